"""Simulates what is gained by hosts of a shard in different racks, where single groups fail, and sometimes a whole
rack.

    python benchmarks/failure_domains.py [--rack n] [--domain-mtbf-s S] [--resume FILE]

Without re-join, so that a job lives until a shard has lost all its hosts. 'as listed': machines get group numbers rack
by rack; 'spread': ``placement.domains`` numbers them. Both have the same failures of machines.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._report import report
from benchmarks._trials import mean_ratio, options, outcomes
from spare_megatron.placement import build_placement
from spare_megatron.placement.domains import spread_over_domains
from spare_megatron.simulator.cluster import Cluster, Policy
from spare_megatron.simulator.trials import Case

REDUNDANCIES = (2, 3, 4, 5, 7)


def racks(groups: int, rack: int, redundancy: int, spread: bool) -> dict[str, tuple[int, ...]]:
    """Rack -> the group numbers of its machines."""
    domains = [f"rack{machine // rack:04d}" for machine in range(groups)]
    numbers = list(range(groups))
    if spread:
        numbers = list(spread_over_domains(build_placement(groups, redundancy), domains).numbers)
    members: dict[str, list[int]] = {}
    for number, domain in zip(numbers, domains, strict=True):
        members.setdefault(domain, []).append(number)
    return {domain: tuple(found) for domain, found in members.items()}


def main() -> None:
    parser = options(__doc__, steps=3000, trials=5)
    parser.add_argument("--groups", type=int, default=200)
    parser.add_argument("--rack", type=int, default=4, help="number of groups of one rack")
    parser.add_argument(
        "--domain-mtbf-s", type=float, default=200_000.0, help="mean seconds between failures of a rack"
    )
    args = parser.parse_args()
    # Single failures are rarer than in the published cluster, so that racks are a good part of all losses.
    cluster = Cluster(args.groups, mtbf_s=1200.0, reduce_s=args.groups / 100, domain_mtbf_s=args.domain_mtbf_s)
    table = [(r, spread) for r in REDUNDANCIES for spread in (False, True)]
    found = outcomes(
        args,
        [
            Case(
                cluster,
                Policy("microbatch", r, 16, steps=args.steps),
                domains=racks(args.groups, args.rack, r, spread),
            )
            for r, spread in table
        ],
    )
    if found is None:
        return
    rows: list[dict[str, object]] = []
    for (r, spread), trials in zip(table, found[0], strict=True):
        rows.append(
            {
                "redundancy": r,
                "machines": "spread" if spread else "as listed",
                "ratio": mean_ratio(trials),
                "wipe_outs": fmean(one.tally.wipe_outs for one in trials),
                "failures": fmean(one.tally.failures for one in trials),
                "availability_percent": 100 * fmean(one.availability for one in trials),
            }
        )
    config = {"groups": args.groups, "rack": args.rack, "domain_mtbf_s": args.domain_mtbf_s, **found[1]}
    report("failure_domains", config, rows, args.json)


if __name__ == "__main__":
    main()

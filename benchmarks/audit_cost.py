"""Measures what --spare-audit-rate costs in runs without a fault: about its share of the computing, and hardly more.

    python benchmarks/audit_cost.py [--rates 0.05 0.25 1] [--rounds 10] [--steps 6]

Jobs with and without audits are alive at once and take turns of a few steps (``_turns.py``); a step goes from commit to
commit. ``ratio`` is the median over the rounds of the mean step with audits over the mean step without (the number of
audited pieces changes from step to step), ``audited_share`` the pieces that were computed twice. ``beside`` is what a
step costs beyond its pieces: the same ratio with the time for each piece, audited ones counted too; 1 means that audits
cost their compute and nothing else. ``cpu_beside`` is that of CPU time.

All ranks share this machine's cores, so the whole compute counts here; where each has its own, a step waits for the
group with the most pieces and audits.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from _report import report
from _turns import Side, take_turns
from step_overhead import CASES, jobs, mean, model, ours

NONE = "0"
"""The rate with which all others are compared."""


def main() -> None:
    """Print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="*", default=["0.05", "0.25", "1"])
    parser.add_argument("--rounds", type=int, default=10, help="number of turns of each side")
    parser.add_argument("--steps", type=int, default=6, help="number of steps of a turn")
    options = parser.parse_args()
    rows = []
    for name, groups, _, words in jobs(CASES):
        flags = (*words, "--spare-redundancy", "2", "--spare-audit-rate")
        with tempfile.TemporaryDirectory(prefix="spare-") as folder:
            sides = {rate: ours(Path(folder) / rate, groups, (*flags, rate)) for rate in (NONE, *options.rates)}
            rounds = take_turns(sides, options.rounds, options.steps)
        rows += [{"case": name, "rate": float(rate), **_compared(rate, rounds, sides)} for rate in options.rates]
    report("audit_cost", {"model": " ".join(model()), "rounds": options.rounds, "steps": options.steps}, rows)


def _compared(rate: str, rounds: list[dict[str, list[dict]]], sides: dict[str, Side]) -> dict[str, object]:
    pairs = [(mean(lines[NONE], "step_time_s"), mean(lines[rate], "step_time_s")) for lines in rounds]
    shares = [mean(lines[rate], "pieces_audited") / mean(lines[rate], "pieces") for lines in rounds]
    ratios = [audited / without for without, audited in pairs]
    return {
        "step_s": round(statistics.median(without for without, _ in pairs), 4),
        "step_audited_s": round(statistics.median(audited for _, audited in pairs), 4),
        "audited_share": round(statistics.mean(shares), 4),
        "ratio": round(statistics.median(ratios), 4),
        "beside": round(statistics.median(ratio / (1 + share) for ratio, share in zip(ratios, shares, strict=True)), 4),
        "cpu_beside": round(sides[rate].cpu_s() / sides[NONE].cpu_s() / (1 + statistics.mean(shares)), 4),
    }


if __name__ == "__main__":
    main()

"""Reproduces the published table of SPARe (arXiv 2603.00357: N = 200/600/1000 groups, 10,000 steps, three trials), with
this framework's policy beside it.

    python benchmarks/reproduce_spare.py [--best-only] [--no-sensitivity] [--plot PNG] [--resume FILE]

Every row runs the same controller on the same failures and jitter: r = 2..20 for SPARe and microbatch, 2..5 for
replication (``--best-only``: the best ones); then the return of lost groups, planned restarts and balancing; and at N =
200 one row for each assumption of ``simulator.cluster.Reading`` that is changed. With ``--resume`` finished trials are
kept in a file, and an interrupted run goes on from it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._report import report
from benchmarks._trials import mean_ratio, options, outcomes
from spare_megatron.simulator.cluster import Cluster, Policy, Reading
from spare_megatron.simulator.policy_trial import TrialResult
from spare_megatron.simulator.trials import Case

PUBLISHED = {
    ("replication", 200): (6.07, 0.6174),
    ("replication", 600): (4.27, 0.7989),
    ("replication", 1000): (3.88, 0.8441),
    ("spare", 200): (2.92, 0.8700),
    ("spare", 600): (2.49, 0.9390),
    ("spare", 1000): (2.34, 0.9654),
}
BEST = {200: 9, 600: 8, 1000: 9}
RESTART_AFTER = {200: 80, 600: 180, 1000: 250}
REPAIR_S = 600.0

Row = tuple[str, Case]


def best(steps: int) -> Iterator[Row]:
    """The published best redundancies, and the options that only this framework's policy has."""
    for groups in (200, 600, 1000):
        cluster = Cluster(groups, reduce_s=groups / 100)
        yield "replication", Case(cluster, Policy("replication", 3, steps=steps))
        yield "spare", Case(cluster, Policy("spare", BEST[groups], steps=steps))
        yield "microbatch", Case(cluster, Policy("microbatch", 7, 16, steps=steps))
        shared = Policy("microbatch", groups, 16, steps=steps, restart_after=RESTART_AFTER[groups])
        yield "shared data, planned restart", Case(cluster, shared)
        back = replace(cluster, rejoin_s=REPAIR_S)
        returning = Policy("microbatch", 6, 64, steps=steps)
        yield "re-join", Case(back, returning)
        yield "re-join, no jitter", Case(replace(back, jitter=0.0), returning)
        yield "re-join, saves do not block", Case(back, replace(returning, async_save=True))
        yield "re-join, balance, saves do not block", Case(back, replace(returning, async_save=True, balance=True))
        yield "replication, re-join", Case(back, Policy("replication", 3, steps=steps))


def sweep(steps: int) -> Iterator[Row]:
    """The rows of all redundancies, by ascending N."""
    for groups in (200, 600, 1000):
        cluster = Cluster(groups, reduce_s=groups / 100)
        for r in range(2, 6):
            yield "replication", Case(cluster, Policy("replication", r, steps=steps))
        for r in range(2, 21):
            yield "spare", Case(cluster, Policy("spare", r, steps=steps))
            yield "microbatch", Case(cluster, Policy("microbatch", r, 16, steps=steps))


def sensitivity(steps: int) -> Iterator[Row]:
    """The rows with one changed assumption each, for N = 200, replication r = 3 and SPARe r = 9."""
    base = Cluster(200, reduce_s=2.0)
    policies = (Policy("replication", 3, steps=steps), Policy("spare", 9, steps=steps))
    for label, cluster in {
        "as read": base,
        "one system-wide clock": replace(base, clocks="system"),
        "exponential failures": replace(base, weibull_shape=1.0),
        "no jitter": replace(base, jitter=0.0),
    }.items():
        for policy in policies:
            yield f"{policy.name}: {label}", Case(cluster, policy)
    for label, reading in {
        "restart in exactly 60 min": Reading(restart_repeats=False),
        "clocks start new at a restart": Reading(clocks_restart=True),
        "every masked failure + 1 layer": Reading(masked_layers=1),
    }.items():
        for policy in policies:
            yield f"{policy.name}: {label}", Case(base, replace(policy, reading=reading))
    replication, spare = policies
    yield "replication: cyclic, no blocks", Case(base, replace(replication, reading=Reading(blocks=False)))
    yield "spare: consecutive offsets", Case(base, replace(spare, placement="consecutive"))
    yield "spare: a patch waits for the slowest", Case(base, replace(spare, reading=Reading(patch_jitter=True)))
    waits = replace(spare, reading=Reading(replans_at_once=False))
    yield "spare: every death waits for the reduction", Case(base, waits)
    for work in (0.0, 0.035, 0.14, 0.28):
        yield (
            f"spare: patch work {work:g} in the save interval",
            Case(base, replace(spare, reading=Reading(patch_work=work))),
        )


def row(label: str, case: Case, trials: list[TrialResult]) -> dict[str, object]:
    """One line of the table."""
    groups, policy = case.cluster.num_groups, case.policy
    ratios = [outcome.ratio for outcome in trials]
    known = [one for one in ratios if one is not None]
    mean = mean_ratio(trials)
    is_best = policy.redundancy == (3 if policy.name == "replication" else BEST[groups])
    published = PUBLISHED.get((label, groups)) if is_best else None
    available = fmean(outcome.availability for outcome in trials)
    return {
        "policy": label,
        "groups": groups,
        "redundancy": policy.redundancy,
        "pieces": policy.pieces_per_shard if policy.name == "microbatch" else 1,
        "ratio": mean,
        "ratio_sd": stdev(known) if len(known) > 1 else 0.0,
        "published_ratio": published[0] if published else "",
        "off_percent": 100 * (mean / published[0] - 1) if published else "",
        "availability_percent": 100 * available,
        "availability_sd_points": 100 * stdev(one.availability for one in trials) if len(trials) > 1 else 0.0,
        "published_availability_percent": 100 * published[1] if published else "",
        # Ratio times availability is the time of training itself, which hardly scatters, unlike its two factors, in
        # which a few long restarts show.
        "up_time_off_percent": 100 * (mean * available / (published[0] * published[1]) - 1) if published else "",
        "mean_work": fmean(outcome.mean_work for outcome in trials),
        "wipe_outs": fmean(outcome.tally.wipe_outs for outcome in trials),
        "patched_share": sum(o.tally.patched for o in trials) / max(1, sum(o.tally.failures for o in trials)),
    }


def plot(rows: list[dict[str, object]], path: Path) -> None:
    """Draw ratio, availability and mean work over r."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(3, 3, figsize=(11, 8), sharex=True)
    for column, groups in enumerate((200, 600, 1000)):
        for line, figure_name in enumerate(("ratio", "availability_percent", "mean_work")):
            for policy in ("replication", "spare", "microbatch"):
                of_policy = [one for one in rows if (one["policy"], one["groups"]) == (policy, groups)]
                of_policy.sort(key=lambda one: one["redundancy"])  # type: ignore[arg-type,return-value]
                xs = [one["redundancy"] for one in of_policy]
                axes[line][column].plot(xs, [one[figure_name] for one in of_policy], marker=".", label=policy)
            axes[line][column].set_ylabel(figure_name.replace("_", " "))
        axes[0][column].set_title(f"N = {groups}")
        axes[2][column].set_xlabel("redundancy")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--best-only", action="store_true", help="run only the best redundancies")
    parser.add_argument("--no-sensitivity", action="store_true", help="do not run the changed assumptions")
    args = parser.parse_args()
    table = list(best(args.steps))
    if not args.no_sensitivity:
        table += sensitivity(args.steps)
    if not args.best_only:
        table += [found for found in sweep(args.steps) if found not in table]
    found = outcomes(args, [case for _, case in table])
    if found is None:
        return
    rows = [row(label, case, trials) for (label, case), trials in zip(table, found[0], strict=True)]
    config = found[1]
    report("reproduce_spare", config, rows, args.json)
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()

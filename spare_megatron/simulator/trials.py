"""Runs trials of a policy on all cores and takes their means: the JSON of ``spare-simulate``."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from spare_megatron.simulator.cluster import Cluster, Policy
from spare_megatron.simulator.failures import Ring
from spare_megatron.simulator.pieces import PiecesEngine
from spare_megatron.simulator.policy_trial import PolicyTrial, TrialResult
from spare_megatron.simulator.published_policies import ReplicationEngine, SpareEngine

ENGINES: Mapping[str, type[PolicyTrial]] = {
    "checkpoint": ReplicationEngine,
    "replication": ReplicationEngine,
    "spare": SpareEngine,
    "microbatch": PiecesEngine,
}


@dataclass(frozen=True)
class Case:
    """What a trial simulates, apart from its seed."""

    cluster: Cluster
    policy: Policy
    trace: Sequence[Ring] | None = None
    domains: Mapping[str, Sequence[int]] | None = None
    check: bool = False


def run_one(case: Case, seed: int) -> TrialResult:
    """Run one trial in this process."""
    engine = ENGINES[case.policy.name]
    return engine(case.cluster, case.policy, seed, case.trace, case.domains, case.check).run()


def run_many(
    jobs: Sequence[tuple[Case, int]], workers: int | None = None, done: Callable[[int], None] | None = None
) -> list[TrialResult]:
    """The results of every (case, seed), in order; ``done(n)`` is called when n of them are finished."""
    workers = min(workers or len(os.sched_getaffinity(0)), len(jobs))
    outcomes: list[TrialResult] = []
    if workers <= 1:
        for case, seed in jobs:
            outcomes.append(run_one(case, seed))
            if done:
                done(len(outcomes))
        return outcomes
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        waiting = [pool.submit(run_one, case, seed) for case, seed in jobs]
        for future in waiting:
            outcomes.append(future.result())
            if done:
                done(len(outcomes))
    return outcomes


def summary(outcomes: Sequence[TrialResult], seed: int) -> dict[str, Any]:
    """Means over the trials; the mean ratio is None where a trial made no progress."""
    ratios = [outcome.ratio for outcome in outcomes]
    known = [ratio for ratio in ratios if ratio is not None]
    tallies = [outcome.tally for outcome in outcomes]

    def mean(name: str) -> float:
        return fmean(getattr(tally, name) for tally in tallies)

    return {
        "time_to_train_ratio": {"mean": fmean(known) if len(known) == len(ratios) else None, "trials": ratios},
        "availability": fmean(outcome.availability for outcome in outcomes),
        "groups_away": fmean(outcome.away for outcome in outcomes),
        "mean_work": fmean(outcome.mean_work for outcome in outcomes),
        "failures": mean("failures"),
        "masked": mean("masked"),
        "wipe_outs": mean("wipe_outs"),
        "soft_wipe_outs": mean("soft_wipe_outs"),
        "steps_recomputed": mean("steps_recomputed"),
        "patched": mean("patched"),
        "planned_restarts": mean("planned_restarts"),
        "joins": mean("joins"),
        "learners_lost": mean("learners_lost"),
        "save_s": mean("save_s"),
        "seed": seed,
        "seeds": [outcome.seed for outcome in outcomes],
    }

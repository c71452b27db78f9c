"""SIGKILL and SIGSTOP of real ranks at random moments: the others go on in the next epoch, at once and with right sums.

The bound is generous (a loaded machine), but far below the time-outs of a communication library that has to notice a
death by itself; the figures are printed, and measured in benchmarks/replica_recovery.py.
"""

from __future__ import annotations

import random
import signal
import statistics
import time

import pytest

from tests.process.replica_job import PATIENCE_S, ReplicaJob, replica_job

BOUND_S = 8.0
TIMEOUT_S = 60.0
"""Of the communicators: must not be sat out."""
SMALL, MEDIUM, LARGE = 1_000, 2 << 20, 8 << 20
"""4 kB, 8 MB and 32 MB of float32."""
MOMENTS = ("forming", "between buckets", "any")


@pytest.mark.parametrize(
    ("numel", "bucket_bytes", "trials"),
    [
        (SMALL, 1 << 20, 9),
        (MEDIUM, 2 << 20, 3),
        *(pytest.param(*one, marks=pytest.mark.full) for one in ((SMALL, 1 << 20, 30), (LARGE, 4 << 20, 6))),
    ],
)
def test_survivors_reduce_in_the_next_epoch(numel: int, bucket_bytes: int, trials: int) -> None:
    """After stops, and then, with one more rank, after kills."""
    with replica_job(4, numel, bucket_bytes, TIMEOUT_S) as job:
        _stops(job, numel, trials)
        job.start([4])
        _kills(job, numel)


def _stops(job: ReplicaJob, numel: int, trials: int) -> None:
    """The stopped rank, continued, disturbs nobody, cannot reduce in its old epoch and takes part in a later one."""
    rng = random.Random(numel)
    print(f"seed {numel}")
    everybody, took_s = range(4), []
    for trial in range(trials):
        victim = rng.randrange(4)
        survivors = [group for group in everybody if group != victim]
        moment = MOMENTS[trial % 3]
        _strike(job, victim, "stop", moment, rng)
        took_s += _move_to_next_epoch(job, survivors)
        job.strike(victim, signal.SIGCONT)
        if moment != "forming":  # else it forms, alone, until it learns of a newer epoch
            job.ranks[victim].expect(lambda line: line["event"] == "reduced" and not line["ok"])
        job.sums(survivors)
        job.view(everybody)
        job.sums(everybody)
    _report(f"SIGSTOP, {4 * numel} bytes", took_s)


def _kills(job: ReplicaJob, numel: int) -> None:
    """One after the other, until a single group is left, which reduces alone."""
    rng = random.Random(numel + 1)
    print(f"seed {numel + 1}")
    survivors, took_s = sorted(job.ranks), []
    assert len(survivors) == 5
    while len(survivors) > 1:
        victim = rng.choice(survivors)
        _strike(job, victim, "kill", MOMENTS[len(survivors) % 3], rng)
        survivors.remove(victim)
        took_s += _move_to_next_epoch(job, survivors)
    _report(f"SIGKILL, {4 * numel} bytes", took_s)


def test_epochs_leave_nothing_behind() -> None:
    """50 epochs, each given up in the middle of forming or reducing: no thread, descriptor or buffer accumulates, and
    the processes end by themselves."""
    rng = random.Random(50)
    print("seed 50")
    with replica_job(3, 1 << 20, 1 << 20, TIMEOUT_S) as job:
        before = {}
        for epoch in range(53):
            if epoch == 20:  # by then there is a heap for each thread, and what is inherited has been written to
                before = _settled(job)
            groups = (0, 1, 2) if epoch % 3 else (0, 1)
            if epoch % 5 == 1:
                job.view(groups, fault={0: {"bucket": 1, "signal": "stop"}})
                job.struck(0)
                job.view([group for group in groups if group])
                job.strike(0, signal.SIGCONT)
            else:
                job.view(groups)
                time.sleep(rng.uniform(0.0, 0.03))  # the moment is what is random here
        after = _settled(job)
        print(before, after)
        for group, now in after.items():
            assert now["lingering"] == 0
            assert now["threads"] <= before[group]["threads"]
            assert now["descriptors"] <= before[group]["descriptors"] + 3  # store connections that are kept
            assert now["private_kib"] <= before[group]["private_kib"] + 20_000
        job.view((0, 1, 2))
        job.sums((0, 1, 2))
        for rank in job.ranks.values():
            rank.send(quit=True)
        job.view((0, 1, 2))  # ends the reductions; whether it is adopted before or after the end must not matter
        for rank in job.ranks.values():
            assert rank.expect(lambda line: line["event"] == "closed")["lingering"] == 0
            assert rank.process.wait(PATIENCE_S) == 0, "".join(rank.log)


def _strike(job: ReplicaJob, victim: int, kind: str, moment: str, rng: random.Random) -> None:
    """All live groups reduce; one is struck."""
    groups = sorted(job.ranks)
    number = signal.SIGSTOP if kind == "stop" else signal.SIGKILL
    if moment == "between buckets":
        job.view(groups, fault={victim: {"bucket": 1, "signal": kind}})
        job.struck(victim)
    else:
        job.view(groups)
        if moment == "any":
            job.sums(groups)
        time.sleep(rng.uniform(0.0, 0.02 if moment == "forming" else 0.3))  # the moment is what is random here
        job.strike(victim, number)
    if kind == "kill":
        job.end(victim)
    time.sleep(rng.choice((0.0, 0.01, 0.05)))  # until the coordinator learns of it


def _move_to_next_epoch(job: ReplicaJob, survivors: list[int]) -> list[float]:
    sent_s = job.view(survivors)
    took_s = [at_s - sent_s for at_s in job.sums(survivors)]
    assert max(took_s) < BOUND_S
    return took_s


def _settled(job: ReplicaJob) -> dict[int, dict[str, int]]:
    """Resources of every group when the present epoch has been reduced in and the older ones had time to go."""
    job.view((0, 1, 2), reductions=2)
    job.sums((0, 1, 2))
    time.sleep(0.3)  # a bound on how long an abandoned epoch may linger
    return {group: job.resources(group) for group in job.ranks}


def _report(what: str, took_s: list[float]) -> None:
    median_s = statistics.median(took_s)
    print(f"{what}: view -> first sum, median {median_s:.3f} s, most {max(took_s):.3f} s of {len(took_s)}")

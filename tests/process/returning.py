"""What the tests of groups that come back read from a job's journal."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import torch

from spare_megatron.config.exits import ExitCode
from spare_megatron.control_plane.group_aggregation import first_part, joined_digests
from spare_megatron.coordinator.journal import Record, read
from spare_megatron.protocol.messages import SendView, Vote
from spare_megatron.protocol.view import View
from tests.process.followed import follow
from tests.process.harness import RESTARTS, Job
from tests.process.toy_engine import ToyEngine
from tests.tickets import run_of

AFTER = 4
"""Steps that all groups train together after the last one is back."""
RETURNS = (RESTARTS, "3", "--spare-progress-timeout-s", "240")
"""Flags of a job whose lost groups come back, and whose steps may be held until they are (:func:`held`)."""


def held(step: int, *, by: int, until: tuple[int, int]) -> str:
    """An injection: group ``by`` holds a step until this (group, incarnation) is back, however slow the machine is."""
    group, incarnation = until
    return f"wait={group}.{incarnation}:group={by},position=0,step={step},at=forward,n=0"


def records(job: Job) -> list[Record]:
    """The journal by now."""
    return job.records()


def views(job: Job) -> list[View]:
    """All views that were sent, in their order."""
    return [a.view for r in records(job) for a in r.actions if isinstance(a, SendView)]


def voted(job: Job) -> dict[int, set[str]]:
    """Step -> the digests of the weights after it that groups voted, which no number of groups changes."""
    return voted_in(job.run_dir / "journal.jsonl")


def voted_in(journal: Path) -> dict[int, set[str]]:
    """The same, of a journal."""
    found: dict[int, set[str]] = {}
    for record in read(journal):
        if isinstance(record.event, Vote) and record.event.result.ok:
            found.setdefault(record.event.result.step - 1, set()).add(first_part(record.event.result.weights_digest))
    return found


def reported(job: Job, kind: type, group: int, incarnation: int) -> bool:
    """Whether the machine has received such a word of an incarnation of a group."""
    of = [r.event for r in records(job) if isinstance(r.event, kind)]
    return any((event.group, event.incarnation) == (group, incarnation) for event in of)


def is_member(job: Job, group: int, incarnation: int) -> bool:
    """Whether the incarnation has been in a live set."""
    return any((group, incarnation) in view.live for view in views(job))


def leave_whole(job: Job, groups: int, *back: tuple[int, int]) -> dict[int, set[str]]:
    """Wait until the incarnations ``back`` are members and all ``groups`` have trained some steps, and let the job
    leave; returns the digests that were voted, of all steps."""
    for member in back:
        job.wait_for(f"group {member} as a member", lambda member=member: is_member(job, *member), timeout_s=240.0)
    job.wait_for("all groups", lambda: job.metrics[-1]["live_groups"] == groups)
    job.wait_for_step(job.metrics[-1]["step"] + AFTER)
    job.kill(job.process.pid, number=signal.SIGTERM)
    job.finish(code=ExitCode.REQUEUE)
    found = voted(job)
    assert found.keys() >= set(range(1, max(found)))
    return found


def check_same(found: dict[int, set[str]], failure_free: dict[int, set[str]]) -> None:
    """Every group had the weights of the run without failures, in every step."""
    unlike = [step for step, digests in found.items() if digests != failure_free[step]]
    assert not unlike, f"weights differ from those of the failure-free run after steps {unlike}"


def check_simulated(job: Job, admissions: int) -> None:
    """The simulator's events, with the run's losses and what its learners reported, lead to the run's actions, at least
    so many admissions among them."""
    followed = follow(job.run_dir / "journal.jsonl")
    assert followed.admissions >= admissions
    assert followed.actions > followed.commits


def check_voted(journal: Path, groups: int, pieces: int = 2, size: int = 1) -> None:
    """Every step of a job of the toy, whose groups have ``size`` ranks, was voted with the weights that one group
    computes which has the ``pieces`` of every group."""
    found = voted_in(journal)
    failure_free = failure_free_pipeline(max(found), groups, pieces, size)
    weights = [joined_digests(ranks) if size > 1 else ranks[0] for ranks in failure_free]
    unlike = [step for step, digests in found.items() if digests != {weights[step]}]
    assert not unlike, f"weights differ from those of the failure-free run after steps {unlike}"
    assert found.keys() >= set(range(1, max(found)))


def failure_free_weights(steps: int, groups: int, pieces: int) -> list[str]:
    """The digests of the weights after each step from 0 on, where one engine computes all pieces."""
    return [digest for [digest] in failure_free_pipeline(steps, groups, pieces, size=1)]


def failure_free_pipeline(steps: int, groups: int, pieces: int, size: int = 2, layers: int = 1) -> list[list[str]]:
    """The same of a pipeline of ``size`` engines, which are threads: after each step the digests by position."""
    pipes: Pipes = {(a, b): SimpleQueue() for a in range(size) for b in range(size)}

    def trained(position: int) -> list[str]:
        engine = _Stage(position, size, groups, pieces, 0.0, layers=layers)
        engine.pipes = pipes
        digests = [engine.weights_digest()]
        for step in range(1, steps + 1):
            engine.begin_step(step)
            engine.run(step, run_of(range(pieces * groups)))
            engine.apply(step, engine.local_sum(), engine.scalars())
            digests.append(engine.weights_digest())
        return digests

    with ThreadPoolExecutor(size) as stages:
        return [list(one) for one in zip(*stages.map(trained, range(size)), strict=True)]


Pipes = dict[tuple[int, int], "SimpleQueue[torch.Tensor]"]


class _Stage(ToyEngine):
    """A rank whose neighbours are threads of this process."""

    pipes: Pipes

    def _send(self, tensor: torch.Tensor, position: int) -> None:
        self.pipes[self.position, position].put(tensor.clone())

    def _receive(self, tensor: torch.Tensor, position: int) -> None:
        tensor.copy_(self.pipes[position, self.position].get(timeout=60.0))

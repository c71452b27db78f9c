"""Shards that have lost their last host are adopted: the job goes on without a restart, with the weights of the
undisturbed run."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from spare_megatron.config.exits import ExitCode
from spare_megatron.protocol.messages import Hosts, Opened
from spare_megatron.runtime.failpoints import VARIABLE
from tests.process.harness import RESTARTS, Job, launch
from tests.process.returning import check_voted, leave_whole, records

GROUPS = 4
PIECES = 4
HOSTS = (1, 2)
"""The two groups that host shard 2."""


def start(
    run_dir: Path, *words: str, steps: int, environ: Mapping[str, str] | None = None, back: str = "0", size: int = 1
) -> Job:
    """A job of four groups, each shard on two."""
    shape = ("--redundancy", "2", "--pieces", str(PIECES), "--piece-s", "0.05", "--adoption")
    flags = (*shape, "--steps", str(steps), RESTARTS, back)
    return launch(run_dir, *flags, *words, groups=GROUPS, group_size=size, environ=environ)


def lose_both(job: Job, step: int = 3) -> None:
    """Kill both hosts of shard 2 in one step."""
    job.wait_for_step(step)
    job.kill(*(pid for group in HOSTS for pid in job.pids(group)))


def answers(job: Job) -> set[tuple[int, int, bool]]:
    """(group, shard, whether it could open it) of all words on adopted shards."""
    reported = [record.event for record in records(job)]
    return {(event.group, event.shard, event.opened) for event in reported if isinstance(event, Hosts)}


def check_whole(job: Job) -> None:
    """The job ended without a restart, by the processes that it began with, and each step with the weights of the
    undisturbed run."""
    assert len(job.ranks_seen) == GROUPS, job.ranks_seen
    assert sum(isinstance(record.event, Opened) and record.event.fencing == 1 for record in records(job)) == 1
    assert max(record.event.job_attempt for record in records(job) if isinstance(record.event, Opened)) == 1
    check_voted(job.run_dir / "journal.jsonl", GROUPS, PIECES)
    for line in job.metrics:
        assert line["pieces"] == GROUPS * PIECES, line


@pytest.mark.parametrize("late", [0.0, 1.0], ids=["at once", "after a second"])
def test_both_hosts_of_a_shard_are_killed(tmp_path: Path, late: float) -> None:
    job = start(tmp_path, "--open-s", str(late), steps=14)
    lose_both(job)
    job.finish()
    assert answers(job) == {(0, 2, True), (3, 2, True)}
    check_whole(job)


def test_an_adopter_that_cannot_open_the_data_is_followed_by_another(tmp_path: Path) -> None:
    job = start(tmp_path, "--shut", "0", steps=4000)
    lose_both(job)
    job.wait_for("both answers", lambda: len(answers(job)) == 2)
    job.wait_for_step(job.metrics[-1]["step"] + 3)
    job.kill(job.process.pid, number=signal.SIGTERM)
    job.finish(code=ExitCode.REQUEUE)
    assert answers(job) == {(0, 2, False), (3, 2, True)}
    assert "OSError: no such file: shard-2.bin" in (tmp_path / "journal.jsonl").read_text()
    check_whole(job)


@pytest.mark.parametrize(
    "how", [("--shut", "0", "3"), ("--open-s", "60", "--adopt-timeout-s", "1")], ids=["no", "late"]
)
def test_nobody_can_open_the_data(tmp_path: Path, how: Sequence[str]) -> None:
    """Where they say no, one of the two ranks of each group could; else it takes them too long."""
    job = start(tmp_path, *how, steps=200, size=2)
    lose_both(job)
    job.finish(code=ExitCode.NO_CHECKPOINT)
    assert answers(job) == {(0, 2, False), (3, 2, False)}


def test_a_coordinator_is_killed_before_it_receives_the_answers(tmp_path: Path) -> None:
    armed = tmp_path / "armed"
    armed.touch()
    kill = f"coordinator:order.view=kill,after={GROUPS + 1},while={armed}"
    environ = {VARIABLE: f"{kill};rank:report.hosts=ECONNRESET,times=2"}
    # On a busy machine a connection that broke takes a second to be back.
    job = start(tmp_path / "run", "--open-s", "0.5", "--grace-s", "6", steps=14, environ=environ)
    lose_both(job)
    job.wait_for("the next coordinator", lambda: (tmp_path / "run" / "journal.jsonl").read_text().count('"Opened"') > 1)
    armed.unlink()
    job.finish()
    assert answers(job) == {(0, 2, True), (3, 2, True)}
    check_whole(job)


def test_the_hosts_come_back_while_the_shard_is_adopted(tmp_path: Path) -> None:
    job = start(tmp_path, "--open-s", "0.5", steps=4000, back="3")
    lose_both(job)
    leave_whole(job, GROUPS, (1, 1), (2, 1))
    assert answers(job) >= {(0, 2, True), (3, 2, True)}
    check_voted(tmp_path / "journal.jsonl", GROUPS, PIECES)

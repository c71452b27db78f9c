"""What follows the end of a job attempt: the table of all that matters, and what holds for every combination."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spare_megatron.config.exits import ExitCode
from spare_megatron.launch.attempt_report import is_users_error
from spare_megatron.launch.restart_policy import (
    ATTEMPTS_WITHOUT_PROGRESS,
    LEAST_TIME_LEFT_S,
    EndedAttempt,
    JobProgress,
    Obstacles,
    SlurmFacts,
    Then,
    after_attempt,
    is_failure,
    needs_checkpoint,
    slurm_obstacles,
)

HERE = EndedAttempt(
    code=ExitCode.WIPE_OUT,
    reason="wipe-out: 1 of 4 shards",
    first_step=4,
    reached=12,
    before=JobProgress(),
    checkpoint="save/iter_0000008",
    looked_in=("save", "load"),
    stop_requested=False,
    obstacles=Obstacles(),
)
RUNNING = SlurmFacts(
    state="RUNNING",
    nodes=4,
    nodes_answer=True,
    time_left_s=3600.0,
    requeue_wanted=True,
    requeue_allowed=True,
    next_element=False,
)
NODE_LOST = Obstacles(here="not all 4 nodes of the allocation answer")
NO_QUEUE = Obstacles(queue="start the same command again")
NOWHERE = replace(NODE_LOST, queue="the next element of the job array goes on")
LAST_IDLE = ATTEMPTS_WITHOUT_PROGRESS - 1


@pytest.mark.parametrize("code", [ExitCode.WIPE_OUT, ExitCode.RESTART])
@pytest.mark.parametrize(
    ("changes", "then", "leaves_with", "idle", "words"),
    [
        # Another job attempt is due, and nothing is in its way.
        ({}, Then.START_AGAIN, None, 0, "; the job starts again from save/iter_0000008"),
        ({"obstacles": NO_QUEUE}, Then.START_AGAIN, None, 0, "the job starts again from"),
        ({"reached": 4}, Then.START_AGAIN, None, 1, "the job starts again from"),
        ({"before": JobProgress(2)}, Then.START_AGAIN, None, 0, "the job starts again from"),
        ({"reason": ""}, Then.START_AGAIN, None, 0, "every group is lost; the job starts again from"),
        # It cannot begin here.
        ({"obstacles": NODE_LOST}, Then.QUEUE_AGAIN, 4, 0, "not all 4 nodes of the allocation answer: its checkpoint"),
        ({"obstacles": NODE_LOST}, Then.QUEUE_AGAIN, 4, 0, "save/iter_0000008; the job is queued again"),
        ({"obstacles": NOWHERE}, Then.LEAVE, 4, 0, "save/iter_0000008; the next element of the job array goes on"),
        ({"obstacles": NODE_LOST, "reached": 4}, Then.QUEUE_AGAIN, 4, 1, "queued again"),
        # It must not begin here.
        ({"stop_requested": True}, Then.QUEUE_AGAIN, 4, 0, "; the job was asked to stop: its checkpoint is"),
        ({"stop_requested": True, "obstacles": NO_QUEUE}, Then.LEAVE, 4, 0, "; start the same command again"),
        ({"stop_requested": True, "obstacles": NODE_LOST}, Then.QUEUE_AGAIN, 4, 0, "asked to stop"),
        # It cannot begin at all.
        ({"checkpoint": None}, Then.LEAVE, 3, 0, "; there is no good checkpoint of this job in save or load to start"),
        ({"checkpoint": None, "looked_in": ()}, Then.LEAVE, 3, 0, "in (no --save or --load was given) to start"),
        ({"checkpoint": None, "stop_requested": True}, Then.LEAVE, 3, 0, "there is no good checkpoint"),
        ({"checkpoint": None, "obstacles": NODE_LOST}, Then.LEAVE, 3, 0, "there is no good checkpoint"),
        # It is no use.
        (
            {"reached": 4, "before": JobProgress(LAST_IDLE)},
            *(Then.LEAVE, 1, ATTEMPTS_WITHOUT_PROGRESS, "; 3 job attempts in a row did not get beyond step 0"),
        ),
        ({"reached": 4, "before": JobProgress(LAST_IDLE - 1)}, Then.START_AGAIN, None, LAST_IDLE, "starts again"),
        ({"reached": 4, "before": JobProgress(LAST_IDLE), "stop_requested": True}, Then.LEAVE, 1, 3, "3 job attempts"),
        ({"reached": 4, "before": JobProgress(LAST_IDLE), "obstacles": NODE_LOST}, Then.LEAVE, 1, 3, "3 job attempts"),
        ({"reached": 4, "before": JobProgress(LAST_IDLE), "checkpoint": None}, Then.LEAVE, 3, 3, "no good checkpoint"),
    ],
)
def test_after_a_wipe_out_and_for_a_planned_restart(
    code: ExitCode, changes: dict[str, Any], then: Then, leaves_with: int | None, idle: int, words: str
) -> None:
    decision = after_attempt(replace(HERE, code=code, **changes))
    assert (decision.then, decision.code, decision.progress.idle_attempts) == (then, leaves_with, idle)
    assert words in decision.sentence
    assert decision.sentence.startswith(str(changes.get("reason", HERE.reason)))


@pytest.mark.parametrize(
    ("code", "changes", "then", "leaves_with", "idle", "sentence"),
    [
        (ExitCode.FINISHED, {"before": JobProgress(2), "reached": 4}, Then.LEAVE, 0, 0, ""),
        (ExitCode.FAILED, {"reason": "no majority"}, Then.LEAVE, 1, 0, "the job failed; no majority"),
        (ExitCode.DISK_FAILED, {"reason": "ENOSPC"}, Then.LEAVE, 1, 0, "the job failed; ENOSPC"),
        (ExitCode.BAD_INPUT, {"reason": "--lr is -1"}, Then.LEAVE, 2, 0, "--lr is -1"),
        (
            *(ExitCode.REQUEUE, {"reason": "signal SIGTERM; step 7 is saved"}, Then.QUEUE_AGAIN, 4, 0),
            "signal SIGTERM; step 7 is saved; the job is queued again",
        ),
        (
            *(ExitCode.REQUEUE, {"reason": "signal SIGTERM", "obstacles": NO_QUEUE}, Then.LEAVE, 4, 0),
            "signal SIGTERM; start the same command again",
        ),
        (
            *(ExitCode.REQUEUE, {"reason": "", "reached": 4, "before": JobProgress(2)}, Then.QUEUE_AGAIN, 4, 2),
            "the job was asked to stop; the job is queued again",
        ),
        (
            *(ExitCode.REQUEUE, {"reason": "signal SIGTERM", "before": JobProgress(2)}, Then.QUEUE_AGAIN, 4, 0),
            "signal SIGTERM; the job is queued again",
        ),
    ],
)
def test_after_any_other_end(
    code: ExitCode, changes: dict[str, Any], then: Then, leaves_with: int, idle: int, sentence: str
) -> None:
    decision = after_attempt(replace(HERE, code=code, checkpoint=None, **changes))
    assert (decision.then, decision.code, decision.progress.idle_attempts, decision.sentence) == (
        then,
        leaves_with,
        idle,
        sentence,
    )


CLAUSES = st.sampled_from(["", "a clause"])
ATTEMPTS = st.builds(
    EndedAttempt,
    code=st.sampled_from(ExitCode),
    reason=st.sampled_from(["", "a reason"]),
    first_step=st.integers(0, 2),
    reached=st.integers(2, 6),
    before=st.builds(JobProgress, st.integers(0, ATTEMPTS_WITHOUT_PROGRESS + 1), st.integers(0, 8)),
    checkpoint=st.sampled_from([None, "save/iter_0000008"]),
    looked_in=st.sampled_from([(), ("save",), ("save", "load")]),
    stop_requested=st.booleans(),
    obstacles=st.builds(Obstacles, CLAUSES, CLAUSES),
    own_end=st.sampled_from(["", "Traceback"]),
)


@given(ATTEMPTS)
def test_what_is_promised_of_every_decision(ended: EndedAttempt) -> None:
    decision = after_attempt(ended)
    assert (decision.code is None) == (decision.then is Then.START_AGAIN)
    if decision.then is Then.START_AGAIN:
        assert needs_checkpoint(ended.code)
        assert ended.checkpoint is not None
        assert ended.checkpoint in decision.sentence
        assert not ended.stop_requested
        assert not ended.obstacles.here
        assert decision.progress.idle_attempts < ATTEMPTS_WITHOUT_PROGRESS
    if decision.then is Then.QUEUE_AGAIN:
        assert decision.code is ExitCode.REQUEUE
        assert not ended.obstacles.queue
        assert ended.code is ExitCode.REQUEUE or (
            ended.checkpoint and decision.progress.idle_attempts < ATTEMPTS_WITHOUT_PROGRESS
        )
    if decision.code is not None:
        assert decision.code <= ExitCode.REQUEUE
        assert is_failure(ended.code) <= (decision.code is ExitCode.FAILED)
    if ended.reached > max(ended.first_step, ended.before.best_step):
        assert decision.progress == JobProgress(0, ended.reached)
    assert decision.progress.idle_attempts <= ended.before.idle_attempts + 1
    assert decision.progress.best_step >= ended.before.best_step
    assert decision.sentence.endswith(ended.own_end) or not decision.sentence
    assert decision.sentence or ended.code in (ExitCode.FINISHED, ExitCode.BAD_INPUT)


@given(ATTEMPTS, st.integers(0, 9), st.integers(1, 20))
def test_lives_that_get_no_further_come_to_an_end(ended: EndedAttempt, fails_at: int, more: int) -> None:
    """However often a job attempt is wiped out at one step, in place or over the queue: also where each commits steps
    again from a checkpoint before it, up to a record that nobody can train on."""
    first = min(ended.first_step, fails_at)
    ended = replace(ended, code=ExitCode.WIPE_OUT, first_step=first, reached=fails_at, before=JobProgress())
    job_attempts = 0
    for _ in range(more):
        decision = after_attempt(ended)
        job_attempts += 1
        if decision.then is Then.LEAVE:
            break
        ended = replace(ended, before=decision.progress)
    assert job_attempts <= ATTEMPTS_WITHOUT_PROGRESS + 1


def test_a_job_attempt_that_was_asked_to_stop_is_no_idle_one() -> None:
    reported = replace(HERE, code=ExitCode.REQUEUE, reached=4, before=JobProgress(1, 12))
    assert after_attempt(reported).progress == JobProgress(1, 12)


def test_steps_that_are_done_again_are_no_progress() -> None:
    """A job attempt that starts from step 4 and commits up to 12 once more."""
    assert after_attempt(replace(HERE, before=JobProgress(1, 12))).progress == JobProgress(2, 12)
    assert after_attempt(replace(HERE, before=JobProgress(1, 11))).progress == JobProgress(0, 12)


def test_an_error_of_every_group_is_shown_and_is_the_users() -> None:
    own = replace(HERE, reason="every group ended by an error of its own, first group 1 (rank 0): ValueError: bad")
    own = replace(own, own_end="the end of logs/x.log:\nValueError: bad")
    again = after_attempt(own)
    assert again.then is Then.START_AGAIN
    assert again.sentence.splitlines()[0].endswith("; the job starts again from save/iter_0000008")
    nowhere = after_attempt(replace(own, checkpoint=None))
    assert (nowhere.code, nowhere.sentence.splitlines()[1:]) == (ExitCode.FAILED, own.own_end.splitlines())
    assert nowhere.sentence.startswith("the job failed; every group ended by an error of its own")
    idle = after_attempt(replace(own, reached=8, before=JobProgress(LAST_IDLE, 8)))
    assert idle.code is ExitCode.FAILED
    assert "3 job attempts in a row did not get beyond step 8\nthe end of" in idle.sentence


@pytest.mark.parametrize(
    ("changes", "here", "queue"),
    [
        ({}, "", ""),
        ({"time_left_s": None}, "", ""),
        ({"time_left_s": LEAST_TIME_LEFT_S}, "", ""),
        ({"nodes_answer": False}, "not all 4 nodes of the allocation answer", ""),
        ({"batch_script": False}, "the node of the batch script is lost", ""),
        ({"time_left_s": 61.2}, "the time limit is only 61 s away", ""),
        ({"time_left_s": -3.0}, "the time limit is only 0 s away", ""),
        ({"left_over": True}, "processes of the job attempt that ended are still there", ""),
        ({"requeue_wanted": False}, "", "--no-requeue was given, so somebody else queues the job again"),
        (
            {"requeue_allowed": False},
            "",
            "Slurm was asked not to queue the job again; give its script to sbatch once more",
        ),
        ({"queued_by_slurm": True}, "", "Slurm preempts the job and queues it again by itself"),
        ({"queued_by_slurm": True, "batch_script": False}, "the node of the batch script is lost", ""),
        ({"next_element": True}, "", "the next element of the job array goes on"),
        ({"next_element": True, "requeue_wanted": False}, "", "the next element of the job array goes on"),
        (
            {"state": "COMPLETING"},
            "Slurm has the job in state COMPLETING",
            "Slurm has the job in state COMPLETING, so it is not queued again from here",
        ),
        (
            {"state": "", "nodes_answer": False},
            "Slurm has the job in state unknown",
            "Slurm has the job in state unknown, so it is not queued again from here",
        ),
        ({"state": "CANCELLED", "next_element": True}, "Slurm has the job in state CANCELLED", "the next element of"),
    ],
)
def test_what_slurm_allows(changes: dict[str, Any], here: str, queue: str) -> None:
    found = slurm_obstacles(replace(RUNNING, **changes))
    assert found.here == here
    assert found.queue.startswith(queue)
    assert bool(found.queue) == bool(queue)


def test_bad_input_of_some_groups_is_no_users_error_once_the_job_has_trained() -> None:
    bad, other = ExitCode.BAD_INPUT, -9
    assert is_users_error(1, 3, [bad])
    assert not is_users_error(2, 3, [bad, bad])
    assert not is_users_error(2, 3, [bad, bad, other])
    assert is_users_error(2, 3, [bad, bad, bad])

"""Where wall time goes: each part in a job whose times are known, and all parts together."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from spare_megatron.config.errors import ConfigError
from spare_megatron.coordinator.job_events import JobEvent, events_of
from spare_megatron.coordinator.journal import Record
from spare_megatron.monitor.durations import duration
from spare_megatron.monitor.job_history import Failure, JobHistory, Return
from spare_megatron.monitor.job_picture import JobPicture
from spare_megatron.monitor.job_texts import back_text, happenings, wall_time_line
from spare_megatron.monitor.wall_time import RESTART_WITHIN_S
from spare_megatron.protocol import messages as m
from spare_megatron.protocol.view import View
from tests.pure.scripted_job import BEGAN_S, COMPUTE_S, FAILURE_FREE_S, REDUCE_S, REST_S, SPEC, STARTED_S, ScriptedJob


def reported(failure_free_steps: int = 5) -> ScriptedJob:
    """A job with some failure-free steps."""
    job = ScriptedJob()
    for _ in range(failure_free_steps):
        job.step()
    return job


def ended(job: ScriptedJob) -> dict[str, float]:
    """The parts once one more failure-free step has followed, less the start and the failure-free steps."""
    job.step()
    job.step()  # the line of the step before counts now
    parts = job.parts()
    steps = len(job.lines) - 1
    assert sum(parts.values()) == pytest.approx(job.lines[-2]["time_unix_s"] - STARTED_S, abs=1e-3)
    assert parts.pop("start") == BEGAN_S - STARTED_S
    parts["train"] = round(parts["train"] - steps * FAILURE_FREE_S, 4)
    return {name: seconds for name, seconds in parts.items() if seconds}


def test_a_failure_free_job_trains_all_the_time_but_the_start() -> None:
    assert ended(reported()) == {}


def test_the_others_wait_for_a_slow_group() -> None:
    job = reported()
    job.step(FAILURE_FREE_S + 0.75, {2: COMPUTE_S + 0.75})
    assert ended(job) == {"slowest": 0.75}


def test_the_others_wait_for_a_group_that_begins_late() -> None:
    """Its computing takes as long as theirs, so only the sums tell."""
    job = reported()
    job.now_s += FAILURE_FREE_S + 0.75
    job.votes({}, {}, late_s={2: 0.75})
    job.report()
    assert ended(job) == {"slowest": 0.75}


def test_of_a_failure_that_all_wait_for_each_part_counts() -> None:
    """Group 1 dies while all reduce. 0.3 s pass until that is known, 1 s while its pieces are computed again."""
    job = reported()
    job.now_s += REST_S + COMPUTE_S + 0.3
    job.lose(1, detect_s=0.1)
    job.now_s += 0.125 + 0.0625 + 1.0 + REDUCE_S
    job.votes({}, {2: 1.0})
    job.report()
    [cost] = job.picture().failures(job.picture().wall_time())
    assert cost.parts == {}, "the line of the step counts only once another follows"
    job.step(FAILURE_FREE_S * 4 / 3 - (REST_S + REDUCE_S) / 3, dict.fromkeys(range(4), COMPUTE_S * 4 / 3))
    parts = job.parts()
    assert [parts[name] for name in ("detect", "agree", "rebuild", "patch")] == [0.3, 0.125, 0.0625, 1.0]
    assert "unknown" not in parts
    [cost] = job.picture().failures(job.picture().wall_time())
    assert (cost.failure.groups, cost.failure.step, cost.failure.masked) == ((1,), 6, True)
    assert cost.total_s == pytest.approx(1.4875)


def test_a_failure_that_is_known_before_anybody_waits_costs_its_patch_only() -> None:
    job = reported()
    job.now_s += REST_S + 0.5
    job.lose(1, detect_s=0.4)
    job.now_s += COMPUTE_S - 0.5 + 1.0 + REDUCE_S
    job.votes({}, {2: 1.0})
    job.report()
    job.step()
    parts = job.parts()
    assert {name: parts.get(name, 0.0) for name in ("detect", "agree", "rebuild", "patch", "again")} == {
        "detect": 0.0,
        "agree": 0.0,
        "rebuild": 0.0,
        "patch": 1.0,
        "again": 0.0,
    }


def test_a_patch_beside_a_slower_group_costs_nothing() -> None:
    job = reported()
    job.now_s += REST_S + 0.5
    job.lose(1)
    job.now_s += COMPUTE_S - 0.5 + 1.0 + REDUCE_S
    job.votes({3: COMPUTE_S + 1.0}, {2: 1.0})
    job.report()
    job.step()
    parts = job.parts()
    assert "patch" not in parts
    assert parts["slowest"] == 1.0


def test_survivors_compute_the_pieces_of_groups_that_are_gone() -> None:
    job = reported()
    job.now_s += FAILURE_FREE_S
    job.lose(1)
    job.votes({}, {})
    job.report()
    longer = dict.fromkeys((0, 2, 3), COMPUTE_S * 4 / 3)
    for _ in range(3):
        job.step(FAILURE_FREE_S + COMPUTE_S / 3, longer)
    assert job.lines[-1]["load_max"] == 4
    assert job.parts()["fewer"] == pytest.approx(2 * COMPUTE_S / 3, abs=1e-3)


def test_a_save_counts_whichever_group_reports_first() -> None:
    job = reported()
    job.now_s += FAILURE_FREE_S + 0.6
    job.votes({}, {})
    job.report()
    job.report(save_s=0.6)
    assert ended(job) == {"save": 0.6}


def test_the_first_update_of_a_job_attempt_belongs_to_its_start() -> None:
    job = reported(1)
    job.step(FAILURE_FREE_S + 3.0)
    job.step()
    job.step()
    assert job.parts() == {"train": 3 * FAILURE_FREE_S, "start": BEGAN_S - STARTED_S + 3.0}


def test_a_long_rest_is_attributed_to_nothing() -> None:
    job = reported()
    job.step(FAILURE_FREE_S + 3.0)
    assert ended(job) == {"unknown": 3.0}


def test_a_coordinator_that_is_started_again_has_a_part() -> None:
    job = reported()
    job.now_s += 1.0
    job.tell(m.Opened(SPEC, 1, job.state.fencing + 1))
    job.now_s += FAILURE_FREE_S + 1.0
    job.votes({}, {})
    job.report()
    assert ended(job) == {"coordinator": 2.0}


def test_what_a_step_takes_longer_in_which_a_state_is_given_is_transfer() -> None:
    job = reported()
    job.lose(3)
    job.step()
    job.tell(m.Hello(3, 1, "f", 0, process_nonce="again"))
    job.tell(m.Ready(3, 1))
    job.step()
    job.step(FAILURE_FREE_S + 0.125)
    assert job.picture().history.job_attempt.served == {8, 9}
    job.step(FAILURE_FREE_S)
    assert job.parts()["transfer"] == 0.125


def test_an_attempt_that_is_made_again_has_a_part() -> None:
    job = reported()
    job.now_s += REST_S + COMPUTE_S + 4.0
    job.tell(m.Vote(0, 0, m.ReductionResult(6, job.state.epoch, False, detail="the link is silent")))
    assert job.state.epoch == 2
    job.now_s += REDUCE_S
    job.votes({}, {})
    job.report()
    assert ended(job) == {"again": 4.0}


def test_a_wipe_out_costs_the_restart_and_what_it_undid() -> None:
    """Steps 4 and 5 were committed after the checkpoint, step 6 was in flight for 2 s."""
    job = reported()
    job.now_s += 2.0
    job.lose(0, 1)
    assert job.state.outcome == "wipe-out"
    job.now_s += 3.0
    job.open(replace(SPEC, first_step=3), 2, begun_s=job.now_s + 9.0)
    for _ in range(3):
        job.step()
    parts = job.parts()
    assert parts["restart"] == 12.0
    assert parts["redone"] == pytest.approx(2 * FAILURE_FREE_S + 2.0)
    assert parts["train"] == pytest.approx((5 - 2 + 2) * FAILURE_FREE_S)
    assert sum(parts.values()) == pytest.approx(job.lines[-2]["time_unix_s"] - STARTED_S, abs=1e-3)
    picture = job.picture()
    [cost] = picture.failures(picture.wall_time())
    assert (cost.failure.groups, cost.failure.masked) == ((0, 1), False)
    assert cost.total_s == pytest.approx(12.0 + 2 * FAILURE_FREE_S + 2.0)
    assert back_text(cost) == "with the next job attempt"
    assert [one.kind for one in happenings(picture)] == ["life", "failure", "end", "life"], "the end follows its cause"


def test_the_time_until_a_user_starts_the_job_again_is_no_wall_time() -> None:
    job = reported()
    job.leave(1.5)
    assert job.state.outcome == "left"
    left_s = job.now_s
    assert job.parts()["end"] == 1.5
    job.now_s += 10_000.0
    job.begin_coordinator()
    job.open(replace(SPEC, first_step=6), 2, begun_s=job.now_s + 7.0)
    job.step()
    job.step()
    parts = job.parts()
    assert parts == {"train": 7 * FAILURE_FREE_S, "start": BEGAN_S - STARTED_S + 7.0, "end": 1.5}
    assert sum(parts.values()) == left_s - STARTED_S + 7.0 + FAILURE_FREE_S


def wiped_out(job: ScriptedJob, first_step: int, after_s: float = 3.0) -> None:
    """Two groups are lost at once; the next job attempt's coordinator is there ``after_s`` later, and its first step
    begins 9 s after that."""
    job.lose(0, 1)
    assert job.state.outcome == "wipe-out"
    job.now_s += after_s
    job.begin_coordinator()
    job.open(replace(SPEC, first_step=first_step), job.state.job_attempt + 1, begun_s=job.now_s + 9.0)


def test_a_wipe_out_that_nothing_follows_costs_the_step_in_flight() -> None:
    job = reported()
    job.now_s += 2.0
    job.lose(0, 1)
    picture = job.picture()
    [cost] = picture.failures(picture.wall_time())
    assert (cost.failure.groups, cost.parts) == ((0, 1), {"redone": 2.0})
    assert back_text(cost) == "not back"


def test_a_group_that_had_not_come_back_by_the_end_comes_back_with_the_next_job_attempt() -> None:
    job = reported()
    job.lose(2)
    job.step()
    job.lose(1)
    assert job.state.outcome == "wipe-out"
    job.open(replace(SPEC, first_step=3), 2, begun_s=job.now_s + 9.0)
    picture = job.picture()
    costs = picture.failures(picture.wall_time())
    assert [(one.failure.masked, back_text(one)) for one in costs] == [
        (True, "with the next job attempt"),
        (False, "with the next job attempt"),
    ]


def test_a_loss_that_a_vote_shows_at_a_wipe_out_is_a_failure() -> None:
    job = reported()
    job.lose(1)
    job.step()
    job.now_s += 2.0
    result = m.ReductionResult(job.state.step_in_flight, job.state.epoch, False, corrupt=True, detail="a sum is wrong")
    job.tell(m.Vote(0, 0, result))
    assert job.state.outcome == "wipe-out"
    picture = job.picture()
    assert [(one.groups, one.masked) for one in picture.history.failures] == [((1,), True), ((0,), False)]
    assert picture.history.failures[1].causes == ("group 0 corrupt: a sum is wrong",)
    assert sorted(picture.history.live) == [2, 3]
    assert picture.failures(picture.wall_time())[1].parts == {"redone": 2.0}


@pytest.mark.parametrize("steps", [0, 2], ids=["while it forms", "once it trains"])
def test_a_job_attempt_that_begins_much_later_than_a_wipe_out_is_no_restart(steps: int) -> None:
    job = reported()
    wiped_out(job, 3, 100_000.0)
    wiped_s = job.picture().history.job_attempts[0].ended_s or 0.0
    for _ in range(steps):
        job.step()
    wall_time = job.picture().wall_time()
    assert (wall_time.parts["restart"], wall_time.parts["start"]) == (0.0, BEGAN_S - STARTED_S + 9.0)
    assert wall_time.job_attempts == {1: {"redone": 2 * FAILURE_FREE_S}}, "no restart that was observed"
    [cost] = job.picture().failures(wall_time)
    assert (cost.failure.masked, cost.total_s) == (False, 2 * FAILURE_FREE_S)
    assert wall_time.wall_s == pytest.approx(wiped_s - STARTED_S + 9.0 + FAILURE_FREE_S * (steps > 0))


def test_a_restart_counts_whose_coordinator_was_there_in_time() -> None:
    """Its first step may begin later than that."""
    job = reported()
    job.lose(0, 1)
    job.now_s += RESTART_WITHIN_S - 1.0
    job.begin_coordinator()
    job.now_s += 50.0  # until the first group sends Hello
    job.open(SPEC, 2, begun_s=job.now_s + 9.0)
    job.step()
    assert job.picture().wall_time().parts["restart"] == 0.0, "no line says yet when the coordinator began"
    job.step()
    assert job.picture().wall_time().job_attempts[1]["restart"] == RESTART_WITHIN_S - 1.0 + 50.0 + 9.0


def test_each_step_is_undone_once() -> None:
    """Job attempt 1 trains 5 steps, job attempt 2 begins behind step 4 and trains 1, job attempt 3 begins behind step 2
    and trains 2, job attempt 4 begins behind step 1 before it has trained."""
    job = reported()
    wiped_out(job, 4)
    job.step()
    wiped_out(job, 2)
    job.step()
    job.step()
    wiped_out(job, 1)
    wall_time = job.picture().wall_time()
    redone = {number: cost["redone"] for number, cost in wall_time.job_attempts.items()}
    assert redone == {1: FAILURE_FREE_S, 2: 3 * FAILURE_FREE_S, 3: 3 * FAILURE_FREE_S}
    assert (wall_time.parts["train"], wall_time.parts["redone"]) == (FAILURE_FREE_S, 7 * FAILURE_FREE_S)


def test_the_last_step_of_an_ended_job_attempt_counts_while_the_next_job_attempt_forms() -> None:
    job = reported()
    job.leave(1.5)
    job.now_s += 3.0
    before = job.parts()
    job.tell(m.Opened(replace(SPEC, first_step=6), 2, job.state.fencing + 1))
    assert job.parts() == before == {"train": 6 * FAILURE_FREE_S, "start": BEGAN_S - STARTED_S, "end": 1.5}


def test_the_last_step_of_a_job_attempt_without_an_end_counts_once_the_next_job_attempt_is_there() -> None:
    job = reported()
    job.now_s += 3.0
    job.begin_coordinator()
    job.tell(m.Opened(SPEC, 2, job.state.fencing + 1))
    job.tell(m.Opened(SPEC, 2, job.state.fencing + 1))
    assert job.parts()["redone"] == 5 * FAILURE_FREE_S


def test_a_job_without_a_record_has_no_wall_time() -> None:
    assert JobPicture().wall_time().wall_s == 0.0
    picture = JobPicture()
    picture.take((), reported(1).lines)
    with pytest.raises(ConfigError, match="steps of job attempt 1 of the job, of which the journal knows nothing"):
        picture.wall_time()


def test_a_save_before_the_last_step_of_a_job_attempt_counts_and_so_does_the_first_of_the_next() -> None:
    job = reported()
    job.step(FAILURE_FREE_S + 0.75, save_s=0.75)
    wiped_out(job, 6)
    job.step(FAILURE_FREE_S + 0.5, save_s=0.5)
    job.step()
    assert [len(line.get("saves_s", ())) for line in job.lines] == [0] * 5 + [1, 1, 0]
    assert job.parts()["save"] == 1.25


def test_a_clock_that_is_set_back_is_attributed_to_nothing() -> None:
    job = reported()
    job.step(-100.0)
    job.step()
    job.step()  # the line of the step before counts now
    assert job.parts() == {"train": 6 * FAILURE_FREE_S, "start": BEGAN_S - STARTED_S, "unknown": -100.0}


def test_a_loss_after_the_end_is_no_failure() -> None:
    job = reported()
    job.leave(1.5)
    job.now_s += 0.25
    job.tell(m.Lost((m.Loss(1, 0, "exited"),)))
    assert job.transitions[-1][0].reason == "the job is over"
    history = job.picture().history
    assert (history.failures, len(history.live)) == ([], 4)


def test_a_joiner_that_is_sent_back_has_not_returned() -> None:
    """It counts from the loss until the group is a member for good."""
    job = reported()
    job.lose(3)
    lost_s = job.now_s
    job.step()
    job.tell(m.Hello(3, 1, "f", 0, process_nonce="again"))
    for number in (1, 2):
        job.tell(m.Ready(3, 1))
        job.step()
        job.tell(m.CaughtUp(3, 1, number, job.state.committed[0]))
        job.step()
        assert 3 in job.state.live
        assert [one.group for one in job.picture().history.returns] == [3]
        if number == 1:
            job.tell(m.JoinersLate(job.state.epoch, 1.0))
            assert 3 not in job.state.live
            assert job.picture().history.returns == []
    picture = job.picture()
    [back], [cost] = picture.history.returns, picture.failures(picture.wall_time())
    assert back.away_s == cost.back_s[3] == job.now_s - lost_s == 5 * FAILURE_FREE_S


def test_many_failures_and_returns_are_matched_fast() -> None:
    """10,000 of each: no pair of them is looked at but those that belong together."""
    picture = JobPicture()
    for number in range(10_000):
        group, time_s = number % 7, float(number)
        picture.history.failures.append(Failure(time_s, 1, number, (group, 7), (), True, ""))
        picture.history.returns.append(Return(time_s + 0.5, 1, number, group, 0.5))
    began_s = time.process_time()
    costs = picture.failures(picture.wall_time())
    assert time.process_time() - began_s < 2.0
    assert all(cost.back_s == {cost.failure.groups[0]: 0.5} for cost in costs)


def test_a_group_that_was_lost_before_the_job_began_has_been_away_since() -> None:
    """Its loss is none of a member, so no failure tells when it was."""
    history = JobHistory()
    history.take(Record(1, 5.0, 0, m.Opened(SPEC, 1, 1), (), ""))
    for epoch, time_s, live in ((1, 10.0, ((0, 0), (1, 0))), (2, 14.0, ((0, 0), (1, 0), (2, 1)))):
        view = View(0, 0, epoch, 1, live, (0, 0), 1, (), ())
        history.take(Record(1 + epoch, time_s, epoch, m.StartupOver(1.0), (m.SendView(view),), ""))
    assert [(one.group, one.away_s) for one in history.returns] == [(2, 4.0)]


def test_the_job_attempt_of_a_line_is_found_fast() -> None:
    """20,000 job attempts; the lines of the first one are taken once the records of all are."""
    history = JobHistory()
    for job_attempt in range(1, 20_001):
        history.take(Record(job_attempt, float(job_attempt), 0, m.Opened(SPEC, job_attempt, job_attempt), (), ""))
    began_s = time.process_time()
    assert all(history.numbered(job_attempt % 10 + 1).number == job_attempt % 10 + 1 for job_attempt in range(20_000))
    assert time.process_time() - began_s < 2.0


def test_a_hole_in_the_metrics_is_attributed_to_nothing() -> None:
    job = reported(9)
    del job.lines[4]
    assert job.parts()["unknown"] == pytest.approx(FAILURE_FREE_S)


def test_metrics_without_their_journal_are_refused() -> None:
    with pytest.raises(ConfigError, match="steps of job attempt 1 of the job, of which the journal knows nothing"):
        JobPicture().take((), reported().lines)


def test_the_line_names_the_parts_that_took_time() -> None:
    job = reported(20)
    job.step(FAILURE_FREE_S + 3.0)
    job.step()
    assert wall_time_line(job.picture().wall_time()) == (
        "effective training time 84.0 % of 1:09 min; start up to the first update 11.6 %, attributed to nothing 4.4 %"
    )
    assert [duration(s) for s in (0.0123, 3.4211, 425.0, 93_780.0)] == ["12 ms", "3.42 s", "7:05 min", "26:03 h"]


def of_kind(events: list[JobEvent], kind: str) -> list[int | None]:
    return [event.group for event in events if event.kind == kind]


def test_the_history_has_the_events_that_operators_are_notified() -> None:
    """Losses and saves, from what was sent, are those that a replay of the machine finds."""
    job = reported(2)
    job.lose(1)
    job.step()
    job.tell(m.Saved(0, 0, 2, "step-2"))
    job.step()
    job.lose(3)
    job.step()
    history = job.picture().history
    events = [event for transition in job.transitions for event in events_of(*transition)]
    assert [group for failure in history.failures for group in failure.groups] == of_kind(events, "loss") == [1, 3]
    assert [save.group for save in history.saves] == of_kind(events, "save") == [0]
    assert any(isinstance(action, m.AcceptSave) for record, _, _ in job.transitions for action in record.actions)
    kinds = [one.kind for one in happenings(job.picture())]
    assert kinds == ["life", "failure", "save", "failure"]


def test_rounded_lengths_of_steps_leave_no_hole() -> None:
    """Times are rounded to a microsecond in the lines: what is attributed to nothing is nothing, and not less."""
    job = reported()
    for line in job.lines:
        line["step_time_s"] += 4e-7
    assert job.picture().wall_time().parts["unknown"] == 0

"""Who is slow, and who took whose pieces: from plans and paces to the words that people read."""

from __future__ import annotations

from typing import Any

import pytest

from spare_megatron.coordinator.status_figures import speeds
from spare_megatron.metrics.metrics import MetricsBook
from spare_megatron.metrics.moved_pieces import moved_pieces
from spare_megatron.monitor.group_numbers import numbered_groups
from spare_megatron.monitor.speed_texts import SHOWN_MAX, speed_lines
from spare_megatron.protocol import messages as m
from spare_megatron.protocol.messages import SendAsk
from spare_megatron.protocol.state import Plan
from tests.pure.scripted_job import ScriptedJob

SPEC = m.JobSpec(4, 8, (0, 1, 2), "microbatch", 0, 99, 1, "f")


def job_with_given_pieces() -> ScriptedJob:
    """Group 1 has given pieces of its step 3 to others, which is in flight."""
    job = ScriptedJob(SPEC)
    job.step()
    job.step()
    job.tell(m.RunningOut(3, 1, ((0, 1, 1.0), (1, 7, 2.0), (2, 1, 1.0), (3, 1, 1.0))))
    for one in [action for action in job.transitions[-1][0].actions if isinstance(action, SendAsk)]:
        pieces = job.state.plan.pieces(1)[-one.ask.pieces :] if one.group == 1 else ()
        job.tell(m.GaveBack(one.group, 0, 3, one.ask, pieces))
    assert job.state.epoch == 2
    assert not job.picture().history.patching, "nobody was lost"
    return job


def relieved_job() -> ScriptedJob:
    """The same, after the commit of that step."""
    job = job_with_given_pieces()
    job.step()
    return job


def test_a_line_says_who_took_what_and_only_where_pieces_moved() -> None:
    job = relieved_job()
    job.step()
    first, relieved, after = job.lines[1:4]
    assert "moved" not in first
    assert "moved" not in after
    job.lose(3)
    assert job.picture().history.patching
    (taken,) = relieved["moved"].values()
    assert relieved["moved"].keys() == {"1"}
    assert sum(taken.values()) == relieved["pieces_given"] > 0
    assert "1" not in taken
    assert job.book.relieved == {"step": 3, "moved": relieved["moved"]}
    again = MetricsBook()
    again.recall(job.book.memo())
    assert again.relieved == job.book.relieved, "after a restart from a snapshot"
    memo = job.book.memo()
    del memo["relieved"]
    again.recall(memo)
    assert again.relieved == {}, "of an older version"


def test_what_a_group_gave_counts_although_it_dies_in_the_same_step() -> None:
    job = job_with_given_pieces()
    given = len(job.state.plan.left[1])
    assert given > 0
    job.lose(1)
    job.book.recall(job.book.memo())  # a coordinator is back by a snapshot
    job.step()
    job.step()
    assert [line["pieces_given"] for line in job.lines if line["step"] >= 3] == [given, 0]


def test_a_piece_that_came_back_has_not_moved() -> None:
    """Group 0 gives two pieces to group 1, which gives one back."""
    share = relieved_job().state.plan.assignment
    assert share is not None
    first, second = share.pieces_of(0)[:2]
    plan = Plan(share, (0, 1, 2, 3)).without({0: (first, second)}).grown((0, 1, 2, 3), {1: (first, second)})
    assert moved_pieces(plan) == {"0": {"1": 2}}
    plan = plan.without({1: (second,)}).grown((0, 1, 2, 3), {0: (second,)})
    assert moved_pieces(plan) == {"0": {"1": 1}}
    assert moved_pieces(plan.without({1: (first,)}).grown((0, 1, 2, 3), {0: (first,)})) == {}


def test_the_speeds_of_a_step_are_those_of_computing() -> None:
    job = ScriptedJob(SPEC)
    job.step(4.75, compute_s={2: 4.0})
    assert job.book.piece_s == {0: 0.25, 1: 0.25, 2: 0.5, 3: 0.25}
    assert speeds(job.book.piece_s, job.state.live) == {0: 1.0, 1: 1.0, 2: 0.5, 3: 1.0}
    assert speeds({0: 1.0, 1: 2.0, 7: 0.1}, {0, 1}) == {0: 1.0, 1: 0.5}, "of two groups the faster one is the measure"
    assert speeds({0: 0.0}, {0}) == speeds({}, {0}) == {}


def status(speed: dict[int, float], moved: dict[str, dict[str, int]] | None = None) -> dict[str, Any]:
    """What status.json says of such groups."""
    one = {"rank": 1, "phase": "backward", "silent_s": 0.1}
    reported: dict[str, Any] = {"phase": "running", "live": {str(group): 0 for group in speed}}
    reported["groups"] = {str(group): {**one, "speed": figure} for group, figure in speed.items()}
    return reported | ({"relieved": {"step": 41, "moved": moved}} if moved else {"relieved": {}})


@pytest.mark.parametrize(
    ("reported", "lines"),
    [
        (status({0: 1.0, 1: 0.9, 2: 1.2}), []),
        (
            status({0: 1.0, 1: 1.0, 2: 0.5, 3: 1.0}, {"2": {"0": 2, "1": 2, "3": 1}}),
            ["group 2 is at 0.50 of the median speed (rank 1, backward); it gave 5 pieces of step 41 to groups 0-1, 3"],
        ),
        (
            status({0: 1.0, 1: 0.5, 2: 1.0}, {"2": {"0": 1}}),
            ["group 1 is at 0.50 of the median speed (rank 1, backward)", "group 2 gave 1 piece of step 41 to group 0"],
        ),
        (
            status({0: 1.0, 1: 1.0, 2: 1.0}, {"1": {"0": 2}, "2": {"0": 3}}),
            ["groups 1-2 gave 5 pieces of step 41 to others"],
        ),
        ({"phase": "running", "live": {"0": 0}, "groups": {"0": {"silent_s": 0.1}}}, []),
        (status({0: 1.0, 1: 0.5}) | {"phase": "stopped"}, []),
    ],
    ids=["even", "slow", "slow and another", "several", "older version", "over"],
)
def test_slow_groups_are_named_with_what_they_gave(reported: dict[str, Any], lines: list[str]) -> None:
    assert list(speed_lines(reported)) == lines


def test_of_many_slow_groups_the_slowest_are_named() -> None:
    lines = list(speed_lines(status({group: 0.3 + group / 100 for group in range(9)} | {9: 1.0})))
    assert len(lines) == SHOWN_MAX + 1
    assert lines[0].startswith("group 0 is at 0.30")
    assert lines[-1] == "4 more groups below 0.75 of the median speed"


def test_numbers_of_groups() -> None:
    assert numbered_groups([4]) == "group 4"
    assert numbered_groups([5, 0, 1, 2]) == "groups 0-2, 5"

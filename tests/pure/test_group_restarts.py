"""When a lost group is started again: the table of pauses, and what holds for every course of losses."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spare_megatron.launch.group_restarts import (
    COME_S,
    FIRST_PAUSE_S,
    LEAVE_S,
    PAUSES_MOST,
    WITHIN_S,
    Absences,
    GroupRestarts,
    GroupStart,
    Incarnations,
    NextStart,
    pause_s,
)


@pytest.mark.parametrize(
    ("before", "expected_s"),
    [(0, 0.0), (1, 5.0), (2, 10.0), (3, 20.0), (4, 40.0), (6, 160.0), (7, 300.0), (8, 300.0), (5000, 300.0)],
)
def test_the_pauses(before: int, expected_s: float) -> None:
    assert pause_s(before) == expected_s
    assert pause_s(before, 0.5) == expected_s / 10
    assert pause_s(before, 0.0) == 0.0


def test_a_group_that_fails_at_once_each_time_is_given_up() -> None:
    restarts, now_s, pauses = GroupRestarts(3), 100.0, []
    while (start := restarts.after_loss(2, now_s)).pause_s is not None:
        pauses.append(start.pause_s)
        now_s += start.pause_s + 1.0
    assert (pauses, start) == ([0.0, 5.0, 10.0], NextStart(None, 3))


@pytest.mark.parametrize(
    ("most", "losses_s", "expected"),
    [
        (0, (0.0,), (None,)),
        (1, (0.0, 1.0), (0.0, None)),
        (1, (0.0, WITHIN_S - 1.0), (0.0, None)),
        (1, (0.0, WITHIN_S), (0.0, 0.0)),
        (2, (0.0, 1800.0, WITHIN_S), (0.0, 5.0, 5.0)),
        (2, (0.0, 1800.0, WITHIN_S, WITHIN_S + 1.0), (0.0, 5.0, 5.0, None)),
    ],
)
def test_what_is_an_hour_ago_does_not_count(
    most: int, losses_s: tuple[float, ...], expected: tuple[float | None, ...]
) -> None:
    restarts = GroupRestarts(most)
    assert tuple(restarts.after_loss(0, at_s).pause_s for at_s in losses_s) == expected


def test_a_restart_counts_from_when_it_begins() -> None:
    """Its host was not fit for it for most of an hour."""
    restarts = GroupRestarts(1)
    assert restarts.after_loss(0, 0.0).pause_s == 0.0
    restarts.begins(0, 3000.0)
    assert restarts.after_loss(0, WITHIN_S + 1.0).pause_s is None
    assert restarts.after_loss(0, WITHIN_S + 3000.0).pause_s == 0.0


def test_each_group_has_its_own_count() -> None:
    restarts = GroupRestarts(1)
    assert [restarts.after_loss(group, 0.0).pause_s for group in (0, 1, 0, 2)] == [0.0, 0.0, None, 0.0]


LOSSES = st.lists(st.tuples(st.integers(0, 2), st.floats(0.0, 2000.0)), max_size=40)


@given(st.integers(0, 5), LOSSES)
def test_no_hour_has_more_restarts_than_allowed(most: int, losses: list[tuple[int, float]]) -> None:
    restarts, begun_s = GroupRestarts(most), defaultdict(list)
    ready_s: dict[int, float] = {}
    for group, later_s in losses:
        now_s = ready_s.get(group, 0.0) + later_s
        start = restarts.after_loss(group, now_s)
        if start.pause_s is None:
            assert start.before == most
            ready_s[group] = now_s
            continue
        assert start.pause_s in {0.0, *(FIRST_PAUSE_S * min(PAUSES_MOST, 2**k) for k in range(7))}
        assert (start.pause_s == 0.0) == (start.before == 0)
        ready_s[group] = now_s + start.pause_s
        begun_s[group].append(now_s + start.pause_s)
    for times in begun_s.values():
        assert all(sum(at_s - WITHIN_S < other_s <= at_s for other_s in times) <= most for at_s in times)


def test_the_incarnations_of_two_job_attempts() -> None:
    drawn = Incarnations()
    assert drawn.first(3, -1) == 0
    assert [drawn.next(2, 0), drawn.next(2, 0), drawn.next(1, 7)] == [1, 2, 8]
    assert drawn.first(3, 1) == 9
    assert drawn.next(0, -1) == 10


DRAWS = st.lists(st.one_of(st.none(), st.integers(0, 3)).flatmap(lambda g: st.tuples(st.just(g), st.integers(-1, 20))))


@given(DRAWS)
def test_no_incarnation_of_a_group_is_drawn_twice(draws: list[tuple[int | None, int]]) -> None:
    drawn, seen = Incarnations(), dict.fromkeys(range(4), -1)
    for group, known in draws:
        if group is None:
            first = drawn.first(4, known)
            assert first > max(known, *seen.values())
            seen = dict.fromkeys(range(4), first)
        else:
            number = drawn.next(group, known)
            assert number > max(known, seen[group])
            seen[group] = number


def test_a_start_that_never_comes_is_late() -> None:
    comes, hangs = GroupStart(0, 1, restarts=1), GroupStart(1, 1, restarts=1)
    absences, both = Absences(), [comes, hangs]

    def late(there: set[tuple[int, int]], now_s: float) -> list[GroupStart]:
        assert absences.gone(both, there, now_s) == []
        return absences.late(both, now_s)

    assert late(set(), 10.0) == late({comes.member}, 20.0) == late({comes.member}, 10.0 + COME_S) == []
    assert late({comes.member}, 10.1 + COME_S) == [hangs]
    assert late({comes.member, hangs.member}, 11.0 + COME_S) == []


def test_who_is_gone() -> None:
    first, second, back = GroupStart(0, 0), GroupStart(1, 0), GroupStart(1, 1, restarts=1)
    absences, both = Absences([first]), {first.member, second.member}
    assert absences.gone([first, second], set(), 10.0) == []
    assert absences.gone([first, second], set(), 10.1 + LEAVE_S) == [first], "the second has not come yet"
    assert absences.gone([first, second], both, 20.0) == []
    assert absences.gone([first, second], {first.member}, 21.0) == []
    assert absences.gone([first, second], both, 21.0 + LEAVE_S) == []
    assert absences.gone([first, second], {first.member}, 30.0) == [], "counted anew"
    assert absences.gone([first, second], {first.member}, 30.0 + LEAVE_S) == []
    assert absences.gone([first, second], {first.member}, 30.1 + LEAVE_S) == [second]
    assert absences.gone([first, back], {first.member}, 99.0) == [], "the newer start has not come yet"

"""Which steps benchmarks/goodput.py counts, on courses that can be counted by hand."""

from __future__ import annotations

import pytest

from benchmarks._goodput_account import Course, State, kill_schedule, median


def course(*states: tuple[float, int, int]) -> Course:
    """Of (time, step, groups), six samples a group."""
    return Course([State(time_s, step, groups, 6.0 * groups) for time_s, step, groups in states])


def test_the_same_seed_draws_the_same_kills_inside_the_window() -> None:
    kills = kill_schedule(1, 900.0, 60.0, 4)
    assert kills == kill_schedule(1, 900.0, 60.0, 4)
    assert 8 <= len(kills) <= 25
    assert all(0 <= kill.at_s < 900 and kill.group in range(4) for kill in kills)
    assert kill_schedule(1, 300.0, 60.0, 4) == [kill for kill in kills if kill.at_s < 300]


def test_a_step_that_is_lost_and_trained_again_counts_once() -> None:
    # Steps 3 and 4 are lost at 4.5 s, as the newest checkpoint is of step 2.
    found = course((1, 1, 4), (2, 2, 4), (3, 3, 4), (4, 4, 4))
    found.states += [State(4.5, 2, 0, 0.0), *course((8, 3, 4), (9, 4, 4), (10, 5, 4)).states]
    assert [found.step_at(time_s) for time_s in (0.5, 1, 4.2, 4.6, 8.5, 20)] == [0, 1, 4, 2, 3, 5]
    assert found.samples_between(1, 10) == 4 * 24
    assert found.samples_between(1, 4.6) == 24, "what was lost at the end of the window is not counted"
    assert found.seconds_until_beyond(4.2) == pytest.approx(5.8)
    assert found.seconds_until_beyond(10) is None


def test_a_step_without_a_dead_replica_has_fewer_samples() -> None:
    found = course((1, 1, 4), (2, 2, 3), (3, 3, 3), (4, 4, 4))
    assert found.step_at(4) - found.step_at(1) == 3
    assert found.samples_between(1, 4) == 18 + 18 + 24


def test_whole_steps_are_those_since_the_last_that_missed_a_group() -> None:
    found = course((1, 1, 4), (2, 2, 3), (3, 3, 4), (4, 4, 4))
    assert found.whole_steps_since(0, 4) == 2
    assert found.whole_steps_since(3.5, 4) == 1
    assert found.whole_steps_since(9, 4) == 0


def test_the_failure_free_rate_is_from_step_to_step_and_leaves_out_what_lies_between() -> None:
    found = course((1, 1, 4), (2, 2, 4), (3, 3, 4), (10, 4, 4), (20.5, 5, 4), (21, 6, 4), (21.5, 7, 4))
    assert found.failure_free_rate([(0.5, 3.5), (20, 22)]) == (4 / 3, 4 * 24 / 3)
    with pytest.raises(ValueError, match="no steps"):
        found.failure_free_rate([(30, 40)])


def test_the_median_is_of_what_is_known() -> None:
    assert median([3.0, None, 1.0]) == 2.0
    assert median([None]) is None

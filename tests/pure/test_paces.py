"""How fast groups are, by their leaders' clocks, and who is asked for what by the coordinator's estimates."""

from __future__ import annotations

from dataclasses import replace

from spare_megatron.control_plane.rank_ledger import PaceMeter
from spare_megatron.control_plane.reports import Pace
from spare_megatron.coordinator.paces import Paces
from spare_megatron.protocol import messages as m
from spare_megatron.protocol.machine import State, initial_state, step

SPEC = m.JobSpec(3, 8, (0, 1, 2), "microbatch", 0, 9, 1, "job")


def running() -> State:
    state = step(initial_state(), m.Opened(SPEC, 1, 1))[0]
    return step(state, m.AllHere(tuple((group, 0) for group in range(3))))[0]


def test_the_filling_of_a_pipeline_is_no_pace() -> None:
    meter = PaceMeter(filling=2)
    assert meter.pace(1.0) == Pace(0, 0, 1.0, 0.0)
    for begun, at_s in ((1, 10.0), (2, 10.5), (3, 11.0), (4, 13.0), (4, 13.5), (6, 15.0)):
        meter.note(7, begun, at_s)
    assert meter.pace(15.5) == Pace(7, 4, 0.5, 1.0)
    meter.note(8, 1, 16.0)
    assert meter.pace(16.0) == Pace(8, 0, 0.0, 1.0), "that of the step before"
    meter.note(8, 0, 20.0)
    assert meter.pace(20.0) == Pace(8, 0, 4.0, 4.0), "but it has taken longer"
    meter.rest(30.0)
    assert meter.pace(30.5) == Pace(8, 1, 0.5, 1.0), "it had nothing to begin"
    for begun, at_s in ((4, 31.0), (5, 33.0)):
        meter.note(8, begun, at_s)
    assert meter.pace(33.0) == Pace(8, 5, 0.0, 2.0)


def test_a_slow_group_is_asked_when_another_runs_out() -> None:
    state, paces = running(), Paces()
    assert paces.runs_out(state, 1, (1, 1), 0.0) is None, "nothing is known"
    for group, begun, piece_s in ((0, 6, 1.0), (1, 6, 1.0), (2, 3, 2.0)):
        paces.receive(group, 0, Pace(1, begun, 0.5, piece_s), 100.0)
    paces.receive(1, 0, None, 100.0)
    assert paces.runs_out(state, 1, (2, 1), 101.0) is None
    assert paces.runs_out(state, 1, (1, 2), 101.0) is None
    event = paces.runs_out(state, 1, (1, 1), 101.0)
    assert event == m.RunningOut(1, 1, ((0, 1, 1.0), (1, 1, 1.0), (2, 5, 2.0)))
    after, decision = step(state, event)
    assert [(action.group, action.ask.pieces) for action in decision.actions] == [(2, 4)]
    assert paces.runs_out(after, 1, (1, 1), 101.1) is None, "it is asked already"
    paces.receive(2, 0, Pace(1, 3, 5.0, 2.0), 102.0)
    stands = paces.runs_out(state, 1, (1, 1), 102.0)
    assert stands is not None
    assert stands.paces[2] == (2, 4, 5.0), "it has begun nothing for longer than two of its pieces take"


def test_even_groups_are_not_looked_at_again_at_once() -> None:
    state, paces = running(), Paces()
    for group in range(3):
        paces.receive(group, 0, Pace(1, 4, 0.0, 1.0), 100.0)
    assert paces.runs_out(state, 1, (1, 1), 100.0) is None
    paces.receive(2, 0, Pace(1, 1, 0.0, 4.0), 100.1)
    assert paces.runs_out(state, 1, (1, 1), 100.2) is None, "within half a piece"
    assert paces.runs_out(state, 1, (1, 1), 100.6) is not None


def test_another_incarnation_is_not_known() -> None:
    state, paces = running(), Paces()
    for group in range(3):
        paces.receive(group, int(group == 1), Pace(1, 4, 0.0, 1.0 + 7 * (group == 2)), 100.0)
    assert paces.runs_out(state, 1, (1, 1), 100.0) is None


def test_a_group_that_has_just_come_and_has_nothing_to_do_is_taken_for_the_median() -> None:
    lost = step(running(), m.Lost((m.Loss(2, 0, "exited"),)))[0]
    joined, paces = replace(lost, live={**lost.live, 2: 1}), Paces()
    holds = replace(joined, holders=joined.holders | {2})
    for group in range(2):
        paces.receive(group, 0, Pace(1, 0, 0.0, 1.0), 100.0)
    assert paces.holds(holds, 2, 100.0) is None, "it has not run out of tickets"
    assert paces.runs_out(joined, 2, (1, 2), 100.0) is None, "who does not hold the state takes no pieces"
    event = paces.holds(holds, 2, 100.0)
    assert event == m.RunningOut(1, 2, ((0, 12, 1.0), (1, 12, 1.0), (2, 0, 1.0)))
    decision = step(holds, event)[1]
    assert [(action.group, action.ask.pieces) for action in decision.actions] == [(0, 4), (1, 4)]
    assert paces.holds(holds, 1, 100.0) is None
    uneven = Paces()
    for group in range(2):
        uneven.receive(group, 0, Pace(1, 0, 0.0, 1.0 + group), 100.0)
    assert uneven.runs_out(joined, 2, (1, 2), 100.0) is None, "whoever were asked would not be when it holds the state"
    assert uneven.runs_out(joined, 0, (1, 2), 100.0) is not None


def test_a_group_of_unknown_pace_that_has_pieces_is_not_guessed_at() -> None:
    state, paces = running(), Paces()
    paces.receive(0, 0, Pace(1, 8, 0.0, 1.0), 100.0)
    paces.receive(1, 0, Pace(1, 0, 0.0, 4.0), 100.0)
    assert paces.runs_out(state, 0, (1, 1), 100.0) is None

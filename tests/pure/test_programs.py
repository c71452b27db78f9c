"""Pipeline programs against all shapes up to four stages, two virtual stages and nine tickets, with pauses anywhere.

The oracle is the rehearsal of all stages with exchanges that buffer nothing: it ends, or the programs are wrong. What
the rehearsal itself would overlook is tried on programs that were made wrong.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spare_megatron.pipeline.operations import Backward, Exchange, Forward, Operation, Transfer
from spare_megatron.pipeline.programs import ForwardOnly, Interleaved, OneForwardOneBackward, Program, run
from tests.pure.rehearsal import DeadlockError, MismatchError, finish_times, most_in_flight, work_of

Kind = Callable[[int, int], Program]


def interleaved(chunks: int) -> Kind:
    return lambda stage, stages: Interleaved(stage, stages, chunks)


def stream(kind: Kind, stages: int, runs: Sequence[int]) -> list[list[Operation]]:
    """Of each stage what it does for runs of so many blocks, with a pause after each."""
    programs = [kind(stage, stages) for stage in range(stages)]
    return [[one for blocks in runs for one in run(program, blocks * program.block)] for program in programs]


def check(kind: Kind, stages: int, runs: Sequence[int], chunks: int, bound: Callable[[int], int]) -> None:
    """Everything that programs promise."""
    programs = stream(kind, stages, runs)
    finish_times(programs)
    block = kind(0, stages).block
    everything = list(range(block * sum(runs)))
    for stage, program in enumerate(programs):
        expected = dict.fromkeys(range(chunks), (everything, everything)) if everything else {}
        assert work_of(program) == expected, f"stage {stage}"
        longest = max(runs, default=0) * block * chunks
        assert most_in_flight(program) <= min(bound(stage), longest)
        begun: set[tuple[int, int]] = set()
        for operation in program:
            if isinstance(operation, Forward):
                begun.add((operation.microbatch, operation.chunk))
            elif isinstance(operation, Backward):
                assert (operation.microbatch, operation.chunk) in begun


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_1f1b_with_every_division_of_nine_tickets(stages: int) -> None:
    for tickets in range(10):
        for runs in divisions(tickets):
            check(OneForwardOneBackward, stages, runs, 1, lambda stage: stages - stage)


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("chunks", [2, 3])
def test_interleaved_with_every_division_of_five_blocks(stages: int, chunks: int) -> None:
    for blocks in range(6):
        for runs in divisions(blocks):
            check(
                interleaved(chunks),
                stages,
                runs,
                chunks,
                lambda stage: 2 * (stages - 1 - stage) + (chunks - 1) * stages + 1,
            )


@given(
    st.integers(1, 8),
    st.lists(st.integers(1, 9), max_size=3),
    st.integers(1, 3),
    st.lists(st.floats(0.1, 9.0), min_size=1, max_size=9),
)
def test_any_shape_and_any_durations(stages: int, runs: list[int], chunks: int, durations: list[float]) -> None:
    if chunks == 1 or stages == 1:
        check(OneForwardOneBackward, stages, runs, 1, lambda stage: stages - stage)
        return
    programs = stream(interleaved(chunks), stages, runs[:2])
    drawn = itertools.cycle(durations)
    finish_times(programs, lambda _stage, _work: next(drawn), 0.01)


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_forward_only(stages: int) -> None:
    for tickets in range(6):
        programs = stream(ForwardOnly, stages, [tickets])
        finish_times(programs)
        for program in programs:
            assert [one for one in program if isinstance(one, Forward)] == [Forward(n) for n in range(tickets)]


def test_a_pause_costs_a_pipeline_and_nothing_else_does() -> None:
    """Time of one run: (tickets + P - 1) (forward + backward), where transfers are free (Narayanan et al., 2021)."""

    def duration(_stage: int, work: Forward | Backward) -> float:
        return 1.0 if isinstance(work, Forward) else 2.0

    for stages, tickets in ((1, 4), (2, 8), (4, 8), (4, 3)):
        whole = max(finish_times(stream(OneForwardOneBackward, stages, [tickets]), duration))
        assert whole == 3.0 * (tickets + stages - 1)
        paused = max(finish_times(stream(OneForwardOneBackward, stages, [tickets, tickets]), duration))
        assert whole < paused <= 2 * whole
        if stages > 1:
            once = max(finish_times(stream(OneForwardOneBackward, stages, [2 * tickets]), duration))
            assert once < paused, "a pause was for nothing"


def test_virtual_stages_shorten_the_bubble() -> None:
    """The bubble is (P - 1) (forward + backward) / V (Narayanan et al., 2021): chunks are a V-th of the work."""
    stages, blocks = 4, 3

    def bubble(chunks: int) -> float:
        kind = OneForwardOneBackward if chunks == 1 else interleaved(chunks)
        runs = [blocks * stages] if chunks == 1 else [blocks]
        whole = max(finish_times(stream(kind, stages, runs), lambda _, work: (1 + isinstance(work, Backward)) / chunks))
        return whole - 3.0 * blocks * stages

    assert bubble(1) == pytest.approx(9.0)
    assert bubble(2) < 0.75 * bubble(1)


def divisions(total: int) -> list[tuple[int, ...]]:
    """All ways to cut ``total`` in a sequence of runs."""
    if not total:
        return [()]
    return [(first, *rest) for first in range(1, total + 1) for rest in divisions(total - first)]


@pytest.mark.parametrize("stages", range(1, 6))
def test_the_first_stage_gets_to_its_next_word_before_the_others_have_it(stages: int) -> None:
    """A leader writes the pause when the first stage has the last ticket: until then the others wait for a word."""
    kinds: list[Kind] = [OneForwardOneBackward, ForwardOnly]
    kinds += [interleaved(chunks) for chunks in (2, 3, 4)] * (stages > 1)
    for kind, words in itertools.product(kinds, range(1, 9)):
        programs = [kind(stage, stages) for stage in range(stages)]
        waiting: Sequence[int] = ()
        try:
            finish_times([[one for _ in range(words) for one in program.add()] for program in programs])
        except DeadlockError as error:
            waiting = list(error.waiting)
        assert 0 not in waiting, f"{stages} stages, {words} words: {waiting} wait"


# -------------------------------------------------------------------------------- what the rehearsal must not overlook


def two_stages() -> list[list[Operation]]:
    return stream(OneForwardOneBackward, 2, [3])


def test_blocking_sends_in_the_wrong_order_are_a_deadlock() -> None:
    apart = [
        [
            part
            for one in program
            for part in (
                (Exchange(sends=one.sends), Exchange(receives=one.receives)) if isinstance(one, Exchange) else (one,)
            )
        ]
        for program in two_stages()
    ]
    with pytest.raises(DeadlockError):
        finish_times([[one for one in program if not isinstance(one, Exchange) or one] for program in apart])


def test_tensors_that_change_places_are_found() -> None:
    swapped = {Transfer(False, 0, 0): Transfer(False, 1, 0), Transfer(False, 1, 0): Transfer(False, 0, 0)}
    first, second = two_stages()
    wrong = [
        replace(one, receives=tuple(swapped.get(t, t) for t in one.receives)) if isinstance(one, Exchange) else one
        for one in second
    ]
    with pytest.raises(MismatchError, match="do not agree"):
        finish_times([first, wrong])


def test_a_tensor_that_nobody_receives_is_found() -> None:
    first, second = two_stages()
    extra = Exchange(sends=(Transfer(False, 9, 0),))
    with pytest.raises(DeadlockError):
        finish_times([[*first, extra], second])
    with pytest.raises(MismatchError, match="of others"):
        finish_times([first, [*second, extra]])

"""Explores every world that a model can reach: checks safety on the way, then liveness over the complete graph.

The search is breadth first, so that a counterexample is a shortest list of moves. Liveness means that from every world
that was reached, moves that are no faults lead to a world in which the job is over. The graph is finite, so a job in
which nothing more fails ends, provided that a move that is possible again and again is made at last (strong fairness).
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import breadth_first_order

from tests.explore.model import Model
from tests.explore.world import World


class CounterexampleError(AssertionError):
    """Some moves from the start lead to a violation; the message lists them."""

    def __init__(self, what: str, moves: list[str], reported: list[str]) -> None:
        lines = "\n".join(f"{n:4d}  {line}" for n, line in enumerate(reported, 1))
        super().__init__(f"{what}\nafter {len(moves)} moves:\n{lines}\nplay it: {'; '.join(moves)}")
        self.what, self.moves = what, moves


@dataclass
class Found:
    """The figures of an exploration."""

    states: int = 0
    transitions: int = 0
    depth: int = 0
    decisions: int = 0
    """Different (machine state, event) pairs."""
    ends: dict[str, int] = field(default_factory=dict)
    """Outcome -> number of worlds in which the job is over."""
    seconds: float = 0.0

    def __str__(self) -> str:
        ends = ", ".join(f"{outcome} {number}" for outcome, number in sorted(self.ends.items()))
        return (
            f"{self.states} states, {self.transitions} transitions, depth {self.depth}, {self.decisions} decisions, "
            f"ends: {ends}; {self.seconds:.1f} s"
        )


class Explorer:
    """One exploration."""

    def __init__(
        self,
        model: Model,
        limit: int | None = None,
        progress: Callable[[str], None] | None = None,
        every_move: bool = False,
    ) -> None:
        """More than ``limit`` states are an error, so that nothing is left out unnoticed. ``every_move`` explores
        without the partial-order reduction."""
        self._moves = model.moves if every_move else model.fewer_moves
        self._model, self._limit, self._progress = model, limit, progress
        self._numbers: dict[World, int] = {}
        self._parents = array("i", [-1])
        self._labels = array("H", [0])
        self._texts: dict[str, int] = {}
        self._from, self._to = array("i"), array("i")
        """The edges of the graph that are no faults."""

    def explore(self) -> Found:
        """Explore all worlds.

        Raises:
            CounterexampleError: there is a violation, or a world from which the job does not end.
            RuntimeError: there are more states than ``limit``.
        """
        began_s, found = time.process_time(), Found()
        start = self._model.start()
        self._numbers[start] = 0
        frontier, over = [start], []
        while frontier:
            found.depth += 1
            following: list[World] = []
            for world in frontier:
                number = self._numbers[world]
                if world.over:
                    over.append(number)
                    outcome = world.brain.state.outcome
                    found.ends[outcome] = found.ends.get(outcome, 0) + 1
                found.transitions += self._expand(world, number, following)
            frontier = following
            if self._limit is not None and len(self._numbers) > self._limit:
                raise RuntimeError(f"{len(self._numbers)} states at depth {found.depth}, the limit is {self._limit}")
            if self._progress is not None:
                self._progress(f"depth {found.depth}: {len(self._numbers)} states, {len(frontier)} in front")
        self._check_ends(over)
        found.states, found.decisions = len(self._numbers), self._model.do.brains.decisions
        found.seconds = time.process_time() - began_s
        return found

    def _expand(self, world: World, number: int, following: list[World]) -> int:
        numbers, count = self._numbers, 0
        for label, fault, make in self._moves(world):
            try:
                after = make()
            except AssertionError as error:
                moves = [*self._path(number), label]
                raise CounterexampleError(str(error), moves, tell(self._model, moves)) from error
            count += 1
            known = numbers.get(after)
            if known is None:
                known = numbers[after] = len(numbers)
                following.append(after)
                self._parents.append(number)
                self._labels.append(self._texts.setdefault(label, len(self._texts)))
            if not fault:
                self._from.append(number)
                self._to.append(known)
        return count

    def _path(self, number: int) -> list[str]:
        texts, path = list(self._texts), []
        while number > 0:
            path.append(texts[self._labels[number]])
            number = self._parents[number]
        return path[::-1]

    def _check_ends(self, over: list[int]) -> None:
        """Check that the job ends from everywhere: a search backwards from the ends reaches every world."""
        total = len(self._numbers)
        sources = np.concatenate([np.frombuffer(self._to, dtype=np.int32), np.full(len(over), total, dtype=np.int32)])
        targets = np.concatenate([np.frombuffer(self._from, dtype=np.int32), np.array(over, dtype=np.int32)])
        back = csr_matrix((np.ones(len(sources), dtype=np.int8), (sources, targets)), shape=(total + 1, total + 1))
        reached = np.zeros(total + 1, dtype=np.bool_)
        reached[breadth_first_order(back, total, return_predecessors=False)] = True
        stuck = np.flatnonzero(~reached)
        if len(stuck):
            moves = self._path(int(stuck[0]))
            what = f"the job does not end from here, nor from {len(stuck) - 1} other states of {total}"
            raise CounterexampleError(what, moves, tell(self._model, moves))


def play(model: Model, moves: Iterable[str]) -> World:
    """The world after these moves."""
    world = model.start()
    for wanted in moves:
        world = _move(model, world, wanted)
    return world


def _move(model: Model, world: World, wanted: str) -> World:
    there = {label: make for label, _, make in model.moves(world)}
    if wanted not in there:
        raise ValueError(f"{wanted!r} cannot happen here; possible are {', '.join(there)}")
    return there[wanted]()


def tell(model: Model, moves: Iterable[str]) -> list[str]:
    """One line for each move: what the coordinator decided, and how the groups changed."""
    reported, world = [], model.start()
    for wanted in moves:
        before, model.do.reasons = world, []
        try:
            world = _move(model, before, wanted)
        except AssertionError as error:
            reported.append(f"{wanted}: {error}")
            break
        reasons = [f"=> {reason}" for reason in model.do.reasons]
        reported.append("  ".join([wanted, *reasons, *_changes(before, world)]))
    return reported


def _changes(before: World, after: World) -> Iterator[str]:
    """How groups changed in one move, as far as a reader must know it."""
    old = {p[:2]: p for p in before.processes}
    for p in after.processes:
        known = old.get(p[:2])
        if known is None or p.orders is None:
            continue
        now = p.orders.value
        if p.orders is not known.orders:
            yield f"(group {p.name}: epoch {now.epoch}, commit {now.committed}, plan {now.segments})"
        elif p.applied != known.applied:
            yield f"(group {p.name} has applied {p.applied}, weights {p.weights!r})"

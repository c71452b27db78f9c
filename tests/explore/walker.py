"""Long random walks of jobs in which every kind of fault may meet every other; shortens what they find.

Each walk draws, from its seed, how often faults come, how likely each kind is (some not at all), how fast each
process is and how long the walk goes on; so one walk starves a donor while another kills all groups that come back.
The judge is :mod:`tests.explore.observer`. From some states of a walk the job is run to its end without faults, in a
fair order: it must finish, with nobody waiting.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from tests.explore.model import Model, Move
from tests.explore.process import Process
from tests.explore.search import tell
from tests.explore.shape import Shape
from tests.explore.world import World

MOVES_MAX = 20_000
"""A job that has not ended without faults after so many moves never does."""
SAMPLED = 0.01
"""From this share of the states of a walk the job is run to its end, before the walk goes on."""
LIES = frozenset({"damage", "err"})
NONE = "none"
"""A kind of fault that there is not."""


@dataclass
class Finding:
    """A violation, with the moves that lead to it and, where it is that the job does not end, the order of the rest."""

    what: str
    moves: list[str]
    shape: Shape
    seed: str
    ending: int | None = None
    """Seed of the order in which the job went on without faults after the moves; None: the moves themselves fail."""

    def __str__(self) -> str:
        reported = tell(Model(self.shape), self.moves)
        lines = "\n".join(f"{n:4d}  {line}" for n, line in enumerate(reported, 1))
        return f"{self.what}\nseed {self.seed}, {self.shape}\nafter {len(self.moves)} moves:\n{lines}\n" + (
            f"play it: {'; '.join(self.moves)}"
        )


@dataclass
class Figures:
    """How much was walked."""

    walks: int = 0
    events: int = 0
    faults: int = 0
    decisions: int = 0
    ends: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    findings: list[Finding] = field(default_factory=list)

    def __str__(self) -> str:
        ends = ", ".join(f"{outcome} {number}" for outcome, number in sorted(self.ends.items()))
        rate = self.events / max(self.seconds, 1e-9)
        return (
            f"{self.walks} walks, {self.events} events, {self.faults} faults, {self.decisions} decisions, "
            f"{rate:.0f} events/s, {self.walks / max(self.seconds, 1e-9):.1f} walks/s, ends: {ends}; "
            f"{len(self.findings)} findings"
        )


class _FoundError(Exception):
    """A finding of the way to the end."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.what)
        self.finding = finding


class Walker:
    """Walks through one shape."""

    def __init__(self, shape: Shape, seed: str) -> None:
        self._shape = replace(shape, observed=True)
        self._seed, self.figures = seed, Figures()

    def walk(self, number: int) -> Finding | None:
        """One walk; the violation that it found, if it did."""
        seed, figures = f"{self._seed}/{number}", self.figures
        order = random.Random(seed)
        model, moves = Model(self._shape), list[str]()
        habits = _Habits(order, self._shape)
        began_s = time.process_time()
        figures.walks += 1
        try:
            world = model.start()
            for _ in range(habits.length):
                move = habits.next(model, world)
                if move is None:
                    break
                moves.append(move[0])
                figures.faults += move[1]
                world = move[2]()
                if order.random() < SAMPLED:
                    self._finish(model, world, moves, seed, order.randrange(2**32))
            world = self._finish(model, world, moves, seed, order.randrange(2**32))
            outcome = world.brain.state.outcome
            figures.ends[outcome] = figures.ends.get(outcome, 0) + 1
        except _FoundError as error:
            return self._found(error.finding)
        except AssertionError as error:
            return self._found(Finding(str(error), moves, self._shape, seed))
        finally:
            figures.events += len(moves)
            figures.decisions += model.do.brains.decisions
            figures.seconds += time.process_time() - began_s
        return None

    def _finish(self, model: Model, w: World, moves: list[str], seed: str, ending: int) -> World:
        """Run the job to its end from a state of the walk; returns the last world."""
        try:
            over, made = finish(model, w, ending)
        except AssertionError as error:
            raise _FoundError(Finding(str(error), moves, self._shape, seed, ending)) from error
        self.figures.events += made
        return over

    def _found(self, finding: Finding) -> Finding:
        self.figures.findings.append(finding)
        return finding


def walks(
    shapes: Mapping[str, Shape], seed: str, seconds: float, progress: Callable[[str], None] | None = None
) -> dict[str, Figures]:
    """Walk through these shapes in turn for so many seconds of CPU time. Returns the figures of each."""
    walkers = {name: Walker(shape, f"{seed}/{name}") for name, shape in shapes.items()}
    until_s, number, reported_s = time.process_time() + seconds, 0, time.monotonic()
    while time.process_time() < until_s:
        for walker in walkers.values():
            walker.walk(number)
        number += 1
        if progress is not None and time.monotonic() - reported_s > 2:
            reported_s = time.monotonic()
            progress(str(summed(walker.figures for walker in walkers.values())))
    return {name: walker.figures for name, walker in walkers.items()}


def summed(all_of_them: Iterable[Figures]) -> Figures:
    """The figures of several shapes together."""
    total = Figures()
    for figures in all_of_them:
        for item in fields(Figures):
            if item.name != "ends":
                setattr(total, item.name, getattr(total, item.name) + getattr(figures, item.name))
        for outcome, number in figures.ends.items():
            total.ends[outcome] = total.ends.get(outcome, 0) + number
    return total


class _Habits:
    """How one walk chooses its moves."""

    def __init__(self, order: random.Random, shape: Shape) -> None:
        self._order = order
        self.length = order.choice((20, 40, 80, 150, 300, 600))
        self._faulty = order.choice((0.01, 0.03, 0.06, 0.12, 0.2))
        some = ["kill", "return"]
        if order.random() < 0.5:  # a few kinds, which then often meet
            others = sorted(shape.kinds.difference(some))
            some += dict.fromkeys(order.choices(others, [4 if k in LIES else 1 for k in others], k=order.randrange(4)))
        else:
            some += [kind for kind in sorted(shape.kinds.difference(some)) if order.random() < 0.5]
        self._kinds = some
        self._weights = [order.choice((1, 2, 5)) * (3 if kind in ("kill", "return", "suspect") else 1) for kind in some]
        self._paces = order.choice(((0.02, 0.3, 1.0, 1.0, 1.0), (0.003, 0.05, 1.0, 20.0)))
        self._speeds: dict[tuple[int, int, str], float] = {}

    def next(self, model: Model, w: World) -> Move | None:
        """The next move; None where there is none."""
        if w.left and self._order.random() < self._faulty:
            move = self._fault(model, w)
            if move is not None:
                return move
        if self._order.random() < 0.02:
            self._speeds.clear()
        return usual(model, w, self._order, self._speed)

    def _speed(self, p: Process) -> float:
        key = (p.group, p.incarnation, p.process_nonce)
        if key not in self._speeds:
            self._speeds[key] = self._order.choice(self._paces)
        return self._speeds[key]

    def _fault(self, model: Model, w: World) -> Move | None:
        for kind in self._order.choices(self._kinds, self._weights, k=4):
            there = faults(model, w, kind)
            if there:
                return self._order.choice(there)
        return None


def faults(model: Model, w: World, kind: str) -> list[Move]:
    """The faults of one kind that may happen next."""
    if not model.do.may(w, kind):
        return []
    model.do.only = kind
    try:
        return [move for move in model.moves(w) if move[1]]
    finally:
        model.do.only = None


def usual(model: Model, w: World, order: random.Random, speed: Callable[[Process], float] | None = None) -> Move | None:
    """A move that is no fault, of a process drawn by its speed; None where there is none."""
    model.do.only = NONE
    try:
        places = list(range(-1, len(w.processes)))
        keys = [1.0 if n < 0 or speed is None else speed(w.processes[n]) for n in places]
        drawn = sorted(places, key=lambda n: order.random() ** (1 / keys[n + 1]), reverse=True)
        for n in drawn:
            there = list(model.moves_of_nobody(w) if n < 0 else model.moves_of(w, n, w.processes[n]))
            if there:
                return there[int(order.random() * len(there))]
    finally:
        model.do.only = None
    return None


def finish(model: Model, w: World, seed: int) -> tuple[World, int]:
    """Go on without faults, in a fair order, until the job is over and all processes have left; also the number of
    moves.

    Raises:
        AssertionError: the job stands still, or does not end.
    """
    order = random.Random(seed)
    w = w._replace(left=0)
    for number in range(MOVES_MAX):
        move = usual(model, w, order)
        if move is None:
            assert w.over, f"the job stands still: {_standing(w)}"
            return w, number
        w = move[2]()
    raise AssertionError(f"the job does not end: {_standing(w)}")


def _standing(w: World) -> str:
    state = w.brain.state
    at = ", ".join(f"{p.name} after {p.applied}" for p in w.processes)
    return f"{state.phase}, step {state.step_in_flight}, members {sorted(state.live.items())}, processes {at}"


# --------------------------------------------------------------------------------------------------------- shortening


def repeat(finding: Finding, moves: Sequence[str]) -> Finding | None:
    """Play those of the moves that are possible; the same violation (or any, where ``finding`` says none), if they
    lead to it, with the moves made."""
    model, made = Model(finding.shape), list[str]()
    try:
        w = model.start()
        for label in moves:
            move = _named(model, w, label)
            if move is None:
                continue
            made.append(label)
            w = move[2]()
        if finding.ending is not None:
            try:
                finish(model, w, finding.ending)
            except AssertionError as error:
                return _same(finding, _with_moves(finding, str(error), made))
            return None
    except AssertionError as error:
        if finding.ending is not None:
            return None
        return _same(finding, _with_moves(finding, str(error), made))
    return None


def _with_moves(finding: Finding, what: str, moves: list[str]) -> Finding:
    """The same finding with other moves."""
    return Finding(what, moves, finding.shape, finding.seed, finding.ending)


def _same(old: Finding, new: Finding) -> Finding | None:
    return new if not old.what or kind_of(old.what) == kind_of(new.what) else None


def kind_of(what: str) -> str:
    """A violation without its figures."""
    return re.sub(r"[\d.]+|\(.*|\[.*|'.*", "", re.sub(r":.*", "", what, flags=re.DOTALL)).strip()


def _named(model: Model, w: World, label: str) -> Move | None:
    words = label.split()
    for n, p in enumerate(w.processes):
        if len(words) > 1 and p.name == words[1]:
            for move in model.moves_of(w, n, p):
                if move[0] == label:
                    return move
    for move in model.moves_of_nobody(w):
        if move[0] == label:
            return move
    return None


def shorten(finding: Finding, seconds: float = 60.0) -> Finding:
    """Drop moves that are not needed while the same violation remains (delta debugging), for at most so long."""
    until_s = time.process_time() + seconds
    best = repeat(finding, finding.moves)
    if best is None:
        return finding
    size = max(1, len(best.moves) // 2)
    while time.process_time() < until_s:
        start, shorter = 0, False
        while start < len(best.moves) and time.process_time() < until_s:
            found = repeat(best, [*best.moves[:start], *best.moves[start + size :]])
            if found is not None and len(found.moves) < len(best.moves):
                best, shorter = found, True
            else:
                start += size
        if size == 1 and not shorter:
            break
        size = max(1, size // 2)
    return best

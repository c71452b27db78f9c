"""A whole job as one immutable value."""

from __future__ import annotations

from typing import NamedTuple

from tests.explore.brain import Brain
from tests.explore.keep import Kept
from tests.explore.process import Part, Process, Result

NOTHING = (-1, "")
"""No checkpoint."""


class World(NamedTuple):
    """Everything that matters of one moment."""

    brain: Brain
    """Of the coordinator that counts."""
    processes: tuple[Process, ...]
    """Those that run, sorted."""
    left: int
    """Faults."""
    each: tuple[int, ...]
    """Faults that are left of the kinds with a limit of their own."""
    ghosts: tuple[Brain, ...] = ()
    """Of coordinators that were replaced and go on."""
    shares: tuple[tuple[tuple[int, int], tuple[Part, ...]], ...] = ()
    """(step, epoch) of a reduction -> what groups contributed to it; of those that somebody may still complete."""
    results: tuple[Kept[Result], ...] = ()
    """What was applied for the steps that some process has not applied yet."""
    guilty: frozenset[tuple[int, int]] = frozenset()
    """(group, incarnation) that was damaged or computed something wrongly."""
    blind: bool = False
    """There was damage, and for a while only one group to ask."""
    against: frozenset[tuple[int, str]] = frozenset()
    """(step, digest) of weights that votes spoke against."""
    offered: tuple[int, str] = NOTHING
    """(step, digest) of the newest checkpoint that a member asked about."""

    @property
    def over(self) -> bool:
        """The job has ended, and everybody knows."""
        return self.brain.state.phase == "stopped" and not self.processes

    def is_member(self, p: Process) -> bool:
        """Live, or waiting for admission."""
        state = self.brain.state
        return p.incarnation in (state.live.get(p.group), state.waiting.get(p.group))

    def counts(self, p: Process) -> bool:
        """Whoever started this process has no reason to start another one for its group."""
        return self.is_member(p) or p.incarnation > self.brain.state.highest.get(p.group, -1)

    def ghost_of(self, p: Process) -> int | None:
        """Index of the ghost that it is connected to."""
        return next((k for k, ghost in enumerate(self.ghosts) if ghost.state.fencing == p.where), None)

    def tidied(self) -> World:
        """Without sums and results that nobody can use any more, and without ghosts that nobody can reach."""
        w = self
        if w.ghosts:
            places = [(p.where, p.orders.value.fencing if p.orders else 0) for p in w.processes]
            w = w._replace(ghosts=tuple(ghost for ghost in w.ghosts if _reached(ghost.state.fencing, places)))
        if not (w.shares or w.results):
            return w
        at = [(p.applied, p.orders.value.epoch if p.orders else 0) for p in w.processes]
        shares = tuple(s for s in w.shares if any(step < s[0][0] and epoch <= s[0][1] for step, epoch in at))
        results = w.results
        if results:
            behind = min((step for step, _ in at), default=results[-1].value.step)
            results = tuple(sorted((r for r in results if behind < r.value.step), key=_step_of))
        return w if shares == w.shares and results == w.results else w._replace(shares=shares, results=results)


def _reached(number: int, places: list[tuple[int, int]]) -> bool:
    """Somebody is connected to this coordinator, or may connect to it: (where it is, the highest number it knows)."""
    return any(where == number or (where == 0 and known <= number) for where, known in places)


def _step_of(result: Kept[Result]) -> int:
    return result.value.step

"""A whole job as one immutable value."""

from __future__ import annotations

from typing import NamedTuple

from tests.explore.brain import Brain
from tests.explore.keep import Kept
from tests.explore.memory import NO_MEMORY, Memory
from tests.explore.process import Part, Process, Result

NOTHING = (-1, "")
"""No checkpoint."""


class World(NamedTuple):
    """All that matters of a job at one moment."""

    brain: Brain
    """The state of the present coordinator, which was not replaced."""
    processes: tuple[Process, ...]
    """The processes that run, sorted."""
    left: int
    """Number of faults that are left."""
    each: tuple[int, ...]
    """Number of faults that are left of each kind with a limit of its own."""
    ghosts: tuple[Brain, ...] = ()
    """The states of coordinators that were replaced and go on."""
    shares: tuple[tuple[tuple[int, int], tuple[Part, ...]], ...] = ()
    """((step, epoch) of a reduction, the shares that groups contributed), for reductions that may still complete."""
    results: tuple[Kept[Result], ...] = ()
    """The results that were applied, of the steps that some process has not applied yet."""
    guilty: frozenset[tuple[int, int]] = frozenset()
    """The (group, incarnation) of processes that were damaged or computed something wrongly."""
    blind: bool = False
    """After damage there was for a while only one group, so that no comparison could show the damage."""
    against: frozenset[tuple[int, str]] = frozenset()
    """(step, digest) of weights that votes spoke against."""
    memory: Memory = NO_MEMORY
    """What the judge remembers in walks (``Shape.observed``)."""
    offered: tuple[int, str] = NOTHING
    """(step, digest) of the newest checkpoint that a member asked about."""

    @property
    def over(self) -> bool:
        """Whether the job has ended and all processes have left."""
        return self.brain.state.phase == "stopped" and not self.processes

    def is_member(self, p: Process) -> bool:
        """Whether the process is a member or a learner."""
        return self.brain.state.incarnation_of(p.group) == self.incarnation(p)

    def incarnation(self, p: Process) -> int:
        """The incarnation of a process, which it may not have been notified yet."""
        given, process_nonce = self.brain.state.process_nonces.get(p.group, (-1, ""))
        return given if p.incarnation < 0 and process_nonce == p.process_nonce else p.incarnation

    def counts(self, p: Process) -> bool:
        """Whether the process is, or may become, a member, so that its launcher starts no other one for its group."""
        return p.incarnation < 0 or self.is_member(p) or p.incarnation > self.brain.state.highest.get(p.group, -1)

    def ghost_of(self, p: Process) -> int | None:
        """Index of the ghost that the process is connected to; None: it is connected to none."""
        return next((k for k, ghost in enumerate(self.ghosts) if ghost.state.fencing == p.where), None)

    def with_processes(self, processes: tuple[Process, ...]) -> World:
        """``_replace`` in a third of the time."""
        return World._make((self[0], processes, *self[2:]))

    def tidied(self) -> World:
        """This world without sums and results that nobody can use any more, and without ghosts that nobody can
        reach."""
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
            behind = min((step for step, _ in at if step >= 0), default=results[-1].value.step)
            results = tuple([r for r in results if behind < r.value.step])
            results = results if len(results) < 2 else tuple(sorted(results, key=_step_of))
        return w if shares == w.shares and results == w.results else w._replace(shares=shares, results=results)


def _reached(number: int, places: list[tuple[int, int]]) -> bool:
    """Whether a process is connected to coordinator ``number``, or may connect to it. ``places`` has, for each process,
    (the coordinator that it is connected to, the highest fencing number that it knows)."""
    return any(where == number or (where == 0 and known <= number) for where, known in places)


def _step_of(result: Kept[Result]) -> int:
    return result.value.step

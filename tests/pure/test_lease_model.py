"""Every order of looks, writes, copies and stops among coordinators that follow one another, in ticks of a clock.

The promise of spare_megatron.coordinator.election is checked at each state: what a holder has acted on is in every
journal that a later one goes on with. The real :class:`LeaseValidity` and ``wait_after_claim_s`` decide; the model
around them lets every step happen at any later tick, so a process may be stopped, or its disk be slow, between any two
of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest

from spare_megatron.coordinator.election import CERTAIN, SEEN, LeaseValidity, wait_after_claim_s
from spare_megatron.coordinator.terms import Term

Records = frozenset[int]
"""By the number of the term whose holder wrote it: each writes one."""


@dataclass(frozen=True)
class Rules:
    """The real ones; a test may leave one out, to see that it is needed."""

    wait_ticks: Callable[[int, float], float] = lambda number, lease: wait_after_claim_s(
        Term(number, 1), Term(number - 1, 1), lease
    )
    certain_after_sync: bool = True
    sealed: bool = True
    looks_count_from_their_begin: bool = True


@dataclass(frozen=True)
class One:
    """A coordinator: the holder of term n is the n-th."""

    claimed: int | None = None
    phase: str = "waits"
    """waits, walks (looks for what the terms before it left), copies, copied, serves."""
    source: int = 0
    """The term whose journal it copies."""
    surely: Records = frozenset()
    """What was synced in the source when the copy began."""
    copy: Records = frozenset()
    journal: Records | None = None
    """Its own, once it has opened its term."""
    opened: int = 0
    """When."""
    record: str = "none"
    """none, written, synced, acted: its own record."""


@dataclass(frozen=True)
class World:
    """All of them at one tick."""

    now: int
    ones: tuple[One, ...]
    sealed: frozenset[int] = frozenset()

    def having(self, number: int, **changes: object) -> World:
        """With something changed of one coordinator."""
        ones = list(self.ones)
        ones[number - 1] = replace(ones[number - 1], **changes)  # type: ignore[arg-type]
        return replace(self, ones=tuple(ones))


class Model:
    """What may happen next in a world."""

    def __init__(self, lease: int, terms: int, last_tick: int, rules: Rules) -> None:
        self.lease, self.last_tick, self.rules = lease, last_tick, rules
        first = One(claimed=0, phase="serves", journal=frozenset())
        self.start = World(0, (first, *(One() for _ in range(terms - 1))))

    def explore(self) -> int:
        """Number of worlds; AssertionError with the way to one where the promise is broken."""
        came_from: dict[World, tuple[World, str] | None] = {self.start: None}
        todo = [self.start]
        while todo:
            world = todo.pop()
            for what, after in self.next(world):
                if after not in came_from:
                    came_from[after] = (world, what)
                    assert _kept(after), "\n".join(_way(came_from, after))
                    todo.append(after)
        return len(came_from)

    def next(self, world: World) -> Iterator[tuple[str, World]]:
        """Each thing that may happen, and the world after it."""
        if world.now < self.last_tick:
            yield "tick", replace(world, now=world.now + 1)
        for number, one in enumerate(world.ones, 1):
            if one.claimed is None:
                if world.ones[number - 2].claimed is not None:
                    yield f"{number} claims", world.having(number, claimed=world.now)
            elif one.phase == "serves":
                yield from self._write(world, number, one)
            else:
                yield from self._take_over(world, number, one)

    def _certain(self, world: World, number: int) -> bool:
        """True where it may be, after the looks that let it be so for longest: those that began at any tick since its
        claim, end by now, and miss every later term that they may miss."""
        claimed = world.ones[number - 1].claimed
        assert claimed is not None
        validity = LeaseValidity(number, float(self.lease), float(claimed))
        later = [one.claimed for one in world.ones[number:] if one.claimed is not None]
        for began in range(claimed, world.now + 1):
            if all(began < at + SEEN * self.lease for at in later):
                validity.looked(began if self.rules.looks_count_from_their_begin else world.now, number)
        return validity.certain(float(world.now))

    def _write(self, world: World, number: int, one: One) -> Iterator[tuple[str, World]]:
        if one.record == "none" and number < len(world.ones):
            yield f"{number} writes", world.having(number, record="written")
        elif one.record == "written":
            assert one.journal is not None
            yield f"{number} syncs", world.having(number, record="synced", journal=one.journal | {number})
        elif one.record == "synced" and (not self.rules.certain_after_sync or self._certain(world, number)):
            yield f"{number} acts", world.having(number, record="acted")

    def _take_over(self, world: World, number: int, one: One) -> Iterator[tuple[str, World]]:
        assert one.claimed is not None
        if one.phase == "waits" and world.now - one.claimed >= self.rules.wait_ticks(number, float(self.lease)):
            yield f"{number} has waited", world.having(number, phase="walks", source=number - 1)
        elif one.phase == "walks":
            source = world.ones[one.source - 1]
            if source.journal is not None:
                yield f"{number} copies {one.source}", world.having(number, phase="copies", surely=source.journal)
            if source.journal is None and self.rules.sealed:
                sealed = world.sealed | {one.source}
                yield f"{number} seals", replace(world.having(number, source=one.source - 1), sealed=sealed)
            elif one.source > 1 and not self.rules.sealed and source.opened + SEEN * self.lease > world.now:
                yield f"{number} misses {one.source}", world.having(number, source=one.source - 1)
        elif one.phase == "copies":
            source = world.ones[one.source - 1]
            assert source.journal is not None
            whole = source.journal | ({one.source} if source.record == "written" else frozenset())
            for copy in {one.surely, source.journal, whole}:
                yield (
                    f"{number} has copied {set(copy)}",
                    world.having(number, phase="copied", copy=copy, surely=frozenset()),
                )
        elif one.phase == "copied" and number not in world.sealed:
            yield (
                f"{number} opens",
                world.having(number, phase="serves", journal=one.copy, copy=frozenset(), opened=world.now),
            )


def _kept(world: World) -> bool:
    """What was acted on is in the journal of every later term that is open."""
    acted = [n for n, one in enumerate(world.ones, 1) if one.record == "acted"]
    journals = [(n, one.journal) for n, one in enumerate(world.ones, 1) if one.journal is not None]
    return all(record in journal for record in acted for n, journal in journals if n > record)


def _way(came_from: dict[World, tuple[World, str] | None], world: World) -> list[str]:
    steps = [repr(world)]
    while (before := came_from[world]) is not None:
        world, what = before
        steps.append(f"tick {world.now}: {what}")
    return steps[::-1]


@pytest.mark.parametrize(("lease", "terms", "last_tick"), [(16, 2, 40), (8, 3, 10)])
def test_what_was_acted_on_is_in_every_later_journal(lease: int, terms: int, last_tick: int) -> None:
    worlds = Model(lease, terms, last_tick, Rules()).explore()
    print(f"{worlds} worlds")
    assert worlds > 10_000, "the model does not move"


@pytest.mark.parametrize(
    ("rules", "terms"),
    [
        (Rules(wait_ticks=lambda _, lease: CERTAIN * lease), 2),
        (Rules(certain_after_sync=False), 2),
        (Rules(looks_count_from_their_begin=False), 2),
        (Rules(sealed=False), 3),
    ],
    ids=["wait half a lease", "no certainty after the sync", "looks count from their end", "no seals"],
)
def test_each_rule_is_needed(rules: Rules, terms: int) -> None:
    with pytest.raises(AssertionError, match="has waited"):
        Model(8, terms, 10, rules).explore()

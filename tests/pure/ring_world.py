"""A ring of members in virtual time: the real :class:`~spare_megatron.collectives.link_monitor.LinkMonitor` of each, a
model of the rest. Members compute, then sum in a ring, again and again; what they send takes its time or is lost; a
starved member does nothing for a while, and what came meanwhile waits for it."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from spare_megatron.collectives.link_monitor import BEATS, LEFT, RIGHT, LinkBeat, LinkMonitor, Traffic
from spare_megatron.protocol.messages import Link

TIMEOUT_S = 1.0
GRACE_S = 0.05
"""From the end of a member's epoch to its vote, where a link is silent (exchange.SILENT_GRACE_S)."""
PORTION_BYTES = 1000
SUMS = 6
"""Between two times of computing: the first waits for its peers, as members come to it when they are ready."""


@dataclass(frozen=True)
class Network:
    """``silent(sender, receiver, kind, now_s)``: nothing passes. ``delay_s(...)``: how long it takes."""

    silent: Callable[[int, int, str, float], bool]
    delay_s: Callable[[int, int, str, float], float]


@dataclass(frozen=True)
class Starved:
    """One member does nothing from ``start_s`` to ``stop_s``."""

    rank: int
    start_s: float
    stop_s: float


class Member:
    """One of the ring."""

    def __init__(self, rank: int, size: int, suspects: frozenset[int], now_s: float) -> None:
        self.rank, self.size = rank, size
        self.monitor = LinkMonitor(rank, size, TIMEOUT_S, suspects, now_s)
        self.traffic = Traffic()
        self.computes_until_s = now_s
        self.came, self.came_s = 0, -math.inf
        """Portions that have come and are not read yet."""
        self.sent = self.read = 0
        """Portions of the present sum."""
        self.sums = 0
        self.reported = -1
        self.over_s: float | None = None

    @property
    def of_a_sum(self) -> int:
        return 2 * (self.size - 1)


class RingWorld:
    """One epoch of the ring, from the moment that all have met."""

    def __init__(
        self,
        size: int,
        network: Network,
        starved: tuple[Starved, ...],
        rng: random.Random,
        suspects: dict[int, frozenset[int]] | None = None,
        start_s: float = 0.0,
        compute_s: float = 0.3,
    ) -> None:
        self.now_s, self.size, self.network, self.starved, self.rng = start_s, size, network, starved, rng
        self.compute_s = compute_s
        suspects = suspects or {}
        self.members = [Member(rank, size, suspects.get(rank, frozenset()), start_s) for rank in range(size)]
        self._number = itertools.count()
        self._due: list[tuple[float, int, int, Callable[[Member], None]]] = []
        self._order: dict[tuple[int, int, str], float] = {}
        """When the last thing sent on a way arrives: ways keep the order."""
        for member in self.members:
            for side in (LEFT, RIGHT):
                self._send(member, side, "C", self._greeting(1 - side))
            self._later(member, rng.uniform(0, TIMEOUT_S / BEATS), self._round)

    def run(self, until_s: float) -> None:
        """Until then, or until every member has voted."""
        while self._due and self._due[0][0] <= until_s and not all(self._voted(one) for one in self.members):
            due_s, _, rank, what = heapq.heappop(self._due)
            self.now_s = max(self.now_s, due_s)
            woken_s = self._woken_s(rank)
            if woken_s > self.now_s:
                heapq.heappush(self._due, (woken_s, next(self._number), rank, what))
                continue
            what(self.members[rank])

    def evidence(self) -> list[frozenset[Link]]:
        """What each member votes that has given up."""
        return [member.monitor.links for member in self.members if member.over_s is not None]

    def _voted(self, member: Member) -> bool:
        return member.over_s is not None and self.now_s > member.over_s + GRACE_S

    def _woken_s(self, rank: int) -> float:
        times = [one.stop_s for one in self.starved if one.rank == rank and one.start_s <= self.now_s < one.stop_s]
        return max(times, default=0.0)

    def _later(self, member: Member, after_s: float, what: Callable[[Member], None]) -> None:
        heapq.heappush(self._due, (self.now_s + after_s, next(self._number), member.rank, what))

    def _send(self, member: Member, side: int, kind: str, what: Callable[[Member], None]) -> None:
        receiver = self.members[(member.rank + (1 if side == RIGHT else -1)) % self.size]
        way = (member.rank, receiver.rank, kind)
        if self.network.silent(*way, self.now_s):
            return
        at_s = max(self._order.get(way, 0.0), self.now_s + self.network.delay_s(*way, self.now_s))
        self._order[way] = at_s
        if not self.network.silent(*way, at_s):
            self._later(receiver, at_s - self.now_s, what)

    def _greeting(self, side: int) -> Callable[[Member], None]:
        return lambda member: member.monitor.connect(side, self.now_s)

    def _round(self, member: Member) -> None:
        member.monitor.look(member.traffic, self.now_s, self.now_s - member.came_s)
        self._work(member)
        self._speak(member, due=True)
        self._later(member, TIMEOUT_S / BEATS, self._round)

    def _speak(self, member: Member, due: bool = False) -> None:
        monitor = member.monitor
        if monitor.over and member.over_s is None:
            member.over_s = self.now_s
            for side in (LEFT, RIGHT):  # its data connections end
                self._send(member, side, "D", self._ending(1 - side))
        if (member.reported == monitor.version) if monitor.over else not due:
            return
        member.reported = monitor.version if monitor.over else -1
        for side in (LEFT, RIGHT):
            self._send(member, side, "C", self._saying(1 - side, monitor.beat(side, member.traffic)))

    def _saying(self, side: int, beat: LinkBeat) -> Callable[[Member], None]:
        def announce(member: Member) -> None:
            member.monitor.receive(side, beat, self.now_s)
            self._speak(member)

        return announce

    def _ending(self, side: int) -> Callable[[Member], None]:
        def end(member: Member) -> None:
            if member.monitor.connected:
                member.monitor.end(side, self.now_s)
                self._speak(member)

        return end

    def _work(self, member: Member) -> None:
        """All that can be read and sent of the present sums."""
        traffic = member.traffic
        traffic.wants = False
        if member.monitor.over or not member.monitor.connected or self.now_s < member.computes_until_s:
            return
        moved = True
        while moved:
            moved = False
            if member.came and member.read < member.of_a_sum:
                member.came, member.read, moved = member.came - 1, member.read + 1, True
                traffic.received += PORTION_BYTES
            if member.sent < member.of_a_sum and member.sent <= member.read:
                member.sent, moved = member.sent + 1, True
                traffic.sent += PORTION_BYTES
                self._send(member, RIGHT, "D", self._portion)
            if member.read == member.sent == member.of_a_sum:
                member.read = member.sent = 0
                member.sums, moved = member.sums + 1, True
                traffic.wait_for_peers = member.sums % SUMS == 0
                if traffic.wait_for_peers:
                    member.computes_until_s = self.now_s + self.rng.uniform(0, 2 * self.compute_s)
                    self._later(member, member.computes_until_s - self.now_s, self._work)
                    return
        traffic.wants = True

    def _portion(self, member: Member) -> None:
        member.came, member.came_s = member.came + 1, self.now_s
        self._work(member)

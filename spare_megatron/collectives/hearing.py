"""What one member of a ring hears of its two neighbours, and what that says about the links between them.

Pure: time is an argument, and nothing here sends or waits. :mod:`spare_megatron.collectives.ring_links` has the
sockets.

Each pair of neighbours has a data connection, from left to right, and a control connection, on which both say about
forty times in a time-out how many bytes they have sent to the other and whether they wait for their own left. A link
leads from a sender to a receiver, and only the receiver can tell that it is broken:

- it is *mute* when nothing at all came for the time-out, or when the sender says that it has sent more bytes than came,
  this member waits for them, and none came for the time-out. A slow link brings something in that time, and who
  computes says so: neither is mute.
- it *ended* when a connection ended and no farewell came before or soon after.

What a member knows goes round the ring in its farewell (the *bye*), with the reason of whoever gave up first, so that
all members vote with the same evidence and nobody names a neighbour that only gave up because of somebody else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from spare_megatron.controller.messages import Link

LEFT, RIGHT = 0, 1
BEATS = 40
"""What a member says of itself in one time-out, to each neighbour."""
TOGETHER = 0.75
"""When a link is mute for its time-out, one that has been silent for so much of its own went mute with it. They differ
by little more than the time between two beats, and a member that was starved for less is not taken for mute."""
SUSPECT = 0.5
"""A link that was mute in the epoch before has this part of the time-out, until it has held for two of them."""
HOLD_ON = 4.0
"""A member with everything at hand whose neighbours wait too leaves it to others to find the cause, but not longer."""
ENDED_GRACE_S = 0.1
"""The farewell and the end of a data connection travel apart: this long after an end none comes any more. Less than
what an outcome waits for the view that explains a loss
(:data:`spare_megatron.collectives.reduction_attempt.VIEW_GRACE_S`)."""


@dataclass
class Traffic:
    """What a member's sums are at. The thread that sums writes it, others read: each field is one word."""

    sent: int = 0
    """Bytes handed to the right neighbour's connection in this epoch."""
    received: int = 0
    """Bytes that came from the left neighbour."""
    wants: bool = False
    """A sum is stopped for want of bytes from the left."""
    offers: bool = False
    """A sum has bytes that the right neighbour's connection does not take."""
    patient: bool = True
    """The present sum waits for members that still compute."""


@dataclass(frozen=True)
class LinkBeat:
    """What a member says of itself to one neighbour."""

    sent: int
    """Bytes to this neighbour."""
    wants: bool
    bye: bool = False
    """It has given this epoch up."""
    links: frozenset[Link] = frozenset()
    """Of a bye: the evidence, its own and what others told it, in ranks."""
    why: str = ""
    """Of a bye: what made the first member give up."""


class _Ear:
    """One neighbour."""

    def __init__(self, rank: int, clock_s: float) -> None:
        self.rank = rank
        self.connected = False
        self.heard_s = clock_s
        """When something came from it; until it is connected: when it was first waited for."""
        self.owed_s: float | None = None
        """Since when bytes that it sent and this member waits for have not come; None: they do."""
        self.sent = 0
        self.wants = False
        self.bye = False
        self.ended_s: float | None = None

    def silent_s(self, clock_s: float) -> float:
        if self.bye or self.ended_s is not None:
            return 0.0
        return clock_s - (self.heard_s if self.owed_s is None else min(self.heard_s, self.owed_s))


class Hearing:
    """One member's account of one epoch, from the moment that all members have met. For one thread at a time."""

    def __init__(self, rank: int, size: int, timeout_s: float, suspects: Iterable[int], now_s: float) -> None:
        """``suspects``: ranks whose link to this one was mute in the epoch before."""
        self.over = ""
        """Why this member can sum no more in this epoch."""
        self._cause = ""
        """Why the first member gave up; empty while only ended connections are known."""
        self.version = 0
        """Of the evidence."""
        self._rank = rank
        self._timeout_s = timeout_s
        self._interval_s = timeout_s / BEATS
        self._suspects = frozenset(suspects)
        self._looked_s, self._absent_s = now_s, 0.0
        self._began_s = now_s
        self._ears = (_Ear((rank - 1) % size, now_s), _Ear((rank + 1) % size, now_s))
        self._links: dict[tuple[int, int], bool] = {}
        """(sender, receiver) -> mute."""
        self._moved = (0, 0)
        self._stalled_s = now_s
        """When the sum in hand last moved a byte."""

    @property
    def links(self) -> frozenset[Link]:
        """The evidence: own, and what others told."""
        return frozenset(Link(sender, receiver, mute) for (sender, receiver), mute in self._links.items())

    @property
    def connected(self) -> bool:
        """Both neighbours are."""
        return all(ear.connected for ear in self._ears)

    def beat(self, side: int, traffic: Traffic) -> LinkBeat:
        """What is to be said to a neighbour now."""
        sent = traffic.sent if side == RIGHT else 0
        if not self.over:
            return LinkBeat(sent, traffic.wants)
        return LinkBeat(sent, traffic.wants, True, self.links, self._cause)

    def connect(self, side: int, now_s: float) -> None:
        """Both connections to this neighbour stand."""
        ear = self._ears[side]
        ear.connected, ear.heard_s = True, self._clock_s(now_s)

    def hear(self, side: int, beat: LinkBeat, now_s: float) -> None:
        """A neighbour speaks."""
        clock_s, ear = self._clock_s(now_s), self._ears[side]
        if ear.connected:
            ear.heard_s = clock_s
        ear.sent, ear.wants = beat.sent, beat.wants
        if beat.bye:
            ear.bye = True
            knew_mute = any(self._links.values())
            self._note(beat.links)
            if not knew_mute and any(link.mute for link in beat.links):
                self._take_stock(clock_s, self._timeout_s)
            why = f"rank {ear.rank} of the ring gave up"
            self._stop(f"{why}: {beat.why}" if beat.why else why, beat.why)

    def end(self, side: int, now_s: float) -> None:
        """A connection to this neighbour ended, or was refused."""
        clock_s, ear = self._clock_s(now_s), self._ears[side]
        if ear.ended_s is None:
            ear.ended_s = clock_s
        self._stop(f"the connection to rank {ear.rank} of the ring is lost", "")

    def give_up(self, why: str) -> None:
        """Nothing more can be summed in this epoch."""
        self._stop(why, why)

    def _stop(self, why: str, cause: str) -> None:
        """The first reason stays, but for an ended connection: a farewell that says why may come after the end."""
        if not self.over or (cause and not self._cause):
            self.version += bool(self.over)
            self.over, self._cause = why, cause

    def look(self, traffic: Traffic, now_s: float, data_age_s: float = math.inf) -> None:
        """Time has passed: to be called at least once between two beats.

        ``data_age_s``: since when no data has come from the left neighbour. When they are read does not matter: they
        may have lain in this machine's buffers since before the link went mute.
        """
        came = data_age_s <= now_s - self._looked_s
        clock_s = self._clock_s(now_s)
        left = self._ears[LEFT]
        moved = (traffic.received, traffic.sent)
        if came and left.connected:
            left.heard_s = clock_s
        owes = traffic.wants and left.sent > traffic.received and traffic.received == self._moved[0] and not came
        left.owed_s = None if not owes else clock_s if left.owed_s is None else left.owed_s
        busy = (traffic.wants or traffic.offers) and not traffic.patient
        if not busy or moved != self._moved:
            self._stalled_s = clock_s
        self._moved = moved
        self._note_ended(clock_s)
        if not self.over:
            self._find_mute(clock_s)
        if not self.over and busy:
            self._find_stalled(traffic, clock_s)

    def _clock_s(self, now_s: float) -> float:
        """Time in which this process ran: when it was stopped or starved, nobody's silence can be told."""
        gap_s = now_s - self._looked_s
        if gap_s > 2 * self._interval_s:
            self._absent_s += gap_s - self._interval_s
        self._looked_s = now_s
        return now_s - self._absent_s

    def _patience_s(self, ear: _Ear, clock_s: float) -> float:
        held = clock_s - self._began_s > 2 * self._timeout_s
        return self._timeout_s * (SUSPECT if ear.rank in self._suspects and not held else 1.0)

    def _find_mute(self, clock_s: float) -> None:
        mute = [ear for ear in self._ears if ear.silent_s(clock_s) >= self._patience_s(ear, clock_s)]
        if mute:
            ear = mute[0]
            what = "nothing" if ear.owed_s is None else "none of the bytes that it has sent"
            patience_s = self._patience_s(ear, clock_s)
            self._take_stock(clock_s, patience_s)
            self.give_up(f"rank {ear.rank} of the ring is mute: {what} came for {patience_s:g} s")

    def _take_stock(self, clock_s: float, patience_s: float) -> None:
        """Some link is mute, after ``patience_s``: name all here that went mute with it, not only the first that is
        noticed. Links that never stood in this epoch were all waited for since it began: where one was a suspect, half
        the time tells as much of the others."""
        for ear in self._ears:
            least_s = TOGETHER * (patience_s if ear.connected else min(patience_s, SUSPECT * self._timeout_s))
            if ear.silent_s(clock_s) >= least_s:
                self._note([Link(ear.rank, self._rank, mute=True)])

    def _find_stalled(self, traffic: Traffic, clock_s: float) -> None:
        """All members have everything at hand, and still nothing moves."""
        stalled_s = clock_s - self._stalled_s
        if stalled_s < self._timeout_s:
            return
        left, right = self._ears
        late = [left] if traffic.wants and not left.wants and left.sent <= traffic.received else []
        if traffic.offers and not right.wants:
            late.append(right)
        if late or stalled_s >= HOLD_ON * self._timeout_s:
            self._note(Link(ear.rank, self._rank) for ear in late)
            names = " and ".join(str(ear.rank) for ear in late)
            who = f"rank {names} of the ring does not take part" if late else "the ring stands still"
            self.give_up(f"{who}: no byte moved for {stalled_s:.3g} s")

    def _note_ended(self, clock_s: float) -> None:
        for ear in self._ears:
            if ear.ended_s is not None and not ear.bye and clock_s - ear.ended_s >= ENDED_GRACE_S:
                self._note([Link(ear.rank, self._rank)])

    def _note(self, links: Iterable[Link]) -> None:
        for link in links:
            pair = (link.sender, link.receiver)
            if self._links.get(pair, False) < link.mute or pair not in self._links:
                self._links[pair] = link.mute
                self.version += 1

"""Judges the links between ring neighbours by what one member receives from its two neighbours, and when.

Pure: time is an argument, and nothing here sends or waits; :mod:`spare_megatron.collectives.ring_links` has the
sockets.

Each pair of neighbours has a data connection, from left to right, and a control connection, on which both say about
forty times in a time-out how many bytes they have sent to the other and whether they wait for their own left. A link
leads from a sender to a receiver, and only the receiver can tell that it is broken:

- it is *silent* when nothing at all came for the time-out, or when this member waits for bytes that the sender says it
  has sent, and none of them came for the time-out. On a slow link some bytes come in that time, and a member that
  computes still sends beats: neither is silent.
- it *ended* when a connection ended and no close message came before or soon after.

A member can sum once both neighbours have said that they are *here*, in its epoch. If a neighbour is not here after the
time-out, it has not received its view yet: that is weak evidence, as an ended connection is. But a neighbour that was
called and does not answer is silent.

A close message carries all the evidence that a member has, and the reason of the member that gave up first; it goes
round the ring. So all members vote with the same evidence, and none blames a neighbour that gave up only because of
another one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from ctypes import Structure, c_bool, c_int64
from typing import NamedTuple

from spare_megatron.protocol.messages import Link

LEFT, RIGHT = 0, 1
BEATS = 40
"""How many beats a member sends to each neighbour in one time-out."""
TOGETHER = 0.75
"""When one link is found silent, another that has been silent for this part of its own time-out counts as silent too:
links that fall silent together differ by little more than the time between two beats. A member that was starved for
less than this is not taken for silent."""
SUSPECT = 0.5
"""A link that was silent in the epoch before has only this part of the time-out, for the first two time-outs of the
epoch."""
HOLD_ON = 4.0
"""How many time-outs a member whose neighbours wait too leaves it to others to find out why the ring stands still."""
ENDED_GRACE_S = 0.1
"""How long after the end of a data connection a close message may still come, for it travels on another connection.
Less than the time that a failed reduction waits for the view that explains it
(:data:`spare_megatron.collectives.attempt.VIEW_GRACE_S`)."""


class Traffic(Structure):
    """How far a member's sums are. The thread that sums, also in compiled code, writes it and others read it, without a
    lock: each field is consistent alone."""

    _fields_ = (
        ("sent", c_int64),
        ("received", c_int64),
        ("wants", c_bool),
        ("offers", c_bool),
        ("wait_for_peers", c_bool),
    )
    sent: int
    """Bytes handed to the right neighbour's connection in this epoch."""
    received: int
    """Bytes that came from the left neighbour."""
    wants: bool
    """A sum waits for bytes from the left neighbour."""
    offers: bool
    """A sum has bytes that the connection to the right neighbour does not accept now."""
    wait_for_peers: bool
    """The present sum waits for members that still compute."""

    def __init__(
        self, sent: int = 0, received: int = 0, wants: bool = False, offers: bool = False, wait_for_peers: bool = True
    ) -> None:
        super().__init__(sent, received, wants, offers, wait_for_peers)


class LinkBeat(NamedTuple):
    """The message that a member sends to a neighbour about forty times in a time-out, and when it gives up."""

    sent: int
    """Bytes sent to this neighbour in this epoch."""
    wants: bool
    """It waits for bytes from its own left neighbour."""
    closing: bool = False
    """The close message: it has given this epoch up."""
    links: frozenset[Link] = frozenset()
    """In a close message, the evidence that it has found or received, in ranks."""
    why: str = ""
    """In a close message, the reason of the member that gave up first."""
    right_at: str = ""
    """To a left neighbour: host:port at which the sender's right neighbour listens."""


class _Neighbour:
    """What has arrived from one neighbour, and when."""

    def __init__(self, rank: int, clock_s: float) -> None:
        self.rank = rank
        self.connected = False
        self.here = False
        """It has said that it is in this epoch."""
        self.received_s = clock_s
        """When something last came from it; until it is connected, since when it is waited for."""
        self.owed_s: float | None = None
        """Since when this member waits for bytes that it has sent, and none come; None while they come."""
        self.sent = 0
        self.wants = False
        self.closing = False
        self.ended_s: float | None = None

    def silent_s(self, clock_s: float) -> float:
        if self.closing or self.ended_s is not None:
            return 0.0
        return clock_s - (self.received_s if self.owed_s is None else min(self.received_s, self.owed_s))


class LinkMonitor:
    """What one member knows of the links in one epoch, from the moment that it is in it. For one thread at a time."""

    def __init__(self, rank: int, size: int, timeout_s: float, suspects: Iterable[int], now_s: float) -> None:
        """``suspects``: ranks whose link to this one was silent in the epoch before."""
        self.over = ""
        """Why this member can sum no more in this epoch."""
        self._cause = ""
        """Why the first member gave up; empty while only ended connections are known."""
        self.version = 0
        """Grows when this member gives up, and when there is more evidence, or a better reason, to tell the neighbours
        at once."""
        self._rank = rank
        self._timeout_s = timeout_s
        self._interval_s = timeout_s / BEATS
        self._suspects = frozenset(suspects)
        self._looked_s, self._absent_s = now_s, 0.0
        self._began_s = now_s
        self._neighbours = (_Neighbour((rank - 1) % size, now_s), _Neighbour((rank + 1) % size, now_s))
        self._links: dict[tuple[int, int], bool] = {}
        """(sender, receiver) -> silent."""
        self._moved = (0, 0)
        self._stalled_s = now_s
        """When the sum in hand last moved a byte."""

    @property
    def links(self) -> frozenset[Link]:
        """The evidence that this member has found or received."""
        if not self._links:
            return frozenset()
        return frozenset(Link(sender, receiver, silent) for (sender, receiver), silent in self._links.items())

    @property
    def connected(self) -> bool:
        """Whether messages from both neighbours have arrived on both of their connections."""
        return all(neighbour.connected for neighbour in self._neighbours)

    def here(self, side: int) -> bool:
        """Whether a neighbour has said that it is in this epoch."""
        return self._neighbours[side].here

    def beat(self, side: int, traffic: Traffic) -> LinkBeat:
        """The beat to send to a neighbour now; a close message once this member has given up."""
        sent = traffic.sent if side == RIGHT else 0
        if not self.over:
            return LinkBeat(sent, traffic.wants)
        return LinkBeat(sent, traffic.wants, True, self.links, self._cause)

    def connect(self, side: int, now_s: float) -> None:
        """Note that messages of this neighbour have arrived on both connections to it; again changes nothing."""
        neighbour = self._neighbours[side]
        if not neighbour.connected:
            neighbour.connected, neighbour.received_s = True, self._clock_s(now_s)

    def alive(self, side: int, now_s: float) -> None:
        """Note that a message of a neighbour has arrived. Called alone if it is of an older epoch."""
        clock_s, neighbour = self._clock_s(now_s), self._neighbours[side]
        if neighbour.connected:
            neighbour.received_s = clock_s

    def move_on(self, side: int, now_s: float) -> None:
        """Note that a neighbour is in a newer epoch: nothing can be summed in this one any more. The other neighbour
        receives that epoch's view by itself, so it is notified only with the next beat."""
        self.alive(side, now_s)
        neighbour = self._neighbours[side]
        neighbour.closing = True
        if not self.over:
            self.over = f"rank {neighbour.rank} of the ring is in a newer epoch"

    def receive(self, side: int, beat: LinkBeat, now_s: float) -> None:
        """Take a beat of a neighbour in this epoch."""
        self.alive(side, now_s)
        clock_s, neighbour = self._clock_s(now_s), self._neighbours[side]
        neighbour.here, neighbour.sent, neighbour.wants = True, beat.sent, beat.wants
        if beat.closing:
            neighbour.closing = True
            knew_silent = any(self._links.values())
            self._note(beat.links)
            if not knew_silent and any(link.silent for link in beat.links):
                self._take_stock(clock_s, self._timeout_s)
            why = f"rank {neighbour.rank} of the ring gave up"
            self._stop(f"{why}: {beat.why}" if beat.why else why, beat.why)

    def end(self, side: int, now_s: float) -> None:
        """Note that a connection to this neighbour ended or was refused."""
        clock_s, neighbour = self._clock_s(now_s), self._neighbours[side]
        if neighbour.ended_s is None:
            neighbour.ended_s = clock_s
        self._stop(f"the connection to rank {neighbour.rank} of the ring is lost", "")

    def give_up(self, why: str) -> None:
        """Give the epoch up for the reason ``why``, unless it is given up already."""
        self._stop(why, why)

    def _stop(self, why: str, cause: str) -> None:
        """Note why the epoch is over. The first reason stays, with one exception: the reason of a close message
        replaces that of an ended connection, because the message may be read after the end."""
        if not self.over or (cause and not self._cause):
            self.version += 1
            self.over, self._cause = why, cause

    def look(self, traffic: Traffic, now_s: float, data_age_s: float = math.inf) -> None:
        """Judge the links again after time has passed; to be called at least once between two beats.

        ``data_age_s``: for how long no data has reached this machine from the left neighbour. When it is read does not
        matter, for it may have lain in this machine's buffers since before the link fell silent.
        """
        came = data_age_s <= now_s - self._looked_s
        clock_s = self._clock_s(now_s)
        left = self._neighbours[LEFT]
        moved = (traffic.received, traffic.sent)
        if came and left.connected:
            left.received_s = clock_s
        owes = traffic.wants and left.sent > traffic.received and traffic.received == self._moved[0] and not came
        left.owed_s = None if not owes else clock_s if left.owed_s is None else left.owed_s
        busy = (traffic.wants or traffic.offers) and not traffic.wait_for_peers
        if not busy or moved != self._moved:
            self._stalled_s = clock_s
        self._moved = moved
        self._note_ended(clock_s)
        if not self.over:
            self._find_silent(clock_s)
        if not self.over:
            self._find_late(clock_s)
        if not self.over and busy:
            self._find_stalled(traffic, clock_s)

    def _clock_s(self, now_s: float) -> float:
        """The time without the gaps in which this process was stopped or starved: in those it could receive nothing."""
        gap_s = now_s - self._looked_s
        if gap_s > 2 * self._interval_s:
            self._absent_s += gap_s - self._interval_s
        self._looked_s = now_s
        return now_s - self._absent_s

    def _patience_s(self, neighbour: _Neighbour, clock_s: float) -> float:
        held = clock_s - self._began_s > 2 * self._timeout_s
        return self._timeout_s * (SUSPECT if neighbour.rank in self._suspects and not held else 1.0)

    def _find_silent(self, clock_s: float) -> None:
        caller = None if self._neighbours[LEFT].rank in self._suspects else self._neighbours[LEFT]
        asked = [neighbour for neighbour in self._neighbours if neighbour.connected or neighbour is not caller]
        silent = [
            neighbour for neighbour in asked if neighbour.silent_s(clock_s) >= self._patience_s(neighbour, clock_s)
        ]
        if silent:
            neighbour = silent[0]
            what = "nothing" if neighbour.owed_s is None else "none of the bytes that it has sent"
            patience_s = self._patience_s(neighbour, clock_s)
            self._take_stock(clock_s, patience_s)
            self.give_up(f"rank {neighbour.rank} of the ring is silent: {what} came for {patience_s:g} s")

    def _take_stock(self, clock_s: float, patience_s: float) -> None:
        """Note all links of this member that fell silent together with one that was found silent after ``patience_s``.

        Links that were never connected in this epoch have all been waited for since it began. If one of them was a
        suspect, for which half of the time-out is enough, half is enough for the others too."""
        for neighbour in self._neighbours:
            least_s = TOGETHER * (patience_s if neighbour.connected else min(patience_s, SUSPECT * self._timeout_s))
            if neighbour.silent_s(clock_s) >= least_s:
                self._note([Link(neighbour.rank, self._rank, silent=True)])

    def _find_late(self, clock_s: float) -> None:
        """Give up when a neighbour is not here after the time-out although nothing shows that it is silent. One that is
        connected and has been silent for long is waited for: in a moment it sends a message, or counts as silent, which
        is stronger evidence."""
        late = [neighbour for neighbour in self._neighbours if not neighbour.here]
        quiet = any(
            neighbour.connected and neighbour.silent_s(clock_s) >= TOGETHER * self._timeout_s for neighbour in late
        )
        if late and not quiet and clock_s - self._began_s >= self._timeout_s:
            self._note(Link(neighbour.rank, self._rank) for neighbour in late)
            names = " and ".join(dict.fromkeys(str(neighbour.rank) for neighbour in late))
            self.give_up(f"rank {names} of the ring did not come within {self._timeout_s:g} s")

    def _find_stalled(self, traffic: Traffic, clock_s: float) -> None:
        """Give up when no byte of a sum has moved for the time-out although all members have begun it."""
        stalled_s = clock_s - self._stalled_s
        if stalled_s < self._timeout_s:
            return
        left, right = self._neighbours
        late = [left] if traffic.wants and not left.wants and left.sent <= traffic.received else []
        if traffic.offers and not right.wants:
            late.append(right)
        if late or stalled_s >= HOLD_ON * self._timeout_s:
            self._note(Link(neighbour.rank, self._rank) for neighbour in late)
            names = " and ".join(str(neighbour.rank) for neighbour in late)
            who = f"rank {names} of the ring does not take part" if late else "the ring stands still"
            self.give_up(f"{who}: no byte moved for {stalled_s:.3g} s")

    def _note_ended(self, clock_s: float) -> None:
        for neighbour in self._neighbours:
            if neighbour.ended_s is not None and not neighbour.closing and clock_s - neighbour.ended_s >= ENDED_GRACE_S:
                self._note([Link(neighbour.rank, self._rank)])

    def _note(self, links: Iterable[Link]) -> None:
        for link in links:
            pair = (link.sender, link.receiver)
            if self._links.get(pair, False) < link.silent or pair not in self._links:
                self._links[pair] = link.silent
                self.version += 1

"""A replica communicator on plain TCP sockets: ring all-reduces that another thread can end at any moment.

gloo, which does the same inside a group, is not used, because its operations cannot be ended from outside: its
``abort()`` does nothing. Shutting its connections down from under it ends nearly all of them within a
millisecond, but 1 in 10 to 50 stays in a wait that only its own time-out ends, its event loop then spins on
messages whose buffers are gone, and late events or the end of the process abort the process. A rank that is
to survive other ranks cannot depend on that. Here every wait is one ``poll`` that also listens for
:meth:`RingBackend.cut`; nothing outlives its owner thread.

The owner thread moves the bytes of the sums and has no time-outs: the thread of
:mod:`spare_megatron.collectives.ring_links` makes and keeps the connections, listens to the neighbours, finds out who
is silent, and ends its waits.

Promises: what :class:`~spare_megatron.collectives.backend.Backend` says; a member has eight connections, whatever N.
"""

from __future__ import annotations

import select
import threading
from collections.abc import Callable

import torch

from spare_megatron.collectives.backend import BackendError, Seat
from spare_megatron.collectives.converting import ConvertedBucket
from spare_megatron.collectives.frames import DesyncError
from spare_megatron.collectives.link_monitor import LEFT, RIGHT
from spare_megatron.collectives.ring import SEGMENT_BYTES, Packing, RingStreams, Shares
from spare_megatron.collectives.ring_epoch import RingEpoch
from spare_megatron.collectives.ring_line import Line
from spare_megatron.collectives.ring_links import RingLinks
from spare_megatron.collectives.ring_native import NativeSum, Outcome, Way, compiled_ring
from spare_megatron.protocol.messages import Link

LOST = select.POLLERR | select.POLLHUP | select.POLLRDHUP


class RingBackend:
    """The :class:`~spare_megatron.collectives.backend.Backend` on TCP sockets."""

    reads_sources = True
    converts = True
    in_flight = 1
    forms_alone = True
    linger_s = 0.5
    """Longer than a failed reduction waits before it ends; in that time the evidence of other members still arrives."""

    def __init__(self, seat: Seat, links: RingLinks, timeout_s: float, suspects: frozenset[int] = frozenset()) -> None:
        """``suspects``: ranks whose link to this one was silent in the epoch before."""
        self._seat, self._links = seat, links
        self._epoch = RingEpoch(seat, timeout_s, suspects)
        self._traffic = self._epoch.traffic
        self._left: Line | None = None
        self._right: Line | None = None
        """While a sum is in hand."""
        self._scratch: torch.Tensor | None = None
        self._packing: Packing | None = None
        self._compiled = compiled_ring()

    @property
    def evidence(self) -> frozenset[Link]:
        return self._links.evidence(self._epoch)

    @property
    def over(self) -> str:
        return self._epoch.over

    @property
    def formed(self) -> bool:
        return self._epoch.formed

    def begin(self, tell: Callable[[], None]) -> None:
        self._epoch.tell = tell
        self._links.enter(self._epoch)

    def form(self) -> None:
        published = threading.Event()
        self.begin(published.set)
        published.wait()
        if self.over:
            raise BackendError(self.over)

    def sum(
        self,
        wire: torch.Tensor,
        wait_for_peers: bool,
        source: torch.Tensor | None = None,
        converted: ConvertedBucket | None = None,
        shares: Shares | None = None,
    ) -> None:
        if self._scratch is None:
            self._scratch = torch.empty(SEGMENT_BYTES, dtype=torch.uint8)
            self._packing = Packing.of(SEGMENT_BYTES // 8)
        self._left, self._right = self._links.use(self._epoch)
        self._traffic.wait_for_peers = wait_for_peers
        given = (wire, self._seat.rank, self._seat.size, self._scratch, source, converted)
        try:
            if self._compiled is None:
                self._sum(RingStreams(*given, shares=shares, packing=self._packing))
            else:
                self._run(NativeSum(*given, shares=shares, packing=self._packing, library=self._compiled))
        finally:
            self._traffic.wants = self._traffic.offers = False
            self._left = self._right = None
            self._links.rest(self._epoch)

    def _run(self, ring: NativeSum) -> None:
        assert self._left is not None
        assert self._right is not None
        left, right = (Way(line.sock.fileno(), line.frames) for line in (self._left, self._right))
        match outcome := ring.run(self._seat.epoch, left, right, self._epoch.alarm, self._traffic):
            case Outcome.DONE:
                return
            case Outcome.OVER:
                raise BackendError(self._epoch.over)
            case Outcome.OTHER_SUM:
                raise self._other_sum(ring.words(outcome))
            case Outcome.LOST_LEFT | Outcome.LOST_RIGHT:
                raise self._lost(LEFT if outcome is Outcome.LOST_LEFT else RIGHT, ring.words(outcome))
            case _:
                raise OSError(f"poll: {ring.words(outcome)}")

    def _sum(self, ring: RingStreams) -> None:
        while not ring.over:
            if self._epoch.over:  # no byte may leave any more
                raise BackendError(self._epoch.over)
            received = self._pull(ring)
            sent = self._push(ring)
            if not (received or sent or ring.over):
                self._await_neighbours(ring)

    def cut(self, why: str) -> None:
        self._links.cut(self._epoch, why)

    begin_sum = sum
    """It returns when the sum is complete."""

    def end_sum(self, more: Callable[[], bool]) -> bool:
        return True

    def halt(self) -> None:
        """Nothing is in flight outside :meth:`sum`."""

    def release(self) -> None:
        self._links.leave(self._epoch)

    def _pull(self, ring: RingStreams) -> bool:
        room = ring.incoming
        if room is None:
            return False
        assert self._left is not None
        try:
            number = self._left.receiver.receive(self._seat.epoch, room, in_parts=ring.in_parts)
        except BlockingIOError:
            return False
        except DesyncError as error:
            raise self._other_sum(error) from error
        except OSError as error:
            raise self._lost(LEFT, error) from error
        self._traffic.received += number
        ring.received(number)
        return True

    def _push(self, ring: RingStreams) -> bool:
        ready = ring.outgoing
        if ready is None:
            return False
        assert self._right is not None
        try:
            number = self._right.sender.send(self._seat.epoch, ready)
        except BlockingIOError:
            return False
        except OSError as error:
            raise self._lost(RIGHT, error) from error
        self._traffic.sent += number
        ring.sent(number)
        return True

    def _await_neighbours(self, ring: RingStreams) -> None:
        assert self._left is not None
        assert self._right is not None
        traffic, alarm = self._traffic, self._epoch.alarm
        traffic.wants, traffic.offers = ring.incoming is not None, ring.outgoing is not None
        poller = select.poll()
        poller.register(alarm, select.POLLIN)
        if traffic.wants and not self._left.receiver.ahead(self._seat.epoch):
            poller.register(self._left.sock, select.POLLIN)
        if not ring.all_sent:
            poller.register(self._right.sock, select.POLLRDHUP | (select.POLLOUT if traffic.offers else 0))
        happened = dict(poller.poll())
        if alarm in happened:
            raise BackendError(self._epoch.over)
        if happened.get(self._right.sock.fileno(), 0) & LOST:
            raise self._lost(RIGHT, "closed by the other side")

    def _other_sum(self, what: object) -> BackendError:
        return BackendError(f"rank {(self._seat.rank - 1) % self._seat.size} of the ring sums something else: {what}")

    def _lost(self, side: int, what: object) -> BackendError:
        """The error for a data connection that ended. Most often the neighbour has said why, on its control
        connection."""
        why = self._epoch.over
        self._links.lose(self._epoch, side)
        rank = (self._seat.rank + (1 if side == RIGHT else -1)) % self._seat.size
        return BackendError(why or f"the connection to rank {rank} of the ring is lost: {what}")

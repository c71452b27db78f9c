"""The connections of one rank to its ring neighbours, over all epochs, and the thread that listens on them.

A rank listens at one address as long as it lives. In each epoch it is connected twice to its right neighbour, which it
calls, and its left neighbour twice to it: once for data, which the owner of the epoch's communicator moves in frames
(:mod:`spare_megatron.collectives.frames`), and once for control, which belongs to the thread here. On those both sides
send the beats of :mod:`spare_megatron.collectives.link_monitor`, with their epoch, also while no sum is in hand. A
connection stays open over epochs as long as its two ends are neighbours, unless it was silent. When a member dies, its
two neighbours become neighbours of each other, and all other connections stay. Only the operations of an epoch end with
it.

The thread that receives a view (the control thread) enters the epoch itself. It sends the neighbours one beat of the
new epoch, which also says that the old one is over; the thread here learns of the epoch only afterwards. So if both
neighbours stay, a change of epochs wakes the thread here twice, for the beat of each neighbour, and no other thread.

A rank is also connected, by calls of the same kind, to its neighbours' other neighbours. One of these becomes its
neighbour when the rank between them is lost, and then no call is needed. The right neighbour's beats contain the
address at which the next rank after it listens. Such a connection is *ready*: beats keep it alive. If it ends or is
silent, that has no effect on the epoch, and a new one is made with a later beat.

A call may come from a neighbour that is already in a later epoch: the handshake is made, and the connection waits.
Beats carry the sender's epoch, so each side knows whether the other one is *here*. A member that gives up says so on
its control connections, and only the end of its process closes them.

May assume: the addresses are those of the members. Promises: only ``close`` ever waits; what does not prove itself
(:mod:`spare_megatron.collectives.handshake`) is not listened to, and costs at most STRANGERS_MAX descriptors.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time

from spare_megatron.collectives.backend import BackendError, Seat
from spare_megatron.collectives.beats import pack, unpack
from spare_megatron.collectives.handshake import (
    CONTROL,
    DATA,
    STRANGER_S,
    STRANGERS_MAX,
    Identity,
    Member,
    StrangerError,
)
from spare_megatron.collectives.interface import family_of
from spare_megatron.collectives.link_monitor import BEATS, ENDED_GRACE_S, LEFT, RIGHT, LinkBeat
from spare_megatron.collectives.listening import is_hopeless, listener_at
from spare_megatron.collectives.ring_epoch import RingEpoch
from spare_megatron.collectives.ring_line import Line
from spare_megatron.collectives.ring_lines import KINDS, RingLines
from spare_megatron.config.host_port import join_address, split_address
from spare_megatron.protocol.messages import Link
from spare_megatron.runtime.wakeups import ask_for_short_waits

ENTERS = "given up when the epoch was over"
LOOKS = 4
"""How many times between two beats the links are judged at most, while messages come."""
FRESH = 5
"""A ready connection whose last beat is older than so many is not used when a neighbour is lost."""


class RingLinks:
    """One rank's listener and connections. Thread-safe."""

    def __init__(self, me: Identity, host: str, timeout_s: float) -> None:
        """Listen at ``host``. Raises OSError where this machine does not have that address."""
        self._me, self._timeout_s = me, timeout_s
        self._listener = listener_at(host)
        port = self._listener.getsockname()[1]
        self.address = join_address(host, port)
        """Where other ranks call this one."""
        self.calls = 0
        """Number of calls that an epoch waited for; each makes two connections."""
        self.ready_calls = 0
        """Number of the others."""
        self._lock = threading.Lock()
        """Guards everything below."""
        self._lines = RingLines()
        self._present: RingEpoch | None = None
        """The epoch that was entered and is not left."""
        self._next: RingEpoch | None = None
        """The epoch to enter when the owner of the present one is out of its sum."""
        self._epoch = 0
        """The newest epoch that was entered."""
        self._blamed: frozenset[tuple[int, Member]] = frozenset()
        """(side, peer) whose connections are made anew with the next epoch."""
        self._ready: set[Line] = set()
        """Those that were ready when the newest epoch began."""
        self._seat: Seat | None = None
        """This member's place in it."""
        self._beat_s = self._look_s = 0.0
        """When the next beat is due, and the next look at the links."""
        self._published = 0
        """The version of the evidence in the last close message; 0 before there is one."""
        self._closing = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        for descriptor in (self._wake, self._listener.fileno()):
            self._lines.poll(descriptor)
        self._thread = threading.Thread(target=self._run, name="replicas-links", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------- who brings views, and the owner

    def enter(self, epoch: RingEpoch) -> None:
        """Give the present epoch up for ``epoch``. The new one begins at once, or as soon as the owner of the present
        one has left its sum. ``epoch.tell`` is called when the new epoch is formed, or is over before that."""
        with self._lock:
            now_s = time.monotonic()
            present = self._present
            if epoch.over or self._closing:
                epoch.give_up("this rank leaves")
            elif present is not None and present.in_use:
                self._next = epoch
                present.give_up(ENTERS)
                self._speak(now_s)
            else:
                if present is not None:
                    present.give_up(ENTERS)
                self._begin(epoch, now_s)
            changed = epoch.changed() or bool(epoch.over)  # the monitor of one that was cut before is still to be asked
        if changed:
            epoch.tell()

    def use(self, epoch: RingEpoch) -> tuple[Line, Line]:
        """The data connections to the left and the right neighbour, for the owner alone, until it calls :meth:`rest`.
        Raises BackendError when the epoch is over."""
        with self._lock:
            self._check(epoch)
            assert epoch.formed, "nothing can be summed before the neighbours are here"
            epoch.arm()
            return self._lines.pair(LEFT)[DATA], self._lines.pair(RIGHT)[DATA]

    def rest(self, epoch: RingEpoch) -> None:
        """Note that the owner is out of its sum."""
        with self._lock:
            epoch.in_use = False
            if self._closing:
                self._lines.close()
            entered = self._next if self._present is epoch and not self._closing else None
            if entered is not None:
                self._begin(entered, time.monotonic())
        if entered is not None and entered.changed():
            entered.tell()

    def leave(self, epoch: RingEpoch) -> None:
        """Note that the owner of ``epoch``, which is over, touches its connections no more."""
        with self._lock:
            if self._present is epoch:
                self._vacate()
                self._lines.take(None)
            epoch.free()

    def cut(self, epoch: RingEpoch, why: str) -> None:
        """Give ``epoch`` up and tell the neighbours. From any thread, and more than once."""
        with self._lock:
            epoch.give_up(why)
            if self._present is epoch:
                self._speak(time.monotonic())
            elif self._next is epoch:
                self._next = None
            changed = epoch.changed()
        if changed:
            epoch.tell()

    def lose(self, epoch: RingEpoch, side: int) -> None:
        """Note that the owner has found a data connection ended."""
        with self._lock:
            if self._present is epoch:
                if (line := self._lines.pair(side).get(DATA)) is not None:
                    self._lines.end(line)
                epoch.monitor.end(side, time.monotonic())
                self._speak(time.monotonic())
                self._stir()

    def evidence(self, epoch: RingEpoch) -> frozenset[Link]:
        """What is known about links in ``epoch``, in ranks; more may come until its owner leaves."""
        with self._lock:
            if self._present is epoch and epoch.over and not self._closing:
                self._review(epoch, time.monotonic())  # on a busy machine the thread may not have run since
            return epoch.evidence

    @property
    def ready(self) -> bool:
        """Whether this member is connected to the neighbours that it will have when one that it has is lost."""
        with self._lock:
            seat = None if self._present is None else self._present.seat
            if seat is None or seat.after is None:
                return seat is not None
            return sum(line.proven for line in self._lines.ready(seat)) == 2 * len(KINDS)

    def close(self) -> None:
        """End the thread and free everything. Called once, when no owner is inside any more or ever will be."""
        with self._lock:
            self._closing = True
            self._stir()
        self._thread.join()

    def _check(self, epoch: RingEpoch) -> None:
        if epoch.over or self._closing:
            raise BackendError(epoch.over or "this rank leaves")

    def _begin(self, epoch: RingEpoch, now_s: float) -> None:
        """Make ``epoch`` the present one, keep what connections it can use, and send beats on them. It must not
        happen earlier: a neighbour that receives a beat of this member and then the end of the connection treats that
        as a loss."""
        self._vacate()
        old, self._seat = self._seat, epoch.seat
        if old is not None and (old.after == epoch.seat.right or old.before == epoch.seat.left):
            self._weed(old, now_s - FRESH / BEATS * self._timeout_s, answered=True)
        left = self._epoch
        self._present, self._epoch, self._published, self._next = epoch, epoch.seat.epoch, 0, None
        self._lines.take(epoch.seat)
        epoch.begin(now_s)
        before = self._ready
        if self._blamed or not self._lines.settled:
            self._ready = self._lines.ready(epoch.seat)
            self._keep(epoch.seat, left)
            self._lines.settle()
        words = pack(self._epoch, LinkBeat(0, False))
        for line in self._lines:
            if line.proven and line.kind == CONTROL and not (line in before and line in self._ready):
                line.send(words)
        self._beat_s = now_s + self._timeout_s / BEATS
        self._call(now_s)
        self._greet(epoch, now_s)
        epoch.formed = self._formed(epoch)

    def _vacate(self) -> None:
        """Let the present epoch go."""
        if self._present is not None:
            seat = self._present.seat
            self._blamed |= {(side, seat.left if side == LEFT else seat.right) for side in self._present.blamed()}
            self._present.free()
            self._present = None

    def _keep(self, seat: Seat, left: int) -> None:
        """Close the connections that ``seat`` has no use for, with a close message of the epoch that was ``left``.

        Of the left neighbour's call one connection may be here and the other still on its way."""
        pairs = {side: self._lines.pair(side, proven=False) for side in (LEFT, RIGHT)}
        kept = {line for pair in pairs.values() if len(pair) == len(KINDS) for line in pair.values()}
        kept |= {line for line in pairs[LEFT].values() if self._lines.whole(line)} | self._ready
        for line in self._lines:
            early = line.side == LEFT and not line.ended and (not line.proven or line.epoch >= seat.epoch)
            blamed = (line.side, line.peer) in self._blamed
            if (blamed or line not in kept) and not early:
                if line.proven and line.kind == CONTROL:
                    line.send(pack(left, LinkBeat(0, False, closing=True)))
                self._forget(line)
        self._blamed = frozenset()

    def _call(self, now_s: float) -> None:
        """Call the right neighbour, unless that is done."""
        epoch = self._present
        if epoch is None or epoch.over or self._lines.called(epoch.seat.right):
            return
        self.calls += 1
        self._dial(epoch.seat.right, epoch.seat.right_at, epoch.seat.epoch, now_s)

    def _call_after(self, now_s: float) -> None:
        """Call the right neighbour's right neighbour, unless that is done, or it is not known yet where it listens."""
        epoch = self._present
        if epoch is None or epoch.over or not epoch.formed:
            return
        self._weed(epoch.seat, now_s - self._timeout_s)
        after, control = epoch.seat.after, self._lines.pair(RIGHT).get(CONTROL)
        if after is None or self._lines.called(after) or control is None or control.newest is None:
            return
        at, beat = control.newest
        if at == epoch.seat.epoch and beat.right_at:
            self.ready_calls += 1
            self._dial(after, beat.right_at, at, now_s)

    def _weed(self, seat: Seat, received_since_s: float, answered: bool = False) -> None:
        """Close calls that should be ready in ``seat`` and are not usable. Between two epochs also those that are not
        ``answered``: no member should have to wait for an answer."""
        for line in self._lines.useless(seat, received_since_s, answered):
            self._forget(line)

    def _dial(self, peer: Member, at: str, epoch: int, now_s: float) -> None:
        """Make the two connections of a call."""
        host, port = split_address(at)
        number = self.calls + self.ready_calls
        for kind in KINDS:
            line = Line(socket.socket(family_of(host), socket.SOCK_STREAM), self._me, now_s)
            self._lines.add(line)
            try:
                line.call((host, port), kind, epoch, number, peer)
            except OSError:
                self._end(line, now_s, refused=True)
                return
            self._lines.refresh(line)

    # --------------------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        ask_for_short_waits()
        try:
            while not self._closing:
                self._round()
        finally:  # whatever ended it, nobody may wait for it
            with self._lock:
                self._closing = True
                left = [epoch for epoch in (self._present, self._next) if epoch is not None]
                used = [line for line in self._lines if line.kind == DATA and any(epoch.in_use for epoch in left)]
                for epoch in left:
                    epoch.give_up("nobody listens to the neighbours any more")
                self._lines.close(used)
                self._listener.close()
                os.close(self._wake)
                self._wake = -1
            for epoch in left:
                epoch.tell()

    def _round(self) -> None:
        happened = self._lines.wait(self._wait_s())
        now_s = time.monotonic()
        with self._lock:
            for fd, events in happened:
                if fd == self._wake:
                    os.eventfd_read(self._wake)
                elif fd == self._listener.fileno():
                    self._accept(now_s)
                elif (line := self._lines.polled(fd)) is not None:
                    self._attend(line, events, now_s)
            if happened:
                self._receive_others({fd for fd, _ in happened}, now_s)
            epoch = self._present
            if epoch is not None:
                self._review(epoch, now_s)
            self._speak(now_s)
            self._turn_away(now_s)
            changed = epoch is not None and epoch.changed()
        if changed and epoch is not None:
            epoch.tell()

    def _receive_others(self, received: set[int], now_s: float) -> None:
        """Take what came from a neighbour while this thread waited for its turn: it need not be woken for it again."""
        for side in (LEFT, RIGHT):
            line = self._lines.pair(side).get(CONTROL)
            if line is not None and line.sock.fileno() not in received:
                self._take(line, now_s)

    def _wait_s(self) -> float:
        """Until the next beat, or the next look at an epoch that is over: more may be found out about its end."""
        epoch, until_beat_s = self._present, self._beat_s - time.monotonic()
        if epoch is not None and epoch.over:
            return ENDED_GRACE_S / 2
        return min(max(until_beat_s, 0.0), self._timeout_s / BEATS)

    def _review(self, epoch: RingEpoch, now_s: float) -> None:
        """Judge the links again, where that is due, and see how the epoch stands."""
        if epoch.over or now_s >= self._look_s:
            self._look_s = now_s + self._timeout_s / BEATS / LOOKS
            left = self._lines.pair(LEFT).get(DATA)
            epoch.look(now_s, left.sock if left is not None else None)
        if epoch.over:
            epoch.sound()
        elif not epoch.formed:
            epoch.formed = self._formed(epoch)

    def _accept(self, now_s: float) -> None:
        """Accept all waiting connections and speak first. What a connection has already sent is read at once: each time
        that this thread waits beside one that computes, it may be a while until it runs again."""
        with contextlib.suppress(OSError):
            while True:
                sock = self._listener.accept()[0]
                if is_hopeless(sock):
                    sock.close()
                    continue
                line = Line(sock, self._me, now_s)
                self._lines.add(line)
                line.greet()
                self._attend(line, select.EPOLLIN, now_s)

    def _attend(self, line: Line, events: int, now_s: float) -> None:
        """Do what can be done on a connection on which something happened."""
        if line.proven:
            self._take(line, now_s)
            return
        if line.calling:
            if not events & ~select.EPOLLIN:
                return  # of a connection that had its descriptor before
            if line.failed():
                self._end(line, now_s, refused=True)
                return
            line.send(b"")
            line.calling = bool(line.outbox)
            if line.calling:
                return  # of a connection that had its descriptor before
        try:
            open_still = line.read()
        except StrangerError:
            open_still = False
        self._lines.refresh(line)
        if line.proven:
            if not self._wanted(line):
                self._forget(line)
                return
            line.received_s = now_s
            if line.side == LEFT and not self._is_neighbours(line):  # a neighbour ends its older call itself
                for one in self._lines.older(line):
                    self._forget(one)
            self._send(line)
        if self._present is not None:
            self._greet(self._present, now_s)
        self._listen(line, now_s)
        if not open_still:
            self._end(line, now_s, refused=False)

    def _take(self, line: Line, now_s: float) -> None:
        """Take the beats that have come on a connection that has proved itself, or its end."""
        open_still = line.read()
        if line.inbox:
            line.received_s = now_s
            self._listen(line, now_s)
        if not open_still:
            self._end(line, now_s, refused=False)

    def _wanted(self, line: Line) -> bool:
        """Whether a connection whose caller has just proved itself has a use, now or in a later epoch."""
        epoch = self._present
        if line.side == RIGHT:
            return True
        awaited = epoch is None or line.epoch > epoch.seat.epoch or line.peer in (epoch.seat.left, epoch.seat.before)
        return awaited and self._lines.whole(line)

    def _listen(self, line: Line, now_s: float) -> None:
        """Take the beats that have come on a control connection."""
        if line.kind != CONTROL or not line.proven:
            return
        while (message := unpack(line.inbox)) is not None:
            line.newest = message
            epoch, beat = message
            present = self._present
            if present is None or self._lines.pair(line.side).get(CONTROL) is not line:
                continue
            if epoch == present.seat.epoch:
                present.monitor.receive(line.side, beat, now_s)
            elif epoch > present.seat.epoch:
                present.monitor.move_on(line.side, now_s)
            else:
                present.monitor.alive(line.side, now_s)

    def _greet(self, epoch: RingEpoch, now_s: float) -> None:
        """Note which neighbours have sent messages, and what these said of this epoch before this member was in it."""
        for side in (LEFT, RIGHT):
            pair = self._lines.pair(side, proven=False)
            if len(pair) == len(KINDS) and pair[DATA].received and pair[CONTROL].received:
                epoch.monitor.connect(side, now_s)
            control = self._lines.pair(side).get(CONTROL)
            if control is not None and control.newest is not None and not epoch.monitor.here(side):
                at, beat = control.newest
                if at == epoch.seat.epoch:
                    epoch.monitor.receive(side, beat, now_s)

    def _formed(self, epoch: RingEpoch) -> bool:
        if not (epoch.monitor.here(LEFT) and epoch.monitor.here(RIGHT)):
            return False
        return all(len(self._lines.pair(side)) == len(KINDS) for side in (LEFT, RIGHT))

    def _speak(self, now_s: float) -> None:
        """Send a beat when it is due; once this member gives up, a close message, and another when there is more
        evidence."""
        epoch = self._present
        over = epoch is not None and bool(epoch.over)
        due = now_s >= self._beat_s
        news = epoch is not None and over and self._published != epoch.version
        if not due and not news:
            return
        if due:
            self._beat_s = now_s + self._timeout_s / BEATS
            self._call(now_s)
            self._call_after(now_s)
        if news and epoch is not None:
            self._published = epoch.version
        for line in self._lines:
            if line.proven and (self._is_neighbours(line) if news else not line.outbox):
                self._send(line)

    def _send(self, line: Line) -> None:
        if line.kind == CONTROL:
            line.send(pack(self._epoch, self._beat_for(line)))

    def _beat_for(self, line: Line) -> LinkBeat:
        epoch = self._present
        if epoch is None or self._lines.pair(line.side).get(CONTROL) is not line:
            return LinkBeat(0, False)
        beat = epoch.monitor.beat(line.side, epoch.traffic)
        return beat if line.side == RIGHT else beat._replace(right_at=epoch.seat.right_at)

    def _end(self, line: Line, now_s: float, refused: bool) -> None:
        """Forget a connection that has ended. Of a neighbour's that is evidence where it was refused, or the other side
        is here; before that the caller calls anew."""
        epoch = self._present
        known = self._lines.pair(line.side).get(line.kind) is line
        refused = refused and self._is_neighbours(line)
        if epoch is not None and (refused or (known and epoch.monitor.here(line.side))):
            epoch.monitor.end(line.side, now_s)
        alone = line.side == LEFT and (not line.proven or self._is_neighbours(line))  # the owner may read the other
        for one in [line] if alone else self._lines.of_one_call(line):
            self._forget(one)

    def _is_neighbours(self, line: Line) -> bool:
        """Whether a connection is one to or from a neighbour in the present epoch."""
        epoch = self._present
        return epoch is not None and line.peer == (epoch.seat.left if line.side == LEFT else epoch.seat.right)

    def _forget(self, line: Line) -> None:
        """Close a connection, unless the owner may be using it."""
        epoch = self._present
        used = epoch is not None and epoch.formed and line.kind == DATA and line.proven
        if used and self._is_neighbours(line) and line.epoch <= self._epoch:
            self._lines.end(line)
        else:
            self._lines.drop(line)

    def _turn_away(self, now_s: float) -> None:
        """Close accepted connections that take too long to prove themselves, or are too many."""
        if self._lines.settled:
            return
        strangers = [line for line in self._lines if not line.proven and line.side == LEFT]
        for number, line in enumerate(strangers):
            if now_s - line.born_s > STRANGER_S or number < len(strangers) - STRANGERS_MAX:
                self._forget(line)

    def _stir(self) -> None:
        """Wake the thread, so that it looks at everything again."""
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

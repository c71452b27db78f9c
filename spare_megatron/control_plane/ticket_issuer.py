"""The leader's side of the ticket stream: turns the plan of its group into entries. Pure: no I/O, no clock.

The plan is a queue of tickets. They are issued at once, or, where the group may be asked to give pieces back, at most a
fixed depth ahead of what the first stage has begun: what has no ticket yet can be given back. Where the pipeline takes
in tickets while it runs, a pause is written only when the queue is empty and the first stage has begun the last ticket,
so whatever a failure adds until then is computed without draining the pipeline; else each addition is followed by a
pause, as megatron-core's own schedules need it. Behind a pause the stream is closed for the newest epoch.

Promises: a Close of epoch e comes after all tickets of the plan of e; the newest epoch of a member is closed at last,
if the first stage begins what it receives, the coordinator takes in what is given back, and shards are opened or cannot
be; a ticket of a shard that is not open, and those behind it, wait; a piece that was given back gets no ticket before a
view has it and no ask; a step that is left half-way (a joiner that is sent back, the end of the job) ends with a pause,
so no rank waits between a forward pass and its backward pass for a ticket that never comes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from spare_megatron.protocol.audits import selected
from spare_megatron.protocol.messages import GaveBack, JobSpec
from spare_megatron.protocol.rebalance import first_given
from spare_megatron.protocol.tickets import Begin, Close, Pause, Ticket, TicketEntry, TicketStream
from spare_megatron.protocol.view import View

STEPS_KEPT = 4
"""Steps of which the entries are kept for a rank that connects again."""


class TicketIssuer:
    """Writes the ticket stream of one group."""

    def __init__(self, spec: JobSpec, late_pauses: bool, depth: int = 0) -> None:
        """``late_pauses``: whether the pipeline takes in tickets while it runs. ``depth``: how many tickets at most are
        ahead of what the first stage has begun; 0: all that there are."""
        self._spec, self._late, self._depth = spec, late_pauses, depth
        self.kept = TicketStream()
        """The entries of the last steps."""
        self._new: list[TicketEntry] = []
        """Those that are written now."""
        self._begins: list[int] = []
        """Numbers of the Begins that are kept."""
        self._at: tuple[int, int] | None = None
        """(step, offer) of the present Begin; None while the group has no part in a step."""
        self._offer = 0
        self._queue: deque[Ticket] = deque()
        """The plan's tickets that are not issued, without those given back."""
        self._issued: set[Ticket] = set()
        """Those of the present Begin that are."""
        self._ahead: deque[int] = deque()
        """The numbers of issued tickets that the first stage may not have begun."""
        self._segment = 0
        """The segment of the newest ticket."""
        self._begun = -1
        """Number of the newest ticket that the first stage has begun."""
        self._open = False
        """Whether there is a ticket behind the last pause."""
        self._epoch = self._closed = 0
        """The newest epoch, and the newest one that is closed, of the present Begin."""
        self._shut = frozenset[int]()
        """The adopted shards that are not open on all ranks."""
        self.answer: GaveBack | None = None
        """What the group has given back and no view has taken in; None where it is asked for nothing."""

    @property
    def runs_out(self) -> tuple[int, int, bool] | None:
        """(step, epoch, whether all its tickets are issued), once the first stage has begun half of them; None before,
        and where some were given back and no view has taken that in."""
        step, begun = self.begun_of_step
        if self._at is None or self._holds or len(self._queue) + len(self._ahead) > begun:
            return None
        return step, self._epoch, not self._queue

    @property
    def begun_of_step(self) -> tuple[int, int]:
        """(step, how many of its tickets the first stage has begun)."""
        return (self._at[0] if self._at else 0), len(self._issued) - len(self._ahead)

    @property
    def is_ahead(self) -> bool:
        """Whether there is an issued ticket that the first stage has not begun."""
        return bool(self._ahead)

    def reported(self, view: View, over: bool = False, shut: frozenset[int] = frozenset()) -> TicketStream:
        """The entries that follow from the newest view; ``over``: the job is, for this group; ``shut``: the shards that
        are not open."""
        self._shut = shut
        self._offer = self._offer if view.offer is None else view.offer.number
        part = view.is_member and not view.leave and not over
        at = (view.step, self._offer) if part else None
        if at != self._at:
            self._begin(at)
        if at is None:
            self.answer = None
        else:
            plan = (ticket for number in range(len(view.segments)) for ticket in self._tickets(view, number))
            self._queue = deque(ticket for ticket in plan if ticket not in self._issued)
            self._give_back(view)
            self._epoch = view.epoch
            self._settle()
        return self._reported()

    def opened(self, shut: frozenset[int]) -> TicketStream:
        """The entries that follow when only the shards ``shut`` are not open any more."""
        self._shut = shut
        if self._at is not None:
            self._settle()
        return self._reported()

    def begun(self, number: int) -> TicketStream:
        """The entries that follow when the first stage has begun the ticket of this number."""
        self._begun = max(self._begun, number)
        if self._at is not None:
            self._settle()
        return self._reported()

    def _begin(self, at: tuple[int, int] | None) -> None:
        if self._open:
            self._new.append(Pause())
        self._at, self._closed, self._open = at, 0, False
        self._issued, self._segment = set(), 0
        self._ahead.clear()
        if at is not None:
            self._begins = [*self._begins, self._end][-STEPS_KEPT:]
            self._new.append(Begin(*at))

    def _tickets(self, view: View, segment: int) -> Iterator[Ticket]:
        """The audits of a segment, then its pieces: a run ends with a gradient that is summed."""
        pieces = view.segments[segment]
        compared = frozenset(selected(self._spec, view.step, pieces))
        for piece in view.audits_of(segment):
            yield Ticket(piece, segment, audited=True)
        for piece in pieces:
            yield Ticket(piece, segment, compared=piece in compared)

    def _give_back(self, view: View) -> None:
        """Answer the view's ask, once, with tickets of the queue; not with those that are compared with what an auditor
        computes, nor of a shard that is not open: the group may have to say that it cannot be. What was answered is
        kept back while the view has the ask."""
        if view.ask is None:
            self.answer = None
            return
        if self.answer is None or (self.answer.step, self.answer.ask) != (view.step, view.ask):
            free = [t for t in self._queue if not (t.audited or t.compared or self._shard(t) in self._shut)]
            segments = ([t.piece for t in free if t.segment == number] for number in range(len(view.segments)))
            pieces = first_given(segments, self._spec.pieces_per_shard)[: view.ask.pieces]
            self.answer = GaveBack(view.group, view.incarnation, view.step, view.ask, tuple(pieces))
        given = frozenset(self.answer.pieces)
        self._queue = deque(ticket for ticket in self._queue if ticket.audited or ticket.piece not in given)

    def _settle(self) -> None:
        """Issue what may be issued, then pause and close where nothing is left."""
        while self._ahead and self._ahead[0] <= self._begun:
            self._ahead.popleft()
        while self._queue and not self._waits and (not self._depth or len(self._ahead) < self._depth):
            ticket = self._queue.popleft()
            if ticket.segment != self._segment and not self._late:
                self._pause()
            self._ahead.append(self._end)
            self._issued.add(ticket)
            self._new.append(ticket)
            self._open, self._segment = True, ticket.segment
        if self._queue and not self._waits:
            return
        if not self._late or not self._ahead:
            self._pause()
        if self._queue:
            return
        if not self._open and not self._holds and self._closed < self._epoch:
            self._new.append(Close(self._epoch))
            self._closed = self._epoch

    @property
    def _waits(self) -> bool:
        """Whether the next ticket waits for its shard."""
        return bool(self._queue) and self._shard(self._queue[0]) in self._shut

    def _shard(self, ticket: Ticket) -> int:
        return ticket.piece // self._spec.pieces_per_shard

    @property
    def _holds(self) -> bool:
        """Whether pieces of the plan were given back and no view has taken that in."""
        return self.answer is not None and bool(self.answer.pieces)

    def _pause(self) -> None:
        if self._open:
            self._new.append(Pause())
            self._open = False

    @property
    def _end(self) -> int:
        """The number of the entry that is written next."""
        return self.kept.end + len(self._new)

    def _reported(self) -> TicketStream:
        """What is written now, which is kept."""
        reported, self._new = TicketStream(self.kept.end, tuple(self._new)), []
        whole = self.kept.joined(reported)
        self.kept = whole.since(self._begins[0]) if self._begins else whole
        return reported

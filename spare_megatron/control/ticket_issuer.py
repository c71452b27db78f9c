"""The leader's side of the ticket stream: turns the plan of its group into words. Pure: no I/O, no clock.

A plan only grows inside a step. What is added to it becomes tickets at once. Where the group's pipeline takes in
tickets while it runs, a pause is written only when the first stage has begun the last ticket, so whatever a failure
adds until then is computed without draining the pipeline; else each addition is followed by a pause, as megatron-core's
own schedules need it. Behind a pause the stream is closed for the newest epoch.

Promises: a Close of epoch e comes after all tickets of the plan of e; the newest epoch of a member is closed at last,
if the first stage begins what it is told; a step that is left half-way (a joiner that is sent back, the end of the job)
ends with a pause, so no rank waits between a forward pass and its backward pass for a ticket that never comes.
"""

from __future__ import annotations

from collections.abc import Iterator

from spare_megatron.controller.audits import selected
from spare_megatron.controller.messages import JobSpec
from spare_megatron.controller.tickets import Begin, Close, Pause, Ticket, TicketStream, Word
from spare_megatron.controller.view import View

STEPS_KEPT = 4
"""Steps of which the words are kept for a rank that connects again."""


class TicketIssuer:
    """Writes the ticket stream of one group."""

    def __init__(self, spec: JobSpec, late_pauses: bool) -> None:
        """``late_pauses``: whether the pipeline takes in tickets while it runs."""
        self._spec, self._late = spec, late_pauses
        self.kept = TicketStream()
        """The words of the last steps."""
        self._new: list[Word] = []
        """Those that are written now."""
        self._begins: list[int] = []
        """Numbers of the Begins that are kept."""
        self._at: tuple[int, int] | None = None
        """(step, offer) of the present Begin; None while the group has no part in a step."""
        self._offer = 0
        self._segments = 0
        """Segments of the plan that have their tickets."""
        self._last = -1
        """Number of the newest ticket."""
        self._begun = -1
        """Number of the newest ticket that the first stage has begun."""
        self._open = False
        """Whether there is a ticket behind the last pause."""
        self._epoch = self._closed = 0
        """The newest epoch, and the newest one that is closed, of the present Begin."""

    def told(self, view: View, over: bool = False) -> TicketStream:
        """The words that follow from the newest view; ``over``: the job is, for this group."""
        self._offer = self._offer if view.offer is None else view.offer.number
        part = view.is_member and not view.leave and not over
        at = (view.step, self._offer) if part else None
        if at != self._at:
            self._begin(at)
        if at is not None:
            for number in range(self._segments, len(view.segments)):
                for ticket in self._tickets(view, number):
                    self._last, self._open = self._end, True
                    self._new.append(ticket)
                self._pause()
            self._segments, self._epoch = len(view.segments), view.epoch
            self._settle()
        return self._said()

    def begun(self, number: int) -> TicketStream:
        """The words that follow when the first stage has begun the ticket of this number."""
        self._begun = max(self._begun, number)
        if self._at is not None:
            self._settle()
        return self._said()

    def _begin(self, at: tuple[int, int] | None) -> None:
        if self._open:
            self._new.append(Pause())
        self._at, self._segments, self._closed, self._open = at, 0, 0, False
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

    def _settle(self) -> None:
        self._pause()
        if not self._open and self._closed < self._epoch:
            self._new.append(Close(self._epoch))
            self._closed = self._epoch

    def _pause(self) -> None:
        if self._open and (self._begun >= self._last or not self._late):
            self._new.append(Pause())
            self._open = False

    @property
    def _end(self) -> int:
        """The number of the word that is written next."""
        return self.kept.end + len(self._new)

    def _said(self) -> TicketStream:
        """What is written now, which is kept."""
        said, self._new = TicketStream(self.kept.end, tuple(self._new)), []
        whole = self.kept.joined(said)
        self.kept = whole.since(self._begins[0]) if self._begins else whole
        return said

"""Determines which gradients of a run are final while its last backward pass is still going on. Pure.

A parameter's accumulator is final when the last backward pass of its chunk has added to it as often as a pass does.
That number (one; more where a layer is recomputed in parts, or a weight is used again) is counted in earlier passes. A
parameter that no earlier pass had, or that the last pass leaves out (an expert without tokens), is final when the pass
is over. So the reports depend on the schedule's order and on counts alone.

Parameters are numbered in the order in which their gradients leave. Reports are about a prefix of that order: a
parameter is reported only after all before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """One parameter's place: it ends at element ``stop`` of flat tensor ``tensor``, and belongs to ``chunk``."""

    tensor: int
    stop: int
    chunk: int


class Arrivals:
    """Counts how often each backward pass adds to each accumulator of one rank."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = spans
        chunks = {span.chunk for span in spans}
        self._of_chunk = {chunk: [n for n, span in enumerate(spans) if span.chunk == chunk] for chunk in chunks}
        self._usual = [0] * len(spans)
        """The largest number of additions to each parameter in one pass so far."""
        self._counts = [0] * len(spans)
        """The number of additions to each parameter in the present pass of its chunk."""
        self._final = [False] * len(spans)
        self._reported = 0
        self._last: set[int] = set()
        """Chunks whose last pass of this run has begun."""
        self._ready: Callable[[int, int], None] | None = None
        self._late: Callable[[int], None] | None = None

    def watch(self, ready: Callable[[int, int], None], late: Callable[[int], None]) -> None:
        """Report on the run that begins.

        Args:
            ready: ``ready(tensor, stop)`` is called when the elements of ``tensor`` before ``stop``, and all tensors
                before it, are final.
            late: ``late(number)`` is called when parameter ``number`` was reported final, and was added to again.
        """
        self._ready, self._late = ready, late
        self._final = [False] * len(self._spans)
        self._reported = 0
        self._last = set()

    def unwatch(self) -> None:
        """End the reports, because the run is over or they are not wanted any more. Passes are still counted."""
        self._ready = self._late = None
        self._last = set()

    def pass_begins(self, chunk: int, *, last: bool) -> None:
        """Note that a backward pass of ``chunk`` begins; ``last`` when it is the chunk's last pass in this run."""
        for number in self._of_chunk.get(chunk, ()):
            self._counts[number] = 0
        if last and self._ready is not None:
            self._last.add(chunk)

    def arrived(self, number: int) -> None:
        """Note that a gradient was added to the accumulator of parameter ``number``."""
        self._counts[number] += 1
        if self._spans[number].chunk not in self._last:
            return
        if number < self._reported:
            assert self._late is not None, "nothing is sent"
            self._late(number)
        elif self._counts[number] == self._usual[number]:
            self._final[number] = True
            self._tell()

    def pass_ends(self, chunk: int) -> None:
        """Note that the backward pass of ``chunk`` is over."""
        for number in self._of_chunk.get(chunk, ()):
            self._usual[number] = max(self._usual[number], self._counts[number])
            if chunk in self._last:
                self._final[number] = True
        if chunk in self._last:
            self._tell()

    def _tell(self) -> None:
        before = self._reported
        while self._reported < len(self._spans) and self._final[self._reported]:
            self._reported += 1
        if self._reported > before:
            assert self._ready is not None, "nothing is sent"
            span = self._spans[self._reported - 1]
            self._ready(span.tensor, span.stop)

"""Which gradients of a run are final while its last backward pass is still going on. Pure.

A parameter's accumulator is final once the last backward pass of its chunk has added to it as often as a pass does.
How often that is (once; more where a layer is recomputed in parts, or a weight is used again) is counted in the passes
before; until a parameter was seen in one, and where a pass leaves it out (an expert without tokens), it is final when
the pass is over. So what is told to be final follows from the schedule's order and from counts alone.

Parameters are numbered in the order in which their gradients travel: :attr:`Arrivals.ready` tells of a prefix, never of
a parameter before those in front of it.
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
    """Counts what is added to the accumulators of one rank, pass after pass."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = spans
        chunks = {span.chunk for span in spans}
        self._of_chunk = {chunk: [n for n, span in enumerate(spans) if span.chunk == chunk] for chunk in chunks}
        self._usual = [0] * len(spans)
        """The most additions that were seen in one pass."""
        self._counts = [0] * len(spans)
        """Of the pass that its chunk is in."""
        self._final = [False] * len(spans)
        self._told = 0
        self._last: set[int] = set()
        """Chunks in the last pass of this run."""
        self._ready: Callable[[int, int], None] | None = None
        self._late: Callable[[int], None] | None = None

    def watch(self, ready: Callable[[int, int], None], late: Callable[[int], None]) -> None:
        """Tell of the run that begins.

        Args:
            ready: ``ready(tensor, stop)``: elements of ``tensor`` before ``stop`` and all tensors before it are final.
            late: ``late(number)``: parameter ``number`` was told to be final, and was not.
        """
        self._ready, self._late = ready, late
        self._final = [False] * len(self._spans)
        self._told = 0
        self._last = set()

    def unwatch(self) -> None:
        """The run is over, or nobody wants to know any more. Passes are counted all the same."""
        self._ready = self._late = None
        self._last = set()

    def pass_begins(self, chunk: int, *, last: bool) -> None:
        """A backward pass of ``chunk``; ``last``: no other one follows in this run."""
        for number in self._of_chunk.get(chunk, ()):
            self._counts[number] = 0
        if last and self._ready is not None:
            self._last.add(chunk)

    def arrived(self, number: int) -> None:
        """A gradient was added to the accumulator of parameter ``number``."""
        self._counts[number] += 1
        if self._spans[number].chunk not in self._last:
            return
        if number < self._told:
            assert self._late is not None, "nobody is told"
            self._late(number)
        elif self._counts[number] == self._usual[number]:
            self._final[number] = True
            self._tell()

    def pass_ends(self, chunk: int) -> None:
        """The backward pass of ``chunk`` is over."""
        for number in self._of_chunk.get(chunk, ()):
            self._usual[number] = max(self._usual[number], self._counts[number])
            if chunk in self._last:
                self._final[number] = True
        if chunk in self._last:
            self._tell()

    def _tell(self) -> None:
        before = self._told
        while self._told < len(self._spans) and self._final[self._told]:
            self._told += 1
        if self._told > before:
            assert self._ready is not None, "nobody is told"
            span = self._spans[self._told - 1]
            self._ready(span.tensor, span.stop)

"""How long the parts of a rank's start take: one line in its log."""

from __future__ import annotations

from spare_megatron.runtime.steady_clock import process_age_s


class StartTimes:
    """The parts of a start, each of which begins where the one before it ends; the first one with the process."""

    def __init__(self) -> None:
        self._parts: list[tuple[str, float]] = []

    def done(self, part: str) -> None:
        """``part`` has ended."""
        self._parts.append((part, process_age_s() - sum(seconds for _, seconds in self._parts)))

    @property
    def sentence(self) -> str:
        """Such as 'this rank has started in 9.1 s: imports and flags 6.0, world 1.0, model 1.1, data 1.0'."""
        parts = ", ".join(f"{part} {seconds:.2f}" for part, seconds in self._parts)
        return f"this rank has started in {sum(seconds for _, seconds in self._parts):.2f} s: {parts}"

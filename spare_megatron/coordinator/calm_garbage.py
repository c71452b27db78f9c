"""Collects garbage when the coordinator has nothing to decide.

CPython looks for dead cycles of objects whenever some hundred more objects live than before: in a job of a thousand
groups that is among a thousand votes, or between the views of an epoch. These searches took a third of the time from
a death to its last view (benchmarks/thousand_groups.py), and the complete ones 0.1 s each. Few cycles arise here, some
fifty in 20 s, so nothing is lost where one search waits for a pause.
"""

from __future__ import annotations

import gc
from types import TracebackType

CALM_S = 0.2
"""So long nothing was decided: no votes and no views are under way."""
AGAIN_S = 10.0
"""Time between two collections."""
LATEST_S = 60.0
"""The longest time without one, however busy the job is."""


class CalmGarbage:
    """While it is entered, Python collects nothing by itself; :meth:`look` does."""

    def __init__(self, now_s: float) -> None:
        self._collected_s = self._busy_s = now_s
        self._was_enabled = False

    def __enter__(self) -> CalmGarbage:
        self._was_enabled = gc.isenabled()
        gc.disable()
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        if self._was_enabled:
            gc.enable()

    def busy(self, now_s: float) -> None:
        """Something is decided."""
        self._busy_s = now_s

    def look(self, now_s: float) -> None:
        """Collect if it is time to."""
        calm = now_s - self._busy_s >= CALM_S
        if now_s - self._collected_s >= (AGAIN_S if calm else LATEST_S):
            gc.collect()
            self._collected_s = now_s

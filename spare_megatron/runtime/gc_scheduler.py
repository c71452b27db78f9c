"""Collects garbage while a process has little to do, instead of when Python's collector would.

The collector looks for dead cycles of objects whenever some hundred more live than before: in a coordinator of a
thousand groups that is among a thousand votes, or between the views of an epoch. Its searches took a third of the time
from a death to the last view, and complete ones 0.1 s each (benchmarks/thousand_groups.py). Few cycles arise here, some
fifty in 20 s, so nothing is lost where one search waits for a pause. What a process has imported is never looked
through.
"""

from __future__ import annotations

import asyncio
import gc
import time

LOOK_S = 0.2
"""How often the process looks how much it has had to do, once a collection may be due."""
IDLE = 0.25
"""It has little to do where it used less than this share of a core since it looked last."""
AGAIN_S = 30.0
"""Time between two collections."""
LATEST_S = 120.0
"""The longest time without one, however much there is to do."""


class Pauses:
    """Says when to collect."""

    def __init__(self, now_s: float, cpu_s: float) -> None:
        """``cpu_s`` is the CPU time that the process has used so far."""
        self._collected_s = self._looked_s = now_s
        self._cpu_s = cpu_s

    def look(self, now_s: float, cpu_s: float) -> None:
        """Begin to look at how much there is to do."""
        self._looked_s, self._cpu_s = now_s, cpu_s

    def is_due(self, now_s: float, cpu_s: float) -> bool:
        """Whether to collect now; to be asked :data:`LOOK_S` after the last look, and not sooner than :data:`AGAIN_S`
        after the last collection."""
        idle = cpu_s - self._cpu_s < IDLE * (now_s - self._looked_s)
        self.look(now_s, cpu_s)
        due = now_s - self._collected_s >= (AGAIN_S if idle else LATEST_S)
        if due:
            self._collected_s = now_s
        return due


async def collect_in_pauses() -> None:
    """Until this is cancelled Python collects nothing by itself, and all garbage is collected in pauses. What is frozen
    stays so: a collection would copy the memory that the forks of a preloaded parent share. (Whether a parent has
    frozen anything is not asked: to count it takes a fork 30 ms.)"""
    was_on = gc.isenabled()
    gc.disable()
    gc.freeze()
    pauses = Pauses(time.monotonic(), time.process_time())
    try:
        while True:
            await asyncio.sleep(AGAIN_S)
            pauses.look(time.monotonic(), time.process_time())
            due = False
            while not due:
                await asyncio.sleep(LOOK_S)
                due = pauses.is_due(time.monotonic(), time.process_time())
            gc.collect()
    finally:
        if was_on:
            gc.enable()

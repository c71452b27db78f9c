"""Seconds since 1970 that no change of the wall clock makes jump: for the times in a job's records.

The wall clock is read once, at the first start of a job's coordinator on a host; from then on the time since the host's
boot counts, which nobody sets and which goes on while the host sleeps. So the difference between two records is what
has passed, whatever becomes of the wall clock. A coordinator that is started again on the same boot goes on with the
same reading (``clock.json``). On another host, or after a boot, the wall clock is read anew, and never taken to be
before what the job has recorded.

Promises: the time never goes back within a process.
"""

from __future__ import annotations

import math
import os
import time
from contextlib import suppress
from pathlib import Path

from spare_megatron.runtime.orphan_reaper import start_time
from spare_megatron.runtime.run_directory import RunDirectory, glance, write_json

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def boot_s() -> float:
    """Seconds since this host's boot, with the time for which it slept."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def process_age_s(pid: int = 0) -> float:
    """How long ago a process began, this one without ``pid``; 0 where the system does not say."""
    ticks = start_time(pid or os.getpid())
    return max(0.0, boot_s() - int(ticks) / os.sysconf("SC_CLK_TCK")) if ticks else 0.0


class SteadyClock:
    """Called, it says the time: seconds since 1970."""

    def __init__(self, run_dir: RunDirectory) -> None:
        """Go on with the reading of an earlier coordinator on this boot, or read the wall clock and keep that."""
        try:
            boot = _BOOT.read_text().strip()
        except OSError:
            boot = ""
        kept = glance(run_dir.clock) or {}
        known = kept.get("boot_unix_s")
        if boot and kept.get("boot") == boot and isinstance(known, int | float) and math.isfinite(known):
            self._boot_unix_s = float(known)
            return
        self._boot_unix_s = time.time() - boot_s()
        with suppress(OSError):  # without it a coordinator that is started again reads the wall clock anew
            write_json(run_dir.clock, {"boot": boot, "boot_unix_s": self._boot_unix_s})

    def __call__(self) -> float:
        return self._boot_unix_s + boot_s()

    def not_before(self, recorded_s: float) -> None:
        """A record of this time is there: what follows is not before it."""
        self._boot_unix_s += max(0.0, recorded_s - self())

"""How a process that spare-launch has started ahead of a loss waits for its place in the job.

spare-launch writes the place atomically into one file, for whose name only this process waits. Waiting costs one look
at the file each POLL_S, and ends with the launcher.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import MutableMapping
from pathlib import Path

from spare_megatron.config.place import PLACE_FILE, Place, number, standby_name
from spare_megatron.control_plane.control_thread import leave_at_once
from spare_megatron.control_plane.launcher_watch import LauncherWatch
from spare_megatron.runtime.disk import with_retries
from spare_megatron.runtime.run_directory import glance, waits_file
from spare_megatron.runtime.stop_signals import STOP_SIGNALS, ignore_stop_signals

log = logging.getLogger(__name__)
POLL_S = 0.05


def wait_for_place(environ: MutableMapping[str, str]) -> None:
    """Wait, for hours if need be, until the file that ``environ`` names is there, and add what it has to ``environ``.
    The process ends where its launcher has ended."""
    before = {one: signal.getsignal(one) for one in STOP_SIGNALS}
    ignore_stop_signals()  # they are meant for the job, and this process is not part of it yet
    path = environ.pop(PLACE_FILE)
    launcher = LauncherWatch(number(environ, "SPARE_LAUNCHER_PID") or 0)
    mark = waits_file(Path(path), os.getpid())
    with_retries(mark.touch)
    log.info("%s waits for a place", standby_name(path))
    while (place := glance(Path(path))) is None:
        if launcher.is_gone():
            leave_at_once("the launcher is gone")
        time.sleep(POLL_S)
    environ.update(place["environ"])
    for one, handler in before.items():  # what a rank starts would ignore them too
        signal.signal(one, handler or signal.SIG_DFL)


class PlaceFormatter(logging.Formatter):
    """Log lines with the rank's place."""

    def __init__(self, place: Place) -> None:
        super().__init__(f"%(asctime)s {place.home} rank {place.position} %(levelname)s %(message)s")


def log_as(place: Place) -> None:
    """Let the lines of this process's log begin with ``place`` from now on; a log that the user's script has set up
    stays as it is."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, PlaceFormatter):
            handler.setFormatter(PlaceFormatter(place))

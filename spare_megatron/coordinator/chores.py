"""Optional work in a thread of its own, which may wait or fail: it writes files on which no decision depends.

Newer work replaces queued work of the same name. A failure is reported once, until the work succeeds again; it is not
repeated here, because its owner submits it again some time later.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from spare_megatron.runtime.disk import words


class Chores:
    """The thread and its works. The thread begins with the first work, and does not keep the process from ending."""

    def __init__(self, name: str, announce: Callable[[str], None]) -> None:
        self._name, self._announce = name, announce
        self._waiting: dict[str, Callable[[], None]] = {}
        self._failing: set[str] = set()
        self._busy = self._closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def do(self, what: str, work: Callable[[], None]) -> None:
        """Do ``work`` soon, in place of an older one of the same name that has not begun. ``what`` is its name, as in
        'cannot take a snapshot'."""
        with self._changed:
            if self._closed:
                return
            self._waiting[what] = work
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def close(self, patience_s: float) -> None:
        """Take no more work, and wait for what there is, but not for longer than ``patience_s``."""
        until_s = time.monotonic() + patience_s
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            while (self._waiting or self._busy) and time.monotonic() < until_s:
                self._changed.wait(until_s - time.monotonic())
            self._waiting.clear()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                while not self._waiting:
                    if self._closed:
                        return
                    self._changed.wait()
                what = next(iter(self._waiting))
                work = self._waiting.pop(what)
                self._busy = True
            self._try(what, work)

    def _try(self, what: str, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            if what not in self._failing:
                why = words(error) if isinstance(error, OSError) else repr(error)
                self._announce(f"the coordinator cannot {what}: {why}; the job goes on without")
            self._failing.add(what)
            return
        self._failing.discard(what)

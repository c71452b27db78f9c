"""Runs the operator's command (``--spare-on-event``) for each event, in threads for which nobody waits.

Promises:

* :meth:`EventCommands.tell` never waits: events that find AT_ONCE commands running wait in line, and are dropped and
  counted where QUEUE_MOST wait already.
* A command is killed with its process group after LIMIT_S, at the end of the job, and when this process dies.
* The first command that fails is reported, and at the end how many have failed or were dropped: no command, however
  often it fails, fills the job's output.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from spare_megatron.config.plural import counted
from spare_megatron.runtime.brief_command import run_command
from spare_megatron.runtime.child_guard import ChildGuard
from spare_megatron.runtime.disk import words

AT_ONCE = 4
QUEUE_MOST = 256
LIMIT_S = 30.0
END_PATIENCE_S = 5.0
"""How long the end of the job waits for the commands of its last events."""
THREAD_END_S = 5.0
"""How long it waits for the threads of commands that were killed."""
FLAG = "--spare-on-event"


class EventCommands:
    """The commands of one coordinator process."""

    def __init__(
        self, command: str, announce: Callable[[str], None], limit_s: float = LIMIT_S, queue_most: int = QUEUE_MOST
    ) -> None:
        """``command`` is given to the shell. ``announce`` shows one line, from any thread."""
        self._command, self._announce, self._limit_s, self._queue_most = command, announce, limit_s, queue_most
        self._starting = threading.Lock()
        """Guards the next one, whose start takes longer than the event loop may wait."""
        self._guard: ChildGuard | None = None
        self._changed = threading.Condition()
        """Guards everything below."""
        self._waiting: deque[Mapping[str, Any]] = deque()
        self._busy = 0
        self._threads: list[threading.Thread] = []
        self._closed = self._over = False
        self._run = self._failed = self._dropped = 0

    def tell(self, event: Mapping[str, Any]) -> None:
        """Run the command soon, with ``event`` as one line of JSON on its standard input."""
        with self._changed:
            if self._closed:
                return
            if len(self._waiting) >= self._queue_most:
                self._dropped += 1
                if self._dropped == 1:
                    self._announce(
                        f"{FLAG}: {self._queue_most} events wait for their commands; further ones are dropped"
                    )
                return
            self._waiting.append(event)
            self._changed.notify()
            if len(self._threads) < min(AT_ONCE, self._busy + len(self._waiting)):
                self._start_thread()

    def close(self, patience_s: float) -> None:
        """Take no more events; wait for what there is, but not for longer than ``patience_s``; end what is left."""
        until_s = time.monotonic() + patience_s
        with self._changed:
            self._closed = True
            while (self._waiting or self._busy) and (left_s := until_s - time.monotonic()) > 0:
                self._changed.wait(left_s)
            self._dropped += len(self._waiting)
            self._waiting.clear()
            self._over = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(THREAD_END_S)
        if self._guard is not None:
            self._guard.close()
        if self._failed or self._dropped:
            self._announce(
                f"{FLAG}: {self._failed} of {counted(self._run, 'command')} failed, "
                f"{counted(self._dropped, 'event')} had none"
            )

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._work, name=f"event-command-{len(self._threads)}", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # there are too many threads; the next event tries again
            return
        self._threads.append(thread)

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    if self._over:
                        return
                    self._changed.wait()
                event = self._waiting.popleft()
                self._busy += 1
            failure = self._one(event)
            with self._changed:
                self._busy -= 1
                self._run += 1
                self._failed += bool(failure)
                first = failure and self._failed == 1
                self._changed.notify_all()
            if first:
                self._announce(f"{FLAG}: the command failed: {failure}; later failures are counted only")

    def _one(self, event: Mapping[str, Any]) -> str:
        """Run the command for one event; how it failed, empty where it did not."""
        shell, line = ("/bin/sh", "-c", self._command), json.dumps(event).encode() + b"\n"
        try:
            end = run_command(shell, self._limit_s, self._guarded(), lambda: self._over, given=line)
        except Exception as error:  # a thread that ends would take its turn from the events to come
            return words(error) if isinstance(error, OSError) else repr(error)
        return "" if end.status == 0 else end.words(self._limit_s)

    def _guarded(self) -> ChildGuard:
        with self._starting:
            if self._guard is None:
                self._guard = ChildGuard()
            return self._guard

"""Notes when this rank did which part of each step, for a timeline (``--spare-rank-times``).

The training thread only notes. A thread of its own appends a line a step to a file of this rank alone, which is never
synced. A disk that fails or hangs costs lines, and one warning, never training.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from pathlib import Path
from queue import SimpleQueue

from spare_megatron.metrics.rank_lines import RankLine, RankPart, encoded
from spare_megatron.runtime import failpoints
from spare_megatron.runtime.disk import words

log = logging.getLogger(__name__)
SHORTEST_S = 2e-5
"""What is shorter is not reported."""
ONE_S = 1e-3
"""Two parts of the same name with a shorter pause between them are reported as one."""
PARTS_MAX = 64
"""Parts of a line; a step has few, and what comes before the first one is not without end."""
WAITING_MAX = 1000
"""Lines that may wait for a disk that hangs; further ones are left out."""
CLOSE_S = 2.0
"""How long the end of the process waits for the disk."""


class RankParts:
    """Records nothing. Used without ``--spare-rank-times``."""

    def note(self, name: str, began_s: float, ended_s: float) -> None:
        """This rank has done ``name`` from ``began_s`` to ``ended_s``, by time.monotonic()."""

    def end(self, step: int) -> None:
        """Everything noted since the last call belongs to ``step``, or was done before this rank's first step."""

    def close(self) -> None:
        """Nothing more will be noted."""


class WrittenRankParts(RankParts):
    """Writes them into ``path``. Belongs to the training thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._handle, self._torn, self._warned = -1, False, False
        self._unix_s = time.time() - time.monotonic()
        self._parts: list[RankPart] = []
        self._waiting = SimpleQueue[tuple[int, list[RankPart]] | None]()
        self._thread = threading.Thread(target=self._run, name="rank-times", daemon=True)
        self._thread.start()

    def note(self, name: str, began_s: float, ended_s: float) -> None:
        """Keep a part until the end of its step."""
        parts = self._parts
        if ended_s - began_s < SHORTEST_S:
            return
        if parts and parts[-1][0] == name and began_s - parts[-1][2] < ONE_S:
            parts[-1] = (name, parts[-1][1], ended_s)
        elif len(parts) < PARTS_MAX:
            parts.append((name, began_s, ended_s))

    def end(self, step: int) -> None:
        """Have a line written; never waits."""
        if self._parts and self._waiting.qsize() < WAITING_MAX:
            self._waiting.put((step, self._parts))
        self._parts = []

    def close(self) -> None:
        """Wait for the last lines, but not long."""
        self._waiting.put(None)
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        for step, parts in iter(self._waiting.get, None):
            first_s = parts[0][1]
            since = [(name, began_s - first_s, ended_s - first_s) for name, began_s, ended_s in parts]
            self._append(encoded(RankLine(step, first_s + self._unix_s, since)))
        self._give_up()

    def _append(self, line: bytes) -> None:
        """Append a line; behind one that was cut short it begins anew."""
        try:
            failpoints.hit("rank_times.write")
            if self._handle < 0:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._handle = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            data = b"\n" + line if self._torn else line
            short = os.write(self._handle, data) < len(data)
            self._torn = short
            if short:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._give_up()
            if not self._warned:
                self._warned = True
                log.warning("%s cannot be written: %s; steps will lack in it", self._path, words(error))

    def _give_up(self) -> None:
        """Close the file; the next line opens it again."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            try:
                os.close(handle)
            except OSError as error:
                log.debug("%s: %s", self._path, words(error))

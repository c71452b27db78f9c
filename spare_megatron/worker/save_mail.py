"""Messages between the ranks of a group about a checkpoint that they write while training goes on.

Collectives belong to the training thread, so the writing threads exchange messages through the group's own store, over
a connection on which no other thread waits. The messages are JSON, with the bytes of a report behind them.

May assume: one save at a time, numbered alike on every rank. Promises: a value waits in the store until it is
fetched; when position 0, which serves the store, dies, waits end with an error.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from spare_megatron.checkpoint.files import ManifestEntry
from spare_megatron.worker.group_store import StoreClient

WAIT_S = 7 * 86400.0
"""Longer than any write takes: a disk may be slow, and a dead rank ends its group, and so this wait."""


@dataclass(frozen=True)
class Written:
    """How the writing of one rank's files went."""

    failure: str = ""
    """Why the files are not on the disk; empty when they are."""
    files: dict[str, ManifestEntry] = field(default_factory=dict)
    report: bytes = b""
    """What position 0 needs of this rank to complete the checkpoint."""


class SaveMail:
    """One rank's access to the messages."""

    def __init__(self, store: StoreClient, position: int, size: int) -> None:
        """``store`` is of this object alone."""
        self._store = store
        self._store.timeout_s = WAIT_S
        self._position, self._size = position, size

    def written(self, number: int, what: Written) -> None:
        """Send position 0 how this rank's part of save ``number`` went."""
        words = json.dumps([what.failure, {name: dict(entry) for name, entry in what.files.items()}]).encode()
        self._store.set(f"save/written/{number}/{self._position}", b"%d %s%s" % (len(words), words, what.report))

    def collect(self, number: int) -> list[Written]:
        """For position 0: wait for the message of every rank; returns them in order of position. Removes what is left
        of the save before."""
        reported = []
        for position in range(self._size):
            key = f"save/written/{number}/{position}"
            reported.append(_read(self._store.get(key)))
            self._store.delete(key)
        self._store.delete(f"save/ended/{number - 1}")
        return reported

    def end(self, number: int, failure: str) -> None:
        """For position 0: send the ranks that the checkpoint is published, or by ``failure`` why it is not."""
        self._store.set(f"save/ended/{number}", (failure or "-").encode())

    def ended(self, number: int) -> str:
        """Wait for position 0's message: why save ``number`` failed; empty if it did not."""
        outcome = self._store.get(f"save/ended/{number}").decode()
        return "" if outcome == "-" else outcome


def _read(words: bytes) -> Written:
    size, _, rest = words.partition(b" ")
    failure, files = json.loads(rest[: int(size)])
    return Written(failure, files, rest[int(size) :])

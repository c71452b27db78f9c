"""What the ranks of a group tell each other about a checkpoint that they write beside the training.

Collectives belong to the training thread, so writing threads speak through the group's own store, over a connection
that no other thread waits on.

May assume: one save at a time, numbered alike on every rank. Promises: a value waits in the store until it is
fetched; when position 0, which serves the store, dies, waits end with an error.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

from spare_megatron.checkpoint.files import ManifestEntry

WAIT = timedelta(days=7)
"""A disk may be slow; a dead rank ends its group, and so this wait."""


@dataclass(frozen=True)
class Written:
    """One rank's files are on the disk, or why not."""

    failure: str = ""
    files: dict[str, ManifestEntry] = field(default_factory=dict)
    report: bytes = b""
    """What position 0 needs to complete the checkpoint."""


class SaveMail:
    """One rank's end."""

    def __init__(self, store: dist.Store, position: int, size: int) -> None:
        self._store = dist.PrefixStore("save", store.clone())
        self._store.set_timeout(WAIT)
        self._position, self._size = position, size

    def written(self, number: int, what: Written) -> None:
        """Say how this rank's part of save ``number`` went."""
        self._store.set(f"written/{number}/{self._position}", pickle.dumps(what))

    def collect(self, number: int) -> list[Written]:
        """Position 0: what every rank said, in order of their positions. What is left of earlier saves is removed."""
        told = []
        for position in range(self._size):
            key = f"written/{number}/{position}"
            told.append(pickle.loads(self._store.get(key)))
            self._store.delete_key(key)
        self._store.delete_key(f"ended/{number - 1}")
        return told

    def end(self, number: int, failure: str) -> None:
        """Position 0: the checkpoint counts, or (``failure``) does not."""
        self._store.set(f"ended/{number}", failure or "-")

    def ended(self, number: int) -> str:
        """Wait for what position 0 says: why save ``number`` failed, empty if it did not."""
        told = self._store.get(f"ended/{number}").decode()
        return "" if told == "-" else str(told)

"""Notices that a published checkpoint is replaced or removed while its files are opened one after another.

A job that goes back saves a step again, and one that goes on deletes old checkpoints.

A checkpoint's version is the checksum of its manifest, which has the checksums of all its files. Without a manifest, as
with Megatron-LM's checkpoints, nothing is noticed. Imports neither torch nor megatron.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from pathlib import Path

from spare_megatron.config.errors import ConfigError

MANIFEST = "spare_manifest.json"


@contextlib.contextmanager
def read_whole(directory: Path) -> Iterator[None]:
    """A ConfigError at the end, whatever was raised meanwhile, where the checkpoint was replaced or removed."""
    before = version_of(directory)
    try:
        yield
    except Exception:
        refuse_replaced(directory, before)
        raise
    refuse_replaced(directory, before)


def version_of(directory: Path) -> int | None:
    """Checksum of a checkpoint's manifest; None without one. Every host sees the same, unlike inodes and times on some
    network file systems."""
    try:
        return zlib.crc32((directory / MANIFEST).read_bytes())
    except OSError:
        return None


def refuse_replaced(directory: Path, before: int | None) -> None:
    """ConfigError where the checkpoint has not the :func:`version_of` that it had ``before``."""
    if version_of(directory) != before:
        raise ConfigError(f"{directory} was replaced or removed while it was read; read it or another one again")

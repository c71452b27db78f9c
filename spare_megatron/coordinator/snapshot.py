"""Snapshots: the state behind a final record of the journal, so that a restart replays only what follows it.

A snapshot is only an optimisation. It is written beside the training, whenever the disk allows; where it is missing,
damaged, of another format or does not fit the journal, a restart takes an older one, or replays everything. What counts
is checked before it is used: its own checksum, and that the bytes of its part up to its place are those that it was
taken behind.

A snapshot is taken only behind a final record, which was on the disk and confirmed by then. So its place is in the
journal of every later holder of the lease, and a process that was stopped for long may still write it.

``snapshot-000003.json`` is the newest one of part 3; those of finished parts are kept, in case a newer one is damaged.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spare_megatron.coordinator.journal_parts import FORMAT, JournalPlace, snapshot_path
from spare_megatron.protocol.machine import State
from spare_megatron.protocol.state_codec import decode_state, encode_state
from spare_megatron.runtime.run_directory import read_json, write_json


@dataclass(frozen=True)
class Snapshot:
    """The state of a job at one place of its journal."""

    place: JournalPlace
    durable_bytes: int
    """How much of the part of ``place`` was certainly on the disk: all up to there, or nothing where only its header
    is."""
    state: State
    seen: Mapping[str, Any]
    """What observers of the records made of them up to there, as JSON values."""


def save_snapshot(path: Path, snapshot: Snapshot) -> None:
    """Write a snapshot of the journal ``path``; it replaces an older one of the same part. Raises OSError."""
    content = {
        "format": FORMAT,
        **snapshot.place._asdict(),
        "settled_bytes": snapshot.durable_bytes,
        "state": encode_state(snapshot.state),
        "seen": snapshot.seen,
    }
    write_json(snapshot_path(path, snapshot.place.part), {"sha256": _sha256(content), **content}, durable=True)


def load_snapshot(path: Path, part: int) -> Snapshot | str:
    """The newest snapshot of a part, or why there is none; empty where none was taken. Whether it fits the journal is
    for whoever reads the part to see."""
    name = snapshot_path(path, part)
    try:
        content = read_json(name)
        if content is None:
            return ""
        if content.pop("sha256") != _sha256(content):
            return f"{name} is damaged: its checksum is another"
        if content["format"] != FORMAT:
            return f"{name} has format {content['format']}, not {FORMAT}"
        place = JournalPlace(**{field: content[field] for field in JournalPlace._fields})
        return Snapshot(place, content["settled_bytes"], decode_state(content["state"]), content["seen"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{name} cannot be read: {error}"


def _sha256(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()

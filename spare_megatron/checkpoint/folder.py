"""A ``--save`` directory: Megatron's names for what counts, names of our own for what does not count yet.

A checkpoint is written under ``partial/`` in a directory whose name holds group, incarnation and epoch, so that a
partitioned group that writes on can never touch what another group published. It gets Megatron's name,
``iter_0000010``, only after the coordinator has accepted it; then ``latest_checkpointed_iteration.txt`` names it.
``spare_manifest.json`` inside lists every file with its size and checksum: a checkpoint is *good* when all agree.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path

TRACKER = "latest_checkpointed_iteration.txt"
MANIFEST = "spare_manifest.json"
PARTIAL = "partial"
_ITERATION = re.compile(r"iter_(\d{7,})$")
_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True)
class Damage:
    """Why a checkpoint does not count."""

    directory: Path
    reason: str


def iteration_name(step: int) -> str:
    """Megatron's directory name of a step: ``iter_0000010``."""
    return f"iter_{step:07d}"


def partial_directory(save: Path, step: int, group: int, incarnation: int, epoch: int) -> Path:
    """Where one group writes step ``step`` before it counts."""
    return save / PARTIAL / f"{iteration_name(step)}.group{group}-incarnation{incarnation}-epoch{epoch}"


def write_manifest(directory: Path) -> None:
    """List every file of a complete checkpoint with size and CRC-32; the manifest itself is written atomically."""
    files = {name: {"bytes": size, "crc32": _crc32(directory / name)} for name, size in sorted(_files(directory))}
    _replace(directory / MANIFEST, json.dumps({"files": files}, indent=1))


def publish(partial: Path, save: Path, step: int) -> Path:
    """Give an accepted checkpoint its final name and make it the newest. An older directory of that name gives way."""
    final = save / iteration_name(step)
    if final.exists():
        shutil.rmtree(final)
    os.replace(partial, final)
    _sync_directory(save)
    _replace(save / TRACKER, str(step))
    return final


def discard_partials(save: Path) -> None:
    """Remove what earlier lives of the job began to write and never published."""
    shutil.rmtree(save / PARTIAL, ignore_errors=True)


def iterations(save: Path) -> list[int]:
    """Steps that have a published directory, newest first."""
    if not save.is_dir():
        return []
    found = [_ITERATION.match(entry.name) for entry in save.iterdir() if entry.is_dir()]
    return sorted((int(match[1]) for match in found if match), reverse=True)


def damage(directory: Path) -> str:
    """Why the checkpoint in ``directory`` is not good; empty if it is. Without a manifest (a checkpoint of
    Megatron-LM) only its metadata is looked for."""
    if not directory.is_dir():
        return f"{directory} does not exist"
    manifest = directory / MANIFEST
    if not manifest.exists():
        return "" if (directory / "metadata.json").exists() else f"{directory} has neither {MANIFEST} nor metadata.json"
    try:
        listed = json.loads(manifest.read_text())["files"]
    except (ValueError, KeyError, OSError) as error:
        return f"{manifest} cannot be read: {error}"
    for name, entry in listed.items():
        path = directory / name
        if not path.is_file():
            return f"{path} is missing"
        if path.stat().st_size != entry["bytes"]:
            return f"{path} has {path.stat().st_size} bytes, its manifest says {entry['bytes']}"
        if _crc32(path) != entry["crc32"]:
            return f"{path} differs from its checksum"
    return ""


def last_good(save: Path) -> tuple[Path | None, list[Damage]]:
    """The newest good checkpoint of a ``--save`` directory (None: there is none), and the damaged ones passed over."""
    passed: list[Damage] = []
    for step in iterations(save):
        directory = save / iteration_name(step)
        reason = damage(directory)
        if not reason:
            return directory, passed
        passed.append(Damage(directory, reason))
    return None, passed


def step_of(directory: Path) -> int:
    """The step in the name of a published checkpoint."""
    match = _ITERATION.match(directory.name)
    if not match:
        raise ValueError(f"{directory.name} is no checkpoint's name, such as {iteration_name(10)}")
    return int(match[1])


def _files(directory: Path) -> list[tuple[str, int]]:
    paths = [p for p in directory.rglob("*") if p.is_file() and p.name != MANIFEST]
    return [(p.relative_to(directory).as_posix(), p.stat().st_size) for p in paths]


def _crc32(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            crc = zlib.crc32(chunk, crc)
    return crc


def _replace(path: Path, text: str) -> None:
    """Write a small file so that a reader sees the old text or the new one."""
    temporary = path.with_name(path.name + ".new")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    _sync_directory(path.parent)


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

"""A ``--save`` directory: Megatron's names for what counts, names of our own for what does not count yet or any more.

A checkpoint is written under ``partial/`` in a directory whose name holds group, incarnation and epoch, so that a
partitioned group that writes on can never touch what another group published. It gets Megatron's name,
``iter_0000010``, only after the coordinator has accepted it; then ``latest_checkpointed_iteration.txt`` names it.
``spare_manifest.json`` inside lists every file with its size and checksum, and has a checksum of its own: a checkpoint
is *good* when all agree.

Directories take and give up Megatron's name by renaming alone: a process may be killed anywhere in here, and what has
that name is whole.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from spare_megatron import failpoints
from spare_megatron.checkpoint.files import ManifestEntry, entry_of

TRACKER = "latest_checkpointed_iteration.txt"
MANIFEST = "spare_manifest.json"
CONFIG = "metadata.json"
"""megatron-core's file by which it knows a checkpoint of its own; written last."""
PARTIAL = "partial"
_ITERATION = re.compile(r"iter_(\d{7,})(?:$|\.)")


@dataclass(frozen=True)
class Damage:
    """Why a checkpoint does not count."""

    directory: Path
    reason: str


@dataclass(frozen=True)
class Retention:
    """Which published checkpoints stay. Without any of the two all do."""

    interval: int | None = None
    """Megatron's --save-retain-interval: multiples of so many steps stay."""
    last: int | None = None
    """The newest so many stay, whatever their step; two with an interval, so that a damaged one can be passed over."""

    def retired(self, steps: Iterable[int]) -> list[int]:
        """Those of ``steps`` that need not stay, oldest first."""
        if self.interval is None and self.last is None:
            return []
        older = sorted(steps, reverse=True)[self.last or 2 :]
        return sorted(step for step in older if self.interval is None or step % self.interval)


def iteration_name(step: int) -> str:
    """Megatron's directory name of a step: ``iter_0000010``."""
    return f"iter_{step:07d}"


def partial_directory(save: Path, step: int, group: int, incarnation: int, epoch: int) -> Path:
    """Where one group writes step ``step`` before it counts."""
    return save / PARTIAL / f"{iteration_name(step)}.group{group}-incarnation{incarnation}-epoch{epoch}"


def write_manifest(directory: Path, files: Mapping[str, ManifestEntry]) -> None:
    """List every file of a complete checkpoint; written atomically."""
    _replace(directory / MANIFEST, _manifest_text(files))


def _manifest_text(files: Mapping[str, ManifestEntry]) -> str:
    """The only text that a manifest of these files may have, so that any other byte in it shows."""
    listed = dict(sorted(files.items()))
    return json.dumps({"files": listed, "crc32": zlib.crc32(json.dumps(listed).encode())}, indent=1)


def publish(partial: Path, save: Path, step: int) -> Path:
    """Give an accepted checkpoint its final name and make it the newest. An older directory of that name gives way.
    Where the disk fails it can be called again."""
    final = save / iteration_name(step)
    if partial.exists():
        if final.exists():
            _set_aside(final)
        failpoints.hit("checkpoint.publish")
        os.replace(partial, final)
        failpoints.hit("checkpoint.published")
    _sync_directory(save)
    _replace(save / TRACKER, str(step))
    return final


def publish_left_over(save: Path, accepted: str) -> None:
    """Publish a checkpoint that the coordinator accepted and whose writer died before it could; ``accepted`` is its
    directory. Nothing where it is published, damaged, elsewhere or not newer than what is."""
    partial = Path(accepted)
    match = _ITERATION.match(partial.name)
    if match is None or partial.parent != save / PARTIAL or not (partial / MANIFEST).exists():
        return
    step = int(match[1])
    if step > max(iterations(save), default=-1) and not damage(partial):
        publish(partial, save, step)


def retire(save: Path, retention: Retention) -> list[int]:
    """Remove published checkpoints that need not stay; their steps."""
    gone = retention.retired(iterations(save))
    for step in gone:
        shutil.rmtree(_set_aside(save / iteration_name(step)), ignore_errors=True)
    return gone


def discard_partials(save: Path, up_to: int | None = None) -> None:
    """Remove what was begun and never published; with ``up_to`` only of steps up to that one, which is published."""
    if up_to is None:
        shutil.rmtree(save / PARTIAL, ignore_errors=True)
        return
    for entry in (save / PARTIAL).glob("iter_*"):
        match = _ITERATION.match(entry.name)
        if match and int(match[1]) <= up_to:
            shutil.rmtree(entry, ignore_errors=True)


def iterations(save: Path) -> list[int]:
    """Steps that have a published directory, newest first."""
    if not save.is_dir():
        return []
    found = [_ITERATION.fullmatch(entry.name) for entry in save.iterdir() if entry.is_dir()]
    return sorted((int(match[1]) for match in found if match), reverse=True)


def identities(save: Path) -> dict[int, object]:
    """Step -> what tells its published directory from any other that has, had or will have that name."""
    found: dict[int, object] = {}
    for step in iterations(save):
        status = (save / iteration_name(step)).stat()
        found[step] = (status.st_ino, status.st_mtime_ns)
    return found


def damage(directory: Path) -> str:
    """Why the checkpoint in ``directory`` is not good; empty if it is. Without a manifest (a checkpoint of
    Megatron-LM) only its metadata is looked for."""
    if not directory.is_dir():
        return f"{directory} does not exist"
    if not (directory / MANIFEST).exists():
        return "" if (directory / CONFIG).exists() else f"{directory} has neither {MANIFEST} nor {CONFIG}"
    listed = _listed(directory)
    if isinstance(listed, str):
        return listed
    for name, (size, crc) in listed.items():
        reason = _file_damage(directory / name, size, crc)
        if reason:
            return reason
    return ""


def file_damage(directory: Path, name: str) -> str:
    """Why one file of the checkpoint in ``directory`` is not good; empty if it is. Without a manifest it need only be
    there."""
    if not (directory / MANIFEST).exists():
        return "" if (directory / name).is_file() else f"{directory / name} is missing"
    listed = _listed(directory)
    if isinstance(listed, str):
        return listed
    return _file_damage(directory / name, *listed[name]) if name in listed else f"{directory / name} is missing"


def _listed(directory: Path) -> dict[str, tuple[int, int]] | str:
    """Size and checksum of each file by a checkpoint's manifest, or why that cannot be believed."""
    manifest = directory / MANIFEST
    try:
        text = manifest.read_bytes().decode()
        files = json.loads(text)["files"]
        if text != _manifest_text(files):
            return f"{manifest} differs from its checksum"
        return {name: (entry["bytes"], entry["crc32"]) for name, entry in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        return f"{manifest} cannot be read: {error}"


def _file_damage(path: Path, size: int, crc: int) -> str:
    if not path.is_file():
        return f"{path} is missing"
    try:
        if path.stat().st_size != size:
            return f"{path} has {path.stat().st_size} bytes, its manifest says {size}"
        return "" if entry_of(path)["crc32"] == crc else f"{path} differs from its checksum"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"


def pointer_damage(save: Path) -> str:
    """Why Megatron's pointer file in a ``--save`` directory is not what the newest save wrote; empty if it is.

    This framework writes the file and never reads it: a wrong one misleads Megatron-LM's tools only.
    """
    steps, pointer = iterations(save), save / TRACKER
    if not steps:
        return ""
    try:
        said = pointer.read_bytes().decode(errors="replace").strip()
    except OSError as error:
        return f"{pointer} cannot be read: {error.strerror}"
    if said == str(steps[0]) or (said == "release" and (save / said).is_dir()):
        return ""
    return f"{pointer} says {said!r}, but the newest checkpoint is of step {steps[0]}; the next save writes it again"


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
    match = _ITERATION.fullmatch(directory.name)
    if not match:
        raise ValueError(f"{directory.name} is no checkpoint's name, such as {iteration_name(10)}")
    return int(match[1])


def _set_aside(final: Path) -> Path:
    """Take Megatron's name from a published directory; where it lies now, to be removed."""
    aside = final.parent / PARTIAL / f"{final.name}.old"
    aside.parent.mkdir(exist_ok=True)
    shutil.rmtree(aside, ignore_errors=True)
    failpoints.hit("checkpoint.retire")
    os.replace(final, aside)
    return aside


def _replace(path: Path, text: str) -> None:
    """Write a small file so that a reader sees the old text or the new one."""
    temporary = path.with_name(path.name + ".new")
    failpoints.hit_file(path, "write")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        failpoints.hit_file(path, "sync")
        os.fsync(file.fileno())
    failpoints.hit_file(path, "rename")
    os.replace(temporary, path)
    failpoints.hit_file(path, "renamed")
    _sync_directory(path.parent)


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

"""The ``--save`` directory: published checkpoints have Megatron's names; others lie below ``partial/``.

A checkpoint is written under ``partial/`` in a directory whose name holds group, incarnation and epoch, so that a
partitioned group that goes on writing can never touch what another group published. It gets Megatron's name,
``iter_0000010``, only after the coordinator has accepted it; then ``latest_checkpointed_iteration.txt`` names it.
``spare_manifest.json`` inside lists every file with its size and checksum, and has a checksum of its own: a checkpoint
is *good* when all agree.

A directory gets and loses Megatron's name by a rename only. So whenever a process is killed, every directory that has
Megatron's name is complete.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from spare_megatron.checkpoint.files import ManifestEntry, entry_of
from spare_megatron.megatron_adapter.checkpoint.manifest_version import MANIFEST
from spare_megatron.runtime import failpoints
from spare_megatron.runtime.run_directory import sync_path

TRACKER = "latest_checkpointed_iteration.txt"
CONFIG = "metadata.json"
"""The file by which megatron-core recognizes a distributed checkpoint; it is written last."""
PARTIAL = "partial"
RELEASE = "release"
"""Megatron's name for a checkpoint of weights alone, of no step."""
ACCEPTED = ".accepted"
"""A file of this name behind that of an unpublished checkpoint's directory, beside it, says that the coordinator has
accepted it."""
_ITERATION = re.compile(r"iter_(\d{7,})(?:$|\.)")


@dataclass(frozen=True)
class Damage:
    """A checkpoint that is not good, and why."""

    directory: Path
    reason: str


@dataclass(frozen=True)
class Retention:
    """Which published checkpoints are kept. When both values are None, all are."""

    interval: int | None = None
    """Megatron's --save-retain-interval: checkpoints of steps that are multiples of it are kept."""
    last: int | None = None
    """Number of newest checkpoints that are kept, whatever their step. With ``interval`` and None here it is two, so
    that there is another one when the newest is damaged."""

    def retired(self, steps: Iterable[int]) -> list[int]:
        """Those of ``steps`` whose checkpoints are not kept, oldest first."""
        if self.interval is None and self.last is None:
            return []
        older = sorted(steps, reverse=True)[self.last or 2 :]
        return sorted(step for step in older if self.interval is None or step % self.interval)


def iteration_name(step: int) -> str:
    """Megatron's directory name of a step: ``iter_0000010``."""
    return f"iter_{step:07d}"


def partial_directory(save: Path, step: int, group: int, incarnation: int, epoch: int) -> Path:
    """Where one group writes the checkpoint of ``step`` before it is published."""
    return save / PARTIAL / f"{iteration_name(step)}.group{group}-incarnation{incarnation}-epoch{epoch}"


def write_manifest(directory: Path, files: Mapping[str, ManifestEntry]) -> None:
    """Write the manifest of a complete checkpoint, atomically; ``files`` maps relative names to entries."""
    _replace(directory / MANIFEST, _manifest_text(files))


def mark_accepted(partial: Path) -> None:
    """Note beside a complete checkpoint that the coordinator has accepted it. All that knows it otherwise is one job's
    run directory, and its writer may die before the checkpoint has its name."""
    if partial.parent.name == PARTIAL and partial.is_dir():
        _replace(_mark_of(partial), "")


def _mark_of(partial: Path) -> Path:
    return partial.with_name(partial.name + ACCEPTED)


def _marks(save: Path) -> list[tuple[int, Path]]:
    """(step, mark) of the accepted checkpoints whose publication has not ended, whether they have their names or not,
    in order."""
    found = ((_ITERATION.match(mark.name), mark) for mark in sorted((save / PARTIAL).glob(f"iter_*{ACCEPTED}")))
    return [(int(match[1]), mark) for match, mark in found if match]


def _accepted(save: Path) -> dict[int, Path]:
    """Step -> the directory of an accepted checkpoint that has not got its name."""
    found = [(step, mark.with_name(mark.name.removesuffix(ACCEPTED))) for step, mark in _marks(save)]
    return {step: partial for step, partial in found if (partial / MANIFEST).exists()}


def give_up(save: Path, after: int) -> None:
    """Forget what was accepted after this step and is not published, as the job goes back to it."""
    for step, mark in _marks(save):
        if step > after:
            mark.unlink(missing_ok=True)


def _manifest_text(files: Mapping[str, ManifestEntry]) -> str:
    """The exact text of the manifest of these files: a manifest that differs from it in any byte is damaged."""
    listed = dict(sorted(files.items()))
    return json.dumps({"files": listed, "crc32": zlib.crc32(json.dumps(listed).encode())}, indent=1)


def publish(partial: Path, save: Path, step: int, *, newest: bool = True) -> Path:
    """Give an accepted checkpoint its final name and, if it is the ``newest`` one, make Megatron's tracker file name
    it; the mark that it was accepted goes last.

    An older directory of that name is moved away first. After an OSError the call can be repeated.
    """
    final = save / iteration_name(step)
    if partial.exists():
        if final.exists():
            _set_aside(final)
        failpoints.hit("checkpoint.publish")
        os.replace(partial, final)
        failpoints.hit("checkpoint.published")
    sync_path(save)
    if newest:
        _replace(save / TRACKER, str(step))
    _mark_of(partial).unlink(missing_ok=True)
    return final


def publish_left_over(save: Path, accepted: str) -> None:
    """Publish the checkpoint in the directory ``accepted``, the newest one that the coordinator has accepted and whose
    writer has left; or do what is left of that, where it has its name already. Do nothing where it is published,
    damaged or not below ``save``."""
    partial = Path(accepted)
    match = _ITERATION.match(partial.name)
    if match is None or partial.parent != save / PARTIAL:
        return
    step = int(match[1])
    named = not partial.exists() and _mark_of(partial).exists() and (save / iteration_name(step)).is_dir()
    if named or ((partial / MANIFEST).exists() and not damage(partial)):
        publish(partial, save, step)


def retire(save: Path, retention: Retention, up_to: int) -> list[int]:
    """Remove the published checkpoints that are not kept; returns their steps.

    ``up_to`` is the step that was published last. Later ones are neither counted nor removed: where the job went back
    to an older checkpoint, they are damaged or of a run that was given up.
    """
    gone = retention.retired(step for step in iterations(save) if step <= up_to)
    for step in gone:
        shutil.rmtree(_set_aside(save / iteration_name(step)), ignore_errors=True)
    return gone


def discard_partials(save: Path, up_to: int) -> None:
    """Remove directories that were never published, of steps up to this published one."""
    for entry in (save / PARTIAL).glob("iter_*"):
        match = _ITERATION.match(entry.name)
        if match and int(match[1]) <= up_to:
            if entry.name.endswith(ACCEPTED):
                entry.unlink(missing_ok=True)
            else:
                shutil.rmtree(entry, ignore_errors=True)


def iterations(save: Path) -> list[int]:
    """Steps that have a published directory, newest first."""
    if not save.is_dir():
        return []
    found = [_ITERATION.fullmatch(entry.name) for entry in save.iterdir() if entry.is_dir()]
    return sorted((int(match[1]) for match in found if match), reverse=True)


def identities(save: Path) -> dict[int, object]:
    """Step -> the :func:`identity` of its published directory."""
    return {step: identity(save / iteration_name(step)) for step in iterations(save)}


def identity(directory: Path) -> object:
    """A value that changes when another directory takes the name of this published one (inode, mtime); OSError where
    there is none."""
    status = directory.stat()
    return status.st_ino, status.st_mtime_ns


def damage(directory: Path) -> str:
    """Why the checkpoint in ``directory`` is not good; empty if it is. Without a manifest (a checkpoint of
    Megatron-LM) only its metadata is looked for."""
    if not directory.is_dir():
        return f"{directory} does not exist"
    if not (directory / MANIFEST).exists():
        if (directory / CONFIG).exists():
            return ""
        return other_format(directory) or torch_own(directory) or f"{directory} has neither {MANIFEST} nor {CONFIG}"
    listed = _listed(directory)
    if isinstance(listed, str):
        return listed
    for name, (size, crc) in listed.items():
        reason = _file_damage(directory / name, size, crc)
        if reason:
            return reason
    return ""


def other_format(directory: Path) -> str:
    """What makes a checkpoint of Megatron's older format, ``--ckpt-format torch``, loadable; empty where it is not
    one."""
    return f"{directory} holds mp_rank files; {_converted(directory)}" if any(directory.glob("mp_rank_*")) else ""


def torch_own(directory: Path) -> str:
    """What makes a checkpoint of torch's own format loadable, which Megatron's FSDP modes write; empty where it is not
    one. Such a directory looks as one of torch_dist that was not written to its end."""
    if not (directory / ".metadata").exists() or any((directory / name).exists() for name in (MANIFEST, CONFIG)):
        return ""
    return (
        f"{directory} has neither {MANIFEST} nor {CONFIG}: it is incomplete, or has the format of Megatron's FSDP "
        f"modes (fsdp_dtensor or torch_dcp), then {_converted(directory)}"
    )


def _converted(directory: Path) -> str:
    load = directory.parent
    return (
        "spare-convert --model-type GPT --loader core --saver "
        f"core --load-dir {load} --save-dir {load}-torch_dist makes it loadable, with --load {load}-torch_dist "
        "--finetune (weights are converted, optimizer state is not)"
    )


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
    """Size and checksum of each file according to a checkpoint's manifest, or why the manifest is damaged."""
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
            return f"{path} has {path.stat().st_size} bytes, but its manifest says {size}"
        return "" if entry_of(path)["crc32"] == crc else f"{path} differs from its checksum"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"


def pointer_damage(save: Path) -> str:
    """Why Megatron's tracker file in a ``--save`` directory names no checkpoint of it; empty if it names one."""
    if not iterations(save):
        return ""
    try:
        return tracked(save)[1]
    except OSError as error:
        return f"{save / TRACKER} cannot be read: {error.strerror}"


def tracked(save: Path) -> tuple[Path | None, str]:
    """The checkpoint that Megatron's tracker file names, and why it is none: its text is neither a step nor ``release``
    (then there is no path), or there is no such directory; empty where it is one. OSError where it cannot be read."""
    word = (save / TRACKER).read_bytes().decode(errors="replace").strip()
    named = save / RELEASE if word == RELEASE else None
    if word.isascii() and word.isdigit() and len(word) < 20:
        named = save / iteration_name(int(word))
    if named is not None and named.is_dir():
        return named, ""
    return named, f"{save / TRACKER} says {word[:60]!r}, but there is no such checkpoint"


def last_good(save: Path, up_to: int | None = None) -> tuple[Path | None, list[Damage]]:
    """The newest good checkpoint of a ``--save`` directory (None: there is none), and the damaged ones passed over;
    with ``up_to`` only of steps up to that one. One that was accepted and has not got its name counts as well:
    everything may have died before."""
    return _first_good(_newest_first(save, up_to))


def _newest_first(save: Path, up_to: int | None) -> list[Path]:
    there = _accepted(save) | {step: save / iteration_name(step) for step in iterations(save)}
    return [there[step] for step in sorted(there, reverse=True) if up_to is None or step <= up_to]


def _first_good(directories: Iterable[Path]) -> tuple[Path | None, list[Damage]]:
    passed: list[Damage] = []
    for directory in directories:
        reason = damage(directory)
        if reason and directory.parent.name == PARTIAL and not directory.is_dir():  # it has got its name meanwhile
            directory = directory.parent.parent / iteration_name(step_of(directory))
            reason = damage(directory)
        if not reason:
            return directory, passed
        passed.append(Damage(directory, reason))
    return None, passed


@dataclass(frozen=True)
class Beginning:
    """The checkpoint of a ``--load`` directory with which a job begins."""

    directory: Path | None
    """None: it has no good one."""
    passed: Sequence[Damage]
    """Damaged ones that were passed over."""
    later: Sequence[int]
    """Steps of checkpoints after the one that the tracker file names, in order."""


def to_begin_with(load: Path) -> Beginning:
    """The first good one of :func:`choices`."""
    there, last = _choices(load)
    return Beginning(*_first_good(there), [step for step in iterations(load)[::-1] if last is not None and step > last])


def choices(load: Path) -> list[Path]:
    """The checkpoints of a ``--load`` directory among which a job takes the first good one. It is the one that
    Megatron's tracker file names, as in Megatron-LM, then those before it: after a job that went back with
    ``--ckpt-step``, or an edit of that file, later ones are of a run that was given up. What was accepted after the
    named one and is not published counts as well: everything may have died before. If the tracker file names no step,
    they are all, the newest first, or the one of no step to which Megatron's tools give the name ``release``.

    Raises:
        OSError: the directory or its tracker file cannot be read.
    """
    return _choices(load)[0]


def _choices(load: Path) -> tuple[list[Path], int | None]:
    """:func:`choices`, and the step after which checkpoints were given up, None where none were."""
    release = load / RELEASE
    try:  # one that cannot be read is not a missing one: the job could begin with what was given up
        named = tracked(load)[0]
    except (FileNotFoundError, NotADirectoryError):
        named = None
    last = None if named in (None, release) else max([step_of(named), *(step for step, _ in _marks(load))])
    steps = [] if named == release and release.is_dir() else _newest_first(load, last)
    return steps or [one for one in [release] if one.is_dir()], last


def step_of(directory: Path) -> int:
    """The step in the name of a checkpoint, published or not."""
    match = _ITERATION.match(directory.name)
    if not match:
        raise ValueError(f"{directory.name} is not a checkpoint's name such as {iteration_name(10)}")
    return int(match[1])


def _set_aside(final: Path) -> Path:
    """Move a published directory below ``partial/``; returns its new path, which the caller may remove."""
    aside = final.parent / PARTIAL / f"{final.name}.old"
    aside.parent.mkdir(exist_ok=True)
    shutil.rmtree(aside, ignore_errors=True)
    failpoints.hit("checkpoint.retire")
    os.replace(final, aside)
    return aside


def _replace(path: Path, text: str) -> None:
    """Write a small file atomically: a reader sees the old text or the new one."""
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
    sync_path(path.parent)

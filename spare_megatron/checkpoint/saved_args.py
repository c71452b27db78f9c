"""The ``args`` of a checkpoint: Megatron's namespace of all flags, which every save writes.

With everything else that is not a tensor they lie in ``common.pt``, or, since megatron-core 0.19, in one object beside
the tensors. :func:`read_args` needs neither torch nor megatron and runs no code from the files
(``megatron_adapter.checkpoint.restricted_pickle``). So a job can take flags from a checkpoint before it imports torch,
and from a file that it does not trust.
"""

from __future__ import annotations

import argparse
import io
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from spare_megatron.checkpoint import folder
from spare_megatron.config.errors import ConfigError
from spare_megatron.megatron_adapter.checkpoint.manifest_version import MANIFEST
from spare_megatron.megatron_adapter.checkpoint.restricted_pickle import InertUnpickler
from spare_megatron.runtime.disk import with_retries

COMMON = "common.pt"
"""megatron-core's file for everything that is not a tensor, up to 0.18; ours always have it."""
METADATA = ".metadata"
"""torch's file that says in which file, and where in it, each tensor and object lies."""
_COMMON_OBJECT = re.compile("common_state/.*|args")
"""The name of the object that holds the same since megatron-core 0.19, or of the args alone in the formats of
Megatron's FSDP modes."""
_PLAIN = (bool, int, float, str, type(None))
_REASON_CHARS = 200


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``values`` for which :func:`is_plain` holds: any torch can read them without trusting the file."""
    return {name: value for name, value in values.items() if is_plain(value)}


def is_plain(value: Any) -> bool:
    """Whether a value is a bool, int, float, str or None, or a list or tuple of plain values."""
    return isinstance(value, _PLAIN) or (isinstance(value, (list, tuple)) and all(map(is_plain, value)))


def saved_args(load: Path, step: int | None = None) -> tuple[Path, dict[str, Any]] | None:
    """The directory that :func:`iteration_directory` finds in a ``--load`` directory, and its args.

    None where there is no checkpoint. ConfigError from :func:`iteration_directory` and :func:`read_args`.
    """
    directory = iteration_directory(load, step) if load.is_dir() else None
    return None if directory is None else (directory, read_args(directory))


def iteration_directory(load: Path, step: int | None = None) -> Path | None:
    """The checkpoint of ``load`` from which flags are taken: that of ``step``, or the first of ``folder.choices`` whose
    args are good.

    None where there is no checkpoint at all. Only the file that leads to the args is looked at. The weights are
    verified when they are loaded; if an older checkpoint is used then, it is assumed to be one of the same model.

    Raises:
        ConfigError: there is no such step, no iteration has a good file, or the files are of Megatron's older layout.
    """
    if step is not None:
        directory = load / folder.iteration_name(step)
        reason = _damage(directory)
        if reason:
            raise ConfigError(f"--ckpt-step {step}: {reason}; give a step that --load {load} has")
        return directory
    reasons = []
    for directory in _choices(load):
        reason = _damage(directory)
        if not reason:
            return directory
        reasons.append(reason)
    if reasons:
        raise ConfigError(f"--load {load}: {'; '.join(reasons)}; give a directory with a checkpoint")
    return None


def check_format(load: Path, step: int | None = None) -> None:
    """ConfigError, with the command that converts it, where the checkpoint with which ``load`` begins, or that of
    ``step``, has Megatron's older format."""
    there = _choices(load) if step is None else [load / folder.iteration_name(step)]
    reason = folder.other_format(there[0]) if there else ""
    if reason:
        raise ConfigError(f"--load {load}: {reason}")


def _choices(load: Path) -> list[Path]:
    """The checkpoints with one of which a job begins; ConfigError where the disk does not say which."""
    try:
        return with_retries(lambda: folder.choices(load))
    except OSError as error:
        raise ConfigError(f"--load {load} cannot be read: {error.strerror}") from None


def _has_common_file(directory: Path) -> bool:
    """Whether the checkpoint has a ``common.pt``, or should have one: only those of megatron-core 0.19 have none."""
    plain_new = (directory / METADATA).exists() and not (directory / MANIFEST).exists()
    return (directory / COMMON).exists() or not plain_new


def _damage(directory: Path) -> str:
    file = COMMON if _has_common_file(directory) else METADATA
    return folder.other_format(directory) or folder.torch_own(directory) or folder.file_damage(directory, file)


def read_args(directory: Path) -> dict[str, Any]:
    """The args of the checkpoint in ``directory``, by name; empty where it was saved without args.

    A value that is not of plain types is replaced by an inert object.

    Raises:
        ConfigError: the file that holds them cannot be read.
    """
    path = directory / (COMMON if _has_common_file(directory) else METADATA)
    try:
        with path.open("rb") as file:
            common = _saved_object(file if path.name == COMMON else _common_object(directory, file))
    except Exception as error:  # a damaged pickle may raise anything
        reason = " ".join(str(error).split())[:_REASON_CHARS] or type(error).__name__
        raise ConfigError(f"{path} cannot be read: {reason}; use another checkpoint") from error
    common = common[0] if isinstance(common, list) else common
    args = common.get("args") if isinstance(common, dict) else common
    return dict(vars(args)) if isinstance(args, argparse.Namespace) else {}


def _saved_object(file: IO[bytes]) -> Any:
    """What ``torch.save`` wrote into a file."""
    with zipfile.ZipFile(file) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
        with archive.open(name) as pickled:
            return InertUnpickler(pickled).load()


def _common_object(directory: Path, metadata: IO[bytes]) -> IO[bytes]:
    """The bytes of the common object, to which torch's metadata lead."""
    places = InertUnpickler(metadata).load().state["storage_data"]
    (place,) = (place.state for index, place in places.items() if _COMMON_OBJECT.fullmatch(index.state["fqn"]))
    with (directory / place["relative_path"]).open("rb") as file:
        file.seek(place["offset"])
        return io.BytesIO(file.read(place["length"]))

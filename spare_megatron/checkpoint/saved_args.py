"""The ``args`` of a checkpoint: Megatron's namespace of all flags, which every save writes into ``common.pt``.

:func:`read_args` needs neither torch nor megatron and runs no code from the file: it unpickles plain values and
containers, and puts an inert object in the place of everything else. So a job can take flags from a checkpoint before
it imports torch, and from a file that it does not trust.
"""

from __future__ import annotations

import argparse
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from spare_megatron.checkpoint import folder
from spare_megatron.config.errors import ConfigError

COMMON = "common.pt"
"""megatron-core's file for everything that is not a tensor."""
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
    """The checkpoint of ``load`` from which flags are taken: that of ``step``, or the newest with a good ``common.pt``.

    None where there is no checkpoint at all. Only ``common.pt`` is read. The weights are verified when they are loaded;
    if an older checkpoint is used then, it is assumed to be one of the same model.

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
    for number in folder.iterations(load):
        directory = load / folder.iteration_name(number)
        reason = _damage(directory)
        if not reason:
            return directory
        reasons.append(reason)
    if reasons:
        raise ConfigError(f"--load {load}: {'; '.join(reasons)}; give a directory with a checkpoint")
    return None


def check_format(load: Path, step: int | None = None) -> None:
    """ConfigError, with the command that converts it, where the newest checkpoint of ``load``, or that of ``step``, has
    Megatron's older format."""
    steps = folder.iterations(load) if step is None else [step]
    name = folder.iteration_name(steps[0]) if steps else "release"
    reason = folder.other_format(load / name)
    if reason:
        raise ConfigError(f"--load {load}: {reason}")


def _damage(directory: Path) -> str:
    return folder.other_format(directory) or folder.file_damage(directory, COMMON)


def read_args(directory: Path) -> dict[str, Any]:
    """The args of the checkpoint in ``directory``, by name; empty where it was saved without args.

    A value that is not of plain types is replaced by an inert object.

    Raises:
        ConfigError: ``common.pt`` cannot be read.
    """
    path = directory / COMMON
    try:
        with zipfile.ZipFile(path) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
            with archive.open(name) as file:
                common = _Unpickler(file).load()
    except Exception as error:  # a damaged pickle may raise anything
        reason = " ".join(str(error).split())[:_REASON_CHARS] or type(error).__name__
        raise ConfigError(f"{path} cannot be read: {reason}; use another checkpoint") from error
    args = common.get("args") if isinstance(common, dict) else None
    return dict(vars(args)) if isinstance(args, argparse.Namespace) else {}


class _Inert:
    """Takes the place of an object of any other class, and accepts whatever a pickle does to build one."""

    def __new__(cls, *_args: Any, **_options: Any) -> _Inert:
        return object.__new__(cls)

    def __init__(self, *_args: Any, **_options: Any) -> None:
        """Accept any arguments."""

    def __setstate__(self, _state: Any) -> None:
        """Accept any state and drop it."""

    def __setitem__(self, _key: Any, _value: Any) -> None:
        """Accept an item, as a dictionary does, and drop it."""

    def append(self, _value: Any) -> None:
        """Accept an element, as a list does, and drop it."""

    def extend(self, _values: Any) -> None:
        """Accept elements, as a list does, and drop them."""

    def add(self, _value: Any) -> None:
        """Accept an element, as a set does, and drop it."""


class _Unpickler(pickle.Unpickler):
    """Unpickles with classes that do nothing. It imports no module that the pickle names and calls none of its code.

    Each instance makes its own classes, because a pickle may also set attributes of classes.
    """

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self._inert = type("Inert", (_Inert,), {})
        self._known = {
            ("argparse", "Namespace"): type("Namespace", (argparse.Namespace,), {}),
            ("collections", "OrderedDict"): type("OrderedDict", (dict,), {}),
        }

    def find_class(self, module: str, name: str) -> type:
        return self._known.get((module, name), self._inert)

    def persistent_load(self, _pid: Any) -> Any:
        """An inert object in the place of a tensor's storage, which is another file of the archive."""
        return self._inert()

"""The ``args`` of a checkpoint: Megatron's namespace of all flags, which every save writes into ``common.pt``.

:func:`read_args` needs neither torch nor megatron and runs nothing that stands in the file: it unpickles plain values
and containers, and puts an inert object in the place of everything else. So a job can take flags from a checkpoint
before it imports torch, and from a file that it has no reason to trust.
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
"""megatron-core's file for what is no tensor."""
_PLAIN = (bool, int, float, str, type(None))
_REASON_CHARS = 200


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``values`` that any torch can read back without trusting the file: plain ones, and lists of such."""
    return {name: value for name, value in values.items() if is_plain(value)}


def is_plain(value: Any) -> bool:
    """Whether a value is a bool, a number, a string or None, or a list or tuple of such."""
    return isinstance(value, _PLAIN) or (isinstance(value, (list, tuple)) and all(map(is_plain, value)))


def saved_args(load: Path, step: int | None = None) -> tuple[Path, dict[str, Any]] | None:
    """The iteration of a ``--load`` directory whose args count, and these args; None where there is no checkpoint.
    ConfigError as of :func:`iteration_directory` and :func:`read_args`."""
    directory = iteration_directory(load, step) if load.is_dir() else None
    return None if directory is None else (directory, read_args(directory))


def iteration_directory(load: Path, step: int | None = None) -> Path | None:
    """The iteration of ``load`` whose args count: that of ``step``, or the newest one that has a good ``common.pt``.

    None where there is no checkpoint at all. Only ``common.pt`` is read: whether the weights are good is looked at
    when they are loaded, and if an older iteration is used then, it is one of the same model.

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


def _damage(directory: Path) -> str:
    if any(directory.glob("mp_rank_*")):
        return f"{directory} holds mp_rank files, which tools/checkpoint/convert.py --saver core makes loadable"
    return folder.file_damage(directory, COMMON)


def read_args(directory: Path) -> dict[str, Any]:
    """The args of one iteration, empty where it was saved without any; values that are not plain are inert objects.

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
    """Stands for an object of a class that is not looked up, whatever the pickle does with it."""

    def __new__(cls, *_args: Any, **_options: Any) -> _Inert:
        return object.__new__(cls)

    def __init__(self, *_args: Any, **_options: Any) -> None:
        """Takes anything."""

    def __setstate__(self, _state: Any) -> None:
        """Takes anything."""

    def __setitem__(self, _key: Any, _value: Any) -> None:
        """As of a dictionary."""

    def append(self, _value: Any) -> None:
        """As of a list."""

    def extend(self, _values: Any) -> None:
        """As of a list."""

    def add(self, _value: Any) -> None:
        """As of a set."""


class _Unpickler(pickle.Unpickler):
    """Gives a pickle classes that do nothing; each reader its own, because a pickle may set attributes of classes too.
    Nothing is imported for it, and nothing that it brings is called."""

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
        """A tensor's memory, which is another file of the archive."""
        return self._inert()

"""Makes the imports of a preloaded parent, and says why a fork of it would not be as a new process that imports the
same.

What a module may do as it is imported, and forks would share or miss: start a thread, open a file (forks share
one position in it) or a device, make a temporary directory (which the first fork that ends removes), read the command
line or a variable that each rank has of its own, seed random numbers.
What it sets in the environment is set in forks too (:func:`repeat_changes`).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.machinery
import os
import random
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from spare_megatron.launch import preload_wire as wire
from spare_megatron.runtime.script_sources import find_module

NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""With it ``torch.cuda.is_available()`` asks the driver's management library, which opens no device."""
OF_A_RANK = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "SPARE_")
"""Beginnings of the names of variables that each rank has of its own, and its parent has not."""
_WITHOUT_STATE = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
"""Files that processes may share."""

_changed: dict[str, tuple[str | None, str | None]] = {}
"""Variables that imports have changed: what they found, and what they left."""


def import_all(modules: Sequence[str]) -> None:
    """Import these modules, one after the other; ForkRefusedError names one after which nothing may be forked."""
    had, given = _open_files(), dict(os.environ)
    fault = fork_fault(had)
    if fault:
        raise wire.ForkRefusedError(f"their parent {fault} before its imports")
    words = sys.argv = sys.argv if isinstance(sys.argv, _Words) else _Words(sys.argv)
    os.environ[NVML] = "1"
    gc.disable()
    try:
        with _missed_variables() as missed, _directories_made() as made:
            for module in modules:
                if module not in sys.modules:
                    words.read, before = False, _random_states()
                    _import(module)
                    fault = fork_fault(had) or _rank_fault(missed, words.read) or _random_fault(before) or _left(made)
                if fault:
                    raise wire.ForkRefusedError(f"{module} {fault}", module)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()
        os.environ.pop(NVML)
        if NVML in given:
            os.environ[NVML] = given[NVML]
        _note_changes(given)


def _import(module: str) -> None:
    try:
        importlib.import_module(module)
    except BaseException as error:  # whatever it is: a rank that imports it says it itself
        raise wire.ForkRefusedError(f"{module} cannot be imported: {type(error).__name__}: {error}", module) from error


def fork_fault(had: Mapping[int, str]) -> str:
    """What this process has done, since it had these open files, after which a fork of it is not as a new process;
    empty: nothing."""
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1 or threading.active_count() > 1:
        return f"has started {max(threads, threading.active_count()) - 1} thread(s)"
    opened = {file for number, file in _open_files().items() if had.get(number) != file}
    if opened - {*_WITHOUT_STATE}:
        return f"has opened {', '.join(sorted(opened - {*_WITHOUT_STATE}))}"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "has initialised CUDA"
    return ""


def _open_files() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found


@contextlib.contextmanager
def _directories_made() -> Iterator[list[str]]:
    """The temporary directories that are made inside."""
    made: list[str] = []
    usual = tempfile.mkdtemp

    def noted(*args: Any, **named: Any) -> Any:
        made.append(usual(*args, **named))
        return made[-1]

    tempfile.mkdtemp = noted
    try:
        yield made
    finally:
        tempfile.mkdtemp = usual


def _left(made: Sequence[str]) -> str:
    there = [path for path in made if os.path.isdir(path)]
    return f"has made the directory {there[0]}, which the first fork that ends would remove" if there else ""


# ------------------------------------------------------------------------------------------------------- environment


class _Environ(os._Environ[str]):
    """The environment, which notes what was looked for and is not there."""

    missed: ClassVar[set[str]] = set()

    def __getitem__(self, name: str) -> str:
        try:
            return super().__getitem__(name)
        except KeyError:
            self.missed.add(name)
            raise


@contextlib.contextmanager
def _missed_variables() -> Iterator[set[str]]:
    """The names of variables that are looked for inside and are not there."""
    usual = type(os.environ)
    _Environ.missed.clear()
    os.environ.__class__ = _Environ
    try:
        yield _Environ.missed
    finally:
        os.environ.__class__ = usual


def _note_changes(given: Mapping[str, str]) -> None:
    for name in given.keys() | os.environ.keys():
        if given.get(name) != os.environ.get(name):
            _changed[name] = _changed.get(name, (given.get(name), None))[0], os.environ.get(name)


def repeat_changes(environ: MutableMapping[str, str]) -> None:
    """Do with the environment of a forked process what imports have done with that of its parent, where they would have
    found the same."""
    for name, (found, left) in _changed.items():
        if environ.get(name) == found:
            if left is not None:
                environ[name] = left
            else:
                environ.pop(name, None)


# ------------------------------------------------------------------------------------- command line and generators


class _Words(list[str]):
    """The command line, which notes whether more than the program is read of it."""

    read = False

    def __getitem__(self, place: Any) -> Any:
        self.read = self.read or place != 0
        return super().__getitem__(place)

    def __iter__(self) -> Iterator[str]:
        self.read = True
        return super().__iter__()


def _rank_fault(missed: set[str], read: bool) -> str:
    own = sorted(name for name in missed if name.startswith(OF_A_RANK)) + ["the command line"] * read
    return f"reads {own[0]} as it is imported, which each rank has of its own" if own else ""


def _random_states() -> dict[str, object]:
    """The states of the generators that libraries share."""
    states: dict[str, object] = {"random": random.getstate()}
    if "numpy.random" in sys.modules:
        name, numbers, *rest = sys.modules["numpy.random"].get_state()
        states["numpy.random"] = name, numbers.tobytes(), rest
    if "torch" in sys.modules:
        states["torch"] = sys.modules["torch"].default_generator.get_state().numpy().tobytes()
    return states


def _random_fault(before: Mapping[str, object]) -> str:
    now = _random_states()
    used = [name for name in before if now[name] != before[name]]
    return f"uses the random numbers of {used[0]} as it is imported, whose state forks have not" if used else ""


# ------------------------------------------------------------------------------------------------------------- files


def finds_this_package(search_path: Sequence[str]) -> bool:
    """Whether a process with this search path imports the package that this one has imported."""
    spec = importlib.machinery.PathFinder.find_spec("spare_megatron", list(search_path))
    return spec is not None and spec.origin is not None and Path(spec.origin).resolve().parent == wire.PACKAGE


def other_file() -> str:
    """A module that this process has imported, and a new one with the search path of this one would import from another
    file: both, in words; empty where there is none. One that would not be found at all is one that its package has
    found in a way of its own."""
    importlib.invalidate_caches()
    for name, spec in _found_by_path():
        found = find_module(name, getattr(sys.modules.get(name.rpartition(".")[0]), "__path__", sys.path))
        if found is not None and found.origin != spec.origin and not _is_same(str(found.origin), str(spec.origin)):
            return f"it has imported {spec.origin}, where the script would import {found.origin}"
    return ""


def _is_same(one: str, other: str) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def _found_by_path() -> Iterator[tuple[str, importlib.machinery.ModuleSpec]]:
    """Name and origin of modules with a file that are in no package, or in one without a file, whose parts may lie in
    several places, as ``megatron.core``."""
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        above = getattr(sys.modules.get(name.rpartition(".")[0]), "__spec__", None)
        if name != "__main__" and spec is not None and spec.has_location and not (above and above.has_location):
            yield name, spec


def imported_files() -> dict[str, int]:
    """The files of all modules, and when each was changed last."""
    specs = [getattr(module, "__spec__", None) for module in list(sys.modules.values())]
    files = {str(spec.origin) for spec in specs if spec is not None and spec.has_location}
    return {file: changed_ns(file) for file in files}


def changed_ns(file: str) -> int:
    """When a file was changed last; 0 where it is not there."""
    try:
        return os.stat(file).st_mtime_ns
    except OSError:
        return 0

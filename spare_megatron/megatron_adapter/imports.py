"""Makes imports cheaper: they are most of a rank's start.

Promises: importing this module imports neither torch nor megatron.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Inside, no garbage is collected, and what is there at the end is never looked through for any.

    Imports make hardly any, and to look for it again and again took a fifth of their time. The 450,000 objects that
    they leave would be looked through once as a whole by each generation of the collector, which takes 0.2 s, and 0.7
    on a busy machine: the second time is among the first steps, or just as a group has died.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()


class _Name:
    """An attribute of a module, which is imported when something is done with it."""

    def __init__(self, module: str, name: str) -> None:
        self._place = module, name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._found(), attribute)

    def __call__(self, *positional: Any, **named: Any) -> Any:
        return self._found()(*positional, **named)

    def _found(self) -> Any:
        module, name = self._place
        return getattr(importlib.import_module(module), name)


class _Module(types.ModuleType):
    """Stands for a module that is not imported yet."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(self.__name__, name)


@contextlib.contextmanager
def imported_when_used(package: str, *modules: str) -> Iterator[None]:
    """Inside, what is imported from a package or some ``modules`` of it is imported when it is first used, unless the
    package has been imported already, or is not installed."""
    if package in sys.modules or importlib.util.find_spec(package) is None:
        yield
        return
    stand_ins = {name: _Module(name) for name in (package, *modules)}
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name in stand_ins:
            del sys.modules[name]

"""Reads pickles without importing a module that they name and without running their code.

Values of plain types and containers come out as they are. An object of any other class becomes an :class:`Inert` one,
which keeps the state that the pickle gives it and does nothing.
"""

from __future__ import annotations

import argparse
import pickle
from typing import IO, Any


class Inert:
    """Takes the place of an object of any other class, and accepts whatever a pickle does to build one."""

    state: Any = None
    """What the pickle says of the object: for most classes the attributes by name."""

    def __new__(cls, *_args: Any, **_options: Any) -> Inert:
        return object.__new__(cls)

    def __init__(self, *_args: Any, **_options: Any) -> None:
        """Accept any arguments."""

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, _key: Any, _value: Any) -> None:
        """Accept an item, as a dictionary does, and drop it."""

    def append(self, _value: Any) -> None:
        """Accept an element, as a list does, and drop it."""

    def extend(self, _values: Any) -> None:
        """Accept elements, as a list does, and drop them."""

    def add(self, _value: Any) -> None:
        """Accept an element, as a set does, and drop it."""


class InertUnpickler(pickle.Unpickler):
    """An unpickler whose classes do nothing.

    Each instance makes its own classes, because a pickle may also set attributes of classes.
    """

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self._inert = type("Inert", (Inert,), {})
        self._known = {
            ("argparse", "Namespace"): type("Namespace", (argparse.Namespace,), {}),
            ("collections", "OrderedDict"): type("OrderedDict", (dict,), {}),
        }

    def find_class(self, module: str, name: str) -> type:
        return self._known.get((module, name), self._inert)

    def persistent_load(self, _pid: Any) -> Any:
        """An inert object in the place of a tensor's storage, which is another file of the archive."""
        return self._inert()

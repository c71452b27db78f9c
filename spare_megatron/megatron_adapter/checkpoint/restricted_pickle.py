"""Reads pickles without importing a module that they name and without running their code.

torch's and Megatron's formats force pickles on us, and a pickle can name any function of any module and have it called.
Every pickle that this framework reads goes through one of the two classes below, or through torch's own
``weights_only=True`` (``megatron_adapter.checkpoint.safe_loading``). Plain values and containers come out as they are.
An object of another class becomes an :class:`Inert` one, which keeps the state that the pickle gives it and does
nothing (:class:`InertUnpickler`), or is refused unless its class is on a list (:class:`RestrictedUnpickler`).

Importing this module imports neither torch nor megatron.
"""

from __future__ import annotations

import argparse
import enum
import pickle
from collections.abc import Callable, Mapping
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


class ForbiddenPickleError(pickle.UnpicklingError):
    """A pickle names what no checkpoint has; the message says what, and nothing of it was called."""


class RestrictedUnpickler(pickle.Unpickler):
    """An unpickler that finds the names on a list and no others.

    Raises:
        ForbiddenPickleError: the pickle names anything else, or changes a class of the list.
    """

    def __init__(self, file: IO[bytes], allowed: Mapping[tuple[str, str], Callable[..., Any]]) -> None:
        """``allowed`` maps (module, name) to what stands for it."""
        super().__init__(file)
        self._allowed = allowed

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member  # how Python 3.11 pickles the members of an enumeration
        if (module, name) not in self._allowed:
            raise ForbiddenPickleError(
                f"it names {module}.{name}, which no checkpoint has there; nothing of it was run"
            )
        return self._allowed[module, name]

    def load(self) -> Any:
        """The object. A pickle can also set attributes of classes: what it sets is undone, and the pickle refused."""
        classes = {one: dict(vars(one)) for one in self._allowed.values() if isinstance(one, type)}
        try:
            return super().load()
        finally:
            changed = [one for one, before in classes.items() if _restored(one, before)]
            if changed:
                raise ForbiddenPickleError(f"it changes the class {changed[0].__qualname__}; the change was undone")


def _member(kind: Any, name: Any) -> Any:
    if not (isinstance(kind, enum.EnumMeta) and isinstance(name, str) and name in kind.__members__):
        raise ForbiddenPickleError("it names builtins.getattr, and not for the member of an enumeration")
    return kind[name]


def _restored(kind: type, before: Mapping[str, Any]) -> bool:
    """Whether the attributes of a class differed from those before; they are set back."""
    now = dict(vars(kind))
    differing = {name for name in now.keys() | before.keys() if now.get(name) is not before.get(name)}
    for name in differing:
        if name in before:
            setattr(kind, name, before[name])
        else:
            delattr(kind, name)
    return bool(differing)

"""Makes one object for each value, compared by identity, so that millions of worlds share it and hash it fast."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar, cast

T_co = TypeVar("T_co", covariant=True)
H = TypeVar("H", bound=Hashable)


class Kept(Generic[T_co]):
    """The only wrapper of its value in one :class:`Keeper`: equal values are the same object."""

    __slots__ = ("value",)

    def __init__(self, value: T_co) -> None:
        self.value = value

    def __repr__(self) -> str:
        return repr(self.value)


class Keeper:
    """Makes :class:`Kept` values. A ``forgetful`` one makes a new one each time: for walks, which never ask
    whether a world is known."""

    def __init__(self, forgetful: bool = False) -> None:
        self._forgetful = forgetful
        self._kept: dict[Hashable, Kept[Hashable]] = {}
        self._shared: dict[Hashable, Hashable] = {}

    def keep(self, value: H) -> Kept[H]:
        """The wrapper of a value."""
        if self._forgetful:
            return Kept(value)
        found = self._kept.get(value)
        if found is None:
            found = self._kept[value] = Kept(value)
        return cast(Kept[H], found)

    def share(self, value: H) -> H:
        """The first value that was given and is equal to this one, so that copies need no memory of their own."""
        return value if self._forgetful else cast(H, self._shared.setdefault(value, value))

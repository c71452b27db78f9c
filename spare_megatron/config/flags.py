"""How a dataclass field says which command-line flag it is.

A field of a config dataclass is the flag ``--field-name`` unless :func:`flag` gives other names. What follows from
the annotation: ``bool`` that is False is a switch that turns it on, ``bool`` that is True needs names (``--no-...``),
``Literal`` gives choices, ``tuple[...]`` takes several words, ``| None`` may be left out. The text of ``--help`` is
the docstring under the field.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class FlagMeta:
    """What the annotation alone does not say."""

    names: tuple[str, ...] = ()
    """Flag names; empty: one name made from the field's."""
    kind: str = ""
    """Overrides the kind that the annotation gives ('int', 'float', 'str', 'on', 'off', 'int-or-auto', ...)."""
    nargs: str | int = ""
    """'+', '*' or a number of words for tuples; empty: '+'."""


def flag(default: Any, *names: str, kind: str = "", nargs: str | int = "") -> Any:
    """A dataclass field with ``default`` whose flag differs from what the annotation says."""
    return field(default=default, metadata={"flag": FlagMeta(names, kind, nargs)})

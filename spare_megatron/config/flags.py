"""Declares which command-line flag a dataclass field is, and how flags are named.

A field of a config dataclass is the flag ``--field-name`` unless :func:`flag` gives other names. The annotation decides
what the flag takes: a ``bool`` with default False is a switch that turns it on, a ``bool`` with default True needs
names (``--no-...``), ``Literal`` gives choices, ``tuple[...]`` takes several words, and ``| None`` may be left out. The
docstring under the field is the text of ``--help``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class FlagMeta:
    """The properties of a flag that do not follow from the annotation."""

    names: tuple[str, ...] = ()
    """Names of the flag; empty: the name made from the field's."""
    kind: str = ""
    """The kind of the flag, where it differs from the annotation's: 'int', 'float', 'str', 'on', 'off', 'int-or-auto',
    ..."""
    nargs: str | int = ""
    """How many words a tuple takes: '+', '*' or a number; empty: '+'."""


def flag(default: Any, *names: str, kind: str = "", nargs: str | int = "") -> Any:
    """A dataclass field with ``default`` whose flag does not follow from its name and annotation alone."""
    return field(default=default, metadata={"flag": FlagMeta(names, kind, nargs)})


def flag_name(dest: str) -> str:
    """The name of the flag whose value is called ``dest``."""
    return "--" + dest.replace("_", "-")

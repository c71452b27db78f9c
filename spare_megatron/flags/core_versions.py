"""Says which versions of megatron-core have a field or a value, and what the installed one has.

``core_fields.json`` has the fields of megatron-core's dataclasses, by minor version, as
``megatron_adapter.flag_sources`` finds them there. Flags are made of all of them, so that a flag of a newer
megatron-core is known everywhere, and a job with an older one can report which version it needs. Imports neither torch
nor megatron: the installed version is read from its package's metadata.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Sequence
from typing import Any

from spare_megatron.megatron_adapter.flag_sources import Minor, read_tables
from spare_megatron.megatron_adapter.versions import core_version, minor_of

tables = functools.cache(read_tables)


@functools.cache
def rows_of(minor: Minor) -> dict[str, dict[str, Any]]:
    """Field -> its first row in one version's table."""
    rows: dict[str, dict[str, Any]] = {}
    for row in tables()[minor]["fields"]:
        rows.setdefault(row["field"], row)
    return rows


def installed() -> Minor:
    """The version whose table counts here: the installed one's, or the nearest older one's; the newest where
    megatron-core is not installed, which other checks say."""
    try:
        mine = minor_of(core_version())
    except importlib.metadata.PackageNotFoundError:
        return max(tables())
    return max((minor for minor in tables() if minor <= mine), default=min(tables()))


@functools.cache
def all_rows() -> tuple[dict[str, Any], ...]:
    """The rows of the newest version, and after them those that only older ones have."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for minor in reversed(tables()):
        for row in tables()[minor]["fields"]:
            rows.setdefault((row["class"], row["field"]), row)
    return tuple(rows.values())


def versions_with(field: str, value: Any = None) -> list[Minor]:
    """The versions whose dataclasses have the field, and take ``value`` where they name the possible values."""
    values = value if isinstance(value, list) else [value]
    return [
        minor
        for minor in tables()
        if (row := rows_of(minor).get(field)) is not None
        and all(one is None or one in row.get("choices", [one]) for one in values)
    ]


def in_words(having: Sequence[Minor]) -> str:
    """'megatron-core 0.18 or later', for the versions of :func:`versions_with`; empty for all of them."""
    known = list(tables())
    if list(having) == known:
        return ""
    if not having:
        return f"a megatron-core later than {_text(known[-1])}"
    if having[-1] == known[-1]:
        return f"megatron-core {_text(having[0])} or later"
    return f"megatron-core {_text(having[-1])}" + (" or earlier" if having[0] == known[0] else "")


def needed(field: str, value: Any = None) -> str:
    """The megatron-core that a field, and a value of it, need, in words; empty where the installed one has them."""
    having = versions_with(field, value)
    return "" if installed() in having else in_words(having)


def _text(minor: Minor) -> str:
    return ".".join(map(str, minor))

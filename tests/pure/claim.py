"""What a measured figure of a page is compared with.

A claim is a page, words of it with ``{}`` in place of each figure, and the figures' places in a file of
benchmarks/results. A figure agrees when the file's value, rounded as the page shows it, is what the page says. Words
match whatever the line breaks.
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
HISTORY, GENERATED = "docs/log.md", ("docs/flags.md", "docs/api.md")
PAGES = ("README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
TWO_GROUPS, FOUR_GROUPS = "PP2 x 2 groups, K=8", "1 x 4 groups, K=8"
"""Cases of the benchmarks of a step."""
SMALL = {"shape": "PP2 x 4", "hidden": 128}
"""The job whose masked failures README shows."""


@dataclass(frozen=True)
class Figure:
    """A value of a results file, and the words that say where it stands."""

    value: float | str
    source: str

    def times(self, factor: float) -> Figure:
        return Figure(float(self.value) * factor, f"{self.source}, times {factor:g}")


@dataclass(frozen=True)
class Claim:
    """``words`` of ``page`` hold these figures, in this order."""

    page: str
    words: str
    figures: tuple[Figure, ...]


@dataclass(frozen=True)
class Results:
    """One file of benchmarks/results."""

    name: str

    @functools.cached_property
    def content(self) -> dict[str, Any]:
        return dict(json.loads((RESULTS / self.name).read_text()))

    def __call__(self, key: str, **row: object) -> Figure:
        """The value of ``key`` in the only row of the results that has these values."""
        rows = [one for one in self.content["results"] if all(one[name] == value for name, value in row.items())]
        where = ", ".join(f"{name}={value}" for name, value in row.items())
        assert len(rows) == 1, f"{self.name} has {len(rows)} rows with {where}"
        return Figure(rows[0][key], f"{self.name}: {key} ({where})")

    def config(self, key: str) -> Figure:
        return Figure(self.content["config"][key], f"{self.name}: config.{key}")

    def every(self, key: str, **row: object) -> list[float]:
        """The values of ``key`` in all rows that have these values."""
        rows = (one for one in self.content["results"] if all(one[name] == value for name, value in row.items()))
        return [float(one[key]) for one in rows]

    def of(self, value: float, words: str) -> Figure:
        """A value made of several of the file's, as the words say."""
        return Figure(value, f"{self.name}: {words}")


def pattern(words: str) -> re.Pattern[str]:
    """What the words look like in a page: any white space between them, any word in place of ``{}``."""
    assert not words.endswith("{}"), f"words behind the last figure are missing: {words}"
    parts = [r"\s+".join(map(re.escape, part.split(" "))) for part in words.split("{}")]
    return re.compile(r"([^\s|]+?)".join(parts) + r"(?!\d)")


def shown(value: float | str, like: str) -> str:
    """The value with as many decimals, and in the form, that ``like`` has."""
    if isinstance(value, str):
        return value
    digits, power, _ = like.lower().partition("e")
    decimals = len(digits.partition(".")[2])
    sign = "+" if like.startswith("+") else ""
    if power:
        return re.sub(
            r"e([+-])0*(\d)", lambda match: f"e{match[1].strip('+')}{match[2]}", f"{value:{sign}.{decimals}e}"
        )
    return f"{value:{sign}{',' if ',' in like else ''}.{decimals}f}"

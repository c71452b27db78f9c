"""docs/api.md, written from the code: what programs may import.

    python -m tests.pure.api_page

writes the page; a test compares.
"""

from __future__ import annotations

import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from spare_megatron.training.megatron_exports import EXPORTS

ARGUMENT = re.compile(r"^    (\w+): ")
"""One entry of a docstring's Args or Raises."""
PAGE = Path(__file__).resolve().parents[2] / "docs" / "api.md"
INTRODUCTION = """# What programs may import

Written by `python -m tests.pure.api_page`; a test checks that it is current. Names on this page keep their meaning; the
[changelog](../CHANGELOG.md) announces a change. Everything else in the package is internal. Commands, flags, files and
exit codes are in [reference.md](reference.md) and [operating.md](operating.md).
"""
SCRIPTS = """## For Megatron scripts: `spare_megatron.training`

Also importable from `spare_megatron`, and from the modules in which Megatron has them
([from_megatron.md](from_megatron.md#2-the-script-its-import-lines)). Each is loaded when it is first used.
"""
ENGINE = """## For an engine of your own

The fault-tolerant step loop runs any model that implements `StepEngine`. `examples/torch_only/` is a complete program.
"""
OWN_ENGINE = (
    "spare_megatron.worker.engine.StepEngine",
    "spare_megatron.worker.worker.train_rank",
    "spare_megatron.worker.worker.RankJob",
    "spare_megatron.worker.fault_injection.Injector.from_environment",
    "spare_megatron.protocol.messages.JobSpec",
    "spare_megatron.protocol.tickets.Ticket",
    "spare_megatron.config.job.JobDescription",
    "spare_megatron.config.place.place_of",
    "spare_megatron.config.place.world_hint",
    "spare_megatron.placement.build_placement",
)


def text() -> str:
    """The page."""
    parts = [INTRODUCTION, SCRIPTS]
    for name, module in EXPORTS.items():
        parts.extend(_entry(name, getattr(importlib.import_module(module), name)))
    parts.append(ENGINE)
    for path in OWN_ENGINE:
        parts.extend(_entry(path, _found(path)))
    return "\n".join(_wrapped(part) if not part.startswith("```") else part for part in parts)


def _found(path: str) -> Any:
    names, found = path.split("."), None
    for number, name in enumerate(names):
        found = getattr(found, name) if hasattr(found, name) else importlib.import_module(".".join(names[: number + 1]))
    return found


def _entry(name: str, thing: Any) -> Iterator[str]:
    yield f"### `{name}`\n"
    if not inspect.isclass(thing):
        yield f"```python\n{name.rpartition('.')[2]}{_signature(thing)}\n```\n"
    yield _prose(inspect.getdoc(thing))
    if is_dataclass(thing):
        yield "Fields: " + ", ".join(f"`{field.name}`" for field in fields(thing)) + ".\n"
    elif inspect.isclass(thing):
        own = (base for base in thing.__mro__ if base.__module__ == thing.__module__)
        for method, function in {name: one for base in own for name, one in vars(base).items()}.items():
            if inspect.isfunction(function) and not method.startswith("_"):
                yield f"```python\n{method}{_signature(function)}\n```\n"
                yield _prose(inspect.getdoc(function))


def _signature(thing: Any) -> str:
    words = re.sub(r"<function .*?>+ at \w+>", "...", str(inspect.signature(thing)).replace("'", ""))
    if len(words) <= 100:
        return words
    inside, _, result = words[1:].rpartition(")")
    return "(\n    " + ",\n    ".join(re.split(r", (?![^\[]*\])", inside)) + f",\n){result}"


def _prose(docstring: str | None) -> str:
    """A docstring as Markdown: roles and double backticks become code."""
    assert docstring, "what programs may import has a docstring"
    plain = re.sub(r":\w+:`~?([^`]+)`", lambda match: f"`{match[1].removeprefix('spare_megatron.')}`", docstring)
    lines = plain.replace("``", "`").split("\n")
    return "\n".join(ARGUMENT.sub(r"\n- `\1`: ", line) for line in lines) + "\n"


def _wrapped(part: str) -> str:
    if part.startswith("#"):
        heading, _, rest = part.partition("\n")
        return f"{heading}\n{_wrapped(rest)}" if rest.strip() else part
    blocks = (" ".join(block.split()) for block in part.strip("\n").split("\n\n"))
    wrapped = (
        textwrap.fill(one, 120, subsequent_indent="  " * one.startswith("- "), break_on_hyphens=False) for one in blocks
    )
    return "\n" * part.startswith("\n") + "\n\n".join(wrapped) + "\n"


if __name__ == "__main__":
    PAGE.write_text(text())

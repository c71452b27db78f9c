"""Makes the tables of the fields of megatron-core's dataclasses, from which flags are made: one for each minor version.

They are kept together in ``flags/core_fields.json``, so that flags are read and refused without importing megatron-core
(a second or more); a test makes that of the installed version anew and compares. A row that not all versions have names
the first (``since``) and the last minor version that have it (``until``). With another megatron-core installed:

    python -m spare_megatron.megatron_adapter.flag_sources

writes its rows. The help text of a field is read from megatron-core's source, only for ``--help``.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import importlib.util
import json
import sys
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spare_megatron.megatron_adapter.versions import core_version, minor_of

CORE_FIELDS = Path(__file__).parents[1] / "flags" / "core_fields.json"
Minor = tuple[int, int]
"""A minor version, such as (0, 16)."""

# class -> the module that defines it
CLASSES = {
    "TransformerConfig": "megatron.core.transformer.transformer_config",
    "MLATransformerConfig": "megatron.core.transformer.transformer_config",
    "OptimizerConfig": "megatron.core.optimizer.optimizer_config",
    "DistributedDataParallelConfig": "megatron.core.distributed.distributed_data_parallel_config",
}
# source files, under megatron/core, that hold the field docstrings of these classes and of their parents
SOURCES = (
    "model_parallel_config.py",
    "transformer/transformer_config.py",
    "optimizer/optimizer_config.py",
    "distributed/distributed_data_parallel_config.py",
)


def dataclass_types() -> dict[str, type]:
    """Name -> class of the dataclasses in CLASSES. Imports megatron-core."""
    from spare_megatron.megatron_adapter.shims import install_cpu_shims

    install_cpu_shims()
    return {name: getattr(importlib.import_module(module), name) for name, module in CLASSES.items()}


def kind_of(annotation: Any) -> dict[str, Any] | None:
    """How a field of this type is read from one or several words of a command line; None for callables, dtypes etc."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        parts = tuple(part for part in parts if part is not type(None))
        return kind_of(parts[0]) if len(parts) == 1 else None
    if origin is typing.Literal:
        return {"kind": type(parts[0]).__name__, "choices": list(parts)}
    if origin in (list, typing.List):  # noqa: UP006
        inner = kind_of(parts[0])
        return inner and {**inner, "nargs": "+"}
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return {"kind": "str", "choices": [member.name for member in annotation]}
    if annotation in (int, float, str):
        return {"kind": annotation.__name__}
    return {"kind": "bool"} if annotation is bool else None


def plain_default(field: dataclasses.Field[Any]) -> Any:
    """A field's default as JSON can represent it."""
    value = field.default
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    return value.name if isinstance(value, enum.Enum) else value


def core_table() -> dict[str, Any]:
    """Every field of every class that can be a flag. Imports megatron-core."""
    classes = dataclass_types()
    rows = []
    for name, cls in classes.items():
        hints = typing.get_type_hints(cls)
        inherited = {field.name for base in cls.__bases__ if base is not object for field in dataclasses.fields(base)}
        if name == "TransformerConfig":
            inherited = set()  # its parent, ModelParallelConfig, is not listed by itself
        for field in dataclasses.fields(cls):
            kind = kind_of(hints[field.name])
            if kind is not None and field.init and field.name not in inherited:
                rows.append({"class": name, "field": field.name, **kind, "default": plain_default(field)})
    return {"megatron_core": core_version(), "fields": rows}


def read_tables() -> dict[Minor, dict[str, Any]]:
    """Minor version -> what :func:`core_table` returned there, oldest first."""
    kept = json.loads(CORE_FIELDS.read_text())
    tables: dict[Minor, dict[str, Any]] = {
        minor_of(version): {"megatron_core": version, "fields": []} for version in kept["megatron_core"]
    }
    for row in kept["fields"]:
        since, until = row.pop("since", None), row.pop("until", None)
        for minor, table in tables.items():
            if (since is None or minor_of(since) <= minor) and (until is None or minor <= minor_of(until)):
                table["fields"].append(row)
    return tables


def tables_text(tables: Mapping[Minor, Mapping[str, Any]]) -> str:
    """The tables of minor versions as one JSON with a row on each line. Raises ValueError where two versions have a row
    that one between them has not."""
    minors = sorted(tables)
    lines: dict[str, list[Minor]] = {}
    order: list[str] = []  # that of the newest version; what only older ones have stands behind its neighbour there
    for minor in reversed(minors):
        place = 0
        for line in map(json.dumps, tables[minor]["fields"]):
            if line not in lines:
                order.insert(place, line)
            lines.setdefault(line, []).insert(0, minor)
            place = order.index(line) + 1
    rows = []
    for line in order:
        since, until = lines[line][0], lines[line][-1]
        if lines[line] != [minor for minor in minors if since <= minor <= until]:
            raise ValueError(f"some versions between {since} and {until} lack {line}; write two rows that differ")
        row = json.loads(line)
        row |= {"since": "{}.{}".format(*since)} if since != minors[0] else {}
        row |= {"until": "{}.{}".format(*until)} if until != minors[-1] else {}
        rows.append("  " + json.dumps(row))
    versions = json.dumps([tables[minor]["megatron_core"] for minor in minors])
    return f'{{"megatron_core": {versions},\n "fields": [\n' + ",\n".join(rows) + "\n]}\n"


def field_docs() -> dict[str, str]:
    """Field name -> its docstring in megatron-core's source. Imports nothing of megatron-core."""
    found = importlib.util.find_spec("megatron")
    roots = [Path(root) / "core" for root in (found.submodule_search_locations or ())] if found else []
    docs: dict[str, str] = {}
    for path in (root / source for root in roots for source in SOURCES):
        if not path.is_file():
            continue
        for cls in (node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)):
            for field, text in zip(cls.body, cls.body[1:], strict=False):
                if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
                    continue
                if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                    docs.setdefault(field.target.id, " ".join(str(text.value.value).split()))
    return docs


def main() -> None:
    table = core_table()
    CORE_FIELDS.write_text(tables_text({**read_tables(), minor_of(table["megatron_core"]): table}))
    sys.stdout.write(f"{CORE_FIELDS}: {len(table['fields'])} fields of megatron-core {table['megatron_core']}\n")


if __name__ == "__main__":
    main()

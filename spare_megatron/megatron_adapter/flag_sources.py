"""Makes a table of the fields of megatron-core's dataclasses, from which flags are made.

The tables are kept in ``flags/core_tables/``, one for each minor version, so that flags are read and refused without
importing megatron-core (a second or more); a test makes that of the installed version anew and compares. With another
megatron-core installed:

    python -m spare_megatron.megatron_adapter.flag_sources

writes its table. The help text of a field is read from megatron-core's source, only for ``--help``.
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
from pathlib import Path
from typing import Any

from spare_megatron.megatron_adapter.versions import core_version

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


def table_text(table: dict[str, Any]) -> str:
    """The table as JSON with a field on each line."""
    lines = ",\n".join("  " + json.dumps(row) for row in table["fields"])
    return f'{{"megatron_core": "{table["megatron_core"]}",\n "fields": [\n{lines}\n]}}\n'


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
    minor = ".".join(table["megatron_core"].split(".")[:2])
    target = Path(__file__).parent.parent / "flags" / "core_tables" / f"{minor}.json"
    target.write_text(table_text(table))
    sys.stdout.write(f"{target}: {len(table['fields'])} fields of megatron-core {table['megatron_core']}\n")


if __name__ == "__main__":
    main()

"""Makes the specifications of all flags from our dataclasses and megatron-core's, with Megatron-LM's names.

``SECTIONS`` are our dataclasses. ``core_fields.json`` lists the fields of megatron-core's dataclasses, by version
(:mod:`core_versions`), ``megatron_lm.json`` the whole command line of Megatron-LM. A flag is supported when one of our
dataclasses has its field, or when a megatron-core has it and it is not refused (:mod:`supported`).
Imports neither torch nor megatron, so that bad flags are refused at once.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import json
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spare_megatron.config import sections
from spare_megatron.config.flags import FlagMeta, flag_name
from spare_megatron.config.spare import SpareConfig
from spare_megatron.flags import core_versions

HERE = Path(__file__).parent

# section name -> (title of --help, dataclass); the order is that of --help
SECTIONS: dict[str, tuple[str, type]] = {
    "spare": ("masking failures", SpareConfig),
    "training": ("training", sections.TrainingConfig),
    "model": ("model", sections.ModelConfig),
    "schedule": ("learning rate and weight decay", sections.ScheduleConfig),
    "ademamix": ("AdEMAMix (--optimizer ademamix)", sections.AdemamixConfig),
    "data": ("data", sections.DataConfig),
    "tokenizer": ("tokenizer", sections.TokenizerConfig),
    "evaluation": ("evaluation", sections.EvaluationConfig),
    "checkpoint": ("checkpoints", sections.CheckpointConfig),
    "logging": ("logging", sections.LoggingConfig),
}
CORE_SECTIONS: dict[str, str] = {
    "TransformerConfig": "megatron-core: model and parallelism",
    "MLATransformerConfig": "megatron-core: multi-latent attention",
    "OptimizerConfig": "megatron-core: optimizer",
    "DistributedDataParallelConfig": "megatron-core: gradients",
}


MORE_CHOICES: dict[str, tuple[str, ...]] = {"optimizer": ("ademamix",)}
"""Destination -> values that are honoured here and that Megatron-LM does not have."""


@dataclass(frozen=True)
class FlagSpec:
    """One flag."""

    names: tuple[str, ...]
    dest: str
    kind: str
    """'int', 'float', 'str', 'on' (sets True), 'off' (sets False), 'int-or-auto' (auto becomes None) or
    'steps-or-auto' (auto stays 'auto'; None means that the flag was not given)."""
    default: Any
    section: str
    """A key of SECTIONS or of CORE_SECTIONS."""
    choices: tuple[Any, ...] = ()
    nargs: str | int = ""


def unwrapped(annotation: Any) -> Any:
    """The annotation without ``| None``."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return next(part for part in typing.get_args(annotation) if part is not type(None))
    return annotation


def specs_of(section: str, cls: type) -> list[FlagSpec]:
    """The flags of one of our dataclasses."""
    hints = typing.get_type_hints(cls)
    prefix = "spare_" if cls is SpareConfig else ""
    specs = []
    for field in dataclasses.fields(cls):
        meta: FlagMeta = field.metadata.get("flag", FlagMeta())
        kind: Any = unwrapped(hints[field.name])
        nargs: str | int = ""
        choices: tuple[Any, ...] = ()
        if typing.get_origin(kind) is tuple:
            kind, nargs = typing.get_args(kind)[0], meta.nargs or "+"
        if typing.get_origin(kind) is typing.Literal:
            choices = typing.get_args(kind)
            kind = type(choices[0])
        word = meta.kind or kind.__name__
        if word == "bool":
            word = "off" if field.default else "on"
        dest = prefix + field.name
        default = list(field.default) if isinstance(field.default, tuple) else field.default
        specs.append(FlagSpec(meta.names or (flag_name(dest),), dest, word, default, section, choices, nargs=nargs))
    return specs


@functools.cache
def megatron_table() -> dict[str, dict[str, Any]]:
    """Megatron-LM's command line: destination -> its row of ``megatron_lm.json``."""
    rows = json.loads((HERE / "megatron_lm.json").read_text())["flags"]
    table: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row["dest"] in table:  # two flags of one destination: the first row keeps the default
            table[row["dest"]] = {**table[row["dest"]], "names": table[row["dest"]]["names"] + row["names"]}
        else:
            table[row["dest"]] = row
    return table


def core_table() -> dict[str, Any]:
    """The fields of the installed megatron-core's dataclasses."""
    return core_versions.tables()[core_versions.installed()]


def own_specs() -> list[FlagSpec]:
    """The flags of our dataclasses."""
    return [spec for section, (_, cls) in SECTIONS.items() for spec in specs_of(section, cls)]


def core_specs(taken: set[str]) -> list[FlagSpec]:
    """The flags of the fields of any megatron-core that Megatron-LM's command line has and ``taken`` does not.

    Names, choices and defaults are the command line's, which differ from the dataclass here and there (``min_lr``).
    """
    specs, seen = [], set(taken)
    for row in core_versions.all_rows():
        known = megatron_table().get(row["field"])
        if known is None or row["field"] in seen:
            continue
        seen.add(row["field"])
        kind = known["kind"] if row["kind"] == "bool" else row["kind"]
        choices = tuple(known.get("choices") or row.get("choices") or ())
        choices += MORE_CHOICES.get(row["field"], ())
        specs.append(
            FlagSpec(
                tuple(known["names"]),
                row["field"],
                kind,
                known["default"],
                row["class"],
                choices,
                nargs=row.get("nargs", ""),
            )
        )
    return specs


def docs_of(cls: type) -> dict[str, str]:
    """Field name -> the docstring under it in the source of one of our dataclasses."""
    (tree,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(tree, ast.ClassDef)
    docs = {}
    for field, text in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            docs[field.target.id] = " ".join(ast.literal_eval(text.value).split())
    return docs

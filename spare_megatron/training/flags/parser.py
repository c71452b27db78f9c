"""From words of a command line to a namespace with Megatron's names, or to one sentence that says what is wrong.

:func:`parse` honours every flag of :func:`specs.all_specs`, drops those of ``ALWAYS_SO``, refuses those of
:mod:`refusals` and finds the nearest known name of a flag that nobody knows. The namespace also has the defaults of
refused flags, because users' own code reads them. Imports neither torch nor megatron.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from spare_megatron.config.errors import ConfigError
from spare_megatron.training.flags import refusals
from spare_megatron.training.flags.specs import CORE_SECTIONS, SECTIONS, FlagSpec, all_specs, megatron_table

ExtraArguments = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]
"""Megatron's ``extra_args_provider``: adds the user's own flags."""

PROGRAM = "pretrain_gpt.py"
USAGE = "python pretrain_gpt.py FLAGS...    (one rank; spare-launch starts a whole job on one machine)"
EXAMPLE = """example:
  spare-launch --num-groups 2 pretrain_gpt.py --mock-data --tokenizer-type NullTokenizer --vocab-size 1000 \\
    --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 \\
    --micro-batch-size 1 --global-batch-size 8 --train-iters 20 --lr 1e-3

python pretrain_gpt.py --spare-check FLAGS... checks the flags without starting anything."""


class Parser(argparse.ArgumentParser):
    """argparse whose errors are ConfigError and whose help is complete and grouped."""

    def error(self, message: str) -> NoReturn:
        text = message.removeprefix("argument ")
        raise ConfigError(f"{text} (see --help)")


def whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"takes a whole number, but got {text!r}") from None


def any_number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"takes a number, but got {text!r}") from None
    if value != value or value in (float("inf"), float("-inf")):
        raise argparse.ArgumentTypeError(f"takes a finite number, but got {text!r}")
    return value


def whole_number_or_auto(text: str) -> int | None:
    if text == "auto":
        return None
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"takes 'auto' or a whole number, but got {text!r}") from None


TYPES: dict[str, Callable[[str], Any]] = {
    "int": whole_number,
    "float": any_number,
    "str": str,
    "int-or-auto": whole_number_or_auto,
}


def add_flag(group: Any, spec: FlagSpec, text: str) -> None:
    """One flag into an argument group."""
    help_text = text.replace("%", "%%")
    if spec.kind in ("on", "off"):
        action = "store_true" if spec.kind == "on" else "store_false"
        group.add_argument(*spec.names, dest=spec.dest, action=action, default=spec.default, help=help_text)
        return
    if spec.kind == "int-or-auto":
        help_text += " (default: auto)"
    elif spec.default is not None:
        help_text += f" (default: {spec.default})"
    group.add_argument(
        *spec.names,
        dest=spec.dest,
        type=TYPES[spec.kind],
        default=spec.default,
        choices=spec.choices or None,
        nargs=spec.nargs or None,
        metavar=None if spec.choices else {"int": "N", "float": "X", "int-or-auto": "auto|N"}.get(spec.kind, "WORD"),
        help=help_text,
    )


def make_parser(extra: ExtraArguments | None = None, docs: Mapping[str, str] | None = None) -> Parser:
    """The parser of all honoured flags; ``docs`` gives each destination's text for --help."""
    parser = Parser(
        prog=PROGRAM,
        usage=USAGE,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("-h", "--help", action="store_true", dest="spare_help", help="this text")
    titles = {name: title for name, (title, _) in SECTIONS.items()} | CORE_SECTIONS
    groups: dict[str, Any] = {}
    for spec in all_specs():
        if spec.section not in groups:
            groups[spec.section] = parser.add_argument_group(titles[spec.section])
        add_flag(groups[spec.section], spec, (docs or {}).get(spec.dest, ""))
    return (extra(parser) or parser) if extra else parser  # type: ignore[return-value]


def help_text(extra: ExtraArguments | None = None) -> str:
    """What --help prints: our docstrings, and megatron-core's own for its fields."""
    from spare_megatron.megatron_adapter.flag_sources import field_docs
    from spare_megatron.training.flags.specs import docs_of

    docs = field_docs()
    for section, (_, cls) in SECTIONS.items():
        prefix = "spare_" if section == "spare" else ""
        docs |= {prefix + name: text for name, text in docs_of(cls).items()}
    return make_parser(extra, docs).format_help()


def megatron_defaults() -> dict[str, Any]:
    """Destination -> default of every flag of Megatron-LM, honoured or not; lists are fresh copies."""
    rows = megatron_table().values()
    return {row["dest"]: list(row["default"]) if isinstance(row["default"], list) else row["default"] for row in rows}


def drop_or_refuse(words: Sequence[str], own: frozenset[str]) -> list[str]:
    """The words without ALWAYS_SO flags; ConfigError names every refused flag. ``own`` are the user's own flags."""
    refused, kinds = refusals.refused_names(), {}
    for row in megatron_table().values():
        kinds |= dict.fromkeys(row["names"], row["kind"])
    kept: list[str] = []
    given: list[tuple[str, refusals.Refusal]] = []
    skip = 0
    for word in words:
        name, _, value = word.partition("=")
        if skip:
            skip -= 1
        elif name in own or not name.startswith("--"):
            kept.append(word)
        elif name in refused:
            given.append((name, refused[name]))
        elif name in refusals.ALWAYS_SO:
            skip = int(kinds[name] not in ("on", "off") and not value)
        else:
            kept.append(word)
    if given:
        raise ConfigError(refusals.all_sentences(given))
    return kept


def nearest(name: str, own: frozenset[str]) -> str:
    """'; did you mean --x?' for an unknown flag, or nothing."""
    honoured = [name for spec in all_specs() for name in spec.names]
    return nearest_of(name, [*own, *honoured, *refusals.refused_names(), *refusals.ALWAYS_SO])


def nearest_of(name: str, known: Sequence[str]) -> str:
    """As :func:`nearest`, among ``known``."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else " (see --help)"


def refuse_values(namespace: argparse.Namespace) -> None:
    """ConfigError for a flag that is honoured, but not with this value."""
    specs = {spec.dest: spec for spec in all_specs()}
    for dest, why in refusals.DEFAULT_ONLY.items():
        if getattr(namespace, dest) != specs[dest].default:
            raise ConfigError(refusals.Refusal(*why).sentence(specs[dest].names[0]))
    for (dest, value), why in refusals.VALUES.items():
        given = getattr(namespace, dest)
        if given == value:
            raise ConfigError(refusals.Refusal(*why).sentence(f"{specs[dest].names[0]} {value}"))


def parse(
    words: Sequence[str], extra: ExtraArguments | None = None, defaults: Mapping[str, Any] | None = None
) -> argparse.Namespace:
    """The namespace of ``words`` (without the program's name), or ConfigError.

    ``defaults`` are Megatron's ``args_defaults``: values for flags that are not given and have no default.
    """
    parser = make_parser(extra)
    honoured = {name for spec in all_specs() for name in spec.names}
    own = frozenset(parser._option_string_actions) - honoured
    kept = drop_or_refuse(words, own)
    namespace, unknown = parser.parse_known_args(kept, argparse.Namespace(**megatron_start(parser)))
    if unknown:
        name = unknown[0].partition("=")[0]
        if name.startswith("-"):
            raise ConfigError(f"there is no flag {name}{nearest(name, own)}")
        raise ConfigError(f"the word {name!r} belongs to no flag; values follow their flag, as in --seq-length 1024")
    for key, value in (defaults or {}).items():
        if getattr(namespace, key, None) is None:
            setattr(namespace, key, value)
    refuse_values(namespace)
    return namespace


def megatron_start(parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Defaults of what the parser itself does not set."""
    own = {action.dest for action in parser._actions}
    return {dest: value for dest, value in megatron_defaults().items() if dest not in own}

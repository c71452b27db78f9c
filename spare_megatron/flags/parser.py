"""Parses a command line into a namespace with Megatron's names; ConfigError says in one sentence what is wrong.

:func:`parse` honours every flag of :func:`supported.all_specs`, notes those of :mod:`no_effect`, refuses those of
:mod:`refusals`, and names the nearest known flag for an unknown one. The namespace also has the defaults of refused
flags, because users' own code reads them. Imports neither torch nor megatron.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NoReturn

from spare_megatron.config.errors import ConfigError
from spare_megatron.flags import checkpoint_args, no_effect, refusals
from spare_megatron.flags.specs import SECTIONS, FlagSpec, megatron_table
from spare_megatron.flags.supported import all_specs, nearest_of
from spare_megatron.flags.yaml_config import with_yaml

ExtraArguments = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]
"""Megatron's ``extra_args_provider``: adds the user's own flags."""

PROGRAM = "pretrain_gpt.py"
USAGE = "python pretrain_gpt.py FLAGS...    (one rank; spare-launch starts a whole job on one machine)"
EXAMPLE = """examples:
  two groups of one rank on made-up data, on this machine:
  spare-launch --num-groups 2 pretrain_gpt.py --mock-data --tokenizer-type NullTokenizer \\
    --vocab-size 1000 --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 \\
    --max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 8 --train-iters 20 \\
    --lr 1e-3

  four groups of two pipeline stages, Llama style, one of them killed while gradients are summed:
  spare-launch --num-groups 4 --inject sigkill:group=1,step=5,at=reduce pretrain_gpt.py \\
    --pipeline-model-parallel-size 2 --data-path my_text_document --split 98,1,1 \\
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model my_tokenizer --num-layers 8 \\
    --hidden-size 512 --num-attention-heads 8 --swiglu --normalization RMSNorm \\
    --position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights \\
    --seq-length 512 --max-position-embeddings 512 --micro-batch-size 2 --global-batch-size 64 \\
    --train-iters 1000 --lr 3e-4 --save checkpoints --load checkpoints --save-interval 100

  experts spread over two ranks of each group, and its optimizer state divided between them:
  ... --num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 2 --use-distributed-optimizer

python pretrain_gpt.py --spare-check FLAGS... checks the flags without starting anything."""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are ConfigError."""

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


def steps_or_auto(text: str) -> int | str:
    found = whole_number_or_auto(text)
    return "auto" if found is None else found


def whole_number_with_point(text: str) -> int:
    """1000000.0 as well: newer versions of Megatron-LM take a number with a decimal point here."""
    value = any_number(text)
    if value != int(value):
        raise argparse.ArgumentTypeError(f"takes a whole number, but got {text!r}")
    return int(value)


OF_LAUNCHERS = {
    **dict.fromkeys(
        ("--num-groups", "--group-size", "--run-dir", "--listen", "--tls-dir"), "spare-launch and spare-slurm"
    ),
    "--inject": "spare-launch",
    **dict.fromkeys(("--candidates", "--lease-s", "--srun", "--no-requeue", "--lend"), "spare-slurm"),
}
"""Flag of a launcher's own -> whose."""
UNKNOWN_MAX = 4
"""So many unknown flags have a line of their own."""
WITH_POINT = ("rotary_base",)
"""Flags of whole numbers that newer versions of Megatron-LM take with a decimal point."""
TYPES: dict[str, Callable[[str], Any]] = {
    "int": whole_number,
    "float": any_number,
    "str": str,
    "int-or-auto": whole_number_or_auto,
    "steps-or-auto": steps_or_auto,
}
METAVARS = {"int": "N", "float": "X", "int-or-auto": "auto|N", "steps-or-auto": "auto|N"}


CHOICES_MAX = 60
"""Characters; more choices stand in the text of a flag, which is wrapped, not beside its name."""


def add_flag(group: Any, spec: FlagSpec, text: str) -> None:
    """Add one flag to an argument group, with ``text`` as its help."""
    help_text = text.replace("%", "%%")
    if spec.kind in ("on", "off"):
        action = "store_true" if spec.kind == "on" else "store_false"
        group.add_argument(*spec.names, dest=spec.dest, action=action, default=spec.default, help=help_text)
        return
    if spec.kind == "int-or-auto":
        help_text += " (default: auto)"
    elif spec.default is not None:
        help_text += f" (default: {spec.default})"
    in_text = len(",".join(map(str, spec.choices or ()))) > CHOICES_MAX
    if in_text:
        help_text += f"; one of {', '.join(map(str, spec.choices))}"
    group.add_argument(
        *spec.names,
        dest=spec.dest,
        type=whole_number_with_point if spec.dest in WITH_POINT else TYPES[spec.kind],
        default=spec.default,
        choices=spec.choices or None,
        nargs=spec.nargs or None,
        metavar=None if spec.choices and not in_text else METAVARS.get(spec.kind, "WORD"),
        help=help_text,
    )


def titled(specs: Sequence[FlagSpec]) -> dict[str, list[FlagSpec]]:
    """The flags by the title of their group: our own first, then Megatron's groups in the order of Megatron's
    --help."""
    order = megatron_table()
    known = {spec.dest: spec for spec in specs}
    groups: dict[str, list[FlagSpec]] = {}
    for spec in specs:
        if spec.dest not in order:
            groups.setdefault(SECTIONS[spec.section][0], []).append(spec)
    for dest in order:
        if dest in known:
            groups.setdefault(megatron_table()[dest]["group"], []).append(known[dest])
    return groups


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
    parser.add_argument("-h", "--help", action="store_true", dest="spare_help", help="print this text")
    for title, specs in titled(all_specs()).items():
        group = parser.add_argument_group(title)
        for spec in specs:
            add_flag(group, spec, (docs or {}).get(spec.dest, ""))
    return (extra(parser) or parser) if extra else parser  # type: ignore[return-value]


@cache
def _package_parser() -> Parser:
    """The parser without flags of a user's script: making it takes longer than to parse."""
    return make_parser()


def help_text(extra: ExtraArguments | None = None) -> str:
    """What --help prints: the docstrings of our dataclasses' fields, and megatron-core's for its own."""
    from spare_megatron.flags.specs import docs_of
    from spare_megatron.megatron_adapter.flag_sources import field_docs

    docs = field_docs()
    for section, (_, cls) in SECTIONS.items():
        prefix = "spare_" if section == "spare" else ""
        docs |= {prefix + name: text for name, text in docs_of(cls).items()}
    return make_parser(extra, docs).format_help()


def megatron_defaults() -> dict[str, Any]:
    """Destination -> default of every flag of Megatron-LM, honoured or not; lists are fresh copies."""
    rows = megatron_table().values()
    return {row["dest"]: list(row["default"]) if isinstance(row["default"], list) else row["default"] for row in rows}


@dataclass
class Sorted:
    """The words of a command line: those that are parsed, and those of flags that change nothing."""

    kept: list[str] = field(default_factory=list)
    noted: list[str] = field(default_factory=list)
    """Names of the flags of :mod:`no_effect` that were given."""
    noted_words: list[str] = field(default_factory=list)
    """The same flags with their values, as words."""
    refused: list[tuple[str, refusals.Refusal]] = field(default_factory=list)
    """Names of refused flags that were given, and why they are."""


def sort_words(words: Sequence[str], own: frozenset[str]) -> Sorted:
    """Separate flags that change nothing, and refused ones, from the others. ``own`` are the flags of the user's
    script, which are never refused."""
    refused, noted, result = refusals.refused_names(), no_effect.taken(), Sorted()
    into = result.kept
    for word in words:
        name = word.partition("=")[0]
        if name.startswith("--"):
            into = result.kept
            if name in refused and name not in own:
                into = []
                result.refused.append((name, refused[name]))
            elif name in noted and name not in own:
                into = result.noted_words
                result.noted.append(name)
        into.append(word)
    return result


def flags_of(words: Sequence[str]) -> tuple[str, ...]:
    """The names of the flags among the words: what a user gave explicitly is not changed by other flags."""
    return tuple(word.partition("=")[0] for word in words if word.startswith("--"))


def read_noted(words: Sequence[str]) -> dict[str, Any]:
    """Destination -> value of the flags of :mod:`no_effect` among the words; users' code may read them."""
    if not words:
        return {}
    parser = Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for row in megatron_table().values():
        names = [name for name in row["names"] if name in no_effect.taken()]
        if names:
            spec = FlagSpec(tuple(names), row["dest"], row["kind"], argparse.SUPPRESS, "", nargs=row.get("nargs") or "")
            add_flag(parser, spec, "")
    return vars(parser.parse_args(list(words)))


def nearest(name: str, own: frozenset[str]) -> str:
    """The end of the sentence about an unknown flag: '; did you mean --x?', or ' (see --help)'."""
    honoured = [name for spec in all_specs() for name in spec.names]
    return nearest_of(name, [*own, *honoured, *refusals.refused_names(), *no_effect.taken()])


def refuse_values(namespace: argparse.Namespace) -> None:
    """ConfigError for a flag that is honoured, but not with the value it has."""
    specs = {spec.dest: spec for spec in all_specs()}
    for (dest, value), why in refusals.VALUES.items():
        given = getattr(namespace, dest)
        if given == value or (isinstance(given, list) and value in given):
            raise ConfigError(refusals.Refusal(*why).sentence(f"{specs[dest].names[0]} {value}"))


def parse(
    words: Sequence[str],
    extra: ExtraArguments | None = None,
    defaults: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    saved: checkpoint_args.SavedArgs = checkpoint_args.no_checkpoint,
) -> argparse.Namespace:
    """The namespace of ``words`` (without the program's name), or ConfigError.

    ``defaults`` are Megatron's ``args_defaults``: values for flags that are not given and have no default. ``environ``
    fills in what a ``--yaml-cfg`` takes from it. ``saved`` reads a checkpoint's args, for ``--use-checkpoint-args``;
    ``spare_taken`` of the result is what was taken from them.
    """
    parser = make_parser(extra) if extra else _package_parser()
    honoured = {name for spec in all_specs() for name in spec.names}
    own = frozenset(parser._option_string_actions) - honoured
    given = sort_words(with_yaml(words, environ or {}), own)
    start = argparse.Namespace(**megatron_start(parser), spare_notes=(), spare_given=flags_of(given.kept))
    try:
        namespace, unknown = parser.parse_known_args(given.kept, start)
    except ConfigError:
        if given.refused:
            raise ConfigError(refusals.all_sentences(given.refused)) from None
        raise
    names = list(dict.fromkeys(word.partition("=")[0] for word in unknown if word.startswith("-")))
    sentences = [_unknown(name, own) for name in names[:UNKNOWN_MAX]]
    sentences += [f"nor are there flags {' '.join(names[UNKNOWN_MAX:])}"] if names[UNKNOWN_MAX:] else []
    if given.refused:
        sentences.append(refusals.all_sentences(given.refused, refusals.LINES_MAX - len(sentences)))
    if sentences:
        raise ConfigError("\n".join(sentences))
    if unknown:
        name = unknown[0]
        raise ConfigError(f"the word {name!r} belongs to no flag; values follow their flag, as in --seq-length 1024")
    defaults = defaults or {}
    namespace.spare_taken = checkpoint_args.take(namespace, saved, bool(defaults.get("use_checkpoint_args")))
    for key, value in defaults.items():
        if getattr(namespace, key, None) is None:
            setattr(namespace, key, value)
    with checkpoint_args.explained(namespace.spare_taken):
        refuse_values(namespace)
    for key, value in read_noted(given.noted_words).items():
        setattr(namespace, key, value)
    namespace.spare_notes = tuple(no_effect.notes(given.noted, namespace))
    return namespace


def _unknown(name: str, own: frozenset[str]) -> str:
    """Why there is no such flag."""
    if name not in OF_LAUNCHERS:
        return f"there is no flag {name}{nearest(name, own)}"
    also = "; --spare-check reads SPARE_NUM_GROUPS=N from the environment" if name == "--num-groups" else ""
    return f"{name} is a flag of {OF_LAUNCHERS[name]}, so it comes before the script{also}"


def megatron_start(parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Destination -> default of Megatron's flags that the parser does not have."""
    own = {action.dest for action in parser._actions}
    return {dest: value for dest, value in megatron_defaults().items() if dest not in own}

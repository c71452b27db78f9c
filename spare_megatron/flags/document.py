"""Writes docs/flags.md from the parser's tables: every flag of Megatron-LM, what becomes of it, and why.

    python -m spare_megatron.flags.document

writes it; a test compares. Imports neither torch nor megatron.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from spare_megatron.config.flags import flag_name
from spare_megatron.flags import core_versions, no_effect, refusals
from spare_megatron.flags.parser import titled
from spare_megatron.flags.specs import CORE_SECTIONS, HERE, SECTIONS, docs_of
from spare_megatron.flags.supported import all_specs

TARGET = Path(__file__).parents[2] / "docs" / "flags.md"
INTRODUCTION = """# Flags

Written by `python -m spare_megatron.flags.document`; a test checks that it is current. Flags have
Megatron-LM's names and defaults. Read from: {source}.

A flag is never ignored: it does what it does in Megatron, or it changes nothing here and the job says so once, or it
is refused with the reason and the nearest choice. `python pretrain_gpt.py --spare-check FLAGS...` checks a whole
command line without hardware, data or other ranks, and lists what the job would need. A `--yaml-cfg` file stands for
flags.

Flags of megatron-core's dataclasses are read from all its versions from {oldest} to {newest}. One that not all of them
have says which it needs: the check lists it, a job with another version refuses it.

Without a GPU the tests run everything that megatron-core's own layers can do. What needs transformer-engine (fp8,
context parallelism, gated delta net, Mamba, multi-latent attention) is handed to megatron-core as Megatron hands it, is
listed by the check as a need, and has not been run by the tests.
"""


def text() -> str:
    """The text of docs/flags.md."""
    return "\n".join([*_supported(), *_without_effect(), *_refused()]) + "\n"


def _supported() -> Iterator[str]:
    source = json.loads((HERE / "megatron_lm.json").read_text())["source"]
    versions = [table["megatron_core"] for table in core_versions.tables().values()]
    yield INTRODUCTION.format(source=source, oldest=versions[0], newest=versions[-1])
    yield "## Supported"
    docs: dict[str, str] = {}
    for section, (_, cls) in SECTIONS.items():
        prefix = "spare_" if section == "spare" else ""
        docs |= {prefix + name: doc for name, doc in docs_of(cls).items()}
    for title, specs in titled(all_specs()).items():
        yield from ("", f"### {title}", "", "| flag | takes | default | what for |", "|---|---|---|---|")
        for spec in specs:
            takes = {"on": "", "off": ""}.get(spec.kind, spec.kind)
            if spec.choices:
                takes = ", ".join(map(str, spec.choices))
            default = "" if spec.default is None or spec.kind in ("on", "off") else f"`{spec.default}`"
            what = docs.get(spec.dest, "as in Megatron")
            if spec.section in CORE_SECTIONS:
                only = core_versions.in_words(core_versions.versions_with(spec.dest))
                what += f" ({only})" if only else ""
            words = [" ".join(f"`{name}`" for name in spec.names), takes, default, what]
            yield "| " + " | ".join(word.replace("|", "\\|") for word in words) + " |"


def _without_effect() -> Iterator[str]:
    yield from ("", "## Taken, and without effect here", "")
    yield "What these ask for holds in any case:"
    yield from _by_reason(no_effect.ALWAYS_SO.items())
    yield from ("", "These ask for another way to the same result; time or memory may differ from Megatron's:")
    yield from _by_reason(no_effect.TIME_ONLY.items())
    values = ((f"{flag_name(dest)} {value}", reason) for (dest, value), reason in no_effect.VALUES.items())
    yield from _by_reason(values)


def _refused() -> Iterator[str]:
    yield from ("", "## Refused", "")
    yield "| why | instead | flags |"
    yield "|---|---|---|"
    by_refusal: dict[refusals.Refusal, list[str]] = {}
    for name, refusal in sorted(refusals.refused_names().items()):
        by_refusal.setdefault(refusal, []).append(name)
    for (dest, value), why in refusals.VALUES.items():
        by_refusal.setdefault(refusals.Refusal(*why), []).append(f"{flag_name(dest)} {value}")
    for refusal, flags in by_refusal.items():
        yield f"| {refusal.reason} | {refusal.instead or '-'} | {' '.join(f'`{flag}`' for flag in flags)} |"


def _by_reason(pairs: Iterable[tuple[str, str]]) -> Iterator[str]:
    by_reason: dict[str, list[str]] = {}
    for name, reason in pairs:
        by_reason.setdefault(reason, []).append(f"`{name}`")
    yield ""
    for reason, flags in by_reason.items():
        yield f"- {' '.join(flags)}: {reason}"


if __name__ == "__main__":
    TARGET.write_text(text())
    sys.stdout.write(f"{TARGET}\n")

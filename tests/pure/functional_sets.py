"""The configurations that Megatron-LM's functional tests train, as words, and what ``--spare-check`` says to them."""

from __future__ import annotations

import contextlib
import functools
import io
import json
from pathlib import Path

from spare_megatron.config.errors import ConfigError
from spare_megatron.worker.job_arguments import parse_job

DATA = Path(__file__).parent.parent / "data"
DEFAULTS = {"tokenizer_type": "GPT2BPETokenizer"}
"""What Megatron's pretrain_gpt.py gives, and ours."""


def answer(words: list[str]) -> str:
    """What ``--spare-check`` says: empty when the flags are good."""
    try:
        parse_job(["--spare-check", *words], {}, None, DEFAULTS)
    except SystemExit as left:
        return "" if left.code == 0 else f"left with {left.code}"
    except ConfigError as error:
        return str(error)
    return "did not leave"


@functools.cache
def functional_sets() -> dict[str, dict[str, list[str]]]:
    """Kind of functional test -> folder and name of a test -> its words."""
    content = json.loads((DATA / "megatron_functional_tests.json").read_text())
    split = [entry.split(" ") if isinstance(entry, str) else entry for entry in content["words"]]
    return {
        kind: {name: [word for place in places for word in split[place]] for name, places in sets.items()}
        for kind, sets in content["sets"].items()
    }


def answers_of(kind: str) -> dict[str, str]:
    """Folder and name of a functional test of this kind -> the answer."""
    with contextlib.redirect_stdout(io.StringIO()):
        return {name: answer(words) for name, words in functional_sets()[kind].items()}

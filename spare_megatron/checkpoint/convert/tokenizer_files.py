"""Copies the small files that belong to a model besides its weights: tokenizer and Hugging Face configuration."""

from __future__ import annotations

import shutil
from pathlib import Path

FOLDER = "hugging_face"
"""The folder inside a ``--save`` directory that holds these files."""
NAMES = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "vocab.txt", "spiece.model", "chat_template.jinja", "chat_template.json"),
    *("generation_config.json", "tekken.json", "tiktoken.model"),
)


def copy(origin: Path, target: Path, *, config: bool) -> list[str]:
    """Copy those of NAMES that exist in ``origin``, and ``config.json`` with ``config``; returns the names copied."""
    names = [*NAMES, "config.json"] if config else [*NAMES]
    there = [name for name in names if (origin / name).is_file()]
    if there:
        target.mkdir(parents=True, exist_ok=True)
    for name in there:
        shutil.copyfile(origin / name, target / name)
    return there

"""Copies the small files that belong to a model besides its weights: tokenizer and Hugging Face configuration."""

from __future__ import annotations

import filecmp
import os
import shutil
import tempfile
import time
from pathlib import Path

FOLDER = "hugging_face"
"""The folder inside a ``--save`` directory that holds these files."""
_ATTEMPTS, _PAUSE_S = 20, 0.05
NAMES = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "vocab.txt", "spiece.model", "chat_template.jinja", "chat_template.json"),
    *("generation_config.json", "tekken.json", "tiktoken.model", "qwen.tiktoken", "tokenizer.tiktoken"),
    *("sentencepiece.bpe.model", "source.spm", "target.spm", "bpe.codes", "vocab.bpe", "vocab.tiktoken"),
)


def folder_of(load_dir: Path) -> Path:
    """Where these files lie for a ``--save`` directory, or for one iteration inside it."""
    beside = load_dir.parent / FOLDER
    return beside if not (load_dir / FOLDER).is_dir() and beside.is_dir() else load_dir / FOLDER


def carry(load_dir: Path, save: Path) -> Path | None:
    """Make a ``--save`` directory have the files that came with the model which was loaded from ``load_dir``, so that
    the trained model can go back with them.

    Every group of a job may do it at once: the folder gets its name when it is complete. One with other files, of
    another model that was trained here before, is moved aside; returns where to. OSError as from any file.
    """
    origin, target = folder_of(load_dir), save / FOLDER
    names = _names(origin)
    if not names or _same(origin, target):
        return None
    save.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{FOLDER}.", dir=save))
    try:
        made.chmod(0o755)
        for name in names:
            shutil.copyfile(origin / name, made / name)
        aside = save / f"{FOLDER}.before.{made.name.rpartition('.')[2]}"
        for attempt in range(_ATTEMPTS):
            there = target.exists()
            if _same(origin, target):  # another group was faster
                break
            try:
                if there:
                    os.rename(target, aside)
                os.rename(made, target)
                break
            except OSError:
                if attempt == _ATTEMPTS - 1:
                    raise
                time.sleep(_PAUSE_S)
        if _same(origin, aside):  # what was moved was another group's, made in between
            shutil.rmtree(aside)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return aside if aside.exists() else None


def _names(folder: Path) -> list[str]:
    return [name for name in (*NAMES, "config.json") if (folder / name).is_file()]


def _same(one: Path, other: Path) -> bool:
    """Whether two folders hold the same of these files."""
    names = _names(one)
    try:
        return names == _names(other) and all(filecmp.cmp(one / name, other / name, shallow=False) for name in names)
    except FileNotFoundError:  # one is being moved
        return False


def copy(origin: Path, target: Path, *, config: bool) -> list[str]:
    """Copy those of NAMES that exist in ``origin``, and ``config.json`` with ``config``; returns the names copied."""
    names = [*NAMES, "config.json"] if config else [*NAMES]
    there = [name for name in names if (origin / name).is_file()]
    if there:
        target.mkdir(parents=True, exist_ok=True)
    for name in there:
        shutil.copyfile(origin / name, target / name)
    return there

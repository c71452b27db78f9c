"""Reads the data files, weights and shares that ``--data-path`` and the other data flags name, as Megatron does."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from spare_megatron.config.errors import ConfigError

SPLITS = ("train", "valid", "test")
Blend = tuple[list[str], list[float] | None]
"""Prefixes of data files and their weights (None weighs them by size), as megatron-core's data set config takes
them."""


def blend_of(words: Sequence[str] | None, name: str) -> Blend | None:
    """Prefixes and weights from the words of data flag ``name``: ``P1 P2 P3`` or ``W1 P1 W2 P2``."""
    if words is None:
        return None
    words = list(words)
    if not words:
        raise ConfigError(f"{name} has no words; give the prefixes of data files")
    weights = [as_number(word) for word in words[0::2]]
    if len(words) % 2 == 0 and all(weight is not None for weight in weights):
        if min(weight for weight in weights if weight is not None) < 0 or not sum(w for w in weights if w is not None):
            raise ConfigError(f"{name} has weights {words[0::2]}, but weights must be positive numbers")
        return words[1::2], [float(word) for word in words[0::2]]
    if any(as_number(word) is not None and not Path(f"{word}.idx").exists() for word in words):
        raise ConfigError(
            f"{name} {' '.join(words)} mixes weights and prefixes; give a weight before each prefix or none at all"
        )
    return words, None


def as_number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def blends(args: Namespace) -> tuple[Blend | None, list[Blend | None] | None]:
    """(one blend for all splits, a blend for each split) from the data flags: one of the two, or (None, None) where no
    flag names data, as with --mock-data."""
    if args.data_path is not None:
        return blend_of(args.data_path, "--data-path"), None
    if args.per_split_data_args_path is not None:
        return None, per_split_blends(Path(args.per_split_data_args_path))
    flags = [(getattr(args, f"{split}_data_path"), f"--{split}-data-path") for split in SPLITS]
    if any(words is not None for words, _ in flags):
        return None, [blend_of(words, name) for words, name in flags]
    return None, None


def per_split_blends(path: Path) -> list[Blend | None]:
    """The blends of training, validation and test from a JSON file with lists 'train', 'valid' and 'test'."""
    name = f"--per-split-data-args-path {path}"
    try:
        lists = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror}; give a file that exists") from None
    except ValueError as error:
        raise ConfigError(f"{name} is not JSON: {error}; give an object with lists of prefixes") from None
    if not isinstance(lists, dict) or not set(lists) <= set(SPLITS):
        raise ConfigError(f"{name} must be an object with lists 'train', 'valid' and 'test'")
    parts = [lists.get(split) for split in SPLITS]
    words = [part.split() if isinstance(part, str) else part for part in parts]
    return [blend_of(None if part is None else [str(word) for word in part], name) for part in words]


def split_shares(text: str) -> list[float]:
    """Shares of training, validation and test from text such as ``969,30,1``; they add up to 1."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    numbers = [as_number(part) for part in parts]
    if not 1 <= len(parts) <= len(SPLITS) or any(number is None or number < 0 for number in numbers):
        raise ConfigError(f"--split is {text!r}, but takes up to three positive numbers, as in --split 969,30,1")
    shares = [float(part) for part in parts] + [0.0] * (len(SPLITS) - len(parts))
    if sum(shares) == 0:
        raise ConfigError(f"--split is {text!r}, but the shares must not all be 0; use --split 969,30,1")
    return [share / sum(shares) for share in shares]

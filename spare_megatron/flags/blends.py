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
        return _weighed(words, name)
    if any(as_number(word) is not None and not Path(f"{word}.idx").exists() for word in words):
        raise ConfigError(
            f"{name} {' '.join(words)} mixes weights and prefixes; give a weight before each prefix or none at all"
        )
    return words, None


def _weighed(words: list[str], name: str) -> Blend:
    """Prefixes and weights of ``W1 P1 W2 P2``, without those of weight 0: megatron-core has no data set of which
    nothing is drawn. ConfigError for a weight that is none."""
    pairs = [(float(weight), prefix) for weight, prefix in zip(words[0::2], words[1::2], strict=True)]
    for (weight, prefix), word in zip(pairs, words[0::2], strict=True):
        if not 0 <= weight < float("inf"):
            raise ConfigError(
                f"{name} gives {prefix} the weight {word}, but weights must be positive numbers, or 0 to leave a data "
                "file out"
            )
    kept = [(weight, prefix) for weight, prefix in pairs if weight]
    if not kept:
        raise ConfigError(f"{name} has weights {words[0::2]}, but at least one of them must be above 0")
    if not sum(weight for weight, _ in kept) < float("inf"):
        raise ConfigError(f"{name} has weights {words[0::2]}, whose sum is too large for a number; give smaller ones")
    return [prefix for _, prefix in kept], [weight for weight, _ in kept]


def left_out(args: Namespace) -> list[str]:
    """What is to be said of data files with the weight 0: nothing is drawn from them."""
    named = [("--data-path", args.data_path)]
    named += [(f"--{split}-data-path", getattr(args, f"{split}_data_path")) for split in SPLITS]
    path = args.per_split_data_args_path
    if path is not None and Path(path).exists():
        named += [(f"--per-split-data-args-path {path}", words) for words in _per_split_words(Path(path))]
    return [
        f"{name}: {prefix} has the weight 0 and is left out"
        for name, words in named
        if words is not None and len(words) % 2 == 0 and all(as_number(word) is not None for word in words[0::2])
        for weight, prefix in zip(words[0::2], words[1::2], strict=True)
        if float(weight) == 0
    ]


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
    return [blend_of(words, name) for words in _per_split_words(path)]


def _per_split_words(path: Path) -> list[list[str] | None]:
    name = f"--per-split-data-args-path {path}"
    try:
        lists = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror}; give a file that exists") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name} is not JSON: {error}; give an object with lists of prefixes") from None
    if not isinstance(lists, dict) or not set(lists) <= set(SPLITS):
        raise ConfigError(f"{name} must be an object with lists 'train', 'valid' and 'test'")
    found: list[list[str] | None] = []
    for split in SPLITS:
        part = lists.get(split)
        words = part.split() if isinstance(part, str) else part
        if not (words is None or (isinstance(words, list) and all(type(word) in (str, int, float) for word in words))):
            raise ConfigError(f"{name}: '{split}' is {str(part)[:80]!r}, but must be a list of weights and prefixes")
        found.append(None if words is None else [str(word) for word in words])
    return found


def split_shares(text: str) -> list[float]:
    """Shares of training, validation and test from text such as ``969,30,1``; they add up to 1."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    numbers = [as_number(part) for part in parts]
    if not 1 <= len(parts) <= len(SPLITS) or any(
        number is None or not 0 <= number < float("inf") for number in numbers
    ):
        raise ConfigError(f"--split is {text!r}, but takes up to three positive numbers, as in --split 969,30,1")
    shares = [float(part) for part in parts] + [0.0] * (len(SPLITS) - len(parts))
    if not sum(shares) < float("inf"):
        raise ConfigError(f"--split is {text!r}, whose sum is too large for a number; use --split 969,30,1")
    if sum(shares) == 0:
        raise ConfigError(f"--split is {text!r}, but the shares must not all be 0; use --split 969,30,1")
    return [share / sum(shares) for share in shares]

"""Flags of recipes that people run (tests/data/recipes): what is taken stays so, and a refusal names every reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.recipes import FOLDER, of_mainline
from spare_megatron.config.errors import ConfigError
from spare_megatron.flags import parser

IN_THE_WAY = {"--lr-decay-iters: expected one argument": ("paimoon",), "--enable-gpt-oss": ("gptoss",)}
"""What is refused -> the recipes that ask for it."""


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.args")), ids=lambda path: path.stem)
def test_a_recipe_is_taken_or_reported_all_that_is_in_its_way(path: Path) -> None:
    """Flags that only a fork has are taken out. (Its sizes are checked by benchmarks/recipes.py.)"""
    words = ["--spare-check", *of_mainline(path.read_text().splitlines())[0]]
    reasons = [reported for reported, names in IN_THE_WAY.items() if path.stem in names]
    if not reasons:
        parser.parse(words)
        return
    with pytest.raises(ConfigError) as error:
        parser.parse(words)
    for reported in reasons:
        assert reported in str(error.value)
    assert len(str(error.value).splitlines()) == len(reasons)


def test_a_value_that_only_a_fork_has_is_taken_out_with_its_flag() -> None:
    words = [
        "--tokenizer-type",
        "DeepSeekV3Tokenizer",
        "--seq-length",
        "8",
        "--lr-decay-style=cosine",
        "--of-a-fork",
        "1",
    ]
    assert of_mainline(words) == (["--seq-length", "8", "--lr-decay-style=cosine"], ["--tokenizer-type", "--of-a-fork"])
    with pytest.raises(ConfigError, match="--tokenizer-type: invalid choice: 'DeepSeekV3Tokenizer'"):
        parser.parse(words[:2])

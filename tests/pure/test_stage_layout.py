"""--pipeline-model-parallel-layout: what each rank builds is said, and what does not fit is one sentence."""

from __future__ import annotations

import pytest

from spare_megatron.config.errors import ConfigError
from spare_megatron.flags.stage_layout import check_layout, layout_text


@pytest.mark.parametrize(
    ("text", "pipeline", "layers", "reported"),
    [
        ("Et*3|(tt|)*6L", 8, 15, "1 stage on each of 8 ranks; layers of the stages: E+3, 6 x 2, 0+L"),
        (
            "Et*2|(tt|)*22t|(tt|)*7L",
            8,
            61,
            "4 stages on each of 8 ranks; layers of the stages: E+2, 22 x 2, 1, 7 x 2, 0+L",
        ),
        ("Et*2|(tt|)*6mL", 8, 14, "1 stage on each of 8 ranks; layers of the stages: E+2, 6 x 2, 0+m+L"),
        ("EttL", 1, 2, "1 stage on each of 1 rank; layers of the stages: E+2+L"),
    ],
)
def test_what_each_rank_builds_is_said(text: str, pipeline: int, layers: int, reported: str) -> None:
    assert layout_text(check_layout(text, pipeline, layers, text.count("m")), pipeline) == reported


@pytest.mark.parametrize(
    ("text", "pipeline", "layers", "reported"),
    [
        ("Et|(t|)*5t|L", 8, 8, "has 7 decoder layers (t) and --num-layers is 8"),
        ("Et|t|L", 2, 2, "has 3 stages, not a multiple of --pipeline-model-parallel-size 2; use 4 stages"),
        ("t|tL", 2, 2, "must begin with E, for the embedding, and have one"),
        ("Et|t", 2, 2, "must end with L, for the loss, and have one"),
        ("EEt|tL", 2, 2, "must begin with E"),
        ("Et|tmL", 2, 2, "has 1 layer of multi-token prediction (m) and --mtp-num-layers is 0"),
        ("Ett x|L", 2, 2, "has ' ' 'x'"),
        ("Et*99999999|L", 2, 2, "repeats a part 99999999 times; the most is 4096"),
    ],
)
def test_what_does_not_fit_is_one_sentence(text: str, pipeline: int, layers: int, reported: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_layout(text, pipeline, layers)
    assert reported in str(error.value)


@pytest.mark.parametrize("text", ["Etm|tL", "Emt|tL", "Et|mtL"])
def test_layers_of_multi_token_prediction_are_on_the_last_stage(text: str) -> None:
    with pytest.raises(ConfigError, match=r"put all of them right before L, as in '\.\.\.\|mL'"):
        check_layout(text, 2, 2, 1)

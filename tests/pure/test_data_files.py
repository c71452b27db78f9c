"""Data files that are missing, cut off or of another vocabulary are one sentence before anything reads them."""

from __future__ import annotations

import json
import struct
from argparse import Namespace
from pathlib import Path

import numpy
import pytest

from spare_megatron.config.errors import ConfigError
from spare_megatron.data.data_files import HEADER, DataFile, check_data, check_file, check_split
from spare_megatron.flags.blends import blend_of, blends, split_shares
from tests.pure.flags_of_a_job import job_of


def write_pair(prefix: Path, documents: list[list[int]], dtype: str = "uint16") -> None:
    """A pair of files as megatron-core writes it."""
    codes = {"uint16": 8, "int32": 4}
    itemsize = numpy.dtype(dtype).itemsize
    lengths = [len(document) for document in documents]
    offsets = [sum(lengths[:index]) * itemsize for index in range(len(lengths))]
    index = HEADER + struct.pack("<QBQQ", 1, codes[dtype], len(lengths), len(lengths) + 1)
    index += numpy.array(lengths, numpy.int32).tobytes() + numpy.array(offsets, numpy.int64).tobytes()
    index += numpy.arange(len(lengths) + 1, dtype=numpy.int64).tobytes()
    Path(f"{prefix}.idx").write_bytes(index)
    Path(f"{prefix}.bin").write_bytes(b"".join(numpy.array(document, dtype).tobytes() for document in documents))


def flags(**values: object) -> Namespace:
    names = ("data_path", "train_data_path", "valid_data_path", "test_data_path", "per_split_data_args_path")
    return Namespace(**{**dict.fromkeys(names), "split": "1,0,0", **values})


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    prefix = tmp_path / "data"
    write_pair(prefix, [[1, 2, 3], [4, 5], [900]])
    return prefix


def test_a_whole_pair(pair: Path) -> None:
    assert check_file(str(pair)) == DataFile(str(pair), "uint16", 3, 6)
    assert check_file(str(pair)).largest_token() == 900
    assert check_data(flags(data_path=[str(pair)]), 901) == [check_file(str(pair))]


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda p: Path(f"{p}.bin").unlink(), "data.bin does not exist"),
        (lambda p: Path(f"{p}.idx").unlink(), "data.idx does not exist"),
        (
            lambda p: Path(f"{p}.bin").write_bytes(b"123"),
            "data.bin is cut off: it has 3 bytes, .* 6 tokens .* = 12 bytes",
        ),
        (lambda p: Path(f"{p}.bin").write_bytes(b"1" * 14), "data.bin is not the file of this index: it has 14 bytes"),
        (lambda p: Path(f"{p}.idx").write_bytes(b""), "data.idx is no index of a data file"),
        (lambda p: Path(f"{p}.idx").write_bytes(HEADER + b"1"), "data.idx is cut off: it has 10 of the 34 bytes"),
        (
            lambda p: Path(f"{p}.idx").write_bytes(Path(f"{p}.idx").read_bytes()[:-9]),
            "data.idx is cut off: it has .* bytes, but 3 sequences and 4 document ends take 102",
        ),
        (
            lambda p: Path(f"{p}.idx").write_bytes(HEADER + struct.pack("<QBQQ", 1, 99, 0, 0)),
            "data.idx has version 1 and dtype code 99",
        ),
    ],
)
def test_a_damaged_pair_is_one_sentence(pair: Path, damage: object, sentence: str) -> None:
    damage(pair)  # type: ignore[operator]
    with pytest.raises(ConfigError, match=sentence):
        check_file(str(pair))


def test_a_prefix_with_its_ending_gets_a_hint(pair: Path) -> None:
    with pytest.raises(ConfigError, match=r"give the prefix without \.bin"):
        check_file(f"{pair}.bin")


def test_tokens_outside_the_vocabulary(pair: Path) -> None:
    with pytest.raises(ConfigError, match="has token id 900, but the tokenizer's vocabulary has 900 ids"):
        check_data(flags(data_path=[str(pair)]), 900)


def test_largest_token_looks_at_the_beginning_the_middle_and_the_end(tmp_path: Path) -> None:
    tokens = [1] * 3000
    tokens[1500] = 7
    tokens[2999] = 9
    write_pair(tmp_path / "d", [tokens], "int32")
    assert check_file(str(tmp_path / "d")).largest_token(30) == 9


def test_words_of_a_blend(pair: Path) -> None:
    assert blend_of(None, "--data-path") is None
    assert blend_of(["a"], "--data-path") == (["a"], None)
    assert blend_of(["a", "b"], "--data-path") == (["a", "b"], None)
    assert blend_of(["a", "b", "c"], "--data-path") == (["a", "b", "c"], None)
    assert blend_of(["0.3", "a", "7", "b"], "--data-path") == (["a", "b"], [0.3, 7.0])


@pytest.mark.parametrize("words", [[], ["0.3", "a", "b"], ["0.3", "a", "b", "c"], ["-1", "a", "2", "b"], ["0", "a"]])
def test_bad_words_of_a_blend(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="--data-path"):
        blend_of(words, "--data-path")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nan", "a", "1", "b"], "--data-path gives a the weight nan, but weights must be positive numbers, or 0 to"),
        (["1", "a", "inf", "b"], "--data-path gives b the weight inf, but"),
        (["1", "a", "-0.5", "b"], "--data-path gives b the weight -0.5, but"),
        (["0", "a", "0.0", "b"], "at least one of them must be above 0"),
        (["1e308", "a", "1e308", "b"], "whose sum is too large for a number; give smaller ones"),
    ],
)
def test_a_weight_that_is_none_is_one_sentence(words: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as error:
        blend_of(words, "--data-path")
    assert "\n" not in str(error.value)


def test_a_data_file_of_weight_0_is_left_out_and_the_job_says_so(tmp_path: Path) -> None:
    assert blend_of(["0", "a", "7", "b", "0.0", "c"], "--data-path") == (["b"], [7.0])
    _, args = job_of("--data-path 0 a 7 b 0.0 c", drop=("--mock-data",))
    said = [note for note in args.spare_notes if "weight 0" in note]
    assert said == [f"--data-path: {prefix} has the weight 0 and is left out" for prefix in "ac"]
    assert blends(args)[0] == (["b"], [7.0])
    path = tmp_path / "split.json"
    path.write_text(json.dumps({"train": [0, "a", 1, "b"]}))
    _, args = job_of(f"--per-split-data-args-path {path}", drop=("--mock-data",))
    assert f"--per-split-data-args-path {path}: a has the weight 0 and is left out" in args.spare_notes


@pytest.mark.parametrize("part", ["5", '{"a": 1}', "[[1]]", "[null]", "true"])
def test_a_split_that_is_no_list_is_one_sentence(tmp_path: Path, part: str) -> None:
    path = tmp_path / "split.json"
    path.write_text(f'{{"train": {part}}}')
    with pytest.raises(ConfigError, match="but must be a list of weights and prefixes"):
        blends(flags(per_split_data_args_path=str(path)))


def test_words_in_a_file_that_is_no_text_are_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "words"
    path.write_bytes(b"1 a \xff\xfe")
    with pytest.raises(ConfigError, match=r"--data-args-path .*words is not text: .* at byte 4"):
        job_of(f"--data-args-path {path}", drop=("--mock-data",))
    with pytest.raises(ConfigError, match=r"--yaml-cfg .*words is not text: .* at byte 4"):
        job_of(f"--yaml-cfg {path}")


def test_blends_of_each_split(tmp_path: Path) -> None:
    path = tmp_path / "split.json"
    path.write_text(json.dumps({"train": ["0.5", "a", "0.5", "b"], "valid": "c d"}))
    per_split = blends(flags(per_split_data_args_path=str(path)))[1]
    assert per_split == [(["a", "b"], [0.5, 0.5]), (["c", "d"], None), None]
    assert blends(flags(train_data_path=["a"], test_data_path=["b"])) == (None, [(["a"], None), None, (["b"], None)])
    assert blends(flags()) == (None, None)
    for text, sentence in (("{", "is not JSON"), ("[]", "must be an object with"), ('{"tran": []}', "must be an")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=sentence):
            blends(flags(per_split_data_args_path=str(path)))
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        blends(flags(per_split_data_args_path="nowhere.json"))


def test_splits() -> None:
    assert split_shares("969, 30, 1") == [0.969, 0.03, 0.001]
    assert split_shares("1") == [1.0, 0.0, 0.0]
    for text in ("", "a,b", "0,0,0", "1,2,3,4", "-1,2", "nan,1", "inf", "1e308,1e308"):
        with pytest.raises(ConfigError, match="--split is"):
            split_shares(text)


def test_a_split_without_a_document_is_refused_because_building_it_would_never_end() -> None:
    file = DataFile("d", "uint16", 20, 1000)
    check_split(file, "90,10,0")
    with pytest.raises(
        ConfigError, match=r"--split 969,30,1 leaves no document for test: d has 20 .* use --split 96\.9,3,0"
    ):
        check_split(file, "969,30,1")

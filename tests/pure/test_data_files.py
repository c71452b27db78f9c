"""Data files that are missing, cut off or of another vocabulary are one sentence before anything reads them."""

from __future__ import annotations

import json
import struct
from argparse import Namespace
from pathlib import Path

import numpy
import pytest

from spare_megatron.config.errors import ConfigError
from spare_megatron.data import data_files
from spare_megatron.data.data_files import (
    HEADER,
    HEADER_BYTES,
    LOOKED_AT_MAX,
    DataFile,
    TokenRange,
    check_data,
    check_file,
    check_split,
    data_identity,
    looked_at,
)
from spare_megatron.data.preprocess import merge
from spare_megatron.flags.blends import blend_of, blends, split_shares
from spare_megatron.worker.job_loaders import check_same_data
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
    assert check_file(str(pair)).token_range() == TokenRange(1, 900, 6)
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


LENGTHS_AT, OFFSETS_AT, ENDS_AT = HEADER_BYTES, HEADER_BYTES + 3 * 4, HEADER_BYTES + 3 * 12


def overwrite(prefix: Path, at: int, value: int, size: int) -> None:
    """Put a little-endian number into an index."""
    raw = bytearray(Path(f"{prefix}.idx").read_bytes())
    raw[at : at + size] = value.to_bytes(size, "little", signed=True)
    Path(f"{prefix}.idx").write_bytes(raw)


@pytest.mark.parametrize(
    ("at", "value", "size", "sentence"),
    [
        (LENGTHS_AT + 4, -2, 4, "data.idx: sequence 1 has -2 tokens; copy the file again"),
        (OFFSETS_AT + 16, 10 - 2**32, 8, "sequence 2 begins at byte -4294967286 of .* take 10 bytes: .*merge_"),
        (OFFSETS_AT, 2, 8, "sequence 0 begins at byte 2 of .* take 0 bytes"),
        (ENDS_AT, 1, 8, "the ends of documents begin with 1, but must begin with 0"),
        (ENDS_AT + 8, 3, 8, "document 2 ends before sequence 2, and the one before it before sequence 3, but"),
        (ENDS_AT + 24, 2, 8, "the last document ends before sequence 2, but there are 3: an end is missing"),
        (26, 3, 8, "the last document ends before sequence 2, but there are 3: an end is missing"),
        (26, 0, 8, "the ends of documents are missing, but must begin with 0"),
    ],
)
def test_what_megatron_core_would_believe_is_checked(pair: Path, at: int, value: int, size: int, sentence: str) -> None:
    overwrite(pair, at, value, size)
    with pytest.raises(ConfigError, match=sentence) as error:
        check_file(str(pair))
    assert "\n" not in str(error.value)


def test_entries_are_checked_in_parts(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_files, "SEQUENCES_AT_ONCE", 2)
    whole = check_file(str(pair))
    assert whole.tokens == 6
    overwrite(pair, OFFSETS_AT + 16, 6, 8)
    with pytest.raises(ConfigError, match=r"sequence 2 begins at byte 6 of .* take 10 bytes"):
        check_file(str(pair))
    monkeypatch.undo()
    write_pair(pair, [[1, 2, 3], [4, 5], [900]])
    assert check_file(str(pair)).layout == whole.layout


def test_merge_writes_wrong_offsets_anew(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = Path(f"{pair}.idx").read_bytes()
    overwrite(pair, OFFSETS_AT + 16, 10 - 2**32, 8)
    new = pair.parent.parent / f"{pair.parent.name}-merged"
    assert merge.main(["--input", str(pair.parent), "--output-prefix", str(new)]) == 0
    assert Path(f"{new}.idx").read_bytes() == before
    overwrite(pair, ENDS_AT + 24, 2, 8)
    assert merge.main(["--input", str(pair.parent), "--output-prefix", str(new)]) == 2
    assert "an end is missing" in capsys.readouterr().err


def test_negative_ids_are_refused_and_a_check_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_pair(tmp_path / "data", [[1, 2, -1], [3, 4, -1]], "int32")
    with pytest.raises(ConfigError, match=r"data\.bin has token id -1, but ids begin with 0: .*--append-eod"):
        check_data(flags(data_path=[str(tmp_path / "data")]), 100)
    words = f"--data-path {tmp_path / 'data'} --split 1,0,0 --spare-check"
    with pytest.raises(ConfigError, match="has token id -1"):
        job_of(words, drop=("--mock-data",))
    write_pair(tmp_path / "data", [[1, 2, 0], [3, 4, 0]], "int32")
    with pytest.raises(SystemExit) as ended:
        job_of(words, drop=("--mock-data",))
    assert ended.value.code == 0
    assert "the flags are good" in capsys.readouterr().out


def test_what_was_not_looked_at_is_said() -> None:
    files = [DataFile("a", "uint16", 1, LOOKED_AT_MAX // 2), DataFile("b", "uint16", 1, LOOKED_AT_MAX)]
    assert [text.split(":")[0] for text in looked_at(files)] == ["b.bin"]


def test_a_prefix_with_its_ending_gets_a_hint(pair: Path) -> None:
    with pytest.raises(ConfigError, match=r"give the prefix without \.bin"):
        check_file(f"{pair}.bin")


def test_tokens_outside_the_vocabulary(pair: Path) -> None:
    with pytest.raises(ConfigError, match="has token id 900, but the tokenizer's vocabulary has 900 ids"):
        check_data(flags(data_path=[str(pair)]), 900)


def test_a_large_file_is_looked_at_at_the_beginning_the_middle_and_the_end(tmp_path: Path) -> None:
    tokens = [1] * 3000
    tokens[1500] = 7
    tokens[2999] = 9
    tokens[10] = 0
    write_pair(tmp_path / "d", [tokens], "int32")
    assert check_file(str(tmp_path / "d")).token_range(30) == TokenRange(1, 9, 30)
    assert check_file(str(tmp_path / "d")).token_range(3000) == TokenRange(0, 9, 3000)


def test_other_tokens_or_other_lengths_are_other_data(pair: Path) -> None:
    """A group that comes back, or another host's copy, must have the tokens of the others: nothing else shows it."""

    def identity(whole: bool = True) -> dict[str, str]:
        return data_identity(check_data(flags(data_path=[str(pair)]), None), whole=whole)

    first, index = identity(), identity(whole=False)
    assert identity() == first
    write_pair(pair, [[1, 2, 3], [4, 5], [901]])
    changed = identity()
    assert changed != first
    assert identity(whole=False) == index, "tokens may be brought later"
    write_pair(pair, [[1, 2], [3, 4, 5], [900]])
    assert identity(whole=False) != index
    check_same_data([first, first])
    with pytest.raises(ConfigError, match=r"rank 1 of this group has other data than rank 0: the data of .* is 6 "):
        check_same_data([first, changed])


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
    reported = [note for note in args.spare_notes if "weight 0" in note]
    assert reported == [f"--data-path: {prefix} has the weight 0 and is left out" for prefix in "ac"]
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
    path.write_text("activation_func: []")
    with pytest.raises(ConfigError, match=r"activation_func \[\] is not supported; use one of swiglu"):
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

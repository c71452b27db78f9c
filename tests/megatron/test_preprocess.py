"""The preprocess tool: what it writes is what the tokenizer says, in order, whole or not at all."""

from __future__ import annotations

import gzip
import hashlib
import json
import random
from pathlib import Path

import pytest

from spare_megatron.data.data_files import check_file
from spare_megatron.data.preprocess import command
from spare_megatron.data.preprocess.token_files import Output
from spare_megatron.megatron_adapter.data import tokenizers
from tests.megatron.golden_preprocess import numbers_before

NULL = numbers_before(100)
DOCUMENTS = ["1 2 3", "4", "99 98 97 96"]


def write_lines(path: Path, documents: list[object]) -> Path:
    text = "".join(json.dumps(document) + "\n" for document in documents)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    elif path.suffix == ".zst":
        zstandard = pytest.importorskip("zstandard")
        path.write_bytes(zstandard.ZstdCompressor().compress(text.encode()))
    elif path.suffix == ".parquet":
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist(documents), path)
    else:
        path.write_text(text)
    return path


def run(path: Path, *words: str) -> int:
    return command.main(["--input", str(path), "--output-prefix", str(path.parent / "out"), *NULL, *words])


def documents_of(prefix: Path) -> list[list[int]]:
    from spare_megatron.megatron_adapter.data.datasets import IndexedDataset

    return [sequence.tolist() for sequence in IndexedDataset(str(prefix))]


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("name", ["in.jsonl", "in.jsonl.gz", "in.jsonl.zst", "in.parquet"])
def test_tokens_in_order(tmp_path: Path, workers: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_lines(tmp_path / name, [{"text": text} for text in DOCUMENTS])
    assert run(path, "--append-eod", "--workers", workers, "--log-interval", "2") == 0
    assert documents_of(tmp_path / "out_text_document") == [[1, 2, 3, 100], [4, 100], [99, 98, 97, 96, 100]]
    assert check_file(str(tmp_path / "out_text_document")).dtype == "uint16"
    out = capsys.readouterr()
    assert "Processed 3 documents (" in out.err
    assert "tokens/s) in" in out.err
    assert out.out == f"{tmp_path}/out_text_document: 3 documents, 11 tokens\n"
    assert sorted(file.name for file in tmp_path.iterdir() if "out" in file.name) == [
        "out_text_document.bin",
        "out_text_document.idx",
    ]


def test_several_files_and_plain_text(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    write_lines(folder / "b.jsonl", [{"text": "2"}, {"text": "3"}])
    (folder / "a.txt").write_text("0 1")
    last = write_lines(tmp_path / "last.jsonl.gz", [{"text": "4"}])
    words = ["--input", str(folder), str(last), "--output-prefix", str(tmp_path / "out"), *NULL]
    assert command.main(words) == 0
    assert documents_of(tmp_path / "out_text_document") == [[0, 1], [2], [3], [4]]


@pytest.mark.parametrize(("words", "order"), [("", [0, 3, 6, 1, 4, 2, 5]), ("--keep-sequential-samples", range(7))])
def test_partitions_give_megatrons_order(tmp_path: Path, words: str, order: list[int]) -> None:
    path = write_lines(tmp_path / "in.jsonl", [{"text": str(number)} for number in range(7)])
    assert run(path, "--partitions", "3", *words.split()) == 0
    assert documents_of(tmp_path / "out_text_document") == [[number] for number in order]
    assert len(list(tmp_path.iterdir())) == 3


def test_several_keys_and_documents_in_parts(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", [{"a": ["1", "2 3"], "b": "7"}, {"a": "5", "b": "8"}])
    assert run(path, "--json-keys", "a", "b") == 0
    assert documents_of(tmp_path / "out_a_document") == [[1], [2, 3], [5]]
    assert documents_of(tmp_path / "out_b_document") == [[7], [8]]


@pytest.mark.parametrize(
    ("text", "words", "sentence"),
    [
        ('{"text": "1"}\n{"text": \n', "", "line 2 of the input is not JSON"),
        ('{"words": "1"}\n', "", "line 1 of the input has no text under 'text'; name the right key with --json-keys"),
        ('["1"]\n', "", "line 1 of the input has no text under 'text'"),
        ("\n", "", "has no text"),
        ("", "--workers 0", "--workers is 0, but must be at least 1"),
        ("", "--workerz 1", "there is no flag --workerz; did you mean --workers?"),
        ("", "--split-sentences", "--split-sentences is not supported"),
        ("", "--partitions 0", "--partitions is 0, but must be at least 1"),
        ("", "--input nowhere", "--input nowhere does not exist"),
        ("", "--output-prefix nowhere/x", "is in nowhere, which does not exist"),
        ("", "--tokenizer-type SentencePieceTokenizer", "needs --tokenizer-model FILE"),
        ("", "--tokenizer-type SentencePieceTokenizer --tokenizer-model nowhere", "nowhere does not exist"),
        ('{"text": "1"}\n{"text": "2 x"}\n', "", "line 2 of the input cannot be tokenized: invalid literal"),
        ('{"text": "70000"}\n', "", "has token id 70000, which uint16 cannot hold"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing(
    tmp_path: Path, text: str, words: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(text)
    assert run(path, *words.split()) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert [line for line in error.splitlines() if "spare-preprocess: " in line] == [error.splitlines()[-1]]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("name", "workers"),
    [
        ("b.jsonl.gz", "1"),
        ("b.jsonl.zst", "2"),
        *(pytest.param(*one, marks=pytest.mark.full) for one in (("b.jsonl.gz", "2"), ("b.jsonl.zst", "1"))),
    ],
)
def test_an_input_that_is_cut_is_one_sentence_and_leaves_nothing(
    tmp_path: Path, name: str, workers: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The cut file is the second of three, and of several frames or members; the cut is in the last one."""
    (tmp_path / "in").mkdir()
    for one in ("a.jsonl", "c.jsonl"):
        write_lines(tmp_path / "in" / one, [{"text": "1 2 3"}] * 3)
    frame = write_lines(tmp_path / name, [{"text": " ".join(str(n % 90) for n in range(m))} for m in range(1, 50)])
    cut = tmp_path / "in" / name
    cut.write_bytes(3 * frame.read_bytes() + frame.read_bytes()[:-5])
    words = ["--input", str(tmp_path / "in"), "--output-prefix", str(tmp_path / "out"), *NULL, "--workers", workers]
    assert command.main(words) == 2
    reported = capsys.readouterr().err.splitlines()
    assert str(cut) in reported[-1]
    assert "cut off" in reported[-1]
    assert "Traceback" not in "".join(reported)
    assert not list(tmp_path.glob("out*"))
    cut.write_bytes(4 * frame.read_bytes())
    assert command.main(words) == 0
    assert sum(map(len, documents_of(tmp_path / "out_text_document"))) == 4 * sum(range(50)) + 18


@pytest.mark.parametrize("kind", ["TikTokenizer", "HuggingFaceTokenizer"])
def test_a_package_that_is_missing_is_named(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizers.importlib.util, "find_spec", lambda name: None)
    path = write_lines(tmp_path / "in.jsonl", [{"text": "1"}])
    assert run(path, "--tokenizer-type", kind, "--tokenizer-model", str(path)) == 2
    assert f"needs the package {tokenizers.PACKAGES[kind]}, which is not installed" in capsys.readouterr().err


def test_a_damaged_tokenizer_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_lines(tmp_path / "in.jsonl", [{"text": "1"}])
    words = ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", str(path)]
    assert command.main(["--input", str(path), "--output-prefix", str(tmp_path / "out"), *words]) == 2
    assert "cannot be built" in capsys.readouterr().err


# Made by Megatron-LM's own tools/preprocess_data.py at core_v0.16.1 (55ac7082517c3878ae653c07c09c534b8aed49f6):
#   --input in.jsonl --output-prefix out --append-eod --tokenizer-type NullTokenizer --vocab-size 1000 --workers 2
#   and the same with --partitions 2; sha256 of the .bin and of the .idx file.
GOLDEN = {
    "1": (
        "b1ee7857076338700cdb1c8c70968e3ea868a1a49aebdb564998460a7a006362",
        "120f63396019ae82a3c3e6bfcfb0b4e20e5b19991a68e0658a755efd862ea74f",
    ),
    "2": (
        "b48dd8d8d06ee53d5a96edc9bc88d553482aae917cb55acd67b18d883679d4ca",
        "a40453299e9e0dddf15be2ea1c8f308c68ad9b592a0352db0ec0defbf3150f6c",
    ),
}


@pytest.mark.parametrize("partitions", GOLDEN)
def test_files_are_byte_for_byte_those_of_megatrons_tool(tmp_path: Path, partitions: str) -> None:
    draw = random.Random(1)
    texts = [" ".join(str(draw.randrange(1000)) for _ in range(draw.randrange(1, 400))) for _ in range(300)]
    path = write_lines(tmp_path / "in.jsonl", [{"text": text} for text in texts])
    words = [*numbers_before(1000), "--append-eod", "--partitions", partitions]
    assert command.main(["--input", str(path), "--output-prefix", str(tmp_path / "out"), *words]) == 0
    made = [hashlib.sha256((tmp_path / f"out_text_document.{end}").read_bytes()).hexdigest() for end in ("bin", "idx")]
    assert tuple(made) == GOLDEN[partitions]


def test_a_second_run_with_the_same_output_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_lines(tmp_path / "in.jsonl", [{"text": text} for text in DOCUMENTS])
    writer = Output(str(tmp_path / "out_text_document"), "uint16", 1)
    there = sorted(tmp_path.iterdir())
    assert run(path) == 2
    assert "out_text_document.part0.bin is being written by another run with this" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == there
    writer.close()
    assert run(path) == 0
    assert documents_of(tmp_path / "out_text_document") == [[1, 2, 3], [4], [99, 98, 97, 96]]


def test_a_tokenizer_of_several_files_is_one_of_the_settings(tmp_path: Path) -> None:
    """A run that goes on must have the tokenizer with which it began."""
    path, model = write_lines(tmp_path / "in.jsonl", []), tmp_path / "model"
    model.mkdir()
    (model / "tokenizer.json").write_text("{}")
    words = ["--input", str(path), "--output-prefix", str(tmp_path / "out"), "--tokenizer-type", "HuggingFaceTokenizer"]
    args = command.parse([*words, "--tokenizer-model", str(model)])
    before = command.settings_of(args, [path])
    (model / "tokenizer.json").write_text('{"other": 1}')
    assert command.settings_of(args, [path]) != before

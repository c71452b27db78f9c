"""The preprocess tool against what Megatron-LM's own tool made of the same 5 MB, also after a kill in the middle.

The sums are those of golden.json (Megatron-LM's commit and its commands are recorded there); golden_preprocess.py makes
them anew.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks._corpus import tokenizer_flags, write_corpus
from spare_megatron.data.preprocess import command, merge
from tests.megatron.golden_preprocess import FOLDER, GOLDEN, MEGABYTES, VOCABULARY, numbers_before, sha256, sums
from tests.polling import until
from tests.process.running import has_not_ended

FLAGS = {**tokenizer_flags(FOLDER, VOCABULARY), "null": [*numbers_before(100_000), "--json-keys", "numbers"]}


@pytest.fixture(scope="module")
def golden() -> dict[str, dict[str, str]]:
    return json.loads(GOLDEN.read_text())["cases"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    write_corpus(path, MEGABYTES)
    assert sha256(path) == json.loads(GOLDEN.read_text())["input_sha256"], "the corpus is not the one of the sums"
    return path


def words_of(corpus: Path, prefix: Path, kind: str, workers: int) -> list[str]:
    words = ["--input", str(corpus), "--output-prefix", str(prefix), "--append-eod", "--workers", str(workers)]
    return [*words, *FLAGS[kind]]


def wanted(golden: dict[str, dict[str, str]], kind: str) -> dict[str, str]:
    return {end: golden[kind][end] for end in ("bin", "idx")}


QUICK = [("sentencepiece", 1), ("gpt2", 2), ("huggingface", 1), ("tiktoken", 1)]
LONG = [pytest.param(kind, workers, marks=pytest.mark.full) for kind in FLAGS for workers in (1, 2, 5)]


@pytest.mark.parametrize(("kind", "workers"), [*QUICK, *LONG])
def test_the_bytes_are_megatrons(
    tmp_path: Path, corpus: Path, golden: dict[str, dict[str, str]], kind: str, workers: int
) -> None:
    if kind == "tiktoken":
        pytest.importorskip("tiktoken")
    assert command.main(words_of(corpus, tmp_path / "out", kind, workers)) == 0
    assert sums(tmp_path / "out") == wanted(golden, kind)


# Blocks are small and every one of the first is recorded; then no more are, so that the kill loses some.
DIES = """
import os, signal, sys, psutil
from spare_megatron.data.preprocess import command
command.KEPT_EVERY_S, command.BLOCK_BYTES = 0.0, 1 << 16
add = command.Run.add
def add_and_die(run, block):
    add(run, block)
    if run.progress.documents >= 300:
        command.KEPT_EVERY_S = 1e9
    if run.progress.documents >= 800:
        print(*(child.pid for child in psutil.Process().children(recursive=True)), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
command.Run.add = add_and_die
command.main(sys.argv[1:])
"""


def test_a_killed_run_goes_on_and_its_workers_are_gone(
    tmp_path: Path, corpus: Path, golden: dict[str, dict[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    words = words_of(corpus, tmp_path / "out", "null", 2)
    killed = subprocess.run([sys.executable, "-c", DIES, *words], capture_output=True, text=True, timeout=100)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    pids = [int(pid) for pid in killed.stdout.split()]
    assert len(pids) >= 2
    until(f"the end of {pids}", lambda: not any(map(has_not_ended, pids)), 60)

    left = sorted(os.listdir(tmp_path))
    assert "out.progress" in left
    assert "out_numbers_document.idx" not in left
    others = [word for word in words if word != "--append-eod"]
    assert command.main(others) == 2
    assert "an interrupted run with --append-eod True, not False" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == left

    words[words.index("--workers") + 1] = "1"
    assert command.main(words) == 0
    behind = int(capsys.readouterr().err.split("Going on after ")[1].split()[0])
    assert 300 <= behind < 800
    assert sums(tmp_path / "out") == wanted(golden, "null")
    assert sorted(os.listdir(tmp_path)) == ["out_numbers_document.bin", "out_numbers_document.idx"]


def test_merged_files_are_those_of_the_whole(
    tmp_path: Path, corpus: Path, golden: dict[str, dict[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    lines, shards = corpus.read_bytes().splitlines(keepends=True), tmp_path / "shards"
    shards.mkdir()
    for number, (start, end) in enumerate([(0, 7), (7, 900), (900, len(lines))]):
        part = tmp_path / f"part{number}.jsonl"
        part.write_bytes(b"".join(lines[start:end]))
        assert command.main(words_of(part, shards / f"{number}", "null", 1)) == 0
    words = ["--input", str(shards), "--output-prefix", str(tmp_path / "merged_all")]
    assert merge.main(words) == 0
    assert sums(tmp_path / "merged") == wanted(golden, "null")

    small = tmp_path / "small.jsonl"
    small.write_text('{"text": "1"}\n')
    null = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "10"]
    assert command.main(["--input", str(small), "--output-prefix", str(tmp_path / "small"), *null]) == 0
    for change, sentence in [
        (["--multimodal"], "holds no modes; leave --multimodal out"),
        (["--output-prefix", str(shards / "0_numbers_document")], "is one of the pairs to be merged"),
        (["--input", "nowhere"], "--input needs the directory nowhere"),
        (["--input", str(tmp_path), "--output-prefix", str(tmp_path / "new")], "has tokens of uint16, but"),
    ]:
        assert merge.main([*words, *change]) == 2
        assert sentence in capsys.readouterr().err

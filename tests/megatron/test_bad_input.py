"""A user's mistake, through the whole path: one sentence with the values, exit code 2, nothing written over."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from spare_megatron.config.exits import ExitCode
from tests.process.harness import launch

FLAGS = (
    *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "16"),
    *("--max-position-embeddings", "16", "--micro-batch-size", "1", "--global-batch-size", "4", "--lr", "1e-3"),
    *("--train-iters", "2", "--tokenizer-type", "NullTokenizer", "--vocab-size", "63", "--eval-iters", "0"),
    *("--split", "100,0,0", "--num-workers", "0"),
)
LARGEST_TOKEN = 500


def prefix_of(folder: Path) -> Path:
    """A pair of data files of four documents; the largest token is 500."""
    from spare_megatron.megatron_adapter.data.datasets import IndexedDatasetBuilder

    prefix = folder / "corpus"
    builder = IndexedDatasetBuilder(str(prefix) + ".bin", dtype=np.uint16)
    for _ in range(4):
        builder.add_document(np.arange(LARGEST_TOKEN + 1, dtype=np.uint16), [LARGEST_TOKEN + 1])
    builder.finalize(str(prefix) + ".idx")
    return prefix


def missing(folder: Path) -> tuple[tuple[str, ...], str]:
    return ("--data-path", str(folder / "nothing")), f"{folder / 'nothing'}.idx"


def truncated(folder: Path) -> tuple[tuple[str, ...], str]:
    prefix = prefix_of(folder)
    data = prefix.with_suffix(".bin")
    data.write_bytes(data.read_bytes()[:-100])
    return ("--data-path", str(prefix), "--vocab-size", "600"), str(data)


def vocabulary(folder: Path) -> tuple[tuple[str, ...], str]:
    return ("--data-path", str(prefix_of(folder))), f"{LARGEST_TOKEN}"


def nothing_to_load(folder: Path) -> tuple[tuple[str, ...], str]:
    (folder / "empty").mkdir()
    return ("--mock-data", "--load", str(folder / "empty"), "--exit-on-missing-checkpoint"), str(folder / "empty")


def damaged_to_load(folder: Path) -> tuple[tuple[str, ...], str]:
    directory = folder / "damaged" / "iter_0000005"
    directory.mkdir(parents=True)
    (directory / "metadata.json").write_text("{")
    (directory.parent / "latest_checkpointed_iteration.txt").write_text("5")
    return ("--mock-data", "--load", str(directory.parent)), str(directory)


def batch(_: Path) -> tuple[tuple[str, ...], str]:
    return ("--mock-data", "--global-batch-size", "5"), "--global-batch-size 5"


@pytest.mark.parametrize("case", [missing, truncated, vocabulary, nothing_to_load, damaged_to_load, batch])
def test_one_sentence_and_exit_code_2(
    tmp_path: Path, case: Callable[[Path], tuple[tuple[str, ...], str]], capsys: pytest.CaptureFixture[str]
) -> None:
    flags, named = case(tmp_path)
    job = launch(tmp_path / "run", *FLAGS, *flags, groups=2, group_size=None, script="pretrain_gpt.py")
    job.finish(code=ExitCode.BAD_INPUT, timeout_s=110)
    text = (job.run_dir / "launch.out").read_text()
    with capsys.disabled():
        print(f"\n{case.__name__}: {text.strip()}")
    assert named in text
    assert len(text.splitlines()) <= 12, text
    assert "Traceback" not in text
    assert sum(line.startswith("spare-launch: ") for line in text.splitlines()) == 1

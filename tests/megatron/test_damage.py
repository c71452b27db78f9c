"""A flipped byte in any file of a checkpoint: found by ``spare-checkpoint verify``, passed over or refused by a load.

Two checkpoints are made in this process. A job starts from them, the newer one damaged, and saves further ones; of the
newest of those each file is damaged in turn.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, load

from spare_megatron.checkpoint.files import entries_of
from spare_megatron.checkpoint.folder import (
    CONFIG,
    TRACKER,
    iteration_name,
    iterations,
    last_good,
    write_manifest,
)
from spare_megatron.cli import checkpoint as command
from spare_megatron.config.errors import ConfigError
from spare_megatron.megatron_adapter.checkpoint.manifest_version import MANIFEST
from tests.process.harness import launch

pytestmark = [pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore")]

SEED, SMALL_BYTES, PLACES = 5, 4096, 12
FLAGS = (
    *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "16"),
    *("--max-position-embeddings", "16", "--micro-batch-size", "1", "--global-batch-size", "2", "--lr", "1e-3"),
    *("--train-iters", "6", "--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "127"),
    *("--eval-iters", "0", "--split", "100,0,0", "--num-workers", "0", "--log-interval", "1"),
    *("--spare-heartbeat-timeout-s", "60"),
)
OLDER, NEWER, LAST = 2, 4, 6


@contextmanager
def replica() -> Iterator[Any]:
    """The job's model in a world of this process alone."""
    from spare_megatron.megatron_adapter.model import world
    from spare_megatron.megatron_adapter.model.replica import build_replica
    from spare_megatron.worker.job_arguments import parse_job

    job, _ = parse_job(FLAGS)
    here = world.init_group_world(job.shape, 0, torch.distributed.HashStore(), timeout_s=60.0)
    try:
        yield build_replica(job.settings(128), here)
    finally:
        world.destroy()


@pytest.fixture(scope="module")
def save(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 2 and 4."""
    from spare_megatron.megatron_adapter.checkpoint import group_checkpoint

    save = tmp_path_factory.mktemp("damage") / "save"
    with replica() as made:
        for step in (OLDER, NEWER):
            directory = save / iteration_name(step)
            group_checkpoint.save(directory, made, step=step, consumed_samples=2 * step)
            write_manifest(directory, entries_of(directory))
    (save / TRACKER).write_text(str(NEWER))
    return save


@contextmanager
def flipped(path: Path, position: int, bits: int) -> Iterator[None]:
    """A file with other bits in one byte."""
    data = path.read_bytes()
    path.write_bytes(data[:position] + bytes([data[position] ^ bits]) + data[position + 1 :])
    try:
        yield
    finally:
        path.write_bytes(data)


def flips(path: Path, chance: random.Random) -> list[tuple[int, int]]:
    """(position, bits): every byte of a small file, some of a large one, with its first and last."""
    size = path.stat().st_size
    places = range(size) if size <= SMALL_BYTES else [0, size - 1, *chance.sample(range(size), PLACES)]
    return [(place, chance.randint(1, 255)) for place in places]


def verify(save: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = command.main(["verify", str(save)])
    return code, capsys.readouterr().out


def test_a_job_passes_over_the_damaged_one(save: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(save, capsys)[0] == 0
    largest = max((save / iteration_name(NEWER)).glob("*.distcp"), key=lambda path: path.stat().st_size)
    words = ("--load", str(save), "--save", str(save), "--save-interval", "2")
    with flipped(largest, largest.stat().st_size // 2, 1):
        shape: dict[str, Any] = {"groups": 1, "group_size": None}
        job = launch(tmp_path / "run", *FLAGS, *words, **shape, script="pretrain_gpt.py")
        lines = job.finish(timeout_s=110)
        data = largest.read_bytes()
    largest.write_bytes(data)
    assert [line["step"] for line in lines] == list(range(OLDER + 1, LAST + 1))
    reported = (job.run_dir / "logs" / "group-0" / "rank-0.log").read_text()
    assert f"A DAMAGED CHECKPOINT IS PASSED OVER: {largest} differs from its checksum" in reported
    assert f"{iteration_name(OLDER)}: step {OLDER}, {2 * OLDER} samples consumed" in reported
    assert "Traceback" not in reported + (job.run_dir / "launch.out").read_text()
    assert iterations(save) == [LAST, NEWER, OLDER]
    assert verify(save, capsys)[0] == 0


def test_a_digest_is_of_each_tensor_by_itself(save: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not depend on how many are read together."""
    from spare_megatron.megatron_adapter.checkpoint import digest as module

    sums = hashlib.sha256()
    directory = save / iteration_name(OLDER)
    for name, entry in module.model_tensors(directory, optimizer=True).items():
        tensor = {name: torch.empty(entry.size, dtype=entry.properties.dtype)}
        load(tensor, storage_reader=FileSystemReader(str(directory)), no_dist=True)
        sums.update(f"{name} {entry.properties.dtype} {tuple(entry.size)}\n".encode() + tensor[name].numpy().tobytes())
    for size in (1, 20_000, 1 << 28):
        monkeypatch.setattr(module, "TOGETHER_BYTES", size)
        parts = list(module._together(module.model_tensors(directory, optimizer=True)))
        assert (len(parts) > 1) == (size < 1 << 28)
        assert module.digest(directory, optimizer=True) == sums.hexdigest()


def test_a_flipped_byte_in_any_file_is_found(save: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print(f"seed {SEED}")
    chance, newest = random.Random(SEED), save / iteration_name(iterations(save)[0])
    files = sorted(path for path in newest.iterdir() if path.is_file())
    assert {CONFIG, MANIFEST, ".metadata", "common.pt"} < {path.name for path in files}
    tried = 0
    for path in [*files, save / TRACKER]:
        for position, bits in flips(path, chance):
            with flipped(path, position, bits):
                code, reported = verify(save, capsys)
                good, _ = last_good(save)
            where = f"{path.name}, byte {position} ^ {bits}"
            assert code == 1, where
            assert path.name in reported, where
            assert good == (newest if path.name == TRACKER else save / iteration_name(iterations(save)[1])), where
            tried += 1
    with capsys.disabled():
        print(f"\n{tried} flipped bytes in {len(files) + 1} files, each found")
    assert verify(save, capsys)[0] == 0


@pytest.mark.parametrize("name", [".metadata", "common.pt", CONFIG])
def test_without_checksums_what_cannot_be_read_is_one_sentence(save: Path, name: str) -> None:
    """A checkpoint of Megatron-LM has no manifest, and torch reads a tensor without looking at its checksum: there a
    flipped byte goes unseen unless it makes the file unreadable."""
    from spare_megatron.megatron_adapter.checkpoint import group_checkpoint

    directory = save / iteration_name(OLDER)
    manifest = (directory / MANIFEST).read_text()
    (directory / MANIFEST).unlink()
    try:
        with replica() as made, flipped(directory / name, 0, 1):
            with pytest.raises(ConfigError, match=str(directory)) as caught:
                group_checkpoint.load(directory, made)
            assert "\n" not in str(caught.value)
    finally:
        (directory / MANIFEST).write_text(manifest)

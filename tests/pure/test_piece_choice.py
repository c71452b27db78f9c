"""--spare-piece-microbatches auto: chosen from flags and the kind of GPU alone, and said."""

from __future__ import annotations

from pathlib import Path

import pytest

from spare_megatron.cli.plan import parser, planned
from spare_megatron.planning.memory import GIB
from spare_megatron.worker import piece_choice
from tests.pure.flags_of_a_job import job_of, launched

NAME = "NVIDIA H100 80GB HBM3"


def chosen(extra: str) -> tuple[int, list[str]]:
    job, ns = job_of(f"--micro-batch-size 1 {extra}", launched(4))
    assert ns.spare_piece_microbatches == job.shape.piece_microbatches
    return job.shape.piece_microbatches, [note for note in job.notes if "--spare-piece-microbatches auto" in note]


def test_small_shards_keep_single_microbatches_and_large_ones_do_not() -> None:
    size, reported = chosen("--global-batch-size 32")
    assert size == 1
    assert "2 would save" in reported[0]
    size, reported = chosen("--global-batch-size 16384")
    assert size == 2
    assert "pieces of 2 of the 4096 microbatches of a shard" in reported[0]


@pytest.mark.parametrize("mode", ["exact32", "fp32", "bf16"])
def test_only_exact_sums_gain_by_larger_pieces(mode: str) -> None:
    assert chosen(f"--global-batch-size 16384 --spare-reduce {mode}") == (1, [])


@pytest.mark.parametrize("mode", ["exact32", "fp32", "bf16"])
@pytest.mark.parametrize("more", ["", "--piece-microbatches auto"])
def test_a_plan_chooses_for_the_modes_for_which_a_job_does(mode: str, more: str) -> None:
    words = "--gpus 512 --gpus-per-group 8 --restart-s 900 --save-s 30 --compute-s 20 --reduce-s 2 --standby-groups 0"
    found = planned(parser().parse_args([*words.split(), "--params", "1e9", "--reduce", mode, *more.split()]))
    assert (found["piece_microbatches"], found["piece_step_times"]) == (1, None)
    assert found["memory_gib_per_gpu"]["accumulator"] == pytest.approx(4 * 1e9 / 8 / GIB, rel=1e-3)


def test_what_is_given_is_taken() -> None:
    assert chosen("--global-batch-size 32 --spare-piece-microbatches 8") == (8, [])


def test_a_batch_that_grows_has_whole_pieces_from_the_first_step_on() -> None:
    size, _ = chosen("--global-batch-size 16384 --rampup-batch-size 16360 8 100000 --train-iters 100")
    assert size == 2, "shards of 4090, 4092, 4094 and 4096 microbatches"


def test_the_kind_of_gpu_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert piece_choice.gpu_name() is None or piece_choice.DRIVER.exists()
    (tmp_path / "0000:01:00.0").mkdir()
    (tmp_path / "0000:01:00.0" / "information").write_text(f"Model: \t\t {NAME}\nIRQ:   \t 11\n")
    monkeypatch.setattr(piece_choice, "DRIVER", tmp_path)
    assert piece_choice.gpu_name() == NAME
    size, reported = chosen("--global-batch-size 256 --train-iters 1000")
    assert size == 1, "single microbatches cost no more than fp32 sums there"
    assert "a step takes" in reported[0]

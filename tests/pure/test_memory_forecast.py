"""The memory that ``--spare-check`` forecasts: the published formula of activations, bytes a parameter of each mode,
and what its lines say of a group that does not fit."""

from __future__ import annotations

import re
from typing import Any

import pytest

from spare_megatron.config.errors import ConfigError
from spare_megatron.planning.memory import GIB, Shape, memory
from spare_megatron.worker.memory_forecast import (
    activation_bytes,
    memory_items,
    memory_lines,
    shapes_that_fit,
    smaller_shapes,
)
from spare_megatron.worker.return_forecast import rank_parameters
from tests.pure.flags_of_a_job import job_of
from tests.pure.test_return_memory import DEEPSEEK, GPT, LLAMA, flags, shape

OF_ACTIVATIONS = {
    "seq_length": 2048,
    "hidden_dropout": 0.1,
    "sequence_parallel": False,
    "recompute_granularity": None,
    "recompute_modules": None,
    "virtual_pipeline_model_parallel_size": None,
    "moe_router_topk": 8,
    "optimizer_cpu_offload": False,
    "spare_state_redundancy": None,
    "spare_shapes": "none",
    "overlap_grad_reduce": False,
    "pipeline_model_parallel_size": 1,
    "pipeline_model_parallel_layout": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
    "optimizer_offload_fraction": 1.0,
}


def model(*changes: dict[str, Any], **more: Any) -> Any:
    return flags(OF_ACTIVATIONS, *changes, **more)


@pytest.mark.parametrize(
    ("changes", "degrees", "bytes_of_a_token_and_hidden_size"),
    [
        ({}, {"tensor": 8, "pipeline": 8}, 10 + 24 / 8),  # Korthikanti et al., equation 2 without 5 a s / h t
        ({"sequence_parallel": True}, {"tensor": 8, "pipeline": 8}, 34 / 8),  # section 5
        ({"sequence_parallel": True}, {"tensor": 8, "pipeline": 8, "context": 2}, 34 / 16),
        ({"sequence_parallel": True, "virtual_pipeline_model_parallel_size": 3}, {"tensor": 8, "pipeline": 8},
         34 / 8 * (1 + 7 / 24)),  # section 4.2.3
    ],
)  # fmt: skip
def test_activations_are_those_of_the_published_formula(
    changes: dict[str, Any], degrees: dict[str, int], bytes_of_a_token_and_hidden_size: float
) -> None:
    """GPT-3's first stage holds as many layers' activations as the model has: 8 microbatches of 12 layers."""
    found = activation_bytes(model(GPT, changes), shape(**degrees), 51_200)
    assert found == pytest.approx(96 * 2048 * 12288 * bytes_of_a_token_and_hidden_size, rel=1e-12)


def test_recomputation_keeps_inputs_and_one_layer() -> None:
    found = activation_bytes(model(GPT, recompute_granularity="full"), shape(tensor=8, pipeline=8), 51_200)
    assert found == pytest.approx(2048 * 12288 * (96 * 2 + 13), rel=1e-12)


@pytest.mark.parametrize("mode", ["exact", "exact32", "fp32"])
@pytest.mark.parametrize("tensor", [1, 8])
def test_the_other_items_are_those_of_the_planner(mode: str, tensor: int) -> None:
    of = model(LLAMA, spare_reduce=mode)
    items = memory_items(of, shape(tensor=tensor), 32_000)
    parameters = rank_parameters(of, shape(tensor=tensor), 32_000)[0].parameters
    parts = memory(parameters * tensor, Shape(4 * tensor, tensor), mode).parts
    names = {"weights": "weights", "accumulator": "sums of gradients", "reduced_result": "reduced gradients"}
    for part, item in {**names, "optimizer": "optimizer"}.items():
        assert items[item] == pytest.approx(parts[part] * GIB)


def test_fewer_copies_of_the_optimizers_state_take_memory_for_a_gather() -> None:
    all_of_it, half = (memory_items(model(LLAMA, spare_state_redundancy=r), shape(), 32_000) for r in (4, 2))
    assert half["optimizer"] == pytest.approx(all_of_it["optimizer"] / 2)
    assert half["gathered weights"] == half["weights"]
    assert all_of_it == memory_items(model(LLAMA), shape(), 32_000)


def said(capsys: pytest.CaptureFixture[str], flags: str) -> tuple[float, dict[str, float]]:
    """What ``--spare-check`` states: GB of the fullest GPU, and those that each flag saves."""
    with pytest.raises(SystemExit) as left:
        job_of(f"{LARGE} {flags} --spare-check", {"SPARE_NUM_GROUPS": "4"})
    assert left.value.code == 0
    text = capsys.readouterr().out
    total = re.search(r"buffers of libraries: about (\S+) GB", text)
    assert total is not None
    return float(total[1]), {one[1]: float(one[2]) for one in re.finditer(r"^  (--.*) saves (\S+) GB$", text, re.M)}


LARGE = (
    "--num-layers 80 --hidden-size 8192 --num-attention-heads 64 --seq-length 8192 --max-position-embeddings 8192 "
    "--global-batch-size 128 --bf16 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4"
)
EXPERTS = (
    "--sequence-parallel --num-experts 64 --moe-ffn-hidden-size 512 --disable-bias-linear "
    "--expert-model-parallel-size 8"
)
PREDICTED = "--mtp-num-layers 1 --position-embedding-type rope --recompute-granularity selective"


@pytest.mark.parametrize(
    ("flags", "without"),
    [
        ("", ""),
        (f"{EXPERTS} --expert-tensor-parallel-size 1", ""),  # D follows from TP
        ("--tensor-model-parallel-size 1 --num-experts 2 --disable-bias-linear --seq-length 1024", ""),
        (PREDICTED, ""),
        ("--spare-reduce fp32 --optimizer-cpu-offload", "--spare-reduce --optimizer-cpu-offload"),
        ("--use-distributed-optimizer --global-batch-size 4", "--use-distributed-optimizer"),  # a batch of one for each
        (f"--optimizer muon --muon-tp-mode duplicated {EXPERTS}", "--use-distributed-optimizer"),
    ],
)  # fmt: skip
def test_each_flag_that_is_said_to_save_memory_is_taken_and_saves_that_much(
    capsys: pytest.CaptureFixture[str], flags: str, without: str
) -> None:
    total, found = said(capsys, flags)
    assert len(found) >= 2
    assert not [advice for advice in found for flag in without.split() if flag in advice]
    for advice, saved in found.items():
        left, _ = said(capsys, f"{flags} {advice}")
        assert total - left == pytest.approx(saved, abs=0.006 * total), advice


def test_experts_are_counted_with_the_tokens_that_they_get() -> None:
    few, many = (activation_bytes(model(DEEPSEEK, moe_router_topk=k), shape(), 1) for k in (1, 8))
    sparse_share = 58 / 61
    assert many - few == pytest.approx(61 * 2048 * sparse_share * 7 * 2 * (3 * 2048 + 7168) * 1.0)


def test_a_group_that_does_not_fit_is_said_with_what_helps(capsys: pytest.CaptureFixture[str]) -> None:
    def half_as_much(flags: str) -> float:
        return sum(memory_items(model(LLAMA), shape(), 32_000).values()) / 2

    lines = list(memory_lines(model(LLAMA), shape(), 32_000, half_as_much))
    assert lines[0].startswith("memory of the fullest GPU, without buffers of libraries: about ")
    assert lines[2] == "  more than a GPU of 80 GB (A100, H100) or 141 GB (H200) or 180 GB (B200) has; by itself"
    assert all(line.startswith("  --") and " saves " in line for line in lines[3:])
    assert len(lines) == 3 + 5
    assert len(list(memory_lines(model(LLAMA), shape(tensor=8), 32_000, half_as_much))) == 2
    with pytest.raises(SystemExit) as left:
        job_of("--spare-check")
    assert left.value.code == 0
    assert "memory of the fullest GPU, without buffers of libraries: about " in capsys.readouterr().out


SMALLER = "--pipeline-model-parallel-size 4 --spare-max-group-restarts 3"


def test_a_shape_that_does_not_fit_is_left_out_or_refused(caplog: pytest.LogCaptureFixture) -> None:
    job, args = job_of(f"{SMALLER} --num-layers 8 --spare-shapes auto")
    needed = smaller_shapes(args, job.shape, 50_000)
    home = sum(memory_items(args, job.shape, 50_000).values())
    assert home < needed[3] < needed[2] < needed[1]
    assert shapes_that_fit(args, job.shape, 50_000, needed[1]) == (3, 2, 1)
    assert not caplog.records
    between = (needed[1] + needed[2]) / 2
    assert shapes_that_fit(args, job.shape, 50_000, between) == (3, 2)
    assert caplog.messages == [
        "no lost group comes back so: with 1 pipeline stage a GPU would need about 114 MB, and this one has 101 MB"
    ]
    assert shapes_that_fit(args, job.shape, 50_000, home) == ()
    job, args = job_of(f"{SMALLER} --num-layers 8 --spare-shapes 1")
    with pytest.raises(ConfigError, match=r"--spare-shapes 1: with 1 pipeline stage a GPU would need .* auto$"):
        shapes_that_fit(args, job.shape, 50_000, between)


@pytest.mark.parametrize(
    "cut",
    [
        "--num-layers 10 --decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 2",
        "--num-layers 16 --num-virtual-stages-per-pipeline-rank 2",
    ],
)
def test_a_smaller_shape_needs_what_a_job_of_that_shape_does(cut: str) -> None:
    job, args = job_of(f"{SMALLER} --spare-shapes auto {cut}")
    for stages, needed in smaller_shapes(args, job.shape, 50_000).items():
        layers = cut if stages == 2 and "virtual" in cut else " ".join(cut.split()[:2])
        layout = "" if stages != 3 else " --pipeline-model-parallel-layout Etttt|ttt|tttL"
        there, flags = job_of(f"--pipeline-model-parallel-size {stages} {layers}{layout}")
        assert needed == sum(memory_items(flags, there.shape, 50_000).values())

"""From one checkpoint, a step of each parallel layout applies what one rank alone applies, and all copies of a weight
in the group stay equal.

megatron-core is no reference here: some of its versions compute something else in some layouts. SGD with a rate of 1
applies the gradients themselves, clipped, so a weight shows what is wrong with its gradient. Sums of floats differ in
their last bits from layout to layout.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import load as read

from spare_megatron.megatron_adapter.checkpoint.digest import model_tensors
from spare_megatron.megatron_adapter.checkpoint.safe_loading import SafeReader
from tests.megatron.test_engine import alone
from tests.megatron.test_inner_sums import PIECES, engine_of, job_of
from tests.spawn import run_ranks

RANKS = 4
SGD = (
    *("--num-layers", "4", "--global-batch-size", str(PIECES), "--clip-grad", "0.05"),
    *("--optimizer", "sgd", "--sgd-momentum", "0", "--lr", "1", "--log-params-norm"),
)
T2, T4 = ("--tensor-model-parallel-size", "2"), ("--tensor-model-parallel-size", "4")
SEQUENCE, WHOLE = ("--sequence-parallel",), ("--expert-tensor-parallel-size", "1")
P2, VIRTUAL = ("--pipeline-model-parallel-size", "2"), ("--num-layers-per-virtual-pipeline-stage", "1")
D2, D4 = ("--spare-inner-data-parallel", "2"), ("--spare-inner-data-parallel", "4")
E2, E4 = ("--expert-model-parallel-size", "2"), ("--expert-model-parallel-size", "4")
DENSE: dict[str, tuple[str, ...]] = {
    "TP2": T2,
    "TP4, sequence parallel": T4 + SEQUENCE,
    "TP2 x PP2": T2 + SEQUENCE + P2,
    "PP2, virtual stages": P2 + VIRTUAL,
    "PP2 x D2": P2 + D2,
}
EXPERTS: dict[str, tuple[str, ...]] = {
    "TP2, whole experts": T2 + SEQUENCE + WHOLE,
    "TP2 x PP2, whole experts, EP2": T2 + SEQUENCE + P2 + WHOLE + E2,
    "TP2 x D2, whole experts, EP4": T2 + SEQUENCE + D2 + WHOLE + E4,
    "TP4, whole experts, EP2": T4 + SEQUENCE + WHOLE + E2,
    "PP2 x D2, EP2": P2 + D2 + E2,
    "D4, EP2": D4 + E2,
}
SPLIT = {"TP2, split experts": T2 + SEQUENCE, "TP2 x D2, split experts": T2 + SEQUENCE + D2}
"""Only for experts without biases. With EP as well, gloo has no all-gather of what uneven routing makes of them."""
COPIES = ("TP2, whole experts", "TP4, whole experts, EP2", "D4, EP2", "TP2 x D2, split experts")
"""Layouts in which several ranks of a group have an expert, or the same part of one."""
LLAMA = (
    *("--swiglu", "--normalization", "RMSNorm", "--disable-bias-linear", "--position-embedding-type", "rope"),
    *("--group-query-attention", "--num-query-groups", "2", "--qk-layernorm", "--kv-channels", "12"),
)
ROUTED = ("--num-experts", "4", "--moe-router-topk", "2", "--moe-token-dispatcher-type", "alltoall")
MODELS: dict[str, tuple[tuple[str, ...], Mapping[str, tuple[str, ...]]]] = {
    "biases, learned positions, tied": ((), DENSE),
    "Llama's kind, MTP, loss per token": ((*LLAMA, "--mtp-num-layers", "1", "--calculate-per-token-loss"), DENSE),
    "experts with biases": (ROUTED, EXPERTS),
    "DeepSeek's kind of experts": (
        (
            *(*LLAMA, *ROUTED, "--moe-layer-freq", "([0]+[1]*3)", "--moe-ffn-hidden-size", "48"),
            *("--moe-shared-expert-intermediate-size", "64", "--moe-router-score-function", "sigmoid"),
            *("--moe-router-enable-expert-bias", "--moe-router-topk-scaling-factor", "2.5"),
            *("--moe-router-load-balancing-type", "seq_aux_loss", "--moe-aux-loss-coeff", "0.1"),
            *("--moe-z-loss-coeff", "0.1"),
            *("--untie-embeddings-and-output-weights", "--mtp-num-layers", "1"),
        ),
        {**EXPERTS, **SPLIT},
    ),
}


def worker(rank: int, store: Any, task: dict[str, Any]) -> dict[str, Any]:
    """What a step reported, and the checksum of each part of the weights after it, for one rank and each layout."""
    from torch.distributed import PrefixStore

    from spare_megatron.megatron_adapter.checkpoint import group_checkpoint
    from spare_megatron.megatron_adapter.model import world

    model, layouts = MODELS[task["model"]]
    directory, found = Path(task["directory"]), dict[str, Any]()
    for name, flags in {"one rank": (), **layouts}.items():
        if not flags and rank:
            store.wait(["saved"])
            continue
        words = (*SGD, *model, *flags)
        if rank >= job_of(words, 0).shape.group_size:
            continue
        engine = engine_of(words, rank, PrefixStore(name, store))
        try:
            if flags:
                group_checkpoint.load(directory / "begin", engine.replica)
            else:
                unlike_any_start(engine)
                group_checkpoint.save(directory / "begin", engine.replica, step=0, consumed_samples=0)
                store.set("saved", "1")
            reported = alone(engine, 1, [list(range(PIECES // engine.world.shape.inner_data))])
            group_checkpoint.save(directory / name, engine.replica, step=1, consumed_samples=0)
            figures = {key: value for key, value in reported.items() if isinstance(value, int | float)}
            found[name] = {"figures": figures, "weights": parts(engine)}
        finally:
            world.destroy()
    return found


def unlike_any_start(engine: Any) -> None:
    """Change each parameter, so that no zeros or ones of an initialization hide a wrong gradient."""
    drawn = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in engine.replica.chunks[0].parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=drawn))


def parts(engine: Any) -> dict[str, int]:
    """Name of each weight, and of the part that this rank has of it -> its checksum."""
    world, found = engine.world, {}
    for number, chunk in enumerate(engine.replica.chunks):
        for name, weight in chunk.named_parameters():
            part = f"tensor rank {world.tensor_rank}" if weight.tensor_model_parallel else "whole"
            if ".local_experts." in name:
                part = f"expert rank {world.expert_rank}, {world.expert_tensor_rank}"
            key = f"stage {world.pipeline_rank}, {number}: {name}, {part}"
            found[key] = zlib.crc32(weight.detach().contiguous().numpy().tobytes())
    return found


def weights(directory: Path) -> dict[str, torch.Tensor]:
    found = {name: torch.empty(one.size) for name, one in model_tensors(directory).items()}
    read(found, storage_reader=SafeReader(str(directory)), no_dist=True)
    return found


@pytest.mark.timeout(240)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("model", MODELS)
def test_a_step_is_that_of_one_rank_and_copies_stay_equal(tmp_path: Path, model: str) -> None:
    task = {"directory": str(tmp_path), "model": model}
    of_ranks = run_ranks("tests.megatron.test_step_of_one_rank:worker", [task] * RANKS)
    begin, right = weights(tmp_path / "begin"), weights(tmp_path / "one rank")
    still = [name for name in right if torch.equal(right[name], begin[name])]
    assert not still, "parameters without a gradient show nothing"
    for name in MODELS[model][1]:
        group, copies = [rank[name] for rank in of_ranks if name in rank], dict[str, list[int]]()
        for rank in group:
            for part, checksum in rank["weights"].items():
                copies.setdefault(part, []).append(checksum)
        assert [part for part, found in copies.items() if len(set(found)) > 1] == [], name
        experts = {len(found) > 1 for part, found in copies.items() if "expert rank" in part}
        assert experts == ({name in COPIES} if "--num-experts" in MODELS[model][0] else set()), name
        one, other = of_ranks[0]["one rank"]["figures"], group[0]["figures"]
        assert other == pytest.approx(one, rel=1e-5), name
        assert {rank["figures"]["grad_norm"] for rank in group} == {other["grad_norm"]}, name
        there = weights(tmp_path / name)
        assert there.keys() == right.keys()
        off = {
            weight: float((value - right[weight]).abs().max() / (right[weight] - begin[weight]).abs().max())
            for weight, value in there.items()
        }
        assert max(off.values()) < 1e-3, f"{name}: {off}"

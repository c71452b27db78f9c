"""Experts with biases that tensor-parallel ranks have whole, a copy each or others: a step applies what one rank alone
applies, and all copies in the group stay equal."""

from __future__ import annotations

import warnings
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import load as read

from spare_megatron.megatron_adapter.checkpoint.digest import model_tensors
from spare_megatron.megatron_adapter.checkpoint.safe_loading import SafeReader
from tests.megatron.test_engine import alone
from tests.megatron.test_inner_sums import PIECES, engine_of
from tests.spawn import run_ranks

MODEL = (
    *("--num-experts", "4", "--moe-router-topk", "2", "--global-batch-size", str(PIECES), "--clip-grad", "0.05"),
    *("--optimizer", "sgd", "--sgd-momentum", "0", "--lr", "1"),
)
WHOLE = ("--tensor-model-parallel-size", "2", "--sequence-parallel", "--expert-tensor-parallel-size", "1")
LAYOUTS = {
    "one rank": (),
    "copies": WHOLE,
    "others": (*WHOLE, "--expert-model-parallel-size", "2"),
}


def worker(rank: int, store: Any, directory: str) -> dict[str, Any]:
    """The norm, and the checksum of each part of the weights, after a step of each layout from the same weights."""
    from torch.distributed import PrefixStore

    from spare_megatron.megatron_adapter.checkpoint import group_checkpoint
    from spare_megatron.megatron_adapter.model import world

    # megatron-core's word on experts that are whole on a tensor rank
    warnings.filterwarnings(
        "ignore", message="`sequence_parallel` is set to `True`, but tensor model parallel size is 1"
    )
    found: dict[str, Any] = {}
    for name, flags in LAYOUTS.items():
        if rank and not flags:
            store.wait(["saved"])
            continue
        engine = engine_of((*MODEL, *flags), rank, PrefixStore(name, store))
        try:
            if flags:
                group_checkpoint.load(f"{directory}/begin", engine.replica)
            else:
                group_checkpoint.save(f"{directory}/begin", engine.replica, step=0, consumed_samples=0)
                store.set("saved", "1")
            norm = alone(engine, 1, [list(range(PIECES))])["grad_norm"]
            group_checkpoint.save(f"{directory}/{name}", engine.replica, step=1, consumed_samples=0)
            found[name] = {"norm": norm, "weights": parts(engine)}
        finally:
            world.destroy()
    return found


def parts(engine: Any) -> dict[str, int]:
    """Name of each weight, and of the part that this rank has of it -> its checksum."""
    world, found = engine.world, {}
    for name, weight in engine.replica.chunks[0].named_parameters():
        part = f"tensor rank {world.tensor_rank}" if weight.tensor_model_parallel else "whole"
        part = f"expert rank {world.expert_rank}" if ".local_experts." in name else part
        found[f"{name}, {part}"] = zlib.crc32(weight.detach().contiguous().numpy().tobytes())
    return found


def weights(directory: Path) -> dict[str, torch.Tensor]:
    found = {name: torch.empty(one.size) for name, one in model_tensors(directory).items()}
    read(found, storage_reader=SafeReader(str(directory)), no_dist=True)
    return found


@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_step_is_that_of_one_rank_and_copies_stay_equal(tmp_path: Path) -> None:
    of_ranks = run_ranks("tests.megatron.test_whole_experts:worker", [str(tmp_path)] * 2)
    begin, right = weights(tmp_path / "begin"), weights(tmp_path / "one rank")
    norm = of_ranks[0]["one rank"]["norm"]
    for name in ("copies", "others"):
        one, other = (rank[name] for rank in of_ranks)
        assert one["norm"] == other["norm"] == pytest.approx(norm, rel=1e-5), name
        both = one["weights"].keys() & other["weights"].keys()
        assert {part for part in both if one["weights"][part] != other["weights"][part]} == set(), name
        assert any("experts" in part for part in both) == (name == "copies")
        for weight, value in weights(tmp_path / name).items():
            change = (right[weight] - begin[weight]).abs().max()
            assert (value - right[weight]).abs().max() <= 1e-3 * change + 1e-7, f"{name}: {weight}"

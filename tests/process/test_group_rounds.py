"""The ranks of a group agree: each is given what all of them gave, by position."""

from __future__ import annotations

from typing import Any

from tests.spawn import run_ranks


def worker(rank: int, store: Any, size: int) -> list[list[int]]:
    import torch
    import torch.distributed as dist

    from spare_megatron.worker.group_rounds import gather_in_group

    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    gather = gather_in_group(size, torch.device("cpu"))
    found = [list(one) for turn in range(2) for one in gather((turn, rank, -(2**62) + rank))]
    dist.destroy_process_group()
    return found


def test_each_rank_is_given_what_all_gave() -> None:
    expected = [[turn, rank, -(2**62) + rank] for turn in range(2) for rank in range(3)]
    assert run_ranks("tests.process.test_group_rounds:worker", [3] * 3) == [expected] * 3

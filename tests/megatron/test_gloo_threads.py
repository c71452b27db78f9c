"""A group's gloo process groups share one thread for input and output, and still sum."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.spawn import run_ranks

pytestmark = pytest.mark.timeout(120)


def _io_threads() -> int:
    return sum(task.read_text().startswith("gloo_tcp") for task in Path("/proc/self/task").glob("*/comm"))


def sums(rank: int, store: Any, _unused: None) -> list[float]:
    """The number of threads, and what the world, the pipeline's and a lone rank's group sum."""
    import torch
    import torch.distributed as dist

    from spare_megatron.config.shape import JobShape
    from spare_megatron.megatron_adapter.model import world as group_world

    shape = JobShape(num_groups=1, micro_batch_size=1, global_batch_size=2, pipeline=2)
    group_world.init_group_world(shape, rank, store, timeout_s=60.0)
    from megatron.core import parallel_state

    found = [float(_io_threads())]
    groups = (None, parallel_state.get_pipeline_model_parallel_group(), parallel_state.get_data_parallel_group())
    for group in groups:
        value = torch.full((1000,), float(1 + rank))
        dist.all_reduce(value, group=group)
        found.append(value.mean().item())
    dist.barrier()
    group_world.destroy()
    return found


def test_groups_share_a_thread_and_sum() -> None:
    assert run_ranks("tests.megatron.test_gloo_threads:sums", [None, None]) == [
        [1.0, 3.0, 3.0, 1.0],
        [1.0, 3.0, 3.0, 2.0],
    ]

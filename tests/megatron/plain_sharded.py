"""Plain megatron-core with its distributed optimizer: trains, saves in mid-run and resumes, as Megatron-LM does it.

Of this project only the CPU shims are used, and the guard that keeps a save's planning from starting processes; what
is written and read is megatron-core's. Without apex and transformer-engine, megatron-core 0.16.1 restores its own
distributed optimizer wrongly, because torch's Adam counts steps for each parameter; :func:`_load` sets right what that
breaks (empty state, one counter shared by all).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from spare_megatron.megatron_adapter.shims import install_cpu_shims

install_cpu_shims()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import dist_checkpointing  # noqa: E402
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer  # noqa: E402

from spare_megatron.megatron_adapter import core_differences  # noqa: E402
from spare_megatron.megatron_adapter.checkpoint import checkpoint_writer  # noqa: E402
from tests.megatron import plain_reference  # noqa: E402


def train(case: dict[str, Any], saves: dict[str, str | None], at: int) -> list[dict[str, float]]:
    """All steps of ``case`` from scratch; after step ``at`` one checkpoint in each directory, in the named form (None:
    whatever megatron-core takes)."""
    chunks, optimizer, config = plain_reference.build(case)
    schedule = plain_reference.schedule_of(case, optimizer)
    history = plain_reference.steps(case, chunks, optimizer, config, schedule, range(at))
    for directory, form in saves.items():
        _save(directory, form, case, chunks, optimizer, schedule, at)
    return history + plain_reference.steps(case, chunks, optimizer, config, schedule, range(at, case["steps"]))


def resume(case: dict[str, Any], directory: str) -> list[dict[str, float]]:
    """The steps that are left after the checkpoint in ``directory``."""
    chunks, optimizer, config = plain_reference.build({**case, "seed": 99})
    schedule = plain_reference.schedule_of(case, optimizer)
    step, consumed = _load(directory, case, chunks, optimizer, schedule)
    assert consumed == step * case["global_batch_size"]
    return plain_reference.steps(case, chunks, optimizer, config, schedule, range(step, case["steps"]))


def _models(chunks: list[Any], content: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    modules = []
    for chunk in chunks:
        while hasattr(chunk, "module"):
            chunk = chunk.module
        modules.append(chunk)
    names = ["model"] if len(modules) == 1 else [f"model{index}" for index in range(len(modules))]
    return modules, {name: one.sharded_state_dict(metadata=content) for name, one in zip(names, modules, strict=True)}


def _save(
    directory: str, form: str | None, case: dict[str, Any], chunks: list[Any], optimizer: Any, schedule: Any, step: int
) -> None:
    content: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if form is not None:
        content["distrib_optim_sharding_type"] = form
    _, state = _models(chunks, dict(content))
    state["optimizer"] = optimizer.sharded_state_dict(state, metadata=dict(content))
    consumed = step * case["global_batch_size"]
    state["args"] = argparse.Namespace(consumed_train_samples=consumed, consumed_valid_samples=0)
    state["opt_param_scheduler"] = schedule.state_dict()
    state["iteration"], state["checkpoint_version"] = step, 3.0
    if dist.get_rank() == 0:
        Path(directory).mkdir(parents=True)
    dist.barrier()
    with core_differences.writer_replaced(checkpoint_writer.FileSystemWriterAsync):
        dist_checkpointing.save(state, directory, _InProcess("torch_dist", 1, thread_count=1), content_metadata=content)


class _InProcess(checkpoint_writer.TorchDistSaveShardedStrategy):
    """megatron-core's strategy, whose forked writers this test's processes must not have."""

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        request = core_differences.plan_save(self)(sharded_state_dict, checkpoint_dir)
        if request.async_fn is not None:
            import queue

            transforms, _ = request.async_fn.args
            _, buckets, results = request.async_fn_args
            written = {}
            for index, bucket in enumerate(buckets):
                outcome: Any = queue.Queue()
                running: Any = queue.Queue()
                running.put(index)
                checkpoint_writer.FileSystemWriterAsync.write_preloaded_data(
                    transforms, index, bucket, outcome, running, use_fsync=False
                )
                written[index] = outcome.get_nowait()[1]
            results.put(written)
        dist.barrier()
        for finalize in request.finalize_fns:
            finalize()


def _load(directory: str, case: dict[str, Any], chunks: list[Any], optimizer: Any, schedule: Any) -> tuple[int, int]:
    common = dist_checkpointing.load_common_state_dict(directory)
    content = dict(common["content_metadata"])
    modules, state = _models(chunks, dict(content))
    shared = case.get("distributed", False)
    for part in optimizer.chained_optimizers if shared else ():
        part._init_optimizer_states_with_dummy_values()
    state["optimizer"] = optimizer.sharded_state_dict(state, is_loading=True, metadata=dict(content))
    loaded = dist_checkpointing.load(state, directory)
    for name, module in zip([name for name in state if name.startswith("model")], modules, strict=True):
        module.load_state_dict(loaded[name])
    with _counters_of_their_own(optimizer) if shared else _nothing():
        optimizer.load_state_dict(loaded["optimizer"])
    schedule.load_state_dict(loaded["opt_param_scheduler"])
    return int(loaded["iteration"]), int(loaded["args"].consumed_train_samples)


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def _counters_of_their_own(optimizer: Any) -> Iterator[None]:
    original = DistributedOptimizer._set_main_param_and_optimizer_states

    def set_states(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        state["step"] = state["step"].clone()
        original(self, model_param, {**tensors, "step": state["step"]})

    DistributedOptimizer._set_main_param_and_optimizer_states = set_states
    try:
        yield
    finally:
        DistributedOptimizer._set_main_param_and_optimizer_states = original
    for part in optimizer.chained_optimizers:
        for state in part.optimizer.state.values():
            state["step"] = state["step"].clone()
        for group in part.optimizer.param_groups:
            assert all(isinstance(one, torch.Tensor) for one in group["params"])

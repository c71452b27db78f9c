"""Makes an optimizer with the state of all shards, from which a checkpoint is made, in a group that keeps some of them.

It is in host memory: such a group has no room on its devices for the state of all shards. Only the objects of
megatron-core that describe a state are made anew. The optimizers that train are not changed.

May assume: parameters keep their places in the optimizers' parameter groups. Promises: training changes nothing of what
is made here, but for weights in fp32, which are the model's own.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from spare_megatron.megatron_adapter.checkpoint.optimizer_gather import first_state, main_copies
from spare_megatron.megatron_adapter.model.group_sum import parts_of
from spare_megatron.megatron_adapter.model.replica import Replica
from spare_megatron.megatron_adapter.model.state_snapshot import flat_view
from spare_megatron.megatron_adapter.shims import compute_device

GATHERED = 2**24
"""So many elements of each rank are on its device at a time when ranks exchange their parts."""


class ChainPlace(NamedTuple):
    """Where a parameter is in a chained optimizer."""

    part: int
    group: int
    number: int
    in_model: bool
    """Whether the optimizer updates the model's own memory, and not an fp32 copy."""


class Whole(NamedTuple):
    """What an optimizer has for one parameter."""

    main: torch.Tensor
    """What it updates."""
    state: dict[str, torch.Tensor]


def on_host(
    replica: Replica, places: Mapping[torch.nn.Parameter, ChainPlace]
) -> tuple[Replica, dict[torch.nn.Parameter, Whole]]:
    """The replica with another optimizer, in which ``places`` are as in its own, and what that has for each parameter:
    of the shape of the parameter, not filled in yet. No collective."""
    made: dict[torch.nn.Parameter, Whole] = {}
    chained = copy.copy(replica.optimizer)
    chained.chained_optimizers = [copy.copy(part) for part in replica.optimizer.chained_optimizers]
    for number, part in enumerate(chained.chained_optimizers):
        groups: list[list[torch.nn.Parameter]] = [[] for _ in part.param_groups]
        for parameter, place in sorted(places.items(), key=lambda item: item[1]):
            if place.part == number:
                room = torch.empty_like(parameter.detach(), dtype=torch.float32, device="cpu")
                made[parameter] = Whole(parameter if place.in_model else room, first_state(part, room))
                groups[place.group].append(parameter)
        mains = [[made[one].main for one in group] for group in groups]
        inner = object.__new__(type(part.optimizer))
        vars(inner).update(vars(part.optimizer))
        options = zip(part.param_groups, mains, strict=True)
        inner.param_groups = [{**group, "params": here} for group, here in options]
        inner.state = defaultdict(dict, {made[one].main: made[one].state for group in groups for one in group})
        part.optimizer = inner
        if hasattr(part, "float16_groups"):
            halves = [[one for one in group if not places[one].in_model] for group in groups]
            part.float16_groups = halves
            part.fp32_from_float16_groups = [[made[one].main for one in group] for group in halves]
            part.fp32_from_fp32_groups = [[one for one in group if places[one].in_model] for group in groups]
    return dataclasses.replace(replica, optimizer=chained), made


def storages(replica: Replica) -> frozenset[int]:
    """The addresses of the memory that optimizers made by :func:`on_host` have for themselves."""
    found = set()
    for part in replica.optimizer.chained_optimizers:
        copies = [main for parameter, main in main_copies(part).items() if main is not parameter]
        tensors = [one for state in part.optimizer.state.values() for one in state.values()]
        found |= {one.untyped_storage().data_ptr() for one in (*copies, *tensors)}
    return frozenset(found)


def share(buffer: Any, group: dist.ProcessGroup, made: Mapping[torch.nn.Parameter, Whole]) -> None:
    """Complete what there is for the parameters of a gradient buffer, of which each rank of ``group`` has filled in its
    part (:func:`parts_of`). Collective; nothing happens where the ranks do not divide the buffer."""
    parts = parts_of(buffer, group)
    if sum(part.size for part in parts) == buffer.grad_data.numel():
        return
    for bucket, part in zip(buffer.buckets, parts, strict=True):
        here = {one: made[one] for one in bucket.params if one in made}
        kinds = [kind for kind in dict.fromkeys(kind for one in here.values() for kind in one.state) if kind != "step"]
        of_kinds = [{one: whole.state[kind] for one, whole in here.items()} for kind in kinds]
        of_kinds.append({one: whole.main for one, whole in here.items() if whole.main is not one})
        for tensors in filter(None, of_kinds):
            ranges = {one: buffer.param_index_map[one][:2] for one in tensors}
            full = torch.zeros(bucket.grad_data.numel())
            for one, (start, stop) in ranges.items():
                full[start - bucket.offset : stop - bucket.offset].copy_(flat_view(tensors[one]))
            _gather(full, part.start - bucket.offset, part.size, group)
            for one, (start, stop) in ranges.items():
                flat_view(tensors[one]).copy_(full[start - bucket.offset : stop - bucket.offset])
        _share_steps([whole.state["step"] for whole in here.values() if "step" in whole.state], group)


def _gather(full: torch.Tensor, start: int, size: int, group: dist.ProcessGroup) -> None:
    """Fill ``full`` in, of which this rank has ``size`` elements from ``start`` on, and each other one has as many."""
    for first in range(0, size, GATHERED):
        mine = full[start + first : start + min(first + GATHERED, size)].to(compute_device())
        of_all = mine.new_empty(group.size() * mine.numel())
        dist.all_gather_into_tensor(of_all, mine, group=group)
        for rank, values in enumerate(of_all.split(mine.numel())):
            full[rank * size + first : rank * size + first + mine.numel()].copy_(values)


def _share_steps(counters: Collection[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Give all counters of updates the common value; of a parameter of which a rank has no part it has none."""
    if counters:
        counted = torch.stack([one.reshape(()).float() for one in counters]).max().to(compute_device())
        dist.all_reduce(counted, op=dist.ReduceOp.MAX, group=group)
        for one in counters:
            one.fill_(counted.item())

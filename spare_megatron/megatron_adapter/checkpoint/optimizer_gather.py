"""Gathers optimizer state that is divided over inner ranks, so that a checkpoint is the same for every D.

megatron-core's distributed optimizer keeps on each inner data rank a part of every bucket. Its own checkpoint formats
depend on that division, and they restore torch's Adam wrongly (one step counter for all parameters, or none). Here a
checkpoint has the state of a plain optimizer instead: :func:`gathered` makes a plain optimizer with the whole state,
and :func:`scatter` divides a loaded one into the parts again.

Memory: while a checkpoint is made or read, each rank has the whole state of its parameters (8 bytes per parameter with
Adam, 12 with AdEMAMix, and 4 more in half precision).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from spare_megatron.megatron_adapter.model.ademamix import AdEMAMix
from spare_megatron.megatron_adapter.model.replica import Replica, build_optimizer
from spare_megatron.megatron_adapter.model.soap import is_soap, order_bases


def is_split(replica: Replica) -> bool:
    """Whether the optimizer is megatron-core's distributed one, whose state is divided over inner ranks."""
    return any(hasattr(part, "model_param_group_index_map") for part in replica.optimizer.chained_optimizers)


def empty(replica: Replica) -> Replica:
    """The replica with a plain optimizer that has no state yet; ``replica`` itself where its state is not divided."""
    return plain(replica) if is_split(replica) else replica


def plain(replica: Replica) -> Replica:
    """The replica with another optimizer, which has all of its parameters and no state yet."""
    mains = {parameter: getattr(parameter, "main_param", None) for parameter in _parameters(replica)}
    built = build_optimizer(replica.settings, replica.config, replica.chunks, split=False)
    for parameter, main in mains.items():  # the new optimizer leaves its own copies there
        if main is not None:
            parameter.main_param = main
        elif hasattr(parameter, "main_param"):
            del parameter.main_param
    for part, whole in zip(replica.optimizer.chained_optimizers, built.chained_optimizers, strict=True):
        if hasattr(part, "grad_scaler"):  # optimizers of weights in fp32 have none
            whole.grad_scaler = part.grad_scaler
    return dataclasses.replace(replica, optimizer=built)


def counts_steps(part: Any) -> bool:
    """Whether one of megatron-core's optimizers has a step counter for each tensor, as torch's Adam and AdEMAMix."""
    return isinstance(part.optimizer, (torch.optim.Adam, torch.optim.AdamW, AdEMAMix))


def counts_in_groups(part: Any) -> bool:
    """Whether one of megatron-core's optimizers counts updates once for each parameter group, as the FusedAdam of
    transformer-engine and of apex does. It counts none for a group without parameters."""
    return any(kind.__name__ == "FusedAdam" for kind in type(part.optimizer).__mro__)


def counted_updates(chained: Any) -> int:
    """How many updates those of a chained optimizer's parts have counted that count them in parameter groups."""
    groups = [group for part in chained.chained_optimizers if counts_in_groups(part) for group in part.param_groups]
    return max((int(group.get("step", 0)) for group in groups), default=0)


def count_updates(chained: Any, count: int) -> None:
    """Have them count from ``count`` on in every group, as one without parameters may get some later on."""
    for part in filter(counts_in_groups, chained.chained_optimizers):
        for group in part.param_groups:
            known = group.get("step")
            group["step"] = torch.full_like(known, count) if torch.is_tensor(known) else count


def is_emerging(part: Any) -> bool:
    """Whether one of megatron-core's optimizers is of the package emerging-optimizers. Of those that are taken (Muon,
    Lion and SOAP) SOAP alone counts steps."""
    return any(kind.__module__.startswith("emerging_optimizers.") for kind in type(part.optimizer).__mro__)


def is_sgd(part: Any) -> bool:
    """Whether one of megatron-core's optimizers is torch's SGD, or the FusedSGD of transformer-engine and of apex."""
    return any(kind.__name__ in ("SGD", "FusedSGD") for kind in type(part.optimizer).__mro__)


def moments(part: Any) -> tuple[str, ...]:
    """The names of the tensors that Adam or AdEMAMix keeps for each parameter."""
    return AdEMAMix.MOMENTS if isinstance(part.optimizer, AdEMAMix) else ("exp_avg", "exp_avg_sq")


def kinds(part: Any) -> tuple[str, ...]:
    """The names of the tensors that an optimizer other than SOAP keeps for each parameter, of its shape, beside a step
    counter."""
    if is_sgd(part):
        return ("momentum_buffer",) if any(group["momentum"] for group in part.param_groups) else ()
    if is_emerging(part):
        return ("exp_avg",) if type(part.optimizer).__name__ == "Lion" else ("momentum_buffer",)
    return moments(part)


def keeps_state(part: Any) -> bool:
    """Whether one of megatron-core's optimizers has something for each parameter beside the parameter itself."""
    return part.optimizer is not None and bool(kinds(part) or hasattr(part, "fp32_from_float16_groups"))


def give_first_state(replica: Replica) -> None:
    """Give each optimizer that was never updated the state with which it would begin: zeros, step 0. An update has the
    same result with it and without."""
    for part in replica.optimizer.chained_optimizers:
        _give_first_state(part)


def _give_first_state(part: Any) -> None:
    for group in part.param_groups:
        if is_emerging(part):
            part.optimizer._init_group(group, skip_non_grad_params=False)  # as megatron-core does for checkpoints
            if is_soap(part):
                order_bases(part.optimizer)
            continue
        for parameter in group["params"]:
            state = part.optimizer.state.get(parameter) or first_state(part, parameter.data)
            if state:
                part.optimizer.state[parameter] = state


def begin_states(replica: Replica) -> None:
    """Have megatron-core begin the state of each optimizer before it reads a checkpoint, also of SGD, for which it has
    no function that does."""
    for part in replica.optimizer.chained_optimizers:
        if part.init_state_fn is None and is_sgd(part):
            part.init_state_fn = lambda *_, part=part: _give_first_state(part)


def first_state(part: Any, values: torch.Tensor) -> dict[str, torch.Tensor]:
    """What an optimizer other than SOAP has for a parameter with these ``values`` that was never updated."""
    zeros = {name: torch.zeros_like(values) for name in kinds(part)}
    return {"step": torch.tensor(0.0), **zeros} if counts_steps(part) else zeros


def gathered(replica: Replica) -> Replica:
    """The replica with a plain optimizer that has the whole state; ``replica`` itself where its state is not divided.

    The optimizer must have a state (after a step, or zeros). Collective over the ranks that divide it.
    """
    whole = empty(replica)
    if whole is replica:
        return replica
    for split, plain in zip(replica.optimizer.chained_optimizers, whole.optimizer.chained_optimizers, strict=True):
        copy_options(split, plain)
        mains = main_copies(plain)
        steps = [state["step"] for state in split.optimizer.state.values() if "step" in state]
        for buffer_number, buffer in enumerate(split.buffers):
            for bucket_number, bucket in enumerate(buffer.buckets):
                shards = list(_shards(split, buffer_number, bucket_number))
                for key in ("param", *moments(split)):
                    full = _gather(split, bucket, key, shards)
                    for parameter in bucket.params:
                        start, stop, _ = buffer.param_index_map[parameter]
                        values = full[start - bucket.offset : stop - bucket.offset].view(parameter.shape)
                        if key != "param":
                            plain.optimizer.state[mains[parameter]][key] = values.clone()
                        elif mains[parameter] is not parameter:
                            mains[parameter].data.copy_(values)
        for state in plain.optimizer.state.values():
            if steps:
                state["step"] = steps[0].clone()
    return whole


def scatter(whole: Replica, replica: Replica) -> None:
    """Copy this rank's parts of a plain optimizer's loaded state into ``replica``; do nothing where both are the
    same."""
    if whole is replica:
        return
    for split, plain in zip(replica.optimizer.chained_optimizers, whole.optimizer.chained_optimizers, strict=True):
        copy_options(plain, split)
        mains = main_copies(plain)
        for buffer_number, buffer in enumerate(split.buffers):
            for bucket_number in range(len(buffer.buckets)):
                for parameter, ranges in _shards(split, buffer_number, bucket_number):
                    inside = slice(ranges["param"].start, ranges["param"].end)
                    group, order = split.model_param_group_index_map[parameter]
                    own = split.optimizer.param_groups[group]["params"][order]
                    source = plain.optimizer.state[mains[parameter]]
                    state = split.optimizer.state[own]
                    for key in moments(split):
                        state[key] = source[key].reshape(-1)[inside].clone()
                    if "step" in source:
                        state["step"] = source["step"].clone()
                    own.data.copy_(mains[parameter].data.reshape(-1)[inside])


def take_weights(replica: Replica) -> None:
    """Have the optimizers go on from the weights of the model. Their fp32 copies may be on another device."""
    if is_split(replica):
        replica.optimizer.reload_model_params()
        return
    for part in replica.optimizer.chained_optimizers:
        for parameter, main in main_copies(part).items():
            main.data.copy_(parameter.data)


def _parameters(replica: Replica) -> Iterator[torch.nn.Parameter]:
    for chunk in replica.chunks:
        yield from chunk.parameters()


def copy_options(source: Any, target: Any) -> None:
    """Copy the options of parameter groups (learning rate, weight decay, FusedAdam's step), but not the parameters."""
    for one, other in zip(source.optimizer.param_groups, target.optimizer.param_groups, strict=True):
        other.update({name: value for name, value in one.items() if name != "params"})


def main_copies(plain: Any) -> dict[torch.nn.Parameter, torch.Tensor]:
    """Model parameter -> what a plain optimizer updates for it: an fp32 copy in half precision, else itself."""
    if not hasattr(plain, "float16_groups"):
        return {one: one for group in plain.optimizer.param_groups for one in group["params"]}
    halves = zip(plain.float16_groups, plain.fp32_from_float16_groups, strict=True)
    mains = {one: main for ones, copies in halves for one, main in zip(ones, copies, strict=True)}
    return mains | {one: one for group in plain.fp32_from_fp32_groups for one in group}


def _shards(split: Any, buffer: int, bucket: int) -> Iterator[tuple[torch.nn.Parameter, dict[str, Any]]]:
    """(parameter, ranges of its elements) for each parameter of which this rank has a part in a bucket."""
    (buckets,) = split.gbuf_ranges[buffer].values()
    yield from buckets[bucket]["param_map"].items()


def _gather(split: Any, bucket: Any, key: str, shards: list[tuple[torch.nn.Parameter, dict[str, Any]]]) -> torch.Tensor:
    """The values of ``key`` (weights or a moment) over a whole bucket: fp32 [elements of the bucket]."""
    group = split.data_parallel_group
    size = bucket.grad_data.numel() // group.size()
    mine = torch.zeros(size, dtype=torch.float32, device=bucket.grad_data.device)
    for parameter, ranges in shards:
        number, order = split.model_param_group_index_map[parameter]
        own = split.optimizer.param_groups[number]["params"][order]
        values = own.detach() if key == "param" else split.optimizer.state[own][key]
        mine[ranges["gbuf_local"].start : ranges["gbuf_local"].end].copy_(values)
    full = torch.empty(size * group.size(), dtype=torch.float32, device=mine.device)
    dist.all_gather_into_tensor(full, mine, group=group)
    return full

"""What one rank needs to go on after the last applied step, as tensors in its own memory and a few values.

The same rank position of another group that was built of the same flags has the same tensors, so it takes the state by
overwriting them, whatever is split over the ranks of a group. Nothing here depends on how many steps were applied: what
an optimizer would create in its first update is created before, as zeros.

Not part of it: gradients; what follows from the step alone (random numbers, data positions); counts and sums that every
step begins anew (routing counts, losses); and fp8 scales, which follow from what a rank computed last and are not equal
in two groups: whoever takes over begins them anew, as a job does.

Where the group keeps only some state shards, parameters and shards are not part of it either: groups gather these
(:mod:`spare_megatron.worker.shard_gather`).

Where this rank has a whole fp32 copy of a half-precision parameter, the copy is the state, and the parameter is rounded
from it, as in each update. A distributed optimizer has only a part of that copy here, so the parameter is state too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from spare_megatron.megatron_adapter.checkpoint.optimizer_gather import give_first_state, main_copies
from spare_megatron.megatron_adapter.model.exact import ExactGradients
from spare_megatron.megatron_adapter.model.optimizer_shards import OptimizerShards
from spare_megatron.megatron_adapter.model.replica import Replica
from spare_megatron.megatron_adapter.model.state_snapshot import in_memory_order, model_tensors

_FP8 = "_extra_state"
"""How the names of transformer-engine's fp8 scales end in a model's state."""
_HALVES = "float16_groups"
"""The attribute of megatron-core's optimizers that lists half-precision parameters; those that split them lack it."""


class TransferableState:
    """The methods of :class:`~spare_megatron.worker.engine.StepEngine` that give and take a rank's state.

    May assume: both sides have the same flags, layout and rank position.
    """

    replica: Replica
    exact: ExactGradients | None
    """The exact sums, whose scales follow from earlier steps; None in plain modes."""
    shards: OptimizerShards
    applied: int
    """The step after which the state is."""

    def state_tensors(self) -> Mapping[str, torch.Tensor]:
        """Name -> tensor of parameters, persistent buffers, scales of exact sums and, by state shard, fp32 copies and
        optimizer states, in the memory that training uses. In the order of names, which is that in which they travel, a
        shard is one range of bytes. No collective."""
        replica = self.replica
        if self.shards.kept is None:
            seen = {half.data_ptr() for part in _parts(replica) for half in _rounded(part)}
        else:
            parameters = (one for chunk in replica.chunks for one in chunk.parameters())
            seen = {one.data_ptr() for one in parameters if one.requires_grad}  # they come with the shards
        found: dict[str, torch.Tensor] = {}
        for name, tensor in model_tensors(replica):
            if tensor.data_ptr() not in seen and not name.endswith(_FP8):
                seen.add(tensor.data_ptr())
                found[f"model.{name}"] = tensor
        if self.exact is not None:
            found |= {f"exact.{key}": one for key, one in self.exact.format.tensors.items()}
        found = {name: in_memory_order(tensor.detach()) for name, tensor in found.items()}
        for one in self.shards.tensors(range(self.shards.number) if self.shards.kept is None else ()):
            found[f"state shard {one.shard:05}.{one.place}.{one.kind}"] = one.tensor
        return found

    def state_values(self) -> Mapping[str, Any]:
        """Options and step counters of the optimizers, loss scalers, learning-rate schedule, the scales of exact sums
        that are no tensors, and in exact modes the digest of each state shard, which is equal on all donors. No
        collective."""
        replica = self.replica
        divided = self.shards.kept is not None
        if not divided:
            give_first_state(replica)
        schedule = {name: value for name, value in vars(replica.scheduler).items() if name != "optimizer"}
        return {
            "optimizers": [_values_of(part, replica, counts=not divided) for part in _parts(replica)],
            "schedule": schedule,
            "exact": None if self.exact is None else self.exact.format.values,
            **({} if self.exact is None or divided else self._shard_digests()),
        }

    def adopt_state(self, step: int, values: Mapping[str, Any]) -> None:
        """Go on from the state after ``step``: ``values`` of another rank, whose tensors have been written into those
        of :meth:`state_tensors`. No collective.

        Raises RuntimeError where what is in a state shard is not what the other rank had in it."""
        replica = self.replica
        self.applied = step
        divided = self.shards.kept is not None
        if not divided:
            give_first_state(replica)
        for part, reported in zip(_parts(replica), values["optimizers"], strict=True):
            _adopt_values(part, reported, replica, counts=not divided)
            if hasattr(part, _HALVES) and not divided:
                part._copy_main_params_to_model_params()
        vars(replica.scheduler).update(values["schedule"])
        if self.exact is not None:
            self.exact.format.adopt(values["exact"])
            digests = {} if divided else self._shard_digests()
            unlike = [name for name, digest in digests.items() if values[name] != digest]
            if unlike:
                raise RuntimeError(f"the state after step {step} came otherwise than it was: {', '.join(unlike)}")

    def _shard_digests(self) -> dict[str, str]:
        """The digest of each state shard, 16 hex digits."""
        digests = self.shards.digests(range(self.shards.number))
        return {f"state shard {number}": f"{digest:016x}" for number, digest in enumerate(digests)}


def _parts(replica: Replica) -> list[Any]:
    """megatron-core's optimizers of this rank; those of experts are apart."""
    return list(replica.optimizer.chained_optimizers)


def _rounded(part: Any) -> Iterator[torch.Tensor]:
    """The parameters that are rounded from fp32 copies which this rank has whole."""
    for group in getattr(part, _HALVES, ()):
        yield from group


def _counting(part: Any, replica: Replica) -> list[dict[str, Any]]:
    """The states of the tensors that the optimizer updates and counts steps of, in a fixed order."""
    row = None if replica.row is None else set(replica.row.parameters.values())
    mine = None if row is None else {id(main) for one, main in main_copies(part).items() if one in row}
    updated = [one for group in part.param_groups for one in group["params"] if mine is None or id(one) in mine]
    return [state for one in updated if "step" in (state := part.optimizer.state.get(one, {}))]


def _values_of(part: Any, replica: Replica, counts: bool) -> dict[str, Any]:
    """What an optimizer has beside tensors; with ``counts`` also how often it has updated each of its tensors."""
    scaler = getattr(part, "grad_scaler", None)
    return {
        "options": [
            {name: _plain(value) for name, value in group.items() if name != "params"} for group in part.param_groups
        ],
        "steps": [_plain(state["step"]) for state in _counting(part, replica)] if counts else [],
        "scaler": {} if scaler is None else {name: _plain(one) for name, one in scaler.state_dict().items()},
    }


def _adopt_values(part: Any, reported: Mapping[str, Any], replica: Replica, counts: bool) -> None:
    for group, options in zip(part.param_groups, reported["options"], strict=True):
        group.update({name: _like(group.get(name), value) for name, value in options.items()})
    counting = _counting(part, replica) if counts else []
    for state, count in zip(counting, reported["steps"], strict=True):
        state["step"] = _like(state["step"], count)
    if reported["scaler"]:
        own = part.grad_scaler.state_dict()
        part.grad_scaler.load_state_dict({name: _like(own[name], value) for name, value in reported["scaler"].items()})


def _plain(value: Any) -> Any:
    """A number in a tensor as a number, a tuple as a list; else the value itself."""
    if torch.is_tensor(value):
        return value.item()
    return list(value) if isinstance(value, tuple) else value


def _like(own: Any, value: Any) -> Any:
    """``value``, which :func:`_plain` returned, in the form that ``own`` has."""
    if torch.is_tensor(own):
        return torch.full_like(own, value)
    return tuple(value) if isinstance(own, tuple) else value

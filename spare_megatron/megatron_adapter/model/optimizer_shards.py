"""What this rank's optimizers have for each element of its gradient buffers, cut into state shards, and their digests.

Of the buffers, the one of a tied output layer's use (:mod:`.tied_head`) has no state: it is that of the embedding.

May assume: the replica's parameters and optimizers stay the same objects. Promises: the layout
(:mod:`spare_megatron.placement.shard_borders`) is the same on this position of all groups; each tensor that an
optimizer has for a parameter is in the shards whole, in the memory that training updates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from spare_megatron import kernels
from spare_megatron.megatron_adapter.checkpoint.optimizer_gather import give_first_state, is_emerging, main_copies
from spare_megatron.megatron_adapter.model.gradient_overlap import gradient_buffers
from spare_megatron.megatron_adapter.model.group_sum import BufferSlice, parts_of
from spare_megatron.megatron_adapter.model.replica import Replica
from spare_megatron.megatron_adapter.model.state_snapshot import in_memory_order
from spare_megatron.placement.shard_borders import BufferBorders, UnitRun


class ShardTensor(NamedTuple):
    """A part of one tensor of an optimizer, all of one shard."""

    shard: int
    place: str
    """The numbers of the optimizer, of its parameter group and of the parameter in it."""
    kind: str
    """'main' for what the optimizer updates, where that is not the model's own memory; else the name in the optimizer's
    state, as 'exp_avg'."""
    tensor: torch.Tensor
    """Flat, in the optimizer's memory."""


class _Updated(NamedTuple):
    """What an optimizer updates for a parameter."""

    place: str
    inner: torch.optim.Optimizer
    main: torch.Tensor
    """The parameter, an fp32 copy of it or, where the optimizer is divided, this rank's slice of either."""
    is_slice: bool
    cuts: bool
    """Whether the update of an element needs no other one."""


class _Span(NamedTuple):
    """Elements ``start`` to ``stop`` of what an optimizer updates."""

    updated: _Updated
    start: int
    stop: int


class OptimizerShards:
    """The state shards of one rank."""

    def __init__(self, replica: Replica, number: int) -> None:
        """``number`` is S."""
        self.number = number
        self._replica = replica
        self._spans: list[list[_Span]] = [[] for _ in range(number)]
        self._model = {one.untyped_storage().data_ptr() for chunk in replica.chunks for one in chunk.parameters()}
        """Where the model's memory begins."""
        updated, placed = _updated(replica), set[torch.nn.Parameter]()
        for _, buffer, group in gradient_buffers(replica):
            kept, cuts = parts_of(buffer, group), list[tuple[torch.nn.Parameter, int, BufferSlice]]()
            for parameter, (start, stop, _) in sorted(buffer.param_index_map.items(), key=lambda item: item[1][0]):
                parts = (one.cut(start, stop) for one in kept if parameter in updated)
                cuts += [(parameter, part.start - start, part) for part in parts if part is not None]
            runs = [
                UnitRun(
                    part.at,
                    part.at + part.size,
                    first,
                    kernels.BLOCK if updated[parameter].cuts else parameter.numel(),
                )
                for parameter, first, part in cuts
            ]
            borders = BufferBorders(runs, sum(one.size for one in kept), number)
            for parameter, first, part in cuts:
                one = updated[parameter]
                begin = part.at - (0 if one.is_slice else first)  # of what is updated, in the sum that this rank keeps
                for span in borders.spans(part.at, part.at + part.size):
                    self._spans[span.shard].append(_Span(one, span.start - begin, span.stop - begin))
            placed |= {parameter for parameter, _, _ in cuts}
        assert placed == updated.keys(), f"{len(updated.keys() - placed)} updated parameters are in no gradient buffer"

    def tensors(self, shards: Iterable[int]) -> Iterator[ShardTensor]:
        """The tensors of some shards in a fixed order; what an optimizer has not begun is zeros. No collective."""
        give_first_state(self._replica)
        for shard in shards:
            for one, start, stop in self._spans[shard]:
                if one.main.untyped_storage().data_ptr() not in self._model:
                    yield ShardTensor(shard, one.place, "main", _flat(one.main)[start:stop])
                for kind, values in sorted(one.inner.state.get(one.main, {}).items()):
                    if kind == "step":
                        continue
                    assert values.numel() == one.main.numel(), f"{kind} of {one.place} has {values.numel()} elements"
                    yield ShardTensor(shard, one.place, kind, _flat(values)[start:stop])

    def digests(self, shards: Sequence[int]) -> list[int]:
        """64 bits for each of some shards, as :func:`kernels.digest`: equal state has equal digests on every machine.
        No collective."""
        found: dict[int, list[torch.Tensor]] = {shard: [] for shard in shards}
        for one in self.tensors(shards):
            found[one.shard].append(one.tensor)
        return [kernels.digest(found[shard]) for shard in shards]

    def parts(self) -> dict[str, list[kernels.Digestible]]:
        """What the optimizers have, by shard and kind, to find where it differs. No collective."""
        found: dict[str, list[kernels.Digestible]] = {}
        for one in self.tensors(range(self.number)):
            found.setdefault(f"{one.kind} of state shard {one.shard}", []).append(one.tensor)
        return found


def _updated(replica: Replica) -> dict[torch.nn.Parameter, _Updated]:
    found = {}
    for number, part in enumerate(replica.optimizer.chained_optimizers):
        groups = part.optimizer.param_groups
        places = {
            id(one): f"{number}.{g}.{n}" for g, group in enumerate(groups) for n, one in enumerate(group["params"])
        }
        if hasattr(part, "model_param_group_index_map"):
            mains = {one: groups[g]["params"][n] for one, (g, n) in part.model_param_group_index_map.items()}
            is_slice = True
        else:
            mains, is_slice = main_copies(part), False
        for parameter, main in mains.items():
            cuts = main.is_contiguous() and not is_emerging(part)
            found[parameter] = _Updated(places[id(main)], part.optimizer, main, is_slice, cuts)
    return found


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return in_memory_order(tensor.detach()).view(-1)

"""What this rank's optimizers have for each element of its gradient buffers, cut into state shards, and their digests.

Of the buffers, the one of a tied output layer's use (:mod:`.tied_head`) has no state: it is that of the embedding.

A group may keep some of the shards only (:meth:`OptimizerShards.keep`). Then the optimizers update slices of
parameters: for each of them there are a slice of the fp32 copy and of the moments, and nothing for the rest. What an
update needs of all elements, the norm of the gradients, is still that of all. The parameters of other shards come from
groups that keep these, in gathers of the bits of a shard in a fixed order. Where the ranks of a group divide the sums
of gradients (``--use-distributed-optimizer``), the shards of a rank are those of its part of the buffers: of the other
parts it has no state, and gets their parameters from these ranks once the gather is over
(:meth:`OptimizerShards.share_weights`).

May assume: the replica's parameters and optimizers stay the same objects. Promises: the layout
(:mod:`spare_megatron.placement.shard_borders`) is the same on this position of all groups; each tensor that an
optimizer has for a parameter is in the shards whole, in the memory that training updates.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from spare_megatron import kernels
from spare_megatron.megatron_adapter.checkpoint.optimizer_gather import (
    counts_steps,
    first_state,
    give_first_state,
    is_emerging,
    kinds,
    main_copies,
)
from spare_megatron.megatron_adapter.checkpoint.whole_state import ChainPlace, on_host, share
from spare_megatron.megatron_adapter.core_differences import copy_norm_group, set_norm_gradients, unscale_all
from spare_megatron.megatron_adapter.model.gradient_overlap import gradient_buffers, summed_names
from spare_megatron.megatron_adapter.model.group_sum import BufferSlice, parts_of
from spare_megatron.megatron_adapter.model.replica import Replica
from spare_megatron.megatron_adapter.model.state_snapshot import flat_view
from spare_megatron.megatron_adapter.shims import compute_device
from spare_megatron.placement.shard_borders import BufferBorders, UnitRun


class ShardTensor(NamedTuple):
    """A part of one tensor of an optimizer, all of one shard."""

    shard: int
    place: str
    """The name of the parameter in the whole model."""
    kind: str
    """'main' for what the optimizer updates, where that is not the model's own memory; else the name in the optimizer's
    state, as 'exp_avg'."""
    tensor: torch.Tensor
    """Flat, in the optimizer's memory."""


class _Updated(NamedTuple):
    """What an optimizer updates for a parameter."""

    place: str
    at: tuple[int, int, int]
    """The numbers of the optimizer, of its parameter group and of the parameter in it."""
    part: Any
    """megatron-core's optimizer."""
    parameter: torch.nn.Parameter
    main: torch.Tensor
    """The parameter, an fp32 copy of it or, where the optimizer is divided, this rank's slice of either. Without
    elements where only some shards are kept."""
    in_model: bool
    """Whether that is the model's own memory."""
    is_slice: bool
    cuts: bool
    """Whether the update of an element needs no other one."""


class _Span(NamedTuple):
    """Elements ``start`` to ``stop`` of what an optimizer updates."""

    updated: _Updated
    start: int
    stop: int


class _Held(NamedTuple):
    """What an optimizer has for the elements of a span, where only some shards are kept."""

    span: _Span
    model: torch.Tensor
    """The elements of the parameter in the model's memory, with the attribute ``main_grad``: flat or, where an update
    needs all elements, the parameter itself."""
    main: torch.Tensor
    state: dict[str, torch.Tensor]

    @property
    def carried(self) -> list[torch.Tensor]:
        """What a group must get to keep this too, all fp32 and flat."""
        main = [] if self.main is self.model else [flat_view(self.main)]
        return [*main, *(flat_view(one) for _, one in sorted(self.state.items()))]


class OptimizerShards:
    """The state shards of one rank."""

    def __init__(self, replica: Replica, number: int) -> None:
        """``number`` is S."""
        self.number = number
        self.kept: frozenset[int] | None = None
        """The shards that this rank keeps; None: all, in tensors that are not cut."""
        self._held: dict[int, list[_Held]] = {}
        self._replica = replica
        self._spans: list[list[_Span]] = [[] for _ in range(number)]
        updated, placed = _updated(replica), set[torch.nn.Parameter]()
        self._places = {one: ChainPlace(*found.at, found.in_model) for one, found in updated.items()}
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
            placed |= updated.keys() & buffer.param_index_map.keys()
        assert placed == updated.keys(), f"{len(updated.keys() - placed)} updated parameters are in no gradient buffer"

    def tensors(self, shards: Iterable[int]) -> Iterator[ShardTensor]:
        """The tensors of some shards that this rank keeps in a fixed order; what an optimizer has not begun is zeros.
        No collective."""
        if self.kept is None:
            give_first_state(self._replica)
        for shard in shards:
            for held in self._held.get(shard, ()):
                one = held.span.updated
                if held.main is not held.model:
                    yield ShardTensor(shard, one.place, "main", flat_view(held.main))
                for kind, values in sorted(held.state.items()):
                    if kind != "step":
                        yield ShardTensor(shard, one.place, kind, flat_view(values))
            for one, start, stop in self._spans[shard] if self.kept is None else ():
                if not one.in_model:
                    yield ShardTensor(shard, one.place, "main", flat_view(one.main)[start:stop])
                for kind, values in sorted(one.part.optimizer.state.get(one.main, {}).items()):
                    if kind == "step":
                        continue
                    flat = flat_view(values)
                    if values.numel() == one.main.numel():
                        flat = flat[start:stop]
                    else:  # of a matrix that is updated as a whole, such as SOAP's sums of products of its rows
                        assert not one.cuts, f"{kind} of {one.place} has {values.numel()} elements"
                    yield ShardTensor(shard, one.place, kind, flat)

    def digests(self, shards: Sequence[int]) -> list[int]:
        """64 bits for each of some shards, as :func:`kernels.digest`: equal state has equal digests on every machine.
        Where this rank keeps only some, of the parameters that it has made from them too: those of others are copies.
        No collective."""
        found: dict[int, list[torch.Tensor]] = {shard: [] for shard in shards}
        for one in self.tensors(shards):
            found[one.shard].append(one.tensor)
        for shard, tensors in found.items():
            tensors += [flat_view(held.model) for held in self._held.get(shard, ())]
        return [kernels.digest(found[shard]) for shard in shards]

    def keep(self, shards: Collection[int], received: Mapping[int, torch.Tensor]) -> None:
        """Keep these shards and no other. ``received`` has the state, as of :meth:`state`, of those that this rank does
        not keep yet; the parameters must be those that belong to it. For the thread that updates; no collective."""
        if self.kept == frozenset(shards):
            return
        if self.kept is None:
            self._cut()
            held = {shard: [_cut_out(span) for span in self._spans[shard]] for shard in shards}
            self._spans = [[_emptied(span) for span in spans] for spans in self._spans]
            for parameter in (one for chunk in self._replica.chunks for one in chunk.parameters()):
                vars(parameter).pop("main_param", None)  # the optimizer's copy
        else:
            held = {
                shard: self._held[shard] if shard in self._held else self._filled(shard, received[shard])
                for shard in shards
            }
        for one in (one for shard, of_shard in self._held.items() if shard not in held for one in of_shard):
            one.model.grad = None  # else the next backward pass adds to what the optimizer, which has it no more, left
        self.kept, self._held = frozenset(shards), held
        self._give_to_optimizers()

    def weight_sizes(self) -> list[int]:
        """Of each shard how many int32 have the bits of its parameters."""
        return [-(-sum(map(_weight_bytes, spans)) // 4) for spans in self._spans]

    def weights(self, order: Sequence[int], mine: Collection[int]) -> torch.Tensor:
        """The bits of the parameters of all shards, in this ``order``, as int32; what is in it for others than ``mine``
        means nothing. May run beside the forward and backward passes; no collective."""
        sizes = self.weight_sizes()
        flat = torch.empty(sum(sizes), dtype=torch.int32, device=self.device)
        for shard, part in zip(order, flat.split([sizes[shard] for shard in order]), strict=True):
            for values, there in _in_bytes(self._spans[shard], part) if shard in mine else ():
                there.copy_(values)
        return flat

    def take_weights(self, flat: torch.Tensor, order: Sequence[int], own: Collection[int]) -> None:
        """Write the parameters of all shards but ``own`` from ``flat``, in which those of all are as in
        :meth:`weights`."""
        sizes = self.weight_sizes()
        for shard, part in zip(order, flat.split([sizes[shard] for shard in order]), strict=True):
            for values, there in _in_bytes(self._spans[shard], part) if shard not in own else ():
                values.copy_(there)

    def share_weights(self) -> None:
        """Get the parameters of the parts that other ranks of the group keep, which have those of all their shards as
        this one has. Collective in the group; nothing happens where its ranks do not divide the sums."""
        for chunk in self._replica.chunks:
            if chunk.ddp_config.use_distributed_optimizer:
                chunk.start_param_sync(force_sync=True)

    def state(self, shard: int, *, mine: bool) -> torch.Tensor:
        """The bits of all that a group must get to keep ``shard``, as int32; room for them where they are not ``mine``
        to give. May run beside the forward and backward passes; no collective."""
        room = self._room(self.state_size(shard))
        values, at = room.view(torch.float32), 0
        for one in (one for held in self._held[shard] for one in held.carried) if mine else ():
            values[at : at + one.numel()].copy_(one)  # torch's Adam counts steps in host memory
            at += one.numel()
        return room

    def state_size(self, shard: int) -> int:
        """Elements of :meth:`state`."""
        return sum(_carried_numel(span) for span in self._spans[shard])

    def whole(self, states: dict[int, torch.Tensor]) -> Replica:
        """The replica with an optimizer that has the state of all shards and all parts, in host memory. ``states`` has
        each shard as :meth:`state`, and is emptied. Collective in the group where its ranks divide the sums."""
        replica, made = on_host(self._replica, self._places)
        for shard, spans in enumerate(self._spans):
            values, at = states.pop(shard).view(torch.float32), 0
            for span in spans:
                one = made[span.updated.parameter]
                for kind, tensor in [
                    *([] if span.updated.in_model else [("main", one.main)]),
                    *sorted(one.state.items()),
                ]:
                    into = tensor.view(-1) if kind == "step" else flat_view(tensor)[span.start : span.stop]
                    into.copy_(values[at : at + into.numel()])
                    at += into.numel()
        for _, buffer, group in gradient_buffers(self._replica):
            share(buffer, group, made)
        return replica

    def _room(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int32, device=self.device)

    @property
    def device(self) -> torch.device:
        """Where the state is."""
        return next(self._replica.chunks[0].parameters()).device

    def _cut(self) -> None:
        """Have the norm, the number of zeros and whether a step is skipped depend on all gradients once the optimizers
        have slices only."""
        chained, ahead = self._replica.optimizer, self._replica.config.mtp_num_layers or 0
        here, parts = dict[int, torch.Tensor](), chained.chained_optimizers
        of_parts: list[list[torch.Tensor]] = [[] for _ in parts]
        for of_parameter in self._by_parameter().values():
            one, start, stop = of_parameter[0].updated, of_parameter[0].start, of_parameter[-1].stop
            gradient: torch.Tensor = one.parameter.main_grad  # type: ignore[assignment]
            here[id(one.main)] = gradient if stop - start == gradient.numel() else flat_view(gradient)[start:stop]
            of_parts[one.at[0]].append(here[id(one.main)])
        for part, gradients in zip(parts, of_parts, strict=True):
            unscale_all(part, gradients)
        _count_zeros_of(chained, [set_norm_gradients(part, lambda main: here.get(id(main)), ahead) for part in parts])

    def _by_parameter(self) -> dict[torch.nn.Parameter, list[_Span]]:
        """The spans of each parameter of which this rank has any, in ascending order."""
        found: dict[torch.nn.Parameter, list[_Span]] = {}
        for span in (span for spans in self._spans for span in spans):
            found.setdefault(span.updated.parameter, []).append(span)
        return found

    def _filled(self, shard: int, received: torch.Tensor) -> list[_Held]:
        """A shard of the state that a group gave as :meth:`state`."""
        found, values, at = [], received.view(torch.float32), 0
        for span in self._spans[shard]:
            part, model = span.updated.part, _in_model(span)
            main = model if span.updated.in_model else _like(span, torch.empty_like(model, dtype=torch.float32))
            held = _Held(span, model, main, first_state(part, main.detach()))
            for one in held.carried:
                one.copy_(values[at : at + one.numel()])
                at += one.numel()
            found.append(held)
        return found

    def _give_to_optimizers(self) -> None:
        """Have megatron-core's optimizers update what is held, and nothing else."""
        of_group: dict[tuple[int, int], list[_Held]] = {}
        for held in (one for shard in sorted(self._held) for one in self._held[shard]):
            of_group.setdefault(held.span.updated.at[:2], []).append(held)
        for number, part in enumerate(self._replica.optimizer.chained_optimizers):
            part.optimizer.state.clear()
            for g, group in enumerate(part.optimizer.param_groups):
                mine = sorted(of_group.get((number, g), ()), key=lambda one: (one.span.updated.at, one.span.start))
                for one in mine:
                    copy_norm_group(one.span.updated.parameter, one.main)
                group["params"] = [one.main for one in mine]
                part.optimizer.state.update({one.main: one.state for one in mine})
                if hasattr(part, "float16_groups"):
                    copied = [one for one in mine if one.main is not one.model]
                    part.float16_groups[g] = [one.model for one in copied]
                    part.fp32_from_float16_groups[g] = [one.main for one in copied]
                    part.fp32_from_fp32_groups[g] = [one.main for one in mine if one.main is one.model]

    def parts(self) -> dict[str, list[kernels.Digestible]]:
        """What the optimizers have, by shard and kind, to find where it differs. No collective."""
        found: dict[str, list[kernels.Digestible]] = {}
        for one in self.tensors(range(self.number)):
            found.setdefault(f"{one.kind} of state shard {one.shard}", []).append(one.tensor)
        return found


def _count_zeros_of(chained: Any, of_parts: Sequence[Sequence[torch.Tensor]]) -> None:
    """Have a chained optimizer count the zeros of these gradients of each of its parts. Collective in the group."""

    def count_zeros() -> int:
        total = 0
        for part, gradients in zip(chained.chained_optimizers, of_parts, strict=True):
            zeros = [one.numel() - one.count_nonzero() for one in gradients]
            of_ranks = sum(zeros, torch.zeros((), dtype=torch.int64, device=compute_device()))
            dist.all_reduce(of_ranks, group=part.get_grad_stats_parallel_group())
            total += int(of_ranks)
        return total

    chained.count_zeros = count_zeros


def _in_model(span: _Span) -> torch.Tensor:
    """:attr:`_Held.model` of a span."""
    parameter = span.updated.parameter
    if not span.updated.cuts:
        return parameter
    model = flat_view(parameter)[span.start : span.stop]
    model.main_grad = flat_view(parameter.main_grad)[span.start : span.stop]  # type: ignore[attr-defined]
    return model


def _like(span: _Span, main: torch.Tensor) -> torch.Tensor:
    """A copy for an optimizer with the attributes of what it updated before, as that of a matrix of queries, keys and
    values."""
    if not span.updated.cuts:
        vars(main).update(vars(span.updated.main))
    return main


def _in_bytes(spans: Iterable[_Span], part: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The elements of each span in the model's memory, and their place in ``part``, both as bytes."""
    data, at = part.view(torch.uint8), 0
    for span in spans:
        values = flat_view(span.updated.parameter)[span.start : span.stop].view(torch.uint8)
        yield values, data[at : at + values.numel()]
        at += values.numel()


def _weight_bytes(span: _Span) -> int:
    return (span.stop - span.start) * span.updated.parameter.element_size()


def _cut_out(span: _Span) -> _Held:
    """The elements of a span of optimizers that have all (in host memory), in memory of their own. What was never
    updated has no state yet, and gets that of its elements alone."""
    one, model = span.updated, _in_model(span)
    main = model if one.in_model else _like(span, _cut_of(span, one.main))
    state = {
        kind: values.clone() if kind == "step" else _cut_of(span, values)
        for kind, values in one.part.optimizer.state.get(one.main, {}).items()
    }
    return _Held(span, model, main, state or first_state(one.part, main.detach()))


def _cut_of(span: _Span, values: torch.Tensor) -> torch.Tensor:
    """A copy of a span's elements of a tensor that belongs to what an optimizer updates, on the parameter's device."""
    values = values.detach()
    cut = flat_view(values)[span.start : span.stop] if span.updated.cuts else values
    return cut.to(span.updated.parameter.device, copy=True)


def _emptied(span: _Span) -> _Span:
    """A span without its optimizer's copy of the whole parameter."""
    return span._replace(updated=span.updated._replace(main=_like(span, torch.empty(0))))


def _carried_numel(span: _Span) -> int:
    """Elements of :attr:`_Held.carried`."""
    part, size = span.updated.part, span.stop - span.start
    return size * (len(kinds(part)) + (not span.updated.in_model)) + counts_steps(part)


def _updated(replica: Replica) -> dict[torch.nn.Parameter, _Updated]:
    found = {}
    model = {one.untyped_storage().data_ptr() for chunk in replica.chunks for one in chunk.parameters()}
    names = summed_names(replica)
    mine = None if replica.row is None else replica.row.parameters
    for number, part in enumerate(replica.optimizer.chained_optimizers):
        groups = part.optimizer.param_groups
        places = {id(one): (number, g, n) for g, group in enumerate(groups) for n, one in enumerate(group["params"])}
        if hasattr(part, "model_param_group_index_map"):
            mains = {one: groups[g]["params"][n] for one, (g, n) in part.model_param_group_index_map.items()}
            is_slice = True
        else:
            mains, is_slice = main_copies(part), False
        if mine is not None:
            mains = {one: mains[updated] for one, updated in mine.items() if updated in mains}
        for parameter, main in mains.items():
            cuts = main.is_contiguous() and not is_emerging(part)
            at, in_model = places[id(main)], main.untyped_storage().data_ptr() in model
            place = names[parameter]
            found[parameter] = _Updated(place, at, part, parameter, main, in_model, is_slice=is_slice, cuts=cuts)
    return found

"""The rows of a rank that keeps several, or a part of a home stage (:mod:`spare_megatron.config.rows`).

A row has layers of one home stage, in as many chunks as home, the first row the embedding too, the last one what
follows the layers. What groups compare or send of it must be the same bytes in groups of all shapes: each row has
gradient buffers of its own, instead of megatron-core's, in which the parameters have home's order, and tensors are
sorted by the names that they have at home.

Tied embeddings are a parameter of the first row and one of the last. On a rank with both rows they are one parameter,
which each row names as its home stage does, and of which each gives and takes the whole state. The gradient of the
output layer's use is apart (:mod:`.tied_head`).

Refused, each with its reason (:func:`check_home`): what makes this untrue, or has not been tried.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.rows import RowCut
from spare_megatron.config.stage_cut import LayerPlace, StageCut
from spare_megatron.megatron_adapter.model.global_names import global_names, unwrapped
from spare_megatron.megatron_adapter.model.tied_head import PlainBuffer, TiedHead, tied_weight

_LAYER = re.compile(r"^(decoder\.layers\.)(\d+)(\..*)$")
_COUNTS = ".local_tokens_per_expert"
"""How the names of routers' counts end, which are in no state and yet of a row."""


class HomePlace(NamedTuple):
    """Where a tensor is in a group of the home shape."""

    stage: int
    chunk: int
    name: str
    """In the chunk."""
    layer: int | None = None
    """The layer of the model to which it belongs."""


class RowTensor(NamedTuple):
    """A parameter or buffer of a row."""

    home_chunk: int
    home: str
    """Its name in the chunk of home."""
    chunk: int
    name: str
    """Its name in this rank's chunk."""
    model: str
    """Its name in the whole model."""


@dataclass
class Row:
    """One row of a rank."""

    tensors: list[RowTensor] = field(default_factory=list)
    """In the order of home's chunks and names."""
    parameters: dict[torch.nn.Parameter, torch.nn.Parameter] = field(default_factory=dict)
    """What has a gradient in the row -> what the optimizer updates by it: itself, or of a tied output layer the
    embedding."""
    counts: list[torch.Tensor] = field(default_factory=list)
    """Those of :func:`~spare_megatron.megatron_adapter.model.schedule.routing_counts`."""
    buffers: list[tuple[int, PlainBuffer, Any]] = field(default_factory=list)
    """As :func:`~spare_megatron.megatron_adapter.model.gradient_overlap.gradient_buffers`."""


def rows_of_replica(
    chunks: Sequence[Any], config: Any, head: TiedHead | None, cut: RowCut, rows: Sequence[int]
) -> list[Row]:
    """The rows of a rank; ``rows`` are their numbers in ``cut``. Their buffers replace those of the chunks. Raises
    ConfigError."""
    found = {row: Row() for row in rows}
    of_chunk: dict[torch.nn.Parameter, int] = {}
    places, ends = home_places(chunks, config, cut.home), (0, cut.number - 1)
    tied = tied_weight(list(chunks))
    for number, (chunk, names) in enumerate(zip(chunks, global_names(chunks), strict=True)):
        model = unwrapped(chunk)
        parameters, others = dict(model.named_parameters()), dict(model.named_buffers())
        for name, place in places[number].items():
            row = found[ends[place.stage > 0] if place.layer is None else cut.of_layers[place.layer]]
            row.tensors.append(RowTensor(place.chunk, place.name, number, name, names.get(name, name)))
            if name in parameters:
                row.parameters[parameters[name]] = parameters[name]
                of_chunk[parameters[name]] = place.chunk
            if name.endswith(_COUNTS):
                row.counts.append(others[name])
            if tied is not None and parameters.get(name) is tied:
                last, at = found[ends[1]], (cut.home.chunks or 1) - 1
                last.tensors.append(RowTensor(at, TiedHead.name, number, name, TiedHead.name))
                if head is not None:  # else it is frozen
                    last.parameters[head.parameter] = head.weight
                    of_chunk[head.parameter] = at
    for row in found.values():
        row.tensors.sort()
    _divide_buffers(chunks, list(found.values()), head, of_chunk)
    return list(found.values())


def _divide_buffers(
    chunks: Sequence[Any], rows: Sequence[Row], head: TiedHead | None, of_chunk: Mapping[torch.nn.Parameter, int]
) -> None:
    """Give rows buffers in the order in which home has them, the last chunk's first; ``of_chunk`` are the numbers of
    home's chunks."""
    of_row: list[list[tuple[int, int, PlainBuffer, Any]]] = [[] for _ in rows]
    for number, chunk in enumerate(chunks):
        buffers = [(buffer, chunk.dp_cp_group) for buffer in chunk.buffers]
        buffers += [(buffer, chunk.expt_dp_group) for buffer in chunk.expert_parallel_buffers]
        for buffer, group in buffers:
            buffer.grad_data.untyped_storage().resize_(0)
            places = {one: place[0] for one, place in buffer.param_index_map.items()}
            if head is not None and head.weight in places:  # the model's last parameters are first
                places[head.parameter] = -1
            for row, own in zip(rows, of_row, strict=True):
                mine = sorted(row.parameters.keys() & places.keys(), key=lambda one: places[one])
                for at in sorted({of_chunk[one] for one in mine}):
                    some = [one for one in mine if of_chunk[one] == at]
                    own.append((at, number, _own_buffer(some, buffer.grad_data), group))
    if head is not None:
        head.buffer.grad_data.untyped_storage().resize_(0)
    for row, own in zip(rows, of_row, strict=True):
        own.sort(key=lambda one: (-one[0], -one[2].grad_data.numel()))
        row.buffers = [one[1:] for one in own]


def _own_buffer(parameters: Sequence[torch.nn.Parameter], like: torch.Tensor) -> PlainBuffer:
    """A buffer with the gradients of these parameters one behind the other."""
    gradient = torch.zeros(sum(one.numel() for one in parameters), dtype=like.dtype, device=like.device)
    places, at = dict[torch.nn.Parameter, tuple[int, int, int]](), 0
    for one in parameters:
        stop = at + one.numel()
        places[one] = (at, stop, 0)
        one.main_grad = gradient[at:stop].view(one.shape)  # type: ignore[attr-defined]
        at = stop
    return PlainBuffer(gradient, places)


def check_home(chunks: Sequence[Any], config: Any, home: StageCut, stage: int) -> None:
    """Raises ConfigError where groups of the job can have the home shape only. For a rank that has it."""
    for number, places in enumerate(home_places(chunks, config, home)):
        for name, place in places.items():
            if place[:3] != (stage, number, name):
                raise ConfigError(f"{_ONLY_HOME}: stage {stage} has {name}, which belongs to stage {place.stage}")


def home_places(chunks: Sequence[Any], config: Any, home: StageCut) -> list[dict[str, HomePlace]]:
    """For each chunk of a rank of any shape, name of each tensor in it that groups compare or count -> where it is in
    the home shape. Raises ConfigError."""
    if getattr(config, "mtp_num_layers", None):
        raise ConfigError(f"{_ONLY_HOME}: layers of multi-token prediction have embeddings of their own")
    layers, found = home.places(), []
    for chunk, names in zip(chunks, global_names(chunks), strict=True):
        state = chunk.module.state_dict()
        compared = [name for name in state if torch.is_tensor(state[name])]
        compared += [name for name in names if name.endswith(_COUNTS)]
        found.append({name: _at_home(names.get(name, name), layers, home) for name in compared})
    return found


_ONLY_HOME = "the groups of this job can run in their home shape only"


def _at_home(name: str, layers: Sequence[LayerPlace], home: StageCut) -> HomePlace:
    """The place of a tensor, by its name in the whole model."""
    layer = _LAYER.match(name)
    if layer and int(layer[2]) < len(layers):
        place = layers[int(layer[2])]
        return HomePlace(place.stage, place.chunk, f"{layer[1]}{place.number}{layer[3]}", int(layer[2]))
    if name.startswith("embedding."):
        return HomePlace(0, 0, name)
    if name.startswith(("decoder.final_", "output_layer.")):
        return HomePlace(home.stages - 1, (home.chunks or 1) - 1, name)
    raise ConfigError(
        f"{_ONLY_HOME}: which stage has {name} is not known; only GPT models of decoder layers can be cut"
    )

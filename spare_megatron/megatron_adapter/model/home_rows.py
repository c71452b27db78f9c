"""The rows of a rank that keeps several home stages (:mod:`spare_megatron.config.rows`).

A row has the layers of its home stage, the first one the embedding too, the last one what follows the layers. What
groups compare or send of it must be the same bytes as on the home stage's own rank: each row has gradient buffers of
its own, instead of megatron-core's, in which the parameters have the home stage's order, and tensors are sorted by the
names that they have there.

Tied embeddings are a parameter of the first home stage and one of the last. On a rank with both rows they are one
parameter, which each row names as its home stage does, and of which each gives and takes the whole state. The gradient
of the output layer's use is apart (:mod:`.tied_head`).

Refused, each with its reason (:func:`home_places`): what makes this untrue, or has not been tried.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from spare_megatron.config.errors import ConfigError
from spare_megatron.megatron_adapter.model.global_names import global_names, unwrapped
from spare_megatron.megatron_adapter.model.tied_head import PlainBuffer, TiedHead

_LAYER = re.compile(r"^(decoder\.layers\.)(\d+)(\..*)$")
_ONLY_EVEN = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout",
)
"""Fields of TransformerConfig that divide layers unevenly over stages."""


class HomePlace(NamedTuple):
    """Where a tensor is in a group of the home shape."""

    stage: int
    name: str
    """In the stage's chunk."""


class Tensor(NamedTuple):
    """A parameter or buffer of a row."""

    home: str
    """Its name on the rank of the home stage."""
    name: str
    """Its name in this rank's chunk."""
    model: str
    """Its name in the whole model."""


@dataclass
class Row:
    """One row of a rank."""

    tensors: list[Tensor] = field(default_factory=list)
    """Sorted by the names of home."""
    parameters: dict[torch.nn.Parameter, torch.nn.Parameter] = field(default_factory=dict)
    """What has a gradient in the row -> what the optimizer updates by it: itself, or of a tied output layer the
    embedding."""
    counts: list[torch.Tensor] = field(default_factory=list)
    """Those of :func:`~spare_megatron.megatron_adapter.model.schedule.routing_counts`."""
    buffers: list[tuple[int, PlainBuffer, Any]] = field(default_factory=list)
    """As :func:`~spare_megatron.megatron_adapter.model.gradient_overlap.gradient_buffers`."""


def rows_of_replica(
    chunks: Sequence[Any], config: Any, head: TiedHead | None, home_stages: int, rows: Sequence[int]
) -> list[Row]:
    """The rows of a rank; ``rows`` are the numbers of their home stages. Their buffers replace those of the chunks.
    Raises ConfigError."""
    found = {row: Row() for row in rows}
    model = unwrapped(chunks[0])
    parameters, others = dict(model.named_parameters()), dict(model.named_buffers())
    (names,) = global_names(chunks)
    for name, (stage, there) in home_places(chunks, config, home_stages).items():
        row = found[stage]
        row.tensors.append(Tensor(there, name, names.get(name, name)))
        if name in parameters:
            row.parameters[parameters[name]] = parameters[name]
        if name.endswith(".local_tokens_per_expert"):
            row.counts.append(others[name])
    if head is not None:
        last = found[home_stages - 1]
        tied = next(name for name, parameter in parameters.items() if parameter is head.weight)
        last.tensors.append(Tensor(head.name, tied, head.name))
        last.parameters[head.parameter] = head.weight
    for row in found.values():
        row.tensors.sort()
    for number, chunk in enumerate(chunks):
        buffers = [(buffer, chunk.dp_cp_group) for buffer in chunk.buffers]
        buffers += [(buffer, chunk.expt_dp_group) for buffer in chunk.expert_parallel_buffers]
        for buffer, group in buffers:
            buffer.grad_data.untyped_storage().resize_(0)
            for row in found.values():
                mine = _in_home_order(row, buffer, head)
                if mine:
                    row.buffers.append((number, _own_buffer(mine, buffer.grad_data), group))
    if head is not None:
        head.buffer.grad_data.untyped_storage().resize_(0)
    for row in found.values():
        row.buffers.sort(key=lambda one: one[1].grad_data.numel(), reverse=True)
    return list(found.values())


def _in_home_order(row: Row, buffer: Any, head: TiedHead | None) -> list[torch.nn.Parameter]:
    """The parameters that a row has in one of megatron-core's buffers: the model's last ones first."""
    places = buffer.param_index_map
    mine = [one for one in row.parameters if one in places]
    mine.sort(key=lambda one: places[one][0])
    has_head = head is not None and head.parameter in row.parameters and head.weight in places
    return [head.parameter, *mine] if head is not None and has_head else mine


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


def home_places(chunks: Sequence[Any], config: Any, home_stages: int) -> dict[str, HomePlace]:
    """Name of each tensor in a rank's only chunk, of any shape -> where it is in the home shape. Raises ConfigError
    where groups of the job can have the home shape only."""
    uneven = next((name for name in _ONLY_EVEN if getattr(config, name, None)), None)
    model = unwrapped(chunks[0])
    why = (
        "the layers of a home stage are split over virtual stages"
        if len(chunks) > 1
        else f"{uneven} divides the layers unevenly"
        if uneven
        else "layers of multi-token prediction have embeddings of their own"
        if getattr(config, "mtp_num_layers", None)
        else ""
    )
    if why:
        raise ConfigError(f"the groups of this job can run in their home shape only: {why}")
    (names,) = global_names(chunks)
    each = config.num_layers // home_stages
    return {
        name: _at_home(names.get(name, name), each, home_stages)
        for name in {**names, **dict.fromkeys(model.state_dict())}
    }


def _at_home(name: str, each: int, stages: int) -> HomePlace:
    """The home stage of a tensor, by its name in the whole model, and its name in that stage's chunk."""
    layer = _LAYER.match(name)
    if layer:
        stage, number = divmod(int(layer[2]), each)
        return HomePlace(stage, f"{layer[1]}{number}{layer[3]}")
    if name.startswith("embedding."):
        return HomePlace(0, name)
    if name.startswith(("decoder.final_", "output_layer.")):
        return HomePlace(stages - 1, name)
    if name.startswith("rotary_pos_emb."):
        return HomePlace(0, name)
    raise ConfigError(
        f"the groups of this job can run in their home shape only: which home stage has {name} is not known; only GPT "
        "models of decoder layers can be cut"
    )

"""The rows of a rank that keeps several home stages in one chunk (:mod:`spare_megatron.config.rows`).

A row has the layers of its home stage, the first one the embedding too, the last one what follows the layers. What
groups compare or send of it must be the same bytes as on the home stage's own rank: the parameters lie in one range of
each gradient buffer, in the home stage's order, and tensors are sorted by the names that they have there.

Refused, each with its reason (:func:`home_names`): what makes these two things untrue, or has not been tried.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from spare_megatron.config.errors import ConfigError
from spare_megatron.megatron_adapter.model.global_names import global_names, unwrapped

_LAYER = re.compile(r"^(decoder\.layers\.)(\d+)(\..*)$")
_ONLY_EVEN = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout",
)
"""Fields of TransformerConfig that divide layers unevenly over stages."""


@dataclass(frozen=True)
class Row:
    """One row of a chunk."""

    names: Mapping[str, str]
    """Name in the chunk -> name on the rank of the home stage, of the row's parameters and buffers."""
    parameters: frozenset[torch.nn.Parameter]

    def parts_of(self, buffer: Any) -> BufferPart | None:
        """The row's part of one of megatron-core's gradient buffers; None where it has none."""
        places = {one: place for one, place in buffer.param_index_map.items() if one in self.parameters}
        if not places:
            return None
        start, stop = min(place[0] for place in places.values()), max(place[1] for place in places.values())
        inside = sum(place[1] - place[0] for place in places.values())
        assert stop - start == inside, f"{inside} elements of a row lie in a range of {stop - start}"
        moved = {one: (place[0] - start, place[1] - start, place[2]) for one, place in places.items()}
        return BufferPart(buffer.grad_data[start:stop], moved, buffer.ddp_config, buffer.grad_data.numel())


@dataclass
class BufferPart:
    """What is read of megatron-core's gradient buffers, of a range of one."""

    grad_data: torch.Tensor
    param_index_map: dict[torch.nn.Parameter, tuple[int, int, int]]
    ddp_config: Any
    whole: int
    """Elements of the buffer."""


def rows_of_replica(chunks: Sequence[Any], config: Any, home_stages: int, rows: Sequence[int]) -> list[Row]:
    """The rows of a rank; ``rows`` are the numbers of their home stages. Raises ConfigError."""
    of_rows: dict[int, dict[str, str]] = {row: {} for row in rows}
    for name, (stage, there) in home_names(chunks, config, home_stages).items():
        of_rows[stage][name] = there
    parameters = dict(unwrapped(chunks[0]).named_parameters())
    return [
        Row(of_row, frozenset(one for name, one in parameters.items() if name in of_row)) for of_row in of_rows.values()
    ]


def home_names(chunks: Sequence[Any], config: Any, home_stages: int) -> dict[str, tuple[int, str]]:
    """Name of each tensor in a rank's only chunk, of any shape -> its home stage, and its name there. Raises
    ConfigError where groups of the job can have the home shape only."""
    uneven = next((name for name in _ONLY_EVEN if getattr(config, name, None)), None)
    model = unwrapped(chunks[0])
    why = (
        "the layers of a home stage are split over virtual stages"
        if len(chunks) > 1
        else f"{uneven} divides the layers unevenly"
        if uneven
        else "experts are summed in buffers of their own"
        if config.num_moe_experts
        else "layers of multi-token prediction have embeddings of their own"
        if getattr(config, "mtp_num_layers", None)
        else "the embedding and the output layer share a weight, which home has on two stages; give "
        "--untie-embeddings-and-output-weights"
        if getattr(model, "share_embeddings_and_output_weights", False)
        else ""
    )
    if why:
        raise ConfigError(f"the groups of this job can run in their home shape only: {why}")
    (names,) = global_names(chunks)
    each = config.num_layers // home_stages
    return {
        name: _on_home(names.get(name, name), each, home_stages)
        for name in {**names, **dict.fromkeys(model.state_dict())}
    }


def _on_home(name: str, each: int, stages: int) -> tuple[int, str]:
    """The home stage of a tensor, by its name in the whole model, and its name in that stage's chunk."""
    layer = _LAYER.match(name)
    if layer:
        stage, number = divmod(int(layer[2]), each)
        return stage, f"{layer[1]}{number}{layer[3]}"
    if name.startswith("embedding."):
        return 0, name
    if name.startswith(("decoder.final_", "output_layer.")):
        return stages - 1, name
    if name.startswith("rotary_pos_emb."):
        return 0, name
    raise ConfigError(
        f"the groups of this job can run in their home shape only: which home stage has {name} is not known; only GPT "
        "models of decoder layers can be cut"
    )

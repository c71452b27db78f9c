"""The second use of tied embeddings, as the output layer's weight, apart from the first where one stage has both.

With several stages the first one has the gradient of the embedding and the last one that of the output layer; each is
summed by itself, and megatron-core adds both at the end, in fp32. A stage that is first and last would add them in each
backward pass, before the sum: other bits. So there the output layer gets the weight as a parameter of its own, in the
same memory, whose gradient has a buffer of its own, and exact sums add both at the end as well.

Models with layers of multi-token prediction use both weights again, and are left as they are.

May assume: made after the chunk, whose weight stays where it is. Promises: one more gradient buffer, of the size of the
weight; forward passes without gradients are not changed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from spare_megatron.megatron_adapter.model.global_names import unwrapped


@dataclass
class PlainBuffer:
    """What is read of megatron-core's gradient buffers, of a buffer that ranks which share it sum whole."""

    grad_data: torch.Tensor
    param_index_map: dict[torch.nn.Parameter, tuple[int, int, int]]
    ddp_config: Any = field(default_factory=lambda: SimpleNamespace(use_distributed_optimizer=False))


class TiedHead:
    """The output layer's use of a tied weight."""

    name = "output_layer.weight"
    """As on a last stage that is not the first."""

    def __init__(self, chunk: Any, head: torch.nn.Module, weight: torch.nn.Parameter) -> None:
        self.weight = weight
        self.parameter = torch.nn.Parameter(weight.detach())
        gradient = torch.zeros(weight.numel(), dtype=torch.float32, device=weight.device)
        self.buffer = PlainBuffer(gradient, {self.parameter: (0, weight.numel(), 0)})

        def apart(_head: torch.nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
            if named.get("weight") is not weight or not torch.is_grad_enabled():
                return None
            return given, {**named, "weight": self.parameter}

        def added(parameter: torch.nn.Parameter) -> None:
            chunk.accumulate(parameter)
            parameter.grad = None
            if chunk.arrived is not None:
                chunk.arrived(parameter)

        head.register_forward_pre_hook(apart, with_kwargs=True)
        self.parameter.register_post_accumulate_grad_hook(added)


def tied_weight(chunks: list[Any]) -> torch.nn.Parameter | None:
    """The weight of which a rank's one chunk has both uses; None on all other ranks."""
    model = unwrapped(chunks[0])
    both = getattr(model, "pre_process", False) and getattr(model, "post_process", False)
    head = getattr(model, "output_layer", None)
    if len(chunks) > 1 or not both or not isinstance(head, torch.nn.Module):
        return None
    config: Any = getattr(model, "config", None)
    if not getattr(model, "share_embeddings_and_output_weights", False) or getattr(config, "mtp_num_layers", None):
        return None
    shared: Any = model.shared_embedding_or_output_weight
    weight: torch.nn.Parameter = shared()
    return weight


def tied_head(chunks: list[Any]) -> TiedHead | None:
    """That of :func:`tied_weight`, where there is one that is trained."""
    weight = tied_weight(chunks)
    if weight is None or not weight.requires_grad:
        return None
    head: Any = unwrapped(chunks[0])
    return TiedHead(chunks[0], head.output_layer, weight)

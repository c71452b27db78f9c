"""Sums the losses by which routers keep the experts' loads even, so that a job logs them by Megatron's names.

megatron-core's routers note them in a tracker that knows neither pieces nor groups. What a microbatch adds is taken
from it when its forward pass, or with recomputation its backward pass, is over; so pads, audits and evaluations add
nothing. The sums over the group's ranks are part of a step's scalars. As Megatron does, a value is averaged over
microbatches and over layers with experts; layers of multi-token prediction count as such, whatever they have.
"""

from __future__ import annotations

from typing import Any

import torch

from spare_megatron.megatron_adapter.core_differences import taken_routing_losses
from spare_megatron.megatron_adapter.model.losses import COUNT, SUM
from spare_megatron.megatron_adapter.model.world import GroupWorld

_NAMES = {"aux_loss": "load_balancing_loss", "seq_aux_loss": "seq_load_balancing_loss"}
"""Value of ``--moe-router-load-balancing-type`` -> megatron-core's name of its loss."""
Z_LOSS = "z_loss"
"""Each rank of TP x CP notes the mean over its own tokens, and the mean of these is logged, as megatron-core does since
0.19 (before, it logs that of the last tensor-parallel rank's tokens); of the other losses each rank has a part."""


class RoutingLosses:
    """Running sums over the microbatches of one step on one rank."""

    def __init__(self, config: Any, hybrid_pattern: str | None, world: GroupWorld) -> None:
        """``config`` is megatron-core's TransformerConfig, ``hybrid_pattern`` the layers of a hybrid model."""
        self.names = _names(config)
        """Those that this model has."""
        self._world = world
        self._layers = _layers(config, hybrid_pattern) if self.names else 1
        self._noted: dict[str, list[torch.Tensor]] = {}
        self._microbatches = 0
        self.begin_step()

    def begin_step(self) -> None:
        """Forget all microbatches."""
        self._noted = {name: [] for name in self.names}
        self._microbatches = 0

    def take(self, counts: bool) -> None:
        """Take what routers have noted since the last call; it is thrown away unless it ``counts``."""
        if not self.names:
            return
        for name, value in taken_routing_losses().items():
            if counts and name in self._noted:
                self._noted[name].append(value)

    def count(self) -> None:
        """Count a microbatch; called where its loss is computed, on the last pipeline stage."""
        self._microbatches += 1

    def scalars(self) -> dict[str, float]:
        """This rank's part of the sum and of the count of each loss, for the sum over all ranks of the group."""
        world, shape = self._world, self._world.shape
        counts = world.is_last_stage and world.tensor_rank == world.context_rank == 0
        found = {}
        for name, values in self._noted.items():
            found[name + SUM] = float(torch.stack(values).double().sum()) if values else 0.0
            each = self._layers * (shape.tensor * shape.context if name == Z_LOSS else 1)
            found[name + COUNT] = float(self._microbatches * each) if counts else 0.0
        return found


def _names(config: Any) -> tuple[str, ...]:
    if not config.num_moe_experts:
        return ()
    kinds, weights = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    kinds = [kinds] if isinstance(kinds, str) else kinds
    weights = weights if isinstance(weights, (list, tuple)) else [weights] * len(kinds)
    named = [_NAMES[kind] for kind, weight in zip(kinds, weights, strict=True) if kind in _NAMES and weight]
    return (*named, *([Z_LOSS] if config.moe_z_loss_coeff else []))


def _layers(config: Any, hybrid_pattern: str | None) -> int:
    """The number by which Megatron divides."""
    freq, layers = config.moe_layer_freq, config.num_layers
    if hybrid_pattern is not None:
        number = hybrid_pattern.count("E")
    else:
        number = sum(freq) if isinstance(freq, (list, tuple)) else len(range(0, layers, freq))
    return max(1, number + (config.mtp_num_layers or 0))

"""Lets gradients leave this rank while the last backward passes of a run still go on.

The gradient buffers of megatron-core lie in the order in which backward passes fill them: the model's last parameters
first. With a rank's last chunk in front, the order of the buffers is that of the run's end, on every rank alike.

May assume: nothing else sets :attr:`GroupDDP.arrived`. Promises: what it calls final is not added to again in that run,
or ``spoil`` says that it was.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from spare_megatron.config.engine_hooks import Outlet
from spare_megatron.megatron_adapter.model.gradient_readiness import Arrivals, Span
from spare_megatron.megatron_adapter.model.replica import Replica

log = logging.getLogger(__name__)


class Outflow:
    """What of one rank's gradient buffers is final, told to an outlet."""

    def __init__(self, replica: Replica) -> None:
        self._names: list[str] = []
        numbers: dict[torch.nn.Parameter, int] = {}
        spans: list[Span] = []
        shared = False
        for tensor, (chunk, buffer, group) in enumerate(gradient_buffers(replica)):
            shared = shared or group.size() > 1
            names = {parameter: name for name, parameter in replica.chunks[chunk].module.named_parameters()}
            for parameter, (_, stop, _) in sorted(buffer.param_index_map.items(), key=lambda item: item[1][0]):
                numbers[parameter] = len(spans)
                spans.append(Span(tensor, stop, chunk))
                self._names.append(names[parameter])
            spans[-1] = Span(tensor, buffer.grad_data.numel(), chunk)
        self.arrivals = Arrivals(spans)
        self.possible = bool(spans) and not shared
        """Whether anything can leave before the run is over."""
        if shared:
            log.info("gradients do not leave while the backward pass runs: inner ranks of the group sum them first")
        for one in replica.chunks:
            one.arrived = lambda parameter: self.arrivals.arrived(numbers[parameter])

    def watch(self, outlet: Outlet) -> None:
        """Tell ``outlet`` of the run that begins."""

        def late(number: int) -> None:
            outlet.spoil(f"the gradient of {self._names[number]} came more often in one piece than ever before")

        self.arrivals.watch(outlet.ready, late)


def gradient_buffers(replica: Replica) -> Sequence[tuple[int, Any, Any]]:
    """(chunk, megatron-core's buffer, ranks of the group that share its parameters), in the order in which the last
    backward passes of a run fill them. Of one chunk's buffers, which fill at the same time, the largest is first:
    where there are experts it has most of the bytes, and a small one delays less at the end."""
    result: list[tuple[int, Any, Any]] = []
    for number, chunk in reversed(list(enumerate(replica.chunks))):
        mine = [(number, buffer, chunk.dp_cp_group) for buffer in chunk.buffers]
        mine += [(number, buffer, chunk.expt_dp_group) for buffer in chunk.expert_parallel_buffers]
        result += sorted(mine, key=lambda one: one[1].grad_data.numel(), reverse=True)
    return result

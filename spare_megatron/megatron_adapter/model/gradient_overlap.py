"""Tells which gradients of this rank are final, so that their reduction begins during the last backward passes of a
run.

Inside megatron-core's gradient buffers parameters are in the order in which backward passes fill them: the model's last
parameters first. With a rank's last chunk first, all buffers are in the order in which the end of a run fills them, on
every rank alike.

May assume: nothing else sets :attr:`GroupDDP.arrived`. Promises: nothing is added in that run to a gradient that was
reported final, or ``spoil`` reports it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from spare_megatron.config.engine_hooks import Outlet
from spare_megatron.megatron_adapter.model.global_names import parameter_names
from spare_megatron.megatron_adapter.model.gradient_readiness import Arrivals, Span
from spare_megatron.megatron_adapter.model.replica import Replica

log = logging.getLogger(__name__)


class Outflow:
    """Tells an outlet which parts of this rank's gradient buffers are final."""

    def __init__(self, replica: Replica) -> None:
        self._names: list[str] = []
        numbers: dict[torch.nn.Parameter, int] = {}
        spans: list[Span] = []
        shared, names = False, summed_names(replica)
        for tensor, (chunk, buffer, group) in enumerate(gradient_buffers(replica)):
            shared = shared or group.size() > 1
            for parameter, (_, stop, _) in sorted(buffer.param_index_map.items(), key=lambda item: item[1][0]):
                numbers[parameter] = len(spans)
                spans.append(Span(tensor, stop, chunk))
                self._names.append(names[parameter])
            spans[-1] = Span(tensor, buffer.grad_data.numel(), chunk)
        self.arrivals = Arrivals(spans)
        self.possible = bool(spans) and not shared
        """Whether gradients can leave before the run is over: not where ranks of the group must sum them first."""
        if shared:
            log.info("gradients do not leave while the backward pass runs: inner ranks of the group sum them first")
        for one in replica.chunks:
            one.arrived = lambda parameter: self.arrivals.arrived(numbers[parameter])

    def watch(self, outlet: Outlet) -> None:
        """Report to ``outlet`` during the run that begins."""

        def late(number: int) -> None:
            outlet.spoil(f"the gradient of {self._names[number]} was added more often in one piece than ever before")

        self.arrivals.watch(outlet.ready, late)


def gradient_buffers(replica: Replica) -> Sequence[tuple[int, Any, Any]]:
    """(chunk number, megatron-core's buffer, process group of the ranks that share its parameters), in the order in
    which the last backward passes of a run fill the buffers. Of the buffers of one chunk, which fill at the same time,
    the largest is first: with experts it has most of the bytes, and a small one at the end delays less."""
    if replica.row is not None:
        return replica.row.buffers
    result: list[tuple[int, Any, Any]] = []
    for number, chunk in reversed(list(enumerate(replica.chunks))):
        mine = [(number, buffer, chunk.dp_cp_group) for buffer in chunk.buffers]
        mine += [(number, buffer, chunk.expt_dp_group) for buffer in chunk.expert_parallel_buffers]
        result += sorted(mine, key=lambda one: one[1].grad_data.numel(), reverse=True)
    if replica.head is not None:  # a backward pass begins there
        result.insert(0, (0, replica.head.buffer, replica.chunks[0].dp_cp_group))
    return result


def summed_names(replica: Replica) -> dict[torch.nn.Parameter, str]:
    """The name in the whole model of each parameter of :func:`gradient_buffers`."""
    head = {} if replica.head is None else {replica.head.parameter: replica.head.name}
    return {**parameter_names(replica.chunks), **head}

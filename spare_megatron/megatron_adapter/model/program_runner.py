"""Carries a pipeline program out on this rank's chunks, with megatron-core's own forward and backward steps.

May assume: all stages carry out the programs of one stream of microbatches. Promises: each microbatch is computed as
megatron-core's schedules compute it, so its gradients have the same bits; tensors that other stages need leave before
their memory is given up; no loss is divided by a number of microbatches, which need not be known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from spare_megatron.megatron_adapter.shims import install_cpu_shims

install_cpu_shims()

from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules

from spare_megatron.megatron_adapter.core_differences import backward_step
from spare_megatron.megatron_adapter.shims import compute_device, cuda_available
from spare_megatron.pipeline.operations import Backward, Exchange, Forward, Operation, Transfer
from spare_megatron.pipeline.programs import ForwardOnly, Interleaved, OneForwardOneBackward, Program


def program_of(chunks: int, forward_only: bool) -> Program:
    """The program of this rank's stage."""
    group = parallel_state.get_pipeline_model_parallel_group()
    stage, stages = group.rank(), group.size()
    if chunks > 1:
        return Interleaved(stage, stages, chunks, forward_only)
    return ForwardOnly(stage, stages) if forward_only else OneForwardOneBackward(stage, stages)


@dataclass
class ProgramRunner:
    """One stream of microbatches."""

    chunks: Sequence[torch.nn.Module]
    config: Any
    """megatron-core's config, with its run-time fields set."""
    forward_step: Callable[..., Any]
    """As the schedule calls it: (data iterator, model chunk) -> (output, loss function)."""
    data_iterators: Sequence[Any]
    """One for each chunk."""
    seq_length: int
    micro_batch_size: int
    forward_only: bool
    _kept: dict[tuple[int, int], tuple[Any, Any]] = field(default_factory=dict)
    """(microbatch, chunk) -> its input and output, until its backward pass."""
    _here: dict[Transfer, torch.Tensor] = field(default_factory=dict)
    """What has come and is not used yet."""
    _made: dict[Transfer, torch.Tensor] = field(default_factory=dict)
    """What has not left yet."""

    def __post_init__(self) -> None:
        group = parallel_state.get_pipeline_model_parallel_group()
        self._group, self._stage, self._stages = group, group.rank(), group.size()
        self._ranks = dist.get_process_group_ranks(group)
        self._last = self._stages * len(self.chunks) - 1
        self._context = parallel_state.get_context_parallel_group()
        self._shape = schedules.get_tensor_shapes(
            seq_length=self.seq_length,
            micro_batch_size=self.micro_batch_size,
            decoder_seq_length=self.seq_length,
            config=self.config,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            cp_group=self._context,
        )[0]

    def carry_out(self, operations: Iterable[Operation]) -> None:
        """Do the operations, in order."""
        for operation in operations:
            if isinstance(operation, Exchange):
                self._exchange(operation)
            elif isinstance(operation, Forward):
                self._forward(operation)
            else:
                self._backward(operation)

    def _forward(self, work: Forward) -> None:
        chunk, virtual = work.chunk, work.chunk * self._stages + self._stage
        given = self._here.pop(Transfer(False, work.microbatch, virtual - 1)) if virtual else None
        output, _ = schedules.forward_step(
            self.forward_step,
            self.data_iterators[chunk],
            self.chunks[chunk],
            1,
            given,
            [],
            self.config,
            cp_group_size=self._context.size(),
            is_first_microbatch=work.microbatch == 0,
            current_microbatch=work.microbatch,
            vp_stage=chunk if len(self.chunks) > 1 else None,
            is_last_stage=virtual == self._last,
        )
        if virtual < self._last:
            self._made[Transfer(False, work.microbatch, virtual)] = output
        if not self.forward_only:
            self._kept[work.microbatch, chunk] = given, output

    def _backward(self, work: Backward) -> None:
        virtual = work.chunk * self._stages + self._stage
        given, output = self._kept.pop((work.microbatch, work.chunk))
        back = self._here.pop(Transfer(True, work.microbatch, virtual)) if virtual < self._last else None
        gradient = backward_step(given, output, back, self.chunks[work.chunk], self.config)
        if virtual:
            self._made[Transfer(True, work.microbatch, virtual - 1)] = gradient

    def _exchange(self, exchange: Exchange) -> None:
        """Send and receive; returns when all of it is done."""
        leaving = [(transfer, self._made.pop(transfer)) for transfer in sorted(exchange.sends)]
        coming = [(transfer, self._room()) for transfer in sorted(exchange.receives)]
        posted = [self._post(dist.isend, tensor, transfer.receiver(self._stages)) for transfer, tensor in leaving]
        posted += [self._post(dist.irecv, tensor, transfer.sender(self._stages)) for transfer, tensor in coming]
        for request in dist.batch_isend_irecv(posted):
            request.wait()
        if self.config.batch_p2p_sync and cuda_available():
            torch.cuda.synchronize()
        self._here.update(coming)
        for transfer, tensor in leaving:
            if not transfer.gradient:
                schedules.deallocate_output_tensor(tensor, self.config.deallocate_pipeline_outputs)

    def _post(self, kind: Callable[..., Any], tensor: torch.Tensor, stage: int) -> dist.P2POp:
        return dist.P2POp(kind, tensor, self._ranks[stage], self._group)

    def _room(self) -> torch.Tensor:
        return torch.empty(
            self._shape, dtype=self.config.pipeline_dtype, device=compute_device(), requires_grad=not self.forward_only
        )

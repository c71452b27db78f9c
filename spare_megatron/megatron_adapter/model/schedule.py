"""Runs tickets through a pipeline schedule, megatron-core's or our own program, as one continuous pipeline.

megatron-core's schedule must know its whole load before it begins, so all tickets are taken first. Our program takes a
ticket when this stage begins it; so what comes while the pipeline runs is computed in it.

:class:`PieceRun` wraps the user's forward step for the schedule: it sets the generator states of each microbatch, tells
the caller which piece this stage computes, collects what the loss function returns, and cancels the effects of
microbatches that only fill up an interleaved pipeline (*pads*).

May assume: every rank of the group gets the same tickets. Each chunk computes the microbatches of a run in their
order, forward and backward. Promises: a pad adds exactly zero to every gradient, to the loss
sums and to the routing counts; the contribution of a piece does not depend on the other pieces of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from spare_megatron.megatron_adapter.shims import install_cpu_shims

install_cpu_shims()

from megatron.core.pipeline_parallel import get_forward_backward_func
from torch.autograd import Variable

from spare_megatron.config.engine_hooks import PieceHook
from spare_megatron.config.errors import ConfigError
from spare_megatron.megatron_adapter.core_differences import auto_scalers, taken_prediction_losses
from spare_megatron.megatron_adapter.model.gradient_readiness import Arrivals
from spare_megatron.megatron_adapter.model.losses import LossSums
from spare_megatron.megatron_adapter.model.program_runner import ProgramRunner, program_of
from spare_megatron.megatron_adapter.model.replica import Replica, rng
from spare_megatron.megatron_adapter.model.routing_losses import RoutingLosses
from spare_megatron.megatron_adapter.model.world import GroupWorld
from spare_megatron.protocol.tickets import Ticket, Tickets

ForwardStep = Callable[..., Any]
"""Megatron's forward step: (data iterator, model) -> (output, loss function)."""

MicrobatchSource = Callable[[int, Sequence[int]], Iterator[Any]]
"""(step, numbers) -> iterator over this rank's microbatches of these numbers, in order. It is called once for each
chunk, but consumed only where the forward step reads samples, so it must cost nothing before. ``numbers`` may grow
while the iterator is used."""

AUDITS_FROM = 1_000_000
"""The first audited piece of a run has this number, so that numbers do not depend on how many pieces follow."""

_AUTO_SCALERS = auto_scalers()


class PassWatch(Protocol):
    """Receives the piece to which each backward pass of this rank belongs."""

    needs_all: bool
    """Whether each backward pass must be reported; else passes of chunks whose output is no tensor are left out."""

    def pass_begins(self, chunk: int, ticket: Ticket | None, n: int, *, ends_piece: bool, ends_run: bool) -> None:
        """A backward pass of one microbatch of ``ticket``'s piece (None: of a pad) begins on ``chunk``; ``ends_piece``:
        of its last one; ``ends_run``: it is known to be the chunk's last one in this run. ``n`` is the piece's number
        in the run, of audited pieces counted from :data:`AUDITS_FROM`."""

    def pass_ends(self) -> None:
        """The backward pass is over."""


@dataclass
class PieceRun:
    """One call of a schedule."""

    replica: Replica
    world: GroupWorld
    step: int
    tickets: Tickets
    """Audited pieces: only ``passes`` takes their gradients, and they count in no sum. The last ticket is none of them,
    unless all are, so that the run ends with a gradient that is summed."""
    forward_step: ForwardStep
    sums: LossSums
    routing: RoutingLosses
    """Takes what routers note while training."""
    batch: int
    """Samples of the step's batch: a small one has fewer pieces, and the last one may be short."""
    on_piece: PieceHook | None = None
    forward_only: bool = False
    arrivals: Arrivals | None = None
    """Receives the backward passes of each chunk."""
    passes: PassWatch | None = None
    _order: list[_Which] = field(default_factory=list)
    """What was taken so far."""
    _numbers: list[int] = field(default_factory=list)
    """The microbatches of what was taken, and of what is known to follow."""
    _taken: list[int] = field(default_factory=lambda: [0, 0])
    """How many tickets were taken: of pieces, and of audited ones."""
    _foreseen: int = 0
    """Number of the tickets whose microbatches are in ``_numbers``."""
    _empty: list[int] = field(default_factory=list)
    """Pieces without samples."""
    _complete: bool = False
    """Whether all tickets were taken."""
    _started: list[int] = field(default_factory=list)

    def execute(self, source: MicrobatchSource, seq_length: int) -> None:
        """Run all pieces forward and, unless ``forward_only``, backward into the gradient buffers; those without
        samples are done last."""
        self._started = [0] * len(self.replica.chunks)
        if not self._own_program:
            while self._take():
                pass
            self._pad(self.world.shape.pipeline - len(self._order))
        if self._order or self._own_program:
            self._run(source, seq_length)
        for n in self._empty:
            self._tell("backward", n)

    def _run(self, source: MicrobatchSource, seq_length: int) -> None:
        chunks, config = self.replica.chunks, self.replica.config
        for chunk_config in {id(chunk.config): chunk.config for chunk in chunks}.values():
            self._set_run_fields(chunk_config, len(self._order))
        iterators = [source(self.step, self._numbers) for _ in chunks]
        if self._own_program:
            self._run_program(iterators, seq_length)
        else:
            get_forward_backward_func()(
                forward_step_func=self._forward_step,
                data_iterator=iterators,
                model=list(chunks),
                num_microbatches=len(self._order),
                seq_length=seq_length,
                micro_batch_size=self.world.shape.micro_batch_size,
                decoder_seq_length=seq_length,
                forward_only=self.forward_only,
            )
        config.grad_scale_func = None

    @property
    def _own_program(self) -> bool:
        return self.replica.settings.schedule == "tickets"

    def _run_program(self, iterators: Sequence[Any], seq_length: int) -> None:
        chunks, config = self.replica.chunks, self.replica.config
        size = self.world.shape.micro_batch_size
        runner = ProgramRunner(
            chunks, config, self._forward_step, iterators, seq_length, size, forward_only=self.forward_only
        )
        program, begun = program_of(len(chunks), self.forward_only), 0
        while not self._complete:
            while len(self._order) < begun + program.block and self._take():
                pass
            if self._complete:
                self._pad(-len(self._order) % program.block)
            while begun + program.block <= len(self._order):
                runner.carry_out(program.add())
                begun += program.block
        runner.carry_out(program.drain())

    def _take(self) -> bool:
        """Take the next ticket, with what is known to follow; false where there is none."""
        ticket = next(self.tickets, None)
        if ticket is None:
            self._complete = True
            return False
        n, self._taken[ticket.audited] = self._taken[ticket.audited], self._taken[ticket.audited] + 1
        numbers = self._microbatches(ticket)
        self._order += [_Which(ticket, number, n, number == numbers[0], number == numbers[-1]) for number in numbers]
        first = sum(self._taken) - 1
        for following in [ticket, *self.tickets.ahead()][self._foreseen - first :]:
            self._numbers += self._microbatches(following)
            self._foreseen += 1
        if not numbers and not ticket.audited:
            self._empty.append(n)
        return True

    def _microbatches(self, ticket: Ticket) -> Sequence[int]:
        """Those that have samples in this step."""
        return self.world.shape.microbatches_of(ticket.piece, self.batch)

    def _pad(self, missing: int) -> None:
        """Fill up what an interleaved pipeline needs, with microbatches that weigh nothing."""
        if self.world.virtual_pipeline and self._order and missing > 0:
            pad = replace(self._order[-1], is_pad=True)
            self._order += [pad] * missing
            self._numbers += [pad.microbatch] * missing

    def _set_run_fields(self, config: Any, load: int) -> None:
        """Set the fields that the schedule reads from the config, for a run of ``load`` microbatches.

        Without a loss per token the schedule divides each loss by the local number of microbatches (schedules
        263-269, aux losses 292); multiplying the gradient by the same number first cancels that exactly, because the
        backward of a division computes n / n.
        """
        factor = 1.0 if config.calculate_per_token_loss or self._own_program else float(load)
        scale = self.replica.optimizer.get_loss_scale() * factor
        config.grad_scale_func = lambda loss: loss * scale
        config.finalize_model_grads_func = None
        config.grad_sync_func = config.param_sync_func = config.no_sync_func = None
        if self.world.virtual_pipeline and not self._own_program:
            config.microbatch_group_size_per_vp_stage = interleaved_group(load, self.world.shape.pipeline)

    # ------------------------------------------------------------------------------- called by the schedule

    def _forward_step(self, data_iterator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        chunk = next(index for index, candidate in enumerate(self.replica.chunks) if candidate is model)
        index = self._started[chunk]
        which = self._order[index]
        self._started[chunk] += 1
        if chunk == 0 and which.begins_piece and not which.is_pad:
            self._tell("audit" if which.is_audit else "forward", which.n)
        self._set_states(which.microbatch)
        counts = self._routing_counts(model) if which.is_pad or which.is_audit else []
        taken_prediction_losses()  # of a microbatch whose loss was never asked for
        output, loss_function = self.forward_step(data_iterator, model, *args, **kwargs)
        self.routing.take(which.counts and not self.forward_only)
        _restore(counts)
        if not self.forward_only:
            self._watch_backward(output, model, chunk, which, index)
        return output, self._wrap_loss(loss_function, which)

    def _tell(self, phase: str, n: int) -> None:
        if self.on_piece is not None:
            self.on_piece(phase, n)

    def _set_states(self, number: int) -> None:
        shape, world = self.world.shape, self.world
        shard, j = divmod(number, shape.microbatches_per_shard)
        microbatch = (j * shape.num_groups + shard) * shape.inner_data + world.data_rank
        keys = rng.RankKeys(
            context=world.context_rank,
            tensor=world.tensor_rank,
            expert=world.expert_rank,
            expert_tensor=world.expert_tensor_rank,
        )
        rng.set_piece_states(self.replica.settings.seed, self.step, microbatch, keys)

    def _wrap_loss(self, loss_function: Any, which: _Which) -> Any:
        if loss_function is None:
            return None

        def loss(output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            outputs = loss_function(output, *args, **kwargs)
            more = self._prediction_losses()
            if which.is_pad:
                return (outputs[0] * 0.0, *outputs[1:])
            if not which.is_audit:
                self.sums.add((*outputs[:-1], {**outputs[-1], **more}))
                if not self.forward_only:
                    self.routing.count()
            return outputs

        return loss

    def _prediction_losses(self) -> dict[str, Any]:
        """What the layers of multi-token prediction add to a microbatch's report, by Megatron's names. megatron-core
        notes no such loss where it evaluates: then there is nothing to count."""
        layers = self.replica.config.mtp_num_layers or 0
        values = taken_prediction_losses() or [torch.zeros(2)] * layers
        return {f"mtp_{n} loss": value for n, value in enumerate(values, 1)}

    # ---------------------------------------------------------------------------------------- backward side

    def _watch_backward(self, output: Any, model: Any, chunk: int, which: _Which, index: int) -> None:
        """Have autograd call back when the backward of this microbatch on this chunk begins and ends.

        The hook on the chunk's output runs first in that backward pass; a callback that it queues with the engine
        runs when the pass is over (the mechanism of torch's own DDP).
        """
        if not torch.is_tensor(output) and self.passes is not None and self.passes.needs_all:
            raise ConfigError(
                f"the forward step returned {type(output).__name__}, but pieces of several microbatches need a tensor, "
                "whose backward pass tells where a piece ends; use --spare-piece-microbatches 1"
            )
        if not (torch.is_tensor(output) and output.requires_grad):
            if chunk == 0 and which.ends_piece and not which.is_pad:
                self._done(which)  # all before is frozen, or nothing says when the pass is over
            return

        def begins(_gradient: torch.Tensor) -> None:
            restore = self._weigh_nothing(model) if which.is_pad else None
            counts = self._routing_counts(model) if which.is_audit else []
            ends_run = self._complete and index == len(self._order) - 1
            if self.arrivals is not None:
                self.arrivals.pass_begins(chunk, last=ends_run)
            if self.passes is not None:
                n = which.n + AUDITS_FROM if which.is_audit else which.n
                ticket = None if which.is_pad else which.ticket
                self.passes.pass_begins(chunk, ticket, n, ends_piece=which.ends_piece, ends_run=ends_run)

            def ends() -> None:
                self.routing.take(which.counts)
                if self.passes is not None:
                    self.passes.pass_ends()
                if self.arrivals is not None:
                    self.arrivals.pass_ends(chunk)
                _restore(counts)
                if restore is not None:
                    restore()
                elif chunk == 0 and which.ends_piece:
                    self._done(which)

            Variable._execution_engine.queue_callback(ends)

        output.register_hook(begins)

    def _done(self, which: _Which) -> None:
        """Note that this stage has finished the backward pass of a piece."""
        self._tell("audit" if which.is_audit else "backward", which.n)

    def _weigh_nothing(self, model: Any) -> Callable[[], None]:
        """Cancel the auxiliary losses and routing counts of a pad's backward pass; returns a function that restores
        all."""
        scales = [(scaler, scaler.main_loss_backward_scale) for scaler in _AUTO_SCALERS]
        for scaler, scale in scales:
            scaler.main_loss_backward_scale = torch.zeros_like(scale if scale is not None else torch.zeros(1))
        counts = self._routing_counts(model)

        def restore() -> None:
            for scaler, scale in scales:
                scaler.main_loss_backward_scale = scale
            _restore(counts)

        return restore

    def _routing_counts(self, model: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(counts, counts.clone()) for counts in routing_counts(model)]


@dataclass(frozen=True)
class _Which:
    """What a run computes at one position: a microbatch of a piece or of an audit, or a pad."""

    ticket: Ticket
    microbatch: int
    n: int
    """The piece's number among the pieces of the run, or among the audited ones."""
    begins_piece: bool
    ends_piece: bool
    is_pad: bool = False

    @property
    def is_audit(self) -> bool:
        return self.ticket.audited and not self.is_pad

    @property
    def counts(self) -> bool:
        """Whether it is part of the step's sums."""
        return not (self.is_pad or self.is_audit)


def _restore(saved: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for tensor, value in saved:
        tensor.copy_(value)


def routing_counts(model: torch.nn.Module) -> list[torch.Tensor]:
    """Tokens per expert since the last update, of each router of ``model`` that balances by an expert bias."""
    found: list[Any] = []
    for module in model.modules():
        if getattr(module, "expert_bias", None) is not None:
            found.append(module.local_tokens_per_expert)
    return found


def interleaved_group(load: int, pipeline: int) -> int:
    """Number of microbatches that a virtual stage runs in a row: the least one >= PP that leaves no remainder below PP.

    megatron-core's schedule (schedules 1005-1017) wants PP <= group <= load and load mod group = 0 or >= PP; a small
    group keeps few activations alive.
    """
    for group in range(pipeline, load):
        if load % group == 0 or load % group >= pipeline:
            return group
    return load

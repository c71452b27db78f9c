"""The step loop's engine on megatron-core: it computes and updates one rank of one group, and knows no other group.

It implements the interface :class:`spare_megatron.worker.engine.StepEngine` with megatron-core's schedules, gradient
buffers and optimizer. Between the backward pass and the optimizer step the gradients leave this module (``local_sum``)
and return summed over the whole batch (``apply``).

May assume: every rank of the group gets the same calls of ``run``, ``local_sum``, ``apply`` and ``evaluate`` with the
same arguments; ``begin_step`` and ``scalars`` call no collective. Promises: gradients of pieces are
plain sums; the only divisor is the constant of :meth:`MegatronEngine._divisor`, applied once, in ``apply``.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from spare_megatron.megatron_adapter.json_collectives import broadcast_json
from spare_megatron.megatron_adapter.shims import install_cpu_shims

install_cpu_shims()

from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging

from spare_megatron import kernels
from spare_megatron.config.batches import BatchSchedule
from spare_megatron.config.engine_hooks import Outlet, PieceHook
from spare_megatron.config.rows import RowCut
from spare_megatron.exact_sum.sum_conversion import SumConversion
from spare_megatron.megatron_adapter.checkpoint.optimizer_gather import count_updates, counted_updates
from spare_megatron.megatron_adapter.model.exact import FORMATS, ExactGradients, flip_bit
from spare_megatron.megatron_adapter.model.exact_rows import ExactRows
from spare_megatron.megatron_adapter.model.finalized_gradients import finalize_gradients
from spare_megatron.megatron_adapter.model.gradient_overlap import Outflow, gradient_buffers
from spare_megatron.megatron_adapter.model.group_sum import GroupSum, parts_of
from spare_megatron.megatron_adapter.model.home_rows import rows_of_replica
from spare_megatron.megatron_adapter.model.losses import TOKENS, LossSums, averages, sum_names
from spare_megatron.megatron_adapter.model.optimizer_shards import OptimizerShards
from spare_megatron.megatron_adapter.model.replica import Replica
from spare_megatron.megatron_adapter.model.routing_losses import RoutingLosses
from spare_megatron.megatron_adapter.model.schedule import ForwardStep, MicrobatchSource, PieceRun, routing_counts
from spare_megatron.megatron_adapter.model.state_snapshot import weights_checksums, weights_digest
from spare_megatron.megatron_adapter.model.tied_head import tied_head
from spare_megatron.megatron_adapter.model.transferred_state import TransferableState
from spare_megatron.megatron_adapter.model.world import GroupWorld
from spare_megatron.megatron_adapter.shims import compute_device
from spare_megatron.protocol.tickets import KnownTickets, Ticket, Tickets

log = logging.getLogger(__name__)

OVERFLOWS, NOT_FINITE = "overflows", "not finite"
"""Scalars of the exact sum: the number of ranks on which a piece's gradient exceeded the bound, or was NaN or
infinite."""

StepFlips = Callable[[str, int, int], bool]


class NonFiniteGradientError(RuntimeError):
    """A step's summed gradients are not finite, and the optimizer would not notice."""


class RowState(TransferableState):
    """What groups compare and exchange of a row, or of a rank that has one row."""

    _routing: list[torch.Tensor] | tuple[()] = ()
    """Counts of the tokens that routers sent to each expert, where experts are balanced by a bias."""

    def rows(self) -> Sequence[RowState]:
        """A row has no others."""
        return (self,)

    @property
    def sums(self) -> int:
        """How many tensors are summed over groups."""
        number = 0 if self.exact is None else self.exact.num_buffers
        return number + bool(self._routing)

    def conversion(self) -> SumConversion | None:
        """In exact modes how the sums of gradients over groups become fp32."""
        return None if self.exact is None else self.exact.conversion

    def result_fault(self, reduced: Sequence[torch.Tensor]) -> str:
        """What is wrong with the sums over all groups according to their checksums; empty where nothing is, and in
        plain modes."""
        if self.exact is None:
            return ""
        return self.exact.result_fault(self._parted(reduced)[0], reduced[-1])

    def result_digest(self, reduced: Sequence[torch.Tensor], scalars: Mapping[str, float]) -> str:
        """In exact modes a digest (16 hex digits) of the reduced scalars, routing counts and check vector, which has
        the checksums of the sums; else ''."""
        if self.exact is None:
            return ""
        text = ",".join(f"{name}={float(value).hex()}" for name, value in sorted(scalars.items()))
        return f"{kernels.digest([text.encode(), *self._parted(reduced)[1]]):016x}"

    def piece_checksums(self, audited: bool) -> Mapping[int, Mapping[str, int]]:
        """Piece -> parameter -> checksum of its gradient, of audited or of compared pieces; empty in plain modes."""
        return self.exact.piece_checksums(audited) if self.exact is not None else {}

    def weights_digest(self) -> str:
        """In exact modes, in which all groups compute the same bits, a digest of parameters, persistent buffers and the
        scales of sums, '+', and that of one state shard of the optimizers: after step t number t mod S. So each shard
        is compared once in S steps, and a step costs one S-th of reading them all; where this group keeps only some
        shards, votes have their digests by themselves. '' in other modes, in which a sum inside a group may differ from
        another group's in its last bit."""
        if self.exact is None:
            return ""
        if self.shards.kept is not None:
            return weights_digest(self.replica, self.exact.scales)
        [due] = self.shards.digests([self.applied % self.shards.number])
        return f"{weights_digest(self.replica, self.exact.scales)}+{due:016x}"

    def weights_checksums(self) -> Mapping[str, int]:
        """Name -> checksum of each parameter and persistent buffer, of the scales, and of what the optimizers have in
        each state shard by its kind, which shows where groups differ."""
        parts = self.shards.parts()
        if self.exact is not None:
            parts["scales_of_exact_sums"] = self.exact.scales
        return weights_checksums(self.replica, parts)

    def summed(self) -> list[torch.Tensor]:
        """In exact modes the row's tensors of :meth:`MegatronEngine.local_sum`. Collective in the group."""
        return [*([] if self.exact is None else self.exact.tensors()), *self.counted()]

    def counted(self) -> list[torch.Tensor]:
        """The routing counts, as one tensor, where there are any."""
        return [torch.stack(list(self._routing)).to(torch.int64).reshape(-1)] if self._routing else []

    def take_counts(self, reduced: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Take the row's routing counts from its results; returns its sums of gradients."""
        gradients, counted = self._parted(reduced)
        if self._routing:
            for counts, total in zip(self._routing, counted[0].view(len(self._routing), -1), strict=True):
                counts.copy_(total)
        return gradients

    def _parted(self, reduced: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """The sums of gradients, and what follows them."""
        number = len(reduced) - bool(self._routing) if self.exact is None else self.exact.num_buffers
        return reduced[:number], reduced[number:]


class MegatronRow(RowState):
    """One row of a rank that has several."""

    def __init__(
        self, engine: MegatronEngine, replica: Replica, exact: ExactGradients, shards: OptimizerShards
    ) -> None:
        """``replica`` has the row; ``exact`` and ``shards`` are of it alone."""
        self._engine, self.replica, self.exact, self.shards = engine, replica, exact, shards
        self._routing = [] if replica.row is None else replica.row.counts

    @property
    def applied(self) -> int:  # type: ignore[override]
        """The step after which the state is."""
        return self._engine.applied

    @applied.setter
    def applied(self, step: int) -> None:
        self._engine.applied = step


class MegatronEngine(RowState):
    """One rank's model, gradient accumulators and optimizer. Pieces are numbers ``i * K + j``."""

    def __init__(
        self,
        replica: Replica,
        world: GroupWorld,
        forward_step: ForwardStep,
        source: MicrobatchSource,
        *,
        probe_piece: int = 0,
        on_piece: PieceHook | None = None,
        method: str = "fp32",
        flips: StepFlips | None = None,
        batches: BatchSchedule | None = None,
        first_step: int = 0,
        state_shards: int | None = None,
        rows: Sequence[int] = (),
        cut: RowCut | None = None,
    ) -> None:
        """
        Args:
            replica: the rank's model and optimizer.
            world: the rank's place in its group.
            forward_step: the user's forward step.
            source: gives training microbatches.
            probe_piece: a piece that this group hosts. A group that has not run any piece yet runs it forward to learn
                what the loss function reports.
            on_piece: called when a piece's forward begins and when its backward ends.
            method: a value of ``--spare-reduce``: pieces are added as integers
                (:mod:`spare_megatron.megatron_adapter.model.exact`) or in fp32.
            flips: ``flips(point, step, n)`` says whether an injected fault flips a bit there; for n see
            ``exact.Flips``. None where no fault does: it is asked for every gradient.
            batches: the batch size of each step, where it changes; a step with a smaller batch has empty pieces.
            first_step: the replica has the state after this step.
            state_shards: into how many shards the optimizers' state is cut; None: one for each group.
            rows: the rows of ``cut`` that this rank has, where they are no whole stage of home.
        """
        self.replica = replica
        self.world = world
        self._forward_step = forward_step
        self._source = source
        self._probe_piece = probe_piece
        self.on_piece = on_piece
        self._step = 0
        self._sums = self._new_sums()
        self._scalars: dict[str, float] = {}
        self._names: list[str] | None = None
        self._group_sums_made: list[GroupSum] = []
        if method in FORMATS:
            replica.head = tied_head(replica.chunks)
        self._outflow = Outflow(replica)
        self._routing = [counts for chunk in replica.chunks for counts in routing_counts(chunk)]
        self._routing_losses = RoutingLosses(replica.config, replica.settings.hybrid_layer_pattern, world)
        self._flips = flips
        self.exact: ExactGradients | None = None
        shape = world.shape
        self._batches = batches or BatchSchedule(((1, 0, shape.global_batch_size),))
        shards = state_shards or shape.num_groups
        self.shards = OptimizerShards(replica, shards)
        self.applied = first_step
        flips_now = None if flips is None else lambda point, n: flips(point, self._step, n)
        self._rows: list[MegatronRow] = []
        if cut is not None and rows:
            parts = rows_of_replica(replica.chunks, replica.config, replica.head, cut, rows)
            replicas = [dataclasses.replace(replica, row=part) for part in parts]
            exacts = [ExactGradients(one, world, method, flips_now) for one in replicas]
            self.exact = cast(ExactGradients, ExactRows(replicas, exacts))
            self._rows = [
                MegatronRow(self, one, exact, OptimizerShards(one, shards))
                for one, exact in zip(replicas, exacts, strict=True)
            ]
        elif method in FORMATS:
            self.exact = ExactGradients(replica, world, method, flips_now)

    def rows(self) -> Sequence[RowState]:
        """The rows of this rank; a single one is the engine itself."""
        return self._rows or (self,)

    # ------------------------------------------------------------------------------------------ step engine

    def begin_step(self, step: int) -> None:
        """Zero the accumulators; they contain no piece afterwards."""
        self._step = step
        self._outflow.arrivals.unwatch()
        self._sums.clear()
        self._routing_losses.begin_step()
        if self.exact is not None:
            self.exact.begin_step()
        else:
            for chunk in self.replica.chunks:
                chunk.zero_grad_buffer()
        self.replica.optimizer.zero_grad()
        for counts in self._routing:
            counts.zero_()

    def run(self, step: int, tickets: Tickets) -> None:
        """Run ``tickets`` forward and backward as one pipeline, and add them to the accumulators.

        The checksums of compared and of audited pieces are kept for :meth:`piece_checksums`.
        """
        if step != self._step:
            raise AssertionError(f"run of step {step}, but the accumulators belong to step {self._step}")
        for chunk in self.replica.chunks:
            chunk.train()
        run = self._piece_run(step, tickets, self._sums, self._batches.size(step), forward_only=False)
        run.passes = self.exact
        run.execute(self._source, self._seq_length)

    def leaving(self) -> Sequence[torch.Tensor] | None:
        """The tensors that :meth:`local_sum` will return, for gradients that leave during the run; None where ranks of
        the group share gradient buffers and must sum them first."""
        if not self._outflow.possible or self._rows:
            return None
        tensors = self.exact.leaving() if self.exact is not None else [data for data, _ in self._buffers()]
        if self._routing:
            tensors.append(torch.empty_like(torch.stack(self._routing), dtype=torch.int64).reshape(-1))
        return tensors

    def watch(self, outlet: Outlet) -> None:
        """Tell ``outlet`` of gradients that are final, while the last backward pass of each chunk adds them."""
        self._outflow.watch(outlet)

    def local_sum(self) -> Sequence[torch.Tensor]:
        """The gradient buffers summed over context and inner data ranks, then, where experts are balanced by a bias,
        this rank's routing counts (int64).

        Collective in the group. A buffer that no other rank of the group shares is returned itself; else the sum has
        memory of its own.
        """
        self._outflow.arrivals.unwatch()
        self._scalars = self._group_sums(self._sums, self._routing_losses.scalars())
        if self.exact is None:
            return [*self._plain_sums(), *self.counted()]
        return [one for row in self.rows() for one in row.summed()]

    def _plain_sums(self) -> list[torch.Tensor]:
        return [one.over_ranks() for one in self._sums_in_group()]

    def _sums_in_group(self) -> list[GroupSum]:
        """The group sum of each gradient buffer; made at the first call, because exact modes have their own."""
        if not self._group_sums_made:
            buffers = [(buffer, group) for _, buffer, group in gradient_buffers(self.replica)]
            made = [GroupSum(buffer.grad_data, group, parts_of(buffer, group)) for buffer, group in buffers]
            self._group_sums_made = made
        return self._group_sums_made

    def scalars(self) -> Mapping[str, float]:
        """Loss sums and token counts of the computed pieces, summed over the group's context and inner data ranks.

        They are those of the last :meth:`local_sum`, and the same on every rank of the group, because each rank
        position sums them over groups by itself and needs the whole.
        """
        return dict(self._scalars)

    def apply(self, step: int, reduced: Sequence[torch.Tensor], scalars: Mapping[str, float]) -> Mapping[str, Any]:
        """Update the weights from the committed sums over all pieces of the step; returns the figures to log, the same
        on every rank."""
        replica, at, gradients = self.replica, 0, list[torch.Tensor]()
        for row in self.rows():
            stop = at + row.sums + 1 if self._rows else len(reduced)  # a row's check vector is the last
            gradients += row.take_counts(reduced[at:stop])
            at = stop
        loss_scale = float(replica.optimizer.get_loss_scale().item())
        updated, grad_norm, zeros = False, None, None
        if self._take_gradients(step, gradients, scalars):
            # two addends have one order
            finalize_gradients(replica.chunks, one_by_one=self.exact is not None and self.world.shape.tensor > 2)
            before = counted_updates(replica.optimizer)
            updated, grad_norm, zeros = replica.optimizer.step()
            count_updates(replica.optimizer, before + bool(updated))
        if self._flips is not None and self._flips("weights", step, 0):
            flip_bit(next(replica.chunks[0].module.parameters()).data.view(-1))
        if self._flips is not None and self._flips("optimizer", step, 0):
            for one in list(self.shards.tensors([step % self.shards.number]))[-1:]:
                flip_bit(one.tensor)
        if updated:
            replica.scheduler.step(increment=self._batches.size(step))
        self.applied = step
        values = averages(scalars)
        own = [name for name in values if name != "lm loss"]
        cores = self._routing_losses.names  # beside the user's, as are those of more tokens
        main = [name for name in values if not name.startswith("mtp_") and name not in cores]
        return {
            "loss": values.get("lm loss", values[main[0]] if main else 0.0),
            "grad_norm": None if grad_norm is None else float(grad_norm),
            "lr": get_canonical_lr_for_logging(replica.optimizer.param_groups),
            "tokens": int(scalars[TOKENS]),
            "skipped": int(not updated),
            "loss_scale": loss_scale,
            **({} if zeros is None else {"num_zeros": int(zeros)}),
            **({"reported": own} if own else {}),
            **values,
        }

    # --------------------------------------------------------------------------------------------- checks

    def accumulators_fault(self, *, suspected: bool) -> str:
        """What is wrong with the accumulators according to their checksums; empty where nothing is, and in plain modes,
        which have no checksums."""
        return self.exact.accumulators_fault(suspected) if self.exact is not None else ""

    # ------------------------------------------------------------------------------------------- evaluation

    def evaluate(self, step: int, pieces: Sequence[int], source: MicrobatchSource) -> Mapping[str, float]:
        """Run ``pieces`` of ``source`` forward only; returns their sums under the names of :meth:`scalars`. Collective
        in the group.

        Accumulators are not changed, and generator states of training do not depend on it.
        """
        sums = self._new_sums()
        if pieces:
            self._forward(step, pieces, source, sums, self.world.shape.global_batch_size)
        values = self._group_sums(sums, {})
        return {name: value for name, value in values.items() if name not in (OVERFLOWS, NOT_FINITE)}

    def _forward(self, step: int, pieces: Sequence[int], source: MicrobatchSource, sums: LossSums, batch: int) -> None:
        chunks = self.replica.chunks
        for chunk in chunks:
            chunk.eval()
        try:
            with torch.no_grad():
                tickets = KnownTickets(map(Ticket, pieces))
                self._piece_run(step, tickets, sums, batch, forward_only=True).execute(source, self._seq_length)
        finally:
            for chunk in chunks:
                chunk.train()

    # ---------------------------------------------------------------------------------------------- helpers

    @property
    def _seq_length(self) -> int:
        return self.replica.settings.seq_length

    def _new_sums(self) -> LossSums:
        shape = self.world.shape
        return LossSums(shape.micro_batch_size * self.replica.settings.seq_length // shape.context)

    def _piece_run(self, step: int, tickets: Tickets, sums: LossSums, batch: int, *, forward_only: bool) -> PieceRun:
        return PieceRun(
            replica=self.replica,
            world=self.world,
            step=step,
            tickets=tickets,
            forward_step=self._forward_step,
            sums=sums,
            routing=self._routing_losses,
            batch=batch,
            on_piece=None if forward_only else self.on_piece,
            forward_only=forward_only,
            arrivals=None if forward_only else self._outflow.arrivals,
        )

    def _buffers(self) -> list[tuple[torch.Tensor, dist.ProcessGroup]]:
        """Each flat gradient buffer of this rank with the ranks of the group that share its parameters."""
        return [(buffer.grad_data, group) for _, buffer, group in gradient_buffers(self.replica)]

    def _take_gradients(self, step: int, reduced: Sequence[torch.Tensor], scalars: Mapping[str, float]) -> bool:
        """Write the committed sums into megatron-core's gradients; False when this step must be skipped.

        All groups skip a step together, because the flags of pieces that were too large are part of the committed sums.
        """
        divisor = self._divisor(scalars)
        if self.exact is None:
            for one, total in zip(self._sums_in_group(), reduced, strict=True):
                for part in one.parts:
                    _write_quotient(part.of(total), divisor, one.mine[part.start : part.stop])
            self._check_finite(step)
            return True
        measuring = self.exact.measuring
        self.exact.finalize(reduced, divisor, scalars[OVERFLOWS] > 0)
        if not scalars[OVERFLOWS] and not scalars[NOT_FINITE]:
            if measuring:
                log.info("step %d only measures the scales of the gradients and is not applied", step)
            elif self._stops_at_infinity and self.exact.infinite(divisor):
                raise NonFiniteGradientError(_not_finite(step, "a sum beyond fp32's range"))
            return not measuring
        self._explain_skip(step, scalars)
        if not self.replica.config.fp16:
            return False
        self.exact.spoil()
        return True

    def _explain_skip(self, step: int, scalars: Mapping[str, float]) -> None:
        assert self.exact is not None, "only exact sums are flagged"
        mine = ", ".join(self.exact.flagged()[:3]) or "none on this rank of this group"
        if scalars[NOT_FINITE] and self._stops_at_infinity:
            raise NonFiniteGradientError(_not_finite(step, f"parameters here: {mine}"))
        what = "not finite" if scalars[NOT_FINITE] else f"{2**self.exact.growth_bits} times its last sum"
        log.warning("step %d is skipped: a piece's gradient was %s (parameters here: %s)", step, what, mine)

    def _divisor(self, scalars: Mapping[str, float]) -> float:
        """The divisor of the sums: the number of microbatches times CP, as Megatron averages, or with a per-token loss
        the tokens of the batch."""
        if self.replica.config.calculate_per_token_loss:
            return max(scalars[TOKENS], 1.0)
        shape = self.world.shape
        return float(self._batches.size(self._step) // shape.micro_batch_size * shape.context)

    def _check_finite(self, step: int) -> None:
        """Megatron's ``check_for_nan_in_grad``, on the sums: every group sees the same and stops at the same step."""
        if not self._stops_at_infinity:
            return
        parts = [one.mine[part.start : part.stop] for one in self._sums_in_group() for part in one.parts]
        for norm in (part.norm(p=2) for part in parts):
            if not torch.isfinite(norm):
                raise NonFiniteGradientError(_not_finite(step, f"norm {norm.item()}"))

    @property
    def _stops_at_infinity(self) -> bool:
        """Whether gradients that are not finite stop training; with a loss scale the optimizer skips the step
        instead."""
        return bool(self.replica.settings.ddp.get("check_for_nan_in_grad")) and not self.replica.config.fp16

    def _group_sums(self, sums: LossSums, routing: Mapping[str, float]) -> dict[str, float]:
        """The scalars of the last pipeline stage (of tensor-parallel rank 0) and those of the routers of all ranks,
        summed over the group; on every rank."""
        values = sums.values()
        if self._names is None:
            self._names = self._learn_names(values)
        holds = self.world.is_last_stage and self.world.tensor_rank == 0
        names, numbers = list(self._names), [values.get(name, 0.0) if holds else 0.0 for name in self._names]
        names += routing
        numbers += routing.values()
        if self.exact is not None:
            names += [OVERFLOWS, NOT_FINITE]
            numbers += [float(flag) for flag in self.exact.flags()]
        if self.world.shape.group_size == 1:  # gloo and NCCL would wake a thread or a device for it
            return dict(zip(names, map(float, numbers), strict=True))
        vector = torch.tensor(numbers, dtype=torch.float64).to(compute_device())
        dist.all_reduce(vector)
        return dict(zip(names, vector.tolist(), strict=True))

    def _learn_names(self, values: Mapping[str, float]) -> list[str]:
        """The names that the loss function reports, from the pieces run so far or else from a forward pass of the probe
        piece."""
        holder = self.world.last_stage_position
        names = broadcast_json(sum_names(values), holder, compute_device())
        if not names:
            sums = self._new_sums()
            self._forward(self._step, (self._probe_piece,), self._source, sums, self._batches.size(self._step))
            names = broadcast_json(sum_names(sums.values()), holder, compute_device())
        return list(names)


def _write_quotient(total: torch.Tensor, divisor: float, gradient: torch.Tensor) -> None:
    """Write ``total / divisor`` into ``gradient``, in the dtype of ``gradient``."""
    if total.dtype == gradient.dtype and total.device == gradient.device:
        torch.div(total, divisor, out=gradient)
    else:
        gradient.copy_(total).div_(divisor)


def _not_finite(step: int, what: str) -> str:
    return (
        f"the gradients of step {step} have NaN or infinity ({what}): training stops before they reach the weights; "
        "with --no-check-for-nan-in-loss-and-grad it would go on"
    )

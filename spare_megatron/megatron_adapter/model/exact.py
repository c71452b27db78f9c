"""Exact gradient sums of one rank: integer accumulators, their checksums, and how sums over groups become gradients.

Each piece's gradient of each parameter is rounded once to an integer (:mod:`spare_megatron.exact_sum.formats`
says how) and added; integers add exactly in any order, so it does not matter which group computed a piece, nor when.
For each parameter the checksums of its pieces are summed too, as the pieces are added. The checksum is linear, so this
sum must be the checksum of the accumulator, and its sum over groups the checksum of the reduced result.

A piece of several microbatches is summed in fp32 first, with megatron-core's arithmetic: the sum *waits*, in the memory
that the first gradient came in, until the last microbatch's gradient comes; both are added, rounded and taken into the
accumulator in one pass over memory. Whoever computes a piece adds its microbatches in the same order, so these bits do
not depend on it either. Where pieces are single microbatches, a gradient waits for that of the next piece, so that the
accumulator, as large as both, is read and written once for two (not in ``exact32``, which is there to save memory).
What waits is taken at the latest when the run's last backward pass of its chunk is over, or its end. What is taken
first in a step is written over what the accumulator had.

Sums over groups come back in fp32, converted where they were complete, with the check vector of that
(:mod:`spare_megatron.exact_sum.sum_conversion`). The norm by which the optimizer clips is a sum of integers too
(:mod:`spare_megatron.exact_sum.gradient_norm`).

Memory: the accumulator uses the storage of megatron-core's fp32 gradient buffer, enlarged to the size of the integers.
During a step it has integers; after the commit they are no longer needed, and the fp32 gradient is written into the
same memory.

May assume: gradients come through :attr:`GroupDDP.accumulate`, which gives their memory away; backward passes of one
rank run one after the other, and those of a chunk in the order of its microbatches. Promises:
what :meth:`ExactGradients.tensors` returns depends on the *set* of pieces alone.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from spare_megatron import kernels
from spare_megatron.exact_sum.formats import Format, Int32, Int64, ScalesState, Slot
from spare_megatron.exact_sum.gradient_norm import gradient_norm
from spare_megatron.exact_sum.piece_checksums import PieceChecksums
from spare_megatron.exact_sum.sum_conversion import SumConversion
from spare_megatron.megatron_adapter.core_differences import norm_gradients, set_norm
from spare_megatron.megatron_adapter.model.gradient_overlap import gradient_buffers, summed_names
from spare_megatron.megatron_adapter.model.group_sum import BufferSlice, GroupSum, parts_of
from spare_megatron.megatron_adapter.model.replica import Replica
from spare_megatron.megatron_adapter.model.sum_checks import SumParts, index_of
from spare_megatron.megatron_adapter.model.world import GroupWorld
from spare_megatron.megatron_adapter.shims import compute_device
from spare_megatron.protocol.tickets import Ticket

log = logging.getLogger(__name__)
FORMATS: dict[str, type[Format]] = {"exact": Int64, "exact32": Int32}
"""Value of ``--spare-reduce`` -> format."""
Flips = Callable[[str, int], bool]
"""``flips(point, n)`` says whether an injected fault flips a bit at this point now. n is the number of the piece in its
run, for points within a backward pass; else 0."""


class _Buffer:
    """One of megatron-core's gradient buffers, with an integer accumulator in the same memory."""

    def __init__(self, buffer: Any, group: dist.ProcessGroup, dtype: torch.dtype) -> None:
        gradient = buffer.grad_data
        self.gradient = gradient
        self.accumulator = torch.empty(0, dtype=dtype, device=gradient.device)
        storage, start = gradient.untyped_storage(), gradient.storage_offset()
        assert start == 0, "the gradient buffer does not begin its storage"
        size = dtype.itemsize * gradient.numel()
        if storage.nbytes() != size:
            storage.resize_(0)  # else both would be there at once, and the old values copied
            storage.resize_(size)
        self.accumulator.set_(storage, 0, (gradient.numel(),), (1,))
        self.sum = GroupSum(self.accumulator, group, parts_of(buffer, group))
        self.of_ranks = [parts_of(buffer, group, rank) for rank in range(group.size())]
        """The parts of the sum that each rank of ``group`` keeps."""
        self.gaps: list[slice] = []
        """Elements that belong to no parameter (padding)."""


def _device_of(replica: Replica) -> torch.device:
    """Where the weights of a rank are of which none is trained."""
    return next((one.device for one in replica.chunks[0].parameters()), torch.device("cpu"))


class ExactGradients:
    """The accumulators of one rank. ``tensors``, ``finalize`` and ``restore`` are collective in the group."""

    def __init__(self, replica: Replica, world: GroupWorld, method: str, flips: Flips | None) -> None:
        """``method``: one of :data:`FORMATS`. ``flips`` is None where no bit is ever flipped."""
        kind = FORMATS[method]
        self._buffers: list[_Buffer] = []
        self._slots: list[Slot] = []
        self._numbers: dict[torch.nn.Parameter, int] = {}
        self._chunks: list[int] = []
        """The chunk of each slot."""
        self.needs_all = world.shape.piece_microbatches > 1
        self._pairs = not self.needs_all and method == "exact"
        """Whether a piece's gradient may wait for that of the next one."""
        names = summed_names(replica)
        for number, buffer, group in gradient_buffers(replica):
            self._add(buffer, group, names, kind.dtype)
            self._chunks += [number] * (len(self._slots) - len(self._chunks))
        for chunk in replica.chunks:
            chunk.accumulate = self.accumulate
        device = self._buffers[0].gradient.device if self._buffers else _device_of(replica)
        self._method = method
        sharing = max((buffer.sum.group.size() for buffer in self._buffers), default=1)
        self._keys = [
            _key(slot.name, parameter, world) for slot, parameter in zip(self._slots, self._numbers, strict=True)
        ]
        terms, unit_bits = world.shape.pieces * sharing, _unit_bits(replica, world)
        self.format = kind(self._slots, terms, unit_bits, device)  # type: ignore[call-arg]
        self._optimizer = replica.optimizer
        self._head = replica.head if replica.row is None else None
        set_norm(replica.optimizer, self._gradient_norm)
        self._kept = [piece for buffer in range(len(self._buffers)) for piece in self._kept_of(buffer)]
        self._reports = torch.zeros(len(self._slots), 2, dtype=torch.int64, device=device)
        self._adders = [
            self.format.adder(number, self._buffers[slot.buffer].accumulator[slot.start : slot.stop], report)
            for number, (slot, report) in enumerate(zip(self._slots, self._reports, strict=True))
        ]
        """Of each slot the function that adds a gradient to its accumulator."""
        self.pieces = PieceChecksums(self._reports)
        self._scratch = torch.zeros(0, dtype=kind.dtype, device=device)
        """Memory to which audited gradients are added; it is never read."""
        self._flips, self._n = flips, 0
        self._waiting: dict[int, torch.Tensor] = {}
        """Slot -> the fp32 sum of the first microbatches of a piece or, with ``_pairs``, the gradient of a piece."""
        self._empty: set[int] = set()
        """Slots to which nothing was added in this step: their accumulators have no meaning yet."""
        self._chunk, self._ends_piece, self._ends_run = 0, True, False
        """Of the present backward pass: its chunk, and whether it is of a piece's last microbatch and the chunk's last
        one in this run."""
        self._given: tuple[torch.Tensor, ...] = ()
        """What :meth:`tensors` returned last."""
        self._expected = torch.zeros(0, dtype=torch.int64, device=device)
        """The checksums that these sums must have: one for each parameter of which this rank keeps a part."""
        numbers = range(len(self._buffers))
        whole = [(number, BufferSlice(one.start, one.stop, one.start)) for number, one in enumerate(self._slots)]
        self._whole_parts = SumParts(self._slots, whole, numbers)
        self._kept_parts = SumParts(self._slots, self._kept, numbers)
        self.conversion = SumConversion(self._kept_parts.segments, self.format.exponents, lambda: self._expected)
        """What the sums over groups become."""
        self._finalizers = [
            self.format.peaks.finalizer(torch.tensor(self._gradients_of(number), dtype=torch.int64).view(-1, 4))
            for number in numbers
        ]
        """Of each buffer what makes gradients of its sums."""
        self._scattered = [
            self._scattered_of(number) if self._buffers[number].sum.scattered else None for number in numbers
        ]
        self.begin_step()

    def _add(
        self, buffer: Any, group: dist.ProcessGroup, names: Mapping[torch.nn.Parameter, str], dtype: torch.dtype
    ) -> None:
        mine, end, ends = _Buffer(buffer, group, dtype), 0, list[tuple[int, int]]()
        for parameter, (start, stop, _) in sorted(buffer.param_index_map.items(), key=lambda item: item[1][0]):
            self._numbers[parameter] = len(self._slots)
            last = self._slots[-1] if self._slots else None
            index = last.index + -(-last.size // kernels.BLOCK) * kernels.BLOCK if last else 0
            self._slots.append(Slot(names[parameter], len(self._buffers), start, stop, index))
            ends.append((end, start))
            end = stop
        ends.append((end, mine.gradient.numel()))
        mine.gaps = [slice(*gap) for gap in ends if gap[0] < gap[1]]
        self._buffers.append(mine)

    @property
    def measuring(self) -> bool:
        """Whether the step in flight only measures scales."""
        return self.format.measuring

    @property
    def growth_bits(self) -> int:
        """See :class:`~spare_megatron.exact_sum.formats.Format`."""
        return self.format.growth_bits

    def infinite(self, divisor: float) -> bool:
        """Whether a sum of the step, or it divided by ``divisor``, exceeds fp32. Waits for the device."""
        return self.format.peaks.infinite(divisor)

    @property
    def num_buffers(self) -> int:
        """Number of sums that :meth:`tensors` returns."""
        return len(self._buffers)

    @property
    def state(self) -> dict[str, Any]:
        """All that the next step's scales depend on, by names that no split changes. A run that resumes without it is
        exact too, but rounds differently."""
        common, slots = self.format.state
        sizes = [slot.size for slot in self._slots]
        scales = dict(zip(self._keys, zip(sizes, slots, strict=True), strict=True))
        return {"method": self._method, "common": common, "scales": scales}

    @property
    def scales(self) -> list[kernels.Digestible]:
        """What the exponents of the next step follow from. It must be the same on all groups: no checksum tells of
        integers that were rounded or converted by other scales."""
        reported = [self.format.values, float(self._optimizer.get_loss_scale().item())]
        return [json.dumps(reported).encode(), *self.format.tensors.values()]

    def restore(self, state: Any, read_all: Callable[[], list[Any]]) -> None:
        """Go on from a checkpoint's :attr:`state` of this rank position, or where the layout was another one from those
        of all positions, which ``read_all`` reads. Where these lack a tensor, or have another format, no rank does.

        Collective in the group.
        """
        restore_scales([self], state, read_all)

    def scales_in(self, states: Sequence[Any]) -> ScalesState | None:
        """What ``states`` have of this rank's scales; None where they do not have all."""
        ours = [one for one in states if one and one.get("method") == self._method and "scales" in one]
        known = {key: scale for one in ours for key, scale in one["scales"].items()}
        mine = [known.get(key) for key in self._keys]
        fits = all(one is not None and one[0] == slot.size for one, slot in zip(mine, self._slots, strict=True))
        return ScalesState(ours[0]["common"], [one[1] for one in mine if one is not None]) if ours and fits else None

    def begin_step(self) -> None:
        """Forget all pieces, and choose the step's scales from the committed state."""
        for buffer in self._buffers:
            for gap in buffer.gaps:
                buffer.accumulator[gap].zero_()
        self._reports.zero_()
        self._waiting.clear()
        self._empty = set(range(len(self._slots)))
        self.pieces.begin_step()
        self.format.begin_step(math.ceil(math.log2(float(self._optimizer.get_loss_scale().item()))))

    def accumulate(self, parameter: torch.nn.Parameter) -> None:
        """Add the gradient that a backward pass left in ``parameter.grad``."""
        number = self._numbers[parameter]
        gradient = parameter.grad
        assert gradient is not None, f"{self._slots[number].name} has no gradient to add"
        gradient = gradient.contiguous()
        if self._flips is not None and self._flips("gradient", self._n):
            flip_bit(gradient.view(-1))
        waiting = self._waiting.get(number)
        if not self._ends_piece:
            self._waiting[number] = gradient if waiting is None else waiting.float().add_(gradient)
        elif waiting is None and self._pairs and not self._ends_run and self.pieces.unwatched:
            self._waiting[number] = gradient
        else:
            self._take(number, gradient)

    def _take(self, number: int, gradient: torch.Tensor | None = None) -> None:
        """Add the rounded gradient of a piece to the accumulator, with what waits there; or only that. Of an audited
        piece, with the sum of its earlier microbatches, to the scratch memory."""
        report = self.pieces.report
        if report is not None:
            other = self._waiting.pop(number, None) if self.needs_all else None
            add, first = self.format.adder(number, self._room(self._slots[number].size), report[number]), True
        else:
            other = self._waiting.pop(number, None)
            add, first = self._adders[number], number in self._empty
            self._empty.discard(number)
        if gradient is None:
            gradient, other = other, None
        assert gradient is not None, "nothing waits there"
        add(gradient, other, apart=self._pairs, first=first)

    def _take_waiting(self, chunk: int | None) -> None:
        """Take what waits for a chunk, or for all."""
        for number in self._of(self._waiting, chunk):
            self._take(number)

    def _settle(self, chunk: int | None = None) -> None:
        """Take what waits for a chunk, or for all, and make the accumulators that no piece reached zero."""
        self._take_waiting(chunk)
        self._make_zero(chunk)

    def _make_zero(self, chunk: int | None) -> None:
        for number in self._of(self._empty, chunk):
            slot = self._slots[number]
            self._buffers[slot.buffer].accumulator[slot.start : slot.stop].zero_()
            self._empty.remove(number)

    def _of(self, slots: Iterable[int], chunk: int | None) -> list[int]:
        return [number for number in slots if chunk in (None, self._chunks[number])]

    def _room(self, size: int) -> torch.Tensor:
        if self._scratch.numel() < size:
            self._scratch = self._scratch.new_zeros(max(slot.size for slot in self._slots))
        return self._scratch[:size]

    def pass_begins(self, chunk: int, ticket: Ticket | None, n: int, *, ends_piece: bool, ends_run: bool) -> None:
        """Note that a backward pass of a microbatch of ``ticket``'s piece, the ``n``-th of a run, begins on ``chunk``;
        audited pieces are added to no accumulator."""
        self._chunk, self._ends_piece, self._ends_run = chunk, ends_piece, ends_run
        if ticket is None:
            return
        self._n = n
        final = ticket.audited and ends_run
        if self._pairs and (final or ticket.compared):
            self._take_waiting(chunk)
        if final:
            self._make_zero(chunk)
        self.pieces.pass_begins(ticket.piece, audited=ticket.audited, compared=ticket.compared)

    def pass_ends(self) -> None:
        """Note that the backward pass is over. Where it ends a piece, take the sums of parameters that it left out, as
        of experts to which its microbatch sent no token."""
        if self._ends_piece and self.needs_all:
            self._take_waiting(self._chunk)
        self.pieces.pass_ends()
        if self._ends_run:
            self._settle(self._chunk)
        self._n, self._ends_piece, self._ends_run = 0, True, False

    def piece_checksums(self, audited: bool) -> dict[int, dict[str, int]]:
        """Piece -> parameter -> checksum of its rounded gradient, for the audited pieces of this step or for the summed
        pieces whose checksums are kept. Waits for the device."""
        pieces = self.pieces
        found = {p: report[:, 0] for p, report in pieces.audited.items()} if audited else pieces.inside
        return {piece: self._by_name(checksums) for piece, checksums in found.items()}

    def _by_name(self, checksums: torch.Tensor) -> dict[str, int]:
        return {slot.name: value for slot, value in zip(self._slots, checksums.tolist(), strict=True)}

    def tensors(self) -> list[torch.Tensor]:
        """The accumulators summed over context and inner data ranks, one tensor for each buffer with the part that this
        rank keeps. Collective in the group."""
        self._settle()
        self._strike()
        if self._buffers:  # else all is frozen here
            self._expected = torch.cat([self._checksums(number) for number in range(len(self._buffers))])
        self._given = tuple(buffer.sum.over_ranks() for buffer in self._buffers)
        return list(self._given)

    def _checksums(self, number: int) -> torch.Tensor:
        """The expected checksums of this rank's part of a buffer's sum over the ranks that share it.

        They are computed from the pieces' checksums where this rank keeps whole parameters, else from the accumulators,
        which are themselves checked before any vote.
        """
        buffer = self._buffers[number]
        slots = [index for index, slot in enumerate(self._slots) if slot.buffer == number]
        scattered = self._scattered[number]
        if scattered is None:
            whole = self._reports[slots[0] : slots[-1] + 1, 0].clone()
            if buffer.sum.group.size() > 1:
                dist.all_reduce(whole, group=buffer.sum.group)
            return whole
        inside, mine = scattered
        sums = inside.checksums([buffer.accumulator])
        dist.all_reduce(sums, group=buffer.sum.group)
        return sums[mine]

    def _scattered_of(self, number: int) -> tuple[SumParts, slice]:
        """The parts, in the accumulator, that the ranks of a buffer's group keep of its sum, and which this rank
        does."""
        group = self._buffers[number].sum.group
        kept = [self._kept_of(number, rank) for rank in range(group.size())]
        inside = [(slot, BufferSlice(part.start, part.stop, part.start)) for of_rank in kept for slot, part in of_rank]
        first = sum(map(len, kept[: group.rank()]))
        return SumParts(self._slots, inside, [number]), slice(first, first + len(kept[group.rank()]))

    def _kept_of(self, number: int, rank: int | None = None) -> list[tuple[int, BufferSlice]]:
        """(slot number, part) of each parameter of a buffer of which ``rank`` of its group (default: this one) keeps a
        part."""
        buffer = self._buffers[number]
        parts = buffer.sum.parts if rank is None else buffer.of_ranks[rank]
        slots = [(index, slot) for index, slot in enumerate(self._slots) if slot.buffer == number]
        cuts = [(index, part.cut(slot.start, slot.stop)) for part in parts for index, slot in slots]
        return [(index, part) for index, part in cuts if part is not None]

    def _gradients_of(self, number: int) -> list[tuple[int, int, int, int]]:
        """Of each part of a buffer's sum that this rank keeps: start and stop in the sum, start in the buffer, and the
        index of the first element."""
        return [
            (part.at, part.at + part.size, part.start, index_of(self._slots[slot], part))
            for slot, part in self._kept_of(number)
        ]

    @property
    def _accumulators(self) -> list[torch.Tensor]:
        return [buffer.accumulator for buffer in self._buffers]

    def leaving(self) -> list[torch.Tensor]:
        """The tensors that :meth:`tensors` will return after a run where no other rank shares buffers."""
        self._strike()
        return self._accumulators

    def _strike(self) -> None:
        if self._slots and self._flips is not None and self._flips("accumulate", 0):
            self._make_zero(self._chunks[0])
            flip_bit(self._buffers[0].accumulator[: self._slots[0].stop])

    def flags(self) -> tuple[bool, bool]:
        """Whether a piece of this rank exceeded the bound, and whether one was not finite."""
        self._settle()
        flags = self._reports[:, 1].tolist()
        return any(flag & kernels.OVERFLOW for flag in flags), any(flag & kernels.NOT_FINITE for flag in flags)

    def flagged(self) -> list[str]:
        """Names of the parameters that have such a flag."""
        return [slot.name for slot, flag in zip(self._slots, self._reports[:, 1].tolist(), strict=True) if flag]

    def accumulators_fault(self, suspected: bool) -> str:
        """Which parameter's accumulator is not the sum of its pieces, or which tensor that :meth:`tensors` returned is
        not the sum over the ranks that share it, according to the checksums; empty where all is right, and where nobody
        has ``suspected`` anything and :meth:`result_fault` would find it as well: it knows what the pieces' checksums
        are, but for scattered sums, whose checksums :meth:`tensors` has computed from the accumulators."""
        if not suspected and not any(buffer.sum.scattered for buffer in self._buffers):
            return ""
        fault = self._whole_parts.fault(self._accumulators, self._reports[:, 0], "accumulator")
        if fault or all(buffer.sum.group.size() == 1 for buffer in self._buffers):
            return fault
        return self._kept_parts.fault(self._given, self._expected, "sum inside the group")

    def result_fault(self, sums: Sequence[torch.Tensor], check_vector: torch.Tensor) -> str:
        """Which parameter's reduced result is not what the pieces of all groups put in according to the
        ``check_vector``; empty where all is right. ``sums`` are what those of :meth:`tensors` have become."""
        if self._slots and self._flips is not None and self._flips("reduce", 0):
            flip_bit(sums[0][: self._kept[0][1].size])
        missing, expected = check_vector.chunk(2)
        fault = self._kept_parts.named(missing, "sum over the groups")
        return fault or self._kept_parts.fault([one.view(torch.int32) for one in sums], expected, "reduced result")

    def finalize(self, sums: Sequence[torch.Tensor], divisor: float, overflows: bool) -> None:
        """After the commit, write ``sums`` / divisor into the fp32 gradients, which may have the accumulators' memory,
        and choose the next step's scales. Gradients of which this rank keeps no part are zero. Collective in the group
        where sums are scattered."""
        for buffer in self._buffers:
            for gap in [slice(None)] if buffer.sum.scattered else buffer.gaps:
                buffer.gradient[gap].zero_()
        for buffer, finalizer, total in zip(self._buffers, self._finalizers, sums, strict=True):
            finalizer.finalize(total, buffer.gradient, divisor)
        if self._head is not None:
            self._add_head(self._numbers[self._head.weight], self._numbers[self._head.parameter])
        for number, buffer in enumerate(self._buffers):
            if buffer.sum.scattered:
                self.format.peaks.agree([slot for slot in self._slots if slot.buffer == number], buffer.sum.group)
        self.format.commit(overflows)

    def _add_head(self, embedding: int, head: int) -> None:
        """Add the gradient of slot ``head`` to that of slot ``embedding``, as megatron-core does between two stages."""
        to, add = self._slots[embedding], self._slots[head]
        for number, part in self._kept:
            if number == embedding:
                start, stop = (add.start + place - to.start for place in (part.start, part.stop))
                kept = self._buffers[to.buffer].gradient[part.start : part.stop]
                kept.add_(self._buffers[add.buffer].gradient[start:stop])

    def _gradient_norm(self, separate: str | None = None) -> float:
        """The norm of the gradients that the optimizer is about to apply, instead of megatron-core's, whose last digits
        depend on the split of the layers; see :func:`norm_gradients`. Collective in the group."""
        parts = self._optimizer.chained_optimizers
        of_parts = [(norm_gradients(part, separate), part.get_grad_stats_parallel_group()) for part in parts]
        return gradient_norm(of_parts, compute_device())

    def spoil(self) -> None:
        """Make the gradients infinite, so that the optimizer's loss scaler skips this step and lowers its scale."""
        for buffer in self._buffers:
            buffer.gradient.fill_(math.inf)


def restore_scales(rows: Sequence[ExactGradients], state: Any, read_all: Callable[[], list[Any]]) -> None:
    """:meth:`ExactGradients.restore` of all rows of a rank."""
    if _go_on(rows, [state]):
        return
    states = [one for one in read_all() if one]
    if not _go_on(rows, states) and any("method" in one for one in states):
        log.warning(
            "the checkpoint has scales of other tensors or of another format, or by position as older versions "
            "saved them: they are found anew"
        )


def _go_on(rows: Sequence[ExactGradients], states: Sequence[Any]) -> bool:
    """Take the scales from ``states`` if each rank of the group finds its own in them."""
    found = [(row, scales) for row in rows if (scales := row.scales_in(states)) is not None]
    all_fit = torch.tensor([int(len(found) == len(rows))], device=compute_device())
    dist.all_reduce(all_fit, op=dist.ReduceOp.MIN)
    if not all_fit.item():
        return False
    for row, scales in found:
        row.format.restore(scales)
    return True


def _key(name: str, parameter: torch.nn.Parameter, world: GroupWorld) -> str:
    """A name for the scale of this rank's part of a parameter: ranks that have other parts have scales of their own."""
    if getattr(parameter, "allreduce", True):
        return f"{name}, tensor rank {world.tensor_rank}"
    return f"{name}, expert rank {world.expert_rank}, tensor rank {world.expert_tensor_rank}"


def _unit_bits(replica: Replica, world: GroupWorld) -> int:
    """log2, rounded up, of how many times larger than a mean loss a piece's loss is; see ``Scales``."""
    shape = world.shape
    tokens = shape.micro_batch_size * replica.settings.seq_length // shape.context
    units = tokens if replica.config.calculate_per_token_loss else 1
    return (shape.piece_microbatches * units - 1).bit_length()


def flip_bit(values: torch.Tensor) -> None:
    """Flip one bit of the middle element, for injected faults."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    bits = values.view(integer)
    bits[bits.numel() // 2] ^= 1 << (8 * values.element_size() - 10)

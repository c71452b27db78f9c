"""Gradients that wait are counted once, whatever passes follow: the sums of random runs against sums of plain integers.

One rank's :class:`ExactGradients` gets passes of random pieces: summed, compared, audited, pads; parameters without a
gradient, and with two in one pass; runs whose last pass is known to be the last, and runs whose last pass is not.
Before each step its memory holds garbage. The seed is in the failure's message.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spare_megatron.config.shape import JobShape
from spare_megatron.megatron_adapter.model.exact import ExactGradients
from spare_megatron.protocol.tickets import Ticket

SIZES = ({"a": 5, "b": 2048, "c": 3}, {"d": 1025, "e": 7})
"""Elements of each chunk's parameters; a gap of one element is behind each."""
STEPS, WALKS = 4, 25


class Alone:
    """A process group of one rank."""

    def size(self) -> int:
        return 1


def replica_of(dtype: torch.dtype) -> Any:
    chunks = []
    for sizes in SIZES:
        module = torch.nn.ParameterDict({name: torch.zeros(size, dtype=dtype) for name, size in sizes.items()})
        places, end = {}, 0
        for parameter in module.values():
            places[parameter] = (end, end + parameter.numel(), 0)
            end += parameter.numel() + 1
        split = SimpleNamespace(use_distributed_optimizer=False)
        buffer = SimpleNamespace(grad_data=torch.zeros(end), param_index_map=places, ddp_config=split)
        groups = {"dp_cp_group": Alone(), "expt_dp_group": Alone()}
        chunks.append(SimpleNamespace(module=module, buffers=[buffer], expert_parallel_buffers=[], **groups))
    return SimpleNamespace(
        chunks=chunks,
        config=SimpleNamespace(calculate_per_token_loss=False),
        settings=SimpleNamespace(seq_length=16),
        head=None,
        row=None,
        optimizer=SimpleNamespace(get_loss_scale=lambda: torch.tensor(1.0)),
    )


class Walk:
    """Random steps of one rank."""

    def __init__(self, method: str, microbatches: int, dtype: torch.dtype, seed: int) -> None:
        self.random, self.dtype, self.microbatches = random.Random(seed), dtype, microbatches
        self.values = torch.Generator().manual_seed(seed)
        self.replica = replica_of(dtype)
        shape = JobShape(1, 1, 16 * microbatches, piece_microbatches=microbatches)
        world: Any = SimpleNamespace(shape=shape, tensor_rank=0)
        self.exact = ExactGradients(self.replica, world, method, None)
        self.slots = {slot.name: number for number, slot in enumerate(self.exact._slots)}
        self.sums: dict[str, torch.Tensor] = {}
        """What the accumulators must have."""
        self.checksums: dict[tuple[str, int], dict[str, int]] = {}
        """What (kind, piece) must have for each parameter."""

    def step(self) -> None:
        for buffer in self.exact._buffers:
            buffer.accumulator.random_(generator=self.values)
        self.exact.begin_step()
        dtype = self.exact.format.dtype
        self.sums = {name: torch.zeros(size, dtype=dtype) for sizes in SIZES for name, size in sizes.items()}
        self.checksums = {}
        numbers = iter(range(100))
        for _ in range(self.random.choice((0, 1, 1, 2, 3))):
            kinds = self.random.choices(("summed", "compared", "audited"), (6, 2, 2), k=self.random.randint(0, 4))
            self.run([(kind, next(numbers)) for kind in kinds], known_end=self.random.random() < 0.6)
            if self.random.random() < 0.5:
                self.given()
        if self.random.random() < 0.8:  # else the step is given up
            self.given()

    def run(self, pieces: list[tuple[str, int]], *, known_end: bool) -> None:
        """Every chunk computes all pieces in their order; chunks take turns at random."""
        order = [(kind, piece, part + 1 == self.microbatches) for kind, piece in pieces for part in self.parts]
        if pieces and self.random.random() < 0.3:
            order.append(("pad", pieces[-1][1], True))
        due = [list(order) for _ in SIZES]
        partials: dict[str, torch.Tensor] = {}
        while any(due):
            chunk = self.random.choice([chunk for chunk, left in enumerate(due) if left])
            kind, piece, ends_piece = due[chunk].pop(0)
            ticket = None if kind == "pad" else Ticket(piece, audited=kind == "audited", compared=kind == "compared")
            ends_run = known_end and not due[chunk]
            self.exact.pass_begins(chunk, ticket, piece, ends_piece=ends_piece, ends_run=ends_run)
            for name, parameter in self.replica.chunks[chunk].module.items():
                for _ in range(self.random.choice((0, 1, 1, 1, 1, 2 if self.microbatches == 1 else 1))):
                    gradient = torch.randn(parameter.shape, generator=self.values) * (0.0 if kind == "pad" else 0.1)
                    parameter.grad = gradient.to(self.dtype)
                    partial = partials.pop(name, torch.zeros(())) + parameter.grad.float()
                    if ends_piece:
                        self.count(name, partial, kind, piece)
                    else:
                        partials[name] = partial
                    self.exact.accumulate(parameter)
                    parameter.grad = None
                    if ends_run:
                        self.compare([name], "as soon as its last gradient has come")
            for name in list(SIZES[chunk]) if ends_piece else ():
                if name in partials:
                    self.count(name, partials.pop(name), kind, piece)
            self.exact.pass_ends()
            if ends_run:
                self.compare(SIZES[chunk], "when its chunk's last pass is over")

    @property
    def parts(self) -> range:
        return range(self.microbatches)

    def count(self, name: str, gradient: torch.Tensor, kind: str, piece: int) -> None:
        """Expect the rounded ``gradient``."""
        total, report = torch.zeros_like(self.sums[name]), torch.zeros(2, dtype=torch.int64)
        self.exact.format.adder(self.slots[name], total, report)(gradient, None, apart=False, first=False)
        if kind != "audited":
            self.sums[name] += total
        of_piece = self.checksums.setdefault((kind, piece), {})
        of_piece[name] = of_piece.get(name, 0) + int(report[0])

    def compare(self, names: Any, when: str) -> None:
        for name in names:
            slot = self.exact._slots[self.slots[name]]
            found = self.exact._buffers[slot.buffer].accumulator[slot.start : slot.stop]
            assert torch.equal(found, self.sums[name]), f"parameter {name} {when}"

    def given(self) -> None:
        assert self.exact.flags() == (False, False)
        for buffer, given in zip(self.exact._buffers, self.exact.tensors(), strict=True):
            assert given is buffer.accumulator
            assert not any(given[gap].any() for gap in buffer.gaps), "gaps are not zero"
        self.compare(self.sums, "when the sums are given")
        assert self.exact.accumulators_fault(suspected=True) == ""
        for audited, kind in ((True, "audited"), (False, "compared")):
            found = self.exact.piece_checksums(audited)
            for piece in [piece for which, piece in self.checksums if which == kind]:
                expected = self.checksums[kind, piece]
                assert {name: (value - expected.get(name, 0)) % 2**64 for name, value in found[piece].items()} == (
                    dict.fromkeys(self.slots, 0)
                ), f"checksums of {kind} piece {piece}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("method", "microbatches"), [("exact", 1), ("exact", 2), ("exact", 3), ("exact32", 1)])
def test_random_runs(method: str, microbatches: int, dtype: torch.dtype) -> None:
    for seed in range(WALKS):
        walk = Walk(method, microbatches, dtype, seed)
        for step in range(STEPS):
            try:
                walk.step()
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, step {step}: {error}") from error

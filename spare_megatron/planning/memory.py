"""Computes the memory of one GPU by part and reduction mode, from a table that plans and documents print.

This framework keeps a step's local accumulator until the commit, beside the reduced result, so that a loss during the
reduction costs no gradient. After the commit the accumulator's memory holds the fp32 main gradient. Inside a group
D x CP ranks hold the same parameters (inner data and context parallel). The distributed optimizer is assumed: the sum
over these ranks, the reduced result and the optimizer's state are divided over them. Plain Megatron divides the
optimizer over all such ranks of the job, so a model that fits there may need D > 1 here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from spare_megatron.config.errors import ConfigError

GIB = float(2**30)
WEIGHT_BYTES = 2.0
"""bf16 weights."""
MAIN_BYTES = 4.0
"""fp32 weights, the main ones where the model's are half as long."""
OPTIMIZER_BYTES = 3 * MAIN_BYTES
"""fp32 master weights and Adam's two moments."""
PLAIN_GRADIENT_BYTES = 4.0
"""fp32 main gradient of plain Megatron."""
PIECE_BYTES = 4.0
"""fp32 sum of a piece of several microbatches, where sums over pieces are exact."""
PAIR_BYTES = 2.0
"""bf16 gradient of a piece of one microbatch, which waits for the next piece's."""


@dataclass(frozen=True)
class GradientBytes:
    """Bytes per parameter of one reduction mode."""

    accumulator: float
    """The sum of a step's pieces, whose memory holds the fp32 main gradient after the commit.
    The sum over the ranks of a group that hold the same parameters has the same dtype
    (megatron_adapter/model/group_sum.py)."""
    result: float
    """The sum over groups, which has memory of its own."""
    wire: float
    """Bytes per parameter that travel: a ring sends 2 (N - 1) / N times as many. The mean of a sum's and a result's."""
    pair: float = 0.0
    piece: float = 0.0
    """What waits to be added to the accumulator: with pieces of one microbatch, and with larger ones."""

    def accumulators(self, piece_microbatches: int = 1) -> float:
        """What one rank keeps during a step, with pieces of so many microbatches."""
        return self.accumulator + (self.piece if piece_microbatches > 1 else self.pair)


GRADIENT_BYTES = {
    "exact": GradientBytes(8.0, 4.0, 6.0, PAIR_BYTES, PIECE_BYTES),
    "exact32": GradientBytes(4.0, 4.0, 4.0, piece=PIECE_BYTES),
    "fp32": GradientBytes(4.0, 4.0, 4.0),
    "bf16": GradientBytes(4.0, 2.0, 2.0),
}
"""Value of ``--spare-reduce`` -> bytes. exact32 has 16 bytes more for each 1024 parameters (scales and peaks of
blocks)."""


@dataclass(frozen=True)
class RankParameters:
    """Parameters of one rank whose optimizer state is divided over the same number of ranks."""

    parameters: float
    sharing: int = 1
    """How many ranks of the group divide optimizer state and results of these parameters."""
    split: bool = False
    """The optimizer is a distributed one, also where it divides these parameters over one rank only."""

    def state_bytes(self, half: bool, moments: float) -> float:
        """The state that travels. Where the model's weights are ``half`` as long and their fp32 copy is whole on this
        rank, they are rounded from it and do not travel. ``moments``: fp32 values of the optimizer per parameter."""
        if half and self.split:
            return (WEIGHT_BYTES + MAIN_BYTES * (1 + moments) / self.sharing) * self.parameters
        return MAIN_BYTES * (1 + moments / self.sharing) * self.parameters

    def result_bytes(self, mode: str) -> float:
        """The sum over groups of one step, in reduction mode ``mode``."""
        return GRADIENT_BYTES[mode].result / self.sharing * self.parameters


def rank_bytes(
    parts: Iterable[RankParameters],
    mode: str,
    piece_microbatches: int = 1,
    *,
    weight: float = WEIGHT_BYTES,
    optimizer: float = OPTIMIZER_BYTES,
    state_copies: int = 1,
    groups: int = 1,
) -> dict[str, float]:
    """Item -> bytes of one rank that keeps these parameters.

    Args:
        parts: its parameters, by the ranks that divide their optimizer state.
        mode: of the reduction.
        piece_microbatches: C.
        weight: bytes of a weight.
        optimizer: bytes of the whole optimizer state of a parameter.
        state_copies: r_s, so many of the ``groups`` keep each state shard. Where it is not all of them weights are
            gathered, and a group that has taken a copy over keeps a shard more while the lost one is missing.
    """
    widths = GRADIENT_BYTES[mode]
    names = ("weights", "accumulator", "group_sum", "reduced_result", "optimizer")
    items = dict.fromkeys(names, 0.0)
    whole = gathered = 0.0
    for part in parts:
        items["weights"] += weight * part.parameters
        items["accumulator"] += widths.accumulators(piece_microbatches) * part.parameters
        items["group_sum"] += widths.accumulator * part.parameters / part.sharing if part.sharing > 1 else 0.0
        items["reduced_result"] += part.result_bytes(mode)
        whole += optimizer * part.parameters / part.sharing
        gathered += weight * part.parameters / part.sharing
    items["optimizer"] = whole * state_copies / groups
    if state_copies < groups:
        items["copy_taken_over"] = whole / groups
        items["gathered_weights"] = gathered
    return items


@dataclass(frozen=True)
class Memory:
    """Memory of a GPU in GiB, by part; ``plain`` is that of the same job under plain Megatron with its distributed
    optimizer."""

    parts: dict[str, float]
    plain: dict[str, float]

    @property
    def total(self) -> float:
        """GiB of all parts, in this framework."""
        return sum(self.parts.values())

    def as_json(self) -> dict[str, object]:
        """The parts and totals of both, in GiB, rounded to a MiB."""
        ours = {name: round(value, 3) for name, value in self.parts.items()}
        plain = {name: round(value, 3) for name, value in self.plain.items()}
        plain["total"] = round(sum(self.plain.values()), 3)
        return {**ours, "total": round(self.total, 3), "plain_megatron": plain}


@dataclass(frozen=True)
class Shape:
    """The GPUs of a job, and the parallel degrees of a group of M: M = tensor x pipeline x context x D."""

    gpus: int
    group_size: int
    inner_data: int = 1
    """D, the inner data-parallel degree."""
    context: int = 1
    """CP, the context-parallel degree."""

    @property
    def sharing(self) -> int:
        """Number of ranks of a group that hold the same parameters, D x CP."""
        return self.inner_data * self.context

    @property
    def num_groups(self) -> int:
        """N: number of groups."""
        return self.gpus // self.group_size

    def check(self) -> None:
        """ConfigError when the size of a group is not divisible by D x CP."""
        if self.group_size % self.sharing == 0:
            return
        factors = f"--inner-data-parallel {self.inner_data}"
        if self.context > 1:
            factors += f" times --context-parallel-size {self.context}"
        near = next(each for each in range(min(self.sharing, self.group_size), 0, -1) if self.group_size % each == 0)
        raise ConfigError(
            f"--gpus-per-group {self.group_size} is not divisible by {factors}; use a divisor of it, such as {near}"
        )


def memory(
    parameters: float,
    shape: Shape,
    mode: str,
    activations_gib: float = 0.0,
    piece_microbatches: int = 1,
    *,
    state_copies: int | None = None,
) -> Memory:
    """The memory of one GPU for a model of ``parameters`` parameters in reduction mode ``mode``.

    Tensor and pipeline parallelism divide the weights; ``activations_gib`` is added as it is. ``state_copies``: groups
    that keep each part of the optimizer's state; None: all.
    """
    here, sharing = parameters * shape.sharing / shape.group_size / GIB, shape.sharing
    items = rank_bytes(
        [RankParameters(here, sharing)],
        mode,
        piece_microbatches,
        state_copies=state_copies or shape.num_groups,
        groups=shape.num_groups,
    )
    parts = {**items, "activations": activations_gib}
    plain = {
        "weights": WEIGHT_BYTES * here,
        "gradients": PLAIN_GRADIENT_BYTES * here,
        "optimizer": OPTIMIZER_BYTES * here / (sharing * shape.num_groups),
        "activations": activations_gib,
    }
    return Memory(parts, plain)


def fitting(
    parameters: float,
    shape: Shape,
    mode: str,
    gpu_memory_gib: float | None,
    activations_gib: float = 0.0,
    piece_microbatches: int = 1,
    *,
    state_copies: int | None = None,
) -> Memory:
    """The memory of this shape; ConfigError when a GPU has less, naming the D and the group size that would fit."""
    shape.check()
    needed = memory(parameters, shape, mode, activations_gib, piece_microbatches, state_copies=state_copies)
    if gpu_memory_gib is None or needed.total <= gpu_memory_gib:
        return needed
    small = memory(parameters, shape, mode, activations_gib, state_copies=state_copies)
    if piece_microbatches > 1 and small.total <= gpu_memory_gib:
        raise ConfigError(
            f"{parameters:.4g} parameters with --reduce {mode} and pieces of {piece_microbatches} microbatches need "
            f"{needed.total:.1f} GiB per GPU, more than --gpu-memory-gib {gpu_memory_gib:g}; use --piece-microbatches "
            "1, which keeps no fp32 sum of a piece"
        )
    replica = shape.group_size // shape.inner_data
    fact = (
        f"{parameters:.4g} parameters on {replica} GPUs per replica with --inner-data-parallel {shape.inner_data} and "
        f"--reduce {mode} need {needed.total:.1f} GiB per GPU, more than --gpu-memory-gib {gpu_memory_gib:g}"
    )
    for degree in range(shape.inner_data + 1, shape.gpus // replica // 2 + 1):
        if shape.gpus % (replica * degree):
            continue
        wider = replace(shape, group_size=replica * degree, inner_data=degree)
        copies = None if state_copies is None else min(state_copies, wider.num_groups)
        there = memory(parameters, wider, mode, activations_gib, piece_microbatches, state_copies=copies)
        if there.total <= gpu_memory_gib:
            raise ConfigError(
                f"{fact}; use --inner-data-parallel {degree} with --gpus-per-group {wider.group_size} "
                f"({wider.num_groups} groups, {there.total:.1f} GiB)"
            )
    lasting = (WEIGHT_BYTES + GRADIENT_BYTES[mode].accumulators(piece_microbatches)) * parameters * shape.context / GIB
    room = gpu_memory_gib - activations_gib
    raise ConfigError(
        f"{fact}, and no inner data-parallel degree that leaves two groups makes it fit; use "
        + (
            f"more than {lasting / room:.0f} GPUs per replica (tensor or pipeline parallel)"
            if room > 0
            else "larger GPUs"
        )
    )


def table() -> str:
    """The bytes per parameter of every mode as a Markdown table, which the documents show."""
    lines = ["| bytes per parameter | " + " | ".join(GRADIENT_BYTES) + " | plain Megatron |"]
    lines.append("|---" * (len(GRADIENT_BYTES) + 2) + "|")
    modes = GRADIENT_BYTES.values()
    rows = (
        ("accumulator, later the fp32 main gradient", [f"{one.accumulator:g}" for one in modes], "4"),
        ("gradient that waits to be added, C = 1", [f"{one.pair:g}" if one.pair else "-" for one in modes], "-"),
        ("fp32 sum that waits to be added, C > 1", [f"{one.piece:g}" if one.piece else "-" for one in modes], "-"),
        ("sum over these D, where D > 1", [f"{one.accumulator:g} / D" for one in modes], "-"),
        ("reduced result", [f"{one.result:g} / D" for one in modes], "-"),
        ("on the wire at most, times 2 (N - 1) / N", [f"{one.wire:g}" for one in modes], "4"),
        ("weights", [f"{WEIGHT_BYTES:g}"] * len(modes), f"{WEIGHT_BYTES:g}"),
        ("optimizer", [f"{OPTIMIZER_BYTES:g} / D"] * len(modes), f"{OPTIMIZER_BYTES:g} / (N D)"),
    )
    lines += [f"| {name} | " + " | ".join([*values, last]) + " |" for name, values, last in rows]
    return "\n".join(lines)

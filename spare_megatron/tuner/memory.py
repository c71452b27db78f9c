"""Bytes per parameter on one GPU, by part and by reduction mode: the one table that plans and documents print.

Ours keeps the step's local accumulator until the commit, beside the reduced result, so that a loss inside the
reduction costs no gradient. The accumulator's storage doubles as the fp32 main gradient after the commit. Inside a
group the optimizer and the reduced result are divided over its D data-parallel ranks; plain Megatron divides the
optimizer over all data-parallel ranks of the job, which is why what fits there may need D > 1 here.
"""

from __future__ import annotations

from dataclasses import dataclass

from spare_megatron.config.errors import ConfigError

GIB = float(2**30)
WEIGHT_BYTES = 2.0
"""bf16 weights."""
OPTIMIZER_BYTES = 12.0
"""fp32 master weights and Adam's two moments."""
PLAIN_GRADIENT_BYTES = 4.0
"""fp32 main gradient of plain Megatron."""


@dataclass(frozen=True)
class GradientBytes:
    """Bytes per parameter of one reduction mode."""

    accumulator: float
    """A step's sum of pieces; its memory becomes the fp32 main gradient after the commit."""
    result: float
    """The sum over groups, out of place."""
    wire: float
    """Sent by a group for each parameter and reduction, times 2 (N - 1) / N of a ring."""


GRADIENT_BYTES = {
    "exact": GradientBytes(8.0, 8.0, 8.0),
    "exact32": GradientBytes(4.0, 4.0, 4.0),
    "fp32": GradientBytes(4.0, 4.0, 4.0),
    "bf16": GradientBytes(4.0, 2.0, 2.0),
}
"""By the names of ``--spare-reduce``. exact32 has 16 bytes more for each 1024 parameters (scales and sizes of blocks);
where a group has D x CP > 1 ranks that share parameters, their sum takes another accumulator."""


@dataclass(frozen=True)
class Memory:
    """What a GPU holds, in GiB, by part; ``plain`` is the same job under plain Megatron with its sharded optimizer."""

    parts: dict[str, float]
    plain: dict[str, float]

    @property
    def total(self) -> float:
        """Ours."""
        return sum(self.parts.values())

    def as_json(self) -> dict[str, object]:
        """Parts, totals and plain Megatron's, rounded to a MiB."""
        ours = {name: round(value, 3) for name, value in self.parts.items()}
        plain = {name: round(value, 3) for name, value in self.plain.items()}
        plain["total"] = round(sum(self.plain.values()), 3)
        return {**ours, "total": round(self.total, 3), "plain_megatron": plain}


def memory(
    parameters: float, group_size: int, num_groups: int, inner_data: int, mode: str, activations_gib: float = 0.0
) -> Memory:
    """Of one GPU of a group of M = ``group_size`` GPUs, D = ``inner_data`` of which are data-parallel (D divides M)."""
    here = parameters / (group_size // inner_data) / GIB
    parts = {
        "weights": WEIGHT_BYTES * here,
        "accumulator": GRADIENT_BYTES[mode].accumulator * here,
        "reduced_result": GRADIENT_BYTES[mode].result * here / inner_data,
        "optimizer": OPTIMIZER_BYTES * here / inner_data,
        "activations": activations_gib,
    }
    plain = {
        "weights": WEIGHT_BYTES * here,
        "gradients": PLAIN_GRADIENT_BYTES * here,
        "optimizer": OPTIMIZER_BYTES * here / (inner_data * num_groups),
        "activations": activations_gib,
    }
    return Memory(parts, plain)


def fitting(
    parameters: float,
    gpus: int,
    group_size: int,
    inner_data: int,
    mode: str,
    gpu_memory_gib: float | None,
    activations_gib: float = 0.0,
) -> Memory:
    """The memory of this shape; ConfigError when a GPU has less, naming the D and the group size that would fit."""
    if group_size % inner_data:
        raise ConfigError(
            f"--gpus-per-group {group_size} is not divisible by --inner-data-parallel {inner_data}; use "
            f"--gpus-per-group {max(1, group_size // inner_data) * inner_data}"
        )
    needed = memory(parameters, group_size, gpus // group_size, inner_data, mode, activations_gib)
    if gpu_memory_gib is None or needed.total <= gpu_memory_gib:
        return needed
    replica = group_size // inner_data
    fact = (
        f"{parameters:.4g} parameters on {replica} GPUs per replica with --inner-data-parallel {inner_data} and "
        f"--reduce {mode} need {needed.total:.1f} GiB per GPU, more than --gpu-memory-gib {gpu_memory_gib:g}"
    )
    for wider in range(inner_data + 1, gpus // replica // 2 + 1):
        if gpus % (replica * wider):
            continue
        there = memory(parameters, replica * wider, gpus // (replica * wider), wider, mode, activations_gib)
        if there.total <= gpu_memory_gib:
            raise ConfigError(
                f"{fact}; use --inner-data-parallel {wider} with --gpus-per-group {replica * wider} "
                f"({gpus // (replica * wider)} groups, {there.total:.1f} GiB)"
            )
    lasting = (WEIGHT_BYTES + GRADIENT_BYTES[mode].accumulator) * parameters / GIB
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
    """The bytes per parameter of every mode in Markdown: what the documents show."""
    lines = ["| bytes per parameter | " + " | ".join(GRADIENT_BYTES) + " | plain Megatron |"]
    lines.append("|---" * (len(GRADIENT_BYTES) + 2) + "|")
    modes = GRADIENT_BYTES.values()
    rows = (
        ("accumulator, later the fp32 main gradient", [f"{one.accumulator:g}" for one in modes], "4"),
        ("reduced result", [f"{one.result:g} / D" for one in modes], "-"),
        ("on the wire, times 2 (N - 1) / N", [f"{one.wire:g}" for one in modes], "4"),
        ("weights", [f"{WEIGHT_BYTES:g}"] * len(modes), f"{WEIGHT_BYTES:g}"),
        ("optimizer", [f"{OPTIMIZER_BYTES:g} / D"] * len(modes), f"{OPTIMIZER_BYTES:g} / (N D)"),
    )
    lines += [f"| {name} | " + " | ".join([*values, last]) + " |" for name, values, last in rows]
    return "\n".join(lines)

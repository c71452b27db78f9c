"""A roofline of what sums of gradients cost on a GPU: bytes and time per parameter and microbatch, beside the GEMMs.

Everything is per parameter that a rank holds, so tensor and pipeline parallelism cancel. A *piece* of C microbatches is
summed in fp32; its sum is rounded and added to an integer accumulator of a = 8 bytes (``exact``) or 4 (``exact32``).
g: bytes of an element of a microbatch's gradient, 2 (bf16) or 4 (fp32). How a gradient gets into the sum (``way``):

``separate``
    The weight-gradient GEMM writes g bytes, a kernel of its own adds them: what this code does. In fp32 it reads g + 4
    and writes 4. ``exact``, C = 1: a gradient waits for that of the next piece; for the two the kernel reads 2 g + a
    and writes a. ``exact32``, C = 1: it reads g + a, writes a. C > 1: the first gradient waits where it is, the next
    ones are added to it, which reads g + 4 and writes 4 (from bf16 it is first made fp32, which reads g and writes 4),
    the last one reads g and what waits (g for C = 2, else 4) and a, and writes a.
``fused``
    The GEMM itself adds to an fp32 buffer (megatron-core's gradient_accumulation_fusion: reads 4, writes 4). Exact:
    once per piece a sweep reads 4 + a, writes a and zeroes the 4: (8 + 2 a) / C.
``epilogue``
    A GEMM, not written, whose epilogue rounds what is in registers: the last one of a piece reads and writes a.

Bytes of the GEMM pass while it computes, if it has tokens enough; those of separate kernels do not. Kernels never reach
the published bandwidth, so their times are lower bounds.

Sources. Memory bandwidth and dense bf16 FLOP/s: NVIDIA's data sheets of H100 SXM (3.35 TB/s) and H200 SXM (4.8 TB/s),
both 1,979 TFLOP/s with sparsity and half without, and of HGX B200 (8 TB/s, 2.25 PFLOP/s). Network: one ConnectX-7 of
400 Gb/s for each GPU (DGX H100, H200, B200). 6 FLOP per parameter and token: arXiv 2001.08361, section 2.1.
``UTILISATION``: 38 to 43% on up to 16,384 H100 (Llama 3 405B, arXiv 2407.21783, section 3.3.2).
Nothing here was measured on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

FLOPS_PER_TOKEN = 6.0
"""Forward and backward pass, per parameter."""
UTILISATION = 0.4
"""Share of the dense bf16 FLOP/s that a step reaches."""
TOKENS = 4096
"""Tokens of a microbatch that a rank's parameters see, unless given otherwise. An expert sees its share of them."""
ACCUMULATOR_BYTES = {"exact": 8, "exact32": 4}
"""Value of ``--spare-reduce`` -> a. ``exact32`` has 16 bytes more for each 1024 parameters."""
RESULT_BYTES = {"plain": 4, "fp32": 4, "bf16": 2, "exact": 4, "exact32": 4}
"""Bytes of the sum over groups; exact ones are converted to fp32 where they are complete. plain: megatron-core's."""
WAYS = ("separate", "fused", "epilogue")
CPU_SHARES = {"exact": 0.003, "exact32": 0.01}
"""On a CPU, measured: what exact sums add to the CPU time of a microbatch of ``CPU_TOKENS`` tokens at C = 1, over it.
``exact``: lines "add pieces" and "zero" of benchmarks/step_lines.py; ``exact32``: a whole step (step_modes.json)."""
CPU_TOKENS = 256


@dataclass(frozen=True)
class Gpu:
    """Published figures of a GPU."""

    name: str
    memory_bytes_per_s: float
    flops: float
    """Dense bf16 operations per second."""
    network_bytes_per_s: float = 50e9


GPUS = {
    "h100": Gpu("H100", 3.35e12, 989.5e12),
    "h200": Gpu("H200", 4.8e12, 989.5e12),
    "b200": Gpu("B200", 8.0e12, 2250e12),
}


@dataclass(frozen=True)
class MovedBytes:
    """Bytes per parameter and microbatch."""

    gemm: float
    """Written and read by the weight-gradient GEMM, beside its inputs."""
    kernels: float
    """Read and written by kernels that do nothing else."""


def traffic(mode: str, microbatches: int, gradient_bytes: int, way: str) -> MovedBytes:
    """The traffic of a mode ('plain' or a value of ``--spare-reduce``) with pieces of C = ``microbatches``, per
    microbatch; where sums are not exact C has no effect."""
    assert way in WAYS, way
    a, c = ACCUMULATOR_BYTES.get(mode), microbatches
    if way == "separate":
        return MovedBytes(gradient_bytes, _separate(mode, c, gradient_bytes))
    if a is None:
        return MovedBytes(8, 0)
    if way == "fused":
        return MovedBytes(8, (8 + 2 * a) / c)
    # The first GEMM of a piece writes 4, the last reads 4 where there was one before.
    return MovedBytes(8 + (2 * a - 8) / c, 0)


def _separate(mode: str, c: int, g: int) -> float:
    """Bytes of the kernels, per microbatch."""
    a = ACCUMULATOR_BYTES.get(mode)
    if a is None:
        return g + 8
    if c == 1 and mode == "exact32":
        return g + 2 * a
    if c <= 2:  # one pass for two gradients: of two pieces, or of one
        return g + a
    widened = g + 4 if g < 4 else 0
    return (widened + (c - 2) * (g + 8) + g + 4 + 2 * a) / c


def compute_s(gpu: Gpu, tokens: float = TOKENS, utilisation: float = UTILISATION) -> float:
    """Seconds of computing per parameter and microbatch of ``tokens`` tokens."""
    return FLOPS_PER_TOKEN * tokens / (gpu.flops * utilisation)


def kernels_s(gpu: Gpu, moved: MovedBytes) -> float:
    """Seconds of the kernels beside the GEMM, per parameter and microbatch, at the published bandwidth."""
    return moved.kernels / gpu.memory_bytes_per_s


def exact_share(
    device: str,
    mode: str,
    microbatches: int,
    tokens: float = TOKENS,
    way: str = "separate",
    utilisation: float = UTILISATION,
) -> float:
    """What exact sums add to the time of a microbatch, with pieces of C = ``microbatches``, over its computing.

    ``device``: 'cpu' (as measured; with fewer tokens not more, as other costs do not shrink either) or one of ``GPUS``,
    with bf16 gradients. 0 where sums are not exact. On a CPU inverse to C. On a GPU single microbatches cost nothing in
    way 'separate'; in way 'fused' gradients are added as in 'separate' where that is cheaper."""
    if mode not in ACCUMULATOR_BYTES:
        return 0.0
    if device == "cpu":
        return CPU_SHARES[mode] * min(1.0, CPU_TOKENS / tokens) / microbatches
    gpu = GPUS[device]
    here = kernels_s(gpu, traffic(mode, microbatches, 2, way)) - kernels_s(gpu, traffic("fp32", 1, 2, way))
    if way == "fused":
        here = min(here, kernels_s(gpu, traffic(mode, microbatches, 2, "separate")))
    return here / compute_s(gpu, tokens, utilisation)


def device_of(gpu_name: str | None) -> str:
    """The device of :func:`exact_share` for a GPU of this name ('NVIDIA H100 80GB HBM3'), 'h100' for one that is not
    known; 'cpu' without a GPU."""
    if gpu_name is None:
        return "cpu"
    return next((device for device in GPUS if device in gpu_name.lower()), "h100")


def shard_s(device: str, step_flops: float, num_groups: int, group_size: int) -> float | None:
    """Seconds in which a group of ``group_size`` GPUs computes one of the N shards of a step of ``step_flops``
    operations; None on a CPU, which is not modelled."""
    if device == "cpu":
        return None
    return step_flops / (num_groups * group_size * GPUS[device].flops * UTILISATION)


def per_step(mode: str) -> dict[str, float]:
    """Bytes per parameter that are moved once in a step, by part (D = 1; the wire is not among them, nor the conversion
    of exact sums, of which each rank does one in N)."""
    a = ACCUMULATOR_BYTES.get(mode)
    copied = 4 + RESULT_BYTES[mode] if a is None else 2 * a
    return {
        "zero the sums": 4 if a is None else 0,
        "checksums of the result": 0 if a is None else RESULT_BYTES[mode],
        "copies for the reduction": 0 if mode == "plain" else copied,
        "finalize": 0 if mode == "plain" else RESULT_BYTES[mode] + 4,
        # exact: a pass for the largest element and one for the squares
        "norm": 4 if a is None else 8,
        # Adam reads the gradient, master weight and two moments, writes the last three, and the bf16 weight.
        "optimizer": 16 + 12 + 2,
        "digest of the weights": 0 if a is None else 2,
    }

"""The tables of docs/exact_reduction.md's roofline, as Markdown."""

from __future__ import annotations

from collections.abc import Iterable

from spare_megatron.planning import reduction_cost as cost

WEIGHT_GRADIENT_FLOPS = 2.0
"""Operations per parameter and token in weight-gradient GEMMs, of the ``FLOPS_PER_TOKEN`` of a step."""
WIRE_BYTES = {"plain": 4, "fp32": 4, "bf16": 2, "exact": 6, "exact32": 4}
"""Bytes that travel, twice: as sums until they are complete, then as results. Their mean."""
SHOWN = (
    *(("plain", 1, way) for way in ("separate", "fused")),
    *(("exact", c, "separate") for c in (1, 2, 4, 8)),
    *(("exact32", c, "separate") for c in (1, 4)),
    *(("exact", c, "fused") for c in (2, 4, 8)),
    ("exact32", 4, "fused"),
    ("exact", 1, "epilogue"),
    ("exact32", 1, "epilogue"),
)
"""(mode, C, way) of the table's rows."""


def traffic_table() -> str:
    """Per parameter and microbatch, with gradients of 2 / 4 bytes: bytes, picoseconds, and their share of the computing
    of ``TOKENS`` tokens, as Markdown."""
    lines = [
        "| sums, C | way | bytes of the GEMM | of kernels | "
        + " | ".join(gpu.name for gpu in cost.GPUS.values())
        + " |",
        "|---" * (4 + len(cost.GPUS)) + "|",
    ]
    for mode, c, way in SHOWN:
        both = [cost.traffic(mode, c, gradient_bytes, way) for gradient_bytes in (2, 4)]
        name = "fp32, bf16, plain" if mode == "plain" else f"{mode}, {c}"
        cells = [_pair(f"{moved.gemm:g}" for moved in both), _pair(f"{moved.kernels:g}" for moved in both)]
        for gpu in cost.GPUS.values():
            times = [cost.kernels_s(gpu, moved) for moved in both]
            shares = _pair(f"{100 * time / cost.compute_s(gpu):.1f}" for time in times)
            cells.append(f"{_pair(f'{time * 1e12:.1f}' for time in times)} ps, {shares}%")
        lines.append(_row(f"{name} | {way}", cells))
    return "\n".join(lines)


def _pair(values: Iterable[str]) -> str:
    """'2 / 4'; only '2' where both are the same."""
    return " / ".join(dict.fromkeys(values))


def step_table() -> str:
    """Bytes that are moved once in a step, and their picoseconds, as Markdown."""
    modes = ("plain", "fp32", "bf16", "exact", "exact32")
    lines = ["| bytes per parameter and step | " + " | ".join(modes) + " |", "|---" * (1 + len(modes)) + "|"]
    parts = {mode: cost.per_step(mode) for mode in modes}
    lines += [_row(part, (f"{parts[mode][part]:g}" for mode in modes)) for part in parts["plain"]]
    totals = {mode: sum(parts[mode].values()) for mode in modes}
    lines.append(_row("together", (f"{total:g}" for total in totals.values())))
    for gpu in cost.GPUS.values():
        times = (f"{total / gpu.memory_bytes_per_s * 1e12:.0f} ps" for total in totals.values())
        lines.append(_row(f"on {gpu.name}", times))
    wires = (f"{wire_s(WIRE_BYTES[mode], 1000) * 1e12:.0f} ps" for mode in modes)
    lines.append(_row("400 Gb/s, N = 1000", wires))
    return "\n".join(lines)


def _row(name: str, cells: Iterable[str]) -> str:
    return f"| {name} | " + " | ".join(cells) + " |"


def hidden_tokens(gpu: cost.Gpu, gemm_bytes: float) -> float:
    """From so many tokens on, a weight-gradient GEMM at full speed computes for longer than it moves these bytes."""
    return gemm_bytes / gpu.memory_bytes_per_s * gpu.flops / WEIGHT_GRADIENT_FLOPS


def wire_s(wire_bytes: float, num_groups: int, bytes_per_s: float = 50e9) -> float:
    """Seconds per parameter of a ring all-reduce over N groups: each rank sends 2 (N - 1) / N times the bytes."""
    return 2 * (num_groups - 1) / num_groups * wire_bytes / bytes_per_s

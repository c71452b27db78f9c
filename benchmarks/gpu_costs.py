"""What sums over groups cost on GPUs, for four models: bytes, launches, exchange and memory by item, as Markdown.

    python benchmarks/gpu_costs.py [--measured]

Arithmetic from published figures of an H100 (spare_megatron/planning/reduction_cost.py has them with their sources);
the tables of docs/gpu_costs.md are this output. With --measured the kernels' bytes are those that the emulator counts.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from spare_megatron.collectives.buckets import NCCL_BUCKET_BYTES, SHARED
from spare_megatron.planning.memory import GIB, GRADIENT_BYTES, Shape, memory
from spare_megatron.planning.reduction_cost import GPUS, compute_s, kernels_s, per_step, traffic

H100 = GPUS["h100"]
GROUPS = 8
MICROBATCHES = (8, 32)
CALL_S = 0.4e-3
"""From the call of a collective to the first byte, by assumption."""
POLL_S = 0.2e-3
MIB = 1 << 20
BUCKETS = (16 * MIB, 64 * MIB, 256 * MIB)
SUM_BYTES, RESULT_BYTES = 8, 4
KERNELS = ("accumulate, one gradient", "accumulate, two gradients", "convert", "checksums", "finalize", "digest")
COUNTED = (18.0, 20.0, 12.0, 4.0, 8.0, 2.0)
"""Bytes an element: bf16 gradients, int64 sums, fp32 results, bf16 weights."""


LAUNCHED = {"checksums": 113, "convert": 68, "finalize": 78, "digests": 146, "largest": 146, "squares": 113}
"""Function -> how many segments or parts one launch takes: those for which its argument of 4 KiB has room."""


@dataclass(frozen=True)
class Model:
    """A model on groups of GPUs."""

    name: str
    parameters: float
    shape: str
    group_size: int
    held: float
    """Parameters of the fullest rank."""
    seen: float
    """Those of them that one token goes through."""
    tensors: int
    """Parameters of that rank as tensors: six of a layer, two of an expert."""


MODELS = (
    Model("8B", 8.03e9, "TP8", 8, 8.03e9 / 8, 8.03e9 / 8, 32 * 6 + 3),
    Model("70B", 70.6e9, "TP8 PP4", 32, 70.6e9 / 32, 70.6e9 / 32, 20 * 6 + 2),
    Model("405B", 405.9e9, "TP8 PP32", 256, 405.9e9 / 256, 405.9e9 / 256, 4 * 6 + 2),
    # 8 experts of 3 x 6144 x 16384 in 56 layers, two of them for each token
    Model("MoE 8x22B", 140.6e9, "PP8 EP8", 64, 135.3e9 / 64 + 5.3e9 / 8, 2 * 135.3e9 / 64 + 5.3e9 / 8, 7 * (5 + 2) + 2),
    # 128 experts of 3 x 2048 x 768 in 48 layers, eight of them for each token
    Model("MoE 30B", 30.5e9, "EP8", 8, 29.0e9 / 8 + 1.5e9, 8 * 29.0e9 / 128 + 1.5e9, 48 * (7 + 16 * 2) + 3),
)


def _table(head: str, rows: Iterable[Iterable[str]]) -> str:
    lines = [head, "|---" * (head.count("|") - 1) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def step_s(model: Model, microbatches: int) -> float:
    """Seconds of computing of a step, without pipeline bubbles."""
    return compute_s(H100) * model.seen * microbatches


def kernel_table() -> str:
    """Bytes that each kernel moves for an element."""
    rows = ([name, f"{size:g}"] for name, size in zip(KERNELS, COUNTED, strict=True))
    return _table("| kernel | bytes an element |", rows)


def launches(model: Model, microbatches: int) -> tuple[int, int, int]:
    """Kernels of a rank and step: adding gradients (two pieces in a pass); everything once in a step, where each tensor
    is a launch; and the same by list. Once are checksums, finalize, a digest and the two passes of the norm, and for
    each bucket the conversion of a chunk and of a rest."""
    buckets = math.ceil(model.held * SUM_BYTES / NCCL_BUCKET_BYTES)
    lists = [most for name, most in LAUNCHED.items() if name != "convert"]
    once = sum(math.ceil(model.tensors / most) for most in lists)
    return (
        model.tensors * math.ceil(microbatches / 2),
        len(lists) * model.tensors + 2 * buckets,
        once + 2 * buckets,
    )


def cost_table() -> str:
    """Kernels of exact sums on an H100: bytes, launches, and their share of a step's computing."""
    rows = []
    for model in MODELS:
        for number in MICROBATCHES:
            added = traffic("exact", 1, 2, "separate")
            gradients = added.kernels * model.held * number
            parts = per_step("exact").items()
            once = sum(size for part, size in parts if part not in ("optimizer", "norm")) * model.held
            seconds = kernels_s(H100, added) * model.held * number + once / H100.memory_bytes_per_s
            plain = kernels_s(H100, traffic("plain", 1, 2, "separate")) * model.held * number
            step = step_s(model, number)
            adding, by_tensor, by_list = launches(model, number)
            rows.append(
                [
                    f"{model.name}, {model.shape}",
                    str(number),
                    f"{gradients / 1e9:.0f}",
                    f"{once / 1e9:.0f}",
                    f"{adding:,}",
                    f"{by_tensor:,}",
                    f"{by_list:,}",
                    f"{step:.2f} s",
                    f"{100 * seconds / step:.1f}%",
                    f"{100 * plain / step:.1f}%",
                ]
            )
    head = (
        "| model | microbatches | GB to add gradients | GB once | launches to add | once, by tensor | once, by list "
        "| computing | exact sums | fp32 sums |"
    )
    return _table(head, rows)


def exchange_s(model: Model, bucket: int, in_flight: int) -> float:
    """Seconds of the exchange over GROUPS groups: a reduce-scatter of sums and an all-gather of results a bucket. With
    several in flight the next one is called while this one moves."""
    unit = SHARED * SUM_BYTES
    bucket = bucket // unit * unit
    buckets = math.ceil(model.held * SUM_BYTES / bucket)
    moved = ideal_s(model) / buckets
    waits = 2 * CALL_S + POLL_S / 2
    return buckets * max(moved, (moved + waits) / in_flight) + (waits if in_flight > 1 else 0.0)


def ideal_s(model: Model) -> float:
    """Bytes over bandwidth."""
    return (GROUPS - 1) / GROUPS * (SUM_BYTES + RESULT_BYTES) * model.held / H100.network_bytes_per_s


def exchange_table() -> str:
    """The exchange at N = GROUPS, by bucket size and buckets in flight."""
    rows = []
    for model in MODELS:
        cells = [f"{model.name}, {model.shape}", f"{ideal_s(model):.3f} s"]
        for bucket, in_flight in ((BUCKETS[0], 1), (BUCKETS[1], 1), (BUCKETS[2], 1), (BUCKETS[1], 2), (BUCKETS[1], 3)):
            seconds = exchange_s(model, bucket, in_flight)
            cells.append(f"{seconds / ideal_s(model):.2f}")
        shares = [100 * exchange_s(model, BUCKETS[0], 1) / step_s(model, number) for number in MICROBATCHES]
        rows.append([*cells, f"{shares[0]:.0f}%, {shares[1]:.0f}%"])
    head = "| model | ideal | 16 MiB, 1 in flight | 64 MiB, 1 | 256 MiB, 1 | 64 MiB, 2 | 64 MiB, 3 | 16 MiB, of step |"
    return _table(head, rows)


def memory_table() -> str:
    """GiB of a GPU, by item, as spare-plan computes them, and wire buffers."""
    rows = []
    for model in MODELS:
        shape = Shape(GROUPS * model.group_size, model.group_size)
        for mode in ("exact", "exact32", "fp32"):
            found = memory(model.held * model.group_size, shape, mode)
            parts = [found.parts[name] for name in ("weights", "accumulator", "reduced_result", "optimizer")]
            waiting = GRADIENT_BYTES[mode].pair * model.held / GIB
            parts[1] -= waiting
            plain = sum(found.plain.values())
            cells = (*parts[:2], waiting, *parts[2:], found.total, plain)
            rows.append([model.name, mode, *(f"{one:.1f}" for one in cells)])
    head = "| model | sums | weights | accumulator | waits to be added | result | optimizer | together | Megatron |"
    return _table(head, rows)


def measured() -> str:
    """Bytes an element of each kernel, as the emulator counts them."""
    import torch

    from tests.kernels import emulation

    count = 64 * 1024
    with tempfile.TemporaryDirectory() as folder:
        library = emulation.Emulated(emulation.build(Path(folder)))
        gradient = torch.randn(count).bfloat16()
        sums, report = torch.zeros(count, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
        exponents, out = torch.full((64,), 40, dtype=torch.int16), torch.zeros(count)
        segments, peaks = torch.tensor([(0, count, 0)]), torch.zeros(64, dtype=torch.int32)
        found = torch.zeros(1, 2, dtype=torch.int64)
        half = gradient.clone()
        counted = []
        for call in (
            lambda: library.adder(sums, 0, 57, report)(gradient, 20),
            lambda: library.adder(sums, 0, 57, report)(gradient, 20, half, True),
            lambda: library.convert(segments, exponents, 0, sums, None, out, found),
            lambda: library.checksums(out.view(torch.int32), segments, report[:1]),
            lambda: library.finalize(torch.tensor([(0, count, 0, 0)]), out, out.clone(), 3.0, peaks),
            lambda: library.digest_sums([half.view(torch.uint8)]),
        ):
            call()
            counted.append(sum(library.counted[:2]) / count)
    return "\n".join(f"{name}: {size:.2f}" for name, size in zip(KERNELS, counted, strict=True))


TABLES: tuple[Callable[[], str], ...] = (kernel_table, cost_table, exchange_table, memory_table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measured", action="store_true", help="count the kernels' bytes with the emulator")
    if parser.parse_args().measured:
        print(measured())
    else:
        print("\n\n".join(table() for table in TABLES))

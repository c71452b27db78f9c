"""Measures the error of a step's sum of real gradients, and of the Adam update that follows, against float64; the table
has a row for each tensor.

    python benchmarks/real_gradients.py [--steps 20] [--data runs/demo/data] [--json FILE]

A small GPT (the demo's, in one process) trains on the demo's text. The gradients of every piece of every step are
summed in float64 and in each form that ``--spare-reduce`` offers, with the product's own formats and scales, as 4
groups of 8 pieces would: fp32 in the group and over groups; bf16 over groups. Each form has Adam moments of its own (in
float64, so that only the sums differ); training itself goes on with float64's. Errors are relative L2, medians over
the steps after the first WARM_UP, in which exact32 finds its scales.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._report import report
from spare_megatron import kernels
from spare_megatron.protocol.tickets import KnownTickets, Ticket
from spare_megatron.worker.job_arguments import parse_job

ROOT = Path(__file__).resolve().parents[1]
GROUPS, PIECES, WARM_UP = 4, 32, 3
BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-8
MODEL = (
    *("--num-layers", "4", "--hidden-size", "128", "--num-attention-heads", "4", "--seq-length", "128"),
    *("--max-position-embeddings", "128", "--micro-batch-size", "1", "--global-batch-size", str(PIECES)),
    *("--lr", "2e-3", "--lr-warmup-iters", "5", "--weight-decay", "0.1", "--clip-grad", "1.0", "--eval-iters", "0"),
    *("--attention-dropout", "0", "--hidden-dropout", "0", "--tokenizer-type", "SentencePieceTokenizer"),
    *("--split", "100,0,0", "--num-workers", "0", "--spare-reduce", "fp32", "--spare-redundancy", "1"),
)
FORMS = ("exact", "exact32", "fp32", "bf16")
FIRST = ("exact", "fp32")
"""Modes whose first steps are reported too: the scale of int64 in the very first step is a guess."""
Gradients = dict[str, torch.Tensor]


def steps_of(data: Path, steps: int) -> Iterator[Gradients]:
    """Name -> fp32 [PIECES, elements], for each step of training."""
    import torch.distributed as dist

    from spare_megatron.megatron_adapter.model.world import init_group_world

    words = [*MODEL, "--tokenizer-model", str(next(data.glob("*.model"))), "--train-iters", str(steps)]
    words += ["--data-path", str(data / "stdlib_text_document")]
    environ = {**os.environ, "SPARE_GROUP": "0", "SPARE_POSITION": "0", "SPARE_NUM_GROUPS": "1"}
    job, args = parse_job(words, environ)
    world = init_group_world(job.shape, 0, dist.HashStore())
    import pretrain_gpt
    from spare_megatron.data.dataset_build import build_datasets, sample_counts
    from spare_megatron.data.microbatch_loader import MicrobatchLoader, train_consumed
    from spare_megatron.data.sampling import SampleOrder
    from spare_megatron.megatron_adapter.megatron_engine import MegatronEngine
    from spare_megatron.megatron_adapter.model.replica import build_replica
    from spare_megatron.worker import user_state
    from spare_megatron.worker.tokenizer import build_tokenizer

    user_state.begin(job, args, build_tokenizer(args))
    replica = build_replica(job.settings(args.padded_vocab_size), world, pretrain_gpt.model_provider)
    provider = pretrain_gpt.train_valid_test_datasets_provider
    train = build_datasets(provider, sample_counts(job.train_iters, args), args, (), leads=True).train
    loader = MicrobatchLoader(
        train,
        SampleOrder(job.shape, len(train)),
        inner=0,
        hosted=None,
        consumed=train_consumed(0, job.shape.global_batch_size),
        threads=0,
        vocab_size=args.padded_vocab_size,
    )
    engine = MegatronEngine(replica, world, pretrain_gpt.forward_step, loader)
    (chunk,) = replica.chunks
    names = {parameter: name for name, parameter in chunk.module.named_parameters()}
    found: dict[str, list[torch.Tensor]] = {}

    def keep(parameter: torch.nn.Parameter) -> None:
        found.setdefault(names[parameter], []).append(parameter.grad.detach().float().reshape(-1).clone())

    chunk.accumulate = keep
    for step in range(1, steps + 1):
        found.clear()
        engine.begin_step(step)
        engine.run(step, KnownTickets(map(Ticket, range(PIECES))))
        pieces = {name: torch.stack(gradients) for name, gradients in found.items()}
        yield pieces
        for parameter, name in names.items():
            parameter.main_grad.copy_(pieces[name].double().sum(dim=0).view_as(parameter))
        engine.apply(step, [tensor.clone() for tensor in engine.local_sum()], engine.scalars())


class IntegerSum:
    """Sums all tensors of the model in an exact mode, with its scales."""

    def __init__(self, method: str, sizes: dict[str, int]) -> None:
        from spare_megatron.exact_sum.formats import Slot
        from spare_megatron.megatron_adapter.model.exact import FORMATS

        self._slots, index = [], 0
        for name, size in sizes.items():
            self._slots.append(Slot(name, 0, 0, size, index))
            index += -(-size // kernels.BLOCK) * kernels.BLOCK
        self._format = FORMATS[method](self._slots, PIECES, 0, torch.device("cpu"))

    def __call__(self, pieces: Gradients) -> Gradients:
        self._format.begin_step(0)
        flags, result = 0, {}
        for number, slot in enumerate(self._slots):
            total, report_ = torch.zeros(slot.size, dtype=self._format.dtype), torch.zeros(2, dtype=torch.int64)
            for gradient in pieces[slot.name]:
                self._format.adder(number, total, report_)(gradient, None, apart=False, first=False)
            flags |= int(report_[1])
            converted = result[slot.name] = torch.empty(slot.size)
            converter = kernels.Converter(torch.tensor([[0, slot.size, slot.index]]), self._format.exponents)
            converter.convert(0, total, None, converted, None)
            self._format.peaks.finalize(slot.index, converted, torch.empty_like(converted), 1.0)
        if flags:
            print(f"{type(self._format).__name__}: a piece exceeded the bound, the step would be skipped")
        self._format.commit(bool(flags))
        return result


def fp32_sum(pieces: torch.Tensor, over_groups: torch.dtype) -> torch.Tensor:
    """Sum as Megatron does: the pieces of a group one after another in fp32, then the groups in dtype
    ``over_groups``."""
    groups = []
    for part in pieces.chunk(GROUPS):
        total = torch.zeros(pieces.shape[1])
        for piece in part:
            total += piece
        groups.append(total.to(over_groups))
    total = groups[0]
    for other in groups[1:]:
        total = total + other
    return total.float()


class Adam:
    """Adam's moments and updates for the sums of one mode, in float64."""

    def __init__(self) -> None:
        self._first: Gradients = {}
        self._second: Gradients = {}
        self._steps = 0

    def __call__(self, gradients: Gradients) -> Gradients:
        self._steps += 1
        updates = {}
        for name, gradient in gradients.items():
            mean = gradient.double() / PIECES
            old = torch.zeros_like(mean)
            first = self._first[name] = BETA_1 * self._first.get(name, old) + (1 - BETA_1) * mean
            second = self._second[name] = BETA_2 * self._second.get(name, old) + (1 - BETA_2) * mean.square()
            scale = math.sqrt(1 - BETA_2**self._steps) / (1 - BETA_1**self._steps)
            updates[name] = scale * first / (second.sqrt() + EPSILON * math.sqrt(1 - BETA_2**self._steps))
        return updates


def distance(found: torch.Tensor, reference: torch.Tensor) -> float:
    norm = float(reference.norm())
    return float((found.double() - reference).norm()) / norm if norm else 0.0


def main() -> None:
    """Print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--data", type=Path, default=ROOT / "runs" / "demo" / "data", help="made by scripts/demo.sh")
    parser.add_argument("--json", type=Path, help="result file (default: benchmarks/results/real_gradients.json)")
    options = parser.parse_args()
    if not (options.data / "stdlib_text_document.idx").exists():
        parser.error(f"--data {options.data} has no stdlib_text_document.idx; run scripts/demo.sh, which makes it")
    sums: dict[str, IntegerSum] = {}
    adams = {form: Adam() for form in ("float64", *FORMS)}
    errors: dict[str, dict[str, list[float]]] = {}
    first: list[dict[str, list[float]]] = []
    for number, pieces in enumerate(steps_of(options.data, options.steps)):
        if not sums:
            sizes = {name: tensor.shape[1] for name, tensor in pieces.items()}
            sums = {method: IntegerSum(method, sizes) for method in ("exact", "exact32")}
        found = {method: one(pieces) for method, one in sums.items()}
        found["fp32"] = {name: fp32_sum(tensor, torch.float32) for name, tensor in pieces.items()}
        found["bf16"] = {name: fp32_sum(tensor, torch.bfloat16) for name, tensor in pieces.items()}
        reference = {name: tensor.double().sum(dim=0) for name, tensor in pieces.items()}
        if number < WARM_UP:
            first.append({form: [distance(found[form][name], reference[name]) for name in reference] for form in FIRST})
            continue
        wanted = adams["float64"](reference)
        for form in FORMS:
            updates = adams[form](found[form])
            for name, tensor in reference.items():
                row = errors.setdefault(name, {})
                row.setdefault(f"{form}_sum", []).append(distance(found[form][name], tensor))
                row.setdefault(f"{form}_update", []).append(distance(updates[name], wanted[name]))
    columns = [f"{form}_{what}" for what in ("sum", "update") for form in FORMS]
    rows: list[dict[str, object]] = []
    for name, row in errors.items():
        rows.append({"tensor": name.removeprefix("module."), **{key: statistics.median(row[key]) for key in columns}})
    rows.append({"tensor": "worst", **{key: max(float(row[key]) for row in rows) for key in columns}})
    worse = [
        name
        for name, row in errors.items()
        if any(one > other for one, other in zip(row["exact_sum"], row["fp32_sum"], strict=True))
    ]
    config = {
        "model": " ".join(MODEL),
        "steps": options.steps,
        "warm_up": WARM_UP,
        "tensors_with_a_step_in_which_exact_is_worse_than_fp32": len(worse),
        "tensors_so_in_the_first_steps": [
            sum(one > other for one, other in zip(step["exact"], step["fp32"], strict=True)) for step in first
        ],
        "worst_tensor_in_the_first_steps": [{form: max(found) for form, found in step.items()} for step in first],
    }
    print(f"written to {report('real_gradients', config, rows, options.json)}")
    os._exit(0)


if __name__ == "__main__":
    main()

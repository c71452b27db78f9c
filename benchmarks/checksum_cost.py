"""Measures what the checks of the exact modes cost in a step: checksums of the result, digests of result and weights.

    python benchmarks/checksum_cost.py [--steps 12] [--mode exact32] [--json FILE]

One process is one group: a GPT, its pieces, the sum, the update. In each step the checks are timed where they happen;
the ratio is the median of step / (step - checks). The checksum inside the kernel that adds cannot be taken out;
`as_separate_pass_share` is an upper bound: what it would cost as a separate pass over each piece, as accumulators are
looked at when a result is damaged.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._report import report
from spare_megatron.collectives.converting import results_of
from spare_megatron.protocol.tickets import KnownTickets, Ticket
from spare_megatron.worker.job_arguments import parse_job

PIECES, WARM_UP = 8, 3
CHECKS = ("weights", "result", "result_digest")
"""Names of the checks that are timed in each step."""
MODEL = (
    *("--num-layers", "4", "--hidden-size", "256", "--num-attention-heads", "4", "--seq-length", "256"),
    *("--max-position-embeddings", "256", "--micro-batch-size", "1", "--lr", "1e-3", "--clip-grad", "1.0"),
    *("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "1023", "--split", "100,0,0"),
    *("--attention-dropout", "0", "--hidden-dropout", "0", "--eval-iters", "0", "--num-workers", "0"),
    *("--global-batch-size", str(PIECES), "--train-iters", "1000", "--spare-redundancy", "1"),
    *("--spare-piece-microbatches", "1"),
)


def engine_of(mode: str) -> Any:
    """An engine of one rank, whose microbatches are made up."""
    import torch.distributed as dist

    from spare_megatron.megatron_adapter.model.world import init_group_world

    environ = {**os.environ, "SPARE_GROUP": "0", "SPARE_POSITION": "0", "SPARE_NUM_GROUPS": "1"}
    job, _ = parse_job([*MODEL, "--spare-reduce", mode], environ)
    world = init_group_world(job.shape, 0, dist.HashStore())
    from spare_megatron.megatron_adapter.megatron_engine import MegatronEngine
    from spare_megatron.megatron_adapter.model.replica import build_replica

    length = job.seq_length

    def source(step: int, pieces: Sequence[int]) -> Iterator[torch.Tensor]:
        for piece in pieces:
            generator = torch.Generator().manual_seed(step * PIECES + piece)
            yield torch.randint(0, 1023, (1, length + 1), generator=generator)

    def forward_step(data: Iterator[torch.Tensor], model: Any) -> Any:
        tokens = next(data)
        output = model(tokens[:, :-1], torch.arange(length).unsqueeze(0), None, labels=tokens[:, 1:].contiguous())
        return output, partial(loss_of, torch.ones(length))

    return MegatronEngine(build_replica(job.settings(1024), world), world, forward_step, source, method=mode)


def loss_of(mask: torch.Tensor, losses: torch.Tensor) -> Any:
    total = (losses.float().view(-1) * mask).sum()
    count = mask.sum().to(torch.int)
    return total, count, {"lm loss": torch.cat([total.clone().detach().view(1), count.view(1)])}


def timed(call: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    call()
    return time.perf_counter() - started_s


def one_step(engine: Any, step: int) -> dict[str, float]:
    """Seconds of the step and, inside it, of its checks; and of a look at the accumulators, which no step needs."""
    found: dict[str, float] = {}
    started_s = time.perf_counter()
    found["weights"] = timed(engine.weights_digest)
    engine.begin_step(step)
    engine.run(step, KnownTickets(map(Ticket, range(PIECES))))
    sums = engine.local_sum()
    found["accumulators"] = timed(partial(engine.accumulators_fault, suspected=True))
    reduced = results_of(engine.conversion(), sums)
    found["result"] = timed(lambda: engine.result_fault(reduced))
    found["result_digest"] = timed(lambda: engine.result_digest(reduced, engine.scalars()))
    engine.apply(step, reduced, engine.scalars())
    found["step"] = time.perf_counter() - started_s - found["accumulators"]
    return found


def main() -> None:
    """Print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--mode", choices=("exact", "exact32"), default="exact")
    parser.add_argument("--json", type=Path, help="result file (default: benchmarks/results/checksum_cost.json)")
    options = parser.parse_args()
    engine = engine_of(options.mode)
    steps = [one_step(engine, step) for step in range(1, options.steps + WARM_UP + 1)][WARM_UP:]
    checks = [sum(one[name] for name in CHECKS) for one in steps]
    separate = [one["accumulators"] * PIECES for one in steps]
    row = {
        "mode": options.mode,
        "parameters": sum(p.numel() for chunk in engine.replica.chunks for p in chunk.module.parameters()),
        **{f"{name}_ms": 1e3 * statistics.median(one[name] for one in steps) for name in steps[0]},
        "ratio": statistics.median(
            one["step"] / (one["step"] - check) for one, check in zip(steps, checks, strict=True)
        ),
        "as_separate_pass_share": statistics.median(
            extra / one["step"] for one, extra in zip(steps, separate, strict=True)
        ),
    }
    config = {"model": " ".join(MODEL), "steps": options.steps, "threads": torch.get_num_threads()}
    print(f"written to {report('checksum_cost', config, [row], options.json)}")
    os._exit(0)


if __name__ == "__main__":
    main()

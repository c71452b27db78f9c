"""Measures what it costs in a step that bits do not depend on the layout: the norm as a sum of integers, random states
set at each layer, and a tied weight whose two uses are summed apart.

    python benchmarks/layout_cost.py [--rounds 20] [--json FILE]

One process is one group, as in benchmarks/checksum_cost.py. In each round an engine takes a step, and the gradients'
norm is computed by megatron-core and by us, one after the other; then an engine whose tied weight is summed as autograd
adds its uses takes the same step. All times are of the process's CPU. Figures are medians; `extra_share` and `ratio`
are medians of paired values.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._report import report
from benchmarks.checksum_cost import MODEL, PIECES, WARM_UP, engine_of
from spare_megatron.collectives.converting import results_of
from spare_megatron.protocol.tickets import KnownTickets, Ticket


def one_step(engine: Any, step: int) -> None:
    engine.begin_step(step)
    engine.run(step, KnownTickets(map(Ticket, range(PIECES))))
    engine.apply(step, results_of(engine.conversion(), engine.local_sum()), engine.scalars())


def summed_together(engine: Any) -> Any:
    """Another engine in the same world, with one gradient for both uses of the tied weight."""
    from spare_megatron.megatron_adapter import megatron_engine
    from spare_megatron.megatron_adapter.model.replica import build_replica

    apart = megatron_engine.tied_head
    megatron_engine.tied_head = lambda _chunks: None
    try:
        replica = build_replica(engine.replica.settings, engine.world)
        return megatron_engine.MegatronEngine(
            replica, engine.world, engine._forward_step, engine._source, method="exact"
        )
    finally:
        megatron_engine.tied_head = apart


def timed(call: Callable[[], object]) -> float:
    """CPU seconds."""
    started_s = time.process_time()
    call()
    return time.process_time() - started_s


def seconds_of(calls: list[Callable[[], object]], number: int) -> list[float]:
    """The shortest of ``number`` calls of each, taken in turn: they are short, and what disturbs them is not."""
    return [min(times) for times in zip(*([timed(call) for call in calls] for _ in range(number)), strict=True)]


def main() -> None:
    """Print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path, help="result file (default: benchmarks/results/layout_cost.json)")
    options = parser.parse_args()
    engine = engine_of("exact")
    other = summed_together(engine)
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from spare_megatron.megatron_adapter.model import rng

    optimizer = engine.replica.optimizer
    norms = [lambda: type(optimizer).get_grad_norm(optimizer), optimizer.get_grad_norm]
    keys = rng.RankKeys(0, 0, 0, 0)
    places = 2 + sum(isinstance(one, TransformerLayer) for one in engine.replica.chunks[0].modules())

    def times_of(step: int) -> tuple[float, ...]:
        step_s = timed(lambda: one_step(engine, step))
        core_s, norm_s = seconds_of(norms, 5)
        (states_s,) = seconds_of([lambda: rng.set_piece_states(1, step, 2, keys)], 20)
        return step_s, core_s, norm_s, states_s, timed(lambda: one_step(other, step))

    rows = [times_of(step) for step in range(1, options.rounds + WARM_UP + 1)]
    rows = rows[WARM_UP:]
    parameters = sum(p.numel() for p in engine.replica.chunks[0].parameters())

    def median(of: Callable[..., float]) -> float:
        return statistics.median(of(*row) for row in rows)

    found = {
        "parameters": parameters,
        "step_ms": median(lambda step, *_: 1e3 * step),
        "core_norm_ns": median(lambda _step, core, *_: 1e9 * core / parameters),
        "norm_ns": median(lambda _step, _core, norm, *_: 1e9 * norm / parameters),
        "norm_extra_share": median(lambda step, core, norm, *_: (norm - core) / step),
        "states_us": median(lambda _step, _core, _norm, states, _other: 1e6 * states),
        "states_extra_share": median(lambda step, _core, _norm, states, _other: places * PIECES * states / step),
        "tied_apart_ratio": median(lambda step, _core, _norm, _states, other_step: step / other_step),
    }
    config = {"model": " ".join(MODEL), "rounds": options.rounds, "threads": torch.get_num_threads()}
    print(f"written to {report('layout_cost', config, [found], options.json)}")
    os._exit(0)


if __name__ == "__main__":
    main()

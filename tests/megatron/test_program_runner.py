"""Own pipeline programs train the same bits as megatron-core's schedules, in every shape, for any number of pieces.

All cases run in one start of four processes, each first with megatron-core's schedules, then with programs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from spare_megatron.collectives.converting import results_of
from tests.megatron.test_parity import BALANCED, MOE, SEED, case
from tests.spawn import run_ranks
from tests.tickets import Late, run_of

pytestmark = pytest.mark.timeout(600)

STEPS = 2
CUTS = 12
"""The cuts of a step repeat after so many; each case begins with others, and trains with all of them in ``--full``."""
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
BF16 = {"bf16": True}


def one_group(**changes: Any) -> dict[str, Any]:
    return case(**{"groups": 1, "global_batch_size": 12, "transformer": DROPOUT, **changes})


CASES = {
    # those of four ranks come first, so that no rank waits for others that are at a case of two
    "PP4": one_group(pipeline=4),
    "TP2 x PP2, sequence parallel": one_group(tensor=2, pipeline=2, transformer={**DROPOUT, "sequence_parallel": True}),
    "TP2 x PP2, virtual stages, bf16, exact": one_group(
        tensor=2, pipeline=2, virtual=2, reduce="exact", transformer={**DROPOUT, **BF16}, optimizer=BF16
    ),
    "D2 x PP2, exact": one_group(pipeline=2, inner_data=2, reduce="exact"),
    "MoE, EP2 x PP2": one_group(pipeline=2, inner_data=2, expert=2, transformer=MOE),
    "PP2": one_group(pipeline=2),
    "PP2, exact, pieces of two microbatches": one_group(pipeline=2, reduce="exact", piece_microbatches=2),
    "PP2, older loss convention": one_group(pipeline=2, convention="mean"),
    "PP2, virtual stages, exact": one_group(pipeline=2, virtual=2, reduce="exact"),
    "MoE, PP2, virtual stages, pads": one_group(pipeline=2, virtual=2, transformer=BALANCED),
    "D2": one_group(inner_data=2),
}
COVERED = ("TP2 x PP2, sequence parallel", "PP2", "PP2, virtual stages, exact", "D2")
"""What they check is checked by a case that has more; the long run trains all."""
SHORT = [name for name in CASES if name not in COVERED]


def worker(rank: int, store: Any, cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Digest of the weights and the figures of all steps, of each case and schedule."""
    from torch.distributed import PrefixStore

    found: dict[str, Any] = {}
    for name, one in cases.items():
        if rank < one["tensor"] * one["pipeline"] * one["inner_data"]:
            found[name] = {
                schedule: trained(rank, PrefixStore(f"{name}/{schedule}", store), {**one, "schedule": schedule})
                for schedule in ("core", "tickets")
            }
    return found


def trained(position: int, store: Any, one: dict[str, Any]) -> dict[str, Any]:
    """One job that is this group only: each step cuts its pieces in other segments, and an evaluation follows. Our
    programs take the segments of every other step as one run, in which they come late."""
    from spare_megatron.megatron_adapter.model import world
    from tests.megatron import groups

    engine = groups.engine_of(one, position, store)
    try:
        shape = groups.shape_of(one)
        pieces, steps, first_weights = list(range(shape.pieces)), [], digest(engine)
        for step in range(1, one["steps"] + 1):
            engine.begin_step(step)
            cut = step + one["first_cut"]
            first, second = cut % 3, cut % 3 + 1 + cut % 4
            segments = pieces[:first], pieces[first:second], pieces[second:]
            joined = one["schedule"] == "tickets" and cut % 2
            for run in [Late(segments)] if joined else map(run_of, segments):
                engine.run(step, run)
            tensors = results_of(engine.conversion(), engine.local_sum())
            report = engine.apply(step, tensors, engine.scalars())
            steps.append([report["loss"], report["grad_norm"]])
        source = groups.source_of(shape, engine.world.data_rank)
        evaluated = [dict(engine.evaluate(one["steps"] + 1, pieces[:count], source)) for count in (1, 3)]
        return {"steps": steps, "evaluated": evaluated, "weights": [first_weights, digest(engine)]}
    finally:
        world.destroy()


def digest(engine: Any) -> str:
    """sha256 of all weights."""
    import torch

    found = hashlib.sha256()
    for chunk in engine.replica.chunks:
        for parameter in chunk.parameters():
            found.update(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def trained_by_four(names: Iterable[str], steps: int, timeout_s: float) -> list[Any]:
    """What four processes find in these cases of so many steps."""
    cases = {name: {**CASES[name], "steps": steps, "first_cut": n * STEPS} for n, name in enumerate(names)}
    return run_ranks("tests.megatron.test_program_runner:worker", [cases] * 4, timeout_s=timeout_s)


@pytest.fixture(scope="module")
def results(once: Callable[..., Any]) -> list[Any]:
    found: list[Any] = once("program runner", lambda: trained_by_four(SHORT, STEPS, 580.0))
    return found


@pytest.mark.parametrize("name", SHORT)
def test_the_same_bits_as_megatron_core(results: list[Any], name: str) -> None:
    compare(name, results)


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_the_same_bits_in_every_cut() -> None:
    results = trained_by_four(CASES, CUTS, 1100.0)
    for name in CASES:
        compare(name, results)


def compare(name: str, results: list[Any]) -> None:
    print(f"seed {SEED}")
    ranks = [result[name] for result in results if name in result]
    assert ranks
    for rank in ranks:
        first_weights, weights = rank["core"]["weights"]
        assert weights != first_weights, "the reference itself must learn"
        assert rank["tickets"] == rank["core"]

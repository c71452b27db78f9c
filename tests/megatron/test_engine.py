"""What the engine promises beside parity: keyed randomness, evaluation, progress, joiners, skipped steps, providers.

All cases run in one start of two processes, as the two ranks of one group or as two groups of one rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from spare_megatron.collectives.converting import results_of
from tests.megatron import toy
from tests.megatron.test_parity import SEED, case
from tests.spawn import run_ranks
from tests.tickets import run_of

pytestmark = pytest.mark.timeout(300)

STEPS = 2
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def one_group(**changes: Any) -> dict[str, Any]:
    return case(groups=1, steps=STEPS, **changes)


RANDOM = {
    "PP2": one_group(pipeline=2, transformer=DROPOUT),
    "PP2, recompute": one_group(pipeline=2, transformer={**DROPOUT, **RECOMPUTE}),
    "PP2 x V2": one_group(pipeline=2, virtual=2, transformer=DROPOUT),
    "TP2, sequence parallel": one_group(tensor=2, transformer={**DROPOUT, "sequence_parallel": True}),
    "TP2, recompute": one_group(tensor=2, transformer={**DROPOUT, **RECOMPUTE}),
}


def worker(rank: int, store: Any, _: Any) -> dict[str, Any]:
    """Run every check on both ranks; what the tests below look at."""
    from torch.distributed import PrefixStore

    checks = {
        "random": random_orders,
        "evaluation": evaluation,
        "progress": progress,
        "joiner": joiner,
        "skipped": skipped,
        "providers": providers,
    }
    return {name: check(rank, PrefixStore(name, store)) for name, check in checks.items()}


class Group:
    """A group of both processes, or (``alone``) a group of this process only, left at the end of the block."""

    def __init__(self, one: dict[str, Any], rank: int, store: Any, alone: bool = False) -> None:
        from torch.distributed import PrefixStore

        self.case, self.group, self.position = one, rank if alone else 0, 0 if alone else rank
        self.store = PrefixStore(f"group{self.group}", store)

    def __enter__(self) -> Any:
        from tests.megatron import groups

        return groups.engine_of(self.case, self.position, self.store)

    def __exit__(self, *_: object) -> None:
        from spare_megatron.megatron_adapter.model import world

        world.destroy()


def alone(engine: Any, step: int, segments: list[list[int]]) -> dict[str, Any]:
    """One step of a job that is this group only."""
    engine.begin_step(step)
    for segment in segments:
        engine.run(step, run_of(segment))
    tensors = results_of(engine.conversion(), engine.local_sum())
    return dict(engine.apply(step, tensors, engine.scalars()))


def random_orders(rank: int, store: Any) -> dict[str, Any]:
    """Losses of two runs with dropout that compute their pieces in different orders and segments; norms' weights."""
    from torch.distributed import PrefixStore

    from spare_megatron.megatron_adapter.model.state_snapshot import model_tensors

    result = {}
    for name, one in RANDOM.items():
        runs = []
        for index, segments in enumerate([[list(range(4))], [[3, 1], [0, 2]]]):
            with Group(one, rank, PrefixStore(f"{name}{index}", store)) as engine:
                losses = [alone(engine, step, segments)["loss"] for step in range(1, STEPS + 1)]
                replicated = {n: t.double().sum().item() for n, t in model_tensors(engine.replica) if "norm" in n}
                runs.append({"losses": losses, "replicated": replicated})
        result[name] = runs
    return result


def evaluation(rank: int, store: Any) -> dict[str, Any]:
    """Evaluation sums however the pieces are cut, and training with and without evaluation in between."""
    from torch.distributed import PrefixStore

    from tests.megatron import groups

    one = one_group(pipeline=2, virtual=2, transformer=DROPOUT)
    result: dict[str, Any] = {"sums": [], "losses": []}
    for evaluate in (True, False):
        with Group(one, rank, PrefixStore(f"{evaluate}", store)) as engine:
            source = groups.source_of(groups.shape_of(one), engine.world.data_rank)
            losses = []
            for step in (1, 2):
                losses.append(alone(engine, step, [list(range(4))])["loss"])
                if evaluate and step == 1:
                    for cuts in ([[0, 1, 2, 3]], [[3], [1, 0], [2]], [[]]):
                        parts = [engine.evaluate(100, cut, source) for cut in cuts]
                        result["sums"].append({key: sum(part[key] for part in parts) for key in parts[0]})
            result["losses"].append(losses)
    return result


def progress(rank: int, store: Any) -> dict[str, Any]:
    """What the hook receives during two segments, with and without virtual stages."""
    from torch.distributed import PrefixStore

    result = {}
    for name, virtual in (("PP2", None), ("PP2 x V2", 2)):
        with Group(one_group(pipeline=2, virtual=virtual), rank, PrefixStore(name, store)) as engine:
            received: list[tuple[str, int]] = []
            engine.on_piece = lambda phase, n, received=received: received.append((phase, n))
            alone(engine, 1, [[0, 1, 2], [3]])
            result[name] = received
    return result


def joiner(rank: int, store: Any) -> dict[str, Any]:
    """Two groups, the second has no piece: what each reports, and the digests of both after one step."""
    from torch.distributed import PrefixStore

    from spare_megatron.megatron_adapter.model.state_snapshot import weights_digest
    from tests.megatron import groups

    one = case(steps=1, loads=[4, 0])
    with Group(one, rank, store, alone=True) as engine:
        peers = groups.peers_of(PrefixStore("peers", store), rank, 2)
        engine.begin_step(1)
        for segment in groups.dealt(one, rank):
            engine.run(1, run_of(segment))
        engine.local_sum()
        own = dict(engine.scalars())
        engine.apply(1, *groups.exchange(peers, engine))
        return {"own": own, "digest": weights_digest(engine.replica)}


def skipped(rank: int, store: Any) -> list[dict[str, Any]]:
    """fp16 with a loss scale that overflows at first."""
    one = one_group(pipeline=2, transformer={"fp16": True}, tied=False)
    saved = dict(toy.OPTIMIZER)
    toy.OPTIMIZER.update({"initial_loss_scale": 2.0**19, "hysteresis": 1})
    try:
        with Group(one, rank, store) as engine:
            reports = [alone(engine, step, [list(range(4))]) for step in range(1, 8)]
            return [{key: report[key] for key in ("skipped", "loss_scale", "lr", "loss")} for report in reports]
    finally:
        toy.OPTIMIZER.clear()
        toy.OPTIMIZER.update(saved)


def providers(rank: int, store: Any) -> dict[str, Any]:
    """A user's model provider of the older signature: used without virtual stages, refused with them."""
    from torch.distributed import PrefixStore

    from spare_megatron.config.errors import ConfigError
    from spare_megatron.megatron_adapter.model import world as group_world
    from tests.megatron import groups

    result: dict[str, Any] = {}
    for virtual in (None, 2):
        one = one_group(pipeline=2, virtual=virtual)
        settings, shape = groups.settings_of(one), groups.shape_of(one)
        world = group_world.init_group_world(shape, rank, PrefixStore(f"{virtual}", store), virtual_pipeline=virtual)
        from spare_megatron.megatron_adapter.model.replica import (
            build_replica,
            default_model_provider,
            transformer_config,
        )

        calls: list[tuple[bool, bool]] = []
        config = transformer_config(settings, world.shape)

        def older(
            pre_process: bool, post_process: bool, calls: Any = calls, made: Any = config, settings: Any = settings
        ) -> Any:
            calls.append((pre_process, post_process))
            return default_model_provider(settings, made)(pre_process, post_process)

        try:
            build_replica(settings, world, older)
            result[str(virtual)] = calls
        except ConfigError as error:
            result[str(virtual)] = str(error)
        finally:
            group_world.destroy()
    return result


@pytest.fixture(scope="module")
def results(once: Callable[..., Any]) -> list[Any]:
    print(f"seed {SEED}")
    found: list[Any] = once("engine", lambda: run_ranks("tests.megatron.test_engine:worker", [None] * 2))
    return found


@pytest.mark.parametrize("name", RANDOM)
def test_dropout_follows_the_piece_not_the_order(results: list[Any], name: str) -> None:
    first, second = results[0]["random"][name]
    assert second["losses"] == pytest.approx(first["losses"], rel=1e-6)
    if "TP2" in name:
        assert results[0]["random"][name][0]["replicated"] == results[1]["random"][name][0]["replicated"]


def test_dropout_is_there(results: list[Any]) -> None:
    """Recomputation draws what the forward pass drew; another layout of chunks draws other numbers."""
    random = {name: runs[0]["losses"] for name, runs in results[0]["random"].items()}
    assert random["PP2, recompute"] == random["PP2"]
    assert random["PP2 x V2"] != random["PP2"]


def test_evaluation_is_a_sum_over_pieces_and_leaves_training_alone(results: list[Any]) -> None:
    whole, parts, nothing = results[0]["evaluation"]["sums"]
    assert parts == pytest.approx(whole, rel=1e-6)
    assert whole["lm loss/count"] == whole["tokens"] > 0
    assert set(nothing) == set(whole)
    assert not any(nothing.values())
    with_evaluation, without = results[0]["evaluation"]["losses"]
    assert with_evaluation == without
    assert results[0]["evaluation"] == results[1]["evaluation"]


@pytest.mark.parametrize("name", ["PP2", "PP2 x V2"])
def test_hook_receives_each_piece_once_forward_and_backward(results: list[Any], name: str) -> None:
    expected = [*range(3), 0]
    for rank in (0, 1):
        received = results[rank]["progress"][name]
        assert [n for phase, n in received if phase == "forward"] == expected
        assert [n for phase, n in received if phase == "backward"] == expected
        for n in range(3):
            assert received.index(["forward", n]) < received.index(["backward", n])


def test_group_without_pieces_reports_zeros_under_the_same_names(results: list[Any]) -> None:
    holder, empty = results[0]["joiner"], results[1]["joiner"]
    assert set(empty["own"]) == set(holder["own"]) == {"tokens", "lm loss/sum", "lm loss/count"}
    assert not any(empty["own"].values())
    assert empty["digest"] == holder["digest"]


def test_overflow_skips_the_step_on_every_rank(results: list[Any]) -> None:
    reports = results[0]["skipped"]
    assert reports == results[1]["skipped"]
    assert [r["skipped"] for r in reports[:2]] == [1, 1]
    assert reports[1]["loss_scale"] == reports[0]["loss_scale"] / 2
    assert reports[-1]["skipped"] == 0
    assert reports[1]["lr"] == reports[0]["lr"] > reports[2]["lr"], "a skipped step is none of the schedule's"
    assert reports[-1]["loss"] < reports[0]["loss"]


def test_older_model_provider(results: list[Any]) -> None:
    assert results[0]["providers"]["None"] == [[True, False]]
    assert results[1]["providers"]["None"] == [[False, True]]
    assert "takes no vp_stage, which 2 virtual pipeline stages need" in results[0]["providers"]["2"]

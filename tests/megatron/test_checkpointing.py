"""Checkpoints: resumed under the same and under another layout, read by plain megatron-core, one digest for all.

Step 2 of a run of PP2 x 2 groups is saved by one group. Every other layout loads it and must go on as the run did.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.megatron.test_parity import BALANCED, SEED, case
from tests.spawn import run_ranks

pytestmark = pytest.mark.timeout(300)

SAVED, STEPS = 2, 4
SHARDS = 5
"""State shards of the job that saved first, whatever the groups of those that go on."""
BATCH = 8
DENSE = {"steps": STEPS, "global_batch_size": BATCH, "transformer": {"gated_linear_unit": True, "num_query_groups": 2}}
EXPERTS = {"steps": STEPS, "global_batch_size": BATCH, "transformer": BALANCED}
PREDICTING: dict[str, Any] = {
    "steps": STEPS,
    "global_batch_size": BATCH,
    "positions": "rope",
    "transformer": {"mtp_num_layers": 1},
    "optimizer": {"decoupled_lr": 1e-3},
}
"""The last stage has a copy of the tied embedding, for its layer of multi-token prediction, with its learning rate, and
no weight of an output layer."""
HALF = {"steps": STEPS, "global_batch_size": BATCH, "transformer": {"bf16": True}, "tied": False}

FIRST = {
    "dense": case(pipeline=2, **DENSE),
    "experts": case(inner_data=2, expert=2, **EXPERTS),
    "half": case(pipeline=2, virtual=2, **HALF),
    "predicting": case(pipeline=2, **PREDICTING),
}
RESUMED = {
    "dense": {
        "PP2": case(pipeline=2, **DENSE),
        "TP2": case(tensor=2, **DENSE),
        "N1 x D2": case(groups=1, inner_data=2, **DENSE),
    },
    "experts": {"EP2": case(inner_data=2, expert=2, **EXPERTS), "PP2": case(pipeline=2, **EXPERTS)},
    "half": {"PP2 x V2": case(pipeline=2, virtual=2, **HALF), "N2 x D2": case(inner_data=2, **HALF)},
    "predicting": {"PP2 x V2": case(pipeline=2, virtual=2, **PREDICTING), "N4": case(groups=4, **PREDICTING)},
}


def worker(rank: int, store: Any, directory: str) -> dict[str, Any]:
    """On every rank: the first runs, then every resumed run, then plain megatron-core reading the dense checkpoint."""
    from torch.distributed import PrefixStore

    from spare_megatron.megatron_adapter.checkpoint.digest import digest

    histories: dict[str, Any] = {}
    for kind, first in FIRST.items():
        path = f"{directory}/{kind}"
        histories[kind] = {"first": run(rank, PrefixStore(kind, store), first, None, path)}
        expected = "" if rank else digest(path)
        for name, other in RESUMED[kind].items():
            again = f"{path}-{name}"
            histories[kind][name] = run(rank, PrefixStore(kind + name, store), other, path, again)
            if rank == 0:
                histories[kind][f"digest {name}"] = [expected, digest(again)]
    return {
        "histories": histories,
        "plain": plain_load(rank, store, f"{directory}/dense"),
        "unused": unused(rank, store, f"{directory}/unused"),
        "rates": rates(rank, PrefixStore("rates", store), f"{directory}/rates"),
        "descents": descents(rank, PrefixStore("descents", store), f"{directory}/descents"),
        "without": without_optimizer(rank, PrefixStore("without", store), f"{directory}/without"),
    }


def rates(rank: int, store: Any, path: str) -> dict[str, list[float]] | None:
    """The learning rates of all groups after a load with other flags; embeddings have rates of their own. On rank 0."""
    from torch.distributed import PrefixStore

    from spare_megatron.megatron_adapter.checkpoint import group_checkpoint
    from tests.megatron import groups, toy

    if rank:
        return None
    found = {}
    for name, lr, kept in (
        ("saved", 1.0, ""),
        ("same", 1.0, ""),
        ("flags", 0.5, "override"),
        ("its", 0.5, "use_checkpoint"),
    ):
        optimizer = {"lr": lr * toy.OPTIMIZER["lr"], "min_lr": 0.0}
        optimizer |= {"decoupled_lr": 0.125 * optimizer["lr"], "decoupled_min_lr": 0.0}
        one = case(groups=1, steps=STEPS, tied=False, transformer={"num_layers": 1}, optimizer=optimizer)
        engine = groups.engine_of(one, 0, PrefixStore(name, store))
        try:
            scheduler = engine.replica.scheduler
            scheduler.max_lr, scheduler.min_lr = optimizer["lr"], 0.0
            if kept:
                setattr(scheduler, f"{kept}_opt_param_scheduler", True)
            if name == "saved":
                groups.one_step(engine, groups.peers_of(PrefixStore("peers", store), 0, 1), one, 0, 1)
                group_checkpoint.save(path, engine.replica, step=1, consumed_samples=16, args={})
            else:
                group_checkpoint.load(path, engine.replica)
            scheduler.step(16)
            found[name] = [group["lr"] for group in engine.replica.optimizer.param_groups]
        finally:
            groups.group_world.destroy()
    return found


def unused(rank: int, store: Any, path: str) -> list[Any]:
    """Two runs of PP2 in one group of ranks 0 and 1: after saving at step 0, and after loading that."""
    from torch.distributed import PrefixStore

    from spare_megatron.megatron_adapter.checkpoint import group_checkpoint
    from spare_megatron.megatron_adapter.model import world
    from tests.megatron import groups

    one = case(groups=1, pipeline=2, **DENSE)
    histories: list[Any] = []
    for start in (None, path) if rank < 2 else ():
        engine = groups.engine_of(one, rank, PrefixStore(f"unused{start}", store))
        try:
            peers = groups.peers_of(PrefixStore(f"unused peers{start}{rank}", store), 0, 1)
            if start is None:
                group_checkpoint.save(path, engine.replica, step=0, consumed_samples=0)
            else:
                assert group_checkpoint.load(path, engine.replica).step == 0
            histories.append([groups.one_step(engine, peers, one, 0, step) for step in (1, 2, 3)])
        finally:
            world.destroy()
    return histories


DESCENTS = {
    "with momentum": {"sgd_momentum": 0.9},
    "without": {"sgd_momentum": 0.0},
    "fused": {"sgd_momentum": 0.9},
}


def descents(rank: int, store: Any, path: str) -> dict[str, Any] | None:
    """Steps 2 and 3 of SGD, the names of its state, and the same after loading step 1. On rank 0."""
    import megatron.core.optimizer as core
    from torch.distributed import PrefixStore

    from spare_megatron.megatron_adapter.checkpoint import group_checkpoint
    from tests.megatron import groups

    if rank:
        return None
    found: dict[str, Any] = {}
    torchs = core.SGD
    for (name, given), start in itertools.product(DESCENTS.items(), (1, 2)):
        core.SGD = fused_descent() if name == "fused" else torchs
        small = {"num_layers": 1, "bf16": name != "without"}
        one = case(groups=1, steps=STEPS, tied=False, transformer=small, optimizer={"optimizer": "sgd", **given})
        engine = groups.engine_of(one, 0, PrefixStore(f"{name}{start}", store))
        try:
            peers = groups.peers_of(PrefixStore(f"peers {name}{start}", store), 0, 1)
            if start > 1:
                group_checkpoint.load(f"{path} {name}", engine.replica)
            for step in range(start, 4):
                reported = groups.one_step(engine, peers, one, 0, step)
                if step == 1:
                    group_checkpoint.save(f"{path} {name}", engine.replica, step=1, consumed_samples=16)
            states = engine.replica.optimizer.chained_optimizers[0].optimizer.state.values()
            kinds = sorted({kind for state in states for kind in state})
            found.setdefault(name, []).append([reported, kinds, engine.weights_checksums()])
        finally:
            groups.group_world.destroy()
    core.SGD = torchs
    return found


def fused_descent() -> type:
    """A class that is no SGD of torch's, as that of transformer-engine and apex."""
    import torch

    class FusedSGD(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float, momentum: float, weight_decay: float) -> None:
            super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for one in group["params"]:
                    state = self.state[one]
                    if "momentum_buffer" not in state:
                        state["momentum_buffer"] = torch.zeros_like(one.data)
                    state["momentum_buffer"].mul_(group["momentum"]).add_(one.grad)
                    one.sub_(group["lr"] * state["momentum_buffer"])

    return FusedSGD


def without_optimizer(rank: int, store: Any, path: str) -> dict[str, Any] | None:
    """What a checkpoint that was saved with --no-save-optim has, and what loading it gives. On rank 0."""
    from torch.distributed import PrefixStore

    from spare_megatron.config.errors import ConfigError
    from spare_megatron.megatron_adapter.checkpoint import group_checkpoint
    from spare_megatron.megatron_adapter.checkpoint.digest import model_tensors
    from tests.megatron import groups

    if rank:
        return None
    one = case(groups=1, steps=STEPS, tied=False, transformer={"num_layers": 1})
    engine = groups.engine_of(one, 0, store)
    try:
        peers = groups.peers_of(PrefixStore("peers", store), 0, 1)
        groups.one_step(engine, peers, one, 0, 1)
        saved = weights(engine)
        group_checkpoint.save(path, engine.replica, optimizer=False, step=1, consumed_samples=16)
        names = list(model_tensors(path, optimizer=True))
        groups.one_step(engine, peers, one, 0, 2)
        reported = ""
        try:
            group_checkpoint.load(path, engine.replica)
        except ConfigError as error:
            reported = str(error)
        step = group_checkpoint.load(path, engine.replica, optimizer=False).step
        return {"names": names, "said": reported, "step": step, "same": weights(engine) == saved}
    finally:
        groups.group_world.destroy()


def weights(engine: Any) -> dict[str, int]:
    """The checksums of the weights, not of the optimizer's state."""
    return {name: one for name, one in engine.weights_checksums().items() if "of state shard" not in name}


def run(
    rank: int, store: Any, one: dict[str, Any], start: str | None, target: str, shards: int | None = SHARDS
) -> list[Any] | None:
    """Train from scratch to the last step, saving step SAVED; or load it, save it again at once and go on. What is
    loaded has the number ``shards`` of state shards, None where plain megatron-core has written it."""
    from torch.distributed import PrefixStore

    from spare_megatron.megatron_adapter.model import world
    from tests.megatron import groups

    size = groups.shape_of(one).group_size
    group, position = divmod(rank, size)
    if group >= one["groups"]:
        return None
    engine = groups.engine_of(one, position, PrefixStore(f"group{group}", store))
    try:
        peers = groups.peers_of(PrefixStore(f"peers{position}", store), group, one["groups"])
        if start is None:
            first = [groups.one_step(engine, peers, one, group, step) for step in range(1, SAVED + 1)]
            write(engine, group, target)
            return first + [groups.one_step(engine, peers, one, group, step) for step in range(SAVED + 1, STEPS + 1)]
        read(engine, start, shards)
        write(engine, group, target)
        return [groups.one_step(engine, peers, one, group, step) for step in range(SAVED + 1, STEPS + 1)]
    finally:
        world.destroy()


def write(engine: Any, group: int, target: str) -> None:
    from spare_megatron.megatron_adapter.checkpoint import group_checkpoint

    batch = engine.world.shape.global_batch_size
    if group == 0:
        group_checkpoint.save(
            target,
            engine.replica,
            step=SAVED,
            consumed_samples=SAVED * batch,
            args={"flag": "value"},
            state_shards=SHARDS,
        )


def read(engine: Any, start: str, shards: int | None) -> None:
    from spare_megatron.config.errors import ConfigError
    from spare_megatron.megatron_adapter.checkpoint import group_checkpoint

    with pytest.raises(ConfigError, match="has no checkpoint"):
        group_checkpoint.load(start + "-absent", engine.replica)
    two_stages = engine.world.shape.pipeline == 2
    if start.endswith("experts") and two_stages:
        with pytest.raises(ConfigError, match=r"cannot be loaded into this model: .*; give the flags of the model"):
            group_checkpoint.load(start.replace("experts", "dense"), engine.replica)
    if start.endswith("dense") and two_stages:
        scheduler = engine.replica.scheduler
        scheduler.lr_decay_steps, scheduler.use_checkpoint_opt_param_scheduler = 1, False
        with pytest.raises(ConfigError, match=r"schedule of .* is not that of these flags .*--override-opt_param"):
            group_checkpoint.load(start, engine.replica)
        scheduler.use_checkpoint_opt_param_scheduler = True
    loaded = group_checkpoint.load(start, engine.replica)
    assert (loaded.step, loaded.consumed_samples) == (SAVED, SAVED * engine.world.shape.global_batch_size)
    assert loaded.args.get("flag", "value") == "value"
    assert loaded.state_shards == shards


def plain_load(rank: int, store: Any, path: str) -> float | None:
    """Loss of a batch, computed by a model that megatron-core alone built and loaded; rank 0 only."""
    if rank:
        return None
    import torch
    import torch.distributed as dist
    from megatron.core import dist_checkpointing
    from megatron.core import parallel_state as mpu

    from tests.megatron import plain_reference, toy

    dist.init_process_group("gloo", store=dist.PrefixStore("plain", store), rank=0, world_size=1)
    mpu.initialize_model_parallel()
    try:
        chunks, _, _ = plain_reference.build({**case(**DENSE), "seed": 99})
        model = chunks[0].module
        state = dist_checkpointing.load({"model": model.sharded_state_dict()}, path)
        model.load_state_dict(state["model"])
        batch = toy.microbatch(range(SAVED * BATCH, (SAVED + 1) * BATCH))
        with torch.no_grad():
            output, loss = toy.forward_step(iter([batch]), model.eval())
            total, _, report = loss(output)
        assert state["iteration"] == SAVED
        return float(total / report["lm loss"][1])
    finally:
        mpu.destroy_model_parallel()
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(once: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    directory: Path = tmp_path_factory.mktemp("checkpoints")
    worker = "tests.megatron.test_checkpointing:worker"
    found: list[Any] = once("checkpointing", lambda: run_ranks(worker, [str(directory)] * 4))
    return found


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in RESUMED for name in RESUMED[kind]])
def test_resumes_under_this_layout(results: list[Any], kind: str, name: str) -> None:
    print(f"seed {SEED}")
    histories = results[0]["histories"][kind]
    expected, got = histories["first"][SAVED:], histories[name]
    same_layout = RESUMED[kind][name] == FIRST[kind]
    tolerance = 0.0 if same_layout else 1e-5 if kind != "half" else 5e-3
    for step, (a, b) in enumerate(zip(expected, got, strict=True), SAVED + 1):
        assert b["loss"] == pytest.approx(a["loss"], rel=tolerance, abs=0), f"step {step}"
        assert b["lr"] == a["lr"]
    one, other = histories[f"digest {name}"]
    assert one == other


def test_plain_megatron_core_reads_it(results: list[Any]) -> None:
    expected = results[0]["histories"]["dense"]["first"][SAVED]["loss"]
    assert results[0]["plain"] == pytest.approx(expected, rel=1e-2)


def test_rates_are_those_that_the_flags_or_the_checkpoint_say(results: list[Any]) -> None:
    """Parameter groups that differ in their rates alone are distinguished; the schedule that is asked for counts."""
    found = results[0]["rates"]
    saved = found["saved"]
    assert len(set(saved)) == 2
    assert found["same"] == saved
    assert found["flags"] == pytest.approx([0.5 * rate for rate in saved])
    # rates that are not the schedule's are the flags'
    assert found["its"] == pytest.approx([rate if rate == max(saved) else 0.5 * rate for rate in saved])


@pytest.mark.parametrize("kind", DESCENTS)
def test_sgd_goes_on_from_a_checkpoint(results: list[Any], kind: str) -> None:
    """megatron-core has no function that begins its state."""
    trained, resumed = results[0]["descents"][kind]
    assert resumed == trained
    assert trained[1] == ([] if kind == "without" else ["momentum_buffer"])


def test_a_checkpoint_without_the_optimizer_has_the_weights(results: list[Any]) -> None:
    found = results[0]["without"]
    assert found["names"]
    assert not [name for name in found["names"] if name.startswith("optimizer.")]
    assert "has no optimizer state, as it was saved with --no-save-optim; add --no-load-optim" in found["said"]
    assert (found["step"], found["same"]) == (1, True)


def test_state_before_the_first_update(results: list[Any]) -> None:
    trained, resumed = results[0]["unused"]
    assert trained == resumed
    first = results[0]["histories"]["dense"]["first"]
    assert trained[0]["loss"] == pytest.approx(first[0]["loss"], rel=1e-5)
    assert trained[2]["loss"] == pytest.approx(first[2]["loss"], rel=1e-5)

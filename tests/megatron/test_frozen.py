"""Exact sums where parameters are frozen: all of a stage, or tied embeddings. The weights do not depend on the number
of stages, a group in a smaller shape has home's rows, and a job that goes on from a checkpoint ends as one that went
on."""

from __future__ import annotations

import re
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.megatron import toy
from tests.megatron.test_engine import alone
from tests.megatron.test_parity import case
from tests.spawn import run_ranks

pytestmark = pytest.mark.timeout(120)

FROZEN = {
    "the first stage": r"embedding|output_layer|layers\.[01]\.",
    "tied embeddings": r"word_embeddings|output_layer",
    "all but a norm": r"^(?!decoder.final)",
}
STEPS = 2
HOME = {"reduce": "exact", "groups": 1, "global_batch_size": 4, "steps": STEPS, "optimizer": {"clip_grad": 0.05}}


SAVED = 3
"""The first step that ``exact32`` applies."""
RESUMED = {"fp32": {"reduce": "exact"}, "bf16": {"reduce": "exact32", "transformer": {"bf16": True}}}


def worker(rank: int, store: Any, directory: str) -> dict[str, Any]:
    """Row by row the checksums of the sums, and the weights by their names, of each case and number of stages; and what
    the job and one that goes on from its checkpoint have in the end, where nothing of the first stage is trained."""
    from torch.distributed import PrefixStore

    from spare_megatron.megatron_adapter.model import world as group_world

    found: dict[str, Any] = {}
    for kind, pattern in FROZEN.items():
        for stages in (2, 1):
            if rank < stages:
                place = PrefixStore(f"{kind} {stages}", store)
                found[f"{kind}, {stages}"] = trained(case(pipeline=stages, **HOME), pattern, rank, place)
    plain = {"optimizer": "sgd", "sgd_momentum": 0.0}
    one = case(pipeline=2, **{**HOME, "optimizer": plain})
    engine = engine_of(one, FROZEN["the first stage"], rank, PrefixStore("plain", store))
    found["refused without state"] = refusal(engine)
    group_world.destroy()
    for kind, changes in RESUMED.items():
        one, pattern = case(pipeline=2, **{**HOME, **changes}), FROZEN["all but a norm"]
        for way in ("saved", "loaded"):
            place = PrefixStore(f"{kind} {way}", store)
            found[f"{kind}, {way}"] = resumed(one, pattern, rank, place, f"{directory}/{kind}", way == "loaded")
    return found


def resumed(one: dict[str, Any], pattern: str, position: int, store: Any, path: str, loads: bool) -> dict[str, int]:
    """The checksums of weights and state after a step that follows the checkpoint."""
    from spare_megatron.megatron_adapter.checkpoint import group_checkpoint
    from spare_megatron.megatron_adapter.model import world as group_world

    engine = engine_of(one, pattern, position, store)
    try:
        if loads:
            loaded = group_checkpoint.load(path, engine.replica)
            engine.exact.restore(loaded.rank_state, loaded.read_rank_states)
        for step in range(SAVED + 1 if loads else 1, SAVED + 2):
            alone(engine, step, [[0, 1]])
            if step == SAVED:
                kept = engine.exact.state
                group_checkpoint.save(path, engine.replica, step=step, consumed_samples=0, rank_state=kept)
        return dict(engine.weights_checksums())
    finally:
        group_world.destroy()


def engine_of(one: dict[str, Any], pattern: str, position: int, store: Any, **options: Any) -> Any:
    """An engine whose parameters with this pattern in their names are frozen."""
    from spare_megatron.megatron_adapter.megatron_engine import MegatronEngine
    from spare_megatron.megatron_adapter.model import world as group_world
    from spare_megatron.megatron_adapter.model.replica import build_replica, default_model_provider, transformer_config
    from tests.megatron import groups

    settings, shape = groups.settings_of(one), groups.shape_of(one)
    world = group_world.init_group_world(shape, position, store, timeout_s=60.0)
    provide = default_model_provider(settings, transformer_config(settings, shape))
    replica = build_replica(settings, world, lambda *a, **named: frozen(provide(*a, **named), pattern))
    forward = partial(toy.forward_step, convention=one["convention"])
    return MegatronEngine(replica, world, forward, groups.source_of(shape, 0), method=one["reduce"], **options)


def trained(one: dict[str, Any], pattern: str, position: int, store: Any) -> dict[str, Any]:
    from spare_megatron.config.rows import RowCut
    from spare_megatron.config.stage_cut import StageCut
    from spare_megatron.megatron_adapter.model import world as group_world
    from spare_megatron.megatron_adapter.model.global_names import parameter_names, unwrapped
    from tests.megatron import groups

    cut = RowCut(StageCut(toy.TRANSFORMER["num_layers"], 2), (1,))
    rows = tuple(range(cut.number)) if one["pipeline"] == 1 else ()
    engine = engine_of(one, pattern, position, store, rows=rows, cut=cut)
    names = parameter_names(engine.replica.chunks)
    for parameter, name in names.items():
        of_name = torch.Generator().manual_seed(
            zlib.crc32(name.replace("output_layer", "embedding.word_embeddings").encode())
        )
        parameter.data.copy_(0.02 * torch.randn(parameter.shape, generator=of_name))
    refused = refusal(engine)
    done = list[int]()
    engine.on_piece = lambda phase, n: done.append(n) if phase == "backward" else None
    try:
        sums = []
        for step in range(1, STEPS + 1):
            engine.begin_step(step)
            engine.run(step, groups.run_of(groups.dealt(one, 0)[0]))
            tensors = [tensor.clone() for tensor in engine.local_sum()]
            sums.append([zlib.crc32(tensor.numpy().tobytes()) for tensor in tensors if tensor.numel()])
            results, rest = list[torch.Tensor](), list(tensors)
            for row in engine.rows():
                results += groups.results_of(row.conversion(), rest[: row.sums])
                del rest[: row.sums]
            engine.apply(step, results, engine.scalars())
        weights = {name: zlib.crc32(parameter.detach().numpy().tobytes()) for parameter, name in names.items()}
        begin = [row.state_tensors() for row in engine.rows()]
        if position + 1 == one["pipeline"]:
            unwrapped(engine.replica.chunks[0]).sharded_state_dict = cannot_be_saved
        return {
            "sums": sums,
            "weights": weights,
            "state": [sorted(tensors) for tensors in begin],
            "done": done,
            "refused": [refused, refusal(engine)],
        }
    finally:
        group_world.destroy()


def refusal(engine: Any) -> str:
    """Why the model cannot be saved, if it cannot."""
    from spare_megatron.config.errors import ConfigError
    from spare_megatron.megatron_adapter.checkpoint.group_checkpoint import Checkpointer

    try:
        Checkpointer(engine.replica).check()
    except ConfigError as error:
        return str(error)
    return ""


def cannot_be_saved(**_: Any) -> None:
    raise AssertionError("a key too many")


def frozen(model: torch.nn.Module, pattern: str) -> torch.nn.Module:
    """With the parameters whose names in the whole model have the pattern."""
    first = model.decoder.layers[0].layer_number - 1  # type: ignore[union-attr,index]
    for name, one in model.named_parameters():
        whole = re.sub(r"layers\.(\d+)", lambda found: f"layers.{first + int(found[1])}", name)
        one.requires_grad_(re.search(pattern, whole) is None)
    return model


def test_what_is_frozen_changes_neither_sums_nor_shapes_nor_checkpoints(tmp_path: Path) -> None:
    first, second = run_ranks("tests.megatron.test_frozen:worker", [str(tmp_path)] * 2)
    for rank in (first, second):
        assert not rank["refused without state"], "SGD without momentum has nothing to save"
        for kind in RESUMED:
            assert rank[f"{kind}, loaded"] == rank[f"{kind}, saved"], f"{kind}: weights or state of a resumed job"
    for kind in FROZEN:
        home, smaller = (first[f"{kind}, 2"], second[f"{kind}, 2"]), first[f"{kind}, 1"]
        together = {**home[1]["weights"], **home[0]["weights"]}
        shared = "output_layer.weight"
        assert together.pop(shared, None) in (None, together["embedding.word_embeddings.weight"])
        assert smaller["weights"] == together, kind
        for one in (*home, smaller):
            layers = "megatron-core stores that of all layers as one tensor, and some of them are frozen"
            assert (layers in one["refused"][0]) == (kind == "the first stage"), f"{kind}: {one['refused']}"
            assert one["refused"][1] == "this model cannot be saved: a key too many; leave --save out", (
                "all ranks say so"
            )
        assert [one["done"] for one in (*home, smaller)] == [[0, 1] * STEPS] * 3, f"{kind}: pieces done"
        assert smaller["sums"] == [a + b for a, b in zip(home[0]["sums"], home[1]["sums"], strict=True)], kind
        assert smaller["state"] == home[0]["state"] + home[1]["state"], kind

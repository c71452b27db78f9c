"""From one checkpoint, jobs of other pipeline splits, virtual stages, inner data parallelism, recomputation and numbers
of groups end with the same weights and optimizer moments, bit for bit: with clipping, dropout, experts, and a forward
step that draws random numbers.

The number of microbatches of a batch and of a piece is the same for all of them. One start of processes goes through
all layouts that fit on them, one after the other.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from spare_megatron.exact_sum.gradient_norm import gradient_norm
from spare_megatron.megatron_adapter.checkpoint.digest import digest
from spare_megatron.megatron_adapter.model.global_names import global_names, parameter_names
from spare_megatron.megatron_adapter.shims import install_cpu_shims
from tests.megatron import toy
from tests.megatron.test_parity import case
from tests.spawn import run_ranks

CLIP = 0.05
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}
"""Two layers are recomputed from one saved state."""
PLAIN: dict[str, Any] = {
    "groups": 1,
    "micro_batch_size": 1,
    "global_batch_size": 12,
    "reduce": "exact",
    "tied": False,
    "convention": "thinned",
    "steps": 5,
}
ORIGIN, STEPS = 3, 5
"""Steps before the checkpoint, of which ``exact32`` does not apply the first two, and altogether."""
USUAL: dict[str, dict[str, Any]] = {
    "PP2": {"pipeline": 2},
    "PP1, two layers recomputed as one": {"transformer": RECOMPUTED},
    "PP2 1|3": {"pipeline": 2, "transformer": {"num_layers_in_first_pipeline_stage": 1}},
    "PP2, virtual stages": {"pipeline": 2, "virtual": 2},
    "D2, split optimizer": {"inner_data": 2, "optimizer": {"use_distributed_optimizer": True}},
    "2 groups": {"groups": 2},
}
FULL: dict[str, dict[str, Any]] = {
    **USUAL,
    "PP1": {},
    "D2": {"inner_data": 2},
    "PP2, own schedule": {"pipeline": 2, "schedule": "tickets"},
    "PP4": {"pipeline": 4},
    "PP2, D2": {"pipeline": 2, "inner_data": 2},
    "2 groups of PP2, virtual stages": {"groups": 2, "pipeline": 2, "virtual": 2},
    "3 groups": {"groups": 3},
    "3 groups of PP2 3|1": {"groups": 3, "pipeline": 2, "transformer": {"num_layers_in_last_pipeline_stage": 1}},
}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "dense, exact32": {"reduce": "exact32"},
    "bf16": {"transformer": {"bf16": True}},
    "tied": {"tied": True},
    "experts, tied": {"tied": True, "transformer": {**toy.MOE, "moe_input_jitter_eps": 0.01}},
}


def layouts(model: dict[str, Any], some: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Name of each layout -> its case."""
    made = {}
    for name, layout in some.items():
        both = {**model, **layout}
        both["transformer"] = {**DROPOUT, **model.get("transformer", {}), **layout.get("transformer", {})}
        both["optimizer"] = {"clip_grad": CLIP, **layout.get("optimizer", {})}
        made[name] = case(**{**PLAIN, **both})
    return made


def worker(rank: int, store: dist.Store, task: dict[str, Any]) -> dict[str, list[dict[str, float]]]:
    """Train up to the checkpoint in the first layout, then go on from it in each; what the steps reported."""
    first = next(iter(task["layouts"].values()))
    reported = {"origin": _train(rank, dist.PrefixStore("origin", store), first, task["directory"], "origin")}
    if rank == 0:
        store.set("saved", "1")
    store.wait(["saved"])
    for name, layout in task["layouts"].items():
        reported[name] = _train(rank, dist.PrefixStore(name, store), layout, task["directory"], name)
    return {name: lines for name, lines in reported.items() if lines}


def _train(rank: int, store: dist.Store, layout: dict[str, Any], directory: str, name: str) -> list[dict[str, float]]:
    from spare_megatron.megatron_adapter.checkpoint import group_checkpoint
    from spare_megatron.megatron_adapter.model import world
    from tests.megatron.groups import engine_of, one_step, peers_of, shape_of

    group, position = divmod(rank, shape_of(layout).group_size)
    if group >= layout["groups"]:
        return []
    begins, ends = (1, ORIGIN) if name == "origin" else (ORIGIN + 1, STEPS)
    engine = engine_of(layout, position, dist.PrefixStore(f"group{group}", store))
    try:
        if begins > 1:
            loaded = group_checkpoint.load(Path(directory) / "origin", engine.replica)
            engine.exact.restore(loaded.rank_state, loaded.read_rank_states)
        peers = peers_of(dist.PrefixStore(f"peers{position}", store), group, layout["groups"])
        lines = [one_step(engine, peers, layout, group, step) for step in range(begins, ends + 1)]
        if group == 0:
            kept, folder = engine.exact.state, Path(directory) / name
            group_checkpoint.save(folder, engine.replica, step=ends, consumed_samples=0, rank_state=kept)
    finally:
        world.destroy()
    return lines


def compare(directory: Path, made: dict[str, dict[str, Any]], processes: int) -> None:
    task = {"directory": str(directory), "layouts": made}
    reported = run_ranks("tests.megatron.test_layouts:worker", [task] * processes, timeout_s=500.0)[0]
    norms = {name: [line["grad_norm"] for line in lines] for name, lines in reported.items() if name != "origin"}
    assert all(norm > CLIP for some in norms.values() for norm in some), f"clipping does not bite: {norms}"
    lines = {json.dumps(one) for name, one in reported.items() if name != "origin"}
    assert len(lines) == 1, f"layouts report other figures: {lines}"
    digests = {name: digest(directory / name, optimizer=True) for name in made}
    assert len(set(digests.values())) == 1, json.dumps({"digests": digests, "norms": norms}, indent=2)


@pytest.mark.timeout(300)
def test_the_bits_do_not_depend_on_the_layout(tmp_path: Path) -> None:
    compare(tmp_path, layouts({**MODELS["experts, tied"], "global_batch_size": 6}, USUAL), 2)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", MODELS)
def test_the_bits_of_no_model_depend_on_the_layout(tmp_path: Path, model: str) -> None:
    compare(tmp_path, layouts(MODELS[model], FULL), 6)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_bits_of_four_tensor_parallel_ranks_do_not_depend_on_the_layout(tmp_path: Path) -> None:
    norms = {"sequence_parallel": True, "qk_layernorm": True}
    compare(tmp_path, layouts({"tensor": 4, "transformer": norms}, {"PP1": {}, "PP2": {"pipeline": 2}}), 8)


def shared_gradients(rank: int, store: dist.Store, _: None) -> list[list[float]]:
    """Gradients of norms that three tensor-parallel ranks have added, of both layers on one stage and on two."""
    install_cpu_shims()
    from spare_megatron.megatron_adapter.model.finalized_gradients import add_one_by_one

    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    config, found = SimpleNamespace(sequence_parallel=True, qk_layernorm=False), []
    for stages in ([(1, 2)], [(1,), (2,)]):
        norms = {number: torch.nn.LayerNorm(50) for stage in stages for number in stage}
        for number, norm in norms.items():
            for parameter in norm.parameters():
                random = torch.Generator().manual_seed(10 * number + rank)
                parameter.main_grad, parameter.sequence_parallel = torch.randn(50, generator=random), True
        for stage in stages:
            chunk = torch.nn.ModuleList([norms[number] for number in stage])
            chunk.ddp_config = SimpleNamespace(use_megatron_fsdp=False)
            add_one_by_one([chunk], config, dist.group.WORLD)
        found.append([one for norm in norms.values() for one in norm.weight.main_grad.tolist()])
    dist.destroy_process_group()
    return found


def test_a_gradient_that_ranks_share_does_not_depend_on_the_others_of_its_stage() -> None:
    one, other = run_ranks("tests.megatron.test_layouts:shared_gradients", [None] * 3)[0]
    assert one == other


class Numbered(torch.nn.Linear):
    """A layer with its number in the model, from 1."""

    def __init__(self, number: int) -> None:
        super().__init__(1, 1, bias=False)
        self.layer_number = number


def stage(first: int, **parts: torch.nn.Module) -> torch.nn.Module:
    """A wrapped chunk with two layers from number ``first`` on."""
    model = torch.nn.Module()
    model.decoder = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([Numbered(first), Numbered(first + 1)])})
    model.pre_process = first == 1
    for name, part in parts.items():
        model.add_module(name, part)
    wrapped = torch.nn.Module()
    wrapped.module = torch.nn.Module()
    wrapped.module.module = model
    return wrapped


def test_names_are_those_of_the_whole_model() -> None:
    """Also of a second chunk, a prediction layer's embedding, and chunks of a user's model that number from 1 each."""
    first, second = (global_names([stage(one, embedding=torch.nn.Embedding(2, 1))])[0] for one in (1, 5))
    assert first == {
        "decoder.layers.0.weight": "decoder.layers.0.weight",
        "decoder.layers.1.weight": "decoder.layers.1.weight",
        "embedding.weight": "embedding.weight",
    }
    assert list(second.values()) == ["decoder.layers.4.weight", "decoder.layers.5.weight", "mtp.embedding.weight"]
    plain = [stage(1), stage(1)]
    assert list(global_names(plain)[1].values()) == [f"decoder.layers.{n}.weight of chunk 1" for n in (0, 1)]
    assert len(set(parameter_names(plain).values())) == 4


@pytest.mark.filterwarnings("ignore:full scope is deprecated")
def test_layers_of_any_class_draw_by_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of megatron-core's state-space models, which are no transformer layers, as two stages and as one."""
    install_cpu_shims()
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    from spare_megatron.megatron_adapter.model import rng

    class Mixer(torch.nn.Module):
        """In the place of one that needs a GPU."""

        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__()

        def forward(self, given: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
            return given * 0.5, None

    monkeypatch.setattr(rng.core_random, "_CUDA_RNG_STATE_TRACKER", rng.core_random.CudaRNGStatesTracker())
    monkeypatch.setattr(rng.core_random, "initialize_rng_tracker", lambda *_: None)
    config = TransformerConfig(
        num_layers=4, hidden_size=8, num_attention_heads=2, hidden_dropout=0.5, bias_dropout_fusion=False
    )
    groups: Any = SimpleNamespace(tp=None)
    parts = MambaLayerSubmodules(mixer=Mixer, mamba_bda=get_bias_dropout_add)

    def trained(*stages: range) -> torch.Tensor:
        hidden = torch.ones(4, 1, 8)
        for numbers in stages:
            layers = [MambaLayer(config, parts, layer_number=one, pg_collection=groups) for one in numbers]
            model = torch.nn.Sequential(*layers)
            rng.set_states_by_layer(model)
            rng.set_piece_states(1, 1, 0, rng.RankKeys(0, 0, 0, 0))
            hidden = model(hidden)
        return hidden

    whole = trained(range(1, 5))
    assert torch.equal(whole, trained(range(1, 3), range(3, 5)))
    assert not torch.equal(whole, trained(range(1, 3), range(1, 3))), "each layer has numbers of its own"


def norms(rank: int, store: dist.Store, ranks: int) -> list[float]:
    """The norms of some vectors, cut in other places for each number of ranks."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    random, found = torch.Generator().manual_seed(5), []
    for special in (None, 3.0e38, torch.inf, torch.nan, 0.0):
        sizes = torch.exp2(torch.randint(-60, 20, (10_001,), generator=random).float())
        vector = sizes * torch.randn(10_001, generator=random) * (special != 0.0)
        if special is not None:
            vector[4321] = special
        parts = vector.tensor_split([700 * (number + 1) for number in range(3 * ranks - 1)])[rank::ranks]
        group = dist.group.WORLD
        assert group is not None
        mine = [([part.view(-1, 1) for part in parts[:1]], group), (parts[1:], group)]
        found.append(gradient_norm(mine, torch.device("cpu")))
        exact = float(vector.double().square().sum().sqrt())
        assert found[-1] == pytest.approx(exact, rel=1e-9, nan_ok=True)
    found.append(gradient_norm([([], group)], torch.device("cpu")))
    dist.destroy_process_group()
    return found


def test_a_norm_does_not_depend_on_the_ranks() -> None:
    results = [repr(one) for ranks in (1, 3) for one in run_ranks("tests.megatron.test_layouts:norms", [ranks] * ranks)]
    assert len(set(results)) == 1, results
    assert results[0].endswith("inf, nan, 0.0, 0.0]"), results

"""Optimizers beside Adam and SGD, and maximal update parametrization: they train as plain megatron-core does, their
state reaches checkpoints and ranks that take over, and kills change no bit.

Muon, Lion and SOAP need emerging-optimizers, which needs megatron-core 0.18 and Python 3.12; AdEMAMix runs everywhere.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from spare_megatron.checkpoint.folder import last_good
from spare_megatron.flags.optimizer_flags import CORE_OF_EMERGING, PACKAGE
from spare_megatron.megatron_adapter.checkpoint.digest import digest, model_tensors
from spare_megatron.megatron_adapter.versions import release
from tests.megatron.test_kinds_of_models import killed_and_failure_free
from tests.megatron.test_parity import MOE, SEED, case, compare
from tests.megatron.test_transferred_state import SPLIT, one_group, unlike
from tests.process.harness import Job, launch
from tests.spawn import run_ranks

pytestmark = pytest.mark.timeout(600)

MISSING = importlib.util.find_spec(PACKAGE.replace("-", "_")) is None or release() < CORE_OF_EMERGING
needs_emerging = pytest.mark.skipif(MISSING, reason=f"needs pip install {PACKAGE} and megatron-core 0.18")
needs_widths = pytest.mark.skipif(release() < (0, 17), reason="needs megatron-core 0.17")

MUON = {"optimizer": "muon", "muon_tp_mode": "duplicated", "muon_momentum": 0.95, "muon_nesterov": True}
EXACTLY = {"muon_fp32_matmul_prec": "highest"}
"""Newton-Schulz iterations in fp32: those in bf16 make much of the last bit of a sum."""
LION = {"optimizer": "lion", "lr": 1e-3, "min_lr": 1e-4}
SOAP = {"optimizer": "soap", "lr": 3e-3, "min_lr": 3e-4}
GATED = {"gated_linear_unit": True, "normalization": "RMSNorm", "add_bias_linear": False}
WIDTHS = {"use_mup": True, "mup_base_hidden_size": 16, "mup_embedding_mult": 2.0}
MIXED = {"optimizer": "ademamix", **SPLIT}
SLOW = {"ademamix_alpha": 4.0, "ademamix_beta3": 0.99, "ademamix_alpha_warmup": 4, "ademamix_beta3_warmup": 4}


def plain(**changes: Any) -> dict[str, Any]:
    return case(global_batch_size=16, **changes)


# name -> (case of all ranks, marks)
PLAIN: dict[str, tuple[dict[str, Any], Any]] = {
    "Muon": (plain(optimizer={**MUON, **EXACTLY}), needs_emerging),
    "Muon, TP2": (plain(groups=1, tensor=2, optimizer={**MUON, **EXACTLY}), needs_emerging),
    "Muon, TP2, distributed": (
        plain(groups=1, tensor=2, optimizer={**MUON, **EXACTLY, "muon_tp_mode": "distributed"}),
        needs_emerging,
    ),
    "Muon, MoE, EP2": (
        plain(groups=1, inner_data=2, expert=2, transformer=MOE, optimizer={**MUON, **EXACTLY}),
        needs_emerging,
    ),
    "Muon, Lion beside it": (plain(optimizer={**MUON, **EXACTLY, "muon_scalar_optimizer": "lion"}), needs_emerging),
    "Lion": (plain(optimizer=LION), needs_emerging),
    "SOAP": (plain(optimizer=SOAP), needs_emerging),
    "SOAP, TP2": (plain(groups=1, tensor=2, optimizer=SOAP), needs_emerging),
    "muP": (plain(transformer=WIDTHS, tied=False), needs_widths),
    "muP, Muon": (plain(transformer=WIDTHS, tied=False, optimizer={**MUON, **EXACTLY}), needs_emerging),
}
"""What plain megatron-core trains too."""
KEPT: dict[str, tuple[dict[str, Any], Any]] = {
    "Muon, TP2, bf16": (one_group({"bf16": True}, tensor=2, reduce="exact", optimizer=MUON), needs_emerging),
    "Lion, PP2": (one_group({}, pipeline=2, reduce="exact", optimizer=LION), needs_emerging),
    "SOAP, PP2": (one_group({}, pipeline=2, reduce="exact", optimizer=SOAP), needs_emerging),
    "SOAP, TP2, SwiGLU, bf16": (
        one_group({**GATED, "bf16": True}, tensor=2, tied=False, reduce="exact", optimizer=SOAP),
        needs_emerging,
    ),
    "SOAP, MoE, EP2": (one_group(MOE, inner_data=2, expert=2, reduce="exact", optimizer=SOAP), needs_emerging),
    "muP, PP2": (one_group(WIDTHS, pipeline=2, tied=False, reduce="exact", optimizer={"adam_eps": 1e-3}), needs_widths),
    "AdEMAMix, D2": (one_group({}, inner_data=2, reduce="exact", optimizer=MIXED, ademamix=SLOW), ()),
    "AdEMAMix, D2, bf16": (one_group({"bf16": True}, inner_data=2, optimizer=MIXED, ademamix=SLOW), ()),
}
"""Groups of two ranks, whose state is saved, and taken over."""


def names(cases: dict[str, tuple[dict[str, Any], Any]]) -> list[Any]:
    return [pytest.param(name, marks=marks) for name, (_, marks) in cases.items()]


def here(cases: dict[str, tuple[dict[str, Any], Any]]) -> dict[str, dict[str, Any]]:
    """The cases that this megatron-core has."""
    return {name: one for name, (one, marks) in cases.items() if not (marks and marks.args[0])}


def worker(rank: int, store: Any, directory: str) -> dict[str, Any]:
    """On each of two ranks: all cases."""
    from torch.distributed import PrefixStore

    from tests.megatron.test_parity import both
    from tests.megatron.test_transferred_state import Transfer

    kept = here(KEPT)
    return {
        **both(rank, PrefixStore("plain", store), here(PLAIN)),
        "resumed": {
            name: resumed(rank, PrefixStore(f"resumed{name}", store), one, f"{directory}/{name}")
            for name, one in kept.items()
        },
        "moved": {} if MISSING else moved(rank, PrefixStore("moved", store), f"{directory}/moved"),
        "taken over": {name: Transfer(one, rank, PrefixStore(name, store)).found() for name, one in kept.items()},
    }


def resumed(rank: int, store: Any, one: dict[str, Any], path: str) -> dict[str, Any]:
    """Two steps, saved; what a fresh engine has after loading them that the first had not, and which weights of the
    third step are others."""
    import torch
    from torch.distributed import PrefixStore

    from spare_megatron.megatron_adapter.checkpoint import group_checkpoint
    from spare_megatron.megatron_adapter.model import world
    from tests.megatron import groups

    def state(engine: Any) -> dict[str, Any]:
        return {name: tensor.clone() for name, tensor in engine.state_tensors().items()} | engine.state_values()

    seen: list[tuple[dict[str, Any], dict[str, int]]] = []
    for name in ("first", "second"):
        engine = groups.engine_of({**one, "seed": SEED + len(seen)}, rank, PrefixStore(name, store))
        try:
            engine.replica.settings = dataclasses.replace(engine.replica.settings, seed=SEED)
            peers = groups.peers_of(PrefixStore(f"{name} peers{rank}", store), 0, 1)
            if name == "first":
                for step in (1, 2):
                    groups.one_step(engine, peers, one, 0, step)
                exact = None if engine.exact is None else engine.exact.state
                group_checkpoint.save(path, engine.replica, step=2, consumed_samples=8, rank_state=exact)
            else:
                loaded = group_checkpoint.load(path, engine.replica)
                if engine.exact is not None:
                    engine.exact.restore(loaded.rank_state, loaded.read_rank_states)
            engine.begin_step(3)
            before = state(engine)
            groups.one_step(engine, peers, one, 0, 3)
            seen.append((before, dict(engine.weights_checksums())))
        finally:
            world.destroy()
    (one_state, one_weights), (other_state, other_weights) = seen
    assert torch.is_tensor(next(iter(one_state.values())))
    return {"state": unlike(other_state, one_state), "weights": one_weights == other_weights}


LAYOUTS = {"stages": {"pipeline": 2}, "data": {"inner_data": 2}, "tensor": {"tensor": 2}}


def moved(rank: int, store: Any, path: str) -> dict[str, Any]:
    """SOAP's state of two pipeline stages, saved; what another layout saves after it has loaded that, and how a third
    one refuses."""
    from torch.distributed import PrefixStore

    from spare_megatron.config.errors import ConfigError
    from spare_megatron.megatron_adapter.checkpoint import group_checkpoint
    from spare_megatron.megatron_adapter.model import world
    from tests.megatron import groups

    found = {}
    for number, (name, layout) in enumerate(LAYOUTS.items()):
        one = one_group(GATED, tied=False, optimizer=SOAP, **layout)
        engine = groups.engine_of({**one, "seed": SEED + number}, rank, PrefixStore(name, store))
        try:
            if number == 0:
                peers = groups.peers_of(PrefixStore(f"{name} peers{rank}", store), 0, 1)
                groups.one_step(engine, peers, one, 0, 1)
            else:
                group_checkpoint.load(f"{path} stages", engine.replica)
            group_checkpoint.save(f"{path} {name}", engine.replica, step=1, consumed_samples=4)
        except ConfigError as error:
            found[name] = str(error)
        finally:
            world.destroy()
    return found


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("optimizers")


@pytest.fixture(scope="module")
def results(directory: Path) -> list[Any]:
    return run_ranks("tests.megatron.test_optimizers:worker", [str(directory)] * 2, timeout_s=560.0)


@pytest.mark.parametrize("name", names(PLAIN))
def test_ten_steps_equal_plain_megatron_core(results: list[Any], name: str) -> None:
    compare(name, results)


@pytest.mark.parametrize("name", names(KEPT))
def test_a_checkpoint_has_the_whole_state(results: list[Any], name: str) -> None:
    for rank in results:
        assert rank["resumed"][name] == {"state": [], "weights": True}


@needs_emerging
def test_soap_goes_on_with_other_stages_and_data_ranks_but_not_with_other_tensor_ranks(
    results: list[Any], directory: Path
) -> None:
    one, other = (digest(directory / f"moved {name}", optimizer=True) for name in ("stages", "data"))
    assert one == other
    for rank in results:
        assert list(rank["moved"]) == ["tensor"]
        assert "cannot be loaded into this model" in rank["moved"]["tensor"]


@pytest.mark.parametrize("name", names(KEPT))
def test_whoever_takes_over_a_state_goes_on_as_its_donor(results: list[Any], name: str) -> None:
    for rank in results:
        assert rank["taken over"][name]["wrong"] == []
        assert rank["taken over"][name]["needless"] == []


# ------------------------------------------------------------------------------------------------------- real jobs

FLAGS = (
    *("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "32"),
    *("--max-position-embeddings", "32", "--micro-batch-size", "1", "--lr", "1e-3", "--clip-grad", "1.0"),
    *("--train-iters", "2000", "--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "127"),
    *("--attention-dropout", "0.1", "--hidden-dropout", "0.1", "--log-interval", "1", "--split", "100,0,0"),
    *("--eval-iters", "0", "--num-workers", "0", "--global-batch-size", "6", "--spare-piece-microbatches", "1"),
)
TP2 = ("--tensor-model-parallel-size", "2")
PP2 = ("--pipeline-model-parallel-size", "2")
D2 = ("--spare-inner-data-parallel", "2", "--use-distributed-optimizer")
WARMED = ("--ademamix-alpha", "8", "--ademamix-alpha-warmup", "100", "--ademamix-beta3-warmup", "100")
JOBS: dict[str, tuple[tuple[str, ...], set[str], Any]] = {
    "muon": (
        (*TP2, "--optimizer", "muon", "--muon-tp-mode", "duplicated", "--muon-momentum", "0.95"),
        {"momentum_buffer", "exp_avg", "exp_avg_sq"},
        needs_emerging,
    ),
    "dist_muon, bf16": (
        (*PP2, "--bf16", "--optimizer", "dist_muon", "--muon-nesterov"),
        {"momentum_buffer", "exp_avg", "exp_avg_sq"},
        (needs_emerging, pytest.mark.full),
    ),
    "lion": ((*PP2, "--optimizer", "lion"), {"exp_avg", "exp_avg_sq"}, needs_emerging),
    "soap": ((*TP2, "--optimizer", "soap"), {"L", "R", "Q_L", "Q_R", "exp_avg", "exp_avg_sq"}, needs_emerging),
    "muP, offload": (
        (*PP2, "--use-mup", "--mup-base-hidden-size", "16", "--optimizer-cpu-offload"),
        {"exp_avg", "exp_avg_sq"},
        needs_widths,
    ),
    "ademamix": ((*D2, "--optimizer", "ademamix", *WARMED), {"exp_avg_fast", "exp_avg_slow", "exp_avg_sq"}, ()),
}
"""Name -> (flags, the tensors beside weights that a checkpoint has for one or another of them, marks)."""


def train(run_dir: Path, groups: int, *flags: str, optimizer: str, inject: tuple[str, ...] = ()) -> Job:
    words = (*FLAGS, *JOBS[optimizer][0], *flags, "--save", str(run_dir / "save"), "--save-interval", "1000")
    return launch(run_dir, *words, groups=groups, group_size=None, script="pretrain_gpt.py", inject=inject)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("optimizer", [pytest.param(name, marks=one[2]) for name, one in JOBS.items()])
def test_two_kills_and_a_return_change_nothing(tmp_path: Path, optimizer: str) -> None:
    job, _ = killed_and_failure_free(tmp_path, partial(train, optimizer=optimizer))
    one = last_good(job.run_dir / "save")[0]
    saved = {name.split(".")[2] for name in model_tensors(one, optimizer=True) if name.startswith("optimizer.state.")}
    assert saved - {"param", "fp32_param"} == JOBS[optimizer][1]
    assert job.metrics[-1]["loss"] < job.metrics[0]["loss"]


DIVIDED = {
    "ademamix": (("--optimizer", "ademamix", "--bf16", *WARMED), pytest.mark.full),
    "sgd": ((*PP2, "--optimizer", "sgd", "--lr", "1e-2"), pytest.mark.full),
    "muon": (JOBS["muon"][0], needs_emerging),
    "dist_muon, bf16": (JOBS["dist_muon, bf16"][0], needs_emerging),
    "lion": (JOBS["lion"][0], (needs_emerging, pytest.mark.full)),
}
"""Name -> (flags, marks)."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("optimizer", [pytest.param(name, marks=marks) for name, (_, marks) in DIVIDED.items()])
def test_groups_may_keep_a_part_of_the_state(tmp_path: Path, optimizer: str) -> None:
    """State shards are cut at whole matrices where an update needs these."""

    def start(run_dir: Path, groups: int, *flags: str, inject: tuple[str, ...] = ()) -> Job:
        copies = ("--spare-state-redundancy", "2") if groups == 3 else ()
        words = (*FLAGS, *DIVIDED[optimizer][0], *flags, *copies, "--save", str(run_dir / "save"))
        return launch(
            run_dir,
            *(*words, "--save-interval", "1000"),
            groups=groups,
            group_size=None,
            script="pretrain_gpt.py",
            inject=inject,
        )

    killed_and_failure_free(tmp_path, start)

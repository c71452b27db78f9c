"""The long matrix of exact sums: random schedules of kills and flipped bits on real Megatron jobs of many shapes.

What each run saves at its end (all weights, all optimizer state) must have the sha256 of the failure-free run of its
shape. Everything random comes from a seed that is printed; ``SPARE_SCHEDULES_SEED`` gives another one.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from spare_megatron.megatron_adapter.checkpoint.digest import digest
from tests.megatron import test_exact
from tests.megatron.test_exact import EXPERTS, flags_of, reported
from tests.process.harness import launch

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

LAUNCH: dict[str, Any] = {"groups": 2, "group_size": None, "script": "pretrain_gpt.py"}
SEED = int(os.environ.get("SPARE_SCHEDULES_SEED", "20264"))
SCHEDULES_PER_SHAPE = 5
STEPS = 6
train = partial(test_exact.train, steps=STEPS)
POINTS = ("forward", "backward", "reduce", "vote", "apply")
AFTER_A_LOSS = ("rebuild", "patch")
"""Points that exist only in a step in which another group was lost."""
RECOMPUTE = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
UNTIED = "--untie-embeddings-and-output-weights"


@dataclass(frozen=True)
class Shape:
    """A job: groups of ``size`` ranks, and its flags beside those of every run."""

    groups: int
    size: int
    flags: tuple[str, ...]
    pieces: int = 3
    """So many pieces, at least, are in the first segment of each group."""


SHAPES = {
    "TP2 x PP2 x 3, tied, dropout": Shape(
        3, 4, ("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2", "--global-batch-size", "12")
    ),
    "PP2 x 4, tied, recompute": Shape(
        4, 2, ("--pipeline-model-parallel-size", "2", "--global-batch-size", "16", *RECOMPUTE)
    ),
    "PP2 x 4, untied, bf16": Shape(
        4, 2, ("--pipeline-model-parallel-size", "2", "--global-batch-size", "16", "--bf16", UNTIED)
    ),
    "D2 x 4, bf16": Shape(4, 2, ("--spare-inner-data-parallel", "2", "--bf16", "--global-batch-size", "16"), 2),
    "MoE EP2 TP2 x 3, bf16": Shape(3, 4, EXPERTS, 2),
    "x 5": Shape(5, 1, ("--global-batch-size", "20")),
    "PP2 x 4, exact32": Shape(
        4, 2, ("--pipeline-model-parallel-size", "2", "--global-batch-size", "16", "--spare-reduce", "exact32")
    ),
}


@pytest.fixture(scope="module")
def failure_free(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Digest of each shape's run without failures, as far as asked for."""
    return {}


def failure_free_digest(failure_free: dict[str, str], name: str, where: Path) -> str:
    if name not in failure_free:
        shape = SHAPES[name]
        failure_free[name] = train(where / "failure-free", shape.groups, shape.flags)[1]
    return failure_free[name]


def kills(shape: Shape, rng: random.Random, first: bool) -> list[str]:
    """One to four kills of different groups that leave at least one group, in the first schedule of a shape as many as
    there may be; some inside the handling of another."""
    most = min(4, shape.groups - 1)
    number = most if first else rng.randint(1, most)
    specs, step = [], 0
    for group in rng.sample(range(shape.groups), number):
        same = step > 0 and rng.random() < 0.5
        point = rng.choice(AFTER_A_LOSS if same else POINTS)
        step = step if same else rng.randint(1, STEPS)
        position = f",position={rng.randrange(shape.size)}" if rng.random() < 0.5 else ""
        nth = f",n={rng.randrange(shape.pieces)}" if point in ("forward", "backward") else ""
        specs.append(f"sigkill:group={group}{position},step={step},at={point}{nth}")
    return specs


@pytest.mark.parametrize("number", range(SCHEDULES_PER_SHAPE))
@pytest.mark.parametrize("name", SHAPES)
def test_kills_leave_no_trace(tmp_path: Path, failure_free: dict[str, str], name: str, number: int) -> None:
    rng = random.Random(f"{SEED} {name} {number}")
    granularity = rng.choice(("microbatch", "shard"))
    specs = kills(SHAPES[name], rng, first=number == 0)
    print(f"seed {SEED}, {name}, schedule {number}, {granularity}: {' '.join(specs)}")
    flags = (*SHAPES[name].flags, "--spare-granularity", granularity)
    job, found = train(tmp_path / "killed", SHAPES[name].groups, flags, *specs)
    fired = {int(path.name.split("-")[0]) for path in (job.run_dir / "injected").iterdir()}
    print(f"{len(fired)} of {len(specs)} faults happened")
    reached = {number for number, spec in enumerate(specs) if not any(f"at={point}" in spec for point in AFTER_A_LOSS)}
    assert reached <= fired
    assert found == failure_free_digest(failure_free, name, tmp_path)


@pytest.mark.parametrize("reduce", ["exact", "exact32"])
def test_the_number_of_groups_leaves_no_trace(tmp_path: Path, reduce: str) -> None:
    flags = ("--pipeline-model-parallel-size", "2", "--global-batch-size", "16", "--spare-reduce", reduce)
    assert train(tmp_path / "four", 4, flags)[1] == train(tmp_path / "two", 2, flags)[1]


@pytest.mark.parametrize("reduce", ["exact", "exact32"])
def test_a_run_that_leaves_and_resumes_leaves_no_trace(tmp_path: Path, reduce: str) -> None:
    """The scales are in the checkpoint: also exact32 measures once."""
    flags = ("--pipeline-model-parallel-size", "2", "--global-batch-size", "16", "--spare-reduce", reduce)
    whole = train(tmp_path / "whole", 2, flags)[1]
    half = STEPS // 2
    stay = ("--save", str(tmp_path / "save"), "--save-interval", str(half), "--spare-redundancy", "2")
    words = (*flags_of(STEPS), *flags, *stay)
    first = launch(tmp_path / "first", *words, "--exit-interval", str(half), **LAUNCH)
    first.finish(timeout_s=500)
    second = launch(tmp_path / "second", *words, "--load", str(tmp_path / "save"), **LAUNCH)
    second.finish(timeout_s=500)
    assert digest(tmp_path / "save" / f"iter_{STEPS:07d}", optimizer=True) == whole


@dataclass(frozen=True)
class Flip:
    """A flipped bit and what the coordinator must say of it."""

    spec: str
    reported: str


def flips(shape: Shape, rng: random.Random) -> list[Flip]:
    """Five flips in one job of four groups: three in results, one in an accumulator, one in weights. The last two cost
    a group each: they strike in steps 2 and 3 (damaged weights are found in the next step), the others before or after,
    and elsewhere."""
    first, second, *others = rng.sample(range(shape.groups), shape.groups)
    points = rng.sample(["accumulate", "weights"], 2)
    found = []
    for group, step, point in zip((first, second), (2, 3), points, strict=True):
        position = rng.randrange(shape.size)
        spec = f"bitflip:group={group},position={position},step={step},at={point}"
        corrupt = f"group {group} corrupt: rank {position}: the accumulator of"
        diverged = (
            f"group {group} (rank {position}) diverged: its weights after step {step} differ from the majority's: in"
        )
        reported = corrupt if point == "accumulate" else diverged
        found.append(Flip(spec, reported))
    for step in (1, STEPS - 1, STEPS):
        group, position = rng.choice(others), rng.randrange(shape.size)
        spec = f"bitflip:group={group},position={position},step={step},at=reduce"
        found.append(Flip(spec, f"group {group} failed step {step} in epoch"))
    return found


@pytest.mark.parametrize("name", [name for name in SHAPES if SHAPES[name].groups == 4])
def test_flipped_bits_are_found_and_leave_no_trace(tmp_path: Path, failure_free: dict[str, str], name: str) -> None:
    rng = random.Random(f"{SEED} flips {name}")
    chosen = flips(SHAPES[name], rng)
    print(f"seed {SEED}, {name}: {' '.join(one.spec for one in chosen)}")
    job, found = train(tmp_path / "flipped", SHAPES[name].groups, SHAPES[name].flags, *(one.spec for one in chosen))
    for one in chosen:
        assert one.reported in reported(job), f"{one.spec} was not found"
    assert found == failure_free_digest(failure_free, name, tmp_path)

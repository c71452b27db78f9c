"""Groups come back to Megatron jobs in which each keeps only a part of the optimizer's state: weights after every step,
and each copy of a state shard, are those of the job without failures, bit for bit."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks._measured_pretrain import LINES
from spare_megatron.cli import drain as drain_command
from spare_megatron.megatron_adapter.checkpoint.digest import digest
from spare_megatron.monitor.waiting_counts import waiting_counts
from spare_megatron.runtime.run_directory import RunDirectory, read_json
from tests.megatron.test_state_redundancy import (
    DIVIDED,
    EXPERTS,
    FLAGS,
    HALF,
    check_bits,
    start,
    states,
    weights,
)
from tests.process.harness import Job, launch
from tests.process.returning import RETURNS, held

pytestmark = pytest.mark.timeout(400)

PP2 = ("--pipeline-model-parallel-size", "2")
MEASURED = "benchmarks/_measured_pretrain.py"


def members(job: Job) -> list[int]:
    """How many groups each step had."""
    return [line["live_groups"] for line in job.metrics]


def check_members(job: Job, expected: Sequence[int]) -> None:
    """Groups were gone when they were to be, and each was back by the step in which it was to be, or earlier."""
    found = members(job)
    gone = [at for at in range(1, len(expected)) if expected[at] < expected[at - 1]]
    assert [found[at] for at in gone] == [expected[at] for at in gone], f"a group was never gone: {found}"
    assert len(found) == len(expected)
    assert all(one >= other for one, other in zip(found, expected, strict=True)), f"a group was back too late: {found}"


def copies(job: Job) -> dict[str, Any]:
    """What spare-status knows of state shards."""
    return (read_json(RunDirectory(job.run_dir).status) or {}).get("state_copies") or {}


def test_groups_come_back_and_host_shards_again(tmp_path: Path, undisturbed: Path, whole_saves: dict[str, str]) -> None:
    """Saves are ordered while a group comes back, and with the commit that makes it a member."""
    kills = ("sigkill:group=1,step=2,at=reduce", "sigkill:group=2,step=6,at=apply")
    saves = ("--save", str(tmp_path / "save"), "--save-interval", "4")
    waits = (held(4, by=0, until=(1, 1)), held(7, by=0, until=(2, 1)))
    job = start(tmp_path / "run", *DIVIDED, *RETURNS, *saves, inject=(*kills, *waits))
    job.finish(timeout_s=250)
    check_members(job, [3, 2, 2, 2, 3, 3, 2, 3])
    check_bits(job.run_dir, undisturbed)
    for name in ("iter_0000004", "iter_0000008"):
        assert digest(tmp_path / "save" / name, optimizer=True) == whole_saves[name]


def check_levels(job: Job) -> None:
    """Each group keeps two of the three shards again, nothing is being copied, and its optimizers have the memory of
    just that."""
    known, spread = copies(job), Counter[int]()
    for groups in known["hosts"].values():
        spread.update(groups)
    assert spread == {0: 2, 1: 2, 2: 2}, f"not level: {known}"
    assert known["copying"] == known["unable"] == {}
    for group in range(3):
        found = json.loads((job.run_dir / f"{group}.json").read_text())
        assert found["optimizer_bytes"] == pytest.approx(12 * found["elements"] * 2 / 3, rel=0.03)


def start_measured(run_dir: Path, *flags: str, inject: Sequence[str]) -> Job:
    """A job whose ranks write what memory their optimizers have at the end."""
    words = (*FLAGS, *DIVIDED, *RETURNS, *flags)
    environ = {LINES: str(run_dir)}
    return launch(run_dir, *words, groups=3, group_size=None, script=MEASURED, inject=inject, environ=environ)


def test_shards_move_to_a_group_that_is_back(tmp_path: Path, undisturbed: Path) -> None:
    """While it is gone the others keep three shards each."""
    job = start_measured(tmp_path / "run", inject=("sigkill:group=1,step=2,at=reduce", held(4, by=0, until=(1, 1))))
    job.finish(timeout_s=250)
    check_members(job, [3, 2, 2, 2, 3, 3, 3, 3])
    check_bits(job.run_dir, undisturbed)
    check_levels(job)


@pytest.mark.full
def test_shards_move_again_and_again(tmp_path: Path) -> None:
    """A second group is killed while shards move to the first one; then a third, when all is level."""
    steps = ("--train-iters", "24")
    whole = start(tmp_path / "whole", *DIVIDED, *steps)
    whole.finish(timeout_s=200)
    kills = ("sigkill:group=1,step=2,at=reduce", "sigkill:group=2,step=6,at=gather", "sigkill:group=0,step=14,at=apply")
    waits = (held(4, by=0, until=(1, 1)), held(9, by=1, until=(2, 1)), held(17, by=2, until=(0, 1)))
    job = start_measured(tmp_path / "run", *steps, inject=(*kills, *waits))
    job.finish(timeout_s=300)
    counts = members(job)
    assert [counts[at] for at in (0, 2, 5, 7, 13, 15, 23)] == [3, 2, 3, 2, 3, 2, 3], (
        f"too late, or never gone: {counts}"
    )
    assert weights(job.run_dir) == weights(whole.run_dir)
    expected = {at: value for at, value in states(whole.run_dir).items() if at[0]}
    assert {at: value for at, value in states(job.run_dir).items() if at[0]} == expected
    check_levels(job)


@pytest.mark.parametrize(
    ("second", "last"),
    [
        pytest.param("sigkill:group=1,step=3,at=gather,restart=1", (1, 2), marks=pytest.mark.full),
        ("sigkill:group=1,step=3,at=join,restart=1", (1, 2)),
        ("sigkill:group=0,step=3,at=gather", (0, 1)),
    ],
    ids=["in its gather", "before it reports that it has caught up", "the lowest of those that give"],
)
def test_a_group_is_killed_while_another_comes_back(
    tmp_path: Path, undisturbed: Path, second: str, last: tuple[int, int]
) -> None:
    kills = ("sigkill:group=1,step=2,at=reduce", second)
    waits = (held(3, by=2, until=(1, 1)), held(5, by=2, until=last))
    job = start(tmp_path / "run", *DIVIDED, *RETURNS, inject=(*kills, *waits))
    job.finish(timeout_s=250)
    assert members(job) == [3, 2, 2, 2, 2, 3, 3, 3], "a group was back too late, or never gone"
    check_bits(job.run_dir, undisturbed)


@pytest.mark.full  # experts that come back have two ranks as well
@pytest.mark.parametrize("flags", [(), HALF], ids=["bf16", "fp16"])
def test_groups_of_two_ranks_come_back(tmp_path: Path, flags: Sequence[str]) -> None:
    """Checksums of a shard on two ranks are joined in another way where groups keep all: here two jobs are compared
    that keep some. (Where no group is lost, they have the checkpoints of those that keep all:
    :mod:`.test_divided_saves`.)"""
    some = start(tmp_path / "some", *PP2, *DIVIDED, *flags)
    some.finish(timeout_s=200)
    kills = ("sigkill:group=1,position=1,step=2,at=reduce", "sigkill:group=0,position=0,step=6,at=gather")
    waits = (held(4, by=2, until=(1, 1)), held(7, by=2, until=(0, 1)))
    job = start(tmp_path / "run", *PP2, *DIVIDED, *RETURNS, *flags, inject=(*kills, *waits))
    job.finish(timeout_s=250)
    check_members(job, [3, 2, 2, 2, 3, 3, 2, 3])
    check_bits(job.run_dir, some.run_dir)


@pytest.mark.parametrize(
    "inside",
    [pytest.param((), marks=pytest.mark.full), ("--use-distributed-optimizer", "--spare-reduce", "exact32")],
    ids=["each rank sums all", "divided inside, exact32"],
)
def test_experts_come_back_and_are_saved(tmp_path: Path, inside: Sequence[str]) -> None:
    """They have gradient buffers and optimizers of their own, and each of two ranks has other ones. Sums are made while
    gradients are still computed, or, where the ranks of a group divide those of what they share, afterwards."""
    ranks = ("--expert-model-parallel-size", "2", "--spare-inner-data-parallel", "2", "--global-batch-size", "6")
    flags = (*EXPERTS, *ranks, *inside, "--overlap-grad-reduce", "--save-interval", "4")
    kills = ("sigkill:group=1,position=1,step=2,at=reduce", "sigkill:group=2,step=6,at=apply")
    waits = (held(4, by=0, until=(1, 1)), held(7, by=0, until=(2, 1)))
    whole = start(tmp_path / "whole", *flags, "--save", str(tmp_path / "of-whole"), groups=1)
    whole.finish(timeout_s=200)
    saves = ("--save", str(tmp_path / "save"))
    job = start(tmp_path / "run", *flags, *saves, *DIVIDED, *RETURNS, inject=(*kills, *waits))
    job.finish(timeout_s=250)
    check_members(job, [3, 2, 2, 2, 3, 3, 2, 3])
    assert weights(job.run_dir) == weights(whole.run_dir)
    for step in (4, 8):
        one, other = (digest(tmp_path / where / f"iter_{step:07d}", optimizer=True) for where in ("save", "of-whole"))
        assert one == other, f"the checkpoint of step {step}"


def test_a_group_without_memory_for_a_shard_is_not_asked_again(tmp_path: Path, undisturbed: Path) -> None:
    """No other one is left: the job has one copy of the shard until the lost group is back, and says so. What the
    others copy of it passes through this group without ever being there whole."""
    back = held(4, by=0, until=(1, 1))
    faults = ("sigkill:group=1,step=2,at=reduce", "exception:group=2,step=1,at=copy,n=0", back)
    script = "tests/data/pretrain_little_room.py"
    flags = (*FLAGS, *DIVIDED, *RETURNS)
    job = launch(tmp_path / "run", *flags, groups=3, group_size=None, script=script, inject=faults)
    job.wait_for("the loss", lambda: copies(job).get("unable"), 100)
    known = copies(job)
    assert (known["hosts"]["0"], known["unable"]) == ([0], {"0": [2]})
    job.finish(timeout_s=250)
    check_members(job, [3, 2, 2, 2, 3, 3, 3, 3])
    check_bits(job.run_dir, undisturbed)
    said = re.findall(
        r"^spare: (.*(?: copies|cannot keep state shard) .*)$", (job.run_dir / "launch.out").read_text(), re.MULTILINE
    )
    assert said[0] == "state shards 0, 1 have fewer than 2 copies (at least 1); new ones are made on groups 0, 2"
    assert re.match(r"group 2 cannot keep state shard 0: injected at copy of step 1; epoch \d with 2 of 3 ", said[1])
    assert said[-1].startswith("each of the 3 state shards has 2 copies again, ")
    assert copies(job)["copying"] == {}


def test_a_standby_takes_a_place_without_a_whole_state(tmp_path: Path, undisturbed: Path) -> None:
    flags = (*DIVIDED, *RETURNS, "--spare-standby-groups", "1")
    job = start(tmp_path / "run", *flags, inject=(held(4, by=0, until=(1, 1)),))
    job.wait_for("who waits", lambda: waiting_counts(RunDirectory(job.run_dir)) == {"standby": 1}, 100)
    job.kill(*job.pids(1))
    job.finish(timeout_s=200)
    counts = members(job)
    assert 2 in counts[:4], f"the group was never gone: {counts}"
    assert counts[4:] == [3, 3, 3, 3], f"the standby was too late: {counts}"
    check_bits(job.run_dir, undisturbed)


def test_the_only_copy_of_a_shard_moves_before_its_group_leaves(tmp_path: Path, undisturbed: Path) -> None:
    slow = "slow=12:group=0,position=0,step=4,at=forward,n=0"  # until the request has come
    job = start(tmp_path / "run", "--spare-state-redundancy", "1", inject=(slow,))
    job.wait_for_step(3, 100)
    assert drain_command.main([str(job.run_dir), "--group", "1", "--no-wait"]) == 0
    job.finish(timeout_s=200)
    assert members(job)[0] == 3
    assert members(job)[-1] == 2, "the group never left"
    check_bits(job.run_dir, undisturbed)

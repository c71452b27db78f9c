"""An Adam that counts updates in parameter groups, as transformer-engine's, and parameters that are frozen: a group
that comes back, shards that move and a job that goes on from a checkpoint have the weights of the undisturbed job."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.megatron.test_divided_returns import check_members
from tests.megatron.test_state_redundancy import ALONE, DIVIDED, FLAGS, weights
from tests.process.harness import Job, launch
from tests.process.returning import RETURNS, held

pytestmark = pytest.mark.timeout(300)


def train(run_dir: Path, *flags: str, groups: int, frozen: bool = True, inject: Sequence[str] = ()) -> Job:
    words = (*FLAGS, *(ALONE if groups == 1 else DIVIDED), *flags)
    job = launch(
        run_dir,
        *words,
        groups=groups,
        group_size=None,
        script="tests/data/pretrain_fused_adam.py",
        inject=inject,
        environ={"FROZEN": "1"} if frozen else {},
    )
    job.finish(timeout_s=250)
    return job


def test_updates_are_counted_on_and_frozen_parameters_come_back(tmp_path: Path) -> None:
    """Of three shards a group keeps one or two, so it has no parameters of some parameter group for a while. What is
    frozen has been trained by an earlier job, so a new process does not begin with it."""
    first, second = (("--save", str(tmp_path / name)) for name in ("first", "second"))
    train(tmp_path / "before", *first, "--save-interval", "2", "--exit-interval", "2", groups=1, frozen=False)
    tuned = ("--load", first[1], "--finetune")
    expected = weights(train(tmp_path / "undisturbed", *tuned, groups=1).run_dir)
    faults = ("sigkill:group=1,step=2,at=reduce", held(4, by=0, until=(1, 1)))
    flags = (*tuned, *RETURNS, *second, "--save-interval", "4")
    job = train(tmp_path / "run", *flags, groups=3, inject=faults)
    check_members(job, [3, 2, 2, 2, 3, 3, 3, 3])
    assert weights(job.run_dir) == expected
    shutil.rmtree(tmp_path / "second" / "iter_0000008")
    again = train(tmp_path / "again", "--load", second[1], groups=3)
    assert weights(again.run_dir) == {step: digests for step, digests in expected.items() if step >= 4}

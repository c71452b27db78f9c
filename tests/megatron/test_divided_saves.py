"""Checkpoints of jobs whose groups keep only a part of the optimizer's state are those of jobs whose groups keep all,
bit for bit, also where groups are killed meanwhile; and each kind of job goes on from the other's."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from spare_megatron.megatron_adapter.checkpoint.digest import digest
from tests.megatron.test_state_redundancy import ALONE, DIVIDED, FLAGS, GROUPS, states
from tests.process.harness import Job, launch

pytestmark = pytest.mark.timeout(300)

EVERY = 3
STAGES = ("--pipeline-model-parallel-size", "2")


def start(
    folder: Path, *flags: str, inject: Sequence[str] = (), size: int = 1, ranks: int = 1, groups: int = GROUPS
) -> Job:
    """A job that saves into ``folder``, of groups of ``size`` stages, or of ``ranks`` of another kind."""
    saves = ("--save", str(folder / "save"), "--save-interval", str(EVERY))
    stages = STAGES if size == 2 else ()
    return launch(
        folder / "run",
        *(*FLAGS, *saves, *stages, *flags, *(ALONE if groups == 1 else ())),
        groups=groups,
        group_size=size * ranks,
        script="pretrain_gpt.py",
        inject=inject,
    )


def saved(folder: Path) -> dict[str, str]:
    """Digests of all checkpoints, with the optimizer's state."""
    return {one.name: digest(one, optimizer=True) for one in sorted((folder / "save").glob("iter_*"))}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The checkpoints of the job without failures, of one group of two stages, which keeps all state."""
    folder = tmp_path_factory.mktemp("whole")
    start(folder, size=2, groups=1).finish(timeout_s=200)
    found = saved(folder)
    assert set(found) == {f"iter_{step:07d}" for step in (3, 6, 8)}
    return found


@pytest.mark.parametrize(
    ("kills", "missed", "others"),
    [
        ((), (), ()),
        (("sigkill:group=0,step=3,at=gather,n=2", "sigkill:group=2,step=7,at=vote"), (3,), (4, 7)),
        (("sigkill:group=2,step=6,at=gather,n=1", "sigkill:group=0,step=8,at=checkpoint"), (), ()),
    ],
    ids=["no kill", "the saver in the gather", "another in the gather, the saver at the end"],
)
def test_checkpoints_have_the_bits_of_those_of_whole_groups(
    tmp_path: Path, whole: dict[str, str], kills: Sequence[str], missed: Sequence[int], others: Sequence[int]
) -> None:
    """Where the saver of step 3 is lost, the next commit orders another save; that of step 7 is an emergency save."""
    start(tmp_path, *DIVIDED, inject=kills, size=2).finish(timeout_s=200)
    found = saved(tmp_path)
    expected = {name: value for name, value in whole.items() if int(name[-7:]) not in missed}
    assert expected.items() <= found.items()
    assert set(found) - set(expected) == {f"iter_{step:07d}" for step in others}


@pytest.mark.parametrize(
    ("before", "groups", "after"),
    [
        pytest.param(DIVIDED, 3, (), marks=pytest.mark.full),
        pytest.param((), 3, DIVIDED, marks=pytest.mark.full),
        (DIVIDED, 6, DIVIDED),
    ],
    ids=["whole groups go on", "divided groups go on", "more groups go on"],
)
def test_a_job_goes_on_from_such_a_checkpoint(
    tmp_path: Path, whole_saves: dict[str, str], before: Sequence[str], groups: int, after: Sequence[str]
) -> None:
    start(tmp_path / "before", *before, "--exit-interval", "3").finish(timeout_s=200)
    first = tmp_path / "before" / "save"
    job = start(tmp_path / "after", "--load", str(first), *after, groups=groups)
    job.finish(timeout_s=200)
    assert saved(tmp_path / "after")["iter_0000008"] == whole_saves["iter_0000008"]
    if after:
        assert {shard for _, shard in states(job.run_dir)} == set(range(groups))


@pytest.mark.full
def test_groups_whose_ranks_divide_the_sums_go_on(tmp_path: Path) -> None:
    """The parts of a shard that a rank keeps are cut from a checkpoint that has no parts."""
    flags = ("--spare-inner-data-parallel", "2", "--use-distributed-optimizer", "--spare-reduce", "exact")
    for name, more in (("whole", ()), ("before", (*DIVIDED, "--exit-interval", "3"))):
        start(tmp_path / name, *flags, *more, ranks=2).finish(timeout_s=200)
    words = ("--load", str(tmp_path / "before" / "save"), *DIVIDED)
    kills = ("sigkill:group=1,position=0,step=5,at=gather",)
    start(tmp_path / "after", *flags, *words, ranks=2, inject=kills).finish(timeout_s=200)
    expected = saved(tmp_path / "whole")
    assert saved(tmp_path / "before")["iter_0000003"] == expected["iter_0000003"]
    assert saved(tmp_path / "after")["iter_0000008"] == expected["iter_0000008"]


def test_the_job_goes_on_from_its_checkpoint_after_a_wipe_out(tmp_path: Path, whole_saves: dict[str, str]) -> None:
    kills = ["sigkill:group=0,step=5,at=vote", "sigkill:group=1,step=5,at=vote"]
    job = start(tmp_path, *DIVIDED, inject=kills)
    job.wait_for("the end", lambda: job.process.poll() is not None, 200)
    shown = (job.run_dir / "launch.out").read_text()
    assert re.search(r"no copy is left of state shard \d", shown)
    job.finish(timeout_s=200)
    assert saved(tmp_path)["iter_0000008"] == whole_saves["iter_0000008"]


def test_weights_in_fp32(tmp_path: Path) -> None:
    """Their optimizer has no copies of them, and no loss scale. A group is killed while state goes round for a save."""
    flags = [flag for flag in FLAGS if flag != "--bf16"]
    kill = "sigkill:group=0,step=6,at=gather,n=1"
    for name, groups, more, kills in (("whole", 1, ALONE, ()), ("divided", GROUPS, DIVIDED, (kill,))):
        saves = ("--save", str(tmp_path / name / "save"), "--save-interval", str(EVERY))
        words = (*flags, *saves, *more)
        job = launch(
            tmp_path / name / "run", *words, groups=groups, group_size=1, script="pretrain_gpt.py", inject=kills
        )
        job.finish(timeout_s=200)
    expected, found = saved(tmp_path / "whole"), saved(tmp_path / "divided")
    assert expected.keys() >= {"iter_0000003", "iter_0000008"}
    assert expected.keys() & found.keys() >= {"iter_0000003", "iter_0000008"}
    assert all(found[name] == expected[name] for name in expected.keys() & found.keys())


@pytest.mark.full
def test_sums_in_fp32(tmp_path: Path) -> None:
    """Without failures the order of additions is that of whole groups. After a loss it is another one, as there; the
    copies of a shard stay equal all the same, because each host gets the same sums."""
    sums = ("--spare-reduce", "fp32")
    jobs = {
        name: start(tmp_path / name, *sums, *flags, inject=inject)
        for name, flags, inject in (
            ("whole", (), ()),
            ("divided", DIVIDED, ()),
            ("struck", DIVIDED, ("sigkill:group=0,step=4,at=gather",)),
        )
    }
    for job in jobs.values():
        job.finish(timeout_s=250)
    assert saved(tmp_path / "divided") == saved(tmp_path / "whole")
    assert "iter_0000008" in saved(tmp_path / "struck")
    copies = states(jobs["struck"].run_dir)
    assert {step for step, _ in copies} == set(range(9))
    assert all(len(checksums) == 1 for checksums in copies.values())

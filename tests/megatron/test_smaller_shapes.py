"""A group that has lost a device comes back with fewer pipeline stages, then goes home: the weights of every step are
those of the run without failures, bit for bit, and so is the state from which the job goes on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from spare_megatron.checkpoint.folder import last_good
from spare_megatron.megatron_adapter.checkpoint.digest import digest
from tests.process.harness import Job, launch
from tests.process.returning import check_same, is_member, leave_whole, voted

FLAGS = (
    *("--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "32"),
    *("--max-position-embeddings", "32", "--micro-batch-size", "1", "--lr", "1e-3", "--clip-grad", "1.0"),
    *("--train-iters", "2000", "--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "127"),
    *("--attention-dropout", "0.1", "--hidden-dropout", "0.1", "--log-interval", "1", "--split", "90,5,5"),
    *("--eval-interval", "5", "--eval-iters", "2", "--num-workers", "0", "--global-batch-size", "6"),
    *("--spare-reduce", "exact", "--spare-piece-microbatches", "1", "--untie-embeddings-and-output-weights"),
    *("--pipeline-model-parallel-size", "2", "--save-interval", "1000"),
)


def train(run_dir: Path, groups: int, *flags: str, inject: tuple[str, ...] = ()) -> Job:
    words = (*FLAGS, *flags, "--save", str(run_dir / "save"))
    return launch(run_dir, *words, groups=groups, group_size=None, script="pretrain_gpt.py", inject=inject)


@pytest.mark.timeout(900)
def test_a_group_comes_back_with_one_stage_and_goes_home(tmp_path: Path) -> None:
    fit = tmp_path / "fit"
    # The host is fit for one rank of the group and, once the file is there, for both.
    check = f'[ "$SPARE_GROUP_SIZE" = 1 ] || [ -e {fit} ]'
    flags = ("--spare-redundancy", "2", "--spare-max-group-restarts", "3", "--spare-shapes", "auto")
    inject = ("sigkill:group=2,step=3,at=reduce", "slow=6:group=0,position=0,step=4,at=forward,n=0")
    job = train(tmp_path / "run", 3, *flags, "--spare-health-check", check, inject=inject)
    job.wait_for("group 2 with one stage", lambda: is_member(job, 2, 1), timeout_s=240.0)
    assert "group 2: it is started with 1 pipeline stage" in (job.run_dir / "launch.out").read_text()
    job.wait_for_step(job.metrics[-1]["step"] + 5)
    assert job.metrics[-1]["live_groups"] == 3
    fit.touch()
    found = leave_whole(job, 3, (2, 2))
    assert re.search(r"group 2 leaves with a commit", (job.run_dir / "launch.out").read_text())
    failure_free = train(tmp_path / "failure-free", 1, "--exit-interval", str(max(found)))
    failure_free.finish(timeout_s=400.0)
    check_same(found, voted(failure_free))
    one, other = (digest(last_good(one.run_dir / "save")[0], optimizer=True) for one in (job, failure_free))
    assert one == other, "weights or optimizer differ"

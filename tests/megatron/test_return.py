"""Lost groups of real Megatron ranks come back while the others train: the weights of every step are those of the run
without failures, bit for bit, and so is the state from which they go on. The script has a state of its own, which goes
with them and through checkpoints."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from spare_megatron.checkpoint.folder import last_good
from spare_megatron.config.exits import ExitCode
from spare_megatron.megatron_adapter.checkpoint.digest import digest
from tests.process.harness import Job, launch
from tests.process.returning import RETURNS, check_same, held, is_member, leave_whole, voted

FLAGS = (
    *("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "32"),
    *("--max-position-embeddings", "32", "--micro-batch-size", "1", "--lr", "1e-3", "--clip-grad", "1.0"),
    *("--train-iters", "2000", "--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "127"),
    *("--attention-dropout", "0.1", "--hidden-dropout", "0.1", "--log-interval", "1", "--split", "90,5,5"),
    *("--eval-interval", "5", "--eval-iters", "1", "--num-workers", "0", "--global-batch-size", "6"),
    *("--spare-reduce", "exact", "--spare-piece-microbatches", "1"),
)
PP2 = ("--pipeline-model-parallel-size", "2")
MOE = ("--num-experts", "4", "--expert-model-parallel-size", "2", "--moe-router-topk", "2", "--disable-bias-linear")
BALANCED = ("--moe-router-enable-expert-bias", "--moe-router-score-function", "sigmoid")
LAYOUTS = {
    "one rank": (),
    "PP2": PP2,
    "TP2xPP2": (*PP2, "--tensor-model-parallel-size", "2", "--sequence-parallel"),
    "D2": ("--use-distributed-optimizer", "--spare-inner-data-parallel", "2"),
    "EP2": (*MOE, *BALANCED),
    "bf16": (*PP2, "--bf16"),
}
MANY = [pytest.param(name, marks=() if name == "one rank" else pytest.mark.full) for name in LAYOUTS]
"""Groups of two stages come back in other tests too (:mod:`.test_kinds_of_models`, :mod:`.test_smaller_shapes`)."""


SCRIPT = "tests/data/pretrain_remembering.py"


def train(run_dir: Path, layout: str, groups: int, *flags: str, inject: tuple[str, ...] = ()) -> Job:
    words = (*FLAGS, *LAYOUTS[layout], *flags, "--save", str(run_dir / "save"), "--save-interval", "1000")
    environ = {"STEP_S": "0.3"} if inject else {}
    return launch(run_dir, *words, groups=groups, group_size=None, script=SCRIPT, inject=inject, environ=environ)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", MANY)
def test_a_killed_group_is_back_with_the_state_of_the_others(tmp_path: Path, layout: str) -> None:
    flags = ("--spare-redundancy", "2", *RETURNS)
    # Steps that only wait for the return would have to be compared.
    inject = ("sigkill:group=2,step=3,at=reduce", held(4, by=0, until=(2, 1)))
    job = train(tmp_path / "run", layout, 3, *flags, inject=inject)
    found = leave_whole(job, 3, (2, 1))
    failure_free = train(tmp_path / "failure-free", layout, 1, "--exit-interval", str(max(found)))
    failure_free.finish(timeout_s=400.0)
    check_same(found, voted(failure_free))
    one, other = (digest(last_good(job.run_dir / "save")[0], optimizer=True) for job in (job, failure_free))
    assert one == other, "weights or optimizer differ"
    last, [(steps, norm)] = max(found), kept(failure_free)
    assert (steps, kept(job)) == (last, {(last, norm)}), "the script's own state differs"
    after = train(
        tmp_path / "after", layout, 1, "--load", str(failure_free.run_dir / "save"), "--exit-interval", str(last + 1)
    )
    after.finish(timeout_s=400.0)
    [(steps, one)] = kept(after)
    assert steps == last + 1
    assert abs(one - 0.9 * norm - 0.1 * after.metrics[-1]["grad_norm"]) < 1e-9


@pytest.mark.timeout(600)
def test_a_job_of_more_groups_keeps_the_state_shards_and_so_does_a_group_that_comes_back(tmp_path: Path) -> None:
    first = train(tmp_path / "first", "one rank", 2, "--exit-interval", "2")
    first.finish(timeout_s=200.0)
    flags = ("--load", str(first.run_dir / "save"), "--spare-redundancy", "2", "--spare-max-group-restarts", "1")
    job = train(tmp_path / "run", "one rank", 3, *flags, inject=("sigkill:group=2,step=4,at=reduce",))
    job.wait_for("group 2 as a member", lambda: is_member(job, 2, 1), timeout_s=240.0)
    job.wait_for_step(job.metrics[-1]["step"] + 2)
    job.kill(job.process.pid, number=signal.SIGTERM)
    job.finish(code=ExitCode.REQUEUE)
    assert [json.loads((one.run_dir / "job.json").read_text())["state_shards"] for one in (first, job)] == [2, 2]
    assert {len(digests) for digests in voted(job).values()} == {1}


def kept(job: Job) -> set[tuple[int, float]]:
    """The script's own state on all ranks of the job that know the gradients' norm: steps, and the mean norm."""
    reported = [json.loads(file.read_text()) for file in job.run_dir.glob("norm-*.json")]
    assert all(steps == step for step, steps, _ in reported)
    return {(steps, norm) for _, steps, norm in reported if norm}

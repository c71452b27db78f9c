"""Twenty times a real Megatron job is killed at a random moment while it saves: what it can resume from is always good.

Ten starts of two groups of two ranks, which save every step beside the training, into one directory. In each start
the group that saves is killed with SIGKILL, and later, while the other one saves, the whole job is: launcher,
coordinator, ranks. The next start resumes from what is there. So each moment is a kill of real processes that write;
what a machine's loss of power would add (files that the disk never got) is not tested.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path

import pytest

from spare_megatron.checkpoint.folder import PARTIAL, iteration_name, iterations, last_good, step_of
from spare_megatron.cli import checkpoint as command
from spare_megatron.megatron_adapter.checkpoint.digest import digest
from tests.process.harness import Job, launch

pytestmark = [pytest.mark.full, pytest.mark.timeout(3000)]

SEED, STARTS = 21, 10
TOLERANCE = 1e-5
"""Relative, of a step's loss. The weights are compared bit for bit."""
LOOK_S, PATIENCE_S = 0.002, 240.0
FLAGS = (
    *("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "32"),
    *("--max-position-embeddings", "32", "--micro-batch-size", "1", "--global-batch-size", "4", "--lr", "1e-3"),
    *("--train-iters", "5000", "--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "16383"),
    *("--pipeline-model-parallel-size", "2", "--eval-iters", "0", "--split", "100,0,0", "--num-workers", "0"),
    *("--log-interval", "1", "--hidden-dropout", "0.1", "--attention-dropout", "0.1", "--spare-redundancy", "2"),
)


def start(run_dir: Path, *words: str) -> Job:
    return launch(run_dir, *FLAGS, *words, groups=2, group_size=None, script="pretrain_gpt.py")


def newest(save: Path) -> int:
    return (iterations(save) or [0])[0]


def begun(save: Path) -> set[str]:
    """Names of the checkpoints that are being written, or were when their writer died."""
    return {entry.name for entry in (save / PARTIAL).glob("iter_*") if not entry.name.endswith(".old")}


def kill_while_saving(job: Job, save: Path, share: float, *, everything: bool) -> bool:
    """Once a save was timed, kill ``share`` of that time after the next one began; whether it was still unfinished."""
    timing = {"timeout_s": PATIENCE_S, "every_s": LOOK_S}
    at = newest(save)
    job.wait_for("a checkpoint", lambda: newest(save) > at, **timing)
    there = begun(save)
    job.wait_for("the next one", lambda: bool(begun(save) - there), **timing)
    started_s, at = time.monotonic(), newest(save)
    job.wait_for("its end", lambda: newest(save) > at, **timing)
    lasts_s = time.monotonic() - started_s
    job.wait_for("its processes", lambda: len(job.ranks()) >= 2)
    # the launcher first, so that it does not answer the deaths of the others
    pids = [job.process.pid, *sorted(job.seen)] if everything else job.pids(0)
    there = begun(save)
    job.wait_for("the save to die in", lambda: bool(begun(save) - there), **timing)
    time.sleep(share * lasts_s)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    left = bool(begun(save) - there)
    if everything:
        job.process.wait()
        job.wait_until_gone()
    else:
        job.wait_for_exit(*pids)
    return left


def check(save: Path, reached: int) -> None:
    """All that has Megatron's name is good, and nothing that was there is lost."""
    good, passed = last_good(save)
    assert good is not None
    assert not passed
    assert step_of(good) >= reached


def test_there_is_always_a_good_checkpoint_to_resume_from(tmp_path: Path) -> None:
    print(f"seed {SEED}")
    chance, save, unfinished = random.Random(SEED), tmp_path / "save", 0
    words = ("--save", str(save), "--load", str(save), "--save-interval", "1", "--spare-keep-checkpoints", "3")
    losses: dict[int, float] = {}
    for number in range(STARTS):
        reached = newest(save)
        job = start(tmp_path / f"run{number}", *words)
        try:
            for everything in (False, True):
                before = newest(save)
                share = chance.uniform(0.0, 1.0)
                unfinished += kill_while_saving(job, save, share, everything=everything)
                check(save, before + 1)
        finally:
            job.end()
        lines = job.metrics
        assert lines[0]["step"] == reached + 1, "it resumes from the newest good checkpoint"
        for line in lines:
            known = losses.setdefault(line["step"], line["loss"])
            assert line["loss"] == pytest.approx(known, rel=TOLERANCE), f"step {line['step']} of start {number}"
    assert unfinished >= STARTS // 2, f"only {unfinished} of {2 * STARTS} moments were within a save"
    last = start(tmp_path / "last", *words[:4], "--save-interval", "1000", "--exit-interval", "5")
    last.finish(timeout_s=300)
    assert command.main(["verify", str(save)]) == 0
    step = newest(save)
    failure_free_save = tmp_path / "failure-free save"
    once = ("--save-interval", "1000", "--exit-interval", str(step))
    failure_free = start(tmp_path / "failure-free", "--save", str(failure_free_save), *once)
    for line in failure_free.finish(timeout_s=600):
        known = losses.get(line["step"], line["loss"])
        assert line["loss"] == pytest.approx(known, rel=TOLERANCE), f"step {line['step']}"
    assert newest(failure_free_save) == step
    name = iteration_name(step)
    assert digest(save / name, optimizer=True) == digest(failure_free_save / name, optimizer=True)
    print(f"{2 * STARTS} kills, {unfinished} of them left an unfinished checkpoint; {step} steps as without them")

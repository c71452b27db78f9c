"""Checks with whole jobs: what a kill changes in the weights, which must be nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from spare_megatron.gpu_check.table import CheckError, Machine, MachineCheck, SkipError

JOB_S = 1200.0
MODEL = (
    *("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "32"),
    *("--max-position-embeddings", "32", "--micro-batch-size", "1", "--global-batch-size", "8", "--lr", "1e-3"),
    *("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "255", "--eval-iters", "0"),
    *("--attention-dropout", "0", "--hidden-dropout", "0", "--log-interval", "10"),
)


def _job(machine: Machine, name: str, groups: int, steps: int, flags: tuple[str, ...], inject: str = "") -> str:
    """Run a job to its end; returns the digest of its weights."""
    if machine.script is None:
        raise SkipError("needs a training script with Megatron's form; give --script pretrain_gpt.py")
    run = machine.output / name
    command = [sys.executable, "-m", "spare_megatron.cli.launch", "--num-groups", str(groups), "--run-dir", str(run)]
    command += [*(("--inject", inject) if inject else ()), str(machine.script), *MODEL, *flags]
    command += ["--train-iters", str(steps), "--save", str(run / "save"), "--save-interval", str(steps)]
    log = machine.output / f"{name}.log"
    with log.open("w") as file:
        code = subprocess.run(command, stdout=file, stderr=file, timeout=JOB_S, check=False).returncode
    if code:
        raise CheckError(f"a job ended with exit code {code}: {_last_line(log)}; see {log}")
    digest = [sys.executable, "-m", "spare_megatron.cli.checkpoint", "digest", str(run / "save")]
    return subprocess.run(digest, capture_output=True, text=True, timeout=JOB_S, check=True).stdout.split()[0]


def _last_line(log: Path) -> str:
    return next((line for line in reversed(log.read_text().splitlines()) if line.strip()), "")


def _with_and_without(machine: Machine, name: str, groups: int, flags: tuple[str, ...], kills: str) -> dict[str, Any]:
    steps = machine.times(40, 6)
    # a group that is killed leaves or is back; either way the weights are those of the run without the kill
    killed = _job(machine, f"{name}-killed", groups, steps, flags, kills)
    failure_free = _job(machine, f"{name}-calm", groups, steps, flags)
    values = {"groups": groups, "steps": steps, "weights": killed[:16]}
    if killed != failure_free:
        raise CheckError(
            "the weights differ from those of the run without the kill", values | {"calm": failure_free[:16]}
        )
    return values


def _staged(machine: Machine) -> dict[str, Any]:
    """Two groups of one rank; on a machine with one GPU both use it."""
    kills = "sigkill:group=1,step=3,at=reduce"
    flags = ("--spare-comm", "gloo", "--distributed-backend", "gloo")
    return _with_and_without(machine, "staged", 2, flags, kills)


def _tensor_parallel(machine: Machine) -> dict[str, Any]:
    machine.want_gpus(8)
    kills = "sigkill:group=2,step=5,at=reduce"
    return _with_and_without(machine, "tp2x4", 4, ("--tensor-model-parallel-size", "2"), kills)


CHECKS = (
    MachineCheck("staged job", "two groups, one killed: the weights are those of the run without the kill", _staged),
    MachineCheck(
        "TP2 x 4 groups", "over NCCL, one group killed: the weights are those of the run without it", _tensor_parallel
    ),
)

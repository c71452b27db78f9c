"""Submits the shipped batch scripts to a cluster of virtual nodes, edited in the places where a user edits them."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from spare_megatron.coordinator import journal
from spare_megatron.coordinator.terms import Terms
from spare_megatron.runtime.run_directory import RunDirectory, glance
from tests.process.running import processes
from tests.slurm.cluster import Cluster

ROOT = Path(__file__).resolve().parents[2]
STEPS, PIECES = 200, 2
OWN = ("--lease-s", "3", "--listen", "127.0.0.1:0")
TOY = (
    *("tests/process/toy_train.py", "--steps", str(STEPS), "--pieces", str(PIECES), "--piece-s", "0.25"),
    *("--redundancy", "3", "--heartbeat-s", "6"),
)
"""All steps take longer than a test waits for anything, so no signal and no death comes when the job is over. Once what
a test waits for has come, it hurries the rest."""
MEGATRON = (
    *("pretrain_gpt.py", "--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4"),
    *("--seq-length", "32", "--max-position-embeddings", "32", "--micro-batch-size", "1", "--global-batch-size", "8"),
    *("--lr", "1e-3", "--train-iters", "12", "--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "127"),
    *("--pipeline-model-parallel-size", "2", "--log-interval", "1", "--num-workers", "0", "--eval-iters", "0"),
)
QUICK = "quick"
"""Where this file is there, nothing waits any more."""
ENDED = ("COMPLETED", "COMPLETING", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")


def edited(shipped: str, folder: Path, nodes: int, ranks: int, run_dir: Path, command: Sequence[str]) -> Path:
    """A shipped script with its five marked places changed; the command is what follows the run directory."""
    text = (ROOT / "examples" / "slurm" / shipped).read_text()
    option = "--lend" if shipped == "lend.sbatch" else "--run-dir"
    changes = {
        r"#SBATCH --nodes=\d+.*": f"#SBATCH --nodes={nodes}",
        r"#SBATCH --ntasks-per-node=\d+.*": f"#SBATCH --ntasks-per-node={ranks}",
        r"#SBATCH --gpus-per-node=\d+.*\n": "",
        r"#SBATCH --time=\S+.*": "#SBATCH --time=00:10:00",
        r"exec spare-slurm .*": f"exec spare-slurm {option} {run_dir} {shlex.join(command)}",
    }
    for pattern, replacement in changes.items():
        text, count = re.subn(pattern, replacement, text)
        assert count == 1, f"{shipped} has no single line for {pattern}"
    script = folder / shipped
    script.write_text(text)
    return script


@dataclass
class SlurmJob:
    """One submitted job."""

    cluster: Cluster
    run_dir: RunDirectory
    output: Path
    id: str

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The complete lines of metrics.jsonl so far."""
        path = self.run_dir.metrics
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    @property
    def state(self) -> str:
        """Slurm's word for it."""
        return self.cluster.show(self.id)["JobState"]

    def ranks(self) -> dict[int, int]:
        """Task -> pid of the ranks that live; a group that was started again has its tasks of before."""
        found = {}
        for pid in processes(f"SPARE_RUN_DIR={self.run_dir.path}"):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                process = psutil.Process(pid)
                environ = process.environ()
                if "SLURM_PROCID" in environ and process.name().startswith("python"):
                    first = int(environ.get("SPARE_GROUP", 0)) * int(environ["SPARE_GROUP_SIZE"])
                    some = environ.get("SPARE_POSITIONS", "").split(",")
                    number = int(environ["SLURM_PROCID"])
                    position = environ.get("SPARE_POSITION") or (some[number] if some[0] else number)
                    found[first + int(position)] = pid
        return found

    def fencing(self) -> int:
        """Number of the coordinator in charge."""
        published = self.run_dir.coordinator()
        return published.fencing if published else 0

    def coordinator_node(self) -> str:
        """Name of the node on which the coordinator in charge runs."""
        published = self.run_dir.coordinator()
        assert published is not None
        return str(psutil.Process(published.pid).environ()["SLURMD_NODENAME"])

    def until(self, what: str, true: Callable[[], bool], timeout_s: float = 90.0) -> None:
        """Poll until ``true()``; AssertionError with all that there is to read where it does not come true."""
        deadline_s = time.monotonic() + timeout_s
        while not true():
            assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s: {what}\n{self.report()}"
            time.sleep(0.3)

    def until_step(self, step: int, timeout_s: float = 90.0) -> None:
        """Until ``step`` is committed."""
        self.until(f"step {step}", lambda: bool(self.metrics) and self.metrics[-1]["step"] >= step, timeout_s)

    def until_ended(self, timeout_s: float = 120.0) -> dict[str, str]:
        """Until Slurm says that the job is over; what it says."""
        self.until("the end of the job", lambda: self.state in ENDED, timeout_s)
        return self.cluster.show(self.id)

    def check_every_step_once(self, steps: int) -> None:
        """Every step of 1..steps was committed once; the journal replays."""
        assert [line["step"] for line in self.metrics] == list(range(1, steps + 1)), self.report()
        journal.verify(self.run_dir.journal)

    def report(self) -> str:
        """Everything to read for a failing test."""
        paths = [
            self.output,
            *sorted(self.run_dir.path.glob("logs/*.*")),
            *sorted(self.run_dir.path.glob("logs/tasks/*")),
        ]
        parts = [f"--- {path.name}\n{path.read_text(errors='replace')[-2500:]}" for path in paths if path.exists()]
        return "\n".join(
            [*parts, f"--- terms: {Terms(self.run_dir).newest()}", self.cluster.states(), self.cluster.log()]
        )


def submit(
    cluster: Cluster,
    folder: Path,
    command: Sequence[str],
    *options: str,
    shipped: str = "single.sbatch",
    nodes: int = 4,
    ranks: int = 2,
    environ: dict[str, str] | None = None,
) -> SlurmJob:
    """Queue a shipped script, edited; its files are in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    run_dir, output = folder / "run", folder / "job.out"
    script = edited(shipped, folder, nodes, ranks, run_dir, command)
    reported = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(environ or {})}
    job = cluster.sbatch(script, f"--output={output}", *options, environ=reported, cwd=ROOT)
    return SlurmJob(cluster, RunDirectory(run_dir), output, job)


def lend(job: SlurmJob, folder: Path, nodes: int, ranks: int, *options: str) -> SlurmJob:
    """Queue a job that lends its nodes to another one; its output is in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    output = folder / "lend.out"
    script = edited("lend.sbatch", folder, nodes, ranks, job.run_dir.path, ())
    reported = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    lending = job.cluster.sbatch(script, f"--output={output}", *options, environ=reported, cwd=ROOT)
    return SlurmJob(job.cluster, job.run_dir, output, lending)


def until_reported(*flags: str, groups: int | None = None, size: int = 1) -> tuple[str, ...]:
    """The command of a job of groups of ``size`` ranks that trains until it is asked to leave, and is not queued again.
    With ``groups`` not all nodes are used. ``flags`` are further ones of a rank."""
    number = () if groups is None else ("--num-groups", str(groups))
    toy = (*TOY, "--steps", "3000", "--piece-s", "0.2", *flags)
    return (*OWN, "--no-requeue", "--group-size", str(size), *number, *toy)


def live(job: SlurmJob) -> dict[str, int]:
    """Group -> incarnation of the members."""
    members: dict[str, int] = (glance(job.run_dir.status) or {"live": {}})["live"]
    return members


def node_of(pid: int) -> str:
    """The virtual node on which a process runs."""
    return str(psutil.Process(pid).environ()["SLURMD_NODENAME"])

"""The jobs that a soak can run, and the failure-free run of each: one group that computes every piece, whose sums are
the same bits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks._weather import Weather
from spare_megatron.launch.preloaded_ranks import LISTENING
from spare_megatron.megatron_adapter.checkpoint.digest import digest
from spare_megatron.placement.placement import build_placement
from tests.process.harness import RESTARTS, TOY, Job, launch

FOREVER = 100_000
"""More steps than a soak trains."""
ENVIRON = {"TORCHDYNAMO_DISABLE": "1", LISTENING: ""}
"""The job's ranks are forked by a parent of its own, so that all its processes are below its spare-launch."""


@dataclass(frozen=True)
class Model(ABC):
    """A job, and how often a fault strikes it unless something else is asked for."""

    groups: int
    group_size: int
    redundancy: int
    mean_gap_s: float
    heartbeat_s: float
    """The heartbeat time-out."""
    also: tuple[str, ...]
    """Further flags of the soaked job."""
    shapes: tuple[str, ...] = ()
    """Flags of both jobs that say in which shapes groups may come back."""

    def hosts(self) -> list[list[int]]:
        """The groups that host each shard."""
        found: list[list[int]] = build_placement(self.groups, self.redundancy).hosts().tolist()
        return found

    def start(
        self, run_dir: Path, restarts: Mapping[str, object], scratch: Path, weather: Weather | None = None
    ) -> Job:
        """The job to soak, with the launcher's flags ``restarts`` and its temporary files in ``scratch``."""
        reported = (word for flag, value in restarts.items() for word in (flag, str(value)))
        environ, under = {**ENVIRON, "TMPDIR": str(scratch)}, ()
        if weather is not None:
            environ |= weather.environ(self.groups, self.group_size)
            under = weather.under
        return self._launch(run_dir, (*self._soaked(), *self.also, *reported), self.groups, environ, under)

    def failure_free(self, run_dir: Path, steps: int) -> Job:
        """The run without failures, of ``steps`` steps."""
        return self._launch(run_dir, (*self._failure_free(steps), RESTARTS, "1" if self.shapes else "0"), 1, ENVIRON)

    @property
    @abstractmethod
    def flags(self) -> tuple[str, ...]:
        """Those that stand in a report."""

    @abstractmethod
    def differences(self, one: Path, other: Path) -> list[str]:
        """What differs between two checkpoints of one step, bit for bit."""

    @abstractmethod
    def _soaked(self) -> tuple[str, ...]:
        """The flags of the soaked job."""

    @abstractmethod
    def _failure_free(self, steps: int) -> tuple[str, ...]:
        """The flags of the failure-free one."""

    @property
    @abstractmethod
    def script(self) -> str:
        """The script of each rank."""

    @property
    def launched_size(self) -> int | None:
        """The launcher's --group-size; None where it follows from the flags."""
        return self.group_size

    def _launch(
        self,
        run_dir: Path,
        words: tuple[str, ...],
        groups: int,
        environ: Mapping[str, str],
        under: tuple[str, ...] = (),
    ) -> Job:
        """Start a job that saves in ``run_dir``/save, behind the words ``under``."""
        words = (*self.flags, *words, "--save", str(run_dir / "save"))
        size, script = self.launched_size, self.script
        return launch(run_dir, *words, groups=groups, group_size=size, script=script, environ=environ, under=under)


@dataclass(frozen=True)
class Toy(Model):
    """The toy model of the protocol tests (tests/process/toy_engine.py)."""

    groups: int = 6
    group_size: int = 2
    redundancy: int = 3
    mean_gap_s: float = 5.0
    heartbeat_s: float = 5.0
    also: tuple[str, ...] = ()
    pieces: int = 2
    """Of a shard."""
    piece_s: float = 0.05
    save_every: int = 25

    @property
    def flags(self) -> tuple[str, ...]:
        return ("--width", "256", "--layers", "2")

    def differences(self, one: Path, other: Path) -> list[str]:
        found = []
        for position in range(self.group_size):
            states = [torch.load(directory / f"rank{position}.pt") for directory in (one, other)]
            for kind, tensors in states[0].items():
                pairs = enumerate(zip(tensors, states[1][kind], strict=True))
                found += [f"rank {position}: {kind} {n}" for n, (a, b) in pairs if not torch.equal(a, b)]
        return found

    def _soaked(self) -> tuple[str, ...]:
        words = ("--steps", str(FOREVER), "--pieces", str(self.pieces), "--piece-s", str(self.piece_s))
        words += ("--redundancy", str(self.redundancy), "--heartbeat-s", str(self.heartbeat_s), "--progress-s", "60")
        return (*words, "--save-interval", str(self.save_every), "--keep", "3")

    def _failure_free(self, steps: int) -> tuple[str, ...]:
        return ("--steps", str(steps), "--pieces", str(self.pieces * self.groups))

    @property
    def script(self) -> str:
        return TOY


@dataclass(frozen=True)
class Megatron(Model):
    """A small GPT of megatron-core, with exact sums."""

    groups: int = 3
    group_size: int = 2
    redundancy: int = 3
    mean_gap_s: float = 60.0
    heartbeat_s: float = 5.0
    also: tuple[str, ...] = ()
    save_every: int = 50
    inner: int = 1
    """Inner data ranks of a group, which divide the sums; the others are stages."""

    @property
    def flags(self) -> tuple[str, ...]:
        return (
            *("--num-layers", str(2 * self.group_size), "--hidden-size", "64", "--num-attention-heads", "4"),
            *("--seq-length", "32"),
            *("--max-position-embeddings", "32", "--micro-batch-size", "1", "--global-batch-size", "12"),
            *("--lr", "1e-3", "--clip-grad", "1.0", "--train-iters", str(FOREVER), "--mock-data"),
            *("--tokenizer-type", "NullTokenizer", "--vocab-size", "127", "--attention-dropout", "0.1"),
            *("--hidden-dropout", "0.1", "--split", "100,0,0", "--eval-iters", "0", "--num-workers", "0"),
            *("--log-interval", "1000", "--pipeline-model-parallel-size", str(self.group_size // self.inner)),
            *(("--spare-inner-data-parallel", str(self.inner)) if self.inner > 1 else ()),
            *(("--use-distributed-optimizer",) if self.inner > 1 else ()),
            *("--spare-reduce", "exact", "--spare-piece-microbatches", "1"),
            *self.shapes,
        )

    def differences(self, one: Path, other: Path) -> list[str]:
        digests = [digest(directory, optimizer=True) for directory in (one, other)]
        return [] if digests[0] == digests[1] else ["weights or optimizer"]

    def _soaked(self) -> tuple[str, ...]:
        words = ("--spare-redundancy", str(self.redundancy), "--spare-heartbeat-timeout-s", str(self.heartbeat_s))
        return (*words, "--save-interval", str(self.save_every), "--spare-keep-checkpoints", "3")

    def _failure_free(self, steps: int) -> tuple[str, ...]:
        return ("--exit-interval", str(steps), "--save-interval", str(FOREVER))

    @property
    def script(self) -> str:
        return "pretrain_gpt.py"

    @property
    def launched_size(self) -> int | None:
        return None


MODELS: Mapping[str, type[Model]] = {"toy": Toy, "megatron": Megatron}

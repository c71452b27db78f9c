"""A table of checks: what each needs, what it must show, how it came out."""

from __future__ import annotations

import json
import textwrap
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from spare_megatron.collectives.nccl_start import Devices

PASSED, FAILED, SKIPPED = "passed", "FAILED", "skipped"


class SkipError(Exception):
    """A check cannot run here; the message says why."""


class CheckError(Exception):
    """A criterion does not hold; the message has the values."""

    def __init__(self, message: str, values: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.values = values or {}


@dataclass(frozen=True)
class Machine:
    """Where the checks run, and how much of them."""

    devices: Devices
    output: Path
    script: Path | None
    """A training script with Megatron's form, for jobs."""
    quick: bool
    """Few repetitions."""
    seed: int

    @property
    def gpus(self) -> int:
        return self.devices.count

    @property
    def device(self) -> torch.device:
        """Where kernels are checked."""
        return torch.device("cuda", 0) if self.gpus else torch.device("cpu")

    def times(self, many: int, few: int) -> int:
        """How often something is repeated: ``few`` without a GPU, or where it has to be quick."""
        return many if self.gpus and not self.quick else few

    def want_gpus(self, number: int = 1) -> None:
        """Raises SkipError where there are fewer."""
        if self.gpus < number:
            seen = self.devices.failure or f"torch sees {self.gpus}"
            raise SkipError(f"needs {number} GPU{'s' if number > 1 else ''}, and {seen}")


CheckRun = Callable[[Machine], dict[str, Any]]


@dataclass(frozen=True)
class MachineCheck:
    """One line of the table."""

    name: str
    what: str
    """What must hold, with the figures of the criterion."""
    run: CheckRun
    """Returns what was measured. Raises SkipError, or CheckError where the criterion does not hold."""


@dataclass(frozen=True)
class CheckOutcome:
    """How a check came out."""

    name: str
    what: str
    state: str
    why: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


def run(checks: Iterable[MachineCheck], machine: Machine, tell: Callable[[CheckOutcome], None]) -> list[CheckOutcome]:
    """Run one after the other; an error of any kind fails its own check only."""
    outcomes = []
    for check in checks:
        began_s = time.monotonic()
        state, why, values = PASSED, "", {}
        try:
            values = check.run(machine)
        except SkipError as reason:
            state, why = SKIPPED, str(reason)
        except CheckError as error:
            state, why, values = FAILED, str(error), error.values
        except Exception as error:
            state, why = FAILED, f"{type(error).__name__}: {error}"
        outcomes.append(CheckOutcome(check.name, check.what, state, why, values, round(time.monotonic() - began_s, 2)))
        tell(outcomes[-1])
    return outcomes


def counts(outcomes: Sequence[CheckOutcome]) -> str:
    """One line: how many came out how."""
    states = [one.state for one in outcomes]
    return ", ".join(f"{states.count(state)} {state}" for state in (PASSED, FAILED, SKIPPED))


def as_text(outcomes: Sequence[CheckOutcome], facts: dict[str, Any]) -> str:
    """The report: facts, then the table."""
    lines = ["spare-gpu-check", ""]
    lines += [f"{name:16} {value}" for name, value in facts.items()]
    lines += ["", counts(outcomes), ""]
    for one in outcomes:
        lines.append(f"{one.state:8} {one.name:22} {one.what} ({one.seconds:.1f} s)")
        reported = [one.why] if one.why else []
        reported += [f"{name} = {value}" for name, value in one.values.items()]
        for text in reported:
            lines += textwrap.wrap(text, 120, initial_indent=" " * 9, subsequent_indent=" " * 11)
    return "\n".join(lines) + "\n"


def write(outcomes: Sequence[CheckOutcome], facts: dict[str, Any], output: Path) -> tuple[Path, Path]:
    """Write report and JSON; returns their paths."""
    report, data = output / "gpu_check.txt", output / "gpu_check.json"
    report.write_text(as_text(outcomes, facts))
    data.write_text(json.dumps({"facts": facts, "checks": [asdict(one) for one in outcomes]}, indent=1) + "\n")
    return report, data

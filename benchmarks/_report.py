"""Writes the results of every benchmark: a header with hardware and versions, a printed table, a JSON file.

A result file is ``{"benchmark", "command", "date_utc", "hardware", "versions", "config", "results"}``; ``results`` is
the list of the table's rows, each a flat mapping with its units in the names.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).resolve().parent / "results"
PACKAGES = ("torch", "megatron-core", "numpy", "scipy", "grpcio")

Row = Mapping[str, object]


def hardware() -> dict[str, object]:
    """The properties of the machine on which timings depend, and its load in the last minute (1 per busy core, with the
    benchmark's own). GPUs are listed when the benchmark has imported torch."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        model = models[0] if models else model
    found: dict[str, object] = {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "load_average": round(os.getloadavg()[0], 1),
        "os": f"{platform.system()} {platform.machine()}",
    }
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        found["gpus"] = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    return found


def versions() -> dict[str, str]:
    """The versions of Python and of those ``PACKAGES`` that are installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def report(benchmark: str, config: Mapping[str, object], rows: Sequence[Row], path: Path | None = None) -> Path:
    """Prints header and table, writes the JSON (default: benchmarks/results/BENCHMARK.json); returns its path."""
    path = path or RESULTS / f"{benchmark}.json"
    show(benchmark, config, rows)
    write(path, benchmark, command(), config, rows)
    return path


def command() -> str:
    """The command line of this process."""
    return shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])


def show(benchmark: str, config: Mapping[str, object], rows: Sequence[Row]) -> None:
    """Prints header and table."""
    machine, packages = hardware(), versions()
    # Piped output has no width, and the table must not be cut to a default one.
    console = Console() if sys.stdout.isatty() else Console(width=200)
    console.print(f"{benchmark}: " + ", ".join(f"{key} {value}" for key, value in {**machine, **packages}.items()))
    console.print("config: " + ", ".join(f"{key} {value}" for key, value in config.items()))
    table = Table()
    for column in rows[0] if rows else ():
        table.add_column(column.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()))
    console.print(table)


def write(path: Path, benchmark: str, command: str, config: Mapping[str, object], rows: Sequence[Row]) -> None:
    """The JSON file alone."""
    record = {
        "benchmark": benchmark,
        "command": command,
        "date_utc": datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
        "hardware": hardware(),
        "versions": versions(),
        "config": dict(config),
        "results": [dict(row) for row in rows],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")

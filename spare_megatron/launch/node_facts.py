"""What a node is, as far as ranks of one job must have it alike: versions of packages, kinds of GPUs, paths."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path

PACKAGES = ("spare_megatron", "torch", "megatron-core")
NVIDIA = Path("/proc/driver/nvidia/gpus")


def versions_here() -> str:
    """Python and the packages of this process's environment."""
    found = [f"Python {platform.python_version()}"]
    for package in PACKAGES:
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            found.append(f"{package} not installed")
    return ", ".join(found)


def gpus_here(root: Path = NVIDIA) -> list[str]:
    """The kinds of this host's GPUs, each once, as the driver says them without being woken."""
    kinds = set()
    for information in root.glob("*/information"):
        try:
            lines = information.read_text().splitlines()
        except OSError:
            continue
        kinds |= {line.partition(":")[2].strip() for line in lines if line.startswith("Model:")}
    return sorted(kinds)


def paths_of(command: Sequence[str]) -> list[str]:
    """The files and directories that a rank's command line names and that exist here; ``PREFIX`` stands for
    ``PREFIX.bin``, as in --data-path."""
    found: dict[str, None] = {}
    for word in command:
        for text in {word, word.partition("=")[2]} - {""}:
            for path in (text, f"{text}.bin"):
                if os.path.exists(path):
                    found[os.path.abspath(path)] = None
    return sorted(found)


def not_here(paths: Iterable[str]) -> list[str]:
    """Those that this process cannot read."""
    return [path for path in paths if not os.access(path, os.R_OK)]

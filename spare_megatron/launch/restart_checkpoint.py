"""Finds the checkpoint from which a job starts again; the launcher does so for all ranks, between two lives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from spare_megatron.checkpoint.folder import last_good, publish_left_over
from spare_megatron.control.run_directory import RunDirectory


def checkpoint_to_start_from(
    run_dir: RunDirectory, directories: Sequence[str], told: Callable[[str], None]
) -> Path | None:
    """The newest good checkpoint of the first of ``directories`` that has one; None where none has. ``told`` is
    called with a sentence for each damaged one.

    A checkpoint that the coordinator has accepted, but whose writer died before it could publish it, is published
    first.
    """
    for directory in directories:
        publish_left_over(Path(directory), run_dir.accepted())
        good, passed = last_good(Path(directory))
        for damage in passed:
            told(f"{damage.reason}; it is passed over")
        if good is not None:
            return good
    return None

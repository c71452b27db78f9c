"""Publishes the checkpoint that counts though its writer has not done so, and finds the one from which a job starts
again; the launcher does so for all ranks, after a life."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from spare_megatron.checkpoint.folder import last_good, publish_left_over
from spare_megatron.control.run_directory import RunDirectory


def publish_accepted(run_dir: RunDirectory, directories: Sequence[str]) -> None:
    """Publish the checkpoint that the coordinator accepted last, where it lies below one of ``directories`` and its
    writer has not done so: it died, or left before it heard the coordinator's word."""
    accepted = run_dir.accepted()
    for directory in directories:
        publish_left_over(Path(directory), accepted)


def checkpoint_to_start_from(directories: Sequence[str], told: Callable[[str], None]) -> Path | None:
    """The newest good checkpoint of the first of ``directories`` that has one; None where none has. ``told`` is
    called with a sentence for each damaged one."""
    for directory in directories:
        good, passed = last_good(Path(directory))
        for damage in passed:
            told(f"{damage.reason}; it is passed over")
        if good is not None:
            return good
    return None

"""Publishes a checkpoint that counts but that its writer has not published, and finds the checkpoint from which a job
starts again. The launcher does both for all ranks, before the first job attempt and after each."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from spare_megatron.checkpoint.folder import last_good, publish_left_over
from spare_megatron.runtime.disk import with_retries
from spare_megatron.runtime.run_directory import RunDirectory


def publish_accepted(run_dir: RunDirectory, directories: Sequence[str], reported: Callable[[str], None]) -> None:
    """Publish the checkpoint that the coordinator accepted last, where it lies below one of ``directories`` and its
    writer has not done so: it died, or left before it received the coordinator's word. Waits for a disk that fails for
    a while; ``reported`` is called with a sentence where it does not come back."""

    def publish() -> None:
        accepted = run_dir.accepted()
        for directory in directories:
            publish_left_over(Path(directory), accepted)

    try:
        with_retries(publish)
    except (OSError, json.JSONDecodeError) as error:
        reported(f"the checkpoint that was accepted last cannot get its name: {error}")


def checkpoint_to_start_from(directories: Sequence[str], reported: Callable[[str], None]) -> Path | None:
    """The newest good checkpoint of the first of ``directories`` that has one; None where none has. ``reported`` is
    called with a sentence for each damaged one."""
    for directory in directories:
        good, passed = last_good(Path(directory))
        for damage in passed:
            reported(f"{damage.reason}; it is passed over")
        if good is not None:
            return good
    return None

"""Publishes a checkpoint that counts but that its writer has not published, and finds the checkpoint from which a job
starts again. The launcher does the former for all ranks, before the first job attempt and after each.

A ``--save`` directory may also hold checkpoints that the job has not written: of another run, or of steps after the one
to which the user went back with ``--ckpt-step``. A job never starts again from those by itself. Its own ones are known
by what the run directory names as accepted last: the job has saved nothing while that is what it was when the job
began, else they are those up to the step of that checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from spare_megatron.checkpoint.folder import (
    Damage,
    damage,
    give_up,
    iteration_name,
    last_good,
    publish_left_over,
    step_of,
    to_begin_with,
)
from spare_megatron.flags.launcher_flags import LauncherFlags
from spare_megatron.runtime.disk import with_retries
from spare_megatron.runtime.run_directory import RunDirectory, read_json, write_json


@dataclass(frozen=True)
class OwnCheckpoints:
    """The checkpoints that a job has saved itself, over all its job attempts."""

    run_dir: RunDirectory
    job: str
    """What is the same in all job attempts of a job and differs from that of any other job in this run directory."""

    def begin(self, flags: LauncherFlags, reported: Callable[[str], None]) -> int | None:
        """Before each job attempt: publish what was accepted last, and note what that was when the job began; returns
        :meth:`newest_step`. ``reported``: see :meth:`publish`."""
        self.publish(flags, reported)
        if self._before() is None:
            step = flags.ckpt_step
            if step is not None and flags.save_dir:
                with_retries(lambda: give_up(Path(flags.save_dir), step))
            accepted = with_retries(self.run_dir.accepted)
            with_retries(lambda: write_json(self.run_dir.began, {"job": self.job, "accepted": accepted}, durable=True))
        return self.newest_step(flags.save_dir)

    def publish(self, flags: LauncherFlags, reported: Callable[[str], None]) -> None:
        """Publish the checkpoint that the coordinator accepted last, where its writer has not done so: it died, or left
        before it received the coordinator's word. Waits for a disk that fails for a while; ``reported`` is called with
        a sentence where it does not come back."""

        def publish() -> None:
            accepted = self.run_dir.accepted()
            for directory in filter(None, (flags.save_dir, flags.load_dir)):
                publish_left_over(Path(directory), accepted)

        try:
            with_retries(publish)
        except (OSError, json.JSONDecodeError) as error:
            reported(f"the checkpoint that was accepted last cannot get its name: {error}")

    def has_begun(self) -> bool:
        """Whether the job is the last one that has begun in the run directory."""
        return self._before() is not None

    def newest_step(self, save: str) -> int | None:
        """The step of the newest one in a ``--save`` directory; None where there is none."""
        accepted = with_retries(self.run_dir.accepted)
        if not save or not accepted or self._before() in (None, accepted):
            return None
        directory = Path(accepted)
        return step_of(directory) if directory.parent.parent.resolve() == Path(save).resolve() else None

    def _before(self) -> str | None:
        kept = with_retries(lambda: read_json(self.run_dir.began)) or {}
        return str(kept["accepted"]) if kept.get("job") == self.job else None


def checkpoint_to_start_from(
    flags: LauncherFlags, saved_step: int | None, reported: Callable[[str], None]
) -> Path | None:
    """The newest good checkpoint that the job has saved itself, ``saved_step`` the step of the newest; where there is
    none, the one of ``--load`` with which the job began. None where there is none either. ``reported`` is called with a
    sentence for each damaged one."""
    load, good, damaged = Path(flags.load_dir), None, list[Damage]()
    if saved_step is not None:
        good, damaged = last_good(Path(flags.save_dir), saved_step)
    if good is None and flags.load_dir and flags.ckpt_step is not None:
        asked = load / iteration_name(flags.ckpt_step)
        good = None if damage(asked) else asked
    elif good is None and flags.load_dir:
        begins = with_retries(lambda: to_begin_with(load))
        good = begins.directory
        damaged += begins.passed
    for one in damaged:
        reported(f"{one.reason}; it is passed over")
    return good

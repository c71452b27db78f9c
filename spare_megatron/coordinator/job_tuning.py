"""Tunes a running job: save interval, redundancy of its next start, planned restart.

The tuner decides (:mod:`spare_megatron.planning.at_start`, pure); here the figures for it are gathered from what the
coordinator sees anyway, and a decision becomes an event of the machine that carries its figures. After each event the
coordinator asks for the next one and applies it. In a replay the same object sees the same records, from the first one
or from a snapshot on; figures that came only with messages of the ranks are then measured anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.exits import PLANNED
from spare_megatron.config.tuning import Tuning
from spare_megatron.coordinator.records import announce
from spare_megatron.planning.at_start import (
    Choice,
    Measured,
    at_start,
    prepare,
    restart_pays,
    updated_interval,
    without_progress,
)
from spare_megatron.protocol.machine import State
from spare_megatron.protocol.messages import Event, Lost, Opened, Saved, StopRequested, Tuned
from spare_megatron.runtime.disk import SideFiles
from spare_megatron.runtime.run_directory import RunDirectory, write_json

WARM_UP_STEPS = 2
MEASURED_STEPS = 3
TRIAL_PATIENCE_STEPS = 20
"""Steps after which a save that was ordered to measure its cost, and was not reported, is ordered again."""

_RECORDED = (
    "losses",
    "elapsed_s",
    "last_s",
    "opened_s",
    "restart_s",
    "commits",
    "calm_since",
    "trial_at",
    "saving",
    "ordered_s",
    "write_s",
    "chosen_s",
    "chosen_at",
)
"""The attributes of JobTuning, less their underscore, that follow from the records and are single values."""


class JobTuning:
    """Gathers the figures of a job, and makes the events that tune it."""

    def __init__(self, started_s: float) -> None:
        """``started_s``: when this coordinator started, seconds since 1970."""
        self._started_s = started_s
        self._wishes = Tuning()
        self._losses, self._elapsed_s, self._last_s = 0, 0.0, 0.0
        self._job_attempt(0.0)

    def _job_attempt(self, opened_s: float) -> None:
        """Forget what belongs to one job attempt."""
        self._opened_s, self._restart_s = opened_s, 0.0
        self._commits = 0
        self._calm_since = 0
        self._votes: dict[str, float] = {}
        self._votes_of = (0, 0)
        self._samples: list[tuple[float, float]] = []
        self._trial_at: int | None = None
        self._saving, self._ordered_s = 0, 0.0
        self._save_s: float | None = None
        self._write_s: float | None = None
        self._measured: Measured | None = None
        self._first: Choice | None = None
        self._chosen_s, self._chosen_at = 0.0, 0
        """When the choice was made, and how many steps had been committed by then."""
        self._changed = False

    @property
    def recorded_s(self) -> float:
        """The time of the newest record; 0 before there is one."""
        return self._last_s

    def begin(self, wishes: Tuning) -> None:
        """The job, and what it leaves to be decided, is known."""
        self._wishes = wishes
        if wishes.save_interval or (wishes.redundancy and not wishes.shared_data):
            prepare()

    # ------------------------------------------------------------------------------------------------- what is seen

    def observe(self, time_s: float, before: State, event: Event, after: State) -> None:
        """Take the figures of one record, live or in a replay."""
        if before.phase == "running":
            self._elapsed_s += max(0.0, time_s - self._last_s)
        self._last_s = time_s
        if isinstance(event, Opened):
            if after.job_attempt != before.job_attempt:
                self._job_attempt(time_s)
            return
        if before.phase == "forming" and after.phase == "running":
            self._restart_s = max(0.001, time_s - min(self._started_s, self._opened_s))
        if isinstance(event, Lost) and before.phase == "running":
            self._losses += len(before.live.keys() - after.live.keys())
            self._changed = True
        if isinstance(event, Tuned):
            self._tuned(event, time_s)
        if isinstance(event, Saved) and event.step == self._saving and after.live.get(event.group) == event.incarnation:
            self._write_s = time_s - self._ordered_s
        if after.committed[0] > before.committed[0]:
            self._committed(time_s, before, after)

    def _committed(self, time_s: float, before: State, after: State) -> None:
        self._commits += 1
        if before.epoch != self._calm_since:
            # The step in which the epoch changed was disturbed.
            self._calm_since = before.epoch
        elif self._votes_of == (after.committed[0], before.epoch) and self._commits > WARM_UP_STEPS:
            largest = int(before.plan.loads().max())
            shard = self._votes.get("compute_s", 0.0) * before.job.pieces_per_shard / max(1, largest)
            self._samples.append((shard, self._votes.get("reduce_s", 0.0)))
        if after.save_step != before.save_step:
            self._saving, self._ordered_s = after.save_step, time_s
            self._changed = True

    def _tuned(self, event: Tuned, time_s: float) -> None:
        if not event.choice:
            self._trial_at = self._commits
        elif self._first is None:
            self._measured = Measured(**event.figures)  # type: ignore[arg-type]
            self._first = Choice(**event.choice)  # type: ignore[arg-type]
            self._chosen_s, self._chosen_at = time_s, self._commits

    def figures(self, step: int, epoch: int, figures: Sequence[tuple[str, float]]) -> None:
        """Take the numbers that came with a vote; the greatest over all groups counts. Called before the vote is
        applied."""
        if (step, epoch) != self._votes_of:
            self._votes_of, self._votes = (step, epoch), {}
        for name, value in figures:
            self._votes[name] = max(value, self._votes.get(name, 0.0))

    def report(self, report: Mapping[str, Any]) -> None:
        """Take a group's report on a step; its ``save_s`` is the time for which its last save kept it from training."""
        if "save_s" in report:
            self._save_s = float(report["save_s"])

    def time_to_train(self) -> dict[str, Any] | None:
        """For the steps that were left at the choice, in seconds: how long they take without failures, how long they
        were predicted to take (None: no progress was), and how long at the pace since then, in which ``steps_done`` of
        them took ``taken_s`` (None before the first). None where nothing was predicted."""
        if self._first is None or self._measured is None or not self._chosen_s:
            return None
        steps, done = self._measured.steps, self._commits - self._chosen_at
        failure_free_s = steps * (self._measured.compute_s + self._measured.reduce_s)
        taken_s, ratio = self._last_s - self._chosen_s, self._first.time_to_train_ratio
        return {
            "steps": steps,
            "without_failures_s": round(failure_free_s, 1),
            "predicted_s": None if ratio is None else round(ratio * failure_free_s, 1),
            "steps_done": done,
            "taken_s": round(taken_s, 1),
            "at_this_pace_s": round(taken_s / done * steps, 1) if done else None,
        }

    # -------------------------------------------------------------------------------------------------- for a snapshot

    def memo(self) -> dict[str, Any]:
        """What the records so far have left here, as JSON values, for :meth:`recall` after a restart."""
        return {
            **{name: getattr(self, f"_{name}") for name in _RECORDED},
            "measured": None if self._measured is None else asdict(self._measured),
            "first": None if self._first is None else self._first.as_json(),
        }

    def recall(self, memo: Mapping[str, Any]) -> None:
        """Go on from the memo of the process that took a snapshot; what followed it is observed next. Whether anything
        is to be decided anew is looked at once more."""
        for name in _RECORDED:
            setattr(self, f"_{name}", memo.get(name, getattr(self, f"_{name}")))
        self._measured = None if memo["measured"] is None else Measured(**memo["measured"])
        self._first = None if memo["first"] is None else Choice(**memo["first"])
        self._changed = True

    # ------------------------------------------------------------------------------------------------ what is decided

    def next(self, state: State) -> Event | None:
        """The event that is to be applied now, or None. Called again after it was applied."""
        if state.phase != "running" or state.leave:
            return None
        changed, self._changed = self._changed, False
        restart = self._planned_restart(state) if changed else None
        if restart is not None or not (self._wishes.save_interval or self._redundancy_is_open(state)):
            return restart
        if self._first is None:
            return self._start(state)
        return self._update(state) if changed and self._wishes.save_interval else None

    def _redundancy_is_open(self, state: State) -> bool:
        """Whether redundancy is to be chosen from figures; where every group reads all data, or there is only one, it
        is known."""
        return self._wishes.redundancy and not self._wishes.shared_data and state.job.num_groups > 1

    def _start(self, state: State) -> Tuned | None:
        """The choice at the start of a job attempt, or the save that is ordered to measure its cost; None while figures
        are missing.

        A save is ordered only where the interval is to be chosen; else the first save at the given interval is awaited.
        """
        if len(self._samples) < MEASURED_STEPS:
            return None
        tried = self._trial_at is not None and self._commits - self._trial_at <= TRIAL_PATIENCE_STEPS
        if self._wishes.save_interval and not tried:
            return Tuned("the next step is saved, to see what a save costs", save_now=True)
        return None if self._save_s is None or self._write_s is None else self._first_choice(state)

    def _first_choice(self, state: State) -> Tuned:
        measured = self._figures(state)
        try:
            choice = at_start(measured)
        except ConfigError as error:
            choice = without_progress(measured, str(error))
        return Tuned(
            choice.reason,
            save_interval=choice.save_interval_steps if self._wishes.save_interval else 0,
            figures=asdict(measured),
            choice=choice.as_json(),
        )

    def _figures(self, state: State) -> Measured:
        wishes, spec = self._wishes, state.job
        return Measured(
            num_groups=spec.num_groups,
            group_size=wishes.group_size,
            restart_s=round(self._restart_s, 3),
            save_s=round(self._save_s or 0.0, 6),
            compute_s=round(max(1e-6, median(compute for compute, _ in self._samples)), 6),
            reduce_s=round(median(reduce for _, reduce in self._samples), 6),
            pieces_per_shard=spec.pieces_per_shard,
            steps=max(1, spec.last_step - state.committed[0]),
            mtbf_gpu_hours=wishes.mtbf_gpu_hours,
            granularity="shard" if spec.granularity == "shard" else "microbatch",
            data="shared" if wishes.shared_data else "staged",
            rejoin_s=round(self._restart_s, 3) if wishes.groups_return else None,
            standby_groups=wishes.standby_groups,
            adopt_s=wishes.adopt_s,
            redundancy=len(spec.offsets),
            redundancy_is_free=wishes.redundancy,
            write_s=round(self._write_s or 0.0, 6),
            planned_restarts=self._may_plan_restarts,
            save_interval_steps=spec.save_every or None,
        )

    def _update(self, state: State) -> Tuned | None:
        assert self._measured is not None, "nothing is updated before the first choice"
        assert self._first is not None
        elapsed_s = round(self._elapsed_s, 3)
        found = updated_interval(self._measured, self._first, self._losses, elapsed_s, state.save_interval)
        if found is None:
            return None
        seen = {"losses": self._losses, "elapsed_s": elapsed_s, "present_steps": state.save_interval}
        return Tuned(found.reason, save_interval=found.save_interval_steps, figures=seen, choice=found.as_json())

    @property
    def _may_plan_restarts(self) -> bool:
        """Whether the job may restart itself; with --spare-restart-after auto only where --save-interval is auto
        too."""
        wishes = self._wishes
        planned = wishes.save_interval if wishes.restart_after is None else wishes.restart_after > 0
        return wishes.can_restart and planned

    def _planned_restart(self, state: State) -> StopRequested | None:
        """The event that begins a planned restart, where enough groups are lost; None else, and when the last step is
        in flight. A learner is not lost: it comes back without a restart."""
        wishes, live = self._wishes, len(state.present)
        lost, left = state.job.num_groups - live, state.job.last_step - state.step_in_flight
        if not wishes.can_restart or left < 1 or not lost:
            return None
        if wishes.restart_after is not None:
            if not 0 < wishes.restart_after <= lost:
                return None
            why = f"--spare-restart-after is {wishes.restart_after}"
        else:
            after = self._first.restart_after_failures if self._first is not None else None
            if after is None or lost < after or self._measured is None or not restart_pays(self._measured, live, left):
                return None
            why = f"the choice at the start was with {after}"
        of = state.job.num_groups
        return StopRequested(f"{PLANNED}: {lost} of {of} groups are lost, {why}, {left} steps are left")


def publish_choice(event: Tuned, job_attempt: int, run_dir: RunDirectory, side: SideFiles) -> None:
    """Print a choice as a table (but not an update, whose reason is enough), and write it to the run directory, where
    checkpoints and the next job attempt's ranks read it."""
    if not event.choice:
        return
    if "num_groups" in event.figures:
        rows = Choice(**event.choice).rows()  # type: ignore[arg-type]
        width = max(len(name) for name, _ in rows)
        for name, value in rows:
            announce(f"  {name.ljust(width)}  {value}")
    plain = {"reason": event.reason, "figures": dict(event.figures), "choice": dict(event.choice)}
    path = run_dir.choice(job_attempt)
    side.write(path.name, lambda: write_json(path, plain, durable=True))

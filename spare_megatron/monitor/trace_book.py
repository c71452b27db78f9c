"""Draws the timeline of a job from the records of its journal, in order, and the lines of the steps that are shown.

Pure. Times are the coordinator's: when it learned of a vote, when it decided. From the last vote that a group had of a
step, :mod:`spare_megatron.monitor.group_steps` goes back to what it did before.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import count

from spare_megatron.coordinator.journal import Record
from spare_megatron.monitor.group_steps import WORK, CommittedStep, GroupVote, reported_groups
from spare_megatron.monitor.job_history import Failure
from spare_megatron.monitor.job_picture import JobPicture
from spare_megatron.monitor.job_texts import happenings
from spare_megatron.monitor.trace_model import Detail, Details, JobTimeline, TraceSlice, group_track, job_track
from spare_megatron.monitor.trace_ranks import RankTracks
from spare_megatron.monitor.trace_returns import BesideSteps
from spare_megatron.monitor.trace_sample import StepSample
from spare_megatron.protocol.messages import SendCommit, SendView, Vote
from spare_megatron.protocol.saves import saver

NO_PATCH = (0, 0.0)
MEASURED = "measured"
"""False in slices whose length was computed."""


class TraceBook:
    """Takes the records of a journal; of votes without a consequence those that it wants are enough."""

    def __init__(self, sample: StepSample, not_read: str = "", ranks: RankTracks | None = None) -> None:
        """``not_read``: what else is missing, in words. ``ranks`` has what single ranks reported."""
        self._sample, self._not_read, self._ranks = sample, not_read, ranks
        self._picture = JobPicture()
        self._history = self._picture.history
        self._beside = BesideSteps()
        self._slices: list[TraceSlice] = []
        self._now_s = 0.0
        self._flow = count(1)
        self._lead_s = 0.0
        self._begin_attempt()

    def _begin_attempt(self) -> None:
        self._began_s: float | None = None
        """When the step in flight began."""
        self._epoch: tuple[int, float, str] | None = None
        """(epoch, since when, why)."""
        self._hidden: tuple[int, float] | None = None
        """(first step, its beginning) of the steps that are not shown since the last one that is."""
        self._saver: int | None = None
        """The group that saves the step before."""
        self._shown: tuple[int, ...] = ()
        """The groups that are shown in the step before."""
        self._live: dict[int, int] = {}
        """Group -> incarnation, of the newest that were members."""
        self._arrived: dict[int, tuple[int, ...]] = {}
        """Group -> the arrows that end at its next commit."""
        self._begin_step()

    def _begin_step(self) -> None:
        self._votes: dict[int, tuple[float, int]] = {}
        """Group -> (time, number of pieces) of its newest vote."""
        self._patches: dict[int, tuple[int, float]] = {}
        """Group -> (number of pieces that it patches, when it got the first of them)."""
        self._arrows: dict[int, tuple[int, ...]] = {}
        """Group -> arrows that lead to its patch."""

    def wants(self, group: int, step: int) -> bool:
        """Whether this group is shown in ``step`` of the present job attempt."""
        at = (self._history.job_attempt.number, step) if self._history.job_attempts else (0, 0)
        if at not in self._sample.steps:
            return False
        reported = at in self._sample.lines and group in reported_groups(self._sample.lines[at])
        return reported or group % self._sample.every_group == 0 or group in self._patches

    def take(self, record: Record) -> None:
        """Take the next record."""
        history, job_attempts, failures = self._history, len(self._history.job_attempts), len(self._history.failures)
        step = history.job_attempt.step_in_flight if job_attempts else 0
        ended = bool(job_attempts) and history.job_attempt.ended_s is not None
        history.take(record)
        if len(history.job_attempts) > job_attempts:
            if job_attempts and not ended:
                self._end_attempt()
            self._begin_attempt()
        self._now_s = record.time_unix_s
        if not history.job_attempts:
            return
        event = record.event
        if isinstance(event, Vote) and event.result.ok and event.result.step == step:
            self._votes[event.group] = self._now_s, len(event.result.pieces)
        patching = self._views(record)
        for failure in history.failures[failures:]:
            self._lose(failure, patching)
        self._beside.take(record)
        for action in record.actions:
            if isinstance(action, SendCommit):
                self._commit(action)
        if history.job_attempt.ended_s is not None and not ended:
            self._end_attempt()

    def finish(self) -> JobTimeline:
        """The timeline, up to the last record."""
        history = self._history
        if history.job_attempts and history.job_attempt.ended_s is None:
            self._end_attempt()
        for place, job_attempt in enumerate(history.job_attempts, start=1):
            details: Details = {
                "outcome": job_attempt.outcome or ("running" if job_attempt is history.job_attempt else "unknown"),
                "reason": job_attempt.reason,
                "groups": job_attempt.spec.num_groups,
            }
            end_s = job_attempt.ended_s or next((one.opened_s for one in history.job_attempts[place:]), self._now_s)
            self._slices.append(
                TraceSlice(
                    job_track("lives"), f"job attempt {job_attempt.number}", job_attempt.opened_s, end_s, details
                )
            )
        for one in happenings(self._picture):
            self._slices.append(TraceSlice(job_track("events"), one.text, one.time_s, one.time_s, {"kind": one.kind}))
        reported = (self._sample.note(), self._not_read, self._ranks.note() if self._ranks else "")
        note = "; ".join(text for text in reported if text)
        if note and self._slices:
            begin_s, end_s = (bound(one.begin_s for one in self._slices) for bound in (min, max))
            self._slices.append(TraceSlice(job_track("what is shown"), note, begin_s, end_s))
        return JobTimeline([*self._slices, *self._beside.slices], note)

    # ------------------------------------------------------------------------------------------------ what is decided

    def _views(self, record: Record) -> list[int]:
        """Follow the epoch, and find the groups that have got more pieces of lost ones with this record."""
        views = [action.view for action in record.actions if isinstance(action, SendView) and action.view.is_member]
        if not views:
            return []
        self._live |= dict(views[0].live)
        if self._began_s is None:
            self._began_s = self._now_s
        if self._epoch is None or self._epoch[0] != views[0].epoch:
            self._end_epoch()
            self._epoch = views[0].epoch, self._now_s, record.reason
        pieces = {view.group: sum(map(len, view.segments[1:])) for view in views}
        known = self._patches
        more = [group for group in sorted(pieces) if pieces[group] > known.get(group, NO_PATCH)[0]]
        known |= {group: (pieces[group], known.get(group, (0, self._now_s))[1]) for group in more}
        return more

    def _lose(self, failure: Failure, patching: list[int]) -> None:
        """Groups are lost; an arrow leads from each to each that patches."""
        flows = {group: tuple(next(self._flow) for _ in patching) for group in failure.groups}
        for place, group in enumerate(patching):
            self._arrows[group] = (*self._arrows.get(group, ()), *(own[place] for own in flows.values()))
        if (failure.job_attempt, failure.step) in self._sample.steps and self._began_s is not None:
            details = {"step": failure.step, "broken off": True}
            self._slices += [
                TraceSlice(group_track(group), WORK, self._began_s, failure.time_s, details) for group in failure.groups
            ]
        self._beside.lose(failure, flows)

    def _commit(self, commit: SendCommit) -> None:
        at = self._history.job_attempt.number, commit.step
        began_s = self._now_s if self._began_s is None else self._began_s
        if at in self._sample.steps:
            self._end_hidden(commit.step)
            self._show(commit, began_s)
        else:
            self._end_shown(commit.step, ())
            self._hidden = self._hidden or (commit.step, began_s)
        self._began_s, self._saver = self._now_s, saver(commit.groups) if commit.save else None
        self._begin_step()

    # -------------------------------------------------------------------------------------------------- what is drawn

    def _show(self, commit: SendCommit, began_s: float) -> None:
        """Draw a step that was committed now."""
        job_attempt, line = (
            self._history.job_attempt,
            self._sample.lines.get((self._history.job_attempt.number, commit.step)),
        )
        votes = {}
        for group in self._votes.keys() & set(commit.groups):
            (time_s, pieces), (patched, from_s) = self._votes[group], self._patches.get(group, NO_PATCH)
            votes[group] = GroupVote(time_s, max(0, pieces - patched), patched, from_s)
        step = CommittedStep(
            began_s,
            self._now_s,
            votes,
            line,
            job_attempt.spec.num_groups,
            usual_lead_s=self._lead_s,
            is_first=commit.step == job_attempt.spec.first_step + 1,
        )
        self._lead_s = step.lead_s
        details: dict[str, Detail] = {"epoch": commit.epoch, "groups": len(commit.groups)}
        if line is not None:
            reported = {"loss": line["loss"], **(line["recovery"] or {})}
            details |= {name: value for name, value in reported.items() if isinstance(value, int | float)}
        self._slices.append(TraceSlice(job_track("steps"), f"step {commit.step}", began_s, self._now_s, details))
        shown = tuple(group for group in sorted(votes) if self.wants(group, commit.step))
        self._end_shown(commit.step, shown)
        for group in shown:
            self._show_group(step, group, commit.step)
        self._shown = shown
        self._arrived = {group: arrows for group, arrows in self._arrows.items() if group in shown}

    def _show_group(self, step: CommittedStep, group: int, number: int) -> None:
        save_s = (
            self._sample.saves_s.get((self._history.job_attempt.number, number), 0.0) if group == self._saver else 0.0
        )
        vote, track = step.votes[group], group_track(group)
        parts, measured = step.parts_of(group, save_s)
        of_step: Details = {"step": number} if measured else {"step": number, MEASURED: False}
        for part in parts:
            details: Details = of_step
            flows: tuple[int, ...] = ()
            if part.name == "commit":
                details, flows = {"step": number - 1}, self._arrived.pop(group, ())
            elif part.name == "compute":
                details = {**of_step, "pieces": vote.own}
            elif part.name == "patch":
                details, flows = {**of_step, "pieces": vote.patched}, self._arrows.get(group, ())
            self._slices.append(TraceSlice(track, part.name, part.begin_s, part.end_s, details, flows))
        if self._ranks is not None and group in self._live:
            job_attempt = self._history.job_attempt.number
            self._slices += self._ranks.slices(group, self._live[group], number, job_attempt, self._sample)

    def _end_shown(self, step: int, going_on: Collection[int]) -> None:
        """The commit of the step before is a moment for the groups that are not ``going_on``, shown in ``step``."""
        at_s = self._now_s if self._began_s is None else self._began_s
        for group in self._shown:
            if group not in going_on:
                flows = self._arrived.pop(group, ())
                self._slices.append(TraceSlice(group_track(group), "commit", at_s, at_s, {"step": step - 1}, flows))
        self._shown = ()

    def _end_hidden(self, step: int) -> None:
        """Steps up to ``step`` are not shown."""
        if self._hidden is not None:
            first, began_s = self._hidden
            last = step - 1
            name = f"steps {first} to {last} are not shown" if last > first else f"step {first} is not shown"
            self._slices.append(TraceSlice(job_track("steps"), name, began_s, self._began_s or began_s))
        self._hidden = None

    def _end_epoch(self) -> None:
        if self._epoch is not None:
            epoch, since_s, reason = self._epoch
            self._slices.append(
                TraceSlice(job_track("epochs"), f"epoch {epoch}", since_s, self._now_s, {"reason": reason})
            )
        self._epoch = None

    def _end_attempt(self) -> None:
        step = self._history.job_attempt.step_in_flight
        self._end_shown(step, ())
        self._end_hidden(step)
        self._end_epoch()
        self._beside.end_all(self._now_s)

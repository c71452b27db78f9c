"""What happened in a job, from the records of its journal: job attempts, failures, returns, saves. Pure.

It follows what the coordinator sent, so it needs no state of the protocol machine and none of the votes that led to
nothing (:func:`spare_megatron.coordinator.journal.acted_on`): a long journal is read far faster than it is replayed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from spare_megatron.config.errors import ConfigError
from spare_megatron.coordinator.journal import Record
from spare_megatron.protocol import messages as m
from spare_megatron.protocol.transition import describe
from spare_megatron.protocol.view import View


@dataclass
class AttemptHistory:
    """One job attempt. Times are in seconds since 1970; None: not yet."""

    number: int
    opened_s: float
    """When the first group sent Hello."""
    spec: m.JobSpec
    begun_s: float | None = None
    """When its first step began."""
    committed: int = 0
    """t*."""
    ended_s: float | None = None
    outcome: str = ""
    reason: str = ""
    coordinators_s: list[float] = field(default_factory=list)
    """When a coordinator went on from the journal of one before it."""
    served: set[int] = field(default_factory=set)
    """Steps in which groups gave a group that comes back their state or results."""
    repeated: set[int] = field(default_factory=set)
    """Steps that were tried again by the same members."""
    save_interval: int = 0
    """Steps between two saves; 0: none are planned but perhaps that of the end."""

    @property
    def step_in_flight(self) -> int:
        """t* + 1."""
        return self.committed + 1


@dataclass(frozen=True)
class Failure:
    """Groups that were lost together while they were members. Times are in seconds since 1970."""

    time_s: float
    job_attempt: int
    step: int
    """The step in flight."""
    groups: tuple[int, ...]
    causes: tuple[str, ...]
    """Of the losses, in the protocol machine's words: 'group 2 (rank 1) exited: killed by SIGKILL'."""
    masked: bool
    """The step was finished without them, or is still in flight: :attr:`JobHistory.in_flight`."""
    reason: str
    """The protocol machine's."""
    adopted: tuple[int, ...] = ()
    """The shards that have lost their last host by it, and that others have adopted: a soft wipe-out."""


@dataclass(frozen=True)
class Departure:
    """A group has left because an operator asked for it."""

    time_s: float
    job_attempt: int
    step: int
    """The step with whose commit it left."""
    group: int
    reason: str
    """The protocol machine's."""


@dataclass(frozen=True)
class Return:
    """A lost group is a member again."""

    time_s: float
    job_attempt: int
    step: int
    """The step that was committed last."""
    group: int
    away_s: float
    """Seconds since it was lost, or since the job attempt began without it."""


@dataclass(frozen=True)
class Save:
    """A checkpoint counts."""

    time_s: float
    step: int
    group: int


class JobHistory:
    """Collects what happened, record by record."""

    def __init__(self) -> None:
        self.job_attempts: list[AttemptHistory] = []
        self.failures: list[Failure] = []
        self.returns: list[Return] = []
        self.saves: list[Save] = []
        self.drained: list[Departure] = []
        self.live: dict[int, int] = {}
        """Group -> incarnation of the members, by the last view that was sent."""
        self.patching: set[int] = set()
        """The members that compute pieces of lost groups in the step in flight."""
        self._adopted: set[tuple[int, int]] = set()
        """(group, shard that it has adopted), by the last views."""
        self._segments: dict[int, int] = {}
        """Group -> how many segments of its plan are known."""
        self._epoch = self._fencing = 0
        self._numbered: dict[int, AttemptHistory] = {}
        self._lost_s: dict[int, float] = {}
        """Group -> when it was lost last, in this job attempt."""

    @property
    def job_attempt(self) -> AttemptHistory:
        """The newest job attempt; IndexError before the first."""
        return self.job_attempts[-1]

    def in_flight(self, failure: Failure) -> bool:
        """Whether the step in which these groups were lost has not been committed."""
        newest = self.job_attempt
        return (failure.job_attempt, failure.step) == (newest.number, newest.step_in_flight)

    def numbered(self, number: int) -> AttemptHistory:
        """The job attempt with this number; ConfigError where no record is of it."""
        job_attempt = self._numbered.get(number)
        if job_attempt is None:
            raise ConfigError(
                f"metrics.jsonl has steps of job attempt {number} of the job, of which the journal knows nothing"
            )
        return job_attempt

    def take(self, record: Record) -> None:
        """Take the next record."""
        event = record.event
        if isinstance(event, m.Opened):
            self._opened(record, event)
            return
        if not self.job_attempts:
            return
        job_attempt, before = self.job_attempt, self.live
        trains = job_attempt.begun_s is not None and job_attempt.ended_s is None
        for action in record.actions:
            if isinstance(action, m.SendCommit):
                job_attempt.committed = action.step
                self.patching.clear()
                self._segments.clear()
                job_attempt.served |= {action.step + 1} if action.serves else set()
            elif isinstance(action, m.AcceptSave):
                self.saves.append(Save(record.time_unix_s, action.step, action.group))
            elif isinstance(action, m.SendStop) and job_attempt.ended_s is None:
                job_attempt.ended_s, job_attempt.outcome, job_attempt.reason = (
                    record.time_unix_s,
                    action.outcome,
                    action.reason,
                )
                if action.outcome not in ("finished", "left"):
                    self._not_masked()
        if isinstance(event, m.Tuned):
            job_attempt.save_interval = event.save_interval or job_attempt.save_interval
        views = [action.view for action in record.actions if isinstance(action, m.SendView)]
        self._follow_segments(views, relieves=isinstance(event, m.GaveBack))
        view = next((view for view in views if view.is_member), None)
        if view is not None:
            self.live = dict(view.live)
            self.patching &= self.live.keys()
            job_attempt.begun_s = job_attempt.begun_s or record.time_unix_s
        if trains:
            self._members(record, before, self._newly_adopted(views))
        self._epoch = max(self._epoch, record.epoch)

    def _opened(self, record: Record, event: m.Opened) -> None:
        if event.fencing <= self._fencing:
            return
        self._fencing = event.fencing
        if self.job_attempts and self.job_attempt.number == event.job_attempt:
            self.job_attempt.coordinators_s.append(record.time_unix_s)
            return
        if self.job_attempts and self.job_attempt.ended_s is None:
            self._not_masked()
        first = event.spec.first_step
        save_every = event.spec.save_every
        self.job_attempts.append(
            AttemptHistory(event.job_attempt, record.time_unix_s, event.spec, None, first, save_interval=save_every)
        )
        self._numbered[event.job_attempt] = self.job_attempt
        self.live, self._lost_s = {}, {}
        self.patching.clear()
        self._segments.clear()

    def _not_masked(self) -> None:
        """The job attempt is over, and its step in flight was not finished."""
        self.failures = [replace(one, masked=False) if self.in_flight(one) else one for one in self.failures]

    def _follow_segments(self, views: Sequence[View], relieves: bool) -> None:
        """Note who patches: whose plan has grown, but not by what slow groups gave back."""
        for view in views:
            known = self._segments.get(view.group, 1)
            if any(view.segments[known:]) and not relieves:
                self.patching.add(view.group)
            self._segments[view.group] = max(known, len(view.segments))

    def _newly_adopted(self, views: Sequence[View]) -> tuple[int, ...]:
        """Follow which shards are adopted; returns those of which a group is notified for the first time."""
        reported = {(view.group, shard) for view in views for shard, _ in view.adopts}
        new = {shard for group, shard in reported - self._adopted}
        groups = {view.group for view in views}
        self._adopted = {pair for pair in self._adopted if pair[0] not in groups} | reported
        return tuple(sorted(new))

    def _members(self, record: Record, before: Mapping[int, int], adopted: tuple[int, ...]) -> None:
        """Note who is not a member any more, and who is one again."""
        job_attempt, event, now_s = self.job_attempt, record.event, record.time_unix_s
        commits = any(isinstance(action, m.SendCommit) for action in record.actions)
        changed = record.epoch > self._epoch
        losses = event.losses if isinstance(event, m.Lost) else ()
        reported = [loss for loss in losses if before.get(loss.group) == loss.incarnation]
        fenced = [a for a in record.actions if isinstance(a, m.SendFenced) and before.get(a.group) == a.incarnation]
        dead = {loss.group for loss in reported} | {action.group for action in fenced}
        if dead and (job_attempt.ended_s is not None or not changed):  # no view says so
            self.live = {group: one for group, one in self.live.items() if group not in dead}
        sent_back = _sent_back(record)
        back = {group for group in before.keys() - self.live.keys() if (group, before[group]) in sent_back}
        self._not_returned(back)
        gone = before.keys() - self.live.keys() - back
        if gone and commits:
            self.drained += [
                Departure(now_s, job_attempt.number, job_attempt.committed, g, record.reason) for g in sorted(gone)
            ]
            self._lost_s |= dict.fromkeys(gone, now_s)
        elif gone:
            causes = tuple(map(describe, reported)) or tuple(a.reason for a in fenced if a.group in gone)
            masked = job_attempt.outcome in ("", "finished", "left")
            step = job_attempt.step_in_flight
            lost = tuple(sorted(gone))
            self.failures.append(
                Failure(
                    time_s=now_s,
                    job_attempt=job_attempt.number,
                    step=step,
                    groups=lost,
                    causes=causes,
                    masked=masked,
                    reason=record.reason,
                    adopted=adopted,
                )
            )
            self._lost_s |= dict.fromkeys(gone, now_s)
        elif changed and not commits and not isinstance(event, m.GaveBack | m.DrainRequested | m.Hosts):
            job_attempt.repeated.add(job_attempt.step_in_flight)
        for group in sorted(self.live.keys() - before.keys()):
            away_s = now_s - self._lost_s.get(group, job_attempt.begun_s or now_s)
            self.returns.append(Return(now_s, job_attempt.number, job_attempt.committed, group, away_s))

    def _not_returned(self, groups: Set[int]) -> None:
        """Strike the last returns of these joiners: they have to learn again."""
        for group in groups:
            place = next((i for i in reversed(range(len(self.returns))) if self.returns[i].group == group), None)
            if place is not None:
                del self.returns[place]


def _sent_back(record: Record) -> set[tuple[int, int]]:
    """(group, incarnation) of the joiners that have to learn again: they are notified. (So is the next incarnation of a
    member, which is lost by it.)"""
    views = (action.view for action in record.actions if isinstance(action, m.SendView))
    return {(view.group, view.incarnation) for view in views if not view.is_member}

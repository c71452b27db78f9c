"""Follows what groups do beside the steps, for a timeline: being away, learning, giving state, writing checkpoints.

Pure. It takes the records that :class:`spare_megatron.monitor.job_history.JobHistory` takes, each right after it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from spare_megatron.coordinator.journal import Record
from spare_megatron.monitor.job_history import Failure
from spare_megatron.monitor.trace_model import Details, TraceSlice, group_track
from spare_megatron.protocol.messages import AcceptSave, CaughtUp, Hello, Ready, SendCommit, SendView
from spare_megatron.protocol.saves import saver
from spare_megatron.protocol.view import Offer

SAVES = "saves"


@dataclass(frozen=True)
class _Open:
    """A slice that has begun."""

    begun: TraceSlice
    offer: int = 0
    """Number of the offer that it belongs to."""


class BesideSteps:
    """Makes the slices. Of a group, ``lost`` is around what its new processes do until it is a member again."""

    def __init__(self) -> None:
        self.slices: list[TraceSlice] = []
        self._lost: dict[int, TraceSlice] = {}
        self._learns: dict[int, _Open] = {}
        self._gives: dict[tuple[int, int], _Open] = {}
        """(donor, learner)."""
        self._saves: dict[int, TraceSlice] = {}

    def take(self, record: Record) -> None:
        """Take the next record."""
        now_s, event = record.time_unix_s, record.event
        if isinstance(event, Hello):
            self._learn(event.group, "start", now_s, {"incarnation": event.incarnation})
        elif isinstance(event, Ready):
            self._learn(event.group, "ready", now_s)
        elif isinstance(event, CaughtUp):
            self._learn(event.group, "catch up", now_s, offer=event.number)
        for action in record.actions:
            if isinstance(action, SendCommit):
                self._serve(dict(action.serves), self._donors, now_s)
                if action.save or action.leave:
                    self._save(saver(action.groups), action, now_s)
            elif isinstance(action, SendView) and action.view.is_member:
                self._serve({action.view.group: action.view.serves}, {action.view.group}, now_s)
                if action.view.group in self._lost:
                    self.end(action.view.group, now_s)
            elif isinstance(action, AcceptSave):
                self._saved(action.group, now_s, counts=True)

    def lose(self, failure: Failure, flows: dict[int, tuple[int, ...]]) -> None:
        """Groups are lost; ``flows``: group -> the arrows that begin there."""
        for group in failure.groups:
            self._saved(group, failure.time_s, counts=False)
            for donor, learner in [pair for pair in self._gives if group in pair]:
                self._gave(donor, learner, failure.time_s)
            self.end(group, failure.time_s)
            details: Details = {"step": failure.step, "cause": "; ".join(failure.causes), "reason": failure.reason}
            lost = TraceSlice(group_track(group), "lost", failure.time_s, failure.time_s, details, flows.get(group, ()))
            self._lost[group] = lost

    def end(self, group: int, now_s: float) -> None:
        """The group is a member again, or is lost once more."""
        learns = self._learns.pop(group, None)
        if learns is not None:
            self.slices.append(replace(learns.begun, end_s=now_s))
        lost = self._lost.pop(group, None)
        if lost is not None:
            self.slices.append(replace(lost, end_s=now_s))

    def end_all(self, now_s: float) -> None:
        """The job attempt is over, or nothing more is known of it."""
        for group in sorted(self._lost):
            self.end(group, now_s)
        for donor, learner in list(self._gives):
            self._gave(donor, learner, now_s)
        for group in list(self._saves):
            self._saved(group, now_s, counts=False)

    def _learn(self, group: int, name: str, now_s: float, details: Details | None = None, offer: int = 0) -> None:
        """The processes of a lost group do something new."""
        known = self._learns.get(group)
        if group not in self._lost or (known is not None and (known.begun.name, known.offer) == (name, offer)):
            return
        if known is not None and known.begun.begin_s < now_s:
            self.slices.append(replace(known.begun, end_s=now_s))
        self._learns[group] = _Open(TraceSlice(group_track(group), name, now_s, now_s, details or {}), offer)

    @property
    def _donors(self) -> set[int]:
        return {donor for donor, _ in self._gives}

    def _serve(self, serves: Mapping[int, Sequence[Offer]], reported: Collection[int], now_s: float) -> None:
        """Of the groups that are ``reported`` what they serve, what is not in ``serves`` is dropped."""
        offers = {(donor, offer.learner[0]): offer for donor, own in serves.items() for offer in own}
        for (donor, learner), known in list(self._gives.items()):
            offer = offers.get((donor, learner))
            if donor in reported and (offer is None or offer.number != known.offer):
                self._gave(donor, learner, now_s)
        for (donor, learner), offer in offers.items():
            details: Details = {"offer": offer.number, "state of step": offer.step}
            if (donor, learner) not in self._gives:
                begun = TraceSlice(
                    group_track(donor, f"gives state to group {learner}"), "transfer", now_s, now_s, details
                )
                self._gives[donor, learner] = _Open(begun, offer.number)
            if learner not in self._learns or self._learns[learner].offer != offer.number:
                self._learn(learner, "transfer", now_s, details, offer.number)

    def _gave(self, donor: int, learner: int, now_s: float) -> None:
        self.slices.append(replace(self._gives.pop((donor, learner)).begun, end_s=now_s))

    def _save(self, group: int, commit: SendCommit, now_s: float) -> None:
        self._saved(group, now_s, counts=False)
        details: Details = {"step": commit.save or commit.step, "ordered": bool(commit.save)}
        self._saves[group] = TraceSlice(group_track(group, SAVES), "save", now_s, now_s, details)

    def _saved(self, group: int, now_s: float, counts: bool) -> None:
        """A save counts, or is over; that of the end is known to have begun only if it counts."""
        begun = self._saves.pop(group, None)
        if begun is not None and (counts or begun.details["ordered"]):
            details: Details = {"step": begun.details["step"], "counts": counts}
            self.slices.append(replace(begun, end_s=now_s, details=details))

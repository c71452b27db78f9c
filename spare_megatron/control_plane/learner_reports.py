"""How a leader merges what its ranks report as learners and as donors into one report. Pure: no I/O, no clock.

A group is ready, or has caught up to a step, when its last rank reports so; an offer cannot be had, or is served no
longer, as soon as one rank reports so. A rank that could take an offer can take another one whenever that ends, so the
group is ready again when its view has none. What a connection may have lost and still holds is repeated after every
Hello.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from spare_megatron.control_plane.group_aggregation import MinOverRanks, joined_digests
from spare_megatron.control_plane.reports import RankCaughtUp, RankReady, RankVoid, RankWithdrawn
from spare_megatron.protocol.learner import NO_OFFER
from spare_megatron.protocol.messages import CaughtUp, Ready, Void, Withdrawn
from spare_megatron.protocol.view import MemberId, View

GroupLearnerReport = Ready | CaughtUp | Void | Withdrawn
RankLearnerReport = RankReady | RankCaughtUp | RankVoid | RankWithdrawn


@dataclass
class LearnerReports:
    """The reports of one group of ``size`` ranks with ``rows`` rows."""

    me: MemberId
    size: int
    rows: int
    _ready: set[int] = field(default_factory=set, init=False)
    """Positions."""
    _caught_up: MinOverRanks[tuple[int, int]] = field(init=False)
    """(number, step) of the state of each row that its rank holds."""
    _digests: dict[tuple[int, int], dict[int, str]] = field(default_factory=dict, init=False)
    """(number, step) -> row -> digest of its weights."""
    _last: CaughtUp | None = field(default=None, init=False)
    _void: Void | None = field(default=None, init=False)
    _withdrawn: dict[int, Withdrawn] = field(default_factory=dict, init=False)
    _view: View | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._caught_up = MinOverRanks(self.rows, (-1, -1))

    def reported(self, view: View) -> Ready | None:
        """Take the newest view; returns the group's report where it is ready: with each such view, because an offer may
        have been made and have ended without a view that shows it."""
        self._view = view
        if not view.is_member and self._caught_up.reached[0] == NO_OFFER:  # what it had without an offer is gone
            self._caught_up, self._last = MinOverRanks(self.rows, (-1, -1)), None
        served = {offer.number for offer in view.serves}
        self._withdrawn = {number: report for number, report in self._withdrawn.items() if number in served}
        return self._ready_now()

    def receive(self, position: int, report: RankLearnerReport) -> GroupLearnerReport | None:
        """Take the report of the rank at ``position``; returns the group's if this one decides it."""
        if isinstance(report, RankReady):
            self._ready.add(position)
            return self._ready_now()
        if isinstance(report, RankCaughtUp):
            return self._receive_caught_up(report)
        detail = f"rank {position}: {report.detail}"
        if isinstance(report, RankVoid):
            if self._void is not None and self._void.number >= report.number:
                return None
            self._void = Void(*self.me, report.number, detail)
            return self._void
        if report.number in self._withdrawn:
            return None
        self._withdrawn[report.number] = Withdrawn(*self.me, report.number, detail)
        return self._withdrawn[report.number]

    def again(self) -> Iterable[GroupLearnerReport]:
        """What still holds by the newest view."""
        ready = self._ready_now()
        if ready is not None:
            yield ready
        number = NO_OFFER if self._view is None or self._view.offer is None else self._view.offer.number
        for report in (self._last, self._void):
            if report is not None and report.number == number:
                yield report
        yield from self._withdrawn.values()

    def _ready_now(self) -> Ready | None:
        view = self._view
        learns = view is not None and view.epoch > 0 and not view.is_member and view.offer is None
        return Ready(*self.me) if learns and len(self._ready) == self.size else None

    def _receive_caught_up(self, report: RankCaughtUp) -> CaughtUp | None:
        at = report.number, report.step
        self._digests.setdefault(at, {})[report.row] = report.weights_digest
        if not self._caught_up.add(report.row, at):
            return None
        digests = self._digests[self._caught_up.reached]
        self._digests = {key: kept for key, kept in self._digests.items() if key > self._caught_up.reached}
        if len(digests) < self.rows:
            return None  # a rank's report was lost with its connection: the next step's is the group's next one
        digest = joined_digests(digests[p] for p in sorted(digests))
        number, step = self._caught_up.reached
        self._last = CaughtUp(*self.me, number, step, digest)
        return self._last

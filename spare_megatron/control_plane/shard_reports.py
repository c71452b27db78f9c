"""How a leader merges what its ranks report of shards that the group has adopted, and of state shards of which it is a
new host. Pure: no I/O; time comes in as an argument.

A shard is open when every rank has opened it, or reads no data; it cannot be opened as soon as one rank reports so, or
when that takes too long. An answer is final, and is repeated with each view that does not know it.

A group has the state of a state shard when every rank reports so; it has nothing, or cannot keep the shard, as soon as
one rank reports that. A report is about one epoch; what was reported in the present one is repeated after every Hello.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from spare_megatron.control_plane.reports import RankHave, RankOpened
from spare_megatron.protocol.messages import Have, Hosts
from spare_megatron.protocol.view import MemberId, View


@dataclass
class ShardReports:
    """The reports of one group of ``size`` ranks."""

    me: MemberId
    size: int
    limit_s: float
    """How long a shard may take; ranks open one after the other, so from the answer for the one before it on."""
    _open_on: dict[int, set[int]] = field(default_factory=dict, init=False)
    """Shard -> positions that have opened it."""
    _asked_s: dict[int, float] = field(default_factory=dict, init=False)
    """Adopted shard -> when the group was notified."""
    _answers: dict[int, Hosts] = field(default_factory=dict, init=False)
    _answered_s: float = field(default=0.0, init=False)
    """When the newest answer was given."""

    def reported(self, view: View, now_s: float) -> list[Hosts]:
        """Take the newest view; returns the answers that the coordinator does not know."""
        self.me = view.receiver
        for shard, _ in view.adopts:
            self._asked_s.setdefault(shard, now_s)
            if shard not in self._answers and len(self._open_on.get(shard, ())) == self.size:
                self._answer(Hosts(*self.me, shard, True), now_s)
        unknown = [shard for shard, is_known in view.adopts if not is_known and shard in self._answers]
        return [self._answers[shard] for shard in unknown]

    def receive(self, position: int, report: RankOpened, now_s: float) -> Hosts | None:
        """Take one rank's report; returns the group's if this one decides it."""
        shard = report.shard
        if report.opened:
            self._open_on.setdefault(shard, set()).add(position)
        if shard in self._answers or shard not in self._asked_s:
            return None
        if not report.opened:
            return self._answer(Hosts(*self.me, shard, False, f"rank {position}: {report.detail}"), now_s)
        if len(self._open_on[shard]) < self.size:
            return None
        return self._answer(Hosts(*self.me, shard, True), now_s)

    def late(self, now_s: float) -> Iterable[Hosts]:
        """The answers for shards that take too long."""
        for shard, asked_s in self._asked_s.items():
            if shard not in self._answers and now_s - max(asked_s, self._answered_s) > self.limit_s:
                there = len(self._open_on.get(shard, ()))
                detail = f"{there} of {self.size} ranks have opened it within {self.limit_s:g} s"
                yield self._answer(Hosts(*self.me, shard, False, detail), now_s)

    @property
    def is_opening(self) -> bool:
        """Whether the group waits for its ranks to open a shard."""
        return len(self._answers) < len(self._asked_s)

    def shut(self, view: View) -> frozenset[int]:
        """The adopted shards of a view whose pieces nobody may begin."""
        return frozenset(shard for shard, _ in view.adopts if not self._is_open(shard))

    def _is_open(self, shard: int) -> bool:
        answer = self._answers.get(shard)
        return answer is not None and answer.opened

    def _answer(self, answer: Hosts, now_s: float) -> Hosts:
        self._answers[answer.shard], self._answered_s = answer, now_s
        return answer


@dataclass
class StateReports:
    """The reports of one group of ``size`` ranks."""

    me: MemberId
    size: int
    _whole: dict[tuple[int, int], set[int]] = field(default_factory=dict, init=False)
    """(epoch, shard) -> positions that have their part."""
    _sent: dict[tuple[int, int], Have] = field(default_factory=dict, init=False)
    """(epoch, shard) -> what the group has reported."""

    def receive(self, position: int, report: RankHave) -> Have | None:
        """Take one rank's report; returns the group's if this one decides it."""
        at = (report.epoch, report.shard)
        if report.whole:
            self._whole.setdefault(at, set()).add(position)
            if len(self._whole[at]) < self.size:
                return None
        have = Have(*self.me, *at, report.whole, report.detail)
        if self._sent.get(at) == have:
            return None
        self._sent[at] = have
        return have

    def again(self, view: View) -> list[Have]:
        """What still holds in the epoch of ``view``; older epochs are forgotten."""
        self.me = view.receiver
        self._whole = {at: ranks for at, ranks in self._whole.items() if at[0] >= view.epoch}
        self._sent = {at: have for at, have in self._sent.items() if at[0] >= view.epoch}
        return list(self._sent.values())

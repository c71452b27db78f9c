"""How a leader merges what its ranks report of state shards of which the group is a new host. Pure: no I/O.

A group has the state of a shard when every rank reports so; it has nothing, or cannot keep the shard, as soon as one
rank reports that. A report
is about one epoch; what was reported in the present one is repeated after every Hello.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from spare_megatron.control_plane.reports import RankHave
from spare_megatron.protocol.messages import Have
from spare_megatron.protocol.view import MemberId, View


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

"""What a rank does as a learner where groups keep only some state shards, without an offer (docs/protocol.md, rule 28).

The record of a commit makes its group a member. The gather with which the epoch begins brings all parameters after t*,
the state of the shards of which the group is a new host, and what is in no shard. Ranks of a group see epochs at
different times, so all of them go on only where all have had the gather of the same epoch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from spare_megatron.control_plane.session import Session
from spare_megatron.protocol.learner import NO_OFFER
from spare_megatron.worker.engine import StepEngine
from spare_megatron.worker.group_rounds import Gather, same_orders
from spare_megatron.worker.packed_state import unpacked
from spare_megatron.worker.rank_parts import RankParts
from spare_megatron.worker.shard_gather import ShardGather
from spare_megatron.worker.step import Joined
from spare_megatron.worker.ticket_reader import LeaveError
from spare_megatron.worker.warm_up import warm_up


@dataclass
class ShardJoining:
    """The learner's side of one rank. Belongs to the training thread."""

    engine: StepEngine
    session: Session
    shards: ShardGather
    gather: Gather
    inject: Callable[[str, int, int], None]
    """``inject(point, step, n)`` is called when this rank has what it needs of a step, the n-th time."""
    cold: bool = True
    """Whether this process has computed nothing yet."""
    parts: RankParts = field(default_factory=RankParts)
    """Takes note of what this rank does when."""
    _came: int = field(default=0, init=False)
    _reported: bool = field(default=False, init=False)

    def learn(self) -> Joined:
        """Wait until the group is a member and this rank has the state after t*; called again when the group was sent
        back.

        Raises:
            LeaveError: the job is over for this group.
        """
        if not self._reported:
            self._reported = True
            self.shards.empty()
            if self.cold:
                spec = self.session.spec
                warm_up(self.engine, spec.first_step + 1, self.session.orders.view.group * spec.pieces_per_shard)
            self.session.ready()
        while True:
            orders = same_orders(self.session, self.gather)
            view = orders.view
            if orders.over:
                raise LeaveError(orders)
            if not view.is_member:
                self._wait(view.epoch, view.committed)
                continue
            step, began_s = view.committed[0], time.monotonic()
            came = self.shards.join(step, view.epoch)
            if any(one != (1,) for one in self.gather((int(came is not None),))):
                continue
            assert came is not None, "all ranks have it"
            self.parts.note("transfer", began_s, time.monotonic())
            self.inject("join", step, self._came)
            self._came += 1
            self.shards.share(step)
            self.engine.adopt_state(step, unpacked(came, self.engine))
            self.session.progress("apply", step, 0)
            self.session.caught_up(NO_OFFER, step, self.engine.weights_digest())
            self.shards.caught_up(view)
            return Joined(step, NO_OFFER)

    def _wait(self, epoch: int, committed: tuple[int, int]) -> None:
        """Wait for another epoch, another commit or the end, which all ranks of the group come to see."""
        orders = self.session.orders
        while not orders.over and (orders.view.epoch, orders.view.committed) == (epoch, committed):
            orders = self.session.wait(orders.version)

"""The view of one group: what the coordinator sends it about the step in flight, with the transfers of state in which
it takes part."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

Segments = tuple[tuple[int, ...], ...]
MemberId = tuple[int, int]
"""(group, incarnation)."""


@dataclass(frozen=True)
class Offer:
    """Some holders of the state after ``step`` give it to a learner, and every later result until it has caught up.

    Donor i of d serves part i of d, to the ranks of its own position. It copies its part before it applies
    ``step + 1``, and keeps the same part of each later reduced result until the learner has it."""

    learner: MemberId
    number: int
    """Numbers of offers never repeat in a job attempt."""
    step: int
    donors: tuple[MemberId, ...]


COUNTS, WHOLE, NEW, VOID, UNABLE = "counts", "whole", "new", "void", "unable"
"""How far a host of a state shard is: votes have found its copy to be right; it has reported that it has the state;
it is to get it; it has reported that it has nothing and no donor; it has reported that it cannot keep the shard."""


@dataclass(frozen=True)
class StateHost:
    """A group that keeps one state shard: the optimizer's state of a part of the parameters."""

    shard: int
    group: int
    incarnation: int
    standing: str = COUNTS
    """``COUNTS``, ``WHOLE``, ``NEW`` or ``VOID``; all but the first are *new* hosts. ``UNABLE``: the group is no host,
    and none will be made of this incarnation."""
    donor: MemberId | None = None
    """For a new host: the counting host that gives it the state of the shard after ``step``."""
    step: int = -1

    @property
    def member(self) -> MemberId:
        """(group, incarnation)."""
        return self.group, self.incarnation

    @property
    def counts(self) -> bool:
        """Whether it is a counting host."""
        return self.standing == COUNTS

    @property
    def is_new(self) -> bool:
        """Whether it is a new host."""
        return self.standing not in (COUNTS, UNABLE)


@dataclass(frozen=True)
class ReliefAsk:
    """A group is to give back pieces of the step in flight that it has not begun."""

    fencing: int
    """Fencing number of the coordinator that made it."""
    number: int
    """Numbers never fall in a job attempt; those of one round are equal."""
    pieces: int
    """How many, at most."""


@dataclass(frozen=True)
class View:
    """All that one group must know of the step in flight in an epoch. A group that is not in ``live`` is a learner: it
    has no part in the step, and nobody waits for it."""

    group: int
    incarnation: int
    epoch: int
    fencing: int
    live: tuple[MemberId, ...]
    """(group, incarnation) of all members, sorted."""
    committed: tuple[int, int]
    """(t*, e*); e* is 0 before the first commit of a job attempt. A member that has not applied t* yet applies the
    reduced result of (t*, e*)."""
    step: int
    """t* + 1."""
    segments: Segments
    """This group's plan of ``step`` in ``epoch``; inside a step it grows, one segment at a time, and loses what
    the group has given back; a joiner that gets another offer begins anew."""
    standing: tuple[int, ...]
    """This group's plan of the steps after ``step`` while the epoch lasts."""
    offer: Offer | None = None
    """For a learner or joiner: where it gets its state; None for a learner that has no offer, and for a member that
    holds t*."""
    serves: tuple[Offer, ...] = ()
    """The offers in which this group is a donor. One that is not listed any more is dropped."""
    leave: bool = False
    """The run ends with t*: apply it, vote on its weights, save where it is this group's turn, then send
    Applied(t*)."""
    audits: Segments = ()
    """Pieces that this group audits in ``step``: those of entry k are computed before the pieces of segment k, and are
    not added to the accumulators. Segments beyond the last entry have none."""
    disputed: tuple[int, ...] = ()
    """Pieces over whose gradients groups disagree, or ``WEIGHTS``: the next vote must have their checksums, parameter
    by parameter."""
    save: int = 0
    """The save that the commit of t* ordered, as returned by :func:`spare_megatron.protocol.saves.order`."""
    adopts: tuple[tuple[int, int], ...] = ()
    """(shard, 1 where the coordinator knows that it is open, else 0) of each shard that the group has adopted: no piece
    of it is begun before all ranks have opened its data."""
    ask: ReliefAsk | None = None
    """What the group is asked to give back. While it is, its answer has not changed any plan, and what it gave in it is
    still in its segments."""
    asks_made: int = 0
    """Number of the newest ask of any group when this view was made."""
    state_hosts: tuple[StateHost, ...] = ()
    """The hosts of all state shards, and who cannot be one, sorted by (shard, group); empty where every group hosts
    everything."""

    @property
    def receiver(self) -> MemberId:
        """Whom this view is for."""
        return self.group, self.incarnation

    @property
    def is_member(self) -> bool:
        """False for a learner."""
        place = bisect_left(self.live, self.receiver)
        return place < len(self.live) and self.live[place] == self.receiver

    @property
    def live_groups(self) -> tuple[int, ...]:
        """Ids of the members, sorted: a group's index in it is its rank in a replica communicator."""
        return tuple(group for group, _ in self.live)

    @property
    def neighbour(self) -> MemberId | None:
        """(group, incarnation) of the next member after this group, the first after the last: to that one its ranks
        send in the replica rings. None where there is no other, and for a learner."""
        if len(self.live) < 2 or not self.is_member:
            return None
        return self.live[(bisect_left(self.live, self.receiver) + 1) % len(self.live)]

    def audits_of(self, segment: int) -> tuple[int, ...]:
        """The pieces that are audited before those of a segment are computed."""
        return self.audits[segment] if segment < len(self.audits) else ()

"""What one rank knows of the job, and how the coordinator's messages change it: the rank's half of the protocol.

Pure, like the machine. Every rank holds one :class:`Orders` value and replaces it; the training thread reads it as
a snapshot. The rules are 3 (a view carries the last commit), 5 (a newer epoch abandons the old communicators), 8
(fencing numbers) and 9 (all messages may be repeated; older views are ignored; a view of the same epoch has the
vote sent again).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum

from spare_megatron.protocol.tickets import TicketStream
from spare_megatron.protocol.view import Offer, ReliefAsk, View


@dataclass(frozen=True)
class Orders:
    """A consistent snapshot of what the coordinator last said."""

    view: View
    """The last view, brought up to date with the commits of its epoch that came after it."""
    version: int = 0
    """Grows by one at each change; 0 before the first view."""
    right_at: str = ""
    """host:port at which the next member's rank of this position listens; empty where there is no other member."""
    donors_at: tuple[str, ...] = ()
    """For a view with an offer: host:port at which the donors' ranks of this position serve it, in the order of its
    donors."""
    stream: TicketStream = field(default_factory=TicketStream)
    """What the group's leader has written of the ticket stream, without what this rank has read."""
    stop: tuple[str, str] | None = None
    """(outcome, reason) once the job is over."""
    fenced: str | None = None
    """Why this group is no member any more, so that it must write nothing and leave; None while it is one."""

    @property
    def over(self) -> bool:
        """True when the group was stopped or fenced; later messages change nothing."""
        return self.stop is not None or self.fenced is not None


def first_orders(group: int, incarnation: int) -> Orders:
    """The orders of a rank before its first view: epoch 0, which has no members."""
    return Orders(View(group, incarnation, 0, fencing=0, live=(), committed=(0, 0), step=0, segments=(), standing=()))


class Change(Enum):
    """How a message changed the orders of a rank."""

    NONE = "older than what is known, or known"
    SAME = "the present epoch again: send the vote again"
    COMMIT = "the step in flight is committed"
    TICKETS = "the group's leader has written more of the ticket stream"
    ASK = "the group is asked for pieces that it has not begun"
    EPOCH = "a newer epoch: abandon the replica communicators of the old one"
    END = "the job is over for this group"


def take_view(orders: Orders, view: View, right_at: str = "", donors_at: tuple[str, ...] = ()) -> tuple[Orders, Change]:
    """The orders after a View, whose neighbour listens at ``right_at``, and whose offer is served at ``donors_at``.

    It changes nothing if it is for another group or incarnation, or if its fencing number, its epoch or its t* is
    older. A commit is final, so a view of a newer epoch that does not know the last one comes from a coordinator that
    no longer decides."""
    known = orders.view
    if orders.over or view.group != known.group or known.incarnation not in (-1, view.incarnation):
        return orders, Change.NONE
    if view.fencing < known.fencing or view.epoch < known.epoch or view.committed[0] < known.committed[0]:
        return orders, Change.NONE
    if (view.fencing, view.step) == (known.fencing, known.step) and view.asks_made < known.asks_made:
        # It was made before the group was asked, and came later: views may have to wait.
        view = replace(view, ask=known.ask, asks_made=known.asks_made)
    updated = replace(orders, view=view, version=orders.version + 1, right_at=right_at, donors_at=donors_at)
    if view.epoch > known.epoch:
        return updated, Change.EPOCH
    if view.committed[0] > known.committed[0]:
        return updated, Change.COMMIT
    return updated, Change.SAME


def take_commit(
    orders: Orders,
    step: int,
    epoch: int,
    leave: bool,
    *,
    audits: tuple[int, ...] = (),
    save: int = 0,
    serves: tuple[Offer, ...] = (),
) -> tuple[Orders, Change]:
    """The orders after Commit(t, e): the plan of t + 1 is the steady-state assignment, with ``audits`` in its pipeline.
    A repeated commit, or one of another epoch, changes nothing."""
    known = orders.view
    if orders.over or (step, epoch) != (known.step, known.epoch):
        return orders, Change.NONE
    view = replace(
        known,
        committed=(step, epoch),
        step=step + 1,
        segments=() if leave else (known.standing,),
        offer=None,
        serves=serves,
        leave=leave,
        audits=(audits,) if audits else (),
        disputed=(),
        save=save,
        ask=None,
    )
    updated = replace(orders, view=view, version=orders.version + 1)
    return updated, Change.COMMIT


def take_ask(orders: Orders, step: int, ask: ReliefAsk) -> tuple[Orders, Change]:
    """The orders of a leader that is asked for pieces of ``step``. One of another step or coordinator, or an older one,
    changes nothing."""
    view = orders.view
    if orders.over or (step, ask.fencing) != (view.step, view.fencing) or ask.number <= view.asks_made:
        return orders, Change.NONE
    asked = replace(view, ask=ask, asks_made=ask.number)
    return replace(orders, view=asked, version=orders.version + 1), Change.ASK


def take_tickets(orders: Orders, more: TicketStream, read: int = 0) -> tuple[Orders, Change]:
    """The orders after entries of the ticket stream, of which this rank has read those before number ``read``. Entries
    that are known change nothing. The leader sends its ranks a view or commit before the entries that follow from
    it."""
    stream = orders.stream.joined(more)
    if stream is orders.stream:
        return orders, Change.NONE
    return replace(orders, stream=stream.since(read), version=orders.version + 1), Change.TICKETS


def take_end(
    orders: Orders, *, stop: tuple[str, str] | None = None, fenced: str | None = None
) -> tuple[Orders, Change]:
    """The orders after Stop or Fenced; only the first of them counts."""
    if orders.over:
        return orders, Change.NONE
    return replace(orders, version=orders.version + 1, stop=stop, fenced=fenced), Change.END

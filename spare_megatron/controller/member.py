"""What one rank knows of the job, and how the coordinator's messages change it: the member's half of the protocol.

Pure, like the machine. Every rank holds one :class:`Orders` value and replaces it; the training thread reads it as
a snapshot. The rules are 3 (a view carries the last commit), 5 (a newer epoch abandons the old communicators), 8
(fencing numbers) and 9 (all messages may be repeated; older views are ignored; a view of the same epoch has the
vote sent again).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from spare_megatron.controller.messages import Segments, View


@dataclass(frozen=True)
class Orders:
    """A snapshot of what the coordinator last said. Everything in it belongs together."""

    group: int
    incarnation: int
    version: int = 0
    """Grows by one at each change; 0 before the first view."""
    epoch: int = 0
    """e; 0 before the first view."""
    fencing: int = 0
    live: tuple[tuple[int, int], ...] = ()
    """(group, incarnation) of all members of the epoch, sorted."""
    committed: tuple[int, int] = (0, 0)
    """(t*, e*). If t* is not applied yet, the reduced result of (t*, e*) is to be applied."""
    step: int = 0
    """The step in flight, t* + 1."""
    segments: Segments = ()
    """This group's plan of the step in flight; inside a step it only grows, one segment at a time."""
    standing: tuple[int, ...] = ()
    """This group's pieces in the steps after the one in flight."""
    donors: tuple[int, ...] = ()
    """Groups to take the state of t* from; empty for a group that holds it."""
    store: str = ""
    """host:port of the store in which replica communicators of this epoch meet."""
    store_prefix: str = ""
    leave: bool = False
    """The run ends with t*: apply it, save, say that it is held, leave."""
    audits: Segments = ()
    """What this group audits in ``step``: entry k in the pipeline of segment k, after its pieces."""
    disputed: tuple[int, ...] = ()
    """Pieces of ``step`` whose gradients the next vote gives for each parameter."""
    save: bool = False
    """t* is to be saved once it is applied."""
    stop: tuple[str, str] | None = None
    """(outcome, reason) once the job is over."""
    fenced: str | None = None
    """Why this group is no member any more: drop everything, write nothing, leave."""

    @property
    def live_groups(self) -> tuple[int, ...]:
        """Ids of the members, sorted: the index in it is the rank in a replica communicator."""
        return tuple(group for group, _ in self.live)

    def audits_of(self, segment: int) -> tuple[int, ...]:
        """The pieces that are audited in the pipeline of a segment."""
        return self.audits[segment] if segment < len(self.audits) else ()

    @property
    def over(self) -> bool:
        """True when nothing more will come."""
        return self.stop is not None or self.fenced is not None


class Change(Enum):
    """What a message meant for the rank that got it."""

    NONE = "older than what is known, or known"
    SAME = "the present epoch again: send the vote again"
    COMMIT = "the step in flight is committed"
    EPOCH = "a newer epoch: abandon the replica communicators of the old one"
    END = "the job is over for this group"


def take_view(orders: Orders, view: View, store: str = "", store_prefix: str = "") -> tuple[Orders, Change]:
    """A View for this group. Nothing changes for one that is not for this place or older in any of fencing, epoch, t*:
    a commit is final, so a view of a newer epoch that does not know it comes from somebody who does not decide."""
    if orders.over or (view.group, view.incarnation) != (orders.group, orders.incarnation):
        return orders, Change.NONE
    if view.fencing < orders.fencing or view.epoch < orders.epoch or view.committed[0] < orders.committed[0]:
        return orders, Change.NONE
    told = replace(
        orders,
        version=orders.version + 1,
        epoch=view.epoch,
        fencing=view.fencing,
        live=view.live,
        committed=view.committed,
        step=view.step,
        segments=view.segments,
        standing=view.standing,
        donors=view.donors,
        store=store,
        store_prefix=store_prefix,
        leave=view.leave,
        audits=view.audits,
        disputed=view.disputed,
        save=view.save,
    )
    if view.epoch > orders.epoch:
        return told, Change.EPOCH
    if view.committed[0] > orders.committed[0]:
        return told, Change.COMMIT
    return told, Change.SAME


def take_commit(
    orders: Orders, step: int, epoch: int, leave: bool, audits: tuple[int, ...] = (), save: bool = False
) -> tuple[Orders, Change]:
    """Commit(t, e): the plan of t + 1 is the standing assignment, with ``audits`` in its pipeline. Repeated or of
    another epoch: nothing."""
    if orders.over or (step, epoch) != (orders.step, orders.epoch):
        return orders, Change.NONE
    segments: Segments = () if leave else (orders.standing,)
    told = replace(
        orders,
        version=orders.version + 1,
        committed=(step, epoch),
        step=step + 1,
        segments=segments,
        donors=(),
        leave=leave,
        audits=(audits,) if audits else (),
        disputed=(),
        save=save,
    )
    return told, Change.COMMIT


def take_end(
    orders: Orders, *, stop: tuple[str, str] | None = None, fenced: str | None = None
) -> tuple[Orders, Change]:
    """Stop or Fenced: the first one counts."""
    if orders.over:
        return orders, Change.NONE
    return replace(orders, version=orders.version + 1, stop=stop, fenced=fenced), Change.END

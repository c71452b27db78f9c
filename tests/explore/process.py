"""A model of one process of a group: an immutable value, and pure functions that make the next one.

Its orders change by the real :mod:`spare_megatron.controller.member`, and its votes are made by the real
:class:`spare_megatron.control.group_aggregation.Ballots`. The training thread (trainer.loop, trainer.step: compute what
the plan says, reduce, apply on commit, save, vote on the end) and the leader's greeting are modelled. A group has one
rank, because this model is not about how the ranks of a group agree.

A process runs all segments that it knows of and contributes to the sum in one move: messages that it hears between two
segments only add segments, and either order leads to the same value.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from spare_megatron.control.group_aggregation import Ballots
from spare_megatron.control.reports import Reduced
from spare_megatron.controller import audits, member, saves
from spare_megatron.controller import messages as m
from spare_megatron.controller.member import Change, Orders, first_orders
from tests.explore.keep import Keeper, Kept

Found = tuple[int, int]
"""(piece, checksum of its gradient). The checksum is the piece's number, or below 0 where the arithmetic was wrong."""
Part = tuple[int, int, tuple[Found, ...], tuple[Found, ...]]
"""One member's share of a sum: (group, incarnation, checksums of its pieces, checksums of those that it audited)."""


class Result(NamedTuple):
    """A reduced gradient, represented by the shares that went into it."""

    step: int
    epoch: int
    parts: tuple[Part, ...]


class Violation(AssertionError):  # noqa: N818
    """Something that must never happen has happened."""


class Process(NamedTuple):
    """One incarnation of a group, with its connection to a coordinator."""

    group: int
    incarnation: int
    where: int = 0
    """Fencing number of the coordinator that it is connected to; 0: none."""
    down: tuple[Kept[m.Action], ...] = ()
    """Messages on the way from that coordinator."""
    up: tuple[Kept[m.Event], ...] = ()
    """Messages on the way to it."""
    orders: Kept[m.View] | None = None
    """The last view with later commits applied; None before the first view."""
    applied: int = 0
    weights: str = "0"
    """Digest of its weights after its last apply: the number of the step, and what damage adds to it."""
    damage: str = ""
    """What a flipped bit adds to the digest, from the next apply on; empty: none has flipped."""
    ran: tuple[Found, ...] = ()
    audited: tuple[Found, ...] = ()
    segments: int = 0
    """Number of segments of the step in flight that have run."""
    gave: int = 0
    """Epoch of the newest sum of the step in flight that it contributed to."""
    held: Kept[Result] | None = None
    """The result of its last reduction; None where that failed."""
    ballot: Kept[m.Vote] | None = None
    """The leader's last vote, which is sent again when asked for while its epoch is the present one."""
    ended: int = 0
    """Epoch of its newest vote at the end of the run."""
    holds: tuple[int, int] | None = None
    """(step, epoch) of its newest Applied."""
    asked: tuple[Kept[m.Saved], ...] = ()
    """Checkpoints that it asked about without an answer so far."""
    saving: tuple[int, str] | None = None
    """(step, digest of the weights) of a checkpoint that is being written."""
    saved_end: bool = False
    """It has begun to save the last step."""

    @property
    def name(self) -> str:
        """'2', or '2.1' for incarnation 1 of group 2."""
        return f"{self.group}.{self.incarnation}" if self.incarnation else str(self.group)

    @property
    def known(self) -> m.View:
        """Its orders, which must exist."""
        assert self.orders is not None, "no orders yet"
        return self.orders.value


class Processes:
    """The rules by which processes change."""

    def __init__(self, spec: m.JobSpec, keeper: Keeper) -> None:
        self._spec, self._keep = spec, keeper.keep

    # ------------------------------------------------------------------------------------------------ connections

    def connect(self, p: Process, fencing: int) -> Process:
        """A new connection, with the greeting on the way; messages on the way on the old one are lost."""
        orders = p.orders.value if p.orders else None
        hello = m.Hello(
            p.group,
            p.incarnation,
            self._spec.fingerprint,
            last_applied=p.applied,
            held=self._ballots(p).held,
            fencing=orders.fencing if orders else 0,
            committed=orders.committed if orders else None,
        )
        greeting: list[Kept[m.Event]] = [self._keep(hello)]
        if p.holds is not None:
            greeting.append(self._keep(m.Applied(p.group, p.incarnation, *p.holds)))
        return p._replace(where=fencing, down=(), up=(*greeting, *p.asked))

    @staticmethod
    def cut(p: Process) -> Process:
        """The connection breaks; messages on the way are lost."""
        return p._replace(where=0, down=(), up=())

    # ---------------------------------------------------------------------------------------------- what it is told

    def hear(self, p: Process) -> Process | None:
        """The process hears its next message; None where it then leaves."""
        note, p = p.down[0], p._replace(down=p.down[1:])
        action = note.value
        if isinstance(action, m.AcceptSave):
            return p._replace(asked=tuple(k for k in p.asked if k.value.directory != action.directory))
        if isinstance(action, m.SendFenced):
            deaf = p.orders is not None and p.where < p.orders.value.fencing
            return self.cut(p) if deaf else None
        if isinstance(action, m.SendStop):
            return None
        before = Orders(p.orders.value) if p.orders else first_orders(p.group, p.incarnation)
        if isinstance(action, m.SendView):
            told, change = member.take_view(before, action.view)
        else:
            assert isinstance(action, m.SendCommit)
            mine = dict(action.audits).get(p.group, ())
            told, change = member.take_commit(before, action.step, action.epoch, action.leave, mine, action.save)
        if change is Change.NONE:
            return p
        known = told.view
        if known.committed[0] < before.view.committed[0]:
            raise Violation(f"group {p.name} knew commit {before.view.committed}, now {known.committed}")
        p = p._replace(orders=self._keep(known))
        if change is Change.EPOCH:
            ballots = self._ballots(p)
            ballots.forget_older(known.epoch, known.committed)
            p = p._replace(ballot=p.ballot if ballots.last else None)
        if change is Change.SAME and p.ballot is not None and self.has_voted(p):
            p = p._replace(up=(*p.up, p.ballot))
        return p

    # ------------------------------------------------------------------------------------------------- what it does

    def has_voted(self, p: Process) -> bool:
        """Whether its last vote is for the present (step, epoch)."""
        vote = p.ballot.value if p.ballot else None
        return vote is not None and vote.result.at == (p.known.step, p.known.epoch)

    def computes(self, p: Process) -> bool:
        """Whether it has something to contribute to the sum of the present epoch."""
        if p.orders is None:
            return False
        orders = p.orders.value
        return not orders.leave and not orders.donors and p.applied + 1 == orders.step and p.gave < orders.epoch

    def compute(self, p: Process, wrong: str = "") -> Process:
        """Run the segments that have not run, and contribute them to the sum. ``wrong`` says what is computed wrongly:
        the first 'piece', the first 'audit' or 'all'."""
        orders = p.known
        new = [(number, orders.segments[number]) for number in range(p.segments, len(orders.segments))]
        pieces = [piece for _, segment in new for piece in segment]
        told = [piece for number, _ in new for piece in orders.audits_of(number)]
        bad_pieces = pieces if wrong == "all" else pieces[: wrong == "piece"]
        bad_audits = told if wrong == "all" else told[: wrong == "audit"]
        error = -1 - 1000 * p.group
        return p._replace(
            ran=(*p.ran, *((q, error - q if q in bad_pieces else q) for q in pieces)),
            audited=(*p.audited, *((q, error - q if q in bad_audits else q) for q in told)),
            segments=len(orders.segments),
            gave=orders.epoch,
        )

    def may_err(self, p: Process) -> tuple[str, ...]:
        """The ways in which the next computation can be wrong."""
        orders = p.known
        numbers = range(p.segments, len(orders.segments))
        ways = [("piece", any(orders.segments[n] for n in numbers)), ("audit", any(map(orders.audits_of, numbers)))]
        there = tuple(way for way, possible in ways if possible)
        return (*there, "all") if len(there) > 1 else there

    def reduces(self, p: Process) -> bool:
        """Whether it takes part in the reduction of the present epoch and has not voted."""
        if p.orders is None:
            return False
        orders = p.orders.value
        here = p.gave == orders.epoch and p.applied + 1 == orders.step and not orders.leave and not orders.donors
        return here and not self.has_voted(p)

    def reduced(self, p: Process, result: Kept[Result] | None, links: tuple[m.Link, ...] = ()) -> Process:
        """The reduction ended, with a result or without one; its vote is on the way."""
        orders, ran = p.known, dict(p.ran)
        inside = audits.selected(self._spec, orders.step, ran)
        said = m.ReductionResult(
            orders.step,
            orders.epoch,
            result is not None,
            pieces=tuple(ran),
            weights_digest=p.weights,
            checksums=tuple((piece, ran[piece]) for piece in inside),
            audits=p.audited,
            links=links,
        )
        return self._vote(p._replace(held=result), said)

    @staticmethod
    def applies(p: Process) -> bool:
        """Whether a step is committed that it has not applied. (A joiner takes the state instead.)"""
        return p.orders is not None and not p.known.donors and p.known.committed[0] > p.applied

    def apply(self, p: Process) -> Process:
        """Apply the committed step, whose result it must hold, because it voted for it."""
        orders = p.known
        held = p.held.value if p.held else None
        if orders.committed[0] != p.applied + 1 or held is None or (held.step, held.epoch) != orders.committed:
            at = f"has applied step {p.applied} and holds {held and held[:2]}"
            raise Violation(f"group {p.name} is to apply {orders.committed}, but {at}")
        step = orders.committed[0]
        p = p._replace(
            applied=step,
            weights=f"{step}{p.damage}",
            ran=(),
            audited=(),
            segments=0,
            gave=0,
            held=None,
        )
        return p if orders.leave else self._save(p, [group for group, *_ in held.parts])

    def ends(self, p: Process) -> Process | None:
        """After the last step: vote on its weights, once in each epoch; None where that is not possible now or is
        done."""
        orders = p.orders.value if p.orders else None
        if orders is None or not orders.leave or p.applied != orders.committed[0] or p.ended == orders.epoch:
            return None
        said = m.ReductionResult(orders.step, orders.epoch, True, weights_digest=p.weights)
        return self._vote(p._replace(ended=orders.epoch), said)

    def settles(self, p: Process) -> Process | None:
        """After the vote at the end: save if this group is the saver, then say Applied; None where it waits for
        something, or has done both."""
        orders = p.orders.value if p.orders else None
        if orders is None or not orders.leave or p.ended != orders.epoch or p.saving or p.asked:
            return None
        if p.group == saves.saver(orders.live_groups) and not p.saved_end:
            return p._replace(saving=(p.applied, p.weights), saved_end=True)
        if p.holds == (p.applied, orders.epoch):
            return None
        done = m.Applied(p.group, p.incarnation, p.applied, orders.epoch)
        return p._replace(holds=(p.applied, orders.epoch), up=self._up(p, done))

    def saved(self, p: Process) -> Process:
        """The checkpoint is complete: ask whether it counts. The directory's name is the digest of the weights in
        it."""
        assert p.saving is not None
        step, weights = p.saving
        ask = self._keep(m.Saved(p.group, p.incarnation, step, weights))
        up = (*p.up, ask) if p.where else p.up
        return p._replace(saving=None, asked=(*p.asked, ask), up=up)

    def joined(self, p: Process, donor: Process | None) -> Process:
        """It has the state of t*, from ``donor`` or (None) already before, and says Applied."""
        orders = p.known
        if donor is not None:
            p = Process(p.group, p.incarnation, p.where, p.down, p.up, p.orders, asked=p.asked, saving=p.saving)
            p = p._replace(applied=orders.committed[0], weights=donor.weights, damage=donor.damage)
        step = orders.committed[0]
        has = m.Applied(p.group, p.incarnation, step, orders.epoch)
        return p._replace(
            orders=self._keep(replace(orders, donors=())), holds=(step, orders.epoch), up=self._up(p, has)
        )

    @staticmethod
    def _save(p: Process, live: list[int]) -> Process:
        """Begin to save where the commit orders it, this group is the saver, and no other save is in flight."""
        free = p.saving is None and not p.asked
        mine = p.known.save and saves.saver(live) == p.group
        return p._replace(saving=(p.applied, p.weights)) if free and mine else p

    def _vote(self, p: Process, said: m.ReductionResult) -> Process:
        ballot = self._ballots(p).add(0, Reduced(said))
        if ballot is None:
            return p
        vote = self._keep(ballot[0])
        return p._replace(ballot=vote, up=(*p.up, vote) if p.where else p.up)

    def _up(self, p: Process, event: m.Event) -> tuple[Kept[m.Event], ...]:
        """The messages on the way with ``event`` added, which is lost where there is no connection."""
        return (*p.up, self._keep(event)) if p.where else p.up

    @staticmethod
    def _ballots(p: Process) -> Ballots:
        """The leader's ballots, with its last vote in them."""
        ballots = Ballots(p.group, p.incarnation, 1)
        ballots.last = (p.ballot.value, ()) if p.ballot else None
        return ballots

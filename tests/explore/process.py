"""A model of one process of a group: an immutable value, and pure functions that make the next one.

Its orders change by the real :mod:`spare_megatron.protocol.member`, and its votes are made by the real
:class:`spare_megatron.control_plane.group_aggregation.Ballots`. The training thread (worker.loop, worker.step: compute
what the plan says, reduce, apply on commit, save, vote on the end) and the leader's greeting are modelled. A group has
one rank, because this model is not about how the ranks of a group agree.

A process runs all segments that it has seen and contributes to the sum in one move: messages that it receives between
two segments only add segments, and either order leads to the same value.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from spare_megatron.control_plane.group_aggregation import Ballots
from spare_megatron.control_plane.reports import Reduced
from spare_megatron.protocol import audits, member, saves
from spare_megatron.protocol import messages as m
from spare_megatron.protocol.member import Change, Orders, first_orders
from spare_megatron.protocol.rebalance import first_given
from spare_megatron.protocol.view import MemberId, Offer, View
from tests.explore.keep import Keeper, Kept

Found = tuple[int, int]
"""(piece, checksum of its gradient). The checksum is the piece's number, or below 0 where the arithmetic was wrong."""
Part = tuple[int, int, tuple[Found, ...], tuple[Found, ...]]
"""One member's share of a sum: (group, incarnation, checksums of its pieces, checksums of those that it audited)."""


class Serving(NamedTuple):
    """A donor's part of an offer: the state that it has copied, and the results since."""

    number: int
    weights: str
    damage: str
    upto: int
    """The newest step whose result it has."""


class Copies(NamedTuple):
    """What a process has of weights and of state shards (tests.explore.shard_process)."""

    weights: tuple[int, ...]
    """Of each shard: the step after which it has the weights; -1: none."""
    own: tuple[tuple[int, int], ...] = ()
    """(shard, step after which it has its state), sorted."""
    sums: tuple[tuple[int, int, int], ...] = ()
    """(shard, step, epoch) of the sums that it has and has not applied."""
    copied: tuple[tuple[int, MemberId, int], ...] = ()
    """As a donor: (shard, new host, step) of the states that it has copied."""
    caught: int = -1
    """The step to which it has caught up as a joiner."""
    refused: tuple[int, int] = (0, 0)
    """(epoch, shard): what it cannot keep; so it waits for another epoch."""


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
    orders: Kept[View] | None = None
    """The last view with later commits applied; None before the first view."""
    process_nonce: str = ""
    replaces: int = -1
    applied: int = 0
    """-1: it has no state."""
    weights: str = "0"
    """Digest of its weights after its last apply: the number of the step, and what damage adds to it."""
    damage: str = ""
    """What a flipped bit adds to the digest, from the next apply on; empty: none has flipped."""
    ran: tuple[Found, ...] = ()
    audited: tuple[Found, ...] = ()
    segments: int = 0
    """Number of segments of the step in flight that have run."""
    slow: bool = False
    """It may be long until it runs the other segments of the step in flight."""
    answer: Kept[m.GaveBack] | None = None
    """Its answer to the newest ask that it has answered."""
    opened: tuple[tuple[int, bool], ...] = ()
    """(shard that it was asked to adopt, whether it could open the data), of those that it has tried."""
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
    follows: int = 0
    """Number of the offer by which it gets, or got, its state; 0: none."""
    gave_up: int = 0
    """Number of the offer that it has said is void."""
    serving: tuple[Serving, ...] = ()
    """The offers of which it has its part."""
    offers_seen: int = 0
    """Number of the newest offer in which it was made a donor."""
    withdrew: tuple[int, ...] = ()
    """The listed offers that it has withdrawn from."""
    copies: Copies | None = None
    """None in a job without state shards."""

    @property
    def name(self) -> str:
        """'2', or '2.1' for incarnation 1 of group 2."""
        return f"{self.group}.{self.incarnation}" if self.incarnation else str(self.group)

    @property
    def known(self) -> View:
        """Its orders, which must exist."""
        assert self.orders is not None, "no orders yet"
        return self.orders.value

    @property
    def offer(self) -> Offer | None:
        """The offer by which it gets its state; None where it has none, has given it up, or needs it no more: as a
        joiner that holds t*."""
        known = self.orders.value if self.orders else None
        if known is None or known.offer is None or known.offer.number == self.gave_up:
            return None
        return None if known.is_member and self.applied == known.committed[0] else known.offer

    def serves(self, number: int) -> Serving | None:
        """Its part of an offer; None: it has none (yet)."""
        return next((one for one in self.serving if one.number == number), None)


class Eager(NamedTuple):
    """What a process does by itself, as soon as it can."""

    kind: str
    """'answer', 'compute', 'reduce' or 'end'; empty: nothing."""
    after: tuple[Process, ...] = ()
    """Of 'answer' and 'end': the process after it, in each way in which that may be."""


REMEMBERED = (
    *("connect", "receive", "eager", "learns", "computes", "answers", "opens", "applies", "reduces", "compute"),
    *("apply", "gathers", "fetches", "refusable"),
)
"""The rules, functions of a process alone, that are asked most often."""


class Processes:
    """The rules by which processes change."""

    def __init__(self, spec: m.JobSpec, keeper: Keeper) -> None:
        self._spec, self._keep = spec, keeper.keep

    def remember(self) -> None:
        """Answer each question once: in an exploration, thirty worlds have a process in common."""
        for name in REMEMBERED:
            if hasattr(self, name):
                setattr(self, name, cache(getattr(self, name)))

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
            process_nonce=p.process_nonce,
            replaces=p.replaces,
        )
        reported: list[m.Event] = [hello]
        if p.holds is not None:
            reported.append(m.Applied(p.group, p.incarnation, *p.holds))
        reported += self._reported_of_offers(p)
        return p._replace(where=fencing, down=(), up=(*map(self._keep, reported), *p.asked))

    def _reported_of_offers(self, p: Process) -> list[m.Event]:
        """What still holds of what it has said as a learner or donor."""
        if p.orders is None:
            return []
        name, known = (p.group, p.incarnation), p.orders.value
        reported: list[m.Event] = [m.Withdrawn(*name, number) for number in p.withdrew]
        if known.offer is None and not known.is_member and not known.leave:
            reported.append(m.Ready(*name))
        elif known.offer is not None and known.offer.number == p.gave_up:
            reported.append(m.Void(*name, p.gave_up))
        elif known.offer is not None and p.applied >= 0:
            reported.append(m.CaughtUp(*name, p.follows, p.applied, p.weights))
        return reported

    @staticmethod
    def cut(p: Process) -> Process:
        """The connection breaks; messages on the way are lost."""
        return p._replace(where=0, down=(), up=())

    # ---------------------------------------------------------------------------------------------- what it is notified

    def receive(self, p: Process) -> Process | None:
        """The process receives its next message; None where it then leaves."""
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
            reported, change = member.take_view(before, action.view)
        elif isinstance(action, m.SendAsk):
            reported, change = member.take_ask(before, action.step, action.ask)
        else:
            assert isinstance(action, m.SendCommit)
            mine = dict(action.audits).get(p.group, ())
            serves = dict(action.serves).get(p.group, ())
            reported, change = member.take_commit(
                before, action.step, action.epoch, action.leave, audits=mine, save=action.save, serves=serves
            )
        if change is Change.NONE:
            return p
        known = reported.view
        if known.committed[0] < before.view.committed[0]:
            raise Violation(f"group {p.name} knew commit {before.view.committed}, now {known.committed}")
        p = self._learn(p._replace(orders=self._keep(known), incarnation=known.incarnation))
        p = self._serve(p)
        for shard, is_known in known.adopts:
            if not is_known and shard in dict(p.opened):
                p = self._reported_of_shard(p, shard)
        if change is Change.EPOCH:
            ballots = self._ballots(p)
            ballots.forget_older(known.epoch, known.committed)
            p = p._replace(ballot=p.ballot if ballots.last else None)
        if change is Change.SAME and p.ballot is not None and self.has_voted(p):
            p = p._replace(up=(*p.up, p.ballot))
        if p.answer is not None and self._is_of(p.answer.value, p.known):
            p = p._replace(up=(*p.up, p.answer))
        return p

    # ------------------------------------------------------------------------------------------------- what it does

    def has_voted(self, p: Process) -> bool:
        """Whether its last vote is for the present (step, epoch)."""
        vote = p.ballot.value if p.ballot else None
        return vote is not None and vote.result.at == (p.known.step, p.known.epoch)

    def computes(self, p: Process) -> bool:
        """Whether it has something to contribute to the sum of the present epoch, and can."""
        return self._may_compute(p) and not self._is_shut(p)

    def _is_shut(self, p: Process) -> bool:
        """Whether it has not opened, or cannot open, a shard of which it has a piece to run."""
        new = [piece for segment in p.known.segments[p.segments :] for piece in segment]
        return not self._shut(p).isdisjoint(piece // self._spec.pieces_per_shard for piece in new)

    @staticmethod
    def _shut(p: Process) -> set[int]:
        """The shards that it has adopted and not opened."""
        return {shard for shard, _ in p.known.adopts} - {shard for shard, is_open in p.opened if is_open}

    def opens(self, p: Process) -> list[int]:
        """The shards whose data it may try to open."""
        return [] if p.orders is None else [shard for shard, _ in p.known.adopts if shard not in dict(p.opened)]

    def open(self, p: Process, shard: int, can: bool) -> Process:
        """It has opened a shard, or cannot, and says so."""
        return self._reported_of_shard(p._replace(opened=tuple(sorted((*p.opened, (shard, can))))), shard)

    def _reported_of_shard(self, p: Process, shard: int) -> Process:
        return p._replace(up=self._up(p, m.Hosts(p.group, p.incarnation, shard, dict(p.opened)[shard])))

    def _may_compute(self, p: Process) -> bool:
        if p.orders is None:
            return False
        orders = p.orders.value
        if orders.leave or not orders.is_member or p.applied + 1 != orders.step or p.gave >= orders.epoch:
            return False
        gave = p.answer.value.pieces if p.answer is not None and self._is_of(p.answer.value, orders) else ()
        return not gave

    @staticmethod
    def _is_of(answer: m.GaveBack, view: View) -> bool:
        """Whether this is the answer to what the view asks."""
        return view.ask is not None and (answer.step, answer.ask) == (view.step, view.ask)

    def answers(self, p: Process) -> list[Process]:
        """Its answers to an ask that it has not answered: it gives any number of pieces of segments that have not
        run."""
        if p.orders is None or (p.answer is not None and self._is_of(p.answer.value, p.known)):
            return []
        known = p.known
        if known.ask is None:
            return []
        new = [piece for segment in known.segments[p.segments :] for piece in segment]
        audited = audits.selected(self._spec, known.step, new)
        shut = self._shut(p)
        free = [q for q in new if q not in audited and q // self._spec.pieces_per_shard not in shut]
        free = first_given([free], self._spec.pieces_per_shard) if self._may_compute(p) else []
        ways = range(min(known.ask.pieces, len(free)) + 1) if p.slow or self._is_shut(p) else (0,)
        reported = [m.GaveBack(p.group, p.incarnation, known.step, known.ask, tuple(free[:number])) for number in ways]
        return [p._replace(answer=self._keep(one), up=self._up(p, one)) for one in reported]

    def compute(self, p: Process, wrong: str = "") -> Process:
        """Run the segments that have not run, and contribute them to the sum. ``wrong`` says what is computed wrongly:
        the first 'piece', the first 'audit' or 'all'."""
        orders = p.known
        new = [(number, orders.segments[number]) for number in range(p.segments, len(orders.segments))]
        pieces = [piece for _, segment in new for piece in segment]
        reported = [piece for number, _ in new for piece in orders.audits_of(number)]
        bad_pieces = pieces if wrong == "all" else pieces[: wrong == "piece"]
        bad_audits = reported if wrong == "all" else reported[: wrong == "audit"]
        error = -1 - 1000 * p.group
        return p._replace(
            ran=(*p.ran, *((q, error - q if q in bad_pieces else q) for q in pieces)),
            audited=(*p.audited, *((q, error - q if q in bad_audits else q) for q in reported)),
            segments=len(orders.segments),
            gave=orders.epoch,
            slow=False,
        )

    def eager(self, p: Process) -> Eager:
        """What it does by itself, as soon as it can. A slow one does nothing so."""
        if p.slow:
            return Eager("")
        answers = self.answers(p)
        if answers:
            return Eager("answer", tuple(answers))
        if self.computes(p):
            return Eager("compute")
        if self.reduces(p):
            return Eager("reduce")
        done = self.ends(p) or self.settles(p)
        return Eager("") if done is None else Eager("end", (done,))

    @staticmethod
    def learns(p: Process) -> bool:
        """Whether it gets its state by an offer."""
        return p.offer is not None

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
        here = p.gave == orders.epoch and p.applied + 1 == orders.step and not orders.leave and orders.is_member
        return here and not self.has_voted(p)

    def reduced(self, p: Process, result: Kept[Result] | None, links: tuple[m.Link, ...] = ()) -> Process:
        """The reduction ended, with a result or without one; its vote is on the way."""
        orders, ran = p.known, dict(p.ran)
        inside = audits.selected(self._spec, orders.step, ran)
        reported = m.ReductionResult(
            orders.step,
            orders.epoch,
            result is not None,
            pieces=tuple(ran),
            weights_digest=p.weights,
            checksums=tuple((piece, ran[piece]) for piece in inside),
            audits=p.audited,
            links=links,
            state=tuple(one for one in p.copies.own if one[1] == orders.step - 1) if p.copies else (),
        )
        if result is not None and p.copies is not None:
            mine = [host.shard for host in orders.state_hosts if host.member == (p.group, p.incarnation)]
            sums = {*p.copies.sums, *((shard, orders.step, orders.epoch) for shard in mine)}
            p = p._replace(copies=p.copies._replace(sums=tuple(sorted(sums))))
        return self._vote(p._replace(held=result), reported)

    @staticmethod
    def applies(p: Process) -> bool:
        """Whether a step is committed that it has not applied, and that it held the result of. (Learners and joiners
        get their states by offers.)"""
        if p.orders is None or p.orders.value.offer is not None or not p.orders.value.is_member:
            return False
        return p.known.committed[0] > p.applied

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
            slow=False,
            answer=None,
            gave=0,
            held=None,
            serving=tuple(one._replace(upto=step) for one in p.serving),
        )
        p = self._serve(p)
        return p if orders.leave else self._save(p, [group for group, *_ in held.parts])

    def ends(self, p: Process) -> Process | None:
        """After the last step: vote on its weights, once in each epoch; None where that is not possible now or is
        done."""
        orders = p.orders.value if p.orders else None
        if orders is None or not orders.leave or p.applied != orders.committed[0] or p.ended == orders.epoch:
            return None
        reported = m.ReductionResult(orders.step, orders.epoch, True, weights_digest=p.weights)
        return self._vote(p._replace(ended=orders.epoch), reported)

    def settles(self, p: Process) -> Process | None:
        """After the vote at the end: save if this group is the saver, then send Applied; None where it waits for
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

    # ------------------------------------------------------------------------------------- learners and their donors

    def _learn(self, p: Process) -> Process:
        """A learner or joiner that is notified of another offer than the one it follows begins anew."""
        known = p.known
        if known.is_member and known.offer is None:
            if p.applied < 0:
                raise Violation(f"group {p.name} has no state and is taken for a holder of step {known.committed[0]}")
            return p
        number = known.offer.number if known.offer else 0
        if number == p.follows and number:
            return p
        empty = Process(
            p.group, p.incarnation, p.where, p.down, p.up, p.orders, p.process_nonce, p.replaces, applied=-1
        )
        p = empty._replace(weights="", follows=number, gave_up=p.gave_up)
        return p if number or known.leave else p._replace(up=self._up(p, m.Ready(p.group, p.incarnation)))

    def _serve(self, p: Process) -> Process:
        """A donor drops the offers that are not listed any more, copies its part of those of which it has the state,
        and withdraws from those whose state it has no more."""
        listed = {offer.number: offer.step for offer in p.known.serves}
        p = p._replace(
            serving=tuple(one for one in p.serving if one.number in listed),
            withdrew=tuple(number for number in p.withdrew if number in listed),
            offers_seen=max([p.offers_seen, *listed]),
        )
        for number, step in listed.items():
            if p.serves(number) or number in p.withdrew or p.applied < step:
                continue
            if p.applied == step:
                part = Serving(number, p.weights, p.damage, step)
                p = p._replace(serving=(*p.serving, part))
            else:
                p = self.withdraw(p, number)
        return p

    def withdraw(self, p: Process, number: int) -> Process:
        """A donor serves an offer no longer."""
        p = p._replace(serving=tuple(one for one in p.serving if one.number != number), withdrew=(*p.withdrew, number))
        return p._replace(up=self._up(p, m.Withdrawn(p.group, p.incarnation, number)))

    def give_up(self, p: Process) -> Process:
        """A learner or joiner cannot have a part of its offer. It keeps its state until it is notified that the offer
        has ended: it may have been called as a holder."""
        number = p.follows
        p = p._replace(gave_up=number)
        return p._replace(up=self._up(p, m.Void(p.group, p.incarnation, number)))

    def fetched(self, p: Process, parts: list[Serving]) -> Process:
        """It has the state after the offer's step, of these parts."""
        offer = p.known.offer
        assert offer is not None
        damage = "".join(sorted({part.damage for part in parts}))
        same = len({part.weights for part in parts}) == 1
        weights = parts[0].weights if same else f"{offer.step}{damage}"
        return self._caught_up(p._replace(applied=offer.step, weights=weights, damage=damage))

    def caught_up(self, p: Process) -> Process:
        """It has applied the next committed result, of which each donor gave its part."""
        step = p.applied + 1
        return self._caught_up(p._replace(applied=step, weights=f"{step}{p.damage}"))

    def _caught_up(self, p: Process) -> Process:
        reported = m.CaughtUp(p.group, p.incarnation, p.follows, p.applied, p.weights)
        return p._replace(up=self._up(p, reported))

    @staticmethod
    def _save(p: Process, live: list[int]) -> Process:
        """Begin to save where the commit orders it, this group is the saver, and no other save is in flight."""
        free = p.saving is None and not p.asked
        mine = p.known.save and saves.saver(live) == p.group
        return p._replace(saving=(p.applied, p.weights)) if free and mine else p

    def _vote(self, p: Process, reported: m.ReductionResult) -> Process:
        ballot = self._ballots(p).add(0, Reduced(reported))
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

"""The state of the protocol machine: one immutable value, which a replay of the journal rebuilds.

Mappings are plain dicts that nobody changes after construction (a copy is made for each change). Derived figures
that are costly at a thousand groups, such as the plan of a steady-state assignment, are computed once per assignment.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from spare_megatron.placement import Placement, placement_from_offsets
from spare_megatron.protocol.assign import Assignment
from spare_megatron.protocol.blame import Evidence
from spare_megatron.protocol.learner import Learner
from spare_megatron.protocol.messages import JobSpec, Saved, Vote
from spare_megatron.protocol.view import MemberId, Offer, ReliefAsk, Segments, StateHost, View


class Plan(Mapping[int, Segments]):
    """Group -> its segments: its share of an assignment, then the segments that failures of the step added. Shares are
    computed when they are asked for, because a failure changes the plans of few groups out of thousands."""

    def __init__(
        self,
        assignment: Assignment | None,
        members: tuple[int, ...],
        added: Mapping[int, Segments] | None = None,
        patched: frozenset[int] = frozenset(),
        left: Mapping[int, frozenset[int]] | None = None,
    ) -> None:
        self.assignment, self.members, self.added = assignment, members, added or {}
        self.patched = patched
        """Groups that were lost in this step: their shares have gone to others, also where they are back. Whoever has a
        share and is no member is one of them."""
        self.left = left or {}
        """Group -> pieces of its share that it has given back."""

    def __getitem__(self, group: int) -> Segments:
        if self.assignment is None or group not in self._set:
            raise KeyError(group)
        share = () if group in self.patched else self.assignment.pieces_of(group)
        return (self._kept(group, share), *self.added.get(group, ()))

    def __iter__(self) -> Iterator[int]:
        return iter(self.members)

    def __len__(self) -> int:
        return len(self.members)

    @cached_property
    def _set(self) -> frozenset[int]:
        return frozenset(self.members)

    def _kept(self, group: int, share: tuple[int, ...]) -> tuple[int, ...]:
        """What a group has of its share."""
        left = self.left.get(group)
        return share if left is None else tuple(piece for piece in share if piece not in left)

    def pieces(self, group: int) -> tuple[int, ...]:
        """All pieces of one group, computed for it alone: faster for a few groups than computing the plan of all."""
        if self.assignment is None:
            raise KeyError(group)
        share = () if group in self.patched else self.assignment.pieces_of_one(group)
        return (*self._kept(group, share), *chain.from_iterable(self.added.get(group, ())))

    def loads(self) -> NDArray[np.int64]:
        """[N]: number of pieces of every member, 0 for the others."""
        if self.assignment is None:
            return np.zeros(0, dtype=np.int64)
        loads = self.assignment.loads.copy()
        if self.patched:
            loads[list(self.patched)] = 0
        for group, pieces in self.left.items():
            loads[group] -= len(pieces)
        for group, segments in self.added.items():
            loads[group] += sum(map(len, segments))
        return loads

    def grown(self, members: tuple[int, ...], more: Mapping[int, tuple[int, ...]], lost: Collection[int] = ()) -> Plan:
        """This plan for ``members``, with one more segment for the groups in ``more``. Those that are ``lost`` have
        nothing of what they had, also where they are members again."""
        inside = frozenset(members) - frozenset(lost)
        added = {group: segments for group, segments in self.added.items() if group in inside}
        for group, pieces in more.items():
            added[group] = (*added.get(group, ()), pieces)
        left = {group: pieces for group, pieces in self.left.items() if group in inside}
        return Plan(self.assignment, members, added, self.patched.union(lost), left)

    def without(self, given: Mapping[int, tuple[int, ...]]) -> Plan:
        """This plan without pieces that groups have given back."""
        if not any(given.values()):
            return self
        added, left = dict(self.added), dict(self.left)
        for group, pieces in given.items():
            gone = frozenset(pieces)
            later = [piece for segment in added.get(group, ()) for piece in segment]
            added[group] = tuple(tuple(p for p in segment if p not in gone) for segment in added.get(group, ()))
            left[group] = left.get(group, frozenset()) | gone.difference(later)
        return Plan(self.assignment, self.members, added, self.patched, left)


NO_PLAN = Plan(None, ())


@dataclass(frozen=True, eq=False)
class Standing:
    """The assignment of the steps after the one in flight, with the plan that it gives each live group."""

    assignment: Assignment
    live: tuple[int, ...]

    @cached_property
    def plan(self) -> Plan:
        """Group -> its pieces as one segment, which is empty for a group without a piece."""
        return Plan(self.assignment, self.live)


@dataclass(frozen=True)
class Retries:
    """Failed attempts of the step in flight since the live set last changed (protocol rule 11)."""

    failures: int = 0
    evidence: Evidence = field(default_factory=Evidence)
    result_mismatches: int = 0
    since: int = 0
    """Failed votes of epochs below this one are no evidence: their members waited for joiners, or were others than the
    present ones of the same groups."""


@dataclass(frozen=True)
class Relief:
    """How slow groups are relieved in the step in flight (protocol.relief)."""

    rounds: int = 0
    """How often groups were asked since the step began, a member was lost or one that came held the state."""
    asked: Mapping[int, ReliefAsk] = field(default_factory=dict)
    """Group -> what it is asked for, until its answer has changed plans."""
    given: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Group -> its answer, which has not changed plans yet: the pieces are still in its own."""
    paces: Mapping[int, tuple[int, float]] = field(default_factory=dict)
    """Group -> (pieces that it had not done when groups were asked, seconds for a piece)."""


@dataclass(frozen=True)
class State:
    """Membership, plan, votes and commits of one job. ``phase`` is one of

    ========  =========================================================================================
    closed    no spec yet
    forming   groups are arriving, nothing is planned
    running   step ``committed[0] + 1`` is in flight
    ending    the last step of the run is committed; groups vote on its weights, save, send Applied
    stopped   ``outcome`` says how it ended; nothing is decided any more
    ========  =========================================================================================
    """

    spec: JobSpec | None = None
    placement: Placement | None = None
    phase: str = "closed"
    job_attempt: int = 0
    fencing: int = 0
    epoch: int = 0
    live: Mapping[int, int] = field(default_factory=dict)
    """Group -> incarnation of the members of ``epoch`` (while forming: of those that have come)."""
    highest: Mapping[int, int] = field(default_factory=dict)
    """Highest incarnation ever seen of each group, dead ones too."""
    gone: frozenset[int] = frozenset()
    """Groups that were lost while the job formed, or had not come when it began."""
    process_nonces: Mapping[int, tuple[int, str]] = field(default_factory=dict)
    """Group -> (its highest incarnation, the process nonce of the process that has it)."""
    learners: Mapping[int, Learner] = field(default_factory=dict)
    """Group -> what is known of it, of learners (not in ``live``) and joiners (in ``live``, not in ``holders``)."""
    offers_made: int = 0
    """Number of the newest offer."""
    digests: tuple[tuple[int, str], ...] = ()
    """(t, digest of the weights after t on which votes agreed) of the last steps, oldest first."""
    committed: tuple[int, int] = (0, 0)
    """(t*, e*)."""
    holders: frozenset[int] = frozenset()
    """Live groups that hold state t*, or the result of (t*, e*) that leads to it."""
    independent: frozenset[MemberId] = frozenset()
    """Members of (t*, e*) whose weights after t* votes may count for a majority: a joiner, also one that has the place
    of such a member, has copied its own, and so has who had not computed any weights of its own before that commit."""
    untried: frozenset[int] = frozenset()
    """Holders whose state nobody has compared yet: joiners of the last resort, until they have voted for a commit."""
    plan: Plan = field(default_factory=lambda: NO_PLAN)
    """Group -> plan of the step in flight."""
    standing: Standing | None = None
    votes: Mapping[int, Vote] = field(default_factory=dict)
    """Ok votes of the step in flight in this epoch."""
    retries: Retries = field(default_factory=Retries)
    audits: Mapping[int, Segments] = field(default_factory=dict)
    """Group -> the pieces of the step in flight that it audits, segment by segment (``View.audits``); groups without
    audits are left out."""
    disputes: Mapping[int, Mapping[MemberId, int]] = field(default_factory=dict)
    """Piece of the step in flight over which groups disagreed (or ``WEIGHTS``) -> member, also a dead one -> checksum
    that it voted."""
    relief: Relief = field(default_factory=Relief)
    asks_made: int = 0
    """Number of the newest ask."""
    drained: frozenset[int] = frozenset()
    """Groups that an operator wants to be out: members of them leave with the next commit that can do without them,
    and no process of theirs is started until the wish is taken back, or another process has taken the place."""
    drained_for_now: frozenset[int] = frozenset()
    """Those of them that only the launcher wants to be out, which takes that back once they have left."""
    slowness: Mapping[int, int] = field(default_factory=dict)
    """Group -> how long a piece takes it, in sixteenths of a usual group's time, of the members that are slow for long
    (protocol.speeds)."""
    slowness_step: int = 0
    """t* when that changed last; before the first time, of the step that this job attempt started from."""
    share_anew: bool = False
    """The next commit draws the steady-state assignment for the slowness that is known by then."""
    adopted: Mapping[int, Mapping[int, bool]] = field(default_factory=dict)
    """Group -> shard that it hosts beyond its stack, because nobody else did -> whether it has opened the data
    (protocol.adoption). ``placement`` has these hosts too."""
    unable: Mapping[int, frozenset[int]] = field(default_factory=dict)
    """Group -> the shards that its incarnation was to adopt and cannot open."""
    state_hosts: tuple[StateHost, ...] = ()
    """The hosts of all state shards, sorted by (shard, group); empty where every group hosts everything
    (protocol.state_shards)."""
    leave: str = ""
    """Why the run ends before its last step; empty if it does not."""
    applied_last: frozenset[int] = frozenset()
    """While the run ends: groups that have sent Applied in the present epoch."""
    save_interval: int = 0
    """Steps between saves that the tuner chose; 0: it has chosen none."""
    save_now: bool = False
    """The step in flight is to be saved when it is committed."""
    save_step: int = 0
    """The last step at which a save was due; before the first one, the step that this job attempt started from."""
    endangered: frozenset[MemberId] = frozenset()
    """The members whose loss alone would have ended the job after the last commit (protocol.saves)."""
    saver: MemberId | None = None
    """The member that the last order to save was for; None before the first order."""
    save: int = 0
    """The save that the last commit ordered (``View.save``)."""
    unproved: Saved | None = None
    """The newest complete checkpoint whose weights no votes have compared yet, also of a group that is lost since,
    unless votes spoke against that group."""
    reported: Mapping[MemberId, str] = field(default_factory=dict)
    """Member that saves, or has saved, t* -> digest of the weights after t* that it has voted, also if it is lost since
    and its vote with it."""
    accused: frozenset[MemberId] = frozenset()
    """Members whose weights after t* votes have found to be others than the majority's."""
    saved_step: int = -1
    """Step of the newest checkpoint that counts; -1 before the first."""
    outcome: str = ""
    outcome_reason: str = ""

    @property
    def job(self) -> JobSpec:
        """The spec of an opened job."""
        assert self.spec is not None, "no Opened event yet"
        return self.spec

    @property
    def where(self) -> Placement:
        """The placement of an opened job, with what groups have adopted."""
        assert self.placement is not None, "no Opened event yet"
        return self.placement

    @property
    def step_in_flight(self) -> int:
        """t* + 1."""
        return self.committed[0] + 1

    @property
    def stopped(self) -> str | None:
        """How the job ended, or None."""
        return self.outcome or None

    @property
    def last_weights(self) -> str | None:
        """The digest of the weights after the last step, on which all groups agreed; None where the run did not come to
        its end, or votes carry no digests because arithmetic may differ between groups."""
        if self.outcome not in ("finished", "left"):
            return None
        return self.voted_weights or None

    @property
    def voted_weights(self) -> str:
        """The digest of the weights in the votes, where these agree; empty where no vote carries one."""
        return next((vote.result.weights_digest for vote in self.votes.values() if vote.result.weights_digest), "")

    def segments_of(self, group: int) -> Segments:
        """The group's plan of the step in flight."""
        return self.plan.get(group, ())

    def standing_of(self, group: int) -> tuple[int, ...]:
        """The group's pieces in the steps after the one in flight."""
        if self.standing is None:
            return ()
        return self.standing.assignment.pieces_of(group)

    @property
    def present(self) -> dict[int, int]:
        """Group -> incarnation of members and learners."""
        return {**self.live, **{group: known.incarnation for group, known in self.learners.items()}}

    def incarnation_of(self, group: int) -> int | None:
        """That of a member or learner; None where the group is neither."""
        known = self.learners.get(group)
        return self.live.get(group) if known is None else known.incarnation

    def is_member(self, who: MemberId) -> bool:
        """Whether this incarnation of a group is a member of the present epoch."""
        return self.live.get(who[0]) == who[1]

    def is_independent(self, group: int) -> bool:
        """Whether the present member of this group was a member of (t*, e*)."""
        return (group, self.live.get(group, -1)) in self.independent

    @property
    def joiners(self) -> frozenset[int]:
        """Members that do not hold t* yet."""
        return frozenset(self.learners.keys() & self.live.keys()) if self.learners else frozenset()

    @property
    def offers(self) -> Iterator[Offer]:
        """All offers that hold, in the order of the learners' groups."""
        return (known.offer for _, known in sorted(self.learners.items()) if known.offer is not None)

    @property
    def serves(self) -> dict[int, tuple[Offer, ...]]:
        """Group -> the offers in which it is a donor, of every donor."""
        served: dict[int, tuple[Offer, ...]] = {}
        for offer in self.offers:
            for group, _ in offer.donors:
                served[group] = (*served.get(group, ()), offer)
        return served

    def view_of(self, group: int) -> View:
        """The present view of one member or learner."""
        return self._view(group, self._members, self.serves)

    def views(self) -> Iterator[View]:
        """The present views of all members and learners, in the order of the groups."""
        members, serves = self._members, self.serves
        return (self._view(group, members, serves) for group in sorted(self.live.keys() | self.learners.keys()))

    @property
    def _members(self) -> tuple[MemberId, ...]:
        return tuple(sorted(self.live.items()))

    def _view(self, group: int, members: tuple[MemberId, ...], serves: Mapping[int, tuple[Offer, ...]]) -> View:
        learner = self.learners.get(group)
        return View(
            group=group,
            incarnation=self.live[group] if learner is None else learner.incarnation,
            epoch=self.epoch,
            fencing=self.fencing,
            live=members,
            committed=self.committed,
            step=self.step_in_flight,
            segments=self.segments_of(group),
            standing=self.standing_of(group) if group in self.live else (),
            offer=None if learner is None else learner.offer,
            serves=serves.get(group, ()),
            leave=self.phase == "ending",
            audits=self.audits.get(group, ()),
            disputed=tuple(sorted(self.disputes)),
            save=self.save,
            adopts=tuple((s, int(is_open)) for s, is_open in sorted(self.adopted[group].items()))
            if group in self.adopted
            else (),
            ask=self.relief.asked.get(group),
            asks_made=self.asks_made,
            state_hosts=self.state_hosts,
        )


def initial_state() -> State:
    """The state before the first event of a journal."""
    return State()


def opened_state(state: State, spec: JobSpec, job_attempt: int, fencing: int) -> State:
    """The state at the start of a new job attempt. Of the old job attempt only the epoch and the highest incarnations
    are kept, because these numbers never repeat."""
    return State(
        spec=spec,
        placement=placement_from_offsets(spec.num_groups, spec.offsets),
        phase="forming",
        job_attempt=job_attempt,
        fencing=fencing,
        epoch=state.epoch,
        highest=state.highest,
        process_nonces=state.process_nonces,
        offers_made=state.offers_made,
        committed=(spec.first_step, 0),
        slowness_step=spec.first_step,
        save_step=spec.first_step,
        saved_step=spec.first_step if spec.first_step else -1,
    )

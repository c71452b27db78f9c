"""A model of a whole job around the real controller: groups, links that break, reductions that fail, deaths.

The coordinator is :func:`spare_megatron.controller.machine.step` itself and each group follows
:mod:`spare_megatron.controller.member` itself; only computing, the reduction and the network are modelled. Any
interleaving can be drawn: ``enabled()`` and ``faults()`` list what may happen now. After every event
the invariants are checked, and with them what only an observer of the whole job can see:

* no two groups ever apply different results for one step, and every applied result holds each piece exactly once;
* a group applies steps in order, without gap or repeat;
* a run that finishes has saved its last step, and what was saved has the right weights, unless nobody was left who
  could have told;
* a piece that its owner computed wrongly is never applied when another group of that epoch audited it rightly, and
  only groups that computed something wrongly are ever fenced for it;
* the journal, replayed, gives the same state and the same actions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from spare_megatron.controller import audits
from spare_megatron.controller import messages as m
from spare_megatron.controller.invariants import check
from spare_megatron.controller.machine import State, initial_state, step
from spare_megatron.controller.member import Change, Orders, take_commit, take_end, take_view
from spare_megatron.placement import build_placement

Choice = tuple[str, Callable[[], None]]
Result = tuple[int, int]
"""(step, epoch) of a reduction; what went into it is in ``World.contributions``."""


@dataclass
class Group:
    """One group as the model sees it."""

    id: int
    incarnation: int
    alive: bool = True
    connected: bool = True
    orders: Orders = field(init=False)
    applied: int = 0
    ran: list[int] = field(default_factory=list)
    segments_run: int = 0
    found: dict[int, int] = field(default_factory=dict)
    """Piece inside -> checksum of its gradient."""
    audited: dict[int, int] = field(default_factory=dict)
    wrong: int = 0
    """Pieces that it will compute wrongly from now on."""
    weights: str = ""
    """Digest of its weights, when it took it: after its last apply."""
    damaged: str = ""
    """What a bit that flipped since then makes of it."""
    saved: dict[int, str] = field(default_factory=dict)
    """Step -> digest of the weights in its checkpoint."""
    held: Result | None = None
    last_vote: m.Vote | None = None
    inbox: deque[m.Action] = field(default_factory=deque)
    outbox: deque[m.Event] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.orders = Orders(self.id, self.incarnation)


class World:
    """N groups, one coordinator, and everything that can go wrong between them."""

    def __init__(
        self,
        num_groups: int,
        pieces: int,
        redundancy: int,
        granularity: str,
        steps: int,
        faults: int,
        audit_rate: float = 0.0,
        damages: bool = False,
    ) -> None:
        placement = build_placement(num_groups, redundancy)
        self.spec = m.JobSpec(
            num_groups,
            pieces,
            placement.offsets,
            granularity,
            0,
            steps,
            1,
            "job",
            heartbeat_timeout_s=0.0,
            retry_limit=99,
            audit_rate=audit_rate,
            audit_seed=7,
        )
        self.faults_left, self.damages = faults, damages
        self.clock_s = 0.0
        self.state: State = initial_state()
        self.journal: list[tuple[m.Event, m.Decision]] = []
        self.applied_result: dict[int, Result] = {}
        self.contributions: dict[Result, dict[int, tuple[int, ...]]] = {}
        self.found: dict[Result, dict[int, tuple[dict[int, int], dict[int, int]]]] = {}
        """What each group of a reduction found, of its pieces and of those that it audited."""
        self.ever_wrong: set[tuple[int, int]] = set()
        """(group, incarnation) that computed something wrongly."""
        self.ever_damaged: set[tuple[int, int]] = set()
        """(group, incarnation) whose weights were damaged."""
        self.blind = False
        """Weights were damaged, and for a while there was only one group to ask."""
        self.trace: list[str] = []
        self.feed(m.Opened(self.spec, 1, 1))
        self.groups = [Group(g, 0) for g in range(num_groups)]
        for group in self.groups:
            group.outbox.append(self._hello(group))

    # ------------------------------------------------------------------------------------------- the coordinator

    def feed(self, event: m.Event) -> None:
        """One event through the machine, with all checks; actions go into the inboxes."""
        before = self.state
        self.state, decision = step(before, event)
        if self.ever_damaged and (len(before.witnesses & self.state.live.keys()) < 2 or self.state.stopped):
            self.blind = True
        check(before, event, self.state, decision)
        self.journal.append((event, decision))
        self.trace.append(f"{event} => {decision.reason}")
        for action in decision.actions:
            if isinstance(action, m.SendFenced) and "gradient" in action.reason:
                assert (action.group, action.incarnation) in self.ever_wrong, f"a false alarm: {decision.reason}"
            if isinstance(action, m.SendFenced) and "weights" in action.reason:
                assert (action.group, action.incarnation) in self.ever_damaged, f"a false alarm: {decision.reason}"
            if isinstance(action, m.AcceptSave):
                self._check_saved(action)
            self._send(action)
        if self.state.stopped == "finished" and before.phase == "ending":
            assert self.state.saved_step == self.state.committed[0], "the run ended before its last step was saved"
        if self.state.stopped == "failed" and before.phase not in ("forming", "stopped"):
            assert self.ever_wrong or self.ever_damaged, f"a false alarm: {decision.reason}"

    def _check_saved(self, action: m.AcceptSave) -> None:
        content = self.groups[action.group].saved[action.step]
        assert content == str(action.step) or self.blind, f"damaged weights of step {action.step} count"

    def _send(self, action: m.Action) -> None:
        if isinstance(action, m.SendView):
            targets = [(action.view.group, action.view.incarnation)]
        elif isinstance(action, m.SendCommit | m.SendStop):
            targets = [(g, self.groups[g].incarnation) for g in action.groups]
        else:
            targets = [(action.group, action.incarnation)]
        for number, incarnation in targets:
            if not 0 <= number < len(self.groups):
                continue
            group = self.groups[number]
            if group.alive and group.connected and group.incarnation == incarnation:
                group.inbox.append(action)

    def replay(self) -> None:
        """The journal gives the same state and the same actions."""
        state = initial_state()
        for event, decision in self.journal:
            state, again = step(state, event)
            assert again == decision, f"replay of {event} gives {again}, recorded was {decision}"
        assert (state.epoch, state.committed, dict(state.live)) == (
            self.state.epoch,
            self.state.committed,
            dict(self.state.live),
        )

    # ---------------------------------------------------------------------------------------------- what can happen

    def pick(self, number: int) -> Choice | None:
        """One thing that may happen next, a fault in one of ten cases; None when nothing can happen."""
        faults = self.faults() if number % 10 == 0 else []
        choices = faults or self.enabled() or self.faults()
        return choices[number // 10 % len(choices)] if choices else None

    def form(self) -> None:
        """Every group's Hello is heard, every first view delivered."""
        for group in self.groups:
            self.feed(group.outbox.popleft())
        for group in self.groups:
            self._hear(group)

    def enabled(self) -> list[Choice]:
        """Everything that may happen next without a fault."""
        choices: list[Choice] = []
        for group in self.groups:
            if not group.alive:
                continue
            if group.outbox and group.connected:
                choices.append((f"say {group.id}", lambda g=group: self.feed(g.outbox.popleft())))
            if group.inbox:
                choices.append((f"hear {group.id}", lambda g=group: self._hear(g)))
            if not group.connected:
                choices.append((f"reconnect {group.id}", lambda g=group: self._reconnect(g)))
            choices += self._work(group)
        return choices

    def faults(self) -> list[Choice]:
        """Every fault, repeat or return that may happen next, as long as there are any left."""
        if not self.faults_left:
            return []
        choices: list[Choice] = [("coordinator restarts", self._reopen)]
        for group in self.groups:
            if not group.alive:
                if not self.state.stopped:
                    choices += [(f"restart {group.id}", lambda g=group: self._restart(g))] * 2
                continue
            choices.append((f"kill {group.id}", lambda g=group: self._kill(g)))
            if group.connected:
                choices.append((f"cut {group.id}", lambda g=group: self._cut(g)))
            if group.last_vote is not None:
                choices.append((f"repeat {group.id}", lambda g=group: self._repeat(g)))
            if self.spec.audit_rate:
                choices += [(f"err {group.id} {n}", lambda g=group, n=n: self._err(g, n)) for n in (1, 3)]
            if self.damages and not group.damaged:
                choices.append((f"damage {group.id}", lambda g=group: self._damage(g)))
            if self._reducing(group):
                choices.append((f"fail {group.id}", lambda g=group: self._fail(g)))
        return choices

    def _work(self, group: Group) -> list[Choice]:
        """What the group itself can do next."""
        orders = group.orders
        if orders.epoch == 0 or orders.over:
            return []
        if orders.leave:
            due = group.applied == orders.committed[0] and not self._voted(group)
            return [(f"vote on the end {group.id}", lambda: self._vote(group, True))] if due else []
        if orders.donors:
            donor = next((d for d in orders.donors if self._gives(d, orders)), None)
            return [] if donor is None else [(f"join {group.id}", lambda: self._take_state(group))]
        if group.applied + 1 != orders.step:
            return []
        if group.segments_run < len(orders.segments):
            return [(f"run {group.id}", lambda: self._run(group))]
        if not self._voted(group):
            key = (orders.step, orders.epoch)
            if group.id not in self.contributions.get(key, {}):
                return [(f"contribute {group.id}", lambda: self._contribute(group))]
            if set(self.contributions[key]) == set(orders.live_groups):
                return [(f"reduced {group.id}", lambda: self._reduced(group))]
        return []

    def _voted(self, group: Group) -> bool:
        vote = group.last_vote
        return vote is not None and (vote.step, vote.epoch) == (group.orders.step, group.orders.epoch)

    def _reducing(self, group: Group) -> bool:
        orders = group.orders
        here = self.contributions.get((orders.step, orders.epoch), {})
        return not orders.over and group.id in here and not self._voted(group)

    # ------------------------------------------------------------------------------------------------------- the groups

    def _hello(self, group: Group) -> m.Hello:
        return m.Hello(group.id, group.incarnation, "job", group.applied, group.held, group.orders.fencing)

    def _hear(self, group: Group) -> None:
        action = group.inbox.popleft()
        if isinstance(action, m.SendView):
            self._told(group, *take_view(group.orders, action.view))
        elif isinstance(action, m.SendCommit):
            mine = dict(action.audits).get(group.id, ())
            told = take_commit(group.orders, action.step, action.epoch, action.leave, mine, action.save)
            self._told(group, *told)
        elif isinstance(action, m.SendFenced):
            self._told(group, *take_end(group.orders, fenced=action.reason))
        elif isinstance(action, m.SendStop):
            self._told(group, *take_end(group.orders, stop=(action.outcome, action.reason)))

    def _told(self, group: Group, orders: Orders, change: Change) -> None:
        group.orders = orders
        if change is Change.SAME and group.last_vote is not None and self._voted(group):
            group.outbox.append(group.last_vote)
        again = change in (Change.SAME, Change.EPOCH)
        if again and orders.leave and group.applied == orders.committed[0]:
            if group.id == min(orders.live_groups):
                group.saved[group.applied] = group.weights
                group.outbox.append(m.Saved(group.id, group.incarnation, group.applied, "d"))
            group.outbox.append(m.Applied(group.id, group.incarnation, group.applied, group.orders.epoch))
        if orders.over or orders.donors:
            return
        if orders.committed[0] == group.applied + 1 and group.held == orders.committed:
            self._apply(group)

    def _apply(self, group: Group) -> None:
        assert group.held is not None
        done, key = group.held[0], group.held
        assert self.applied_result.setdefault(done, key) == key, f"two results for step {done}"
        pieces = sorted(p for part in self.contributions[key].values() for p in part)
        assert pieces == list(range(self.spec.num_groups * self.spec.pieces_per_shard)), "no partition was applied"
        self._check_audits(key)
        group.applied = done
        self._fresh(group)
        group.weights = group.damaged or str(done)
        if group.id == min(group.orders.live_groups):
            group.saved[done] = group.weights
            group.outbox.append(m.Saved(group.id, group.incarnation, done, "d"))
        if group.orders.leave:
            group.outbox.append(m.Applied(group.id, group.incarnation, done, group.orders.epoch))

    def _fresh(self, group: Group) -> None:
        group.ran, group.segments_run, group.held, group.last_vote = [], 0, None, None
        group.found, group.audited = {}, {}

    def _check_audits(self, key: Result) -> None:
        inside = {piece: (g, c) for g, (found, _) in self.found[key].items() for piece, c in found.items()}
        for auditor, (_, audited) in self.found[key].items():
            for piece, checksum in audited.items():
                owner, other = inside[piece]
                assert checksum == other, f"{key}: group {auditor} found {checksum}, group {owner} applied {other}"
                assert owner == auditor or checksum == piece, f"{key}: a wrong piece {piece} was applied"

    def _run(self, group: Group) -> None:
        orders, segment = group.orders, group.segments_run
        group.ran += orders.segments[segment]
        group.found.update({piece: self._compute(group, piece) for piece in orders.segments[segment]})
        group.audited.update({piece: self._compute(group, piece) for piece in orders.audits_of(segment)})
        group.segments_run += 1

    def _compute(self, group: Group, piece: int) -> int:
        """The gradient's checksum: the piece's number, or where the arithmetic is wrong a figure of the group's own."""
        if not group.wrong:
            return piece
        group.wrong -= 1
        self.ever_wrong.add((group.id, group.incarnation))
        return -1 - piece - 1000 * group.id

    def _err(self, group: Group, pieces: int) -> None:
        self.faults_left -= 1
        group.wrong = pieces

    def _damage(self, group: Group) -> None:
        self.faults_left -= 1
        self.ever_damaged.add((group.id, group.incarnation))
        group.damaged = f"damaged in group {group.id} incarnation {group.incarnation}"

    def _contribute(self, group: Group) -> None:
        key = (group.orders.step, group.orders.epoch)
        self.contributions.setdefault(key, {})[group.id] = tuple(group.ran)
        self.found.setdefault(key, {})[group.id] = dict(group.found), dict(group.audited)

    def _reduced(self, group: Group) -> None:
        orders = group.orders
        group.held = (orders.step, orders.epoch)
        self._vote(group, True)

    def _fail(self, group: Group) -> None:
        self.faults_left -= 1
        self._vote(group, False)

    def _vote(self, group: Group, ok: bool) -> None:
        self.clock_s += 1.0
        orders = group.orders
        links = () if ok else tuple(m.Link(g, group.id) for g in orders.live_groups if g != group.id)[:1]
        vote = m.Vote(
            group.id,
            group.incarnation,
            orders.step,
            orders.epoch,
            ok,
            () if orders.leave else tuple(group.ran),
            weights_digest=group.weights,
            links=links,
            failing_s=0.0 if ok else self.clock_s,
            checksums=tuple((p, group.found[p]) for p in audits.selected(self.spec, orders.step, group.ran)),
            audits=tuple(group.audited.items()),
        )
        group.last_vote = vote
        group.outbox.append(vote)

    def _gives(self, donor: int, orders: Orders) -> bool:
        group = self.groups[donor]
        return group.alive and group.applied == orders.committed[0] and not group.orders.over

    def _take_state(self, group: Group) -> None:
        donor = next(self.groups[d] for d in group.orders.donors if self._gives(d, group.orders))
        group.applied = group.orders.committed[0]
        self._fresh(group)
        group.weights, group.damaged = donor.damaged or donor.weights, donor.damaged
        if donor.damaged:
            self.ever_damaged.add((group.id, group.incarnation))
        group.orders = take_view(group.orders, self._without_donors(group))[0]
        group.outbox.append(m.Applied(group.id, group.incarnation, group.applied, group.orders.epoch))

    @staticmethod
    def _without_donors(group: Group) -> m.View:
        o = group.orders
        return m.View(
            o.group,
            o.incarnation,
            o.epoch,
            o.fencing,
            o.live,
            o.committed,
            o.step,
            o.segments,
            o.standing,
            audits=o.audits,
            disputed=o.disputed,
        )

    # --------------------------------------------------------------------------------------------------------- faults

    def _kill(self, group: Group) -> None:
        self.faults_left -= 1
        group.alive = False
        done = tuple((g.id, len(g.ran)) for g in self.groups)
        self.feed(m.Lost((m.Loss(group.id, group.incarnation, "exited", detail="killed"),), done))

    def _restart(self, group: Group) -> None:
        self.faults_left -= 1
        fresh = Group(group.id, group.incarnation + 1)
        self.groups[group.id] = fresh
        fresh.outbox.append(self._hello(fresh))

    def _cut(self, group: Group) -> None:
        """The connection breaks: whatever was on the way is lost."""
        self.faults_left -= 1
        group.connected = False
        group.inbox.clear()
        group.outbox.clear()

    def _reconnect(self, group: Group) -> None:
        group.connected = True
        group.outbox.append(self._hello(group))

    def _repeat(self, group: Group) -> None:
        assert group.last_vote is not None
        self.faults_left -= 1
        group.outbox.append(group.last_vote)

    def _reopen(self) -> None:
        """The coordinator dies and replays its journal; every connection breaks."""
        self.faults_left -= 1
        self.replay()
        for group in self.groups:
            if group.alive:
                group.connected = False
                group.inbox.clear()
                group.outbox.clear()
        self.feed(m.Opened(self.spec, self.state.life, self.state.fencing + 1))

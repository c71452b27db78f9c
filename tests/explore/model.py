"""A model of a whole job, and of everything that may happen to it next.

The coordinator is the real machine (:mod:`tests.explore.brain`), the groups follow the real member rules
(:mod:`tests.explore.process`), and :mod:`tests.explore.judge` checks them. Connections keep messages in order and lose
those on the way when they break. Each entry of :meth:`Model.moves` is one thing that may happen next; a fault uses up
one of the faults that are left. Exploring all moves of all worlds gives every interleaving; drawing them gives a random
walk.

A coordinator's restart is the replay of the journal, with all connections broken. A takeover is the same, but the old
coordinator goes on as a *ghost*: it receives and answers groups that are connected to it, its records go to a file that
nobody reads, and at the first record that needs a confirmation it ends without sending anything (docs/protocol.md,
rule 8). Messages that it sent before are still on the way. So the journal may hold a final record of which nobody, or
not everybody, has received.

What must hold, beside protocol.invariants after each event:

* a member's last commit never goes back, and a member that is asked to apply a result holds it;
* all groups apply the same sum for a step; it has each piece of the batch once, and audited pieces are right;
* only groups that were damaged or computed wrongly are fenced for that; a job fails only where there was such a group;
* a checkpoint that counts has the right weights, unless nobody was left to compare with and no vote spoke against it;
* a job that finishes has saved its last step, and one that is wiped out has kept a checkpoint that nothing speaks
  against;
* a coordinator that was replaced fences no member;
* with state shards (:mod:`tests.explore.shard_judge`): who counts as a host of one has its state, nobody computes on
  other weights than those after the last commit, and the job is wiped out only where the last copy of one is lost.

Messages to and from a process that is gone are dropped. Nothing is missed by that: they could have arrived before its
end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from spare_megatron.protocol import messages as m
from spare_megatron.protocol.membership import waited_for
from tests.explore.effects import Effects
from tests.explore.process import Process
from tests.explore.shape import Shape
from tests.explore.shard_process import Wanted
from tests.explore.world import World

Move = tuple[str, bool, Callable[[], World]]
"""(what happens, whether it is a fault, the world after it)."""


class Model:
    """The worlds of one shape, and the moves between them."""

    def __init__(self, shape: Shape) -> None:
        self.shape, self.do = shape, Effects(shape)
        self._all = frozenset(range(shape.groups))

    def start(self) -> World:
        """The first world: all groups are about to send Hello, or have received the first view already
        (``Shape.formed``)."""
        world = self.do.begin()
        if self.shape.formed:
            for n in range(self.shape.groups):
                world = self.do.announce(world, n)
            for n in range(self.shape.groups):
                world = self.do.receive(world, n)
        return world

    def moves(self, w: World) -> Iterator[Move]:
        """Everything that may happen next."""
        for n, p in enumerate(w.processes):
            yield from self.moves_of(w, n, p)
        yield from self.moves_of_nobody(w)

    def moves_of(self, w: World, n: int, p: Process) -> Iterator[Move]:
        """What may happen next to one process."""
        yield from self._received(w, n, p)
        yield from self._reported(w, n, p)
        yield from self._connections(w, n, p)
        if w.brain.state.phase != "stopped":
            yield from self._eager(w, n, p)
            yield from self._patient(w, n, p)
            yield from self._own_faults(w, n, p)
            yield from self._faults(w, n, p)

    def moves_of_nobody(self, w: World) -> Iterator[Move]:
        """What may happen next that is not of one process."""
        if w.brain.state.phase != "stopped":
            yield from self._detections(w)
            yield from self._asks(w)
            yield from self._elsewhere(w)

    def fewer_moves(self, w: World) -> Iterator[Move]:
        """A partial-order reduction of :meth:`moves`, which reaches the same states of the machine. In each of these
        cases the moves of one process come before all others, because the order changes neither their effect nor
        whether they are possible.

        1. A process that can compute, reduce, or vote on the end does so, or fails to. It only adds to a sum and to the
           end of its own queue. A process that did it later, or not at all because a newer epoch came first, would send
           no vote of the old epoch; but the machine ignores such a vote (tests.explore.brain checks it), so the vote
           may as well be in the queue.
        2. A process says a message to a ghost that sends nothing in answer: nothing depends on when.
        3. A process that is not connected to the present coordinator, and has no messages on the way, connects to it,
           or first does what it has to do: until its Hello is received nobody notices. (Not while there are learners,
           because it may be a donor.)
        4. Where no connection can break any more, a process receives and does what it can: the others only add to the
        ends
           of its queues, and to sums. (Not while there are learners; of a slow one only what it receives.)

        tests.explore.test_explore checks this for shapes of which all moves can be explored.
        """
        stopped = w.brain.state.phase == "stopped"
        first = self._first(w, stopped)
        if first is None:
            yield from self.moves(w)
            return
        n, p, own = first
        yield from own
        if not stopped:
            yield from self._own_faults(w, n, p)

    def _first(self, w: World, stopped: bool) -> tuple[int, Process, list[Move]] | None:
        """The process whose moves come first, and these moves; None where all moves are needed."""
        for n, p in enumerate(w.processes):
            if not stopped and self.do.rules.eager(p).kind:
                own = list(self._eager(w, n, p))
                if own:
                    return n, p, own
        for n, p in enumerate(w.processes):
            if p.up and self.do.is_idle_talk(w, p):
                return n, p, list(self._reported(w, n, p))
            away = p.where != w.brain.state.fencing and not (p.up or p.down)
            if away and not self._teaches(w):
                return n, p, [*self._connections(w, n, p), *([] if stopped else self._patient(w, n, p))]
        for n, p in enumerate(w.processes if self._whole(w) and not self._teaches(w) else ()):
            own = [*self._received(w, n, p), *([] if stopped or p.slow else self._patient(w, n, p))]
            if own:
                return n, p, own
        return None

    def _teaches(self, w: World) -> bool:
        """Whether a process gets its state by an offer, so that it matters when its donors receive something; with
        state shards any process may."""
        return (
            self.shape.state_shards > 0 or bool(w.brain.state.learners) or any(map(self.do.rules.learns, w.processes))
        )

    def _whole(self, w: World) -> bool:
        """Whether no connection is broken or can break."""
        breaks = any(self.do.may(w, kind) for kind in ("cut", "restart", "takeover"))
        return not (w.ghosts or breaks) and all(p.where == w.brain.state.fencing for p in w.processes)

    # ------------------------------------------------------------------------------------------------- without a fault

    def _received(self, w: World, n: int, p: Process) -> Iterator[Move]:
        if p.down:
            yield f"hear {p.name}", False, lambda: self.do.receive(w, n)

    def _reported(self, w: World, n: int, p: Process) -> Iterator[Move]:
        if p.up:
            yield f"say {p.name}", False, lambda: self.do.announce(w, n)

    def _connections(self, w: World, n: int, p: Process) -> Iterator[Move]:
        """A process connects to the present coordinator; or to a ghost, if its connection is broken and it has learned
        of no later coordinator."""
        newest = w.brain.state.fencing
        if p.where != newest:
            yield f"connect {p.name}", False, lambda: self.do.put(w, n, self.do.rules.connect(p, newest))
        for ghost in w.ghosts if p.where == 0 else ():
            number = ghost.state.fencing
            if (p.known.fencing if p.orders else 0) <= number:
                there = self.do.rules.connect(p, number)
                yield f"connect {p.name} to {number}", False, partial(self.do.put, w, n, there)

    def _patient(self, w: World, n: int, p: Process) -> Iterator[Move]:
        """What a process may do by itself at any time."""
        if p.orders is None:
            return
        if p.slow:
            if self.do.rules.computes(p):
                yield f"compute {p.name}", False, lambda: self.do.compute(w, n)
            for number, after in enumerate(self.do.rules.answers(p)):
                yield f"answer {p.name} {number}", False, partial(self.do.put, w, n, after)
        for shard in self.do.rules.opens(p):
            yield f"open {p.name} {shard}", False, partial(self.do.put, w, n, self.do.rules.open(p, shard, True))
        if p.saving is not None and (p.copies is None or self._all_there(w, p.saving[0])):
            yield f"saved {p.name}", False, lambda: self.do.put(w, n, self.do.rules.saved(p))
        if p.copies is not None:
            yield from self._shards(w, n, p)
        if p.offer is not None:
            yield from self._learning(w, n, p)
        elif self.do.rules.applies(p):
            yield f"apply {p.name}", False, lambda: self.do.apply(w, n)

    def _shards(self, w: World, n: int, p: Process) -> Iterator[Move]:
        """A process gets the weights of a shard from whoever has them, or, as a new host, its state from the donor."""
        rules, others = self.do.shards, [q for q in w.processes if q is not p]
        for shard in rules.gathers(p):
            if any(rules.kept(q).weights[shard] == rules.target(p) for q in others):
                yield f"gather {p.name} {shard}", False, partial(self._gather, w, n, shard)
        for wanted in rules.fetches(p):
            part = wanted.shard, (p.group, p.incarnation), wanted.step
            if any(q[:2] == wanted.donor and part in rules.kept(q).copied for q in others):
                yield f"fetch {p.name} {wanted.shard}", False, partial(self._fetch, w, n, wanted)
        if self._fetching(p) and rules.reduces(p):
            result = self.do.sum_of(w, p)
            if result is not None:
                yield f"reduce {p.name}", False, lambda: self.do.reduce(w, n, result)

    def _gather(self, w: World, n: int, shard: int) -> World:
        return self.do.put(w, n, self.do.shards.gathered(w.processes[n], shard))

    def _fetch(self, w: World, n: int, wanted: Wanted) -> World:
        return self.do.put(w, n, self.do.shards.fetched(w.processes[n], wanted))

    def _fetching(self, p: Process) -> bool:
        """Whether its vote depends on when it has fetched what it is to host."""
        return p.copies is not None and bool(self.do.shards.fetches(p))

    def _all_there(self, w: World, step: int) -> bool:
        """Whether somebody has the state of each shard after a step, for the checkpoint."""
        there = {shard for q in w.processes for shard, at in self.do.shards.kept(q).own if at == step}
        return len(there) == self.shape.state_shards

    def _learning(self, w: World, n: int, p: Process) -> Iterator[Move]:
        """A learner or joiner gets what its donors have for it, or finds that one has dropped it."""
        if p.applied >= p.known.committed[0]:
            return
        parts = self.do.parts_for(w, p)
        if parts is None:
            yield f"give up {p.name}", False, lambda: self.do.put(w, n, self.do.rules.give_up(p))
        elif parts:
            yield f"learn {p.name}", False, lambda: self.do.learn(w, n, parts)

    def _eager(self, w: World, n: int, p: Process) -> Iterator[Move]:
        """What a process does by itself, as soon as it can, and the ways in which that goes wrong."""
        do, rules = self.do, self.do.rules
        what = rules.eager(p)
        if what.kind == "answer":
            for number, after in enumerate(what.after):
                yield f"answer {p.name} {number}", False, partial(do.put, w, n, after)
        elif what.kind == "compute":
            yield f"compute {p.name}", False, lambda: do.compute(w, n)
            for wrong in rules.may_err(p) if do.may(w, "err") else ():
                yield f"err {p.name} {wrong}", True, partial(do.compute, do.pay(w, "err"), n, wrong)
        elif what.kind == "reduce":
            if self._fetching(p):
                return
            result = do.sum_of(w, p)
            if result is not None:
                yield f"reduce {p.name}", False, lambda: do.reduce(w, n, result)
                yield from self._failures(w, n, p)
        elif what.kind == "end":
            yield f"end {p.name}", False, lambda: do.put(w, n, what.after[0])

    def _detections(self, w: World) -> Iterator[Move]:
        """The coordinator notices processes that are gone, one by one or together; while the job forms, also groups
        that never came."""
        state, here = w.brain.state, {(p.group, w.incarnation(p)) for p in w.processes}
        gone = sorted(state.present.items() - here)
        if state.phase == "forming":
            away = self._all - state.live.keys() - state.gone - {p.group for p in w.processes}
            gone += [(group, state.highest.get(group, -1) + 1) for group in sorted(away)]
        for one in gone:
            yield f"lose {one[0]}", False, partial(self.do.lose, w, (one,), "exited")
        if len(gone) > 1:
            yield "lose them", False, lambda: self.do.lose(w, tuple(gone), "exited")

    def _asks(self, w: World) -> Iterator[Move]:
        """The coordinator finds that a group runs out of pieces and another one has many: a slow one, or, as a fault,
        any."""
        live, do = w.brain.state.live, self.do
        slow = sorted(p.group for p in w.processes if p.slow and live.get(p.group) == w.incarnation(p))
        for some in [(group,) for group in slow] + [tuple(slow)] * (len(slow) > 1):
            event = do.running_out(w.brain.state, some)
            if event is not None:
                yield f"ask {' '.join(map(str, some))}", False, partial(do.feed, w, event)
        for group in sorted(live.keys() - slow) if do.may(w, "ask") else ():
            event = do.running_out(w.brain.state, (group,))
            if event is not None:
                yield from self._fault(w, "ask", f" {group}", lambda v, event=event: do.feed(v, event))  # type: ignore[misc]

    # ---------------------------------------------------------------------------------------------------------- faults

    def _fault(self, w: World, kind: str, label: str, make: Callable[[World], World]) -> Iterator[Move]:
        """One fault, if one of its kind is left; ``make`` gets the world in which it is used up."""
        if self.do.may(w, kind):
            yield f"{kind}{label}", True, lambda: make(self.do.pay(w, kind))

    def _own_faults(self, w: World, n: int, p: Process) -> Iterator[Move]:
        """Faults that are not possible any more after some move of the same process."""
        if not w.left:
            return
        if p.where and p.ballot is not None:
            yield from self._fault(w, "repeat", f" {p.name}", lambda v: self.do.repeat(v, n))
        if self.do.rules.computes(p) and not p.slow:
            yield from self._fault(w, "slow", f" {p.name}", lambda v: self.do.put(v, n, p._replace(slow=True)))
        for shard in self.do.rules.opens(p):
            shut = partial(self.do.rules.open, p, shard, False)
            label = f" {p.name} for {shard}"
            yield from self._fault(w, "unable", label, lambda v, shut=shut: self.do.put(v, n, shut()))  # type: ignore[misc]
        for wanted in self.do.shards.refusable(p) if p.copies is not None else ():
            no = partial(self.do.shards.refused, p, wanted.shard)
            label = f" {p.name} for state shard {wanted.shard}"
            yield from self._fault(w, "unable", label, lambda v, no=no: self.do.put(v, n, no()))  # type: ignore[misc]
        if not p.damage and p.applied >= 0:
            yield from self._fault(w, "damage", f" {p.name}", lambda v: self.do.damage(v, n))
        if self.do.rules.reduces(p) and self.do.sum_of(w, p) is None:
            yield from self._failures(w, n, p)
        if p.offer is not None:
            yield from self._fault(w, "void", f" {p.name}", lambda v: self.do.put(v, n, self.do.rules.give_up(p)))
        for part in p.serving:
            after = partial(self.do.rules.withdraw, p, part.number)
            label = f" {p.name} from {part.number}"
            yield from self._fault(w, "withdraw", label, lambda v, after=after: self.do.put(v, n, after()))  # type: ignore[misc]

    def _failures(self, w: World, n: int, p: Process) -> Iterator[Move]:
        """A reduction fails: nothing comes from the previous neighbour in the ring, or its connection ends, or the sum
        is damaged."""
        live = p.known.live_groups
        before = live[live.index(p.group) - 1]
        yield from self._fault(w, "fail", f" {p.name}", lambda v: self.do.reduce(v, n, None))
        for silent in (True, False) if before != p.group else ():
            link = m.Link(before, p.group, silent)
            label = f" {p.name} {'silent' if silent else 'ended'} {before}"
            yield from self._fault(w, "fail", label, partial(self.do.reduce, n=n, result=None, links=(link,)))

    def _faults(self, w: World, n: int, p: Process) -> Iterator[Move]:
        if not w.left:
            return
        name, one = f" {p.name}", ((p.group, w.incarnation(p)),)
        yield from self._fault(w, "kill", name, lambda v: self.do.without(v, n))
        if p.where:
            yield from self._fault(w, "cut", name, lambda v: self.do.put(v, n, self.do.rules.cut(p)))
        if w.ghost_of(p) is not None:
            yield from self._fault(w, "suspect", f"{name} by {p.where}", lambda v: self.do.lose_by_ghost(v, n))
            if self.do.may(w, "ask") and self.do.ghost_asks(w, n) is not w:
                yield from self._fault(w, "ask", f"{name} by {p.where}", lambda v: self.do.ghost_asks(v, n))
        if w.is_member(p):
            yield from self._fault(w, "suspect", name, lambda v: self.do.lose(v, one, "silent"))
            if w.brain.state.phase == "running":
                yield from self._fault(w, "stall", name, lambda v: self.do.lose(v, one, "stalled"))

    def _elsewhere(self, w: World) -> Iterator[Move]:
        """Faults that are not of one process: of coordinators, timers and users, and groups that come back."""
        if not w.left:
            return
        do, state = self.do, w.brain.state
        yield from self._fault(w, "restart", "", lambda v: do.reopen(v, ghost=False))
        if any(p.where == state.fencing for p in w.processes):
            yield from self._fault(w, "takeover", "", lambda v: do.reopen(v, ghost=True))
        if not state.leave:
            yield from self._fault(w, "stop", "", lambda v: do.feed(v, m.StopRequested("signal")))
        for kind, who in (("drain", "operator"), ("home", "launcher")):
            for event in do.drains(state, who) if do.may(w, kind) else ():
                label = f" {event.groups[0]}{' undone' if event.undo else ''}"
                yield from self._fault(w, kind, label, lambda v, event=event: do.feed(v, event))  # type: ignore[misc]
        for reported in do.speeds(state) if do.may(w, "speeds") else ():
            group, _, pace, _ = reported.paces[0]
            label = f" {group} {'slow' if pace > 1 else 'usual'}"
            yield from self._fault(w, "speeds", label, lambda v, reported=reported: do.feed(v, reported))  # type: ignore[misc]
        if state.phase == "forming" and state.live:
            yield from self._fault(w, "hurry", "", lambda v: do.feed(v, m.StartupOver(1.0)))
        if state.phase == "running":
            yield from self._fault(w, "standstill", "", lambda v: do.feed(v, m.Standstill(state.epoch, "all wait")))
            if waited_for(state):
                yield from self._fault(w, "late", "", lambda v: do.feed(v, m.JoinersLate(state.epoch, 1.0)))
            if not state.save_now:
                tuned = m.Tuned("the tuner measures what a save costs", save_now=True)
                yield from self._fault(w, "tune", "", lambda v: do.feed(v, tuned))
        for group in sorted(self._all) if do.may(w, "twin") else ():
            mine = [p for p in w.processes if p.group == group and w.counts(p)]
            if len(mine) == 1 and mine[0].incarnation >= 0:
                yield from self._fault(w, "twin", f" {group}", partial(do.come_back, group=group))
        for group in sorted(self._all) if do.may(w, "return") else ():
            if not any(p.group == group and w.counts(p) for p in w.processes):
                yield from self._fault(w, "return", f" {group}", partial(do.come_back, group=group))

"""A whole job as one immutable value, and everything that may happen to it next.

The coordinator is the real machine (:mod:`tests.explore.brain`), the groups follow the real member rules
(:mod:`tests.explore.process`). Connections keep order and lose what is on the way when they break. Each entry of
:meth:`Model.moves` is one thing that may happen next; a fault costs one of the faults that are left. Who explores all
moves of all worlds sees every interleaving; who draws them walks at random.

Coordinators. A restart is the replay of the journal, with all connections broken. A takeover is the same, but the old
coordinator goes on as a *ghost*: it hears and answers groups that have not moved yet, its records go to a file that
nobody reads, and it ends, unheard, with the first record that needs a confirmation (docs/protocol.md, rule 8). What it
had said before is still on the way. So the journal may hold a final record that nobody, or not everybody, heard of.

What an observer of the whole job checks, beside controller.invariants after each event:

* a member's last commit never goes back, and it holds what it is told to apply;
* all groups apply the same sum for a step, and its pieces are the batch, each once, audited ones right;
* only groups that were damaged or computed wrongly are ever fenced for it; a job fails only where there was one;
* a checkpoint that counts has the right weights, unless nobody was left to compare with and no vote spoke against it;
* a job that finishes has saved its last step.

Messages to a process that is gone, and from it, are dropped: what was to arrive could have arrived before its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from spare_megatron.controller import messages as m
from spare_megatron.controller.machine import initial_state
from spare_megatron.placement import build_placement
from tests.explore.brain import Brain, Brains, Step, Word
from tests.explore.keep import Keeper, Kept
from tests.explore.process import Part, Process, Processes, Result, Violation

NOTHING = (-1, "")
FAULTS = ("kill", "suspect", "cut", "repeat", "restart", "takeover", "return", "fail", "damage", "err", "stop", "hurry")
"""kill: a process ends; suspect: a live group is lost by the detector's word; cut: a connection breaks; repeat: a vote
is said twice; restart, takeover: of the coordinator; return: a new incarnation of a group; fail: a reduction fails;
damage: a bit of the weights flips; err: something is computed wrongly; stop: somebody asks the job to leave; hurry: the
time for groups to come at start is over."""


@dataclass(frozen=True)
class Shape:
    """The size of a job, and what may happen to it."""

    groups: int = 2
    redundancy: int = 2
    steps: int = 2
    pieces: int = 1
    """Per shard."""
    faults: int = 2
    """In all."""
    kinds: frozenset[str] = frozenset({"kill"})
    each: tuple[tuple[str, int], ...] = ()
    """(kind, at most so many of it) where that is fewer than ``faults``."""
    save_every: int = 0
    audit_rate: float = 0.0
    granularity: str = "microbatch"
    formed: bool = False
    """Start with all groups in their first step."""
    late_finals: bool = False
    """A ghost says one final record after it was replaced, which the second confirmation is there to prevent. The job may
    fail then; it must not hang, and no step may be applied twice or differently."""

    @property
    def spec(self) -> m.JobSpec:
        """The machine's constants."""
        offsets = build_placement(self.groups, self.redundancy).offsets
        return m.JobSpec(
            self.groups,
            self.pieces,
            offsets,
            self.granularity,
            first_step=0,
            last_step=self.steps,
            min_groups=1,
            fingerprint="job",
            retry_limit=99,
            audit_rate=self.audit_rate,
            audit_seed=7,
        )


class World(NamedTuple):
    """Everything that matters of one moment."""

    brain: Brain
    processes: tuple[Process, ...]
    """Those that run, sorted."""
    ghosts: tuple[Brain, ...]
    shares: tuple[tuple[tuple[int, int], tuple[Part, ...]], ...]
    """(step, epoch) of a reduction -> what groups contributed to it; of those that somebody may still complete."""
    results: tuple[Kept[Result], ...]
    """What was applied for the steps that some process has not applied yet."""
    left: int
    """Faults."""
    each: tuple[int, ...]
    """Faults that are left of the kinds with a limit of their own."""
    guilty: frozenset[tuple[int, int]]
    """(group, incarnation) that was damaged or computed something wrongly."""
    blind: bool
    """There was damage, and for a while only one group to ask."""
    against: frozenset[tuple[int, str]]
    """(step, digest) of weights that votes spoke against."""
    offered: tuple[int, str]
    """(step, digest) of the newest checkpoint that a member asked about."""

    @property
    def over(self) -> bool:
        """The job has ended, and everybody knows."""
        return self.brain.state.phase == "stopped" and not self.processes


Move = tuple[str, bool, Callable[[], World]]
"""(what happens, whether it is a fault, the world after it)."""


class Model:
    """All worlds of one shape."""

    def __init__(self, shape: Shape) -> None:
        self.shape, self.spec = shape, shape.spec
        self.keeper = Keeper()
        self.brains = Brains(self.keeper)
        self.heard: list[tuple[Kept[m.Event], Step]] | None = None
        """Every event of the coordinator that counts, where somebody wants to know."""
        self._rules = Processes(self.spec, shape.save_every, self.keeper)
        self._limits = tuple(kind for kind, _ in shape.each)
        self._all = frozenset(range(shape.groups))
        self._batch = list(range(shape.groups * shape.pieces))

    # ------------------------------------------------------------------------------------------------- the beginning

    def start(self) -> World:
        """All groups say Hello to the first coordinator."""
        event = self._event(m.Opened(self.spec, 1, 1))
        opened = self.brains.step(self.brains.of(initial_state()), event)
        if self.heard is not None:
            self.heard.append((event, opened))
        processes = tuple(self._rules.connect(Process(group, 0), 1) for group in sorted(self._all))
        nobody: frozenset[tuple[int, int]] = frozenset()
        limits = tuple(limit for _, limit in self.shape.each)
        world = World(
            opened.after, processes, (), (), (), self.shape.faults, limits, nobody, False, frozenset(), NOTHING
        )
        if self.shape.formed:
            for _ in self._all:
                world = next(make() for what, _, make in self.moves(world) if what.startswith("say"))
            while any(p.down for p in world.processes):
                world = next(make() for what, _, make in self.moves(world) if what.startswith("hear"))
        return world

    # ------------------------------------------------------------------------------------------------ what may happen

    def moves(self, w: World) -> Iterator[Move]:
        """Everything that may happen next."""
        stopped = w.brain.state.phase == "stopped"
        for n, p in enumerate(w.processes):
            if p.down:
                yield f"hear {p.name}", False, lambda n=n: self._hear(w, n)
            if p.up:
                yield f"say {p.name}", False, lambda n=n: self._say(w, n)
            yield from self._connections(w, n, p)
            if not stopped:
                yield from self._eager(w, n, p)
                yield from self._work(w, n, p)
                yield from self._own_faults(w, n, p)
                yield from self._faults(w, n, p)
        if not stopped:
            yield from self._detections(w)
            yield from self._elsewhere(w)

    def fewer_moves(self, w: World) -> Iterator[Move]:
        """Enough of them: a partial-order reduction of :meth:`moves`.

        1. A process that can compute, reduce, or vote on the end does so before anything else happens, or fails to. It
           only adds to a sum and to the end of its own queue, and nothing takes the possibility away but what makes
           it void: whoever does it late, or not at all before it hears of a newer epoch, sends no vote of the old one,
           and such a vote, which the machine ignores, may as well lie unread in the queue.
        2. Where no connection can break any more, what one process hears and does is done before anything else
           happens. It commutes with all that others do: they only add to the ends of its queues, and to sums.

        3. What a ghost only takes note of is said to it before anything else happens: nothing depends on it.

        4. A process that is not connected to the present coordinator, and has nothing on the way, connects to it before
           anything else happens, or does first what it has to do: until its Hello is heard nobody notices.

        tests.explore.test_explore compares both, where all moves can be explored.
        """
        if w.brain.state.phase != "stopped":
            for n, p in enumerate(w.processes):
                eager = tuple(self._eager(w, n, p))
                if eager:
                    yield from eager
                    return
        for n, p in enumerate(w.processes):
            if p.up and p.where != w.brain.state.fencing and self._is_idle_talk(w, p):
                yield f"say {p.name}", False, lambda n=n: self._say(w, n)
                return
        for n, p in enumerate(w.processes):
            apart = p.where != w.brain.state.fencing and not (p.up or p.down)
            if apart and not (p.orders and p.orders.value.donors):
                yield from self._connections(w, n, p)
                if w.brain.state.phase != "stopped":
                    yield from self._work(w, n, p)
                    yield from self._own_faults(w, n, p)
                return
        if self._whole(w):
            for n, p in enumerate(w.processes):
                own = [(f"hear {p.name}", False, lambda n=n: self._hear(w, n))] if p.down else []
                if w.brain.state.phase != "stopped":
                    own += self._work(w, n, p)
                if own:
                    yield from own
                    yield from self._own_faults(w, n, p)
                    return
        yield from self.moves(w)

    def _whole(self, w: World) -> bool:
        """No connection is broken, or can break."""
        breaks = any(self._may(w, kind) for kind in ("cut", "restart", "takeover"))
        return not (w.ghosts or breaks) and all(p.where == w.brain.state.fencing for p in w.processes)

    def _connections(self, w: World, n: int, p: Process) -> Iterator[Move]:
        newest = w.brain.state.fencing
        if p.where != newest:
            yield f"connect {p.name}", False, lambda: self._put(w, n, self._rules.connect(p, newest))
        for ghost in w.ghosts:
            number = ghost.state.fencing
            known = p.orders.value.fencing if p.orders else 0
            if p.where == 0 and known <= number:
                yield (
                    f"connect {p.name} to {number}",
                    False,
                    lambda g=number: self._put(w, n, self._rules.connect(p, g)),
                )

    def _work(self, w: World, n: int, p: Process) -> Iterator[Move]:
        """What the process does by itself, at any time."""
        if p.orders is None:
            return
        rules, orders = self._rules, p.orders.value
        if p.saving is not None:
            yield f"saved {p.name}", False, lambda: self._put(w, n, rules.saved(p))
        if orders.donors:
            donor = p if p.applied == orders.committed[0] and p.holds else self._donor(w, p)
            if donor is not None:
                yield f"join {p.name}", False, lambda: self._join(w, n, p, donor)
        elif orders.committed[0] > p.applied:
            yield f"apply {p.name}", False, lambda: self._apply(w, n, p)

    def _eager(self, w: World, n: int, p: Process) -> Iterator[Move]:
        """What the process does by itself, as soon as it can, and the ways in which that goes wrong."""
        rules = self._rules
        if rules.computes(p):
            yield f"compute {p.name}", False, lambda: self._compute(w, n, p, "")
            if self._may(w, "err"):
                for wrong in rules.may_err(p):
                    yield f"err {p.name} {wrong}", True, lambda x=wrong: self._compute(self._pay(w, "err"), n, p, x)
        elif rules.reduces(p):
            result = self._sum(w, p)
            if result is not None:
                yield f"reduce {p.name}", False, lambda: self._put(w, n, rules.reduced(p, result))
                if self._may(w, "fail"):
                    yield f"fail {p.name}", True, lambda: self._put(self._pay(w, "fail"), n, self._failed(p))
        else:
            done = rules.ends(p) or rules.settles(p)
            if done is not None:
                yield f"end {p.name}", False, lambda: self._put(w, n, done)

    def _own_faults(self, w: World, n: int, p: Process) -> Iterator[Move]:
        """Faults that another move of the same process may take the chance of."""
        name = p.name
        if self._may(w, "repeat") and p.where and p.ballot is not None:
            again = p._replace(up=(*p.up, p.ballot))
            yield f"repeat {name}", True, lambda: self._put(self._pay(w, "repeat"), n, again)
        if self._may(w, "fail") and self._rules.reduces(p) and self._sum(w, p) is None:
            yield f"fail {name}", True, lambda: self._put(self._pay(w, "fail"), n, self._failed(p))
        if self._may(w, "damage") and not p.damage:
            bad = p._replace(damage=f" damaged in {name}")
            yield f"damage {name}", True, lambda: self._blame(self._put(self._pay(w, "damage"), n, bad), p)

    def _failed(self, p: Process) -> Process:
        return self._rules.reduced(p, None, tuple(g for g in p.orders.value.live_groups if g != p.group)[:1])

    def _faults(self, w: World, n: int, p: Process) -> Iterator[Move]:
        name, rules = p.name, self._rules
        if self._may(w, "kill"):
            yield f"kill {name}", True, lambda: self._without(self._pay(w, "kill"), n)
        if self._may(w, "cut") and p.where:
            yield f"cut {name}", True, lambda: self._put(self._pay(w, "cut"), n, rules.cut(p))
        if self._may(w, "suspect") and self._member(w, p):
            lost = self._lost(w, ((p.group, p.incarnation),), "silent")
            yield f"suspect {name}", True, lambda: self._feed(self._pay(w, "suspect"), lost)

    def _detections(self, w: World) -> Iterator[Move]:
        """Processes that are gone are lost, one by one or together; one that never came too, while the job forms."""
        state, here = w.brain.state, {(p.group, p.incarnation) for p in w.processes}
        gone = sorted({*state.live.items(), *state.waiting.items()} - here)
        if state.phase == "forming":
            away = self._all - state.live.keys() - state.gone - {p.group for p in w.processes}
            gone += [(group, state.highest.get(group, -1) + 1) for group in sorted(away)]
        for one in gone:
            yield f"lose {one[0]}", False, lambda o=one: self._feed(w, self._lost(w, (o,), "exited"))
        if len(gone) > 1:
            yield "lose them", False, lambda: self._feed(w, self._lost(w, tuple(gone), "exited"))

    def _elsewhere(self, w: World) -> Iterator[Move]:
        """Coordinators, users, and groups that come back."""
        state = w.brain.state
        if self._may(w, "restart"):
            yield "restart", True, lambda: self._reopen(self._pay(w, "restart"), ghost=False)
        if self._may(w, "takeover") and any(p.where == state.fencing for p in w.processes):
            yield "takeover", True, lambda: self._reopen(self._pay(w, "takeover"), ghost=True)
        if self._may(w, "stop") and not state.leave:
            asked = self._event(m.StopRequested("signal"))
            yield "stop", True, lambda: self._feed(self._pay(w, "stop"), asked)
        if self._may(w, "hurry") and state.phase == "forming" and state.live:
            waited = self._event(m.StartupOver(1.0))
            yield "hurry", True, lambda: self._feed(self._pay(w, "hurry"), waited)
        if self._may(w, "return"):
            for group in sorted(self._all):
                if not any(p.group == group and self._counts(w, p) for p in w.processes):
                    yield f"return {group}", True, lambda g=group: self._return(self._pay(w, "return"), g)

    # ------------------------------------------------------------------------------------------------ what happens then

    def _hear(self, w: World, n: int) -> World:
        p = self._rules.hear(w.processes[n])
        return self._without(w, n) if p is None else self._put(w, n, p)

    def _say(self, w: World, n: int) -> World:
        p = w.processes[n]
        event, w = p.up[0], self._put(w, n, p._replace(up=p.up[1:]))
        if p.where == w.brain.state.fencing:
            return self._feed(w, event)
        number = self._ghost(w, p)
        return w if number is None else self._feed_ghost(w, number, event)

    @staticmethod
    def _ghost(w: World, p: Process) -> int | None:
        return next((k for k, ghost in enumerate(w.ghosts) if ghost.state.fencing == p.where), None)

    def _feed(self, w: World, event: Kept[m.Event]) -> World:
        """One event of the coordinator that counts."""
        done = self.brains.step(w.brain, event)
        if self.heard is not None:
            self.heard.append((event, done))
        if self.shape.kinds & {"damage", "err"}:
            w = self._witness(w, done)
        elif done.fenced:
            raise Violation(f"an innocent group is fenced: {done.reason}")
        w = self._saves(w, event.value, done)
        return self._speak(w._replace(brain=done.after), done.words, done.after.state.fencing)

    def _is_idle_talk(self, w: World, p: Process) -> bool:
        """A ghost would take note of what it is told next, and do nothing."""
        if self.shape.late_finals:
            return False
        number = self._ghost(w, p)
        if number is None:
            return True
        done = self.brains.step(w.ghosts[number], p.up[0])
        return done.final or _takes_note(w.ghosts[number], done)

    def _feed_ghost(self, w: World, number: int, event: Kept[m.Event]) -> World:
        """What a ghost must confirm it never says: it ends there, and whoever is connected to it moves on, as anybody
        may at any time. What it only takes note of has no effect but on such a record."""
        ghost = w.ghosts[number]
        done = self.brains.step(ghost, event)
        if not self.shape.late_finals and (done.final or _takes_note(ghost, done)):
            return w
        after = self._speak(w, done.words, ghost.state.fencing)
        kept = () if done.final else (done.after,)
        return after._replace(ghosts=(*w.ghosts[:number], *kept, *w.ghosts[number + 1 :]))

    def _speak(self, w: World, words: tuple[Word, ...], fencing: int) -> World:
        """Put a coordinator's words on its connections. A connection begins when its Hello is heard, and a fence closes
        it."""
        if not words:
            return w
        processes = list(w.processes)
        for word in words:
            for n, p in enumerate(processes):
                meant = p.where == fencing and p.group == word.group and word.incarnation in (-1, p.incarnation)
                meant = meant and not (p.up and isinstance(p.up[0].value, m.Hello))
                if meant and not (p.down and isinstance(p.down[-1].value, m.SendFenced)):
                    processes[n] = p._replace(down=(*p.down, word.note))
        return w._replace(processes=tuple(map(self.keeper.share, processes)))

    def _reopen(self, w: World, ghost: bool) -> World:
        """Another coordinator begins with the journal as it is."""
        state = w.brain.state
        if ghost:
            w = w._replace(ghosts=(*w.ghosts, w.brain))
        else:
            cut = tuple(self._rules.cut(p) if p.where == state.fencing else p for p in w.processes)
            w = w._replace(processes=cut)
        return self._feed(w, self._event(m.Opened(self.spec, state.life, state.fencing + 1)))

    def _compute(self, w: World, n: int, p: Process, wrong: str) -> World:
        done = self._rules.compute(p, wrong)
        orders = p.orders.value
        key, part = (orders.step, orders.epoch), (p.group, p.incarnation, done.ran, done.audited)
        shares = dict(w.shares)
        shares[key] = tuple(sorted((*shares.get(key, ()), part)))
        w = w._replace(shares=tuple(sorted(shares.items())))
        return self._put(self._blame(w, p) if wrong else w, n, done)

    def _sum(self, w: World, p: Process) -> Kept[Result] | None:
        """The sum of the present epoch, once all members have contributed."""
        orders = p.orders.value
        parts = next((there for at, there in w.shares if at == (orders.step, orders.epoch)), ())
        if tuple((group, incarnation) for group, incarnation, *_ in parts) != orders.live:
            return None
        return self.keeper.keep(Result(orders.step, orders.epoch, parts))

    def _apply(self, w: World, n: int, p: Process) -> World:
        done = self._rules.apply(p)
        assert done is not None and p.held is not None
        result = p.held.value
        known = next((one for one in w.results if one.value.step == result.step), p.held)
        if known is not p.held:
            raise Violation(f"step {result.step} is applied as {known.value} and as {result}")
        pieces = sorted(piece for *_, ran, _ in result.parts for piece, _ in ran)
        if pieces != self._batch:
            raise Violation(f"group {p.name} applies pieces {pieces} for step {result.step}")
        _check_audits(result)
        return self._put(w._replace(results=tuple({*w.results, p.held})), n, done)

    def _join(self, w: World, n: int, p: Process, donor: Process) -> World:
        done = self._rules.joined(p, None if donor is p else donor)
        return self._put(self._blame(w, p) if donor.damage else w, n, done)

    def _donor(self, w: World, p: Process) -> Process | None:
        orders = p.orders.value
        return next(
            (d for d in w.processes if d.group in orders.donors and d.applied == orders.committed[0] and d.orders), None
        )

    def _return(self, w: World, group: int) -> World:
        used = [p.incarnation for p in w.processes if p.group == group]
        p = Process(group, 1 + max([*used, w.brain.state.highest.get(group, 0)]))
        processes = sorted((*w.processes, self._rules.connect(p, w.brain.state.fencing)), key=lambda q: q[:2])
        return w._replace(processes=tuple(processes))

    # ----------------------------------------------------------------------------------------------------- bookkeeping

    def _may(self, w: World, kind: str) -> bool:
        if not w.left or kind not in self.shape.kinds:
            return False
        return kind not in self._limits or w.each[self._limits.index(kind)] > 0

    def _pay(self, w: World, kind: str) -> World:
        each = tuple(left - (kind == limited) for limited, left in zip(self._limits, w.each, strict=True))
        return w._replace(left=w.left - 1, each=each)

    def _put(self, w: World, n: int, p: Process) -> World:
        return self._tidy(w._replace(processes=(*w.processes[:n], self.keeper.share(p), *w.processes[n + 1 :])))

    def _without(self, w: World, n: int) -> World:
        return self._tidy(w._replace(processes=w.processes[:n] + w.processes[n + 1 :]))

    def _tidy(self, w: World) -> World:
        """Forget sums and results that nobody can use any more, and ghosts that nobody can reach."""
        if w.ghosts:
            known = [(p.where, p.orders.value.fencing if p.orders else 0) for p in w.processes]
            numbers = [(ghost, ghost.state.fencing) for ghost in w.ghosts]
            kept = tuple(g for g, number in numbers if any(at == number or not at and k <= number for at, k in known))
            w = w._replace(ghosts=kept)
        if not (w.shares or w.results):
            return w
        places = [(p.applied, p.orders.value.epoch if p.orders else 0) for p in w.processes]
        shares = tuple(s for s in w.shares if any(a < s[0][0] and e <= s[0][1] for a, e in places))
        results = tuple(sorted((r for r in w.results if any(a < r.value.step for a, _ in places)), key=_step_of))
        return w._replace(shares=shares, results=results)

    def _blame(self, w: World, p: Process) -> World:
        return w._replace(guilty=w.guilty | {(p.group, p.incarnation)})

    def _event(self, event: m.Event) -> Kept[m.Event]:
        return self.keeper.keep(event)

    @staticmethod
    def _member(w: World, p: Process) -> bool:
        """Live, or waiting for admission."""
        return p.incarnation in (w.brain.state.live.get(p.group), w.brain.state.waiting.get(p.group))

    def _counts(self, w: World, p: Process) -> bool:
        """Whoever started it has no reason to start another one."""
        return self._member(w, p) or p.incarnation > w.brain.state.highest.get(p.group, -1)

    def _lost(self, w: World, gone: tuple[tuple[int, int], ...], cause: str) -> Kept[m.Event]:
        done = {p.group: len(p.ran) for p in w.processes if p.applied + 1 == w.brain.state.step_in_flight}
        progress = tuple((group, done.get(group, 0)) for group in sorted(w.brain.state.live))
        return self._event(m.Lost(tuple(m.Loss(group, incarnation, cause) for group, incarnation in gone), progress))

    # ---------------------------------------------------------------------------------------------------------- checks

    def _witness(self, w: World, done: Step) -> World:
        """What votes show of damage and wrong arithmetic is true."""
        for group, incarnation, why in done.fenced:
            if (group, incarnation) not in w.guilty:
                raise Violation(f"innocent group {group} is fenced: {why}")
        blind = w.blind or bool(w.guilty) and len(w.brain.state.witnesses & done.after.state.live.keys()) < 2
        against = w.against | done.against
        for accept in done.accepted:
            spoken = (accept.step, accept.directory) in against
            unseen = blind or done.after.state.outcome == "wipe-out"
            if accept.directory != str(accept.step) and (spoken or not unseen):
                raise Violation(f"a checkpoint of step {accept.step} counts, its weights are {accept.directory!r}")
        return w._replace(blind=blind, against=against)

    def _saves(self, w: World, event: m.Event, done: Step) -> World:
        """A checkpoint that nothing speaks against is not thrown away, and the end does not come before one counts."""
        before, after = w.brain.state, done.after.state
        if isinstance(event, m.Saved) and before.live.get(event.group) == event.incarnation:
            w = w._replace(offered=max(w.offered, (event.step, event.directory)))
        if after.saved_step >= w.offered[0]:
            w = w._replace(offered=NOTHING)
        if after.phase != "stopped" or before.phase == "stopped":
            return w
        if self.shape.late_finals:
            return w._replace(offered=NOTHING)
        if after.outcome == "failed" and not (w.guilty or before.phase == "forming"):
            raise Violation(f"the job fails without a cause: {done.reason}")
        if (
            after.outcome in ("finished", "left")
            and before.phase == "ending"
            and after.saved_step != after.committed[0]
        ):
            raise Violation(f"the job ends before its last step is saved: {done.reason}")
        if after.outcome == "wipe-out" and w.offered != NOTHING and w.offered not in w.against:
            raise Violation(f"nothing speaks against the checkpoint of step {w.offered[0]}: {done.reason}")
        return w._replace(offered=NOTHING)


def _check_audits(result: Result) -> None:
    """A piece that was audited is applied only as both computed it, and then it is right: two groups never agree on
    something wrong."""
    inside = {piece: checksum for *_, ran, _ in result.parts for piece, checksum in ran}
    for *_, audited in result.parts:
        for piece, checksum in audited:
            if not checksum == inside[piece] == piece:
                raise Violation(f"piece {piece} of step {result.step} is applied as {inside[piece]}, found {checksum}")


def _takes_note(brain: Brain, done: Step) -> bool:
    """Nobody is told anything, now or in later views."""
    return not done.final and not done.words and done.after.state.holders == brain.state.holders


def _step_of(result: Kept[Result]) -> int:
    return result.value.step

"""The effect of each move on the world. :mod:`tests.explore.model` says when a move is possible."""

from __future__ import annotations

from itertools import count

from spare_megatron.protocol import draining, relief
from spare_megatron.protocol import messages as m
from spare_megatron.protocol.machine import State, initial_state
from spare_megatron.protocol.speeds import slowness_after
from tests.explore import judge, observer, shard_judge
from tests.explore.brain import Brain, Brains, Step, Word
from tests.explore.keep import Keeper, Kept
from tests.explore.process import Copies, Process, Processes, Result, Serving
from tests.explore.shape import Shape
from tests.explore.shard_process import ShardProcesses
from tests.explore.world import World

LONG_S = 1e6


class Effects:
    """Makes the next world of a shape from a world. ``n`` is an index of ``World.processes``."""

    def __init__(self, shape: Shape) -> None:
        self.shape, self.spec = shape, shape.spec
        self.keeper = Keeper(forgetful=shape.observed)
        self.brains = Brains(self.keeper, forgetful=shape.observed)
        self.only: str | None = None
        """The only kind of fault that may happen, where somebody looks for such moves; else None."""
        self.rules = (ShardProcesses if shape.state_shards else Processes)(self.spec, self.keeper)
        if not shape.observed:
            self.rules.remember()
        self.received: list[m.Event] | None = None
        """All events of the present coordinator, in order, where somebody wants to know; else None."""
        self.reasons: list[str] = []
        """The reasons of the coordinator's decisions since the list was last emptied."""
        self._limits = tuple(kind for kind, _ in shape.each)
        self._batch = list(range(shape.groups * shape.pieces))

    def begin(self) -> World:
        """The world in which the Hellos of all groups are on the way to the first coordinator."""
        opened = m.Opened(self.spec, 1, 1)
        closed = World(
            brain=self.brains.of(initial_state()),
            processes=tuple(
                self.rules.connect(Process(group, 0, copies=self._copies(0)), 1) for group in range(self.shape.groups)
            ),
            left=self.shape.faults,
            each=tuple(limit for _, limit in self.shape.each),
        )
        return self.feed(closed, opened)

    # ------------------------------------------------------------------------------------------------ coordinators

    def feed(self, w: World, event: m.Event) -> World:
        """The present coordinator (the one that was not replaced) gets an event."""
        if self.received is not None:
            self.received.append(event)
        done = self.brains.step(w.brain, self.keeper.keep(event))
        self.reasons.append(done.reason)
        judged = (observer if self.shape.observed else judge).decided(w, self.shape, event, done)
        if self.shape.state_shards:
            shard_judge.decided(w, done)
        after = self._speak(judged._replace(brain=done.after), done.words, done.after.state.fencing)
        if self.shape.observed:
            observer.reported(after)
        return after

    def lose(self, w: World, gone: tuple[tuple[int, int], ...], cause: str) -> World:
        """The present coordinator takes the (group, incarnation) of ``gone`` for dead."""
        return self.feed(w, self._lost(w, gone, cause))

    def lose_by_ghost(self, w: World, n: int) -> World:
        """A ghost takes a process that is connected to it for dead."""
        p = w.processes[n]
        number = w.ghost_of(p)
        assert number is not None
        return self._feed_ghost(w, number, self.keeper.keep(self._lost(w, ((p.group, p.incarnation),), "silent")))

    def _lost(self, w: World, gone: tuple[tuple[int, int], ...], cause: str) -> m.Lost:
        """The event that loses these groups, with the progress of the live ones."""
        done = {p.group: len(p.ran) for p in w.processes if p.applied + 1 == w.brain.state.step_in_flight}
        progress = tuple((group, done.get(group, 0)) for group in sorted(w.brain.state.live))
        losses = tuple(m.Loss(group, incarnation, cause) for group, incarnation in gone)
        return m.Lost(losses, progress, failing_s=LONG_S if self.shape.hasty and cause == "stalled" else 0.0)

    @staticmethod
    def running_out(state: State, slow: tuple[int, ...]) -> m.RunningOut | None:
        """The event by which groups are asked for as many pieces as others can take; None where none would be."""
        if state.phase != "running":
            return None
        paces = tuple(
            (group, len(state.plan.pieces(group)), 9.0) if group in slow else (group, 0, 1.0)
            for group in sorted(state.live)
        )
        event = m.RunningOut(state.step_in_flight, state.epoch, paces)
        return event if relief.to_ask(state, event) else None

    @staticmethod
    def drains(state: State, who: str) -> list[m.DrainRequested]:
        """The requests of an operator or the launcher that a coordinator would not refuse, and that change anything;
        the launcher may also take back what is not its own."""
        for_now = who == "launcher"
        new = state.present.keys() - state.drained | (set() if for_now else state.drained_for_now)
        wanted = [m.DrainRequested((group,), who, for_now=for_now) for group in sorted(new)]
        wanted += [m.DrainRequested((group,), who, undo=True, for_now=for_now) for group in sorted(state.drained)]
        return [event for event in wanted if not draining.refusal(state, event)]

    @staticmethod
    def speeds(state: State) -> list[m.SpeedsMeasured]:
        """What may be measured that changes anything: one group is twice as slow as usual, or is usual again. That it
        is measured over no step allows it at any moment."""
        paces = [(group, 1.0 if group in state.slowness else 2.0) for group in sorted(state.live)]
        reported = [
            m.SpeedsMeasured(state.committed[0], 0, ((group, state.live[group], pace, pace),)) for group, pace in paces
        ]
        return [event for event in reported if slowness_after(state, event) != state.slowness]

    def ghost_asks(self, w: World, n: int) -> World:
        """A ghost asks a process that is connected to it; the same world where it would not."""
        p = w.processes[n]
        number = w.ghost_of(p)
        assert number is not None
        event = self.running_out(w.ghosts[number].state, (p.group,))
        return w if event is None else self._feed_ghost(w, number, self.keeper.keep(event))

    def reopen(self, w: World, ghost: bool) -> World:
        """Another coordinator replays the journal and begins; the one before it goes on (``ghost``) or has died."""
        state = w.brain.state
        if ghost:
            w = w._replace(ghosts=(*w.ghosts, w.brain))
        else:
            cut = tuple(self.rules.cut(p) if p.where == state.fencing else p for p in w.processes)
            w = w._replace(processes=cut)
        return self.feed(w, m.Opened(self.spec, state.job_attempt, state.fencing + 1))

    def announce(self, w: World, n: int) -> World:
        """A coordinator receives the next message of a process."""
        p = w.processes[n]
        event, w = p.up[0], self.put(w, n, p._replace(up=p.up[1:]))
        if p.where == w.brain.state.fencing:
            return self.feed(w, event.value)
        number = w.ghost_of(p)
        return w if number is None else self._feed_ghost(w, number, event)

    def is_idle_talk(self, w: World, p: Process) -> bool:
        """True where the next message of this process has no effect on others: it goes to nobody, or to a ghost
        that sends nothing."""
        if p.where == w.brain.state.fencing or self.shape.late_finals:
            return False
        number = w.ghost_of(p)
        return number is None or _is_silent(w.ghosts[number], self.brains.step(w.ghosts[number], p.up[0]))

    def _feed_ghost(self, w: World, number: int, event: Kept[m.Event]) -> World:
        """A ghost gets an event. A record that needs a confirmation changes nothing in the model: the ghost would end
        without sending its actions, and processes that are connected to it may connect elsewhere at any time anyway.
        (With ``Shape.late_finals`` its actions are sent, and then the ghost ends.) Nor does a record that sends nothing
        and leaves later views as they are."""
        ghost = w.ghosts[number]
        done = self.brains.step(ghost, event)
        if not self.shape.late_finals and _is_silent(ghost, done):
            return w
        kept = () if done.final else (done.after,)
        after = self._speak(w, done.words, ghost.state.fencing)
        return after._replace(ghosts=(*w.ghosts[:number], *kept, *w.ghosts[number + 1 :]))

    def _speak(self, w: World, words: tuple[Word, ...], fencing: int) -> World:
        """Put a coordinator's actions on its connections: on those whose Hello it has received and that no fence has
        closed."""
        if not words:
            return w
        processes = list(w.processes)
        for word in words:
            for n, p in enumerate(processes):
                meant = p.where == fencing and p.group == word.group and self._is_meant(w, p, word)
                greeted = not (p.up and isinstance(p.up[0].value, m.Hello))
                fenced = p.down and isinstance(p.down[-1].value, m.SendFenced)
                if meant and greeted and not fenced:
                    processes[n] = p._replace(down=(*p.down, word.note))
        return w.with_processes(tuple(map(self.keeper.share, processes)))

    @staticmethod
    def _is_meant(w: World, p: Process, word: Word) -> bool:
        """Whether a word for a group is for this process: also for one that has no incarnation yet, by its process
        nonce."""
        if p.incarnation >= 0:
            return word.incarnation in (-1, p.incarnation)
        named = w.brain.state.process_nonces.get(p.group) == (word.incarnation, p.process_nonce)
        return named or isinstance(word.note.value, m.SendStop) or word.process_nonce == p.process_nonce

    # ------------------------------------------------------------------------------------------------------ processes

    def receive(self, w: World, n: int) -> World:
        """A process receives the next message of its coordinator."""
        p = self.rules.receive(w.processes[n])
        if p is None:
            judge.left(w, w.processes[n])
            return self.without(w, n)
        return self.put(w, n, p)

    def compute(self, w: World, n: int, wrong: str = "") -> World:
        """A process runs its segments and contributes to the sum of its epoch."""
        p = w.processes[n]
        if p.copies is not None:
            shard_judge.computes(p)
        done = self.rules.compute(p, wrong)
        key, part = (done.known.step, done.known.epoch), (p.group, p.incarnation, done.ran, done.audited)
        shares = dict(w.shares)
        shares[key] = tuple(sorted((*shares.get(key, ()), part)))
        w = w._replace(shares=tuple(sorted(shares.items())))
        return self.put(self.blame(w, p, done.known.step) if wrong else w, n, done)

    def sum_of(self, w: World, p: Process) -> Kept[Result] | None:
        """The sum of the present epoch, once all members have contributed."""
        orders = p.known
        parts = next((there for at, there in w.shares if at == (orders.step, orders.epoch)), ())
        if tuple((group, incarnation) for group, incarnation, *_ in parts) != orders.live:
            return None
        return self.keeper.keep(Result(orders.step, orders.epoch, parts))

    def reduce(self, w: World, n: int, result: Kept[Result] | None, links: tuple[m.Link, ...] = ()) -> World:
        """A process gets the sum, or fails to, and votes."""
        return self.put(w, n, self.rules.reduced(w.processes[n], result, links))

    def apply(self, w: World, n: int) -> World:
        """A process applies what is committed."""
        p = w.processes[n]
        done = self.rules.apply(p)
        assert p.held is not None, "what is applied is held"
        judge.applied(w, p, p.held.value, self._batch)
        return self.put(w._replace(results=tuple({*w.results, p.held})), n, done)

    def parts_for(self, w: World, p: Process) -> list[Serving] | None:
        """The parts of the state that a learner or joiner may have now: those of its next step. None: a donor has
        dropped its part. (An empty list: one has not come so far, or has not been notified yet.)"""
        assert p.offer is not None
        there = {q[:2]: q for q in w.processes}
        parts, wanted = [], p.applied + 1 if p.applied >= 0 else p.offer.step
        for donor in p.offer.donors:
            process = there.get(donor)
            part = process.serves(p.offer.number) if process else None
            if process and part is None and process.offers_seen >= p.offer.number:
                known = process.known
                if all(offer.number != p.offer.number for offer in known.serves) or p.offer.number in process.withdrew:
                    return None
            if part is not None and part.upto >= wanted:
                parts.append(part)
        return parts if len(parts) == len(p.offer.donors) else []

    def learn(self, w: World, n: int, parts: list[Serving]) -> World:
        """A learner or joiner gets the state of its offer, or the result of the next step."""
        p = w.processes[n]
        done = self.rules.fetched(p, parts) if p.applied < 0 else self.rules.caught_up(p)
        return self.put(self.blame(w, p) if done.damage else w, n, done)

    @property
    def shards(self) -> ShardProcesses:
        """The rules of a job with state shards."""
        assert isinstance(self.rules, ShardProcesses), "a job without state shards"
        return self.rules

    def _copies(self, step: int) -> Copies | None:
        return Copies((step,) * self.shape.state_shards) if self.shape.state_shards else None

    def come_back(self, w: World, group: int) -> World:
        """A new process of a group sends Hello. It knows which incarnation was there before it."""
        state = w.brain.state
        mine = [p for p in w.processes if p.group == group]
        number = 1 + max([state.highest.get(group, 0), *(p.incarnation for p in mine)])
        used = {state.process_nonces.get(group, (0, ""))[1], *(p.process_nonce for p in mine)}
        process_nonce = next(str(n) for n in count(number) if str(n) not in used)
        if self.shape.observed and state.phase == "forming":  # a launcher tells its processes their incarnation
            p = Process(group, number, process_nonce=process_nonce, copies=self._copies(0))
        else:
            p = Process(
                group, -1, process_nonce=process_nonce, replaces=state.present.get(group, -1), applied=-1, weights=""
            )
            p = p._replace(copies=self._copies(-1))
        processes = sorted((*w.processes, self.rules.connect(p, state.fencing)), key=lambda q: q[:2])
        return w._replace(processes=tuple(processes))

    def put(self, w: World, n: int, p: Process) -> World:
        """The world with process ``n`` replaced by ``p``."""
        return w.with_processes((*w.processes[:n], self.keeper.share(p), *w.processes[n + 1 :])).tidied()

    def without(self, w: World, n: int) -> World:
        """The world without process ``n`` and the messages on the way to it and from it."""
        return w.with_processes(w.processes[:n] + w.processes[n + 1 :]).tidied()

    # --------------------------------------------------------------------------------------------------------- faults

    def may(self, w: World, kind: str) -> bool:
        """Whether a fault of this kind is left."""
        if not w.left or kind not in self.shape.kinds or self.only not in (None, kind):
            return False
        return kind not in self._limits or w.each[self._limits.index(kind)] > 0

    def pay(self, w: World, kind: str) -> World:
        """The world with one fault of this kind less."""
        each = tuple(left - (kind == limited) for limited, left in zip(self._limits, w.each, strict=True))
        return w._replace(left=w.left - 1, each=each)

    def blame(self, w: World, p: Process, step: int = -1) -> World:
        """The world that remembers that this process was damaged, or computed something wrongly in ``step``."""
        if self.shape.observed:
            w = observer.blamed(w, (p.group, p.incarnation), step)
        return w._replace(guilty=w.guilty | {(p.group, p.incarnation)})

    def damage(self, w: World, n: int) -> World:
        """A bit of the weights flips."""
        p = w.processes[n]
        return self.blame(self.put(w, n, p._replace(damage=f" damaged in {p.name}")), p)

    def repeat(self, w: World, n: int) -> World:
        """A process sends its last vote again."""
        p = w.processes[n]
        assert p.ballot is not None
        return self.put(w, n, p._replace(up=(*p.up, p.ballot)))


def _is_silent(brain: Brain, done: Step) -> bool:
    """Whether a ghost sends nothing after this decision, and its later views are unchanged by it."""
    before, after = brain.state, done.after.state
    return done.final or (not done.words and (after.holders, after.learners) == (before.holders, before.learners))

"""The ticket stream: the real issuer, the real readers, and orders that come late, twice, or to a broken connection.

Each walk plays the leader of one group and its ranks. Ranks receive at their own pace, lose their connection and come
back, and do what their next entry says; those of a joiner look at the same orders between runs (worker.group_rounds).
Epochs grow the plan or not, steps are committed when all ranks have reduced, the group is asked for pieces and epochs
take them out or leave them, shards are adopted and opened, or cannot be, a joiner is sent back and gets other offers,
and the job ends anywhere. What must hold:

* all ranks do the same in the same order: each one's log begins as the longest does;
* who reduces in an epoch has exactly the pieces of its plan inside, in its order, and none that was given back and is
  not known to be its own again;
* an ask has one answer, of pieces that have no ticket;
* no ticket is of an adopted shard before that is open;
* when nothing more happens every rank has reduced in the newest epoch, or stands outside of any run.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace

import pytest

from spare_megatron.control_plane.ticket_entries import order_of, stream_of
from spare_megatron.control_plane.ticket_issuer import TicketIssuer
from spare_megatron.protocol.member import (
    Orders,
    first_orders,
    take_ask,
    take_commit,
    take_end,
    take_tickets,
    take_view,
)
from spare_megatron.protocol.messages import GaveBack, JobSpec
from spare_megatron.protocol.tickets import Begin, Close, Pause, Ticket, Tickets, TicketStream
from spare_megatron.protocol.view import Offer, ReliefAsk, View
from spare_megatron.worker.step import StepRunner
from spare_megatron.worker.ticket_reader import LeaveError, TicketReader, TicketRun
from tests.pure.learner_world import RankEngine, RankReplicas

SPEC = JobSpec(3, 4, (0, 1), "microbatch", 0, 9, 1, "f", audit_rate=0.5, audit_seed=3)
VIEW = View(1, 0, 1, 1, ((0, 0), (1, 0), (2, 0)), (0, 0), 1, ((4, 5),), (4, 5), audits=((0,),))
SEEDS = range(200)


class Rank:
    """One rank: its orders, and its training thread as a machine that does one entry at a time."""

    def __init__(self, position: int, world: World) -> None:
        self.position, self.rows, self.world = position, (position,), world
        self.orders = first_orders(1, 0)
        self.coming: deque[object] = deque()
        self.tickets_read = 0
        self.reader = TicketReader(self)  # type: ignore[arg-type]
        self.step, self.offer = 0, 0
        self.log: list[object] = []
        self.inside: list[int] = []
        self.runs = False
        self.reduced = (0, 0)
        """(epoch, step)."""

    tickets_low = 0

    def read_tickets(self, number: int) -> None:
        self.tickets_read = number

    def begun(self, number: int) -> None:
        if self.position == 0:
            self.world.reported.append(number)

    def receive(self) -> None:
        order = self.coming.popleft()
        self.orders = taken(self.orders, order, self.tickets_read)

    def go_on(self) -> bool:
        """Do what follows from the orders; false where nothing does."""
        view = self.orders.view
        offer = view.offer.number if view.offer else self.offer
        if not self.runs and (view.step, offer) != (self.step, self.offer) and view.is_member and not self.orders.over:
            self.step, self.offer, self.inside = view.step, offer, []
            self.reader.begin(view.step, offer if view.offer else -1)
            return True
        entry = self.reader.next(self.orders)
        if entry is None or isinstance(entry, Begin):
            return False
        if isinstance(entry, Ticket):
            self.runs = True
            self.reader.move()
            self.inside += [] if entry.audited else [entry.piece]
        else:
            self.reader.move()
            assert self.runs == isinstance(entry, Pause), f"{entry} is read, and a run is under way: {self.runs}"
            self.runs = False
            if isinstance(entry, Close) and entry.epoch == view.epoch and not self.orders.over:
                planned = [piece for segment in view.segments for piece in segment]
                assert self.inside == planned, f"epoch {entry.epoch}: {self.inside} are inside, planned are {planned}"
                self.reduced = (entry.epoch, self.step)
        self.log.append(entry)
        return True


def taken(orders: Orders, order: object, read: int) -> Orders:
    if isinstance(order, TicketStream):
        return take_tickets(orders, stream_of(order_of(order).tickets), read)[0]
    if isinstance(order, View):
        return take_view(orders, order)[0]
    if isinstance(order, ReliefAsk):
        return take_ask(orders, orders.view.step, order)[0]
    if isinstance(order, tuple):
        return take_commit(orders, *order, leave=False)[0]
    return take_end(orders, stop=("failed", "it ends"))[0]


class World:
    """The leader and its ranks."""

    def __init__(self, seed: int, depth: int | None = None) -> None:
        self.random = random.Random(seed)
        self.joins = seed % 5 == 4
        self.late = seed % 3 != 0
        depth = depth or (seed % 4 if self.late and depth is None else 0)
        self.issuer = TicketIssuer(SPEC, self.late, depth)
        self.answers: dict[ReliefAsk, GaveBack] = {}
        self.given = 0
        self.orders = first_orders(1, 0)
        self.reported: deque[int] = deque()
        self.ranks = [Rank(position, self) for position in range(self.random.choice((1, 2, 3)))]
        self.pieces, self.offers = 6, 0
        self.shards, self.opened = 100, set[int]()
        """The number of the next adopted shard, and the shards that are open."""
        self.joined = 0
        """Tickets that were added to a run under way."""

    def tell(self, order: object) -> None:
        """The leader learns an order and passes it on, with what follows from it."""
        self.orders = taken(self.orders, order, 0)
        runs = self.issuer._open
        entries = self._entries(self.issuer.reported(self.orders.view, self.orders.over, self.shut))
        self.joined += runs and isinstance(entries.entries[:1] and entries.entries[0], Ticket)
        self._look_at_answer()
        for one in (entries, order) if self.orders.over else (order, entries):
            self._pass_on(one)

    @property
    def shut(self) -> frozenset[int]:
        """The adopted shards that are not open."""
        return frozenset(shard for shard, _ in self.orders.view.adopts if shard not in self.opened)

    def _entries(self, entries: TicketStream) -> TicketStream:
        """What the issuer says, in which no piece is of a shard that is not open."""
        reported = {entry.piece // SPEC.pieces_per_shard for entry in entries.entries if isinstance(entry, Ticket)}
        assert reported.isdisjoint(self.shut), f"pieces of shards {reported} are issued, not open are {self.shut}"
        return entries

    def _look_at_answer(self) -> None:
        """The group reports the same whenever it is asked the same, and has begun nothing of it."""
        ask, answer = self.orders.view.ask, self.issuer.answer
        assert (ask is None or not self.orders.view.is_member) == (answer is None)
        if ask is not None and answer is not None:
            assert self.answers.setdefault(ask, answer) == answer
            assert answer.ask == ask
            assert len(answer.pieces) <= ask.pieces
            issued = {ticket.piece for ticket in self.issuer._issued if not ticket.audited}
            assert not issued.intersection(answer.pieces)

    def _pass_on(self, order: object) -> None:
        for rank in self.ranks:
            rank.coming.append(order)

    def moves(self) -> list[str]:
        """What may happen without an event from outside."""
        there = [f"receive {r.position}" for r in self.ranks if r.coming] + ["begun"] * bool(self.reported)
        return there + [f"go on {r.position}" for r in self.ranks]

    def do(self, move: str) -> bool:
        if move == "begun":
            self._pass_on(self._entries(self.issuer.begun(self.reported.popleft())))
            return True
        rank = self.ranks[int(move.rpartition(" ")[2])]
        if move.startswith("receive"):
            rank.receive()
            return True
        if self.joins and not rank.runs:
            return self._together()
        return rank.go_on()

    def _together(self) -> bool:
        """The ranks of a joiner go on, when all of them look at the same orders."""
        marks = {(r.runs, r.orders.over, r.orders.view, r.orders.stream.end) for r in self.ranks}
        return len(marks) == 1 and sum(rank.go_on() for rank in self.ranks) > 0

    def settle(self) -> None:
        """All that can happen without an event happens, in any order."""
        while any(self.do(move) for move in self.random.sample(self.moves(), len(self.moves()))):
            self.check()

    def check(self) -> None:
        longest = max((rank.log for rank in self.ranks), key=len)
        for rank in self.ranks:
            assert rank.log == longest[: len(rank.log)]

    # ---------------------------------------------------------------------------------------------------- events

    def cut(self) -> None:
        """A rank loses what was on the way, connects again, and is given the newest orders and entries."""
        rank = self.random.choice(self.ranks)
        entries = self.issuer.kept.since(rank.orders.stream.end)
        rank.coming = deque([self.orders.view, entries])

    def epoch(self) -> None:
        """A new epoch, with pieces of a lost group, with something to audit, or without anything."""
        view, kind = self.orders.view, self.random.randrange(3)
        if not view.is_member:
            return
        more = (tuple(range(self.pieces, self.pieces + self.random.randrange(1, 4))),) if kind == 0 else ()
        self.pieces += 4 * len(more)
        if kind == 1:
            more = ((),)
            audits = (*view.audits, *((),) * (len(view.segments) - len(view.audits)), (1,))
            view = replace(view, audits=audits)
        self.tell(replace(view, epoch=view.epoch + 1, segments=(*view.segments, *more)))

    def ask(self) -> None:
        """The group is asked, again, or for another number of pieces; not where it may be sent back, nor anew before
        what it gave is taken in."""
        view, answer = self.orders.view, self.issuer.answer
        if view.is_member and not self.joins and (answer is None or not answer.pieces):
            number = view.asks_made + self.random.randrange(2)
            self.tell(ReliefAsk(view.fencing, number, self.random.randrange(1, 4)))

    def taken_in(self) -> None:
        """A new epoch has what was given back in another segment or not at all, and asks no more."""
        view, answer = self.orders.view, self.issuer.answer
        if answer is None:
            return
        gone = frozenset(answer.pieces)
        kept = tuple(tuple(piece for piece in segment if piece not in gone) for segment in view.segments)
        again = (answer.pieces,) if self.random.random() < 0.5 else ()
        self.given += len(gone)
        self.tell(replace(view, epoch=view.epoch + 1, segments=(*kept, *again), ask=None))

    def adopt(self) -> None:
        """A new epoch in which the group has adopted a shard, with some or none of its pieces."""
        view = self.orders.view
        if view.is_member and not self.joins:
            first = self.shards * SPEC.pieces_per_shard
            pieces = tuple(range(first, first + self.random.randrange(3)))
            adopts = (*view.adopts, (self.shards, 0))
            self.shards += 1
            self.tell(replace(view, epoch=view.epoch + 1, segments=(*view.segments, pieces), adopts=adopts))

    def open(self) -> None:
        """A shard is open, or cannot be opened: then a view follows that has none of its pieces, and nothing of what
        was given back."""
        for shard in sorted(self.shut)[:1]:
            if self.random.random() < 0.6:
                self.opened.add(shard)
                self._pass_on(self._entries(self.issuer.opened(self.shut)))
                continue
            view, answer = self.orders.view, self.issuer.answer
            gone = frozenset(answer.pieces) if answer is not None else frozenset[int]()
            kept = tuple(
                tuple(p for p in segment if p not in gone and p // SPEC.pieces_per_shard != shard)
                for segment in view.segments
            )
            adopts = tuple(pair for pair in view.adopts if pair[0] != shard)
            self.tell(replace(view, epoch=view.epoch + 1, segments=kept, adopts=adopts, ask=None))

    def same(self) -> None:
        self.tell(self.orders.view)

    def commit(self) -> None:
        view = self.orders.view
        if view.is_member and all(rank.reduced == (view.epoch, view.step) for rank in self.ranks):
            self.tell((view.step, view.epoch))

    def send_back(self) -> None:
        """The group is a joiner: it leaves the epoch, and then joins anew by another offer."""
        view = replace(self.orders.view, ask=None)
        self.offers += 1
        self.tell(replace(view, epoch=view.epoch + 1, live=((0, 0), (2, 0)), segments=()))
        if self.random.random() < 0.5:
            self.settle()
        offer = Offer((1, 0), self.offers, view.committed[0], ((0, 0),))
        self.tell(replace(view, epoch=view.epoch + 2, offer=offer, segments=(view.standing,), audits=()))


@pytest.mark.parametrize("seed", SEEDS)
def test_all_ranks_do_the_same_and_reduce_with_all_pieces(seed: int) -> None:
    world = World(seed)
    events = [world.cut, world.epoch, world.epoch, world.same, world.commit, world.commit, world.ask, world.taken_in]
    events += [world.adopt, world.open, world.open]
    events += [world.send_back] * world.joins
    world.tell(VIEW)
    for _ in range(40):
        for _ in range(world.random.randrange(8)):
            world.do(world.random.choice(world.moves()))
            world.check()
        if world.random.random() < 0.2:
            world.settle()
        world.random.choice(events)()
    while world.shut:
        world.open()
    world.taken_in()
    world.settle()
    newest = world.orders.view.epoch, world.orders.view.step
    assert [rank.reduced for rank in world.ranks] == [newest] * len(world.ranks)
    world.epoch()
    world.tell(None)
    world.settle()
    assert not any(rank.runs for rank in world.ranks), "a rank waits inside a run of a job that is over"
    assert len({len(rank.log) for rank in world.ranks}) == 1


def test_pieces_are_given_back_in_the_walks() -> None:
    """Else the walks above would show nothing of it."""
    given = 0
    for seed in SEEDS[:60]:
        world = World(seed)
        world.tell(replace(VIEW, segments=(tuple(range(8)),)))
        world.ask()
        world.taken_in()
        given += world.given
    assert given > 10, given


def test_late_pauses_let_patches_join() -> None:
    worlds = [World(seed, depth=0) for seed in (1, 3)]
    for world in worlds:
        world.tell(VIEW)
        world.tell(replace(VIEW, epoch=2, segments=(*VIEW.segments, (9,))))
    late, early = (world.issuer.kept.entries for world in worlds)
    audited = Ticket(0, audited=True)
    first = [Begin(1), audited, Ticket(4, compared=True), Ticket(5, compared=True)]
    marks = [replace(entry, compared=False) if isinstance(entry, Ticket) else entry for entry in (*late, *early)]
    plain = [replace(entry, compared=False) if isinstance(entry, Ticket) else entry for entry in first]
    assert marks[: len(late)] == [*plain, Ticket(9, 1)], "nothing is closed before the last ticket is begun"
    assert marks[len(late) :] == [*plain, Pause(), Close(1), Ticket(9, 1), Pause(), Close(2)]
    assert worlds[0].joined == 1
    assert not worlds[0].issuer.begun(3).entries, "another ticket follows the one that was begun"
    assert worlds[0].issuer.begun(4).entries == (Pause(), Close(2))


def test_words_are_taken_once_and_never_across_a_gap() -> None:
    known = TicketStream(4, (Begin(2), Ticket(7)))
    for more in (
        TicketStream(),
        TicketStream(7, (Pause(),)),
        TicketStream(4, known.entries),
        TicketStream(0, (Pause(),) * 6),
    ):
        assert known.joined(more) is known
    whole = known.joined(TicketStream(5, (Ticket(7), Pause(), Close(3))))
    assert (whole.first, whole.entries[2:], whole.end) == (4, (Pause(), Close(3)), 8)
    assert (whole.since(6).entries, whole.since(9), whole.at(8)) == (whole.entries[2:], TicketStream(8), None)


def test_a_rank_that_reads_of_the_next_step_waits_for_the_commit_of_this_one() -> None:
    """Its view was lost with the connection, and the one that it was notified again is older than its neighbour's
    address."""
    reported = take_view(first_orders(1, 0), replace(VIEW, segments=((),), audits=()))[0]
    early = take_tickets(reported, TicketStream(0, (Begin(1), Close(1), Begin(2), Close(1))))[0]
    session = Rank(0, World(0))
    session.orders, session.spec, later = early, SPEC, [take_commit(early, 1, 1, leave=False)[0]]  # type: ignore[attr-defined]
    session.progress = session.reduced = lambda *_: None  # type: ignore[attr-defined]

    def wait(_: int) -> Orders:
        session.orders = later.pop()
        return session.orders

    session.wait = wait  # type: ignore[attr-defined]
    engine = RankEngine(lambda mine: [mine])
    engine.step = 0
    runner = StepRunner(engine, session, RankReplicas(session), lambda *_: None)  # type: ignore[arg-type]
    assert (runner.run(1).step, later) == (1, [])


def test_an_offer_that_comes_while_a_rank_computes_is_seen_before_the_next_piece() -> None:
    reported = take_view(first_orders(1, 0), replace(VIEW, segments=((),), audits=()))[0]
    entries = take_tickets(reported, TicketStream(0, (Begin(1), Close(1))))[0]
    session, seen = Rank(0, World(0)), list[tuple[tuple[Offer, ...], int]]()
    session.orders, session.spec = entries, SPEC  # type: ignore[attr-defined]
    session.progress = session.reduced = lambda *_: None  # type: ignore[attr-defined]
    offer = Offer((2, 1), 1, 0, ((1, 0),))

    class Engine(RankEngine):
        def run(self, step: int, tickets: Tickets) -> None:
            runner.on_piece("evaluate", 0)
            session.orders = take_view(session.orders, replace(reported.view, serves=(offer,)))[0]
            runner.on_piece("evaluate", 1)
            runner.on_piece("evaluate", 2)
            assert seen == [((), 0), ((offer,), 0)]
            super().run(step, tickets)

    engine = Engine(lambda mine: [mine])
    engine.step = 0

    def wait(_: int) -> Orders:
        session.orders = take_commit(session.orders, 1, 1, leave=False)[0]
        return session.orders

    session.wait = wait  # type: ignore[attr-defined]

    def look(view: View, step: int) -> None:
        seen.append((view.serves, step))

    runner = StepRunner(engine, session, RankReplicas(session), lambda *_: None, look=look)  # type: ignore[arg-type]
    assert runner.run(1).step == 1


def test_a_run_ends_at_the_pause_and_a_rank_leaves_where_none_comes() -> None:
    world = World(1, depth=0)
    [rank] = world.ranks[:1]
    world.tell(VIEW)
    while rank.coming:
        rank.receive()
    rank.wait = lambda version: rank.orders  # type: ignore[attr-defined]
    rank.reader.begin(1)
    ended: list[bool] = []
    run = TicketRun(rank.reader, lambda: ended.append(True))
    assert [next(run).piece for _ in range(3)] == [0, 4, 5]
    assert (run.audits, run.pieces, run.place(1), list(run.ahead())) == ([0], [4, 5], (0, 1), [])
    rank.orders = take_tickets(rank.orders, world.issuer.begun(world.reported.pop()))[0]
    assert [next(run, None), next(run, None)] == [None, None]
    assert (ended, run.ended) == ([True], True)
    rank.reader.move()
    rank.orders = taken(rank.orders, None, 0)
    with pytest.raises(LeaveError, match="it ends"):
        next(TicketRun(rank.reader, lambda: None))

"""The leader of a group talks to the coordinator for all ranks of the group.

It has a process of its own (:mod:`spare_megatron.control_plane.leader_process`). It serves the ranks of its group,
passes the coordinator's orders on to them unchanged (of a neighbour's and of donors' addresses to each rank those of
its position), writes the ticket stream that they compute by (:mod:`spare_megatron.control_plane.ticket_issuer`), and
merges their reports and beats into one (:mod:`spare_megatron.control_plane.group_aggregation`,
:mod:`spare_megatron.control_plane.learner_reports`, :mod:`spare_megatron.control_plane.shard_reports`,
:mod:`spare_megatron.control_plane.shard_reports`, :mod:`spare_megatron.control_plane.rank_ledger`). The group sends
Hello when all its ranks have connected. So the coordinator has as many clients as there are groups, not as many as
there are GPUs.

In a group of one rank the leader is a part of that rank's control thread, and takes the training thread's reports
directly.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import grpc.aio

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.host_port import join_address, split_address
from spare_megatron.control_plane import control_pb2 as pb
from spare_megatron.control_plane import protobuf_codec
from spare_megatron.control_plane.addresses import same_address, unreachable
from spare_megatron.control_plane.channel import COORDINATOR, LEADER, serve
from spare_megatron.control_plane.control_thread import Agent
from spare_megatron.control_plane.group_aggregation import Ballots, MinOverRanks, VoteFigures, merge_reports
from spare_megatron.control_plane.heartbeat_timer import Pulse, leader_interval_s
from spare_megatron.control_plane.learner_reports import LearnerReports
from spare_megatron.control_plane.rank_ledger import PaceMeter, RankLedger
from spare_megatron.control_plane.reconnecting_stream import ReconnectingStream, joined
from spare_megatron.control_plane.report_messages import GROUP_REPORTS, RANK_REPORTS
from spare_megatron.control_plane.reports import (
    RankApplied,
    RankBegun,
    RankCaughtUp,
    RankHave,
    RankOpened,
    RankReport,
    Reduced,
    SaveRequest,
    StepReport,
    StopRequest,
)
from spare_megatron.control_plane.shard_reports import ShardReports, StateReports
from spare_megatron.control_plane.ticket_entries import order_of
from spare_megatron.control_plane.ticket_issuer import TicketIssuer
from spare_megatron.protocol.codec import job_to_json, spec_to_json
from spare_megatron.protocol.member import Change
from spare_megatron.protocol.messages import Applied, Hello, Hosts, Saved, StopRequested, Vote
from spare_megatron.protocol.tickets import TicketStream
from spare_megatron.runtime import failpoints
from spare_megatron.runtime.disk import SideFiles

REPORTS_KEPT = 2
"""Step reports that are sent again after a reconnect: the coordinator may have died between commit and record."""


class Leader:
    """Speaks for a group: the process of its leader, or the control side of the only rank of a group."""

    def __init__(self, agent: Agent, listening: Callable[[str], None] = lambda _: None) -> None:
        """``listening`` is called with the address at which the ranks reach the leader."""
        self._agent, self._setup, self._listening = agent, agent.setup, listening
        self._process_nonce = secrets.token_hex(8)
        """The process nonce of the group's process: a leader lives and dies with position 0, hence with the group."""
        self._me = self._setup.group, self._setup.incarnation
        size = self._setup.group_size
        self._alone = size == 1
        self._rows = self._setup.rows_of_ranks
        """Of each rank its rows."""
        rows = sum(map(len, self._rows))
        self._ballots = Ballots(*self._me, rows)
        self._arrived = asyncio.Event()
        self._ranks: dict[int, asyncio.Queue[pb.Order | None]] = {}
        interval_s = self._setup.job.timeouts.heartbeat_interval_s
        own_interval_s = leader_interval_s(self._setup.job.timeouts, self._setup.spec.num_groups)
        self._ledger = RankLedger(size, interval_s, own_interval_s, time.monotonic())
        job = self._setup.job
        self._pulse = Pulse(own_interval_s, eager=job.tickets_ahead > 0)
        self._issuer = TicketIssuer(self._setup.spec, job.late_pauses, job.tickets_ahead)
        self._meter = PaceMeter(job.tickets_ahead - 1)
        self._ran_out = (0, 0, False)
        """Of :attr:`TicketIssuer.runs_out`, what the coordinator received last."""
        self._reported = MinOverRanks(size, -1)
        self._applied = MinOverRanks(size, (-1, -1))
        self._seen = MinOverRanks(size, 0)
        self._seen_s = 0.0
        self._reports: dict[int, dict[int, dict[str, Any]]] = {}
        self._asked: list[pb.GroupReport] = []
        self._welcome: pb.Order | None = None
        self._neighbour: pb.Order | None = None
        self._donors: pb.Order | None = None
        self._learning = LearnerReports(self._me, size, rows)
        self._shards = ShardReports(self._me, size, job.adopt_timeout_s)
        self._state = StateReports(self._me, size)
        self._addresses, self._serving_at = [""] * rows, [""] * rows
        """Of each row where its rank listens for the replica ring, and where it serves the row's state to learners."""
        self._is_at(0, self._setup.address, self._setup.serving_at)
        self._process_nonces: dict[int, str] = {}
        """Position -> the process nonce of the process that has it. A rank that dies ends its group: nobody takes its
        place."""
        if self._alone:
            self._reported.add(0, self._setup.last_applied)
        self._security = self._setup.security
        self._closing = asyncio.Event()
        self._side = SideFiles(lambda text: sys.stderr.write(f"spare: {text}\n"))
        self._stream = ReconnectingStream(
            service=COORDINATOR,
            report=pb.GroupReport,
            security=self._security,
            find=self._find,
            greet=self._greet,
            take=self._take,
            done=lambda: self._agent.orders.over,
            patience_s=self._setup.job.timeouts.heartbeat_timeout_s,
            look_s=interval_s,
        )

    async def run(self) -> None:
        """Serve this group until :meth:`close`. Raises ConfigError where it cannot listen."""
        times = self._setup.job.timeouts
        server = None if self._alone else await self._serve()
        if server is None:
            self._arrived.set()
        beats = asyncio.create_task(self._send_beats())
        try:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._arrived.wait(), times.startup_timeout_s)
            if not self._arrived.is_set():
                self._miss_ranks()
            # A coordinator may be lost just when its first groups, or one that comes back, call it.
            first_s = times.coordinator_timeout_s if self._setup.kept else 2 * times.heartbeat_timeout_s
            await self._stream.run(first_s=first_s, again_s=times.coordinator_timeout_s)
            if not self._agent.orders.over and not self._closing.is_set():
                self._lost_coordinator()
            await self._closing.wait()  # the other ranks may still ask what the last order was
        finally:
            beats.cancel()
            if server is not None:
                await self._dismiss(server)

    def post(self, report: RankReport) -> None:
        """Take a report of the training thread of a group's only rank."""
        self._receive(0, report)

    def wants(self, complete: bool) -> bool:
        """Whether :meth:`nudge` would bring the next heartbeat forward."""
        return self._pulse.wants(complete)

    def nudge(self) -> None:
        """Note that the training thread of a group's only rank has done a piece."""
        self._receive_beat(0, self._agent.beat())

    def close(self) -> None:
        """Let the ranks receive their last orders, and end the group's stream to the coordinator; :meth:`run` then
        returns."""
        self._closing.set()
        self._arrived.set()
        self._stream.close()

    # ------------------------------------------------------------------------------------------- towards the ranks

    async def _serve(self) -> grpc.aio.Server:
        setup, host = self._setup, "127.0.0.1"
        if _is_remote(setup.coordinator or self._find() or ""):  # where the ranks listen for other groups
            host = split_address(setup.address)[0] if setup.address else socket.gethostname()
        server, port = await serve(join_address(host, 0), LEADER, self._security, self._join, pb.RankReport)
        address = join_address(host, port)
        publish = partial(setup.run_dir.publish_leader, setup.group, setup.incarnation, address)
        self._side.write(f"the address of group {setup.group}'s leader", publish)
        self._listening(address)
        return server

    async def _join(self, reports: Any, context: grpc.aio.ServicerContext) -> None:
        """Serve one rank's stream from its arrival to its end."""
        first = await context.read()
        if first is grpc.aio.EOF or first.WhichOneof("kind") != "arrival":
            return
        address = first.arrival.address.partition(",")[0]
        far = "" if self._arrived.is_set() else await unreachable(address, self._who(first.arrival))
        refusal = self._refusal(first.arrival) or far  # behind the wait: others arrive meanwhile
        if refusal:
            await context.write(pb.Order(refused=pb.Refused(reason=refusal)))
            return
        position = first.arrival.position
        if self._process_nonces.setdefault(position, first.arrival.process_nonce) != first.arrival.process_nonce:
            reason = f"{self._who(first.arrival)} is there already, as another process"
            await context.write(pb.Order(fenced=pb.Fenced(reason=reason)))
            return
        if first.arrival.tickets < self._issuer.kept.first:
            reason = f"{self._who(first.arrival)} has missed more of the ticket stream than is kept"
            await context.write(pb.Order(refused=pb.Refused(reason=reason)))
            return
        orders: asyncio.Queue[pb.Order | None] = asyncio.Queue()
        self._is_at(position, first.arrival.address, first.arrival.serving_at)
        self._admit(position, orders, first.arrival)
        for report in first.then:
            self._listen_to(position, report)
        listener = asyncio.create_task(self._listen(position, context, orders))
        try:
            while (order := await orders.get()) is not None:
                for reported in (order, *order.then):
                    if reported.HasField("tickets"):
                        failpoints.hit_message("order", reported)
                await context.write(order)
        finally:
            listener.cancel()
            self._closed(position, orders)

    def _refusal(self, arrival: pb.RankArrival) -> str:
        setup = self._setup
        if (arrival.group, arrival.incarnation) != self._me:
            return f"group {arrival.group} incarnation {arrival.incarnation} is not led here"
        if not 0 <= arrival.position < setup.group_size:
            return f"rank position {arrival.position} is not one of 0..{setup.group_size - 1}"
        if arrival.fingerprint != setup.spec.fingerprint:
            return (
                f"rank {arrival.position} of group {setup.group} runs another job than its leader: fingerprint "
                f"{arrival.fingerprint}, not {setup.spec.fingerprint}; give every rank the same flags and versions"
            )
        address = arrival.address.partition(",")[0]
        taken = self._addresses.index(address) if address in self._addresses else self._rows[arrival.position][0]
        if address and taken not in self._rows[arrival.position]:
            return same_address(address, self._who(arrival), f"rank {taken} of it")
        return ""

    def _is_at(self, position: int, address: str, serving_at: str) -> None:
        """Note the addresses of a rank's rows."""
        for row, *at in zip(self._rows[position], address.split(","), serving_at.split(","), strict=True):
            self._addresses[row], self._serving_at[row] = at

    def _who(self, arrival: pb.RankArrival) -> str:
        return f"rank {arrival.position} of group {arrival.group}"

    def _admit(self, position: int, orders: asyncio.Queue[pb.Order | None], arrival: pb.RankArrival) -> None:
        """Take a rank in, for the first time or after a reconnect, and send it the newest orders of the group."""
        back = self._arrived.is_set()
        if position in self._ranks:
            self._ranks[position].put_nowait(None)
        self._ranks[position] = orders
        self._ledger.arrived(position, time.monotonic())
        self._reported.add(position, arrival.last_applied)
        if self._welcome is not None:
            orders.put_nowait(self._welcome)
        for reported in (self._neighbour, self._donors):
            if reported is not None:
                orders.put_nowait(_of_rows(reported, self._rows[position]))
        tickets = order_of(self._issuer.kept.since(arrival.tickets))
        if self._agent.orders.version:
            present = self._present()
            for reported in (tickets, present) if self._agent.orders.over else (present, tickets):
                orders.put_nowait(reported)
        if back:
            self._stream.send(pb.GroupReport(rank_closed=pb.RankClosed(position=position, closed=False)))
        elif len(self._ranks) == self._setup.group_size:
            self._arrived.set()

    async def _listen(
        self, position: int, context: grpc.aio.ServicerContext, orders: asyncio.Queue[pb.Order | None]
    ) -> None:
        """Take one rank's reports until its stream ends."""
        while (message := await context.read()) is not grpc.aio.EOF:
            for one in (message, *message.then):
                self._listen_to(position, one)
        orders.put_nowait(None)

    def _listen_to(self, position: int, message: pb.RankReport) -> None:
        kind = message.WhichOneof("kind")
        if kind == "beat":
            self._receive_beat(position, message.beat)
        elif kind == "seen":
            self._saw(position, message.seen.epoch)
        else:
            report = RANK_REPORTS.report(message)
            if report is not None:
                self._receive(position, report)

    def _closed(self, position: int, orders: asyncio.Queue[pb.Order | None]) -> None:
        if self._ranks.get(position) is not orders:
            return
        del self._ranks[position]
        if not self._agent.orders.over:
            self._stream.send(pb.GroupReport(rank_closed=pb.RankClosed(position=position, closed=True)))

    async def _dismiss(self, server: grpc.aio.Server) -> None:
        """Let the ranks receive their last orders, then stop the server."""
        for orders in self._ranks.values():
            orders.put_nowait(None)
        await server.stop(grace=self._setup.job.timeouts.grace_s)

    def _issue(self, stream: TicketStream, behind: pb.Order | None = None) -> None:
        """Send all ranks these entries of the ticket stream; as one message with the order from which they follow."""
        orders = [] if behind is None else [behind]
        if stream.entries:
            orders.append(order_of(stream))
            if self._alone:
                self._agent.take(orders[-1])
        if orders:
            self._pass_on(joined(orders))

    def _pass_end(self, order: pb.Order) -> None:
        """Pass on that the job is over, behind a pause for those that compute."""
        self._issue(self._issuer.reported(self._agent.orders.view, over=True))
        self._pass_on(order)

    def _pass_on(self, order: pb.Order) -> None:
        for position, orders in self._ranks.items():
            orders.put_nowait(_of_rows(order, self._rows[position]))

    # ---------------------------------------------------------------------------------------------- reports of ranks

    def _receive(self, position: int, report: RankReport) -> None:
        """Take one rank's report; the group's is sent to the coordinator once this one decides it."""
        if isinstance(report, Reduced):
            ballot = self._ballots.add(report.row, report, position)
            if ballot is not None:
                self._stream.send(self._ballot(*ballot))
        elif isinstance(report, StepReport):
            self._receive_step_report(position, report)
        elif isinstance(report, RankApplied):
            if self._applied.add(position, (report.step, report.epoch)):
                self._stream.send(self._applied_message())
        elif isinstance(report, SaveRequest):
            self._ask(Saved(*self._me, report.step, report.directory))
        elif isinstance(report, StopRequest):
            if not any(message.HasField("stop_request") for message in self._asked):  # all ranks may be signalled
                self._ask(StopRequested(report.reason))
        elif isinstance(report, RankBegun):
            self._issue(self._issuer.begun(report.number))
            self._meter.note(*self._issuer.begun_of_step, time.monotonic())
            self._report_if_it_runs_out()
        elif isinstance(report, RankOpened):
            self._answer_for(self._shards.receive(position, report, time.monotonic()))
        elif isinstance(report, RankHave):
            have = self._state.receive(position, report)
            if have is not None:
                self._stream.send(GROUP_REPORTS.message(have))
        else:
            if isinstance(report, RankCaughtUp):
                self._reported.add(position, report.step)
            word = self._learning.receive(position, report)
            if word is not None:
                self._stream.send(GROUP_REPORTS.message(word))

    def _answer_for(self, word: Hosts | None) -> None:
        """Tell the coordinator that a shard is open or cannot be opened, and go on with the pieces of an open one."""
        if word is not None:
            self._stream.send(GROUP_REPORTS.message(word))
            self._issue(self._issuer.opened(self._shards.shut(self._agent.orders.view)))

    def _receive_beat(self, position: int, beat: pb.Beat) -> None:
        """Take one rank's beat; the next heartbeat comes sooner when the group as a whole is further than before."""
        news, complete = self._ledger.receive(position, beat, time.monotonic())
        if news:
            self._pulse.news(complete)

    def _receive_step_report(self, position: int, report: StepReport) -> None:
        self._reports.setdefault(report.step, {})[position] = report.report
        if self._reported.add(position, report.step):
            # All groups report the same; only one need say it at once.
            speaks = [group for group, _ in self._agent.orders.view.live[:1]] == [self._setup.group]
            self._stream.send(self._step_report(self._reported.reached), waits=not speaks)
            for step in [s for s in self._reports if s <= self._reported.reached - REPORTS_KEPT]:
                del self._reports[step]

    def _ask(self, request: Saved | StopRequested) -> None:
        """Send a request, and send it again after each reconnect: nothing else would repeat it."""
        message = GROUP_REPORTS.message(request)
        self._asked.append(message)
        self._stream.send(message)

    def _saw(self, position: int, epoch: int) -> None:
        if self._seen.add(position, epoch):
            self._seen_s = time.monotonic()

    def _step_report(self, step: int) -> pb.GroupReport:
        merged = merge_reports(self._reports.get(step, {}))
        return GROUP_REPORTS.message(StepReport(step, merged))

    def _ballot(self, vote: Vote, figures: VoteFigures) -> pb.GroupReport:
        message = pb.Ballot(figures=[pb.Figure(name=name, value=value) for name, value in figures])
        if self._seen.reached >= vote.result.epoch:
            message.since_seen_s = time.monotonic() - self._seen_s
        protobuf_codec.fill(message.vote, vote)
        return pb.GroupReport(ballot=message)

    def _applied_message(self) -> pb.GroupReport:
        return GROUP_REPORTS.message(Applied(*self._me, *self._applied.reached))

    # ------------------------------------------------------------------------------------- towards the coordinator

    def _find(self) -> str | None:
        """The coordinator's address; None where it is not known, or has a lower fencing number than the newest view."""
        if self._setup.coordinator:
            return self._setup.coordinator
        known = self._setup.run_dir.coordinator()
        return None if known is None or known.fencing < self._agent.orders.view.fencing else known.address

    def _greet(self) -> Sequence[pb.GroupReport]:
        setup, view = self._setup, self._agent.orders.view
        self._ran_out = (0, 0, False)
        hello = Hello(
            group=setup.group,
            incarnation=setup.incarnation,
            fingerprint=setup.spec.fingerprint,
            last_applied=self._reported.reached,
            held=self._ballots.held,
            fencing=view.fencing,
            committed=view.committed if view.epoch else None,
            process_nonce=self._process_nonce,
        )
        arrival = pb.Arrival(
            ranks=setup.group_size,
            spec_json=spec_to_json(setup.spec),
            job_json=job_to_json(setup.job),
            addresses=self._addresses,
            serving_at=self._serving_at,
        )
        protobuf_codec.fill(arrival.hello, hello)
        greeting = [pb.GroupReport(arrival=arrival)]
        greeting += [
            pb.GroupReport(rank_closed=pb.RankClosed(position=p, closed=True))
            for p in range(setup.group_size)
            if not self._alone and p not in self._ranks
        ]
        done = [s for s in sorted(self._reports) if s <= self._reported.reached]
        greeting += [self._step_report(step) for step in done[-REPORTS_KEPT:]]
        if self._applied.reached >= (0, 0):
            greeting.append(self._applied_message())
        again = (*self._learning.again(), *self._state.again(view))
        return [*greeting, *map(GROUP_REPORTS.message, again), *self._asked]

    async def _take(self, order: pb.Order) -> None:
        """Take one order of the coordinator and pass it on; a rank that connects later receives it too."""
        kind = order.WhichOneof("kind")
        change = self._agent.take(order)
        if change is Change.END:
            self._pass_end(order)
        else:
            known, view = change is Change.NONE, self._agent.orders.view
            for word in self._shards.reported(view, time.monotonic()) if kind == "view" and not known else ():
                self._stream.send(GROUP_REPORTS.message(word))
            words = TicketStream() if known else self._issuer.reported(view, shut=self._shards.shut(view))
            self._issue(words, None if kind == "asked" else order)
            if not known and self._issuer.answer is not None:
                self._stream.send(GROUP_REPORTS.message(self._issuer.answer))
            self._report_if_it_runs_out()
        if kind == "welcome":
            self._welcome = order
        elif kind == "neighbour":
            self._neighbour = order
        elif kind == "donors":
            self._donors = order
        elif kind in ("view", "commit"):
            for have in self._state.again(self._agent.orders.view) if kind == "view" else ():
                self._stream.send(GROUP_REPORTS.message(have))
            ready = self._learning.reported(self._agent.orders.view)
            if ready is not None:
                self._stream.send(GROUP_REPORTS.message(ready))
            self._adopt_view(change)
        elif kind == "save_accepted":
            self._asked = [m for m in self._asked if m.saved.directory != order.save_accepted.directory]

    def _report_if_it_runs_out(self) -> None:
        """Tell the coordinator, once in an epoch, that half of its tickets are begun, and that all are issued."""
        at = self._issuer.runs_out
        if self._setup.job.tickets_ahead and at is not None and at > self._ran_out:
            self._ran_out = at
            self._stream.send(pb.GroupReport(runs_out=pb.RunsOut(step=at[0], epoch=at[1])))

    def _adopt_view(self, change: Change) -> None:
        view = self._agent.orders.view
        if change is Change.EPOCH:
            self._ballots.forget_older(view.epoch, view.committed)
            if self._alone:
                self._saw(0, view.epoch)
        ballot = self._ballots.last
        if change is Change.SAME and ballot is not None and ballot[0].result.at == (view.step, view.epoch):
            self._stream.send(self._ballot(*ballot))

    async def _send_beats(self) -> None:
        """Send heartbeats, each of the whole group; an only rank's is of now."""
        await self._arrived.wait()
        while True:
            await self._pulse.due()
            now_s = time.monotonic()
            if self._alone:
                self._ledger.receive(0, self._agent.beat(), now_s)
            for word in self._shards.late(now_s):
                self._answer_for(word)
            if self._shards.is_opening:
                self._ledger.excuse(now_s)  # it waits for data, which has a limit of its own
            beat = self._ledger.heartbeat(now_s)
            if self._setup.job.tickets_ahead:
                if not self._issuer.is_ahead:
                    self._meter.rest(now_s)
                beat = replace(beat, pace=self._meter.pace(now_s))
            heartbeat = protobuf_codec.fill(pb.Heartbeat(), beat)
            self._stream.send(pb.GroupReport(heartbeat=heartbeat))

    def _miss_ranks(self) -> None:
        """Refuse those that have come."""
        setup, here = self._setup, len(self._ranks)
        within = f"came within {setup.job.timeouts.startup_timeout_s:g} s"
        self._agent.fail(
            ConfigError(f"{here} of {setup.group_size} ranks of group {setup.group} {within}; see their logs")
        )
        self._pass_end(self._present())

    def _lost_coordinator(self) -> None:
        setup = self._setup
        if self._stream.refused:
            self._agent.fail(ConfigError(self._stream.refused))
        elif self._welcome is None:
            where = self._find() or f"{setup.run_dir.path} (no coordinator.json)"
            detail = f": {self._stream.error}" if self._stream.error else ""
            self._agent.fail(
                ConfigError(f"no coordinator is reachable at {where}{detail}; start spare-coordinator first")
            )
        else:
            self._agent.end(stop=("failed", f"no coordinator came back: {self._stream.error}"))
        self._pass_end(self._present())

    def _present(self) -> pb.Order:
        """The newest orders as one order, for a rank that may have missed some."""
        orders = self._agent.orders
        if orders.stop is not None:
            return pb.Order(stop=pb.Stop(outcome=orders.stop[0], reason=orders.stop[1]))
        if orders.fenced is not None:
            return pb.Order(refused=pb.Refused(reason=orders.fenced))
        order = pb.Order()
        protobuf_codec.fill(order.view, orders.view)
        return order


def _of_rows(order: pb.Order, rows: Sequence[int]) -> pb.Order:
    """An order as a rank with these rows gets it: of addresses only those that it must know."""
    kind = order.WhichOneof("kind")
    if kind == "neighbour":
        reported = order.neighbour
        at = [reported.addresses[row] for row in rows]
        return pb.Order(neighbour=pb.Neighbour(group=reported.group, incarnation=reported.incarnation, addresses=at))
    if kind == "donors":
        serving_at = [pb.Addresses(values=[one.values[row] for row in rows]) for one in order.donors.serving_at]
        return pb.Order(donors=pb.Donors(number=order.donors.number, serving_at=serving_at))
    return order


def _is_remote(coordinator: str) -> bool:
    """True where the job spans hosts: its coordinator is not on the loopback device."""
    host = coordinator.rpartition(":")[0]
    return bool(host) and host not in ("127.0.0.1", "localhost", "[::1]")

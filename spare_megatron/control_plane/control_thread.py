"""The control thread of one rank: an asyncio loop that passes orders to the training thread and its reports on.

It asks the kernel to be scheduled soon, although training threads compute on the same cores; the leader's process,
which it starts, does the same.

A :class:`Follower` talks to the group's :class:`~spare_megatron.control_plane.leader.Leader`, which has a process of
its own (:mod:`spare_megatron.control_plane.leader_process`); a group of one rank runs it here instead. Both hand orders
to the :class:`Agent`, which keeps the rank's snapshot.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.job import JobDescription
from spare_megatron.control_plane import control_pb2 as pb
from spare_megatron.control_plane import protobuf_codec, reports
from spare_megatron.control_plane.channel import LEADER, Security, security_of
from spare_megatron.control_plane.heartbeat_timer import Pulse
from spare_megatron.control_plane.launcher_watch import LauncherWatch
from spare_megatron.control_plane.reconnecting_stream import ReconnectingStream
from spare_megatron.control_plane.report_messages import RANK_REPORTS
from spare_megatron.control_plane.ticket_entries import stream_of
from spare_megatron.protocol.member import (
    Change,
    Orders,
    first_orders,
    take_ask,
    take_commit,
    take_end,
    take_tickets,
    take_view,
)
from spare_megatron.protocol.messages import JobSpec
from spare_megatron.protocol.view import Offer, ReliefAsk, View
from spare_megatron.runtime.descriptors import watch_descriptors
from spare_megatron.runtime.run_directory import RunDirectory
from spare_megatron.runtime.wakeups import ask_for_short_waits


@dataclass(frozen=True)
class RankSetup:
    """What the control thread of a rank must know."""

    group: int
    incarnation: int
    position: int
    group_size: int
    run_dir: RunDirectory
    spec: JobSpec
    job: JobDescription
    last_applied: int
    coordinator: str = ""
    """host:port where the user gave one; else it is read from the run directory."""
    address: str = ""
    """host:port at which this rank listens for its replica ring; of several rows one for each, with commas."""
    serving_at: str = ""
    """host:port at which this rank serves state to learners; likewise."""
    tls_dir: str = ""
    launcher_pid: int = 0
    """The process that must stay this rank's parent; 0: none."""
    kept: bool = False
    """Whoever started this rank also starts a coordinator again that ends."""
    rows: tuple[tuple[int, ...], ...] = ()
    """Of each rank of the group its rows; empty where each has the row of its position."""

    @property
    def rows_of_ranks(self) -> tuple[tuple[int, ...], ...]:
        """Of each rank of the group its rows."""
        return self.rows or tuple((position,) for position in range(self.group_size))

    @property
    def security(self) -> Security:
        """Token and certificates for this rank's calls."""
        return security_of(self.run_dir, self.tls_dir)


class SessionSide(Protocol):
    """The methods of a session that the control thread calls."""

    def publish(self, orders: Orders, newer_epoch: bool) -> None:
        """Show new orders to the training thread."""

    def answer_save(self, step: int, directory: str) -> None:
        """Tell the training thread that a checkpoint was accepted."""

    @property
    def progress_now(self) -> reports.Progress:
        """How far the training thread is, for the heartbeat."""

    @property
    def tickets_read(self) -> int:
        """The number of the first entry of the ticket stream that the training thread has not read."""


class Agent:
    """Keeps one rank's orders: applies each order by the member's rules and publishes what changed."""

    def __init__(self, setup: RankSetup, session: SessionSide, opened: asyncio.Future[None]) -> None:
        self.setup, self._session, self._opened = setup, session, opened
        self.orders = first_orders(setup.group, setup.incarnation)
        self._neighbour: tuple[tuple[int, int], str] | None = None
        """The neighbour that was announced last, and the address of its rank at this position."""
        self._donors: tuple[int, tuple[str, ...]] = (0, ())
        """The offer whose donors were announced last, and the addresses of their ranks at this position."""

    def take(self, order: pb.Order) -> Change:
        """Apply one order of the coordinator and show the result to the training thread."""
        change = self._learn(order)
        self._show(change)
        return change

    def _learn(self, order: pb.Order) -> Change:
        """Apply one order to :attr:`orders`, not yet seen by the training thread."""
        kind = order.WhichOneof("kind")
        if kind == "welcome":
            self._settle(None)
        elif kind == "refused":
            self._settle(ConfigError(order.refused.reason))
            return self._end(fenced=order.refused.reason)
        elif kind == "neighbour":
            reported = order.neighbour
            self._neighbour = (reported.group, reported.incarnation), ",".join(reported.addresses)
        elif kind == "donors":
            self._donors = order.donors.number, tuple(",".join(one.values) for one in order.donors.serving_at)
        elif kind == "tickets":
            return self._adopt(*take_tickets(self.orders, stream_of(order.tickets), self._session.tickets_read))
        elif kind == "view":
            return self._take_view(protobuf_codec.read(order.view, View))
        elif kind == "commit":
            commit = order.commit
            audits = tuple(commit.audits)
            serves = tuple(protobuf_codec.read(offer, Offer) for offer in commit.serves)
            after = take_commit(
                self.orders, commit.step, commit.epoch, commit.leave, audits=audits, save=commit.save, serves=serves
            )
            return self._adopt(*after)
        elif kind == "asked":
            return self._adopt(
                *take_ask(self.orders, order.asked.step, protobuf_codec.read(order.asked.ask, ReliefAsk))
            )
        elif kind == "fenced" and order.fenced.fencing >= self.orders.view.fencing:
            return self._end(fenced=order.fenced.reason)
        elif kind == "stop":
            return self._end(stop=(order.stop.outcome, order.stop.reason))
        elif kind == "save_accepted":
            self._session.answer_save(order.save_accepted.step, order.save_accepted.directory)
        return Change.NONE

    def _take_view(self, view: View) -> Change:
        wanted, known, right_at = view.neighbour, self._neighbour, ""
        donors_at: tuple[str, ...] = ()
        # A view that is older than the addresses that were announced is not taken: a newer one follows.
        if wanted is not None:
            if known is None or known[0] != wanted:
                return Change.NONE
            right_at = known[1]
        if view.offer is not None:
            if self._donors[0] != view.offer.number:
                return Change.NONE
            donors_at = self._donors[1]
        return self._adopt(*take_view(self.orders, view, right_at, donors_at))

    def _show(self, change: Change) -> None:
        """Publish :attr:`orders` to the training thread if they changed."""
        if change is not Change.NONE:
            self._session.publish(self.orders, change is Change.EPOCH)

    def end(self, *, stop: tuple[str, str] | None = None, fenced: str | None = None) -> None:
        """Tell the training thread that the job is over for this rank, and why."""
        self._show(self._end(stop=stop, fenced=fenced))

    def fail(self, error: ConfigError) -> None:
        """End the session with ``error``: it cannot be opened, or cannot go on."""
        self._settle(error)
        self.end(fenced=str(error))

    @property
    def progress(self) -> reports.Progress:
        """How far the training thread is."""
        return self._session.progress_now

    def beat(self) -> pb.Beat:
        """:attr:`progress` as a message."""
        now = self.progress
        return pb.Beat(
            position=self.setup.position,
            step=now.step,
            phase=now.phase,
            counter=now.counter,
            in_phase=now.in_phase,
            pieces_done=now.pieces_done,
        )

    def _settle(self, error: ConfigError | None) -> None:
        if not self._opened.done():
            if error is None:
                self._opened.set_result(None)
            else:
                self._opened.set_exception(error)

    def _end(self, *, stop: tuple[str, str] | None = None, fenced: str | None = None) -> Change:
        self._settle(None)
        return self._adopt(*take_end(self.orders, stop=stop, fenced=fenced))

    def _adopt(self, orders: Orders, change: Change) -> Change:
        self.orders = orders
        return change


class Follower:
    """A rank of a group of several: one stream to its group's leader."""

    def __init__(self, agent: Agent, find: Callable[[], str | None] | None = None) -> None:
        """``find`` returns the leader's address, None where it is not known yet; else it is read from the run
        directory."""
        self._agent, self._setup = agent, agent.setup
        self._process_nonce = secrets.token_hex(8)
        self._closing = asyncio.Event()
        self._kept: dict[tuple[type, int], pb.RankReport] = {}
        self._last_applied = agent.setup.last_applied
        job = agent.setup.job
        self._pulse = Pulse(job.timeouts.heartbeat_interval_s, eager=job.tickets_ahead > 0)
        self._stream = ReconnectingStream(
            service=LEADER,
            report=pb.RankReport,
            security=agent.setup.security,
            find=find or partial(self._setup.run_dir.leader, self._setup.group, self._setup.incarnation),
            greet=self._greet,
            take=self._take,
            done=lambda: self._agent.orders.over,
            patience_s=self._setup.job.timeouts.heartbeat_timeout_s,
        )

    async def run(self) -> None:
        """Serve this rank until the session closes."""
        times = self._setup.job.timeouts
        beats = asyncio.create_task(self._beats())
        try:
            await self._stream.run(first_s=times.startup_timeout_s, again_s=2 * times.grace_s)
        finally:
            beats.cancel()
        if not self._agent.orders.over and not self._closing.is_set():
            group = self._setup.group
            why = self._stream.refused or self._stream.error or "it never said where it listens"
            self._agent.fail(ConfigError(f"the leader of group {group} is gone: {why}"))
        await self._closing.wait()  # the guard watches over a training thread that does not leave

    def post(self, report: reports.RankReport) -> None:
        """Send a report of the training thread to the leader."""
        message = RANK_REPORTS.message(report)
        if isinstance(report, reports.StepReport | reports.RankCaughtUp):
            self._last_applied = report.step
        # The newest report of each kind and row, and that on each offer that is not served any more and on each
        # adopted and each state shard, is sent again after a reconnect, for the leader may have missed it.
        of = report.number if isinstance(report, reports.RankWithdrawn) else 0
        of = report.shard if isinstance(report, reports.RankOpened | reports.RankHave) else of
        of = report.row if isinstance(report, reports.Reduced | reports.RankCaughtUp) else of
        self._kept[type(report), of] = message
        self._stream.send(message)

    def close(self) -> None:
        """End the stream; :meth:`run` then returns."""
        self._closing.set()
        self._stream.close()

    async def _take(self, order: pb.Order) -> None:
        if self._agent.take(order) is Change.EPOCH:
            self._stream.send(pb.RankReport(seen=pb.Seen(epoch=self._agent.orders.view.epoch)))
        for words in order.then:
            self._agent.take(words)

    def _greet(self) -> list[pb.RankReport]:
        setup = self._setup
        arrival = pb.RankArrival(
            group=setup.group,
            incarnation=setup.incarnation,
            position=setup.position,
            fingerprint=setup.spec.fingerprint,
            last_applied=self._last_applied,
            address=setup.address,
            serving_at=setup.serving_at,
            process_nonce=self._process_nonce,
            tickets=self._agent.orders.stream.end,
        )
        seen = pb.RankReport(seen=pb.Seen(epoch=self._agent.orders.view.epoch))
        return [pb.RankReport(arrival=arrival), seen, *self._kept.values()]

    def wants(self, complete: bool) -> bool:
        """Whether :meth:`nudge` would change anything."""
        return self._pulse.wants(complete)

    def nudge(self) -> None:
        """Bring the next heartbeat forward: the training thread has done a piece."""
        self._pulse.news(self._agent.progress.complete)

    async def _beats(self) -> None:
        while True:
            await self._pulse.due()
            self._stream.send(pb.RankReport(beat=self._agent.beat()))


class ControlSide(Protocol):
    """The part of a follower or a leader that its :class:`ControlThread` calls, in that thread."""

    async def run(self) -> None:
        """Serve this rank; returns after :meth:`close`."""

    def post(self, report: reports.RankReport) -> None:
        """Take a report of this rank's own training thread."""

    def wants(self, complete: bool) -> bool:
        """In the training thread: whether it must tell that it has done a piece (``complete``: the last of its run);
        not where that would bring no heartbeat forward."""

    def nudge(self) -> None:
        """Note that this rank's training thread has done a piece."""

    def close(self) -> None:
        """End :meth:`run`."""


STOP_S = 5.0
"""How long the control side may take to end before it is left to itself."""


class ControlThread:
    """Owns the control thread and its loop, and carries the training thread's calls into them."""

    def __init__(self, setup: RankSetup, session: SessionSide, make: Callable[[Agent], ControlSide]) -> None:
        self._setup, self._session, self._make = setup, session, make
        self._thread = threading.Thread(target=self._run, name="spare-control", daemon=True)
        self._started = threading.Event()
        self._opened = threading.Event()
        self._error: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._side: ControlSide | None = None
        self._failed: asyncio.Future[None] | None = None
        """Raises what a call of the side has raised."""
        self._over = False

    def start(self) -> None:
        """Start, and wait until the session is open or has failed to open."""
        self._thread.start()
        self._opened.wait()
        if self._error is not None:
            self._thread.join()
            raise self._error

    def post(self, report: reports.RankReport) -> None:
        """Pass on a report of the training thread; it is dropped when the control thread has ended."""
        if self._side is not None:
            self._call(self._side.post, report)

    def nudge(self, complete: bool) -> None:
        """Pass on that the training thread has done a piece, where that is news; dropped when the control thread has
        ended."""
        if self._side is not None and self._side.wants(complete):
            self._call(self._side.nudge)

    def stop(self) -> None:
        """Close the stream and end the thread; if that takes longer than STOP_S, it is left behind as a daemon."""
        self._over = True
        if self._side is not None:
            self._call(self._side.close)
        self._thread.join(STOP_S)

    def _call(self, method: Callable[..., None], *args: reports.RankReport) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
                self._loop.call_soon_threadsafe(self._carry_out, method, *args)

    def _carry_out(self, method: Callable[..., None], *args: reports.RankReport) -> None:
        """Call ``method``. A report that cannot be sent ends this rank: everybody would wait for it."""
        try:
            method(*args)
        except Exception as error:
            if self._failed is not None and not self._failed.done():
                self._failed.set_exception(error)

    def _run(self) -> None:
        ask_for_short_waits()
        try:
            asyncio.run(self._main())
        except BaseException as error:
            self._error = error
        finally:
            self._opened.set()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        opened: asyncio.Future[None] = self._loop.create_future()
        agent = Agent(self._setup, self._session, opened)
        failed = self._failed = self._loop.create_future()
        self._side = self._make(agent)
        guard = asyncio.create_task(self._guard(agent))
        who = f"rank {self._setup.position} of group {self._setup.group}"
        watch = asyncio.create_task(watch_descriptors(who, self._setup.run_dir.notice))
        serving = asyncio.create_task(self._side.run())
        try:
            await asyncio.wait({opened, serving}, return_when=asyncio.FIRST_COMPLETED)
            if not opened.done():
                await serving  # raises what ended it
            opened.result()
            self._opened.set()
            await asyncio.wait({serving, failed}, return_when=asyncio.FIRST_COMPLETED)
            await (failed if failed.done() else serving)
        except ConfigError:
            guard.cancel()  # the training thread waits for this one
            self._side.close()
            serving.cancel()
            await asyncio.wait({serving}, timeout=STOP_S)  # a leader tells the other ranks why
            raise
        except Exception as error:
            agent.end(fenced=f"the control thread failed: {error!r}")
            raise
        finally:
            guard.cancel()
            watch.cancel()

    async def _guard(self, agent: Agent) -> None:
        """End this process when its launcher is gone, or when the job is over for it and its training thread hangs."""
        times = agent.setup.job.timeouts
        launcher = LauncherWatch(self._setup.launcher_pid)
        over_at: float | None = None
        while True:
            await asyncio.sleep(times.heartbeat_interval_s)
            if launcher.is_gone():
                leave_at_once("the launcher is gone")
            if agent.orders.over and not self._over:
                over_at = over_at or time.monotonic()
                patience_s = times.grace_s if agent.orders.fenced else times.heartbeat_timeout_s
                finished = agent.orders.stop is not None and agent.orders.stop[0] in ("finished", "left")
                if not finished and time.monotonic() - over_at > max(1.0, 2 * patience_s):
                    leave_at_once(f"the training thread does not leave: {agent.orders.fenced or agent.orders.stop}")


def leave_at_once(why: str) -> None:
    """End the process whatever its training thread does."""
    sys.stderr.write(f"spare: {why}; this process leaves\n")
    sys.stderr.flush()
    os._exit(1)

"""The coordinator: a gRPC server that feeds the protocol machine, journals its decisions and sends its actions.

It has one event loop and handles one event at a time: the machine decides, the record is written to the journal, then
the actions are sent. While the journal cannot be written, events wait in a backlog and nothing is decided. Messages
become events; silence and closed connections are found by the detector. After a restart on the same run directory it
replays the journal, waits for the live groups for up to the heartbeat time-out, and goes on; training processes only
reconnect.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc.aio

from spare_megatron.checkpoint.folder import mark_accepted
from spare_megatron.collectives.interface import advertised
from spare_megatron.config.errors import ConfigError
from spare_megatron.config.exits import SIGNAL_REASON, ExitCode, status_words
from spare_megatron.config.job import PROGRESS, JobDescription, difference
from spare_megatron.control_plane import control_pb2 as pb
from spare_megatron.control_plane import protobuf_codec
from spare_megatron.control_plane.channel import COORDINATOR, UnaryHandler, security_of, serve
from spare_megatron.control_plane.report_messages import GROUP_REPORTS, GroupReport
from spare_megatron.control_plane.reports import Heartbeat, StepReport
from spare_megatron.coordinator.action_dispatcher import ActionDispatcher
from spare_megatron.coordinator.backlog import Backlog
from spare_megatron.coordinator.call_answers import DrainRequests, RestartAnswers
from spare_megatron.coordinator.deadlines import Deadlines, exit_code_of
from spare_megatron.coordinator.election import LeadershipLease
from spare_megatron.coordinator.failure_detector import Detector, Finding
from spare_megatron.coordinator.job_events import JobEvents
from spare_megatron.coordinator.job_tuning import JobTuning, publish_choice
from spare_megatron.coordinator.journal import Journal, Record, resume
from spare_megatron.coordinator.paces import Paces, steady_s
from spare_megatron.coordinator.records import Records, announce
from spare_megatron.coordinator.ring_addresses import RingAddresses
from spare_megatron.coordinator.status_figures import speeds, watched_figures
from spare_megatron.coordinator.streams import Stream, Streams
from spare_megatron.coordinator.suspicion import Suspicion
from spare_megatron.protocol import messages as m
from spare_megatron.protocol.assign_native import compiled_chains
from spare_megatron.protocol.codec import decode, encode, job_from_json, spec_from_json
from spare_megatron.protocol.lasting_paces import LastingPaces
from spare_megatron.protocol.machine import State, step
from spare_megatron.runtime.directory_watch import DirectoryWatch
from spare_megatron.runtime.gc_scheduler import collect_in_pauses
from spare_megatron.runtime.run_directory import CoordinatorAddress, RunDirectory, read_json, write_json
from spare_megatron.runtime.save_lock import only_job
from spare_megatron.runtime.steady_clock import SteadyClock
from spare_megatron.runtime.stop_signals import stop_signals

STATUS_INTERVAL_S = 0.5
PUBLISHED_INTERVAL_S = 1.0
"""Time between two checks that coordinator.json still names this coordinator."""
CHANGES_SHOWN = 6
"""Of what a job attempt has otherwise than the one before, so many names are given."""
DISK_PATIENCE = 0.75
"""How long this coordinator waits for a disk before another process should go on, as a share of the time for which
groups go on without a coordinator."""


@dataclass(frozen=True)
class Options:
    """The options of the command line."""

    listen: str
    run_dir: RunDirectory
    job_attempt: int = 0
    """Number of the job attempt; one that is higher than the journal's begins with the first Hello. 0: go on with the
    journal's job attempt, or begin the next one where that has ended."""
    tls_dir: str = ""
    on_event: str = ""
    """The operator's command, run for each event (coordinator.job_events); empty: none."""
    lease: LeadershipLease | None = None
    """The lease that this coordinator holds, where several candidates share the run directory; else None."""


class Coordinator:
    """One coordinator process. Its creator holds the run directory's lock, or the lease."""

    def __init__(self, options: Options) -> None:
        self._options, self._dir = options, options.run_dir
        compiled_chains()  # what is loaded later may find no file descriptor
        self._security = security_of(self._dir, options.tls_dir, create=True)
        self._streams, self._addresses = Streams(), RingAddresses()
        self._clock = SteadyClock(self._dir)
        self._records = Records(self._dir, self._clock)
        self._tuning = JobTuning(self._clock())
        self._events = JobEvents(options.on_event, self._dir.path, announce)
        self._accepted = ""
        self._paces, self._lasting = Paces(), LastingPaces()
        self._restarts = RestartAnswers(lambda: self._state, lambda: self._nothing_is_decided)
        found = resume(self._dir.journal, self._replayed, self._recall)
        for note in found.notes:
            announce(f"{note}; more of the journal is replayed")
        self._clock.not_before(self._tuning.recorded_s)
        self._state = found.state
        lease, published = options.lease, self._dir.coordinator_for_sure()
        confirm = lease.confirm if lease else _nobody_else
        self._journal = Journal(self._dir.journal, found, self._clock, confirm, announce)
        self._backlog = Backlog(announce, self._fail, lambda: self._suspicion.flush(), self._disk_patience_s)
        known = max(self._state.fencing, published.fencing if published else 0, self._dir.accepted_by())
        self._fencing = lease.number if lease else 1 + known
        over = self._state.phase in ("closed", "stopped")
        self._job_attempt = options.job_attempt or self._state.job_attempt + over
        self._unopened = self._job_attempt > self._state.job_attempt
        self._fingerprint = "" if self._unopened else self._state.job.fingerprint
        self._job = JobDescription()
        self._detector = Detector(self._job.timeouts, time.monotonic())
        self._dispatcher = ActionDispatcher(self._streams, self._fencing, lambda: self._state, self._addresses)
        self._suspicion = Suspicion(
            self._detector, lambda: self._state, self._apply, self._backlog.do, lambda: self._nothing_is_decided
        )
        self._drains = DrainRequests(
            lambda: self._state, lambda: self._nothing_is_decided, self._apply, self._addresses
        )
        self._deadlines = Deadlines(lambda: self._state, self._apply, self._clock)
        self._over = asyncio.Event()
        self._exit_code = ExitCode.FAILED
        self._error: Exception | None = None
        self._resumed = False
        self._held = contextlib.ExitStack()
        """Locks, until the end."""
        # All of the job attempt before may have died between the record and the files.
        if self._accepted and self._unopened:
            self._publish_accepted()

    def _replayed(self, record: Record, before: State, decision: m.Decision, after: State) -> None:
        for action in decision.actions:
            if isinstance(action, m.AcceptSave) and _is_newest(action, after):
                self._accepted = action.directory
        self._restarts.observe(decision.actions)
        self._records.observe(record, before, decision, after, 0.0, False)
        self._tuning.observe(record.time_unix_s, before, record.event, after)

    def _memo(self) -> dict[str, Any]:
        """What a restart from a snapshot must know beside the state."""
        known = {"accepted": self._accepted, "wrong": self._restarts.memo()}
        return {**known, "records": self._records.memo(), "tuning": self._tuning.memo()}

    def _recall(self, memo: Mapping[str, Any]) -> None:
        self._accepted = memo["accepted"]
        self._restarts.recall(memo)
        self._records.recall(memo["records"])
        self._tuning.recall(memo["tuning"])

    # -------------------------------------------------------------------------------------------------- job attempt

    async def run(self) -> ExitCode:
        """Serve until the job is over; the exit code says how it ended."""
        served = False
        try:
            await self._serve()
            served = True
        finally:
            self._events.close(in_order=served)
            self._journal.close()
            self._held.close()
        return self._exit_code

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        unary: dict[str, tuple[Any, UnaryHandler]] = {
            "ReportExit": (pb.Exited, self._report_exit),
            "RequestStop": (pb.StopRequest, self._request_stop),
            "Drain": (pb.DrainRequest, self._drains.answer),
            "AskRestart": (pb.LostGroup, self._restarts.handler(self._suspicion)),
        }
        server, port = await serve(self._options.listen, COORDINATOR, self._security, self._join, pb.GroupReport, unary)
        for number in stop_signals():
            loop.add_signal_handler(number, self._signal, signal.Signals(number).name)
        tasks: list[asyncio.Task[None]] = []
        try:
            if not self._unopened:
                self._resume()
            host = advertised(self._options.listen)
            tasks = self._start_tasks(self._address(f"{host}:{port}"))
            await self._until_over(tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await server.stop(grace=0.2)

    def _start_tasks(self, address: CoordinatorAddress) -> list[asyncio.Task[None]]:
        lease, work = self._options.lease, [self._watch(), self._write_status(), collect_in_pauses()]
        publish = partial(self._dir.publish_coordinator if lease is None else lease.publish, address)
        self._backlog.do(publish)
        ended = self._dir.ended  # an earlier launcher's: the job goes on, perhaps without one
        self._records.side.write(ended.name, partial(ended.unlink, missing_ok=True))
        work.append(self._keep_published(publish) if lease is None else lease.until_lost())
        return [asyncio.create_task(one) for one in work]

    async def _until_over(self, tasks: list[asyncio.Task[None]]) -> None:
        """Wait until the machine has stopped and the groups have left; raises the error of a failed task."""
        over = asyncio.create_task(self._over.wait())
        done, _ = await asyncio.wait([over, *tasks], return_when=asyncio.FIRST_COMPLETED)
        over.cancel()
        for task in done - {over}:
            task.result()
        if self._error is not None:
            raise self._error
        if self._state.stopped:
            if self._resumed:
                await asyncio.sleep(self._job.timeouts.grace_s)  # groups may come back to learn of the end
            await self._streams.wait_empty(self._job.timeouts.heartbeat_timeout_s)
            self._records.finish(self._state)

    def _resume(self) -> None:
        """Go on with the journal's job attempt: its groups must be received again within the heartbeat time-out."""

        def expect() -> None:
            now_s = time.monotonic()
            for group, incarnation in self._state.present.items():
                self._detector.expect(group, incarnation, now_s)
            self._deadlines.expect_all(self._job.timeouts.startup_timeout_s)
            if self._state.stopped:
                self._end()

        self._resumed = True
        self._backlog.do(self._read_job)
        self._apply(m.Opened(self._state.job, self._state.job_attempt, self._fencing))
        if self._accepted:  # the coordinator before may have died between the record and the file
            self._backlog.do(self._publish_accepted)
        self._backlog.do(expect)

    def _publish_accepted(self) -> None:
        """Carry out the decision that a checkpoint counts, as often as need be: its record is on the disk."""
        self._dir.publish_accepted(self._accepted, self._fencing)
        mark_accepted(Path(self._accepted))

    def _read_job(self) -> None:
        kept = read_json(self._dir.job)
        if kept is not None:
            self._adopt_job(decode(kept))
            if why := self._keep_saves(self._job):
                announce(f"WARNING: {why}")

    def _open(self, spec: m.JobSpec, job: JobDescription) -> None:
        """Begin a new job attempt, at its first Hello."""

        def begin() -> None:
            self._adopt_job(job)
            self._deadlines.expect_all(job.timeouts.startup_timeout_s)
            self._suspicion.flush()

        self._unopened, self._fingerprint, self._job = False, spec.fingerprint, job
        self._backlog.do(partial(self._tell_changes, job))
        self._backlog.do(partial(write_json, self._dir.job, encode(job), durable=True))
        self._apply(m.Opened(spec, self._job_attempt, self._fencing))
        self._backlog.do(begin)

    def _tell_changes(self, job: JobDescription) -> None:
        """Say what this job attempt has otherwise than the one before: its groups compare only each other."""
        kept = read_json(self._dir.job)
        if kept is None:
            return
        ours, before = (
            {name: value for name, value in one.identity.items() if name not in PROGRESS} for one in (job, decode(kept))
        )
        if differs := difference(ours, before, shown=CHANGES_SHOWN, whose="before"):
            announce(f"job attempt {self._job_attempt} is not the same job as the attempt before it: {differs}")

    def _adopt_job(self, job: JobDescription) -> None:
        self._job = job
        self._detector.adopt(job.timeouts)
        self._records.begin(job, self._state)
        self._deadlines.limit_duration(job.exit_duration_s, self._records.attempt_began_unix_s)
        self._tuning.begin(job.tuning)

    def _address(self, address: str) -> CoordinatorAddress:
        return CoordinatorAddress(
            address=address,
            fencing=self._fencing,
            job_attempt=self._job_attempt,
            highest_incarnation=max(self._state.highest.values(), default=-1),
            pid=os.getpid(),
            host=socket.gethostname(),
        )

    async def _keep_published(self, publish: Callable[[], None]) -> None:
        """Publish the address again where coordinator.json lost it. The run directory's lock keeps other coordinators
        out, but not a rename by an earlier one that its host carries out late."""
        while True:
            await asyncio.sleep(PUBLISHED_INTERVAL_S)
            if not self._backlog.waiting:
                with contextlib.suppress(OSError):  # the disk may fail for a while
                    publish()

    def _signal(self, name: str) -> None:
        if self._state.phase == "closed" or self._unopened:
            self._exit_code = ExitCode.REQUEUE
            self._over.set()
        elif not self._state.stopped:  # how it has ended is decided
            self._apply(m.StopRequested(f"{SIGNAL_REASON} {name}"))

    # ------------------------------------------------------------------------------------------------------- events

    def _apply(self, event: m.Event, detect_s: float = 0.0) -> None:
        """Handle one event, now or when the disk allows: decide, write the record, then act."""
        self._backlog.do(partial(self._decide, event, detect_s))

    def _decide(self, event: m.Event, detect_s: float = 0.0) -> None:
        """Decide one event. The state changes only once the record is in the journal; an OSError changes nothing."""
        before = self._state
        after, decision = step(before, event)
        record = self._journal.append(event, decision)
        self._state = after
        self._records.observe(record, before, decision, after, detect_s, live=True)
        acts = [partial(self._act, action) for action in decision.actions]
        self._backlog.do_next([*acts, partial(self._follow, record, before)])

    def _act(self, action: m.Action) -> None:
        if isinstance(action, m.AcceptSave) and _is_newest(action, self._state):
            self._accepted = action.directory
            self._publish_accepted()
        self._dispatcher.announce(action)
        if isinstance(action, m.SendFenced):
            self._restarts.observe((action,))
            if not self._is_there(action.group, action.incarnation):
                self._detector.lost(action.group, action.incarnation)

    def _follow(self, record: Record, before: State) -> None:
        """Do what an event leads to once its actions are sent, and decide the events that follow from its figures."""
        if self._state.stopped and not before.stopped:
            self._end()
        if isinstance(record.event, m.Tuned):
            publish_choice(record.event, self._state.job_attempt, self._dir, self._records.side)
        self._tuning.observe(record.time_unix_s, before, record.event, self._state)
        self._events.observe(record, before, self._state)
        self._journal.keep(self._state, self._memo)
        following = (self._tuning.next(self._state), self._measured(before))
        self._backlog.do_next([partial(self._decide, event) for event in following if event is not None])

    def _measured(self, before: State) -> m.Event | None:
        """What a commit shows of groups that are slow for long; None where nothing changes by it, and in a job whose
        slow groups are not relieved."""
        ahead = self._job.tickets_ahead
        if not ahead or self._state.committed == before.committed:
            return None
        book = self._records.book
        return self._lasting.committed(self._state, steady_s(book.piece_s, book.own, before.audits, ahead - 2))

    async def _written(self) -> None:
        """Return when all that waits for the disk now is in the journal; an answer before it could be forgotten."""
        done = asyncio.Event()
        self._backlog.do(done.set)
        await done.wait()

    def _fail(self, error: Exception) -> None:
        """Decide nothing any more after a bug, a lost lease, or a disk that does not come back."""
        self._error = error
        self._over.set()

    @property
    def _nothing_is_decided(self) -> bool:
        return self._unopened or self._backlog.waiting

    def _disk_patience_s(self) -> float:
        return DISK_PATIENCE * self._job.timeouts.coordinator_timeout_s

    def _end(self) -> None:
        self._exit_code = exit_code_of(self._state.outcome, self._state.outcome_reason)
        self._over.set()

    # ------------------------------------------------------------------------------------------------------- groups

    async def _join(self, reports: Any, context: grpc.aio.ServicerContext) -> None:
        """Serve one leader's stream, from its arrival to its end."""
        stream = await self._arrival(context)
        if stream is None:
            return
        listener = asyncio.create_task(self._listen(stream, context))
        try:
            await stream.write()
        finally:
            listener.cancel()
            if self._streams.remove(stream):
                self._detector.closed(stream.group, stream.incarnation, time.monotonic())

    async def _arrival(self, context: grpc.aio.ServicerContext) -> Stream | None:
        """The stream of a group that arrives; None where it has said nothing or may not come in, of which it was
        notified. What it said, with the addresses of all its ranks, is not kept for as long as the stream lasts."""
        first = await context.read()
        if first is grpc.aio.EOF or first.WhichOneof("kind") != "arrival":
            return None
        hello = protobuf_codec.read(first.arrival.hello, m.Hello)
        spec, job = spec_from_json(first.arrival.spec_json), job_from_json(first.arrival.job_json)
        addresses = first.arrival.addresses
        refusal = self._refusal(hello, job) or await self._addresses.refusal(hello, addresses, self._is_there)
        if refusal:
            await context.write(pb.Order(refused=pb.Refused(reason=refusal)))
            return None
        if self._is_taken(hello):
            reason = f"group {hello.group} incarnation {hello.incarnation} is there already, as another process"
            await context.write(pb.Order(fenced=pb.Fenced(fencing=self._fencing, reason=reason)))
            return None
        stream = Stream(hello.group, hello.incarnation, hello.process_nonce, context)
        self._streams.add(stream)
        stream.send(pb.Order(welcome=pb.Welcome(fencing=self._fencing)))
        if self._unopened:
            self._open(spec, job)
        known = partial(self._know, stream, first.arrival.ranks, tuple(addresses), tuple(first.arrival.serving_at))
        if self._is_there(hello.group, hello.incarnation):
            known()
            self._apply(hello)
        else:  # until the machine has let it in, an older incarnation of the group is watched and named
            self._apply(hello)
            self._backlog.do(known)
        for report in first.then:
            self._receive(stream, report)
        return stream

    def _know(self, stream: Stream, ranks: int, addresses: tuple[str, ...], serving_at: tuple[str, ...]) -> None:
        """Watch a group that the machine has let in, and name its addresses to others."""
        member, now_s = (stream.group, stream.incarnation), time.monotonic()
        if not self._is_there(*member):
            return
        self._detector.hello(*member, ranks, now_s)
        if self._streams.of(*member) is not stream:  # it has ended while this waited for the disk
            self._detector.closed(*member, now_s)
        self._addresses.learn(*member, addresses, serving_at)
        self._dispatcher.received(*member)

    def _refusal(self, hello: m.Hello, job: JobDescription) -> str:
        """How a group's job differs from that of the first group, which is a user's error, or why there can be no such
        job; empty otherwise."""
        if self._unopened:
            return self._keep_saves(job)
        if hello.fingerprint == self._fingerprint:
            return ""
        differs = difference(job.identity, self._job.identity) or "the fingerprints differ"
        return f"group {hello.group} runs another job than the others: {differs}; give every rank the same"

    def _keep_saves(self, job: JobDescription) -> str:
        """Keep other jobs out of the job's ``--save``, where no launcher does; why that cannot be, or empty."""
        there = f"WARNING: --save {job.saves_into} cannot be written on this host, so other jobs are not kept out of it"
        try:
            self._held.enter_context(only_job(job.saves_into, self._dir, lambda _: announce(there)))
        except ConfigError as error:
            return str(error)
        return ""

    def _is_taken(self, hello: m.Hello) -> bool:
        """Whether an incarnation belongs to another process (rule 16). The machine would fence this one too, but by
        then its stream would have taken the place of the other's."""
        stream = self._streams.of(hello.group, hello.incarnation)
        process_nonces = {stream.process_nonce} if stream else set()
        if self._is_there(hello.group, hello.incarnation):
            process_nonces.add(self._state.process_nonces[hello.group][1])
        return bool(process_nonces - {hello.process_nonce})

    def _is_there(self, group: int, incarnation: int) -> bool:
        return self._state.incarnation_of(group) == incarnation

    async def _listen(self, stream: Stream, context: grpc.aio.ServicerContext) -> None:
        while (report := await context.read()) is not grpc.aio.EOF:
            for one in (report, *report.then):
                self._receive(stream, one)
        stream.end()

    def _receive(self, stream: Stream, report: pb.GroupReport) -> None:
        kind, group, now_s = report.WhichOneof("kind"), stream.group, time.monotonic()
        if kind == "heartbeat":
            beat = protobuf_codec.read(report.heartbeat, Heartbeat)
            self._detector.heartbeat(group, stream.incarnation, beat, now_s)
            self._paces.receive(group, stream.incarnation, beat.pace, now_s)
        elif kind == "ballot":
            vote = protobuf_codec.read(report.ballot.vote, m.Vote)
            if vote.result.at == (self._state.step_in_flight, self._state.epoch):
                figures = [(figure.name, figure.value) for figure in report.ballot.figures]
                self._records.book.figures(*vote.result.at, group, figures)
                self._records.book.seen(group, self._clock() - report.ballot.since_seen_s)
                self._tuning.figures(*vote.result.at, figures)
            self._apply(vote if vote.result.ok else replace(vote, failing_s=self._suspicion.failing_s()))
        elif kind == "runs_out":
            at = report.runs_out.step, report.runs_out.epoch
            self._relieve(self._paces.runs_out(self._state, group, at, now_s))
        elif kind == "rank_closed":
            position = report.rank_closed.position
            if report.rank_closed.closed:
                self._detector.closed(group, stream.incarnation, now_s, position)
            else:
                self._detector.opened(group, stream.incarnation, position, now_s)
        else:
            self._receive_report(group, GROUP_REPORTS.report(report), now_s)

    def _receive_report(self, group: int, report: GroupReport | None, now_s: float) -> None:
        if isinstance(report, StepReport):
            self._records.report(report.step, report.report)
            self._tuning.report(report.report)
        elif report is not None:
            joins = group in self._state.joiners
            self._apply(report)
            if joins and group in self._state.holders:
                self._relieve(self._paces.holds(self._state, group, now_s))

    def _relieve(self, event: m.RunningOut | None) -> None:
        if event is not None and not self._nothing_is_decided:
            self._apply(event)

    # ------------------------------------------------------------------------------------------------------- losses

    async def _report_exit(self, request: pb.Exited, _: grpc.aio.ServicerContext) -> pb.Done:
        """The launcher saw a process end: its group is lost, unless it left in order at the end of the job."""
        group, incarnation = request.group, request.incarnation
        ended = self._state.phase == "ending" and group in self._state.applied_last
        orderly = request.status == 0 and (self._state.stopped or ended)
        if not orderly and self._detector.lost(group, incarnation):
            loss = m.Loss(group, incarnation, "exited", request.position, status_words(request.status))
            since_s = time.monotonic() - max(0.0, request.age_s)
            self._suspicion.lose(Finding(loss, since_s))
        return pb.Done(opened=not self._unopened)

    async def _request_stop(self, request: pb.StopRequest, _: grpc.aio.ServicerContext) -> pb.Done:
        if self._unopened or self._state.phase == "closed":
            self._signal(request.reason)
        else:
            self._apply(m.StopRequested(request.reason))
            await self._written()
        return pb.Done()

    async def _watch(self) -> None:
        """Ask the detector for losses at every tick."""
        while True:
            await asyncio.sleep(self._detector.tick_s)
            if not self._state.stopped and not self._unopened:
                self._suspicion.look()

    def _watched(self) -> dict[str, Any]:
        state, now_s = self._state, time.monotonic()
        left = self._paces.left(state, now_s)
        piece_s = {group: one_s for group, (_, one_s) in left.items()} or self._records.book.piece_s
        standings = self._detector.standings(state.present, now_s)
        return watched_figures(standings, speeds(piece_s, state.live), left, self._tuning.time_to_train())

    async def _write_status(self) -> None:
        directory = DirectoryWatch(self._dir.path)
        while True:
            gone = directory.gone()
            if gone:
                self._fail(ConfigError(gone))
                return
            if self._options.lease is not None:
                self._options.lease.confirm()
            self._records.write_status(self._state, self._watched)
            await asyncio.sleep(STATUS_INTERVAL_S)


def _is_newest(action: m.AcceptSave, after: State) -> bool:
    """False for a save of an older step that was written for so long that a newer one has been accepted; ``after`` is
    the state in which it counts."""
    return action.step >= after.saved_step


def _nobody_else() -> None:
    """Confirms nothing: without candidates, the run directory's lock keeps other coordinators out."""

"""Runs one rank with any engine: connects it, trains, and returns an exit code that says how it ended.

``pretrain`` calls :func:`train_rank` with Megatron's engine, the protocol tests with a small one. The control thread
receives the views, and moves the replica communicators to a new epoch before the training thread sees it.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from functools import partial

import torch

from spare_megatron.collectives.handshake import Identity, Member
from spare_megatron.collectives.interface import own_address
from spare_megatron.collectives.reduction import GradientReduction, PlainReduction
from spare_megatron.collectives.replica_communicators import Membership, ReplicaCommunicators
from spare_megatron.config.errors import ConfigError
from spare_megatron.config.exits import ExitCode
from spare_megatron.config.host_port import split_address
from spare_megatron.config.job import JobDescription
from spare_megatron.config.place import Place
from spare_megatron.control_plane.exit_report import exit_reported
from spare_megatron.control_plane.session import Session
from spare_megatron.protocol.member import Orders
from spare_megatron.protocol.messages import JobSpec
from spare_megatron.runtime.descriptors import OF_A_RANK, check_descriptors
from spare_megatron.runtime.run_directory import RunDirectory
from spare_megatron.transfer.socket_transport import SocketTransport
from spare_megatron.worker.catch_up import CatchUp
from spare_megatron.worker.donor import RowDonors
from spare_megatron.worker.engine import StepEngine, rows_of
from spare_megatron.worker.fault_injection import Injector
from spare_megatron.worker.group_rounds import gather_in_group
from spare_megatron.worker.loop import Learns, Saver, TrainingLoop
from spare_megatron.worker.rank_parts import RankParts, WrittenRankParts
from spare_megatron.worker.shard_gather import ShardGather
from spare_megatron.worker.shard_joining import ShardJoining
from spare_megatron.worker.shard_opening import Opens, ShardOpening
from spare_megatron.worker.signals import stop_on_signals
from spare_megatron.worker.step import StepRunner

log = logging.getLogger(__name__)
LOOK_S = 0.05


@dataclass(frozen=True)
class RankJob:
    """A job, one rank's place in it, and how that rank reduces over the groups."""

    place: Place
    spec: JobSpec
    job: JobDescription
    backend: str
    """The backend of the replica communicators: 'gloo', 'nccl' or 'gloo-staged'."""
    device: torch.device
    method: GradientReduction = field(default_factory=PlainReduction)
    """The number format in which gradients travel between groups."""
    overlap: bool = False
    """Whether the reduction over groups begins while the last backward passes run."""
    coordinator: str = ""
    """host:port; empty where it is read from the run directory."""
    interface: str = ""
    """The name or the network of the interface over which groups sum; empty: see :func:`own_address`."""
    transfer_rate_bytes_s: float = 0.0
    """The most that this rank gives a second to groups that come back; 0 for no limit."""
    warm: bool = False
    """Whether this process has run a warm-up microbatch already."""
    rank_times: bool = False
    """Whether this rank writes when it did the parts of each step."""
    shards: ShardGather | None = None
    """Gathers what this rank does not keep; None where every group keeps all state."""


def train_rank(
    job: RankJob, engine: StepEngine, saver: Saver | None, injector: Injector, opens: Opens = lambda shard, step: None
) -> ExitCode:
    """Train until the job is over for this rank; returns its exit code. The engine must hold the state after
    ``job.spec.first_step``; it can compute pieces of a shard that its group did not host once ``opens`` has returned
    for it.

    Raises:
        ConfigError: the coordinator cannot be reached or refuses this rank.
    """
    place = job.place
    assert place.run_dir is not None, "a rank has a run directory"
    directory = RunDirectory(place.run_dir)
    check_descriptors(OF_A_RANK * place.group_size, f"the leader of a group of {place.group_size} ranks")
    links = _links(job, directory)
    opening = ShardOpening(opens)

    session = Session.open(
        place,
        job.spec,
        job.job,
        last_applied=job.spec.first_step,
        coordinator=job.coordinator,
        address=",".join(one.address for one in links.replicas),
        serving_at=",".join(one.address for one in links.transports),
        on_view=(links.adopt, opening.look, *(() if job.shards is None else (job.shards.look,))),
    )
    if job.shards is not None:
        job.shards.start(session, links.replicas[0])
    opening.begin(session)
    gather = gather_in_group(place.group_size, job.device)
    parts = _parts(job, directory)
    donor = RowDonors(rows_of(engine), session, links.transports, parts)
    first, *more = links.transports
    gone_s = job.job.timeouts.heartbeat_timeout_s
    cold = not job.warm
    catch_up: Learns = (
        CatchUp(
            engine, session, first, gather, job.device, gone_s, inject=injector.fire, cold=cold, parts=parts, more=more
        )
        if job.shards is None
        else ShardJoining(engine, session, job.shards, gather, injector.fire, cold, parts=parts)
    )
    try:
        runner = StepRunner(
            engine,
            session,
            links.replicas[0],
            injector.fire,
            method=job.method,
            overlap=job.overlap,
            gather=gather,
            look=donor.look,
            parts=parts,
            shards=job.shards,
            more=links.replicas[1:],
        )
        engine.on_piece = runner.on_piece
        loop = TrainingLoop(engine, runner, session, saver, job.spec.first_step, donor, catch_up=catch_up, parts=parts)
        with exit_reported(directory, place), stop_on_signals(place, session):
            orders = loop.run()
    finally:
        if job.shards is not None:
            job.shards.close()
        links.close()
        donor.close()
        opening.close()
        session.close()
        parts.close()
    return _exit_code(orders)


@dataclass(frozen=True)
class _Links:
    """The ways from a rank to those of other groups that keep its rows, by row."""

    replicas: list[ReplicaCommunicators]
    transports: list[SocketTransport]

    def adopt(self, orders: Orders) -> None:
        """Sum with the members of a newer epoch from now on."""
        members = tuple(Member(*one) for one in orders.view.live)
        right_at = orders.right_at.split(",") if orders.right_at else [""] * len(self.replicas)
        for one, at in zip(self.replicas, right_at, strict=True):
            one.adopt(Membership(orders.view.epoch, members, at))

    def close(self) -> None:
        """End them all."""
        for replicas in self.replicas:
            replicas.close()
        for transport in self.transports:
            transport.close()


def _links(job: RankJob, directory: RunDirectory) -> _Links:
    place, member = job.place, Member(job.place.group, job.place.incarnation)
    rows = place.rows[place.position] if place.rows else (place.position,)
    token, host = directory.token(), own_address(job.interface, partial(_coordinator_host, job, directory))
    mes = [Identity(member, row, place.job_attempt, token) for row in rows]
    # Longer than the heartbeat time-out: the coordinator, not the learner, decides whether a silent donor is dead.
    silence_s, rate = 2 * job.job.timeouts.heartbeat_timeout_s, job.transfer_rate_bytes_s / len(rows)
    return _Links(
        [ReplicaCommunicators(me, job.backend, job.device, host=host) for me in mes],
        [SocketTransport(me, host, silence_s, rate) for me in mes],
    )


def _parts(job: RankJob, directory: RunDirectory) -> RankParts:
    place = job.place
    if not job.rank_times:
        return RankParts()
    return WrittenRankParts(directory.rank_times_of(place.group, place.position, place.incarnation))


def _coordinator_host(job: RankJob, directory: RunDirectory) -> str:
    """The host of the coordinator, which may be about to start. Raises ConfigError where none appears."""
    wait_s = 2 * job.job.timeouts.heartbeat_timeout_s
    until_s = time.monotonic() + wait_s
    while not (address := job.coordinator):
        known = directory.coordinator()
        if known is not None:
            address = known.address
            break
        if time.monotonic() > until_s:
            raise ConfigError(
                f"no coordinator is named in {directory.path} after {wait_s:g} s; start spare-coordinator first"
            )
        time.sleep(LOOK_S)
    return split_address(address)[0]


def _exit_code(orders: Orders) -> ExitCode:
    if orders.fenced is not None:
        log.warning("this group is fenced and leaves: %s", orders.fenced)
        return ExitCode.FENCED
    assert orders.stop is not None, "the loop ends only when the job is over"
    outcome, reason = orders.stop
    log.info("the job is over (%s): %s", outcome, reason)
    return {"finished": ExitCode.FINISHED, "left": ExitCode.FINISHED, "wipe-out": ExitCode.WIPE_OUT}.get(
        outcome, ExitCode.FAILED
    )

"""Runs one rank with any engine: connects it, trains, and returns an exit code that says how it ended.

``pretrain`` calls :func:`train_rank` with Megatron's engine, the protocol tests with a small one. The control thread
receives the views, and moves the replica communicators to a new epoch before the training thread sees it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import torch

from spare_megatron.collectives.reduction import GradientReduction, PlainReduction
from spare_megatron.collectives.replica_communicators import Membership, ReplicaCommunicators
from spare_megatron.config.exits import ExitCode
from spare_megatron.config.job import JobDescription
from spare_megatron.config.place import Place
from spare_megatron.control.session import Session
from spare_megatron.controller.member import Orders
from spare_megatron.controller.messages import JobSpec
from spare_megatron.trainer.engine import StepEngine
from spare_megatron.trainer.fault_injection import Injector
from spare_megatron.trainer.loop import Saver, TrainingLoop
from spare_megatron.trainer.signals import stop_on_signals
from spare_megatron.trainer.step import StepRunner

log = logging.getLogger(__name__)


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


def train_rank(job: RankJob, engine: StepEngine, saver: Saver | None, injector: Injector) -> ExitCode:
    """Train until the job is over for this rank; returns its exit code. The engine must hold the state after
    ``job.spec.first_step``.

    Raises:
        ConfigError: the coordinator cannot be reached or refuses this rank.
    """
    place = job.place
    replicas = ReplicaCommunicators(place.group, job.backend, job.device)

    def adopt(orders: Orders) -> None:
        replicas.adopt(_membership(orders, place.position))

    session = Session.open(
        place,
        job.spec,
        job.job,
        last_applied=job.spec.first_step,
        coordinator=job.coordinator,
        on_view=(adopt,),
    )
    try:
        runner = StepRunner(engine, session, replicas, injector.fire, method=job.method, overlap=job.overlap)
        engine.on_piece = runner.on_piece
        loop = TrainingLoop(engine, runner, session, saver, job.spec.first_step)
        with stop_on_signals(place, session.request_stop):
            orders = loop.run()
    finally:
        replicas.close()
        session.close()
    return _exit_code(orders)


def _membership(orders: Orders, position: int) -> Membership:
    host, _, port = orders.store.rpartition(":")
    return Membership(
        epoch=orders.view.epoch,
        groups=orders.view.live_groups,
        position=position,
        store_host=host,
        store_port=int(port),
        prefix=orders.store_prefix,
    )


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

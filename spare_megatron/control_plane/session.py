"""A rank's session with the control plane: what the training thread sees of the coordinator.

One control thread per rank runs an asyncio loop (:mod:`spare_megatron.control_plane.control_thread`); it alone does
I/O. The training thread reads immutable snapshots (:class:`~spare_megatron.protocol.member.Orders`) and leaves
messages. No method but :meth:`Session.open`, :meth:`Session.wait`, :meth:`Session.saved` and :meth:`Session.close` ever
blocks.

On a view of a newer epoch the ``on_view`` callbacks run in the control thread *before* the training thread can see
the new orders: that is where replica communicators of the old epoch are abandoned.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.job import JobDescription
from spare_megatron.config.place import Place
from spare_megatron.control_plane import reports
from spare_megatron.control_plane.control_thread import ControlThread, Follower, RankSetup
from spare_megatron.control_plane.leader import Leader
from spare_megatron.control_plane.leader_process import FirstFollower
from spare_megatron.protocol.member import Orders, first_orders
from spare_megatron.protocol.messages import JobSpec, ReductionResult
from spare_megatron.runtime import failpoints
from spare_megatron.runtime.run_directory import RunDirectory

OnView = Callable[[Orders], None]


class Session:
    """The session of one rank process. Its methods are for the training thread, unless they say "Control thread"."""

    def __init__(self, setup: RankSetup, on_view: Sequence[OnView] = ()) -> None:
        self.spec, self.rows = setup.spec, setup.rows_of_ranks[setup.position]
        self._changed = threading.Condition()
        self._orders = first_orders(setup.group, setup.incarnation)
        self._on_view = tuple(on_view)
        self._progress = reports.Progress()
        self._tickets_read = 0
        self.tickets_low = setup.job.tickets_ahead
        """How few known entries of the ticket stream are few (:meth:`begun`)."""
        self._tells_begun = setup.position == 0 and setup.job.late_pauses
        self._answers: dict[tuple[int, str], bool] = {}
        alone = Leader if setup.group_size == 1 else FirstFollower
        self._control = ControlThread(setup, self, alone if setup.position == 0 else Follower)

    @classmethod
    def open(
        cls,
        place: Place,
        spec: JobSpec,
        job: JobDescription,
        *,
        last_applied: int,
        coordinator: str = "",
        address: str = "",
        serving_at: str = "",
        on_view: Sequence[OnView] = (),
    ) -> Session:
        """Connect to the group's leader, which connects to the coordinator; position 0 starts it. Returns once the
        coordinator has answered.

        Args:
            last_applied: step whose state this rank holds (``spec.first_step`` for a member, anything below the last
                commit for a group that comes back).
            coordinator: host:port; empty: read from the run directory.
            address: host:port at which this rank listens for its replica ring; of several rows one for each, with
                commas.
            serving_at: host:port at which this rank serves state to learners; likewise.
            on_view: called in the control thread with the orders of each newer epoch, before they are visible.

        Raises:
            ConfigError: no coordinator is reachable, it refused the token, or the job differs from the others'.
        """
        if place.run_dir is None:
            raise ConfigError("the run directory is not known; give --spare-run-dir DIR or set SPARE_RUN_DIR")
        failpoints.act_as(f"rank-{place.group}-{place.position}")
        setup = RankSetup(
            group=place.group,
            incarnation=place.incarnation,
            position=place.position,
            group_size=place.group_size,
            rows=place.rows,
            run_dir=RunDirectory(place.run_dir),
            spec=spec,
            job=job,
            last_applied=last_applied,
            coordinator=coordinator,
            address=address,
            serving_at=serving_at,
            tls_dir=place.tls_dir,
            launcher_pid=place.launcher_pid,
            kept=place.starts_again,
        )
        session = cls(setup, on_view)
        session._control.start()
        return session

    @property
    def orders(self) -> Orders:
        """The newest snapshot of this rank's orders."""
        return self._orders

    def wait(self, version: int, timeout_s: float | None = None) -> Orders:
        """Wait for a snapshot newer than ``version``, at most ``timeout_s``; returns the newest one."""
        with self._changed:
            self._changed.wait_for(lambda: self._orders.version > version, timeout_s)
            return self._orders

    def progress(self, phase: str, step: int, pieces_done: int) -> None:
        """Report what the training thread does; to be called at each piece and each bucket. It costs a few stores; the
        control thread does the I/O, and soon where a piece is done.

        ``phase`` is one of ``reports.PHASES``. A rank that makes no call for the progress time-out while others wait
        is taken for hung.
        """
        if self._progress.tick(phase, step, pieces_done):
            self._control.nudge(self._progress.complete)

    def read_tickets(self, number: int) -> None:
        """Note that this rank has read the entries of the ticket stream before ``number``."""
        self._tickets_read = number

    def begun(self, number: int) -> None:
        """Report to the leader that this rank has begun the ticket of this number, where its group pauses late: that
        all stages begin what the first one has."""
        if self._tells_begun:
            self._control.post(reports.RankBegun(number))

    def opened(self, shard: int, problem: str) -> None:
        """Report that this rank has opened the data of a shard that its group has adopted, or reads none; or, where
        there is a ``problem``, that it cannot. From any thread."""
        self._control.post(reports.RankOpened(shard, not problem, problem))

    def reduced(
        self, result: ReductionResult, figures: Mapping[str, float] | None = None, row: int | None = None
    ) -> None:
        """Report to the leader, which votes for the group, that the reduction of a row has ended on this rank.

        Args:
            row: where this rank has several.
            figures: numbers for the step's line in metrics.jsonl: ``rebuild_s``, ``patch_s``, ``reduce_s``,
                ``compute_s``, ``buckets_early`` (the greatest over ranks and groups counts), ``pieces_discarded`` and
                ``pieces_joined`` (the greatest over ranks, summed over groups).
        """
        row = self.rows[0] if row is None else row
        self._control.post(reports.Reduced(result, tuple(sorted((figures or {}).items())), row))

    def report_step(self, step: int, report: Mapping[str, Any]) -> None:
        """Report that this rank has applied the committed ``step``.

        ``report`` has this rank's figures of the step, as JSON values: the loss names of the job description, and
        ``grad_norm``, ``lr``, ``tokens``, ``loss_scale``, ``skipped``, ... The reports of a group's ranks are merged,
        and the first group's report is logged. The group has applied the step when its last rank has reported it.
        """
        self._control.post(reports.StepReport(step, dict(report)))

    def applied(self, step: int, epoch: int) -> None:
        """Report that this rank has done all that the end of the run asks of it (``orders.view.leave``): the state
        after ``step`` is applied and, where that is its group's part, saved. The group's ``Applied`` is sent when its
        last rank has reported.
        """
        self._control.post(reports.RankApplied(step, epoch))

    def have(self, epoch: int, shard: int, whole: bool, detail: str = "") -> None:
        """Report that this rank, of a new host of a state shard, has its part of the state after t* in ``epoch``; or
        that it has not, and that its view names no donor, or why it cannot keep the shard (``detail``). From any
        thread."""
        self._control.post(reports.RankHave(epoch, shard, whole, detail))

    def saved(self, step: int, directory: str) -> bool:
        """Ask whether the checkpoint in ``directory`` counts, and wait for the answer; called by one rank of the group.

        The checkpoint gets its final name only after True, which comes when the groups' votes have agreed on its
        weights: with the next commit, or at the end of the run. False: this group is fenced, or the job is over, before
        it has received the answer; the checkpoint may count all the same.
        """
        key = (step, directory)
        with self._changed:
            self._answers[key] = False
            self._control.post(reports.SaveRequest(step, directory))
            self._changed.wait_for(lambda: self._answers[key] or self._orders.over)
            return self._answers.pop(key)

    def ready(self) -> None:
        """Report that this rank, of a learner, could take an offer, now and after each that ends."""
        self._control.post(reports.RankReady())

    def caught_up(self, number: int, step: int, weights_digest: str, row: int | None = None) -> None:
        """Report that this rank, of a learner or joiner, holds the state after ``step`` of a row, by offer
        ``number``."""
        self._control.post(reports.RankCaughtUp(number, step, weights_digest, self.rows[0] if row is None else row))

    def void(self, number: int, detail: str) -> None:
        """Report that this rank, of a learner or joiner, cannot have its part of offer ``number``, and why."""
        self._control.post(reports.RankVoid(number, detail))

    def withdraw(self, number: int, detail: str) -> None:
        """Report that this rank, of a donor, serves offer ``number`` no longer, and why."""
        self._control.post(reports.RankWithdrawn(number, detail))

    def request_stop(self, reason: str) -> None:
        """Ask that the job saves and leaves at the next step boundary (exit duration, exit signal)."""
        self._control.post(reports.StopRequest(reason))

    def close(self) -> None:
        """Close the stream and end the control thread. Idempotent."""
        self._control.stop()

    # The control thread calls the methods below.

    def publish(self, orders: Orders, newer_epoch: bool) -> None:
        """Control thread: run the callbacks of a newer epoch, then show the orders to the training thread."""
        if newer_epoch:
            for callback in self._on_view:
                callback(orders)
        with self._changed:
            self._orders = orders
            self._changed.notify_all()

    def answer_save(self, step: int, directory: str) -> None:
        """Control thread: wake :meth:`saved`, because the coordinator has accepted a checkpoint."""
        with self._changed:
            if (step, directory) in self._answers:
                self._answers[(step, directory)] = True
                self._changed.notify_all()

    @property
    def tickets_read(self) -> int:
        """Control thread: the number of the first entry of the ticket stream that may still be read."""
        return self._tickets_read

    @property
    def progress_now(self) -> reports.Progress:
        """Control thread: the progress that the next heartbeat carries."""
        return self._progress

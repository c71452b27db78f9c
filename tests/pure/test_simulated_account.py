"""Where the wall time of a simulated job went, by the code that reads a real job's journal: what it attributes must be
what the simulator knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from spare_megatron.coordinator.journal import Record
from spare_megatron.metrics.metrics import MetricsBook
from spare_megatron.monitor.job_picture import JobPicture
from spare_megatron.protocol import messages as m
from spare_megatron.simulator.cluster import Cluster, Policy
from spare_megatron.simulator.job_control import JobControl
from spare_megatron.simulator.pieces import PiecesEngine

CLUSTER = Cluster(12, mtbf_s=400.0, reduce_s=2.0, restart_s=200.0, save_s=30.0, rebuild_s=0.5)
BEGAN_S = 1e9
"""Seconds since 1970."""


class RecordedControl(JobControl):
    """Keeps the journal and the metrics of the job."""

    def __init__(self, spec: m.JobSpec) -> None:
        super().__init__(spec)
        self.now_s = 0.0
        """By the trial's clock."""
        self.book, self.journal, self.lines = MetricsBook(), list[Record](), list[dict[str, Any]]()

    def open(self, first_step: int, groups: Sequence[int], offsets: Sequence[int] | None = None) -> None:
        """Every group sends Hello, as in a real journal."""
        self.spec = replace(self.spec, first_step=first_step)
        incarnation = max(self.state.highest.values(), default=-1) + 1
        self.feed(m.Opened(self.spec, self.state.job_attempt + 1, self.state.fencing + 1))
        for group in groups:
            self.feed(
                m.Hello(group, incarnation, self.spec.fingerprint, first_step, process_nonce=f"{group}-{incarnation}")
            )

    def feed(self, event: m.Event) -> m.Decision:
        """As for a coordinator."""
        before = self.state
        decision = super().feed(event)
        number = len(self.journal) + 1
        self.journal.append(
            Record(number, BEGAN_S + self.now_s, decision.epoch, event, tuple(decision.actions), decision.reason)
        )
        self.book.observe(BEGAN_S + self.now_s, before, event, decision, self.state)
        return decision


class RecordedTrial(PiecesEngine):
    """Tells the control when what happens, and with votes what ranks would."""

    control: RecordedControl

    def __init__(self, policy: Policy, seed: int) -> None:
        super().__init__(CLUSTER, policy, seed)
        self.control = RecordedControl(self.control.spec)

    def _open(self, *args: Any) -> None:
        self.control.now_s = self.now_s
        super()._open(*args)

    def _reduced(self, finish: np.ndarray, ready: float, per_piece: np.ndarray, at: float = np.inf) -> float:
        self._seen = finish, per_piece
        return super()._reduced(finish, ready, per_piece, at)

    def _deaths(self, at: float, *args: Any) -> bool:
        self.control.now_s = at
        self._disturbed = True
        goes_on = super()._deaths(at, *args)
        for group in self.control.state.live:
            self.control.book.seen(group, BEGAN_S + at)
        return goes_on

    def _step(self) -> bool:
        self.control.now_s, self._disturbed = self.now_s, False
        return super()._step()

    def _commit(self) -> None:
        state, (finish, per_piece) = self.control.state, self._seen
        self.control.now_s = self.now_s
        for group in state.live:
            own, *added = map(len, state.segments_of(group))
            figures = {
                "compute_s": own * per_piece[group],
                "patch_s": sum(added) * per_piece[group],
                "reduce_s": self.now_s - finish[group],
                "rebuild_s": self.cluster.rebuild_s if self._disturbed else 0.0,
            }
            reported = tuple((name, float(value)) for name, value in figures.items())
            self.control.book.figures(state.step_in_flight, state.epoch, group, reported)
        super()._commit()
        self._report({})

    def _save(self) -> None:
        began_s = self.now_s
        super()._save()
        self._report({"save_s": self.now_s - began_s}, 1)

    def _report(self, reported: dict[str, float], later: int = 0) -> None:
        book = self.control.book
        book.report(self.control.state.committed[0] + later, reported)
        self.control.lines += book.ready()

    def picture(self) -> JobPicture:
        """What is drawn of it."""
        picture = JobPicture()
        picture.take(self.control.journal, self.control.lines)
        return picture


@pytest.mark.parametrize("seed", [1, 2])
def test_the_account_of_a_simulated_job_covers_its_time(seed: int) -> None:
    """Many failures and some wipe-outs, with saves and restarts: of all time, 1 % at most has no name."""
    trial = RecordedTrial(Policy("microbatch", 3, 4, steps=60, save_interval_s=200.0), seed)
    trial.run()
    picture, tally = trial.picture(), trial.tally
    wall_time = picture.wall_time()
    assert tally.wipe_outs > 1
    assert sum(len(failure.groups) for failure in picture.history.failures) == tally.failures > 10
    last_s = trial.control.lines[-1]["step_time_s"]  # it counts when another one follows
    assert wall_time.wall_s == pytest.approx(trial.now_s - last_s, rel=1e-3)
    assert abs(wall_time.share("unknown")) <= 0.01
    assert wall_time.parts["restart"] == pytest.approx(tally.down_s)
    assert wall_time.parts["save"] == pytest.approx(tally.save_s, abs=CLUSTER.save_s)
    assert wall_time.parts["train"] < trial.failure_free_s < wall_time.wall_s

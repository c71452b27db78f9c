"""A scripted job: the real machine and metrics, a clock that moves by hand, and the picture drawn of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spare_megatron.coordinator.journal import Record
from spare_megatron.metrics.metrics import MetricsBook
from spare_megatron.monitor.job_picture import JobPicture
from spare_megatron.protocol import messages as m
from spare_megatron.protocol.machine import State, initial_state, step

SPEC = m.JobSpec(4, 3, (0, 1), "microbatch", 0, 99, 4, "f")
STARTED_S, BEGAN_S = 1000.0, 1008.0
COMPUTE_S, REDUCE_S, REST_S = 2.0, 0.5, 0.25
FAILURE_FREE_S = REST_S + COMPUTE_S + REDUCE_S
"""Of a step."""


class ScriptedJob:
    """4 groups of 3 pieces, or another job; they begin 8 s after the coordinator."""

    def __init__(self, spec: m.JobSpec = SPEC, started_s: float = STARTED_S) -> None:
        self.book, self.state, self.now_s = MetricsBook(started_unix_s=started_s), initial_state(), started_s + 5
        self.transitions: list[tuple[Record, State, State]] = []
        self.lines: list[dict[str, Any]] = []
        self.open(spec, 1, started_s + BEGAN_S - STARTED_S)

    def open(self, spec: m.JobSpec, job_attempt: int, begun_s: float = BEGAN_S) -> None:
        """A job attempt begins."""
        self.tell(m.Opened(spec, job_attempt, self.state.fencing + 1))
        self.now_s = begun_s
        for group in range(spec.num_groups):
            incarnation = self.state.highest.get(group, -1) + 1
            self.tell(m.Hello(group, incarnation, "f", spec.first_step, process_nonce=f"{group}-{incarnation}"))

    def tell(self, event: m.Event, detect_s: float = 0.0) -> None:
        """One event."""
        before = self.state
        self.state, decision = step(before, event)
        number = len(self.transitions) + 1
        record = Record(number, self.now_s, decision.epoch, event, tuple(decision.actions), decision.reason)
        self.transitions.append((record, before, self.state))
        self.book.observe(self.now_s, before, event, decision, self.state, detect_s)

    def lose(self, *groups: int, detect_s: float = 0.0) -> None:
        """These groups are gone; the others drop their communicators within 0.125 s."""
        self.tell(m.Lost(tuple(m.Loss(group, self.state.live[group], "exited") for group in groups)), detect_s)
        for group in self.state.live:
            self.book.seen(group, self.now_s + 0.125)

    def votes(
        self, compute_s: Mapping[int, float], patch_s: Mapping[int, float], late_s: Mapping[int, float] | None = None
    ) -> None:
        """Every live group votes ok; whoever computed less, or began earlier, waited for the others in the sum."""
        state = self.state
        busy_s = {
            group: compute_s.get(group, COMPUTE_S) + patch_s.get(group, 0.0) + (late_s or {}).get(group, 0.0)
            for group in state.live
        }
        for group, incarnation in state.live.items():
            figures = {
                "compute_s": compute_s.get(group, COMPUTE_S),
                "patch_s": patch_s.get(group, 0.0),
                "rebuild_s": 0.0625,
                "reduce_s": REDUCE_S + max(busy_s.values()) - busy_s[group],
            }
            pieces = tuple(piece for segment in state.segments_of(group) for piece in segment)
            self.book.figures(state.step_in_flight, state.epoch, group, tuple(figures.items()))
            self.tell(m.Vote(group, incarnation, m.ReductionResult(state.step_in_flight, state.epoch, True, pieces)))

    def step(
        self, takes_s: float = FAILURE_FREE_S, compute_s: Mapping[int, float] | None = None, **reported: float
    ) -> None:
        """A step without a loss."""
        self.now_s += takes_s
        self.votes(compute_s or {}, {})
        self.report(**reported)

    def report(self, **reported: float) -> None:
        """A report on the last step."""
        self.book.report(self.state.committed[0], {"lm loss": 2.0, **reported})
        self.lines += self.book.ready()

    def leave(self, ends_s: float) -> None:
        """The job is asked to stop: one step more, and ``ends_s`` for its end."""
        self.tell(m.StopRequested("signal SIGTERM"))
        self.step()
        self.now_s += ends_s
        last, epoch = self.state.committed[0], self.state.epoch
        for group, incarnation in self.state.live.items():
            self.tell(m.Vote(group, incarnation, m.ReductionResult(last + 1, epoch, True)))
            self.tell(m.Applied(group, incarnation, last, epoch))

    def begin_coordinator(self) -> None:
        """A coordinator process begins, and reads what is in the journal."""
        self.book = MetricsBook(written=(self.state.job_attempt, self.state.committed[0]), started_unix_s=self.now_s)
        state = initial_state()
        for record, _, _ in self.transitions:
            before = state
            state, decision = step(state, record.event)
            self.book.observe(record.time_unix_s, before, record.event, decision, state)

    def picture(self) -> JobPicture:
        """What is drawn of it; the line of the last step only counts once another follows."""
        picture = JobPicture()
        picture.take((record for record, _, _ in self.transitions), self.lines)
        return picture

    def parts(self) -> dict[str, float]:
        """The parts of the wall time that are not 0."""
        rounded = {name: round(seconds, 4) for name, seconds in self.picture().wall_time().parts.items()}
        return {name: seconds for name, seconds in rounded.items() if seconds}

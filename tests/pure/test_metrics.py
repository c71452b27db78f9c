"""metrics.jsonl, the iteration line and the boards' scalars, from a controller's records."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spare_megatron.config.exits import PLANNED
from spare_megatron.config.job import JobDescription
from spare_megatron.coordinator.journal import Record
from spare_megatron.coordinator.records import Records, metrics_lines
from spare_megatron.metrics.boards import Boards, points, scalars
from spare_megatron.metrics.iteration_line import IterationLines
from spare_megatron.metrics.metrics import MetricsBook
from spare_megatron.protocol import messages as m
from spare_megatron.protocol.machine import initial_state, step
from spare_megatron.runtime.run_directory import RunDirectory
from tests.pure.scripted_job import ScriptedJob

SPEC = m.JobSpec(3, 2, (0, 1), "microbatch", 0, 9, 3, "f")
JOB = JobDescription(train_iters=9, log_interval=2, global_batch_size=6, world_size=3, flops_per_step=6e12)


class Story:
    """A machine, a book, and a clock that moves by hand."""

    def __init__(self, book: MetricsBook | None = None) -> None:
        self.book, self.state, self.now_s = book or MetricsBook(), initial_state(), 1000.0
        self.log: list[tuple[float, m.Event]] = []
        self.tell(m.Opened(SPEC, 1, 1))
        for group in range(3):
            self.tell(m.Hello(group, 0, "f", 0))

    def tell(self, event: m.Event, detect_s: float = 0.0) -> None:
        """One event."""
        before = self.state
        self.state, decision = step(before, event)
        self.log.append((self.now_s, event))
        self.book.observe(self.now_s, before, event, decision, self.state, detect_s)

    def commit(self, seconds: float = 1.0, rebuild_s: Mapping[int, float] | None = None) -> None:
        """Every live group votes ok after ``seconds``."""
        self.now_s += seconds
        state = self.state
        for group, incarnation in state.live.items():
            pieces = tuple(p for segment in state.segments_of(group) for p in segment)
            figures = [("reduce_s", 0.1 * group), ("patch_s", 0.2), ("pieces_discarded", 0.0), ("pieces_joined", 1.0)]
            figures.append(("rebuild_s", (rebuild_s or {}).get(group, 0.0)))
            self.book.figures(state.step_in_flight, state.epoch, group, figures)
            self.tell(m.Vote(group, incarnation, m.ReductionResult(state.step_in_flight, state.epoch, True, pieces)))

    def replay(self, book: MetricsBook) -> None:
        """Tell it to another book, from the start."""
        state = initial_state()
        for time_s, event in self.log:
            after, decision = step(state, event)
            book.observe(time_s, state, event, decision, after)
            state = after

    def report(self, number: int, loss: float = 2.0) -> list[dict[str, Any]]:
        """A group's report on a step; the lines that are ready then."""
        self.book.report(number, {"lm loss": loss, "grad_norm": 0.5, "lr": 1e-3, "tokens": 12, "extra": 1})
        return self.book.ready()


def test_a_line_is_ready_with_the_first_report() -> None:
    story = Story()
    story.commit(0.25)
    assert story.book.ready() == []
    [line] = story.report(1, 2.5)
    assert list(line)[:6] == ["step", "epoch", "loss", "grad_norm", "lr", "tokens"]
    assert (line["step"], line["epoch"], line["loss"], line["tokens"], line["extra"]) == (1, 1, 2.5, 12, 1)
    assert (line["live_groups"], line["load_max"], line["pieces"], line["step_time_s"]) == (3, 2, 6, 0.25)
    assert (line["pieces_computed"], line["pieces_discarded"], line["recovery"]) == (6, 0, None)
    assert story.report(1, 9.0) == [], "the second group's report is not logged"


def test_a_recovery_has_its_times_and_counts_what_the_dead_had_computed() -> None:
    story = Story()
    story.commit()
    story.report(1)
    story.now_s += 0.5
    story.tell(m.Lost((m.Loss(1, 0, "exited"),), ((0, 2), (1, 1), (2, 0))), detect_s=0.01)
    story.book.seen(0, story.now_s + 0.002)
    story.book.seen(2, story.now_s + 0.004)
    story.commit(0.3, rebuild_s={0: 0.005, 2: 0.001})
    [line] = story.report(2)
    assert line["live_groups"] == 2
    assert line["pieces_computed"] == 7, "the batch, and the one piece that the dead had reported"
    assert line["recovery"] == {
        "detect_s": 0.01,
        "agree_s": 0.004,
        "formed_s": 0.007,
        "rebuild_s": 0.005,
        "patch_s": 0.2,
        "reduce_s": 0.2,
        "patch_wait_s": 0.2,
        "total_s": 0.31,
        "pieces_joined": 2,
        "lost_groups": [1],
    }
    assert (story.book.totals.failures_masked, story.book.totals.recoveries) == (1, 1)
    story.commit()
    [line] = story.report(3)
    assert line["recovery"] is None
    assert story.book.stall_s == 0.0, "the disturbed step took 0.8 s, the usual one 1 s"


def test_a_step_that_nobody_reports_is_written_with_the_next() -> None:
    story = Story()
    story.commit()
    story.commit()
    lines = story.report(2)
    assert [(line["step"], line["loss"]) for line in lines] == [(1, None), (2, 2.0)]


def test_a_restarted_coordinator_writes_no_line_twice_and_none_is_lost() -> None:
    story = Story()
    story.commit()
    story.report(1)
    story.commit()
    again = MetricsBook(written=(1, 1))
    story.replay(again)
    again.report(1, {"lm loss": 7.0})
    again.report(2, {"lm loss": 1.5})
    assert [(line["step"], line["loss"]) for line in again.ready()] == [(2, 1.5)]
    assert again.totals.steps_committed == 2


class KilledError(Exception):
    """Stands for the end of the coordinator."""


def test_a_coordinator_killed_while_it_prints_leaves_no_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What metrics.jsonl has was printed; its successor prints all else, what was cut off too."""
    run_dir, job = RunDirectory(tmp_path), replace(JOB, log_interval=1)

    def killed() -> None:
        raise KilledError

    first = Records(run_dir)
    story = Story(first.book)
    first.begin(job, story.state)
    story.commit()
    first.report(1, {})
    story.commit()
    with monkeypatch.context() as patch:
        patch.setattr(sys.stdout, "flush", killed)
        with pytest.raises(KilledError):
            first.report(2, {})
    assert [line["step"] for line in metrics_lines(run_dir.metrics)] == [1]
    capsys.readouterr()

    second = Records(run_dir)
    story.replay(second.book)
    second.begin(job, story.state)
    second.report(2, {})
    assert [line["step"] for line in metrics_lines(run_dir.metrics)] == [1, 2]
    assert re.findall(r" iteration +(\d+)/", capsys.readouterr().out) == ["2"]


def test_the_summary_names_the_signal_that_came_while_the_job_attempt_ended_anyway(tmp_path: Path) -> None:
    """A planned restart that Slurm interrupts must not be followed by another job attempt at once."""

    def signal_received(*events: m.Event) -> str:
        records, state = Records(RunDirectory(tmp_path)), initial_state()
        for number, event in enumerate(events, 1):
            before = state
            state, decision = step(before, event)
            record = Record(number, 1000.0, state.epoch, event, decision.actions, decision.reason)
            records.observe(record, before, decision, state, 0.0, live=False)
        records.finish(state)
        return str(json.loads((tmp_path / "summary.json").read_text())["stop_signal"])

    begun = (m.Opened(SPEC, 1, 1), *(m.Hello(group, 0, "f", 0) for group in range(3)))
    planned, reported = m.StopRequested(f"{PLANNED}: 1 of 3 groups"), m.StopRequested("signal SIGTERM")
    assert not signal_received(*begun, planned)
    assert signal_received(*begun, planned, reported) == "signal SIGTERM"
    assert signal_received(*begun, planned, reported, m.Opened(SPEC, 1, 2)) == "signal SIGTERM"
    assert not signal_received(*begun, planned, reported, m.Opened(SPEC, 2, 2))


def test_a_wipe_out_and_the_steps_it_loses() -> None:
    story = Story()
    for _ in range(5):
        story.commit()
    story.tell(m.Lost((m.Loss(1, 0, "exited"),)))
    assert story.state.phase == "running", "the others go on with the step"
    story.tell(m.Lost(tuple(m.Loss(group, 0, "exited") for group in (0, 2))))
    assert story.state.outcome == "wipe-out"
    story.tell(m.Opened(m.JobSpec(3, 2, (0, 1), "microbatch", 3, 9, 3, "f"), 2, 2))
    totals = story.book.totals
    assert (totals.wipe_outs, totals.steps_lost, totals.failures_masked) == (1, 2, 0)
    story.book.ready(all_of_them=True)
    for group in range(3):
        story.tell(m.Hello(group, 1, "f", 3))
    story.commit()
    [line] = story.report(4)
    assert (line["life"], line["step"]) == (2, 4)


def test_a_loss_is_masked_once_its_step_is_committed() -> None:
    """A wipe-out in the same step takes what the survivors computed for the lost group with it."""
    job = ScriptedJob()

    def masked() -> list[bool]:
        return [failure.masked for failure in job.picture().history.failures]

    job.step()
    job.lose(0)
    assert (job.book.totals.failures_masked, masked()) == (0, [True])
    assert job.picture().history.in_flight(job.picture().history.failures[0]), "nobody knows yet"
    job.step()
    assert (job.book.totals.failures_masked, masked()) == (1, [True])
    job.lose(2)
    assert not job.state.outcome
    job.lose(1, 3)
    assert job.state.outcome == "wipe-out"
    assert (job.book.totals.failures_masked, masked()) == (1, [True, False, False])
    picture = job.picture()
    costs = [sum(cost.parts.values()) > 0 for cost in picture.failures(picture.wall_time())]
    assert not costs[1], "the restart is the cost of the failure that ended the job attempt"


def test_a_group_that_is_replaced_before_its_death_is_known_is_a_loss_like_any_other() -> None:
    """torchrun starts a group again at once; or the coordinator was away when it died."""
    job = ScriptedJob()
    job.step()
    for incarnation in (1, 2):
        job.tell(m.Hello(1, incarnation, "f", 0, process_nonce=f"1-{incarnation}"))
        assert job.transitions[-1][0].reason.startswith(f"group 1 replaced: incarnation {incarnation} took its place")
        job.step()
        job.tell(m.Ready(1, incarnation))
        job.step()
        [offer] = job.state.offers
        job.tell(m.CaughtUp(1, incarnation, offer.number, job.state.committed[0]))
        for _ in range(3):
            job.step()
        assert job.state.live[1] == incarnation
    totals, history = job.book.totals, job.picture().history
    assert (totals.failures_masked, totals.recoveries, totals.joins) == (2, 2, 2)
    assert [(failure.groups, failure.masked) for failure in history.failures] == [((1,), True)] * 2
    assert [(one.group, one.away_s > 0) for one in history.returns] == [(1, True)] * 2


def line(number: int, **more: Any) -> dict[str, Any]:
    """A metrics line."""
    return {
        "step": number,
        "epoch": 1,
        "loss": 2.0,
        "grad_norm": 0.25,
        "lr": 1e-4,
        "tokens": 100,
        "live_groups": 3,
        "load_max": 2,
        "pieces": 6,
        "step_time_s": 0.5,
        "pieces_computed": 6,
        "pieces_discarded": 0,
        "recovery": None,
        **more,
    }


def test_the_iteration_line_is_megatrons() -> None:
    lines = IterationLines(JOB, 0)
    assert lines.add(line(1, loss=3.0)) is None
    text = lines.add(line(2, loss=1.0, step_time_s=1.5))
    assert text is not None
    assert re.match(
        r" iteration +2/ +9 \| consumed samples: +12 \| elapsed time per iteration \(ms\): 1000\.0 \|", text
    )
    assert " throughput per GPU (TFLOP/s/GPU): 2.0 |" in text
    assert " learning rate: 1.000000E-04 | global batch size:     6 | lm loss: 2.000000E+00 | loss scale: 1.0 |" in text
    assert " grad norm: 0.250 | number of skipped iterations:   0 | number of nan iterations:   0 |" in text
    assert text.endswith(" live groups: 3 | max load: 2 |")


def test_skipped_steps_and_recoveries_show_in_the_line() -> None:
    lines = IterationLines(JOB, 0)
    lines.add(line(1, loss=4.0, skipped=1))
    text = lines.add(line(2, loss=1.0, recovery={"total_s": 0.5, "lost_groups": [1, 2]}))
    assert text is not None
    assert " lm loss: 1.000000E+00 |" in text
    assert " number of skipped iterations:   1 |" in text
    assert text.endswith(" masked loss of group 1,2 in 0.50 s |")


def test_what_a_users_loss_function_reports_is_in_the_line_and_on_the_boards() -> None:
    lines = IterationLines(JOB, 0)
    own = {"plain loss": 1.0, "reported": ["plain loss"]}
    lines.add(line(1, loss=4.0, **own))
    text = lines.add(line(2, loss=2.0, **own | {"plain loss": 2.0}))
    assert text is not None
    assert " lm loss: 3.000000E+00 | plain loss: 1.500000E+00 |" in text
    assert scalars(line(2, **own), JOB)["plain loss"] == 1.0


def test_scalars_have_megatrons_names() -> None:
    values = scalars(line(2, loss_scale=1.0, recovery={"total_s": 0.5, "lost_groups": [1]}), JOB)
    assert values["lm loss"] == 2.0
    expected: Mapping[str, float] = {
        "learning-rate": 1e-4,
        "grad-norm": 0.25,
        "loss-scale": 1.0,
        "batch-size": 6.0,
        "iteration-time": 0.5,
        "throughput": 4.0,
        "spare/live_groups": 3.0,
        "spare/recovery/total_s": 0.5,
    }
    assert expected.items() <= values.items()


def test_an_evaluation_between_two_runs_is_written_where_a_wandb_run_goes_on(tmp_path: Path) -> None:
    """An online run that goes on begins behind its last step, of whose weights the evaluation is."""
    job = JobDescription(global_batch_size=6)
    boards = Boards(job, tmp_path)
    logged: list[tuple[int, dict[str, float]]] = []
    run = SimpleNamespace(step=4)

    def log(values: dict[str, float], step: int) -> None:
        logged.append((step, values))
        run.step = step

    run.log = log
    boards._run, boards._begins_at = run, run.step
    evaluated = line(4, loss=0.5) | {"validation": {"lm loss": 0.25}}
    for point in points(evaluated, job, lambda step: 6 * step):
        boards.write(point)
    assert [step for step, _ in logged] == [4, 4]
    assert logged[0][1] == {"lm loss validation": 0.25}
    assert logged[1][1].items() >= {"lm loss": 0.5, "samples vs steps": 24}.items()
    for number in (2, 5, 4):
        for point in points(line(number, loss=0.5) | {"validation": {"lm loss": 9.0}}, job, lambda step: 6 * step):
            boards.write(point)
    assert [step for step, _ in logged[2:]] == [4, 5], "steps that are computed again are written once"


@pytest.mark.filterwarnings("default")
def test_tensorboard_events_are_written_without_torch(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    job = JobDescription(global_batch_size=6, tensorboard_dir=str(tmp_path / "tb"), tensorboard_log_interval=2)
    boards = Boards(job, tmp_path)
    for number in range(1, 5):
        for point in points(line(number, loss=1.0 / number), job, lambda step: 6 * step):
            boards.write(point)
    boards.close()
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert [(event.step, round(event.value, 3)) for event in events.Scalars("lm loss")] == [(2, 0.5), (4, 0.25)]
    assert [event.step for event in events.Scalars("lm loss vs samples")] == [12, 24]

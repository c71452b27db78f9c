"""OpenTelemetry gets Megatron's figures and a job's spans, read back from the SDK's own exporters."""

from __future__ import annotations

import gzip
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.job import JobDescription
from spare_megatron.config.span_groups import span_groups
from spare_megatron.coordinator.records import Records
from spare_megatron.flags import check
from spare_megatron.metrics import telemetry
from spare_megatron.metrics.boards import Boards
from spare_megatron.metrics.telemetry import Telemetry
from spare_megatron.protocol.messages import CaughtUp, Hello, Ready
from spare_megatron.runtime.run_directory import RunDirectory
from tests.pure.flags_of_a_job import job_of
from tests.pure.scripted_job import ScriptedJob

JOB = JobDescription(
    identity={"num_layers": 4, "pipeline_model_parallel_size": 2},
    train_iters=99,
    global_batch_size=12,
    flops_per_step=4e12,
    world_size=4,
    otel_enabled=True,
    otel_span_groups=("checkpoint", "job", "step"),
)


class Sent:
    """What was sent, kept in memory."""

    def __init__(self) -> None:
        self.spans, self.reader = InMemorySpanExporter(), InMemoryMetricReader()

    def telemetry(self, job: JobDescription = JOB, run: str = "run") -> Telemetry:
        """Sends here."""
        return Telemetry(job, run, self.spans, self.reader)

    def figures(self) -> dict[str, Any]:
        """Name -> the last value, or of a histogram the number and the sum."""
        data = self.reader.get_metrics_data()
        assert data is not None
        found = {}
        for metric in data.resource_metrics[0].scope_metrics[0].metrics:
            (point,) = metric.data.data_points
            found[metric.name] = getattr(point, "value", None) or (getattr(point, "count", 0), getattr(point, "sum", 0))
        return found

    def named(self, name: str) -> Any:
        """The only span of this name."""
        (span,) = [span for span in self.spans.get_finished_spans() if span.name == name]
        return span


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sent]:
    made = Sent()
    monkeypatch.setattr(telemetry, "_otlp", lambda: (made.spans, made.reader))
    yield made
    made.spans.shutdown()


def seconds(span: Any) -> tuple[float, float]:
    """When it began and ended, seconds since 1970."""
    return span.start_time / 1e9, span.end_time / 1e9


def test_figures_have_megatrons_names(sent: Sent) -> None:
    job, made = ScriptedJob(), sent.telemetry()
    job.step(2.0, grad_norm=3.0, lr=1e-3, tokens=100)
    job.step(4.0, grad_norm=3.5, skipped=True)
    for line in job.lines:
        made.step(line)
    figures = sent.figures()
    made.close()
    assert figures == {
        "megatron.training.step_duration_ms": (2, pytest.approx(6000.0)),
        "megatron.training.loss": 2.0,
        "megatron.training.grad_norm": 3.5,
        "megatron.training.learning_rate": 1e-3,
        "megatron.training.tokens_per_sec": pytest.approx(50.0),
        "megatron.training.throughput_tflops": pytest.approx(0.25),
        "megatron.training.skipped_iters": 1,
        "spare.live_groups": 4,
    }


def test_a_failure_is_a_span_from_its_evidence_to_the_commit(sent: Sent) -> None:
    job, made = ScriptedJob(), sent.telemetry()
    job.step()
    job.now_s += 1.0
    job.lose(2, detect_s=0.5)
    job.step(3.0)
    job.report(save_s=0.75)
    job.step()
    for line in job.lines:
        made.step(line)
    made.came_back(2, 1010.0, 1020.0)
    made.close()
    assert sent.figures()["spare.groups_lost"] == 1
    root, failure = sent.named("megatron.train"), sent.named("spare.failure")
    steps = {s.attributes["megatron.iteration"]: s for s in sent.spans.get_finished_spans() if "train_step" in s.name}
    assert sorted(steps) == [1, 2, 3]
    committed_s = job.lines[1]["time_unix_s"]
    assert seconds(steps[2]) == (pytest.approx(committed_s - 4.0), pytest.approx(committed_s))
    assert failure.parent.span_id == steps[2].context.span_id
    assert steps[2].parent.span_id == root.context.span_id
    assert seconds(failure) == (pytest.approx(committed_s - 3.5), pytest.approx(committed_s))
    assert failure.attributes["spare.lost_groups"] == (2,)
    parts = [sent.named(f"spare.{part}") for part in telemetry.PARTS]
    assert {part.parent.span_id for part in parts} == {failure.context.span_id}
    assert [round(end_s - begin_s, 3) for begin_s, end_s in map(seconds, parts)] == [0.5, 0.125, 0.062, 0.0]
    back = sent.named("spare.return")
    assert (seconds(back), back.attributes["spare.group"]) == ((1010.0, 1020.0), 2)
    assert root.resource.attributes["service.name"] == "megatron-training"
    assert root.resource.attributes["dl.pipeline_parallel.size"] == 2
    assert root.resource.attributes["spare.run"] == "run"


def test_a_save_is_a_span_of_the_step_that_it_kept_waiting(sent: Sent) -> None:
    made = sent.telemetry()
    line = ScriptedJob()
    line.step()
    (reported,) = line.lines
    made.step({**reported, "saves_s": [(1, 0.5)]})
    made.close()
    span = sent.named("megatron.save_checkpoint")
    began_s = reported["time_unix_s"] - reported["step_time_s"]
    assert seconds(span) == (pytest.approx(began_s), pytest.approx(began_s + 0.5))
    assert span.attributes["megatron.iteration"] == 0


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        ("default", {"megatron.train", "spare.failure", *(f"spare.{part}" for part in telemetry.PARTS)}),
        ("checkpoint", set()),
        ("step", {"megatron.train_step"}),
    ],
)
def test_only_the_groups_of_spans_that_are_asked_for_are_sent(sent: Sent, spec: str, names: set[str]) -> None:
    job = JobDescription(otel_enabled=True, otel_span_groups=tuple(sorted(span_groups(spec))))
    reported, made = ScriptedJob(), sent.telemetry(job)
    reported.lose(0)
    reported.step()
    made.step(reported.lines[0])
    made.close()
    assert {span.name for span in sent.spans.get_finished_spans()} == names


def test_the_coordinators_records_feed_it(tmp_path: Path, sent: Sent) -> None:
    """Steps as they are written, and the return of a group that was lost."""
    reported, records = ScriptedJob(), Records(RunDirectory(tmp_path / "job"))
    (tmp_path / "job").mkdir()
    records.begin(JOB, reported.state)
    reported.step()
    reported.now_s += 1.0
    reported.lose(3)
    lost_s = reported.now_s
    reported.step()
    reported.tell(Hello(3, 1, "f", 0, process_nonce="again"))
    reported.tell(Ready(3, 1))
    reported.step()
    offer = reported.state.learners[3].offer
    assert offer is not None
    reported.step()
    reported.tell(CaughtUp(3, 1, offer.number, reported.state.committed[0], ""))
    reported.step()
    assert reported.state.live[3] == 1
    for record, before, after in reported.transitions:
        decision = type("Decided", (), {"actions": record.actions, "reason": record.reason, "epoch": record.epoch})
        records.observe(record, before, decision, after, 0.0, live=True)
    for line in reported.lines:
        records.book.report(line["step"], {"lm loss": 2.0})
    records.write_ready()
    records.finish(reported.state)
    begin_s, end_s = seconds(sent.named("spare.return"))
    assert begin_s == pytest.approx(lost_s)
    assert end_s > begin_s
    names = [span.name for span in sent.spans.get_finished_spans()]
    assert names.count("megatron.train_step") == len(reported.lines)
    assert names[-1] == "megatron.train"


def test_a_collector_gets_figures_and_spans(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    got: dict[str, bytes] = {}

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            got[self.path] = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        reported, boards = ScriptedJob(), Boards(JOB, tmp_path)
        reported.step()
        boards.tell(reported.lines[0])
        boards.close()
        server.shutdown()
    assert b"megatron.train_step" in got["/v1/traces"]
    assert b"megatron.training.step_duration_ms" in got["/v1/metrics"]
    assert tmp_path.name.encode() in got["/v1/traces"], "which run it is"


def test_a_collector_that_is_not_there_does_not_keep_the_job(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(telemetry, "SEND_S", 1.0)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    reported, boards = ScriptedJob(), Boards(JOB, tmp_path)
    reported.step()
    boards.tell(reported.lines[0])
    began_s = time.monotonic()
    boards.close()
    assert time.monotonic() - began_s < 10.0
    monkeypatch.setenv(telemetry.PROTOCOL, "grpc")
    with pytest.raises(ValueError, match="OTEL_EXPORTER_OTLP_PROTOCOL is grpc, and only http/protobuf is sent"):
        Boards(JOB, tmp_path)


def test_flags_of_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of("--otel-enabled --otel-service-name mine --otel-span-groups per_step")[0]
    assert (job.logging.otel_enabled, job.logging.otel_service_name) == (True, "mine")
    assert span_groups("per_step") == span_groups("all") == {"job", "checkpoint", "step"}
    assert span_groups("microbatch, layer") == frozenset()
    with pytest.raises(ConfigError, match="has no group 'steps'; use default, per_step, all or names of checkpoint"):
        job_of("--otel-enabled --otel-span-groups default,steps")
    with pytest.raises(ConfigError, match="--otel-span-groups does nothing without --otel-enabled"):
        job_of("--otel-span-groups default")
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    for name in [name for name in sys.modules if name.startswith("opentelemetry.")]:
        monkeypatch.delitem(sys.modules, name)
    assert not check.has_package("opentelemetry.sdk")()
    with pytest.raises(ConfigError, match=r"--otel-enabled needs OpenTelemetry.*pip install 'spare_megatron\[otel\]'"):
        job_of("--otel-enabled")

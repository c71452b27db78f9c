"""Sends a job's figures and spans to OpenTelemetry, under Megatron's names and beside them under ``spare.*``.

The coordinator sends them, once per job, with OTLP over HTTP; where to, and how often, say the SDK's own variables
(OTEL_EXPORTER_OTLP_ENDPOINT, ...). A span is made when it is over, from a line of metrics.jsonl: nothing is measured
twice. Spans of one job attempt of the coordinator are one trace::

    megatron.train
      megatron.train_step                  with the group of spans 'step'
        spare.failure                      from the first evidence to the commit
          spare.detect, spare.agree, spare.rebuild, spare.patch
      megatron.save_checkpoint             for how long a save kept a group from its next step
      spare.return                         from the loss of a group until it is a member again
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from typing import Any

from spare_megatron.config.job import JobDescription
from spare_megatron.metrics.iteration_line import throughput

SERVICE = "megatron-training"
SEND_S, CLOSE_MS = 3.0, 3000.0
"""So long a collector has to take what is sent, where OTEL_EXPORTER_OTLP_TIMEOUT does not say."""
PROTOCOL, TIMEOUT = "OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TIMEOUT"
PARTS = ("detect", "agree", "rebuild", "patch")


class Telemetry:
    """The spans and instruments of a job, of one process."""

    def __init__(self, job: JobDescription, run: str, span_exporter: Any = None, metric_reader: Any = None) -> None:
        """Exporter and reader are those of OTLP where none are given. ``run``: what the job is called."""
        from opentelemetry import trace
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._job, self._trace = job, trace
        service = job.otel_service_name or os.environ.get("OTEL_SERVICE_NAME") or SERVICE
        resource = Resource.create({SERVICE_NAME: service, "spare.run": run, **_resource(job)})
        if span_exporter is None:
            span_exporter, metric_reader = _otlp()
        self._spans = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._meters = MeterProvider([metric_reader], resource, shutdown_on_exit=False)
        self._spans.add_span_processor(BatchSpanProcessor(span_exporter))
        self._tracer, meter = self._spans.get_tracer("spare_megatron"), self._meters.get_meter("spare_megatron")
        self._took_ms = meter.create_histogram("megatron.training.step_duration_ms", "ms", "Duration of one step")
        self._gauges = {
            name: meter.create_gauge(f"megatron.training.{name}", unit)
            for name, unit in (
                *(("loss", ""), ("grad_norm", ""), ("learning_rate", "")),
                *(("tokens_per_sec", "tokens/s"), ("throughput_tflops", "TFLOP/s")),
            )
        }
        self._skipped = meter.create_counter("megatron.training.skipped_iters")
        self._live, self._lost = meter.create_gauge("spare.live_groups"), meter.create_counter("spare.groups_lost")
        details = {"megatron.train_iters": job.train_iters}
        self._root = self._tracer.start_span("megatron.train", start_time=_ns(time.time()), attributes=details)
        self._under_root = trace.set_span_in_context(self._root)

    def step(self, line: Mapping[str, Any]) -> None:
        """A step was committed; ``line`` is its line of metrics.jsonl."""
        took_s, ended_s = float(line["step_time_s"]), float(line["time_unix_s"])
        began_s, under, step = ended_s - max(0.0, took_s), self._under_root, None
        known = {"loss": line.get("loss"), "grad_norm": line.get("grad_norm"), "learning_rate": line.get("lr")}
        if took_s > 0:
            self._took_ms.record(1000 * took_s)
            known["tokens_per_sec"] = line["tokens"] / took_s if line.get("tokens") else None
            if self._job.flops_per_step:
                samples = self._job.batch_schedule(0).size(int(line["step"]))
                known["throughput_tflops"] = throughput(self._job, took_s, samples)
        for name, value in known.items():
            if value is not None and math.isfinite(value):
                self._gauges[name].set(value)
        self._skipped.add(int(bool(line.get("skipped"))))
        self._live.set(line["live_groups"])
        if "step" in self._job.otel_span_groups:
            details = {"megatron.iteration": line["step"], "spare.epoch": line["epoch"]}
            details |= {f"megatron.{name}": known[name] for name in ("loss", "grad_norm") if known[name] is not None}
            step = self._begun("megatron.train_step", began_s, under, details)
            under = self._trace.set_span_in_context(step)
        if line["recovery"] is not None:
            self._failure(line["recovery"], line["step"], ended_s, under)
        for saved, save_s in line.get("saves_s", ()):
            if "checkpoint" in self._job.otel_span_groups and saved == line["step"]:
                details = {"megatron.iteration": saved - 1}
                self._span("megatron.save_checkpoint", began_s, began_s + save_s, self._under_root, details)
        if step is not None:
            step.end(_ns(ended_s))

    def came_back(self, group: int, lost_s: float, back_s: float) -> None:
        """A group is a member again; seconds since 1970."""
        if "job" in self._job.otel_span_groups:
            self._span("spare.return", lost_s, back_s, self._under_root, {"spare.group": group})

    def close(self) -> None:
        """Send what is left; a collector that does not answer is given up."""
        if "job" in self._job.otel_span_groups:
            self._root.end()
        self._spans.shutdown()
        self._meters.shutdown(CLOSE_MS)

    def _failure(self, recovery: Mapping[str, Any], step: int, committed_s: float, under: Any) -> None:
        """What a masked failure took, one part after the other; a part that would go on behind the commit ends there:
        parts overlap."""
        lost = recovery["lost_groups"]
        self._lost.add(len(lost))
        if "job" not in self._job.otel_span_groups:
            return
        at_s = committed_s - recovery["total_s"]
        details = {"megatron.iteration": step, "spare.lost_groups": lost}
        failure = self._begun("spare.failure", at_s, under, details)
        inside = self._trace.set_span_in_context(failure)
        for part in PARTS:
            end_s = min(committed_s, at_s + recovery[f"{part}_s"])
            self._span(f"spare.{part}", at_s, end_s, inside, {})
            at_s = end_s
        failure.end(_ns(committed_s))

    def _span(self, name: str, began_s: float, ended_s: float, under: Any, details: Mapping[str, Any]) -> None:
        self._begun(name, began_s, under, details).end(_ns(ended_s))

    def _begun(self, name: str, began_s: float, under: Any, details: Mapping[str, Any]) -> Any:
        return self._tracer.start_span(name, context=under, start_time=_ns(began_s), attributes=dict(details))


def _otlp() -> tuple[Any, Any]:
    """What sends spans, and what sends figures. Raises ValueError for a protocol that there is not."""
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

    protocol = os.environ.get(PROTOCOL, "http/protobuf")
    if protocol != "http/protobuf":
        raise ValueError(f"{PROTOCOL} is {protocol}, and only http/protobuf is sent; unset it, and name its port")
    timeout_s = None if TIMEOUT in os.environ else SEND_S
    return OTLPSpanExporter(timeout=timeout_s), PeriodicExportingMetricReader(OTLPMetricExporter(timeout=timeout_s))


def _resource(job: JobDescription) -> dict[str, Any]:
    """What is the same for the whole job, under Megatron's names."""
    names = {
        "dl.tensor_parallel.size": "tensor_model_parallel_size",
        "dl.pipeline_parallel.size": "pipeline_model_parallel_size",
        "megatron.num_layers": "num_layers",
        "megatron.hidden_size": "hidden_size",
        "megatron.num_attention_heads": "num_attention_heads",
        "megatron.micro_batch_size": "micro_batch_size",
    }
    known = {name: job.identity.get(flag) for name, flag in names.items()}
    known |= {"dl.batch_size": job.global_batch_size, "dl.sequence_length": job.seq_length}
    return {name: value for name, value in known.items() if value}


def _ns(time_s: float) -> int:
    return round(time_s * 1e9)

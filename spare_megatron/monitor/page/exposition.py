"""The figures of runs for Prometheus, made anew for each scrape. Names are those of docs/operating.md."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from spare_megatron.monitor.job_picture import JobPicture
from spare_megatron.monitor.page.followed_run import FollowedRun
from spare_megatron.monitor.page.run_drawing import cells_of
from spare_megatron.monitor.status_texts import short_shards
from spare_megatron.monitor.wall_time import PARTS

STATES = ("starting", "live", "patching", "learning", "dead")
GAUGES = {
    "readable": "1 where the run directory can be read, else 0",
    "running": "1 until the job has ended for good",
    "last_progress_timestamp_seconds": "when a step was committed last, or a job attempt began",
    "step": "last committed step",
    "last_step": "step that ends the job",
    "step_seconds": "length of the last committed step",
    "loss": "of the last committed step",
    "load_pieces": "pieces of the busiest group in the step in flight",
    "slowest_speed": "speed of the slowest member; the median one has 1",
    "redundancy": "groups that host a shard",
    "hosts_least": "fewest live hosts of a shard; the loss of them all is a wipe-out",
    "state_copies_least": "fewest copies of a state shard that votes have compared; absent where every group has all",
    "state_shards_lacking": "state shards with fewer copies than --spare-state-redundancy; absent as the one before",
    "lives": "starts of the job in this run directory",
    "save_interval_steps": "steps between two saves; absent where none are planned",
    "steps_since_save": "committed steps that are in no checkpoint of this job attempt",
    "wall_seconds": "wall time of the job so far",
    "effective_training_ratio": "effective training time as a share of the wall time",
}
"""Name behind spare_megatron_ -> help; one value for each run."""
COUNTERS = {
    "steps": "committed steps, those that were done again too",
    "returns": "lost groups that were members again",
    "saves": "checkpoints that count",
}
PREFIX = "spare_megatron_"


class _Runs(Collector):
    def __init__(self, runs: Sequence[FollowedRun]) -> None:
        self._runs = runs

    def collect(self) -> Iterator[Metric]:
        gauges = {name: GaugeMetricFamily(PREFIX + name, text, labels=["run"]) for name, text in GAUGES.items()}
        counters = {name: CounterMetricFamily(PREFIX + name, text, labels=["run"]) for name, text in COUNTERS.items()}
        groups = GaugeMetricFamily(PREFIX + "groups", "groups by what they do", labels=["run", "state"])
        parts = GaugeMetricFamily(PREFIX + "part_seconds", "wall time by part", labels=["run", "part"])
        failures = CounterMetricFamily(PREFIX + "failures", "by whether they were masked", labels=["run", "masked"])
        for run in self._runs:
            gauges["readable"].add_metric([run.name], not run.trouble)
            found = run.figures(_figures)
            if found is None:
                continue
            values, counts, states, seconds, masked = found
            for name, value in values.items():
                gauges[name].add_metric([run.name], value)
            for name, value in counts.items():
                counters[name].add_metric([run.name], value)
            for state in STATES:
                groups.add_metric([run.name, state], states[state])
            for part in PARTS:
                parts.add_metric([run.name, part], seconds[part])
            for answer in (True, False):
                failures.add_metric([run.name, str(answer).lower()], masked[answer])
        yield from (*gauges.values(), *counters.values(), groups, parts, failures)


def exposition(runs: Sequence[FollowedRun]) -> bytes:
    """The text that Prometheus reads."""
    registry = CollectorRegistry()
    registry.register(_Runs(runs))
    return generate_latest(registry)


_Found = tuple[Mapping[str, float], Mapping[str, float], Counter[str], Mapping[str, float], Counter[bool]]


def _figures(picture: JobPicture) -> _Found | None:
    """Gauges, counters, groups by state, seconds by part, failures by whether they were masked; None before the first
    job attempt."""
    history, series = picture.history, picture.series
    if not history.job_attempts:
        return None
    job_attempt, wall_time = history.job_attempt, picture.wall_time()
    in_attempt = [save.step for save in history.saves[-1:] if save.time_s >= job_attempt.opened_s]
    values = {
        "running": float(not picture.is_over),
        "last_progress_timestamp_seconds": max([job_attempt.opened_s, *series.time_unix_s[-1:]]),
        "step": job_attempt.committed,
        "last_step": job_attempt.spec.last_step,
        "redundancy": len(job_attempt.spec.offsets),
        "lives": len(history.job_attempts),
        "steps_since_save": job_attempt.committed - max([job_attempt.spec.first_step, *in_attempt]),
        "wall_seconds": wall_time.wall_s,
    }
    if series.step:
        values["step_seconds"] = series.step_time_s[-1]
        values["effective_training_ratio"] = wall_time.share("train")
        if math.isfinite(series.loss[-1]):
            values["loss"] = series.loss[-1]
    if job_attempt.save_interval:
        values["save_interval_steps"] = job_attempt.save_interval
    if picture.status.get("hosts_least") is not None:
        values["hosts_least"] = picture.status["hosts_least"]
    if copies := picture.status.get("state_copies"):
        values["state_copies_least"] = min(map(len, copies["hosts"].values()))
        values["state_shards_lacking"] = len(short_shards(copies))
    if picture.status.get("load"):
        values["load_pieces"] = max(picture.status["load"].values())
    reported = picture.status.get("groups", {})
    speeds = [reported[name]["speed"] for name in map(str, history.live) if "speed" in reported.get(name, {})]
    if speeds:
        values["slowest_speed"] = min(speeds)
    counts = {"steps": len(series.step), "returns": len(history.returns), "saves": len(history.saves)}
    states = Counter(cell[0] for cell in cells_of(picture))
    known = (one for one in history.failures if not one.masked or not history.in_flight(one))  # a counter never falls
    return values, counts, states, wall_time.parts, Counter(failure.masked for failure in known)

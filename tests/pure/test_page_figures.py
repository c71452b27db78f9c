"""The figures for Prometheus, and that dashboard and alert rules use none but these."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from spare_megatron.monitor.page.exposition import COUNTERS, GAUGES, exposition
from spare_megatron.monitor.page.followed_run import FollowedRun
from spare_megatron.monitor.wall_time import PARTS
from spare_megatron.protocol.messages import Saved, Tuned
from tests.pure.scripted_job import FAILURE_FREE_S, SPEC, ScriptedJob
from tests.pure.written_job import Written

GRAFANA = Path(__file__).resolve().parents[2] / "scripts" / "grafana"
USE = re.compile(r"(spare_megatron_\w+)(?:\{(.*?)\})?")

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]

COPIES = {"due": 2, "hosts": {"0": [0, 1], "1": [2], "2": [3]}, "copying": {"1": {"3": 2}}, "unable": {}}
"""Of the state shards in status.json."""


def samples(*runs: FollowedRun) -> Samples:
    """(name, sorted labels without the run) -> value, as Prometheus reads them."""
    families = list(text_string_to_metric_families(exposition(runs).decode()))
    assert all(family.documentation for family in families)
    return {
        (one.name.removeprefix("spare_megatron_"), tuple(sorted(one.labels.items()))): one.value
        for family in families
        for one in family.samples
    }


@pytest.fixture
def job() -> ScriptedJob:
    """A job that saves every two steps; the second of five steps loses a group."""
    job = ScriptedJob(replace(SPEC, save_every=2))
    job.step()
    job.lose(1)
    job.step()
    job.tell(Saved(0, 0, 2, "step-2"))
    for _ in range(3):
        job.step()
    return job


@pytest.fixture
def run(tmp_path: Path, job: ScriptedJob) -> FollowedRun:
    written = Written(tmp_path, job)
    written.go_on()
    written.status()
    status = json.loads(written.dir.status.read_text())
    speeds = {"0": {"speed": 1.0}, "1": {"speed": 0.1}, "2": {"speed": 0.5}, "3": {}}  # group 1 is lost
    written.dir.status.write_text(json.dumps({**status, "groups": speeds, "state_copies": COPIES}))
    run = FollowedRun(0, "a", written.dir)
    run.look()
    return run


def test_every_figure_is_that_of_the_job(run: FollowedRun, job: ScriptedJob) -> None:
    found = samples(run)

    def value(name: str, **labels: str) -> float:
        return found[name, tuple(sorted({**labels, "run": "a"}.items()))]

    assert value("step") == value("steps_total") == 5
    assert value("last_step") == SPEC.last_step
    assert value("step_seconds") == pytest.approx(FAILURE_FREE_S)
    assert value("last_progress_timestamp_seconds") == job.now_s
    assert value("loss") == 2.0
    assert value("running") == value("readable") == value("lives") == value("saves_total") == 1
    assert value("save_interval_steps") == 2
    assert value("steps_since_save") == 3
    assert (value("redundancy"), value("hosts_least"), value("load_pieces")) == (2, 1, 4)
    assert value("slowest_speed") == 0.5
    assert (value("state_copies_least"), value("state_shards_lacking")) == (1, 2)
    assert value("returns_total") == 0
    assert value("groups", state="live") == 3
    assert value("groups", state="dead") == 1
    assert value("failures_total", masked="true") == 1
    assert value("failures_total", masked="false") == 0
    seconds = sum(value("part_seconds", part=part) for part in PARTS)
    assert seconds == pytest.approx(value("wall_seconds"))
    assert value("effective_training_ratio") == pytest.approx(value("part_seconds", part="train") / seconds)
    plain = {name for name, labels in found if labels == (("run", "a"),)}
    assert plain == {*GAUGES, *(f"{name}_total" for name in COUNTERS)}


def test_a_job_that_has_ended_does_not_run(tmp_path: Path, job: ScriptedJob) -> None:
    job.leave(1.0)
    written = Written(tmp_path, job)
    written.go_on()
    run = FollowedRun(0, "a", written.dir)
    run.look()
    assert samples(run)["running", (("run", "a"),)] == 0


def test_the_tuner_changes_the_interval(tmp_path: Path, job: ScriptedJob) -> None:
    job.tell(Tuned("slower saves", save_interval=7))
    written = Written(tmp_path, job)
    written.go_on()
    run = FollowedRun(0, "a", written.dir)
    run.look()
    assert samples(run)["save_interval_steps", (("run", "a"),)] == 7


def test_runs_are_distinguished_and_one_that_cannot_be_read_is_known(run: FollowedRun, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = Written(tmp_path / "other", ScriptedJob())
    other.job.step()
    other.go_on()
    second = FollowedRun(1, 'b "quoted"', other.dir)
    assert ("step", (("run", 'b "quoted"'),)) not in samples(run, second), "not read yet"
    second.look()
    with other.dir.metrics.open("a") as file:
        file.write("{]\n")
    second.look()
    found = samples(run, second)
    assert found["readable", (("run", 'b "quoted"'),)] == 0
    assert found["readable", (("run", "a"),)] == 1
    assert found["step", (("run", 'b "quoted"'),)] == 1, "what is known of it"


def test_the_documentation_names_every_figure(run: FollowedRun) -> None:
    page = (GRAFANA.parents[1] / "docs" / "operating.md").read_text()
    section = page[page.index("### Prometheus and Grafana") :].split("\n## ")[0]
    assert {name for name, _ in samples(run)} <= set(re.findall(r"`(\w+)`", section))


def _expressions() -> dict[str, str]:
    """Where it stands -> what Prometheus is asked."""
    dashboard = json.loads((GRAFANA / "dashboard.json").read_text())
    rules = yaml.safe_load((GRAFANA / "alerts.yml").read_text())
    panels = {
        f"panel {panel['title']} {target['refId']}": target["expr"]
        for panel in dashboard["panels"]
        for target in panel["targets"]
    }
    names = {f"variable {one['name']}": json.dumps(one["query"]) for one in dashboard["templating"]["list"]}
    alerts = {f"alert {rule['alert']}": rule["expr"] for group in rules["groups"] for rule in group["rules"]}
    return panels | {where: text for where, text in names.items() if "spare_megatron" in text} | alerts


EXPRESSIONS = _expressions()


def test_there_are_panels_and_alerts() -> None:
    words = " ".join(EXPRESSIONS)
    assert len(EXPRESSIONS) >= 20
    assert all(f"alert {name}" in words for name in ("NoCommitForLong", "OneHostLeft", "SaveOverdue"))


@pytest.mark.parametrize("where", EXPRESSIONS)
def test_dashboard_and_alerts_use_what_is_there(run: FollowedRun, where: str) -> None:
    there = {(f"spare_megatron_{name}", label) for name, labels in samples(run) for label, _ in labels}
    uses = USE.findall(EXPRESSIONS[where])
    assert uses
    for name, labels in uses:
        assert (name, "run") in there, f"{where} asks for {name}, which /metrics does not have"
        for label in re.findall(r"(\w+)\s*[=!]", labels):
            assert (name, label) in there, f"{where}: {name} has no label {label}"

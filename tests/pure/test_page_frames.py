"""What the page is sent: frames of a scripted job, and changes that lead from one to another."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from spare_megatron.monitor.job_picture import StepSeries
from spare_megatron.monitor.page import run_drawing
from spare_megatron.monitor.page.event_streams import STREAMS_MAX, WAITING_MAX, EventStreams
from spare_megatron.monitor.page.followed_run import FollowedRun, names_of
from spare_megatron.monitor.page.frame import Frame, changes
from spare_megatron.monitor.page.run_drawing import RunDrawing, StepPoints
from spare_megatron.protocol.messages import Hello
from spare_megatron.runtime.run_directory import RunDirectory
from tests.pure.scripted_job import SPEC, ScriptedJob
from tests.pure.written_job import Written


def applied(shown: Frame, news: dict[str, Any]) -> Frame:
    """What a browser shows after ``news`` (static/run.js)."""
    shown = Frame({}) if news.get("whole") else shown
    cells = [("", 0, 0, "", 0.0)] * news["groups"] if "groups" in news else list(shown.cells)
    for group, cell in news.get("cells", {}).items():
        cells[int(group)] = cell
    lists = {
        name: tuple(getattr(shown, name)[: news[key]["from"]]) + tuple(news[key]["list"])
        for name, key in (("listed", "told"), ("points", "points"))
        if key in news
    }
    return replace(shown, cells=tuple(cells), **{n: news[n] for n in ("head", "parts") if n in news}, **lists)


CELLS = st.tuples(
    st.sampled_from(["live", "dead"]), st.integers(0, 2), st.just(0), st.just(""), st.sampled_from([0.0, 0.5])
)
FRAMES = st.builds(
    Frame,
    st.dictionaries(st.sampled_from("ab"), st.integers(0, 2)),
    st.lists(CELLS, max_size=4).map(tuple),
    st.lists(st.tuples(st.just("train"), st.just(""), st.just(""), st.floats(0, 1)), max_size=2).map(tuple),
    st.lists(st.fixed_dictionaries({"text": st.sampled_from("xyz")}), max_size=4).map(tuple),
    st.lists(st.tuples(*[st.integers(0, 2)] * 5), max_size=4).map(tuple),
)


@settings(max_examples=50)
@given(st.lists(FRAMES, min_size=1, max_size=4))
def test_changes_lead_from_one_frame_to_the_next(frames: list[Frame]) -> None:
    news = [changes(None, frames[0])]
    news += [changes(before, after) for before, after in pairwise(frames)]
    shown = Frame({})
    for one in news:
        shown = applied(shown, one)
    assert shown == frames[-1]
    assert changes(shown, frames[-1]) == {}


def test_a_frame_shows_the_states_of_groups() -> None:
    job, drawing = ScriptedJob(), RunDrawing()

    def states(status: dict[str, Any] | None = None) -> list[str]:
        picture = job.picture()
        picture.status = status or {}
        return [cell[0] for cell in drawing.frame(picture, job.now_s).cells]

    job.step()
    assert states() == ["live"] * 4
    job.lose(1)
    assert states() == ["patching", "dead", "live", "live"]
    job.tell(Hello(1, 1, "f", 0, process_nonce="1-1"))
    learning = {"learners": {"1": 1}, "learning": {"1": "its processes start"}, "time_unix_s": job.now_s}
    learning |= {"phase": "running", "hosts_least": 1, "saved_step": -1, "outcome": ""}
    assert states(learning) == ["patching", "learning", "live", "live"]
    job.step()
    assert states() == ["live", "dead", "live", "live"], "patched"


def test_events_have_the_reason_and_the_cost_of_a_failure() -> None:
    job, drawing = ScriptedJob(), RunDrawing()
    job.step()
    job.now_s += 1.0
    job.lose(1)
    job.step()
    job.step()
    frame = drawing.frame(job.picture(), job.now_s)
    assert [one["kind"] for one in frame.listed] == ["life", "failure"]
    failure = frame.listed[-1]
    assert failure["text"] == "group 1 exited"
    assert "epoch 2 with 3 of 4 groups" in failure["why"]
    assert failure["cost"]
    assert (failure["back"], failure["groups"], failure["masked"]) == ("not back", (1,), True)
    assert frame.head["phase"] == "training"
    assert dict(frame.head["facts"])["groups live"] == "3 of 4"
    json.dumps(changes(None, frame), allow_nan=False)


def test_missing_copies_of_state_are_shown() -> None:
    job, drawing = ScriptedJob(), RunDrawing()
    job.step()
    copies = {"due": 2, "hosts": {"0": [0, 1], "1": [1, 2]}, "copying": {}, "unable": {}}
    found = []
    for hosts in (copies["hosts"], {"0": [0], "1": [1, 2]}):
        picture = job.picture()
        picture.status = {
            "phase": "running",
            "saved_step": -1,
            "outcome": "",
            "state_copies": {**copies, "hosts": hosts},
        }
        head = drawing.frame(picture, job.now_s).head
        found.append((head["tone"], head["lines"][:2]))
    assert found == [
        ("good", ("each of the 2 state shards has 2 copies", "  state shard 0: on groups 0-1")),
        ("warn", ("1 state shard has fewer than 2 copies", "  state shard 0: on group 0")),
    ]


def test_before_the_first_group_there_is_a_frame_too() -> None:
    job = ScriptedJob()
    job.transitions = []
    assert RunDrawing().frame(job.picture(), 0.0).head["lines"] == ("no group has come yet",)


def test_points_stay_few_and_keep_extremes(monkeypatch: Any) -> None:
    monkeypatch.setattr(run_drawing, "POINTS_MAX", 8)
    series, points = StepSeries(), StepPoints()
    for step in range(1, 101):
        line = {"time_unix_s": float(step), "step": step, "step_time_s": 1.0, "live_groups": 4, "loss": 1.0 / step}
        series.add(line | ({"step_time_s": 9.0, "live_groups": 1, "loss": None} if step == 77 else {}))
        shown = points.take(series)
        assert len(shown) <= 8
        assert shown[-1][0] == step
    assert max(point[2] for point in shown) == 9.0
    assert min(point[3] for point in shown) == 1
    again = StepPoints()
    assert again.take(series) == shown, "whatever the looks"


def test_a_run_that_cannot_be_read_any_more_says_so(tmp_path: Path) -> None:
    written = Written(tmp_path, ScriptedJob())
    written.job.step()
    written.go_on()
    run = FollowedRun(0, "run", written.dir)
    assert json.loads(run.whole())["head"]["phase"] == "reading"
    seen = run.look()
    assert seen is not None
    assert json.loads(run.show(seen))["groups"] == SPEC.num_groups
    assert run.look() is None, "nothing is new"
    metrics = written.dir.metrics.read_bytes()
    written.dir.metrics.write_bytes(metrics + b"{]\n")
    seen = run.look()
    assert seen is not None
    assert seen.head["lines"] == (f"line 2 of {written.dir.metrics} is no JSON object: the file is damaged",)
    assert seen.cells, "what was seen before is still shown"
    written.dir.metrics.write_bytes(metrics)
    seen = run.look()
    assert seen is not None
    assert seen.head["phase"] == "training"
    assert not run.trouble


def test_names_of_runs_differ() -> None:
    runs = [RunDirectory(path) for path in ("a/first", "b/first", "second", "second")]
    assert names_of(runs) == ["a/first", "b/first", "second (3)", "second (4)"]


def test_a_slow_reader_gets_everything_anew_instead_of_all_that_was_notified() -> None:
    streams = EventStreams(lambda: ["whole"])
    with streams.stream() as stream:
        for number in range(WAITING_MAX + 1):
            streams.tell(str(number))
        streams.tell("more")
        assert [stream._texts.get_nowait() for _ in range(stream._texts.qsize())] == ["whole", "more"]
    assert not streams.full


def test_streams_are_bounded() -> None:
    streams, contexts = EventStreams(list), []
    for _ in range(STREAMS_MAX):
        assert not streams.full
        contexts.append(streams.stream())
        contexts[-1].__enter__()
    assert streams.full
    contexts.pop().__exit__(None, None, None)
    assert not streams.full

"""Operators let groups leave: nothing is patched or computed twice, the weights are those of the undisturbed run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from spare_megatron.checkpoint.folder import last_good, step_of
from spare_megatron.cli import drain as drain_command
from spare_megatron.cli.drain import main
from spare_megatron.cli.status import status_of
from spare_megatron.config.errors import ConfigError
from spare_megatron.config.exits import ExitCode
from spare_megatron.control_plane import control_pb2 as pb
from spare_megatron.launch.attempt_report import note_end
from spare_megatron.monitor.run_files import RunFiles
from spare_megatron.runtime.failpoints import VARIABLE
from spare_megatron.runtime.run_directory import CoordinatorAddress, RunDirectory
from tests.process.harness import RESTARTS, Job, launch
from tests.process.returning import check_voted, leave_whole

GROUPS = 4
PIECES = 4
WORDS = ("--redundancy", "2", "--pieces", str(PIECES), "--piece-s", "0.03")


def start(run_dir: Path, *words: str, steps: int, environ: Mapping[str, str] | None = None) -> Job:
    """A job of four groups of one rank."""
    return launch(run_dir, *WORDS, "--steps", str(steps), *words, groups=GROUPS, group_size=1, environ=environ)


def check_weights(run_dir: Path) -> None:
    """They were those of the undisturbed run after every step."""
    check_voted(run_dir / "journal.jsonl", GROUPS, PIECES)


class Drain:
    """spare-drain, called in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, job: Job, *words: str, code: int = 0) -> str:
        """Its output, or its sentence where it refuses."""
        assert main([str(job.run_dir), *words]) == code, job.report()
        reported = self._capsys.readouterr()
        return (reported.err if code else reported.out).strip()


@pytest.fixture
def drain(capsys: pytest.CaptureFixture[str]) -> Drain:
    return Drain(capsys)


Look = tuple[int, str, list[int], dict[str, int]]


@pytest.mark.parametrize(
    ("last", "reported"),
    [
        ((4, "running", [2], {"0": 0}), 7),
        ((4, "running", [], {"0": 0, "2": 1}), 7),
        ((3, "running", [], {"0": 0, "2": 0}), None),
        ((3, "stopped", [2], {"0": 0, "2": 0}), None),
    ],
    ids=["it has left", "another has its place", "it may stay", "the end"],
)
def test_a_status_of_before_the_request_says_nothing(
    monkeypatch: pytest.MonkeyPatch, last: Look, reported: int | None
) -> None:
    """The group had joined just before."""
    looks = [(0, "forming", [], {}), (1, "running", [], {"0": 0}), (2, "running", [], {"0": 0, "2": 0})]
    statuses = [
        {"epoch": epoch, "phase": phase, "drained": drained, "live": live, "step": 7}
        for epoch, phase, drained, live in (*looks, (3, "running", [2], {"0": 0, "2": 0}), last)
    ]
    left = iter([None, *statuses])
    monkeypatch.setattr(drain_command, "glance", lambda path: next(left))
    monkeypatch.setattr(drain_command, "LOOK_S", 0.0)
    assert list(drain_command.departures(RunDirectory("unread"), [2], 3)) == [(2, reported)]


def test_a_coordinator_that_is_just_being_replaced_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Unless the launcher has left."""
    run_dir, called = RunDirectory(tmp_path), list[str]()
    run_dir.token(create=True)
    first = CoordinatorAddress("127.0.0.1:1", 1, 1, 0, 1, "here")

    class Unavailable(grpc.RpcError):
        def code(self) -> grpc.StatusCode:
            return grpc.StatusCode.UNAVAILABLE

    async def call(address: str, security: object, request: object) -> pb.DrainAnswer:
        called.append(address)
        if address == first.address:
            run_dir.publish_coordinator(replace(first, address="127.0.0.1:2", fencing=2))
            raise Unavailable
        return pb.DrainAnswer(groups=[2])

    monkeypatch.setattr(drain_command, "_call", call)
    run_dir.publish_coordinator(first)
    assert list(drain_command.ask(run_dir, pb.DrainRequest(groups=[2]), "").groups) == [2]
    assert called == ["127.0.0.1:1", "127.0.0.1:2"]
    first = replace(first, address="127.0.0.1:2")
    note_end(run_dir, ExitCode.FINISHED)
    with pytest.raises(ConfigError, match=r"at 127.0.0.1:2 does not answer \(UNAVAILABLE\)"):
        drain_command.ask(run_dir, pb.DrainRequest(groups=[2]), "")


def test_nobody_waits_for_a_group_of_a_job_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain_command, "glance", lambda path: {"epoch": 3, "phase": "running", "live": {"2": 0}})
    monkeypatch.setattr(drain_command, "LOOK_S", 0.01)
    monkeypatch.setattr(drain_command, "GONE_S", 0.05)
    with pytest.raises(ConfigError, match=r"written no status for 0.05 s, so it is not known whether group 2 left"):
        list(drain_command.departures(RunDirectory("unread"), [2], 4))


def test_a_group_leaves_without_a_patch_stays_away_and_is_let_back(tmp_path: Path, drain: Drain) -> None:
    reported = tmp_path / "events"
    events = ("--spare-on-event", f"cat >> {reported}")
    job = start(tmp_path, RESTARTS, "3", *events, steps=2000)
    job.wait_for_step(3)
    assert "are the last live hosts of a shard" in drain(job, "--node", "127.0.0.1", code=2)
    assert "no group that is there has a rank at 192.0.2.1" in drain(job, "--node", "192.0.2.1", code=2)
    answer = drain(job, "--group", "2", "--reason", "ECC errors")
    assert answer.startswith("1 group (2) will leave"), answer
    assert "group 2 has left; step " in answer
    assert "group 1 is the last live host of a shard" in drain(job, "--group", "1", code=2)
    assert "group 2 has been drained already" in drain(job, "--group", "2", code=2)
    assert "groups 0, 1, 3 are there; group 7 is not among them" in drain(job, "--group", "7", code=2)
    job.wait_for("the notice", lambda: "group 2 is drained" in (tmp_path / "launch.out").read_text())
    step = job.metrics[-1]["step"]
    job.wait_for_step(step + 3)
    assert status_of(RunDirectory(str(tmp_path)))["drained"] == [2]
    assert not job.pids(2)
    assert drain(job, "--group", "2", "--undo") == "1 group (2) may stay or be started again"
    leave_whole(job, GROUPS, (2, 1))
    check_weights(tmp_path)
    for line in job.metrics:
        assert line["pieces_computed"] == line["pieces"], line
        assert line["recovery"] is None, line
    history = RunFiles(RunDirectory(str(tmp_path))).look().history
    assert [(one.group, len(history.failures)) for one in history.drained] == [(2, 0)]
    assert [one.group for one in history.returns] == [2]
    kinds = [line.split('"event": "')[1].split('"')[0] for line in reported.read_text().splitlines()]
    assert kinds.count("drained") == 1
    assert not {"loss", "patch"}.intersection(kinds)


def test_a_coordinator_that_is_killed_before_it_tells_the_group(tmp_path: Path, drain: Drain) -> None:
    armed = tmp_path / "armed"
    armed.touch()
    environ = {VARIABLE: f"coordinator:order.fenced=kill,while={armed}"}
    job = start(tmp_path / "run", steps=40, environ=environ)
    job.wait_for_step(2)
    drain(job, "--group", "0", "--no-wait")
    output = tmp_path / "run" / "launch.out"
    job.wait_for("a restart", lambda: "the coordinator was killed by" in output.read_text())
    armed.unlink()
    job.wait_for("group 0 gone", lambda: not job.pids(0))
    job.finish()
    check_weights(tmp_path / "run")
    history = RunFiles(RunDirectory(str(tmp_path / "run"))).look().history
    assert [one.group for one in history.drained] == [0]
    assert not history.failures


def test_a_loss_that_leaves_a_last_host_is_followed_by_a_save(tmp_path: Path) -> None:
    save = tmp_path / "checkpoints"
    words = ("--save", str(save), "--save-interval", "20", "--emergency-saves")
    job = start(tmp_path / "run", *words, steps=25)
    job.wait_for_step(6)
    job.kill(*job.pids(1))
    job.wait_for("the emergency save", lambda: last_good(save)[0] is not None)
    found, _ = last_good(save)
    assert found is not None
    assert 6 <= step_of(found) < 20
    job.finish()
    assert "the loss of one of groups 0 and 2 could end the job" in (tmp_path / "run" / "launch.out").read_text()
    check_weights(tmp_path / "run")

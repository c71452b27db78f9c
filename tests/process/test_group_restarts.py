"""spare-launch starts lost groups again while the others train: real processes, with the toy model and without one."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from spare_megatron.cli.status import status_of
from spare_megatron.config.exits import ExitCode
from spare_megatron.monitor.status_texts import status_text
from spare_megatron.protocol.messages import Event, Hello, Lost
from spare_megatron.runtime.run_directory import RunDirectory, glance
from tests.process.harness import TOY, Job, launch

Begin = Callable[..., Job]


@pytest.fixture
def begin() -> Iterator[Begin]:
    """Starts a job of two groups, by default of ranks without a model, and ends it when the test fails."""
    jobs: list[Job] = []

    def make(run_dir: Path, *words: str, restarts: int = 3, toy: bool = False, inject: Sequence[str] = ()) -> Job:
        flags = ("--spare-max-group-restarts", str(restarts), *words)
        script, options = (TOY, ()) if toy else ("tests.process.control_client", ("-m",))
        jobs.append(launch(run_dir, *flags, groups=2, script=script, options=options, inject=inject))
        return jobs[-1]

    yield make
    for job in jobs:
        job.end()


def reported(job: Job, about: str) -> list[str]:
    """The lines of the launcher that have the words ``about``."""
    lines = (job.run_dir / "launch.out").read_text().splitlines()
    return [line for line in lines if line.startswith("spare-launch: ") and about in line]


def events(job: Job) -> list[Event]:
    """All events of the journal."""
    return [record.event for record in job.records()]


def incarnations(job: Job, group: int) -> list[int]:
    """Those that sent Hello for the first time, in their order."""
    return list(dict.fromkeys(e.incarnation for e in events(job) if isinstance(e, Hello) and e.group == group))


def status(job: Job) -> dict[str, Any]:
    return glance(job.run_dir / "status.json") or {"learners": {}, "live": {}}


def is_back(job: Job, group: int, incarnation: int) -> bool:
    """Whether the group learns or is a member in this incarnation."""
    now = status(job)
    return incarnation in (now["learners"].get(str(group)), now["live"].get(str(group)))


def rows(job: Job, group: int) -> list[tuple[int, int]]:
    """(position, incarnation) of the group's processes."""
    return sorted((rank["position"], rank["incarnation"]) for rank in job.ranks() if rank["group"] == group)


def test_a_killed_group_is_started_again(begin: Begin, tmp_path: Path) -> None:
    words, inject = ("--steps", "100000", "--piece-s", "0.08"), ["sigkill:group=1,step=3,at=reduce"]
    job = begin(tmp_path / "run", *words, "--redundancy", "2", restarts=1, toy=True, inject=inject)
    job.wait_for("the learner", lambda: is_back(job, 1, 1), timeout_s=120.0)
    if status(job)["learners"]:
        assert "being brought up to date: group 1" in status_text(status_of(RunDirectory(job.run_dir)))
    assert rows(job, 1) == [(0, 1), (1, 1)]
    job.kill(job.process.pid, number=signal.SIGTERM)
    job.finish(code=ExitCode.REQUEUE)
    assert reported(job, "group 1") == [
        "spare-launch: group 1 is started again, as incarnation 1: restart 1 of at most 1 within an hour"
    ]
    assert incarnations(job, 1) == [0, 1]
    logs = {path.name for path in (job.run_dir / "logs" / "group-1").iterdir()}
    assert logs == {f"rank-{p}{later}.log" for p in range(2) for later in ("", ".incarnation-1")}


def test_a_group_that_dies_again_and_again_is_given_up(begin: Begin, tmp_path: Path) -> None:
    """The coordinator is killed in the pause before the second restart; the incarnations go on."""
    pause = ("--spare-group-restart-pause-s", "2")
    job = begin(tmp_path, "--crash-when-back", "--steps", "100000", "--piece-s", "0.03", *pause, restarts=2)
    job.wait_for_step(3)
    job.kill(job.pid(1, 1))
    job.wait_for("the pause", lambda: bool(reported(job, "in 2 s")))
    job.kill(json.loads((job.run_dir / "processes.json").read_text())["coordinator"]["pid"])
    job.wait_for("the end of it", lambda: bool(reported(job, "goes on without it")))
    before = job.metrics[-1]["step"]
    job.wait_for_step(before + 5)
    assert rows(job, 1) == []
    job.kill(job.process.pid, number=signal.SIGTERM)
    job.finish(code=ExitCode.REQUEUE)
    lines = reported(job, "group 1")
    assert re.sub("rank [01]", "rank 0", "\n".join(lines)).split("\n") == [
        "spare-launch: group 1 is started again, as incarnation 1: restart 1 of at most 2 within an hour",
        "spare-launch: group 1 (incarnation 1) has failed again, rank 0: exit code 1; it is started again in 2 s",
        "spare-launch: group 1 is started again, as incarnation 2: restart 2 of at most 2 within an hour",
        "spare-launch: group 1 was restarted 2 times within an hour, and has failed again, rank 0: exit code 1: the "
        "job goes on without it",
    ]
    for incarnation in (1, 2):
        logs = (job.run_dir / "logs" / "group-1").glob(f"rank-*.incarnation-{incarnation}.log")
        assert max(log.read_text().count("RuntimeError: asked to crash") for log in logs) == 1


def test_a_group_is_started_again_only_when_its_host_is_fit(begin: Begin, tmp_path: Path) -> None:
    """The check fails twice, for one reason, and is said once; looks are no restarts."""
    mended, looks = tmp_path / "mended", tmp_path / "looks"
    check = f"echo $SPARE_GROUP $LOCAL_RANK >> {looks}; test -e {mended} || {{ echo the fan is broken; exit 7; }}"
    words = ("--steps", "100000", "--piece-s", "0.03", "--heartbeat-timeout-s", "8")  # nobody is silent here
    job = begin(tmp_path, "--spare-health-check", check, *words, restarts=1)
    job.wait_for_step(3)
    job.kill(job.pid(1, 1))
    job.wait_for("two looks", lambda: looks.exists() and len(looks.read_text().splitlines()) == 2)
    assert rows(job, 1) == []
    mended.touch()
    job.wait_for("the learner", lambda: is_back(job, 1, 1))
    job.kill(job.process.pid, number=signal.SIGTERM)
    job.finish(code=ExitCode.REQUEUE)
    first, second = reported(job, "group 1")
    assert re.fullmatch(
        r"spare-launch: group 1 is not started again yet, \S+: --spare-health-check: exit code 7: the fan is broken; "
        r"looked at again in 5 s, and then less and less often",
        first,
    )
    assert second.endswith("group 1 is started again, as incarnation 1: restart 1 of at most 1 within an hour")
    assert set(looks.read_text().splitlines()) == {"1 2"}


def test_a_check_that_hangs_ends_with_the_job(begin: Begin, tmp_path: Path) -> None:
    flags = ("--spare-health-check", f"touch {tmp_path}/looks; sleep 97531", "--steps", "100000", "--piece-s", "0.03")
    job = begin(tmp_path, *flags, restarts=1)
    job.wait_for_step(3)
    job.kill(*job.pids(1))
    job.wait_for("the look", (tmp_path / "looks").exists)
    job.kill(job.process.pid, number=signal.SIGTERM)
    job.finish(code=ExitCode.REQUEUE)


def test_a_group_that_is_back_waits_for_a_coordinator_that_is_away(begin: Begin, tmp_path: Path) -> None:
    """Its heartbeat time-out is 2 s. It once left after two of them with a user's error, and stayed lost."""
    job = begin(tmp_path, "--steps", "100000", "--piece-s", "0.03")
    job.wait_for_step(3)
    job.kill(*job.pids(1))
    coordinator = json.loads((job.run_dir / "processes.json").read_text())["coordinator"]["pid"]
    job.wait_for("its start", lambda: any(rank["incarnation"] == 1 for rank in job.ranks()), every_s=0.005)
    job.kill(coordinator, number=signal.SIGSTOP)
    begun_s = time.monotonic()
    job.wait_for("the end of the pause", lambda: time.monotonic() > begun_s + 9.0)
    job.kill(coordinator, number=signal.SIGCONT)
    job.wait_for("group 1", lambda: incarnations(job, 1) == [0, 1])
    job.kill(job.process.pid, number=signal.SIGTERM)
    job.finish(code=ExitCode.REQUEUE)
    assert reported(job, "group 1") == [
        "spare-launch: group 1 is started again, as incarnation 1: restart 1 of at most 3 within an hour"
    ]


def test_a_users_error_in_a_group_that_is_back_does_not_end_the_job(begin: Begin, tmp_path: Path) -> None:
    words = ("--error-when-back=--data-path_is_gone", "--steps", "100000", "--piece-s", "0.03")
    job = begin(tmp_path, *words, inject=("sigkill:group=0,position=1,step=3,at=reduce",), restarts=1)
    job.wait_for("the end of it", lambda: bool(reported(job, "goes on without it")))
    before = job.metrics[-1]["step"]
    job.wait_for_step(before + 5)
    job.kill(job.process.pid, number=signal.SIGTERM)
    lines = job.finish(code=ExitCode.REQUEUE)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert reported(job, "group 0") == [
        "spare-launch: group 0 is started again, as incarnation 1: restart 1 of at most 1 within an hour",
        "spare-launch: group 0 was restarted 1 time within an hour, and has failed again, --data-path_is_gone: the job "
        "goes on without it",
    ]


def test_a_group_that_hangs_and_does_not_receive_that_it_is_fenced_is_killed(begin: Begin, tmp_path: Path) -> None:
    job = begin(tmp_path, "--hang", "1,3", "--steps", "100000", "--piece-s", "0.03", restarts=1)
    job.wait_for("the learner", lambda: is_back(job, 1, 1))
    job.kill(job.process.pid, number=signal.SIGTERM)
    job.finish(code=ExitCode.REQUEUE)
    assert len(reported(job, "group 1")) == 1
    [cause] = {loss.cause for e in events(job) if isinstance(e, Lost) for loss in e.losses}
    assert cause == "silent"


def test_after_a_wipe_out_no_group_is_started_alone_and_no_incarnation_is_there_twice(
    begin: Begin, tmp_path: Path
) -> None:
    """Group 0 learns when group 1, the last member, dies: the job starts again with groups above both incarnations."""
    save = ("--save", str(tmp_path / "save"), "--save-interval", "5")
    job = begin(tmp_path / "run", *save, "--steps", "100000", "--piece-s", "0.03")
    job.wait_for("a checkpoint", lambda: (tmp_path / "save" / "iter_0000005").exists())
    job.kill(*job.pids(0))
    job.wait_for("the learner", lambda: is_back(job, 0, 1))
    job.kill(*job.pids(1))
    job.wait_for("the second job attempt", lambda: job.metrics[-1]["life"] == 2)
    before = job.metrics[-1]["step"]
    job.wait_for_step(before + 5)
    job.kill(job.process.pid, number=signal.SIGTERM)
    lines = job.finish(code=ExitCode.REQUEUE)
    assert {line["life"] for line in lines} == {1, 2}
    assert [len(reported(job, f"group {group} is started again")) for group in range(2)] == [1, 0]
    assert (incarnations(job, 0), incarnations(job, 1)) == ([0, 1, 2], [0, 2])
    assert {loss.incarnation for e in events(job) if isinstance(e, Lost) for loss in e.losses} <= {0, 1}

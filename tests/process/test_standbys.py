"""Standbys take the places of lost groups: real processes, the toy model.

The weights of every step, as all groups vote them, must be those of the run in which nothing fails.
"""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest

from spare_megatron.cli.drain import main
from spare_megatron.cli.status import status_of
from spare_megatron.monitor.waiting_counts import waiting_text
from spare_megatron.protocol.messages import CaughtUp, Vote
from spare_megatron.runtime.run_directory import RunDirectory
from tests.process.harness import Job, launch
from tests.process.returning import check_same, check_simulated, check_voted, is_member, leave_whole, records, views
from tests.process.three_groups import GROUPS, PIECES, SIZE, STEPS

pytestmark = [pytest.mark.timeout(300)]
PAUSE = ("--spare-group-restart-pause-s", "0.5")


def start(run_dir: Path, *words: str, inject: tuple[str, ...] = (), restarts: int = 3) -> Job:
    toy = ("--steps", str(STEPS), "--pieces", str(PIECES), "--redundancy", "3", "--piece-s", "0.1")
    flags = ("--spare-max-group-restarts", str(restarts), *words)
    return launch(run_dir, *toy, *flags, groups=GROUPS, inject=inject)


def waiting(job: Job) -> dict[str, list[int]]:
    """Name -> the processes that wait for a place, of all that have come that far."""
    path = job.run_dir / "processes.json"
    found: dict[str, list[int]] = {}
    for one in json.loads(path.read_text())["waiting"] if path.exists() else ():
        if RunDirectory(job.run_dir).waits(one["name"], one["pid"]):
            found.setdefault(one["name"], []).append(one["pid"])
    return found


def wait_for(job: Job, *names: str) -> None:
    """Until all ranks of these standbys wait."""
    sizes = {name: SIZE if name.startswith("standby") else 1 for name in names}
    job.wait_for(f"{names}", lambda: all(len(waiting(job).get(n, ())) == s for n, s in sizes.items()), timeout_s=120.0)


def reported(job: Job, about: str) -> list[str]:
    """The lines of the launcher that have the words ``about``, without times."""
    lines = (job.run_dir / "launch.out").read_text().splitlines()
    found = [
        line.removeprefix("spare-launch: ") for line in lines if line.startswith("spare-launch: ") and about in line
    ]
    return [re.sub(r"since [\d:]+", "since T", line) for line in found]


def status_line(job: Job) -> str:
    """What spare-status says of who waits."""
    return waiting_text(status_of(RunDirectory(job.run_dir))["waiting"])


def test_one_standby_after_another(
    tmp_path: Path, failure_free_of_three: dict[int, set[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """The first is killed just behind its place's writing: the group begins where that was, while a process is left
    where the group was first. The next one takes the place of a group that is drained, on whose devices nothing is
    started."""
    job = start(tmp_path, "--spare-standby-groups", "1", *PAUSE)
    wait_for(job, "standby-0")
    late, stopped = max(waiting(job)["standby-0"]), job.pid(2, 0)
    job.kill(stopped, number=signal.SIGSTOP)
    job.kill(job.pid(2, 1))
    job.wait_for("its place", lambda: bool(reported(job, "standby 0, as incarnation 1")))
    job.kill(late)
    job.wait_for("group 2", lambda: is_member(job, 2, 2), timeout_s=120.0)
    job.kill(stopped)
    job.wait_for("a standby", lambda: any(len(pids) == SIZE for pids in waiting(job).values()), timeout_s=120.0)
    [(name, _)] = waiting(job).items()
    assert main([str(job.run_dir), "--group", "0"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("group 0 has left; step ")
    check_same(leave_whole(job, GROUPS, (2, 2), (0, 1)), failure_free_of_three)
    check_simulated(job, admissions=2)
    taken = f"the place of group 0 is taken by {name.replace('-', ' ')}, as incarnation 1 (waiting since T)"
    assert reported(job, "group 0") == [f"{taken}: it was drained, which counts as no restart"]
    later = f"standby-{1 + int(name.removeprefix('standby-'))}"
    assert not (job.run_dir / "logs" / later).exists()
    log = job.run_dir / "logs" / "group-0" / "rank-0.incarnation-1.log"
    assert log.resolve() == job.run_dir / "logs" / name / "rank-0.log"
    assert "the job is over" in log.read_text()


def test_two_groups_at_once_and_a_standby_that_dies(tmp_path: Path, failure_free_of_three: dict[int, set[str]]) -> None:
    """The kill of a standby that waits has another one started; a fault aimed at the restarted group strikes."""
    again = "sigkill:group=1,step=0,at=join,n=0,restart=1"
    job = start(tmp_path, "--spare-standby-groups", "2", *PAUSE, inject=(again,))
    wait_for(job, "standby-0", "standby-1")
    job.kill(waiting(job)["standby-1"][0])
    wait_for(job, "standby-2")
    assert status_line(job) == "2 standbys wait for a place"
    job.kill(waiting(job)["standby-2"][0], number=signal.SIGSTOP)
    job.wait_for("the list", lambda: status_line(job) == "1 standby waits for a place, 1 is stopped by a signal")
    job.kill(waiting(job)["standby-2"][0], number=signal.SIGCONT)
    job.wait_for("the list", lambda: status_line(job) == "2 standbys wait for a place")
    job.kill(*job.pids(1), *job.pids(2))
    job.wait_for("both places", lambda: len(reported(job, "the place of group")) >= 2)
    check_same(leave_whole(job, GROUPS, (1, 2), (2, 1)), failure_free_of_three)
    assert reported(job, "standby 1") == ["standby 1 has ended, rank 0: killed by SIGKILL; it is started again now"]
    takers = [re.search("group (.) is taken by standby (.)", line) for line in reported(job, "incarnation 1 ")]
    assert {one[1] for one in takers if one} == {"1", "2"}
    assert {one[2] for one in takers if one} == {"0", "2"}
    assert len(list(tmp_path.glob("injected/*"))) == 1


def test_a_standby_computes_in_the_step_that_begins_when_it_joins(tmp_path: Path) -> None:
    """Where groups give pieces that they have not begun, the group that has just come takes its share at once. It comes
    in place of one whose only process is stopped, and does not end."""
    pieces, words = 8, ("--joins", "--ahead", "2", "--heartbeat-s", "2")
    toy = ("--steps", "100", "--pieces", str(pieces), "--redundancy", "3", "--piece-s", "0.1")
    flags = ("--spare-max-group-restarts", "3", "--spare-standby-groups", "1", *PAUSE)
    job = launch(tmp_path, *toy, *words, *flags, groups=GROUPS, group_size=1)
    job.wait_for("standby-0", lambda: len(waiting(job).get("standby-0", ())) == 1, timeout_s=120.0)
    job.wait_for_step(job.metrics[-1]["step"] + 2 if job.metrics else 2)
    job.kill(job.pid(2, 0), number=signal.SIGSTOP)
    job.wait_for("group 2", lambda: is_member(job, 2, 1), timeout_s=120.0)
    leave_whole(job, GROUPS)
    check_voted(tmp_path / "journal.jsonl", GROUPS, pieces)
    joined = next(view for view in views(job) if view.receiver == (2, 1) and view.is_member)
    assert joined.segments == ((),)
    ballots = [r for r in records(job) if isinstance(r.event, Vote) and r.event.result.step == joined.step]
    own = [r.event.result.pieces for r in ballots if r.event.group == 2]  # type: ignore[union-attr]
    holds_s = next(
        r.time_unix_s for r in records(job) if isinstance(r.event, CaughtUp) and r.event.step >= joined.step - 1
    )
    begun_s = next(r.time_unix_s for r in records(job) if any(getattr(a, "view", None) == joined for a in r.actions))
    left = (ballots[-1].time_unix_s - holds_s) / (ballots[-1].time_unix_s - begun_s)  # on a busy machine it comes late
    assert len(own[-1]) >= int(pieces * left) - 3, (
        f"of the step that began when it joined, {left:.2f} of which was left"
    )


def test_a_standby_takes_the_place_of_a_group_whose_results_were_wrong(
    tmp_path: Path, failure_free_of_three: dict[int, set[str]]
) -> None:
    """On whose devices nothing is started any more."""
    wrong = "bitflip:group=2,position=1,step=6,at=gradient,n=0"
    job = start(tmp_path, "--audit-rate", "1", "--spare-standby-groups", "1", *PAUSE, inject=(wrong,))
    check_same(leave_whole(job, GROUPS, (2, 1)), failure_free_of_three)
    [taken] = reported(job, "of group 2")
    assert taken.startswith("the place of group 2 is taken by standby 0, as incarnation 1 ")
    assert taken.endswith(": restart 1 of at most 3 within an hour")
    assert not (job.run_dir / "logs" / "standby-1").exists()

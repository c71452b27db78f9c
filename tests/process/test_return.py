"""Lost groups come back while the others train: real processes, the toy model, state over TCP.

Nothing here depends on how long a start takes: the jobs train until the group is back and has trained for some steps,
and are then asked to leave. The weights of every step, as all groups vote them, must be those of the run in which
nothing fails.
"""

from __future__ import annotations

import json
import re
import signal
from collections import defaultdict
from pathlib import Path

import pytest

from spare_megatron.config.exits import ExitCode
from spare_megatron.monitor.trace_files import draw_timeline
from spare_megatron.monitor.trace_model import group_track
from spare_megatron.protocol.messages import CaughtUp, JoinersLate, Lost, Ready, Vote, Withdrawn
from spare_megatron.runtime.run_directory import RunDirectory
from tests.process.harness import Job, launch
from tests.process.returning import check_same, check_simulated, is_member, leave_whole, records, reported
from tests.process.three_groups import GROUPS, PIECES, STEPS

pytestmark = pytest.mark.timeout(300)


def start(
    run_dir: Path,
    *inject: str,
    redundancy: int = 3,
    piece_s: float = 0.1,
    restarts: int = 3,
    progress_s: float = 40.0,
    pause_s: float = 5.0,
    heartbeat_s: float = 8.0,
    rank_times: bool = False,
) -> Job:
    words = ("--steps", str(STEPS), "--pieces", str(PIECES), "--redundancy", str(redundancy))
    words += ("--piece-s", str(piece_s), "--spare-max-group-restarts", str(restarts))
    words += ("--progress-s", str(progress_s), "--spare-group-restart-pause-s", str(pause_s))
    words += ("--heartbeat-s", str(heartbeat_s))
    words += ("--spare-rank-times",) if rank_times else ()
    return launch(run_dir, *words, groups=GROUPS, inject=inject)


def test_a_killed_group_computes_pieces_again_within_four_steps_of_the_state(
    tmp_path: Path, failure_free_of_three: dict[int, set[str]]
) -> None:
    job = start(tmp_path, "sigkill:group=2,step=3,at=reduce", rank_times=True)
    check_same(leave_whole(job, GROUPS, (2, 1)), failure_free_of_three)
    check_simulated(job, admissions=1)
    check_tracks_of_ranks(job)
    events = [record.event for record in records(job)]
    [offered] = {event.number for event in events if isinstance(event, CaughtUp)}
    state = min(event.step for event in events if isinstance(event, CaughtUp))
    votes = (event for event in events if isinstance(event, Vote) and (event.group, event.incarnation) == (2, 1))
    own = next(vote.result.step for vote in votes if vote.result.pieces)
    assert offered == 1
    assert own - state <= 5, "the state of a step is had in the next one at best, and own pieces come four steps later"


def test_one_loss_after_another(tmp_path: Path, failure_free_of_three: dict[int, set[str]]) -> None:
    """The coordinator dies during an offer; then two groups at once, so that the one that came back serves both; then
    a donor of the next learner."""
    job = start(tmp_path, "sigkill:group=2,step=3,at=reduce", pause_s=0.5)
    job.wait_for("the learner", lambda: reported(job, Ready, 2, 1), timeout_s=120.0)
    job.kill(json.loads((job.run_dir / "processes.json").read_text())["coordinator"]["pid"])
    job.wait_for("group 2", lambda: trains_whole(job, (2, 1)), timeout_s=120.0)
    job.kill(*job.pids(0), *job.pids(1))
    job.wait_for("groups 0 and 1", lambda: trains_whole(job, (0, 1), (1, 1)), timeout_s=120.0)
    job.kill(*job.pids(2))
    job.wait_for("the next learner", lambda: reported(job, CaughtUp, 2, 2), timeout_s=120.0)
    job.kill(*job.pids(0))
    check_same(leave_whole(job, GROUPS, (2, 2), (0, 2)), failure_free_of_three)
    check_simulated(job, admissions=5)


def test_the_last_host_of_a_shard_has_not_caught_up(tmp_path: Path, failure_free_of_three: dict[int, set[str]]) -> None:
    """Of three groups and two hosts of each shard one dies, and the next one when the first is about to be brought up
    to date: the step in flight has pieces that only a group without the state can compute."""
    job = start(tmp_path, "sigkill:group=2,step=3,at=reduce", redundancy=2, piece_s=0.3)
    job.wait_for("the learner", lambda: reported(job, Ready, 2, 1), timeout_s=120.0)
    job.kill(*job.pids(1))
    check_same(leave_whole(job, GROUPS, (2, 1), (1, 1)), failure_free_of_three)
    assert any(re.search(r"group 2[^;]*, because no other host of shard \d lives", one.reason) for one in records(job))


@pytest.mark.full
def test_a_learner_that_dies_with_whatever_it_has_got(
    tmp_path: Path, failure_free_of_three: dict[int, set[str]]
) -> None:
    """The state, a result, another one: each time it is started again, after 0, 5 and 10 s."""
    deaths = [f"sigkill:group=2,step=0,at=join,n={n},restart={n + 1}" for n in range(3)]
    job = start(tmp_path, "sigkill:group=2,step=3,at=reduce", *deaths, restarts=4)
    check_same(leave_whole(job, GROUPS, (2, 4)), failure_free_of_three)
    assert len(list(tmp_path.glob("injected/*"))) == 4


@pytest.mark.full
def test_a_joiner_with_pieces_that_hangs_is_found(tmp_path: Path, failure_free_of_three: dict[int, set[str]]) -> None:
    """Called as the last host of a shard, it hangs with the state in hand; another host comes back meanwhile."""
    hang = "hang:group=2,position=1,step=0,at=join,n=0,restart=1"
    job = start(tmp_path, "sigkill:group=2,step=3,at=reduce", hang, redundancy=2, piece_s=0.3, progress_s=10.0)
    job.wait_for("the hang", lambda: len(list(tmp_path.glob("injected/*"))) == 2, timeout_s=120.0)
    job.kill(*job.pids(1))
    check_same(leave_whole(job, GROUPS, (1, 1), (2, 2)), failure_free_of_three)
    stalled = [
        loss for r in records(job) if isinstance(r.event, Lost) for loss in r.event.losses if loss.cause == "stalled"
    ]
    assert {(loss.group, loss.incarnation, loss.position) for loss in stalled} == {(2, 1, 1)}


def test_a_transfer_that_cannot_keep_up_is_said_once_with_what_it_needs(tmp_path: Path) -> None:
    words = ("--steps", str(STEPS), "--pieces", str(PIECES), "--redundancy", "3", "--piece-s", "0.05")
    slow = ("--transfer-rate-bytes-s", "100", "--spare-max-group-restarts", "1")
    job = launch(tmp_path, *words, *slow, groups=GROUPS, inject=("sigkill:group=2,step=3,at=reduce",))
    job.wait_for(
        "two withdrawals",
        lambda: len({one.event.number for one in records(job) if isinstance(one.event, Withdrawn)}) >= 2,
        timeout_s=120.0,
    )
    job.kill(job.process.pid, number=signal.SIGTERM)
    job.finish(code=ExitCode.REQUEUE)
    lines = [line for line in (tmp_path / "launch.out").read_text().splitlines() if "keep up with the steps" in line]
    assert len(lines) == 1
    assert re.fullmatch(
        r"spare: group [01] does not serve offer 1 to group 2 any more: rank [01]: the learner has not taken \d+ "
        r"results?, [\d.]+ k?B here; it cannot keep up with the steps: a result of [\d.]+ k?B each [\d.]+ s needs "
        r"[\d.]+ [kM]?B/s at each position, and about [\d.]+ B/s were had",
        lines[0],
    ), lines[0]


@pytest.mark.full
def test_a_joiner_for_which_the_others_wait_too_long_is_sent_back_and_joins_later(
    tmp_path: Path, failure_free_of_three: dict[int, set[str]]
) -> None:
    """Its second result is that of the step with which it has joined, and reaches it slowly; nobody is fenced."""
    slow = "slow=6:group=2,position=1,step=0,at=join,n=2,restart=1"
    job = start(tmp_path, "sigkill:group=2,step=3,at=reduce", slow, piece_s=0.4, heartbeat_s=2.0, pause_s=0.5)
    job.wait_for("JoinersLate", lambda: any(isinstance(r.event, JoinersLate) for r in records(job)), timeout_s=120.0)
    check_same(leave_whole(job, GROUPS, (2, 1)), failure_free_of_three)
    [lost] = [record.event for record in records(job) if isinstance(record.event, Lost)]
    assert [(loss.group, loss.incarnation) for loss in lost.losses] == [(2, 0)], "the one that was killed"


@pytest.mark.full
def test_a_joiner_that_dies_comes_back_again(tmp_path: Path, failure_free_of_three: dict[int, set[str]]) -> None:
    job = start(tmp_path, "sigkill:group=2,step=3,at=reduce")
    job.wait_for("the joiner", lambda: is_member(job, 2, 1), timeout_s=120.0)
    job.kill(*job.pids(2))
    check_same(leave_whole(job, GROUPS, (2, 2)), failure_free_of_three)


def check_tracks_of_ranks(job: Job) -> None:
    """Group 2 was killed in step 3 and has come back: its ranks took the state and caught up before their first step,
    and those of the others gave it to them."""
    names = defaultdict[tuple[str, ...], list[tuple[str, str | float]]](list)
    for one in draw_timeline(RunDirectory(job.run_dir)).slices:
        if one.track[-1].startswith("rank"):
            names[one.track].append((one.name, one.details["step"]))
    assert sorted(names) == [group_track(group, f"rank {rank}") for group in range(GROUPS) for rank in range(2)]
    for rank in range(2):
        back = names[group_track(2, f"rank {rank}")]
        began = back.index(next(reported for reported in back if reported[0] == "transfer"))
        assert {step for _, step in back[:began]} == {1, 2}
        assert [name for name, _ in back[began : began + 2]] == ["transfer", "catch up"]
        assert {"reduce", "vote", "commit"} <= {name for name, _ in back[began:]}
        given = [name for group in range(2) for name, _ in names[group_track(group, f"rank {rank}")]]
        assert {"patch", "transfer"} <= set(given)


def trains_whole(job: Job, *back: tuple[int, int]) -> bool:
    """Whether these incarnations are members, and all groups have committed a step together."""
    return all(is_member(job, *member) for member in back) and job.metrics[-1]["live_groups"] == GROUPS

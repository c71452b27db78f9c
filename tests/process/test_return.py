"""Lost groups come back while the others train: real processes, the toy model, state over TCP.

Nothing here depends on how long a start takes: the jobs train until the group is back and has trained for some steps,
and are then told to leave. The weights of every step, as all groups vote them, must be those of the run in which
nothing fails.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spare_megatron.controller.messages import CaughtUp, Ready, Vote
from tests.process.harness import Job, launch
from tests.process.returning import check_same, check_simulated, is_member, leave_whole, records, said, voted

pytestmark = pytest.mark.timeout(300)
GROUPS, PIECES = 3, 2
CALM_STEPS = 400


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> dict[int, set[str]]:
    """Step -> digest of the weights after it, of a run without failures: of one group that computes all pieces, whose
    sums are the same."""
    words = ("--steps", str(CALM_STEPS), "--pieces", str(GROUPS * PIECES))
    job = launch(tmp_path_factory.mktemp("calm"), *words, groups=1)
    job.finish(timeout_s=200.0)
    return voted(job)


def start(run_dir: Path, *inject: str) -> Job:
    words = ("--steps", str(CALM_STEPS), "--pieces", str(PIECES), "--redundancy", "3", "--piece-s", "0.1")
    return launch(run_dir, *words, "--spare-max-group-restarts", "3", groups=GROUPS, inject=inject)


def test_a_killed_group_computes_pieces_again_within_four_steps_of_the_state(
    tmp_path: Path, calm: dict[int, set[str]]
) -> None:
    job = start(tmp_path, "sigkill:group=2,step=3,at=reduce")
    check_same(leave_whole(job, GROUPS, (2, 1)), calm)
    check_simulated(job, admissions=1)
    events = [record.event for record in records(job)]
    [offered] = {event.number for event in events if isinstance(event, CaughtUp)}
    state = min(event.step for event in events if isinstance(event, CaughtUp))
    votes = (event for event in events if isinstance(event, Vote) and (event.group, event.incarnation) == (2, 1))
    own = next(vote.result.step for vote in votes if vote.result.pieces)
    assert offered == 1
    assert own - state <= 5, "the state of a step is had in the next one at best, and own pieces come four steps later"


def test_one_loss_after_another(tmp_path: Path, calm: dict[int, set[str]]) -> None:
    """The coordinator dies during an offer; then two groups at once, so that the one that came back serves both; then
    a donor of the next learner."""
    job = start(tmp_path, "sigkill:group=2,step=3,at=reduce")
    job.wait_for("the learner", lambda: said(job, Ready, 2, 1), timeout_s=120.0)
    job.kill(json.loads((job.run_dir / "processes.json").read_text())["coordinator"]["pid"])
    job.wait_for("group 2", lambda: trains_whole(job, (2, 1)), timeout_s=120.0)
    job.kill(*job.pids(0), *job.pids(1))
    job.wait_for("groups 0 and 1", lambda: trains_whole(job, (0, 1), (1, 1)), timeout_s=120.0)
    job.kill(*job.pids(2))
    job.wait_for("the next learner", lambda: said(job, CaughtUp, 2, 2), timeout_s=120.0)
    job.kill(*job.pids(0))
    check_same(leave_whole(job, GROUPS, (2, 2), (0, 2)), calm)
    check_simulated(job, admissions=5)


@pytest.mark.full
def test_a_joiner_that_dies_comes_back_again(tmp_path: Path, calm: dict[int, set[str]]) -> None:
    job = start(tmp_path, "sigkill:group=2,step=3,at=reduce")
    job.wait_for("the joiner", lambda: is_member(job, 2, 1), timeout_s=120.0)
    job.kill(*job.pids(2))
    check_same(leave_whole(job, GROUPS, (2, 2)), calm)


def trains_whole(job: Job, *back: tuple[int, int]) -> bool:
    """Whether these incarnations are members, and all groups have committed a step together."""
    return all(is_member(job, *member) for member in back) and job.metrics[-1]["live_groups"] == GROUPS

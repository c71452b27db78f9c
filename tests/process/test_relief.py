"""Slow groups give pieces back while they compute, on real processes: the same weights, each piece once, nobody fenced
who did nothing wrong."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from spare_megatron.cli.status import status_of
from spare_megatron.coordinator import journal
from spare_megatron.protocol.assign_types import USUAL
from spare_megatron.protocol.lasting_paces import STEPS as MEASURED_STEPS
from spare_megatron.protocol.messages import GaveBack, RunningOut, SpeedsMeasured
from spare_megatron.protocol.speeds import SLOW as SLOW_PACE
from spare_megatron.runtime.failpoints import VARIABLE
from spare_megatron.runtime.run_directory import RunDirectory
from tests.process.harness import Job, launch, toy_digests
from tests.process.returning import failure_free_weights

GROUPS, STEPS, PIECES, PIECE_S = 4, 8, 8, 0.03
WORDS = (
    *("--steps", str(STEPS), "--redundancy", "3", "--pieces", str(PIECES), "--piece-s", str(PIECE_S), "--joins"),
    *("--ahead", "2", "--heartbeat-s", "2"),
)
SLOW = "slow=4x:group=1,step=2"


@pytest.fixture(scope="module")
def failure_free(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The digests of the weights of a run in which nobody is slow, and nobody may be asked."""
    run_dir = tmp_path_factory.mktemp("failure-free")
    launch(run_dir, *WORDS, "--ahead", "0", groups=GROUPS, inject=["slow=2x:group=1,step=5"]).finish()
    events = (record.event for record in journal.read(run_dir / "journal.jsonl"))
    assert not any(isinstance(event, RunningOut | GaveBack) for event in events)
    return set(toy_digests(run_dir).values())


def given(job: Job) -> int:
    """How many pieces have moved."""
    return sum(line["pieces_given"] for line in job.metrics)


def check(job: Job, failure_free: set[str], lost: int = 0) -> None:
    """Pieces moved, and the job ended as one in which nobody was slow."""
    lines = job.finish()
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert given(job) > 0, job.report()
    digests = toy_digests(job.run_dir)
    assert len(digests) == 2 * (GROUPS - lost)
    assert set(digests.values()) == failure_free
    gone = [group for line in lines if line["recovery"] for group in line["recovery"]["lost_groups"]]
    assert len(gone) == lost, gone
    for line in lines:
        if line["recovery"] is None:
            assert line["pieces_computed"] == line["pieces"], line


def test_slow_groups_are_relieved_with_audits_and_overlapped_sums(tmp_path: Path, failure_free: set[str]) -> None:
    words = (*WORDS, "--audit-rate", "0.2", "--overlap")
    check(launch(tmp_path, *words, groups=GROUPS, inject=[SLOW, "slow=2x:group=3,step=4"]), failure_free)
    events = [record.event for record in journal.read(tmp_path / "journal.jsonl")]
    assert any(isinstance(event, RunningOut) for event in events)
    assert {event.group for event in events if isinstance(event, GaveBack) and event.pieces} >= {1}


LOST_WORDS = (
    *("coordinator:order.asked=ECONNRESET,times=2", "leader-1:report.gave_back=ECONNRESET,after=1,times=2"),
    *("report.runs_out=ECONNRESET,after=4,times=2", "coordinator:order.asked=kill,after=4,once=ARMED-1"),
    "coordinator:journal.written=kill,after=25,once=ARMED-2",
)
"""Each kill is one coordinator's: as each counts from its own start, one of them could keep the other from striking."""


def test_words_about_relief_may_be_lost(tmp_path: Path, failure_free: set[str]) -> None:
    """With the connection, or with the coordinator."""
    words = (*WORDS, "--heartbeat-s", "8", "--grace-s", "6")  # on a busy machine a connection takes a second to be back
    armed = tmp_path / "armed"
    for number in (1, 2):
        armed.with_name(f"armed-{number}").touch()
    environ = {VARIABLE: ";".join(LOST_WORDS).replace("ARMED", str(armed))}
    check(launch(tmp_path, *words, groups=GROUPS, inject=[SLOW], environ=environ), failure_free)
    logs = "".join(path.read_text(errors="replace") for path in (tmp_path / "logs").rglob("*") if path.is_file())
    for fault in LOST_WORDS:
        place, _, action = fault.split(",")[0].rpartition(":")[2].partition("=")
        assert f"failpoint {place}: {action}\n" in logs, place


def test_a_group_that_dies_as_it_gives_back_and_one_that_dies_with_what_it_got(
    tmp_path: Path, failure_free: set[str]
) -> None:
    """Group 1 dies at its third answer, group 3 with the first pieces that it gets, in whichever steps that is: on a
    busy machine pieces move in step 1 too."""
    faults = "leader-1:report.gave_back=kill,after=2"
    inject = [SLOW, *(f"sigkill:group=3,step={step},at=patch" for step in range(2, STEPS + 1))]
    check(launch(tmp_path, *WORDS, groups=GROUPS, inject=inject, environ={VARIABLE: faults}), failure_free, lost=2)


def test_a_group_that_is_slow_for_long_has_a_smaller_share_whoever_dies(tmp_path: Path) -> None:
    """A coordinator dies after that was found, and a group later on."""
    steps = MEASURED_STEPS + 12
    words = (*WORDS, "--steps", str(steps))
    inject = (
        *("slow=3x:group=1,step=2", f"coordinator-sigkill:group=0,step={steps - 6},at=forward"),
        f"sigkill:group=3,step={steps - 3},at=forward",
    )
    job = launch(tmp_path, *words, groups=GROUPS, group_size=1, inject=inject)
    lines = job.finish()
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    assert set(toy_digests(job.run_dir).values()) == {failure_free_weights(steps, GROUPS, PIECES)[-1]}
    reported = [record.event for record in journal.read(job.run_dir / "journal.jsonl")]
    assert any(isinstance(event, SpeedsMeasured) and event.paces[0][0] == 1 for event in reported), job.report()
    known = status_of(RunDirectory(str(job.run_dir)))["slow_for_long"]
    assert known.keys() == {"1"}
    slowness, share = known["1"]["slowness"], known["1"]["share"]
    paces = [one for event in reported if isinstance(event, SpeedsMeasured) for one in event.paces if one[0] == 1]
    halves = paces[-1][2:]  # the medians of how many times as long as the median group it took for a piece
    assert min(halves) >= SLOW_PACE
    assert slowness == pytest.approx(statistics.fmean(halves), abs=1 / USUAL)
    assert slowness * share <= (GROUPS * PIECES - share) / 2 + 1, "it ends when the other two do, but for a piece"
    gave = {(event.step, piece) for event in reported if isinstance(event, GaveBack) and event.group == 1
            for piece in event.pieces}  # fmt: skip
    before, after = (sum(step in which for step, _ in gave) for which in (range(1, 11), range(steps - 9, steps + 1)))
    assert before > 3 * after, f"group 1 gave {before} pieces in ten steps before it had a smaller share, {after} after"

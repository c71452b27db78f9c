"""Checkpoints written beside the training: killed at any moment, on a full disk, damaged afterwards, tidied up."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from spare_megatron.checkpoint.files import Create
from spare_megatron.checkpoint.folder import (
    PARTIAL,
    TRACKER,
    damage,
    iteration_name,
    iterations,
    last_good,
    publish_left_over,
    step_of,
)
from spare_megatron.coordinator.journal import read
from spare_megatron.protocol.messages import Lost, Saved
from spare_megatron.runtime import failpoints
from spare_megatron.runtime.failpoints import VARIABLE
from spare_megatron.runtime.run_directory import RunDirectory
from spare_megatron.worker import saving
from spare_megatron.worker.saving import TICK_S, Ask
from tests.process.harness import Job, launch, toy_digests
from tests.process.saver import lone_saver, save_for_ever

WORDS = ("--steps", "18", "--pieces", "2", "--piece-s", "0.02", "--redundancy", "2", "--save-interval", "3")
SEED, MOMENTS = 20, 20


def start(run_dir: Path, *words: str, **options: Any) -> Job:
    return launch(run_dir, *WORDS, "--save", str(run_dir / "save"), *words, groups=2, **options)


def whole(save: Path) -> None:
    """All that has Megatron's name is good."""
    for step in iterations(save):
        assert damage(save / iteration_name(step)) == ""


def log_of(job: Job, group: int, position: int) -> str:
    return (job.run_dir / "logs" / f"group-{group}" / f"rank-{position}.log").read_text()


def weights(run_dir: Path) -> dict[str, str]:
    """Digest of the final weights by position; the groups must agree."""
    digests: dict[str, str] = {}
    for name, digest in toy_digests(run_dir).items():
        assert digests.setdefault(name.rpartition("-")[2], digest) == digest
    return digests


@pytest.fixture(scope="module")
def failure_free(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A job that saved every third step."""
    job = start(tmp_path_factory.mktemp("failure-free"))
    job.finish()
    return job


def test_saves_beside_the_training_and_says_what_it_costs(failure_free: Job) -> None:
    save = failure_free.run_dir / "save"
    assert iterations(save) == [18, 15, 12, 9, 6, 3]
    whole(save)
    assert (save / TRACKER).read_text() == "18"
    reported = log_of(failure_free, 0, 0)
    assert "the checkpoint of step 3 counts: training waited" in reported
    assert "% of a step" in reported
    assert not list((save / PARTIAL).iterdir())


def test_the_group_that_saves_dies_while_writing(tmp_path: Path, failure_free: Job) -> None:
    """Its checkpoint never counts, and the next group saves at once instead of at the next interval. It is held in the
    file that it writes after its first checkpoint, and in its next step, until it is killed."""
    save = tmp_path / "save"
    faults = f"rank-0-0:checkpoint.file=sleep:1000,while={save / iteration_name(3)}"
    job = start(tmp_path, inject=["hang:group=0,step=7,at=forward"], environ={VARIABLE: faults})
    partial = save / PARTIAL
    job.wait_for("a checkpoint in the making", lambda: any(partial.glob("iter_0000006.group0*/rank0.pt")))
    job.kill(*job.pids(0))
    lines = job.finish()
    assert [line["step"] for line in lines] == list(range(1, 19))
    assert [line["step"] for line in lines if line["recovery"]] == [7]
    whole(save)
    assert iterations(save)[0] == 18
    by_next = [step for step in iterations(save) if f"the checkpoint of step {step} counts" in log_of(job, 1, 0)]
    assert min(by_next) == 7, f"group 1 waited for the next interval: {by_next}"
    assert weights(tmp_path) == weights(failure_free.run_dir)


@pytest.mark.full
def test_the_last_save_on_a_disk_that_hangs_is_found_and_the_next_group_saves(
    tmp_path: Path, failure_free: Job
) -> None:
    """The failure-free run ends with a checkpoint of step 18, and so does this one: of another group."""
    save = tmp_path / "save"
    faults = f"rank-0-0:checkpoint.file=sleep:1000,while={save / iteration_name(15)}"
    job = start(tmp_path, "--heartbeat-s", "2", "--progress-s", "3", environ={VARIABLE: faults})
    job.finish()
    assert iterations(save)[0] == 18
    whole(save)
    assert "the checkpoint of step 18 counts" in log_of(job, 1, 0)
    losses = [loss for record in read(RunDirectory(tmp_path).journal) if isinstance(record.event, Lost)
              for loss in record.event.losses]  # fmt: skip
    assert [(loss.group, loss.cause) for loss in losses] == [(0, "stalled")]
    assert weights(tmp_path) == weights(failure_free.run_dir)


@pytest.mark.alone
def test_a_disk_that_takes_nothing_is_no_sign_of_life(tmp_path: Path) -> None:
    """A slow disk is one while it takes something, as long as that may last."""
    saver, alive, hangs = lone_saver(tmp_path / "save"), [], threading.Event()
    saver.hung_s = 0.6

    def share(_step: int, _directory: Path, _copied: bool) -> Any:
        return SlowShare(hangs)

    saver.take = share
    ask = Ask(lambda _step, _directory: True, lambda: alive.append(time.monotonic()))
    started_s = time.monotonic()
    saver.save(1, 1, ask, since=1, final=True)
    assert alive[-1] - started_s > SlowShare.MOVES_S - TICK_S, "it moved all the time"
    saver.take = share
    hangs.set()
    started_s = time.monotonic()
    alive.clear()
    saver.save(2, 1, ask, since=2, final=True)
    ends_s = SlowShare.MOVES_S - TICK_S / 2  # the disk takes all at the end, as a tick may see
    late = [at - started_s for at in alive if saver.hung_s + TICK_S + 0.1 < at - started_s < ends_s]
    assert alive, "it was given time"
    assert not late, "it was alive while its disk took nothing"


class SlowShare:
    """One file, which the disk takes in ten parts, or only at the end."""

    MOVES_S = 3.0

    def __init__(self, hangs: threading.Event) -> None:
        self._hangs = hangs

    def write(self, create: Create) -> bytes:
        """Write it in MOVES_S."""
        with create("rank0.pt") as file:
            for _ in range(10):
                time.sleep(self.MOVES_S / 10)
                if not self._hangs.is_set():
                    file.write(b"part")
        return b""

    def finish(self, create: Create, reports: Sequence[bytes]) -> None:
        """Nothing is left to do."""


def test_a_full_disk_warns_once_and_training_goes_on_to_its_end(tmp_path: Path) -> None:
    """What was trained is in no checkpoint then: each group has tried to save it, and the job is not finished."""
    job = start(tmp_path, "--file-bytes", "4096")
    lines = job.finish(code=1)
    assert [line["step"] for line in lines] == list(range(1, 19))
    assert iterations(tmp_path / "save") == []
    assert not list((tmp_path / "save" / PARTIAL).iterdir()), "what could not be completed takes room"
    shown = [line for line in (tmp_path / "launch.out").read_text().splitlines() if "NO CHECKPOINT" in line]
    assert len(shown) == 2, shown
    assert "the next save tries again" in shown[0]
    assert "it is tried again for a minute" in shown[1], "of the group that saves after the first one"
    assert "rank 1 cannot write: File too large" in shown[0]
    for step in range(3, 19, 3):
        assert f"the checkpoint of step {step} does not count" in log_of(job, 0, 0)
    for group in (0, 1):
        assert log_of(job, group, 0).count("the checkpoint of step 18 does not count") == 3
        assert "LastSaveError: the state after step 18 could not be saved: rank 1" in log_of(job, group, 0)
    assert "every group is lost before step 18 was saved" in (tmp_path / "launch.out").read_text()


def test_the_last_save_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one that the coordinator was asked about: it may count."""
    monkeypatch.setattr(saving, "LAST_PAUSES_S", (0.01, 0.02))
    saver, save, tries = lone_saver(tmp_path / "save"), tmp_path / "save", []
    ask = Ask(lambda _step, _directory: True, lambda: None)

    def fails(times: int) -> Callable[[str], None]:
        tries.clear()

        def hit(place: str) -> None:
            tries.extend([place] if place == failing else [])
            if place == failing and len(tries) <= times:
                raise OSError(errno.ENOSPC, "No space left on device")

        return hit

    failing = "checkpoint.file"
    monkeypatch.setattr(failpoints, "hit", fails(2))
    saver.save(1, 1, ask, since=1, final=True)
    assert iterations(save) == [1]
    monkeypatch.setattr(failpoints, "hit", fails(100))
    with pytest.raises(saving.LastSaveError, match="the state after step 2 could not be saved: rank 0 cannot write"):
        saver.save(2, 1, ask, since=2, final=True)
    assert len(tries) == 3
    saver.save(3, 1, ask, since=3)
    saver.settle(lambda: None)
    monkeypatch.setattr(saving, "PUBLISH_PATIENCE_S", 0.1)
    failing = "checkpoint.publish"
    monkeypatch.setattr(failpoints, "hit", fails(100))
    saver.save(4, 1, ask, since=4, final=True)
    [accepted] = (save / PARTIAL).glob("iter_0000004*")
    assert damage(accepted) == ""


def test_a_place_that_cannot_be_written_comes_back(tmp_path: Path) -> None:
    """A file lies where the directory should be, and is removed while the job runs."""
    (tmp_path / "save").write_text("in the way")
    job = start(tmp_path, "--keep", "2")
    log = tmp_path / "logs" / "notices.log"
    job.wait_for("the warning", log.exists)
    (tmp_path / "save").unlink()
    job.finish()
    reported = log.read_text().splitlines()
    assert len(reported) == 2
    assert "NO CHECKPOINT OF STEP 3" in reported[0]
    assert "Not a directory" in reported[0]
    assert "checkpoints are written again" in reported[1]
    assert len(iterations(tmp_path / "save")) == 2
    whole(tmp_path / "save")


@pytest.mark.timeout(300)
def test_killed_at_random_moments_there_is_always_a_good_checkpoint(tmp_path: Path) -> None:
    """Twenty processes in a row save into one directory as fast as they can and are killed while they do."""
    print(f"seed {SEED}")
    chance, save, reached = random.Random(SEED), tmp_path / "save", 0
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.process.saver"])
    for moment in range(MOMENTS):
        process = context.Process(target=save_for_ever, args=(str(save), reached, moment))
        process.start()
        assert process.pid is not None
        try:
            _wait(lambda at=reached: (iterations(save) or [0])[0] > at, process)
            time.sleep(chance.uniform(0.0, 0.06))
        finally:
            os.kill(process.pid, signal.SIGKILL)
            process.join()
        whole(save)
        good, passed = last_good(save)
        assert good is not None
        assert not passed
        assert step_of(good) > reached
        reached = step_of(good)
    left = len(list((save / PARTIAL).iterdir()))
    assert left <= 2, f"{left} partial checkpoints of the dead were never removed"


def _wait(true: Any, process: Any) -> None:
    deadline_s = time.monotonic() + 60.0
    while not true():
        assert process.is_alive(), "the saving process ended by itself"
        assert time.monotonic() < deadline_s, "nothing was saved within 60 s"
        time.sleep(0.005)


def test_a_checkpoint_that_counts_is_published_when_the_disk_allows(tmp_path: Path) -> None:
    """The coordinator accepted it: it is neither forgotten nor removed because its new name is refused for a while."""
    places = ("checkpoint.publish", "checkpoint.published", f"{TRACKER}.write", f"{TRACKER}.rename")
    faults = ";".join(f"rank:{place}=ESTALE,after=1,times=2" for place in places)
    job = start(tmp_path, environ={VARIABLE: faults})
    job.finish()
    save = tmp_path / "save"
    whole(save)
    assert iterations(save) == [18, 15, 12, 9, 6, 3]
    assert (save / TRACKER).read_text() == "18"
    assert "NO CHECKPOINT" not in (tmp_path / "launch.out").read_text()
    assert log_of(job, 0, 0).count("failpoint ") == len(places)


@pytest.mark.parametrize(("place", "after"), [("accepted-N.json.write", 2), ("order.save_accepted", 1)])
def test_the_coordinator_dies_before_it_says_that_a_checkpoint_counts(tmp_path: Path, place: str, after: int) -> None:
    """Again and again, each time with the record on the disk: the next one is asked again, and says so."""
    job = start(tmp_path, environ={VARIABLE: f"coordinator:{place}=kill,after={after}"})
    job.finish()
    save = tmp_path / "save"
    whole(save)
    assert iterations(save) == [18, 15, 12, 9, 6, 3]
    run_dir = RunDirectory(tmp_path)
    accepted = run_dir.accepted()
    assert Path(accepted).name.startswith(iteration_name(18))
    assert not Path(accepted).exists()
    known = run_dir.coordinator()
    assert known is not None
    assert known.fencing > 2


def test_the_writer_of_the_last_checkpoint_dies_before_that_has_its_name(tmp_path: Path) -> None:
    """It counts, so no other group saves again, and no other job attempt follows: the launcher gives it its name."""
    job = start(tmp_path, environ={VARIABLE: "rank-0-0:checkpoint.publish=kill,after=5"})
    assert job.finish()[-1]["step"] == 18
    save = tmp_path / "save"
    whole(save)
    assert iterations(save) == [18, 15, 12, 9, 6, 3]
    assert (save / TRACKER).read_text() == "18"


def test_a_writer_that_is_fenced_leaves_what_counts_at_the_wipe_out(tmp_path: Path) -> None:
    """It stands still and is taken for dead, then receives that it is fenced, but not that its checkpoint counts."""
    save = tmp_path / "save"
    words = (*WORDS, "--steps", "6", "--piece-s", "0.3", "--heartbeat-s", "3", "--save", str(save))
    job = launch(tmp_path, *words, groups=1, group_size=1)

    def there(kind: type) -> bool:
        return any(isinstance(record.event, kind) for record in job.records())

    job.wait_for("the checkpoint of step 3 to wait for votes", lambda: there(Saved))
    [pid] = job.pids(0)
    job.kill(pid, number=signal.SIGSTOP)
    job.wait_for("the group's loss", lambda: there(Lost))
    job.kill(pid, number=signal.SIGCONT)
    assert [line["step"] for line in job.finish() if line["life"] == 2] == [4, 5, 6]
    assert iterations(save) == [6, 3]


def test_a_writer_that_receives_no_answer_leaves_its_checkpoint_to_others(tmp_path: Path) -> None:
    """Only the coordinator knows whether it counts. If it does not, the next one that does takes its place."""
    saver, save, asked, reported = lone_saver(tmp_path / "save"), tmp_path / "save", [], []
    saver.notice = reported.append

    def unanswered(step: int, directory: str) -> bool:
        asked.append(directory)
        return False

    for step in (1, 2, 3):
        saver.save(step, 1, Ask(unanswered if step < 3 else lambda *_: True, lambda: None), since=step, final=True)
        if step == 1:
            assert iterations(save) == []
            publish_left_over(save, asked[0])
            assert iterations(save) == [1]
        elif step == 2:
            assert damage(Path(asked[1])) == ""
    whole(save)
    assert iterations(save) == [3, 1]
    assert not list((save / PARTIAL).iterdir())
    assert reported == []


def test_a_job_that_goes_back_keeps_what_it_saves(tmp_path: Path) -> None:
    """Three are kept. The later ones that it passed over are not among them, and stay."""
    save = tmp_path / "save"
    for incarnation, steps in enumerate(((37, 38, 39), (31, 32, 33, 34))):
        saver = lone_saver(save, incarnation)
        for step in steps:
            saver.save(step, 1, Ask(lambda *_: True, lambda: None), since=step, final=True)
            assert step in iterations(save)
    assert iterations(save) == [39, 38, 37, 34, 33, 32]


def stopped_at(job: Job, pid: int) -> None:
    """Until a failpoint has stopped this process; then all of the job is killed, as when its machine dies."""
    stat = Path(f"/proc/{pid}/stat")
    job.wait_for("the stop", lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")
    job.kill(pid)  # first: a stopped process whose parent dies is continued by the kernel
    job.process.kill()
    job.process.wait()
    job.wait_until_gone()


@pytest.mark.parametrize(
    ("role", "place", "after", "same"),
    [
        ("coordinator", "accepted-N.json.write", 1, True),
        ("coordinator", "order.save_accepted", 1, False),
        ("rank-0-0", "checkpoint.publish", 1, False),
    ],
    ids=["recorded", "marked", "heard"],
)
def test_all_die_before_a_checkpoint_that_counts_has_its_name(
    tmp_path: Path, failure_free: Job, role: str, place: str, after: int, same: bool
) -> None:
    """The second one, of step 6: the next launch starts from it, whichever of the things that follow the decision were
    done. Where only the journal knows, it has to be the same run directory."""
    save = tmp_path / "save"
    words = (*WORDS, "--save", str(save), "--load")
    job = launch(tmp_path / "one", *words, groups=2, environ={VARIABLE: f"{role}:{place}=stop,after={after}"})
    job.wait_for("the first save", lambda: iterations(save) == [3])
    listed = json.loads((job.run_dir / "processes.json").read_text())
    stopped_at(job, listed["coordinator"]["pid"] if role == "coordinator" else job.pid(0, 0))
    assert iterations(save) == [3]
    again = launch(tmp_path / ("one" if same else "two"), *words, groups=2)
    lines = [line for line in again.finish() if not same or line["life"] > 1]
    assert [line["step"] for line in lines] == list(range(7, 19))
    assert weights(again.run_dir) == weights(failure_free.run_dir)
    assert not list((save / PARTIAL).iterdir())

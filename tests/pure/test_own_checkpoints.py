"""From which checkpoint a job starts again by itself: one that it has saved, or the one with which it began."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from spare_megatron.checkpoint import saved_args
from spare_megatron.checkpoint.files import entries_of, entry_of
from spare_megatron.checkpoint.folder import (
    TRACKER,
    Beginning,
    damage,
    iteration_name,
    last_good,
    mark_accepted,
    partial_directory,
    publish,
    publish_left_over,
    to_begin_with,
    write_manifest,
)
from spare_megatron.cli import checkpoint
from spare_megatron.config.errors import ConfigError
from spare_megatron.flags.launcher_flags import LauncherFlags
from spare_megatron.launch.restart_checkpoint import OwnCheckpoints, checkpoint_to_start_from
from spare_megatron.runtime.run_directory import RunDirectory


def written(directory: Path) -> Path:
    """A good checkpoint."""
    directory.mkdir(parents=True)
    (directory / "weights").write_text(directory.name)
    write_manifest(directory, entries_of(directory))
    return directory


def damaged(directory: Path) -> None:
    (directory / "weights").write_text("other")


class Launched:
    """A job that saves into ``save``, in one job attempt after the other."""

    def __init__(self, tmp_path: Path, job: str = "job", **flags: object) -> None:
        self.save = tmp_path / "save"
        self.run_dir = RunDirectory(tmp_path / "run")
        self.run_dir.create()
        self.flags = LauncherFlags(save_dir=str(self.save), **flags)  # type: ignore[arg-type]
        self.own = OwnCheckpoints(self.run_dir, job)
        self.reported: list[str] = []

    def begins(self) -> int | None:
        return self.own.begin(self.flags, self.reported.append)

    def accepts(self, step: int, incarnation: int = 0, fencing: int = 1) -> Path:
        """Its coordinator accepts a checkpoint, which has not got its name yet."""
        partial = written(partial_directory(self.save, step, 0, incarnation, 1))
        self.run_dir.publish_accepted(str(partial), fencing)
        mark_accepted(partial)
        return partial

    def saves(self, step: int, incarnation: int = 0) -> Path:
        return publish(self.accepts(step, incarnation), self.save, step)

    def starts_again_from(self) -> Path | None:
        return checkpoint_to_start_from(self.flags, self.own.newest_step(self.flags.save_dir), self.reported.append)


def dies_as_it_publishes(job: Launched, partial: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer of the checkpoint of step 20 dies when that has its name, and before the tracker file names it."""

    def dies(place: str) -> None:
        if place == "checkpoint.published":
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("spare_megatron.runtime.failpoints.hit", dies)
        with pytest.raises(KeyboardInterrupt):
            publish(partial, job.save, 20)


def test_nothing_of_another_run_is_started_from(tmp_path: Path) -> None:
    job = Launched(tmp_path)
    written(job.save / iteration_name(20))
    assert job.begins() is None
    assert job.starts_again_from() is None
    own = job.saves(5)
    assert job.starts_again_from() == own
    assert job.begins() == 5


def test_a_fine_tuning_that_has_saved_nothing_begins_again(tmp_path: Path) -> None:
    base = written(tmp_path / "base" / iteration_name(1))
    job = Launched(tmp_path, load_dir=str(base.parent))
    assert job.begins() is None
    assert job.starts_again_from() == base
    assert job.begins() is None, "its ranks begin with the weights alone, as the first time"


def test_a_job_that_went_back_does_not_go_on_with_what_it_gave_up(tmp_path: Path) -> None:
    save = tmp_path / "save"
    steps = {step: written(save / iteration_name(step)) for step in (10, 20, 30)}
    job = Launched(tmp_path, load_dir=str(save), ckpt_step=10)
    assert job.begins() is None
    assert job.starts_again_from() == steps[10]
    own = job.saves(15)
    assert job.starts_again_from() == own
    damaged(own)
    assert job.starts_again_from() == steps[10]
    assert "it is passed over" in job.reported[-1]
    damaged(steps[10])
    assert job.starts_again_from() is None


def test_a_coordinator_that_was_stopped_replaces_nothing_that_the_next_one_has_accepted(tmp_path: Path) -> None:
    """It runs on when the newer checkpoint counts, and was stopped before it wrote that its own does."""
    job = Launched(tmp_path)
    assert job.begins() is None
    late = job.accepts(20)
    newer = publish(job.accepts(30, fencing=2), job.save, 30)
    job.run_dir.publish_accepted(str(late), 1)
    assert job.starts_again_from() == newer
    assert job.run_dir.accepted_by() == 2, "a coordinator after it has a higher number"
    job.accepts(40, fencing=3)
    assert [path.name for path in job.run_dir.path.glob("accepted*")] == ["accepted-3.json"]


def test_what_an_earlier_version_accepted_counts_until_something_else_does(tmp_path: Path) -> None:
    job = Launched(tmp_path)
    job.begins()
    own = job.saves(5)
    (job.run_dir.path / "accepted-1.json").rename(job.run_dir.path / "accepted.json")
    assert job.starts_again_from() == own
    newer = job.saves(10)
    assert job.starts_again_from() == newer


def test_what_was_saved_before_a_launch_is_not_its_own(tmp_path: Path) -> None:
    first = Launched(tmp_path)
    first.begins()
    first.saves(20)
    anew = Launched(tmp_path, job="another")
    assert anew.begins() is None
    assert anew.starts_again_from() is None
    queued_again = Launched(tmp_path, job="another")
    own = queued_again.saves(5, incarnation=1)
    assert queued_again.begins() == 5
    assert queued_again.starts_again_from() == own


def test_another_directory_has_nothing_of_the_job(tmp_path: Path) -> None:
    job = Launched(tmp_path)
    job.begins()
    job.saves(5)
    assert job.own.newest_step(str(tmp_path / "elsewhere")) is None
    assert job.own.newest_step("") is None


def test_one_that_was_accepted_is_started_from_beside_later_ones_that_were_given_up(tmp_path: Path) -> None:
    job = Launched(tmp_path)
    written(job.save / iteration_name(30))
    job.begins()
    job.accepts(15)
    assert job.begins() == 15
    assert job.starts_again_from() == job.save / iteration_name(15)
    assert (job.save / TRACKER).read_text() == "15"


def test_a_writer_that_dies_between_the_name_and_the_tracker_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron's tools, and spare-convert, go by that file."""
    job = Launched(tmp_path)
    job.saves(10)
    partial = job.accepts(20)
    dies_as_it_publishes(job, partial, monkeypatch)
    assert (job.save / TRACKER).read_text() == "10"
    publish_left_over(job.save, str(partial))
    assert (job.save / TRACKER).read_text() == "20"
    assert not list(partial.parent.iterdir())


def test_a_late_save_of_an_older_step_is_not_the_newest(tmp_path: Path) -> None:
    job = Launched(tmp_path)
    older = job.accepts(10)
    job.saves(20)
    publish(older, job.save, 10, newest=False)
    assert (job.save / TRACKER).read_text() == "20"


def test_a_job_begins_with_what_the_tracker_file_names(tmp_path: Path) -> None:
    """Not with later ones: of a run that was given up, or before an edit of that file."""
    first = Launched(tmp_path)
    steps = {step: first.saves(step) for step in (10, 20, 30)}
    assert to_begin_with(first.save) == Beginning(steps[30], [], [])
    back = Launched(tmp_path, "back", load_dir=str(first.save), ckpt_step=10)
    back.begins()
    own = back.saves(15)
    assert to_begin_with(first.save) == Beginning(own, [], [20, 30])
    damaged(own)
    begins = to_begin_with(first.save)
    assert (begins.directory, [one.directory for one in begins.passed]) == (steps[10], [own])
    (first.save / TRACKER).write_text("20\n")
    assert to_begin_with(first.save) == Beginning(steps[20], [], [30])
    (first.save / TRACKER).write_text("25")
    assert to_begin_with(first.save) == Beginning(steps[20], [], [30])
    (first.save / TRACKER).write_text("5")
    assert to_begin_with(first.save) == Beginning(None, [], [10, 15, 20, 30])
    for no_checkpoint in ("-20", "twenty", "", "\N{SUPERSCRIPT TWO}"):
        (first.save / TRACKER).write_text(no_checkpoint)
        assert to_begin_with(first.save) == Beginning(steps[30], [], [])
    (first.save / TRACKER).unlink()
    assert to_begin_with(first.save) == Beginning(steps[30], [], [])
    release = written(first.save / "release")
    assert to_begin_with(first.save) == Beginning(steps[30], [], [])
    (first.save / TRACKER).write_text("release")
    assert to_begin_with(first.save) == Beginning(release, [], [])


def test_a_tracker_file_that_cannot_be_read_is_not_a_missing_one(tmp_path: Path) -> None:
    """The job would begin with what was given up. A disk that fails for a while is waited for."""
    job = Launched(tmp_path)
    job.saves(10)
    written(job.save / iteration_name(20))
    (job.save / TRACKER).unlink()
    (job.save / TRACKER).mkdir()
    with pytest.raises(IsADirectoryError):
        to_begin_with(job.save)
    with pytest.raises(ConfigError, match=r"--load \S+ cannot be read: Is a directory"):
        saved_args.iteration_directory(job.save, None)


def test_a_job_begins_with_what_was_accepted_after_what_the_tracker_file_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the job goes back behind it."""
    job = Launched(tmp_path)
    job.saves(10)
    accepted = job.accepts(20)
    assert to_begin_with(job.save) == Beginning(accepted, [], [])
    dies_as_it_publishes(job, accepted, monkeypatch)
    assert to_begin_with(job.save) == Beginning(job.save / iteration_name(20), [], [])
    elsewhere = Launched(tmp_path / "elsewhere", "back", load_dir=str(job.save), ckpt_step=10)
    elsewhere.flags = dataclasses.replace(elsewhere.flags, save_dir=str(job.save))
    elsewhere.begins()
    assert to_begin_with(job.save) == Beginning(job.save / iteration_name(10), [], [20])


def test_one_that_gets_its_name_while_it_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Launched(tmp_path)
    job.saves(10)
    partial = job.accepts(20)

    def meanwhile(directory: Path) -> str:
        if partial.exists():
            publish(partial, job.save, 20)
        return damage(directory)

    monkeypatch.setattr("spare_megatron.checkpoint.folder.damage", meanwhile)
    assert last_good(job.save) == (job.save / iteration_name(20), [])


def test_a_checkpoint_that_is_replaced_while_it_is_verified_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its manifest was that of one checkpoint, and its files were those of another."""
    one, other = (written(tmp_path / name / iteration_name(3)) for name in ("save", "again"))
    (other / "weights").write_text("of another run")
    write_manifest(other, {"weights": entry_of(other / "weights")})

    def replaced(directory: Path) -> str:
        directory.rename(tmp_path / "aside")
        other.rename(directory)
        return "weights: 13 bytes, not 12"

    monkeypatch.setattr(checkpoint, "damage", replaced)
    assert checkpoint.main(["verify", str(one)]) == 1
    said = capsys.readouterr().out
    assert said == f"{one}: {one} was replaced or removed while it was read; read it or another one again\n"
    monkeypatch.undo()
    assert checkpoint.main(["verify", str(one)]) == 0

"""Only one job saves into a directory."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from spare_megatron.config.errors import ConfigError
from spare_megatron.runtime import save_lock
from spare_megatron.runtime.run_directory import RunDirectory
from spare_megatron.runtime.save_lock import LOCK, only_job


def test_another_job_is_refused_while_the_first_one_runs(tmp_path: Path) -> None:
    save, one, two = tmp_path / "save", RunDirectory(tmp_path / "one"), RunDirectory(tmp_path / "two")
    with only_job(str(save), one, print):
        said = f"is in use by the job of {tmp_path}/one .pid .*remove {save / LOCK}"
        with pytest.raises(ConfigError, match=said), only_job(str(save), two, print):
            pass
        with only_job(str(tmp_path / "elsewhere"), two, print), only_job("", two, print):
            pass
        with only_job(str(save), one, print):  # by a lock that outlived its launcher
            (save / "iter_0000001").mkdir()
    with only_job(str(save), two, print):
        pass
    assert sorted(path.name for path in save.iterdir()) == ["iter_0000001"]


def test_nothing_is_left_where_nothing_was_saved(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for name in ("save", "there"):
        with only_job(str(tmp_path / name), RunDirectory(tmp_path / "run"), print):
            assert (tmp_path / name / LOCK).is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["there"]
    assert list((tmp_path / "there").iterdir()) == []


def test_a_lock_that_its_holder_removes_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir, save, flock = RunDirectory(tmp_path / "run"), tmp_path / "save", save_lock.fcntl.flock

    def late(*words: int) -> None:
        monkeypatch.undo()
        (save / LOCK).unlink()
        flock(*words)

    monkeypatch.setattr(save_lock.fcntl, "flock", late)
    with (
        only_job(str(save), run_dir, print),
        pytest.raises(ConfigError),
        only_job(str(save), RunDirectory(tmp_path / "two"), print),
    ):
        pass


def test_the_end_of_a_job_whose_directory_was_moved_away_leaves_the_next_ones_lock(tmp_path: Path) -> None:
    save, runs = tmp_path / "save", [RunDirectory(tmp_path / name) for name in ("one", "two", "three")]
    with contextlib.ExitStack() as first, contextlib.ExitStack() as second:
        first.enter_context(only_job(str(save), runs[0], print))
        save.rename(tmp_path / "moved")
        second.enter_context(only_job(str(save), runs[1], print))
        first.close()
        with pytest.raises(ConfigError, match="is in use by the job of"), only_job(str(save), runs[2], print):
            pass


def test_a_job_runs_without_locks_and_without_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    reported: list[str] = []
    with only_job(str(tmp_path / "file" / "save"), RunDirectory(tmp_path), reported.append):
        pass
    assert [one.partition(" cannot be written: ")[2] for one in reported] == ["ENOTDIR (Not a directory)"]

    def unknown(*_: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(save_lock.fcntl, "flock", unknown)
    with only_job(str(tmp_path / "save"), RunDirectory(tmp_path), print):
        pass

"""When a run directory counts as gone."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from spare_megatron.launch.attempt_report import refusal_of_coordinator
from spare_megatron.runtime.directory_watch import GONE_S, DirectoryWatch
from spare_megatron.runtime.run_directory import RunDirectory


class Clock:
    """Its time is set by a test."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def watched(tmp_path: Path) -> tuple[DirectoryWatch, Path, Clock]:
    path, clock = tmp_path / "run", Clock()
    path.mkdir()
    (path / "token").write_text("secret")
    return DirectoryWatch(path, clock), path, clock


@pytest.mark.parametrize("how", ["deleted", "replaced", "another job's", "a file"])
def test_it_is_gone_when_it_has_been_for_a_while(watched: tuple[DirectoryWatch, Path, Clock], how: str) -> None:
    watch, path, clock = watched
    assert watch.gone() == ""
    path.rename(path.with_name("aside"))
    if how == "a file":
        path.write_text("")
    elif how != "deleted":
        path.mkdir()
    if how == "another job's":
        (path / "token").write_text("another")
    assert watch.gone() == ""
    clock.now_s = GONE_S - 0.1
    assert watch.gone() == ""
    clock.now_s = GONE_S
    assert watch.gone().startswith(f"the run directory {path} was deleted or replaced")


def test_one_that_is_mounted_again_is_the_same(watched: tuple[DirectoryWatch, Path, Clock]) -> None:
    """With another number, after a while in which it was away, and again later."""
    watch, path, clock = watched
    for _ in range(3):
        shutil.copytree(path, path.with_name("other"))
        path.rename(path.with_name("aside"))
        assert watch.gone() == ""
        clock.now_s += GONE_S - 1
        assert watch.gone() == ""
        path.with_name("other").rename(path)
        assert watch.gone() == ""
        clock.now_s += 2 * GONE_S
        assert watch.gone() == ""
        shutil.rmtree(path.with_name("aside"))


def test_a_coordinator_that_noticed_it_first_has_taken_its_words_along(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path / "run")
    run_dir.create()
    run_dir.coordinator_errors.parent.mkdir(exist_ok=True)
    run_dir.coordinator_errors.write_text("spare-coordinator: --listen 1.2.3.4: no such address\n")
    assert refusal_of_coordinator(run_dir) == "--listen 1.2.3.4: no such address"
    run_dir.coordinator_errors.write_text("")
    assert refusal_of_coordinator(run_dir) == f"the coordinator left with exit code 2; see {run_dir.logs}"
    shutil.rmtree(run_dir.path)
    assert refusal_of_coordinator(run_dir).startswith(f"the run directory {run_dir.path} was deleted or replaced")

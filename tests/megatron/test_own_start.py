"""With which checkpoint the ranks of a job attempt begin: one that the job has saved, or what the flags ask for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spare_megatron.checkpoint.folder import TRACKER, iteration_name
from spare_megatron.config.errors import ConfigError
from spare_megatron.config.sections import CheckpointConfig
from spare_megatron.runtime.run_directory import RunDirectory
from spare_megatron.worker.start import _checkpoint
from tests.pure.test_own_checkpoints import written


def begins_with(saved_step: int | None, **flags: Any) -> tuple[Path | None, bool]:
    place = SimpleNamespace(saved_step=saved_step, group=0, run_dir=flags.pop("run_dir", None))
    job: Any = SimpleNamespace(place=place, checkpoint=CheckpointConfig(**flags))
    return _checkpoint(job)


def test_what_the_flags_ask_for_counts_until_the_job_has_saved(tmp_path: Path) -> None:
    save, base = tmp_path / "save", written(tmp_path / "base" / iteration_name(1))
    before, later = written(save / iteration_name(10)), written(save / iteration_name(30))
    assert begins_with(None, save=str(save)) == (None, False)
    assert begins_with(None, save=str(save), load=str(base.parent)) == (base, False)
    assert begins_with(None, save=str(save), load=str(save)) == (later, False)
    assert begins_with(None, save=str(save), load=str(save), ckpt_step=10) == (before, False)
    own = written(save / iteration_name(15))
    for load in (None, str(base.parent), str(save)):
        assert begins_with(15, save=str(save), load=load) == (own, True)
    assert begins_with(15, save=str(save), load=str(save), ckpt_step=10) == (own, True)


def test_weights_of_no_step_are_found(tmp_path: Path) -> None:
    """Megatron's tools give such a checkpoint the name 'release'; one with a step counts more."""
    release = written(tmp_path / "release")
    assert begins_with(None, load=str(tmp_path)) == (release, False)
    step = written(tmp_path / iteration_name(7))
    assert begins_with(None, load=str(tmp_path)) == (step, False)
    (release / "weights").unlink()
    assert begins_with(None, load=str(tmp_path)) == (step, False)


def test_a_user_sees_that_nothing_is_loaded(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path / "run")
    assert begins_with(None, load=str(tmp_path / "typo"), run_dir=str(run_dir.path)) == (None, False)
    assert run_dir.notices.read_text() == f"--load {tmp_path}/typo has no checkpoint: training begins at step 0\n"
    with pytest.raises(ConfigError, match="typo: it has no checkpoint; give a directory with a checkpoint"):
        begins_with(None, load=str(tmp_path / "typo"), finetune=True)
    damaged = written(tmp_path / "save" / iteration_name(7))
    (damaged / "weights").unlink()
    written(damaged.parent / iteration_name(3))
    begins_with(None, load=str(damaged.parent), run_dir=str(run_dir.path))
    assert "A DAMAGED CHECKPOINT IS PASSED OVER: " in run_dir.notices.read_text()


def test_a_user_sees_which_checkpoints_are_left_out(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path / "run")
    save = tmp_path / "save"
    steps = {step: written(save / iteration_name(step)) for step in (10, 20, 30)}
    (save / TRACKER).write_text("10")
    assert begins_with(None, load=str(save), run_dir=str(run_dir.path)) == (steps[10], False)
    assert "the job begins, as latest_checkpointed_iteration.txt says, with iter_0000010" in run_dir.notices.read_text()
    assert "leaves out later checkpoints (step 20, 30), which --ckpt-step would load" in run_dir.notices.read_text()
    (save / TRACKER).write_text("25")
    assert begins_with(None, load=str(save), run_dir=str(run_dir.path)) == (steps[20], False)
    assert "says '25', but there is no such checkpoint: the job begins with iter_0000020" in run_dir.notices.read_text()
    (save / TRACKER).write_text("10")
    (steps[10] / "weights").unlink()
    with pytest.raises(ConfigError, match=r"missing; \w+\.txt leaves out later ones \(step 20, 30\)"):
        begins_with(None, load=str(save))

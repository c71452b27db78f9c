"""With which checkpoint the ranks of a job attempt begin: one that the job has saved, or what the flags ask for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from spare_megatron.checkpoint.folder import iteration_name
from spare_megatron.config.sections import CheckpointConfig
from spare_megatron.worker.start import _checkpoint
from tests.pure.test_own_checkpoints import written


def begins_with(saved_step: int | None, **flags: Any) -> tuple[Path | None, bool]:
    job: Any = SimpleNamespace(place=SimpleNamespace(saved_step=saved_step), checkpoint=CheckpointConfig(**flags))
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

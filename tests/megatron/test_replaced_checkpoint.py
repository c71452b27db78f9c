"""A job that loads a checkpoint which another job replaces meanwhile, as it has gone back and saves the step again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.exits import ExitCode
from spare_megatron.megatron_adapter.checkpoint.manifest_version import MANIFEST, version_of
from tests.megatron.test_state_redundancy import ALONE, FLAGS
from tests.process.harness import Job, launch
from tests.spawn import run_ranks

pytestmark = pytest.mark.timeout(200)


def start(run_dir: Path, *flags: str, other: Path | None = None) -> Job:
    words = (*FLAGS, *ALONE, "--pipeline-model-parallel-size", "2", *flags)
    environ = {} if other is None else {"OTHER": str(other)}
    script = "tests/data/pretrain_replaced.py"
    return launch(run_dir, *words, groups=1, group_size=2, script=script, environ=environ)


def test_what_ranks_have_read_of_two_checkpoints_is_refused(tmp_path: Path) -> None:
    """Else the job would train on with weights of both, and nothing would compare them with anything."""
    interval = ("--save-interval", "1", "--exit-interval", "1")
    saves = [tmp_path / name for name in ("save", "again")]
    for save, rate in zip(saves, ("1e-3", "2e-3"), strict=True):
        start(tmp_path / f"of-{save.name}", "--save", str(save), *interval, "--lr", rate).finish()
    loads = ("--load", str(saves[0]), "--exit-interval", "2")
    job = start(tmp_path / "run", *loads, other=saves[1] / "iter_0000001")
    job.finish(code=ExitCode.BAD_INPUT)
    said = (job.run_dir / "launch.out").read_text()
    assert "iter_0000001 was replaced or removed while ranks read it; start again, or load another one" in said
    start(tmp_path / "again-run", *loads, "--lr", "2e-3").finish()


def agree(rank: int, store: Any, directories: Sequence[str]) -> str:
    """What a rank says that has read one of the versions while it was there."""
    from spare_megatron.megatron_adapter.checkpoint import group_checkpoint

    dist.init_process_group("gloo", store=dist.PrefixStore("agree", store), rank=rank, world_size=len(directories))
    directory = Path(directories[rank])
    try:
        group_checkpoint._agree(None, directory, version_of(directory))
    except ConfigError as error:
        return str(error)
    finally:
        dist.destroy_process_group()
    return ""


def test_ranks_that_have_read_different_checkpoints_all_say_so(tmp_path: Path) -> None:
    """One has read all it needs before another one begins; to each it seems to be the same from beginning to end."""
    for name in ("before", "after"):
        (tmp_path / name).mkdir()
        (tmp_path / name / MANIFEST).write_text(name)
    for names, differ in ((("before", "before"), False), (("after", "before"), True), (("before", "none"), True)):
        directories = [str(tmp_path / name) for name in names]
        said = run_ranks("tests.megatron.test_replaced_checkpoint:agree", [directories] * 2)
        assert ["was replaced or removed while ranks read it" in one for one in said] == [differ, differ], said

"""A user's script runs here with its imports of megatron.training renamed, and loses a group without a trace.

The job that loses the group runs the script as Megatron's of today are written: they read the flags first. A second
script has the imports and the calls of Megatron-LM's newest, with its builders in modules beside it.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from spare_megatron.cli.launch import SED
from spare_megatron.config.exits import ExitCode
from spare_megatron.megatron_adapter.versions import release
from tests.process.harness import RESTARTS, Job, launch

DATA = Path(__file__).parents[1] / "data"
SCRIPT = DATA.parents[1] / "examples" / "own_script" / "pretrain_own.py"
STEPS = 6
FLAGS = (
    *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "16"),
    *("--max-position-embeddings", "16", "--micro-batch-size", "1", "--global-batch-size", "8", "--lr", "1e-2"),
    *(
        "--train-iters",
        str(STEPS),
        "--vocab-size",
        "61",
        "--log-interval",
        "1",
        "--eval-iters",
        "0",
        "--num-workers",
        "0",
    ),
    *("--pipeline-model-parallel-size", "2", "--mlp-scale", "0.5", "--timing-log-level", "2", "--num-workers", "0"),
    *("--spare-heartbeat-timeout-s", "60"),
)


READS_FLAGS_FIRST = """
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args

if __name__ == "__main__":
    set_startup_timestamps(program_start=_PROGRAM_START_TIME, main_entry=time.time())
    pretrain, store = inprocess_restart.maybe_wrap_for_inprocess_restart(pretrain)
    args = parse_and_validate_args(
        extra_args_provider=add_own_args,
        args_defaults={"tokenizer_type": "NullTokenizer"},
    )
    full_config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(
        full_config,
        train_valid_test_datasets_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        partial(model_provider),
        store=store,
        get_embedding_ranks=get_embedding_ranks,
    )
"""
"""The end of the script in the form of megatron-core 0.19."""


def ported(folder: Path, *, flags_first: bool) -> Path:
    """The script with its import lines changed, and nothing else."""
    text = SCRIPT.read_text()
    if flags_first:
        text = text[: text.index('if __name__ == "__main__":')] + READS_FLAGS_FIRST.lstrip()
    old = text.splitlines()
    new = [re.sub(r"^from megatron\.training\b", "from spare_megatron.training", line) for line in old]
    changed = [line for line, before in zip(new, old, strict=True) if line != before]
    assert len(changed) == (6 if flags_first else 4), changed
    script = folder / "pretrain_own.py"
    script.write_text("\n".join(new) + "\n")
    return script


def train(folder: Path, *inject: str, flags_first: bool = False) -> tuple[Job, list[dict[str, Any]]]:
    folder.mkdir()
    script = ported(folder, flags_first=flags_first)
    shape: dict[str, Any] = {"groups": 2, "group_size": None}
    job = launch(folder / "run", *FLAGS, **shape, script=str(script), inject=inject)
    return job, job.finish(timeout_s=240)


def train_newest(folder: Path, *words: str, inject: tuple[str, ...] = ()) -> tuple[Job, list[dict[str, Any]]]:
    """Runs the newest form of script, which nothing but the documented command of sed has changed."""
    shutil.copytree(DATA / "newest_script", folder)
    subprocess.run(["sed", "-i", SED, *map(str, folder.glob("*.py"))], check=True)
    flags = [word for word in FLAGS if word not in ("--mlp-scale", "0.5")]
    shape: dict[str, Any] = {"groups": 2, "group_size": None}
    script = str(folder / "pretrain_own.py")
    job = launch(folder / "run", "--mock-data", *flags, *words, **shape, script=script, inject=inject)
    return job, job.finish(timeout_s=240)


@pytest.mark.timeout(600)
def test_a_users_script_with_other_import_lines_loses_a_group_and_no_step(tmp_path: Path) -> None:
    _, failure_free = train(tmp_path / "failure-free")
    job, lines = train(tmp_path / "killed", "sigkill:group=1,step=3,at=backward,n=1", flags_first=True)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["recovery"]["lost_groups"] for line in lines if line["recovery"]] == [[1]]
    for line, other in zip(lines, failure_free, strict=True):
        for name in ("loss", "grad_norm", "lr", "tokens"):
            assert line[name] == other[name], f"{name} of step {line['step']}"
    assert lines[-1]["loss"] < lines[0]["loss"], "the own data can be learnt"
    printed = (job.run_dir / "launch.out").read_text()
    assert printed.count(" plain loss: ") == STEPS
    log = (job.run_dir / "logs" / "group-0" / "rank-0.log").read_text()
    assert log.count("building the model with scaled MLPs") == 1
    assert "the script's own imports took" in log


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_group_does_not_come_back_with_another_script(tmp_path: Path) -> None:
    """Somebody edits it while the job trains. The sums of all groups would have the group's other gradients."""
    script = ported(tmp_path, flags_first=False)
    words = [*FLAGS, "--train-iters", "400", RESTARTS, "1"]
    job = launch(tmp_path / "run", *words, groups=2, group_size=None, script=str(script))
    job.wait_for_step(1)
    text = script.read_text()
    script.write_text(text.replace("return loss, ", "return 2 * loss, "))
    assert script.read_text() != text
    job.kill(*job.pids(1))
    printed = job.run_dir / "launch.out"
    job.wait_for(
        "the sentence",
        lambda: "group 1 runs another job than the others: the source of pretrain" in printed.read_text(),
    )
    job.kill(job.process.pid, number=signal.SIGTERM)
    lines = job.finish(code=ExitCode.REQUEUE)
    live = [line["live_groups"] for line in lines]
    assert live == sorted(live, reverse=True), "it was back"
    assert live[-1] == 1


@pytest.mark.skipif(release() < (0, 19), reason="the script imports what megatron-core has since 0.19")
@pytest.mark.timeout(600)
def test_a_script_of_the_newest_form_loses_a_group_and_no_bit(tmp_path: Path) -> None:
    failure_free_job, failure_free = train_newest(tmp_path / "failure-free")
    job, lines = train_newest(tmp_path / "killed", "--own-model", inject=("sigkill:group=1,step=3,at=reduce",))
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["recovery"]["lost_groups"] for line in lines if line["recovery"]] == [[1]]
    for name in ("loss", "grad_norm", "lr", "tokens"):
        assert [line[name] for line in lines] == [line[name] for line in failure_free], name
    digests = [
        json.loads((one.run_dir / "summary.json").read_text())["weights_digest"] for one in (job, failure_free_job)
    ]
    assert digests[0] == digests[1], "the builder beside the script builds the model of the flags"
    printed = (job.run_dir / "launch.out").read_text()
    assert printed.count("GPTModel IS DEPRECATED") == 1
    logs = [(job.run_dir / "logs" / f"group-{group}" / "rank-0.log").read_text() for group in range(2)]
    assert [log.count("the builder beside the script builds the model") for log in logs] == [1, 0]
    assert [log.count("GPTModel IS DEPRECATED") for log in logs] == [0, 0]
    assert "the script's own imports took" in logs[0]

"""What is refused before a node is lent, and what a rank on a lent node takes its place and its signals for."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from spare_megatron.cli import agent
from spare_megatron.config.allocation import Allocation
from spare_megatron.config.errors import ConfigError
from spare_megatron.config.place import place_of, world_hint
from spare_megatron.launch import slurm_commands, slurm_job, slurm_lend
from spare_megatron.launch.node_facts import gpus_here, not_here, paths_of
from spare_megatron.launch.slurm_attempt import SlurmLaunch
from spare_megatron.launch.slurm_job import SlurmJob
from spare_megatron.runtime.run_directory import RunDirectory, write_json

ALLOCATION = Allocation("7", 2, 2, tasks_of_nodes=(1, 1))


def test_a_slurm_job_trains_or_lends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So no two jobs lend to each other."""
    run_dir = RunDirectory(tmp_path)
    write_json(run_dir.launcher, {"address": "127.0.0.1:1"})
    monkeypatch.setattr(slurm_lend, "step_names", lambda job: ["batch", "spare-life-1-group-2"])
    with pytest.raises(ConfigError, match="this Slurm job trains itself; lend the nodes of a Slurm job of its own"):
        asyncio.run(slurm_lend.lend_nodes(ALLOCATION, run_dir, (), "", print))
    monkeypatch.setattr(slurm_job, "step_names", lambda job: ["batch", "spare-lend"])
    launch = SlurmLaunch(ALLOCATION, run_dir, ("python", "train.py"), 1, 1, 5.0, (), ())

    async def train() -> None:
        await SlurmJob(launch, print).run()

    with pytest.raises(ConfigError, match="lends its nodes to another job; train in a Slurm job of its own"):
        asyncio.run(train())


def test_nothing_is_lent_to_a_job_that_is_over_or_is_none(tmp_path: Path) -> None:
    for reported, sentence in (
        (None, "no job runs in"),
        ({"outcome": "finished"}, r"is over \(finished\): nothing is lent"),
    ):
        if reported is not None:
            write_json(RunDirectory(tmp_path).summary, reported)
        with pytest.raises(ConfigError, match=sentence):
            asyncio.run(slurm_lend.lend_nodes(ALLOCATION, RunDirectory(tmp_path), (), "", print))
    with pytest.raises(ConfigError, match="is no run directory"):
        asyncio.run(slurm_lend.lend_nodes(ALLOCATION, RunDirectory(tmp_path / "none"), (), "", print))


@pytest.mark.parametrize("words", [("--places", "2147483648"), ("--drain-s", "nan"), ("--name", "\udcff")])
def test_an_agent_that_cannot_be_described_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        agent.main([str(tmp_path), *words])
    assert ended.value.code == 2
    assert (
        f"{words[0]} is {words[1] if words[0] != '--name' else ascii(words[1])}, but must be" in capsys.readouterr().err
    )


def test_nodes_in_service(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = """NodeName=n1 Arch=x86_64 State=ALLOCATED ThreadsPerCore=1 SlurmdStartTime=2026-11-28T14:00:00
NodeName=n2 State=MIXED* ThreadsPerCore=1
NodeName=n3 State=IDLE+DRAIN Reason=disk
NodeName=n4 State=DOWN+NOT_RESPONDING
NodeName=n5 State=MIXED+PLANNED
"""
    answer = subprocess.CompletedProcess((), 0, shown, "")
    monkeypatch.setattr(slurm_commands, "ask", lambda *words: answer)
    served = slurm_commands.in_service(["n1", "n2", "n3", "n4", "n5"])
    assert served == {"n1": True, "n2": False, "n3": False, "n4": False, "n5": True}


def test_ranks_of_a_group_with_a_lent_node() -> None:
    """Positions 1 and 2 of 4 are on a lent node, the others are tasks 0 and 1 of a step."""
    group = {"SPARE_GROUP": "2", "SPARE_NUM_GROUPS": "3", "SPARE_GROUP_SIZE": "4", "SPARE_INCARNATION": "5"}
    step = {**group, "SLURM_NTASKS": "2", "SPARE_POSITIONS": "0,3"}
    lent = {**group, "SLURM_PROCID": "0", "SPARE_LENT_TO": "slurm"}
    ranks = [
        {**step, "SLURM_PROCID": "0"},
        {**lent, "SPARE_POSITION": "1", "LOCAL_RANK": "0"},
        {**lent, "SPARE_POSITION": "2", "LOCAL_RANK": "1"},
        {**step, "SLURM_PROCID": "1"},
    ]
    places = [place_of(environ, 3, 4, "run") for environ in ranks]
    assert [place.position for place in places] == [0, 1, 2, 3]
    assert {(place.group, place.incarnation, place.launcher) for place in places} == {(2, 5, "slurm")}
    assert [place.lent for place in places] == [False, True, True, False]
    assert {world_hint(environ).num_groups for environ in ranks} == {3}
    assert world_hint(ranks[0]).group_size == 4


def test_a_signal_to_a_rank_on_a_lent_node_is_no_request_to_the_job() -> None:
    """Slurm signals every process of a step that it ends."""
    code = """
import os, signal
from spare_megatron.config.place import Place
from spare_megatron.worker.signals import stop_on_signals
with stop_on_signals(Place(0, 0, 1, 0, None, "slurm", lent=True), session=None):
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
        os.kill(os.getpid(), number)
print("alive")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr


def test_what_a_node_must_have(tmp_path: Path) -> None:
    (tmp_path / "text.bin").touch()
    (tmp_path / "train.py").touch()
    words = [
        str(tmp_path / "train.py"),
        "--data-path",
        "0.5",
        str(tmp_path / "text"),
        f"--load={tmp_path}",
        "--lr",
        "1",
    ]
    assert paths_of(words) == [str(tmp_path), str(tmp_path / "text.bin"), str(tmp_path / "train.py")]
    assert not_here([str(tmp_path), "/nowhere"]) == ["/nowhere"]
    for number, model in enumerate(("NVIDIA H100", "NVIDIA A100", "NVIDIA H100")):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "information").write_text(f"Model: \t\t {model}\nIRQ: 1\n")
    assert gpus_here(tmp_path) == ["NVIDIA A100", "NVIDIA H100"]

"""spare-gpu-check on a machine without a GPU: what needs one is skipped and says why, the rest runs and passes."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spare_megatron.cli import gpu_check
from spare_megatron.collectives.nccl_start import Devices
from spare_megatron.gpu_check import members, table
from spare_megatron.gpu_check.table import CheckError, Machine, MachineCheck, SkipError
from tests import preloaded

SEED = 471_002


def machine(tmp_path: Path) -> Machine:
    return Machine(Devices.here(0), tmp_path, None, False, SEED)


def outcomes(folder: Path) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in json.loads((folder / "gpu_check.json").read_text())["checks"]}


@pytest.fixture
def forked_members(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members are forks of the tests' parent, which import nothing; with --full they are started as always."""

    def start(command: Sequence[str], *, env: Mapping[str, str], **_: Any) -> preloaded.PipedProcess:
        _, _, module, *words = command
        made = preloaded.PipedProcess(module, words, {**preloaded.environment(), **env})
        made.stderr.close()
        return made

    monkeypatch.setattr(members, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": start}))


def without_a_gpu(there: Machine) -> None:
    if there.gpus:
        pytest.skip("this machine has a GPU; run spare-gpu-check")


@pytest.mark.parametrize("words", ["kernel", "sums of", "speed", "NCCL", "TP2", "packets", "bandwidth", "GPU"])
def test_what_needs_a_gpu_is_skipped_and_says_why(words: str, tmp_path: Path) -> None:
    without_a_gpu(machine(tmp_path))
    assert gpu_check.main(["-o", str(tmp_path), "--only", words, "--seed", str(SEED)]) == 0
    for name, one in outcomes(tmp_path).items():
        if name in ("kernel bits", "kernels in threads"):
            assert one["state"] == table.PASSED
        else:
            assert one["state"] == table.SKIPPED
            assert "needs" in one["why"]
    assert f"seed             {SEED}" in (tmp_path / "gpu_check.txt").read_text()


@pytest.mark.usefixtures("forked_members")
def test_epochs_run_over_sockets(tmp_path: Path) -> None:
    without_a_gpu(machine(tmp_path))
    assert gpu_check.main(["-o", str(tmp_path), "--only", "epochs", "--seed", str(SEED)]) == 0
    assert outcomes(tmp_path)["epochs"]["values"]["epochs"] == 20


@pytest.mark.full
def test_the_whole_table(tmp_path: Path) -> None:
    without_a_gpu(machine(tmp_path))
    assert gpu_check.main(["-o", str(tmp_path), "--seed", str(SEED)]) == 0
    states = [one["state"] for one in outcomes(tmp_path).values()]
    assert states.count(table.PASSED) >= 9
    assert table.FAILED not in states


def test_a_criterion_that_does_not_hold_fails_its_own_check(tmp_path: Path) -> None:
    def fails(_: Machine) -> dict[str, Any]:
        raise CheckError("a copy is faster", {"of a copy": 0.3})

    def breaks(_: Machine) -> dict[str, Any]:
        raise OSError("no space left on device")

    def cannot(_: Machine) -> dict[str, Any]:
        raise SkipError("needs a GPU")

    reported: list[str] = []
    chosen = [
        MachineCheck(one.__name__, "something holds", one) for one in (fails, breaks, cannot, lambda _: {"all": "well"})
    ]
    made = table.run(chosen, machine(tmp_path), lambda outcome: reported.append(outcome.state))
    assert reported == [table.FAILED, table.FAILED, table.SKIPPED, table.PASSED]
    assert [one.why for one in made[:3]] == ["a copy is faster", "OSError: no space left on device", "needs a GPU"]
    assert "of a copy = 0.3" in table.as_text(made, {})


@pytest.mark.usefixtures("forked_members")
def test_a_wrong_bit_of_a_sum_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A member that gives something else than it should."""
    started = members.Members.tell

    def tell(self: members.Members, number: int, **words: Any) -> None:
        if words["do"] == "sum" and number == 1:
            words["members"] = [*words["members"], 7]
        started(self, number, **words)

    monkeypatch.setattr(members.Members, "tell", tell)
    there = replace(machine(tmp_path), devices=replace(Devices.here(0), count=0))
    with pytest.raises(CheckError, match="other bits than on the CPU"):
        members._sums(there)


def test_bad_input_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    began_s = time.monotonic()
    for flags, words in (
        (["--only", "nothing"], "--only nothing: no check has this name; there are libraries, environment"),
        (["--script", str(tmp_path / "none.py")], "there is no such file; give a training script"),
        (["--output", str(tmp_path / "file" / "inside")], "give a directory to write to"),
    ):
        assert gpu_check.main(["-o", str(tmp_path), *flags]) == 2
        assert words in capsys.readouterr().err
    assert time.monotonic() - began_s < 60

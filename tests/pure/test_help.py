"""Every command prints its help and its version: argparse formats help texts only when somebody asks for them, so that
a bare % in one is found by nothing else."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import spare_megatron
from spare_megatron.data.preprocess import merge

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MAINS = {name: importlib.import_module(place.partition(":")[0]).main for name, place in PROJECT["scripts"].items()}
MAINS["tools/merge_datasets.py"] = merge.main
SCRIPTS = ("pretrain_gpt.py", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tools").rglob("*.py")))


def test_every_command_of_the_package_is_here() -> None:
    modules = {
        path.stem for path in (ROOT / "spare_megatron" / "cli").glob("*.py") if "\ndef main(" in path.read_text()
    }
    assert modules == {main.__module__.rpartition(".")[2] for main in MAINS.values()} - {"command", "merge"}


@pytest.mark.parametrize("name", MAINS)
def test_help_and_version(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for columns in ("40", "100", "120"):
        monkeypatch.setenv("COLUMNS", columns)
        with pytest.raises(SystemExit) as ended:
            MAINS[name](["--help"])
        assert ended.value.code == 0
        reported = capsys.readouterr().out
        assert reported.startswith("usage: ")
        assert "--version" in reported
        assert columns == "40" or max(map(len, reported.splitlines())) <= int(columns)
    with pytest.raises(SystemExit) as ended:
        MAINS[name](["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"{name} (spare_megatron {spare_megatron.__version__})\n"


def test_the_version_has_one_place_and_is_in_the_changelog() -> None:
    assert "version" not in PROJECT
    assert f"\n## {spare_megatron.__version__} (" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_of_a_script(script: str) -> None:
    command, environ = [sys.executable, script, "--help"], {**os.environ, "COLUMNS": "100"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: ")
    assert max(map(len, done.stdout.splitlines())) <= 100


def test_the_default_of_plan_is_written_with_its_sign(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        MAINS["spare-plan"](["--help"])
    assert re.search(r"\(default:\s+4%\s+of\s+the\s+groups\s+that\s+train\)", capsys.readouterr().out)

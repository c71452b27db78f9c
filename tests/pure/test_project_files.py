"""What a public host and contributors' tools read agrees with scripts/test.sh."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import LONGEST

ROOT = Path(__file__).resolve().parents[2]
HOST = sorted((ROOT / ".github").rglob("*.yml"))


def loaded(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def test_the_hooks_before_a_commit_are_the_checks_of_the_test_script() -> None:
    script = (ROOT / "scripts" / "test.sh").read_text()
    tools = set(
        re.findall(r"^(ruff format|ruff|mypy|lint-imports)\b|\((mypy) && (lint-imports)\)", script, re.MULTILINE)
    )
    tools = {tool for found in tools for tool in found if tool}
    (repository,) = loaded(ROOT / ".pre-commit-config.yaml")["repos"]
    entries = [hook["entry"].removeprefix(".venv/bin/").split() for hook in repository["hooks"]]
    assert {entry[0] + (" format" if "format" in entry else "") for entry in entries} == tools
    assert len(tools) == len(entries) >= 4


@pytest.mark.parametrize("path", HOST, ids=lambda path: path.name)
def test_a_file_of_the_host_is_read_and_runs_scripts_that_are_there(path: Path) -> None:
    content = loaded(path)
    for script, options in re.findall(r"(\./scripts/\w+\.sh)((?: --\w+)*)", path.read_text()):
        text = (ROOT / script).read_text()
        assert all(option in text for option in options.split())
    if path.parent.name == "workflows":
        assert {"name", "permissions", "jobs"} <= set(content)
        assert all(job["timeout-minutes"] for job in content["jobs"].values())
    elif path.name != "config.yml":
        assert all(part["attributes"].get("label") or part["type"] == "markdown" for part in content["body"])


def test_the_usual_workflow_runs_on_each_supported_python() -> None:
    quick = loaded(ROOT / ".github" / "workflows" / "test.yml")["jobs"]["quick"]
    (asked,) = re.findall(r"Python ([\d., ]+) or ([\d.]+) and", " ".join((ROOT / "README.md").read_text().split()))
    assert quick["strategy"]["matrix"]["python"] == [*asked[0].split(", "), asked[1]]


def test_the_files_of_the_longest_tests_are_there() -> None:
    assert [name for name in LONGEST if not (ROOT / "tests" / f"{name}.py").is_file()] == []

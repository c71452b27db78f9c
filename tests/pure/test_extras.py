"""A command that needs a package of an extra says how to install it; its --help does not need it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pure.test_help import PROJECT
from tests.spawn import ROOT, environment

PLAN = "--gpus 64 --gpus-per-group 8 --mtbf-s 40000 --restart-s 60 --save-s 10 --compute-s 1 --reduce-s 0.1"
SIMULATE = "--policy microbatch --num-groups 8 --redundancy 2 --steps 10 --mtbf-s 4000 --trials 1"
CASES = (
    ("page", "aiohttp", "page", "runs/none", "spare-page"),
    ("page", "prometheus_client", "page", "runs/none", "spare-page"),
    ("timeline", "perfetto", "timeline", "runs/none", "spare-timeline"),
    ("plots", "matplotlib", "plan", f"{PLAN} --plot none.png", "--plot"),
    ("plots", "matplotlib", "simulate", f"{SIMULATE} --plot none.png", "--plot"),
)


@pytest.mark.parametrize(("extra", "package", "command", "words", "needed_by"), CASES)
def test_what_is_not_installed_is_named_with_the_command_that_installs_it(
    tmp_path: Path, extra: str, package: str, command: str, words: str, needed_by: str
) -> None:
    code = f"import sys; sys.modules['{package}'] = None; from spare_megatron.cli.{command} import main; "
    argv = [sys.executable, "-c", code + "sys.exit(main(sys.argv[1:]))"]
    shown, done = (
        subprocess.run([*argv, *more], cwd=tmp_path, env=environment(), capture_output=True, text=True)
        for more in (["--help"], words.split())
    )
    assert (shown.returncode, shown.stderr) == (0, "")
    sentence = (
        f"spare-{command}: {needed_by} needs the package {package}, which is not installed; install it with: "
        f"pip install 'spare_megatron[{extra}]'\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (2, "", sentence)


def test_an_extra_has_the_packages_that_are_imported_for_it() -> None:
    extras = PROJECT["optional-dependencies"]
    for name, package in {(case[0], case[1]) for case in CASES}:
        assert re.sub("_", "-", package) in {word.partition(">")[0] for word in extras[name]}
    base = {re.split("[><]", word)[0] for word in PROJECT["dependencies"]}
    assert not {case[1].replace("_", "-") for case in CASES} & base
    assert (ROOT / "THIRD_PARTY_NOTICES.md").read_text().count("| extra `") == len(extras) - 1, "all but those of tests"

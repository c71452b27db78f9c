"""Flags on the wrong side of the script, in a word of the right place."""

from __future__ import annotations

import argparse

import pytest

from spare_megatron.cli import launch, slurm
from spare_megatron.cli.script_words import parse_launch
from spare_megatron.flags.parser import OF_LAUNCHERS
from tests.pure.test_wrong_words import answer


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        (
            "--num-groups 2 --spare-redundancy 2 own.py",
            "there is no flag --spare-redundancy; flags of the script come behind it: spare-launch ... SCRIPT "
            "--spare-redundancy ...",
        ),
        ("--num_groups 2 own.py", "there is no flag --num_groups; did you mean --num-groups?"),
        (
            "--nproc-per-node 8 --num-groups 2 own.py",
            "there is no flag --nproc-per-node, which is torchrun's: spare-launch starts the ranks itself, "
            "--num-groups N times those of a group",
        ),
        (
            "--run-dir here own.py --num-groups=2",
            "--num-groups stands behind the script, where all flags are the script's; give it before",
        ),
        (
            "--num-groups 2 own.py --save runs/\udcff",
            r"'runs/\xff' is no text in utf-8; give another name",
        ),
    ],
)
def test_a_flag_on_the_wrong_side_of_the_script_is_named(
    words: str, reported: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch.main(words.split()) == 2
    assert capsys.readouterr().err == f"spare-launch: {reported}\n"


def test_what_stands_behind_the_script_is_the_scripts() -> None:
    words = "--num-groups 2 --inject=sigkill:group=1,step=2,at=vote --inject x -m own.module --num-groups 3 --nnodes 2"
    args = parse_launch(launch.parser(), words.split())
    assert (args.num_groups, args.module, args.script) == (2, True, "own.module")
    assert args.flags == ["--num-groups", "3", "--nnodes", "2"]


def test_a_launchers_flag_among_those_of_the_script_is_named() -> None:
    assert answer("--inject x") == "--inject is a flag of spare-launch, so it comes before the script"
    assert answer("--num-groups 4").endswith("; --spare-check reads SPARE_NUM_GROUPS=N from the environment")
    shown: dict[str, list[str]] = {}
    for made in (launch.parser(), slurm.parser()):
        for action in made._actions:
            if action.dest not in ("help", "version", "module") and action.help != argparse.SUPPRESS:
                for name in action.option_strings:
                    shown.setdefault(name, []).append(made.prog)
    assert {name: " and ".join(commands) for name, commands in shown.items()} == OF_LAUNCHERS

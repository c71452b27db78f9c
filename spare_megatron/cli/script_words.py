"""What the commands that start a script share: its place on the command line, between their own flags and its own."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.plain_words import check_words
from spare_megatron.flags.supported import nearest_of

OF_TORCHRUN = ("--nproc", "--nnodes", "--node-", "--node_", "--rdzv", "--master", "--standalone", "--max-restarts")
"""How flags of torchrun begin that a command line may still have."""


def add_script(made: argparse.ArgumentParser, run_dir: str, **how: Any) -> None:
    """The ranks' script and its flags, which come last, and what is otherwise taken from those flags; ``run_dir``: the
    help of ``--run-dir``, ``how``: further arguments for the script."""
    add = made.add_argument
    add("--run-dir", metavar="DIR", help=run_dir)
    add("--group-size", type=int, metavar="M", help="ranks of a group; default: from the script's parallelism flags")
    add("-m", "--module", action="store_true", help="the script is the name of a module")
    add("script", help="the Python script that every rank runs", **how)
    add("flags", nargs=argparse.REMAINDER, metavar="FLAGS...", help="the flags of the script")


def parse_launch(made: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags of a command line that starts a script (:func:`add_script`).

    Raises ConfigError for words that are no text, and for a flag on the wrong side of the script. argparse would take
    the word behind a flag that it does not know for the script's name, and everything behind that for the script's
    flags."""
    words = sys.argv[1:] if argv is None else list(argv)
    check_words(words)
    own = made._option_string_actions
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] != "--":
        name, given, _ = words[at].partition("=")
        if name not in own:
            raise ConfigError(f"there is no flag {name}{_instead(made.prog, name, list(own))}")
        at += 1 if given or own[name].nargs == 0 else 2
    before, behind = ({word.partition("=")[0] for word in part} for part in (words[:at], words[at:]))
    for name, action in own.items():
        if action.required and name in behind - before:
            raise ConfigError(f"{name} stands behind the script, where all flags are the script's; give it before")
    return made.parse_args(words)


def _instead(command: str, name: str, own: Sequence[str]) -> str:
    """The end of a sentence about a flag that the command does not have."""
    if name.startswith(OF_TORCHRUN):
        return f", which is torchrun's: {command} starts the ranks itself, --num-groups N times those of a group"
    near = nearest_of(name, own)
    return near if "did you mean" in near else f"; flags of the script come behind it: {command} ... SCRIPT {name} ..."

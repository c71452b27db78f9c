"""The ``--version`` of the commands."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

DISTRIBUTION = "spare_megatron"


class PrintVersion(argparse.Action):
    """Prints the command's name and the installed version, and ends. It is looked up only when it is asked for."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help="print the version and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib import metadata

        try:
            version = metadata.version(DISTRIBUTION)
        except metadata.PackageNotFoundError:
            version = "of a checkout that is not installed"
        sys.stdout.write(f"{parser.prog} ({DISTRIBUTION} {version})\n")
        parser.exit()


def add_version(parser: argparse.ArgumentParser) -> None:
    """Add ``--version`` to a command's flags."""
    parser.add_argument("--version", action=PrintVersion)

"""The ``--version`` of the commands."""

from __future__ import annotations

import argparse

from spare_megatron import __version__


def add_version(parser: argparse.ArgumentParser) -> None:
    """Add ``--version``, which prints the command's name and the package's version, to a command's flags."""
    parser.add_argument(
        "--version",
        action="version",
        version=f"%(prog)s (spare_megatron {__version__})",
        help="print the version and exit",
    )

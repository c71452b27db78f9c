"""What the commands share: how a user's error ends one, flags of several of them, files that flags name."""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.exits import ExitCode
from spare_megatron.config.flags import flag_name


class Main(Protocol):
    """The entry point of a command."""

    def __call__(self, argv: Sequence[str] | None = None) -> int:
        """Run the command with the words of ``argv``, or of the process; returns its exit code, one of
        spare_megatron.config.exits."""
        ...


def command(name: str) -> Callable[[Main], Main]:
    """Let a ConfigError end the entry point of command ``name`` with its sentence on standard error and exit code 2."""

    def with_refusals(main: Main) -> Main:
        @functools.wraps(main)
        def run(argv: Sequence[str] | None = None) -> int:
            try:
                return int(main(argv))
            except ConfigError as error:
                sys.stderr.write(f"{name}: {error}\n")
                return int(ExitCode.BAD_INPUT)

        return run

    return with_refusals


def json_line(value: object) -> str:
    """The value as a line of JSON. A number that is not finite, such as a loss that has become NaN, is null in it: JSON
    has no such numbers, and other programs refuse the whole line."""
    return json.dumps(_finite(value), allow_nan=False) + "\n"


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value


def given(args: argparse.Namespace, cls: type[Any]) -> dict[str, Any]:
    """The fields of dataclass ``cls`` whose flags, of the same names, were given or have a default."""
    values = {field.name: getattr(args, field.name, None) for field in fields(cls)}
    return {name: value for name, value in values.items() if value is not None}


def refuse_without(args: argparse.Namespace, needed: str, *names: str) -> None:
    """Raise ConfigError for the first flag of ``names`` that was given: it has no effect without ``needed``."""
    for name in names:
        value = getattr(args, name)
        if value is not None and value is not False:
            text = "" if value is True else f" {value:g}" if isinstance(value, float) else f" {value}"
            raise ConfigError(f"{flag_name(name)}{text} has no effect without {needed}; give both")


def lines_of(path: Path, flag: str) -> list[str]:
    """The lines of a file that ``flag`` names; ConfigError where it cannot be read."""
    try:
        return path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag} {path} cannot be read: {error}") from None


def add_tls_dir(made: argparse.ArgumentParser, where: str) -> None:
    """``--tls-dir``; ``where``: of which jobs a directory is made."""
    made.add_argument(
        "--tls-dir",
        default="",
        metavar="DIR",
        help="directory of ca.pem, cert.pem and key.pem for mutual TLS, or 'none'; default: one that is made in the "
        f"run directory {where}",
    )

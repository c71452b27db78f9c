"""spare-status RUN_DIR prints what a job is doing, from its run directory; it works for ended jobs too."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from spare_megatron.cli.display import figures
from spare_megatron.config.errors import ConfigError
from spare_megatron.config.exits import ExitCode
from spare_megatron.config.plural import counted
from spare_megatron.control.run_directory import RunDirectory, read_json

EXAMPLE = "example: spare-status runs/first --json"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser("spare-status", description=__doc__, epilog=EXAMPLE)
    made.add_argument("run_dir", metavar="RUN_DIR", help="the --run-dir of the job")
    made.add_argument("--json", action="store_true", help="print one JSON object")
    return made


def status_of(run_dir: RunDirectory) -> dict[str, Any]:
    """The content of status.json, its age in seconds, and the summary of a job that has ended (else None).

    Raises:
        ConfigError: the directory has no status.json.
    """
    status = read_json(run_dir.status)
    if status is None:
        raise ConfigError(f"{run_dir.path} has no status.json; give the --run-dir of a job that has been started")
    return {**status, "age_s": round(time.time() - status["time_unix_s"], 1), "summary": read_json(run_dir.summary)}


def text_of(status: dict[str, Any]) -> str:
    """The status as text for users."""
    lines = [f"{status['phase']}: step {status['step']} of {status['last_step']}, epoch {status['epoch']}"]
    if status["phase"] != "closed":
        lines.append(figures(status))
    for group, load in status["load"].items():
        pieces = counted(load, "piece")
        lines.append(f"  group {group} (incarnation {status['live'][group]}): {pieces} in the step in flight")
    if status["learners"]:
        word = "group" if len(status["learners"]) == 1 else "groups"
        lines.append(f"being brought up to date: {word} {', '.join(status['learners'])}")
    if status["last_losses"]:
        lines.append("last failures:")
        lines.extend(f"  {reason}" for reason in status["last_losses"])
    if status["saved_step"] >= 0:
        lines.append(f"last good checkpoint: step {status['saved_step']}")
    if status["outcome"]:
        lines.append(f"{status['outcome']}: {status['reason']}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code (spare_megatron.config.exits)."""
    args = parser().parse_args(argv)
    try:
        status = status_of(RunDirectory(args.run_dir))
    except ConfigError as error:
        sys.stderr.write(f"spare-status: {error}\n")
        return int(ExitCode.BAD_INPUT)
    sys.stdout.write((json.dumps(status) if args.json else text_of(status)) + "\n")
    return int(ExitCode.FINISHED)


if __name__ == "__main__":
    sys.exit(main())

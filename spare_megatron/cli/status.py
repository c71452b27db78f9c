"""spare-status RUN_DIR prints what a job is doing, from its run directory; it works for ended jobs too."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from spare_megatron.cli.commands import command, json_line
from spare_megatron.cli.status_screen import watch
from spare_megatron.config.errors import ConfigError
from spare_megatron.config.exits import ExitCode
from spare_megatron.config.version_flag import add_version
from spare_megatron.monitor.job_texts import left_out_text, wall_time_line
from spare_megatron.monitor.run_files import RunFiles, file_age_s
from spare_megatron.monitor.status_texts import quiet_text, status_text
from spare_megatron.monitor.waiting_counts import waiting_counts
from spare_megatron.monitor.wall_time import WallTime
from spare_megatron.runtime.disk import words
from spare_megatron.runtime.run_directory import RunDirectory, glance, read_json

EXAMPLE = "example: spare-status runs/first --json"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser("spare-status", description=__doc__, epilog=EXAMPLE)
    add_version(made)
    made.add_argument("run_dir", metavar="RUN_DIR", help="the --run-dir of the job")
    how = made.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="print one JSON object")
    made.add_argument(
        "--wall-time", action="store_true", help="also where the wall time went, which takes a while after months"
    )
    how.add_argument("--watch", action="store_true", help="show it on this terminal until the job ends or Ctrl-C")
    return made


def read(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file, None where there is no file. Raises ConfigError where it cannot be read."""
    try:
        return read_json(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {words(error)}") from None
    except ValueError as error:
        raise ConfigError(str(error)) from None


def status_of(run_dir: RunDirectory) -> dict[str, Any]:
    """The content of status.json, its age in seconds, the summary of a job that has ended (else None), and how many
    standbys wait.

    Raises:
        ConfigError: the directory has no status.json, or it cannot be read.
    """
    status, summary = read(run_dir.status), read(run_dir.summary)
    if status is None and run_dir.journal.exists():
        raise ConfigError(
            f"{run_dir.path} has no status.json now: a job attempt begins, or its coordinator cannot write; look again "
            f"in some seconds, and else at {run_dir.coordinator_log}"
        )
    if status is None:
        raise ConfigError(f"{run_dir.path} has no status.json; give the --run-dir of a job that has been started")
    return {
        **status,
        "age_s": round(file_age_s(run_dir.status), 1),
        "summary": summary,
        "waiting": waiting_counts(run_dir),
    }


def readable_status(run_dir: RunDirectory) -> tuple[dict[str, Any], str]:
    """:func:`status_of`, and its text; ConfigError too where a file is not one that a coordinator has written."""
    try:
        status = status_of(run_dir)
        return status, "\n".join([status_text(status), *_whether_it_runs(run_dir, status)])
    except ConfigError:
        raise
    except (OSError, ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"{run_dir.path} cannot be shown: status.json or summary.json is damaged ({type(error).__name__}: "
            f"{reason}); a running job writes status.json anew, else look at journal.jsonl and metrics.jsonl"
        ) from error


def _whether_it_runs(run_dir: RunDirectory, status: dict[str, Any]) -> Iterator[str]:
    """What is said of a status that tells of a job that goes on, where nobody writes it any more."""
    if status["phase"] == "stopped":
        return
    ended = glance(run_dir.ended)
    if ended is not None:
        yield f"this is the last status that was written: the launcher has left with exit code {ended['code']}"
    elif text := quiet_text(status["age_s"]):
        yield text


def rounded(wall_time: WallTime) -> dict[str, float]:
    """The parts of the wall time, in seconds."""
    return {name: round(seconds, 3) for name, seconds in wall_time.parts.items()}


@command("spare-status")
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code (spare_megatron.config.exits)."""
    args = parser().parse_args(argv)
    run_dir = RunDirectory(args.run_dir)
    if args.watch:
        watch(RunFiles(run_dir))
        return int(ExitCode.FINISHED)
    status, text = readable_status(run_dir)
    lines = [text]
    if args.wall_time:
        picture = RunFiles(run_dir).look()
        wall_time = picture.wall_time()
        status |= {"wall_s": round(wall_time.wall_s, 3), "wall_time_s": rounded(wall_time)}
        status |= {"lines_left_out": picture.lines_left_out}
        lines += [text for text in (wall_time_line(wall_time), left_out_text(picture.lines_left_out)) if text]
    sys.stdout.write(json_line(status) if args.json else "\n".join(lines) + "\n")
    return int(ExitCode.FINISHED)


if __name__ == "__main__":
    sys.exit(main())

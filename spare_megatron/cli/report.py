"""spare-report RUN_DIR writes what a job did into one HTML file: where its time went, and what each failure cost.

It works for jobs that still run too. spare-launch and spare-slurm write RUN_DIR/report.html at the end by themselves.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

from spare_megatron.cli.commands import command
from spare_megatron.config.errors import ConfigError
from spare_megatron.config.exits import ExitCode
from spare_megatron.config.version_flag import add_version
from spare_megatron.coordinator.journal_parts import beside
from spare_megatron.runtime.run_directory import RunDirectory
from spare_megatron.runtime.stop_signals import stop_signals

LEFT_BYTES_MAX = 4 << 30
"""A longer journal takes half a minute or more to read."""
LEFT_S = 30.0
"""How long a launcher may take for the report."""
PACKED = 10
"""About how many times shorter a compressed part of a journal is."""
EXAMPLE = "example: spare-report runs/first -o first.html"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser("spare-report", description=__doc__, epilog=EXAMPLE)
    add_version(made)
    made.add_argument("run_dir", metavar="RUN_DIR", help="the --run-dir of the job")
    made.add_argument("-o", "--output", type=Path, metavar="FILE", help="default: RUN_DIR/report.html")
    return made


class _GivenUp(BaseException):
    """A signal, or the end of the time for it, ends the writing of the report."""


def leave_report(run_dir: RunDirectory, notice: Callable[[str], None]) -> None:
    """Write the report at the end of a job, in the main thread. The job's exit code does not depend on it: where that
    fails, is interrupted by a signal, or would keep the job's nodes for long, ``notice`` is called with the reason. A
    job without a committed step has none."""
    later = f"spare-report {run_dir.path} writes the report"
    try:
        with _brief():
            if not run_dir.metrics.exists():
                return
            size_bytes = _journal_bytes(run_dir)
            if size_bytes > LEFT_BYTES_MAX:
                notice(f"the journal has {size_bytes / 1e9:.0f} GB; {later}, in a while")
                return
            from spare_megatron.monitor.html_report import write_report  # not while a launcher starts its job

            write_report(run_dir, run_dir.report)
    except _GivenUp as why:
        notice(f"there is no report ({why}); {later}")
    except Exception as error:  # of the code that draws, any is possible
        notice(f"there is no report: {error if isinstance(error, ConfigError) else repr(error)}")


@contextlib.contextmanager
def _brief() -> Iterator[None]:
    """Give up after LEFT_S, and at the signals that ask a launcher to end, which would else end it with a code of their
    own."""

    def give_up(number: int, _: FrameType | None) -> None:
        late = number == signal.SIGALRM
        raise _GivenUp(f"not within {LEFT_S:g} s" if late else f"{signal.Signals(number).name} came")

    numbers = (signal.SIGALRM, *stop_signals())
    before = {number: signal.signal(number, give_up) for number in numbers}
    signal.setitimer(signal.ITIMER_REAL, LEFT_S)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        for number, handler in before.items():
            signal.signal(number, handler)


def _journal_bytes(run_dir: RunDirectory) -> int:
    """About how long the journal is, in bytes before compression."""
    sizes = {path: path.stat().st_size for _, path in beside(run_dir.journal) if path.suffix != ".json"}
    return sum(size * (PACKED if path.suffix == ".gz" else 1) for path, size in sizes.items())


@command("spare-report")
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code (spare_megatron.config.exits)."""
    from spare_megatron.monitor.html_report import write_report

    args = parser().parse_args(argv)
    run_dir = RunDirectory(args.run_dir)
    write_report(run_dir, args.output or run_dir.report)
    sys.stdout.write(f"{args.output or run_dir.report}\n")
    return int(ExitCode.FINISHED)


if __name__ == "__main__":
    sys.exit(main())

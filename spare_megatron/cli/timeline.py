"""spare-timeline RUN_DIR writes what each group of a job did when, as a trace that ui.perfetto.dev opens.

Each group has a track: what it did in each step, and when it was lost. Arrows lead from a failure to the patches that
mask it, and on to the commit. It works for jobs that still run too. Of a long job, or of many groups, a sample is
shown, which is said here and in the trace.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from spare_megatron.cli.commands import command
from spare_megatron.config.exits import ExitCode
from spare_megatron.config.extras import extra
from spare_megatron.config.plural import counted
from spare_megatron.config.version_flag import add_version
from spare_megatron.runtime.run_directory import RunDirectory

EXAMPLE = "example: spare-timeline runs/first -o first.pftrace"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser("spare-timeline", description=__doc__, epilog=EXAMPLE)
    add_version(made)
    made.add_argument("run_dir", metavar="RUN_DIR", help="the --run-dir of the job")
    made.add_argument("-o", "--output", type=Path, metavar="FILE", help="default: RUN_DIR/timeline.pftrace")
    return made


@command("spare-timeline")
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code (spare_megatron.config.exits)."""
    args = parser().parse_args(argv)
    run_dir = RunDirectory(args.run_dir)
    path = args.output or run_dir.timeline
    with extra("timeline", "spare-timeline"):
        from spare_megatron.monitor.trace_files import draw_timeline, write_timeline
    timeline = draw_timeline(run_dir)
    size_bytes = write_timeline(timeline, path)
    slices = counted(len(timeline.slices), "slice")
    sys.stdout.write(f"{path}: {slices}, {size_bytes / 1e6:.1f} MB, for https://ui.perfetto.dev\n")
    if timeline.note:
        sys.stdout.write(f"{timeline.note}\n")
    return int(ExitCode.FINISHED)


if __name__ == "__main__":
    sys.exit(main())

"""spare-coordinator runs the process that decides for a job. spare-launch and spare-slurm start it; under
torchrun or a bare srun the user does."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from spare_megatron.cli.commands import add_tls_dir
from spare_megatron.config.errors import ConfigError
from spare_megatron.config.exits import ExitCode
from spare_megatron.config.version_flag import add_version
from spare_megatron.control_plane.tls_files import is_loopback, make_tls
from spare_megatron.coordinator.backlog import DiskFailedError
from spare_megatron.coordinator.journal import JournalError
from spare_megatron.coordinator.process import serve_alone, serve_in_turn
from spare_megatron.coordinator.server import Options
from spare_megatron.runtime import failpoints
from spare_megatron.runtime.descriptors import raise_descriptor_limit
from spare_megatron.runtime.run_directory import RunDirectory
from spare_megatron.runtime.standard_output import outlive_the_disk
from spare_megatron.runtime.stop_signals import usual_signals
from spare_megatron.runtime.wakeups import ask_for_short_waits

LEASE_S = 5.0
"""Default time of silence after which another candidate takes over."""
EXAMPLE = "example: spare-coordinator --listen 127.0.0.1:0 --run-dir runs/first"


def parser() -> argparse.ArgumentParser:
    """The parser of the command's flags."""
    made = argparse.ArgumentParser("spare-coordinator", description=__doc__, epilog=EXAMPLE)
    add_version(made)
    made.add_argument(
        "--listen",
        default="127.0.0.1:0",
        metavar="HOST:PORT",
        help="address to listen at; port 0: any free one; default: 127.0.0.1:0",
    )
    made.add_argument("--run-dir", required=True, metavar="DIR", help="directory of the job's records")
    made.add_argument(
        "--life",
        type=int,
        default=0,
        metavar="N",
        help="number of the job attempt; default: the journal's, or the next one where that is over",
    )
    made.add_argument(
        "--candidate",
        type=int,
        metavar="I",
        help="number of this process among several, from 0: one of them decides, another takes over when it ends",
    )
    made.add_argument(
        "--lease-s",
        type=float,
        default=LEASE_S,
        metavar="S",
        help=f"seconds of silence after which a candidate takes over; default: {LEASE_S:g}",
    )
    add_tls_dir(made, "where --listen is an address that other hosts reach")
    made.add_argument(
        "--on-event",
        default="",
        metavar="CMD",
        help="shell command that is run for each event of the job, with one line of JSON on its standard input",
    )
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns an exit code of spare_megatron.config.exits."""
    args = parser().parse_args(argv)
    options = Options(
        listen=args.listen,
        run_dir=RunDirectory(args.run_dir),
        job_attempt=args.life,
        tls_dir=args.tls_dir,
        on_event=args.on_event,
    )
    return run(options, args.candidate, args.lease_s, own_tls=not is_loopback(args.listen))


def run(options: Options, candidate: int | None, lease_s: float, own_tls: bool = False) -> int:
    """Run one coordinator process; returns its exit code. With ``own_tls`` the job uses TLS although no directory for
    it is given. A user's error is written to standard error as one sentence."""
    usual_signals()
    outlive_the_disk()
    ask_for_short_waits()
    raise_descriptor_limit()
    try:
        failpoints.act_as("coordinator" if candidate is None else f"coordinator-{candidate}")
        if own_tls and not options.tls_dir:
            make_tls(options.run_dir.path)
        return int(serve_alone(options) if candidate is None else serve_in_turn(options, candidate, lease_s))
    except ConfigError as error:
        sys.stderr.write(f"spare-coordinator: {error}\n")
        return int(ExitCode.BAD_INPUT)
    except JournalError as error:
        sys.stderr.write(f"spare-coordinator: {error}; a job cannot go on from it, use another run directory\n")
        return int(ExitCode.BAD_INPUT)
    except DiskFailedError as error:
        sys.stderr.write(f"spare-coordinator: {error}\n")
        return int(ExitCode.DISK_FAILED)


if __name__ == "__main__":
    sys.exit(main())

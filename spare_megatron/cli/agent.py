"""spare-agent RUN_DIR lends the node on which it runs to the job of a run directory, which spare-slurm runs.

The job uses it for groups that wait for nodes, and as a spare one. On SIGTERM the node's groups are drained, then the
agent leaves with 0, as it does when the job ends.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
from collections.abc import Sequence

from spare_megatron.cli.commands import command
from spare_megatron.config.exits import ExitCode
from spare_megatron.config.version_flag import add_version
from spare_megatron.control_plane.channel import security_of
from spare_megatron.launch.node_agent import NodeAgent, launcher_address, until_closed
from spare_megatron.runtime.run_directory import RunDirectory
from spare_megatron.runtime.stop_signals import stop_signals, usual_signals

PLACES_MOST = 4096
"""Above it is no number of ranks that a node has room for."""
DRAIN_S = 240.0
"""Default time for the groups of a node to leave it."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser("spare-agent", description=__doc__)
    add_version(made)
    made.add_argument("run_dir", metavar="RUN_DIR", help="the run directory of the job, which this node shares")
    made.add_argument(
        "--places", type=int, default=1, metavar="R", help="ranks that the node has room for, one a GPU; default: 1"
    )
    made.add_argument("--name", default="", metavar="NODE", help="its name in messages; default: the host's")
    made.add_argument(
        "--drain-s",
        type=float,
        default=DRAIN_S,
        metavar="S",
        help=f"time for its groups to leave it once it is to end; default: {DRAIN_S:g}",
    )
    made.add_argument("--tls-dir", default="", metavar="DIR", help="that of the job, where it uses mutual TLS")
    made.add_argument("--until-eof", action="store_true", help="leave when standard input is closed, too")
    return made


@command("spare-agent")
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code (spare_megatron.config.exits)."""
    made = parser()
    args = made.parse_args(argv)
    if not 1 <= args.places <= PLACES_MOST:
        made.error(f"--places is {args.places}, but must be at least 1 and at most {PLACES_MOST}")
    if not args.drain_s >= 0:
        made.error(f"--drain-s is {args.drain_s:g}, but must be at least 0")
    if not args.name.isprintable():
        made.error(f"--name is {args.name!r}, but must be one line of printable text")
    usual_signals()
    run_dir = RunDirectory(os.path.abspath(args.run_dir))
    name = args.name or socket.gethostname()

    async def lend() -> str:
        leave = asyncio.Event()
        for number in stop_signals():
            asyncio.get_running_loop().add_signal_handler(number, leave.set)
        launcher_address(run_dir)
        agent = NodeAgent(run_dir, security_of(run_dir, args.tls_dir), name, args.places)
        work = [asyncio.create_task(until_closed(sys.stdin.fileno(), leave))] if args.until_eof else []
        try:
            return await agent.run(leave, args.drain_s)
        finally:
            for task in work:
                task.cancel()

    sentence = asyncio.run(lend())
    sys.stdout.write(f"spare-agent: {name} leaves: {sentence}\n")
    return int(ExitCode.FINISHED)


if __name__ == "__main__":
    sys.exit(main())

"""spare-slurm, the one command of a Slurm batch script, starts a job's coordinators and ranks as
steps.

It shows the coordinator's lines (Megatron's iteration line, what was lost and masked). Each
rank's own output is in RUN_DIR/logs/group-G/rank-M.log. On SIGTERM or SIGUSR1 the job saves,
leaves and is queued again.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from spare_megatron.checkpoint.saved_args import saved_args
from spare_megatron.cli.commands import add_tls_dir, command
from spare_megatron.cli.coordinator import LEASE_S
from spare_megatron.cli.coordinator import run as run_coordinator
from spare_megatron.cli.display import Display
from spare_megatron.cli.launch import script_command
from spare_megatron.cli.report import leave_report
from spare_megatron.cli.script_words import add_script, parse_launch
from spare_megatron.config.allocation import Allocation, allocation_of, of_batch_script
from spare_megatron.config.errors import ConfigError
from spare_megatron.config.exits import ExitCode
from spare_megatron.config.place import number
from spare_megatron.config.plural import counted
from spare_megatron.config.version_flag import add_version
from spare_megatron.control_plane.tls_files import make_tls
from spare_megatron.coordinator.records import announce
from spare_megatron.coordinator.server import Options
from spare_megatron.flags.launcher_flags import launcher_flags
from spare_megatron.launch.slurm_attempt import SlurmLaunch
from spare_megatron.launch.slurm_commands import node_names
from spare_megatron.launch.slurm_job import SlurmJob, end_without_batch_script
from spare_megatron.launch.slurm_lend import lend_nodes
from spare_megatron.runtime import failpoints
from spare_megatron.runtime.descriptors import OF_A_GROUP, check_descriptors
from spare_megatron.runtime.run_directory import RunDirectory
from spare_megatron.runtime.standard_output import outlive_the_disk
from spare_megatron.runtime.stop_signals import hold_stop_signals, usual_signals
from spare_megatron.runtime.wakeups import ask_for_short_waits

CANDIDATES = 3
"""Default number of coordinator processes, of which one decides."""
EXAMPLE = """example, in a batch script:
  exec spare-slurm --run-dir runs/$SLURM_JOB_ID pretrain_gpt.py --pipeline-model-parallel-size 8 ...

exit codes: 0 finished; 2 bad flags or configuration; 3 wipe-out without a checkpoint to start
again from; 4 left on SIGTERM or SIGUSR1, or to go on from a checkpoint in another
allocation: queued again; 1 anything else"""


def parser() -> argparse.ArgumentParser:
    """The parser of the command's own flags; everything behind the script is for the script."""
    made = argparse.ArgumentParser(
        "spare-slurm", description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_version(made)
    run_dir = "directory of the job's records, shared by all nodes; default: the script's --spare-run-dir, or runs/JOB"
    add_script(made, run_dir, nargs="?", default="")
    made.add_argument(
        "--num-groups",
        type=int,
        metavar="N",
        help="number of groups; nodes beyond theirs are spares, on which a group goes on whose node is lost; default: "
        "as many as the job has ranks for",
    )
    made.add_argument(
        "--candidates",
        type=int,
        default=CANDIDATES,
        metavar="K",
        help=f"number of coordinator processes; default: {CANDIDATES}",
    )
    made.add_argument(
        "--lease-s",
        type=float,
        default=LEASE_S,
        metavar="S",
        help=f"seconds of silence after which a coordinator is replaced; default: {LEASE_S:g}",
    )
    made.add_argument(
        "--listen",
        default="0.0.0.0:0",
        metavar="HOST:PORT",
        help="address at which a coordinator listens; port 0: any free one; default: 0.0.0.0:0",
    )
    made.add_argument(
        "--srun", default="", metavar="OPTIONS", help="further options for the srun of the ranks, as one quoted word"
    )
    made.add_argument(
        "--no-requeue", action="store_true", help="leave with exit code 4 instead of queueing the job again"
    )
    add_tls_dir(made, "of a job on several nodes")
    made.add_argument("--life", type=int, default=0, help=argparse.SUPPRESS)
    made.add_argument(
        "--lend",
        metavar="RUN_DIR",
        help="train nothing, but lend the nodes to the job of this run directory, which another spare-slurm runs",
    )
    return made


def launch_of(args: argparse.Namespace, words: Sequence[str]) -> SlurmLaunch:
    """The launch that the flags describe; raises ConfigError where they do not fit together. ``words`` is the command
    line, which the coordinators are given too."""
    allocation = allocation_of(of_batch_script(os.environ))
    given = launcher_flags(args.flags, os.environ, saved_args)
    size = given.group_size if args.group_size is None else args.group_size
    if size >= 1 and args.num_groups is not None:
        allocation = allocation.with_spares(args.num_groups, size)
    for name, value in (("--group-size", size), ("--candidates", args.candidates)):
        if value < 1:
            raise ConfigError(f"{name} is {value}, but must be at least 1")
    if not args.lease_s > 0:
        raise ConfigError(f"--lease-s is {args.lease_s:g}, but must be above 0")
    run_dir = args.run_dir or given.run_dir or f"runs/{allocation.array or allocation.job}"
    return SlurmLaunch(
        allocation=allocation,
        run_dir=RunDirectory(Path(run_dir).absolute()),
        command=script_command(args.script, args.module, args.flags),
        group_size=size,
        flags=given,
        candidates=args.candidates,
        lease_s=args.lease_s,
        coordinator=(sys.executable, "-m", "spare_megatron.cli.slurm"),
        words=tuple(words),
        srun_options=tuple(shlex.split(args.srun)),
        requeue=not args.no_requeue,
        listen=args.listen,
        tls_dir=args.tls_dir,
    )


def spare_nodes(allocation: Allocation) -> Iterator[str]:
    """Which nodes are spare and what they can replace, where there are any."""
    rooms = allocation.tasks_of_nodes[allocation.nodes_used :]
    if not rooms:
        return
    names = node_names(allocation.node_list)[allocation.nodes_used :]
    needed = max(allocation.tasks_of_nodes[: allocation.nodes_used])
    enough = sum(room >= needed for room in rooms)
    whose = f" ({', '.join(names)})" if names else ""
    lost = "a lost node" if enough == 1 else f"{enough} lost nodes" if enough else "no node that is full of ranks"
    can = "it can" if len(rooms) == 1 else "they can"
    yield f"{counted(len(rooms), 'spare node')}{whose}: {can} take the place of {lost}"


def start(launch: SlurmLaunch) -> int:
    """Run the whole job, in the batch script; returns its exit code."""
    groups = launch.allocation.ranks // launch.group_size
    launch.allocation.groups_of(launch.group_size)
    check_descriptors(OF_A_GROUP * groups, f"the coordinator of {groups} groups")  # its limits are those of this node
    display = Display(launch.run_dir)
    fate = launch.allocation.shared_fate(launch.group_size)
    if fate:
        display.notice(f"spare-slurm: {fate}")
    for sentence in spare_nodes(launch.allocation):
        display.notice(f"spare-slurm: {sentence}")
    if not launch.tls_dir and launch.allocation.num_nodes > 1:
        make_tls(launch.run_dir.path)
    ask_for_short_waits(inherited=False)

    async def main() -> ExitCode:
        showing = asyncio.create_task(display.run())
        try:
            return await SlurmJob(launch, display.notice).run()
        finally:
            showing.cancel()
            hold_stop_signals()

    try:
        code = asyncio.run(main())
        if code is not ExitCode.REQUEUE:  # Slurm may end this script at any moment to queue it again
            leave_report(launch.run_dir, lambda text: display.notice(f"spare-slurm: {text}"))
        return int(code)
    finally:
        display.close()


def lend(args: argparse.Namespace) -> int:
    """Lend the nodes of the batch script; returns its exit code."""
    if args.script:
        raise ConfigError(f"--lend trains nothing, but a script is given ({args.script}); leave one of them out")

    def announce(text: str) -> None:
        sys.stdout.write(f"spare-slurm: {text}\n")
        sys.stdout.flush()

    run_dir = RunDirectory(Path(args.lend).absolute())
    allocation = allocation_of(os.environ)
    return asyncio.run(lend_nodes(allocation, run_dir, shlex.split(args.srun), args.tls_dir, announce))


def coordinate(launch: SlurmLaunch, args: argparse.Namespace) -> int:
    """Run one coordinator process, in the step of the coordinators; returns its exit code."""
    log, errors = launch.run_dir.coordinator_log, launch.run_dir.coordinator_errors
    log.parent.mkdir(parents=True, exist_ok=True)
    for path, stream in ((log, sys.stdout), (errors, sys.stderr)):
        with path.open("ab") as file:
            os.dup2(file.fileno(), stream.fileno())
    index = number(os.environ, "SLURM_PROCID") or 0
    options = Options(
        listen=args.listen,
        run_dir=launch.run_dir,
        job_attempt=args.life,
        tls_dir=args.tls_dir,
        on_event=launch.flags.on_event,
    )
    code = run_coordinator(options, index, args.lease_s)
    end_without_batch_script(launch, index, ExitCode(code), announce)
    return code


@command("spare-slurm")
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns an exit code of spare_megatron.config.exits."""
    words = sys.argv[1:] if argv is None else argv
    args = parse_launch(parser(), words)
    usual_signals()
    outlive_the_disk()
    failpoints.act_as("launch")
    if args.lend:
        return lend(args)
    if not args.script:
        raise ConfigError("no script is given; name the Python script of the ranks, or --lend RUN_DIR")
    launch = launch_of(args, words)
    return coordinate(launch, args) if args.life else start(launch)


if __name__ == "__main__":
    sys.exit(main())

"""spare-launch starts a job's coordinator and all its ranks on this machine, and starts the job
again when needed.

It shows the coordinator's lines (Megatron's iteration line, what was lost and masked) and, on a
terminal, a progress line below them. Each rank's own output is in
RUN_DIR/logs/group-G/rank-M.log, and in rank-M.incarnation-K.log where its group was started again
while the others trained.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from spare_megatron.checkpoint.saved_args import saved_args
from spare_megatron.cli.commands import add_tls_dir, command
from spare_megatron.cli.display import Display
from spare_megatron.cli.report import leave_report
from spare_megatron.cli.script_words import add_script, parse_launch
from spare_megatron.config.errors import ConfigError
from spare_megatron.config.injection import FORM, check_injections, parse_injection
from spare_megatron.config.plural import counted
from spare_megatron.config.version_flag import add_version
from spare_megatron.control_plane.tls_files import is_loopback, make_tls
from spare_megatron.flags.launcher_flags import launcher_flags
from spare_megatron.launch.local_job import Launch
from spare_megatron.launch.supervisor import Supervisor
from spare_megatron.runtime import failpoints
from spare_megatron.runtime.descriptors import OF_A_RANK, check_descriptors
from spare_megatron.runtime.run_directory import RunDirectory
from spare_megatron.runtime.script_sources import imports_of, script_and_modules
from spare_megatron.runtime.standard_output import outlive_the_disk
from spare_megatron.runtime.stop_signals import usual_signals
from spare_megatron.runtime.wakeups import ask_for_short_waits

PACKAGE = "megatron.training"
SED = (
    r"s/\bmegatron\.\(training\|legacy\.model\)\b/spare_megatron.\1/g; "
    r"s/\bfrom \(megatron import training\)/from spare_\1/"
)
"""The command of sed that ports a script. The builders of Megatron-LM until 0.17 also import ``megatron.legacy.model``,
which no wheel has."""


def check_imports(script: Path) -> None:
    """ConfigError for a script that imports from ``megatron.training`` instead of ``spare_megatron.training``, itself
    or in a module beside it that it imports; what Python cannot parse it says itself when it runs.

    Since megatron-core 0.17 that package lies beside megatron-core, so such a script starts, and then trains as plain
    Megatron does, whose loop knows nothing of groups."""
    sources = script_and_modules(script)
    found = {path: lines for path, tree in sources.items() if (lines := import_lines(tree))}
    if not found:
        return
    where = " and ".join(
        f"{path} in {counted(len(lines), 'line')} ({', '.join(map(str, lines))})" for path, lines in found.items()
    )
    raise ConfigError(
        f"{PACKAGE} is imported by {where}: that is Megatron's own loop, which ends with the first rank that is lost; "
        f"write spare_megatron.training there: sed -i '{SED}' {' '.join(map(str, found))}"
    )


def import_lines(tree: ast.Module) -> list[int]:
    """The numbers of the lines that import from ``megatron.training``."""
    inside = f"{PACKAGE}."
    return [line for line, names in imports_of(tree).items() if any(f"{name}.".startswith(inside) for name in names)]


EXAMPLE = """example:
  spare-launch --num-groups 4 --run-dir runs/first --inject sigkill:group=2,step=20,at=reduce \\
    pretrain_gpt.py --pipeline-model-parallel-size 2 --num-layers 8 ...

exit codes: 0 finished; 2 bad flags or configuration; 3 wipe-out without a checkpoint to start
again from; 4 left on SIGTERM, SIGUSR1, SIGINT or SIGHUP, and saved with --save; 1 anything else"""


def parser() -> argparse.ArgumentParser:
    """The parser of the launcher's own flags; everything behind the script is for the script."""
    made = argparse.ArgumentParser(
        "spare-launch", description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_version(made)
    made.add_argument(
        "--num-groups", type=int, required=True, metavar="N", help="number of groups, each a model replica"
    )
    add_script(made, "directory of the job's records; default: the script's --spare-run-dir, or runs/DATE-TIME")
    made.add_argument(
        "--inject",
        action="append",
        default=[],
        metavar="SPEC",
        help=f"inject a fault; may be given more than once: {FORM}",
    )
    made.add_argument(
        "--listen",
        default="127.0.0.1:0",
        metavar="HOST:PORT",
        help="address at which the coordinator listens; port 0: any free one; default: 127.0.0.1:0",
    )
    add_tls_dir(made, "where --listen is an address that other hosts reach")
    return made


def script_command(script: str, module: bool, flags: Sequence[str]) -> tuple[str, ...]:
    """The command line of a rank; raises ConfigError where there is no such script, or it is Megatron's own."""
    if not module and not Path(script).is_file():
        raise ConfigError(f"the script {script} does not exist; give its path, or a module with -m")
    check_imports(Path(f"{script.replace('.', '/')}.py" if module else script))
    return (sys.executable, *(("-m", script) if module else (script,)), *flags)


def launch_of(args: argparse.Namespace) -> Launch:
    """The launch that the flags describe; raises ConfigError where they do not fit together."""
    if args.num_groups < 1:
        raise ConfigError(f"--num-groups is {args.num_groups}, but must be at least 1")
    given = launcher_flags(args.flags, os.environ, saved_args)
    size = given.group_size if args.group_size is None else args.group_size
    if size < 1:
        raise ConfigError(f"--group-size is {size}, but must be at least 1")
    command = script_command(args.script, args.module, args.flags)
    injections = [parse_injection(text) for text in args.inject]
    check_injections(injections, args.num_groups, size, given.max_group_restarts)
    run_dir = args.run_dir or given.run_dir or time.strftime("runs/%Y%m%d-%H%M%S")
    return Launch(
        num_groups=args.num_groups,
        group_size=size,
        run_dir=RunDirectory(Path(run_dir).absolute()),
        command=command,
        flags=given,
        injections=tuple(args.inject),
        listen=args.listen,
        tls_dir=args.tls_dir,
    )


@command("spare-launch")
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns an exit code of spare_megatron.config.exits."""
    args = parse_launch(parser(), argv)
    usual_signals()
    outlive_the_disk()
    ask_for_short_waits(inherited=False)  # deaths are seen here; ranks compute
    failpoints.act_as("launch")
    launch = launch_of(args)
    if not launch.tls_dir and not is_loopback(launch.listen):
        make_tls(launch.run_dir.path)
    ranks = (launch.num_groups + launch.flags.standby_groups) * launch.group_size
    check_descriptors(OF_A_RANK * ranks, f"spare-launch with {ranks} ranks")
    display = Display(launch.run_dir)
    try:
        code = asyncio.run(Supervisor(launch, display.notice).run((display.run,)))
        leave_report(launch.run_dir, lambda text: display.notice(f"spare-launch: {text}"))
        return int(code)
    finally:
        display.close()


if __name__ == "__main__":
    sys.exit(main())

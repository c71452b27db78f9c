"""spare-gpu-check runs a table of checks on this machine, from driver and kernels to communicators
and jobs with kills, and writes a report and a JSON file that can be sent. A check that cannot run
here is skipped, with the reason.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from spare_megatron.cli.commands import command
from spare_megatron.config.errors import ConfigError
from spare_megatron.config.exits import ExitCode
from spare_megatron.config.version_flag import add_version

EXAMPLE = """examples:
  spare-gpu-check -o runs/check
  spare-gpu-check -o runs/check --quick --only kernel"""
NEXT_TO_THE_PACKAGE = Path(__file__).resolve().parents[2] / "pretrain_gpt.py"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        "spare-gpu-check", description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_version(made)
    made.add_argument("-o", "--output", type=Path, default=Path("gpu_check"), metavar="DIR", help="for report and jobs")
    made.add_argument("--quick", action="store_true", help="few repetitions, as on a machine without a GPU")
    made.add_argument("--only", default="", metavar="WORDS", help="checks whose name has these words")
    made.add_argument("--script", type=Path, metavar="FILE", help="the training script; default: the checkout's")
    made.add_argument("--seed", type=int, help="of values and moments; default: another one each time")
    return made


@command("spare-gpu-check")
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code: 0 where no check failed (spare_megatron.config.exits)."""
    args = parser().parse_args(argv)
    script = args.script or (NEXT_TO_THE_PACKAGE if NEXT_TO_THE_PACKAGE.exists() else None)
    if script is not None and not script.exists():
        raise ConfigError(f"--script {script}: there is no such file; give a training script")
    try:
        args.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output {args.output}: {error.strerror}; give a directory to write to") from None
    warnings.filterwarnings("ignore", message="CUDA initialization")

    from spare_megatron.collectives.nccl_start import Devices
    from spare_megatron.gpu_check import host, jobs, kernel_bits, kernel_speed, members, table

    seed = args.seed if args.seed is not None else secrets.randbelow(1 << 31)
    machine = table.Machine(Devices.here(0), args.output.resolve(), script, args.quick, seed)
    checks = [*host.CHECKS, *kernel_bits.CHECKS, *kernel_speed.CHECKS, *members.CHECKS, *jobs.CHECKS]
    chosen = [check for check in checks if args.only in check.name]
    if not chosen:
        names = ", ".join(check.name for check in checks)
        raise ConfigError(f"--only {args.only}: no check has this name; there are {names}")

    def tell(outcome: table.CheckOutcome) -> None:
        why = f": {outcome.why}" if outcome.why else ""
        sys.stdout.write(f"{outcome.state:8} {outcome.name}{why} ({outcome.seconds:.1f} s)\n")
        sys.stdout.flush()

    facts = host.facts(machine)
    outcomes = table.run(chosen, machine, tell)
    report, data = table.write(outcomes, facts, args.output)
    sys.stdout.write(f"{table.counts(outcomes)}; see {report} and {data}\n")
    return int(ExitCode.FAILED if any(one.state == table.FAILED for one in outcomes) else ExitCode.FINISHED)


if __name__ == "__main__":
    sys.exit(main())

"""Compares how much of its speed each of three systems keeps while groups are killed: the same model, ranks and kills.

    python benchmarks/goodput.py --torchft-python TORCHFT/bin/python
    python benchmarks/goodput.py --minutes 2 --calm-s 40 --mean-gap-s 30 --systems ours,torchrun

- **ours**: spare-launch with groups that come back at once; every group can read every shard, so no loss is a wipe-out.
- **torchrun**: plain megatron-core data parallelism; torchrun starts all ranks again from the newest checkpoint, saved
  at Young's and Daly's interval of the measured cost of a save, or at --save-interval-s (restarted_rank.py).
- **torchft**: a replica for each group, gradients averaged by its Manager over gloo, a Lighthouse; the supervisor that
  starts a killed replica again is this benchmark (torchft_replica.py). It needs an environment of its own:

      python -m venv TORCHFT
      TORCHFT/bin/pip install -c constraints.txt torch megatron-core scipy grpcio protobuf sentencepiece psutil
      TORCHFT/bin/pip install torchft-nightly==2026.10.26

All train the same small GPT with the same optimizer on the same samples, as 4 groups of one rank, one system after the
other. The seed draws when a group is struck (exponential gaps) and which; SIGKILL then ends its processes, also those
that are just starting. A kill that finds no process of its group is counted as missed.

A system's clock begins when it has trained 10 steps with all groups, so its first start costs nothing. Then come half
of --calm-s without kills, the window of --minutes with them, all groups' return, and the other half of --calm-s.
``ratio`` is the useful steps of the window per second over those of the failure-free times. A step is useful if the
state at the end of the window contains it: what torchrun's job loses and computes again counts once. That job does not
save in its failure-free times. A step of torchft goes without the samples of a dead replica, and so is faster and
smaller: ``samples_ratio`` compares useful samples instead (for the others both are the same but for rounding).
``lost_s_per_kill`` is the time that was lost, over the kills; ``next_new_step_s`` the median time from a kill to the
first step beyond the one that had been reached, and ``own_failures`` counts groups that ended without being struck. The
machine must be quiet: ``others_cpu_share`` is the share of its cores that other processes used meanwhile, and
``before`` and ``after`` are the two failure-free rates.

Rates of different systems are measured minutes apart, so they also differ by the machine's drift: what a step without
failures costs more than plain megatron-core's is measured in turns by step_overhead.py --goodput, with this job. The
process groups of torchrun's and torchft's ranks have a gloo device each, as torch makes them.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._goodput_account import kill_schedule
from benchmarks._goodput_model import FLAGS, GROUPS
from benchmarks._goodput_ours import Ours
from benchmarks._goodput_run import Trial
from benchmarks._goodput_system import System
from benchmarks._goodput_torchft import Torchft
from benchmarks._goodput_torchrun import Torchrun
from benchmarks._report import RESULTS, report

SYSTEMS = ("ours", "torchrun", "torchft")


def main() -> None:
    """Print the table, write the JSON."""
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped by SIGTERM"))
    window_s = options.minutes * 60
    kills = kill_schedule(options.seed, window_s, options.mean_gap_s, GROUPS)
    _announce("kills: " + ", ".join(f"{kill.at_s:.1f} s group {kill.group}" for kill in kills))
    make: dict[str, Callable[[Path], System]] = {
        "ours": Ours,
        "torchrun": lambda folder: Torchrun(folder, options.mean_gap_s, options.save_interval_s),
        "torchft": lambda folder: Torchft(folder, options.torchft_python, options.torchft_timeout_s),
    }
    rows, left_out, settings = [], [], {}
    for name in options.systems:
        if name == "torchft" and options.torchft_python is None:
            left_out.append("torchft: no --torchft-python was given")
            continue
        with tempfile.TemporaryDirectory(prefix="goodput-", ignore_cleanup_errors=True) as scratch:
            system = make[name](Path(scratch) / name)
            rows.append(Trial(system, kills, window_s, options.calm_s, _announce).run())
        settings[system.name] = system.notes
        _announce(f"{name}: {rows[-1]}")
    config = {
        "flags": " ".join(FLAGS),
        "groups": GROUPS,
        "seed": options.seed,
        "minutes": options.minutes,
        "mean_gap_s": options.mean_gap_s,
        "kills": len(kills),
        "calm_s": options.calm_s,
        **settings,
        "left_out": "; ".join(left_out) or "nothing",
    }
    report("goodput", config, rows, options.json)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=15.0, help="length of the window with kills (default: 15)")
    parser.add_argument("--calm-s", type=float, default=90.0, help="time without kills, in two halves (default: 90)")
    parser.add_argument("--mean-gap-s", type=float, default=60.0, help="mean time between two kills (default: 60)")
    parser.add_argument("--seed", type=int, default=1, help="of the schedule (default: 1)")
    parser.add_argument("--systems", type=_names, default=list(SYSTEMS), metavar="A,B", help=",".join(SYSTEMS))
    parser.add_argument(
        "--save-interval-s", type=float, default=0.0, help="of torchrun's job; 0: Young's and Daly's (default)"
    )
    parser.add_argument("--torchft-python", type=Path, help="Python of an environment with torchft; else left out")
    parser.add_argument("--torchft-timeout-s", type=float, default=2.0, help="of its gloo operations (default: 2)")
    parser.add_argument("--json", type=Path, default=RESULTS / "goodput.json", help="file for the result")
    return parser.parse_args()


def _names(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in SYSTEMS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(SYSTEMS)}")
    return names


def _announce(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()

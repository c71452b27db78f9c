"""Runs a job for minutes while processes of it are killed and stopped at random, lost groups come back, and nothing
else may happen: a chaos soak.

    python benchmarks/soak.py --minutes 10 --seed 1
    python benchmarks/soak.py --minutes 10 --seed 1 --model megatron --mean-gap-s 30
    python benchmarks/soak.py --minutes 2 --seed 7 --groups 3 --also '--overlap --audit-rate 0.2' --json soak.json
    python benchmarks/soak.py --minutes 20 --seed 1 --model megatron --mean-gap-s 15 --also '--spare-state-redundancy 2'
    python benchmarks/soak.py --seed 2 --model megatron --mean-gap-s 15 --inner 2 --also '--spare-state-redundancy 2'
    python benchmarks/soak.py --minutes 10 --seed 1 --weather --mean-gap-s 1
    python benchmarks/soak.py --minutes 10 --seed 1 --model megatron --mean-gap-s 20 --unfit-hosts

The seed draws the schedule of faults (benchmarks/_chaos.py): SIGKILL of one rank, a group, two groups in quick
succession or the coordinator; SIGSTOP, then SIGCONT, of a rank, a leader or the coordinator, for less and for more than
the heartbeat time-out. With --weather also what benchmarks/_weather.py has: files fail, packets are lost, ports are cut
off, flap or are reset, a rank holds the interpreter's lock or is out of memory, wall clocks jump by up to a day,
strangers connect to all ports, and /dev/shm is full. Where a rank's ports are struck, either end of a link may be lost.
With --inner 2 (megatron) a group has two inner data ranks, which divide sums and state, in the place of two stages.
With --unfit-hosts (megatron) lost groups also come back with fewer pipeline stages, and go home
(benchmarks/_unfit_hosts.py).

Faults that would certainly be a wipe-out are left out and counted. At the end all groups come
back and the job is asked to leave. Then each of these must hold, or the exit code is 1 and the run directory is kept:
each step is committed once, the journal replays to the same actions, nobody is lost whom no fault struck, the weights
of every step and the last checkpoint are those of a failure-free run bit for bit, and no process, port or file is left.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._chaos import Kind
from benchmarks._report import RESULTS, report
from benchmarks._soak_models import MODELS
from benchmarks._soak_samples import growth
from benchmarks._soak_verdict import judge
from benchmarks._soaked_job import Soak
from benchmarks._strikes import DONE
from benchmarks._unfit_hosts import SHAPES, UnfitHosts
from benchmarks._weather import Weather
from tests.process.harness import RESTARTS

SHAPE = {"groups": "groups of the job", "group_size": "ranks of a group", "redundancy": "groups that host a shard"}
RESTARTS_AN_HOUR, PAUSE = 1000, "--spare-group-restart-pause-s"


def main() -> int:
    """Run the soak, print the table, write the JSON; 1 where anything is not as it should be."""
    options = _options()
    shape = {name: value for name in SHAPE if (value := getattr(options, name)) is not None}
    if options.inner > 1:
        shape["inner"] = options.inner
    model = replace(MODELS[options.model](), also=tuple(shlex.split(options.also)), **shape)
    run_dir = Path(tempfile.mkdtemp(prefix=f"soak-{options.model}-{options.seed}-"))
    gap_s = options.mean_gap_s or model.mean_gap_s
    restarts = {RESTARTS: RESTARTS_AN_HOUR, PAUSE: options.pause_s}
    weather = Weather(run_dir / "weather", options.seed) if options.weather else None
    hosts = None
    if options.unfit_hosts:
        size = model.groups, model.group_size
        hosts = UnfitHosts(run_dir / "unfit", options.seed, options.minutes * 60, size)
        model = replace(model, also=(*model.also, *hosts.flags), shapes=SHAPES)
    soak = Soak(model, options.seed, options.minutes * 60, gap_s, run_dir, _announce, restarts, weather, hosts)
    wrong: list[str] = []
    try:
        soak.run()
        wrong = judge(soak, growth(soak.samples.found), _announce)
    except AssertionError as error:
        wrong.append(str(error))
    soak.samples.write(run_dir / "samples.jsonl")
    config = {"model": options.model, "minutes": options.minutes, "seed": options.seed, "mean_gap_s": gap_s}
    config |= {"restart_pause_s": options.pause_s, "groups": model.groups}
    config |= {"group_size": model.group_size, "redundancy": model.redundancy}
    config |= {"flags": " ".join((*model.flags, *model.also))}
    name = f"{'weather' if weather else 'shapes' if hosts else 'soak'}_{options.model}"
    path = options.json or RESULTS / f"{name}.json"
    report(name, config, rows(soak, wrong), run_dir / "soak.json" if wrong else path)
    for sentence in wrong:
        print(f"WRONG: {sentence}")
    if wrong:
        print(f"the run directory is kept: {run_dir}")
        return 1
    shutil.rmtree(run_dir)
    return 0


def rows(soak: Soak, wrong: list[str]) -> list[dict[str, object]]:
    """The table of the result."""
    strikes, step = soak.strikes, soak.job.metrics[-1]["step"] if soak.job.metrics else 0
    found: dict[str, object] = {"verdict": "wrong" if wrong else "as it should be", "steps": step}
    found |= {f"fault: {kind.value}": strikes.outcomes[kind, DONE] for kind in Kind}
    found |= {f"left out: {why}": n for why, n in sorted(strikes.skipped.items())}
    found |= {"returns": strikes.returns, "all_back_after_s": round(soak.whole_after_s, 1)}
    if soak.hosts is not None:
        output = (soak.run_dir / "launch.out").read_text()
        found |= {"hosts changed": soak.hosts.changed, "starts in a smaller shape": output.count("is started with")}
        found |= {"groups that went home": output.count("it has left for that")}
    for one in growth(soak.samples.found):
        for over, value in (("minute", one.per_minute), ("return", one.per_return)):
            found[f"{one.kind} {one.held} per {over}"] = None if value is None else round(value, 4)
        found[f"{one.kind} {one.held} most"] = one.most
    return [{"what": what, "value": value} for what, value in found.items()]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long faults strike (default: 10)")
    parser.add_argument("--seed", type=int, default=1, help="of the schedule (default: 1)")
    parser.add_argument("--model", choices=sorted(MODELS), default="toy")
    parser.add_argument(
        "--weather", action="store_true", help="disks, the network, clocks and memory fail too, and strangers connect"
    )
    parser.add_argument(
        "--unfit-hosts",
        action="store_true",
        help="hosts are fit for a part of their group's ranks now and then: lost groups come back in smaller shapes",
    )
    parser.add_argument("--mean-gap-s", type=float, help="mean time between two faults; default: toy 5, megatron 60")
    for name, what in SHAPE.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=what)
    parser.add_argument("--inner", type=int, default=1, metavar="N", help="inner data ranks of a group (default: 1)")
    parser.add_argument("--also", default="", metavar="FLAGS", help="further flags of the soaked job, in quotes")
    parser.add_argument(
        "--pause-s",
        type=float,
        default=0.25,
        help=f"{PAUSE} of the job (default: 0.25, where a job has 5): with faults every few seconds groups would else "
        "mostly wait for their next start",
    )
    parser.add_argument("--json", type=Path, help="file for the result; one that is wrong stays in the run directory")
    return parser.parse_args()


def _announce(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())

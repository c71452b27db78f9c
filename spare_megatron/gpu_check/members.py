"""Checks of communicators with real processes: over NCCL where there are GPUs, else over sockets.

The runner does what a coordinator does: it hands out views, and after a death the view without the dead one at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spare_megatron.gpu_check.table import CheckError, Machine, MachineCheck, SkipError

UP_S = 120.0
ANSWER_S = 60.0
GONE_S = 1.0
"""Within so long after a kill the survivors are out of the sum."""
GONE_ON_CPU_S = 5.0
SILENCE_S = 5.0
SMALL, LARGE, LARGE_ON_CPU = 100_000, 8_000_000, 1_000_000
HUGE = 1 << 27
CLOSES_S = 5.0
"""Within so long the connections of the epochs before have closed, on a busy host too."""
GROWTH = {"threads": 0, "descriptors": 0, "MiB": 64, "device MiB": 64, "lingering": 0}
"""What a member holds, and how much more of it is no growth."""
MOMENTS = ("init", "before", "in", "after")


@dataclass
class _One:
    """A member's process."""

    process: subprocess.Popen[str]
    reported: queue.Queue[dict[str, Any]]
    address: str = ""
    reader: threading.Thread | None = None


class Members:
    """Processes with the numbers 0 to n - 1, of which some are in the present epoch."""

    def __init__(self, number: int, backend: str, timeout_s: float = SILENCE_S) -> None:
        self.epoch = 0
        self.live: tuple[int, ...] = ()
        self._ones: dict[int, _One] = {}
        self._backend, self._timeout_s = backend, timeout_s
        for one in range(number):
            self.start(one)
        for one in range(number):
            self._ones[one].address = self.wait(one, "up", UP_S)["address"]

    def start(self, number: int) -> None:
        """Start the process of a member."""
        reported = {"number": number, "backend": self._backend, "timeout_s": self._timeout_s}
        command = [sys.executable, "-m", "spare_megatron.gpu_check.check_member", json.dumps(reported)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(command, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, **pipes)  # type: ignore[call-overload]
        one = _One(process, queue.Queue())
        one.reader = threading.Thread(target=_read, args=(one,), daemon=True)
        one.reader.start()
        if number in self._ones:
            _end(self._ones[number])
        self._ones[number] = one

    def restart(self, number: int) -> None:
        """Start a member again that was killed, and wait until it is up."""
        self.start(number)
        self._ones[number].address = self.wait(number, "up", UP_S)["address"]

    def wait(self, number: int, event: str, limit_s: float = ANSWER_S) -> dict[str, Any]:
        """The next line of a member with this event. Raises CheckError where none comes."""
        until_s = time.monotonic() + limit_s
        while True:
            try:
                line = self._ones[number].reported.get(timeout=max(0.0, until_s - time.monotonic()))
            except queue.Empty:
                raise CheckError(f"member {number} does not say {event!r} within {limit_s:g} s") from None
            if line["event"] == "ended" and event != "ended":
                raise CheckError(f"the process of member {number} ended while {event!r} was awaited")
            if line["event"] == event:
                return line

    def tell(self, number: int, **words: Any) -> None:
        """Send one command; a process that is gone gets none."""
        pipe = self._ones[number].process.stdin
        assert pipe is not None
        with contextlib.suppress(OSError):
            pipe.write(json.dumps(words) + "\n")
            pipe.flush()

    def view(self, members: Sequence[int]) -> int:
        """Begin an epoch of ``members``; returns its number."""
        self.epoch += 1
        self.live = tuple(members)
        for place, number in enumerate(self.live):
            right = self._ones[self.live[(place + 1) % len(self.live)]].address
            self.tell(number, do="adopt", epoch=self.epoch, members=self.live, right_at=right)
        return self.epoch

    def begin(self, numel: int) -> None:
        """Let all members of the epoch sum."""
        for number in self.live:
            self.tell(number, do="sum", epoch=self.epoch, members=self.live, numel=numel)

    def sum(self, numel: int) -> list[dict[str, Any]]:
        """Let them sum, and look that all have the right bits."""
        self.begin(numel)
        made = [self.wait(number, "summed") for number in self.live]
        for number, one in zip(self.live, made, strict=True):
            if not one["ok"] or not one["right"]:
                raise CheckError(f"member {number} of {self.live}: {one['error'] or 'other bits than on the CPU'}", one)
        return made

    def strike(self, number: int, what: signal.Signals) -> float:
        """Send a signal to a member; returns when."""
        self._ones[number].process.send_signal(what)
        return time.monotonic()

    def figures(self) -> list[dict[str, int]]:
        """What each member of the epoch holds."""
        for number in self.live:
            self.tell(number, do="figures")
        return [self.wait(number, "figures") for number in self.live]

    def close(self) -> None:
        """End all processes."""
        for one in self._ones.values():
            _end(one)


def _end(one: _One) -> None:
    one.process.kill()
    one.process.wait()
    assert one.reader is not None
    one.reader.join()
    for pipe in (one.process.stdin, one.process.stdout):
        assert pipe is not None
        with contextlib.suppress(OSError):
            pipe.close()


def _read(one: _One) -> None:
    assert one.process.stdout is not None
    for line in one.process.stdout:
        one.reported.put(json.loads(line))
    one.reported.put({"event": "ended"})


@contextlib.contextmanager
def members(machine: Machine, number: int, timeout_s: float = SILENCE_S) -> Iterator[Members]:
    """So many members, over NCCL with a GPU each, or over sockets where there is no GPU at all."""
    if machine.gpus:
        machine.want_gpus(number)
    made = Members(number, "nccl" if machine.gpus else "gloo", timeout_s)
    try:
        yield made
    finally:
        made.close()


def _sums(machine: Machine) -> dict[str, Any]:
    values: dict[str, Any] = {}
    sizes = [size for size in (2, 3, 8) if size <= max(machine.gpus, 0 if machine.gpus else 3)]
    if not sizes:
        machine.want_gpus(2)
    with members(machine, sizes[-1]) as ranks:
        for size in sizes:
            ranks.view(range(size))
            formed = max(one["formed_s"] for one in ranks.sum(SMALL))
            for numel in (1, 77, 63 * size, LARGE + 1):
                ranks.sum(numel)
            values[f"formed by {size} in s"] = round(formed, 3)
    return values


def _kills(machine: Machine) -> dict[str, Any]:
    number = 3 if machine.gpus in (0, 3) else min(8, machine.gpus)
    chance, slowest, innocent = random.Random(machine.seed), 0.0, []
    repeats = machine.times(50, 2)
    numel, limit_s = (LARGE, GONE_S) if machine.gpus else (LARGE_ON_CPU, GONE_ON_CPU_S)
    with members(machine, number) as ranks:
        ranks.view(range(number))
        took_s = max(one["took_s"] for one in ranks.sum(numel))
        for moment in MOMENTS:
            for _ in range(repeats):
                slow, accused = _kill(ranks, number, moment, chance, numel, took_s)
                slowest = max(slowest, slow)
                innocent += accused
    values = {"kills": repeats * len(MOMENTS), "slowest survivor out in s": round(slowest, 3), "accused": innocent}
    if slowest > limit_s or innocent:
        raise CheckError("survivors were out too late, or one of them was accused", values)
    return values


def _kill(
    ranks: Members, number: int, moment: str, chance: random.Random, numel: int, took_s: float
) -> tuple[float, list[tuple[int, int]]]:
    """Kill one member at a moment; returns how long the slowest survivor without a result was in the sum after it, and
    which survivors were accused."""
    victim = chance.randrange(number)
    ranks.view(range(number))
    survivors = [one for one in range(number) if one != victim]
    if moment != "init":
        ranks.sum(SMALL)
    if moment != "before":
        ranks.begin(numel)
    if moment == "after":
        ranks.wait(victim, "summed")
    else:
        time.sleep(chance.random() * (0.05 if moment == "init" else took_s))
    killed_s = ranks.strike(victim, signal.SIGKILL)
    ranks.wait(victim, "ended")
    if moment == "before":
        ranks.begin(numel)
    ranks.view(survivors)
    slowest, accused = 0.0, []
    for one in survivors:
        reported = ranks.wait(one, "summed")
        if reported["ok"] and not reported["right"]:
            raise CheckError(f"after a kill {moment} a sum member {one} has other bits than the CPU", reported)
        slowest = slowest if reported["ok"] else max(slowest, reported["at_s"] - killed_s)
        accused += [(sender, receiver) for sender, receiver in reported["links"] if victim not in (sender, receiver)]
    ranks.sum(SMALL)
    ranks.restart(victim)
    return slowest, accused


def _stop(machine: Machine) -> dict[str, Any]:
    number = 3 if not machine.gpus else min(8, machine.gpus)
    with members(machine, number) as ranks:
        ranks.view(range(number))
        ranks.sum(SMALL)
        stopped_s = ranks.strike(1, signal.SIGSTOP)
        ranks.view(range(number))
        ranks.begin(SMALL)
        rest = [one for one in range(number) if one != 1]
        reported = [ranks.wait(one, "summed") for one in rest]
        wrong = [link for one in reported for link in one["links"] if 1 not in link]
        waited = max(one["at_s"] for one in reported) - stopped_s
        ranks.strike(1, signal.SIGKILL)
        ranks.view(rest)
        ranks.sum(SMALL)
    values = {"waited s": round(waited, 2), "time-out s": SILENCE_S, "accused": wrong}
    if any(one["ok"] for one in reported) or wrong or waited > 3 * SILENCE_S:
        raise CheckError("a stopped member was not found, or another one was accused", values)
    return values


def _epochs(machine: Machine) -> dict[str, Any]:
    number, epochs = 3 if not machine.gpus else min(8, machine.gpus), machine.times(200, 20)
    with members(machine, number) as ranks:
        before: list[dict[str, int]] = []
        for epoch in range(epochs):
            ranks.view(range(number) if epoch % 2 else range(number - 1 if number > 2 else number))
            ranks.sum(SMALL)
            if epoch == min(9, epochs // 2):
                before = ranks.figures()
        until_s = time.monotonic() + CLOSES_S
        more = _more(before, ranks.figures())
        while _grown(more) and time.monotonic() < until_s:
            time.sleep(0.2)
            more = _more(before, ranks.figures())
    values = {"epochs": epochs, **{f"more {name}": number for name, number in more.items()}}
    if grown := _grown(more):
        raise CheckError(f"grows with epochs: {', '.join(grown)}", values)
    return values


def _more(before: Sequence[Mapping[str, int]], after: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """How much more the member holds that holds most more."""
    return {name: max(late[name] - early[name] for early, late in zip(before, after, strict=False)) for name in GROWTH}


def _grown(more: Mapping[str, int]) -> list[str]:
    return [name for name, most in GROWTH.items() if more[name] > most]


def _bandwidth(machine: Machine) -> dict[str, Any]:
    machine.want_gpus(2)
    number = min(8, machine.gpus)
    with members(machine, number) as ranks:
        ranks.view(range(number))
        took = [max(one["took_s"] for one in ranks.sum(HUGE)) for _ in range(5)]
    ours = 2 * (number - 1) / number * HUGE * 8 / min(took) / 1e9
    values: dict[str, Any] = {"GPUs": number, "bus GB/s": round(ours, 1)}
    tool = shutil.which("all_reduce_perf")
    if tool is None:
        raise SkipError(f"all_reduce_perf of nccl-tests is not on the path; ours is {ours:.1f} GB/s over {number} GPUs")
    command = [tool, "-b", "1G", "-e", "1G", "-d", "int64", "-g", str(number)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300.0, check=False)
    lines = [line.split() for line in done.stdout.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    if done.returncode or not lines:
        raise CheckError(f"all_reduce_perf failed: {(done.stdout + done.stderr)[-300:]}", values)
    theirs = float(lines[-1][7])
    values["nccl-tests GB/s"] = theirs
    if ours < 0.7 * theirs:
        raise CheckError("less than 70 % of nccl-tests' bus bandwidth", values)
    return values


def _dropped(machine: Machine) -> dict[str, Any]:
    machine.want_gpus(2)
    if os.geteuid() != 0 or shutil.which("tc") is None:
        raise SkipError("needs root and tc, which drops packets of the loopback interface meanwhile")
    shaped = ["qdisc", "add", "dev", "lo", "root", "netem", "loss", "5%"]
    subprocess.run(["tc", *shaped], check=True, capture_output=True)
    try:
        with members(machine, 2) as ranks:
            ranks.view(range(2))
            took = [max(one["took_s"] for one in ranks.sum(SMALL)) for _ in range(10)]
    finally:
        subprocess.run(["tc", "qdisc", "del", "dev", "lo", "root"], check=False, capture_output=True)
    return {"sums": len(took), "slowest s": round(max(took), 3)}


CHECKS = (
    MachineCheck(
        "sums",
        "communicators of 2, 3 and 8 (of 2 and 3 without GPUs) form, and their integer sums are the CPU's bits",
        _sums,
    ),
    MachineCheck(
        "kills",
        f"a member is killed in the initialisation, before, in and after a sum: the others are out within {GONE_S:g} s "
        f"({GONE_ON_CPU_S:g} s where ranks share cores), accuse nobody else, and sum on without it",
        _kills,
    ),
    MachineCheck("stop", "a member that is stopped in the initialisation is found by the time-out, and named", _stop),
    MachineCheck("epochs", "threads, descriptors and memory do not grow with epochs", _epochs),
    MachineCheck("dropped packets", "sums go on where 5 % of the packets are lost", _dropped),
    MachineCheck("bus bandwidth", "a large sum reaches 70 % of the bus bandwidth of nccl-tests", _bandwidth),
)

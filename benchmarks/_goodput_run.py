"""Takes one system through goodput.py's times: start, failure-free, the window with its kills, the return, failure-free
again."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import psutil

from benchmarks._goodput_account import Kill, median
from benchmarks._goodput_model import GROUPS
from benchmarks._goodput_system import System, left_behind

WARM_UP_STEPS, WHOLE_STEPS = 10, 5
"""Steps with all groups before the first failure-free time, and before the second."""
LOOK_S, ANNOUNCE_S = 0.02, 15.0
START_S, BACK_S = 240.0, 240.0
"""How long the first steps and the return of all groups may take."""

Span = tuple[float, float]


class OthersLoad:
    """How busy processes kept the machine that do not descend from this one. Those that end before the share is asked
    for are not counted; what forked ranks have used reaches no parent's account, so nothing can be subtracted."""

    def __init__(self) -> None:
        self._began_s, self._before = time.monotonic(), self._used_s()

    def share(self) -> float:
        """Of all cores, since this was made."""
        used_s = sum(cpu_s - self._before.get(process, 0.0) for process, cpu_s in self._used_s().items())
        return used_s / (time.monotonic() - self._began_s) / psutil.cpu_count()

    def _used_s(self) -> dict[psutil.Process, float]:
        """Each other process -> its CPU seconds so far. A psutil.Process is a number and a start time."""
        own = {psutil.Process(), *psutil.Process().children(recursive=True)}
        used = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess):
                if process not in own:
                    used[process] = sum(process.cpu_times()[:2])
        return used


@dataclass
class Trial:
    """The measurement of one system."""

    system: System
    kills: Sequence[Kill]
    window_s: float
    failure_free_s: float
    announce: Callable[[str], None]
    struck_s: list[float] = field(default_factory=list)
    """When kills struck processes."""
    missed: int = 0
    """Kills at which no process of their group was there."""

    def run(self) -> dict[str, object]:
        """The row of the table. Whatever happens, no process is left."""
        system, load = self.system, OthersLoad()
        try:
            system.start()
            self._until_whole("the first steps", WARM_UP_STEPS, START_S)
            failure_free = [self._failure_free()]
            window = self._window()
            self._until_whole("the return of all groups", WHOLE_STEPS, BACK_S)
            failure_free.append(self._failure_free())
            system.end()
            return self._row(failure_free, window) | {"others_cpu_share": round(load.share(), 3)}
        finally:
            system.end()
            if left := left_behind(system.folder):
                self.announce(f"{system.name}: processes were left behind and have been killed: {', '.join(left)}")

    def _failure_free(self) -> Span:
        """Half of the failure-free time."""
        self.system.failure_free(True)
        began_s = time.monotonic()
        self._until("calm", lambda: time.monotonic() >= began_s + self.failure_free_s / 2)
        self.system.failure_free(False)
        return began_s, time.monotonic()

    def _window(self) -> Span:
        began_s = time.monotonic()
        for kill in self.kills:
            self._until("kills", lambda due_s=began_s + kill.at_s: time.monotonic() >= due_s)
            at_s = time.monotonic()
            struck = self.system.kill(kill.group)
            if struck:
                self.struck_s.append(at_s)
            else:
                self.missed += 1
            what = f"{struck} process{'es' if struck != 1 else ''} killed"
            self.announce(f"{self.system.name}: {kill.at_s:.1f} s, group {kill.group}: {what}")
        self._until("kills", lambda: time.monotonic() >= began_s + self.window_s)
        return began_s, began_s + self.window_s

    def _until_whole(self, what: str, steps: int, limit_s: float) -> None:
        began_s = time.monotonic()
        course = self.system.course

        def whole() -> bool:
            if time.monotonic() > began_s + limit_s:
                raise RuntimeError(f"{self.system.name}: not within {limit_s:g} s: {what}")
            return course.whole_steps_since(began_s, GROUPS) >= steps

        self._until(what, whole)

    def _until(self, what: str, true: Callable[[], bool]) -> None:
        reported_s = time.monotonic()
        while not true():
            self.system.look()
            if time.monotonic() - reported_s > ANNOUNCE_S:
                reported_s = time.monotonic()
                states = self.system.course.states
                reported = (
                    f"step {states[-1].step}, {states[-1].groups} of {GROUPS} groups" if states else "no step yet"
                )
                self.announce(f"{self.system.name}: {what}: {reported}")
            time.sleep(LOOK_S)
        self.system.look()

    def _row(self, failure_free: Sequence[Span], window: Span) -> dict[str, object]:
        course, window_s = self.system.course, self.window_s
        steps = course.step_at(window[1]) - course.step_at(window[0])
        failure_free_steps, failure_free_samples = course.failure_free_rate(failure_free)
        first, second = (course.failure_free_rate([span])[0] for span in failure_free)
        ratio = steps / window_s / failure_free_steps
        waits = [course.seconds_until_beyond(at_s) for at_s in self.struck_s]
        wait_s, saving = median(waits), self.system.saving()
        return {
            "system": self.system.name,
            "version": self.system.version,
            "kills": len(self.struck_s),
            "missed": self.missed,
            "calm_steps_per_s": round(failure_free_steps, 4),
            "before": round(first, 4),
            "after": round(second, 4),
            "steps_per_s": round(steps / window_s, 4),
            "ratio": round(ratio, 4),
            "samples_ratio": round(course.samples_between(*window) / window_s / failure_free_samples, 4),
            "lost_s_per_kill": round((1 - ratio) * window_s / max(1, len(self.struck_s)), 2),
            "next_new_step_s": "" if wait_s is None else round(wait_s, 2),
            "own_failures": self.system.own_failures(len(self.struck_s)),
            "save_interval_s": round(saving[0], 2) if saving else "",
            "save_s": round(saving[1], 3) if saving else "",
        }

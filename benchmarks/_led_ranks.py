"""The processes of one large group for ``leader.py``: position 0 with a real session and a training thread, or many of
the other ranks, played.

    python benchmarks/_led_ranks.py train RUN_DIR SIZE STEP_S COUNTS
    python benchmarks/_led_ranks.py play RUN_DIR SIZE STEP_S FIRST END

A played rank is the real control side of a rank (:class:`~spare_megatron.control_plane.control_thread.Follower`: its
stream, beats and reports) without a process and a training thread of its own: timers say when it has done a piece.
``COUNTS`` is a file of two int64 in which the training thread counts its units of work and the steps that it has
applied.
"""

from __future__ import annotations

import asyncio
import mmap
import struct
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._played_job import FIGURES, specification
from spare_megatron.config.place import Place
from spare_megatron.control_plane.control_thread import Agent, Follower, RankSetup
from spare_megatron.control_plane.reports import Progress, Reduced, StepReport
from spare_megatron.control_plane.session import Session
from spare_megatron.protocol.member import Orders
from spare_megatron.protocol.messages import ReductionResult
from spare_megatron.runtime.run_directory import RunDirectory

PIECES = 4
"""Pieces of a step; after each one a rank beats sooner than its interval."""
REPORT = {"lm loss": 2.5, "grad_norm": 0.5, "lr": 1e-3, "tokens": 4096}


def result(orders: Orders, step: int) -> ReductionResult:
    """A sum of the whole plan, the same on every rank."""
    pieces = tuple(piece for segment in orders.view.segments for piece in segment)
    return ReductionResult(step, orders.view.epoch, True, pieces, result_digest="r" * 32, weights_digest="w" * 32)


class PlayedRank:
    """One rank at a position above 0, in an event loop that it shares with others."""

    tickets_read = 0
    """It computes nothing, and so reads none."""

    def __init__(self, run_dir: RunDirectory, position: int, size: int, step_s: float) -> None:
        spec, job = specification((0,), 1, PIECES, size)
        setup = RankSetup(0, 0, position, size, run_dir, spec, job, last_applied=0)
        self.progress_now = Progress()
        self._loop = asyncio.get_running_loop()
        self._agent = Agent(setup, self, self._loop.create_future())
        self._follower = Follower(self._agent)
        self._step, self._step_s = 0, step_s

    async def run(self) -> None:
        """As the control thread of a rank does."""
        await self._follower.run()

    def publish(self, orders: Orders, newer_epoch: bool) -> None:
        """New orders: after a commit the next step begins."""
        step = orders.view.committed[0] + 1
        if orders.view.epoch == 0 or step == self._step:
            return
        if self._step:
            self._follower.post(StepReport(self._step, REPORT if self._agent.setup.position == 1 else {}))
        self._step = step
        for done in range(1, PIECES + 1):
            self._loop.call_later(done * self._step_s / PIECES, self._piece, step, done)

    def answer_save(self, step: int, directory: str) -> None:
        """Nothing is saved here."""

    def _piece(self, step: int, done: int) -> None:
        self._tick("backward", step, done)
        if done == PIECES:
            self._tick("reduce", step, done)
            reduced = Reduced(result(self._agent.orders, step), FIGURES, self._agent.setup.position)
            self._follower.post(reduced)
            self._tick("vote", step, done)

    def _tick(self, phase: str, step: int, done: int) -> None:
        if self.progress_now.tick(phase, step, done) and self._follower.wants(self.progress_now.complete):
            self._follower.nudge()


async def play(run_dir: RunDirectory, size: int, step_s: float, mine: range) -> None:
    """Play the ranks ``mine`` until this process is killed."""
    ranks = []
    for position in mine:
        ranks.append(asyncio.create_task(PlayedRank(run_dir, position, size, step_s).run()))
        await asyncio.sleep(0.003)  # they do not beat at one moment
    await asyncio.gather(*ranks)


class Work:
    """What a training thread does: short kernels, in which the interpreter is free, and Python between them."""

    def __init__(self) -> None:
        import torch

        torch.set_num_threads(1)
        torch.manual_seed(0)
        self._torch = torch
        self._x = torch.randn(128, 256)
        self._weights = [torch.randn(256, 256) / 16 for _ in range(4)]

    def unit(self) -> float:
        """About a millisecond."""
        torch, x, total = self._torch, self._x, 0.0
        with torch.no_grad():
            for weight in self._weights:
                y = torch.nn.functional.gelu(x @ weight)
                x = torch.nn.functional.layer_norm(x + y, (256,))
                for n in range(400):
                    total += n * 0.5
        return total


def train(run_dir: RunDirectory, size: int, step_s: float, counts: Path) -> None:
    """Position 0, until this process is killed."""
    work = Work()
    spec, job = specification((0,), 1, PIECES, size)
    place = Place(
        group=0, position=0, num_groups=1, incarnation=0, run_dir=str(run_dir.path), launcher="spare-launch",
        group_size=size,
    )  # fmt: skip
    with counts.open("r+b") as file:
        shared = mmap.mmap(file.fileno(), 16)
    session = Session.open(place, spec, job, last_applied=0)
    units = steps = step = done = 0
    began_s = 0.0
    while True:
        work.unit()
        units += 1
        shared[:] = struct.pack("qq", units, steps)
        orders = session.orders
        if orders.over:
            raise RuntimeError(f"the job ended: {orders}")
        if orders.view.epoch and orders.view.committed[0] + 1 != step:
            if step:
                steps += 1
                session.progress("apply", step, 0)
                session.report_step(step, {})
            step, done, began_s = orders.view.committed[0] + 1, 0, time.monotonic()
            session.progress("forward", step, 0)
        elif step and done < PIECES and time.monotonic() > began_s + (done + 1) * step_s / PIECES:
            done += 1
            session.progress("backward", step, done)
            if done == PIECES:
                session.progress("reduce", step, done)
                session.reduced(result(orders, step), dict(FIGURES))
                session.progress("vote", step, done)


if __name__ == "__main__":
    what, path, size, step_s, *rest = sys.argv[1:]
    directory = RunDirectory(Path(path))
    if what == "train":
        train(directory, int(size), float(step_s), Path(rest[0]))
    else:
        asyncio.run(play(directory, int(size), float(step_s), range(int(rest[0]), int(rest[1]))))

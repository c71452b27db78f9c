"""One rank of a job without a model: it says that it computes, reduces and applies, as fast as it is asked to.

Run as a process by the tests of the control plane: ``python -m tests.process.control_client``. Its place comes from
the environment, as a real rank's does; what it does from the flags. It never loads torch, so it starts in 0.3 s.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import json
import os
import sys
import threading
import time
from pathlib import Path

from spare_megatron.checkpoint.folder import iteration_name, last_good, partial_directory, step_of
from spare_megatron.config.errors import ConfigError
from spare_megatron.config.exits import ExitCode
from spare_megatron.config.job import JobDescription
from spare_megatron.config.place import Place
from spare_megatron.config.timeouts import timeouts_from
from spare_megatron.control_plane.session import Session
from spare_megatron.protocol.member import Orders
from spare_megatron.protocol.messages import JobSpec, ReductionResult
from spare_megatron.runtime import failpoints
from spare_megatron.runtime.run_directory import RunDirectory
from spare_megatron.worker.fault_injection import Injector

LOOK_S = 0.01
"""How often a rank that ends looks whether it still saves."""


def arguments() -> argparse.Namespace:
    """What the client does."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--pieces", type=int, default=4)
    parser.add_argument("--offsets", default="0,1")
    parser.add_argument("--piece-s", type=float, default=0.0)
    parser.add_argument("--heartbeat-timeout-s", type=float, default=2.0)
    parser.add_argument("--progress-timeout-s", type=float, default=30.0)
    parser.add_argument("--grace-s", type=float, default=0.0, help="0: it follows from the heartbeat time-out")
    parser.add_argument("--startup-timeout-s", type=float, default=60.0)
    parser.add_argument("--coordinator-timeout-s", type=float, default=0.0)
    parser.add_argument("--latency", default="", help="file for the times of reduced and commit of each step")
    parser.add_argument("--identity", default="same")
    parser.add_argument(
        "--save", default="", help="directory of pretended checkpoints; attempts above 1 start from there"
    )
    parser.add_argument("--save-interval", type=int, default=0)
    parser.add_argument("--saves-into", default="", help="what the coordinator must keep from other jobs")
    parser.add_argument("--tls-dir", default="")
    parser.add_argument("--address", default="", help="where this rank reports that it listens for its replica ring")
    parser.add_argument("--config-error", default="", help="fail at once with this sentence")
    parser.add_argument("--crash", action="store_true", help="fail at once with an exception")
    parser.add_argument("--error-when-back", default="", help="as --config-error, where the group was started again")
    parser.add_argument("--crash-when-back", action="store_true", help="as --crash, where the group was started again")
    parser.add_argument("--hang", default="", help="GROUP,STEP: hang there with the interpreter's lock")
    for flag in ("max-group-restarts", "group-restart-pause-s", "on-event", "health-check", "preload"):
        parser.add_argument(f"--spare-{flag}", help="is for the launcher")
    return parser.parse_args()


class Client:
    """The training thread of a rank that has nothing to train."""

    def __init__(self, args: argparse.Namespace, place: Place) -> None:
        self.args, self.place = args, place
        self.first_step = self._checkpoint_step() if place.job_attempt > 1 else 0
        timeouts = timeouts_from(args.heartbeat_timeout_s, args.progress_timeout_s)
        if args.coordinator_timeout_s:
            timeouts = dataclasses.replace(timeouts, coordinator_timeout_s=args.coordinator_timeout_s)
        if args.grace_s:
            timeouts = dataclasses.replace(timeouts, grace_s=args.grace_s)
        job = JobDescription(
            identity={"model": args.identity},
            timeouts=dataclasses.replace(timeouts, startup_timeout_s=args.startup_timeout_s),
            train_iters=args.steps,
            log_interval=5,
            global_batch_size=place.num_groups * args.pieces,
            world_size=place.num_groups * place.group_size,
            saves_into=args.saves_into,
        )
        spec = JobSpec(
            num_groups=place.num_groups,
            pieces_per_shard=args.pieces,
            offsets=tuple(map(int, args.offsets.split(","))),
            granularity="microbatch",
            first_step=self.first_step,
            last_step=args.steps,
            min_groups=place.num_groups,
            fingerprint=job.fingerprint,
            heartbeat_timeout_s=args.heartbeat_timeout_s,
        )
        self.injector = Injector.from_environment(os.environ, place)
        self.session = Session.open(place, spec, job, last_applied=self.first_step, address=args.address)
        self.latencies: list[tuple[int, float, float]] = []
        """(step, when reduced, when the commit was seen) on the clock that all processes of a host share."""
        self.saving: list[threading.Thread] = []

    def run(self) -> ExitCode:
        """Step after step until the job is over."""
        orders = self.session.orders
        while not orders.view.is_member and not orders.over:
            orders = self.session.wait(orders.version)
        step = self.first_step + 1
        while not self.session.orders.over:
            leave = self._step(step)
            if leave:
                break
            step += 1
        orders = self._end(step)
        self.session.close()
        if orders.fenced is not None:
            print(f"fenced: {orders.fenced}", flush=True)
            return ExitCode.FENCED
        assert orders.stop is not None
        print(f"stopped: {orders.stop}", flush=True)
        return {"finished": ExitCode.FINISHED, "left": ExitCode.FINISHED, "wipe-out": ExitCode.WIPE_OUT}.get(
            orders.stop[0], ExitCode.FAILED
        )

    def _end(self, step: int) -> Orders:
        """Vote on the end in each epoch, send Applied once nothing is being saved, and stay until the job is over and
        what counts has its name."""
        orders, voted, done = self.session.orders, 0, 0
        while not orders.over:
            epoch, saves = orders.view.epoch, any(saving.is_alive() for saving in self.saving)
            if voted < epoch:
                self.session.reduced(ReductionResult(step + 1, epoch, True))
                voted = epoch
            if done < epoch and not saves:
                self.session.applied(step, epoch)
                done = epoch
            orders = self.session.wait(orders.version, LOOK_S if saves else None)
        for saving in self.saving:
            saving.join()
        return orders

    def _step(self, step: int) -> bool:
        """One step until it is committed; True when the run ends with it (or is over)."""
        session, ran, done, attempted = self.session, 0, [], 0
        reduced_s = 0.0
        while True:
            orders = session.orders
            if orders.over:
                return True
            if orders.view.committed[0] >= step:
                self.latencies.append((step, reduced_s, time.perf_counter()))
                self._apply(step, orders)
                return orders.view.leave
            if ran < len(orders.view.segments):
                self._compute(step, orders.view.segments[ran], done, patching=ran > 0)
                ran += 1
            elif attempted != orders.view.epoch:
                attempted = orders.view.epoch
                session.progress("reduce", step, len(done))
                self.injector.fire("reduce", step, 0)
                reduced_s = time.perf_counter()
                session.reduced(ReductionResult(step, orders.view.epoch, True, tuple(done)), {"reduce_s": 0.001})
                session.progress("vote", step, len(done))
            else:
                session.wait(orders.version)

    def _compute(self, step: int, pieces: tuple[int, ...], done: list[int], patching: bool) -> None:
        for n, piece in enumerate(pieces):
            self.session.progress("forward", step, len(done))
            self.injector.fire("patch" if patching else "forward", step, n)
            if self.args.hang == f"{self.place.group},{step}" and not self.place.restarts:
                ctypes.PyDLL(None).sleep(1000)  # no other thread of the process runs meanwhile
            if self.args.piece_s:
                time.sleep(self.args.piece_s)
            done.append(piece)
            self.session.progress("backward", step, len(done))

    def _apply(self, step: int, orders: Orders) -> None:
        self.session.progress("apply", step, 0)
        self.injector.fire("apply", step, 0)
        report = {"lm loss": 1.0 / step, "grad_norm": 0.5, "lr": 1e-3, "tokens": 64}
        self.session.report_step(step, report if self.place.position == self.place.group_size - 1 else {})
        interval = self.args.save_interval
        if (
            interval
            and step % interval == 0
            and self.place.group == min(orders.view.live_groups)
            and self.place.is_leader
        ):
            self.saving.append(threading.Thread(target=self._save, args=(step,), daemon=True))
            self.saving[-1].start()

    def _save(self, step: int) -> None:
        """The word comes with a later commit, or at the end, so no step waits for it."""
        save, place = Path(self.args.save), self.place
        partial, directory = (
            partial_directory(save, step, place.group, place.incarnation, 1),
            save / iteration_name(step),
        )
        if self.session.saved(step, str(partial)):
            failpoints.hit("checkpoint.publish")
            made = save / f".{directory.name}"
            made.mkdir(parents=True)
            (made / "metadata.json").write_text("{}")
            made.rename(directory)  # as a real one, it has its name once it is whole

    def _checkpoint_step(self) -> int:
        good, _ = last_good(Path(self.args.save))
        assert good is not None, "spare-launch starts again only where there is a checkpoint"
        return step_of(good)


def main() -> int:
    """The process."""
    args = arguments()
    environment = os.environ
    place = Place(
        group=int(environment["SPARE_GROUP"]),
        position=int(environment["SPARE_POSITION"]),
        num_groups=int(environment["SPARE_NUM_GROUPS"]),
        incarnation=int(environment.get("SPARE_INCARNATION", "0")),
        run_dir=environment["SPARE_RUN_DIR"],
        launcher="spare-launch",
        group_size=int(environment.get("SPARE_GROUP_SIZE", "1")),
        job_attempt=int(environment.get("SPARE_LIFE", "1")),
        restarts=int(environment.get("SPARE_RESTARTS", "0")),
        launcher_pid=int(environment.get("SPARE_LAUNCHER_PID", "0")),
        tls_dir=args.tls_dir or environment.get("SPARE_TLS_DIR", ""),
        starts_again=os.environ.get("SPARE_STARTS_AGAIN") == "1",
    )
    try:
        if args.crash or (args.crash_when_back and place.restarts):
            raise RuntimeError("asked to crash")
        if args.error_when_back and place.restarts:
            raise ConfigError(args.error_when_back)
        if args.config_error:
            raise ConfigError(args.config_error)
        client = Client(args, place)
        code = client.run()
        if args.latency:
            Path(f"{args.latency}.{place.group}.{place.position}").write_text(json.dumps(client.latencies))
        return int(code)
    except ConfigError as error:
        RunDirectory(str(place.run_dir)).report_error(f"group-{place.group}-rank-{place.position}", str(error))
        print(f"config error: {error}", flush=True)
        return int(ExitCode.BAD_INPUT)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

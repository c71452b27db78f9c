"""The process of a group's leader, and position 0's side of it.

A leader of hundreds of ranks receives thousands of messages a second. In position 0's own process it would take the
interpreter from the training thread, so it has one of its own: position 0 starts it, and then is one of its ranks, over
the loopback device. (A group of one rank needs no such process: its control thread is the leader.) The two live and die
together. The kernel kills the leader when the thread that started it ends, position 0's control thread; and position 0
leaves at once when the leader ends. Either is the loss of the group. A standby, which has no session yet, starts the
process ahead in its main thread; a rank that was forked by a preloaded parent forks it before it has other threads.

They share two pipes. The leader reads one line with the description of the job from standard input, and at the end
another: the session of position 0 is closed. It writes to standard output where it listens, or why it cannot.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import traceback
from dataclasses import fields
from pathlib import Path
from typing import BinaryIO

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.exits import ExitCode
from spare_megatron.control_plane.control_thread import Agent, Follower, RankSetup, leave_at_once
from spare_megatron.control_plane.leader import Leader
from spare_megatron.control_plane.reports import Progress, RankReport
from spare_megatron.protocol.codec import job_from_json, job_to_json, spec_from_json, spec_to_json
from spare_megatron.protocol.member import Orders
from spare_megatron.runtime import failpoints
from spare_megatron.runtime.descriptors import raise_descriptor_limit
from spare_megatron.runtime.gc_scheduler import collect_in_pauses
from spare_megatron.runtime.process_image import show_as
from spare_megatron.runtime.run_directory import RunDirectory
from spare_megatron.runtime.standard_output import outlive_the_disk
from spare_megatron.runtime.stop_signals import ignore_stop_signals, usual_signals

PACKAGE_PARENT = Path(__file__).resolve().parents[2]
CLOSE_S = 4.0
"""How long a leader may take to end: it lets the other ranks receive their last orders."""
_CLOSE = b"close\n"
_PR_SET_PDEATHSIG = 1


class FirstFollower:
    """The control side of position 0 in a group of several ranks: a follower as the others are, and its leader's
    process."""

    def __init__(self, agent: Agent) -> None:
        self._setup = agent.setup
        self._address: str | None = None
        self._follower = Follower(agent, lambda: self._address)

    async def run(self) -> None:
        """Serve this rank until the session closes, and the leader's process beside it.

        Raises:
            ConfigError: the leader cannot listen, or this rank's session cannot be opened.
        """
        process = _begun()
        lines, pipe = await _reader(process)
        try:
            _write(process, setup_to_json(self._setup).encode() + b"\n")
            self._address = _reported(await lines.readline())
            watch = asyncio.create_task(_watch(lines))
            try:
                await self._follower.run()
            finally:
                watch.cancel()
                await asyncio.wait({watch})  # one task at a time may read
        finally:
            await _ended(process, lines, pipe)

    def post(self, report: RankReport) -> None:
        """Send a report of the training thread to the leader."""
        self._follower.post(report)

    def wants(self, complete: bool) -> bool:
        """Whether :meth:`nudge` would change anything."""
        return self._follower.wants(complete)

    def nudge(self) -> None:
        """Bring the next heartbeat forward: the training thread has done a piece."""
        self._follower.nudge()

    def close(self) -> None:
        """End the stream; :meth:`run` then ends the leader and returns."""
        self._follower.close()


class ForkedLeader:
    """A leader's process that was forked; has what is used of :class:`subprocess.Popen`."""

    def __init__(self, pid: int, stdin: BinaryIO, stdout: BinaryIO) -> None:
        self.pid, self.stdin, self.stdout = pid, stdin, stdout
        self._status: int | None = None

    def poll(self) -> int | None:
        """Its exit code, or minus the number of the signal, if it has ended."""
        if self._status is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if found else None
        return self._status

    def wait(self) -> int:
        """Wait for its end."""
        if self._status is None:
            self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._status

    def kill(self) -> None:
        """Kill it, if it has not ended."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


LeaderHandle = subprocess.Popen[bytes] | ForkedLeader
_ahead: list[LeaderHandle] = []
"""The leader's process that was started ahead and waits for its job description, if there is one."""


def start_ahead() -> None:
    """Start the process of the leader for the session that this process, which will be position 0, opens later, unless
    it is there. To be called in the main thread."""
    if not _ahead:
        _ahead.append(_start())


def fork_ahead() -> None:
    """The same in a process that has imported all that a leader needs, and has one thread: the leader is forked, and
    imports nothing."""
    (asked, stdin), (stdout, reported) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid:
        os.close(asked)
        os.close(reported)
        _ahead.append(ForkedLeader(pid, os.fdopen(stdin, "wb"), os.fdopen(stdout, "rb")))
        return
    code: object = 1
    try:
        os.dup2(asked, 0)
        os.dup2(reported, 1)
        for fd in (asked, stdin, stdout, reported):
            os.close(fd)
        show_as([sys.executable, "-m", __name__], os.environ)
        main()
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


def _begun() -> LeaderHandle:
    """The process that was started ahead, if it lives, or a new one."""
    ahead = _ahead.pop() if _ahead else None
    return ahead if ahead is not None and ahead.poll() is None else _start()


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", __name__],
        env={**os.environ, "PYTHONPATH": _search_path()},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


def setup_to_json(setup: RankSetup) -> str:
    """What a leader must know of position 0, this process, as one line."""
    plain = {field.name: getattr(setup, field.name) for field in fields(setup)}
    plain |= {"run_dir": str(setup.run_dir.path), "spec": spec_to_json(setup.spec), "job": job_to_json(setup.job)}
    return json.dumps({**plain, "launcher_pid": os.getpid()})


def setup_from_json(text: str) -> RankSetup:
    """The inverse of :func:`setup_to_json`; the process that must stay the parent is position 0's."""
    plain = json.loads(text)
    plain |= {"run_dir": RunDirectory(plain["run_dir"]), "rows": tuple(map(tuple, plain["rows"]))}
    plain |= {"spec": spec_from_json(plain["spec"]), "job": job_from_json(plain["job"])}
    return RankSetup(**plain)


def _search_path() -> str:
    """Where the new process finds this package, whatever script position 0 runs."""
    return os.pathsep.join(part for part in (str(PACKAGE_PARENT), os.environ.get("PYTHONPATH", "")) if part)


def _write(process: LeaderHandle, line: bytes) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError):  # it has ended, which the reading side sees
        process.stdin.write(line)
        process.stdin.flush()


async def _reader(process: LeaderHandle) -> tuple[asyncio.StreamReader, asyncio.ReadTransport]:
    """What reads the process's standard output, and its transport, which owns the pipe."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    pipe, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), process.stdout)
    return reader, pipe


def _reported(line: bytes) -> str:
    """The leader's address from its first line. Raises ConfigError where it says why it has none."""
    if not line.strip():
        raise RuntimeError("the process of the group's leader ended before it listened")
    plain = json.loads(line)
    if "error" in plain:
        raise ConfigError(plain["error"])
    return str(plain["address"])


async def _ended(process: LeaderHandle, lines: asyncio.StreamReader, pipe: asyncio.ReadTransport) -> None:
    """Tell the leader that position 0 closes its session, wait for its end, and leave nothing of it."""
    _write(process, _CLOSE)
    try:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(lines.read(), CLOSE_S)
    finally:
        process.kill()  # it has ended, or it hangs
        process.wait()
        pipe.close()
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()


async def _watch(lines: asyncio.StreamReader) -> None:
    """End this process when the leader's has ended, so that the group's loss is seen at once."""
    await lines.read()
    leave_at_once("the process of this group's leader has ended")


# ------------------------------------------------------------------------------------------------------- the process


class NoTraining:
    """Stands for the session in a process that trains nothing."""

    progress_now = Progress()
    tickets_read = 0

    def publish(self, orders: Orders, newer_epoch: bool) -> None:
        """Nobody waits for orders here: the ranks apply them themselves."""

    def answer_save(self, step: int, directory: str) -> None:
        """The order itself answers the rank that asked."""


async def _lead(setup: RankSetup) -> None:
    """Lead the group until position 0 closes its session; leave at once where it has ended without that."""
    loop = asyncio.get_running_loop()
    opened: asyncio.Future[None] = loop.create_future()
    opened.add_done_callback(lambda future: future.exception())  # the ranks are notified
    leader = Leader(Agent(setup, NoTraining(), opened), lambda address: _send({"address": address}))

    def receive() -> None:
        if not os.read(sys.stdin.fileno(), len(_CLOSE)):
            leave_at_once("position 0 is gone")
        loop.remove_reader(sys.stdin.fileno())
        leader.close()

    loop.add_reader(sys.stdin.fileno(), receive)
    garbage = asyncio.create_task(collect_in_pauses())
    try:
        await leader.run()
    finally:
        garbage.cancel()


def _send(plain: dict[str, str]) -> None:
    os.write(sys.stdout.fileno(), json.dumps(plain).encode() + b"\n")


def _first_line() -> str:
    """From standard input, and no byte of the next one."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(sys.stdin.fileno(), 1)
        if not byte:
            sys.exit(1)
        line += byte
    return line.decode()


def main() -> None:
    """The process."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    usual_signals()
    ignore_stop_signals()  # they mean the ranks, which say what follows
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    setup = setup_from_json(_first_line())
    if os.getppid() != setup.launcher_pid:
        leave_at_once("position 0 is gone")
    failpoints.act_as(f"leader-{setup.group}")
    raise_descriptor_limit()
    outlive_the_disk()
    try:
        asyncio.run(_lead(setup))
    except ConfigError as error:
        _send({"error": str(error)})
        sys.exit(int(ExitCode.BAD_INPUT))


if __name__ == "__main__":
    main()

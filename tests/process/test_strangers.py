"""Strangers at the ports of a job's control plane: they can connect, know no token, and cost the job nothing."""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import socket
import threading
from pathlib import Path

import grpc.aio
import psutil
import pytest

from spare_megatron.config.exits import ExitCode
from spare_megatron.config.host_port import split_address
from spare_megatron.control_plane import control_pb2 as pb
from spare_megatron.control_plane.channel import Security, call_once, open_channel
from spare_megatron.protocol.messages import Lost
from tests.process.control_job import ControlJob

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""What a client of HTTP/2 says first: magic, and settings without any."""
FEW_DESCRIPTORS = 640
SILENT, RECONNECTING = 1200, 40


class Strangers:
    """Connections to one port: some keep silent, some say what gRPC's clients say first, some come again and again."""

    def __init__(self, address: str, seed: int) -> None:
        self._place, self._rng = split_address(address), random.Random(seed)
        self.there: list[socket.socket] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._come_again)

    def come(self) -> None:
        """All of them."""
        for number in range(SILENT):
            one = socket.create_connection(self._place, 5.0)
            self.there.append(one)
            if number % 2:
                with contextlib.suppress(OSError):  # there were too many already
                    one.sendall(PREFACE)
        self._thread.start()

    def _come_again(self) -> None:
        while not self._over.wait(0.02):
            for _ in range(RECONNECTING // 10):
                with contextlib.suppress(OSError), socket.create_connection(self._place, 1.0) as one:
                    one.sendall(self._rng.randbytes(self._rng.randint(0, 200)))

    def go(self) -> None:
        """All of them."""
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()
        for one in self.there:
            one.close()


def open_files(pid: int) -> int:
    """The number of descriptors of a process."""
    return psutil.Process(pid).num_fds()


@pytest.mark.skipif(shutil.which("prlimit") is None, reason="no program prlimit of util-linux")
def test_strangers_stop_no_failure_handling(tmp_path: Path) -> None:
    """They are more than the coordinator has descriptors. A group dies meanwhile, is found within its time and masked;
    then another comes to speak with the coordinator, which it can once the first of them have had their time."""
    job = ControlJob(tmp_path, 3, 1, "--steps 150 --piece-s 0.01 --heartbeat-timeout-s 3")
    job.under = ("prlimit", f"--nofile={FEW_DESCRIPTORS}:{FEW_DESCRIPTORS}", "--")
    try:
        known, job.under = job.start_coordinator(), ()
    except BaseException:
        job.close()
        raise
    strangers = Strangers(known.address, seed=43)
    try:
        for group in range(3):
            job.start_group(group)
        job.until(lambda: job.committed() >= 5)
        strangers.come()
        assert open_files(known.pid) < FEW_DESCRIPTORS - 100
        job.kill(1, 0)
        job.until(lambda: any(isinstance(record.event, Lost) for record in job.records()))
        [lost] = [record.event for record in job.records() if isinstance(record.event, Lost)]
        assert [(loss.group, loss.cause) for loss in lost.losses] == [(1, "closed")], "silence had shown it"
        at = job.committed()
        job.until(lambda: job.committed() >= at + 20)
        assert job.finish() == ExitCode.FINISHED, job.outputs()
        assert "EMFILE" not in job.outputs()
    finally:
        strangers.go()
        job.close()
    job.check_steps(150)


def test_a_wrong_token_is_said_once_for_each_host(tmp_path: Path) -> None:
    job = ControlJob(tmp_path, 2, 1, "--steps 100 --piece-s 0.01")
    job.start()
    known = job.run_dir.coordinator()
    assert known is not None

    async def ask(token: str) -> None:
        async with open_channel(known.address, Security(token), 2.0) as channel:
            await call_once(channel, "RequestStop", Security(token), pb.StopRequest(reason="mine"), 2.0)

    try:
        for token in ("", "guess", "guess"):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                asyncio.run(ask(token))
            assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert job.finish() == ExitCode.FINISHED
        reported = [line for line in job.output("coordinator").splitlines() if "has no token of this job" in line]
        assert len(reported) == 1, reported
        assert "a caller at ipv4:127.0.0.1:" in reported[0]
    finally:
        job.close()
    job.check_steps(100)

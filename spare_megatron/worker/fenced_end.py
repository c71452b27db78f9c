"""Chooses the exit code of a rank that was fenced, where torchrun has started it: torchrun starts a group again at once
whose ranks leave with another exit code than 0, and knows nothing of the job.

So the ranks ask the coordinator whether their group may come back, as spare-launch and spare-slurm do.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

import grpc.aio

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.exits import ExitCode
from spare_megatron.config.place import Place
from spare_megatron.control_plane import control_pb2 as pb
from spare_megatron.control_plane.channel import Security, call_once, open_channel, security_of
from spare_megatron.runtime.run_directory import RunDirectory

log = logging.getLogger(__name__)
ASK_S = 5.0
"""How long a coordinator that is away, or cannot decide, is asked; after that the group comes back."""
CALL_S = 1.0
AGAIN_S = 0.1


def status_of(code: ExitCode, place: Place) -> int:
    """The exit code of a rank's process: ``code``, but 0 where torchrun is not to start a fenced group again."""
    if code != ExitCode.FENCED or place.launcher != "torchrun":
        return int(code)
    why = _stays_out(place)
    if why:
        log.warning("torchrun must not start group %d again, so this is no failure: %s", place.group, why)
    return int(ExitCode.FINISHED if why else code)


def _stays_out(place: Place) -> str:
    """Why the group of a fenced rank must not come back by itself; empty where it may."""
    run_dir, deadline_s = RunDirectory(str(place.run_dir)), time.monotonic() + ASK_S
    while time.monotonic() < deadline_s:
        known, answer = run_dir.coordinator(), None
        with contextlib.suppress(grpc.aio.AioRpcError, ConfigError):
            if known is not None:
                answer = asyncio.run(_ask(known.address, security_of(run_dir, place.tls_dir), place))
        if answer is not None:
            back = f"SPARE_INCARNATION={answer.highest_incarnation + 1} torchrun ..."
            if answer.drained:
                return f"it is drained; {back} brings it back"
            if answer.elsewhere:
                return f"{answer.why}; {back} on other devices brings it back"
            if answer.now or answer.never:
                return str(answer.why)
        time.sleep(AGAIN_S)
    return ""


async def _ask(address: str, security: Security, place: Place) -> pb.RestartAnswer:
    request = pb.LostGroup(group=place.group, incarnation=place.incarnation)
    async with open_channel(address, security, CALL_S) as channel:
        answer: pb.RestartAnswer = await call_once(channel, "AskRestart", security, request, CALL_S, pb.RestartAnswer)
        return answer

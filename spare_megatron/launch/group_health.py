"""Checks, before a lost group is started again, that the host can run it: with a probe of ours that is always made, and
with the user's ``--spare-health-check``.

Both are short processes of their own, killed after a time limit: whatever is wrong with a device, spare-launch never
touches it. A device that hangs in the kernel may keep its probe; nobody waits for that.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from spare_megatron.config.job import JobDescription
from spare_megatron.launch.health_probe import HealthNeeds
from spare_megatron.launch.local_job import Launch
from spare_megatron.protocol.codec import decode
from spare_megatron.runtime.brief_command import CommandEnd, run_command
from spare_megatron.runtime.child_guard import ChildGuard
from spare_megatron.runtime.run_directory import glance

PROBE_LIMIT_S = 120.0
"""How long the probe may take; with CUDA it imports torch."""
COMMAND_LIMIT_S = 60.0
MEMORY_FLOOR_BYTES = 256 << 20
"""The memory that a rank needs at the least."""
FLAG = "--spare-health-check"


@dataclass(frozen=True)
class HealthFault:
    """Why a group must not be started now."""

    kind: str
    """'memory', 'disk', 'shm', 'device', 'probe' (it could not be made), 'command' (the user's), 'node' (the
    group cannot be there now), 'gone' (the node is not the job's any more)."""
    sentence: str


class GroupHealth:
    """The checks of one job attempt."""

    def __init__(self, launch: Launch, guard: ChildGuard, pids: Callable[[], Mapping[int, Sequence[int]]]) -> None:
        """``pids`` returns the processes of each group that has any."""
        self._launch, self._guard, self._pids = launch, guard, pids

    async def fault(self, slot: int, group: int | None, ranks: int | None = None, first: int = 0) -> HealthFault | None:
        """What is wrong on this host for ``group`` (None: a standby) on the devices of ``slot``, or so many of them for
        a group of fewer ``ranks``; None where nothing is. Raises OSError where no check can be started."""
        size = self._launch.group_size if ranks is None else ranks
        device = slot * self._launch.group_size + first
        over, needs = threading.Event(), self._needs(range(device, device + size), group)
        environ = {"SPARE_GROUP": str(group)} if group is not None else {}
        environ |= {"SPARE_GROUP_SIZE": str(size), "LOCAL_RANK": str(device)}
        try:
            return await asyncio.to_thread(self._fault, environ, needs, over.is_set)
        finally:
            over.set()

    def _fault(self, place: Mapping[str, str], needs: HealthNeeds, over: Callable[[], bool]) -> HealthFault | None:
        host = socket.gethostname()
        probe = (sys.executable, "-m", "spare_megatron.launch.health_probe", needs.as_json())
        found = self._run(probe, PROBE_LIMIT_S, place, over)
        if found.status != 0:
            kind, _, rest = found.line.partition(": ")
            known = found.status == 1 and kind in ("memory", "disk", "shm", "device")
            how = rest if known else f"the check of this host failed: {found.words(PROBE_LIMIT_S)}"
            return HealthFault(kind if known else "probe", f"{host}: {how}")
        if not self._launch.flags.health_check:
            return None
        found = self._run(("/bin/sh", "-c", self._launch.flags.health_check), COMMAND_LIMIT_S, place, over)
        return None if found.status == 0 else HealthFault("command", f"{host}: {FLAG}: {found.words(COMMAND_LIMIT_S)}")

    def _run(
        self, command: Sequence[str], limit_s: float, place: Mapping[str, str], over: Callable[[], bool]
    ) -> CommandEnd:
        environ = {**self._launch.environ, "SPARE_RUN_DIR": str(self._launch.run_dir.path), **place}
        return run_command(command, limit_s, self._guard, over, environ=environ, receive_all=True)

    def _needs(self, devices: Iterable[int], group: int | None) -> HealthNeeds:
        """Memory as the largest of the groups that live has, because all do the same; beside what ``group`` itself has,
        where it still trains in a smaller shape, which is free once it has left."""
        launch = self._launch
        living = {number: sum(map(own_memory_bytes, pids)) for number, pids in self._pids().items()}
        whole = max([launch.group_size * MEMORY_FLOOR_BYTES, *living.values()])
        return HealthNeeds(
            memory_bytes=whole - (0 if group is None else living.get(group, 0)),
            directories=(str(launch.run_dir.path), *((launch.flags.save_dir,) if launch.flags.save_dir else ())),
            devices=tuple(devices) if self._uses_cuda() else (),
        )

    def _uses_cuda(self) -> bool:
        """Whether the ranks have reported that they compute on CUDA devices."""
        reported = glance(self._launch.run_dir.job)
        job = None if reported is None else decode(reported)
        return isinstance(job, JobDescription) and job.device == "cuda"


def own_memory_bytes(pid: int) -> int:
    """The memory that a process shares with no file; 0 where it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))

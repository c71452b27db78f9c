"""Whether a host is fit for a group that is started again: the probe, by itself and as a process, and the user's
check."""

from __future__ import annotations

import asyncio
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from spare_megatron.config.job import JobDescription
from spare_megatron.control_plane import control_pb2 as pb
from spare_megatron.flags.launcher_flags import LauncherFlags
from spare_megatron.launch import fit_host, group_health, health_probe, restarter
from spare_megatron.launch.group_health import GroupHealth, HealthFault, own_memory_bytes
from spare_megatron.launch.group_restarts import GroupRestarts, GroupStart, Incarnations, LaunchMemory
from spare_megatron.launch.health_probe import HealthNeeds, faults
from spare_megatron.launch.local_job import Launch
from spare_megatron.protocol.codec import encode
from spare_megatron.runtime import free_memory
from spare_megatron.runtime.child_guard import ChildGuard
from spare_megatron.runtime.free_memory import available_bytes
from spare_megatron.runtime.run_directory import RunDirectory, write_json

NEEDS = HealthNeeds(1 << 20, ("/tmp",))


@pytest.fixture
def guard() -> Iterator[ChildGuard]:
    made = ChildGuard()
    yield made
    made.close()


def health(run_dir: Path, guard: ChildGuard, check: str = "", pids: tuple[int, ...] = ()) -> GroupHealth:
    environ = dict(os.environ, REPORTED="word")
    flags = LauncherFlags(health_check=check, save_dir="s")
    launch = Launch(2, 2, RunDirectory(run_dir), (), flags, environ=environ)
    return GroupHealth(launch, guard, lambda: {0: pids})


def fault(of: GroupHealth) -> tuple[str, str] | None:
    """(kind, sentence without the host) for group 1."""
    found = asyncio.run(of.fault(1, 1))
    return None if found is None else (found.kind, found.sentence.partition(": ")[2])


def test_this_host_is_fit() -> None:
    assert list(faults(NEEDS)) == []
    assert 0 < available_bytes() < 1 << 50
    assert HealthNeeds.from_json(NEEDS.as_json()) == NEEDS


def test_the_limits_of_control_groups_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _, found, name = Path("/proc/self/cgroup").read_text().rpartition("0::")
    if not found:
        pytest.skip("this host has no control groups of version 2")
    name = name.strip().strip("/")
    monkeypatch.setattr(free_memory, "CONTROL_GROUPS", tmp_path)
    host = available_bytes()
    for place, most in ((tmp_path / name, "max"), (tmp_path, "9000")):
        place.mkdir(parents=True, exist_ok=True)
        (place / "memory.max").write_text(f"{most}\n")
        (place / "memory.current").write_text("5000\n")
        (place / "memory.stat").write_text("anon 1\nactive_file 1000\ninactive_file 500\n")
    assert available_bytes() == 5500
    (tmp_path / "memory.max").unlink()
    assert available_bytes() > host // 2


def test_a_host_without_memory_space_or_shared_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(health_probe, "DISK_FLOOR_BYTES", 1 << 60)
    monkeypatch.setattr(health_probe, "SHARED_MEMORY", str(tmp_path / "none"))
    place = str(tmp_path / "not" / "made" / "yet")
    memory, disk, shm = faults(HealthNeeds(1 << 60, (place,)))
    assert memory.startswith("memory: ")
    assert memory.endswith(" GiB of memory are available, the group needs 1073741824.00")
    assert disk.startswith("disk: ")
    assert disk.endswith(f" MiB are free in {place}, at least {1 << 40} are needed")
    assert shm == f"shm: {tmp_path}/none cannot be written: No such file or directory"


class Devices(types.ModuleType):
    """As much of torch as the probe calls, with devices that are good (0), compute nothing (1) or wrong sums (2)."""

    int64 = None

    def __init__(self, count: int) -> None:
        super().__init__("torch")
        self.count, self.cuda, self.number = count, self, 0
        self.is_available = lambda: count > 0
        self.device_count = lambda: count
        self.arange, self.sum = self._arange, lambda: self

    def _arange(self, size: int, dtype: object, device: str) -> Devices:
        self.number, self.size = int(device.removeprefix("cuda:")), size
        if self.number == 1:
            raise RuntimeError("CUDA error: uncorrectable ECC error\nand more")
        return self

    def item(self) -> int:
        return self.size * (self.size - 1) // 2 + (self.number == 2)


@pytest.mark.parametrize(
    ("count", "ranks", "expected"),
    [
        (0, (0,), ["no CUDA device is visible"]),
        (4, (0, 3), []),
        (4, (4, 7), []),
        (2, (2, 3), ["CUDA device 1 does not compute: CUDA error: uncorrectable ECC error"]),
        (4, (2,), ["CUDA device 2 computes a wrong sum"]),
    ],
)
def test_the_devices_of_the_groups_ranks_are_tried(
    monkeypatch: pytest.MonkeyPatch, count: int, ranks: tuple[int, ...], expected: list[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", Devices(count))
    assert list(faults(HealthNeeds(0, (), ranks))) == [f"device: {sentence}" for sentence in expected]


def test_the_users_check_is_made_after_ours(tmp_path: Path, guard: ChildGuard) -> None:
    assert fault(health(tmp_path, guard)) is None
    assert fault(health(tmp_path, guard, check='test "$REPORTED $SPARE_GROUP $LOCAL_RANK" = "word 1 2"')) is None
    found = fault(health(tmp_path, guard, check="echo; echo the fan is broken; echo hot >&2; exit 3"))
    assert found == ("command", "--spare-health-check: exit code 3: the fan is broken")
    assert fault(health(tmp_path, guard, check="kill -9 $$")) == ("command", "--spare-health-check: killed by SIGKILL")


def test_a_check_that_hangs_or_floods_is_killed(
    tmp_path: Path, guard: ChildGuard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_health, "COMMAND_LIMIT_S", 0.5)
    found = fault(health(tmp_path, guard, check="yes on fire"))
    assert found == ("command", "--spare-health-check: not done within 0.5 s: on fire")


def test_a_group_needs_the_memory_of_one_that_lives(
    tmp_path: Path, guard: ChildGuard, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert own_memory_bytes(os.getpid()) > 1 << 20
    needs = HealthNeeds(2 * group_health.MEMORY_FLOOR_BYTES, (str(tmp_path), "s"))
    assert health(tmp_path, guard)._needs(1, 1) == needs
    monkeypatch.setattr(group_health, "own_memory_bytes", lambda pid: pid << 50)
    found = fault(health(tmp_path, guard, pids=(2, 3)))
    assert found is not None
    assert found[0] == "memory"
    assert found[1].endswith(f"the group needs {5 << 20}.00")
    assert asyncio.run(health(tmp_path, guard, pids=(2, 3)).fault(0, 0)) is None, "what it has will be free"


def test_the_probe_looks_at_devices_where_the_ranks_use_cuda(
    tmp_path: Path, guard: ChildGuard, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("import types\ncuda = types.SimpleNamespace(is_available=lambda: False)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    for device, expected in (("cpu", None), ("cuda", ("device", "no CUDA device is visible"))):
        write_json(tmp_path / "job.json", encode(JobDescription(device=device)))
        assert fault(health(tmp_path, guard)) == expected
    (tmp_path / "torch.py").write_text("import os\nos.abort()\n")
    assert fault(health(tmp_path, guard)) == ("probe", "the check of this host failed: killed by SIGABRT")


def test_a_check_that_cannot_be_started_is_tried_again(
    tmp_path: Path, guard: ChildGuard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter is missing twice, then it is there again."""
    monkeypatch.setattr(fit_host, "pause_s", lambda looks: 0.01 * looks)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    reported, begun, looks = list[str](), list[GroupStart](), list[GroupStart]()

    class Client:
        async def ask_restart(self, group: int, incarnation: int) -> pb.RestartAnswer:
            return pb.RestartAnswer(now=True, highest_incarnation=3)

    async def fault(start: GroupStart) -> HealthFault | None:
        looks.append(start)
        if len(looks) < 3:
            return await health(tmp_path, guard).fault(start.group, start.group)
        return None

    def begin(start: GroupStart) -> None:
        begun.append(start)

    memory = LaunchMemory(GroupRestarts(1), Incarnations())
    job = restarter.RestartedJob(
        trains=lambda: True, over=lambda: False, fault=fault, begin=begin, announce=reported.append
    )
    made = restarter.Restarter(job, Client(), memory)  # type: ignore[arg-type]
    asyncio.run(made.bring_back(GroupStart(1, 3)))
    assert (len(looks), begun) == (3, [GroupStart(1, 4, 1)])
    assert reported == [
        "group 1 is not started again yet, the check cannot be started: ENOENT (No such file or directory); looked at "
        "again in 0.01 s, and then less and less often",
        "group 1 is started again, as incarnation 4: restart 1 of at most 1 within an hour",
    ]

"""What must hold before the first communicator on NCCL exists: versions, one device for each rank, and the environment.

torch and NCCL read most of their environment once in a process, with its first communicator, and that is one of the
group's own: torch keeps ``TORCH_NCCL_NONBLOCKING_TIMEOUT`` in a static variable (``nccl_nonblocking_timeout``,
NCCLUtils.cpp), NCCL keeps each ``NCCL_*`` when it first asks for it. So :func:`prepare` is called before the group's
world is initialised. Nothing else is changed later, with one exception. ``TORCH_NCCL_BLOCKING_WAIT`` is read by each
constructor of ``ProcessGroupNCCL``: the group's own process groups must not wait on the host, and those between groups
must have no watchdog. So it exists as 0 when the world is made, and :func:`without_watchdog` makes it 1 once, in the
main thread, before any thread of ours forms a communicator. The variable exists by then, so the C library exchanges
one pointer; it does not move the table that another thread may be reading.

May assume: :func:`prepare` runs before any NCCL call of the process. Promises: what the user has set stays as it is, or
is refused with one sentence. Importing needs neither CUDA nor NCCL.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from spare_megatron.config.errors import ConfigError

LEAST_TORCH = (2, 11)
"""With earlier ones the initialisation of non-blocking communicators hangs at times."""
LEAST_NCCL = (2, 26)
DRIVER = "libcuda.so.1"
ALL_RANKS = 1 << 30
BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
RANKS_PER_ROOT = "TORCH_NCCL_RANKS_PER_ROOT"
NONBLOCKING_TIMEOUT = "TORCH_NCCL_NONBLOCKING_TIMEOUT"


@dataclass(frozen=True)
class Devices:
    """What a rank finds on its host."""

    cuda_build: bool
    """torch is built for CUDA."""
    failure: str
    """Why CUDA cannot be used: what is wrong with the driver, or torch's words; empty where it can."""
    count: int
    """Devices that this process sees."""
    local_rank: int
    name: str
    """Of the device that this rank would use."""
    torch_version: str
    nccl_version: tuple[int, ...]
    """Empty where torch has no NCCL."""

    @property
    def own(self) -> torch.device:
        """The device that this rank uses; there is one."""
        return torch.device("cuda", self.local_rank % self.count)

    @classmethod
    def here(cls, local_rank: int) -> Devices:
        """Of this process. Raises nothing."""
        cuda_build, count, name = torch.version.cuda is not None, 0, ""
        failure = driver_fault(torch.version.cuda) if torch.version.cuda is not None else ""
        if cuda_build and not failure:
            try:
                torch.cuda.init()
                count = torch.cuda.device_count()
                name = torch.cuda.get_device_name(local_rank % count)
            except (RuntimeError, AssertionError) as error:
                failure = f"{error}".partition("\n")[0]
        nccl = tuple(torch.cuda.nccl.version())[:3] if dist.is_nccl_available() else ()
        return cls(cuda_build, failure, count, local_rank, name, torch.__version__, nccl)


def driver_fault(cuda: str) -> str:
    """What is wrong with this host's NVIDIA driver for a torch that is built for version ``cuda``; empty where nothing
    is. torch does not say it in a forked process: there it only says that CUDA cannot be initialised again."""
    version = ctypes.c_int(0)
    try:
        ctypes.CDLL(DRIVER).cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return f"there is no NVIDIA driver ({DRIVER} cannot be loaded)"
    major, minor = version.value // 1000, version.value % 1000 // 10
    if major >= int(cuda.partition(".")[0]):
        return ""
    return f"the NVIDIA driver is too old: it is for CUDA {major}.{minor}"


def refusal(devices: Devices) -> str:
    """Why these devices cannot be used with NCCL, in one sentence with the fix; empty where they can."""
    if not devices.cuda_build or not devices.nccl_version:
        return "this torch has no NCCL; use --spare-comm gloo, or a torch that is built for CUDA"
    if devices.failure or not devices.count:
        return (
            f"no GPU of this host can be used: {devices.failure or 'torch sees none'}; install a driver that fits CUDA "
            f"{torch.version.cuda}, look at CUDA_VISIBLE_DEVICES, or train on CPUs with a torch built for them"
        )
    if _numbers(devices.torch_version) < LEAST_TORCH:
        return (
            f"torch {devices.torch_version} hangs at times while it initialises NCCL communicators; install torch "
            f"{_dotted(LEAST_TORCH)} or newer, or use --spare-comm gloo"
        )
    if devices.nccl_version < LEAST_NCCL:
        return (
            f"NCCL {_dotted(devices.nccl_version)} is older than {_dotted(LEAST_NCCL)}, the oldest that is supported "
            "between groups; install a newer nvidia-nccl, or use --spare-comm gloo"
        )
    return no_own_gpu(devices)


def no_own_gpu(devices: Devices) -> str:
    """Why this rank has no GPU over which NCCL can connect it to others; empty where it has one."""
    if devices.local_rank >= devices.count:
        return (
            f"local rank {devices.local_rank} would share GPU {devices.local_rank % devices.count} with another rank, "
            f"and NCCL needs one GPU for each; start at most {devices.count} ranks on this host, or use --spare-comm "
            "gloo and --distributed-backend gloo"
        )
    if " MIG " in f"{devices.name} ":
        return (
            f"GPU {devices.local_rank} is a MIG slice ({devices.name}), between which NCCL cannot connect; use whole "
            "GPUs, or --spare-comm gloo and --distributed-backend gloo"
        )
    return ""


class _Setting(NamedTuple):
    """A variable whose value matters between groups."""

    name: str
    allowed: Callable[[str], bool]
    why: str
    """What goes wrong with another value."""
    instead: str


def _is(*values: str) -> Callable[[str], bool]:
    return lambda value: value.lower() in values


_TRUE, _FALSE = ("1", "t", "true", "y", "yes"), ("0", "f", "false", "n", "no")
_SETTINGS = (
    _Setting("NCCL_RUNTIME_CONNECT", _is("0"), "the first sum would wait, inside NCCL, for a peer that computes", "0"),
    _Setting("NCCL_COMM_BLOCKING", _is("0"), "a peer that dies would keep this rank inside NCCL for ever", "0"),
    _Setting("TORCH_NCCL_BCAST_UNIQUEID", _is(*_TRUE), "no communicator between groups can be formed", "1"),
    _Setting("ENABLE_INTRA_NODE_COMM", _is(*_FALSE), "it meets in a store that only the unique id passes through", "0"),
    _Setting(
        NONBLOCKING_TIMEOUT,
        lambda value: value.isdecimal() and int(value) > 0,
        "it is the longest wait inside torch for a peer that is gone, in whole seconds",
        "15",
    ),
    _Setting(
        RANKS_PER_ROOT,
        lambda value: value.isdecimal() and int(value) >= ALL_RANKS,
        "a communicator between groups has one unique id, whatever its size",
        str(ALL_RANKS),
    ),
    _Setting(BLOCKING_WAIT, _is(*_TRUE, *_FALSE), "torch refuses such a value", "0"),
)


def contradictions(environ: MutableMapping[str, str]) -> list[str]:
    """One sentence with the fix for each variable whose value the communicators between groups cannot work with."""
    return [
        f"{one.name}={environ[one.name]} is set, but {one.why}; unset it, or set it to {one.instead}"
        for one in _SETTINGS
        if one.name in environ and not one.allowed(environ[one.name])
    ]


def prepare(devices: Devices, timeout_s: float, environ: MutableMapping[str, str] = os.environ) -> None:
    """Refuse what cannot work, and bound the waits inside torch and NCCL by ``timeout_s``.

    Raises:
        ConfigError: one sentence that says what does not fit, and what to do.
    """
    for sentence in (refusal(devices), *contradictions(environ)):
        if sentence:
            raise ConfigError(sentence)
    environ.setdefault(NONBLOCKING_TIMEOUT, str(max(1, math.ceil(timeout_s))))
    environ.setdefault("NCCL_RUNTIME_CONNECT", "0")  # all connections are made in the initialisation
    environ.setdefault(RANKS_PER_ROOT, str(ALL_RANKS))
    environ.setdefault(BLOCKING_WAIT, "0")


def without_watchdog(environ: MutableMapping[str, str] = os.environ) -> None:
    """Let the process groups that are made from now on have no watchdog. For the main thread, once the group's own
    world is there and before the first communicator between groups."""
    environ[BLOCKING_WAIT] = "1"


def unprepared(environ: MutableMapping[str, str] = os.environ) -> str:
    """Why a communicator must not be made in this environment; empty where it may."""
    if environ.get(BLOCKING_WAIT, "").lower() not in _TRUE:
        return f"{BLOCKING_WAIT} is not set: torch's watchdog would act on its own when a peer dies"
    missing = [name for name in (NONBLOCKING_TIMEOUT, "NCCL_RUNTIME_CONNECT") if name not in environ]
    return f"{missing[0]} is not set: a wait inside torch would have no bound" if missing else ""


def _numbers(version: str) -> tuple[int, ...]:
    """2.14.1+cu130 as (2, 14)."""
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2])


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))

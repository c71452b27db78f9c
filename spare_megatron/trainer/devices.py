"""Which devices and which transport a rank uses, and what is refused before it uses them.

May assume: the flags have been checked. Promises: what the user can mend is a ConfigError with one sentence.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import torch

from spare_megatron.collectives import nccl_start
from spare_megatron.collectives.replica_communicators import SILENCE_S
from spare_megatron.config.errors import ConfigError
from spare_megatron.trainer.job_arguments import JobArguments

log = logging.getLogger(__name__)


def check_standbys(job: JobArguments) -> None:
    """Refuse standbys for which the host has no devices, although it has one for each rank of the groups."""
    shape, standbys = job.shape, job.spare.standby_groups
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if shape.world_size <= there < shape.world_size + standbys * shape.group_size:
        raise ConfigError(
            f"--spare-standby-groups {standbys} needs {standbys * shape.group_size} devices beside the "
            f"{shape.world_size} of the groups, but this host has {there} in all; use --spare-standby-groups "
            f"{(there - shape.world_size) // shape.group_size}"
        )


def replica_backend(job: JobArguments) -> str:
    """The name of the replica communicators' backend, from --spare-comm and the devices of this machine."""
    cuda = torch.cuda.is_available()
    wanted = job.spare.comm
    if wanted == "nccl" and not cuda:
        if torch.version.cuda is not None:
            raise ConfigError(nccl_start.refusal(nccl_start.Devices.here(job.place.local_rank)))
        raise ConfigError("--spare-comm nccl needs CUDA devices, and this machine has none; use --spare-comm gloo")
    if wanted == "gloo":
        return "gloo-staged" if cuda else "gloo"
    return "nccl" if cuda else "gloo"


@contextlib.contextmanager
def around_the_world(job: JobArguments) -> Iterator[None]:
    """The context in which the group's own world is initialised: what NCCL and torch read only once is set before it,
    and what only the communicators between groups need is set behind it. For the main thread."""
    if replica_backend(job) != "nccl":
        devices = nccl_start.Devices.here(job.place.local_rank)
        if devices.cuda_build and devices.failure:
            log.warning("this rank trains on the CPU, because %s", nccl_start.refusal(devices))
        yield
        return
    nccl_start.prepare(nccl_start.Devices.here(job.place.local_rank), SILENCE_S)
    yield
    nccl_start.without_watchdog()

"""Which devices and which transport a rank uses, and what is refused before it uses them.

May assume: the flags have been checked. Promises: what the user can mend is a ConfigError with one sentence.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence

import torch

from spare_megatron import kernels
from spare_megatron.collectives import nccl_start
from spare_megatron.collectives.replica_communicators import SILENCE_S
from spare_megatron.config.errors import ConfigError
from spare_megatron.config.job import Plain, unlike_first
from spare_megatron.worker.job_arguments import JobArguments

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


def check_alike(words_of_ranks: Sequence[Mapping[str, Plain]]) -> None:
    """Refuse a group whose ranks differ in a property on which the bits of results depend
    (:func:`~spare_megatron.megatron_adapter.determinism.arithmetic` lists them). ``words_of_ranks`` has those of each
    rank. Differences between groups are found elsewhere, by the fingerprint of the job."""
    if odd := unlike_first(words_of_ranks):
        rank, differs = odd
        raise ConfigError(
            f"rank {rank} of this group computes with other bits than rank 0: {differs}; give all ranks one kind of "
            "GPU (CUDA_VISIBLE_DEVICES says which), one number of threads and the same variables, or use "
            "--spare-reduce fp32"
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
    """The context in which the group's own world is initialised: environment variables that NCCL and torch read only
    once are set before, those that only the communicators between groups need are set after. For the main thread.

    Each kernel of ours is run once before: loading one later would wait for any collective that waits on the device."""
    backend, devices = replica_backend(job), nccl_start.Devices.here(job.place.local_rank)
    if backend != "nccl":
        if devices.cuda_build and devices.failure:
            log.warning("this rank trains on the CPU, because %s", nccl_start.refusal(devices))
        if backend == "gloo-staged":
            inside = job.place.group_size > 1 and job.training.distributed_backend != "gloo"
            if inside and (why := nccl_start.no_own_gpu(devices)):
                raise ConfigError(why)
            kernels.start(devices.own)
        yield
        return
    nccl_start.prepare(devices, SILENCE_S)
    kernels.start(devices.own)
    yield
    nccl_start.without_watchdog()

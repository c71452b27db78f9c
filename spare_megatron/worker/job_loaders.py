"""Makes and closes the loaders of a rank of a Megatron job, one for each of its data sets."""

from __future__ import annotations

import fcntl
import logging
import socket
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.job import Plain, unlike_first
from spare_megatron.data.data_files import DataFile, file_identities
from spare_megatron.data.microbatch_loader import MicrobatchLoader, check_enough, evaluation_consumed
from spare_megatron.data.sampling import SampleOrder
from spare_megatron.megatron_adapter.model.world import GroupWorld
from spare_megatron.placement import Placement
from spare_megatron.runtime.brief_command import run_command
from spare_megatron.runtime.child_guard import ChildGuard
from spare_megatron.runtime.run_directory import RunDirectory
from spare_megatron.worker.job_arguments import JobArguments
from spare_megatron.worker.start import Start

FLAG = "--spare-stage-command"


class StagingError(RuntimeError):
    """The command has not brought the data."""


def bring(command: str, shard: int, locks: Path, limit_s: float) -> None:
    """Run ``command`` for a shard and this host, and wait for its end. Ranks of one host run it one after the other:
    all but the first should find nothing to do.

    Args:
        command: is given to the shell, with the shard's number for ``{shard}`` and the name of this host for
            ``{host}``.
        locks: a directory for files that are locked meanwhile.
        limit_s: seconds after which it is killed.

    Raises:
        StagingError: it could not be started, failed, or took too long; with the last line of what it wrote.
    """
    host = socket.gethostname()
    text = command.replace("{shard}", str(shard)).replace("{host}", host)
    locks.mkdir(parents=True, exist_ok=True)
    with (locks / f"{host}-{shard}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        guard = ChildGuard()
        try:
            end = run_command(("/bin/sh", "-c", text), limit_s, guard, lambda: False, receive_all=True)
        finally:
            guard.close()
    if end.status != 0:
        raise StagingError(f"{FLAG} for shard {shard} on {host}: {end.words(limit_s, last=True)}")


log = logging.getLogger(__name__)


class JobLoaders:
    """Makes and closes the piece loaders of this rank, one for each data set."""

    def __init__(
        self,
        job: JobArguments,
        args: Namespace,
        world: GroupWorld,
        placement: Placement,
        start: Start,
        files: Sequence[DataFile],
    ) -> None:
        """The loaders read what ``job.place`` hosts; see :meth:`move`. ``files``: those that the data sets read."""
        self._mapped = file_identities(file.prefix for file in files)
        self._job, self._args, self._world, self._start = job, args, world, start
        self._placement, self._made = placement, list[MicrobatchLoader]()
        self.move(job.place.group)

    def move(self, group: int) -> None:
        """From now on the loaders read the shards that ``group`` hosts: a standby has got its place."""
        stack = self._placement.stack_of(group)
        if any(loader.reads for loader in self._made):
            stage(self._job, stack)
            self._check_mapped()
        self._host(None if self._job.spare.data == "shared" else frozenset(stack))

    def make(self, name: str, dataset: Any, needed: int) -> MicrobatchLoader:
        """A loader of ``dataset``, which must have ``needed`` samples; it is None on a rank that reads no data."""
        job, batch = self._job, self._job.shape.global_batch_size
        kind = self._args.dataloader_type or "single"
        check_enough(name, dataset, needed, kind)
        batches = self._start.batches(job)
        size = needed if dataset is None else len(dataset)
        order = SampleOrder(job.shape, max(size, 1), kind, job.data.data_sharding)
        if name == "training":
            order.check_begin(self._start.consumed_samples)
        loader = MicrobatchLoader(
            dataset,
            order,
            inner=self._world.data_rank,
            hosted=self._hosted,
            consumed=batches.consumed_before if name == "training" else evaluation_consumed(batch),
            vocab_size=self._args.padded_vocab_size,
            threads=job.data.num_workers,
        )
        self._made.append(loader)
        return loader

    def open(self, shard: int, step: int) -> None:
        """Read a shard too that the group did not host, from ``step`` on: bring its data here if there is a command for
        it, and read a first microbatch of it. Raises what that raises."""
        if not any(loader.reads for loader in self._made):
            return
        bring_shard(self._job, shard)
        self._check_mapped()
        for loader in self._made:
            loader.try_shard(step, shard)
        self._host(None if self._hosted is None else self._hosted | {shard})

    def _host(self, shards: frozenset[int] | None) -> None:
        """From now on the loaders read these shards; None: all."""
        self._hosted = shards
        for loader in self._made:
            loader.host(shards)

    def _check_mapped(self) -> None:
        """StagingError where a file has been replaced that the data sets have mapped: they would read the old one."""
        now = file_identities(self._mapped)
        replaced = [prefix for prefix, identity in self._mapped.items() if now[prefix] != identity]
        if replaced:
            raise StagingError(
                f"{replaced[0]}.bin was replaced while the job has it open, which would go on with the old one; write "
                "it in place, as rsync --inplace does"
            )

    def close(self) -> None:
        """Stop the loaders' threads."""
        for loader in self._made:
            loader.close()


def check_same_data(data_of_ranks: Sequence[Mapping[str, Plain]]) -> None:
    """Refuse a group whose ranks have other data under the same names (each host has its own copy, perhaps).
    Differences between groups are found by the fingerprint of the job."""
    if odd := unlike_first(data_of_ranks):
        rank, differs = odd
        raise ConfigError(
            f"rank {rank} of this group has other data than rank 0: {differs}; copy the files again to the host whose "
            "copy is not right"
        )


def stage(job: JobArguments, shards: Sequence[int]) -> None:
    """Bring the data of these shards to this host, where there is a command for it. A failure is not an error here: the
    data may be on this host already, and reading it shows that."""
    for shard in shards:
        try:
            bring_shard(job, shard)
        except StagingError as error:
            log.warning("%s", error)


def bring_shard(job: JobArguments, shard: int) -> None:
    """Bring the data of a shard to this host, where there is a command for it; see :func:`bring`."""
    command, place = job.spare.stage_command, job.place
    if command is not None and place.run_dir is not None:
        bring(command, shard, RunDirectory(place.run_dir).stage, job.spare.adopt_timeout_s)

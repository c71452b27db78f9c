"""The shape of a job: its number of groups, the parallelism inside a group, and how a global batch is cut into pieces.

The words: a *group* is one model replica of ``group_size`` ranks; a *shard* is 1/N of the
global batch; a *piece* is C consecutive microbatches of a shard, which one group computes together and in order (with
``inner_data`` > 1: C for each inner data rank, which always move together). Microbatch m of shard i has the number
``i * N_m + m``, with N_m the microbatches of a shard, and belongs to piece ``i * K + m // C``.
"""

from __future__ import annotations

from dataclasses import dataclass

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.piece_sizes import check


@dataclass(frozen=True)
class JobShape:
    """Degrees of parallelism and batch sizes; the products of them that other modules need are properties."""

    num_groups: int
    """N: number of complete model replicas."""
    micro_batch_size: int
    """Samples of one microbatch on one inner data rank."""
    global_batch_size: int
    """Samples of one optimizer step over the whole job."""
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    inner_data: int = 1
    """D: number of data-parallel ranks inside a group."""
    piece_microbatches: int = 1
    """C: microbatches of a piece."""

    def __post_init__(self) -> None:
        for name in (
            "num_groups",
            "micro_batch_size",
            "global_batch_size",
            "tensor",
            "pipeline",
            "context",
            "inner_data",
        ):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name.replace('_', ' ')} is {value}, but must be at least 1")
        unit = self.num_groups * self.microbatch_samples
        if self.global_batch_size % unit:
            low = self.global_batch_size // unit * unit
            fix = f"{low} or {low + unit}" if low else f"{unit}"
            raise ConfigError(
                f"--global-batch-size {self.global_batch_size} is not divisible by {unit} = {self.num_groups} groups x "
                f"{self.inner_data} inner data ranks x --micro-batch-size {self.micro_batch_size}; "
                f"use --global-batch-size {fix}"
            )
        check(self.piece_microbatches, [self.microbatches_per_shard])

    @property
    def group_size(self) -> int:
        """M: number of ranks of a group, TP x PP x CP x D."""
        return self.tensor * self.pipeline * self.context * self.inner_data

    @property
    def world_size(self) -> int:
        """Number of ranks of the job, N x M."""
        return self.num_groups * self.group_size

    @property
    def microbatches_per_shard(self) -> int:
        """Number of microbatches of one shard in one step, on each inner data rank."""
        return self.global_batch_size // (self.num_groups * self.microbatch_samples)

    @property
    def pieces_per_shard(self) -> int:
        """K: number of pieces of one shard in one step."""
        return self.microbatches_per_shard // self.piece_microbatches

    @property
    def pieces(self) -> int:
        """Number of pieces of one step, N x K."""
        return self.num_groups * self.pieces_per_shard

    @property
    def microbatches(self) -> int:
        """Number of microbatches of one step, on each inner data rank of all groups together."""
        return self.num_groups * self.microbatches_per_shard

    @property
    def microbatch_samples(self) -> int:
        """Samples of one microbatch, over all its inner data ranks."""
        return self.inner_data * self.micro_batch_size

    @property
    def piece_samples(self) -> int:
        """Samples of one piece, over all its inner data ranks."""
        return self.piece_microbatches * self.microbatch_samples

    def microbatches_of(self, piece: int, batch: int) -> range:
        """The numbers of the microbatches of ``piece``, in order, in a step of ``batch`` samples. A batch that is not
        full has only the first microbatches of each shard, so its last pieces are shorter or empty."""
        full, there = self.microbatches_per_shard, batch // (self.num_groups * self.microbatch_samples)
        shard, j = divmod(piece, self.pieces_per_shard)
        first = j * self.piece_microbatches
        return range(shard * full + first, shard * full + max(first, min(first + self.piece_microbatches, there)))

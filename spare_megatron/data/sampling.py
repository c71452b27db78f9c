"""Says which samples a microbatch has: Megatron's order as a function of (samples consumed, microbatch, inner data
rank).

On inner data rank d, microbatch j of shard i has the samples that Megatron's sampler gives to data-parallel rank
``i * D + d`` of ``N * D`` as its microbatch j of the step (``config/shape.py`` numbers microbatches). Nothing here
depends on the group that computes it, so a run goes on from a checkpoint of Megatron-LM at the same sample, and what
moves to another group keeps its samples. Shuffling (``cyclic``) needs torch's generator; ``single`` is arithmetic.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.shape import JobShape


@functools.lru_cache(maxsize=4)
def permutation(size: int, seed: int) -> Sequence[int]:
    """Megatron's shuffle of ``range(size)``: torch.randperm with a generator of its own."""
    import torch

    generator = torch.Generator()
    generator.manual_seed(seed)
    shuffled: Sequence[int] = torch.randperm(size, generator=generator).numpy()  # type: ignore[assignment]
    return shuffled


@dataclass(frozen=True)
class SampleOrder:
    """The order of samples of one data set in one job."""

    shape: JobShape
    total_samples: int
    kind: str = "single"
    """'single': each sample once, in order; 'cyclic': shuffled anew in each epoch of the data."""
    data_sharding: bool = True
    """With 'cyclic', whether each data-parallel rank shuffles a part of its own instead of all samples."""

    def __post_init__(self) -> None:
        if self.kind == "cyclic" and self.total_samples < self.row:
            raise ConfigError(
                f"the data set has {self.total_samples} samples, but --dataloader-type cyclic needs at least "
                f"{self.row}: --micro-batch-size {self.shape.micro_batch_size} on each of {self.ranks} data-parallel "
                "ranks; use more data or --dataloader-type single"
            )

    @property
    def ranks(self) -> int:
        """Data-parallel ranks of the whole job, N x D."""
        return self.shape.num_groups * self.shape.inner_data

    @property
    def row(self) -> int:
        """Number of samples in one microbatch of every data-parallel rank."""
        return self.ranks * self.shape.micro_batch_size

    def check_begin(self, consumed: int) -> None:
        """ConfigError where no job can begin after ``consumed`` samples: a shuffled order is one of whole rows, and in
        the middle of one some samples would come twice and others never."""
        if self.kind == "cyclic" and consumed % self.row:
            raise ConfigError(
                f"the checkpoint has consumed {consumed} samples, which are no multiple of {self.row} = {self.ranks} "
                f"data-parallel ranks x --micro-batch-size {self.shape.micro_batch_size}, as --dataloader-type cyclic "
                "needs; use numbers whose product divides them, or --dataloader-type single"
            )

    def microbatch(self, consumed: int, number: int, inner: int) -> list[int]:
        """The numbers of the samples of microbatch ``number`` on inner data rank ``inner``, in a step before which the
        job has consumed ``consumed`` samples.

        IndexError when a 'single' order has not enough samples left, or there is no such microbatch or rank.
        """
        shape = self.shape
        if not 0 <= number < shape.microbatches or not 0 <= inner < shape.inner_data:
            raise IndexError(
                f"microbatch {number} of {shape.microbatches} on inner data rank {inner} of {shape.inner_data}"
            )
        shard, j = divmod(number, shape.microbatches_per_shard)
        rank = shard * shape.inner_data + inner
        before = consumed + j * self.row
        size = shape.micro_batch_size
        if self.kind == "cyclic":
            return self._shuffled(before, rank)
        first = before + rank * size
        if before + self.row > self.total_samples:
            raise IndexError(f"samples {first} to {first + size - 1} of a data set of {self.total_samples}")
        return list(range(first, first + size))

    def _shuffled(self, before: int, rank: int) -> list[int]:
        """Does what Megatron's random sampler does: an epoch has the samples that fill whole rows, and its number seeds
        its shuffle.

        Without sharding, Megatron's ranks can end an epoch at different microbatches; here all end with the last row.
        """
        size, total = self.shape.micro_batch_size, self.total_samples
        epoch, inside = divmod(before, total - total % self.row)
        if self.data_sharding:
            bucket = total // self.row * size
            first = inside // self.ranks
            order = permutation(bucket, epoch)[first : first + size]
            return [rank * bucket + int(index) for index in order]
        order = permutation(total // size * size, epoch)
        first = inside + rank
        return [int(index) for index in order[first : first + size * self.ranks : self.ranks]]

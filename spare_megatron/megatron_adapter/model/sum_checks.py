"""Parts of parameters in the tensors that a rank sums: where each lies, its checksum, and which of them is damaged."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from spare_megatron import kernels
from spare_megatron.exact_sum.formats import Slot
from spare_megatron.megatron_adapter.model.group_sum import BufferSlice

Part = tuple[int, BufferSlice]
"""Number of a slot, and which elements of it."""


class SumParts:
    """Some parts of a rank's parameters, in tensors of which each holds those of one buffer."""

    def __init__(self, slots: Sequence[Slot], parts: Sequence[Part], buffers: Sequence[int]) -> None:
        """
        Args:
            slots: all slots of the rank.
            parts: in the order of the buffers.
            buffers: the number of the buffer of each tensor.
        """
        self._names = [slots[number].name for number, _ in parts]
        self.segments = [
            torch.tensor(
                [_segment(slots[number], part) for number, part in parts if slots[number].buffer == buffer],
                dtype=torch.int64,
            ).view(-1, 3)
            for buffer in buffers
        ]
        """For each tensor int64 [parts, 3]: start and stop of each part, and the index of its first element in the
        index space of checksums."""
        self._sizes = [len(one) for one in self.segments]

    def checksums(self, sums: Sequence[torch.Tensor]) -> torch.Tensor:
        """int64 [parts]: the checksum of each part, as the tensors have it."""
        found = torch.zeros(len(self._names), dtype=torch.int64, device=sums[0].device if sums else "cpu")
        for total, segments, some in zip(sums, self.segments, found.split(self._sizes), strict=True):
            kernels.checksums(total, segments, some)
        return found

    def fault(self, sums: Sequence[torch.Tensor], expected: torch.Tensor, what: str) -> str:
        """A sentence about the parts whose checksums are not the ``expected`` ones; empty where all are."""
        found = self.checksums(sums)
        return self.named(found - expected.to(found.device), what)

    def named(self, differences: torch.Tensor, what: str) -> str:
        """The same of parts of which it is known by how much they differ."""
        wrong = differences.nonzero().flatten().tolist()
        if not wrong:
            return ""
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        return f"the {what} of {self._names[wrong[0]]}{more} does not have the checksum of its pieces"


def index_of(slot: Slot, part: BufferSlice) -> int:
    """The index, in the index space of checksums, of the first element of ``part``, which lies in ``slot``."""
    return slot.index + part.start - slot.start


def _segment(slot: Slot, part: BufferSlice) -> tuple[int, int, int]:
    return part.at, part.at + part.size, index_of(slot, part)

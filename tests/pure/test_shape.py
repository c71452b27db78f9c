"""How a batch is cut into pieces: each microbatch is in one piece, in every step; what does not fit is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.shape import JobShape


def shape(groups: int = 2, microbatches: int = 8, size: int = 1, inner: int = 1, piece: int = 1) -> JobShape:
    return JobShape(
        num_groups=groups,
        micro_batch_size=size,
        global_batch_size=groups * inner * size * microbatches,
        inner_data=inner,
        piece_microbatches=piece,
    )


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 2), st.integers(1, 4), st.integers(1, 5), st.data())
def test_pieces_share_out_the_microbatches_of_each_step(
    groups: int, size: int, inner: int, piece: int, pieces: int, data: st.DataObject
) -> None:
    job = shape(groups, piece * pieces, size, inner, piece)
    there = data.draw(st.integers(1, job.microbatches_per_shard), label="microbatches of a shard in this step")
    batch = there * groups * job.microbatch_samples
    found = [list(job.microbatches_of(number, batch)) for number in range(job.pieces)]
    wanted = [shard * job.microbatches_per_shard + j for shard in range(groups) for j in range(there)]
    assert [number for one in found for number in one] == wanted
    assert all(len(one) == piece for one in found) == (there == job.microbatches_per_shard)
    full = [len(one) for one in found if len(one) not in (0, piece)]
    assert len(full) <= groups, "only the last piece of a shard that has samples may be short"
    assert (job.pieces, job.piece_samples) == (groups * pieces, piece * inner * size)


@pytest.mark.parametrize(
    ("piece", "reported"),
    [
        (3, "3 does not divide the 8 microbatches of a shard; use 2 or 4"),
        (5, "use 4 or 8"),
        (16, "16 is larger than a shard of 8 microbatches; use 8 "),
        (0, "--spare-piece-microbatches 0 must be at least 1"),
    ],
)
def test_a_piece_that_does_not_fit_is_refused(piece: int, reported: str) -> None:
    with pytest.raises(ConfigError, match=reported):
        shape(piece=piece)

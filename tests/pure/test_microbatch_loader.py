"""The loader gives each piece its samples, reads ahead without changing anything, and keeps to hosted shards."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.shape import JobShape
from spare_megatron.data.microbatch_loader import (
    MicrobatchLoader,
    ShardNotHostedError,
    check_enough,
    evaluation_consumed,
    evaluation_source,
    train_consumed,
)
from spare_megatron.data.sampling import SampleOrder

SHAPE = JobShape(num_groups=3, micro_batch_size=2, global_batch_size=24)


class Samples:
    """A data set whose sample n has the tokens [n, n]; counts what is read."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.read: list[int] = []
        self.lock = threading.Lock()

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        with self.lock:
            self.read.append(index)
        return {"tokens": torch.tensor([index, index]), "labels": torch.tensor([index, index])}


@pytest.fixture
def samples() -> Samples:
    return Samples(240)


@pytest.fixture(params=[0, 2], ids=["no threads", "two threads"])
def loader(samples: Samples, request: pytest.FixtureRequest) -> Iterator[MicrobatchLoader]:
    made = MicrobatchLoader(
        samples,
        SampleOrder(SHAPE, len(samples)),
        inner=0,
        hosted=frozenset({0, 2}),
        consumed=train_consumed(0, SHAPE.global_batch_size),
        threads=request.param,
    )
    yield made
    made.close()


def wanted(step: int, piece: int) -> list[int]:
    return SampleOrder(SHAPE, 240).microbatch((step - 1) * 24, piece, 0)


def test_each_piece_gets_its_samples(loader: MicrobatchLoader, samples: Samples) -> None:
    plans = {1: [0, 1, 2, 3], 2: [0, 1, 2, 3, 8, 9], 3: [9, 8, 8], 5: [11]}
    for step, pieces in plans.items():
        for piece, batch in zip(pieces, loader(step, pieces), strict=True):
            assert batch["tokens"][:, 0].tolist() == wanted(step, piece)
            assert batch["tokens"].shape == (2, 2)
    loader.close()
    needed = {sample for step in range(1, 7) for piece in range(12) for sample in wanted(step, piece)}
    assert set(samples.read) <= needed


def test_nothing_is_read_before_it_is_asked_for(loader: MicrobatchLoader, samples: Samples) -> None:
    iterator = loader(1, [0, 1])
    assert samples.read == []
    next(iterator)
    loader.close()
    assert set(wanted(1, 0)) <= set(samples.read)


def test_the_last_step_reads_nothing_behind_the_end(loader: MicrobatchLoader, samples: Samples) -> None:
    list(loader(10, [0, 1, 2, 3]))
    loader.close()
    assert max(samples.read) < 240
    with pytest.raises(ConfigError, match="step 11 needs samples 240 to 241 of a data set of 240"):
        list(loader(11, [0]))


def test_a_shard_that_is_not_hosted_is_refused_before_anything_is_read(
    loader: MicrobatchLoader, samples: Samples
) -> None:
    with pytest.raises(ShardNotHostedError, match=r"microbatch 4 is of shard 1, but this group hosts \[0, 2\]"):
        next(loader(1, [0, 4]))
    assert samples.read == []
    loader.host(None)
    assert next(loader(1, [4]))["tokens"][:, 0].tolist() == wanted(1, 4)


def test_a_rank_without_data_may_be_given_the_iterator_but_must_not_read_it() -> None:
    order = SampleOrder(SHAPE, 240)
    loader = MicrobatchLoader(None, order, inner=0, hosted=None, consumed=train_consumed(0, 24))
    iterator = loader(1, [0])
    with pytest.raises(RuntimeError, match="this rank has no data"):
        next(iterator)
    loader.close()


def test_tokens_outside_the_vocabulary(samples: Samples) -> None:
    order = SampleOrder(SHAPE, 240)
    loader = MicrobatchLoader(samples, order, inner=0, hosted=None, consumed=train_consumed(0, 24), vocab_size=24)
    list(loader(1, [0]))
    with pytest.raises(ConfigError, match=r"sample 24 of the data has token id 24, but .* has 24 ids"):
        list(loader(2, [0]))
    loader.close()


def test_an_error_of_the_data_set_reaches_the_caller(samples: Samples) -> None:
    class Broken(Samples):
        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            raise OSError("the disk is gone")

    loader = MicrobatchLoader(
        Broken(240), SampleOrder(SHAPE, 240), inner=0, hosted=None, consumed=train_consumed(0, 24)
    )
    with pytest.raises(OSError, match="the disk is gone"):
        list(loader(1, [0]))
    loader.close()


def test_evaluation_batches_count_over_the_whole_job(samples: Samples) -> None:
    order = SampleOrder(SHAPE, 240)
    loader = MicrobatchLoader(samples, order, inner=0, hosted=None, consumed=evaluation_consumed(24))
    got = next(evaluation_source(loader, 3)(17, [5]))["tokens"][:, 0].tolist()
    assert got == order.microbatch(72, 5, 0)
    loader.close()


def test_too_few_samples(samples: Samples) -> None:
    check_enough("training", samples, 240, "single")
    check_enough("training", samples, 1000, "cyclic")
    check_enough("training", None, 1000, "single")
    with pytest.raises(ConfigError, match="the validation data has 240 samples, but the job needs 241"):
        check_enough("validation", samples, 241, "single")


def test_a_shard_is_tried_before_it_is_hosted(loader: MicrobatchLoader, samples: Samples) -> None:
    assert loader.reads
    loader.try_shard(2, 1)
    assert sorted(samples.read) == sorted(SampleOrder(SHAPE, 240).microbatch(24, SHAPE.microbatches_per_shard, 0))
    with pytest.raises(ShardNotHostedError):
        next(loader(2, [SHAPE.microbatches_per_shard]))
    loader.try_shard(99, 1)  # no step of the job: there is nothing to read
    loader.host(frozenset({0, 1, 2}))
    next(loader(2, [SHAPE.microbatches_per_shard]))


def test_a_shard_that_cannot_be_read_says_why(loader: MicrobatchLoader, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Samples, index: int) -> dict[str, torch.Tensor]:
        raise OSError(f"sample {index} is not there")

    monkeypatch.setattr(Samples, "__getitem__", broken)
    with pytest.raises(OSError, match="is not there"):
        loader.try_shard(1, 1)


def test_a_rank_without_data_has_nothing_to_try() -> None:
    made = MicrobatchLoader(None, SampleOrder(SHAPE, 24), inner=0, hosted=None, consumed=train_consumed(0, 24))
    made.try_shard(1, 1)
    assert not made.reads

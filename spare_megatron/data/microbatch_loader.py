"""Loads microbatches: collated, read ahead by threads, and only for shards that the group hosts.

A :class:`MicrobatchLoader` is the engine's source of data: called with a step and the numbers of microbatches, it
returns an iterator over them, in order. It guesses what to read ahead (the same numbers in the next step), but what it
returns depends on (step, number) alone. Evaluation uses the same class with another data set and another
count of consumed samples.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch.utils.data import default_collate

from spare_megatron.config.errors import ConfigError
from spare_megatron.data.data_files import below_zero, too_large
from spare_megatron.data.sampling import SampleOrder

Microbatch = Any
"""Collated samples: for a GPT data set a dict of tensors [micro batch size, sequence length]."""


class ShardNotHostedError(RuntimeError):
    """The shard of a requested microbatch is not hosted by this group: the plan or the placement is wrong."""


class MicrobatchLoader:
    """Microbatches of one data set on one rank. Thread-safe; close it when the job ends."""

    def __init__(
        self,
        dataset: Any,
        order: SampleOrder,
        *,
        inner: int,
        hosted: frozenset[int] | None,
        consumed: Callable[[int], int],
        vocab_size: int | None = None,
        threads: int = 2,
        ahead: int = 4,
    ) -> None:
        """
        Args:
            dataset: samples by number, with ``len()``; None on a rank that needs no data.
            order: which samples each microbatch has.
            inner: this rank's index among the D inner data-parallel ranks of its group.
            hosted: shards that the group hosts; None means all.
            consumed: number of samples consumed before a step (or before an evaluation's batch).
            vocab_size: token ids must be below it; None leaves them unchecked.
            threads: number of threads that read ahead; with 0 each microbatch is read when it is needed.
            ahead: greatest number of microbatches to read ahead.
        """
        self._dataset, self._order, self._inner, self._hosted = dataset, order, inner, hosted
        self._consumed, self._vocab_size, self._ahead = consumed, vocab_size, ahead
        self._pool = ThreadPoolExecutor(threads, "data") if dataset is not None and threads > 0 else None
        self._reading: dict[tuple[int, int], Future[Microbatch]] = {}
        self._lock = threading.Lock()
        self._one_reader = threading.Lock() if threads < 2 else contextlib.nullcontext()
        """A data set is read by several threads at once only where the user asked for them."""

    def close(self) -> None:
        """Stop the threads; what they read is dropped."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def host(self, hosted: frozenset[int] | None) -> None:
        """Change the hosted shards (a new placement)."""
        self._hosted = hosted

    @property
    def reads(self) -> bool:
        """Whether this rank reads samples: only those of the first and the last pipeline stage do."""
        return self._dataset is not None

    def try_shard(self, step: int, shard: int) -> None:
        """Read the first microbatch of a shard in ``step``, hosted or not, if there is one. Raises what reading it
        raises."""
        number = shard * self._order.shape.microbatches_per_shard
        if self._dataset is not None and self._exists(step, number):
            self._read(step, number)

    def __call__(self, step: int, numbers: Sequence[int]) -> Iterator[Microbatch]:
        """The microbatches ``numbers`` of ``step``, which may grow meanwhile. Nothing is read before the first is asked
        for."""
        return self._iterate(step, numbers)

    def _iterate(self, step: int, numbers: Sequence[int]) -> Iterator[Microbatch]:
        if self._dataset is None:
            raise RuntimeError("this rank has no data: only the first and the last pipeline stage read samples")
        self._forget_before(step)
        for index, number in enumerate(numbers):
            for near in numbers[index : index + 1 + self._ahead]:
                self._check_hosted(near)
            self._read_ahead(step, numbers, index, 1 + self._ahead)
            yield self._take(step, number)
            self._read_ahead(step, numbers, index + 1, self._ahead)

    def _check_hosted(self, number: int) -> None:
        shard = number // self._order.shape.microbatches_per_shard
        if self._hosted is not None and shard not in self._hosted:
            raise ShardNotHostedError(
                f"microbatch {number} is of shard {shard}, but this group hosts {sorted(self._hosted)}"
            )

    def _read_ahead(self, step: int, numbers: Sequence[int], first: int, count: int) -> None:
        """Read ``count`` microbatches from number ``first`` on: of this step, then the same ones of the next."""
        if self._pool is None:
            return
        here = numbers[first : first + count]
        wanted = [*((step, one) for one in here), *((step + 1, one) for one in numbers[: count - len(here)])]
        with self._lock:
            for key in wanted:
                if key not in self._reading and self._exists(*key):
                    self._reading[key] = self._pool.submit(self._read, *key)

    def _exists(self, step: int, number: int) -> bool:
        """Whether the microbatch has samples in that step: the step after the last one may have none."""
        try:
            self._order.microbatch(self._consumed(step), number, self._inner)
        except IndexError:
            return False
        return True

    def _take(self, step: int, number: int) -> Microbatch:
        with self._lock:
            reading = self._reading.pop((step, number), None)
        return self._read(step, number) if reading is None else reading.result()

    def _forget_before(self, step: int) -> None:
        """Drop what was read ahead for steps before ``step`` and never used."""
        with self._lock:
            for key in [key for key in self._reading if key[0] < step]:
                self._reading.pop(key).cancel()

    def _read(self, step: int, number: int) -> Microbatch:
        try:
            chosen = self._order.microbatch(self._consumed(step), number, self._inner)
        except IndexError as error:
            raise ConfigError(
                f"step {step} needs {error}; use more data, fewer --train-iters or --dataloader-type cyclic"
            ) from None
        with self._one_reader:
            samples = [self._dataset[index] for index in chosen]
        self._check_tokens(samples, chosen)
        return default_collate(samples)

    def _check_tokens(self, samples: Sequence[Any], numbers: Sequence[int]) -> None:
        if self._vocab_size is None:
            return
        for number, sample in zip(numbers, samples, strict=True):
            for name in ("tokens", "labels"):
                tokens = sample.get(name) if isinstance(sample, dict) else None
                if isinstance(tokens, torch.Tensor) and tokens.numel():
                    largest = int(tokens.max())
                    if largest >= self._vocab_size:
                        raise ConfigError(too_large(largest, self._vocab_size, f"sample {number} of the data"))
                    # labels may be negative in a script's own data: ids that its loss leaves out
                    if name == "tokens" and (least := int(tokens.min())) < 0:
                        raise ConfigError(below_zero(least, f"sample {number} of the data"))


def check_enough(name: str, dataset: Any, needed: int, kind: str) -> None:
    """ConfigError when a data set has too few samples for a job that takes each of them once (``kind`` 'single')."""
    if dataset is not None and kind == "single" and len(dataset) < needed:
        raise ConfigError(
            f"the {name} data has {len(dataset)} samples, but the job needs {needed}; use more data, fewer "
            "--train-iters or --eval-iters, or --dataloader-type cyclic"
        )


def train_consumed(first: int, global_batch_size: int) -> Callable[[int], int]:
    """Function from a step to the samples consumed before it, ``first`` of them before step 1."""
    return lambda step: first + (step - 1) * global_batch_size


def evaluation_consumed(global_batch_size: int) -> Callable[[int], int]:
    """Function from the number of an evaluation batch, counted from 0 over all evaluations of the job, to the samples
    consumed before it."""
    return lambda batch: batch * global_batch_size


def validation_batch(state: int, iteration: int, eval_iters: int, eval_interval: int | None, *, final: bool) -> int:
    """Number of the validation batch that is ``iteration`` (0, 1, ...) of the evaluation after step ``state``.

    As in Megatron, each evaluation goes on in the validation set where the one before ended: first those at multiples
    of --eval-interval, then the ``final`` one after training. (The test set is used once: the number of a batch is its
    iteration.)
    """
    rounds = 0 if eval_interval is None else state // eval_interval
    return (rounds if final else rounds - 1) * eval_iters + iteration


def evaluation_source(loader: MicrobatchLoader, batch: int) -> Callable[[int, Sequence[int]], Iterator[Microbatch]]:
    """A source of data that returns the microbatches of evaluation batch ``batch``, whatever step it is called with."""
    return lambda _step, numbers: loader(batch, numbers)

"""The programs of a stage, drawn while the stream of microbatches comes: 1F1B, interleaved in blocks, forward only.

A program receives microbatches (:meth:`Program.add`) and of pauses (:meth:`Program.drain`), and answers each word with
the operations that follow from it. What it answers depends on the words alone, so all ranks of a stage that receive the
same words do the same. After a pause every microbatch that was begun is finished; what comes later warms up again.

Promises, which tests/pure/test_programs.py checks against all other stages: each send has its receive, in the same
order on both ends; no deadlock although an exchange ends only when all its transfers have; no stage holds more
activations than in 1F1B; each microbatch runs forward and backward once on each chunk, in order; the first stage gets
to its next word although the others have no more than it, so a pause may wait until the first stage has the last one.

1F1B (Narayanan et al., SC 2021): stage r of P runs P - 1 - r microbatches ahead, then one forward and one backward in
turn. With V virtual stages the work of P microbatches is a block: all of the block on chunk 0, then on chunk 1, and so
on; backward in the opposite order of chunks. A stage runs 2 (P - 1 - r) + (V - 1) P such pieces of work ahead.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from spare_megatron.pipeline.operations import Backward, Exchange, Forward, Operation, Transfer


class Program(ABC):
    """One stage's program."""

    block = 1
    """Microbatches come in multiples of so many; who has fewer fills up."""

    def __init__(self, stage: int, stages: int) -> None:
        assert 0 <= stage < stages, f"stage {stage} of {stages}"
        self.stage, self.stages = stage, stages
        self._begun = 0
        """Number of microbatches so far."""

    @abstractmethod
    def add(self) -> list[Operation]:
        """What follows from another :attr:`block` of microbatches."""

    @abstractmethod
    def drain(self) -> list[Operation]:
        """What follows from a pause: whatever was begun is finished."""


def run(program: Program, microbatches: int) -> list[Operation]:
    """What follows from a stream of ``microbatches``, a multiple of the program's block, and a pause."""
    assert microbatches % program.block == 0, f"{microbatches} microbatches in blocks of {program.block}"
    operations = []
    for _ in range(microbatches // program.block):
        operations += program.add()
    return operations + program.drain()


class _Stream(Program):
    """A program whose stage has one chunk."""

    def _receives(self, microbatch: int) -> tuple[Transfer, ...]:
        return (Transfer(False, microbatch, self.stage - 1),) if self.stage else ()

    def _sends(self, microbatch: int) -> tuple[Transfer, ...]:
        return (Transfer(False, microbatch, self.stage),) if self.stage + 1 < self.stages else ()

    def _receives_back(self, microbatch: int) -> tuple[Transfer, ...]:
        return (Transfer(True, microbatch, self.stage),) if self.stage + 1 < self.stages else ()

    def _sends_back(self, microbatch: int) -> tuple[Transfer, ...]:
        return (Transfer(True, microbatch, self.stage - 1),) if self.stage else ()


class ForwardOnly(_Stream):
    """Evaluation of a pipeline without virtual stages."""

    def add(self) -> list[Operation]:
        number = self._begun
        self._begun += 1
        return _without_empty(
            Exchange(receives=self._receives(number)), Forward(number), Exchange(sends=self._sends(number))
        )

    def drain(self) -> list[Operation]:
        return []


class OneForwardOneBackward(_Stream):
    """1F1B of a pipeline without virtual stages."""

    def __init__(self, stage: int, stages: int) -> None:
        super().__init__(stage, stages)
        self._ahead = stages - 1 - stage
        self._done = 0
        """Number of microbatches whose backward pass was answered."""
        self._first = 0
        """The first microbatch after the last pause."""

    def add(self) -> list[Operation]:
        number = self._begun
        self._begun += 1
        came = Exchange(self._owed(), self._receives(number))
        if number - self._first < self._ahead:
            return _without_empty(came, Forward(number), Exchange(sends=self._sends(number)))
        back = self._done
        self._done += 1
        turned = Exchange(self._sends(number), self._receives_back(back))
        return _without_empty(came, Forward(number), turned, Backward(back))

    def drain(self) -> list[Operation]:
        operations: list[Operation] = [Exchange(sends=self._owed())]
        for back in range(self._done, self._begun):
            operations += [Exchange(receives=self._receives_back(back)), Backward(back)]
            operations += [Exchange(sends=self._sends_back(back))]
        self._done = self._first = self._begun
        return _without_empty(*operations)

    def _owed(self) -> tuple[Transfer, ...]:
        """The gradient of the last backward pass, which goes with the next word: so that what comes back for it, and
        what goes on beside it, is one exchange."""
        return self._sends_back(self._done - 1) if self._done > self._first else ()


class Interleaved(Program):
    """1F1B of a pipeline with virtual stages, or only its forward passes."""

    def __init__(self, stage: int, stages: int, chunks: int, forward_only: bool = False) -> None:
        super().__init__(stage, stages)
        self.block, self._chunks, self._forward_only = stages, chunks, forward_only
        self._ahead = 2 * (stages - 1 - stage) + (chunks - 1) * stages
        self._forwards: list[Forward] = []
        self._backwards: list[Backward] = []
        """All work since the last pause, in order."""
        self._ran = self._turned = 0
        """How much of it was answered."""
        self._owed: list[Transfer] = []
        """What goes with the next exchange."""

    def add(self) -> list[Operation]:
        block = range(self._begun, self._begun + self.block)
        self._begun += self.block
        self._forwards += [Forward(number, chunk) for chunk in range(self._chunks) for number in block]
        if not self._forward_only:
            self._backwards += [Backward(number, chunk) for chunk in reversed(range(self._chunks)) for number in block]
        operations: list[Operation] = []
        while self._ran < len(self._forwards):
            work = self._forwards[self._ran]
            turns = self._ran >= self._ahead and not self._forward_only
            back = self._backwards[self._turned] if turns else None
            operations += [self._exchange(work, back), work, *([back] if back else [])]
            self._ran, self._turned = self._ran + 1, self._turned + turns
            self._owe(work, back)
        return _without_empty(*operations)

    def drain(self) -> list[Operation]:
        operations: list[Operation] = []
        for back in self._backwards[self._turned :]:
            operations += [self._exchange(None, back), back]
            self._owe(None, back)
        operations.append(self._exchange(None, None))
        self._forwards, self._backwards = [], []
        self._ran = self._turned = 0
        return _without_empty(*operations)

    def _exchange(self, work: Forward | None, back: Backward | None) -> Exchange:
        """What the last work has made goes, what this work needs comes."""
        sends, self._owed = tuple(sorted(self._owed)), []
        needs = []
        if work is not None and (below := self._virtual(work)) > 0:
            needs.append(Transfer(False, work.microbatch, below - 1))
        if back is not None and (above := self._virtual(back)) < self._last:
            needs.append(Transfer(True, back.microbatch, above))
        return Exchange(sends, tuple(needs))

    def _owe(self, work: Forward | None, back: Backward | None) -> None:
        if work is not None and (below := self._virtual(work)) < self._last:
            self._owed.append(Transfer(False, work.microbatch, below))
        if back is not None and (above := self._virtual(back)) > 0:
            self._owed.append(Transfer(True, back.microbatch, above - 1))

    def _virtual(self, work: Forward | Backward) -> int:
        return work.chunk * self.stages + self.stage

    @property
    def _last(self) -> int:
        return self.stages * self._chunks - 1


def _without_empty(*operations: Operation) -> list[Operation]:
    return [one for one in operations if not isinstance(one, Exchange) or one]

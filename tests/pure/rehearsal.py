"""Plays the programs of all stages of a pipeline against each other: do they end, and when?

An exchange ends when all its transfers have: those of two stages meet in the order in which both have posted them, as
NCCL and gloo match tensors without tags, and a tensor is there a latency after both ends were posted. That is the
strictest reading: nothing is buffered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from spare_megatron.pipeline.operations import Backward, Exchange, Forward, Operation, Transfer

Duration = Callable[[int, Forward | Backward], float]
"""``duration(stage, work)``: seconds."""


class DeadlockError(Exception):
    """Stages wait for each other and for nothing else."""

    def __init__(self, waiting: Mapping[int, Operation]) -> None:
        super().__init__(f"the stages wait for each other: {waiting}")
        self.waiting = waiting
        """Stage -> the operation that it cannot end."""


class MismatchError(Exception):
    """Two stages do not expect the same tensors of each other."""


def _no_time(_stage: int, _work: Forward | Backward) -> float:
    return 0.0


def finish_times(
    programs: Sequence[Sequence[Operation]], duration: Duration = _no_time, latency_s: float = 0.0
) -> list[float]:
    """When each stage has done its program, in seconds from the start of all.

    Args:
        programs: of each stage what it does, in order.
        latency_s: of one transfer, once both of its ends are posted.

    Raises:
        DeadlockError: no stage can go on.
        MismatchError: a stage receives another tensor than the other sends, or one is never sent or never received.
    """
    return _Rehearsal(programs, duration, latency_s).run()


class _Rehearsal:
    def __init__(self, programs: Sequence[Sequence[Operation]], duration: Duration, latency_s: float) -> None:
        self._programs, self._duration, self._latency_s = programs, duration, latency_s
        self._at = [0] * len(programs)
        self._clock_s = [0.0] * len(programs)
        self._posted: list[dict[Transfer, float]] = [{} for _ in programs]
        """Of each stage when it has posted the transfers of its present exchange."""
        self._lines: dict[tuple[int, int, bool], deque[tuple[Transfer, float]]] = {}
        """(sender, receiver, whose end) -> what was posted and has not met its other end."""
        self._met: dict[Transfer, float] = {}
        """When each transfer was complete."""

    def run(self) -> list[float]:
        while any(at < len(program) for at, program in zip(self._at, self._programs, strict=True)):
            moved = [self._go_on(stage) for stage in range(len(self._programs))]
            if not any(moved):
                waiting = {s: p[at] for s, (at, p) in enumerate(zip(self._at, self._programs, strict=True)) if p[at:]}
                raise DeadlockError(waiting)
        left = [posted for line in self._lines.values() for posted, _ in line]
        if left:
            raise MismatchError(f"no other end for {left}")
        return self._clock_s

    def _go_on(self, stage: int) -> bool:
        """Do what one stage can do now; whether it did anything."""
        program, moved = self._programs[stage], False
        while self._at[stage] < len(program):
            operation = program[self._at[stage]]
            if not isinstance(operation, Exchange):
                self._clock_s[stage] += self._duration(stage, operation)
            elif not self._exchange(stage, operation):
                return moved
            self._at[stage] += 1
            moved = True
        return moved

    def _exchange(self, stage: int, exchange: Exchange) -> bool:
        transfers = (*exchange.sends, *exchange.receives)
        if not self._posted[stage]:
            now_s = self._clock_s[stage]
            self._posted[stage] = dict.fromkeys(transfers, now_s)
            for sends, some in ((True, exchange.sends), (False, exchange.receives)):
                for transfer in sorted(some):
                    self._post(stage, transfer, sends, now_s)
        if not all(transfer in self._met for transfer in transfers):
            return False
        self._clock_s[stage] = max(self._met[transfer] for transfer in transfers)
        self._posted[stage] = {}
        return True

    def _post(self, stage: int, transfer: Transfer, sends: bool, now_s: float) -> None:
        stages = len(self._programs)
        sender, receiver = transfer.sender(stages), transfer.receiver(stages)
        if stage != (sender if sends else receiver):
            raise MismatchError(f"stage {stage} {'sends' if sends else 'receives'} {transfer} of others")
        others = self._lines.setdefault((sender, receiver, not sends), deque())
        if not others:
            self._lines.setdefault((sender, receiver, sends), deque()).append((transfer, now_s))
            return
        other, then_s = others.popleft()
        if other != transfer:
            raise MismatchError(f"stage {sender} and stage {receiver} do not agree: {other} and {transfer}")
        self._met[transfer] = max(now_s, then_s) + self._latency_s


def most_in_flight(program: Sequence[Operation]) -> int:
    """The greatest number of microbatches and chunks that ran forward and not yet backward."""
    most = now = 0
    for operation in program:
        now += isinstance(operation, Forward) - isinstance(operation, Backward)
        most = max(most, now)
    return most


def work_of(program: Sequence[Operation]) -> Mapping[int, tuple[list[int], list[int]]]:
    """Chunk -> the microbatches of its forward and of its backward passes, in order."""
    found: dict[int, tuple[list[int], list[int]]] = {}
    for operation in program:
        if not isinstance(operation, Exchange):
            forward, backward = found.setdefault(operation.chunk, ([], []))
            (forward if isinstance(operation, Forward) else backward).append(operation.microbatch)
    return found

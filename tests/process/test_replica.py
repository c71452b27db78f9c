"""What a reduction over groups promises, with the groups as threads of one process: real sockets, no start-up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from spare_megatron.collectives import attempt
from spare_megatron.collectives.gathering import Gathering
from spare_megatron.collectives.handshake import Identity, Member
from spare_megatron.collectives.reduction import PlainReduction, ReduceOutcome, Reduction
from spare_megatron.collectives.replica_communicators import Membership, ReplicaCommunicators
from spare_megatron.collectives.ring import Shares
from spare_megatron.config.errors import ConfigError
from spare_megatron.protocol.messages import Link
from tests.pure import toy_conversion

BOUND_S = 10.0
"""Far above what anything here takes, far below the time-outs that must not be sat out."""
TIMEOUT_S = 60.0
SMALL_BUCKET = 4096
ME = Identity(Member(0))


class Groups:
    """Groups 0..n-1 of one rank position, as threads."""

    def __init__(self, number: int, backend: str = "gloo", timeout_s: float = TIMEOUT_S) -> None:
        self.replicas = [
            ReplicaCommunicators(Identity(Member(g)), backend, "cpu", timeout_s, SMALL_BUCKET) for g in range(number)
        ]
        self.pool = ThreadPoolExecutor(number)
        self.epoch = 0

    def view(self, groups: tuple[int, ...], reported: tuple[int, ...] | None = None) -> int:
        self.epoch += 1
        for group in groups if reported is None else reported:
            self.replicas[group].adopt(self.membership(self.epoch, groups, group))
        return self.epoch

    def membership(self, epoch: int, groups: tuple[int, ...], group: int) -> Membership:
        right = groups[(groups.index(group) + 1) % len(groups)] if group in groups else group
        return Membership(epoch, tuple(map(Member, groups)), self.replicas[right].address)

    def start(
        self, group: int, epoch: int, request: Reduction, stale: Callable[[], bool] = lambda: False
    ) -> Future[ReduceOutcome]:
        return self.pool.submit(self.replicas[group].reduce, epoch, request, stale)

    def reduce(self, requests: dict[int, Reduction]) -> dict[int, ReduceOutcome]:
        futures = {group: self.start(group, self.epoch, request) for group, request in requests.items()}
        return {group: future.result(BOUND_S) for group, future in futures.items()}

    def close(self) -> None:
        for replicas in self.replicas:
            replicas.close()
        self.pool.shutdown()


@pytest.fixture
def three() -> Iterator[Groups]:
    groups = Groups(3)
    yield groups
    groups.close()


def request_of(group: int, **more: object) -> Reduction:
    tensors = (torch.full((5000,), float(group)), torch.full((10,), 10.0 * group))
    return Reduction(tensors=tensors, scalars={"loss": group + 0.5, "tokens": 2.0**50 + group}, **more)  # type: ignore[arg-type]


def test_sums_over_the_groups_leave_the_accumulators_alone(three: Groups) -> None:
    three.view((0, 1, 2))
    for _ in range(3):
        requests = {group: request_of(group) for group in range(3)}
        before = {group: [tensor.clone() for tensor in requests[group].tensors] for group in range(3)}
        for group, outcome in three.reduce(requests).items():
            assert (outcome.ok, outcome.stale, outcome.error) == (True, False, "")
            assert torch.equal(outcome.tensors[0], torch.full((5000,), 3.0))
            assert torch.equal(outcome.tensors[1], torch.full((10,), 30.0))
            assert outcome.scalars == {"loss": 4.5, "tokens": 3 * 2.0**50 + 3}
            assert all(map(torch.equal, requests[group].tensors, before[group]))
            assert outcome.formation_s > 0
            assert outcome.reduce_s > 0


def test_all_groups_get_the_same_bits(three: Groups) -> None:
    three.view((0, 1, 2))
    generator = torch.Generator().manual_seed(3)
    tensors = [torch.randn(4999, generator=generator) * 10.0**group for group in range(3)]
    outcomes = three.reduce({group: Reduction(tensors=(tensors[group],)) for group in range(3)})
    assert torch.equal(outcomes[0].tensors[0], outcomes[1].tensors[0])
    assert torch.equal(outcomes[0].tensors[0], outcomes[2].tensors[0])


def test_a_single_group_reduces_out_of_place_and_in_buckets() -> None:
    groups = Groups(1)
    try:
        groups.view((0,))
        buckets: list[tuple[int, int]] = []
        request = request_of(0, on_bucket=lambda done, total: buckets.append((done, total)))
        outcome = groups.reduce({0: request})[0]
        assert outcome.ok
        assert outcome.scalars == dict(request.scalars)
        for tensor, result in zip(request.tensors, outcome.tensors, strict=True):
            assert torch.equal(tensor, result)
            assert tensor.data_ptr() != result.data_ptr()
        assert buckets == [(done, len(buckets)) for done in range(1, len(buckets) + 1)]
        assert len(buckets) > 2
    finally:
        groups.close()


def test_on_bucket_is_called_between_buckets_and_what_it_raises_comes_out(three: Groups) -> None:
    three.view((0, 1, 2))
    seen: list[tuple[int, int]] = []

    def hook(done: int, total: int) -> None:
        seen.append((done, total))
        if done == 2:
            raise ValueError("injected")

    futures = {group: three.start(group, 1, request_of(group)) for group in (1, 2)}
    broken = three.start(0, 1, request_of(0, on_bucket=hook))
    with pytest.raises(ValueError, match="injected"):
        broken.result(BOUND_S)
    assert [done for done, _ in seen] == [1, 2]
    assert seen[0][1] > 2
    again = three.replicas[0].reduce(1, request_of(0), lambda: False)
    assert not again.ok, "it broke off in the middle: it is out of step with the others"
    assert "injected" in again.error
    three.view((1, 2))
    for future in futures.values():
        future.result(BOUND_S)
    assert all(outcome.ok for outcome in three.reduce({group: request_of(group) for group in (1, 2)}).values())


def gathering_of(group: int, groups: tuple[int, ...] = (0, 1, 2), numel: int = 50_000) -> Gathering:
    """Group g gives g + 1, ``numel`` times; all get it."""
    flat = torch.cat([torch.full((numel,), one + 1 if one == group else 7, dtype=torch.int32) for one in groups])
    shares = Shares((numel,) * len(groups), (len(groups) - 1,) * len(groups))
    return Gathering([flat], [shares], {"size": float(group)})


def start_gather(three: Groups, group: int, epoch: int, request: Gathering) -> Future[ReduceOutcome]:
    return three.pool.submit(three.replicas[group].gather, epoch, request, lambda: False)


def test_a_gather_between_reductions(three: Groups) -> None:
    """And the results of the reduction before it stay."""
    three.view((0, 1, 2))
    before = three.reduce({group: request_of(group) for group in range(3)})
    futures = [start_gather(three, group, 1, gathering_of(group)) for group in range(3)]
    for future in futures:
        outcome = future.result(BOUND_S)
        assert (outcome.ok, outcome.error) == (True, "")
        assert outcome.tensors[0].tolist() == [1] * 50_000 + [2] * 50_000 + [3] * 50_000
        assert outcome.scalars == {"size": 3.0}
    assert torch.equal(before[0].tensors[0], torch.full((5000,), 3.0))
    three.reduce({group: request_of(group) for group in range(3)})
    three.view((1,))
    alone = start_gather(three, 1, 2, gathering_of(1, (1,))).result(BOUND_S)
    assert alone.ok
    assert alone.tensors[0].tolist() == [2] * 50_000


def test_a_gather_ends_with_its_epoch_and_is_made_again_in_the_next_one(three: Groups) -> None:
    three.view((0, 1, 2))
    waiting = [start_gather(three, group, 1, gathering_of(group)) for group in (0, 1)]
    time.sleep(0.05)  # let them hang; they also end right if they do not yet
    three.view((0, 1))
    assert all(future.result(BOUND_S).stale for future in waiting)
    futures = [start_gather(three, group, 2, gathering_of(group, (0, 1))) for group in (0, 1)]
    for future in futures:
        assert future.result(BOUND_S).tensors[0].tolist() == [1] * 50_000 + [2] * 50_000


@pytest.mark.parametrize(("bits", "sum_bytes"), [(40, 6), (44, 6), (60, 8)])
@pytest.mark.parametrize("size", [2, 4])
def test_an_element_of_a_step_travels_as_so_many_bytes(size: int, bits: int, sum_bytes: int) -> None:
    """6 bytes of an exact sum of up to 48 bits, 8 of a larger one, and 4 of what it becomes; and where groups keep a
    part of the state 2 of its parameter in bf16. Each (N - 1) / N times out of every rank; without the part that is the
    same for any size."""
    groups = Groups(size)
    try:
        epoch, everybody = groups.view(tuple(range(size))), range(size)
        sent, steps = [], (8192 * size, 24576 * size)
        for numel in steps:
            before = sent_bytes(groups)
            sums = [torch.arange(numel) + group + (1 << bits) for group in everybody]
            requests = {
                group: Reduction((one,), conversion=toy_conversion.Conversion([one], 1))
                for group, one in enumerate(sums)
            }
            assert all(outcome.ok for outcome in groups.reduce(requests).values())
            reduced = sent_bytes(groups)
            gathers = [gathering_of(group, tuple(everybody), numel // size // 2) for group in everybody]
            futures = [start_gather(groups, group, epoch, one) for group, one in enumerate(gathers)]
            assert all(future.result(BOUND_S).ok for future in futures)
            sent.append((reduced - before, sent_bytes(groups) - reduced))
        (reduced_few, gathered_few), (reduced_many, gathered_many) = sent
        more = steps[1] - steps[0]
        widths = more // (SMALL_BUCKET // 8) * size * (size - 1)  # one for each chunk of a bucket
        expected = (sum_bytes + 4) * more * (size - 1) + widths
        assert reduced_many - reduced_few == pytest.approx(expected, abs=100), "but for the check vector's size"
        assert gathered_many - gathered_few == 2 * more * (size - 1)
    finally:
        groups.close()


def sent_bytes(groups: Groups) -> int:
    """What all ranks have sent to their right neighbours in this epoch."""
    return sum(one._links._present.traffic.sent for one in groups.replicas if one._links._present is not None)


def test_groups_that_do_not_gather_the_same_thing_find_it_out(three: Groups) -> None:
    three.view((0, 1, 2))
    requests = [gathering_of(0), gathering_of(1), gathering_of(2, numel=49_999)]
    futures = [start_gather(three, group, 1, request) for group, request in enumerate(requests)]
    for future in futures:
        outcome = future.result(BOUND_S)
        assert not outcome.ok
        assert not outcome.stale
    again = three.replicas[0].reduce(1, request_of(0), lambda: False)
    assert not again.ok, "a gather that failed ends its epoch's communicator"


def test_the_result_outlives_its_epoch(three: Groups) -> None:
    """Protocol rule 3: a group that has voted may have to apply the result in a newer epoch."""
    three.view((0, 1, 2))
    kept = three.reduce({group: request_of(group) for group in range(3)})
    three.view((0, 1))
    assert torch.equal(kept[0].tensors[0], torch.full((5000,), 3.0))
    assert torch.equal(kept[1].tensors[1], torch.full((10,), 30.0))


def test_a_newer_epoch_ends_a_reduction_that_waits_for_a_group(three: Groups) -> None:
    three.view((0, 1, 2))
    three.reduce({group: request_of(group) for group in range(3)})
    waiting = [three.start(group, 1, request_of(group)) for group in (0, 1)]
    time.sleep(0.05)  # let them hang; they also end right if they do not yet
    three.view((0, 1))
    for future in waiting:
        outcome = future.result(BOUND_S)
        assert (outcome.ok, outcome.stale, outcome.links) == (False, True, ())
    outcomes = three.reduce({group: request_of(group) for group in (0, 1)})
    assert all(torch.equal(outcome.tensors[0], torch.full((5000,), 1.0)) for outcome in outcomes.values())


def test_a_newer_epoch_ends_a_formation_that_waits_for_a_group(three: Groups) -> None:
    three.view((0, 1, 2), reported=(0, 1))
    waiting = [three.start(group, 1, request_of(group)) for group in (0, 1)]
    time.sleep(0.05)  # as above
    three.view((0, 1))
    assert all(future.result(BOUND_S).stale for future in waiting)
    assert all(outcome.ok for outcome in three.reduce({group: request_of(group) for group in (0, 1)}).values())
    assert _eventually(lambda: three.replicas[0].lingering == 0)


def test_a_lost_connection_waits_for_the_view_that_explains_it(three: Groups, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first to learn of a death drops its communicator: to the others that looks like a death, too."""
    monkeypatch.setattr(attempt, "VIEW_GRACE_S", TIMEOUT_S)
    three.view((0, 1, 2))
    three.reduce({group: request_of(group) for group in range(3)})
    waiting = [three.start(group, 1, request_of(group)) for group in (0, 1)]
    three.replicas[2].abandon()
    assert _eventually(lambda: any(three.replicas[group].failure for group in (0, 1)))
    three.view((0, 1))
    assert [(outcome.ok, outcome.stale) for outcome in (future.result(BOUND_S) for future in waiting)] == [
        (False, True),
        (False, True),
    ]


def test_who_gives_up_says_so_and_a_loss_that_no_view_explains_is_a_failure(three: Groups) -> None:
    """Nobody is named: not who gave up, nor who gave up because of that."""
    three.view((0, 1, 2))
    three.reduce({group: request_of(group) for group in range(3)})
    waiting = [three.start(group, 1, request_of(group)) for group in (0, 1)]
    three.replicas[2].abandon()
    for future in waiting:
        outcome = future.result(BOUND_S)
        assert (outcome.ok, outcome.stale, outcome.links) == (False, False, ())
        assert outcome.error
        assert outcome.reduce_s >= attempt.VIEW_GRACE_S


def test_nothing_is_adopted_after_the_end(three: Groups) -> None:
    three.view((0, 1, 2))
    for replicas in three.replicas:
        replicas.close()
    epoch = three.view((0, 1))
    assert three.replicas[0].reduce(epoch, request_of(0), lambda: True).stale
    assert three.replicas[0].lingering == 0


def test_only_newer_epochs_are_adopted_and_older_ones_are_stale(three: Groups) -> None:
    three.view((0, 1, 2))
    three.view((0, 1))
    three.replicas[0].adopt(three.membership(1, (0, 1, 2), 0))
    three.replicas[0].adopt(three.membership(2, (0, 1), 0))
    assert three.replicas[0].reduce(1, request_of(0), lambda: False).stale
    assert all(outcome.ok for outcome in three.reduce({group: request_of(group) for group in (0, 1)}).values())


def test_an_epoch_can_be_reduced_in_before_it_is_adopted(three: Groups) -> None:
    early = three.start(0, 1, request_of(0))
    three.view((0, 1))
    other = three.start(1, 1, request_of(1))
    assert early.result(BOUND_S).ok
    assert other.result(BOUND_S).ok


def test_stale_and_abandon_end_a_reduction(three: Groups) -> None:
    over = threading.Event()
    early = three.start(0, 5, request_of(0), over.is_set)
    over.set()
    assert early.result(BOUND_S).stale
    three.view((0, 1, 2))
    waiting = three.start(1, 1, request_of(1))
    three.replicas[1].abandon()
    assert waiting.result(BOUND_S).stale


def test_a_group_outside_the_view_has_nothing_to_reduce(three: Groups) -> None:
    epoch = three.view((0, 1), reported=(0, 1, 2))
    assert three.replicas[2].reduce(epoch, request_of(2), lambda: False).stale


def test_groups_that_reduce_different_things_are_notified(three: Groups) -> None:
    three.view((0, 1, 2))
    requests = {group: request_of(group) for group in range(3)}
    requests[1] = Reduction(tensors=(torch.ones(4000), torch.ones(10)), scalars=requests[0].scalars)
    for outcome in three.reduce(requests).values():
        assert not outcome.ok
        assert "do not reduce the same thing" in outcome.error


def test_an_absent_member_is_blamed_after_the_timeout() -> None:
    groups = Groups(3, timeout_s=0.3)
    try:
        groups.view((0, 1, 2), reported=(0, 2))
        outcomes = groups.reduce({group: request_of(group) for group in (0, 2)})
        for group, outcome in outcomes.items():
            assert (outcome.ok, outcome.stale) == (False, False)
            assert outcome.links, group
            assert set(outcome.links) <= {Link(1, 0), Link(1, 2)}, "what it found itself, or received first"
            assert "rank 1 of the ring did not come within 0.3 s" in outcome.error
    finally:
        groups.close()


class _FixedPoint(PlainReduction):
    """A format as the exact mode will have one: 64 bits on the wire, fp32 for the step."""

    name = "fixed"

    def wire_dtype(self, accumulator: torch.dtype) -> torch.dtype:
        return torch.int64

    def encode(self, accumulator: torch.Tensor, wire: torch.Tensor) -> None:
        wire.copy_((accumulator.double() * 2.0**30).round())

    def decode(self, wire: torch.Tensor, result: torch.Tensor) -> None:
        result.copy_(wire.double() / 2.0**30)


@pytest.mark.parametrize("backend", ["gloo", "gloo-staged"])
def test_a_reduction_brings_its_own_format(backend: str) -> None:
    groups = Groups(2, backend)
    try:
        groups.view((0, 1))
        tensors = [torch.randn(3000, generator=torch.Generator().manual_seed(group)) for group in range(2)]
        for method in (_FixedPoint(), PlainReduction()):
            outcomes = groups.reduce({g: Reduction(tensors=(tensors[g],), method=method) for g in range(2)})
            for outcome in outcomes.values():
                assert outcome.tensors[0].dtype == torch.float32
                assert torch.allclose(outcome.tensors[0], tensors[0] + tensors[1], atol=1e-6)
    finally:
        groups.close()


def test_unusable_backends_are_refused() -> None:
    with pytest.raises(ConfigError, match="know no backend 'mpi'"):
        ReplicaCommunicators(ME, "mpi")
    if not dist.is_nccl_available():
        with pytest.raises(ConfigError, match="no NCCL; use --spare-comm gloo"):
            ReplicaCommunicators(ME, "nccl")


def _eventually(holds: Callable[[], bool]) -> bool:
    until_s = time.monotonic() + BOUND_S
    while not holds() and time.monotonic() < until_s:
        time.sleep(0.01)
    return holds()


class CopiesReduction(PlainReduction):
    """Has every bucket copied, as where accumulators and wires are on different devices."""

    def is_wire(self, accumulator: torch.dtype) -> bool:
        return False


@pytest.mark.parametrize("method", [PlainReduction(), CopiesReduction()])
@pytest.mark.parametrize("backend", ["gloo", "gloo-staged"])
@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("overlapped", [False, True])
def test_converted_sums_come_with_their_check_vector(
    backend: str, number: int, overlapped: bool, method: PlainReduction
) -> None:
    """The results of more buckets than have wire memory at a time, other tensors as they are, and last the check
    vector; the next attempt counts anew."""
    groups = Groups(number, backend)
    try:
        generator = torch.Generator().manual_seed(number)
        given = [
            tuple(torch.randint(-(2**40), 2**40, (size,), generator=generator) for size in (9001, 3, 1200))
            for _ in range(number)
        ]
        sums = [torch.stack(of_tensor).sum(0) for of_tensor in zip(*given, strict=True)]
        groups.view(tuple(range(number)))
        for attempt in range(2):
            if attempt:
                groups.view(tuple(range(number)))
            requests = {}
            for group, mine in enumerate(given):
                conversion = toy_conversion.Conversion(mine, 2)
                requests[group] = Reduction(mine, {"a": 1.0}, method, overlapped=overlapped, conversion=conversion)
            for outcome in groups.reduce(requests).values():
                assert outcome.ok, outcome.error
                first, second, third, check_vector = outcome.tensors
                assert torch.equal(first, toy_conversion.converted(sums[0]))
                assert torch.equal(second, toy_conversion.converted(sums[1]))
                assert torch.equal(third, sums[2])
                assert check_vector.tolist() == [0, 9004]
                assert outcome.scalars == {"a": float(number)}
    finally:
        groups.close()


def test_a_sum_that_is_not_of_what_was_put_in_shows_in_the_check_vector_of_all(three: Groups) -> None:
    three.view((0, 1, 2))
    given = [(torch.full((5000,), group),) for group in range(3)]
    conversions = [toy_conversion.Conversion(one, 1) for one in given]
    given[1][0][4321] += 64
    requests = {group: Reduction(given[group], conversion=conversions[group]) for group in range(3)}
    for outcome in three.reduce(requests).values():
        assert outcome.ok
        assert outcome.tensors[1].tolist() == [-64, 5000]

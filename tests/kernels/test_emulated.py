"""The CUDA kernels, run without a GPU by an emulator that looks at every access (:mod:`tests.kernels.emulation`): their
bits are those of the reference, nothing is touched that is not theirs, and faults put into them are found.

A case is drawn from a seed: function, types, mode, number of elements, where tensors begin in memory, and the index of
the first element. ``python -m tests.kernels.test_emulated`` prints the table.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from benchmarks.gpu_costs import LAUNCHED
from spare_megatron import kernels
from spare_megatron.kernels import dispatch, reference
from tests.kernels import emulation
from tests.kernels.emulation import Emulated, FaultError, Mutant, mapped
from tests.kernels.test_against_reference import FLOATS, block_exponents, gradients, only_in_the_sum, same

pytestmark = [pytest.mark.skipif(not emulation.available(), reason=f"there is no {emulation.COMPILER}")]

SEED = 471_001
COUNTS = (1, 2, 3, 4, 5, 255, 1023, 1024, 1025, 2047, 3077, 5000)
INDICES = (0, 1, 4, 777, 1023, (1 << 31) + 5, (1 << 41) + 1022, (1 << 62) - 6000)
INTEGERS = (torch.int64, torch.int32)
LISTED = 1 + max(LAUNCHED.values())
"""So many segments or parts are more than any launch takes."""
Run = Callable[[Any], list[torch.Tensor]]
"""Runs a case with one implementation: the emulator, or the reference."""

MUTANTS = (
    Mutant("a warp adds half of its lanes", "Word warp_sum(Word value)", "16", "8"),
    Mutant("a pack is read beyond the end", "void load_four(", "at + kPerThread <= count", "at < count"),
    Mutant("a pack is written before the beginning", "void store_four(", "at >= 0", "at > -kPerThread"),
    Mutant(
        "16 bytes at any address", "bool aligned_here(", "reinterpret_cast<uintptr_t>(pointer) % bytes == 0", "true"
    ),
    Mutant("every second warp is left out", "void add_sum(", "threadIdx.x % 32 == 0", "threadIdx.x % 64 == 0"),
    Mutant(
        "a sum is stored, not added",
        "void add_sum(",
        "atomicAdd(reinterpret_cast<Word*>(to), value)",
        "*reinterpret_cast<Word*>(to) += value",
    ),
    Mutant("a peak is stored, not compared", "void raise(", "atomicMax(peak, value)", "*peak = value", "finalize"),
    Mutant("lanes leave a shuffle early", "void raise(", "step > 0", "step > int(threadIdx.x & 1)", "finalize"),
    Mutant("a mask leaves lanes out", "void raise(", "kFull", "kFull >> 1", "finalize"),
    Mutant(
        "an index of 32 bits",
        "accumulate_kernel(SpareAccumulate",
        "block * SPARE_BLOCK",
        "int64_t(int32_t(block * SPARE_BLOCK))",
    ),
    Mutant(
        "blocks are done twice", "accumulate_kernel(SpareAccumulate", "gridDim.x", "(gridDim.x > 1 ? gridDim.x - 1 : 1)"
    ),
    Mutant(
        "values up to twice the bound",
        "accumulate_kernel(SpareAccumulate",
        "job.bound_bits - exponent",
        "job.bound_bits - exponent + 1",
    ),
    Mutant("the first sum sees what was there", "accumulate_kernel(SpareAccumulate", "!job.first", "true"),
    Mutant("the exponent of another block", "struct Convert {", "exponents[block]", "exponents[number]", "convert"),
    Mutant("one element more is set to 0", "auto zero = [&]", "to - from", "to - from + 1", "convert"),
    Mutant(
        "a kernel reads memory of the host",
        "auto convert = [&]",
        "job.exponents",
        "reinterpret_cast<const int16_t*>(job.segments)",
    ),
    Mutant(
        "a quotient in fp32",
        "struct Finalize {",
        "static_cast<double>(four[k]) / divisor",
        "static_cast<double>(four[k] / static_cast<float>(divisor))",
        "finalize",
    ),
    Mutant("a byte behind the last one", "struct Digest {", "byte < count", "byte <= count", "digests"),
    Mutant("a word behind the last one", "struct Digest {", "at + k >= words()", "at + k > words()", "digests"),
    Mutant(
        "a sign counts",
        "struct Largest {",
        "float_to_bits(four[k]) & Fp32::magnitude",
        "float_to_bits(four[k])",
        "largest",
    ),
    Mutant(
        "a square in fp32",
        "struct Squares {",
        "round_square(four[k], scale)",
        "uint64_t(double(float(four[k] * scale * four[k] * scale)))",
        "squares",
    ),
    Mutant("upper halves of a bit more", "struct Squares {", "sum >> 32", "sum >> 31", "squares"),
    Mutant("parts of the length of the first", "int spare_cuda_squares(", "counts[number]", "counts[0]", "squares"),
    Mutant(
        "sums of the part before", "int spare_cuda_digests(", "2 * number", "2 * (number ? number - 1 : 0)", "digests"
    ),
    Mutant(
        "segments of a checksum in the table of finalize",
        "void finalize_segments(",
        "4 * number",
        "3 * number",
        "finalize",
    ),
    Mutant("results where the sums are", "void finalize_segments(", "segment[2]", "segment[0]", "finalize"),
    Mutant("peaks of the first segment", "void finalize_segments(", "segment[3] / SPARE_BLOCK", "0", "finalize"),
    Mutant("a checksum of the segment before", "void checksum_segments(", "sums + number", "sums + number / 2 * 2"),
    Mutant(
        "a thread block works for the job before its own",
        "batch_kernel(const __grid_constant__",
        "batch.ends[middle] > blockIdx.x",
        "batch.ends[middle] >= blockIdx.x",
        "checksums",
    ),
    Mutant("thread blocks of a job do the same", "batch_kernel(const __grid_constant__", "blockIdx.x - first", "0u"),
    Mutant(
        "blocks that thread blocks of other jobs leave out",
        "batch_kernel(const __grid_constant__",
        "batch.ends[low] - first",
        "batch.ends[low]",
        "digests",
    ),
    Mutant("a batch is launched without its last job", "void launch() {", "batch_.jobs > 0", "--batch_.jobs > 0"),
    Mutant(
        "a full batch is forgotten",
        "void add(const Job& job) {",
        "batch_.jobs == Batch<Job>::kMost",
        "batch_.jobs == Batch<Job>::kMost && !(batch_.jobs = 0)",
        "list checksums",
    ),
)


class Case(NamedTuple):
    """One call."""

    name: str
    """Function, types and mode."""
    seed: int
    full: bool

    def draw(self) -> Run:
        """The call, with arguments drawn from the seed."""
        random = torch.Generator().manual_seed(self.seed)
        kind, *mode = self.name.split()
        counts = (*COUNTS, 9 * 1024 + 300, 20_000) if self.full or self.seed % 5 == 0 else COUNTS
        return _DRAWN[kind](_Draws(random, counts), *mode)


class _Draws:
    """Random choices."""

    def __init__(self, random: torch.Generator, counts: tuple[int, ...]) -> None:
        self.random, self.counts = random, counts

    def below(self, number: int) -> int:
        return int(torch.randint(number, (1,), generator=self.random))

    def one(self, of: tuple[Any, ...]) -> Any:
        return of[self.below(len(of))]

    def integers(self, count: int, kind: torch.dtype, low: int | None = None, high: int | None = None) -> torch.Tensor:
        """They begin anywhere in memory."""
        limits = torch.iinfo(kind)
        low, high = limits.min if low is None else low, limits.max if high is None else high
        at = self.below(4)
        return torch.randint(low, high, (count + at,), dtype=kind, generator=self.random)[at:]

    def moved(self, values: torch.Tensor) -> torch.Tensor:
        """The same values elsewhere in memory."""
        at = self.below(4)
        return torch.cat([values[:1].expand(at), values])[at:]


def _type(name: str) -> torch.dtype:
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


def _accumulate(draws: _Draws, source_type: str, kind: str, other: str, first: str) -> Run:
    dtype, integers = _type(source_type), _type(kind)
    narrow = integers == torch.int32
    count, index, exponent = draws.one(draws.counts), draws.one(INDICES), draws.one((-20, 40, 140))
    bound = draws.one((1, 20, 30) if narrow else (1, 20, 51, 62))
    wild = draws.below(2) == 1
    source = draws.moved(gradients(count, dtype, exponent, wild, draws.random))
    earlier = None
    if other != "alone":
        earlier = gradients(count, torch.float32, exponent, wild, draws.random)
        if wild:
            only_in_the_sum(source, earlier)
        earlier = draws.moved(earlier.to(dtype) if other.endswith("same") else earlier)
    exponents = block_exponents(index, count, exponent, None if wild else bound, draws.random) if narrow else exponent
    start, report = draws.integers(count, integers, -(2**20), 2**20), torch.tensor([5, 0])

    def run(implementation: Any) -> list[torch.Tensor]:
        accumulator, reported = draws_again(start), report.clone()
        add = implementation.adder(accumulator, index, bound, reported)
        add(source, exponents, earlier, other.startswith("apart"), first == "first")
        return [accumulator, reported]

    return run


def _checksums(draws: _Draws, kind: str) -> Run:
    count = draws.one(draws.counts)
    values, middle = draws.integers(count, _type(kind)), draws.below(count + 1)
    segments = torch.tensor([(0, middle, draws.one(INDICES)), (middle, count, draws.one(INDICES))])

    def run(implementation: Any) -> list[torch.Tensor]:
        sums = torch.tensor([3, -9])
        implementation.checksums(values, segments, sums)
        return [sums]

    return run


def _convert(draws: _Draws, kind: str, addend: str, found: str) -> Run:
    count = draws.one(draws.counts)
    start, stop = draws.below(count), 0
    stop = start + 1 + draws.below(count - start)
    cuts = sorted(draws.below(count + 1) for _ in range(4))
    segments = torch.tensor(
        [(cuts[0], cuts[1], draws.below(3000)), (cuts[2], cuts[3], 4096 + count + draws.below(3000))]
    )
    exponents = draws.integers(kernels._num_blocks(0, 16_384 + 2 * count), torch.int16, 20, 190)
    sums, other = (draws.integers(stop - start, _type(kind)) for _ in range(2))

    def run(implementation: Any) -> list[torch.Tensor]:
        result = draws_again(torch.full((stop - start,), torch.nan))
        counted = torch.tensor([[1, 2], [3, 4]]) if found == "counted" else None
        implementation.convert(segments, exponents, start, sums, other if addend == "added" else None, result, counted)
        return [result] if counted is None else [result, counted]

    return run


def _finalize(draws: _Draws, destination_type: str) -> Run:
    count, index = draws.one(draws.counts), draws.one((0, 1, 4, 777, 1023, 5 * 1024 + 7))
    total = draws.moved(torch.randn(count, generator=draws.random) * 2.0 ** draws.one((-130, -10, 0, 90)))
    total[draws.below(count)] = draws.one((torch.inf, -0.0, 3.0e38))
    divisor = draws.one((3.0, -0.1, 2.0**40, 2.0**-100))
    cuts = sorted(draws.below(count + 1) for _ in range(2))
    behind = draws.one((index + cuts[1], (1 + (index + cuts[1]) // 1024) * 1024))  # maybe in the same block
    segments = [(cuts[1], count, 3, behind), (0, cuts[0], 3 + count - cuts[1], index)]
    blocks = kernels._num_blocks(0, behind + count)

    def run(implementation: Any) -> list[torch.Tensor]:
        out = draws_again(torch.full((count + 5,), 7.0, dtype=_type(destination_type)))
        peaks = torch.full((blocks,), 12_345, dtype=torch.int32)
        implementation.finalize(torch.tensor(segments), total, out, divisor, peaks)
        return [out, peaks]

    return run


def _digests(draws: _Draws) -> Run:
    sizes = [draws.one((*draws.counts, 8 * 1024 * 8 + 3)) for _ in range(3)]
    # parts are moved by bytes: they are aligned to nothing
    parts = [draws.integers(size, torch.uint8, 0, 256) for size in (0, *sizes)]
    return lambda implementation: [implementation.digest_sums(parts)]


def _numbers(draws: _Draws, orders: int) -> list[torch.Tensor]:
    """Parts, some without elements, of numbers of many magnitudes up to 1."""
    parts = []
    for count in (draws.one(draws.counts), 0, draws.one(draws.counts)):
        sizes = torch.exp2(-torch.rand(count, generator=draws.random) * orders)
        numbers = sizes * torch.empty(count).uniform_(-1, 1, generator=draws.random)
        parts.append(draws.moved(numbers) if count else numbers)
    return parts


def _largest(draws: _Draws) -> Run:
    parts = _numbers(draws, 40)
    parts[0][draws.below(len(parts[0]))] = draws.one((0.5, -3.0e38, torch.inf, torch.nan))
    return lambda implementation: [implementation.largest(parts)]


def _squares(draws: _Draws) -> Run:
    parts, size = _numbers(draws, 40), draws.one((-126, 0, 100))
    parts = [part * 2.0**size for part in parts]
    parts[2][draws.below(len(parts[2]))] = 2.0**size

    def run(implementation: Any) -> list[torch.Tensor]:
        low, high = implementation.squares(parts, kernels.SQUARE_BITS - size).tolist()
        total = (high << 32) + low
        return [torch.tensor([total >> 62, total & (1 << 62) - 1])]

    return run


def _list(draws: _Draws, kind: str) -> Run:
    """More segments or parts than one launch takes, most of them small; each begins in another block, maybe behind a
    gap."""
    segments, end = [], 0
    for number in range(LISTED):
        start = end + draws.below(2)
        end = start + draws.one((0, 1, 2, 3, 5, 40, 1500 if number % 50 == 7 else 1))
        segments.append((start, end, 2048 * number + 3 * draws.below(2)))
    integers = draws.integers(end, torch.int64)
    numbers = draws.moved(torch.empty(end).uniform_(-1, 1, generator=draws.random))
    numbers[segments[7][0]] = 1.0
    exponents = draws.integers(2 * LISTED, torch.int16, 20, 190)
    return lambda implementation: of_list(implementation, kind, torch.tensor(segments), integers, numbers, exponents)


def of_list(
    implementation: Any,
    kind: str,
    segments: torch.Tensor,
    integers: torch.Tensor,
    numbers: torch.Tensor,
    exponents: torch.Tensor,
) -> list[torch.Tensor]:
    """What a function makes of all segments."""
    sums, out = torch.arange(2 * len(segments)), torch.full((len(numbers),), 7.0)
    parts = [numbers[start:stop] for start, stop, _ in segments.tolist()]
    if kind == "checksums":
        implementation.checksums(integers, segments, sums[: len(segments)])
    elif kind == "convert":
        implementation.convert(segments, exponents, 0, integers, None, out, sums.view(-1, 2))
    elif kind == "finalize":
        table = segments[:, [0, 1, 0, 2]].flip(0).contiguous()
        peaks = torch.zeros_like(exponents, dtype=torch.int32)
        implementation.finalize(table, numbers, out, 3.0, peaks)
        return [out, peaks]
    elif kind == "digests":
        return [implementation.digest_sums([part.view(torch.uint8) for part in parts])]
    elif kind == "largest":
        return [implementation.largest(parts)]
    else:
        low, high = implementation.squares(parts, kernels.SQUARE_BITS).tolist()
        return [torch.tensor((high << 32) + low)]
    return [sums, out]


def draws_again(values: torch.Tensor) -> torch.Tensor:
    """A copy that begins as far from a multiple of 16 bytes as the values do."""
    at = values.data_ptr() // values.itemsize % (16 // values.itemsize)
    return torch.cat([values[:1].expand(at), values])[at:]


_DRAWN: dict[str, Callable[..., Run]] = {
    "accumulate": _accumulate,
    "checksums": _checksums,
    "convert": _convert,
    "finalize": _finalize,
    "digests": _digests,
    "largest": _largest,
    "squares": _squares,
    "list": _list,
}


def names() -> Iterator[str]:
    """Every function with all its types and modes."""
    for parts in itertools.product(
        FLOATS, INTEGERS, ("alone", "summed", "summed-same", "apart", "apart-same"), ("first", "more")
    ):
        yield "accumulate " + " ".join(str(part).removeprefix("torch.") for part in parts)
    for kind in ("int64", "int32"):
        yield f"checksums {kind}"
        for addend, found in itertools.product(("alone", "added"), ("counted", "uncounted")):
            yield f"convert {kind} {addend} {found}"
    yield from ("finalize float32", "finalize bfloat16", "digests", "largest", "squares")
    yield from (f"list {kind}" for kind in LAUNCHED)


def cases(each: int, full: bool = False) -> Iterator[Case]:
    for number, name in enumerate(names()):
        for draw in range(-(-each // 10) if name.startswith("list") else each):
            yield Case(name, SEED + 1000 * number + draw, full)


def differences(library: Emulated, case: Case) -> str:
    """What is wrong with a case; empty where nothing is."""
    run = case.draw()
    library.processors, library.seed = 1, case.seed
    try:
        given = run(library)
    except FaultError as fault:
        return str(fault)
    return "" if all(map(same, given, run(reference))) else "other bits than the reference"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    """The kernels, in which nothing is wrong before a mutant is chosen."""
    return Emulated(emulation.build(tmp_path_factory.mktemp("emulated"), MUTANTS))


def test_every_function_has_the_bits_of_the_reference(library: Emulated) -> None:
    wrong = {case: found for case in cases(6) if (found := differences(library, case))}
    assert not wrong


@pytest.mark.full
def test_many_more_cases(tmp_path: Path) -> None:
    library = Emulated(emulation.build(tmp_path))  # compiled without any mutant
    wrong = {case: found for case in cases(90, full=True) if (found := differences(library, case))}
    assert not wrong


def found_by(library: Emulated, number: int, each: int) -> tuple[str, Case] | None:
    """What finds a mutant first, and by what; None where nothing does."""
    library.mutant = number
    soonest = MUTANTS[number - 1].soonest
    try:
        for case in sorted(cases(each), key=lambda case: (not case.name.startswith(soonest), case.seed % 1000)):
            if found := differences(library, case):
                return found, case
    finally:
        library.mutant = 0
    return None


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_a_fault_in_a_kernel_is_found(library: Emulated, mutant: Mutant) -> None:
    assert found_by(library, MUTANTS.index(mutant) + 1, 12) is not None


def test_more_elements_than_32_bits_count(library: Emulated) -> None:
    """Only the last blocks are run; what lies before them does not exist."""
    count, near, index = (1 << 31) + 5000, 2500, 777
    random = torch.Generator().manual_seed(SEED)
    lead = count - near
    blocks = kernels._num_blocks(index, count)
    first = (index + lead) // kernels.BLOCK - index // kernels.BLOCK + 1
    """The first block that lies in the window as a whole."""
    skipped = (first + index // kernels.BLOCK) * kernels.BLOCK - index - lead
    library.processors, library.only = 1 << 20, (first, blocks - 1)
    source = mapped(gradients(near, torch.float32, 40, False, random))
    integers = mapped(torch.randint(-(2**60), 2**60, (near,), generator=random))
    exponents = mapped(torch.randint(20, 190, (blocks - first,), dtype=torch.int16, generator=random))
    try:
        results = []
        for far in (True, False):
            run: Any = library if far else reference
            made = []

            def of(window: torch.Tensor, number: int = count, far: bool = far) -> Any:
                return emulation.Far(window, number) if far else window[skipped:]

            at = index if far else index + lead + skipped
            accumulator, report = mapped(integers), torch.zeros(2, dtype=torch.int64)
            run.adder(of(accumulator), at, 55, report)(of(source), 40)
            made += [accumulator[skipped:], report]
            sums = torch.zeros(1, dtype=torch.int64)
            run.checksums(of(integers), torch.tensor([(0, count if far else near - skipped, at)]), sums)
            made.append(sums)
            out, peaks = mapped(torch.zeros(near)), mapped(torch.zeros(blocks - first, dtype=torch.int32))
            table = torch.tensor([(0, count, 0, index) if far else (0, near - skipped, 0, 0)])
            run.finalize(table, of(source), of(out), 3.0, of(peaks, blocks) if far else peaks)
            made += [out[skipped:], peaks]
            result, found = mapped(torch.zeros(near)), torch.zeros(1, 2, dtype=torch.int64)
            table = torch.tensor([(0, count, index) if far else (0, near - skipped, at % kernels.BLOCK)])
            run.convert(table, of(exponents, blocks) if far else exponents, 0, of(integers), None, of(result), None)
            made.append(result[skipped:])
            results.append(made)
        assert all(map(same, *results))
        assert found.sum() == 0
        # these count blocks from the first element
        whole = lead // kernels.BLOCK + 1
        library.only = (whole, (count - 1) // kernels.BLOCK)
        window, parts = source.clamp(-1, 1), [emulation.Far(mapped(source.clamp(-1, 1)), count)]
        behind = [window[whole * kernels.BLOCK - lead :]]
        assert same(library.largest(parts), reference.largest(behind))
        low, high = (library.squares(parts, 20) - reference.squares(behind, 20)).tolist()
        assert (high << 32) + low == 0
    finally:
        library.only = None


@pytest.mark.parametrize(("kind", "most"), LAUNCHED.items())
def test_a_list_takes_as_few_launches_as_it_can(library: Emulated, kind: str, most: int) -> None:
    library.processors = 1
    for number, launches in ((most, 1), (most + 1, 2)):
        segments = torch.tensor([(one, one + 1, kernels.BLOCK * one) for one in range(number)])
        exponents = torch.zeros(number, dtype=torch.int16)
        of_list(library, kind, segments, torch.ones(number, dtype=torch.int64), torch.ones(number), exponents)
        assert library.counted[2] == launches


def test_all_kernels_are_run_at_the_start(library: Emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that is loaded later, while a collective waits for its peers on the device, can hang the host."""
    with monkeypatch.context() as patched:
        patched.setattr(dispatch, "kernels", lambda _device: library)
        library.forget_kernels()
        kernels.start(torch.device("cpu"))
    started = library.forget_kernels()
    for case in cases(1):
        case.draw()(library)
    assert started == library.forget_kernels()


def main(each: int) -> None:
    """Print what was run, and what finds each mutant."""
    with tempfile.TemporaryDirectory() as folder:
        library = Emulated(emulation.build(Path(folder)))
        run, wrong = Counter[str](), 0
        for case in cases(each, full=True):
            run[case.name.split()[0]] += 1
            if found := differences(library, case):
                wrong += 1
                print(f"{case}: {found}")
        print(f"seed {SEED}: {dict(run)}, {sum(run.values())} cases in all, {wrong} of them wrong")
    with tempfile.TemporaryDirectory() as folder:
        mutants = Emulated(emulation.build(Path(folder), MUTANTS))
        for number, mutant in enumerate(MUTANTS, 1):
            print(f"{mutant.name}: {found_by(mutants, number, 12) or 'not found'}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)

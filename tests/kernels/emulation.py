"""kernels/cuda.cu compiled as C++ and run by tests/kernels/emulated/emulator.cpp, in the place of a CUDA library.

A call queues its kernels; then everything on the host that it was given is overwritten, as an asynchronous launch may
see it; then the kernels run. Tensors of the call are the only memory that they may touch.
"""

from __future__ import annotations

import ctypes
import mmap
import re
import shutil
import subprocess
from collections.abc import Sequence
from ctypes import c_char_p, c_int, c_int64, c_size_t, c_uint64, c_void_p, memset, sizeof
from pathlib import Path
from typing import Any, NamedTuple

import torch

from spare_megatron.kernels import native
from spare_megatron.kernels.reference import KernelAdd

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent / "emulated"
SOURCE = ROOT / "kernels" / "cuda.cu"
COMPILER = "g++"
FLAGS = ("-std=c++17", "-O1", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-w", "-fvisibility=hidden")
CHECKED = ("-fsanitize=thread,undefined", "-fno-sanitize=vptr,return,nonnull-attribute,returns-nonnull-attribute")
_LAUNCH = re.compile(r"(\w+(?:<[\w, ]+>)?)<<<(.+?), kThreads, 0, \w+>>>\(", re.DOTALL)


class Mutant(NamedTuple):
    """A fault that is put into cuda.cu: an expression that becomes another one."""

    name: str
    behind: str
    """What occurs once in the file; the expression is the first one of its kind behind it."""
    was: str
    becomes: str
    soonest: str = ""
    """The function whose cases find it: they are run before all others."""


def available() -> bool:
    """Whether there is a compiler whose code the emulator can look at."""
    return shutil.which(COMPILER) is not None


def as_cpp(source: str) -> str:
    """Launches as calls of objects that hold their arguments."""
    parts: list[str] = []
    at = 0
    for found in _LAUNCH.finditer(source):
        end, depth = found.end(), 1
        while depth:
            depth += {"(": 1, ")": -1}.get(source[end], 0)
            end += 1
        arguments = source[found.end() : end - 1]
        parts += [
            source[at : found.start()],
            f"emulated::Launch{{unsigned({found[2]}), kThreads}}",
            f"(holding([](const auto&... given) {{ {found[1]}(given...); }}, {arguments}))",
        ]
        at = end
    parts.append(source[at:])
    return "".join(parts).replace(
        "namespace {\n",
        """#include <tuple>
namespace {
template <class Kernel, class... Given>
auto holding(Kernel kernel, Given... given) {
  return [=] { kernel(given...); };
}
""",
        1,
    )


def mutated(source: str, mutants: Sequence[Mutant]) -> str:
    """``source`` with all of ``mutants``, of which the emulator chooses one."""
    for number, mutant in enumerate(mutants, 1):
        assert source.count(mutant.behind) == 1, f"{mutant.behind!r} occurs {source.count(mutant.behind)} times"
        at = source.index(mutant.was, source.index(mutant.behind))
        choice = f"(emulated::mutant() == {number} ? ({mutant.becomes}) : ({mutant.was}))"
        source = source[:at] + choice + source[at + len(mutant.was) :]
    return source


def mapped(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in pages of its own, high in the address space. The heap is below 2 GiB where the interpreter is not
    position-independent, as that of Debian, and what lies 16 GiB before it has no address."""
    copy = torch.frombuffer(mmap.mmap(-1, tensor.nbytes), dtype=tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor)


class Far:
    """A tensor of ``count`` elements of which only the last ones exist, in ``window``, which is :func:`mapped`."""

    def __init__(self, window: torch.Tensor, count: int) -> None:
        self.window, self._count = window, count
        self.dtype, self.device = window.dtype, window.device

    def data_ptr(self) -> int:
        return self.window.data_ptr() - (self._count - self.window.numel()) * self.window.itemsize

    def numel(self) -> int:
        return self._count


def build(folder: Path, mutants: Sequence[Mutant] = ()) -> Path:
    """Compile cuda.cu for the emulator; returns the library."""
    unit, library = folder / "cuda.cpp", folder / "emulated.so"
    unit.write_text(as_cpp(mutated(SOURCE.read_text(), mutants)))
    include = (f"-I{HERE}", f"-I{SOURCE.parent}")
    for file, flags in ((unit, CHECKED), (HERE / "emulator.cpp", ())):
        command = [COMPILER, *FLAGS, *flags, *include, "-c", str(file), "-o", str(folder / f"{file.stem}.o")]
        subprocess.run(command, check=True, capture_output=True, text=True)
    objects = [str(folder / f"{file.stem}.o") for file in (unit, HERE / "emulator.cpp")]
    subprocess.run([COMPILER, "-shared", "-o", str(library), *objects], check=True, capture_output=True, text=True)
    return library


class FaultError(Exception):
    """What the emulator found."""


class Emulated(native.Library):
    """The library, with the interface of :class:`native.CudaLibrary`. Each call is run to its end."""

    _prefix = "spare_cuda_"
    _last = c_void_p

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.seed, self.processors, self.mutant = 0, 3, 0
        self.only: tuple[int, int] | None = None
        """The blocks of a grid that are run; None: all."""
        self.counted = (0, 0, 0)
        """Bytes read and written, and launches, of the last call."""
        self._written: Sequence[torch.Tensor | None] = ()
        self._read: Sequence[torch.Tensor | None] = ()
        self._library.emulated_run.restype = c_char_p
        self._library.emulated_begin.argtypes = (c_uint64, c_int, c_int)
        self._library.emulated_buffer.argtypes = (c_void_p, c_size_t, c_int)
        self._library.emulated_only.argtypes = (c_int64, c_int64)

    def forget_kernels(self) -> int:
        """How many kernels were launched, with each choice of their types, since the last call of this method."""
        return int(self._library.emulated_forget_kernels())

    def call(self, name: str, device: torch.device, *arguments: Any) -> int:
        library = self._library
        self.seed += 1
        library.emulated_begin(self.seed, self.processors, self.mutant)
        for writable, tensors in enumerate((self._read, self._written)):
            for one in tensors:
                if one is not None:
                    there = getattr(one, "window", one)
                    library.emulated_buffer(there.data_ptr(), there.nbytes, writable)
        if self.only is not None:
            library.emulated_only(*self.only)
        error = int(getattr(library, self._prefix + name)(*arguments, None))
        assert error == 0
        for one in arguments:
            _overwrite(one)
        if fault := library.emulated_run().decode():
            raise FaultError(f"{name}: {fault}")
        counts = [c_uint64() for _ in range(3)]
        library.emulated_counts(*map(ctypes.byref, counts))
        self.counted = (counts[0].value, counts[1].value, counts[2].value)
        return 0

    def adder(self, accumulator: torch.Tensor, first_index: int, bound_bits: int, report: torch.Tensor) -> KernelAdd:
        def add(
            source: torch.Tensor, exponents: int | torch.Tensor, other: torch.Tensor | None = None, *rest: bool
        ) -> None:
            self._read = (source, other, None if isinstance(exponents, int) else exponents)
            self._written = (accumulator, report)
            run = super(Emulated, self).adder(accumulator, first_index, bound_bits, report)  # its arguments are used up
            run(source, exponents, other, *rest)

        return add

    def checksums(self, values: torch.Tensor, segments: torch.Tensor, sums: torch.Tensor) -> None:
        self._read, self._written = (values,), (sums,)
        table = segments.clone()
        kind = native._ELEMENTS[values.dtype]
        array = (c_int64 * table.numel()).from_address(table.data_ptr())
        self.call("checksums", values.device, values.data_ptr(), kind, array, len(table), sums.data_ptr())

    def convert(
        self,
        segments: torch.Tensor,
        exponents: torch.Tensor,
        start: int,
        sums: torch.Tensor,
        addend: torch.Tensor | None,
        destination: torch.Tensor,
        found: torch.Tensor | None,
    ) -> None:
        self._read, self._written = (sums, addend, exponents), (destination, found)
        super().convert(segments.clone(), exponents, start, sums, addend, destination, found)

    def finalize(
        self,
        segments: torch.Tensor,
        total: torch.Tensor,
        destination: torch.Tensor,
        divisor: float,
        peaks: torch.Tensor,
    ) -> None:
        self._read, self._written = (total,), (destination, peaks)
        super().finalize(segments.clone(), total, destination, divisor, peaks)

    def digest_sums(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        sums = torch.zeros(len(parts), 2, dtype=torch.int64)
        self._read, self._written = tuple(parts), (sums,)
        sizes = (c_int64 * len(parts))(*[part.nbytes for part in parts])
        self.call("digests", sums.device, native._addresses(parts), sizes, len(parts), sums.data_ptr())
        return sums

    def largest(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        top = torch.zeros(1, dtype=torch.int32)
        self._read, self._written = tuple(parts), (top,)
        addresses, counts = native._addresses(parts), native._counts(parts)
        self.call("largest", top.device, addresses, counts, len(parts), top.data_ptr())
        return top

    def squares(self, parts: Sequence[torch.Tensor], exponent: int) -> torch.Tensor:
        sums = torch.zeros(2, dtype=torch.int64)
        self._read, self._written = tuple(parts), (sums,)
        addresses, counts = native._addresses(parts), native._counts(parts)
        self.call("squares", sums.device, addresses, counts, len(parts), exponent, sums.data_ptr())
        return sums


def _overwrite(argument: Any) -> None:
    """Put other bytes where a structure or an array of the host was, and where its table of segments was."""
    if isinstance(argument, (int, float, type(None))):
        return
    thing = getattr(argument, "_obj", argument)  # what byref points to
    for tensor in (getattr(thing, "tensors", None) or ())[:1]:
        tensor.fill_(1 << 40)
    memset(ctypes.addressof(thing), 0xA5, sizeof(thing))

"""Bad input is refused by name; a missing compiler or a library of another version is reported in one sentence."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from spare_megatron import kernels
from spare_megatron.config.errors import ConfigError
from spare_megatron.kernels import dispatch, native
from tests.kernels.conftest import library

ROOT = Path(__file__).resolve().parents[2]
N = 64


def ints(count: int = N, dtype: torch.dtype = torch.int64, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(count, dtype=dtype, device=device)


def misaligned() -> torch.Tensor:
    """fp32 at an odd address: a view that only another library could hand over."""
    from_bytes = torch.frombuffer(bytearray(4 * N + 8), dtype=torch.float32, count=N, offset=1)
    assert from_bytes.data_ptr() % 4 != 0
    return from_bytes


def accumulate(**changed: object) -> None:
    arguments = {
        "source": torch.zeros(N),
        "accumulator": ints(),
        "exponents": 3,
        "first_index": 0,
        "bound_bits": 50,
        "report": ints(2),
    }
    kernels.accumulate(**{**arguments, **changed})


def checksums(**changed: object) -> None:
    arguments = {"values": ints(), "segments": torch.tensor([(0, N, 0)]), "sums": ints(1)}
    kernels.checksums(**{**arguments, **changed})


def converter(**changed: object) -> kernels.Converter:
    arguments = {"segments": torch.tensor([(0, 10, 0), (20, N, 1024)]), "exponents": ints(2, torch.int16)}
    return kernels.Converter(**{**arguments, **changed})


def convert(**changed: object) -> None:
    arguments = {
        "start": 0,
        "sums": ints(),
        "addend": ints(),
        "destination": torch.zeros(N),
        "found": ints(4).view(2, 2),
    }
    converter().convert(**{**arguments, **changed})


def finalize(**changed: object) -> None:
    arguments = {"total": torch.zeros(N), "destination": torch.zeros(N), "divisor": 2.0, "peaks": ints(1, torch.int32)}
    kernels.finalize(**{**arguments, **changed})


def finalizer(*table: tuple[int, ...]) -> kernels.Finalizer:
    return kernels.Finalizer(torch.tensor(table), ints(2, torch.int32))


REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: accumulate(source=torch.zeros(N, dtype=torch.float64)), "source is torch.float64"),
    (lambda: accumulate(accumulator=ints(dtype=torch.int32), bound_bits=30), "an int32 accumulator one for each block"),
    (lambda: accumulate(source=torch.zeros(2 * N)[::2]), "source has shape .* flat, contiguous"),
    (lambda: accumulate(source=torch.zeros(8, 16)[:, ::2]), "source has shape"),
    (lambda: accumulate(source=misaligned()), "source at address .* is not aligned to its 4 bytes"),
    (lambda: accumulate(accumulator=ints(N + 1)), "source has 64 elements; give 65"),
    (lambda: accumulate(report=ints(1)), "report has 1 element; give 2"),
    (lambda: accumulate(source=torch.zeros(N, device="meta")), "source is on meta, the other tensors on cpu"),
    (lambda: accumulate(exponents=801), "exponent 801 is not within"),
    (lambda: accumulate(bound_bits=63), "bound_bits 63 is not within 1..62"),
    (lambda: accumulate(first_index=-1), "first_index -1"),
    (lambda: accumulate(other=torch.zeros(N, dtype=torch.bfloat16)), "other is torch.bfloat16; give torch.float32"),
    (lambda: accumulate(other=torch.zeros(N + 1)), "other has 65 elements; give 64"),
    (lambda: accumulate(other=torch.zeros(8, 16)[:, ::2]), "other has shape"),
    (lambda: accumulate(other=misaligned()), "other at address .* is not aligned to its 4 bytes"),
    (lambda: accumulate(other=torch.zeros(N, device="meta")), "other is on meta, the other tensors on cpu"),
    (
        lambda: accumulate(accumulator=(sums := ints()), other=sums.view(torch.float32)[N:]),
        "other and accumulator share memory; give separate buffers",
    ),
    (lambda: kernels.largest([]), "no tensor was given; give at least one"),
    (lambda: kernels.squares([torch.zeros(N), ints()], 0), "a tensor is torch.int64; give torch.float32"),
    (lambda: kernels.squares([torch.zeros(8, 8)], 0), "a tensor has shape"),
    (lambda: kernels.squares([torch.zeros(N)], 201), "exponent 201 is not within -200..200"),
    (lambda: checksums(values=torch.zeros(N)), "values is torch.float32"),
    (lambda: checksums(segments=torch.tensor([(0, N + 1, 0)])), "segment 0..65 is not within the 64 values"),
    (lambda: checksums(segments=torch.tensor([(5, 4, 0)])), "segment 5..4 is not within"),
    (lambda: checksums(segments=torch.tensor([(0, N, -1)])), "first_index -1"),
    (lambda: checksums(segments=ints(3)), r"is torch.int64 \(3,\); give a contiguous int64 tensor \[segments, 3\]"),
    (lambda: checksums(segments=torch.zeros(1, 3, dtype=torch.int64, device="meta")), "segments is on meta"),
    (lambda: checksums(sums=ints(2)), "sums has 2 elements; give 1"),
    (lambda: converter(exponents=ints(2)), "exponents is torch.int64; give torch.int16"),
    (lambda: converter(segments=torch.tensor([(0, 5, 0), (4, 9, 1024)])), "segment 4..9 begins before 5, where"),
    (lambda: converter(segments=torch.tensor([(0, 5, 0), (-2, 9, 1024)])), "segment -2..9 is not within"),
    (
        lambda: converter(segments=torch.tensor([(0, 1025, 1024)])),
        "segment 0..1025 ends at index 2049, but 2 exponents are for 2048 indices",
    ),
    (lambda: converter(segments=ints(3)), r"give a contiguous int64 tensor \[segments, 3\]"),
    (lambda: convert(start=-1), "start -1 is not within"),
    (lambda: convert(sums=torch.zeros(N)), "sums is torch.float32; give torch.int64 or torch.int32"),
    (lambda: convert(sums=ints(device="meta")), "sums is on meta, the other tensors on cpu"),
    (lambda: convert(addend=ints(dtype=torch.int32)), "addend is torch.int32; give torch.int64"),
    (lambda: convert(addend=ints(N - 1)), "addend has 63 elements; give 64"),
    (lambda: convert(destination=torch.zeros(N, dtype=torch.bfloat16)), "destination is torch.bfloat16"),
    (lambda: convert(destination=misaligned()), "destination at address .* is not aligned"),
    (lambda: convert(sums=(shared := ints()), destination=shared.view(torch.float32)[:N]), "sums and destination"),
    (lambda: convert(addend=(shared := ints()), destination=shared.view(torch.float32)[N:]), "addend and destination"),
    (lambda: convert(found=ints(4)), r"found is torch.int64 \(4,\); give a contiguous int64 tensor \[2, 2\]"),
    (lambda: convert(found=ints(4, torch.int32).view(2, 2)), r"found is torch.int32 \(2, 2\)"),
    (lambda: converter().compiled(torch.int64, ints(6).view(3, 2)), r"found is torch.int64 \(3, 2\)"),
    (lambda: finalize(total=ints()), "total is torch.int64; give torch.float32"),
    (lambda: finalize(destination=torch.zeros(N, dtype=torch.float16)), "destination is torch.float16"),
    (lambda: finalize(divisor=0.0), "divisor 0.0"),
    (lambda: finalize(divisor=float("nan")), "divisor nan"),
    (lambda: finalize(peaks=ints(1)), "peaks is torch.int64; give torch.int32"),
    (lambda: finalize(first_index=1000), "peaks has 1 element; give 2"),
    (lambda: finalize(first_index=-1), "first_index -1"),
    (lambda: finalize(destination=torch.zeros(N + 1)), "destination has 65 elements; give 64"),
    (lambda: finalizer((0, 5, 0)), r"give a contiguous int64 tensor \[segments, 4\]"),
    (lambda: finalizer((5, 4, 0, 0)), "segment 5..4 to 0 begins before the tensors, or ends before it begins"),
    (lambda: finalizer((0, 4, -1, 0)), "segment 0..4 to -1 begins before the tensors"),
    (lambda: finalizer((0, 4, 0, -1)), "first_index -1"),
    (lambda: finalizer((0, 1025, 0, 1024)), "segment 0..1025 ends at index 2049, but 2 peaks are for 2048 indices"),
    (
        lambda: finalizer((1, N + 1, 0, 0)).finalize(torch.zeros(N), torch.zeros(N), 2.0),
        "total has 64 elements, but its segments end at 65",
    ),
    (
        lambda: finalizer((0, N, 1, 0)).finalize(torch.zeros(N), torch.zeros(N), 2.0),
        "destination has 64 elements, but its segments end at 65",
    ),
    (lambda: finalize(total=(shared := torch.zeros(N)), destination=shared), "share memory"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_another_version_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    path = library().path
    monkeypatch.setattr(native, "VERSION", native.VERSION + 1)
    with pytest.raises(ConfigError, match=rf"{path.name} has kernels of version .* pip install -e"):
        native.CpuLibrary(path)


def test_without_a_library_torch_does_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "find", lambda name: None)
    dispatch._found.cache_clear()
    try:
        assert kernels.implementation() == f"torch: {kernels.why_slow('cpu')}"
        assert kernels.why_slow("cpu").startswith("no native kernels for cpu were built (install a C++ compiler")
        assert "about 20 times as long" in kernels.why_slow("cpu")
        report = ints(2)
        accumulate(source=torch.ones(N), report=report)
        assert int(report[0]) != 0
        assert converter().compiled(torch.int64, ints(4).view(2, 2)) is None
    finally:
        dispatch._found.cache_clear()


def test_without_a_compiler_the_build_says_so_and_ends_well(tmp_path: Path) -> None:
    arguments = ["build_ext", "--build-lib", str(tmp_path / "lib"), "--build-temp", str(tmp_path / "temp")]
    environment = {**os.environ, "CXX": str(tmp_path / "no-such-compiler"), "NVCC": str(tmp_path / "no-such-nvcc")}
    done = subprocess.run(
        [sys.executable, "setup.py", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert "kernels._native was not built" in done.stderr
    assert "protocol._chains was not built" in done.stderr
    assert "collectives._ring was not built" in done.stderr
    assert "Install a C++ compiler, or set CXX" in done.stderr
    assert not list(tmp_path.glob("**/*.so"))

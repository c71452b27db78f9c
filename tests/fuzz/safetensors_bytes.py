"""Fuzzes the bytes of safetensors files: ``python -m tests.fuzz.safetensors_bytes --seed S --minutes M``.

A good file is damaged once or twice: cut, lengthened, bytes changed, a value of its header replaced. The judge is the
package safetensors: what it reads must be read with the same bits; what it refuses must be refused in one sentence; and
what it reads may be refused only for the reasons of ``STRICTER``.
"""

from __future__ import annotations

import json
import struct
import tempfile
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

from tests.fuzz import Hang, patience
from tests.fuzz.searching import PATIENCE_S, Verdict, finish, search

STRICTER = ("which is not converted", "twice")
"""Types that no whole weight has; and names that occur twice, of which safetensors takes the last."""
TYPES = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL", "F8_E4M3", "U16", "C64", "f32", "")
SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}

NUMBERS = st.one_of(
    st.integers(-2, 70), st.sampled_from([2**31, 2**63, 2**64, 10**30, 1.0, 2.5, True, None, "4", [], {}, float("nan")])
)


@st.composite
def files(draw: st.DrawFn) -> bytes:
    """A good file of a few small tensors."""
    header: dict[str, Any] = {}
    if draw(st.booleans()):
        header["__metadata__"] = {"format": "pt"}
    at = 0
    for name in draw(st.lists(st.sampled_from(["a", "b.weight", "ä", "lm_head.weight", ""]), unique=True, max_size=4)):
        dtype = draw(st.sampled_from(list(SIZES)))
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        size = SIZES[dtype] * torch.Size(shape).numel()
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % draw(st.sampled_from([1, 8])))
    return struct.pack("<Q", len(text)) + text + draw(st.binary(min_size=at, max_size=at))


def with_header(data: bytes, text: bytes) -> bytes:
    length = int.from_bytes(data[:8], "little")
    return struct.pack("<Q", len(text)) + text + data[8 + length :]


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    data = draw(files())
    for _ in range(draw(st.integers(0, 2))):
        data = draw(_damage(data))
    return data


@st.composite
def _damage(draw: st.DrawFn, data: bytes) -> bytes:
    kind = draw(st.sampled_from(["cut", "longer", "bytes", "length", "value", "value", "value", "text", "twice"]))
    length = int.from_bytes(data[:8], "little")
    text = data[8 : 8 + length]
    if kind == "cut":
        return data[: draw(st.integers(0, len(data)))]
    if kind == "longer":
        return data + draw(st.binary(min_size=1, max_size=9))
    if kind == "length":
        return struct.pack("<Q", draw(st.integers(0, 2**64 - 1)) if draw(st.booleans()) else length + 1) + data[8:]
    if kind == "bytes" and data:
        place = draw(st.integers(0, min(len(data), 8 + length) - 1 if draw(st.booleans()) else len(data) - 1))
        return data[:place] + draw(st.binary(min_size=1, max_size=1)) + data[place + 1 :]
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        return data
    if not isinstance(header, dict):
        return data
    if kind == "text":
        other = draw(
            st.sampled_from([b"", b"{}", b"[]", b"null", b"[" * 5000, b'{"a":1}', b'{"a":{}}', b"\xff", b" {}"])
        )
        return with_header(data, other)
    names = [name for name, row in header.items() if isinstance(row, dict) and "shape" in row]
    if not names:
        return data
    name = draw(st.sampled_from(names))
    if kind == "twice":
        row = json.dumps({name: header[name]})
        return with_header(data, text.rstrip()[:-1] + b"," + row[1:].encode())
    row = header[name]
    what = draw(st.sampled_from(["dtype", "shape", "offset", "extra", "less", "row", "numbers"]))
    if what == "dtype":
        row["dtype"] = draw(st.one_of(st.sampled_from(TYPES), NUMBERS))
    elif what == "shape":
        row["shape"] = draw(st.one_of(st.lists(NUMBERS, max_size=4), NUMBERS))
    elif what == "offset" and isinstance(row.get("data_offsets"), list) and row["data_offsets"]:
        place = draw(st.integers(0, len(row["data_offsets"]) - 1))
        row["data_offsets"][place] = draw(NUMBERS)
    elif what == "numbers":
        row["data_offsets"] = draw(st.one_of(st.lists(NUMBERS, max_size=3), NUMBERS))
    elif what == "extra":
        row["more"] = 1
    elif what == "less":
        row.pop(draw(st.sampled_from(sorted(row))))
    else:
        header[name] = draw(NUMBERS)
    return with_header(data, json.dumps(header).encode())


def theirs(path: Path) -> dict[str, torch.Tensor] | str:
    """The tensors that the package safetensors reads, or why it does not."""
    from safetensors import safe_open

    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except Exception as error:
        return str(error) or type(error).__name__


def ours(path: Path) -> dict[str, torch.Tensor] | str:
    """The tensors that we read, or our sentence."""
    from spare_megatron.checkpoint.convert.safetensors_file import tensors_of

    try:
        return {name: stored.read() for name, stored in tensors_of(path).items()}
    except ValueError as error:
        return str(error)


def judge(data: bytes, path: Path) -> Verdict:
    path.write_bytes(data)
    expected = theirs(path)
    try:
        with patience(PATIENCE_S):
            found = ours(path)
    except Hang:
        return Verdict("hang", "no answer")
    except Exception as error:
        return Verdict("traceback", f"{type(error).__name__}: {error}")
    if isinstance(found, str):
        if "\n" in found or str(path) not in found or "fetch it again" not in found:
            return Verdict("refused", f"no sentence: {found!r}")
        if not isinstance(expected, str) and not any(reason in found for reason in STRICTER):
            return Verdict("refused", f"a good file is refused: {found}")
        return Verdict("refused")
    if isinstance(expected, str):
        return Verdict("accepted", f"safetensors refuses it: {expected}")
    if found.keys() != expected.keys():
        return Verdict("accepted", f"names {sorted(found)} instead of {sorted(expected)}")
    for name, tensor in found.items():
        other = expected[name]
        if (tensor.dtype, tensor.shape) != (other.dtype, other.shape):
            return Verdict(
                "accepted", f"{name} is {tensor.dtype} {tuple(tensor.shape)}, not {other.dtype} {other.shape}"
            )
        if tensor.numel() and not torch.equal(*(one.flatten().view(torch.uint8) for one in (tensor, other))):
            return Verdict("accepted", f"{name} has other bits")
    return Verdict("accepted")


def run(seed: int, minutes: float) -> list[str]:
    """Search for that long; returns what was found."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        found, counts = search("safetensors_bytes", damaged(), lambda data: judge(data, path), seed, minutes)
    assert counts["accepted"], "no file was accepted, so nothing was compared"
    assert counts["refused"], "no file was refused, so nothing was damaged"
    return found


if __name__ == "__main__":
    finish(run)

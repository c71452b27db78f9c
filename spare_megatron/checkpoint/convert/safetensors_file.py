"""Reads and writes files in the safetensors format, one tensor at a time.

The format: 8 bytes of length (little endian), that many bytes of JSON (name -> dtype, shape, data_offsets), then the
tensors' bytes without gaps. The package safetensors writes a file from tensors that are all in memory; :func:`write`
asks for each tensor when it is to be written.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
HEADER_BYTES_MAX = 100_000_000
"""The limit of the package safetensors."""
_WORDS = {dtype: word for word, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Stored:
    """One tensor of a file: ``offset`` and ``size`` of its data are in bytes."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    size: int

    def read(self, index: int | None = None) -> torch.Tensor:
        """Its values, or those at an index of its first axis, in memory of their own."""
        size, shape = (self.size, self.shape) if index is None else (self.size // self.shape[0], self.shape[1:])
        data = bytearray(size)
        with self.path.open("rb") as file:
            file.seek(self.offset + size * (index or 0))
            if file.readinto(data) != size:
                raise OSError(f"{self.path} is shorter than its header says")
        if not data:
            return torch.empty(shape, dtype=self.dtype)
        return torch.frombuffer(data, dtype=self.dtype).reshape(shape)


def tensors_of(path: Path) -> dict[str, Stored]:
    """The tensors of a file, by name, without their values. ValueError, before any value is read, when the file is
    damaged: its size, and the places of its tensors, must be those that its header says. OSError as from any file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, HEADER_BYTES_MAX):
            raise ValueError(
                f"{path} has {size} bytes, but a safetensors file that begins so has a header of {length} bytes: it is "
                "cut or of another format; fetch it again"
            )
        text = file.read(length)
    found: dict[str, Stored] = {}
    try:
        header = json.loads(text.decode(), object_pairs_hook=_once)
        if not isinstance(header, dict):
            raise ValueError("it is no object of names")
        for name, row in header.items():
            if name != "__metadata__":
                found[name] = _stored(path, name, row, 8 + length)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{path} has a damaged header ({reason}); fetch it again") from None
    at, last = 8 + length, "the header"
    for name, stored in sorted(found.items(), key=lambda item: (item[1].offset, item[1].size)):
        if stored.offset != at:
            raise ValueError(
                f"{path} has {name} at byte {stored.offset}, but {last} ends at {at}: the header is damaged; "
                "fetch it again"
            )
        at, last = at + stored.size, name
    if size != at:
        raise ValueError(
            f"{path} has {size} bytes, but its header says {at}: it is {'cut' if size < at else 'too long'}; "
            "fetch it again"
        )
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of the header, whose names must all differ."""
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it has {next(name for name in names if names.count(name) > 1)!r} twice")
    return made


def _stored(path: Path, name: str, row: Any, origin: int) -> Stored:
    """What one row of the header says; ValueError where it contradicts itself."""
    if not isinstance(row, dict) or not row.keys() >= {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name} has no dtype, shape and data_offsets")
    dtype, shape, offsets = row["dtype"], row["shape"], row["data_offsets"]
    if not _counts(shape) or not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"{name} has shape {str(shape)[:60]} and data_offsets {str(offsets)[:60]}")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{name} has dtype {str(dtype)[:60]}, which is not converted; {', '.join(DTYPES)} are")
    size, wanted = offsets[1] - offsets[0], DTYPES[dtype].itemsize * math.prod(shape)
    if size != wanted:
        raise ValueError(f"{name} has {size} bytes, but {dtype} {shape} needs {wanted}")
    return Stored(path, DTYPES[dtype], tuple(shape), origin + offsets[0], size)


def _counts(value: Any) -> bool:
    """Whether it is a list of whole numbers that a file can have."""
    return isinstance(value, list) and all(type(one) is int and 0 <= one < 1 << 63 for one in value)


def write(
    path: Path, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], value: Callable[[str], torch.Tensor]
) -> int:
    """Write a file of ``tensors`` (name -> dtype, shape), whose values come from ``value(name)``, called in order.

    Returns the number of bytes of the tensors' data. ValueError when a value has another dtype or shape.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        size = dtype.itemsize * torch.Size(shape).numel()
        header[name] = {"dtype": _WORDS[dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, (dtype, shape) in tensors.items():
            tensor = value(name).contiguous()
            if tensor.dtype != dtype or tuple(tensor.shape) != tuple(shape):
                raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, but must be {dtype} {shape}")
            file.write(tensor.view(torch.uint8).numpy().data if tensor.numel() else b"")
    return offset

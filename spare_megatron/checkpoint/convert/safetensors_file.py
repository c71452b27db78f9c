"""Reads and writes files in the safetensors format, one tensor at a time.

The format: 8 bytes of length (little endian), that many bytes of JSON (name -> dtype, shape, data_offsets), then the
tensors' bytes without gaps. The package safetensors writes a file from tensors that are all in memory; :func:`write`
asks for each tensor when it is to be written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

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
_WORDS = {dtype: word for word, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Stored:
    """One tensor of a file: ``offset`` and ``size`` of its data are in bytes."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    size: int

    def read(self) -> torch.Tensor:
        """Its values, in memory of their own."""
        data = bytearray(self.size)
        with self.path.open("rb") as file:
            file.seek(self.offset)
            if file.readinto(data) != self.size:
                raise OSError(f"{self.path} is shorter than its header says")
        if not data:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.frombuffer(data, dtype=self.dtype).reshape(self.shape)


def tensors_of(path: Path) -> dict[str, Stored]:
    """The tensors of a file, by name, without their values. ValueError or OSError when the file is damaged."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            raise ValueError(f"{path} is not a safetensors file")
        header = json.loads(file.read(length))
    found = {}
    for name, row in header.items():
        if name == "__metadata__":
            continue
        if row["dtype"] not in DTYPES:
            raise ValueError(f"{path} has {name} with dtype {row['dtype']}, which is not supported")
        begin, end = row["data_offsets"]
        found[name] = Stored(path, DTYPES[row["dtype"]], tuple(row["shape"]), 8 + length + begin, end - begin)
    return found


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

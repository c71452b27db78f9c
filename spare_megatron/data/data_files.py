"""Checks the data files that the flags name before anything uses them.

A data file is a pair ``PREFIX.bin`` (tokens, one sequence after the other) and ``PREFIX.idx`` (a header, then the
sequences' lengths and offsets and the documents' ends), as megatron-core's IndexedDataset reads them. What is wrong
with a pair is reported here in one sentence; later it would be a stack trace out of a memory map. Needs numpy only.
"""

from __future__ import annotations

import struct
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy

from spare_megatron.config.errors import ConfigError
from spare_megatron.flags.blends import SPLITS, blends, split_shares

HEADER = b"MMIDIDX\x00\x00"
HEADER_BYTES = 34
"""Magic 9 bytes, version 8, dtype code 1, number of sequences 8, number of document ends 8."""
DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
TOKEN_DTYPES = ("uint8", "int8", "int16", "int32", "int64", "uint16")


@dataclass(frozen=True)
class DataFile:
    """A pair of files that passed :func:`check_file`; numbers are those of its index."""

    prefix: str
    dtype: str
    sequences: int
    tokens: int

    def largest_token(self, sampled_max: int = 1 << 20) -> int:
        """The largest token id in samples from the beginning, middle and end of the file; -1 for an empty file.

        At most about ``sampled_max`` tokens are read, a third from each place.
        """
        if self.tokens == 0:
            return -1
        tokens = numpy.memmap(f"{self.prefix}.bin", dtype=self.dtype, mode="r", shape=(self.tokens,))
        part = max(1, sampled_max // 3)
        starts = {0, max(0, self.tokens // 2 - part // 2), max(0, self.tokens - part)}
        return max(int(tokens[start : start + part].max()) for start in starts)


def file_identities(prefixes: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Prefix -> device and inode of its .bin now: a job that maps one goes on with it when another takes its name."""
    return {prefix: ((told := Path(f"{prefix}.bin").stat()).st_dev, told.st_ino) for prefix in prefixes}


def check_file(prefix: str) -> DataFile:
    """The pair of files of ``prefix``; ConfigError says what is wrong with it."""
    index, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    for path in (index, data):
        if not path.is_file():
            hint = "give the prefix without .bin" if prefix.endswith((".bin", ".idx")) else "give a prefix that exists"
            raise ConfigError(f"the data file {path} does not exist; {hint}, or make it with tools/preprocess_data.py")
    remake = "copy the file again or make it anew with tools/preprocess_data.py"
    try:
        with index.open("rb") as file:
            head = file.read(HEADER_BYTES)
            index_bytes = index.stat().st_size
            if head[:9] != HEADER:
                raise ConfigError(f"{index} is no index of a data file (its first bytes are {head[:9]!r}); {remake}")
            if len(head) < HEADER_BYTES:
                raise ConfigError(
                    f"{index} is cut off: it has {len(head)} of the {HEADER_BYTES} bytes of a header; {remake}"
                )
            version, code, sequences, documents = struct.unpack("<QBQQ", head[9:])
            dtype = DTYPES.get(code, "")
            if version != 1 or dtype not in TOKEN_DTYPES:
                raise ConfigError(
                    f"{index} has version {version} and dtype code {code}, which hold no tokens; {remake}"
                )
            expected = HEADER_BYTES + sequences * 12 + documents * 8
            if index_bytes < expected:
                raise ConfigError(
                    f"{index} is cut off: it has {index_bytes} bytes, but {sequences} sequences and {documents} "
                    f"document ends take {expected}; {remake}"
                )
            tokens = int(numpy.fromfile(file, dtype=numpy.int32, count=sequences).sum(dtype=numpy.int64))
        data_bytes = data.stat().st_size
    except OSError as error:
        raise ConfigError(
            f"the data file {error.filename} cannot be read: {error.strerror}; check its rights"
        ) from None
    expected = tokens * numpy.dtype(dtype).itemsize
    if data_bytes != expected:
        what = "cut off" if data_bytes < expected else "not the file of this index"
        raise ConfigError(
            f"{data} is {what}: it has {data_bytes} bytes, but its index counts {tokens} tokens of {dtype} = "
            f"{expected} bytes; {remake}"
        )
    return DataFile(prefix, dtype, sequences, tokens)


def check_split(file: DataFile, text: str) -> None:
    """ConfigError where --split ``text`` gives a data set a share above 0 that holds no document of ``file``.

    With such a share megatron-core would count epochs for ever.
    """
    shares, start = split_shares(text), 0.0
    for name, share in zip(SPLITS, shares, strict=True):
        first, end = round(start * file.sequences), round((start + share) * file.sequences)
        start += share
        if share > 0 and end <= first:
            without = ",".join(
                "0" if other == name else f"{value * 100:g}" for other, value in zip(SPLITS, shares, strict=True)
            )
            raise ConfigError(
                f"--split {text} leaves no document for {name}: {file.prefix} has {file.sequences} of them; "
                f"use --split {without} or more documents"
            )


def check_data(args: Namespace, vocab_size: int | None) -> list[DataFile]:
    """The data files that the flags name, checked; ``vocab_size`` None leaves token ids unchecked.

    ConfigError for the first file that is damaged, is empty, is too short for --split, or has a token id of
    ``vocab_size`` or above among those looked at. Cheap: it reads indices and about a million tokens of each file.
    """
    blend, per_split = blends(args)
    prefixes = [*(blend or ([], None))[0]]
    prefixes += [prefix for part in per_split or [] if part for prefix in part[0]]
    files = [check_file(prefix) for prefix in dict.fromkeys(prefixes)]
    for file in files:
        if file.tokens == 0:
            raise ConfigError(f"{file.prefix}.bin has no tokens; make it anew with tools/preprocess_data.py")
        if blend is not None:
            check_split(file, args.split)
        largest = file.largest_token()
        if vocab_size is not None and largest >= vocab_size:
            raise ConfigError(too_large(largest, vocab_size, f"{file.prefix}.bin"))
    return files


def too_large(token: int, vocab_size: int, where: str) -> str:
    """The error message for a token id outside the vocabulary."""
    return (
        f"{where} has token id {token}, but the tokenizer's vocabulary has {vocab_size} ids (0 to {vocab_size - 1}): "
        "the data was made with another tokenizer; use that one, or make the data anew with tools/preprocess_data.py"
    )

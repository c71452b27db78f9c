"""Checks the data files that the flags name before anything uses them.

A data file is a pair ``PREFIX.bin`` (tokens, one sequence after the other) and ``PREFIX.idx`` (a header, then the
sequences' lengths and offsets and the documents' ends), as megatron-core's IndexedDataset reads them. What is wrong
with a pair is reported here in one sentence; later it would be a stack trace out of a memory map. Needs numpy only.
"""

from __future__ import annotations

import struct
import zlib
from argparse import Namespace
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy
import numpy.typing

from spare_megatron.config.errors import ConfigError
from spare_megatron.flags.blends import SPLITS, blends, split_shares

HEADER = b"MMIDIDX\x00\x00"
HEADER_BYTES = 34
"""Magic 9 bytes, version 8, dtype code 1, number of sequences 8, number of document ends 8."""
DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
TOKEN_DTYPES = ("uint8", "int8", "int16", "int32", "int64", "uint16")


SEQUENCES_AT_ONCE = 1 << 20
"""So many entries of an index are in memory at a time."""
LOOKED_AT_MAX, LOOKED_AT_LEAST = 1 << 24, 1 << 20
"""Tokens of which the ids are looked at: in all files together, and at least in each."""
REMAKE = "copy the file again or make it anew with spare-preprocess"


@dataclass(frozen=True)
class TokenRange:
    """The least and the greatest token id among the tokens that were looked at; -1 and -1 where there are none."""

    least: int
    greatest: int
    looked_at: int
    checksum: int = field(default=0, compare=False)
    """Of the tokens that were looked at."""


@dataclass(frozen=True)
class DataFile:
    """A pair of files that passed :func:`check_file`; numbers are those of its index."""

    prefix: str
    dtype: str
    sequences: int
    tokens: int
    layout: int = field(default=0, compare=False)
    """Checksum of the lengths and the documents' ends: all of a pair that cached sample indices depend on."""
    content: int = field(default=0, compare=False)
    """Checksum of the tokens that :func:`check_data` has looked at."""

    def token_range(self, looked_at_max: int = LOOKED_AT_LEAST) -> TokenRange:
        """The range of all tokens, or of about ``looked_at_max`` of them from the beginning, middle and end of the file
        where there are more."""
        if self.tokens == 0:
            return TokenRange(-1, -1, 0)
        tokens = numpy.memmap(f"{self.prefix}.bin", dtype=self.dtype, mode="r", shape=(self.tokens,))
        part = max(1, looked_at_max // 3)
        starts = sorted({0, max(0, self.tokens // 2 - part // 2), max(0, self.tokens - part)})
        parts = [tokens] if self.tokens <= looked_at_max else [tokens[start : start + part] for start in starts]
        checksum = 0
        for one in parts:
            checksum = zlib.crc32(one.data, checksum)
        least, greatest = min(int(one.min()) for one in parts), max(int(one.max()) for one in parts)
        return TokenRange(least, greatest, sum(map(len, parts)), checksum)


def file_identities(prefixes: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Prefix -> device and inode of its .bin now: a job that maps one goes on with it when another takes its name."""
    return {prefix: ((reported := Path(f"{prefix}.bin").stat()).st_dev, reported.st_ino) for prefix in prefixes}


def check_file(prefix: str, offsets: bool = True) -> DataFile:
    """The pair of files of ``prefix``; ConfigError says what is wrong with it: its header, its sizes, or an entry of
    its index, which is read whole. ``offsets`` False: wrong byte offsets of sequences may be there."""
    index, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    for path in (index, data):
        if not path.is_file():
            hint = "give the prefix without .bin" if prefix.endswith((".bin", ".idx")) else "give a prefix that exists"
            raise ConfigError(f"the data file {path} does not exist; {hint}, or make it with spare-preprocess")
    try:
        with index.open("rb") as file:
            head = file.read(HEADER_BYTES)
            index_bytes = index.stat().st_size
            if head[:9] != HEADER:
                raise ConfigError(f"{index} is no index of a data file (its first bytes are {head[:9]!r}); {REMAKE}")
            if len(head) < HEADER_BYTES:
                raise ConfigError(
                    f"{index} is cut off: it has {len(head)} of the {HEADER_BYTES} bytes of a header; {REMAKE}"
                )
            version, code, sequences, documents = struct.unpack("<QBQQ", head[9:])
            dtype = DTYPES.get(code, "")
            if version != 1 or dtype not in TOKEN_DTYPES:
                raise ConfigError(
                    f"{index} has version {version} and dtype code {code}, which hold no tokens; {REMAKE}"
                )
            expected = HEADER_BYTES + sequences * 12 + documents * 8
            if index_bytes < expected:
                raise ConfigError(
                    f"{index} is cut off: it has {index_bytes} bytes, but {sequences} sequences and {documents} "
                    f"document ends take {expected}; {REMAKE}"
                )
            itemsize = numpy.dtype(dtype).itemsize
            tokens, layout = _checked_entries(index, sequences, documents, itemsize if offsets else None)
        data_bytes = data.stat().st_size
    except OSError as error:
        raise ConfigError(
            f"the data file {error.filename} cannot be read: {error.strerror}; check its rights"
        ) from None
    expected = tokens * itemsize
    if data_bytes != expected:
        what = "cut off" if data_bytes < expected else "not the file of this index"
        raise ConfigError(
            f"{data} is {what}: it has {data_bytes} bytes, but its index counts {tokens} tokens of {dtype} = "
            f"{expected} bytes; {REMAKE}"
        )
    return DataFile(prefix, dtype, sequences, tokens, layout)


def _checked_entries(index: Path, sequences: int, documents: int, itemsize: int | None) -> tuple[int, int]:
    """Number of tokens and checksum (``DataFile.layout``) of an index; ConfigError for an entry that megatron-core
    would believe. The offsets are checked where ``itemsize``, the bytes of a token, is given."""
    raw = numpy.memmap(index, numpy.uint8, "r")
    offsets_at = HEADER_BYTES + 4 * sequences
    ends_at = offsets_at + 8 * sequences
    lengths = numpy.frombuffer(raw, numpy.int32, sequences, HEADER_BYTES)
    found = numpy.frombuffer(raw, numpy.int64, sequences, offsets_at)
    ends = numpy.frombuffer(raw, numpy.int64, documents, ends_at)
    tokens = layout = 0
    for at in range(0, sequences, SEQUENCES_AT_ONCE):
        part = lengths[at : at + SEQUENCES_AT_ONCE]
        layout = zlib.crc32(part.data, layout)
        if int(part.min()) < 0:
            wrong = at + int((part < 0).argmax())
            raise ConfigError(f"{index}: sequence {wrong} has {lengths[wrong]} tokens; {REMAKE}")
        sums = numpy.cumsum(part, dtype=numpy.int64)
        if itemsize is not None:
            right = (sums - part + tokens) * itemsize
            differs = found[at : at + SEQUENCES_AT_ONCE] != right
            if differs.any():
                wrong = int(differs.argmax())
                raise ConfigError(
                    f"{index}: sequence {at + wrong} begins at byte {found[at + wrong]} of the .bin file, as it says, "
                    f"but the sequences before it take {right[wrong]} bytes: an older tool's numbers overflowed, or "
                    "the file is damaged; tools/merge_datasets.py with the pair's directory as --input writes them anew"
                )
        tokens += int(sums[-1])
    _check_ends(index, ends, sequences)
    return tokens, zlib.crc32(ends.data, layout)


def _check_ends(index: Path, ends: numpy.typing.NDArray[numpy.int64], sequences: int) -> None:
    """ConfigError where the documents' ends, as numbers of sequences, do not ascend from 0 to all of them."""
    if not len(ends) or ends[0] != 0:
        first = f"begin with {ends[0]}" if len(ends) else "are missing"
        raise ConfigError(f"{index}: the ends of documents {first}, but must begin with 0; {REMAKE}")
    falls = ends[1:] < ends[:-1]
    if falls.any():
        at = int(falls.argmax()) + 1
        raise ConfigError(
            f"{index}: document {at} ends before sequence {ends[at]}, and the one before it before sequence "
            f"{ends[at - 1]}, but ends must ascend; {REMAKE}"
        )
    if ends[-1] != sequences:
        raise ConfigError(
            f"{index}: the last document ends before sequence {ends[-1]}, but there are {sequences}: an end is missing "
            f"or the file is damaged; {REMAKE}"
        )


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

    ConfigError for the first file that is damaged, is empty, is too short for --split, or has a token id below 0 or of
    ``vocab_size`` or above among those looked at: all of them in files that are not large, see :func:`looked_at_max`.
    """
    blend, per_split = blends(args)
    prefixes = [*(blend or ([], None))[0]]
    prefixes += [prefix for part in per_split or [] if part for prefix in part[0]]
    files = [check_file(prefix) for prefix in dict.fromkeys(prefixes)]
    most = looked_at_max(len(files))
    for n, file in enumerate(files):
        if file.tokens == 0:
            raise ConfigError(f"{file.prefix}.bin has no tokens; make it anew with spare-preprocess")
        if blend is not None:
            check_split(file, args.split)
        found = file.token_range(most)
        if found.least < 0:
            raise ConfigError(below_zero(found.least, f"{file.prefix}.bin"))
        if vocab_size is not None and found.greatest >= vocab_size:
            raise ConfigError(too_large(found.greatest, vocab_size, f"{file.prefix}.bin"))
        files[n] = replace(file, content=found.checksum)
    return files


def data_identity(files: Sequence[DataFile], *, whole: bool) -> dict[str, str]:
    """What stands for the data of checked files, for a comparison with other ranks: whoever reads other tokens under
    the same names trains other samples, and nothing else shows it. Without ``whole`` some tokens may be brought later,
    and only the indices count."""
    return {
        f"the data of {file.prefix}": f"{file.tokens} tokens in {file.sequences} sequences, checksum "
        + (f"{file.layout:08x}{file.content:08x}" if whole else f"{file.layout:08x}")
        for file in files
    }


def looked_at_max(files: int) -> int:
    """Number of tokens of each of so many files of which the ids are looked at; in a larger file, so many from the
    beginning, middle and end."""
    return max(LOOKED_AT_LEAST, LOOKED_AT_MAX // max(1, files))


def looked_at(files: Sequence[DataFile]) -> list[str]:
    """What was looked at of each file that is not looked at as a whole."""
    most = looked_at_max(len(files))
    return [
        f"{file.prefix}.bin: the ids of about {most} of its {file.tokens} tokens were checked, from its beginning, "
        "middle and end, and its whole index"
        for file in files
        if file.tokens > most
    ]


def below_zero(token: int, where: str) -> str:
    """The error message for a negative token id."""
    return (
        f"{where} has token id {token}, but ids begin with 0: the tokenizer had no such token (an end that "
        "--append-eod asked for, perhaps); use one that has it, and make the data anew with spare-preprocess"
    )


def too_large(token: int, vocab_size: int, where: str) -> str:
    """The error message for a token id outside the vocabulary."""
    return (
        f"{where} has token id {token}, but the tokenizer's vocabulary has {vocab_size} ids (0 to {vocab_size - 1}): "
        "the data was made with another tokenizer; use that one, or make the data anew with spare-preprocess"
    )

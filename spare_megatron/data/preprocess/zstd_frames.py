"""Follows the frames of a zstandard file while it is read: zstandard's stream reader takes a file that ends inside a
frame for one that ends there.

The format is that of RFC 8878: frames and skippable frames, one after the other; a frame is a header, blocks, and a
checksum where its header says so. Blocks are passed over by their sizes, so a chunk of the file costs next to nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.plural import counted

MAGIC = b"\x28\xb5\x2f\xfd"
SKIPPABLE = b"\x2a\x4d\x18"
"""Bytes 1 to 3 of a skippable frame's magic number; byte 0 is 0x50 to 0x5f."""
FIX = "copy the file again, or compress it anew"


class CheckedFrames:
    """The bytes of an open zstandard file, for zstandard's stream reader; ConfigError where they are not whole frames,
    as soon as that is read."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file = path, file
        self._at = self._frames = 0
        self._skip, self._need, self._got = 0, 4, b""
        self._next = self._magic
        self._checksum = 0

    def read(self, size: int) -> bytes:
        """At most ``size`` bytes; none at the end of the file."""
        data = self._file.read(size)
        if data:
            self._follow(data)
        else:
            self._end()
        return data

    def _follow(self, data: bytes) -> None:
        at = 0
        while at < len(data):
            if self._skip:
                passed = min(self._skip, len(data) - at)
                self._skip -= passed
            else:
                passed = min(self._need - len(self._got), len(data) - at)
                self._got += data[at : at + passed]
                if len(self._got) == self._need:
                    got, self._got = self._got, b""
                    self._next(got)
            at += passed
            self._at += passed
        if self._next == self._magic and not self._skip:
            self._refuse_no_magic()

    def _magic(self, got: bytes) -> None:
        if got == MAGIC:
            self._frames += 1
            self._need, self._next = 1, self._descriptor
        elif got[0] >> 4 == 5 and got[1:] == SKIPPABLE:
            self._frames += 1
            self._need, self._next = 4, self._skippable
        else:
            self._refuse_junk(got)

    def _skippable(self, got: bytes) -> None:
        self._skip, self._need, self._next = int.from_bytes(got, "little"), 4, self._magic

    def _descriptor(self, got: bytes) -> None:
        flags = got[0]
        single = flags >> 5 & 1
        size = (0, 1, 2, 4)[flags & 3] + (single, 2, 4, 8)[flags >> 6] + (1 - single)
        self._checksum = 4 * (flags >> 2 & 1)
        self._skip, self._need, self._next = size, 3, self._block

    def _block(self, got: bytes) -> None:
        header = int.from_bytes(got, "little")
        repeated = header >> 1 & 3 == 1
        self._skip = 1 if repeated else header >> 3
        if header & 1:
            self._skip += self._checksum
            self._need, self._next = 4, self._magic

    def _end(self) -> None:
        between = self._next == self._magic and not self._skip
        if between and not self._got and self._frames:
            return
        number = self._frames + between
        raise ConfigError(
            f"{self._path} is cut off: it ends at byte {self._at}, inside its zstandard frame number {number}; {FIX}"
        )

    def _refuse_no_magic(self) -> None:
        """Refuse the first bytes of what may be another frame where no magic number begins so: zstandard would."""
        got = self._got
        if not MAGIC.startswith(got) and not (got[0] >> 4 == 5 and SKIPPABLE.startswith(got[1:])):
            self._refuse_junk(got)

    def _refuse_junk(self, got: bytes) -> None:
        if not self._frames:
            raise ConfigError(
                f"{self._path} is not in zstandard's format: it begins with the bytes {got.hex(' ')}; give it the "
                "ending of what it is, or compress it"
            )
        raise ConfigError(
            f"{self._path} has the bytes {got.hex(' ')} behind {counted(self._frames, 'whole zstandard frame')}, where "
            f"only another frame may follow; {FIX}"
        )

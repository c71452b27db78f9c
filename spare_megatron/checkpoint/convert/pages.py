"""Gives back the memory of tensors that lie in mapped files.

Every page of a mapped file that was touched counts as this process's memory until the system needs it for something
else: a conversion that reads or writes one tensor at a time would end with the whole model in its resident set.
"""

from __future__ import annotations

import ctypes
import mmap

import torch

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def release(tensor: torch.Tensor) -> None:
    """Give back the pages of a contiguous ``tensor`` that ``torch.load(mmap=True)`` mapped: never of another one.

    It stays valid. Its next use reads the file again; what was written through a shared mapping is in the file, what
    was written to a private one is lost. OSError from the system.
    """
    begin = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    size = tensor.data_ptr() + tensor.nbytes - begin
    if tensor.nbytes and _LIBC.madvise(begin, size, mmap.MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), "madvise refuses to give pages back")

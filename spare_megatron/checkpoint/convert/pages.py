"""Releases the memory of tensors in memory-mapped files.

Every touched page of a mapped file counts as this process's memory until the system reclaims it. Without a release, a
conversion that reads or writes one tensor at a time would end with the whole model in its resident set.
"""

from __future__ import annotations

import ctypes
import mmap

import torch

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def release(tensor: torch.Tensor) -> None:
    """Release the pages of a contiguous ``tensor`` that ``torch.load(mmap=True)`` mapped; call it for no other tensor.

    The tensor stays valid: its next use reads the file again. What was written through a shared mapping is in the file,
    what was written to a private mapping is lost. OSError when the system refuses.
    """
    begin = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    size = tensor.data_ptr() + tensor.nbytes - begin
    if tensor.nbytes and _LIBC.madvise(begin, size, mmap.MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), "madvise refuses to release pages")

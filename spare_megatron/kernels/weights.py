"""The fixed pseudo-random weights of checksums and digests; the native libraries compute the same.

The checksum of integers x is c(x) = sum of w_i x_i mod 2^64 with w_i = A[i >> 10] * T[i & 1023]: T are 1024 odd 32-bit
numbers, A[b] = splitmix64(b) | 1. Each w_i is odd, so a change of a single element always changes c.
splitmix64: Steele et al., "Fast splittable pseudorandom number generators" (2014).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

BLOCK = 1024
"""Number of elements that share a block weight, and an exponent of ``exact32``."""
MASK = (1 << 64) - 1
CHECKSUM_SEED = 0x53504152
DIGEST_SEED = 0x44494745
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def splitmix64(value: int) -> int:
    """The generator's output for state ``value``."""
    z = (value + _GOLDEN) & MASK
    z = ((z ^ (z >> 30)) * _MIX_1) & MASK
    z = ((z ^ (z >> 27)) * _MIX_2) & MASK
    return z ^ (z >> 31)


def splitmix64_of(values: np.ndarray) -> np.ndarray:
    """:func:`splitmix64` of each integer (taken mod 2^64), uint64."""
    z = values.astype(np.uint64) + np.uint64(_GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_MIX_1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_MIX_2)
    return z ^ (z >> np.uint64(31))


@lru_cache
def _table(seed: int, bits: int) -> np.ndarray:
    mixed = splitmix64_of(np.arange(BLOCK, dtype=np.uint64) + np.uint64(seed))
    return (mixed >> np.uint64(32)) | np.uint64(1) if bits == 32 else mixed


def _expand(blocks: np.ndarray, table: np.ndarray, first: int, count: int, multiply: bool) -> np.ndarray:
    both = blocks[:, None] * table[None, :] if multiply else blocks[:, None] + table[None, :]
    found: np.ndarray = both.reshape(-1)[first % BLOCK : first % BLOCK + count]
    return found


def _blocks(first: int, count: int) -> np.ndarray:
    return np.arange(first // BLOCK, (first + count - 1) // BLOCK + 1, dtype=np.uint64)


def checksum_weights(first: int, count: int, device: torch.device) -> torch.Tensor:
    """The checksum weights of ``count`` elements from index ``first``: int64 [count], two's complement."""
    factors = splitmix64_of(_blocks(first, count)) | np.uint64(1)
    weights = _expand(factors, _table(CHECKSUM_SEED, 32), first, count, multiply=True)
    return torch.from_numpy(weights.view(np.int64)).to(device)


def digest_keys(first: int, count: int, device: torch.device) -> torch.Tensor:
    """The digest keys of ``count`` words from word ``first``: int64 [count]."""
    factors = splitmix64_of(~_blocks(first, count))
    keys = _expand(factors, _table(DIGEST_SEED, 64), first, count, multiply=False)
    return torch.from_numpy(keys.view(np.int64)).to(device)

"""Loads the compiled twin of ``protocol.assign_chains``, kernels/chains.cpp.

It makes the same plans in a tenth of the time. Where it was not built, Python makes them.
"""

from __future__ import annotations

from ctypes import CDLL, POINTER, Structure, byref, c_int32, c_int64, c_void_p
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from spare_megatron.config import native_code

Table = NDArray[np.int64] | NDArray[np.int32] | NDArray[np.bool_]
Tables = tuple[NDArray[np.int64], ...]
VERSION = 2
"""What ``spare_chains_version`` of kernels/chains.cpp returns."""
DONE, SHORTAGE, NEGATIVE_CYCLE, NO_MEMORY, UNEVEN = range(5)


class _SpareChains(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("layers", "groups", "units", "hop", "move")),
        *((name, c_void_p) for name in ("hosts", "stacks", "among", "live", "kept", "extra", "caps")),
        *((name, c_void_p) for name in ("owned", "shard_far", "group_far")),
    )


class _SparePieces(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("layers", "groups", "pieces")),
        *((name, c_void_p) for name in ("hosts", "real", "before", "owned", "owner")),
    )


@lru_cache
def compiled_chains() -> CDLL | None:
    """The library beside this file; None where there is none, or none that can be loaded. Raises ConfigError when it
    has another version."""
    loaded = native_code.load_if_built(Path(__file__).parent, "_chains", VERSION, "spare_chains_version")
    if loaded is not None:
        loaded.spare_chains_run.argtypes, loaded.spare_chains_run.restype = (POINTER(_SpareChains),), c_int32
        loaded.spare_chains_hand_over.argtypes = (POINTER(_SparePieces),)
        loaded.spare_chains_hand_over.restype = c_int32
    return loaded


def redistribute(native: CDLL, numbers: tuple[int, ...], tables: tuple[Table | None, ...], outcome: Tables) -> bool:
    """Whether the caps are large enough. ``numbers``: units, hop, move. ``tables``: hosts, stacks, among, live, kept,
    extra (may be None), caps. ``outcome``, written: owned, shard_far, group_far."""
    job = _SpareChains(*outcome[0].shape, *numbers, *map(_address, tables), *map(_address, outcome))
    found = native.spare_chains_run(byref(job))
    assert found != NEGATIVE_CYCLE, "a cycle of negative length: the plan in hand is not the cheapest for its units"
    return _checked(found) == DONE


def hand_over(native: CDLL, hosts: Table, real: Table | None, before: Table, owned: Table, owner: Table) -> None:
    """Change ``owner`` [N, K] to what ``owned`` says, from the units ``before``."""
    layers, groups = owned.shape
    tables = map(_address, (hosts, real, before, owned, owner))
    found = native.spare_chains_hand_over(byref(_SparePieces(layers, groups, owner.shape[1], *tables)))
    assert _checked(found) == DONE, "more pieces are freed than gained"


def _address(table: Table | None) -> int | None:
    """Of the first element."""
    if table is None:
        return None
    assert table.flags.c_contiguous
    address: int = table.ctypes.data
    return address


def _checked(found: int) -> int:
    if found == NO_MEMORY:
        raise MemoryError("no memory for chains")
    return found

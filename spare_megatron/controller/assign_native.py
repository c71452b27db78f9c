"""Loads the compiled twin of :class:`~spare_megatron.controller.assign_chains.Chains`, kernels/chains.cpp.

It makes the same plans in a tenth of the time. Where it was not built, Python makes them.
"""

from __future__ import annotations

from ctypes import CDLL, POINTER, Structure, byref, c_int32, c_int64, c_void_p
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from spare_megatron.config import native_code

VERSION = 1
"""What ``spare_chains_version`` of kernels/chains.cpp returns."""
DONE, SHORTAGE, NEGATIVE_CYCLE, NO_MEMORY = range(4)
TABLES = ("hosts", "stacks", "kept", "extra", "owned", "take", "give", "room", "waiting", "shard_far", "group_far")


class _SpareChains(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("layers", "groups", "hop", "move")),
        *((name, c_void_p) for name in TABLES),
    )


@lru_cache
def compiled_chains() -> CDLL | None:
    """The library beside this file; None where there is none, or none that can be loaded. Raises ConfigError when it
    has another version."""
    path = native_code.find(Path(__file__).parent, "_chains")
    try:
        loaded = native_code.load(path, VERSION, "spare_chains_version") if path is not None else None
    except OSError:
        return None
    if loaded is not None:
        loaded.spare_chains_run.argtypes, loaded.spare_chains_run.restype = (POINTER(_SpareChains),), c_int32
    return loaded


def run_natively(native: CDLL, hop: int, move: int, tables: dict[str, NDArray[np.int64] | None]) -> bool:
    """Redistribute in place; whether the caps were large enough. ``tables``: those of ``TABLES``, C-contiguous;
    ``extra`` may be None."""
    given = [tables[name] for name in TABLES]
    assert all(table is None or (table.dtype == np.int64 and table.flags.c_contiguous) for table in given)
    layers, groups = tables["owned"].shape  # type: ignore[union-attr]
    pointers = [None if table is None else table.ctypes.data for table in given]
    outcome = native.spare_chains_run(byref(_SpareChains(layers, groups, hop, move, *pointers)))
    if outcome == NO_MEMORY:
        raise MemoryError("no memory for chains")
    assert outcome != NEGATIVE_CYCLE, "a cycle of negative length: the plan in hand is not the cheapest for its units"
    return bool(outcome == DONE)

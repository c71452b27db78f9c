"""The range of the numbers that spare-plan and spare-simulate take.

Outside it they would overflow, run out of memory or compute for hours, so a slip of the pen is refused at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from math import isfinite

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.flags import flag_name

LEAST, MOST = 1e-9, 1e15
"""The smallest and the largest number that is not 0: nanoseconds and 30 million years, parameters of any model."""
COUNT_MAX = 10**10
COUNTS_MAX: Mapping[str, int] = {
    **dict.fromkeys(("num_groups", "standby_groups", "standby_groups_max", "trials"), 100_000),
    **dict.fromkeys(("pieces_per_shard", "microbatches_per_shard"), 100_000),
    **dict.fromkeys(("nodes_per_group", "spare_nodes"), 100_000),
    **dict.fromkeys(("pipeline_model_parallel_size", "num_layers"), 10_000),
    "steps": 10_000_000,
}
"""Largest whole numbers, where they are not ``COUNT_MAX``."""
GROUPS_MAX = COUNTS_MAX["num_groups"]


def check_range(args: argparse.Namespace) -> None:
    """Raise ConfigError for the first number that is out of range. Infinite ones and those that are none are left to
    the checks of each figure."""
    for name, value in vars(args).items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
            continue
        if isinstance(value, int) and value > (most := COUNTS_MAX.get(name, COUNT_MAX)):
            raise ConfigError(f"{flag_name(name)} is {value}, but must be at most {most}")
        if value and not LEAST <= abs(value) <= MOST:
            raise ConfigError(f"{flag_name(name)} is {value:g}, but must be 0 or from {LEAST:g} to {MOST:g}")

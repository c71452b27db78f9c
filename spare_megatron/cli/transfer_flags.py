"""The flags of spare-plan and spare-simulate that say how long the state takes to a group that comes back."""

from __future__ import annotations

import argparse
from math import isfinite

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.flags import flag_name
from spare_megatron.planning.catching_up import DONORS

RESULT_SHARE = 1 / 3
"""A result's size over that of the state: fp32 weights and two moments are three numbers for one of the result."""
NAMES = ("state_gib", "result_gib", "transfer_gib_per_s")


def add_transfer_flags(made: argparse.ArgumentParser) -> None:
    """Add them to a command line."""
    add = made.add_argument
    add(
        "--state-gib",
        type=float,
        help="GiB of weights and optimizer state of one GPU, which a group that comes back takes, every GPU from those "
        f"at its place in {DONORS} living groups (default: it has them at once)",
    )
    add("--result-gib", type=float, help="GiB of a step's gradients of one GPU (default: a third of --state-gib)")
    add("--transfer-gib-per-s", type=float, help="GiB per second that one GPU of a living group sends (default: 1)")


def transfer_of(args: argparse.Namespace, rejoin_s: float | None) -> tuple[float, float]:
    """Seconds in which a returning group takes the state, and a result; ConfigError for what cannot be."""
    given = [name for name in NAMES if getattr(args, name) is not None]
    for name in given:
        value = getattr(args, name)
        if not isfinite(value) or value <= 0:
            raise ConfigError(f"{flag_name(name)} is {value:g}, but must be a finite number above 0")
    if given and rejoin_s is None:
        raise ConfigError(f"{flag_name(given[0])} has no effect without --rejoin-s S; give both")
    if given and args.state_gib is None:
        raise ConfigError(f"{flag_name(given[0])} has no effect without --state-gib G; give both")
    if args.state_gib is None:
        return 0.0, 0.0
    rate = DONORS * (args.transfer_gib_per_s or 1.0)
    return args.state_gib / rate, (args.result_gib or RESULT_SHARE * args.state_gib) / rate

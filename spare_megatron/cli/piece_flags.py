"""The flags with which spare-plan and spare-simulate take how a shard is cut, and what they come to.

``--pieces-per-shard K`` counts pieces, whatever they consist of. ``--microbatches-per-shard M`` and
``--piece-microbatches C`` count microbatches: K = M / C.
"""

from __future__ import annotations

import argparse

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.flags import flag_name
from spare_megatron.config.piece_sizes import check
from spare_megatron.planning.piece_size import Share
from spare_megatron.planning.reduction_cost import GPUS, TOKENS, exact_share

PIECES = 16
"""Microbatches of a shard where nothing is given."""
DEVICES = ("cpu", *GPUS)
DEVICE = "h100"


def add_flags(made: argparse.ArgumentParser, auto: str = "") -> None:
    """Add the flags; ``auto``: what the help says of --piece-microbatches auto, empty where only a number is taken."""
    add = made.add_argument
    add("--pieces-per-shard", type=int, metavar="K", help=f"number of pieces of a shard (default: {PIECES})")
    add("--microbatches-per-shard", type=int, metavar="M", help="number of microbatches of a shard, in pieces of C")
    add(
        "--piece-microbatches",
        type=_size_or_auto if auto else int,
        metavar="C|auto" if auto else "C",
        help="number of microbatches of a piece, which divides M" + (auto or " (default: 1)"),
    )
    add(
        "--device",
        choices=DEVICES,
        help=f"where gradients are summed: cpu (measured) or a GPU (modelled) (default: {DEVICE})",
    )
    add("--microbatch-tokens", type=int, help=f"tokens of a microbatch, for the cost of exact sums (default: {TOKENS})")
    add(
        "--exact-cost",
        type=float,
        metavar="S",
        help="what exact sums add to computing at C = 1, as a share of it; S / C with C (default: that of the device)",
    )


def _size_or_auto(text: str) -> int | str:
    if text != "auto" and not text.lstrip("-").isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor auto")
    return text if text == "auto" else int(text)


def pieces_of(args: argparse.Namespace) -> tuple[int, int | str | None]:
    """(M, C as given), where pieces of one microbatch may be --pieces-per-shard as well.

    Raises:
        ConfigError: the flags contradict each other, or pieces of C do not fill a shard."""
    pieces, microbatches, size = args.pieces_per_shard, args.microbatches_per_shard, args.piece_microbatches
    if pieces is not None and (microbatches is not None or size is not None):
        other = (
            f"--microbatches-per-shard {microbatches}" if microbatches is not None else f"--piece-microbatches {size}"
        )
        raise ConfigError(
            f"--pieces-per-shard {pieces} and {other} are both given; give --microbatches-per-shard M and "
            "--piece-microbatches C, which make M / C pieces, or only --pieces-per-shard"
        )
    for flag, value in (("--pieces-per-shard", pieces), ("--microbatches-per-shard", microbatches)):
        if value is not None and value < 1:
            raise ConfigError(f"{flag} is {value}, but must be at least 1")
    found = microbatches or pieces or PIECES
    if isinstance(size, int):
        check(size, [found], "--piece-microbatches")
    return found, 1 if pieces is not None else size


def share_of(args: argparse.Namespace, mode: str) -> Share:
    """s(C) in reduction mode ``mode``; ConfigError for an impossible figure."""
    cost, tokens = args.exact_cost, args.microbatch_tokens
    if tokens is not None and tokens < 1:
        raise ConfigError(f"--microbatch-tokens is {tokens}, but must be at least 1")
    if cost is None:
        return lambda size: exact_share(args.device or DEVICE, mode, size, tokens or TOKENS)
    if not 0 <= cost < float("inf"):
        raise ConfigError(f"--exact-cost is {cost}, but must be a finite number of at least 0")
    return lambda size: cost / size


def given_cost_flags(args: argparse.Namespace) -> list[str]:
    """The flags of :func:`share_of` that were given, with their values."""
    names = ("device", "microbatch_tokens", "exact_cost")
    return [f"{flag_name(name)} {getattr(args, name)}" for name in names if getattr(args, name) is not None]

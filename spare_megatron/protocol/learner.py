"""What the protocol machine remembers of a group that is brought up to date."""

from __future__ import annotations

from dataclasses import dataclass

from spare_megatron.protocol.view import Offer

NO_OFFER = 0
"""The number in the ``CaughtUp`` of a joiner that got the weights without an offer (protocol.state_shards)."""


@dataclass(frozen=True)
class Learner:
    """A learner, or a joiner: one that was made a member and does not hold t* yet."""

    incarnation: int
    ready: bool = False
    formed: bool = False
    """It was ready once: its world is formed and its model built, so it can take any offer."""
    offer: Offer | None = None
    applied: int = -1
    """The newest step whose state all its ranks hold, by this offer; -1: none."""
    weights_digest: str = ""
    """Of the weights after ``applied``."""
    proved: bool = False
    """The weights after a step that it has applied itself are those that votes agreed on."""
    voids: int = 0
    """How many of its offers ended by its own fault or that of a donor that lives."""
    wrong: int = 0
    """How many of these because it had computed other weights than those that votes agreed on."""

"""The operations of a stage: work on a microbatch, and exchanges of tensors with the stages beside it.

Stage r of P has the virtual stages r, r + P, r + 2P, ...: its chunks 0, 1, 2, ... A *boundary* v lies between the
virtual stages v and v + 1; activations cross it upwards, their gradients downwards.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Forward:
    """The forward pass of a microbatch on one chunk of a stage."""

    microbatch: int
    chunk: int = 0


@dataclass(frozen=True)
class Backward:
    """The backward pass of a microbatch on one chunk of a stage."""

    microbatch: int
    chunk: int = 0


@dataclass(frozen=True, order=True)
class Transfer:
    """One tensor on its way across a boundary. Their order is that in which two stages post what is between them."""

    gradient: bool
    """False: an activation, from virtual stage ``boundary`` to the next; true: its gradient, back."""
    microbatch: int
    boundary: int

    def sender(self, stages: int) -> int:
        """The stage that sends it."""
        return (self.boundary + self.gradient) % stages

    def receiver(self, stages: int) -> int:
        """The stage that receives it."""
        return (self.boundary + (not self.gradient)) % stages


@dataclass(frozen=True)
class Exchange:
    """Transfers that are posted together, in the order of :class:`Transfer`, and waited for together."""

    sends: tuple[Transfer, ...] = ()
    receives: tuple[Transfer, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.sends or self.receives)


Operation = Forward | Backward | Exchange

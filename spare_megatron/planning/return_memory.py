"""Computes the memory that the return of a group takes from the others, and from itself, beside that of the steps.

Donor i of d keeps part i of d of the state and of the results that the learner has not taken, on the host; the learner
has one whole result more on its device. What a rank may keep at most is the same formula for the forecast and for the
donors themselves (worker/donor.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from spare_megatron.planning.memory import GRADIENT_BYTES
from spare_megatron.protocol.messages import JobSpec
from spare_megatron.protocol.offers import SERVES_MAX

RESULTS_PER_STATE = 2
"""The results that are kept may be this many times the size of the state."""
RESULTS_AT_LEAST = 4
"""So many results may be kept in any case."""
MAIN_BYTES = 4.0
"""fp32 weights, the main ones where the model's are half as long."""
HALF_BYTES = 2.0


def most_result_bytes(state_bytes: float, result_bytes: float) -> float:
    """The bytes of results that a donor keeps at most of one offer, of a state and of results of these sizes: those of
    its parts."""
    return max(RESULTS_PER_STATE * state_bytes, RESULTS_AT_LEAST * result_bytes)


@dataclass(frozen=True)
class RankParameters:
    """Parameters of one rank whose optimizer state is divided over the same number of ranks."""

    parameters: float
    sharing: int = 1
    """How many ranks of the group divide optimizer state and results of these parameters."""
    split: bool = False
    """The optimizer is a distributed one, also where it divides these parameters over one rank only."""

    def state_bytes(self, half: bool, moments: float) -> float:
        """The state that travels. Where the model's weights are ``half`` as long and their fp32 copy is whole on this
        rank, they are rounded from it and do not travel. ``moments``: fp32 values of the optimizer per parameter."""
        if half and self.split:
            return (HALF_BYTES + MAIN_BYTES * (1 + moments) / self.sharing) * self.parameters
        return MAIN_BYTES * (1 + moments / self.sharing) * self.parameters

    def result_bytes(self, mode: str) -> float:
        """The sum over groups of one step, in reduction mode ``mode``."""
        return GRADIENT_BYTES[mode].result / self.sharing * self.parameters


@dataclass(frozen=True)
class ReturnMemory:
    """What one return takes, in bytes."""

    donors: int
    state_part: float
    """Host memory of each rank of a donor for its part of the state."""
    results_part: float
    """The most that it keeps of results."""
    result: float
    """Device memory of each rank of the learner."""
    learners: int
    """How many learners a donor serves at most at a time."""


def return_memory(state_bytes: float, result_bytes: float, num_groups: int) -> ReturnMemory | None:
    """The memory of a return to a job of ``num_groups``, all but one of which live; None where nobody could give.

    Args:
        state_bytes: of one rank.
        result_bytes: of one rank.
    """
    if num_groups < 2:
        return None
    donors = min(JobSpec.donors_max, num_groups - 1)
    state, result = state_bytes / donors, result_bytes / donors
    kept = min(most_result_bytes(state, result), JobSpec.results_kept * result)
    return ReturnMemory(donors, state, kept, result_bytes, min(SERVES_MAX, num_groups - 1))

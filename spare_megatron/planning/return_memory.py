"""Computes the memory that the return of a group takes from the others, and from itself, beside that of the steps.

Donor i of d keeps part i of d of the state and of the results that the learner has not taken, on the host; the learner
has one whole result more on its device. What a rank may keep at most is the same formula for the forecast and for the
donors themselves (worker/donor.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from spare_megatron.protocol.messages import JobSpec
from spare_megatron.protocol.offers import SERVES_MAX

RESULTS_PER_STATE = 2
"""The results that are kept may be this many times the size of the state."""
RESULTS_AT_LEAST = 4
"""So many results may be kept in any case."""


def most_result_bytes(state_bytes: float, result_bytes: float) -> float:
    """The bytes of results that a donor keeps at most of one offer, of a state and of results of these sizes: those of
    its parts."""
    return max(RESULTS_PER_STATE * state_bytes, RESULTS_AT_LEAST * result_bytes)


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

"""Chooses r_s, the number of groups that keep each part of the optimizer's state (``--spare-state-redundancy``).

All groups keep all of it where that fits into a GPU: no loss can then take a last copy. Otherwise r_s is the smallest
number with which the wipe-outs of lost last copies cost less than ``LOST_MAX`` of the time, or the largest that fits.
docs/theory.md, section 11.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from spare_megatron.config.errors import ConfigError
from spare_megatron.planning.memory import Memory
from spare_megatron.planning.state_copies import copying_s, seconds_to_wipe_out

LOST_MAX = 1e-4
"""Share of the time."""
MOST = 4
"""Largest r_s below N that is looked at."""


@dataclass(frozen=True)
class StateRates:
    """What decides how long the last copy of a part lasts, and what its loss costs."""

    groups: int
    mtbf_s: float
    """Mean time between losses anywhere in the cluster."""
    gather_gib_per_s: float
    """GiB per second that one GPU takes from others."""
    wipe_out_s: float
    """What a wipe-out costs: the restart and the steps since the last save."""


@dataclass(frozen=True)
class StateCandidate:
    """One r_s, and what it comes to."""

    copies: int
    memory: Memory
    copying_s: float
    """From a loss until all copies are there again."""
    lasts_s: float
    """Mean time until a last copy is lost; infinite where all groups keep all."""
    lost: float
    """Share of the time that such wipe-outs take."""

    def as_json(self) -> dict[str, object]:
        """For spare-plan --json; null where it lasts for ever."""
        return {
            "state_redundancy": self.copies,
            "memory_gib_per_gpu": round(self.memory.total, 3),
            "copying_s": float(f"{self.copying_s:.6g}") if self.lost else None,
            "wipe_out_days": float(f"{self.lasts_s / 86_400:.6g}") if self.lost else None,
            "lost": float(f"{self.lost:.3g}"),
        }


@dataclass(frozen=True)
class StatePlan:
    """The chosen r_s, those that it was chosen among, and why."""

    chosen: StateCandidate
    candidates: Sequence[StateCandidate]
    reason: str


def choose_state_copies(
    memory_of: Callable[[int], Memory],
    rates: StateRates,
    gpu_memory_gib: float | None,
    given: int | None = None,
) -> StatePlan:
    """The number of copies; a ``given`` one is kept. ``memory_of``: the memory of a GPU with so many.

    Raises:
        ConfigError: the given number is impossible.
    """
    groups = rates.groups
    if given is not None and not 1 <= given <= groups:
        raise ConfigError(f"--state-redundancy {given} must lie in 1..{groups}, as there are {groups} groups")
    numbers = sorted({*range(2, min(MOST + 1, groups)), groups, *([] if given is None else [given])})
    candidates = [_candidate(copies, memory_of(copies), rates) for copies in numbers]
    room = [one for one in candidates if gpu_memory_gib is None or one.memory.total <= gpu_memory_gib]
    if given is not None:
        chosen = next(one for one in candidates if one.copies == given)
        return StatePlan(chosen, candidates, "the copies of the optimizer's state were given")
    whole = candidates[-1]
    if not room or whole in room:  # where nothing fits, the plan is refused later
        why = "every group keeps the whole optimizer state, which fits and which no loss but the last can take"
        return StatePlan(whole, candidates, why)
    chosen = next((one for one in room if one.lost <= LOST_MAX), room[-1])
    why = (
        f"with {chosen.copies} copies of each part of the optimizer's state a GPU needs {chosen.memory.total:.1f} GiB "
        f"instead of {whole.memory.total:.1f}; the last copy of a part is lost once in {chosen.lasts_s / 86_400:.3g} "
        f"days, which costs {chosen.lost:.2g} of the time"
    )
    return StatePlan(chosen, candidates, why)


def _candidate(copies: int, memory: Memory, rates: StateRates) -> StateCandidate:
    if copies == rates.groups:
        return StateCandidate(copies, memory, 0.0, float("inf"), 0.0)
    copying = copying_s(memory.parts["weights"], memory.parts["optimizer"], rates.gather_gib_per_s)
    lasts = seconds_to_wipe_out(rates.groups, copies, rates.groups * rates.mtbf_s, copying)
    return StateCandidate(copies, memory, copying, lasts, rates.wipe_out_s / lasts)

"""Searches offsets with a given largest overlap mod N where no ruler is known: exhaustively, then by tabu search.

Both searches are deterministic and stop after a fixed effort, not by the clock: the same N and r give the same offsets
on every machine.
"""

from __future__ import annotations

import numpy as np

from spare_megatron.placement.overlap import difference_counts

EXHAUSTIVE_TESTS = 60_000
"""Marks tried by the exhaustive search before it gives up (about 0.1 s)."""
TABU_STEPS = 4_000
"""Steps of the tabu search (about 0.3 s at 10 marks and 200 groups)."""

_SEED = 20_603


class EffortSpentError(Exception):
    """The exhaustive search reached its limit of effort without a result."""


def exhaustive(num_groups: int, marks: int, overlap: int) -> tuple[int, ...] | None:
    """Marks with at most this overlap, or None when there are none; EffortSpentError when the effort does not suffice.

    Every set has a rotation whose first gap is its smallest cyclic gap, so only those are enumerated.
    """
    counts = [0] * num_groups
    tests = 0

    def place(chosen: list[int], mark: int) -> bool:
        """Count the differences that another mark adds. False when one exceeds the overlap: then none is counted."""
        for done, other in enumerate(chosen):
            difference = mark - other
            counts[difference] += 1
            counts[num_groups - difference] += 1
            if counts[difference] > overlap or counts[num_groups - difference] > overlap:
                remove(chosen[: done + 1], mark)
                return False
        return True

    def remove(chosen: list[int], mark: int) -> None:
        for other in chosen:
            counts[mark - other] -= 1
            counts[num_groups - mark + other] -= 1

    def extend(chosen: list[int], gap: int) -> bool:
        nonlocal tests
        missing = marks - len(chosen)
        if not missing:
            return True
        for mark in range(chosen[-1] + gap, num_groups - gap * missing + 1):
            tests += 1
            if tests > EXHAUSTIVE_TESTS:
                raise EffortSpentError
            if place(chosen, mark):
                chosen.append(mark)
                if extend(chosen, gap):
                    return True
                chosen.pop()
                remove(chosen, mark)
        return False

    for gap in range(1, num_groups // marks + 1):
        chosen = [0]
        if marks == 1:
            return (0,)
        if place(chosen, gap):
            chosen.append(gap)
            if extend(chosen, gap):
                return tuple(chosen)
            chosen.pop()
            remove(chosen, gap)
    return None


def tabu(num_groups: int, marks: int, overlap: int) -> tuple[int, ...] | None:
    """Marks with at most this overlap, or None when the search did not find any.

    Each step removes the mark with most differences above the overlap and adds one where it adds fewest; the position
    of a removed mark is barred for some steps.
    """
    rng = np.random.default_rng((_SEED, num_groups, marks, overlap))
    chosen = rng.permutation(num_groups)[:marks]
    barred_until = np.zeros(num_groups, dtype=np.int64)
    places = np.arange(num_groups)
    for step in range(TABU_STEPS):
        counts = difference_counts(num_groups, chosen.tolist())
        if int(counts.max()) <= overlap:
            return tuple(sorted(int(mark - chosen.min()) for mark in chosen))
        excess = np.maximum(counts - overlap, 0)
        blame = excess[(chosen[:, None] - chosen[None, :]) % num_groups].sum(axis=1) + rng.random(marks)
        worst = int(np.argmax(blame))
        barred_until[chosen[worst]] = step + int(rng.integers(3, 3 + marks))
        rest = np.delete(chosen, worst)
        counts = difference_counts(num_groups, rest.tolist())
        full = (counts >= overlap).astype(np.int64)
        cost = full[(places[:, None] - rest[None, :]) % num_groups].sum(axis=1) + rng.random(num_groups)
        cost[barred_until > step] += marks
        cost[rest] = np.inf
        chosen = np.append(rest, int(np.argmin(cost)))
    return None

"""Modular Golomb rulers: r marks whose r(r-1) differences are pairwise distinct mod N.

A ruler is a placement in which two groups share at most one shard. Three algebraic families give dense ones at a few
moduli. A family's ruler is also a short ruler on the integers, and most windows of consecutive marks of a short ruler
are rulers mod any larger N. LISTED has the rulers with few marks that neither of the two gives.

Sources: Singer 1938, Bose 1942, Ruzsa 1993 (the families); J. B. Shearer, "Modular Golomb rulers" (research.ibm.com,
people/s/shearer/mgrule.html): for up to 14 marks, the moduli at which a ruler exists, by exhaustive search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from math import gcd
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from spare_megatron.placement.overlap import max_overlap

MARKS_MAX = 64
"""With more marks than this the families are not searched (it would take seconds)."""

_FAMILY_PRIMES = 6
"""Number of primes tried per family, from the smallest with enough marks on; larger primes only give longer windows."""

# Marks -> (single moduli, modulus from which a ruler always exists), from Shearer's table.
EXISTS: dict[int, tuple[tuple[int, ...], int]] = {
    2: ((), 3),
    3: ((), 7),
    4: ((), 13),
    5: ((21,), 23),
    6: ((31,), 35),
    7: ((), 48),
    8: ((57,), 63),
    9: ((73, 80), 85),
    10: ((91,), 107),
    11: ((120, 133), 135),
    12: ((133, 156, 158, 159), 161),
    13: ((168, 183), 193),
    14: ((183,), 225),
}

# (N, marks) -> a ruler that the families do not give; found by a randomised search over unions of orbits of a
# multiplier.
LISTED: dict[tuple[int, int], tuple[int, ...]] = {
    (21, 5): (0, 2, 7, 8, 11),
    (73, 9): (0, 2, 5, 9, 15, 23, 34, 35, 51),
    (80, 9): (0, 13, 14, 31, 37, 39, 42, 46, 58),
    (91, 10): (0, 7, 19, 21, 57, 58, 63, 67, 80, 83),
    (63, 8): (0, 5, 17, 20, 21, 31, 55, 61),
    (49, 7): (0, 3, 5, 24, 34, 40, 41),
    (65, 8): (0, 8, 9, 15, 19, 31, 33, 36),
    (66, 8): (0, 4, 17, 20, 26, 28, 51, 65),
    (85, 9): (0, 9, 17, 19, 32, 35, 73, 74, 80),
    (86, 9): (0, 2, 9, 15, 48, 59, 60, 64, 78),
    (87, 9): (0, 27, 43, 55, 63, 66, 80, 81, 85),
    (88, 9): (0, 5, 12, 27, 51, 57, 65, 67, 68),
    (89, 9): (0, 10, 19, 25, 27, 45, 49, 56, 61),
    (90, 9): (0, 3, 11, 12, 47, 63, 69, 73, 88),
    (92, 9): (0, 5, 6, 17, 25, 40, 43, 56, 88),
    (107, 10): (0, 1, 4, 24, 30, 35, 49, 57, 67, 95),
    (108, 10): (0, 24, 26, 30, 37, 42, 45, 59, 98, 107),
    (109, 10): (0, 10, 14, 31, 43, 82, 85, 87, 93, 100),
    (111, 10): (0, 11, 13, 19, 52, 76, 79, 94, 101, 110),
    (112, 10): (0, 4, 12, 13, 19, 61, 79, 81, 84, 95),
    (113, 10): (0, 1, 12, 20, 37, 47, 50, 52, 91, 107),
    (114, 10): (0, 4, 28, 62, 65, 74, 82, 92, 107, 113),
    (115, 10): (0, 3, 16, 18, 25, 26, 46, 60, 65, 77),
    (138, 11): (0, 1, 5, 23, 40, 47, 53, 84, 110, 118, 129),
    (158, 12): (0, 5, 37, 43, 67, 95, 98, 107, 109, 117, 124, 142),
    (159, 12): (0, 29, 64, 66, 83, 89, 96, 97, 123, 135, 139, 144),
    (193, 13): (0, 13, 19, 50, 52, 53, 64, 122, 127, 147, 157, 165, 189),
    (196, 13): (0, 32, 72, 84, 89, 111, 131, 159, 160, 162, 166, 175, 185),
    (198, 13): (0, 14, 25, 49, 53, 54, 61, 71, 91, 104, 123, 164, 167),
    (201, 13): (0, 1, 12, 37, 42, 46, 59, 61, 94, 147, 163, 170, 173),
    (202, 13): (0, 5, 8, 15, 17, 33, 46, 47, 68, 91, 140, 146, 183),
    (255, 16): (0, 6, 30, 35, 71, 80, 84, 87, 99, 124, 126, 146, 147, 157, 229, 247),
    (273, 17): (0, 5, 15, 34, 35, 42, 73, 75, 86, 89, 98, 134, 151, 155, 177, 183, 201),
}


def absent(num_groups: int, marks: int) -> bool:
    """Whether no ruler of this many marks exists mod num_groups; False where one exists or it is not known."""
    if marks not in EXISTS:
        return False
    single, always = EXISTS[marks]
    return num_groups < always and num_groups not in single


def known_ruler(num_groups: int, marks: int) -> tuple[int, ...] | None:
    """A ruler of ``marks`` marks mod ``num_groups``, first mark 0, from the list or the families; else None."""
    if (num_groups, marks) in LISTED:
        return LISTED[num_groups, marks]
    if marks > MARKS_MAX:
        return None
    for family, prime in _families(marks):
        modulus, base = family(prime)
        if modulus == num_groups:
            return tuple(mark - base[0] for mark in base[:marks])
        for windows in _windows(modulus, base, marks):
            fitting = windows[windows[:, -1] < num_groups]
            ruler = _first_ruler(num_groups, fitting)
            if ruler is not None:
                return ruler
    return None


def _windows(modulus: int, base: tuple[int, ...], marks: int) -> Iterator[NDArray[np.int64]]:
    """Integer rulers [*, marks] with first mark 0: the windows of consecutive marks, cyclically, of each multiple of
    the base set."""
    units = np.array([u for u in range(1, modulus // 2 + 1) if gcd(u, modulus) == 1])
    window = np.arange(len(base))[:, None] + np.arange(marks)[None, :]
    for low in range(0, len(units), 64):
        multiples = np.sort(units[low : low + 64, None] * np.asarray(base)[None, :] % modulus, axis=1)
        cyclic = np.concatenate([multiples, multiples + modulus], axis=1)
        yield (cyclic[:, window] - multiples[:, :, None]).reshape(-1, marks)


def _first_ruler(num_groups: int, candidates: NDArray[np.int64]) -> tuple[int, ...] | None:
    low, high = np.triu_indices(candidates.shape[1], 1)
    differences = candidates[:, high] - candidates[:, low]
    differences = np.sort(np.concatenate([differences, num_groups - differences], axis=1), axis=1)
    distinct = (differences[:, 1:] != differences[:, :-1]).all(axis=1)
    if not distinct.any():
        return None
    return tuple(int(mark) for mark in candidates[int(np.argmax(distinct))])


def _families(marks: int) -> list[tuple[Callable[[int], tuple[int, tuple[int, ...]]], int]]:
    """(family, prime) of the smallest members with at least this many marks, by ascending modulus."""
    prime = max(marks - 1, 3)
    found: list[tuple[int, Callable[[int], tuple[int, tuple[int, ...]]], int]] = []
    primes = 0
    while primes < _FAMILY_PRIMES:
        if all(prime % divisor for divisor in range(2, int(prime**0.5) + 1)):
            primes += 1
            of_prime = (
                (prime**2 + prime + 1, singer, prime + 1),
                (prime**2 - 1, bose, prime),
                (prime**2 - prime, ruzsa, prime - 1),
            )
            found += [(modulus, family, prime) for modulus, family, size in of_prime if size >= marks]
        prime += 1
    return [(family, prime) for _, family, prime in sorted(found, key=itemgetter(0))]


@lru_cache(maxsize=128)
def singer(prime: int) -> tuple[int, tuple[int, ...]]:
    """q + 1 marks mod q^2 + q + 1: the zeros of a third-order linear recurrence over GF(q), full projective period."""
    modulus = prime * prime + prime + 1
    for third in range(1, prime):
        for second in range(prime):
            for first in range(prime):
                terms = [0, 0, 1]
                while len(terms) < modulus:
                    terms.append((first * terms[-1] + second * terms[-2] + third * terms[-3]) % prime)
                marks = tuple(n for n, term in enumerate(terms) if term == 0)
                if len(marks) == prime + 1 and max_overlap(modulus, marks) == 1:
                    return modulus, marks
    raise AssertionError(f"no Singer set for {prime}: not a prime")


@lru_cache(maxsize=128)
def bose(prime: int) -> tuple[int, tuple[int, ...]]:
    """q marks mod q^2 - 1: the ones of a second-order linear recurrence over GF(q) of full period."""
    modulus = prime * prime - 1
    for second in range(1, prime):
        for first in range(prime):
            terms = [0, 1]
            while len(terms) < modulus:
                terms.append((first * terms[-1] + second * terms[-2]) % prime)
            marks = tuple(n for n, term in enumerate(terms) if term == 1)
            if len(marks) == prime and max_overlap(modulus, marks) == 1:
                return modulus, marks
    raise AssertionError(f"no Bose set for {prime}: not a prime")


@lru_cache(maxsize=128)
def ruzsa(prime: int) -> tuple[int, tuple[int, ...]]:
    """p - 1 marks mod p(p - 1): p i + (p - 1) g^i for a primitive root g of p."""
    modulus = prime * (prime - 1)
    for root in range(2, prime):
        powers = [pow(root, i, prime) for i in range(1, prime)]
        if len(set(powers)) == prime - 1:
            marks = ((prime * i + (prime - 1) * power) % modulus for i, power in enumerate(powers, start=1))
            return modulus, tuple(sorted(marks))
    raise AssertionError(f"{prime} has no primitive root: not a prime")

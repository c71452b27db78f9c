"""A few seconds of each fuzzer, and two minutes of each in the long form."""

from __future__ import annotations

import random

import pytest

from tests.fuzz import FUZZERS, run

SEED = 44


@pytest.mark.parametrize("name", FUZZERS)
def test_some_seconds(name: str) -> None:
    print(f"seed {SEED}")
    assert run(name, SEED, 2) > 0


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", FUZZERS)
def test_two_minutes(name: str) -> None:
    first = random.randrange(10**6)
    print(f"seed {first}")
    assert run(name, first, 120) > 0

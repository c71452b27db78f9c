"""For all tests: no test of a property has a time limit for one example, because machines may be slow or busy, and no
job of a test that fails goes on beside the next one."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("spare_megatron", deadline=None)
settings.load_profile("spare_megatron")


@pytest.fixture(autouse=True)
def _jobs_end_with_their_test() -> Iterator[None]:
    harness = sys.modules.get("tests.process.harness")
    before = len(harness.STARTED) if harness is not None else 0
    yield
    harness = sys.modules.get("tests.process.harness")
    if harness is not None:
        harness.end_since(before)

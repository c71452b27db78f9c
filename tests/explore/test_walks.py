"""Random walks in which every kind of fault may meet every other (tests.explore.walker; tests.explore.observer judges).

``python -m tests.explore --walk --seed SEED --minutes M`` walks longer, and shortens what it finds.
"""

from __future__ import annotations

import os
import secrets

import pytest

from tests.explore.shapes import WALKS
from tests.explore.walker import shorten, summed, walks


def _walk(seed: str, seconds: float) -> None:
    """Walk through all shapes for so many seconds of CPU time; the test fails with a shortened counterexample."""
    print(f"seed {seed}")
    found = walks(WALKS, seed, seconds)
    for name, figures in found.items():
        print(f"{name}: {figures}")
    total = summed(found.values())
    print(f"in all: {total}")
    assert not total.findings, f"{len(total.findings)} findings; the first one:\n{shorten(total.findings[0])}"
    assert {"finished", "left", "wipe-out"} <= total.ends.keys(), "the walks do not come to every end"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", ["1", pytest.param("2", marks=pytest.mark.full)])
def test_every_kind_of_fault_may_meet_every_other(seed: str) -> None:
    _walk(seed, 5.0)


@pytest.mark.full
@pytest.mark.timeout(5 * 3600)
def test_every_kind_of_fault_may_meet_every_other_for_long() -> None:
    """For an hour, or for ``SPARE_WALK_MINUTES``, with a seed that is drawn anew (``SPARE_WALK_SEED``)."""
    seed = os.environ.get("SPARE_WALK_SEED") or secrets.token_hex(4)
    _walk(seed, 60 * float(os.environ.get("SPARE_WALK_MINUTES", "60")))

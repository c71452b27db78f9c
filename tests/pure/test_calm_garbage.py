"""Garbage is collected while nothing is decided, at the latest after a minute, and by Python itself afterwards."""

from __future__ import annotations

import gc
import weakref

from spare_megatron.coordinator.calm_garbage import AGAIN_S, CALM_S, LATEST_S, CalmGarbage


class Cycle:
    """An object that only a collection frees."""

    def __init__(self) -> None:
        self.itself = self


def test_a_collection_waits_for_a_pause() -> None:
    garbage = CalmGarbage(0.0)
    with garbage:
        cycle = weakref.ref(Cycle())
        garbage.busy(AGAIN_S)
        garbage.look(AGAIN_S + CALM_S / 2)
        assert cycle() is not None
        garbage.look(AGAIN_S + 2 * CALM_S)
        assert cycle() is None
        cycle = weakref.ref(Cycle())
        garbage.look(AGAIN_S + 4 * CALM_S)
        assert cycle() is not None, "collected twice in a row"


def test_a_busy_coordinator_collects_once_a_minute() -> None:
    garbage = CalmGarbage(0.0)
    with garbage:
        cycle = weakref.ref(Cycle())
        for tenth in range(int(LATEST_S * 10)):
            garbage.busy(tenth / 10)
            garbage.look(tenth / 10)
        assert cycle() is not None
        garbage.busy(LATEST_S)
        garbage.look(LATEST_S)
        assert cycle() is None


def test_python_collects_by_itself_outside() -> None:
    assert gc.isenabled()
    with CalmGarbage(0.0):
        assert not gc.isenabled()
    assert gc.isenabled()

"""Invariants are found violated where a rule does not do its part."""

from __future__ import annotations

import pytest

from spare_megatron.protocol import invariants, machine
from spare_megatron.protocol import messages as m
from spare_megatron.protocol.transition import ignore
from tests.pure.scenario import FOLDER, run


def test_joiners_that_are_waited_for_when_their_grace_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(machine._RULES, m.JoinersLate, lambda state, event: ignore(state, "they may come yet"))
    with pytest.raises(invariants.InvariantError, match=r"is over and joiners \[2\] are waited for"):
        run((FOLDER / "joiners_that_are_late.txt").read_text())

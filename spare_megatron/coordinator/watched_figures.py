"""Figures for status.json that change all the time: where each group is, and how long the job will take. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spare_megatron.coordinator.watched_group import GroupStanding


def watched_figures(standings: Mapping[int, GroupStanding], time_to_train: Mapping[str, Any] | None) -> dict[str, Any]:
    """``groups``: group -> where it is; ``time_to_train``: as the coordinator's tuning has it."""
    groups = {str(group): _standing(one) for group, one in sorted(standings.items())}
    return {"groups": groups, "time_to_train": time_to_train}


def _standing(one: GroupStanding) -> dict[str, Any]:
    last, still_s, silent_s = one
    if last is None:
        return {"silent_s": round(silent_s, 2)}
    return {
        "step": last.step,
        "phase": last.phase,
        "rank": last.position,
        "pieces": last.pieces_done,
        "still_s": round(still_s, 2),
        "silent_s": round(silent_s, 2),
    }

"""Figures for status.json that change all the time: where each group is, how fast it is, and how long the job will
take. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from statistics import median_low
from typing import Any

from spare_megatron.coordinator.watched_group import GroupStanding


def speeds(piece_s: Mapping[int, float], members: Collection[int]) -> dict[int, float]:
    """Group -> its speed, 1 for the median member; of two, for the faster one. ``piece_s``: group -> seconds for a
    piece."""
    known = {group: one_s for group, one_s in piece_s.items() if one_s > 0 and group in members}
    median_s = median_low(known.values()) if known else 0.0
    return {group: round(median_s / one_s, 2) for group, one_s in known.items()}


def watched_figures(
    standings: Mapping[int, GroupStanding],
    speed: Mapping[int, float],
    left: Mapping[int, tuple[int, float]],
    time_to_train: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """``groups``: group -> where it is, its ``speed``, and of how many tickets it has not begun (``left``), where these
    are known; ``time_to_train``: as the coordinator's tuning has it."""
    groups = {}
    for group, one in sorted(standings.items()):
        groups[str(group)] = reported = _standing(one)
        if group in speed:
            reported["speed"] = speed[group]
        if group in left:
            reported["left"] = left[group][0]
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

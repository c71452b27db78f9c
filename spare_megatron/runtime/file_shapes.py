"""What the JSON files of a run directory look like, for those who read them: one may be damaged, or of another version.

A file is checked where it is read (``run_directory.read_json``), once for all its readers. Names that are not listed
are let through, so that a newer version's files can be read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

Check = Callable[[Any], bool]
LARGEST = 1 << 62


def whole(value: Any) -> bool:
    """An integer that others can count with."""
    return type(value) is int and abs(value) < LARGEST


def number(value: Any) -> bool:
    """A finite number."""
    return whole(value) or (type(value) is float and math.isfinite(value))


def measured(value: Any) -> bool:
    """A number, or one that has overflowed, as a loss may."""
    return number(value) or type(value) is float


def text(value: Any) -> bool:
    return isinstance(value, str)


def truth(value: Any) -> bool:
    return isinstance(value, bool)


def maybe(check: Check) -> Check:
    """What ``check`` says, or None."""
    return lambda value: value is None or check(value)


def each(check: Check) -> Check:
    """A list."""
    return lambda value: isinstance(value, list) and all(map(check, value))


def numbered(check: Check) -> Check:
    """An object whose names are numbers, of groups as a rule."""
    return lambda value: (
        (isinstance(value, dict) and all(re.fullmatch(r"\d{1,9}", name, re.ASCII) for name in value))
        and all(map(check, value.values()))
    )


def with_names(needed: Mapping[str, Check], known: Mapping[str, Check] | None = None) -> Check:
    """An object that has all ``needed`` names, and of the ``known`` ones any."""

    def fits(value: Any) -> bool:
        return isinstance(value, dict) and misfit(value, needed, known or {}) is None

    return fits


def misfit(plain: Mapping[str, Any], needed: Mapping[str, Check], known: Mapping[str, Check]) -> str | None:
    """What does not fit in an object; None where all does."""
    for name in needed:
        if name not in plain:
            return f"it has no {name!r}"
    for name, check in {**needed, **known}.items():
        if name in plain and not check(plain[name]):
            return f"{name!r} is {str(plain[name])[:40]!r}"
    return None


_OF_A_PLACE = {"step", "rank", "pieces", "still_s"}
_PLACE = with_names(
    {},
    {
        "silent_s": number,
        "step": whole,
        "phase": text,
        "rank": whole,
        "pieces": whole,
        "still_s": number,
        "speed": number,
        "left": whole,
    },
)
_TIME_TO_TRAIN = with_names(
    {
        "steps": whole,
        "without_failures_s": number,
        "predicted_s": maybe(number),
        "steps_done": whole,
        "at_this_pace_s": maybe(number),
    }
)
_COPIES = with_names(
    {
        "due": whole,
        "hosts": numbered(each(whole)),
        "copying": numbered(numbered(maybe(whole))),
        "unable": numbered(each(whole)),
    }
)
_STATUS = (
    {
        "phase": text,
        "epoch": whole,
        "step": whole,
        "last_step": maybe(whole),
        "num_groups": maybe(whole),
        "live": numbered(whole),
        "learners": numbered(whole),
        "load": numbered(whole),
        "failures_masked": whole,
        "saved_step": whole,
        "loss": maybe(measured),
        "outcome": text,
        "reason": text,
    },
    {
        "life": whole,
        "first_step": whole,
        "last_losses": each(text),
        "time_unix_s": number,
        "hosts_least": maybe(whole),
        "losses_left": maybe(whole),
        "last_hosts": maybe(each(whole)),
        "next_save": maybe(whole),
        "learning": numbered(text),
        "ready": each(whole),
        "drained": each(whole),
        "adopted": numbered(each(whole)),
        "adoption": truth,
        "offers": numbered(with_names({"donors": each(whole)})),
        "slow_for_long": numbered(with_names({"slowness": number, "share": whole})),
        "relieved": lambda value: value == {} or with_names({"step": whole, "moved": numbered(numbered(whole))})(value),
        "groups": numbered(lambda one: _PLACE(one) and ("phase" not in one or one.keys() >= _OF_A_PLACE)),
        "time_to_train": maybe(_TIME_TO_TRAIN),
        "state_copies": maybe(_COPIES),
    },
)
_RANK = with_names({}, {"group": whole, "position": whole, "incarnation": whole, "pid": maybe(whole), "host": text})


def _waiting(value: Any) -> bool:
    named = with_names({"name": text, "pid": whole}, {"stopped": truth})(value)
    return named and re.fullmatch(r"standby-\d{1,9}", value["name"], re.ASCII) is not None


_SUMMARY = {
    "outcome": text,
    "reason": text,
    "stop_signal": text,
    "steps": whole,
    "first_step": whole,
    "live_groups": each(whole),
    "saved_step": whole,
    "failures_masked": whole,
    "lives": whole,
}
_ADDRESS = {"address": text, "fencing": whole, "life": whole, "highest_incarnation": whole, "pid": whole, "host": text}
_FILES: Mapping[str, tuple[Mapping[str, Check], Mapping[str, Check]]] = {
    "status.json": _STATUS,
    "summary.json": ({}, _SUMMARY),
    "processes.json": ({}, {"ranks": each(_RANK), "waiting": each(_waiting)}),
    "coordinator.json": (_ADDRESS, {}),
    "launcher.json": ({"address": text}, {}),
    "accepted.json": ({"directory": text}, {}),
    "accepted-N.json": ({"directory": text}, {}),
    "began.json": ({"job": text, "accepted": text}, {}),
    "ended.json": ({"code": whole}, {}),
    "clock.json": ({"boot": text, "boot_unix_s": number}, {}),
}
_LEADER: tuple[Mapping[str, Check], Mapping[str, Check]] = ({"incarnation": whole, "address": text}, {})
METRICS_NEEDED: Mapping[str, Check] = {
    "life": whole,
    "step": whole,
    "time_unix_s": number,
    "step_time_s": number,
    "compute_paced_s": number,
    "reduce_least_s": number,
    "votes_s": number,
    "loss": maybe(measured),
    "recovery": maybe(
        with_names(
            {
                "detect_s": number,
                "agree_s": number,
                "patch_wait_s": number,
                "total_s": number,
                "rebuild_s": number,
                "lost_groups": each(whole),
            },
            {"formed_s": number},
        )
    ),
}
"""What every line of metrics.jsonl has that is read again."""
METRICS_KNOWN: Mapping[str, Check] = {
    **dict.fromkeys(("compute_s", "compute_even_s", "reduce_s", "reduce_median_s", "start_s"), number),
    **dict.fromkeys(("epoch", "live_groups", "pieces", "pieces_given", "load_max"), whole),
    "saves_s": each(lambda pair: isinstance(pair, list) and len(pair) == 2 and whole(pair[0]) and number(pair[1])),
    "slowest": each(lambda one: isinstance(one, list) and len(one) == 4 and whole(one[0]) and all(map(number, one))),
}


def check_file(folder: str, name: str, plain: Mapping[str, Any]) -> str | None:
    """What does not fit in the file ``name`` of a run directory, or of its folder ``leaders``; None where all does, or
    the file is not listed."""
    needed, known = _FILES.get(re.sub(r"\d+", "N", name), ({}, {}))
    if folder == "leaders":
        needed, known = _LEADER
    return misfit(plain, needed, known)

"""The content of status.json as text. Pure, and quick to import: a launcher shows it while it starts a job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

from spare_megatron.config.plural import counted
from spare_megatron.control_plane.reports import PHASE_ORDER
from spare_megatron.monitor.durations import duration
from spare_megatron.monitor.group_numbers import numbered_groups
from spare_megatron.monitor.speed_texts import speed_lines
from spare_megatron.monitor.waiting_counts import waiting_text

SHARDS_SHOWN = 8
QUIET_S = 10.0
"""A coordinator that goes on writes its status at least so often (coordinator.records)."""
SILENT_S = 2.0
"""Members that were not received for longer are named."""


def figures_line(status: Mapping[str, Any]) -> str:
    """Loss, live groups, load and masked failures, for a progress bar."""
    parts = [f"loss {status['loss']:.4f}"] if status["loss"] is not None else []
    parts.append(f"{len(status['live'])}/{status['num_groups']} groups live")
    if status["load"]:
        parts.append(f"load {max(status['load'].values())}")
    if status["failures_masked"]:
        parts.append(f"{counted(status['failures_masked'], 'failure')} masked")
    return ", ".join(parts)


def head_lines(status: Mapping[str, Any]) -> Iterator[str]:
    """How far the job is, and its figures."""
    if status["phase"] == "closed":
        yield "closed: no group has come yet"
        return
    yield f"{status['phase']}: step {status['step']} of {status['last_step']}, epoch {status['epoch']}"
    yield figures_line(status)


def quiet_text(quiet_s: float) -> str:
    """What is said of a job whose coordinator should go on, and has not written its status for ``quiet_s``; empty where
    that is not remarkable."""
    if quiet_s <= QUIET_S:
        return ""
    return f"the coordinator has written nothing for {duration(quiet_s)}: look whether the job's launcher still runs"


def status_text(status: Mapping[str, Any]) -> str:
    """The content of status.json as text for users."""
    lines = list(head_lines(status))
    lines.extend(loads(status))
    if status["learners"]:
        lines.append(f"being brought up to date: {', '.join(learners(status))}")
    lines.extend(places(status))
    lines.extend(speed_lines(status))
    lines.extend(standbys(status))
    if status.get("last_losses"):
        lines.append("last failures:")
        lines.extend(f"  {reason}" for reason in status["last_losses"])
    lines.extend(outlook(status))
    return "\n".join(lines)


def loads(status: Mapping[str, Any]) -> Iterator[str]:
    """Lines on the members, by the number of pieces that each has in the step in flight."""
    found = sorted((load, int(group)) for group, load in status["load"].items())
    for load, same in groupby(found, key=lambda one: one[0]):
        groups = [group for _, group in same]
        each = " each" if len(groups) > 1 else ""
        yield f"  {numbered_groups(groups)}: {counted(load, 'piece')}{each} in the step in flight"


def learners(status: Mapping[str, Any]) -> Iterator[str]:
    """The groups that come back, each with how far it is; an older version's status says less."""
    stages, offers = status.get("learning", {}), status.get("offers", {})
    for group in status["learners"]:
        known = [stages[group]] if group in stages else []
        if group in offers:
            known.append(f"from {numbered_groups(offers[group]['donors'])}")
        yield f"group {group} ({', '.join(known)})" if known else f"group {group}"


def places(status: Mapping[str, Any]) -> Iterator[str]:
    """Lines on the member that is furthest behind, and on members that have not been received for long."""
    members = {group: one for group, one in status.get("groups", {}).items() if group in status["live"]}
    received = {group: one for group, one in members.items() if "phase" in one}
    if received and status["phase"] == "running":
        group, last = min(received.items(), key=lambda item: (*_place(item[1]), -item[1]["still_s"]))
        where = f"group {group} (rank {last['rank']}) in step {last['step']}, {last['phase']}"
        yield f"furthest behind: {where}, {counted(last['pieces'], 'piece')} done, for {last['still_s']:.1f} s"
    silent = [int(group) for group, one in members.items() if one.get("silent_s", 0.0) > SILENT_S]
    if silent:
        most_s = max(members[str(group)]["silent_s"] for group in silent)
        yield f"not received for up to {most_s:.1f} s: {numbered_groups(silent)}"


def standbys(status: Mapping[str, Any]) -> Iterator[str]:
    """A line on standbys, where there are any."""
    text = waiting_text(status.get("waiting", {}))
    if text:
        yield text


def _place(one: Mapping[str, Any]) -> tuple[int, int]:
    return one["step"], PHASE_ORDER.get(one["phase"], 0)


def outlook(status: Mapping[str, Any]) -> Iterator[str]:
    """Lines on what threatens, on saves, on how long it takes, and on the end; an older version's status says less."""
    hosts, running, next_save = status.get("hosts_least"), status["phase"] == "running", status.get("next_save")
    if running and hosts == 1:
        yield f"some shard has one live host{_threat(status)}"
    elif running and hosts:
        losses = counted(hosts - 1, "more loss", "more losses")
        yield f"every shard has at least {hosts} live hosts; {losses} can be masked for certain"
    for shard, groups in status.get("adopted", {}).items():
        yield f"shard {shard} is adopted by {numbered_groups(groups)}"
    if status.get("state_copies"):
        yield from _state_copies(status["state_copies"])
    for group in status.get("drained", []):
        how = "is to leave, as soon as the others can do without it" if str(group) in status["live"] else "is drained"
        yield f"group {group} {how}; spare-drain --undo takes that back"
    saved = f"last good checkpoint: step {status['saved_step']}" if status["saved_step"] >= 0 else "no checkpoint yet"
    yield f"{saved}, next save: step {next_save}" if running and next_save is not None else saved
    if running and status.get("time_to_train") is not None:
        yield _time_to_train(status["time_to_train"])
    if status["outcome"]:
        yield f"{status['outcome']}: {status['reason']}"


def _threat(status: Mapping[str, Any]) -> str:
    """What the loss of a last host would be."""
    last = status.get("last_hosts", [])
    who = f"{'one of ' if len(last) > 1 else ''}{numbered_groups(last)}"
    if status.get("adoption"):
        return f": without {who if last else 'that'} others would have to adopt it"
    return f": the loss of {who} would be a wipe-out" if last else ", whose loss would be a wipe-out"


def short_shards(copies: Mapping[str, Any] | None) -> list[str]:
    """The state shards that have too few copies, of ``state_copies`` of status.json."""
    hosts = copies["hosts"] if copies else {}
    return [shard for shard in hosts if copies and len(hosts[shard]) < copies["due"]]


def _state_copies(reported: Mapping[str, Any]) -> Iterator[str]:
    """Which groups keep which state shards, and what is being copied; of many shards only those with too few copies."""
    due, hosts, lacking = reported["due"], reported["hosts"], short_shards(reported)
    if lacking:
        shards = counted(len(lacking), "state shard has", "state shards have")
        yield f"{shards} fewer than {counted(due, 'copy', 'copies')}"
    else:
        yield f"each of the {len(hosts)} state shards has {counted(due, 'copy', 'copies')}"
    shown = hosts if len(hosts) <= SHARDS_SHOWN else lacking
    for shard in list(shown)[:SHARDS_SHOWN]:
        kept = f"on {numbered_groups(hosts[shard])}" if hosts[shard] else "nowhere for certain"
        new = (
            f"; group {group} {'has a copy to compare' if donor is None else f'copies it from group {donor}'}"
            for group, donor in reported["copying"].get(shard, {}).items()
        )
        unable = reported["unable"].get(shard)
        no = f"; {numbered_groups(unable)} cannot keep it" if unable else ""
        yield f"  state shard {shard}: {kept}{''.join(new)}{no}"
    if len(shown) > SHARDS_SHOWN:
        yield f"  and {len(shown) - SHARDS_SHOWN} more"


def _time_to_train(reported: Mapping[str, Any]) -> str:
    """What was predicted when the job chose for itself, and what came of it."""
    pace_s, predicted_s = reported["at_this_pace_s"], reported["predicted_s"]
    figures = [
        f"{duration(reported['without_failures_s'])} without failures",
        "no prediction" if predicted_s is None else f"{duration(predicted_s)} predicted",
        *([] if pace_s is None else [f"{duration(pace_s)} at the pace of the {reported['steps_done']} done"]),
    ]
    return f"the {reported['steps']} steps left at the choice take {', '.join(figures)}"

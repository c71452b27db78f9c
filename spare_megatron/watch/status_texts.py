"""The content of status.json as text. Pure, and quick to import: a launcher shows it while it starts a job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from spare_megatron.config.plural import counted


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
    yield f"{status['phase']}: step {status['step']} of {status['last_step']}, epoch {status['epoch']}"
    if status["phase"] != "closed":
        yield figures_line(status)


def status_text(status: Mapping[str, Any]) -> str:
    """The content of status.json as text for users."""
    lines = list(head_lines(status))
    for group, load in status["load"].items():
        pieces = counted(load, "piece")
        lines.append(f"  group {group} (incarnation {status['live'][group]}): {pieces} in the step in flight")
    if status["learners"]:
        stages = status.get("learning", {})
        groups = (
            f"group {group} ({stages[group]})" if group in stages else f"group {group}" for group in status["learners"]
        )
        lines.append(f"being brought up to date: {', '.join(groups)}")
    if status["last_losses"]:
        lines.append("last failures:")
        lines.extend(f"  {reason}" for reason in status["last_losses"])
    lines.extend(outlook(status))
    return "\n".join(lines)


def outlook(status: Mapping[str, Any]) -> Iterator[str]:
    """Lines on what threatens, on saves, and on the end; an older version's status says less."""
    hosts, running, next_save = status.get("hosts_least"), status["phase"] == "running", status.get("next_save")
    if running and hosts == 1:
        yield "some shard has one live host, whose loss would be a wipe-out"
    elif running and hosts:
        losses = counted(hosts - 1, "more loss", "more losses")
        yield f"every shard has at least {hosts} live hosts; {losses} can be masked for certain"
    saved = f"last good checkpoint: step {status['saved_step']}" if status["saved_step"] >= 0 else "no checkpoint yet"
    yield f"{saved}, next save: step {next_save}" if running and next_save is not None else saved
    if status["outcome"]:
        yield f"{status['outcome']}: {status['reason']}"

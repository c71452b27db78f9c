"""The content of status.json as text. Pure, and quick to import: a launcher shows it while it starts a job."""

from __future__ import annotations

from collections.abc import Mapping
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


def status_text(status: Mapping[str, Any]) -> str:
    """The content of status.json as text for users."""
    lines = [f"{status['phase']}: step {status['step']} of {status['last_step']}, epoch {status['epoch']}"]
    if status["phase"] != "closed":
        lines.append(figures_line(status))
    for group, load in status["load"].items():
        pieces = counted(load, "piece")
        lines.append(f"  group {group} (incarnation {status['live'][group]}): {pieces} in the step in flight")
    if status["learners"]:
        word = "group" if len(status["learners"]) == 1 else "groups"
        lines.append(f"being brought up to date: {word} {', '.join(status['learners'])}")
    if status["last_losses"]:
        lines.append("last failures:")
        lines.extend(f"  {reason}" for reason in status["last_losses"])
    if status["saved_step"] >= 0:
        lines.append(f"last good checkpoint: step {status['saved_step']}")
    if status["outcome"]:
        lines.append(f"{status['outcome']}: {status['reason']}")
    return "\n".join(lines)

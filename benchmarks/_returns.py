"""What the benchmarks of groups that come back wait for in a running job."""

from __future__ import annotations

from typing import Any

from spare_megatron.coordinator.journal import Record
from spare_megatron.protocol.messages import SendCommit, SendView, View
from spare_megatron.runtime.run_directory import glance
from tests.process.harness import Job

LIMIT_S = 300.0
"""How long a return may take."""


def status(job: Job) -> dict[str, Any]:
    """What the coordinator reports of the job."""
    return glance(job.run_dir / "status.json") or {"live": {}, "step": 0}


def until_whole(job: Job, groups: int, steps: int, back: tuple[int, int] | None = None) -> None:
    """Until all groups have trained together for some steps, the (group, incarnation) ``back`` among them: just behind
    a loss the status still has the group that was lost."""

    def whole() -> bool:
        live = status(job)["live"]
        return len(live) == groups and (back is None or live.get(str(back[0])) == back[1])

    job.wait_for("all groups", whole, LIMIT_S)
    until = status(job)["step"] + steps
    job.wait_for(f"step {until}", lambda: status(job)["step"] >= until, LIMIT_S)


def until_started(job: Job, member: tuple[int, int]) -> None:
    """Until the ranks of a (group, incarnation) run."""

    def there() -> bool:
        return any((rank["group"], rank["incarnation"]) == member for rank in job.ranks())

    job.wait_for(f"the start of {member}", there, LIMIT_S)


def reports(record: Record, kind: type, member: tuple[int, int]) -> bool:
    """Whether a record's event is of this kind and of a (group, incarnation)."""
    return isinstance(record.event, kind) and (record.event.group, record.event.incarnation) == member


def views(record: Record, member: tuple[int, int]) -> list[View]:
    """The views that a record sends to a (group, incarnation)."""
    return [one.view for one in record.actions if isinstance(one, SendView) and one.view.receiver == member]


def commits(record: Record) -> bool:
    """Whether a record commits a step."""
    return any(isinstance(action, SendCommit) for action in record.actions)

"""How large a job is that is explored, and what may happen to it."""

from __future__ import annotations

from dataclasses import dataclass

from spare_megatron.controller.messages import JobSpec
from spare_megatron.placement import build_placement

FAULTS = (
    *("kill", "suspect", "stall", "standstill", "cut", "repeat", "restart", "takeover", "return", "late", "fail"),
    *("damage", "err", "stop", "hurry"),
)
"""kill: a process ends; suspect: a live group is lost by the detector's word; stall, standstill: one stands still, or
all do; cut: a connection breaks; repeat: a vote is said twice; restart, takeover: of the coordinator; return: a new
incarnation of a group; late: the joiners' time is over; fail: a reduction fails; damage: a bit of the weights flips;
err: something is computed wrongly; stop: somebody asks the job to leave; hurry: the time to come at start is over."""


@dataclass(frozen=True)
class Shape:
    """The size of a job, and what may happen to it."""

    groups: int = 2
    redundancy: int = 2
    steps: int = 2
    pieces: int = 1
    """Per shard."""
    faults: int = 2
    """In all."""
    kinds: frozenset[str] = frozenset({"kill"})
    each: tuple[tuple[str, int], ...] = ()
    """(kind, at most so many of it) where that is fewer than ``faults``."""
    save_every: int = 0
    audit_rate: float = 0.0
    granularity: str = "microbatch"
    formed: bool = False
    """Start with all groups in their first step."""
    late_finals: bool = False
    """A ghost says one final record after it was replaced, which the second confirmation is there to prevent. The job
    may fail then; it must not hang, and no step may be applied twice or differently."""

    @property
    def spec(self) -> JobSpec:
        """The machine's constants."""
        offsets = build_placement(self.groups, self.redundancy).offsets
        return JobSpec(
            self.groups,
            self.pieces,
            offsets,
            self.granularity,
            first_step=0,
            last_step=self.steps,
            min_groups=1,
            fingerprint="job",
            retry_limit=99,
            audit_rate=self.audit_rate,
            audit_seed=7,
            save_every=self.save_every,
        )

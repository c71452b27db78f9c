"""The size of an explored job, and the faults that may happen to it."""

from __future__ import annotations

from dataclasses import dataclass

from spare_megatron.placement import build_placement
from spare_megatron.protocol.messages import JobSpec

FAULTS = (
    *("kill", "suspect", "stall", "standstill", "cut", "repeat", "restart", "takeover", "return", "late", "fail"),
    *("damage", "err", "stop", "hurry", "void", "withdraw", "slow", "ask", "drain", "unable", "speeds"),
    *("twin", "tune", "home"),
)
"""kill: a process ends; suspect: the detector takes a live group for dead; stall: the detector finds that a group
stands still; standstill: that all do; cut: a connection breaks; repeat: a vote is sent twice; restart: the coordinator
restarts; takeover: another coordinator takes over; return: a new process of a group sends Hello; late: the joiners'
time is over; fail: a reduction fails; damage: a bit of the weights flips; err: something is computed wrongly; stop:
somebody asks the job to leave; hurry: the time to wait for groups at the start is over; void: a learner or joiner gives
its offer up; withdraw: a donor does; slow: a
group takes its time over its pieces, and may be asked to give some back; ask: a group that is not slow is asked; drain:
an operator wants a group to leave, or takes that wish back; unable: a group cannot open a shard that it was to adopt,
or cannot keep a state shard of which it is a new host;
speeds: it was measured that a group is slow for long, or is not any more; twin: a launcher starts a process of a group
whose last one still runs; tune: the tuner orders a save; home: the launcher wants a group to leave for now, or takes
that back."""


@dataclass(frozen=True)
class Shape:
    """The size of a job, and the faults that may happen to it."""

    groups: int = 2
    redundancy: int = 2
    steps: int = 2
    pieces: int = 1
    """Number of pieces of each shard."""
    faults: int = 2
    """Number of faults in all."""
    kinds: frozenset[str] = frozenset({"kill"})
    each: tuple[tuple[str, int], ...] = ()
    """(kind, largest number of its faults) of kinds with a limit below ``faults``."""
    save_every: int = 0
    audit_rate: float = 0.0
    granularity: str = "microbatch"
    emergency_saves: bool = False
    adoption: bool = False
    state_shards: int = 0
    """Number of state shards; 0: every group hosts everything."""
    state_copies: int = 0
    hasty: bool = False
    """A step that has failed once has failed too often and for too long."""
    formed: bool = False
    """Start with all groups in their first step."""
    offsets: tuple[int, ...] = ()
    """Those of the placement; empty: the usual ones for ``redundancy``."""
    observed: bool = False
    """The judge remembers what was voted, saved and compared (tests.explore.observer). That would multiply the states
    of an exploration."""
    late_finals: bool = False
    """A ghost sends the actions of one final record after it was replaced, which the second confirmation is there to
    prevent. The job may fail then, but it must not hang, and no step may be applied twice or differently."""

    @property
    def spec(self) -> JobSpec:
        """The machine's constants."""
        offsets = self.offsets or build_placement(self.groups, self.redundancy).offsets
        return JobSpec(
            self.groups,
            self.pieces,
            offsets,
            self.granularity,
            first_step=0,
            last_step=self.steps,
            min_groups=1,
            fingerprint="job",
            heartbeat_timeout_s=float(self.observed),
            retry_limit=0 if self.hasty else 99,
            audit_rate=self.audit_rate,
            audit_seed=7,
            save_every=self.save_every,
            emergency_saves=self.emergency_saves,
            adoption=self.adoption,
            state_shards=self.state_shards,
            state_copies=self.state_copies,
        )

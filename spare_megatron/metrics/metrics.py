"""Computes the line of metrics.jsonl of each committed step from the protocol machine's events and decisions. No I/O.

:class:`MetricsBook` is given every event with its decision, live or in a replay of the journal, so a restarted
coordinator has the same figures; where the replay begins with a snapshot, that has a memo of the earlier ones. What
only ranks know (loss, times) comes with the votes for a commit and with the reports after it was applied, of which the
first counts. A line is ready when the report of its step, or of a later step, has arrived.
"""

from __future__ import annotations

import heapq
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from spare_megatron.config.batches import BatchSchedule
from spare_megatron.metrics.moved_pieces import moved_pieces
from spare_megatron.protocol.machine import State
from spare_megatron.protocol.messages import Decision, Event, Hello, Lost, Opened, SendCommit, Vote

LOSING = Lost | Vote | Hello
"""Events in which members are lost."""
TIMES = ("rebuild_s", "patch_s", "reduce_s")
"""Recovery times that come with the votes; a line has the greatest value over all ranks and groups."""
SLOWEST_MAX = 16
"""So many groups a line tells of one by one: who is slow, at a size that does not grow with the job."""
_OF_A_GROUP = ("compute_s", "patch_s", "reduce_s")
Figures = Sequence[tuple[str, float]]


@dataclass
class _Recovery:
    """The losses of groups during the step in flight, and the times of their handling. Times are in seconds."""

    detect_s: float
    first_evidence_s: float
    agree_s: float = 0.0
    lost: set[int] = field(default_factory=set)
    computed_by_dead: int = 0
    given_by_dead: int = 0
    """Pieces that they had given back before."""
    decided_s: float = 0.0
    missing: set[int] = field(default_factory=set)
    """Groups that have not said when their last rank dropped the communicators of the old epoch."""
    seen_s: float = 0.0
    """When the last of the others did."""
    seen: dict[int, float] = field(default_factory=dict)
    """When each of them did."""

    def formed_later_s(self, times: Mapping[int, Mapping[str, float]]) -> float:
        """For how long some group still formed its new communicators when all had dropped the old ones. Who drops them
        first forms the new ones while others drop theirs."""
        formed_s = [
            self.seen.get(group, self.decided_s) + figures.get("rebuild_s", 0.0) for group, figures in times.items()
        ]
        dropped_s = max([self.decided_s, *self.seen.values()])
        return max([0.0, *(at_s - dropped_s for at_s in formed_s)])


@dataclass
class Totals:
    """Counts over all job attempts, for its summary."""

    steps_committed: int = 0
    failures_masked: int = 0
    wipe_outs: int = 0
    soft_wipe_outs: int = 0
    """Losses of the last hosts of shards, which others have adopted."""
    joins: int = 0
    steps_lost: int = 0
    """Steps that were committed, and then computed again from a checkpoint."""
    recoveries: int = 0


@dataclass(frozen=True)
class RealPieces:
    """Counts pieces that have samples, in a job whose batch size changes: smaller batches leave some pieces empty."""

    batches: BatchSchedule
    pieces_per_shard: int
    """K of the full batch."""
    full: int
    """Samples of the full batch; every step's has at most as many."""

    def __call__(self, step: int, pieces: Iterable[int]) -> int:
        """How many of ``pieces`` have samples in ``step``."""
        number = -(-self.pieces_per_shard * self.batches.size(step) // self.full)
        return sum(piece % self.pieces_per_shard < number for piece in pieces)


def all_real(_step: int, pieces: Iterable[int]) -> int:
    """Number of pieces that have samples, in a job with one batch size: all of ``pieces``."""
    return sum(1 for _ in pieces)


class MetricsBook:
    """Collects the figures of steps until their lines are ready.

    ``written`` is the (job attempt, step) of the last line that metrics.jsonl already has: no line is made up to there.
    """

    def __init__(
        self, loss_name: str = "lm loss", written: tuple[int, int] = (0, -1), started_unix_s: float = math.inf
    ) -> None:
        """``started_unix_s`` is when this coordinator's process began."""
        self.loss_name = loss_name
        self._started_unix_s = started_unix_s
        self._start_s: float | None = None
        """From the start of the coordinator to the beginning of the job attempt's first step, until that step has a
        line."""
        self._saves: list[tuple[int, float]] = []
        """(step, for how long a save kept a group from beginning it), until the next line."""
        self._voting = ((0, 0), 0.0)
        """(step, epoch) of the newest votes, and when the first of them came."""
        self.totals = Totals()
        self.real_pieces: Callable[[int, Iterable[int]], int] = all_real
        self._written = written
        self._pending: dict[int, dict[str, Any]] = {}
        self._reports: dict[int, Mapping[str, Any]] = {}
        self._figures: dict[int, dict[str, float]] = {}
        self._figures_at = (0, 0)
        self._recovery: _Recovery | None = None
        self._last_commit_s: float | None = None
        self._times: list[float] = []
        self._disturbed: list[float] = []
        self._job_attempt = 0
        self.relieved: dict[str, Any] = {}
        """The last step in which pieces moved, and who gave how many to whom; empty before there was one."""
        self.piece_s: dict[int, float] = {}
        """Group -> seconds for a piece of its own in the last committed step."""
        self.own: dict[int, int] = {}
        """Group -> how many pieces of its own it had in that step."""

    # ---------------------------------------------------------------------------------------------- what is decided

    def observe(
        self, time_s: float, before: State, event: Event, decision: Decision, after: State, detect_s: float = 0.0
    ) -> None:
        """Take one transition of the protocol machine.

        ``time_s`` is the time of the event in seconds; ``detect_s`` the seconds between the first evidence of a loss
        and this event.
        """
        if isinstance(event, Opened):
            self._open(time_s, before, after)
            return
        if before.phase == "forming" and after.phase == "running":
            self._start_s = time_s - min(self._started_unix_s, self._last_commit_s or time_s)
            self._last_commit_s = time_s
        # Most events are votes that change no member; looking for one among a thousand takes longer than all the rest.
        changed = after.live is not before.live
        commits = after.committed != before.committed  # who leaves with a commit was drained
        if changed and not commits and isinstance(event, LOSING) and before.phase in ("running", "ending"):
            self._lose(time_s, before, event, after, detect_s)
        if isinstance(event, Vote) and event.result.at != self._voting[0]:
            self._voting = event.result.at, time_s
        for action in decision.actions:
            if isinstance(action, SendCommit):
                self._commit(time_s, before, action)
        if changed and before.phase == "running" and after.phase == "running":
            self.totals.joins += len(after.live.keys() - before.live.keys())
        if after.adopted is not before.adopted and not after.outcome and isinstance(event, LOSING):
            self.totals.soft_wipe_outs += bool(set(after.where.adopted) - set(before.where.adopted))
        if after.outcome == "wipe-out" and not before.outcome:
            self.totals.wipe_outs += 1

    def _open(self, time_s: float, before: State, after: State) -> None:
        if after.job_attempt == before.job_attempt:
            return
        if before.spec is not None:
            self.totals.steps_lost += max(0, before.committed[0] - after.committed[0])
        self._job_attempt = after.job_attempt
        self._pending, self._reports, self._figures = {}, {}, {}
        self._recovery, self._last_commit_s, self._start_s, self._saves = None, time_s, None, []

    def _lose(self, time_s: float, before: State, event: Lost | Vote | Hello, after: State, detect_s: float) -> None:
        """Count groups that died, that a vote showed to be wrong, or of which another incarnation has come before their
        death was known. What a vote shows to be wrong had computed all of its pieces."""
        dead = before.live.keys() - after.live.keys()
        if not dead:
            return
        if after.outcome in ("finished", "left") or (before.phase != "running" and not after.outcome):
            self.totals.failures_masked += len(dead)  # no commit follows that could count them
        if before.phase != "running":
            return
        if self._recovery is None:
            self._recovery = _Recovery(detect_s, time_s - detect_s)
            self.totals.recoveries += 1
        recovery = self._recovery
        progress = dict(event.progress) if isinstance(event, Lost) else {}
        if isinstance(event, Vote):
            progress = dict(enumerate(before.plan.loads().tolist()))
        recovery.lost |= dead
        recovery.computed_by_dead += sum(self._done(before, group, progress.get(group, 0)) for group in dead)
        recovery.given_by_dead += sum(len(before.plan.left.get(group, ())) for group in dead)
        recovery.decided_s, recovery.missing, recovery.seen = time_s, set(after.live), {}

    def _done(self, before: State, group: int, done: int) -> int:
        """How many of ``done`` computed pieces have samples: a group runs these before its empty ones."""
        if self.real_pieces is all_real:
            return done
        return min(done, sum(self.real_pieces(before.step_in_flight, part) for part in before.segments_of(group)))

    def _commit(self, time_s: float, before: State, commit: SendCommit) -> None:
        real = self.real_pieces
        loads = {
            group: [real(commit.step, part) for part in before.segments_of(group)] for group in sorted(before.live)
        }
        times = self._figures if self._figures_at == (commit.step, commit.epoch) else {}
        discarded = int(sum(f.get("pieces_discarded", 0.0) for f in times.values()))
        reduced = _of_groups(times, "reduce_s")
        pieces = real(commit.step, range(before.job.num_groups * before.job.pieces_per_shard))
        recovery, step_time_s = self._recovery, time_s - (self._last_commit_s or time_s)
        moved = moved_pieces(before.plan)
        self.totals.failures_masked += len(recovery.lost) if recovery else 0
        own = self.own = {group: parts[0] for group, parts in loads.items()}
        self.piece_s = {g: reported.get("compute_s", 0.0) / own[g] for g, reported in times.items() if own.get(g)}
        line: dict[str, Any] = {
            "step": commit.step,
            "epoch": commit.epoch,
            "life": self._job_attempt,
            "live_groups": len(before.live),
            "load_max": max(map(sum, loads.values()), default=0),
            "pieces": pieces,
            "time_unix_s": time_s,
            "step_time_s": round(step_time_s, 6),
            "pieces_computed": sum(map(sum, loads.values()))
            + discarded
            + (recovery.computed_by_dead if recovery else 0),
            "pieces_discarded": discarded,
            "pieces_given": sum(map(len, before.plan.left.values())) + (recovery.given_by_dead if recovery else 0),
            "pieces_audited": sum(len(part) for audits in before.audits.values() for part in audits),
            "compute_s": round(max(_of_groups(times, "compute_s")), 6),
            **_at_median_pace(self.piece_s, max(own.values(), default=0), pieces / before.job.num_groups),
            "reduce_s": round(max(reduced), 6),
            "reduce_median_s": round(statistics.median(reduced), 6),
            "reduce_least_s": round(min(reduced), 6),
            "votes_s": round(time_s - self._voting[1], 6) if self._voting[0] == (commit.step, commit.epoch) else 0.0,
            "buckets_early": int(max((f.get("buckets_early", 0.0) for f in times.values()), default=0.0)),
            "recovery": None if recovery is None else _recovery_line(recovery, times, time_s),
            "slowest": _slowest(times),
        }
        if moved:
            line["moved"], self.relieved = moved, {"step": commit.step, "moved": moved}
        if self._start_s is not None:
            line["start_s"], self._start_s = round(self._start_s, 6), None
        (self._times if recovery is None else self._disturbed).append(step_time_s)
        self.totals.steps_committed += 1
        if (self._job_attempt, commit.step) > self._written:
            self._pending[commit.step] = line
        self._recovery, self._last_commit_s, self._figures = None, time_s, {}

    # ----------------------------------------------------------------------------------------- what the ranks report

    def figures(self, step: int, epoch: int, group: int, figures: Figures) -> None:
        """Take the numbers that came with a group's vote; to be called before that vote is observed."""
        if (step, epoch) != self._figures_at:
            self._figures_at, self._figures = (step, epoch), {}
        self._figures[group] = dict(figures)

    def seen(self, group: int, time_s: float) -> None:
        """Note when all ranks of a group had dropped the communicators of older epochs.

        The last live group to do so ends the time ``agree_s`` of the recovery.
        """
        recovery = self._recovery
        if recovery is None or group not in recovery.missing:
            return
        recovery.missing.discard(group)
        recovery.seen[group] = time_s
        recovery.seen_s = max(recovery.seen_s, time_s)
        if not recovery.missing:
            recovery.agree_s += max(0.0, recovery.seen_s - recovery.decided_s)

    def report(self, step: int, report: Mapping[str, Any]) -> None:
        """Take what one group reports of a step that it applied; of several reports the first counts, but for what only
        one group knows: for how long a save kept it from beginning the step."""
        if "save_s" in report:
            self._saves.append((step, report["save_s"]))
        if step in self._pending and step not in self._reports:
            self._reports[step] = report

    def ready(self, all_of_them: bool = False) -> list[dict[str, Any]]:
        """The lines that can be written now, in order of step; each is returned once.

        With ``all_of_them`` also those of steps that nobody has reported yet.
        """
        newest = max(self._pending, default=0) if all_of_them else max(self._reports, default=0)
        lines = []
        for step in sorted(s for s in self._pending if s <= newest):
            lines.append(self._finish(self._pending.pop(step), self._reports.pop(step, {})))
        return lines

    def _finish(self, line: dict[str, Any], report: Mapping[str, Any]) -> dict[str, Any]:
        self._written = (line["life"], line["step"])
        whole = {"step": line["step"], "epoch": line["epoch"], "loss": report.get(self.loss_name)}
        for key in ("grad_norm", "lr", "tokens"):
            whole[key] = report.get(key)
        rest = {key: value for key, value in report.items() if key not in whole and key != "save_s"}
        saves, self._saves = self._saves, []
        return {**whole, **line, **rest, **({"saves_s": saves} if saves else {})}

    # -------------------------------------------------------------------------------------------------- for a snapshot

    def memo(self) -> dict[str, Any]:
        """What the events so far have left here, as JSON values, for :meth:`recall` of another book. What ranks
        reported is not in it, except in lines that are complete."""
        recovery = self._recovery
        return {
            "life": self._job_attempt,
            "totals": asdict(self.totals),
            "pending": list(self._pending.values()),
            "last_commit_s": self._last_commit_s,
            "start_s": self._start_s,
            "times": list(self._times),
            "disturbed": list(self._disturbed),
            "relieved": self.relieved,
            "recovery": None
            if recovery is None
            else {
                **asdict(recovery),
                "lost": sorted(recovery.lost),
                "missing": sorted(recovery.missing),
                "seen": list(recovery.seen.items()),
            },
        }

    def recall(self, memo: Mapping[str, Any], complete: Iterable[dict[str, Any]] = ()) -> None:
        """Go on from the memo of another book. Lines that were ``complete`` then are ready again, with their reports;
        no line is made twice that metrics.jsonl has."""
        self._job_attempt, self.totals = memo["life"], Totals(**memo["totals"])
        lines = [line for line in (*complete, *memo["pending"]) if line["life"] == self._job_attempt]
        self._pending = {line["step"]: line for line in lines if (line["life"], line["step"]) > self._written}
        self._last_commit_s, self._start_s = memo["last_commit_s"], memo.get("start_s")
        self._times, self._disturbed = list(memo["times"]), list(memo["disturbed"])
        self.relieved = memo.get("relieved", {})
        kept = memo["recovery"]
        if kept is not None:
            sets = {name: set(kept[name]) for name in ("lost", "missing")}
            kept = _Recovery(**{**kept, **sets, "seen": dict(kept.get("seen", ()))})
        self._recovery = kept

    @property
    def stall_s(self) -> float:
        """Seconds that failures cost: what steps with a recovery took beyond the median of the other steps."""
        usual_s = statistics.median(self._times) if self._times else 0.0
        return sum(max(0.0, time_s - usual_s) for time_s in self._disturbed)


def _of_groups(times: Mapping[int, Mapping[str, float]], *names: str) -> list[float]:
    """The sum of these figures for each group that reported any, or 0 alone where none has."""
    return [sum(figures.get(name, 0.0) for name in names) for figures in times.values()] or [0.0]


def _slowest(times: Mapping[int, Mapping[str, float]]) -> list[list[float]]:
    """[group, seconds in its own pieces, in patches, in the sums] of the groups that computed for longest."""
    reported = ((group, *(figures.get(name, 0.0) for name in _OF_A_GROUP)) for group, figures in times.items())
    found = heapq.nsmallest(SLOWEST_MAX, reported, key=lambda one: (-one[1] - one[2], one[0]))
    return [[group, *(round(seconds, 4) for seconds in parts)] for group, *parts in found]


def _at_median_pace(piece_s: Mapping[int, float], most: int, even: float) -> dict[str, float]:
    """How long a group would compute at the median group's pace, with the ``most`` pieces that a group has without
    patches, and with ``even`` ones. ``piece_s``: group -> seconds for a piece."""
    pace_s = statistics.median(piece_s.values()) if piece_s else 0.0
    return {"compute_paced_s": round(pace_s * most, 6), "compute_even_s": round(pace_s * even, 6)}


def _recovery_line(recovery: _Recovery, times: Mapping[int, Mapping[str, float]], time_s: float) -> dict[str, Any]:
    greatest = {name: max((f.get(name, 0.0) for f in times.values()), default=0.0) for name in TIMES}
    return {
        "detect_s": round(recovery.detect_s, 6),
        "agree_s": round(recovery.agree_s, 6),
        "formed_s": round(recovery.agree_s + recovery.formed_later_s(times), 6),
        **{name: round(value, 6) for name, value in greatest.items()},
        "patch_wait_s": round(max(_of_groups(times, "compute_s", "patch_s")) - max(_of_groups(times, "compute_s")), 6),
        "total_s": round(time_s - recovery.first_evidence_s, 6),
        "pieces_joined": int(sum(f.get("pieces_joined", 0.0) for f in times.values())),
        "lost_groups": sorted(recovery.lost),
    }

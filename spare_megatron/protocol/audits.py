"""Audits: a second host of a shard computes some of its pieces too, and the two gradients are compared.

Checksums of sums cannot show wrong arithmetic in a forward or backward pass, because the summed gradient itself is
wrong. A keyed hash of (seed, step, piece) selects a share F of the pieces; every process can compute it. The least
loaded live host beside the owner computes a selected piece as well, adds nothing to its accumulators, and votes the
checksum of the piece's rounded gradient; so does the owner. :func:`judge` compares them before the step is committed.

Two different checksums do not say who is wrong, so a third host computes the piece in a new epoch. Every checksum that
was ever voted for a disputed piece of this step is an opinion, also that of a member that has died since. One member
has one opinion, however often it computed the piece, and is accused of no other's; where its successor has computed
the piece too, the successor's opinion takes its place, because both may have run on the same hardware. More than half
of the opinions are right; without such a majority a further host is asked; when there is none, nobody can say which
weights the step would give.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from spare_megatron.config.plural import counted
from spare_megatron.placement import Placement
from spare_megatron.protocol.assign import Assignment
from spare_megatron.protocol.messages import JobSpec, Vote
from spare_megatron.protocol.state import State
from spare_megatron.protocol.view import MemberId, Segments

Opinions = Mapping[int, Mapping[MemberId, int]]
"""Piece -> member -> checksum."""

NAMED_MAX = 3
"""A reason names at most this many parameters."""


def selected(spec: JobSpec, step: int, pieces: Iterable[int]) -> tuple[int, ...]:
    """Those of ``pieces`` that are audited in ``step``, in the given order."""
    if not spec.audit_rate:
        return ()
    numbers = np.fromiter(pieces, dtype=np.uint64)
    key = _mix(_mix(np.array([spec.audit_seed], dtype=np.uint64)) ^ np.uint64(step))
    share = (_mix(_mix(numbers) ^ key) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return tuple(numbers[share < spec.audit_rate].tolist())


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64 (Steele, Lea, Flood 2014); arrays of unsigned integers wrap."""
    z = x + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def draw(
    spec: JobSpec, placement: Placement, assignment: Assignment, able: Iterable[int], step: int
) -> dict[int, Segments]:
    """Group -> the pieces that it audits in ``step`` under ``assignment``, all in its first segment.

    Each selected piece goes to the least loaded host of its shard among the groups ``able`` other than the owner (by
    time, where groups are slow for long); a piece without such a host is not audited. The choice is repeated until no
    piece has a host whose load it would improve, because hosts differ from shard to shard and one round leaves the
    loads uneven.
    """
    if not spec.audit_rate:
        return {}
    hosts, owners = placement.hosts(), assignment.owner.ravel()
    takes, may = assignment.slowness.tolist(), frozenset(able)
    loads = (assignment.loads * assignment.slowness).tolist()
    others = {
        piece: [g for g in hosts[piece // spec.pieces_per_shard].tolist() if g in may and g != owners[piece]]
        for piece in selected(spec, step, range(len(owners)))
    }
    auditors: dict[int, int] = {}
    moved = True
    while moved:
        moved = False
        for piece in filter(others.__getitem__, others):
            best, present = min(others[piece], key=loads.__getitem__), auditors.get(piece)
            if present is None or loads[best] + takes[best] < loads[present]:
                moved = True
                auditors[piece] = best
                loads[best] += takes[best]
                if present is not None:
                    loads[present] -= takes[present]
    drawn: dict[int, list[int]] = {}
    for piece, group in auditors.items():
        drawn.setdefault(group, []).append(piece)
    return {group: (_in_order(spec, drawn[group]),) for group in sorted(drawn)}


def _in_order(spec: JobSpec, pieces: Iterable[int]) -> tuple[int, ...]:
    """The pieces in execution order: by ascending global microbatch index j * N + i."""
    per_shard = spec.pieces_per_shard
    return tuple(sorted(pieces, key=lambda p: p % per_shard * spec.num_groups + p // per_shard))


def padded(audits: Segments, segments: int) -> Segments:
    """The same audits with an entry for each of the first ``segments`` segments."""
    return audits + ((),) * (segments - len(audits))


def unlike_the_plan(state: State, vote: Vote) -> str:
    """How the pieces of a vote's checksums differ from those that its plan asks for; empty when they do not."""
    result = vote.result
    inside = selected(state.job, result.step, result.pieces)
    if tuple(piece for piece, _ in result.checksums) != inside:
        return (
            f"gave {counted(len(result.checksums), 'checksum')} for step {result.step}, {len(inside)} of its pieces "
            "are selected"
        )
    planned = tuple(piece for audits in state.audits.get(vote.group, ()) for piece in audits)
    if tuple(piece for piece, _ in result.audits) != planned:
        return (
            f"audited {counted(len(result.audits), 'piece')} in step {result.step} which are not the {len(planned)} "
            "of its plan"
        )
    return ""


@dataclass(frozen=True)
class Verdict:
    """What the votes of a step say about the selected pieces."""

    opinions: Opinions = field(default_factory=dict)
    """All checksums that were voted for disputed pieces in this step."""
    wrong: Mapping[int, tuple[int, str]] = field(default_factory=dict)
    """Live group -> (rank position or -1, what is wrong in words)."""
    open: tuple[int, ...] = ()
    """Pieces without a majority."""


def judge(state: State) -> Verdict:
    """Compare the checksums in the votes, and those voted for disputed pieces in earlier epochs of the step."""
    opinions: dict[int, dict[MemberId, int]] = {piece: dict(known) for piece, known in state.disputes.items()}
    wrong: dict[int, tuple[int, str]] = {}
    for group, vote in sorted(state.votes.items()):
        for piece, checksum in (*vote.result.checksums, *vote.result.audits):
            if _received(opinions.setdefault(piece, {}), (group, vote.incarnation), checksum) != checksum:
                wrong[group] = (-1, f"it found two different gradients of piece {piece} in step {vote.result.step}")
    disputed = {piece: known for piece, known in opinions.items() if piece in state.disputes or _differ(known)}
    undecided = []
    for piece, known in sorted(disputed.items()):
        for group in wrong:
            known.pop((group, state.live[group]), None)
        right = majority(known.values())
        if right is None:
            undecided += [piece] if _differ(known) else []
            continue
        for member in sorted(filter(state.is_member, known)):
            if known[member] != right:
                wrong.setdefault(member[0], _accusation(state, piece, member[0], known, right))
    return Verdict(disputed, wrong, tuple(undecided))


def _received(known: dict[MemberId, int], member: MemberId, checksum: int) -> int:
    """The opinion of a member that has voted ``checksum``: its first one. That of an older incarnation is dropped."""
    for older in [one for one in known if one[0] == member[0] and one != member]:
        del known[older]
    return known.setdefault(member, checksum)


def _differ(known: Mapping[MemberId, int]) -> bool:
    return len(set(known.values())) > 1


def majority(checksums: Iterable[int]) -> int | None:
    """The checksum that more than half of them have, or None."""
    counts = Counter(checksums)
    if not counts:
        return None
    checksum, number = counts.most_common(1)[0]
    return checksum if 2 * number > counts.total() else None


def _accusation(state: State, piece: int, group: int, known: Mapping[MemberId, int], right: int) -> tuple[int, str]:
    others = sorted(g for (g, _), checksum in known.items() if checksum == right)
    reported = (
        f"its gradient of piece {piece} in step {state.step_in_flight} differs from that of {name_groups(others)}"
    )
    position, names = place(state, piece, group, others)
    return position, reported + listed(names)


def listed(names: Sequence[str]) -> str:
    """': in A, B and 7 more'; nothing for no names."""
    if not names:
        return ""
    more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
    return f": in {', '.join(names[:NAMED_MAX])}{more}"


def place(state: State, piece: int, group: int, others: Sequence[int]) -> tuple[int, list[str]]:
    """The first rank position at which the group's gradient of the piece (or its weights) differs from that of
    ``others``, and the names of the parameters that differ there; (-1, none) where the votes do not show it."""
    mine = _parts(state, piece, group)
    theirs = next((parts for other in others if (parts := _parts(state, piece, other))), {})
    unlike = sorted(key for key in mine.keys() & theirs.keys() if mine[key] != theirs[key])
    if not unlike:
        return -1, []
    position = unlike[0][0]
    return position, [name for where, name in unlike if where == position]


def _parts(state: State, piece: int, group: int) -> dict[tuple[int, str], int]:
    vote = state.votes.get(group)
    if vote is None:
        return {}
    return {(part.position, part.name): part.checksum for part in vote.result.parts if part.piece == piece}


def deciders(state: State, verdict: Verdict) -> dict[int, tuple[int, ...]] | str:
    """Group -> the open pieces that it is to compute as well. Each goes to its least loaded live host without an
    opinion on it; where a piece has no such host, a sentence that says so is returned."""
    hosts, per_shard = state.where.hosts(), state.job.pieces_per_shard
    loads = state.plan.loads().tolist()
    asked: dict[int, list[int]] = {}
    for piece in verdict.open:
        known = verdict.opinions[piece]
        there = [g for g in hosts[piece // per_shard].tolist() if g in state.holders]
        others = [g for g in there if (g, state.live[g]) not in known]
        if not others:
            return (
                f"{name_members(known)} found different gradients of piece {piece} in step "
                f"{state.step_in_flight}, no majority agrees and no further live group hosts shard {piece // per_shard}"
            )
        group = min(others, key=loads.__getitem__)
        loads[group] += 1
        asked.setdefault(group, []).append(piece)
    return {group: _in_order(state.job, pieces) for group, pieces in sorted(asked.items())}


def name_members(members: Iterable[MemberId]) -> str:
    """The groups of these members, as :func:`name_groups` names them."""
    return name_groups(sorted({group for group, _ in members}))


def name_groups(groups: Sequence[int]) -> str:
    """'group 1', 'groups 1 and 2', 'groups 0, 1 and 2'."""
    if len(groups) == 1:
        return f"group {groups[0]}"
    return f"groups {', '.join(map(str, groups[:-1]))} and {groups[-1]}"

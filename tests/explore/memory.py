"""What the judge of a walk remembers: all by (group, incarnation), because a successor of a group is another."""

from __future__ import annotations

from typing import NamedTuple

Who = tuple[int, int]
"""(group, incarnation)."""


class Memory(NamedTuple):
    """What happened, as far as a later judgement needs it."""

    damaged: frozenset[Who] = frozenset()
    """Whose weights are damaged, or were copied from such a process."""
    erred: frozenset[tuple[Who, int]] = frozenset()
    """(who, step in which something was computed wrongly)."""
    agreed: tuple[tuple[int, str], ...] = ()
    """(step, digest of the weights after it on which all votes agreed)."""
    independent: frozenset[Who] = frozenset()
    """The members of the epoch that made the last commit."""
    counted: frozenset[Who] = frozenset()
    """Those of them whose votes on these weights may be counted for a majority (rule 12)."""
    proven: frozenset[Who] = frozenset()
    """Members that have voted for a commit, or whose own state was compared when they came and that have not begun
    anew since."""
    reported: frozenset[tuple[Who, int, str]] = frozenset()
    """(who, step, digest of the weights after it) of what was voted that is wrong."""
    wrote: frozenset[tuple[Who, int, str]] = frozenset()
    """(who, step, digest) of checkpoints that members have asked about."""
    owed: tuple[int, Who] | None = None
    """(step at whose commit a save was ordered, the member that is to write it)."""
    ready: frozenset[Who] = frozenset()
    """Learners that have said that they could take an offer."""
    caught: tuple[tuple[Who, int, int, int, str], ...] = ()
    """(who, number of its offer, step of its offer, step that it holds, digest) of what learners reported."""
    opinions: tuple[tuple[int, int, Who, int], ...] = ()
    """(step, piece, who, checksum that it voted) of the step in flight."""


NO_MEMORY = Memory()

"""How much slow groups are asked to give back inside a step, and who takes it. Pure arithmetic on paces.

A *pace* is (pieces that a group has not done, seconds that it takes for one), so a group ends its part in the product
of the two. Pieces are moved one at a time: from the end of the plan of the group that would end last, to the live host
of their shard that would end them first, as long as that one ends them a share of a piece (``MARGIN``) before the giver
would have. The latest end never grows by a move, and nothing else could lower it: when the group that ends last has no
host for its last piece, the search is over.

The result is what groups are asked for. What they still can give is theirs to say, so :func:`shared_out` finds the
takers anew, for what was given.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from statistics import median

Paces = Mapping[int, tuple[int, float]]
Hosts = Callable[[int], Sequence[int]]
"""Piece -> the groups that may take it."""
MARGIN = 0.25
"""By how many of the giver's pieces a move must be of use."""
GAIN = 0.5
"""By how many pieces of the median group the whole must be: groups that would end sooner by less are not asked."""


def wanted(paces: Paces, movable: Callable[[int], Sequence[int]], hosts: Hosts) -> dict[int, int]:
    """Group -> how many pieces it is asked for, of those that are. ``movable`` returns the pieces that a group may have
    to give, in the order of its plan; it gives from the end."""
    ends = {group: left * piece_s for group, (left, piece_s) in paces.items()}
    if len(ends) < 2:
        return {}
    asked, stock = dict[int, int](), dict[int, list[int]]()
    queue = [(-end, group) for group, end in ends.items()]
    heapq.heapify(queue)
    before_s = -queue[0][0]
    while queue:
        end, giver = heapq.heappop(queue)
        if -end != ends[giver]:
            continue  # it has taken or given something since
        pieces = stock.setdefault(giver, list(movable(giver)[-paces[giver][0] :] if paces[giver][0] else ()))
        taker = _first(hosts(pieces[-1]), giver, ends, paces) if pieces else None
        if taker is None or ends[taker] + paces[taker][1] > ends[giver] - MARGIN * paces[giver][1]:
            break
        pieces.pop()
        asked[giver] = asked.get(giver, 0) + 1
        for group, more in ((giver, -1), (taker, 1)):
            ends[group] += more * paces[group][1]
            heapq.heappush(queue, (-ends[group], group))
    gain_s = before_s - max(ends.values())
    return asked if gain_s >= GAIN * median(piece_s for _, piece_s in paces.values()) else {}


def shared_out(given: Mapping[int, Sequence[int]], paces: Paces, hosts: Hosts) -> dict[int, list[int]]:
    """Group -> the pieces that it takes of those that were ``given`` back, each by the host that ends it first; the
    giver itself takes one where nobody else is sooner."""
    ends = {group: left * piece_s for group, (left, piece_s) in paces.items()}
    for group, pieces in given.items():
        ends[group] -= len(pieces) * paces[group][1]
    taken = dict[int, list[int]]()
    for group, pieces in sorted(given.items()):
        for piece in pieces:
            other = _first(hosts(piece), group, ends, paces)
            own_s = ends[group] + paces[group][1]
            taker = group if other is None or own_s <= ends[other] + paces[other][1] else other
            ends[taker] += paces[taker][1]
            taken.setdefault(taker, []).append(piece)
    return taken


def _first(hosts: Sequence[int], giver: int, ends: Mapping[int, float], paces: Paces) -> int | None:
    """The host that would end one more piece first, other than the giver."""
    return min(
        (group for group in hosts if group != giver and group in ends),
        key=lambda group: (ends[group] + paces[group][1], group),
        default=None,
    )

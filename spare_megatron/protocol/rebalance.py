"""How much slow groups are asked to give back inside a step, and who takes it. Pure arithmetic on paces.

A *pace* is (pieces that a group has left, seconds that it takes for one), so a group ends its part in the product of
the two. Pieces are moved one at a time: from the group that would end last, to a live host of
their shard that has time for it, or that has when it passes a piece of its own on, and so forth along the shortest such
chain. The last one must end a share of a piece (``MARGIN``) before the giver would have. The latest end never grows by
a move, and nothing else could lower it: where there is no chain from the group that ends last, the search is over.

The result is what groups are asked for. What they still can give is theirs to say, so :func:`shared_out` finds the
takers anew, for what was given.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from statistics import median

PaceOf = Mapping[int, tuple[int, float]]
"""Group -> its pace."""
HostsOf = Callable[[int], Sequence[int]]
"""Piece -> the groups that may take it."""
MARGIN = 0.25
"""By how many of the giver's pieces a move must be of use."""
GAIN = 0.5
"""By how many pieces of the median group the whole must be: groups that would end sooner by less are not asked."""


def unbegun(segments: Sequence[Sequence[int]], left: int) -> list[list[int]]:
    """The last ``left`` pieces of a plan, by segment."""
    gone, found = sum(map(len, segments)) - left, list[list[int]]()
    for segment in segments:
        found.append(list(segment[max(0, gone) :]))
        gone -= len(segment)
    return found


def first_given(segments: Iterable[Sequence[int]], pieces_per_shard: int) -> list[int]:
    """What a group may give back, by segment, in the order in which it does: an earlier segment first, of it all shards
    in turn, and of each from its end. What a patch appended comes last: all hosts of its shard have as much of it."""
    return [piece for segment in segments for piece in _in_turn(segment, pieces_per_shard)]


def _in_turn(pieces: Sequence[int], pieces_per_shard: int) -> list[int]:
    by_shard = dict[int, list[int]]()
    for piece in pieces:
        by_shard.setdefault(piece // pieces_per_shard, []).append(piece)
    turns = zip_longest(*(reversed(some) for some in by_shard.values()))
    return [piece for turn in turns for piece in turn if piece is not None]


def wanted(paces: PaceOf, movable: Callable[[int], Sequence[int]], hosts: HostsOf) -> dict[int, int]:
    """Group -> how many pieces it is asked for, of those that are. ``movable`` returns the pieces that a group may have
    to give, of those that it has left, in the order in which it gives them."""
    ends = {group: left * piece_s for group, (left, piece_s) in paces.items()}
    if len(ends) < 2 or not _may_gain(paces):
        return {}
    asked, stock = dict[int, int](), dict[int, list[int]]()

    def last_piece(group: int) -> int | None:
        if group not in stock:
            stock[group] = list(reversed(movable(group)))
        return stock[group][-1] if stock[group] else None

    queue = [(-end, group) for group, end in ends.items()]
    heapq.heapify(queue)
    before_s = -queue[0][0]
    while queue:
        end, giver = heapq.heappop(queue)
        if -end != ends[giver]:
            continue  # it has taken or given something since
        chain = _chain(giver, ends, paces, last_piece, hosts)
        if not chain:
            break
        for group in chain[:-1]:
            stock[group].pop()
            asked[group] = asked.get(group, 0) + 1
        for group, more in ((giver, -1), (chain[-1], 1)):
            ends[group] += more * paces[group][1]
            heapq.heappush(queue, (-ends[group], group))
    gain_s = before_s - max(ends.values())
    return asked if gain_s >= GAIN * median(piece_s for _, piece_s in paces.values()) else {}


def _may_gain(paces: PaceOf) -> bool:
    """Whether the step would end sooner by enough if pieces could be divided and moved at will."""
    usual_s = median(piece_s for _, piece_s in paces.values())
    last_s = max(left * piece_s for left, piece_s in paces.values())
    even_s = sum(left for left, _ in paces.values()) / sum(1 / piece_s for _, piece_s in paces.values())
    return last_s - even_s >= GAIN * usual_s


def shared_out(given: Mapping[int, Sequence[int]], paces: PaceOf, hosts: HostsOf) -> dict[int, list[int]]:
    """Group -> the pieces that it takes of those that were ``given`` back: each by another host, the one that ends it
    first, because who passes a piece on gets others; then from the group that ends last to any host of the piece, also
    back to the giver, as long as that one ends sooner."""
    ends = {group: left * piece_s for group, (left, piece_s) in paces.items()}
    for group, pieces in given.items():
        ends[group] -= len(pieces) * paces[group][1]
    taken = dict[int, list[int]]()
    for giver, pieces in sorted(given.items()):
        for piece in pieces:
            others = [host for host in hosts(piece) if host != giver and host in ends]
            _take(_first(others or (giver,), ends, paces), piece, taken, ends, paces)
    queue = [(-ends[group], group) for group in taken]
    heapq.heapify(queue)
    while queue:
        end, group = heapq.heappop(queue)
        move = _better(group, taken[group], ends, paces, hosts) if -end == ends[group] else None
        if move is None:
            continue
        piece, host = move
        taken[group].remove(piece)
        ends[group] -= paces[group][1]
        _take(host, piece, taken, ends, paces)
        for one in (group, host):
            heapq.heappush(queue, (-ends[one], one))
    return {group: pieces for group, pieces in taken.items() if pieces}


def _take(group: int, piece: int, taken: dict[int, list[int]], ends: dict[int, float], paces: PaceOf) -> None:
    taken.setdefault(group, []).append(piece)
    ends[group] += paces[group][1]


def _better(
    group: int, pieces: Sequence[int], ends: Mapping[int, float], paces: PaceOf, hosts: HostsOf
) -> tuple[int, int] | None:
    """(one of the pieces that a group has taken, the host that would end it sooner than the group ends); None where
    there is none. Each such move lowers the ends, seen from the latest on, so they come to an end."""
    for piece in pieces:
        host = _first(hosts(piece), ends, paces)
        if host != group and ends[host] + paces[host][1] < ends[group] - 1e-9:
            return piece, host
    return None


def _chain(
    giver: int, ends: Mapping[int, float], paces: PaceOf, last_piece: Callable[[int], int | None], hosts: HostsOf
) -> list[int]:
    """The shortest way from ``giver`` to a group that has time for one more piece: each group on it passes on what it
    would give next. Empty where there is none. Breadth first; of equally near takers the one that ends first."""
    latest_s = ends[giver] - MARGIN * paces[giver][1]
    came_from, level = dict[int, int](), [giver]
    while level:
        found, following = list[int](), list[int]()
        for group in level:
            piece = last_piece(group)
            for host in hosts(piece) if piece is not None else ():
                if host == giver or host in came_from or host not in ends:
                    continue
                came_from[host] = group
                (found if ends[host] + paces[host][1] <= latest_s else following).append(host)
        if found:
            way = [min(found, key=lambda host: (ends[host] + paces[host][1], host))]
            while way[-1] != giver:
                way.append(came_from[way[-1]])
            return way[::-1]
        level = following
    return []


def _first(hosts: Sequence[int], ends: Mapping[int, float], paces: PaceOf) -> int:
    """The host that would end one more piece first."""
    return min((group for group in hosts if group in ends), key=lambda group: (ends[group] + paces[group][1], group))

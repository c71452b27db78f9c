"""Who took the pieces of a step that slow groups gave back. Pure."""

from __future__ import annotations

from collections import Counter

from spare_megatron.protocol.state import Plan

GIVERS_MAX = 16
"""Of so many groups it is reported, those that gave most: a size that does not grow with the job."""


def moved_pieces(plan: Plan) -> dict[str, dict[str, int]]:
    """Group that gave -> group that has them now -> how many pieces. A piece that is given on counts for its first
    giver, one that came back to it for nobody. Groups are text, as JSON has them."""
    if not plan.left:
        return {}
    giver_of = {piece: group for group, pieces in plan.left.items() for piece in pieces}
    taken: dict[int, Counter[str]] = {}
    for group, segments in sorted(plan.added.items()):
        for segment in segments:
            for piece in segment:
                giver = giver_of.get(piece, group)
                if giver != group:
                    taken.setdefault(giver, Counter())[str(group)] += 1
    most = sorted(taken.items(), key=lambda item: (-item[1].total(), item[0]))[:GIVERS_MAX]
    return {str(giver): dict(takers) for giver, takers in sorted(most)}

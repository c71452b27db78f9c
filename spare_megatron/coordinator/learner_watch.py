"""Finds learners that do not get ready: their start, or what they do after an offer has ended, hangs.

Nobody waits for a learner, so it would hang for good, and its group stay lost, although its heartbeats go on. Pure: the
time comes in as an argument.
"""

from __future__ import annotations

from collections.abc import Mapping

from spare_megatron.protocol.learner import Learner
from spare_megatron.protocol.messages import Loss


class LearnerWatch:
    """Watches all learners of a job. To be asked at every tick of the detector."""

    def __init__(self) -> None:
        self._since_s: dict[tuple[int, int, int], float] = {}
        """(group, incarnation, offers that have ended) -> since when it is not ready."""

    def late(self, learners: Mapping[int, Learner], timeout_s: float, at_s: float) -> list[Loss]:
        """The learners that have been neither ready nor had an offer for ``timeout_s``; each is returned once.

        ``at_s`` is of a clock that stands still while this process does."""
        unready = [
            (group, known.incarnation, known.voids)
            for group, known in sorted(learners.items())
            if known.offer is None and not known.ready
        ]
        self._since_s = {one: self._since_s.get(one, at_s) for one in unready}
        due = [one for one, since_s in self._since_s.items() if at_s - since_s > timeout_s]
        self._since_s |= dict.fromkeys(due, float("inf"))
        detail = f"it could not be brought up to date for {timeout_s:g} s, because it was not ready"
        return [Loss(group, incarnation, "stalled", detail=detail) for group, incarnation, _ in due]

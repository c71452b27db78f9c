"""The state on its way to groups that come back: when a learner holds which step, and who has to wait for a joiner.

The protocol machine makes offers and ends them; this class only follows them. A learner takes the state of its offer,
which all its donors send at once, then one result after the other as they are committed. A donor that keeps more
results than ``JobSpec.results_kept`` withdraws.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from spare_megatron.config.timeouts import Timeouts
from spare_megatron.protocol.membership import waited_for
from spare_megatron.simulator.cluster import Cluster
from spare_megatron.simulator.job_control import JobControl

GRACE_S = Timeouts.heartbeat_timeout_s
"""How long holders wait for joiners."""


@dataclass
class _Fetch:
    number: int
    """Of the offer."""
    step: int
    """The state after this step is on its way."""
    at_s: float
    """When it is there; infinite as long as the step is not committed."""
    result_s: float


class Transfers:
    """The transfers of one trial, whose cluster has a ``transfer_s``."""

    def __init__(self, cluster: Cluster, control: JobControl) -> None:
        self._cluster, self._control = cluster, control
        self._fetches: dict[int, _Fetch] = {}

    @property
    def next_s(self) -> float:
        """When the next learner or joiner holds another step; infinite where none is under way."""
        return min((fetch.at_s for fetch in self._fetches.values()), default=np.inf)

    @property
    def serving(self) -> list[int]:
        """The groups that serve a learner."""
        return sorted(self._control.state.serves)

    def follow(self, now_s: float) -> None:
        """Begin and drop what the protocol machine has offered and ended by now."""
        control = self._control
        if not (control.state.learners or self._fetches):
            return
        self._withdraw()
        control.ready()
        offers = {offer.learner[0]: offer for offer in control.state.offers}
        self._fetches = {g: f for g, f in self._fetches.items() if g in offers and f.number == offers[g].number}
        for group in offers.keys() - self._fetches.keys():
            offer = offers[group]
            slower = control.spec.donors_max / len(offer.donors)
            at_s = now_s + self._cluster.transfer_s * slower
            self._fetches[group] = _Fetch(offer.number, offer.step, at_s, self._cluster.result_s * slower)
        for fetch in self._fetches.values():
            if fetch.at_s == np.inf and fetch.step <= control.state.committed[0]:
                fetch.at_s = now_s + fetch.result_s

    def _withdraw(self) -> None:
        state = self._control.state
        for group, fetch in sorted(self._fetches.items()):
            known = state.learners.get(group)
            current = known is not None and known.offer is not None and known.offer.number == fetch.number
            if current and state.committed[0] - fetch.step > self._control.spec.results_kept:
                self._control.too_slow(group)

    def arrived(self, until_s: float) -> None:
        """Report every step that a learner or joiner holds by now."""
        for group, fetch in sorted(self._fetches.items()):
            while group in self._control.state.learners and fetch.at_s <= until_s:
                self._control.holds(group, fetch.step)
                fetch.step += 1
                there = fetch.step <= self._control.state.committed[0]
                fetch.at_s = fetch.at_s + fetch.result_s if there else np.inf

    def holds_s(self, group: int) -> float:
        """When this joiner will hold t*, if it does not yet."""
        fetch = self._fetches[group]
        return fetch.at_s + (self._control.state.committed[0] - fetch.step) * fetch.result_s

    def waited_for_s(self) -> float:
        """When the last joiner without a piece will hold t*; 0 where none is waited for."""
        return max((self.holds_s(group) for group in waited_for(self._control.state)), default=0.0)

    def reset(self) -> None:
        """Forget all: a new job attempt begins."""
        self._fetches = {}

"""State on its way to groups that come back, in the simulator: the runtime's own machine decides all of it."""

from __future__ import annotations

import numpy as np
import pytest

from spare_megatron.placement import build_placement
from spare_megatron.planning import catching_up
from spare_megatron.planning.catching_up import commits_to_admission
from spare_megatron.protocol import messages as m
from spare_megatron.protocol.messages import JobSpec
from spare_megatron.simulator.cluster import Cluster, Policy
from spare_megatron.simulator.job_control import JobControl
from spare_megatron.simulator.pieces import PiecesEngine

FAILURE_FREE = Cluster(12, mtbf_s=1e12, jitter=0.0, reduce_s=2.0, rejoin_s=100.0, transfer_s=150.0, result_s=10.0)
STEP_S = 66.0


class Watched:
    """A job of 12 groups; the events and decisions of its run."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        cluster: Cluster,
        trace: list[tuple[float, int]],
        r: int = 3,
        steps: int = 40,
    ):
        self.events: list[tuple[m.Event, int, float]] = []
        self.reasons: list[str] = []
        self.engine = PiecesEngine(
            cluster, Policy("microbatch", r, 4, steps=steps, save_interval_s=1e9), 0, trace, check=True
        )
        feed = JobControl.feed

        def watched(control: JobControl, event: m.Event) -> m.Decision:
            decision = feed(control, event)
            self.events.append((event, control.state.committed[0], self.engine.now_s))
            self.reasons.append(decision.reason)
            return decision

        monkeypatch.setattr(JobControl, "feed", watched)
        self.result = self.engine.run()
        assert self.result.tally.wipe_outs == 0

    def longest_s(self) -> float:
        """Of the steps."""
        return float(np.diff([at for event, _, at in self.events if isinstance(event, m.AllVoted)]).max())

    def of(self, kind: type) -> list[tuple[m.Event, int]]:
        return [(event, committed) for event, committed, _ in self.events if isinstance(event, kind)]


@pytest.mark.parametrize(("transfer_s", "result_s"), [(1.0, 0.5), (100.0, 10.0), (150.0, 40.0)])
def test_a_group_comes_back_as_in_a_job(transfer_s: float, result_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hello, Ready and an offer, the state, every result since, the admission by the m-th commit from the offered state
    on, and the result of that commit."""
    cluster = Cluster(**{**vars(FAILURE_FREE), "transfer_s": transfer_s, "result_s": result_s})
    job = Watched(monkeypatch, cluster, [(10.0, 5)])
    [(ready_s, last)] = [(at, committed) for event, committed, at in job.events if isinstance(event, m.Ready)]
    held = [(event.step, committed) for event, committed in job.of(m.CaughtUp)]  # type: ignore[union-attr]
    offered = held[0][0]
    admitted = next(n for n, reason in enumerate(job.reasons) if "group 5 (incarnation 1) joins" in reason)
    commit, committed, _ = job.events[admitted]
    assert isinstance(commit, m.AllVoted)
    assert offered == last
    commits = {event.step: at for event, _, at in job.events if isinstance(event, m.AllVoted)}
    # Steps after the loss take longer by a piece on 11 groups.
    left_s = commits[offered + 1] - ready_s
    assert committed - offered == commits_to_admission(transfer_s, result_s, STEP_S + 16.0, left_s)
    assert [step for step, _ in held] == list(range(offered, committed + 1))
    assert job.result.tally.joins == 1


def test_nobody_waits_for_a_learner_and_a_joiner_is_waited_for_at_most_its_grace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A result takes nearly a step, so the joiner has it just before the others are done. With a grace that ends before
    that, it is sent back."""
    cluster = Cluster(**{**vars(FAILURE_FREE), "transfer_s": 80.0, "result_s": 79.0})
    job = Watched(monkeypatch, cluster, [(10.0, 5)])
    assert job.result.tally.joins == 1
    away = Watched(monkeypatch, Cluster(**{**vars(FAILURE_FREE), "rejoin_s": 1e9}), [(10.0, 5)])
    assert job.longest_s() <= away.longest_s()
    monkeypatch.setattr("spare_megatron.simulator.pieces.GRACE_S", -20.0)
    late = Watched(monkeypatch, cluster, [(10.0, 5)])
    assert late.of(m.JoinersLate)
    assert "did not hold the state" in " ".join(late.reasons)


def test_a_lost_donor_or_learner_ends_the_offer(monkeypatch: pytest.MonkeyPatch) -> None:
    # The learner is ready at 110 s and has an offer of groups 6 and 7 at once, which takes 150 s.
    donor = Watched(monkeypatch, FAILURE_FREE, [(10.0, 5), (200.0, 6)])
    numbers = {event.number for event, _ in donor.of(m.CaughtUp)}  # type: ignore[union-attr]
    assert len(donor.of(m.Ready)) == 3, "the learner reports it again, and group 6 says it"
    assert 1 not in numbers
    learner = Watched(monkeypatch, FAILURE_FREE, [(10.0, 5), (200.0, 5)])
    assert learner.result.tally.learners_lost == 1
    assert [event.incarnation for event, _ in learner.of(m.Ready)] == [1, 2]  # type: ignore[union-attr]
    assert learner.result.tally.failures == 1
    assert learner.engine.alive.all()


def test_a_learner_that_cannot_keep_up_is_fenced_and_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Cluster(**{**vars(FAILURE_FREE), "transfer_s": 1e5, "rejoin_s": 5.0, "reduce_s": 0.0, "compute_s": 0.5})
    job = Watched(monkeypatch, slow, [(1.0, 5)], steps=120)
    assert [event.incarnation for event, _ in job.of(m.Ready)][:4] == [1, 1, 1, 2]  # type: ignore[union-attr]
    assert len(job.of(m.Withdrawn)) >= 3
    assert job.result.tally.joins == 0


def test_the_last_host_computes_when_it_has_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """A learner is called before it has the state; the step waits for its transfer and its pieces."""
    hosts = build_placement(12, 2).hosts()[0].tolist()
    job = Watched(monkeypatch, FAILURE_FREE, [(10.0, hosts[0]), (200.0, hosts[1])], r=2)
    called = next(n for n, reason in enumerate(job.reasons) if "no other host" in reason)
    commits = [at for event, _, at in job.events[called:] if isinstance(event, m.AllVoted)]
    began = max(at for event, _, at in job.events[:called] if isinstance(event, m.AllVoted))
    assert np.diff(commits).min() < STEP_S * 3 < 3 * (commits[1] - began)


def test_donors_compute_slower_by_a_measured_share(monkeypatch: pytest.MonkeyPatch) -> None:
    free = Watched(monkeypatch, FAILURE_FREE, [(10.0, 5)]).result.time_s
    charged = Watched(monkeypatch, Cluster(**{**vars(FAILURE_FREE), "donor_share": 0.5}), [(10.0, 5)]).result.time_s
    assert free < charged < free + 6 * STEP_S / 2


@pytest.mark.parametrize("seed", range(6))
def test_random_failures_keep_every_invariant(seed: int) -> None:
    rng = np.random.default_rng((77, seed))
    cluster = Cluster(
        int(rng.integers(3, 14)),
        mtbf_s=float(rng.choice([60.0, 200.0, 600.0])),
        rejoin_s=float(rng.choice([0.0, 100.0, 400.0])),
        transfer_s=float(rng.choice([5.0, 100.0, 300.0])),
        result_s=float(rng.choice([0.0, 20.0, 60.0])),
        restart_s=100.0,
    )
    policy = Policy(
        "microbatch",
        int(rng.integers(1, min(5, cluster.num_groups) + 1)),
        int(rng.integers(1, 5)),
        steps=150,
        standby_groups=int(rng.integers(0, 3)),
        adopt_s=10.0 if rng.random() < 0.5 else None,
    )
    found = PiecesEngine(cluster, policy, seed, check=True).run()
    assert found.tally.failures > 10, f"seed {seed}"
    assert np.isfinite(found.time_s), f"seed {seed}"


def test_the_theory_counts_as_many_donors_and_results_as_a_job_has() -> None:
    assert (JobSpec.donors_max, JobSpec.results_kept) == (catching_up.DONORS, catching_up.RESULTS_KEPT)

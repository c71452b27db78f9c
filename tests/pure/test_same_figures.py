"""Figures of fixed seeds: whoever makes the planner or the simulator faster must not change a decision.

The digest is over every decision's reason and over every steady-state assignment; a wanted change of a rule changes it,
and the new values go here with that change.
"""

from __future__ import annotations

import hashlib

import pytest

from spare_megatron.protocol import messages as m
from spare_megatron.simulator import job_control
from spare_megatron.simulator.cluster import Cluster, Policy
from spare_megatron.simulator.trials import Case, run_one

SEED = 1
CLUSTER = Cluster(64, reduce_s=2.0)
RETURNING = Cluster(64, reduce_s=2.0, rejoin_s=2000.0)


@pytest.mark.parametrize(
    ("cluster", "policy", "time_s", "digest"),
    [
        (CLUSTER, Policy("microbatch", 3, 16, steps=150), "0x1.a2f82c8febcbfp+16", "91ea0f05f164c349"),
        (CLUSTER, Policy("microbatch", 7, 16, steps=150), "0x1.95b4e2526d152p+14", "82a83093518092cb"),
        (
            CLUSTER,
            Policy("microbatch", 64, 16, steps=150, restart_after=20),
            "0x1.356fb7ea41ac6p+15",
            "6a142a8f1207683e",
        ),
        (CLUSTER, Policy("spare", 6, steps=150), "0x1.c821bf27a0825p+15", "72e02e346951f387"),
        (
            RETURNING,
            Policy("microbatch", 5, 8, steps=150, standby_groups=2),
            "0x1.9865283447018p+13",
            "85b0ca746aed131e",
        ),
        (RETURNING, Policy("microbatch", 2, 8, steps=150, adopt_s=50.0), "0x1.0f9d21e804cb3p+14", "b7e125a40db7c5e1"),
    ],
    ids=["r3", "r7", "shared", "published", "standbys", "adoption"],
)
def test_a_seed_gives_the_same_decisions_and_time(
    cluster: Cluster, policy: Policy, time_s: str, digest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = hashlib.sha256()
    feed = job_control.JobControl.feed

    def watched(control: job_control.JobControl, event: m.Event) -> m.Decision:
        decision = feed(control, event)
        seen.update(decision.reason.encode())
        standing = control.state.standing
        if isinstance(event, m.Lost) and standing is not None:
            seen.update(standing.assignment.owner.tobytes())
        return decision

    monkeypatch.setattr(job_control.JobControl, "feed", watched)
    outcome = run_one(Case(cluster, policy), SEED)
    assert seen.hexdigest()[:16] == digest
    # Not to the bit: how the C library rounds a power is its own affair.
    assert outcome.time_s == pytest.approx(float.fromhex(time_s), rel=1e-12)

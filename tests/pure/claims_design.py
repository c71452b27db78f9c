"""The figures of the pages about the design."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from tests.pure.claim import FOUR_GROUPS, TWO_GROUPS, Claim, Results


def design() -> Iterator[Claim]:
    page = "docs/design.md"
    audit = Results("audit_cost.json")
    rates = (0.05, 0.25, 1.0)
    yield Claim(
        page,
        "steps {}, {} and {} times as long (PP2 x 2 groups) and {}, {} and {} (1 x 4)",
        tuple(audit("ratio", case=case, rate=rate) for case in (TWO_GROUPS, FOUR_GROUPS) for rate in rates),
    )
    beside = audit.every("beside")
    yield Claim(
        page,
        "Relative to the number of computed pieces, steps are {} to {} times as long:",
        (audit.of(min(beside), "least of beside"), audit.of(max(beside), "largest of beside")),
    )
    overlap = Results("step_overlap.json")
    one, two = {"case": "1 x 2 groups, K=2"}, {"case": "PP2 x 2 groups, K=4"}
    loopback = [overlap("hidden_share", link_mbit="", **case).times(100) for case in (one, two)]
    loopback += [overlap("ratio", link_mbit="", **case) for case in (one, two)]
    yield Claim(
        page,
        "over plain loopback {} % (1 x 2 groups) and {} % (PP2 x 2) of the time between the last gradient and its sums "
        "is hidden, and the step takes {} and {} times as long",
        tuple(loopback),
    )
    slow = [overlap("hidden_share", link_mbit=2000, **case).times(100) for case in (one, two)]
    slow += [overlap("ratio", link_mbit=2000, **case) for case in (one, two)]
    yield Claim(page, "with 2 Gbit/s {} % and {} % are hidden, and the step takes {} and {} times", tuple(slow))


def journal() -> Iterator[Claim]:
    page, day = "docs/design.md", functools.partial(Results("journal.json"), groups=1000, hours=24.0)
    yield Claim(
        page,
        "1000 groups write {} MB a day, with a death every five minutes, and its replay takes {} s",
        (day("plain_mb"), day("verify_s")),
    )
    yield Claim(page, "such a day take {} MB, and a restart {} s", (day("disk_mb"), day("restart_s")))

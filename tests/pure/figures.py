"""Where the measured figures of README.md and docs/ come from: a claim for each, or a reason why it has none.

    python -m tests.pure.figures        writes the files' values into the pages

``test_figures.py`` compares, and looks for figures that nobody claims.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.pure.claim import ROOT, Claim, pattern, shown
from tests.pure.claims_design import design, journal
from tests.pure.claims_exact import exact_cost, exact_errors
from tests.pure.claims_operation import looking_on, operation, relief, returns, watching
from tests.pure.claims_readme import demo, measurements, readme
from tests.pure.claims_simulator import adoption, simulator_rest, simulator_table, spare_nodes
from tests.pure.claims_theory import theory


def claims() -> Iterator[Claim]:
    """All of them, in the order of the pages."""
    yield from readme()
    yield from measurements()
    yield from demo()
    yield from operation()
    yield from design()
    yield from returns()
    yield from looking_on()
    yield from watching()
    yield from relief()
    yield from journal()
    yield from exact_errors()
    yield from exact_cost()
    yield from adoption()
    yield from spare_nodes()
    yield from simulator_table()
    yield from simulator_rest()
    yield from theory()


def write() -> None:
    """Puts the files' values into the pages. Words that a page does not have are left to the test."""
    for claim in claims():
        path = ROOT / claim.page
        text = path.read_text()
        for match in reversed(list(pattern(claim.words).finditer(text))):
            for group in range(len(claim.figures), 0, -1):
                start, end = match.span(group)
                text = text[:start] + shown(claim.figures[group - 1].value, match[group]) + text[end:]
        path.write_text(text)


if __name__ == "__main__":
    write()

"""Which donors an offer names: those that serve fewest, and of these the next ones around the circle of groups."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spare_megatron.protocol.offers import _least_busy

SIZE = 9


@given(
    able=st.sets(st.integers(0, SIZE - 1)),
    group=st.integers(0, SIZE - 1),
    serves=st.dictionaries(st.integers(0, SIZE - 1), st.integers(0, 4)),
    number=st.integers(1, 4),
    most=st.none() | st.integers(1, 3),
)
def test_donors_are_the_first_of_all_in_order(
    able: set[int], group: int, serves: dict[int, int], number: int, most: int | None
) -> None:
    free = [donor for donor in able if most is None or serves.get(donor, 0) < most]
    free.sort(key=lambda donor: (serves.get(donor, 0), (donor - group) % SIZE))
    assert _least_busy(sorted(able), group, serves, number, most) == free[:number]

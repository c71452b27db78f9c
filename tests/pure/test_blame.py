"""Who is fenced for links on which nothing arrives (protocol rule 11)."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spare_megatron.protocol.blame import Culprit, Evidence, culprit
from spare_megatron.protocol.messages import Link, ReductionResult, Vote

GROUPS = st.integers(3, 12)


def failed(group: int, epoch: int, *links: Link) -> Vote:
    return Vote(group, 0, ReductionResult(1, epoch, False, links=links))


def judge(votes: list[Vote], groups: int, failures: int = 1, patient: bool = False) -> Culprit | None:
    evidence = Evidence()
    for vote in votes:
        evidence = evidence.after(vote)
    return culprit(evidence, range(groups), failures, patient)


def broken_links(guilty: int, groups: int, direction: str) -> list[Link]:
    """The silent links of a ring in which one group sends nothing, receives nothing, or both."""
    neighbours = sorted({(guilty - 1) % groups, (guilty + 1) % groups})
    out = [Link(guilty, other, True) for other in neighbours if direction != "in"]
    return out + [Link(other, guilty, True) for other in neighbours if direction != "out"]


@given(groups=GROUPS, data=st.data(), direction=st.sampled_from(["in", "out", "both"]))
def test_a_group_whose_network_is_dead_is_fenced_at_once_and_nobody_else_ever(
    groups: int, data: st.DataObject, direction: str
) -> None:
    """Whoever speaks, of however many links to more than one neighbour, and whatever connections ended on the way."""
    guilty = data.draw(st.integers(0, groups - 1))
    links = broken_links(guilty, groups, direction)
    reported = data.draw(st.lists(st.sampled_from(links), min_size=1, unique=True))
    ended = data.draw(st.lists(st.builds(Link, st.integers(0, groups - 1), st.integers(0, groups - 1)), max_size=4))
    votes = [failed(data.draw(st.integers(0, groups - 1)), 1, *ended)] if ended else []
    votes += [failed(data.draw(st.integers(0, groups - 1)), 1, link) for link in reported]
    found = judge(votes, groups)
    others = {link.sender + link.receiver - guilty for link in reported}
    assert (found.group if found else None) == (guilty if len(others) > 1 else None)


def test_one_link_with_two_ends_is_tried_again_then_its_sender_goes() -> None:
    first, second = failed(2, 1, Link(1, 2, True)), failed(2, 2, Link(1, 2, True))
    assert judge([first, first], 4) is None
    found = judge([first, second], 4, failures=2)
    assert found is not None
    assert found.group == 1


def test_two_dead_networks_are_fenced_one_after_the_other() -> None:
    """No single group explains all; what failed twice is judged, most links first."""
    links = broken_links(1, 6, "out") + broken_links(4, 6, "both")
    assert judge([failed(0, 1, *links)], 6) is None
    found = judge([failed(0, 1, *links), failed(3, 2, *links)], 6, failures=2)
    assert found is not None
    assert found.group == 4
    left = [link for link in links if 4 not in (link.sender, link.receiver)]
    found = judge([failed(0, 3, *left)], 6)
    assert found is not None
    assert found.group == 1


@pytest.mark.parametrize(("failures", "patient"), [(2, True), (3, False)])
def test_connections_that_ended_count_late(failures: int, patient: bool) -> None:
    votes = [failed(epoch % 2, epoch, Link(2, epoch % 2)) for epoch in (1, 2, 3)]
    assert judge(votes, 3, failures, patient) is None
    found = judge(votes, 3, 3, True)
    assert found is not None
    assert found.group == 2


def test_evidence_about_groups_that_are_gone_says_nothing() -> None:
    votes = [failed(2, 1, Link(5, 2, True)), failed(2, 2, Link(5, 2, True))]
    assert judge(votes, 4, 3, True) is None


def test_a_group_that_fails_alone_goes_the_third_time() -> None:
    votes = [failed(1, epoch) for epoch in (1, 2, 3)]
    found = judge(votes, 3, 3, True)
    assert found is not None
    assert found.group == 1
    assert judge(votes[:2], 3, 3, True) is None
    for other in itertools.chain([failed(0, 2)], [failed(0, 2, Link(2, 0))]):
        assert judge([*votes, other], 3, 4, True) != Culprit(1, found.why)

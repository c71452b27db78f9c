"""Placements: independent wherever that exists, least overlap elsewhere, hosts and stacks inverse to each other."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spare_megatron.config.errors import ConfigError
from spare_megatron.placement import Placement, build_placement, placement_from_offsets
from spare_megatron.placement.offsets import independent_offsets
from spare_megatron.placement.overlap import max_overlap, overlap_bound
from spare_megatron.placement.rulers import EXISTS, LISTED, absent, bose, known_ruler, ruzsa, singer
from spare_megatron.placement.search import EffortSpentError, exhaustive

CLUSTER_SIZES = (64, 200, 600, 1000, 4000)


def shared_shards(placement: Placement) -> int:
    """The largest overlap, straight from its definition."""
    stacks = [set(row) for row in placement.stacks().tolist()]
    return max((len(a & b) for a, b in combinations(stacks, 2)), default=0)


def least_overlap(num_groups: int, redundancy: int) -> int:
    """Brute force over all offsets that start with 0."""
    return min(
        shared_shards(placement_from_offsets(num_groups, (0, *rest)))
        for rest in combinations(range(1, num_groups), redundancy - 1)
    )


@pytest.mark.parametrize("num_groups", range(1, 11))
def test_overlap_is_the_least_that_exists_at_small_n(num_groups: int) -> None:
    for redundancy in range(1, num_groups + 1):
        placement = build_placement(num_groups, redundancy)
        assert placement.max_overlap == shared_shards(placement)
        assert placement.max_overlap == least_overlap(num_groups, redundancy), placement.reason
        assert placement.max_overlap >= overlap_bound(num_groups, redundancy)
        assert "does not prove" not in placement.reason


@pytest.mark.parametrize("num_groups", CLUSTER_SIZES)
def test_independent_at_cluster_sizes_wherever_it_can_exist(num_groups: int) -> None:
    for redundancy in range(2, 21):
        placement = build_placement(num_groups, redundancy)
        assert placement.max_overlap == max_overlap(num_groups, placement.offsets)
        if overlap_bound(num_groups, redundancy) <= 1 and not absent(num_groups, redundancy):
            assert placement.max_overlap == 1, placement.reason
            assert placement.reason.startswith("independent offsets")
        else:
            assert placement.max_overlap > 1
            assert placement.reason.startswith("no ")
    # The only pair with N >= r(r-1)+1 here at which Shearer's exhaustive search found none.
    assert (build_placement(200, 14).max_overlap, 200 >= 14 * 13 + 1) == (2, True)


def test_rulers_exist_wherever_shearers_table_says_so() -> None:
    """J. B. Shearer, "Modular Golomb rulers": complete up to 14 marks but for four moduli, which are not claimed."""
    missing = {(194, 13), (195, 13), (225, 14), (230, 14)}
    for marks, (single, always) in EXISTS.items():
        for modulus in [*single, *range(always, always + 40)]:
            found = known_ruler(modulus, marks)
            if found is None and marks <= 6:
                found = exhaustive(modulus, marks, 1)
            if found is None:
                assert (modulus, marks) in missing
            else:
                assert (len(found), found[0], max_overlap(modulus, found)) == (marks, 0, 1)


@pytest.mark.parametrize("marks", range(2, 7))
def test_shearers_table_of_absent_rulers_by_own_exhaustive_search(marks: int) -> None:
    for modulus in range(marks, EXISTS[marks][1] + 3):
        try:
            exists = exhaustive(modulus, marks, 1) is not None
        except EffortSpentError:
            pytest.fail(f"{marks} marks mod {modulus}: the effort does not suffice")
        assert exists != absent(modulus, marks), f"{marks} marks mod {modulus}"


def test_listed_rulers_and_families_are_rulers() -> None:
    for (modulus, marks), ruler in LISTED.items():
        assert (len(ruler), ruler[0], max_overlap(modulus, ruler)) == (marks, 0, 1)
    for prime in (3, 5, 7, 11, 13, 17):
        for family, marks in ((singer, prime + 1), (bose, prime), (ruzsa, prime - 1)):
            modulus, ruler = family(prime)
            assert len(ruler) == marks
            assert max_overlap(modulus, ruler) == 1


def test_unproven_is_said() -> None:
    placement = build_placement(400, 20)
    assert placement.max_overlap == 2
    assert (
        "no 20 offsets mod 400 with overlap 1 were found, which does not prove that there are none" in placement.reason
    )
    proven = build_placement(4, 3)
    assert proven.reason == "no 3 offsets mod 4 have a smaller overlap (proven): two groups share at most 2 of 3 shards"


@settings(max_examples=60, print_blob=True)
@given(num_groups=st.integers(1, 60), data=st.data())
def test_hosts_and_stacks_are_inverse(num_groups: int, data: st.DataObject) -> None:
    others = data.draw(st.permutations(range(1, num_groups)))
    placement = placement_from_offsets(num_groups, (0, *others[: data.draw(st.integers(0, min(8, num_groups - 1)))]))
    stacks, hosts = placement.stacks(), placement.hosts()
    assert stacks.dtype == hosts.dtype == np.int32
    assert stacks.shape == hosts.shape == (num_groups, placement.redundancy)
    assert (stacks[:, 0] == np.arange(num_groups)).all()
    for layer in range(placement.redundancy):
        assert (hosts[stacks[:, layer], layer] == np.arange(num_groups)).all()
        assert (stacks[hosts[:, layer], layer] == np.arange(num_groups)).all()
    with pytest.raises(ValueError, match="read-only"):
        hosts[0, 0] = 0


def test_consecutive() -> None:
    placement = build_placement(64, 8, "consecutive")
    assert placement.offsets == tuple(range(8))
    assert placement.max_overlap == shared_shards(placement) == 7
    assert "at most 7 of 8 shards" in placement.reason


def test_same_arguments_same_offsets() -> None:
    known = {pair: build_placement(*pair).offsets for pair in ((8, 3), (64, 8), (200, 9), (100, 20), (1000, 8))}
    for function in (singer, bose, ruzsa):
        function.cache_clear()
    for pair, offsets in known.items():
        assert build_placement(*pair).offsets == offsets
        assert independent_offsets(*pair).offsets == offsets
        assert placement_from_offsets(pair[0], offsets).offsets == offsets


@pytest.mark.parametrize(
    ("num_groups", "redundancy", "kind", "words"),
    [
        (4, 5, "independent", "--spare-redundancy 5 is larger than the number of groups, 4"),
        (4, 5, "consecutive", "--spare-redundancy 5 is larger than the number of groups, 4"),
        (4, 0, "independent", "--spare-redundancy is 0"),
        (0, 1, "independent", "--num-groups is 0"),
        (4, 2, "diagonal", "--spare-placement diagonal is unknown; use independent or consecutive"),
    ],
)
def test_bad_input_names_value_and_fix(num_groups: int, redundancy: int, kind: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_placement(num_groups, redundancy, kind)  # type: ignore[arg-type]


@pytest.mark.parametrize("offsets", [(), (1, 2), (0, 4), (0, 2, 2), (0, -1)])
def test_bad_offsets_are_refused(offsets: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="are not valid for 4 groups"):
        placement_from_offsets(4, offsets)

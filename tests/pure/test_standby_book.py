"""Whose devices are whose, and who is next: what holds for every course of losses."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spare_megatron.config.place import PLACE_FILE, Place
from spare_megatron.control_plane.exit_report import exit_reported, read_exit_reports
from spare_megatron.launch.processes import publish_processes
from spare_megatron.launch.standby_book import StandbyBook, first_choice
from spare_megatron.monitor.waiting_counts import waiting_counts, waiting_text
from spare_megatron.runtime.run_directory import RunDirectory, waits_file, write_json
from spare_megatron.runtime.stop_signals import STOP_SIGNALS
from spare_megatron.worker.waiting import wait_for_place


@pytest.mark.parametrize(
    ("waits_since_s", "expected"),
    [
        ({}, None),
        ({3: None}, 3),
        ({3: None, 2: None}, 2),
        ({1: None, 4: 10.0}, 4),
        ({4: 10.0, 5: 9.0, 6: None}, 5),
        ({5: 9.0, 4: 9.0}, 4),
    ],
)
def test_the_longest_waiting_is_first(waits_since_s: dict[int, float | None], expected: int | None) -> None:
    assert first_choice(waits_since_s) == expected


def test_the_next_standby_begins_where_the_lost_group_was() -> None:
    book = StandbyBook(3, 1)
    assert book.free == [3]
    book.begins(0, 3)
    assert book.takes(0, 2) == 2
    assert (book.slot_of(2), book.free) == (3, [2])
    book.begins(1, 2)
    assert book.takes(1, 0) == 0
    assert (book.slot_of(0), book.free) == (2, [0])


def test_who_has_a_place_takes_signals_as_any_rank(tmp_path: Path) -> None:
    """While a standby waited it ignored them; what it starts later, a user's data loader, must not."""
    place, before = tmp_path / "standby-0.json", [signal.getsignal(number) for number in STOP_SIGNALS]
    write_json(place, {"environ": {"SPARE_GROUP": "2"}})
    environ = {PLACE_FILE: str(place)}
    wait_for_place(environ)
    assert environ == {"SPARE_GROUP": "2"}
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


def test_what_a_standby_ends_by_is_not_said_to_be_group_0s(tmp_path: Path) -> None:
    """Nor does it take away what group 0 has reported."""
    run_dir, of_group_0 = RunDirectory(tmp_path), Place(0, 0, 2, 0, str(tmp_path), "spare-launch")
    for place in (of_group_0, replace(of_group_0, place_file="standbys/standby-0.json")):
        with pytest.raises(ValueError, match=place.home), exit_reported(run_dir, place):
            raise ValueError(place.home)
    assert [one.error for one in read_exit_reports(run_dir.errors)] == ["ValueError: group 0"]


@given(st.integers(1, 4), st.integers(0, 3), st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5)), max_size=40))
def test_no_slot_has_two(groups: int, standbys: int, course: list[tuple[int, int]]) -> None:
    """Each word of the course: a standby begins in a free slot, takes a group's place, or ends."""
    book, living, number = StandbyBook(groups, standbys), list[int](), 0
    for what, which in course:
        if what == 0 and book.free:
            book.begins(number, book.free[which % len(book.free)])
            living.append(number)
            number += 1
        elif what == 1 and living:
            left = book.takes(living.pop(which % len(living)), which % groups)
            assert left in book.free
        elif what == 2 and living:
            book.ends(living.pop(which % len(living)))
        slots = [book.slot_of(group) for group in range(groups)]
        assert len({*slots}) == groups
        assert not {*slots} & {*book.free}
        assert len(book.free) + groups + len(living) == groups + standbys


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ({}, ""),
        ({"standby": 1}, "1 standby waits for a place"),
        ({"standby": 2, "standby starts": 1}, "2 standbys wait for a place, 1 more starts"),
        ({"standby stopped": 1}, "0 standbys wait for a place, 1 is stopped by a signal"),
    ],
)
def test_what_is_said_of_who_waits(counts: dict[str, int], expected: str) -> None:
    assert waiting_text(counts) == expected


def test_a_standby_with_a_process_that_is_stopped_does_not_wait(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path)
    listed = [
        (f"standby-{n}", position, 10 * n + position, (n, position) == (1, 0)) for n in (0, 1) for position in (0, 1)
    ]
    publish_processes(run_dir.processes, None, (), listed)
    run_dir.standbys.mkdir()
    for pid in (0, 1, 10):
        waits_file(run_dir.place_file(f"standby-{pid // 10}"), pid).touch()
    assert waiting_counts(run_dir) == {"standby": 1, "standby stopped": 1}

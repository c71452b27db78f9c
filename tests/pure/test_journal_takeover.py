"""A journal of parts and snapshots under several coordinators: takeovers at any moment, and run directories with and
without terms."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spare_megatron.coordinator.terms import Term, Terms, show_last
from spare_megatron.runtime import failpoints
from spare_megatron.runtime.failpoints import injected
from spare_megatron.runtime.run_directory import CoordinatorAddress, RunDirectory
from tests.pure.journal_writer import EVENTS, PLACES, Writer, assert_whole, shrink, written


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch)


class Holder:
    """The holder of a term, which serves."""

    def __init__(self, run_dir: RunDirectory, number: int) -> None:
        self.terms = Terms(run_dir)
        assert self.terms.claim(self.terms.newest(), 1) == Term(number, 1)
        self.own = self.terms.open(number)
        address = CoordinatorAddress(f"127.0.0.1:{number}", number, 1, -1, number, "here")
        self.terms.write(Term(number, 1, address=address))
        self.terms.show()
        self.writer = Writer(self.own.journal)


@pytest.mark.parametrize(
    ("seen", "after"),
    [
        *(("names", after) for after in (0, 4)),
        ("stale names", 2),
        *(pytest.param("names", after, marks=pytest.mark.full) for after in (2, 6, 8)),
        *(pytest.param("stale names", after, marks=pytest.mark.full) for after in (0, 4, 6, 8)),
    ],
)
@pytest.mark.parametrize("place", [place for place in PLACES if place != "journal.open"])
def test_a_takeover_between_any_two_file_operations_of_the_holder_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, after: int, seen: str
) -> None:
    """The holder is suspended at a place; another one takes over, goes on and is shown; then the first one wakes up and
    carries out the rest of what it was at."""
    run_dir, acked, passed, taken = RunDirectory(tmp_path), list[int](), [0], list[Holder]()
    one = Holder(run_dir, 1)
    real = failpoints._strike

    def strike(name: str, data: bytes = b"", path: Path | None = None) -> bytes:
        if name == place and not taken:
            passed[0] += 1
            if passed[0] > after:
                taken.append(one)  # what the next holder passes is not counted
                with one.writer.at_work:  # it makes nothing final while it is copied
                    known = max(acked, default=0)
                    taken[0] = other = Holder(run_dir, 2)
                    assert other.writer.done >= known
                    other.writer.go_on(min(other.writer.done + 20, len(EVENTS)))
        return real(name, data, path)

    monkeypatch.setattr(failpoints, "_armed", True)
    monkeypatch.setattr(failpoints, "_faults", ())
    monkeypatch.setattr(failpoints, "_strike", strike)
    while one.writer.done < len(EVENTS) and not taken:
        one.writer.go_on(one.writer.done + 1, acked.append)
        if seen == "names":
            one.terms.show()
    one.writer.close()
    one.terms.show()
    if not taken:  # fewer passes than ``after``
        assert_whole(one.own.journal)
        return
    other = taken[0]
    other.writer.go_on()
    other.writer.close()
    assert_whole(other.own.journal)
    other.terms.show()
    assert_whole(run_dir.journal)
    third = Holder(run_dir, 3)
    assert third.writer.done == len(EVENTS)
    third.writer.close()
    assert_whole(third.own.journal)


@pytest.mark.parametrize("faults", ["", "part.show=EIO"])
def test_a_coordinator_without_a_term_goes_on_with_the_last_term_not_with_what_it_last_showed(
    tmp_path: Path, faults: str
) -> None:
    """The holder was killed after it began a part, and before the names followed."""
    run_dir = RunDirectory(tmp_path)
    one = Holder(run_dir, 1)
    one.writer.go_on(40)
    one.terms.show()
    with injected(faults):
        one.writer.go_on()
        one.writer.close()
    show_last(run_dir)
    assert_whole(run_dir.journal)


def test_a_coordinator_without_a_term_that_came_later_is_not_put_back(tmp_path: Path) -> None:
    run_dir = RunDirectory(tmp_path)
    one = Holder(run_dir, 1)
    one.writer.go_on(30)
    one.writer.close()
    show_last(run_dir)
    run_dir.publish_coordinator(CoordinatorAddress("127.0.0.1:2", 2, 1, -1, 2, "here"))
    alone = written(run_dir.journal)
    assert alone.done == len(EVENTS)
    show_last(run_dir)
    assert_whole(run_dir.journal)
    two = Holder(run_dir, 3)
    two.writer.close()
    assert_whole(two.own.journal)


def test_a_name_that_follows_late_or_never_hides_nothing(tmp_path: Path) -> None:
    """journal.jsonl is an old part: to readers, to a restart and to a takeover."""
    run_dir = RunDirectory(tmp_path)
    with injected("part.show=EIO"):
        one = Holder(run_dir, 1)
        one.writer.go_on()
        one.writer.close()
        assert json.loads(one.own.journal.read_bytes().splitlines()[0])["part"] == 1
        assert_whole(one.own.journal)
        two = Holder(run_dir, 2)
        assert two.writer.done == len(EVENTS)
        two.writer.close()
    assert_whole(two.own.journal)

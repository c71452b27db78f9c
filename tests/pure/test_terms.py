"""Terms as real files, and a lease on a clock that the test moves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spare_megatron.coordinator.election import LeadershipLease, LeaseLostError
from spare_megatron.coordinator.terms import SealedError, Term, Terms, UnseenError
from spare_megatron.runtime import failpoints
from spare_megatron.runtime.run_directory import CoordinatorAddress, RunDirectory

LEASE_S = 4.0


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path)


def address(number: int) -> CoordinatorAddress:
    """Of the holder of a term."""
    return CoordinatorAddress(f"127.0.0.1:{number}", number, 1, -1, number, "here")


def begin(run_dir: RunDirectory, number: int, serves: bool = True) -> Terms:
    """A process that claims term ``number``, and serves."""
    terms = Terms(run_dir)
    term = terms.claim(terms.newest(), job_attempt=1)
    assert term == Term(number, 1)
    if serves:
        terms.open(number)
        terms.write(Term(number, 1, address=address(number)))
        terms.show()
    return terms


def write(path: Path, text: str) -> None:
    """Append to a journal."""
    with path.open("a") as file:
        file.write(text)


def test_a_claim_is_exclusive_and_the_number_grows(run_dir: RunDirectory) -> None:
    one, other = Terms(run_dir), Terms(run_dir)
    assert one.newest() is None
    assert (one.claim(None, 1), other.claim(None, 1)) == (Term(1, 1), None)
    assert other.claim(other.newest(), 1) == Term(2, 1)
    other.write(Term(2, 1, 7, 0, address(2)))
    assert one.newest() == Term(2, 1, 7, 0, address(2))
    run_dir.publish_coordinator(address(8))
    assert one.claim(one.newest(), 1) == Term(9, 1), "above every coordinator that had no term, too"


def test_a_lease_is_not_shorter_than_that_of_a_holder_that_may_go_on(run_dir: RunDirectory) -> None:
    """Nor is that of whoever takes over from one that has not waited for it yet."""
    terms = Terms(run_dir)
    assert terms.claim(None, 1, 60.0) == Term(1, 1, lease_s=60.0)
    assert terms.claim(terms.newest(), 1, 2.0) == Term(2, 1, lease_s=60.0)
    terms.write(Term(2, 1, over=0, lease_s=60.0))
    assert terms.claim(terms.newest(), 2, 2.0) == Term(3, 2, lease_s=2.0)


@pytest.mark.parametrize("how", ["listing", "gone", "half", "ESTALE"])
def test_a_look_that_cannot_see_is_no_look(run_dir: RunDirectory, how: str) -> None:
    """A vacancy, or an older term, seen beside a living holder lets a candidate claim."""
    terms = begin(run_dir, 1)
    begin(run_dir, 2)
    assert terms.newest() == Term(2, 1, address=address(2))
    path = run_dir.path / "terms" / "2.json"
    if how == "listing":
        path.rename(path.with_suffix(".hidden"))
    elif how == "gone":
        path.unlink()
        path.symlink_to("nowhere")
    elif how == "half":
        path.write_text(path.read_text()[:20])
    with failpoints.injected("N.json.read=ESTALE" if how == "ESTALE" else ""), pytest.raises(UnseenError):
        terms.newest()


def test_each_term_goes_on_with_files_of_its_own(run_dir: RunDirectory) -> None:
    """Whoever was stopped while it wrote, writes into a file that nobody reads any more."""
    first = begin(run_dir, 1)
    before = first.open(1)
    write(before.journal, "one\n")
    write(before.metrics, "1\n")
    after = begin(run_dir, 2).open(2)
    write(before.journal, "late\n")
    write(after.journal, "two\n")
    assert after.journal.read_text() == run_dir.journal.read_text() == "one\ntwo\n"
    assert after.metrics.read_text() == run_dir.metrics.read_text() == "1\n"
    begin(run_dir, 3)
    begin(run_dir, 4)
    opened = sorted(path.name for path in (run_dir.path / "terms").iterdir() if path.is_dir())
    assert opened == ["3", "4"], "the copy that was copied is kept until the next time, older ones are removed"
    assert run_dir.journal.read_text() == "one\ntwo\n"


def test_a_candidate_that_was_stopped_before_its_copy_was_in_place_is_too_late(run_dir: RunDirectory) -> None:
    """Its copy of an older journal must not replace the one in use."""
    write(begin(run_dir, 1).open(1).journal, "one\n")
    late = begin(run_dir, 2, serves=False)
    write(begin(run_dir, 3).open(3).journal, "three\n")
    with pytest.raises(SealedError, match="coordinator 2 cannot begin any more: a later one has"):
        late.open(2)
    late.show()
    assert run_dir.journal.read_text() == "one\nthree\n"
    assert begin(run_dir, 4).open(4).journal.read_text() == "one\nthree\n"


def test_an_older_name_is_never_put_over_a_newer_one_knowingly(run_dir: RunDirectory) -> None:
    run_dir.publish_coordinator(address(2))
    run_dir.publish_coordinator(address(1))
    assert run_dir.coordinator() == address(2)


def test_a_reader_ignores_a_lower_number_than_it_has_seen(run_dir: RunDirectory) -> None:
    """As when a rename was under way for long; and a file that cannot be read says nothing."""
    path = run_dir.path / "coordinator.json"
    assert run_dir.coordinator() is None
    run_dir.publish_coordinator(address(2))
    assert run_dir.coordinator() == address(2)
    for text in (json.dumps(vars(address(1))), '{"address": "127.', ""):
        path.write_text(text)
        assert run_dir.coordinator() == address(2)
    path.unlink()
    assert run_dir.coordinator() == address(2)
    run_dir.publish_coordinator(address(3))
    with failpoints.injected("coordinator.json.read=ESTALE"):
        assert run_dir.coordinator() == address(2)
    assert run_dir.coordinator() == address(3)


def test_whoever_serves_puts_its_own_name_back(run_dir: RunDirectory) -> None:
    """A rename that was under way when its author was stopped cannot be prevented."""
    terms = begin(run_dir, 2 - 1)
    begin(run_dir, 2)
    (run_dir.path / "coordinator.json").write_text(json.dumps(vars(address(1))))
    run_dir.journal.unlink()
    run_dir.journal.touch()
    terms.show()
    assert RunDirectory(run_dir.path).coordinator() == address(2)
    assert run_dir.journal.samefile(run_dir.path / "terms" / "2" / "journal.jsonl")


class Clock:
    """Of one process."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


MakeLease = Callable[[], tuple[LeadershipLease, Terms, Clock]]


@pytest.fixture
def make_lease(run_dir: RunDirectory) -> Iterator[MakeLease]:
    """Leases whose keep-alive thread hangs from the start (its first beat comes after an hour)."""
    made: list[LeadershipLease] = []

    def make() -> tuple[LeadershipLease, Terms, Clock]:
        clock, terms = Clock(), Terms(run_dir)
        term = terms.claim(terms.newest(), 1)
        assert term is not None
        made.append(LeadershipLease(terms, term, LEASE_S, clock.now_s, clock, beat_s=3600.0))
        return made[-1], terms, clock

    yield make
    for lease in made:
        lease.close()


def test_a_holder_is_certain_for_half_a_lease_after_the_begin_of_a_look(
    make_lease: MakeLease, run_dir: RunDirectory
) -> None:
    lease, _, clock = make_lease()
    begin(run_dir, 2, serves=False)
    clock.now_s += LEASE_S / 2
    lease.confirm()
    clock.now_s += 0.01
    with pytest.raises(LeaseLostError, match="coordinator 2 has taken over from 1"):
        lease.confirm()
    clock.now_s -= LEASE_S
    with pytest.raises(LeaseLostError):
        lease.confirm()


def test_a_look_that_came_back_late_is_no_certainty(
    make_lease: MakeLease, run_dir: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process was stopped in the middle of it, and meanwhile another one took over."""
    lease, terms, clock = make_lease()
    clock.now_s += LEASE_S
    look = terms.newest

    def slow() -> Term | None:
        seen = look()
        monkeypatch.setattr(terms, "newest", look)
        begin(run_dir, 2)
        clock.now_s += LEASE_S
        return seen

    monkeypatch.setattr(terms, "newest", slow)
    with pytest.raises(LeaseLostError, match="coordinator 2 has taken over from 1"):
        lease.confirm()


def test_a_holder_that_cannot_see_its_own_term_is_not_certain(
    make_lease: MakeLease, run_dir: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease, _, clock = make_lease()
    path = run_dir.path / "terms" / "1.json"
    hidden = path.rename(path.with_suffix(".hidden"))
    clock.now_s += LEASE_S
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            hidden.rename(path)

    monkeypatch.setattr("spare_megatron.coordinator.election.time.sleep", pause)
    lease.confirm()
    assert len(pauses) == 3
    path.rename(hidden)
    clock.now_s += LEASE_S
    with pytest.raises(LeaseLostError, match=r"coordinator 1 gives up its lease: .*lists no term above"):
        lease.confirm()
    assert sum(pauses[3:]) == pytest.approx(LEASE_S)


def test_a_disk_that_is_full_for_a_while_delays_a_takeover(make_lease: MakeLease, run_dir: RunDirectory) -> None:
    write(run_dir.journal, "one\n")
    lease, _, _ = make_lease()
    with failpoints.injected("term.copy=ENOSPC,times=1"):
        asyncio.run(asyncio.wait_for(lease.enter(None), 30))
    assert lease.run_dir.journal.read_text() == "one\n"

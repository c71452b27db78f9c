"""A job with fewer copies of a state shard than it is to have says so until it has them again."""

from __future__ import annotations

from typing import Any

from spare_megatron.coordinator.copies_watch import CopiesWatch, state_copies
from spare_megatron.monitor.status_texts import status_text
from tests.pure.scenario import Player
from tests.pure.test_status_figures import STATUS


class Watched:
    """A job whose coordinator says how many copies there are."""

    def __init__(self, groups: int, copies: int, shards: int | None = None) -> None:
        self.player, self.watch, self.now_s = Player(), CopiesWatch(), 100.0
        self.everybody = ",".join(map(str, range(groups)))
        self.play(f"open N={groups} K=1 r={groups} steps=9 shards={shards or groups} copies={copies}")
        self.begun = self.play(f"hello {self.everybody}")

    def play(self, line: str) -> list[str]:
        """What is said of a record."""
        before, self.now_s = self.player.state, self.now_s + 1.0
        self.player.play(line)
        return [said] if (said := self.watch.observe(before, self.player.state, self.now_s)) else []

    @property
    def lines(self) -> list[str]:
        """Of spare-status, about state shards."""
        status: dict[str, Any] = {**STATUS, "state_copies": state_copies(self.player.state)}
        return [line for line in status_text(status).splitlines() if "state shard" in line or "more" in line]


def test_a_loss_is_said_once_and_so_is_its_end() -> None:
    job = Watched(3, 2)
    assert not job.begun
    assert job.lines == [
        "each of the 3 state shards has 2 copies",
        "  state shard 0: on groups 0-1",
        "  state shard 1: on groups 1-2",
        "  state shard 2: on groups 0, 2",
    ]
    assert job.play("lost 1") == [
        "state shards 0, 1 have fewer than 2 copies (at least 1); new ones are made on groups 0, 2"
    ]
    assert job.lines == [
        "2 state shards have fewer than 2 copies",
        "  state shard 0: on group 0; group 2 copies it from group 0",
        "  state shard 1: on group 2; group 0 copies it from group 2",
        "  state shard 2: on groups 0, 2",
    ]
    assert job.play("have 2 shard=0") == []
    assert job.lines[1] == "  state shard 0: on group 0; group 2 has a copy to compare"
    assert job.play("vote all") == []
    assert job.lines[0] == "1 state shard has fewer than 2 copies"
    assert job.play("have 0 shard=1") == []
    assert job.play("vote all") == ["each of the 3 state shards has 2 copies again, 4.0 s later"]


def test_what_nobody_can_keep_is_said_and_a_second_loss_too() -> None:
    job = Watched(3, 3)
    assert job.play("lost 1") == [
        "state shards 0, 1, 2 have fewer than 3 copies (at least 2); no other group can keep one"
    ]
    assert job.play("vote all") == []
    assert job.play("lost 2") == [
        "state shards 0, 1, 2 have fewer than 3 copies (at least 1); no other group can keep one"
    ]


def test_a_restarted_coordinator_knows_since_when() -> None:
    job = Watched(3, 2)
    job.play("lost 1")
    other = CopiesWatch()
    other.recall(job.watch.memo())
    job.watch = other
    for line in ("have 2 shard=0", "have 0 shard=1"):
        assert job.play(line) == []
    assert job.play("vote all") == ["each of the 3 state shards has 2 copies again, 3.0 s later"]


def test_of_many_shards_those_are_shown_that_lack_copies() -> None:
    job = Watched(12, 2)
    assert job.lines == ["each of the 12 state shards has 2 copies"]
    [said] = job.play("lost 0,2,4,6,8")
    assert said.startswith("10 state shards have fewer than 2 copies (at least 1); new ones are made on groups ")
    assert job.lines[0] == "10 state shards have fewer than 2 copies"
    assert job.lines[1].startswith("  state shard 0: on group 1; group ")
    assert len(job.lines) == 1 + 8 + 1
    assert job.lines[-1] == "  and 2 more"


def test_a_job_whose_groups_keep_everything_says_nothing() -> None:
    player = Player()
    player.play("open N=3 K=1 r=3 steps=9")
    player.play("hello 0,1,2")
    assert state_copies(player.state) is None

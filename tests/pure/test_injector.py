"""When an injected fault fires: at its moment, on its ranks, once in a job. The faults themselves need processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.injection import parse_injection
from spare_megatron.config.place import Place
from spare_megatron.runtime.run_directory import RunDirectory
from spare_megatron.worker import fault_injection
from spare_megatron.worker.fault_injection import VARIABLE, InjectedError, Injector


def injector(tmp_path: Path, *texts: str, group: int = 1, position: int = 0, restarts: int = 0) -> Injector:
    """Of one rank."""
    return Injector([parse_injection(text) for text in texts], group, position, RunDirectory(tmp_path), restarts)


def test_it_fires_at_its_moment_and_once_in_a_job(tmp_path: Path) -> None:
    text = "exception:group=1,position=0,step=5,at=forward,n=2"
    one = injector(tmp_path, text)
    for moment in (("forward", 5, 1), ("forward", 4, 2), ("backward", 5, 2)):
        one.fire(*moment)
    with pytest.raises(InjectedError, match="at forward of step 5"):
        one.fire("forward", 5, 2)
    one.fire("forward", 5, 2)
    injector(tmp_path, text).fire("forward", 5, 2)


def test_other_ranks_are_left_alone(tmp_path: Path) -> None:
    text = "exception:group=1,position=0,step=5,at=vote"
    for group, position in ((0, 0), (1, 1)):
        injector(tmp_path, text, group=group, position=position).fire("vote", 5, 0)


def test_without_a_position_every_rank_of_the_group_has_it(tmp_path: Path) -> None:
    for position in range(2):
        with pytest.raises(InjectedError):
            injector(tmp_path, "exception:group=1,step=5,at=vote", position=position).fire("vote", 5, 0)


def test_a_group_that_is_back_is_left_alone_unless_the_fault_is_for_it(tmp_path: Path) -> None:
    """Position 1 was killed with its group before its own part of the fault came."""
    of_all, of_later = "exception:group=1,step=5,at=vote", "exception:group=1,step=6,at=vote,restart=2"
    with pytest.raises(InjectedError):
        injector(tmp_path, of_all, of_later).fire("vote", 5, 0)
    for restarts in (1, 2):
        injector(tmp_path, of_all, of_later, position=1, restarts=restarts).fire("vote", 5, 0)
    for restarts in (0, 1, 3):
        injector(tmp_path, of_all, of_later, restarts=restarts).fire("vote", 6, 0)
    with pytest.raises(InjectedError):
        injector(tmp_path, of_all, of_later, restarts=2).fire("vote", 6, 0)


def test_the_same_fault_twice_is_two_faults(tmp_path: Path) -> None:
    text = "exception:group=1,position=0,step=5,at=vote"
    one = injector(tmp_path, text, text)
    for _ in range(2):
        with pytest.raises(InjectedError):
            one.fire("vote", 5, 0)
    one.fire("vote", 5, 0)


def test_a_bit_flip_is_for_whoever_owns_the_data(tmp_path: Path) -> None:
    one = injector(tmp_path, "bitflip:group=1,step=5,at=weights")
    one.fire("weights", 5, 0)
    assert not one.flips("weights", 4)
    assert one.flips("weights", 5)
    assert not one.flips("weights", 5)


def test_it_comes_with_the_environment(tmp_path: Path) -> None:
    place = Place(1, 0, 2, 0, str(tmp_path), "spare-launch")
    environ = {VARIABLE: "slow=0.001:group=1,step=1,at=vote\nexception:group=1,step=2,at=vote"}
    one = Injector.from_environment(environ, place)
    one.fire("vote", 1, 0)
    with pytest.raises(InjectedError):
        one.fire("vote", 2, 0)
    Injector.from_environment({}, place).fire("vote", 2, 0)
    with pytest.raises(ConfigError, match="is no kind of"):
        Injector.from_environment({VARIABLE: "boom:group=1,step=1,at=vote"}, place)
    with pytest.raises(ConfigError, match="needs a run directory"):
        Injector.from_environment(environ, Place(1, 0, 2, 0, None, "none"))


def test_only_a_rank_whose_bits_are_flipped_is_asked_for_flips(tmp_path: Path) -> None:
    text = "bitflip:group=1,position=0,step=5,at=gradient"
    assert injector(tmp_path, text).has_flips
    assert not injector(tmp_path, text, position=1).has_flips
    assert not injector(tmp_path, "exception:group=1,position=0,step=5,at=vote").has_flips


def test_a_slowness_lasts_and_counts_what_is_computed_inside_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed_s, slept = [100.0], list[float]()
    monkeypatch.setattr(fault_injection.time, "thread_time", lambda: computed_s[-1])
    monkeypatch.setattr(fault_injection.time, "sleep", slept.append)
    one = injector(tmp_path, "slow=3x:group=1,step=2", "slow=2x:group=0,step=1")
    assert [one.slowness(step) for step in (1, 2, 3)] == [1.0, 3.0, 3.0]
    for step, at_s in ((1, 101.0), (1, 102.0), (2, 110.0), (2, 111.5), (3, 120.0), (3, 120.25)):
        computed_s.append(at_s)
        one.fire("backward", step, 0)
    assert slept == [3.0, 0.5], "the update between two steps is none of its pieces"
    assert injector(tmp_path, "slow=3x:group=1,step=2").slowness(2) == 3.0, "of every process"


def test_a_group_waits_until_another_one_is_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the start that was lost, which status.json may still name, nor one whose processes only start counts."""
    here: dict[str, Any] = {"live": {"0": 0}, "learners": {}, "ready": []}
    too_early = [
        {},
        {**here, "live": {"0": 0, "1": 1}},
        {**here, "learners": {"1": 1}, "ready": [1]},
        {**here, "learners": {"1": 2}},
        {**here, "learners": {"1": 2, "2": 2}, "ready": [2]},
    ]
    enough = [
        {**here, "learners": {"1": 2}, "ready": [1]},
        {**here, "live": {"0": 0, "1": 3}},
        {**here, "outcome": "stopped"},
    ]
    for number, last in enumerate(enough):
        shown = iter([*too_early, last, {"it has waited": "too long"}])
        monkeypatch.setattr(fault_injection, "glance", lambda _, shown=shown: next(shown))
        monkeypatch.setattr(fault_injection.time, "sleep", lambda _: None)
        injector(tmp_path / str(number), "wait=1.2:group=0,step=4,at=forward", group=0).fire("forward", 4, 0)
        assert list(shown) == [{"it has waited": "too long"}]

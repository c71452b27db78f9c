"""The checks of the chaos soak find what they look for: in weights, checkpoints, files, processes and journals."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import psutil
import torch

from benchmarks import _soak_verdict as verdict
from benchmarks._soak_models import Toy
from benchmarks._soak_samples import Growth
from benchmarks._soaked_job import Soak
from spare_megatron.coordinator.journal import Journal, Replayed
from spare_megatron.protocol.machine import initial_state, step
from spare_megatron.protocol.messages import Event, Hello, JobSpec, Loss, Lost, Opened


def soak_of(run_dir: Path) -> Soak:
    return Soak(Toy(), 1, 60.0, 5.0, run_dir, print, {})


def test_weights_that_differ_or_were_never_voted() -> None:
    assert not list(verdict._weights({1: {"a"}, 2: {"b"}}, {1: {"a"}, 2: {"b"}}))
    assert list(verdict._weights({1: {"a"}, 3: {"b", "c"}}, {1: {"a"}, 2: {"b"}, 3: {"b"}})) == [
        "the weights of steps were never voted: 2",
        "weights differ from those of the failure-free run after steps: 3",
    ]


def test_checkpoints_that_differ_in_one_bit(tmp_path: Path) -> None:
    for name, last in (("one", 2.0), ("other", 2.0 + 2**-20)):
        (tmp_path / name).mkdir()
        for position in range(2):
            state = {"weights": [torch.ones(3)], "momenta": [torch.ones(3), torch.tensor([1.0, last])]}
            torch.save(state, tmp_path / name / f"rank{position}.pt")
    model = Toy()
    assert not model.differences(tmp_path / "one", tmp_path / "one")
    assert model.differences(tmp_path / "one", tmp_path / "other") == ["rank 0: momenta 1", "rank 1: momenta 1"]


def test_what_is_left_behind(tmp_path: Path) -> None:
    soak = soak_of(tmp_path)
    soak.scratch.mkdir()
    assert not list(verdict._left_behind(soak))
    (soak.scratch / "left").touch()
    (tmp_path / ".status.json.host-1-1").touch()
    (tmp_path / "save" / "partial" / "iter_0000010.group0-incarnation0-epoch1").mkdir(parents=True)
    code = "import socket, time; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1]); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-uc", code], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            soak.samples.seen.add(psutil.Process(process.pid))
            soak.samples.look_at_ports()
            assert list(soak.samples.ports.values()) == [port]
            found = list(verdict._left_behind(soak))
        finally:
            process.kill()
    assert [sentence.partition(" are left: ")[0] for sentence in found] == [
        "processes",
        "ports",
        "temporary files",
        "unfinished files",
        "unpublished checkpoints",
    ]
    with socket.create_server(("127.0.0.1", port)):  # another's: the port was given again
        assert not [one for one in verdict._left_behind(soak) if one.startswith(("processes", "ports"))]


def test_growth_is_a_fault_once_enough_groups_have_come_back() -> None:
    few, many = (Growth("rank", "descriptors", 2, returns, 3.0, 1.0, 60.0) for returns in (3, 12))
    assert list(verdict._grown([few, many])) == ["rank: 1.00 descriptors more with each return of a group"]


def test_a_group_that_is_lost_without_a_fault_is_named(tmp_path: Path) -> None:
    path, state = tmp_path / "journal.jsonl", initial_state()
    journal = Journal(path, Replayed(), lambda: 0.0)
    spec = JobSpec(
        num_groups=3,
        pieces_per_shard=1,
        offsets=(0, 1),
        granularity="microbatch",
        first_step=0,
        last_step=9,
        min_groups=1,
        fingerprint="",
        heartbeat_timeout_s=5.0,
    )
    hellos = tuple(Hello(group, 0, "", 0) for group in range(3))
    events: tuple[Event, ...] = (Opened(spec, 1, 1), *hellos, Lost((Loss(1, 0, "silent"),)))
    for event in events:
        state, decision = step(state, event)
        journal.append(event, decision)
    journal.close()
    assert not list(verdict._replayed(path, {(1, 0)}))
    [sentence] = verdict._replayed(path, set())
    assert sentence.startswith("groups were lost that no fault had struck: record 5: group 1, incarnation 0: silent")

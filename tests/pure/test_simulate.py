"""``spare-simulate``: what it refuses, what its flags mean, what it prints and draws."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spare_megatron.cli import simulate as simulate_command
from spare_megatron.cli.simulate import case_of, main, parser
from spare_megatron.coordinator.journal import Journal, Replayed
from spare_megatron.protocol import messages as m
from spare_megatron.protocol.machine import initial_state, step
from spare_megatron.simulator.cluster import Cluster
from spare_megatron.simulator.replay import losses


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--num-groups", "5", "--redundancy", "6"], "--redundancy 6 is larger than --num-groups 5"),
        (["--num-groups", "0"], "--num-groups is 0"),
        (["--num-groups", "5", "--stragglers", "5"], "--stragglers 5 must lie in 0..4"),
        (["--num-groups", "5", "--stragglers", "-1"], "--stragglers -1 must lie in 0..4"),
        (["--num-groups", "5", "--stragglers", "1", "--straggler-slowdown", "0.5"], "--straggler-slowdown is 0.5"),
        (["--num-groups", "5", "--stragglers", "1", "--straggler-slowdown", "nan"], "--straggler-slowdown is nan"),
        (["--num-groups", "5", "--straggler-slowdown", "2"], "has no effect without --stragglers K; give both"),
        (["--num-groups", "5", "--redundancy", "2", "--mtbf-s", "0"], "--mtbf-s is 0"),
        (["--num-groups", "5", "--redundancy", "2", "--compute-s", "inf"], "--compute-s is inf"),
        (["--num-groups", "5", "--redundancy", "2", "--policy", "magic"], "--policy magic is unknown"),
        (["--num-groups", "5", "--redundancy", "2", "--trials", "0"], "--trials is 0"),
        (["--num-groups", "5", "--redundancy", "2", "--policy", "spare", "--rejoin-s", "9"], "--rejoin-s is only for"),
        (["--num-groups", "5", "--redundancy", "2", "--trace", "TRACE"], "line 3"),
        (["--num-groups", "5", "--inject", "hang:group=1,step=2,at=forward"], "only deaths can be simulated"),
        (["--num-groups", "5", "--inject", "sigkill:group=5,step=2,at=forward"], "the groups are 0 to 4"),
        (["--num-groups", "5", "--inject", "sigkill:group=1,step=2,at=rebuild"], "not a moment of a simulated step"),
        (
            ["--num-groups", "5", "--policy", "spare", "--inject", "sigkill:group=1,step=2,at=vote"],
            "--inject is only for",
        ),
        (["--num-groups", "5", "--redundancy", "2", "--trace", "NODES"], "line 4 is of node '7', but the groups are 0"),
        (
            ["--num-groups", "5", "--redundancy", "2", "--trace", "SQUARE"],
            "line 1 is of node '²', but the groups are 0",
        ),
        (["--num-groups", "5", "--weibull-shape", "0.005"], "--weibull-shape 0.005 is outside"),
        (["--num-groups", "5", "--weibull-shape", "21"], "use 0.1 to 20"),
        (["--num-groups", "5", "--trace", "GOOD", "--clocks", "system"], "--clocks system has no effect"),
        (["--num-groups", "5", "--trace", "GOOD", "--weibull-shape", "0.78"], "--weibull-shape 0.78 has no effect"),
        (["--num-groups", "5", "--trace", "GOOD", "--mtbf-s", "300"], "--mtbf-s 300.0 has no effect"),
        (["--num-groups", "5", "--trace", "GOOD", "--topology", "RACKS"], "--topology"),
        (
            ["--num-groups", "5", "--trace", "GOOD", "--topology", "RACKS", "--domain-mtbf-s", "9000"],
            "has all failures",
        ),
        (["--num-groups", "5", "--topology", "RACKS"], "has no effect without --domain-mtbf-s above 0; give both"),
        (["--num-groups", "5", "--domain-mtbf-s", "9000"], "has no effect without --topology FILE; give both"),
        (["--num-groups", "5", "--topology-as-listed"], "--topology-as-listed has no effect without --topology"),
        (["--num-groups", "5", "--policy", "checkpoint", "--rebuild-s", "5"], "--rebuild-s 5 has no effect with"),
        (["--num-groups", "5", "--trace", "failure-free.jsonl"], "has no loss after the job began"),
        (["--num-groups", "5", "--state-gib", "9"], "--state-gib has no effect without --rejoin-s S; give both"),
        (
            ["--num-groups", "5", "--rejoin-s", "9", "--transfer-gib-per-s", "2"],
            "--transfer-gib-per-s has no effect without --state-gib G; give both",
        ),
        (["--num-groups", "5", "--rejoin-s", "9", "--state-gib", "0"], "--state-gib is 0, but must be"),
        (["--num-groups", "5", "--rejoin-s", "9", "--donor-share", "0.1"], "--donor-share 0.1 has no effect without"),
        (
            [
                "--num-groups",
                "5",
                "--policy",
                "replication",
                "--redundancy",
                "2",
                "--rejoin-s",
                "9",
                "--state-gib",
                "1",
            ],
            "--state-gib is only for --policy microbatch",
        ),
    ],
)
def test_bad_input_is_one_sentence(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "TRACE").write_text("time_s,node\n1.0,2\nsoon,2\n")
    (tmp_path / "NODES").write_text("time_s,node\n1.0,2\n\n2.0,7\n")
    (tmp_path / "GOOD").write_text("1.0,2\n")
    (tmp_path / "RACKS").write_text("0,a\n1,a\n2,b\n3,b\n4,b\n")
    (tmp_path / "failure-free.jsonl").write_text("")
    (tmp_path / "SQUARE").write_text("1.0,²\n")
    given = [str(tmp_path / word) if (tmp_path / word).exists() else word for word in arguments]
    assert main(given) == 2
    reported = capsys.readouterr().err
    assert words in reported
    assert reported.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["--policy", "spare", "--num-groups", "8"],
        ["--policy", "replication", "--num-groups", "4", "--redundancy", "4"],
        ["--policy", "replication", "--num-groups", "20", "--redundancy", "3", "--rejoin-s", "0", "--mtbf-s", "3000"],
    ],
)
def test_the_published_policies_run_where_all_groups_host_all_or_return_at_once(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--steps", "10", "--trials", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["time_to_train_ratio"]["mean"] is not None


def test_the_save_interval_of_a_trace_comes_from_its_failures(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("time_s,node\n4000,2\n6000,3\n9000,2\n")
    case = case_of(parser().parse_args(["--num-groups", "5", "--redundancy", "2", "--trace", str(path)]))
    assert case.cluster.mtbf_s == 3000.0
    drawn = case_of(parser().parse_args(["--num-groups", "5", "--redundancy", "2"]))
    assert drawn.cluster == Cluster(5, reduce_s=0.05)


def test_a_rebuild_time_that_is_given_costs_replication_too(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--num-groups", "40", "--policy", "replication", "--redundancy", "4", "--mtbf-s", "2000", "--steps", "200"]
    found = []
    for more in [], ["--rebuild-s", "30"]:
        assert main([*words, "--jitter", "0", "--trials", "1", "--json", *more]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert [one["wipe_outs"] for one in found] == [0, 0]
    more_s = (found[1]["time_to_train_ratio"]["mean"] - found[0]["time_to_train_ratio"]["mean"]) * 200 * 64.4
    assert found[1]["masked"] > 10
    saves_s = found[1]["save_s"] - found[0]["save_s"]
    assert more_s - saves_s == pytest.approx(30.0 * found[1]["masked"], abs=5.0)  # halves of reductions differ


JOB = m.JobSpec(3, 2, (0, 1), "microbatch", 0, 2, 2, "f")
RUN: list[tuple[float, m.Event]] = [
    (1000.0, m.Opened(JOB, 1, 1)),
    *((1010.0 + group, m.Hello(group, 0, "f", 0)) for group in range(3)),
    (1052.0, m.Lost((m.Loss(1, 0, "exited"),), ((0, 1), (1, 1), (2, 0)))),
    (1060.0, m.Lost((m.Loss(1, 0, "closed"),))),
    *(
        (1080.0, m.Vote(group, 0, m.ReductionResult(1, 2, True, pieces)))
        for group, pieces in ((0, (0, 1, 2, 3)), (2, (4, 5)))
    ),
    (1090.0, m.Hello(1, 1, "f", 0)),
    (1112.5, m.Lost((m.Loss(2, 0, "silent"),))),
]
"""Seconds and events of a run that begins at 1012 s. It loses group 1 after 40 s, said twice, group 2 after 100.5 s."""


def _journal(path: Path) -> list[str]:
    """Write ``RUN`` as a coordinator does; the reasons of its decisions."""
    now, state, reasons = [0.0], initial_state(), []
    journal = Journal(path, Replayed(), clock=lambda: now[0])
    for now[0], event in RUN:
        state, decision = step(state, event)
        journal.append(event, decision)
        reasons.append(decision.reason)
    journal.close()
    return reasons


def test_the_losses_of_a_runs_journal_are_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "journal.jsonl"
    reasons = _journal(path)
    assert "step 1 is committed" in reasons[-3]
    assert losses(path) == [(40.0, 1), (100.5, 2)]
    words = ["--num-groups", "3", "--redundancy", "2", "--steps", "4", "--pieces-per-shard", "2", "--rejoin-s", "30"]
    words += ["--compute-s", "20", "--jitter", "0", "--trials", "1", "--json", "--trace", str(path)]
    assert case_of(parser().parse_args(words)).cluster.mtbf_s == pytest.approx(100.5 / 2)
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["failures"], found["masked"], found["wipe_outs"], found["joins"]) == (2, 2, 0, 1)
    assert main([*words, "--num-groups", "2"]) == 2
    assert "has a loss of group 2, but the groups are 0 to 1" in capsys.readouterr().err


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "arguments",
    [
        ["--num-groups", "40", "--policy", "checkpoint", "--steps", "30", "--mtbf-s", "20"],
        # Here a group fails again before all others are ready: the first restart has no end.
        ["--num-groups", "20", "--policy", "checkpoint", "--steps", "10", "--mtbf-s", "1"],
        ["--num-groups", "40", "--redundancy", "3", "--steps", "10", "--mtbf-s", "5"],
    ],
)
def test_an_impossible_cluster_has_no_ratio(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments, "--trials", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["time_to_train_ratio"] == {"mean": None, "trials": [None]}
    assert found["seed"] == 0


def test_a_plot_draws_time_availability_and_work_of_every_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []

    def keep(figure: Any, path: Path) -> None:
        drawn.append((figure, path))

    monkeypatch.setattr(simulate_command, "write_plot", keep)
    words = ["--num-groups", "12", "--redundancy", "3", "--steps", "20", "--trials", "2", "--seed", "5"]
    assert main([*words, "--plot", str(tmp_path / "p.png")]) == 0
    ((figure, path),) = drawn
    assert path == tmp_path / "p.png"
    assert [axis.get_title() for axis in figure.axes] == [
        "time to train / failure-free",
        "availability",
        "mean work, shards",
    ]
    assert all([label.get_text() for label in axis.get_xticklabels()] == ["5", "6"] for axis in figure.axes)
    assert all(bar.get_height() > 0 for axis in figure.axes for bar in axis.patches)

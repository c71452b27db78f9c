"""Time-outs that contradict each other, ``--inject`` values, and the size of a group from its flags."""

from __future__ import annotations

from pathlib import Path

import pytest

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.injection import Injection, check_flips, check_injections, parse_injection
from spare_megatron.config.spare import SpareConfig
from spare_megatron.config.timeouts import Timeouts, timeouts_from
from spare_megatron.flags.checkpoint_args import no_checkpoint
from spare_megatron.flags.launcher_flags import launcher_flags


def test_defaults_and_what_follows_from_a_short_heartbeat() -> None:
    assert timeouts_from() == Timeouts()
    short = timeouts_from(1.0)
    assert short.heartbeat_interval_s == 0.1
    assert short.grace_s == 0.25
    assert timeouts_from(20.0).progress_timeout_s == 240.0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"heartbeat_timeout_s": 1.0}, "--spare-heartbeat-timeout-s 1 s must be above 3 x heartbeat interval 0.5 s"),
        ({"grace_s": 6.0}, "must be above grace 6 s"),
        ({"progress_timeout_s": 4.0}, "--spare-progress-timeout-s 4 s must be above --spare-heartbeat-timeout-s 5 s"),
        ({"coordinator_timeout_s": 10.0}, "use more than 10"),
        ({"startup_timeout_s": 1.0}, "startup timeout 1 s must be above"),
        ({"heartbeat_timeout_s": 0.0}, "--spare-heartbeat-timeout-s is 0 s, but must be above 0"),
        ({"grace_s": float("nan")}, "grace is nan s"),
    ],
)
def test_contradicting_timeouts_are_refused(values: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        Timeouts(**values)
    assert message in str(error.value)


def test_progress_flag_alone_is_checked_against_the_heartbeat() -> None:
    with pytest.raises(ConfigError, match="--spare-progress-timeout-s 3 s must be above"):
        timeouts_from(progress_timeout_s=3.0)


@pytest.mark.parametrize(
    ("text", "injection"),
    [
        ("sigkill:group=2,step=20,at=reduce", Injection("sigkill", 2, 20, "reduce")),
        ("sigstop:group=0,position=1,step=3,at=forward,n=2", Injection("sigstop", 0, 3, "forward", 1, 2)),
        ("slow=2x:group=1,position=1,step=4", Injection("slow", 1, 4, "", 1, factor=2.0)),
        ("slow=2.5:group=1,step=4,at=apply", Injection("slow", 1, 4, "apply", seconds=2.5)),
        ("wait=1.2:group=0,step=4,at=forward,n=0", Injection("wait", 0, 4, "forward", n=0, awaited=(1, 2))),
        ("sigkill:group=1,step=4,at=vote,restart=2", Injection("sigkill", 1, 4, "vote", restart=2)),
        ("bitflip:group=1,step=4,at=weights", Injection("bitflip", 1, 4, "weights")),
        ("coordinator-sigkill:group=0,step=4,at=vote", Injection("coordinator-sigkill", 0, 4, "vote")),
    ],
)
def test_injections_are_parsed(text: str, injection: Injection) -> None:
    assert parse_injection(text) == injection


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("boom:group=1,step=2,at=reduce", "'boom' is no kind"),
        ("sigkill", "is no kind of"),
        ("sigkill:group=1,at=reduce", "step= is missing"),
        ("sigkill:step=1,at=reduce", "group= is missing"),
        ("sigkill:group=1,step=2", "at=(missing) is no point of sigkill"),
        ("sigkill:group=1,step=2,at=weights", "use one of forward, backward"),
        ("bitflip:group=1,step=2,at=forward", "use one of accumulate"),
        ("sigkill:group=x,step=2,at=reduce", "group=x is no number"),
        ("sigkill:group=-1,step=2,at=reduce", "group=-1 is no number"),
        ("sigkill:group=1,group=2,step=2,at=reduce", "group= is there twice"),
        ("sigkill:group=1,step=2,at=reduce,when=now", "'when=now' is not understood"),
        ("sigkill=3:group=1,step=2,at=reduce", "sigkill takes no amount"),
        ("slow=0.5x:group=1,step=2", "slow=0.5x is no factor above 1; use for example slow=2x"),
        ("slow=2x:group=1,step=2,at=reduce", "slow=2x lasts from its step on; leave at= and n= out"),
        ("slow:group=1,step=2,at=reduce", "slow= is no number of seconds"),
        ("slow=inf:group=1,step=2,at=reduce", "slow=inf is no number of seconds"),
        ("wait:group=1,step=2,at=reduce", "wait= is no GROUP.INCARNATION; use for example wait=1.1"),
        ("wait=0.0:group=1,step=2,at=reduce", "wait=0.0 is no GROUP.INCARNATION"),
    ],
)
def test_bad_injections_name_the_part_and_the_fix(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_injection(text)
    assert message in str(error.value)
    assert text in str(error.value)


def test_an_injection_must_concern_a_rank_of_the_job() -> None:
    check_injections([parse_injection("sigkill:group=3,position=1,step=2,at=reduce")], 4, 2)
    with pytest.raises(ConfigError, match="the job has groups 0 to 2"):
        check_injections([parse_injection("sigkill:group=3,step=2,at=reduce")], 3, 2)
    with pytest.raises(ConfigError, match="a group has positions 0 to 1"):
        check_injections([parse_injection("sigkill:group=0,position=2,step=2,at=reduce")], 3, 2)


def test_a_group_waits_for_another_one_of_the_job() -> None:
    check_injections([parse_injection("wait=3.1:group=0,step=2,at=forward")], 4, 2)
    for group in (4, 0):
        one = parse_injection(f"wait={group}.1:group=0,step=2,at=forward")
        with pytest.raises(ConfigError, match=f"group 0 would wait for group {group}; name another group of 0 to 3"):
            check_injections([one], 4, 2)


def test_a_fault_for_a_restart_needs_restarts() -> None:
    faults = [parse_injection("sigkill:group=1,step=2,at=reduce,restart=1")]
    check_injections(faults, 4, 2, max_restarts=1)
    with pytest.raises(ConfigError, match="no group is started again; add --spare-max-group-restarts 1"):
        check_injections(faults, 4, 2)


def test_a_fault_in_a_join_strikes_a_group_that_is_started_again_at_any_later_step() -> None:
    with pytest.raises(ConfigError, match="only a group that is started again joins; add restart=1"):
        check_injections([parse_injection("sigkill:group=1,step=2,at=join")], 4, 2, max_restarts=1)
    one = parse_injection("sigkill:group=1,step=20,at=join,n=2,restart=1")
    check_injections([one], 4, 2, max_restarts=1)
    assert [one.matches(1, 0, "join", step, 2) for step in (19, 20, 35)] == [False, True, True]
    assert not one.matches(1, 0, "join", 35, 1)


def test_an_injection_matches_its_moment_only() -> None:
    one = parse_injection("sigkill:group=2,position=1,step=20,at=forward,n=3")
    assert one.matches(2, 1, "forward", 20, 3)
    assert not any(
        one.matches(*moment)
        for moment in [
            (1, 1, "forward", 20, 3),
            (2, 0, "forward", 20, 3),
            (2, 1, "backward", 20, 3),
            (2, 1, "forward", 19, 3),
            (2, 1, "forward", 20, 2),
        ]
    )


@pytest.mark.parametrize(
    ("flags", "size"),
    [
        ("", 1),
        ("--tensor-model-parallel-size 2 --pipeline-model-parallel-size=3", 6),
        ("--tensor-model-parallel-size 2 --context-parallel-size 2", 4),
        ("--expert-model-parallel-size 4", 4),
        ("--expert-model-parallel-size 4 --tensor-model-parallel-size 2", 8),
        ("--expert-model-parallel-size 4 --tensor-model-parallel-size 2 --expert-tensor-parallel-size 1", 4),
        ("--expert-model-parallel-size 2 --spare-inner-data-parallel 4", 4),
        ("--expert-model-parallel-size 2 --spare-inner-data-parallel auto", 2),
        ("--tensor-model-parallel-size 2 --tensor-model-parallel-size 4", 4),
    ],
)
def test_group_size_from_flags(flags: str, size: int) -> None:
    words = ["--micro-batch-size", "3", *flags.split(), "--my-own-flag", "7"]
    assert launcher_flags(words, {}, no_checkpoint).group_size == size


def test_a_degree_that_is_no_number_is_refused() -> None:
    for word, message in (("two", "takes a whole number, but got 'two'"), ("0", "is 0, but must be at least 1")):
        with pytest.raises(ConfigError, match=f"--tensor-model-parallel-size:? {message}"):
            launcher_flags(["--tensor-model-parallel-size", word], {}, no_checkpoint)


def test_a_launcher_reads_how_often_a_group_is_started_again() -> None:
    assert launcher_flags([], {}, no_checkpoint).max_group_restarts == SpareConfig.max_group_restarts
    assert launcher_flags(["--spare-max-group-restarts=4", "--other"], {}, no_checkpoint).max_group_restarts == 4
    with pytest.raises(ConfigError, match="--spare-max-group-restarts is -1, but must not be negative"):
        launcher_flags(["--spare-max-group-restarts", "-1"], {}, no_checkpoint)
    assert launcher_flags(["--spare-group-restart-pause-s", "0.5"], {}, no_checkpoint).group_restart_pause_s == 0.5
    with pytest.raises(ConfigError, match="--spare-group-restart-pause-s is -1, but must not be negative"):
        launcher_flags(["--spare-group-restart-pause-s", "-1"], {}, no_checkpoint)


def test_a_launcher_reads_the_command_for_events() -> None:
    assert launcher_flags([], {}, no_checkpoint).on_event == ""
    assert launcher_flags(["--spare-on-event", "cat >> f"], {}, no_checkpoint).on_event == "cat >> f"
    with pytest.raises(ConfigError, match="--spare-on-event is empty; give a command"):
        launcher_flags(["--spare-on-event", " "], {}, no_checkpoint)


def test_a_launcher_reads_the_check_of_a_host() -> None:
    reported = launcher_flags(["--spare-health-check", "true", "--save", "s", "--load", "l"], {}, no_checkpoint)
    assert (reported.health_check, reported.save_dir) == ("true", "s")
    reported = launcher_flags(["--load", "l"], {}, no_checkpoint)
    assert (reported.health_check, reported.save_dir) == ("", "")
    with pytest.raises(ConfigError, match="--spare-health-check is empty; give a command"):
        launcher_flags(["--spare-health-check", ""], {}, no_checkpoint)
    with pytest.raises(ConfigError, match="'true' is made before a group is started again, but --spare-max-group-res"):
        launcher_flags(["--spare-health-check", "true", "--spare-max-group-restarts", "0"], {}, no_checkpoint)


def test_a_launcher_reads_the_yaml_file_too(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("model_parallel:\n  tensor_model_parallel_size: 2\nsave: there\n")
    assert launcher_flags(["--load", "--steps", "3"], {}, no_checkpoint).load_dir == ""
    reported = launcher_flags(
        ["--yaml-cfg", str(config), "--load=here", "--spare-run-dir", "runs/a"], {}, no_checkpoint
    )
    assert (reported.group_size, reported.run_dir) == (2, "runs/a")
    assert (reported.save_dir, reported.load_dir) == ("there", "here")


@pytest.mark.parametrize("point", ["accumulate", "reduce", "gradient", "weights"])
@pytest.mark.parametrize("reduce", ["exact", "exact32", "fp32", "bf16"])
def test_flipped_bits_that_nothing_would_find_are_refused(point: str, reduce: str) -> None:
    flips = [parse_injection(f"bitflip:group=0,step=2,at={point}"), parse_injection("sigkill:group=0,step=2,at=reduce")]
    if reduce.startswith("exact"):
        check_flips(flips, reduce, audit_rate=0.1)
        return
    with pytest.raises(ConfigError, match=f"at {point}: --spare-reduce {reduce} compares neither checksums nor"):
        check_flips(flips, reduce, audit_rate=0.1)


def test_a_flipped_gradient_needs_an_audit() -> None:
    with pytest.raises(ConfigError, match="only an audit of the piece would find the flipped bit; add --spare-audit"):
        check_flips([parse_injection("bitflip:group=0,step=2,at=gradient")], "exact", audit_rate=0.0)

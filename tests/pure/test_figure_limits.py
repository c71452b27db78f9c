"""Numbers of spare-plan and spare-simulate that nobody means are refused in a sentence, before anything is computed."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import pytest

from spare_megatron.cli import plan, simulate
from spare_megatron.cli.commands import Main

PLAN = "--gpus 64 --gpus-per-group 8 --restart-s 900 --save-s 30 --compute-s 20 --reduce-s 2"
SIMULATE = "--num-groups 8 --redundancy 2 --steps 50 --trials 1"


def numbers(parser: Callable[[], argparse.ArgumentParser]) -> Iterator[tuple[str, str]]:
    """Each flag that takes a number, with numbers that are far too large or too small for it."""
    for action in parser()._actions:
        if action.type is float:
            yield from ((action.option_strings[-1], text) for text in ("1e300", "1e-300", "-1e300"))
        elif action.type is int:
            yield action.option_strings[-1], str(10**12)


@pytest.mark.parametrize(
    ("main", "words", "flag", "number"),
    [
        *((plan.main, PLAN, *each) for each in numbers(plan.parser)),
        *((simulate.main, SIMULATE, *each) for each in numbers(simulate.parser)),
    ],
)
def test_absurd_numbers_are_refused_at_once(
    main: Main, words: str, flag: str, number: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = words.split()
    if flag in given:
        del given[given.index(flag) : given.index(flag) + 2]
    assert main([*given, f"{flag}={number}"]) == 2
    reported = capsys.readouterr().err
    assert f"{flag} is {number.replace('e', 'e+').replace('+-', '-')}, but must be " in reported
    assert reported.count("\n") == 1


@pytest.mark.parametrize(
    ("main", "words", "reported"),
    [
        (plan.main, f"{PLAN} --gpus 800008", "are 100001 groups, but a plan is for at most 100000; use larger groups"),
        (plan.main, f"{PLAN} --jitter 0.3", "--jitter 0.3 makes steps of negative length possible; use less than 0.3"),
        (plan.main, f"{PLAN} --reduce exact --exact-cost nan", "--exact-cost is nan, but must be a finite number"),
        (simulate.main, f"{SIMULATE} --mtbf-s 0.003", "1.07e+06 failures in the 3.2e+03 s of --steps 50"),
        (simulate.main, f"{SIMULATE} --num-groups 3000 --pieces-per-shard 7000", "shards of at most 6666"),
        (simulate.main, f"{SIMULATE} --nodes-per-group 99999 --num-groups 11 --rejoin-s 1", "are 1099989 nodes"),
    ],
)
def test_what_would_be_computed_for_hours_is_refused_at_once(
    main: Main, words: str, reported: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 2
    assert reported in capsys.readouterr().err


def test_a_trace_has_as_many_failures_as_lines(tmp_path_factory: pytest.TempPathFactory) -> None:
    trace = tmp_path_factory.mktemp("trace") / "trace.csv"
    trace.write_text("0.0001,1\n0.0002,2\n")
    args = simulate.parser().parse_args([*SIMULATE.split(), "--trace", str(trace)])
    assert simulate.case_of(args).cluster.mtbf_s < 0.003

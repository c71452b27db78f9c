"""Which gradients are final while the last backward pass goes on: from counts of the passes before, in one order."""

from __future__ import annotations

import random

import pytest

from spare_megatron.megatron_adapter.model.gradient_readiness import Arrivals, Span

SPANS = [Span(0, 10, 1), Span(0, 30, 1), Span(0, 40, 1), Span(1, 5, 0), Span(1, 64, 0)]


class Reported:
    def __init__(self, arrivals: Arrivals) -> None:
        self.ready: list[tuple[int, int]] = []
        self.late: list[int] = []
        arrivals.watch(lambda tensor, stop: self.ready.append((tensor, stop)), self.late.append)


def one_pass(arrivals: Arrivals, chunk: int, numbers: list[int], last: bool = False) -> None:
    arrivals.pass_begins(chunk, last=last)
    for number in numbers:
        arrivals.arrived(number)
    arrivals.pass_ends(chunk)


def test_the_last_pass_tells_of_each_parameter_as_it_comes_in_the_order_of_travel() -> None:
    arrivals = Arrivals(SPANS)
    reported = Reported(arrivals)
    one_pass(arrivals, 1, [0, 1, 2])
    one_pass(arrivals, 0, [3, 4])
    assert reported.ready == [], "another pass follows"
    one_pass(arrivals, 1, [1, 0, 2], last=True)
    assert reported.ready == [(0, 30), (0, 40)], "1 came before 0, which is in front of it"
    one_pass(arrivals, 0, [3, 4], last=True)
    assert reported.ready == [(0, 30), (0, 40), (1, 5), (1, 64)]
    assert reported.late == []


def test_a_chunk_that_ends_first_waits_for_those_in_front_of_it() -> None:
    arrivals = Arrivals(SPANS)
    reported = Reported(arrivals)
    one_pass(arrivals, 0, [3, 4], last=True)
    assert reported.ready == []
    one_pass(arrivals, 1, [0, 1, 2], last=True)
    assert reported.ready == [(1, 64)]


def test_parameters_that_were_never_seen_are_final_when_the_pass_is_over() -> None:
    arrivals = Arrivals(SPANS)
    reported = Reported(arrivals)
    arrivals.pass_begins(1, last=True)
    for number in (0, 1, 2):
        arrivals.arrived(number)
    assert reported.ready == [], "nobody knows yet how often they come"
    arrivals.pass_ends(1)
    assert reported.ready == [(0, 40)]


def test_a_parameter_that_gets_no_gradient_holds_up_those_behind_it_to_the_end_of_the_pass() -> None:
    arrivals = Arrivals(SPANS)
    reported = Reported(arrivals)
    one_pass(arrivals, 1, [0, 1, 2])
    arrivals.pass_begins(1, last=True)
    arrivals.arrived(0)
    arrivals.arrived(2)
    assert reported.ready == [(0, 10)]
    arrivals.pass_ends(1)
    assert reported.ready == [(0, 10), (0, 40)]


def test_a_weight_that_is_used_twice_is_final_after_the_second_time() -> None:
    arrivals = Arrivals(SPANS)
    reported = Reported(arrivals)
    one_pass(arrivals, 1, [0, 1, 0, 2])
    arrivals.pass_begins(1, last=True)
    arrivals.arrived(0)
    arrivals.arrived(1)
    assert reported.ready == []
    arrivals.arrived(0)
    assert reported.ready == [(0, 30)]


def test_one_more_addition_than_ever_is_notified_once_the_parameter_may_have_left() -> None:
    arrivals = Arrivals(SPANS)
    one_pass(arrivals, 1, [0, 1, 2])
    reported = Reported(arrivals)
    arrivals.pass_begins(1, last=True)
    for number in (0, 2, 2, 0):
        arrivals.arrived(number)
    assert reported.late == [0], "2 came twice, too, but waits for 1 and has not left"
    arrivals.pass_ends(1)
    again = Reported(arrivals)
    one_pass(arrivals, 1, [0, 0, 1, 2, 2], last=True)
    assert again.late == [], "it is known now"
    assert again.ready[-1] == (0, 40)


def test_nothing_is_notified_when_nobody_watches_but_passes_are_counted() -> None:
    arrivals = Arrivals(SPANS)
    reported = Reported(arrivals)
    arrivals.unwatch()
    one_pass(arrivals, 1, [0, 1, 2], last=True)
    assert reported.ready == []
    again = Reported(arrivals)
    arrivals.pass_begins(1, last=True)
    arrivals.arrived(0)
    assert again.ready == [(0, 10)]


@pytest.mark.parametrize("seed", range(20))
def test_what_is_reported_is_final_whatever_the_order(seed: int) -> None:
    """Against the plain definition: published is a prefix, and nothing of it is added to afterwards."""
    print(f"seed {seed}")
    draw = random.Random(seed)
    spans = [Span(n // 3, 10 * (n % 3 + 1), draw.randrange(2)) for n in range(9)]
    uses = [draw.choice((1, 1, 2)) for _ in spans]
    of_chunk = [[n for n, span in enumerate(spans) if span.chunk == chunk for _ in range(uses[n])] for chunk in (0, 1)]
    arrivals = Arrivals(spans)
    for chunk in (0, 1):
        one_pass(arrivals, chunk, draw.sample(of_chunk[chunk], len(of_chunk[chunk])))
    reported = Reported(arrivals)
    left = list(uses)
    for chunk in draw.sample((0, 1), 2):
        arrivals.pass_begins(chunk, last=True)
        for number in draw.sample(of_chunk[chunk], len(of_chunk[chunk])):
            left[number] -= 1
            arrivals.arrived(number)
            reach = reported.ready[-1] if reported.ready else (0, 0)
            assert all(not left[n] for n, span in enumerate(spans) if (span.tensor, span.stop) <= reach)
        arrivals.pass_ends(chunk)
    assert reported.ready[-1] == (2, 30)
    assert reported.ready == sorted(reported.ready)
    assert not reported.late

"""Computes how long a group that comes back takes from its start to its first share of the work."""

from __future__ import annotations

from math import ceil, exp, floor, inf

DONORS = 2
"""Groups that serve a learner (``JobSpec.donors_max``)."""
RESULTS_KEPT = 16
"""Results that a donor keeps for a learner before it withdraws (``JobSpec.results_kept``)."""


def commits_to_admission(transfer_s: float, result_s: float, step_s: float, left_s: float) -> float:
    """How many commits after that of the offered state admit a learner; infinite where it never catches up.

    In the middle of step s + 1, which ends ``left_s`` = u later, the state after s is offered, and taken in S =
    ``transfer_s``. The result of s + j is there at u + (j - 1) tau and taken in rho = ``result_s``, one after the
    other: so the learner holds s + j at the later of S + j rho and u + (j - 1) tau + rho. The commit of s + m admits it
    if it holds s + m - 1 by then, u + (m - 1) tau: if rho < tau and m - 1 >= (S - u) / (tau - rho). Its weights are
    compared first after a result that it applied itself, so m is at least 2; without a transfer nothing is compared. A
    donor withdraws where more results wait than it keeps.
    """
    if transfer_s <= 0:
        return 1
    if result_s >= step_s or transfer_s >= RESULTS_KEPT * step_s + left_s:
        return inf
    return 1 + max(1, ceil((transfer_s - left_s) / (step_s - result_s)))


def mean_commits_to_admission(transfer_s: float, result_s: float, step_s: float) -> float:
    """The mean of :func:`commits_to_admission` over the moments of a step; infinite where it is at any of them."""
    commits = commits_to_admission(transfer_s, result_s, step_s, 0.0)
    if commits == inf or transfer_s <= 0:
        return commits
    spare_s = step_s - result_s
    begin, end = (transfer_s - step_s) / spare_s, transfer_s / spare_s
    return 1 + (_area(end) - _area(begin)) / (end - begin)


def _area(x: float) -> float:
    """The integral of max(1, ceil(x)), 0 at x = 0."""
    n = floor(x)
    return x if n < 1 else n * (n + 1) / 2 + (x - n) * (n + 1)


def without_a_share_s(start_s: float, transfer_s: float, result_s: float, step_s: float, each_s: float) -> float:
    """Mean time for which steps are planned without a group that was lost, in seconds.

    It is lost in the middle of a step, half a step before the first plan without it, and starts for T, on the mean to
    the middle of another step. There it is offered the state, and is admitted by the m-th commit from that of the
    state on: after (m - 1 / 2) steps. It has no piece in one more step. Together: T + m tau.

    A learner that is lost (each group once in ``each_s``) begins anew, and one whose donor is lost takes the state
    again: what takes w undisturbed takes (exp(q w) - 1) / q where disturbances come at the rate q = DONORS / each_s.
    """
    commits = mean_commits_to_admission(transfer_s, result_s, step_s)
    if commits == inf:
        return inf
    learning_s, kept = (commits - 0.5) * step_s, 1.0
    if transfer_s > 0:
        rate = DONORS / each_s
        learning_s = (exp(min(700.0, rate * learning_s)) - 1) / rate
        kept = exp(-min(700.0, learning_s / each_s))
    return (start_s + learning_s) / kept + step_s / 2

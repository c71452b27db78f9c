"""Computes how long a group that comes back takes from its start to its first share of the work."""

from __future__ import annotations

from math import ceil, exp, inf

DONORS = 2
"""Groups that serve a learner (``JobSpec.donors_max``)."""
RESULTS_KEPT = 16
"""Results that a donor keeps for a learner before it withdraws (``JobSpec.results_kept``)."""


def commits_to_admission(transfer_s: float, result_s: float, step_s: float) -> float:
    """How many commits after that of its offer a learner is admitted by; infinite where it never catches up.

    The state after s is offered with the commit of s, and taken in S = ``transfer_s``. The result of s + j is there
    after j steps tau and taken in rho = ``result_s``, one after the other: so the learner holds s + j at the later of
    S + j rho and j tau + rho. The commit of s + m admits it if it holds s + m - 1 by then, m tau: if rho < tau and
    m >= (S - rho) / (tau - rho). Its weights are compared first after a result that it applied itself, so m is at
    least 2; without a transfer nothing is compared. A donor withdraws where more results wait than it keeps.
    """
    if transfer_s <= 0:
        return 1
    if result_s >= step_s or transfer_s >= (RESULTS_KEPT + 1) * step_s:
        return inf
    return max(2, ceil((transfer_s - result_s) / (step_s - result_s)))


def without_a_share_s(start_s: float, transfer_s: float, result_s: float, step_s: float, each_s: float) -> float:
    """Mean time for which steps are planned without a group that was lost, in seconds.

    It is lost in the middle of a step, starts for T, and waits for the end of the step that is in flight then: that is
    T and one step from the first plan without it. Then it learns for m steps, is admitted, and has no piece in one
    more step, of which one is counted already: T + (m + 1) tau.

    A learner that is lost (each group once in ``each_s``) begins anew, and one whose donor is lost takes the state
    again: what takes w undisturbed takes (exp(q w) - 1) / q where disturbances come at the rate q = DONORS / each_s.
    """
    learning_s = commits_to_admission(transfer_s, result_s, step_s) * step_s
    if learning_s == inf:
        return inf
    if transfer_s > 0:
        rate = DONORS / each_s
        learning_s = (exp(min(700.0, rate * learning_s)) - 1) / rate
        kept = exp(-min(700.0, learning_s / each_s))
        return (start_s + learning_s) / kept + step_s
    return start_s + learning_s + step_s

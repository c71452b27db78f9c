"""Parses fault injections as the user writes them: ``KIND:group=G[,position=M],step=T,at=POINT[,n=K][,restart=R]``, or
``slow=2x:group=G[,position=M],step=T[,restart=R]`` for a group whose pieces take twice as long from step T on, or
``wait=H.I:group=G,...`` for a group that waits until the I-th incarnation of group H is back.

The same syntax works for a real job (:mod:`spare_megatron.worker.fault_injection`) and in the simulator.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from spare_megatron.config.errors import ConfigError

VARIABLE = "SPARE_INJECT"
"""Environment variable of a rank, with one injection per line."""
KINDS = ("sigkill", "sigstop", "exception", "slow", "wait", "bitflip", "hang", "coordinator-sigkill")
POINTS = ("forward", "backward", "reduce", "vote", "apply", "rebuild", "patch", "join", "checkpoint", "gather", "copy")
BITFLIP_POINTS = ("accumulate", "reduce", "weights", "optimizer", "gradient")
FORM = "KIND:group=G[,position=M],step=T,at=POINT[,n=K][,restart=R]"


@dataclass(frozen=True)
class Injection:
    """One fault, injected once in a job; one that lasts, with ``factor``, goes on to the end of its processes."""

    kind: str
    group: int
    step: int
    """The step; at join, where nobody knows it beforehand, the first one that comes from this step on."""
    point: str
    position: int | None = None
    """Rank position; None: the whole group."""
    n: int | None = None
    """Number, from 0, of the piece (forward, backward, patch), of the bucket (reduce), of what a group that joins has
    got (join: the state, then each result, then membership) or else of the occurrence; None: the first that comes."""
    restart: int = 0
    """Which processes of the group it strikes: those that a job attempt began with (0), or those of the group's
    first, second, ... restart in a job attempt. So what ended a group does not end it again when it is back."""
    seconds: float = 0.0
    """Length of the delay, for kind 'slow' at a point."""
    factor: float = 1.0
    """How many times as long every piece takes from the step on, for kind 'slow' without a point."""
    awaited: tuple[int, int] | None = None
    """(group, incarnation) for which kind 'wait' waits: until it, or a later incarnation, is a member, or
    has its processes and its model and can take the state, which others give after a step."""

    def matches(self, group: int, position: int, point: str, step: int, n: int) -> bool:
        """True at the place and moment of this injection."""
        here = self.group == group and (self.position is None or self.position == position)
        now = step >= self.step if point == "join" else step == self.step
        return here and self.point == point and now and (self.n is None or self.n == n)


def parse_injection(text: str) -> Injection:
    """Parse one ``--inject`` value.

    Raises:
        ConfigError: the message names the part that is wrong and what it may be.
    """
    head, colon, tail = text.partition(":")
    kind, _, amount = head.partition("=")
    if not colon or kind not in KINDS:
        raise ConfigError(f"--inject {text}: {kind!r} is no kind of {FORM}; use one of {', '.join(KINDS)}")
    parts = _parts(text, tail)
    point = parts.pop("at", "")
    factor = _factor(text, kind, amount)
    if factor > 1 and (point or "n" in parts):
        raise ConfigError(f"--inject {text}: slow={amount} lasts from its step on; leave at= and n= out")
    points = BITFLIP_POINTS if kind == "bitflip" else POINTS
    if factor == 1 and point not in points:
        raise ConfigError(
            f"--inject {text}: at={point or '(missing)'} is no point of {kind}; use one of {', '.join(points)}"
        )
    numbers = {name: _number(text, name, value) for name, value in parts.items()}
    for name in ("group", "step"):
        if name not in numbers:
            raise ConfigError(f"--inject {text}: {name}= is missing; the form is {FORM}")
    return Injection(
        kind=kind,
        group=numbers["group"],
        step=numbers["step"],
        point=point,
        position=numbers.get("position"),
        n=numbers.get("n"),
        restart=numbers.get("restart", 0),
        seconds=_seconds(text, kind, amount) if factor == 1 else 0.0,
        factor=factor,
        awaited=_awaited(text, amount) if kind == "wait" else None,
    )


def check_injections(injections: list[Injection], num_groups: int, group_size: int, max_restarts: int = 0) -> None:
    """Check that every injection names a group, a position, a point and a restart that the job can have; raises
    ConfigError. ``max_restarts`` is the value of --spare-max-group-restarts."""
    for one in injections:
        if one.point == "join" and not one.restart:
            raise ConfigError(
                f"--inject {one.kind} at join: nothing would happen, as only a group that is started again joins; add "
                "restart=1"
            )
        if one.group >= num_groups:
            raise ConfigError(f"--inject {one.kind}: group={one.group}, but the job has groups 0 to {num_groups - 1}")
        if one.awaited and (one.awaited[0] >= num_groups or one.awaited[0] == one.group):
            raise ConfigError(
                f"--inject wait: group {one.group} would wait for group {one.awaited[0]}; name another group of 0 to "
                f"{num_groups - 1}"
            )
        if one.position is not None and one.position >= group_size:
            raise ConfigError(
                f"--inject {one.kind}: position={one.position}, but a group has positions 0 to {group_size - 1}"
            )
        if one.restart and not max_restarts:
            raise ConfigError(
                f"--inject {one.kind}: restart={one.restart}, but no group is started again; add "
                f"--spare-max-group-restarts {one.restart}"
            )


def check_flips(injections: Sequence[Injection], reduce: str, audit_rate: float) -> None:
    """Check that the job would find each flipped bit; raises ConfigError. ``reduce`` and ``audit_rate`` are the values
    of --spare-reduce and --spare-audit-rate."""
    for one in injections:
        if one.kind == "bitflip" and not reduce.startswith("exact"):
            raise ConfigError(
                f"--inject bitflip at {one.point}: --spare-reduce {reduce} compares neither checksums nor weights, so "
                "nothing would find the flipped bit; use --spare-reduce exact or exact32"
            )
        if one.kind == "bitflip" and one.point == "gradient" and not audit_rate:
            raise ConfigError(
                "--inject bitflip at gradient: only an audit of the piece would find the flipped bit; add "
                "--spare-audit-rate 1"
            )


def _parts(text: str, tail: str) -> dict[str, str]:
    parts: dict[str, str] = {}
    for part in tail.split(","):
        name, equals, value = part.partition("=")
        if not equals or name not in ("group", "position", "step", "at", "n", "restart"):
            raise ConfigError(f"--inject {text}: {part!r} is not understood; the form is {FORM}")
        if name in parts:
            raise ConfigError(f"--inject {text}: {name}= is there twice; the form is {FORM}")
        parts[name] = value
    return parts


def _number(text: str, name: str, value: str) -> int:
    if not value.isdigit():
        raise ConfigError(f"--inject {text}: {name}={value} is no number; give 0 or more")
    return int(value)


def _factor(text: str, kind: str, amount: str) -> float:
    """The factor of a slowness that lasts, 'slow=2x'; 1 for every other injection."""
    if kind != "slow" or not amount.endswith("x"):
        return 1.0
    try:
        factor = float(amount[:-1])
    except ValueError:
        factor = 0.0
    if not 1 < factor < float("inf"):
        raise ConfigError(f"--inject {text}: slow={amount} is no factor above 1; use for example slow=2x")
    return factor


def _awaited(text: str, amount: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)\.([1-9]\d*)", amount)
    if found is None:
        raise ConfigError(
            f"--inject {text}: wait={amount} is no GROUP.INCARNATION; use for example wait=1.1 for the first return of "
            "group 1"
        )
    return int(found[1]), int(found[2])


def _seconds(text: str, kind: str, amount: str) -> float:
    if kind != "slow":
        if amount and kind != "wait":
            raise ConfigError(
                f"--inject {text}: {kind} takes no amount; only slow=SECONDS and wait=GROUP.INCARNATION do"
            )
        return 0.0
    try:
        seconds = float(amount)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"--inject {text}: slow={amount} is no number of seconds above 0; use for example slow=2.5")
    return seconds

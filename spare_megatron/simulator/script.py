"""Scripted deaths at named moments of named steps, with the words of spare-launch's ``--inject``.

Only injections that end a group can be simulated (sigkill, exception): the simulator models neither ranks nor processes
that stall or compute wrong results. As in a real job each injection happens once, even when its step is run again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.injection import Injection, parse_injection

KINDS = ("sigkill", "exception")
POINTS = ("forward", "backward", "reduce", "vote", "apply")


def scripted(words: Sequence[str], num_groups: int, pieces_per_shard: int) -> tuple[Injection, ...]:
    """The injections of a command line; ConfigError for what cannot be simulated."""
    found = tuple(map(parse_injection, words))
    for word, one in zip(words, found, strict=True):
        if one.kind not in KINDS:
            raise ConfigError(f"--inject {word}: only deaths can be simulated; use {' or '.join(KINDS)}")
        if one.point not in POINTS:
            raise ConfigError(
                f"--inject {word}: at={one.point} is not a moment of a simulated step; use {', '.join(POINTS)}"
            )
        if one.group >= num_groups:
            raise ConfigError(f"--inject {word}: group={one.group}, but the groups are 0 to {num_groups - 1}")
        if one.position is not None:
            raise ConfigError(f"--inject {word}: a simulated group has no ranks; leave position={one.position} out")
        if one.restart:
            raise ConfigError(f"--inject {word}: a simulated group is the same when it is back; leave restart= out")
        if one.point in ("forward", "backward") and one.n is not None and one.n >= 2 * pieces_per_shard:
            raise ConfigError(
                f"--inject {word}: n={one.n}, but a group has about {pieces_per_shard} pieces; use a smaller n"
            )
    return found


class Script:
    """The injections that have not happened yet."""

    def __init__(self, injections: Sequence[Injection]) -> None:
        self._waiting = list(injections)

    def times(
        self, step: int, began_s: float, per_piece_s: NDArray[np.float64], ends_s: float, reduce_s: float
    ) -> list[tuple[float, int]]:
        """(time, group) of the injections of this step, whose reduction ends at ``ends_s`` if nothing disturbs it.

        Times are in seconds; ``per_piece_s`` is [N].
        """
        if not self._waiting:
            return []
        now = [one for one in self._waiting if one.step == step]
        self._waiting = [one for one in self._waiting if one.step != step]
        times = []
        for one in now:
            pieces = (one.n or 0) + (one.point == "backward")
            at = {
                "forward": began_s + pieces * float(per_piece_s[one.group]),
                "backward": began_s + pieces * float(per_piece_s[one.group]),
                "reduce": ends_s - reduce_s / 2,
            }.get(one.point, ends_s)
            times.append((min(at, ends_s), one.group))
        return sorted(times)

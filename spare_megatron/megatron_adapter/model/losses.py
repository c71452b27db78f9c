"""Sums what a user's loss function reports, so that averages are taken once, over the whole step.

Megatron has two conventions. A 2-tuple (loss, report): each value of the report is a mean over one microbatch, and
means are averaged over microbatches. A 3-tuple (loss, number of tokens, report): each value of the report is a pair
[sum, count] (or a plain mean). Both become a sum and a count for each key, and value = sum / count.

May assume: the report has the same keys for each microbatch. Promises: sums are taken in float64 on the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

TOKENS = "tokens"
SUM, COUNT = "/sum", "/count"


class LossSums:
    """Running sums over the pieces of one step on one rank."""

    def __init__(self, tokens_per_microbatch: int) -> None:
        self._tokens_per_microbatch = tokens_per_microbatch
        self._pending: list[tuple[Any, Mapping[str, Any]]] = []
        self._sums: dict[str, float] = {}

    def clear(self) -> None:
        """Forget all pieces."""
        self._pending.clear()
        self._sums.clear()

    def add(self, outputs: Sequence[Any]) -> None:
        """Take what the loss function returned for one microbatch; values are read from the device later."""
        if len(outputs) == 3:
            _, tokens, report = outputs
        else:
            (_, report), tokens = outputs, self._tokens_per_microbatch
        self._pending.append((_snapshot(tokens), {key: _snapshot(value) for key, value in report.items()}))

    def values(self) -> dict[str, float]:
        """The sums: ``tokens``, and ``KEY/sum`` and ``KEY/count`` for each key of the report."""
        for name, values in _on_host(self._pending):
            if name is None:
                self._accumulate(TOKENS, values[0])
                continue
            total, count = _sum_and_count(name, values)
            self._accumulate(name + SUM, total)
            self._accumulate(name + COUNT, count)
        self._pending.clear()
        return dict(self._sums)

    def _accumulate(self, key: str, value: float) -> None:
        self._sums[key] = self._sums.get(key, 0.0) + value


def _snapshot(value: Any) -> Any:
    return value.detach().clone() if torch.is_tensor(value) else value


def _on_host(pending: Sequence[tuple[Any, Mapping[str, Any]]]) -> list[tuple[str | None, list[float]]]:
    """(name, numbers) of each value, in order; the name of a token count is None. All tensors are copied from the
    device at once."""
    named = [(name, value) for tokens, report in pending for name, value in ((None, tokens), *report.items())]
    tensors = [torch.as_tensor(value, dtype=torch.float64).reshape(-1) for _, value in named]
    if not tensors:
        return []
    device = max((tensor.device for tensor in tensors), key=lambda device: device.type != "cpu")
    numbers = torch.cat([tensor.to(device) for tensor in tensors]).tolist()
    result: list[tuple[str | None, list[float]]] = []
    start = 0
    for (name, _), tensor in zip(named, tensors, strict=True):
        result.append((name, numbers[start : start + tensor.numel()]))
        start += tensor.numel()
    return result


def _sum_and_count(key: str, numbers: list[float]) -> tuple[float, float]:
    if len(numbers) == 1:
        return numbers[0], 1.0
    if len(numbers) == 2:
        return numbers[0], numbers[1]
    raise ValueError(
        f"the loss function reports {len(numbers)} numbers for {key!r}, but a value is one mean or a pair [sum, count]"
    )


def averages(scalars: Mapping[str, float]) -> dict[str, float]:
    """The reported values, sum / count for each key, in sorted order; without those of which nothing was counted."""
    result = {}
    for name in sorted(scalars):
        if name.endswith(SUM):
            key = name[: -len(SUM)]
            count = scalars[key + COUNT]
            if count:
                result[key] = scalars[name] / count
    return result


def sum_names(scalars: Mapping[str, float]) -> list[str]:
    """The names in the order in which their values are reduced as one flat vector."""
    return sorted(scalars)

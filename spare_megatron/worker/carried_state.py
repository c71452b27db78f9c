"""State of users' own objects that outlives a step: it goes into checkpoints, and to a group that comes back.

Example: a forward step with a schedule of its own has state that is neither in the model nor in the optimizer. The
script registers the object once, with :func:`carry_state`. All other state of a script is lost when a group is
restarted, or when a job loads a checkpoint.

The state must be a function of the committed steps. Then it is equal at one rank position of all groups, and results do
not depend on failures. It may change in ``after_step`` only. Every rank, a learner's too, calls this once for each step
that it applies, in order. Votes compare the state as they compare the weights (docs/protocol.md, rule 12). So a state
that depends on anything else, such as pieces or seconds, is found in its first step and named.

A rank of a smaller shape (``--spare-shapes``) has one object where the ranks of several positions have one each. So
there the state must also be equal at all positions. A group that would learn states that differ is refused.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

import torch

from spare_megatron.config.errors import ConfigError
from spare_megatron.worker.engine import EngineRow, is_row, rows_of
from spare_megatron.worker.engine_decorator import EvaluatesPieces, PassThrough

log = logging.getLogger(__name__)

_KEY = "carried"
"""Under which the states stand in an engine's values, and in what a checkpoint keeps of a rank."""
_SHOWN = 60
"""The most characters of a state in a message."""


@runtime_checkable
class CarriesState(Protocol):
    """An object whose state is carried. A method ``after_step(step, figures)``, where it has one, is called after each
    applied step; ``figures`` is the engine's report of it (``loss``, ``grad_norm``, ``lr``, ...: what this rank
    position knows)."""

    def state_dict(self) -> Mapping[str, Any]:
        """The state: JSON values."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state that :meth:`state_dict` of another process returned."""


_owners: dict[str, CarriesState] = {}


def carry_state(name: str, owner: CarriesState) -> None:
    """Carry the state of ``owner`` to groups that come back and through checkpoints.

    To be called in the script before ``pretrain(...)``, or in a provider. Tensors belong into the model, as buffers.
    Raises TypeError where ``owner`` lacks a method, ValueError where ``name`` is another object's.
    """
    if not isinstance(owner, CarriesState):
        lacking = [one for one in ("state_dict", "load_state_dict") if not hasattr(owner, one)]
        raise TypeError(f"carry_state({name!r}, ...): {type(owner).__name__} has no {' and no '.join(lacking)}()")
    if _owners.get(name, owner) is not owner:
        raise ValueError(f"carry_state({name!r}, ...): another object has this name; give each its own")
    _owners[name] = owner


def carried() -> Mapping[str, CarriesState]:
    """Name -> object, of all that were handed over in this process."""
    return dict(sorted(_owners.items()))


@dataclass
class CarryingEngine(PassThrough):
    """A step engine whose state includes that of ``owners``. Raises ConfigError where one of them is not JSON."""

    owners: Mapping[str, CarriesState]
    others: dict[tuple[int, str], Any] | None = None
    """(step, owner) -> the state that other rows have adopted: an owner has one, whatever row it comes with."""

    def __post_init__(self) -> None:
        self._states()

    def rows(self) -> Sequence[EngineRow]:
        """The engine's rows, each with the owners' states: a rank has them whole, whatever its shape."""
        if is_row(self.engine):
            return (self,)
        others: dict[tuple[int, str], Any] = {}
        return [CarryingEngine(cast(EvaluatesPieces, row), self.owners, others) for row in rows_of(self.engine)]

    def apply(self, step: int, reduced: Sequence[torch.Tensor], scalars: Mapping[str, float]) -> Mapping[str, Any]:
        """Apply the engine's update, then tell the owners; returns the engine's report."""
        report = super().apply(step, reduced, scalars)
        for owner in self.owners.values():
            after_step = getattr(owner, "after_step", None)
            if after_step is not None:
                after_step(step, dict(report))
        return report

    def weights_digest(self) -> str:
        """A digest of the engine's weights and the owners' states; empty where the engine has none."""
        digest = super().weights_digest()
        if not digest or not self.owners:
            return digest
        words = json.dumps(self._states(), sort_keys=True)
        weights, plus, rest = digest.partition("+")
        return hashlib.sha256(f"{weights} {words}".encode()).hexdigest() + plus + rest

    def weights_checksums(self) -> Mapping[str, int]:
        """The engine's checksums, and one for each owner's state."""
        found = dict(super().weights_checksums())
        for name, state in self._states().items():
            words = hashlib.sha256(json.dumps(state, sort_keys=True).encode()).digest()
            found[f"{_KEY}.{name}"] = int.from_bytes(words[:8], "big", signed=True)
        return found

    def state_values(self) -> Mapping[str, Any]:
        """The engine's values and the owners' states."""
        return {**super().state_values(), _KEY: self._states()}

    def adopt_state(self, step: int, values: Mapping[str, Any]) -> None:
        """Have the engine and the owners take over another rank's state. Raises ConfigError where another row of this
        rank has come with another state of an owner."""
        super().adopt_state(step, values)
        for name, owner in self.owners.items():
            state = values[_KEY][name]
            if self.others is not None and self.others.setdefault((step, name), state) != state:
                other = self.others[step, name]
                raise ConfigError(
                    f"the state of {name!r} (carry_state) is not the same on the pipeline stages that this rank has in "
                    f"the smaller shape: {_shown(other)} and {_shown(state)} after step {step}; let it be the same on "
                    "all ranks, or leave --spare-shapes out"
                )
            owner.load_state_dict(state)

    def with_states(self, rank_state: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """What a checkpoint keeps of this rank: ``rank_state``, and the owners' states where there are owners."""
        return {**(rank_state or {}), _KEY: self._states()} if self.owners else rank_state

    def restore(self, rank_state: Mapping[str, Any] | None, read_all: Callable[[], list[Any]] = list) -> None:
        """Load the owners' states from ``rank_state``, a checkpoint's state of this rank; logs what is missing. If a
        group of another layout wrote the checkpoint, ``rank_state`` is None and ``read_all`` returns the states of all
        its ranks: they are used if they are equal. Collective in the group."""
        states = (rank_state or {}).get(_KEY, {})
        if rank_state is None and self.owners:
            kept = [one.get(_KEY, {}) for one in read_all() if one]
            states = kept[0] if kept and all(one == kept[0] for one in kept) else {}
        for name, owner in self.owners.items():
            if name in states:
                owner.load_state_dict(states[name])
            else:
                log.warning("the checkpoint has no state of %r (carry_state): it begins anew", name)
        for name in states.keys() - self.owners.keys():
            log.warning("the checkpoint has a state of %r, which no carry_state() names: it is left out", name)

    def _states(self) -> dict[str, Any]:
        """Name -> a copy of the owner's state."""
        return {name: _plain(name, owner.state_dict(), "") for name, owner in self.owners.items()}


def _shown(state: Any) -> str:
    """A state in a message."""
    words = json.dumps(state, sort_keys=True)
    return words if len(words) <= _SHOWN else f"{words[:_SHOWN]}..."


def _plain(name: str, value: Any, where: str) -> Any:
    """A copy of a state. Raises ConfigError where it is not JSON, which another process could not read as it is."""
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _plain(name, one, f"{where}[{key!r}]") for key, one in value.items()}
    if isinstance(value, list):
        return [_plain(name, one, f"{where}[{index}]") for index, one in enumerate(value)]
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise ConfigError(
        f"state_dict() of {name!r} (carry_state) has a {type(value).__name__} at {where or 'its root'}; it may have "
        "JSON values only: dicts with string keys, lists, numbers, strings, None. Tensors belong into the model, as "
        "buffers"
    )

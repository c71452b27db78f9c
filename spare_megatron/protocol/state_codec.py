"""Encodes a whole :class:`State` as plain JSON values, and decodes it: the content of a snapshot.

Promises: for every state that the machine reaches, ``decode_state(encode_state(state))`` decides all later events as
``state`` does. So nothing is left out but what follows from the rest (the placement); the order of mappings is kept,
because a majority or a reason may follow it; and an assignment that the plan in flight shares with the standing one is
shared afterwards. A change here that older snapshots do not survive is a new format of the journal
(``coordinator.journal_parts.FORMAT``).
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spare_megatron.placement import placement_from_offsets
from spare_megatron.protocol.adoption import placed
from spare_megatron.protocol.assign import Assignment
from spare_megatron.protocol.blame import Evidence
from spare_megatron.protocol.codec import KEYS, decode, encode
from spare_megatron.protocol.state import NO_PLAN, Plan, Relief, Retries, Standing, State
from spare_megatron.protocol.view import MemberId

_ARRAYS = ("owner", "units", "slots", "loads", "slowness")
_KEYS = {**KEYS, "independent": "witnesses", "reported": "said"}
"""Name of a field of the state -> its key in a snapshot, where that differs."""


def encode_state(state: State) -> dict[str, Any]:
    """A state as JSON values."""
    table: list[Assignment] = []
    return {
        **{_KEYS.get(name, name): to_plain(getattr(state, name)) for name, (to_plain, _) in _FIELDS.items()},
        "standing": _encode_standing(state.standing, table),
        "plan": _encode_plan(state, table),
        "assignments": [_encode_assignment(assignment) for assignment in table],
    }


def decode_state(plain: Mapping[str, Any]) -> State:
    """The inverse of :func:`encode_state`.

    Raises:
        ValueError, KeyError, TypeError: these are not the values of a state.
    """
    table = [_decode_assignment(one) for one in plain["assignments"]]
    plain = {"state_hosts": [], "drained_for_now": [], **plain}  # snapshots from before there were any
    values = {name: of_plain(plain[_KEYS.get(name, name)]) for name, (_, of_plain) in _FIELDS.items()}
    spec, standing = values["spec"], _decode_standing(plain["standing"], table)
    state = State(
        **values,
        placement=None if spec is None else placement_from_offsets(spec.num_groups, spec.offsets),
        standing=standing,
        plan=_decode_plan(plain["plan"], standing, table),
    )
    return placed(state, state.adopted, state.unable) if state.adopted else state


# -------------------------------------------------------------------------------------------------- plans in flight


def _encode_standing(standing: Standing | None, table: list[Assignment]) -> Any:
    return None if standing is None else [_number(standing.assignment, table), list(standing.live)]


def _decode_standing(plain: Any, table: list[Assignment]) -> Standing | None:
    return None if plain is None else Standing(table[plain[0]], tuple(plain[1]))


def _encode_plan(state: State, table: list[Assignment]) -> Any:
    """The plan in flight; that of an undisturbed step, which is the standing one, as 'standing'."""
    plan = state.plan
    if state.standing is not None and plan is state.standing.plan:
        return "standing"
    number = None if plan.assignment is None else _number(plan.assignment, table)
    return [number, list(plan.members), _pairs(plan.added), sorted(plan.patched), _encode_sets(plan.left)]


def _decode_plan(plain: Any, standing: Standing | None, table: list[Assignment]) -> Plan:
    if plain == "standing":
        if standing is None:
            raise ValueError("the plan is the standing one, and there is none")
        return standing.plan
    number, members, added, patched, left = plain
    if number is None and not members and not added:
        return NO_PLAN
    assignment = None if number is None else table[number]
    return Plan(assignment, tuple(members), _of_pairs(added), frozenset(patched), _decode_sets(left))


def _number(assignment: Assignment, table: list[Assignment]) -> int:
    """The place of an assignment in the table, which has each one once."""
    for number, known in enumerate(table):
        if known is assignment:
            return number
    table.append(assignment)
    return len(table) - 1


def _encode_assignment(assignment: Assignment) -> dict[str, Any]:
    plain = {item.name: getattr(assignment, item.name) for item in fields(Assignment)}
    arrays = {name: _encode_array(plain[name]) for name in _ARRAYS}
    return {**plain, "live": list(assignment.live), **arrays}


def _decode_assignment(plain: Mapping[str, Any]) -> Assignment:
    arrays = {name: _decode_array(plain[name]) for name in _ARRAYS}
    return Assignment(**{**plain, "live": tuple(plain["live"]), **arrays})


def _encode_array(array: NDArray[Any] | None) -> Any:
    if array is None:
        return None
    packed = zlib.compress(np.ascontiguousarray(array).tobytes())
    return [array.dtype.str, list(array.shape), base64.b64encode(packed).decode()]


def _decode_array(plain: Any) -> NDArray[Any] | None:
    if plain is None:
        return None
    kind, shape, packed = plain
    raw = zlib.decompress(base64.b64decode(packed))
    return np.frombuffer(raw, dtype=np.dtype(kind)).reshape(shape)


# --------------------------------------------------------------------------------------------- the fields one by one


def _pairs(mapping: Mapping[int, Any]) -> list[Any]:
    """A mapping with numbers as keys, in its order; JSON has only texts as keys."""
    return [[key, encode(value)] for key, value in mapping.items()]


def _of_pairs(plain: list[Any]) -> dict[int, Any]:
    return {key: decode(value) for key, value in plain}


def _encode_adopted(adopted: Mapping[int, Mapping[int, bool]]) -> list[Any]:
    return [[group, _pairs(shards)] for group, shards in adopted.items()]


def _decode_adopted(plain: list[Any]) -> dict[int, Mapping[int, bool]]:
    return {group: _of_pairs(shards) for group, shards in plain}


def _encode_sets(sets: Mapping[int, frozenset[int]]) -> list[Any]:
    return [[key, sorted(values)] for key, values in sets.items()]


def _decode_sets(plain: list[Any]) -> dict[int, frozenset[int]]:
    return {key: frozenset(values) for key, values in plain}


def _encode_disputes(disputes: Mapping[int, Mapping[MemberId, int]]) -> list[Any]:
    return [[piece, _encode_reported(known)] for piece, known in disputes.items()]


def _decode_disputes(plain: list[Any]) -> dict[int, Mapping[MemberId, int]]:
    return {piece: _decode_reported(known) for piece, known in plain}


def _encode_reported(reported: Mapping[MemberId, Any]) -> list[Any]:
    """What each member has reported, a single JSON value."""
    return [[*member, value] for member, value in reported.items()]


def _decode_reported(plain: list[Any]) -> dict[MemberId, Any]:
    return {(group, incarnation): value for group, incarnation, value in plain}


def _decode_members(plain: list[Any]) -> frozenset[MemberId]:
    return frozenset((group, incarnation) for group, incarnation in plain)


def _encode_retries(retries: Retries) -> list[Any]:
    evidence = retries.evidence
    seen = [
        [[key, sorted(epochs)] for key, epochs in each.items()]
        for each in (evidence.silent, evidence.ended, evidence.refused)
    ]
    return [retries.failures, retries.result_mismatches, retries.since, *seen]


def _decode_retries(plain: list[Any]) -> Retries:
    failures, mismatches, since, silent, ended, refused = plain
    alone = {key: frozenset(epochs) for key, epochs in refused}
    return Retries(failures, Evidence(_links(silent), _links(ended), alone), mismatches, since)


def _encode_relief(relief: Relief) -> list[Any]:
    return [relief.rounds, _pairs(relief.asked), _pairs(relief.given), _pairs(relief.paces)]


def _decode_relief(plain: list[Any]) -> Relief:
    rounds, *mappings = plain
    return Relief(rounds, *map(_of_pairs, mappings))


def _links(plain: list[Any]) -> dict[tuple[int, int], frozenset[int]]:
    return {(sender, receiver): frozenset(epochs) for (sender, receiver), epochs in plain}


def _same(value: Any) -> Any:
    return value


_ENCODED = (encode, decode)
_PAIRS = (_pairs, _of_pairs)
_GROUPS: tuple[Callable[[Any], Any], Callable[[Any], Any]] = (sorted, frozenset)
_DERIVED = frozenset({"placement", "standing", "plan"})
_SPECIAL: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    **dict.fromkeys(("spec", "unproved", "committed", "digests", "saver", "state_hosts"), _ENCODED),
    **dict.fromkeys(("live", "highest", "process_nonces", "learners", "votes", "audits", "slowness"), _PAIRS),
    **dict.fromkeys(("gone", "holders", "untried", "applied_last", "drained", "drained_for_now"), _GROUPS),
    **dict.fromkeys(("independent", "endangered", "accused"), (sorted, _decode_members)),
    "reported": (_encode_reported, _decode_reported),
    "adopted": (_encode_adopted, _decode_adopted),
    "unable": (_encode_sets, _decode_sets),
    "disputes": (_encode_disputes, _decode_disputes),
    "retries": (_encode_retries, _decode_retries),
    "relief": (_encode_relief, _decode_relief),
}
_FIELDS = {item.name: _SPECIAL.get(item.name, (_same, _same)) for item in fields(State) if item.name not in _DERIVED}
"""Name of a field -> how it is encoded and decoded; fields that are named nowhere are single JSON values."""

"""Encodes messages of the protocol machine as plain JSON values, and decodes them: the content of journal lines.

A dataclass becomes an object with its class name under ``type`` and the fields that differ from their defaults; a
tuple becomes a list. All sequences in messages are tuples, so decoding needs no schema. The views of one decision
repeat the live set once per group, a million pairs at a thousand groups: fields that are equal in all of them are
written once (``Views``). Journals keep the older names of some fields as keys (``KEYS``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from operator import attrgetter
from typing import Any

from spare_megatron.config.job import JobDescription
from spare_megatron.config.timeouts import Timeouts
from spare_megatron.config.tuning import Tuning
from spare_megatron.protocol import learner, messages, view
from spare_megatron.protocol.messages import Action, Event, JobSpec, SendView
from spare_megatron.protocol.view import View

_CLASSES: dict[str, type] = {
    cls.__name__: cls
    for module in (messages, view, learner)
    for cls in vars(module).values()
    if isinstance(cls, type) and is_dataclass(cls) and cls.__module__ == module.__name__
} | {"JobDescription": JobDescription, "Timeouts": Timeouts, "Tuning": Tuning}

_SINGLE = frozenset({int, str, float, bool, type(None)})
"""Types that are JSON values as they are. They are most of all values, and looked for first."""
KEYS = {"job_attempt": "life", "process_nonce": "birth", "process_nonces": "births", "silent": "mute"}
"""Name of a field -> its key in a journal, where that differs."""
_NAMES = {key: name for name, key in KEYS.items()}
_VIEW_FIELDS = tuple(item.name for item in fields(View))


def encode(value: Any) -> Any:
    """A message, or any part of one, as JSON values."""
    if type(value) in _SINGLE:
        return value
    if isinstance(value, tuple | list):
        return [part if type(part) in _SINGLE else encode(part) for part in value]
    if is_dataclass(value) and not isinstance(value, type):
        plain: dict[str, Any] = {"type": type(value).__name__}
        for name, key, default in _defaults(type(value)):
            part = getattr(value, name)
            if part is not default and (default is MISSING or part != default):
                plain[key] = part if type(part) in _SINGLE else encode(part)
        return plain
    if isinstance(value, Mapping):
        return {key: encode(part) for key, part in value.items()}
    return value


@cache
def _defaults(cls: type) -> tuple[tuple[str, str, Any], ...]:
    """The name of each field of a dataclass, its key, and its default or MISSING."""
    return tuple((item.name, KEYS.get(item.name, item.name), item.default) for item in fields(cls))


def decode(plain: Any) -> Any:
    """The inverse of :func:`encode`.

    Raises:
        ValueError: an unknown type, or fields that it does not have.
    """
    if isinstance(plain, list):
        return tuple([part if type(part) in _SINGLE else decode(part) for part in plain])
    if not isinstance(plain, dict):
        return plain
    if "type" not in plain:
        return {key: decode(part) for key, part in plain.items()}
    cls = _CLASSES.get(plain["type"])
    if cls is None:
        raise ValueError(f"unknown message type {plain['type']!r}")
    try:
        parts: dict[str, Any] = {
            str(_NAMES.get(key, key)): decode(part) for key, part in plain.items() if key != "type"
        }
        return cls(**parts)
    except TypeError as error:
        raise ValueError(f"{plain['type']}: {error}") from None


def encode_event(event: Event) -> dict[str, Any]:
    """One event as a JSON object."""
    plain: dict[str, Any] = encode(event)
    return plain


def decode_event(plain: Mapping[str, Any]) -> Event:
    """The inverse of :func:`encode_event`."""
    event: Event = decode(plain)
    return event


def encode_actions(actions: Sequence[Action]) -> list[Any]:
    """The actions of one decision, in order; consecutive views share the fields in which they are equal."""
    plain: list[Any] = []
    run: list[SendView] = []
    for action in (*actions, None):
        if isinstance(action, SendView):
            run.append(action)
            continue
        if run:
            plain.extend(_encode_views(run) if len(run) > 1 else [encode(run[0])])
            run = []
        if action is not None:
            plain.append(encode(action))
    return plain


def decode_actions(plain: Sequence[Any]) -> tuple[Action, ...]:
    """The inverse of :func:`encode_actions`."""
    actions: list[Action] = []
    for part in plain:
        if part.get("type") != "Views":
            actions.append(decode(part))
            continue
        common = decode(part["common"])
        delay_s = common.pop("delay_s")
        actions.extend(SendView(View(**common, **decode(each)), delay_s) for each in part["each"])
    return tuple(actions)


def _encode_views(run: Sequence[SendView]) -> list[Any]:
    first = run[0]
    if any(other.delay_s != first.delay_s for other in run):
        return [encode(send) for send in run]
    views = [send.view for send in run]
    same = [name for name in _VIEW_FIELDS if _all_equal(map(attrgetter(name), views))]
    other = [name for name in _VIEW_FIELDS if name not in same]
    common = {name: encode(getattr(first.view, name)) for name in same}
    each = [{name: encode(getattr(one, name)) for name in other} for one in views]
    return [{"type": "Views", "common": {**common, "delay_s": first.delay_s}, "each": each}]


def _all_equal(values: Iterator[Any]) -> bool:
    """Whether all values are equal; most often they are one object, and are not looked into."""
    first = next(values)
    return all(value is first or value == first for value in values)


def spec_to_json(spec: JobSpec) -> str:
    """A JobSpec as text, to be sent to the coordinator."""
    return json.dumps(encode(spec))


def spec_from_json(text: str) -> JobSpec:
    """The inverse of :func:`spec_to_json`."""
    spec = decode(json.loads(text))
    if not isinstance(spec, JobSpec):
        raise ValueError(f"no JobSpec: {text[:100]}")
    return spec


def job_to_json(job: JobDescription) -> str:
    """A JobDescription as text, to be sent to the coordinator."""
    return json.dumps(encode(job))


def job_from_json(text: str) -> JobDescription:
    """The inverse of :func:`job_to_json`."""
    job = decode(json.loads(text))
    if not isinstance(job, JobDescription):
        raise ValueError(f"no JobDescription: {text[:100]}")
    return job

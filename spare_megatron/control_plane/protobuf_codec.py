"""Converts dataclasses to protobuf messages and back, by the field names of the messages' own descriptors.

Every field of a protobuf message is a field of its dataclass; fields that only the dataclass has are not sent. A tuple
of numbers becomes a repeated field, or ``Integers`` where it is optional or inside another tuple; a tuple of pairs of
numbers becomes ``Pairs``, one number after the other; a (name, number) becomes a ``Figure``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from spare_megatron.control_plane import control_pb2 as pb
from spare_megatron.control_plane import reports
from spare_megatron.protocol import messages, view

T = TypeVar("T")

_NESTED: dict[str, type] = {
    cls.__name__: cls
    for cls in (
        messages.Hello,
        messages.Link,
        messages.ParameterChecksum,
        messages.ReductionResult,
        messages.Vote,
        reports.LastRank,
        reports.LateRank,
        reports.Pace,
        view.ReliefAsk,
        view.Offer,
        view.StateHost,
        view.View,
    )
}


def fill(message: Message, value: object, leave_out: str = "") -> Message:
    """Set every field of ``message`` but ``leave_out`` from the field of ``value`` with the same name, except where
    that is None; returns it."""
    for name, nested, repeated in _fields(message.DESCRIPTOR):
        part = getattr(value, name)
        if part is None or name == leave_out:
            continue
        if repeated:
            if part:
                getattr(message, name).extend([_part(nested, item) for item in part] if nested else part)
        elif not nested:
            setattr(message, name, part)
        else:
            getattr(message, name).CopyFrom(_part(nested, part))
    return message


@cache
def _fields(descriptor: Descriptor) -> tuple[tuple[str, str, bool], ...]:
    """Of each field the name, the name of its message type (empty for a number or text) and whether it is repeated.
    Looked up once for each type, because descriptors are slow and a coordinator handles thousands of messages a
    second."""
    return tuple(
        (field.name, field.message_type.name if field.type == FieldDescriptor.TYPE_MESSAGE else "", field.is_repeated)
        for field in descriptor.fields
    )


def _part(name: str, value: Any) -> Message:
    if name == "Integers":
        return pb.Integers(values=value)
    if name == "Pairs":
        return pb.Pairs(values=[number for pair in value for number in pair])
    if name == "Figure":
        return pb.Figure(name=value[0], value=value[1])
    return fill(getattr(pb, name)(), value)


def read(message: Message, cls: type[T]) -> T:
    """A ``cls`` with every field of ``message``; fields that only the dataclass has keep their defaults."""
    how = _readers(message.DESCRIPTOR)
    found = dict(zip(how.single, how.values(message), strict=True))
    for name in how.numbers:
        found[name] = tuple(getattr(message, name))
    for name, reader in how.messages:
        found[name] = tuple(map(reader, getattr(message, name)))
    for name, reader, absent in how.optional:
        found[name] = reader(getattr(message, name)) if message.HasField(name) else absent
    return cls(**found)


class _Readers(NamedTuple):
    """How the fields of a message are read: kinds of fields, so that most are read without a call of ours."""

    single: tuple[str, ...]
    """Names of fields that have one number or text."""
    values: Callable[[Message], tuple[Any, ...]]
    """Returns what these have."""
    numbers: tuple[str, ...]
    """Repeated numbers or texts."""
    messages: tuple[tuple[str, Callable[[Any], Any]], ...]
    """Repeated messages, and what reads one."""
    optional: tuple[tuple[str, Callable[[Any], Any], Any], ...]
    """Messages, what reads one, and what stands for one that is not there."""


@cache
def _readers(descriptor: Descriptor) -> _Readers:
    fields = _fields(descriptor)
    single = tuple(name for name, nested, repeated in fields if not nested and not repeated)
    return _Readers(
        single,
        _values_of(single),
        tuple(name for name, nested, repeated in fields if not nested and repeated),
        tuple((name, _reader(nested)) for name, nested, repeated in fields if nested and repeated),
        tuple(
            (name, _reader(nested), () if nested == "Pairs" else None)
            for name, nested, repeated in fields
            if nested and not repeated
        ),
    )


def _values_of(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    if len(names) > 1:
        return attrgetter(*names)
    return lambda message: tuple(getattr(message, name) for name in names)


def _reader(name: str) -> Callable[[Any], Any]:
    if name == "Integers":
        return lambda message: tuple(message.values)
    if name == "Pairs":
        return lambda message: tuple(zip(message.values[::2], message.values[1::2], strict=True))
    if name == "Figure":
        return attrgetter("name", "value")
    return partial(read, cls=_NESTED[name])

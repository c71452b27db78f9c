"""Converts dataclasses to protobuf messages and back, by the field names of the messages' own descriptors.

Every field of a protobuf message is a field of its dataclass; fields that only the dataclass has are not sent. A tuple
of numbers becomes a repeated field, or ``Integers`` where it is optional or inside another tuple; a tuple of pairs of
numbers becomes ``Pairs``, one number after the other; a (name, number) becomes a ``Figure``.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from spare_megatron.control import control_pb2 as pb
from spare_megatron.control import reports
from spare_megatron.controller import messages

T = TypeVar("T")

_NESTED: dict[str, type] = {
    cls.__name__: cls
    for cls in (
        messages.Hello,
        messages.Link,
        messages.ParameterChecksum,
        messages.ReductionResult,
        messages.View,
        messages.Vote,
        reports.LastRank,
        reports.LateRank,
    )
}


def fill(message: Message, value: object) -> Message:
    """Set every field of ``message`` from the field of ``value`` with the same name, except where that is None; returns
    it."""
    for field in message.DESCRIPTOR.fields:
        part = getattr(value, field.name)
        if part is None:
            continue
        if field.type != FieldDescriptor.TYPE_MESSAGE:
            if field.is_repeated:
                getattr(message, field.name).extend(part)
            else:
                setattr(message, field.name, part)
        elif field.is_repeated:
            getattr(message, field.name).extend(_part(field, item) for item in part)
        else:
            getattr(message, field.name).CopyFrom(_part(field, part))
    return message


def _part(field: FieldDescriptor, value: Any) -> Message:
    name = field.message_type.name
    if name == "Integers":
        return pb.Integers(values=value)
    if name == "Pairs":
        return _pairs(value)
    if name == "Figure":
        return pb.Figure(name=value[0], value=value[1])
    return fill(getattr(pb, name)(), value)


@lru_cache(maxsize=8)
def _pairs(value: tuple[tuple[int, int], ...]) -> Message:
    """``value`` as a ``Pairs`` message. The last ones are cached, because all views of an epoch have the same live
    set."""
    return pb.Pairs(values=[number for pair in value for number in pair])


def read(message: Message, cls: type[T]) -> T:
    """A ``cls`` with every field of ``message``; fields that only the dataclass has keep their defaults."""
    return cls(**{field.name: _value(message, field) for field in message.DESCRIPTOR.fields})


def _value(message: Message, field: FieldDescriptor) -> Any:
    value = getattr(message, field.name)
    if field.type != FieldDescriptor.TYPE_MESSAGE:
        return tuple(value) if field.is_repeated else value
    if field.is_repeated:
        return tuple(_plain(item) for item in value)
    if message.HasField(field.name):
        return _plain(value)
    return () if field.message_type.name == "Pairs" else None


def _plain(message: Message) -> Any:
    if isinstance(message, pb.Integers):
        return tuple(message.values)
    if isinstance(message, pb.Pairs):
        return tuple(zip(message.values[::2], message.values[1::2], strict=True))
    if isinstance(message, pb.Figure):
        return (message.name, message.value)
    return read(message, _NESTED[message.DESCRIPTOR.name])

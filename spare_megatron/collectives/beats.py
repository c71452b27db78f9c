"""The messages on a control connection between ring neighbours, as bytes."""

from __future__ import annotations

import struct

from spare_megatron.collectives.link_monitor import LinkBeat
from spare_megatron.protocol.messages import Link

LINKS_MAX = 64
"""The most links in one message, which must fit in what a connection takes without blocking. Silent links go first."""
WHY_BYTES = 512
"""The most bytes of the reason in a message."""
_HEAD = struct.Struct("!QBHHHQ")
"""The head of a message: epoch, flags, number of links, bytes of the reason, bytes of the address, bytes sent."""
_LINK = struct.Struct("!IIB")
_WANTS, _CLOSING = 1, 2


def pack(epoch: int, beat: LinkBeat) -> bytes:
    """The beat of a member in ``epoch`` as the bytes of a message."""
    links = sorted(beat.links, key=lambda link: (not link.silent, link.sender, link.receiver))[:LINKS_MAX]
    why = beat.why.encode()[:WHY_BYTES]
    place, flags = beat.right_at.encode(), _WANTS * beat.wants | _CLOSING * beat.closing
    head = _HEAD.pack(epoch, flags, len(links), len(why), len(place), beat.sent)
    return head + b"".join(_LINK.pack(link.sender, link.receiver, link.silent) for link in links) + why + place


def unpack(inbox: bytearray) -> tuple[int, LinkBeat] | None:
    """Remove the first message from ``inbox`` and return (epoch, beat); None when it is not complete yet."""
    if len(inbox) < _HEAD.size:
        return None
    epoch, flags, count, letters, places, sent = _HEAD.unpack_from(inbox)
    reason = _HEAD.size + count * _LINK.size
    end = reason + letters + places
    if len(inbox) < end:
        return None
    if end == _HEAD.size:
        del inbox[:end]
        return epoch, LinkBeat(sent, bool(flags & _WANTS), bool(flags & _CLOSING))
    links = frozenset(Link(s, r, bool(silent)) for s, r, silent in _LINK.iter_unpack(inbox[_HEAD.size : reason]))
    why = inbox[reason : reason + letters].decode(errors="ignore")
    place = inbox[reason + letters : end].decode(errors="ignore")
    del inbox[:end]
    return epoch, LinkBeat(sent, bool(flags & _WANTS), bool(flags & _CLOSING), links, why, place)

"""Reads a trace back with Perfetto's own definitions, as its trace processor does: each track has a stack of slices."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb


@dataclass
class ReadSlice:
    """One slice, or a moment, whose end is its beginning. Times are in seconds since 1970."""

    track: tuple[str, ...]
    name: str
    begin_s: float
    end_s: float = -1.0
    details: dict[str, Any] = field(default_factory=dict)
    flows: tuple[int, ...] = ()
    depth: int = 0
    """The number of slices around it."""


@dataclass
class ReadTrace:
    """All that is in a trace."""

    tracks: list[tuple[str, ...]]
    """In the order of their ranks."""
    slices: list[ReadSlice]

    def of(self, *track: str) -> list[ReadSlice]:
        """The slices of a track, in the order of their beginnings."""
        return [one for one in self.slices if one.track == track]

    def flow(self, number: int) -> list[ReadSlice]:
        """The slices that an arrow joins, in the order of time."""
        return sorted((one for one in self.slices if number in one.flows), key=lambda one: one.begin_s)

    @property
    def flows(self) -> set[int]:
        """The numbers of all arrows."""
        return {number for one in self.slices for number in one.flows}


def read_trace(content: bytes) -> ReadTrace:
    """The trace; AssertionError where it breaks a rule of the format."""
    trace = pb.Trace.FromString(content)
    assert trace.packet[0].sequence_flags & pb.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
    assert {packet.trusted_packet_sequence_id for packet in trace.packet} == {1}
    tracks: dict[int, tuple[str, ...]] = {}
    ranks = []
    for packet in trace.packet:
        if packet.HasField("track_descriptor"):
            described = packet.track_descriptor
            around = tracks[described.parent_uuid] if described.HasField("parent_uuid") else ()
            assert described.uuid not in tracks
            tracks[described.uuid] = (*around, described.name)
            ranks.append(described.sibling_order_rank)
    assert ranks == sorted(set(ranks))
    open_slices: dict[int, list[ReadSlice]] = {uuid: [] for uuid in tracks}
    newest_ns = dict.fromkeys(tracks, 0)
    found = []
    for packet in trace.packet:
        if not packet.HasField("track_event"):
            continue
        event, uuid = packet.track_event, packet.track_event.track_uuid
        assert packet.timestamp >= newest_ns[uuid], "the packets of a track are in order"
        newest_ns[uuid] = packet.timestamp
        stack, time_s = open_slices[uuid], packet.timestamp / 1e9
        if event.type == pb.TrackEvent.TYPE_SLICE_END:
            stack.pop().end_s = time_s
            continue
        one = ReadSlice(tracks[uuid], event.name, time_s, -1.0, _details(event), tuple(event.flow_ids), len(stack))
        found.append(one)
        if event.type == pb.TrackEvent.TYPE_SLICE_BEGIN:
            stack.append(one)
        else:
            assert event.type == pb.TrackEvent.TYPE_INSTANT
            one.end_s = time_s
    assert not any(open_slices.values()), "every slice ends"
    return ReadTrace(list(tracks.values()), found)


def _details(event: pb.TrackEvent) -> dict[str, Any]:
    return {note.name: getattr(note, note.WhichOneof("value")) for note in event.debug_annotations}

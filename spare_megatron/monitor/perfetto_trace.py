"""Writes a timeline as a Perfetto trace, which ui.perfetto.dev opens. Pure.

The format is Perfetto's own (https://perfetto.dev/docs/reference/synthetic-track-event): a packet for each track, then
one for each beginning and end of a slice, or for a moment. Times are UTC: both clocks of the one clock snapshot are the
same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from spare_megatron.monitor.trace_model import JobTimeline, TraceSlice, TrackName

SEQUENCE = 1
"""All packets are of one writer."""
CATEGORY = "spare"


def perfetto_trace(timeline: JobTimeline) -> bytes:
    """The trace, serialized."""
    trace = pb.Trace()
    ids = {name: number for number, name in enumerate(timeline.tracks, start=1)}
    first_ns = min((_ns(one.begin_s) for one in timeline.slices), default=0)
    packet = trace.packet.add(trusted_packet_sequence_id=SEQUENCE, timestamp=first_ns)
    packet.sequence_flags = pb.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
    for clock in (pb.BUILTIN_CLOCK_BOOTTIME, pb.BUILTIN_CLOCK_REALTIME):
        packet.clock_snapshot.clocks.add(clock_id=clock, timestamp=first_ns)
    for rank, (name, number) in enumerate(ids.items()):
        described = trace.packet.add(trusted_packet_sequence_id=SEQUENCE).track_descriptor
        described.uuid, described.name, described.sibling_order_rank = number, name[-1], rank
        described.child_ordering = pb.TrackDescriptor.EXPLICIT
        if len(name) > 1:
            described.parent_uuid = ids[name[:-1]]
    found = defaultdict[TrackName, list[TraceSlice]](list)
    for one in timeline.slices:
        found[one.track].append(one)
    for name, slices in found.items():
        for packet in _packets(slices, ids[name]):
            trace.packet.append(packet)
    return bytes(trace.SerializeToString())


def _packets(slices: list[TraceSlice], track: int) -> Iterator[pb.TracePacket]:
    """The packets of the slices of one track in the order of time. A slice ends with the one around it at the latest,
    and a moment comes before a slice that begins with it."""
    around: list[int] = []
    """The ends of the slices that are open, the outermost first."""
    for one in sorted(slices, key=lambda one: (one.begin_s, one.end_s > one.begin_s, -one.end_s)):
        begin_ns, end_ns = _ns(one.begin_s), _ns(one.end_s)
        while around and around[-1] <= begin_ns:
            yield _packet(track, around.pop(), pb.TrackEvent.TYPE_SLICE_END)
        end_ns = min(end_ns, *around) if around else end_ns
        kind = pb.TrackEvent.TYPE_SLICE_BEGIN if end_ns > begin_ns else pb.TrackEvent.TYPE_INSTANT
        packet = _packet(track, begin_ns, kind)
        _describe(packet.track_event, one)
        yield packet
        if end_ns > begin_ns:
            around.append(end_ns)
    while around:
        yield _packet(track, around.pop(), pb.TrackEvent.TYPE_SLICE_END)


def _packet(track: int, time_ns: int, kind: pb.TrackEvent.Type) -> pb.TracePacket:
    packet = pb.TracePacket(timestamp=time_ns, trusted_packet_sequence_id=SEQUENCE)
    packet.track_event.type, packet.track_event.track_uuid = kind, track
    return packet


def _describe(event: pb.TrackEvent, one: TraceSlice) -> None:
    event.name = one.name
    event.categories.append(CATEGORY)
    event.flow_ids.extend(one.flows)
    for name, value in one.details.items():
        note = event.debug_annotations.add(name=name)
        if isinstance(value, bool):
            note.bool_value = value
        elif isinstance(value, int):
            note.int_value = value
        elif isinstance(value, float):
            note.double_value = value
        else:
            note.string_value = value


def _ns(time_s: float) -> int:
    return round(time_s * 1e9)

"""Draws the timeline of a job from its run directory, of a job that runs or has ended, as a Perfetto trace, which
ui.perfetto.dev opens.

The format is Perfetto's own (https://perfetto.dev/docs/reference/synthetic-track-event): a packet for each track, then
one for each beginning and end of a slice, or for a moment. Times are UTC: both clocks of the one clock snapshot are the
same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from spare_megatron.config.errors import ConfigError
from spare_megatron.coordinator.journal import JournalError, acted_on
from spare_megatron.monitor.job_texts import left_out_text
from spare_megatron.monitor.rank_files import RankFiles
from spare_megatron.monitor.run_files import RunFiles, readable
from spare_megatron.monitor.trace_book import TraceBook
from spare_megatron.monitor.trace_model import JobTimeline, TraceSlice, TrackName
from spare_megatron.monitor.trace_ranks import RankTracks
from spare_megatron.monitor.trace_sample import SLICES_MAX, choose_steps, with_lines
from spare_megatron.monitor.written_file import write_drawn
from spare_megatron.runtime.disk import words
from spare_megatron.runtime.run_directory import RunDirectory

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


def draw_timeline(run_dir: RunDirectory, slices_max: int = SLICES_MAX) -> JobTimeline:
    """The timeline of the job of ``run_dir``, with about ``slices_max`` slices at most.

    Raises:
        ConfigError: the directory is of no job, cannot be read, or has no committed step.
    """
    files, left_out, ranks = RunFiles(run_dir), list[int](), RankTracks(RankFiles(run_dir))
    try:
        sample = choose_steps(files.lines(left_out.append), slices_max, ranks.of_a_group)
        not_read = left_out_text(sum(left_out))
        if not sample.of:
            raise ConfigError(not_read or f"{run_dir.path} has no committed step yet, so there is nothing to draw")
        sample = with_lines(sample, files.lines())
        book = TraceBook(sample, not_read, ranks)
        with readable(run_dir):
            for record, _ in acted_on(run_dir.journal, wanted=book.wants):
                if record is not None:
                    book.take(record)
            return book.finish()
    except JournalError as error:
        raise ConfigError(f"the journal cannot be read: {error}") from None
    except OSError as error:
        raise ConfigError(f"{error.filename or run_dir.path} cannot be read: {words(error)}") from None


def write_timeline(timeline: JobTimeline, path: Path) -> int:
    """Write the trace to ``path``; its length in bytes. Raises ConfigError where it cannot be written."""
    content = perfetto_trace(timeline)
    write_drawn("trace", path, content)
    return len(content)

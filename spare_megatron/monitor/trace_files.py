"""Draws the timeline of a job from its run directory, of a job that runs or has ended."""

from __future__ import annotations

from pathlib import Path

from spare_megatron.config.errors import ConfigError
from spare_megatron.coordinator.journal import JournalError, acted_on
from spare_megatron.monitor.job_texts import left_out_text
from spare_megatron.monitor.perfetto_trace import perfetto_trace
from spare_megatron.monitor.rank_files import RankFiles
from spare_megatron.monitor.run_files import RunFiles, readable
from spare_megatron.monitor.trace_book import TraceBook
from spare_megatron.monitor.trace_model import JobTimeline
from spare_megatron.monitor.trace_ranks import RankTracks
from spare_megatron.monitor.trace_sample import SLICES_MAX, choose_steps, with_lines
from spare_megatron.monitor.written_file import write_drawn
from spare_megatron.runtime.disk import words
from spare_megatron.runtime.run_directory import RunDirectory


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

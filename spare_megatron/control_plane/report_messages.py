"""The reports of ranks and groups, and the field of a protobuf message that carries each: one row for each kind.

A report of a rank travels in a ``RankReport`` to the leader of its group, an event of a group in a ``GroupReport`` to
the coordinator. A field has the fields of its report, except that a step report is carried as JSON. What has no row
here is exchanged by the transport itself (arrivals, heartbeats, connections that closed) or carries more than its event
(a ballot).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Generic, TypeVar

from google.protobuf.message import Message

from spare_megatron.control_plane import control_pb2 as pb
from spare_megatron.control_plane import protobuf_codec, reports
from spare_megatron.protocol import messages as m

GroupReport = (
    m.Applied
    | m.CaughtUp
    | m.GaveBack
    | m.Have
    | m.Hosts
    | m.Ready
    | m.Saved
    | reports.StepReport
    | m.StopRequested
    | m.Void
    | m.Withdrawn
)
M = TypeVar("M", bound=Message)
R = TypeVar("R")


class ReportMessages(Generic[M, R]):
    """Reports of type ``R`` as messages of type ``M``, which has a oneof ``kind``."""

    def __init__(self, message: type[M], rows: Mapping[str, type[R]]) -> None:
        """``rows``: field of ``message`` -> report."""
        self._message, self.rows = message, rows
        self._names = {cls: name for name, cls in rows.items()}

    def message(self, report: R) -> M:
        """``report`` as a message."""
        message: M = self._message()
        name = self._names[type(report)]
        part = getattr(message, name)
        part.SetInParent()
        if isinstance(report, reports.StepReport):
            part.step, part.report_json = report.step, json.dumps(report.report)
        else:
            protobuf_codec.fill(part, report)
        return message

    def report(self, message: M) -> R | None:
        """The inverse of :meth:`message`; None for kinds without a row."""
        name = message.WhichOneof("kind")
        cls = self.rows.get(name) if name else None
        if cls is None:
            return None
        part = getattr(message, name)
        if issubclass(cls, reports.StepReport):
            return cls(part.step, json.loads(part.report_json))
        found: R = protobuf_codec.read(part, cls)
        return found


RANK_REPORTS: ReportMessages[pb.RankReport, reports.RankReport] = ReportMessages(
    pb.RankReport,
    {
        "reduced": reports.Reduced,
        "step_report": reports.StepReport,
        "applied": reports.RankApplied,
        "save_request": reports.SaveRequest,
        "stop_request": reports.StopRequest,
        "ready": reports.RankReady,
        "caught_up": reports.RankCaughtUp,
        "void": reports.RankVoid,
        "withdrawn": reports.RankWithdrawn,
        "begun": reports.RankBegun,
        "opened": reports.RankOpened,
        "have": reports.RankHave,
    },
)
GROUP_REPORTS: ReportMessages[pb.GroupReport, GroupReport] = ReportMessages(
    pb.GroupReport,
    {
        "applied": m.Applied,
        "saved": m.Saved,
        "step_report": reports.StepReport,
        "stop_request": m.StopRequested,
        "ready": m.Ready,
        "caught_up": m.CaughtUp,
        "void": m.Void,
        "withdrawn": m.Withdrawn,
        "gave_back": m.GaveBack,
        "hosts": m.Hosts,
        "have": m.Have,
    },
)

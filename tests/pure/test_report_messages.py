"""Each report has its row in the table of messages, and comes out of its message as it went in."""

from __future__ import annotations

from typing import get_args

import pytest

from spare_megatron.control_plane import control_pb2 as pb
from spare_megatron.control_plane.report_messages import GROUP_REPORTS, RANK_REPORTS, GroupReport
from spare_megatron.control_plane.reports import RankOpened, RankReady, RankReport, StepReport
from spare_megatron.protocol.messages import CaughtUp, GaveBack, Ready, StopRequested
from spare_megatron.protocol.view import ReliefAsk

TRANSPORT_OF_RANKS = {"arrival", "beat", "seen"}
TRANSPORT_OF_GROUPS = {"arrival", "heartbeat", "ballot", "rank_closed", "runs_out"}


def test_each_report_and_each_field_has_one_row() -> None:
    fields = {field.name for field in pb.RankReport.DESCRIPTOR.oneofs_by_name["kind"].fields}
    assert fields - RANK_REPORTS.rows.keys() == TRANSPORT_OF_RANKS
    assert set(RANK_REPORTS.rows.values()) == set(get_args(RankReport))
    fields = {field.name for field in pb.GroupReport.DESCRIPTOR.oneofs_by_name["kind"].fields}
    assert fields - GROUP_REPORTS.rows.keys() == TRANSPORT_OF_GROUPS
    assert set(GROUP_REPORTS.rows.values()) == set(get_args(GroupReport))


@pytest.mark.parametrize("report", [RankReady(), RankOpened(3, False, "gone"), StepReport(7, {"loss": 1.5})])
def test_a_report_of_a_rank_comes_back(report: RankReport) -> None:
    sent = pb.RankReport.FromString(RANK_REPORTS.message(report).SerializeToString())
    assert RANK_REPORTS.report(sent) == report


@pytest.mark.parametrize(
    "report",
    [
        Ready(0, 0),
        CaughtUp(2, 1, 5, 9, "abc"),
        GaveBack(1, 0, 4, ReliefAsk(1, 2, 3), (6,)),
        StopRequested("SIGTERM"),
        StepReport(7, {"loss": 1.5}),
    ],
)
def test_a_report_of_a_group_comes_back(report: GroupReport) -> None:
    sent = pb.GroupReport.FromString(GROUP_REPORTS.message(report).SerializeToString())
    assert GROUP_REPORTS.report(sent) == report


def test_messages_of_the_transport_are_no_reports() -> None:
    assert RANK_REPORTS.report(pb.RankReport(seen=pb.Seen(epoch=1))) is None
    assert GROUP_REPORTS.report(pb.GroupReport(runs_out=pb.RunsOut(step=1, epoch=1))) is None
    assert GROUP_REPORTS.report(pb.GroupReport()) is None

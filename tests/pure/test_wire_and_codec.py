"""Messages survive the wire and the journal; the generated module belongs to the .proto file."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spare_megatron.config.job import JobDescription, difference
from spare_megatron.config.timeouts import timeouts_from
from spare_megatron.control_plane import control_pb2 as pb
from spare_megatron.control_plane import protobuf_codec
from spare_megatron.control_plane.generate import GENERATED, generated_texts
from spare_megatron.control_plane.reports import Heartbeat, LastRank, LateRank, Reduced
from spare_megatron.protocol import codec
from spare_megatron.protocol import messages as m
from spare_megatron.protocol.view import COUNTS, NEW, Offer, StateHost, View

SPEC = m.JobSpec(4, 3, (0, 1), "microbatch", 5, 20, 4, "f", 2.0, audit_rate=0.5, audit_seed=3)
small = st.integers(0, 1000)
numbers = st.lists(small, max_size=5).map(tuple)
pairs = st.tuples(small, small)
OFFERS = st.builds(Offer, pairs, small, small, st.lists(pairs, max_size=3).map(tuple))
HOSTS = st.builds(StateHost, small, small, small, st.sampled_from([COUNTS, NEW]), st.none() | pairs, small)
views = st.builds(
    View,
    group=small,
    incarnation=small,
    epoch=small,
    fencing=small,
    live=st.lists(pairs, max_size=4).map(tuple),
    committed=pairs,
    step=small,
    segments=st.lists(numbers, max_size=3).map(tuple),
    standing=numbers,
    offer=st.none() | OFFERS,
    serves=st.lists(OFFERS, max_size=2).map(tuple),
    leave=st.booleans(),
    audits=st.lists(numbers, max_size=3).map(tuple),
    disputed=numbers,
    adopts=st.lists(pairs, max_size=2).map(tuple),
    state_hosts=st.lists(HOSTS, max_size=3).map(tuple),
)
signed = st.integers(-(2**63), 2**63 - 1)
checksums = st.lists(st.tuples(small, signed), max_size=4).map(tuple)
parts = st.lists(st.builds(m.ParameterChecksum, small, small, st.text(max_size=5), signed), max_size=3).map(tuple)
links = st.lists(st.builds(m.Link, small, small, st.booleans()), max_size=3).map(tuple)
results = st.builds(
    m.ReductionResult,
    step=small,
    epoch=small,
    ok=st.booleans(),
    pieces=numbers,
    result_digest=st.text(max_size=5),
    links=links,
    detail=st.text(max_size=5),
    checksums=checksums,
    audits=checksums,
    parts=parts,
    state=checksums,
)
votes = st.builds(m.Vote, group=small, incarnation=small, result=results, failing_s=st.floats(0, 1e6))
actions = st.one_of(
    st.builds(m.SendView, views, st.sampled_from([0.0, 0.2])),
    st.builds(m.SendCommit, numbers, small, small, st.booleans(), st.lists(st.tuples(small, numbers)).map(tuple)),
    st.builds(m.SendFenced, small, small, st.text(max_size=5)),
    st.builds(m.SendStop, numbers, st.just("failed"), st.text(max_size=5)),
    st.builds(m.AcceptSave, small, small, small, st.text(max_size=5)),
)


def test_the_generated_module_and_its_types_are_current() -> None:
    texts = tuple(path.read_text() for path in GENERATED)
    assert texts == generated_texts(), "run python -m spare_megatron.control_plane.generate"


@given(views)
def test_views_cross_the_wire(view: View) -> None:
    message = protobuf_codec.fill(pb.View(), view)
    assert protobuf_codec.read(pb.View.FromString(message.SerializeToString()), View) == view


@given(votes)
def test_votes_cross_the_wire_without_the_coordinators_figure(vote: m.Vote) -> None:
    read = protobuf_codec.read(protobuf_codec.fill(pb.Vote(), vote), m.Vote)
    assert read == replace(vote, failing_s=0.0)


def test_optional_and_named_figures_cross_the_wire() -> None:
    for held in (None, (3, 4)):
        hello = m.Hello(1, 2, "f", 3, held, 5, held)
        assert protobuf_codec.read(protobuf_codec.fill(pb.Hello(), hello), m.Hello) == hello
    result = m.ReductionResult(1, 2, True, (3,), "r", "w", (m.Link(4, 5, True),), "d", False, ((3, -4),), ((5, 6),))
    reduced = Reduced(result, (("patch_s", 0.5),))
    assert protobuf_codec.read(protobuf_codec.fill(pb.Reduced(), reduced), Reduced) == reduced


def test_the_beat_of_a_group_crosses_the_wire() -> None:
    for last, late in ((None, None), (LastRank(3, 7, "vote", 9, 4, 0.25), LateRank(2, 1.5))):
        beat = Heartbeat(7, 4, 5, last, late)
        assert protobuf_codec.read(protobuf_codec.fill(pb.Heartbeat(), beat), Heartbeat) == beat


@given(st.lists(actions, max_size=6).map(tuple))
def test_actions_survive_the_journal(some: tuple[object, ...]) -> None:
    plain = json.loads(json.dumps(codec.encode_actions(some)))  # type: ignore[arg-type]
    assert codec.decode_actions(plain) == some


@given(votes)
def test_events_survive_the_journal(vote: m.Vote) -> None:
    for event in (
        vote,
        m.Opened(SPEC, 1, 2),
        m.Lost((m.Loss(1, 0, "silent", 1, "why"),), ((0, 3), (1, 2))),
        m.Applied(1, 2, 3, 4),
        m.Saved(1, 2, 3, "there"),
    ):
        assert codec.decode_event(json.loads(json.dumps(codec.encode_event(event)))) == event


def test_views_of_one_decision_share_what_is_equal() -> None:
    live = tuple((group, 0) for group in range(1000))
    sent = [m.SendView(View(g, 0, 2, 1, live, (5, 1), 6, ((g,),), (g,))) for g in range(1000)]
    text = json.dumps(codec.encode_actions(sent))
    assert len(text) < 150_000, "a thousand copies of the live set would be 8 MB"
    assert codec.decode_actions(json.loads(text)) == tuple(sent)


def test_what_is_no_message_is_refused() -> None:
    for plain, message in (({"type": "Nonsense"}, "unknown message type"), ({"type": "Vote", "x": 1}, "Vote: ")):
        with pytest.raises(ValueError, match=message):
            codec.decode(plain)
    with pytest.raises(ValueError, match="no JobSpec"):
        codec.spec_from_json('{"a": 1}')
    with pytest.raises(ValueError, match="no JobDescription"):
        codec.job_from_json(codec.spec_to_json(SPEC))


def test_the_job_crosses_the_wire_as_json() -> None:
    assert codec.spec_from_json(codec.spec_to_json(SPEC)) == SPEC
    job = JobDescription({"lr": 0.1, "model": None}, timeouts_from(2.0), 20, loss_names=("lm loss", "mtp loss"))
    assert codec.job_from_json(codec.job_to_json(job)) == job


def test_a_difference_names_what_differs() -> None:
    same = {"lr": 0.1, "layers": 4}
    assert difference(same, dict(same)) == ""
    assert difference({**same, "lr": 0.2}, same) == "lr is 0.2, elsewhere 0.1"
    assert difference(same, {"lr": 0.1}) == "layers is 4, elsewhere not set"
    assert difference({str(n): 1 for n in range(9)}, {}).endswith("; and 6 more")

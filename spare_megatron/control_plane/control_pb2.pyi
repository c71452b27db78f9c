from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Integers(_message.Message):
    __slots__ = ("values",)
    values: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, values: _Optional[_Iterable[int]] = ...) -> None: ...

class Pairs(_message.Message):
    __slots__ = ("values",)
    values: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, values: _Optional[_Iterable[int]] = ...) -> None: ...

class Figure(_message.Message):
    __slots__ = ("name", "value")
    name: str
    value: float
    def __init__(self, name: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...

class Done(_message.Message):
    __slots__ = ("opened",)
    opened: bool
    def __init__(self, opened: _Optional[bool] = ...) -> None: ...

class GroupReport(_message.Message):
    __slots__ = ("then", "arrival", "heartbeat", "ballot", "applied", "saved", "step_report", "stop_request", "rank_closed", "ready", "caught_up", "void", "withdrawn", "runs_out", "gave_back", "hosts", "have")
    then: _containers.RepeatedCompositeFieldContainer[GroupReport]
    arrival: Arrival
    heartbeat: Heartbeat
    ballot: Ballot
    applied: Applied
    saved: Saved
    step_report: StepReport
    stop_request: StopRequest
    rank_closed: RankClosed
    ready: Ready
    caught_up: CaughtUp
    void: Void
    withdrawn: Withdrawn
    runs_out: RunsOut
    gave_back: GaveBack
    hosts: Hosts
    have: Have
    def __init__(self, then: _Optional[_Iterable[_Union[GroupReport, _Mapping]]] = ..., arrival: _Optional[_Union[Arrival, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., ballot: _Optional[_Union[Ballot, _Mapping]] = ..., applied: _Optional[_Union[Applied, _Mapping]] = ..., saved: _Optional[_Union[Saved, _Mapping]] = ..., step_report: _Optional[_Union[StepReport, _Mapping]] = ..., stop_request: _Optional[_Union[StopRequest, _Mapping]] = ..., rank_closed: _Optional[_Union[RankClosed, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., caught_up: _Optional[_Union[CaughtUp, _Mapping]] = ..., void: _Optional[_Union[Void, _Mapping]] = ..., withdrawn: _Optional[_Union[Withdrawn, _Mapping]] = ..., runs_out: _Optional[_Union[RunsOut, _Mapping]] = ..., gave_back: _Optional[_Union[GaveBack, _Mapping]] = ..., hosts: _Optional[_Union[Hosts, _Mapping]] = ..., have: _Optional[_Union[Have, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("group", "incarnation", "fingerprint", "last_applied", "held", "fencing", "committed", "process_nonce", "replaces")
    group: int
    incarnation: int
    fingerprint: str
    last_applied: int
    held: Integers
    fencing: int
    committed: Integers
    process_nonce: str
    replaces: int
    def __init__(self, group: _Optional[int] = ..., incarnation: _Optional[int] = ..., fingerprint: _Optional[str] = ..., last_applied: _Optional[int] = ..., held: _Optional[_Union[Integers, _Mapping]] = ..., fencing: _Optional[int] = ..., committed: _Optional[_Union[Integers, _Mapping]] = ..., process_nonce: _Optional[str] = ..., replaces: _Optional[int] = ...) -> None: ...

class Arrival(_message.Message):
    __slots__ = ("hello", "ranks", "spec_json", "job_json", "addresses", "serving_at")
    hello: Hello
    ranks: int
    spec_json: str
    job_json: str
    addresses: _containers.RepeatedScalarFieldContainer[str]
    serving_at: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., ranks: _Optional[int] = ..., spec_json: _Optional[str] = ..., job_json: _Optional[str] = ..., addresses: _Optional[_Iterable[str]] = ..., serving_at: _Optional[_Iterable[str]] = ...) -> None: ...

class LastRank(_message.Message):
    __slots__ = ("position", "step", "phase", "counter", "pieces_done", "still_s")
    position: int
    step: int
    phase: str
    counter: int
    pieces_done: int
    still_s: float
    def __init__(self, position: _Optional[int] = ..., step: _Optional[int] = ..., phase: _Optional[str] = ..., counter: _Optional[int] = ..., pieces_done: _Optional[int] = ..., still_s: _Optional[float] = ...) -> None: ...

class LateRank(_message.Message):
    __slots__ = ("position", "silent_s")
    position: int
    silent_s: float
    def __init__(self, position: _Optional[int] = ..., silent_s: _Optional[float] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("step", "pieces_done", "waiting", "last", "late", "pace")
    step: int
    pieces_done: int
    waiting: int
    last: LastRank
    late: LateRank
    pace: Pace
    def __init__(self, step: _Optional[int] = ..., pieces_done: _Optional[int] = ..., waiting: _Optional[int] = ..., last: _Optional[_Union[LastRank, _Mapping]] = ..., late: _Optional[_Union[LateRank, _Mapping]] = ..., pace: _Optional[_Union[Pace, _Mapping]] = ...) -> None: ...

class Pace(_message.Message):
    __slots__ = ("step", "begun", "since_s", "piece_s")
    step: int
    begun: int
    since_s: float
    piece_s: float
    def __init__(self, step: _Optional[int] = ..., begun: _Optional[int] = ..., since_s: _Optional[float] = ..., piece_s: _Optional[float] = ...) -> None: ...

class ParameterChecksum(_message.Message):
    __slots__ = ("piece", "position", "name", "checksum")
    piece: int
    position: int
    name: str
    checksum: int
    def __init__(self, piece: _Optional[int] = ..., position: _Optional[int] = ..., name: _Optional[str] = ..., checksum: _Optional[int] = ...) -> None: ...

class Link(_message.Message):
    __slots__ = ("sender", "receiver", "silent")
    sender: int
    receiver: int
    silent: bool
    def __init__(self, sender: _Optional[int] = ..., receiver: _Optional[int] = ..., silent: _Optional[bool] = ...) -> None: ...

class ReductionResult(_message.Message):
    __slots__ = ("step", "epoch", "ok", "pieces", "result_digest", "weights_digest", "links", "detail", "corrupt", "checksums", "audits", "parts", "state")
    step: int
    epoch: int
    ok: bool
    pieces: _containers.RepeatedScalarFieldContainer[int]
    result_digest: str
    weights_digest: str
    links: _containers.RepeatedCompositeFieldContainer[Link]
    detail: str
    corrupt: bool
    checksums: Pairs
    audits: Pairs
    parts: _containers.RepeatedCompositeFieldContainer[ParameterChecksum]
    state: Pairs
    def __init__(self, step: _Optional[int] = ..., epoch: _Optional[int] = ..., ok: _Optional[bool] = ..., pieces: _Optional[_Iterable[int]] = ..., result_digest: _Optional[str] = ..., weights_digest: _Optional[str] = ..., links: _Optional[_Iterable[_Union[Link, _Mapping]]] = ..., detail: _Optional[str] = ..., corrupt: _Optional[bool] = ..., checksums: _Optional[_Union[Pairs, _Mapping]] = ..., audits: _Optional[_Union[Pairs, _Mapping]] = ..., parts: _Optional[_Iterable[_Union[ParameterChecksum, _Mapping]]] = ..., state: _Optional[_Union[Pairs, _Mapping]] = ...) -> None: ...

class Vote(_message.Message):
    __slots__ = ("group", "incarnation", "result")
    group: int
    incarnation: int
    result: ReductionResult
    def __init__(self, group: _Optional[int] = ..., incarnation: _Optional[int] = ..., result: _Optional[_Union[ReductionResult, _Mapping]] = ...) -> None: ...

class Ballot(_message.Message):
    __slots__ = ("vote", "figures", "since_seen_s")
    vote: Vote
    figures: _containers.RepeatedCompositeFieldContainer[Figure]
    since_seen_s: float
    def __init__(self, vote: _Optional[_Union[Vote, _Mapping]] = ..., figures: _Optional[_Iterable[_Union[Figure, _Mapping]]] = ..., since_seen_s: _Optional[float] = ...) -> None: ...

class Applied(_message.Message):
    __slots__ = ("group", "incarnation", "step", "epoch")
    group: int
    incarnation: int
    step: int
    epoch: int
    def __init__(self, group: _Optional[int] = ..., incarnation: _Optional[int] = ..., step: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("group", "incarnation")
    group: int
    incarnation: int
    def __init__(self, group: _Optional[int] = ..., incarnation: _Optional[int] = ...) -> None: ...

class CaughtUp(_message.Message):
    __slots__ = ("group", "incarnation", "number", "step", "weights_digest")
    group: int
    incarnation: int
    number: int
    step: int
    weights_digest: str
    def __init__(self, group: _Optional[int] = ..., incarnation: _Optional[int] = ..., number: _Optional[int] = ..., step: _Optional[int] = ..., weights_digest: _Optional[str] = ...) -> None: ...

class Void(_message.Message):
    __slots__ = ("group", "incarnation", "number", "detail")
    group: int
    incarnation: int
    number: int
    detail: str
    def __init__(self, group: _Optional[int] = ..., incarnation: _Optional[int] = ..., number: _Optional[int] = ..., detail: _Optional[str] = ...) -> None: ...

class Withdrawn(_message.Message):
    __slots__ = ("group", "incarnation", "number", "detail")
    group: int
    incarnation: int
    number: int
    detail: str
    def __init__(self, group: _Optional[int] = ..., incarnation: _Optional[int] = ..., number: _Optional[int] = ..., detail: _Optional[str] = ...) -> None: ...

class RunsOut(_message.Message):
    __slots__ = ("step", "epoch")
    step: int
    epoch: int
    def __init__(self, step: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class GaveBack(_message.Message):
    __slots__ = ("group", "incarnation", "step", "ask", "pieces")
    group: int
    incarnation: int
    step: int
    ask: ReliefAsk
    pieces: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, group: _Optional[int] = ..., incarnation: _Optional[int] = ..., step: _Optional[int] = ..., ask: _Optional[_Union[ReliefAsk, _Mapping]] = ..., pieces: _Optional[_Iterable[int]] = ...) -> None: ...

class Hosts(_message.Message):
    __slots__ = ("group", "incarnation", "shard", "opened", "detail")
    group: int
    incarnation: int
    shard: int
    opened: bool
    detail: str
    def __init__(self, group: _Optional[int] = ..., incarnation: _Optional[int] = ..., shard: _Optional[int] = ..., opened: _Optional[bool] = ..., detail: _Optional[str] = ...) -> None: ...

class Have(_message.Message):
    __slots__ = ("group", "incarnation", "epoch", "shard", "whole", "detail")
    group: int
    incarnation: int
    epoch: int
    shard: int
    whole: bool
    detail: str
    def __init__(self, group: _Optional[int] = ..., incarnation: _Optional[int] = ..., epoch: _Optional[int] = ..., shard: _Optional[int] = ..., whole: _Optional[bool] = ..., detail: _Optional[str] = ...) -> None: ...

class Saved(_message.Message):
    __slots__ = ("group", "incarnation", "step", "directory")
    group: int
    incarnation: int
    step: int
    directory: str
    def __init__(self, group: _Optional[int] = ..., incarnation: _Optional[int] = ..., step: _Optional[int] = ..., directory: _Optional[str] = ...) -> None: ...

class StepReport(_message.Message):
    __slots__ = ("step", "report_json")
    step: int
    report_json: str
    def __init__(self, step: _Optional[int] = ..., report_json: _Optional[str] = ...) -> None: ...

class Seen(_message.Message):
    __slots__ = ("epoch",)
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class StopRequest(_message.Message):
    __slots__ = ("reason",)
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class RankClosed(_message.Message):
    __slots__ = ("position", "closed")
    position: int
    closed: bool
    def __init__(self, position: _Optional[int] = ..., closed: _Optional[bool] = ...) -> None: ...

class RankReport(_message.Message):
    __slots__ = ("then", "arrival", "beat", "reduced", "step_report", "applied", "save_request", "stop_request", "seen", "ready", "caught_up", "void", "withdrawn", "begun", "opened", "have")
    then: _containers.RepeatedCompositeFieldContainer[RankReport]
    arrival: RankArrival
    beat: Beat
    reduced: Reduced
    step_report: StepReport
    applied: RankApplied
    save_request: SaveRequest
    stop_request: StopRequest
    seen: Seen
    ready: RankReady
    caught_up: RankCaughtUp
    void: RankVoid
    withdrawn: RankWithdrawn
    begun: RankBegun
    opened: RankOpened
    have: RankHave
    def __init__(self, then: _Optional[_Iterable[_Union[RankReport, _Mapping]]] = ..., arrival: _Optional[_Union[RankArrival, _Mapping]] = ..., beat: _Optional[_Union[Beat, _Mapping]] = ..., reduced: _Optional[_Union[Reduced, _Mapping]] = ..., step_report: _Optional[_Union[StepReport, _Mapping]] = ..., applied: _Optional[_Union[RankApplied, _Mapping]] = ..., save_request: _Optional[_Union[SaveRequest, _Mapping]] = ..., stop_request: _Optional[_Union[StopRequest, _Mapping]] = ..., seen: _Optional[_Union[Seen, _Mapping]] = ..., ready: _Optional[_Union[RankReady, _Mapping]] = ..., caught_up: _Optional[_Union[RankCaughtUp, _Mapping]] = ..., void: _Optional[_Union[RankVoid, _Mapping]] = ..., withdrawn: _Optional[_Union[RankWithdrawn, _Mapping]] = ..., begun: _Optional[_Union[RankBegun, _Mapping]] = ..., opened: _Optional[_Union[RankOpened, _Mapping]] = ..., have: _Optional[_Union[RankHave, _Mapping]] = ...) -> None: ...

class RankArrival(_message.Message):
    __slots__ = ("group", "incarnation", "position", "fingerprint", "last_applied", "address", "serving_at", "process_nonce", "tickets")
    group: int
    incarnation: int
    position: int
    fingerprint: str
    last_applied: int
    address: str
    serving_at: str
    process_nonce: str
    tickets: int
    def __init__(self, group: _Optional[int] = ..., incarnation: _Optional[int] = ..., position: _Optional[int] = ..., fingerprint: _Optional[str] = ..., last_applied: _Optional[int] = ..., address: _Optional[str] = ..., serving_at: _Optional[str] = ..., process_nonce: _Optional[str] = ..., tickets: _Optional[int] = ...) -> None: ...

class RankBegun(_message.Message):
    __slots__ = ("number",)
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class RankOpened(_message.Message):
    __slots__ = ("shard", "opened", "detail")
    shard: int
    opened: bool
    detail: str
    def __init__(self, shard: _Optional[int] = ..., opened: _Optional[bool] = ..., detail: _Optional[str] = ...) -> None: ...

class RankHave(_message.Message):
    __slots__ = ("epoch", "shard", "whole", "detail")
    epoch: int
    shard: int
    whole: bool
    detail: str
    def __init__(self, epoch: _Optional[int] = ..., shard: _Optional[int] = ..., whole: _Optional[bool] = ..., detail: _Optional[str] = ...) -> None: ...

class Beat(_message.Message):
    __slots__ = ("position", "step", "phase", "counter", "in_phase", "pieces_done")
    position: int
    step: int
    phase: str
    counter: int
    in_phase: int
    pieces_done: int
    def __init__(self, position: _Optional[int] = ..., step: _Optional[int] = ..., phase: _Optional[str] = ..., counter: _Optional[int] = ..., in_phase: _Optional[int] = ..., pieces_done: _Optional[int] = ...) -> None: ...

class Reduced(_message.Message):
    __slots__ = ("result", "figures", "row")
    result: ReductionResult
    figures: _containers.RepeatedCompositeFieldContainer[Figure]
    row: int
    def __init__(self, result: _Optional[_Union[ReductionResult, _Mapping]] = ..., figures: _Optional[_Iterable[_Union[Figure, _Mapping]]] = ..., row: _Optional[int] = ...) -> None: ...

class RankApplied(_message.Message):
    __slots__ = ("step", "epoch")
    step: int
    epoch: int
    def __init__(self, step: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class RankReady(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RankCaughtUp(_message.Message):
    __slots__ = ("number", "step", "weights_digest", "row")
    number: int
    step: int
    weights_digest: str
    row: int
    def __init__(self, number: _Optional[int] = ..., step: _Optional[int] = ..., weights_digest: _Optional[str] = ..., row: _Optional[int] = ...) -> None: ...

class RankVoid(_message.Message):
    __slots__ = ("number", "detail")
    number: int
    detail: str
    def __init__(self, number: _Optional[int] = ..., detail: _Optional[str] = ...) -> None: ...

class RankWithdrawn(_message.Message):
    __slots__ = ("number", "detail")
    number: int
    detail: str
    def __init__(self, number: _Optional[int] = ..., detail: _Optional[str] = ...) -> None: ...

class SaveRequest(_message.Message):
    __slots__ = ("step", "directory")
    step: int
    directory: str
    def __init__(self, step: _Optional[int] = ..., directory: _Optional[str] = ...) -> None: ...

class Order(_message.Message):
    __slots__ = ("then", "welcome", "view", "commit", "fenced", "stop", "save_accepted", "refused", "neighbour", "donors", "tickets", "asked")
    then: _containers.RepeatedCompositeFieldContainer[Order]
    welcome: Welcome
    view: View
    commit: Commit
    fenced: Fenced
    stop: Stop
    save_accepted: SaveAccepted
    refused: Refused
    neighbour: Neighbour
    donors: Donors
    tickets: Tickets
    asked: Asked
    def __init__(self, then: _Optional[_Iterable[_Union[Order, _Mapping]]] = ..., welcome: _Optional[_Union[Welcome, _Mapping]] = ..., view: _Optional[_Union[View, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., fenced: _Optional[_Union[Fenced, _Mapping]] = ..., stop: _Optional[_Union[Stop, _Mapping]] = ..., save_accepted: _Optional[_Union[SaveAccepted, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., neighbour: _Optional[_Union[Neighbour, _Mapping]] = ..., donors: _Optional[_Union[Donors, _Mapping]] = ..., tickets: _Optional[_Union[Tickets, _Mapping]] = ..., asked: _Optional[_Union[Asked, _Mapping]] = ...) -> None: ...

class Tickets(_message.Message):
    __slots__ = ("first", "entries")
    first: int
    entries: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, first: _Optional[int] = ..., entries: _Optional[_Iterable[int]] = ...) -> None: ...

class ReliefAsk(_message.Message):
    __slots__ = ("fencing", "number", "pieces")
    fencing: int
    number: int
    pieces: int
    def __init__(self, fencing: _Optional[int] = ..., number: _Optional[int] = ..., pieces: _Optional[int] = ...) -> None: ...

class Asked(_message.Message):
    __slots__ = ("step", "ask")
    step: int
    ask: ReliefAsk
    def __init__(self, step: _Optional[int] = ..., ask: _Optional[_Union[ReliefAsk, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("fencing",)
    fencing: int
    def __init__(self, fencing: _Optional[int] = ...) -> None: ...

class View(_message.Message):
    __slots__ = ("group", "incarnation", "epoch", "fencing", "live", "committed", "step", "segments", "standing", "offer", "leave", "audits", "disputed", "save", "serves", "ask", "asks_made", "adopts", "state_hosts")
    group: int
    incarnation: int
    epoch: int
    fencing: int
    live: Pairs
    committed: Integers
    step: int
    segments: _containers.RepeatedCompositeFieldContainer[Integers]
    standing: _containers.RepeatedScalarFieldContainer[int]
    offer: Offer
    leave: bool
    audits: _containers.RepeatedCompositeFieldContainer[Integers]
    disputed: _containers.RepeatedScalarFieldContainer[int]
    save: int
    serves: _containers.RepeatedCompositeFieldContainer[Offer]
    ask: ReliefAsk
    asks_made: int
    adopts: Pairs
    state_hosts: _containers.RepeatedCompositeFieldContainer[StateHost]
    def __init__(self, group: _Optional[int] = ..., incarnation: _Optional[int] = ..., epoch: _Optional[int] = ..., fencing: _Optional[int] = ..., live: _Optional[_Union[Pairs, _Mapping]] = ..., committed: _Optional[_Union[Integers, _Mapping]] = ..., step: _Optional[int] = ..., segments: _Optional[_Iterable[_Union[Integers, _Mapping]]] = ..., standing: _Optional[_Iterable[int]] = ..., offer: _Optional[_Union[Offer, _Mapping]] = ..., leave: _Optional[bool] = ..., audits: _Optional[_Iterable[_Union[Integers, _Mapping]]] = ..., disputed: _Optional[_Iterable[int]] = ..., save: _Optional[int] = ..., serves: _Optional[_Iterable[_Union[Offer, _Mapping]]] = ..., ask: _Optional[_Union[ReliefAsk, _Mapping]] = ..., asks_made: _Optional[int] = ..., adopts: _Optional[_Union[Pairs, _Mapping]] = ..., state_hosts: _Optional[_Iterable[_Union[StateHost, _Mapping]]] = ...) -> None: ...

class StateHost(_message.Message):
    __slots__ = ("shard", "group", "incarnation", "standing", "donor", "step")
    shard: int
    group: int
    incarnation: int
    standing: str
    donor: Integers
    step: int
    def __init__(self, shard: _Optional[int] = ..., group: _Optional[int] = ..., incarnation: _Optional[int] = ..., standing: _Optional[str] = ..., donor: _Optional[_Union[Integers, _Mapping]] = ..., step: _Optional[int] = ...) -> None: ...

class Offer(_message.Message):
    __slots__ = ("learner", "number", "step", "donors")
    learner: Integers
    number: int
    step: int
    donors: Pairs
    def __init__(self, learner: _Optional[_Union[Integers, _Mapping]] = ..., number: _Optional[int] = ..., step: _Optional[int] = ..., donors: _Optional[_Union[Pairs, _Mapping]] = ...) -> None: ...

class Neighbour(_message.Message):
    __slots__ = ("group", "incarnation", "addresses")
    group: int
    incarnation: int
    addresses: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, group: _Optional[int] = ..., incarnation: _Optional[int] = ..., addresses: _Optional[_Iterable[str]] = ...) -> None: ...

class Addresses(_message.Message):
    __slots__ = ("values",)
    values: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, values: _Optional[_Iterable[str]] = ...) -> None: ...

class Donors(_message.Message):
    __slots__ = ("number", "serving_at")
    number: int
    serving_at: _containers.RepeatedCompositeFieldContainer[Addresses]
    def __init__(self, number: _Optional[int] = ..., serving_at: _Optional[_Iterable[_Union[Addresses, _Mapping]]] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("step", "epoch", "leave", "audits", "save", "serves")
    step: int
    epoch: int
    leave: bool
    audits: _containers.RepeatedScalarFieldContainer[int]
    save: int
    serves: _containers.RepeatedCompositeFieldContainer[Offer]
    def __init__(self, step: _Optional[int] = ..., epoch: _Optional[int] = ..., leave: _Optional[bool] = ..., audits: _Optional[_Iterable[int]] = ..., save: _Optional[int] = ..., serves: _Optional[_Iterable[_Union[Offer, _Mapping]]] = ...) -> None: ...

class Fenced(_message.Message):
    __slots__ = ("fencing", "reason")
    fencing: int
    reason: str
    def __init__(self, fencing: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Stop(_message.Message):
    __slots__ = ("outcome", "reason")
    outcome: str
    reason: str
    def __init__(self, outcome: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class SaveAccepted(_message.Message):
    __slots__ = ("step", "directory")
    step: int
    directory: str
    def __init__(self, step: _Optional[int] = ..., directory: _Optional[str] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("reason",)
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Exited(_message.Message):
    __slots__ = ("group", "incarnation", "position", "status", "age_s")
    group: int
    incarnation: int
    position: int
    status: int
    age_s: float
    def __init__(self, group: _Optional[int] = ..., incarnation: _Optional[int] = ..., position: _Optional[int] = ..., status: _Optional[int] = ..., age_s: _Optional[float] = ...) -> None: ...

class LostGroup(_message.Message):
    __slots__ = ("group", "incarnation")
    group: int
    incarnation: int
    def __init__(self, group: _Optional[int] = ..., incarnation: _Optional[int] = ...) -> None: ...

class RestartAnswer(_message.Message):
    __slots__ = ("now", "never", "why", "highest_incarnation", "drained", "elsewhere")
    now: bool
    never: bool
    why: str
    highest_incarnation: int
    drained: bool
    elsewhere: bool
    def __init__(self, now: _Optional[bool] = ..., never: _Optional[bool] = ..., why: _Optional[str] = ..., highest_incarnation: _Optional[int] = ..., drained: _Optional[bool] = ..., elsewhere: _Optional[bool] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("groups", "hosts", "reason", "undo", "for_now")
    groups: _containers.RepeatedScalarFieldContainer[int]
    hosts: _containers.RepeatedScalarFieldContainer[str]
    reason: str
    undo: bool
    for_now: bool
    def __init__(self, groups: _Optional[_Iterable[int]] = ..., hosts: _Optional[_Iterable[str]] = ..., reason: _Optional[str] = ..., undo: _Optional[bool] = ..., for_now: _Optional[bool] = ...) -> None: ...

class DrainAnswer(_message.Message):
    __slots__ = ("refusal", "groups", "undecided", "epoch")
    refusal: str
    groups: _containers.RepeatedScalarFieldContainer[int]
    undecided: bool
    epoch: int
    def __init__(self, refusal: _Optional[str] = ..., groups: _Optional[_Iterable[int]] = ..., undecided: _Optional[bool] = ..., epoch: _Optional[int] = ...) -> None: ...

class AgentReport(_message.Message):
    __slots__ = ("lent", "found", "checked", "ended", "leaves")
    lent: LentNode
    found: PathsFound
    checked: NodeChecked
    ended: RanksEnded
    leaves: NodeLeaves
    def __init__(self, lent: _Optional[_Union[LentNode, _Mapping]] = ..., found: _Optional[_Union[PathsFound, _Mapping]] = ..., checked: _Optional[_Union[NodeChecked, _Mapping]] = ..., ended: _Optional[_Union[RanksEnded, _Mapping]] = ..., leaves: _Optional[_Union[NodeLeaves, _Mapping]] = ...) -> None: ...

class LentNode(_message.Message):
    __slots__ = ("name", "places", "versions", "gpus")
    name: str
    places: int
    versions: str
    gpus: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., places: _Optional[int] = ..., versions: _Optional[str] = ..., gpus: _Optional[_Iterable[str]] = ...) -> None: ...

class PathsFound(_message.Message):
    __slots__ = ("missing",)
    missing: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, missing: _Optional[_Iterable[str]] = ...) -> None: ...

class NodeChecked(_message.Message):
    __slots__ = ("number", "kind", "sentence")
    number: int
    kind: str
    sentence: str
    def __init__(self, number: _Optional[int] = ..., kind: _Optional[str] = ..., sentence: _Optional[str] = ...) -> None: ...

class RanksEnded(_message.Message):
    __slots__ = ("group", "incarnation", "status")
    group: int
    incarnation: int
    status: int
    def __init__(self, group: _Optional[int] = ..., incarnation: _Optional[int] = ..., status: _Optional[int] = ...) -> None: ...

class NodeLeaves(_message.Message):
    __slots__ = ("why",)
    why: str
    def __init__(self, why: _Optional[str] = ...) -> None: ...

class AgentOrder(_message.Message):
    __slots__ = ("needed", "check", "start", "kill", "end")
    needed: NeededPaths
    check: CheckNode
    start: StartRanks
    kill: KillRanks
    end: AgentEnd
    def __init__(self, needed: _Optional[_Union[NeededPaths, _Mapping]] = ..., check: _Optional[_Union[CheckNode, _Mapping]] = ..., start: _Optional[_Union[StartRanks, _Mapping]] = ..., kill: _Optional[_Union[KillRanks, _Mapping]] = ..., end: _Optional[_Union[AgentEnd, _Mapping]] = ...) -> None: ...

class NeededPaths(_message.Message):
    __slots__ = ("directory", "paths")
    directory: str
    paths: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, directory: _Optional[str] = ..., paths: _Optional[_Iterable[str]] = ...) -> None: ...

class CheckNode(_message.Message):
    __slots__ = ("number", "group", "command")
    number: int
    group: int
    command: str
    def __init__(self, number: _Optional[int] = ..., group: _Optional[int] = ..., command: _Optional[str] = ...) -> None: ...

class RankPlace(_message.Message):
    __slots__ = ("position", "local_rank", "log")
    position: int
    local_rank: int
    log: str
    def __init__(self, position: _Optional[int] = ..., local_rank: _Optional[int] = ..., log: _Optional[str] = ...) -> None: ...

class StartRanks(_message.Message):
    __slots__ = ("group", "incarnation", "words", "environ", "ranks")
    class EnvironEntry(_message.Message):
        __slots__ = ("key", "value")
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    group: int
    incarnation: int
    words: _containers.RepeatedScalarFieldContainer[str]
    environ: _containers.ScalarMap[str, str]
    ranks: _containers.RepeatedCompositeFieldContainer[RankPlace]
    def __init__(self, group: _Optional[int] = ..., incarnation: _Optional[int] = ..., words: _Optional[_Iterable[str]] = ..., environ: _Optional[_Mapping[str, str]] = ..., ranks: _Optional[_Iterable[_Union[RankPlace, _Mapping]]] = ...) -> None: ...

class KillRanks(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AgentEnd(_message.Message):
    __slots__ = ("sentence", "refused")
    sentence: str
    refused: bool
    def __init__(self, sentence: _Optional[str] = ..., refused: _Optional[bool] = ...) -> None: ...

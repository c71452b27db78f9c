"""Golden scenarios: texts of commands, each followed by what the protocol machine decided.

A scenario file has one command per line; the machine's decisions are below it, indented. ``run`` plays the commands and
returns the file as it should be; ``python -m tests.pure.scenario`` rewrites all files (read the diff before you commit
it). Every transition is checked against the invariants, and every view crosses the wire.

Commands::

    open N=4 K=2 r=2 [granularity=shard] [steps=3] [first=0] [min=1] [kind=consecutive] [heartbeat=5] [retries=8]
         [audit=0.5] [seed=7] [save=steps] [emergency=1] [adoption=1] [shards=S] [copies=r_s]
    reopen                          the coordinator restarts in the same job attempt
attempt                         a new job attempt starts from step `first`
    hello G[,G...] [inc=0] [applied=0] [held=t,e] [committed=t,e] [fencing=1] [fingerprint=job] [nonce=text]
         [replaces=-1]              inc=-1: a new process, whose incarnation the machine draws
    ready G[,G...]
    caught-up G[,G...] [step=t] [weights=d] [offer=number]
    have G[,G...] shard=i [not|cannot] [epoch=e]
                                    of a state shard: it has it, or nothing and no donor
    void G [offer=number]
    withdraw G offer=number
    vote G[,G...] [no] [step=t] [epoch=e] [pieces=1,2] [inc=0] [ended=G,G] [silent=from>to,from>to] [failing=seconds]
         [result=d] [weights=d] [wrong=piece,piece] [at-rank=position] [state=shard:checksum,...]
                                    a checksum is the piece's number, or below 0 for a wrong piece; of a state shard it
                                    is 0, and the vote has those for which the group counts or is whole
    vote all                        every live group votes ok with the pieces of its plan
    allvoted
    applied G[,G...] [step=t] [epoch=e]
    lost G[,G...] [inc=0] [cause=exited] [progress=g:n,g:n] [failing=seconds]
    saved G [step=t]
    standstill [epoch=e] [failing=seconds]
    joiners-late [epoch=e]
    startup-over
    stop-requested
    drain G[,G...] [undo] [for-now]
    runs-out left=g:n,g:n [slow=g:factor] [epoch=e]
                                    pieces take 1 s, in a slow group `factor` s
    speeds G:pace[,G:pace] [steps=1]
                                    a piece took the group so many times as long as the median one
    opened G[,G...] shard=i [cannot]
                                    of an adopted shard
    gives G[,G...] [pieces=1,2] [number=n]
                                    the answer to the newest ask
"""

from __future__ import annotations

import sys
import zlib
from dataclasses import replace
from pathlib import Path

from spare_megatron.control_plane import control_pb2 as pb
from spare_megatron.control_plane import protobuf_codec
from spare_megatron.placement import build_placement
from spare_megatron.protocol import audits
from spare_megatron.protocol import messages as m
from spare_megatron.protocol.invariants import check
from spare_megatron.protocol.machine import State, initial_state, step
from spare_megatron.protocol.view import COUNTS, NEW, UNABLE, VOID, WHOLE, Offer, ReliefAsk, View

FOLDER = Path(__file__).parent / "scenarios"


class Player:
    """Plays one scenario, and keeps the machine's state between commands."""

    def __init__(self) -> None:
        self.state: State = initial_state()
        self.spec: m.JobSpec | None = None

    def play(self, line: str) -> list[str]:
        """Apply one command; returns the lines that describe the decisions."""
        words = line.split()
        options = dict(w.split("=", 1) for w in words if "=" in w)
        plain = [w for w in words[1:] if "=" not in w]
        lines: list[str] = []
        for event in self._events(words[0], plain, options):
            before = self.state
            self.state, decision = step(before, event)
            check(before, event, self.state, decision)
            _cross_the_wire(decision)
            lines += [f"  {decision.reason}"] + [f"    {text}" for a in decision.actions for text in _describe(a)]
        return lines

    def _events(self, verb: str, plain: list[str], options: dict[str, str]) -> list[m.Event]:
        if verb == "open":
            self.spec = _spec(options)
            return [m.Opened(self.spec, job_attempt=1, fencing=1)]
        assert self.spec is not None, "the first command opens a job"
        if verb == "reopen":
            return [m.Opened(self.spec, self.state.job_attempt, self.state.fencing + 1)]
        if verb == "attempt":
            self.spec = replace(self.spec, first_step=int(options.get("first", 0)))
            return [m.Opened(self.spec, self.state.job_attempt + 1, self.state.fencing + 1)]
        if verb == "allvoted":
            return [m.AllVoted(self.state.step_in_flight, self.state.epoch)]
        if verb == "runs-out":
            slow = dict(pair.split(":") for pair in options.get("slow", "").split(",") if pair)
            reported = dict(pair.split(":") for pair in options["left"].split(","))
            paces = tuple((int(g), int(n), float(slow.get(g, 1))) for g, n in sorted(reported.items()))
            return [m.RunningOut(self.state.step_in_flight, int(options.get("epoch", self.state.epoch)), paces)]
        if verb == "speeds":
            reported = dict(pair.split(":") for pair in plain[0].split(","))
            speeds = tuple(
                (int(g), self._incarnation(int(g), options), float(p), float(p)) for g, p in reported.items()
            )
            return [m.SpeedsMeasured(self.state.committed[0], int(options.get("steps", 1)), speeds)]
        if verb == "startup-over":
            return [m.StartupOver(60.0)]
        if verb == "stop-requested":
            return [m.StopRequested("SIGTERM")]
        if verb == "standstill":
            epoch = int(options.get("epoch", self.state.epoch))
            return [m.Standstill(epoch, "all groups have waited for each other", float(options.get("failing", 0.0)))]
        if verb == "joiners-late":
            return [m.JoinersLate(int(options.get("epoch", self.state.epoch)), 5.0)]
        if plain[0] == "all":
            groups = sorted(self.state.live)
        else:
            groups = [int(g) for g in plain[0].split(",")]
        if verb == "drain":
            return [m.DrainRequested(tuple(groups), "maintenance", undo="undo" in plain, for_now="for-now" in plain)]
        if verb == "lost":
            return [self._lost(groups, options)]
        return [self._of_group(verb, g, plain, options) for g in groups]

    def _lost(self, groups: list[int], options: dict[str, str]) -> m.Lost:
        pairs = [p.split(":") for p in options.get("progress", "").split(",") if p]
        progress = tuple((int(g), int(n)) for g, n in pairs)
        cause = options.get("cause", "exited")
        losses = tuple(m.Loss(g, self._incarnation(g, options), cause) for g in groups)
        return m.Lost(losses, progress, float(options.get("failing", 0.0)))

    def _incarnation(self, group: int, options: dict[str, str]) -> int:
        return int(options.get("inc", self.state.present.get(group, 0)))

    def _of_group(self, verb: str, group: int, plain: list[str], options: dict[str, str]) -> m.Event:
        incarnation = self._incarnation(group, options)
        if verb == "hello":
            held = tuple(int(x) for x in options["held"].split(",")) if "held" in options else None
            applied = int(options.get("applied", self.spec.first_step if self.spec else 0))
            fingerprint = options.get("fingerprint", "job")
            known = tuple(int(x) for x in options["committed"].split(",")) if "committed" in options else None
            fencing = int(options.get("fencing", 0))
            process_nonce, replaces = options.get("nonce", ""), int(options.get("replaces", -1))
            hello = m.Hello(group, incarnation, fingerprint, applied, held, fencing, known)  # type: ignore[arg-type]
            return replace(hello, process_nonce=process_nonce, replaces=replaces)
        learner = self.state.learners.get(group)
        number = int(options.get("offer", learner.offer.number if learner and learner.offer else 0))
        if verb == "have":
            epoch, detail = int(options.get("epoch", self.state.epoch)), "no memory" if "cannot" in plain else ""
            return m.Have(group, incarnation, epoch, int(options["shard"]), not {"not", "cannot"} & set(plain), detail)
        if verb == "ready":
            return m.Ready(group, incarnation)
        if verb == "void":
            return m.Void(group, incarnation, number, "donor 0 sent a damaged part twice")
        if verb == "withdraw":
            return m.Withdrawn(group, incarnation, number, "17 results wait for the learner")
        if verb == "caught-up":
            step = int(options.get("step", self.state.committed[0]))
            return m.CaughtUp(group, incarnation, number, step, options.get("weights", ""))
        if verb == "saved":
            return m.Saved(group, incarnation, int(options.get("step", self.state.committed[0])), "dir")
        if verb == "applied":
            step = int(options.get("step", self.state.committed[0]))
            return m.Applied(group, incarnation, step, int(options.get("epoch", self.state.epoch)))
        if verb == "opened":
            can = "cannot" not in plain
            return m.Hosts(group, incarnation, int(options["shard"]), can, "" if can else "no such file")
        if verb == "gives":
            pieces = tuple(int(p) for p in options.get("pieces", "").split(",") if p)
            ask = self.state.relief.asked.get(group, ReliefAsk(self.state.fencing, self.state.asks_made, 0))
            ask = replace(ask, number=int(options.get("number", ask.number)))
            return m.GaveBack(group, incarnation, self.state.step_in_flight, ask, pieces)
        assert verb == "vote", f"unknown command {verb}"
        planned = tuple(p for segment in self.state.segments_of(group) for p in segment)
        pieces = tuple(int(p) for p in options["pieces"].split(",")) if "pieces" in options else planned
        step = int(options.get("step", self.state.step_in_flight))
        result = m.ReductionResult(
            step,
            int(options.get("epoch", self.state.epoch)),
            ok="no" not in plain,
            pieces=pieces,
            result_digest=options.get("result", ""),
            weights_digest=options.get("weights", ""),
            links=_links(group, options),
            state=self._kept(group, options),
            **self._checked(group, step, pieces, options),  # type: ignore[arg-type]
        )
        return m.Vote(group, incarnation, result, float(options.get("failing", 0.0)))

    def _kept(self, group: int, options: dict[str, str]) -> tuple[tuple[int, int], ...]:
        """(state shard, checksum) in a vote."""
        if "state" in options:
            pairs = (pair.split(":") for pair in options["state"].split(",") if pair)
            return tuple((int(shard), int(checksum)) for shard, checksum in pairs)
        mine = (host for host in self.state.state_hosts if host.group == group)
        return tuple((host.shard, 0) for host in mine if host.standing in (COUNTS, WHOLE))

    def _checked(self, group: int, step: int, pieces: tuple[int, ...], options: dict[str, str]) -> dict[str, object]:
        """The checksums in a vote: of the group's selected pieces, of those that it audited, and of disputed ones by
        parameter."""
        wrong = [int(p) for p in options.get("wrong", "").split(",") if p]
        found = {p: -1 - p - 1000 * group if p in wrong else p for p in range(self.state.job.num_groups * 100)}
        reported = [p for part in self.state.audits.get(group, ()) for p in part]
        inside = audits.selected(self.state.job, step, pieces)
        wrong_rank = int(options.get("at-rank", 0))
        asked = m.WEIGHTS in self.state.disputes
        weights = [zlib.crc32(options.get("weights", "").encode()), 0]
        if wrong_rank:
            weights.reverse()
        return {
            "checksums": tuple((p, found[p]) for p in inside),
            "audits": tuple((p, found[p]) for p in reported),
            "parts": tuple(
                [m.ParameterChecksum(m.WEIGHTS, rank, "weight", weights[rank]) for rank in (0, 1) if asked]
                + [
                    m.ParameterChecksum(p, rank, "weight", found[p] if rank == wrong_rank else p)
                    for p in sorted(self.state.disputes)
                    if p in (*inside, *reported)
                    for rank in (0, 1)
                ]
            ),
        }


def _spec(options: dict[str, str]) -> m.JobSpec:
    groups, redundancy = int(options["N"]), int(options["r"])
    placement = build_placement(groups, redundancy, options.get("kind", "independent"))  # type: ignore[arg-type]
    return m.JobSpec(
        num_groups=groups,
        pieces_per_shard=int(options["K"]),
        offsets=placement.offsets,
        granularity=options.get("granularity", "microbatch"),
        first_step=int(options.get("first", 0)),
        last_step=int(options.get("steps", 3)),
        min_groups=int(options.get("min", 1)),
        fingerprint="job",
        heartbeat_timeout_s=float(options.get("heartbeat", 5.0)),
        retry_limit=int(options.get("retries", 8)),
        audit_rate=float(options.get("audit", 0.0)),
        audit_seed=int(options.get("seed", 0)),
        save_every=int(options.get("save", 0)),
        emergency_saves=bool(options.get("emergency")),
        adoption=bool(options.get("adoption")),
        state_shards=int(options.get("shards", 0)),
        state_copies=int(options.get("copies", 0)),
    )


def _cross_the_wire(decision: m.Decision) -> None:
    """Every view reaches its group as it is."""
    for action in decision.actions:
        if isinstance(action, m.SendView):
            sent = protobuf_codec.fill(pb.View(), action.view).SerializeToString()
            assert protobuf_codec.read(pb.View.FromString(sent), View) == action.view, action.view


def _describe(action: m.Action) -> list[str]:
    if isinstance(action, m.SendView):
        v = action.view
        audited = [v.audits[k] if k < len(v.audits) else () for k in range(len(v.segments))]
        segments = " + ".join(map(_segment, v.segments, audited))
        reported = f" {_offered(v.offer)}" if v.offer else "" if v.is_member else " learner"
        reported += "".join(f" serves {_offered(offer)}" for offer in v.serves)
        delay = f" after {action.delay_s:g} s" if action.delay_s else ""
        leave = " leave" if v.leave else ""
        leave += f" disputed {list(v.disputed)}" if v.disputed else ""
        leave += "".join(f" adopts {shard}{'' if is_open else '?'}" for shard, is_open in v.adopts)
        leave += "".join(f" state {shard} {_kept_by(v, shard)}" for shard in sorted({h.shard for h in v.state_hosts}))
        leave += f" ask {v.ask.number}, for up to {v.ask.pieces}" if v.ask else ""
        standing = " ".join(map(str, v.standing))
        return [
            f"-> {v.group}: view e{v.epoch} committed {v.committed[0]}@{v.committed[1]} step {v.step}: {segments} "
            f"then [{standing}]{reported}{leave}{delay}{_save(v.save)}"
        ]
    if isinstance(action, m.SendAsk):
        return [f"-> {action.group}: ask {action.ask.number}, for up to {action.ask.pieces}, in step {action.step}"]
    if isinstance(action, m.SendCommit):
        reported = "".join(f" {group} audits {list(pieces)}" for group, pieces in action.audits)
        reported += "".join(f" {group} serves {_offered(offer)}" for group, offers in action.serves for offer in offers)
        leave = " leave" if action.leave else ""
        return [f"-> {list(action.groups)}: commit {action.step}@{action.epoch}{leave}{reported}{_save(action.save)}"]
    if isinstance(action, m.SendFenced):
        always = " for good" if action.lasting else ""
        return [f"-> {action.group} (incarnation {action.incarnation}): fenced{always}"]
    if isinstance(action, m.SendStop):
        return [f"-> {list(action.groups)}: stop, {action.outcome}"]
    return [f"-> {action.group}: the checkpoint of step {action.step} counts"]


def _offered(offer: Offer) -> str:
    donors = " ".join(str(group) for group, _ in offer.donors)
    return f"offer {offer.number} of step {offer.step} to {offer.learner[0]} by [{donors}]"


def _kept_by(view: View, shard: int) -> str:
    """The hosts of a state shard: '[0 1<0@3 2+ 3-]' where 0 counts, 1 gets the state after step 3 from 0, 2 is whole,
    3 has nothing and 4! cannot keep it."""
    words = {COUNTS: "", WHOLE: "+", NEW: "?", VOID: "-", UNABLE: "!"}
    hosts = [host for host in view.state_hosts if host.shard == shard]
    texts = [f"{h.group}<{h.donor[0]}@{h.step}" if h.donor else f"{h.group}{words[h.standing]}" for h in hosts]
    return f"[{' '.join(texts)}]"


def _save(order: int) -> str:
    return f" save {order}" if order else ""


def _links(group: int, options: dict[str, str]) -> tuple[m.Link, ...]:
    """The links in a failed vote: connections that ended, and silent links."""
    ended = [m.Link(int(g), group) for g in options.get("ended", "").split(",") if g]
    pairs = [pair.split(">") for pair in options.get("silent", "").split(",") if pair]
    return (*ended, *(m.Link(int(sender), int(receiver), True) for sender, receiver in pairs))


def _segment(pieces: tuple[int, ...], audited: tuple[int, ...]) -> str:
    """'[0 1]', or '[0 1 audits 5]'."""
    words = [*map(str, pieces), *(["audits", *map(str, audited)] if audited else [])]
    return f"[{' '.join(words)}]"


def run(text: str) -> str:
    """The scenario with the decisions below each command; comments and blank lines stay."""
    player = Player()
    out: list[str] = []
    for line in text.splitlines():
        if line.startswith(" "):
            continue
        out.append(line)
        if line and not line.startswith("#"):
            out += player.play(line)
    return "\n".join(out) + "\n"


if __name__ == "__main__":
    for path in sorted(FOLDER.glob("*.txt")):
        path.write_text(run(path.read_text()))
        sys.stdout.write(f"rewrote {path}\n")

"""Simulates checkpoint only, replication and published SPARe with SimGrid, without any code of this package.

    python3 benchmarks/simgrid_rules.py POLICY TRACE.csv N R STEPS SAVE_EVERY [OFFSETS]

An independent check of the simulator: it needs SimGrid's Python bindings (Debian python3-simgrid, or simgrid of PyPI),
reads the failure times (lines ``time_s,group``) and prints the total time in seconds. Without jitter; times are those
of the published simulation: 64 s a layer, N/100 s a reduction, 0.1 s to shrink, 60 s a save, 3600 s a restart. OFFSETS
is the placement, as in 0,1,3.
"""

import sys

from simgrid import Actor, Engine, NetZone, this_actor

LAYER, SHRINK, SAVE, RESTART = 64.0, 0.1, 60.0, 3600.0
SPEED = 1e9


class Job:
    """One actor; SimGrid keeps the time and executes the layers."""

    def __init__(self, policy, rings, groups, r, steps, every, offsets):
        self.policy, self.rings, self.groups, self.r = policy, rings, groups, r
        self.steps, self.every, self.offsets = steps, every, offsets
        self.reduce, self.at, self.found = groups / 100, 0, []
        self.restart_all()

    def restart_all(self):
        self.live, self.depth = set(range(self.groups)), 1
        self.stack = {g: [(g + o) % self.groups for o in self.offsets] for g in self.live}
        self.owner = {i: i for i in self.live}

    def now(self):
        return Engine.clock if not callable(Engine.clock) else Engine.get_clock()

    def due(self, until):
        found = []
        while self.at < len(self.rings) and self.rings[self.at][0] <= until:
            found.append(self.rings[self.at])
            self.at += 1
        return found

    def failed(self, until, most):
        hit = list(dict.fromkeys([g for g in self.found + [g for _, g in self.due(until)] if g in self.live]))
        self.found = hit[most:]
        self.live -= set(hit[:most])
        return hit[:most]

    def __call__(self):
        done = saved = 0
        while done < self.steps:
            if (self.spare_step if self.policy == "spare" else self.block_step)():
                done += 1
                if done % self.every == 0 and done < self.steps:
                    this_actor.sleep_for(SAVE)
                    saved = done
            else:
                self.restart()
                done = max(0, saved - 1)
        print(repr(self.now()))

    def restart(self):
        began = self.now()
        self.due(began)
        ready, self.found = dict.fromkeys(range(self.groups), began + RESTART), []
        while rings := self.due(max(ready.values())):
            for at, g in rings:
                if at <= ready[g]:
                    ready[g] = at + RESTART
                else:
                    self.found.append(g)
        this_actor.sleep_until(max(ready.values()))
        self.restart_all()

    def block_step(self):
        size, hit = (1 if self.policy == "checkpoint" else self.r), []
        for _ in range(size):
            hit += self.failed(self.now(), 1) if not hit else []
            if any(self.block_is_lost(g, size) for g in hit):
                return False
            this_actor.execute(LAYER * SPEED)
        late = [] if hit else self.failed(self.now() + self.reduce, 1)
        this_actor.sleep_for(self.reduce / 2 if late else self.reduce)
        return not any(self.block_is_lost(g, size) for g in late)

    def block_is_lost(self, g, size):
        first = g // size * size
        return not self.live & set(range(first, min(first + size, self.groups)))

    def spare_step(self):
        hit, layers = [], 0
        while layers < self.depth:
            if self.failed(self.now(), self.groups):
                this_actor.sleep_for(SHRINK)
                if not self.replan():
                    return False
            this_actor.execute(LAYER * SPEED)
            layers += 1
        while True:
            hit += self.failed(self.now() + self.reduce, self.groups)
            if not hit:
                this_actor.sleep_for(self.reduce)
                return True
            this_actor.sleep_for(self.reduce / 2 + SHRINK)
            tops = {i for g in self.live for i in self.stack[g][: self.depth]}
            if not self.replan():
                return False
            if len(tops) == self.groups:
                return True
            hit = self.failed(self.now(), self.groups)
            this_actor.execute(LAYER * SPEED)

    def replan(self):
        """Assign shards by Kuhn's augmenting paths from the present owners; S grows only when there is no matching."""
        self.owner = {i: g for i, g in self.owner.items() if g in self.live}
        hosts = {i: [(i - o) % self.groups for o in self.offsets] for i in range(self.groups)}
        if any(not set(hosts[i]) & self.live for i in hosts):
            return False
        self.depth = max(self.depth, -(-self.groups // len(self.live)))
        load = {g: [i for i, o in self.owner.items() if o == g] for g in self.live}
        for shard in sorted(set(range(self.groups)) - self.owner.keys()):
            while not self.augment(shard, hosts, load, set()):
                self.depth += 1
        for g in self.live:
            mine, order = set(load[g]), self.stack[g]
            for place in range(self.depth, len(order)):
                if order[place] in mine:
                    other = max(k for k in range(self.depth) if order[k] not in mine)
                    order[place], order[other] = order[other], order[place]
        return True

    def augment(self, shard, hosts, load, seen):
        live = [g for g in hosts[shard] if g in self.live]
        for g in sorted(live, key=lambda g: shard not in self.stack[g][: self.depth]):
            if len(load[g]) < self.depth:
                return self.give(shard, g, load)
        for g in live:
            for other in list(load[g]):
                if other not in seen:
                    seen.add(other)
                    if self.augment(other, hosts, load, seen):
                        load[g].remove(other)
                        return self.give(shard, g, load)
        return False

    def give(self, shard, g, load):
        self.owner[shard] = g
        load[g].append(shard)
        return True


def main():
    policy, trace, groups, r, steps, every = sys.argv[1:7]
    offsets = [int(o) for o in sys.argv[7].split(",")] if len(sys.argv) > 7 else [0]
    with open(trace) as file:
        rings = [(float(t), int(g)) for t, g in (line.split(",") for line in file if line[0].isdigit())]
    engine = Engine(["rules"])
    zone = NetZone.create_full_zone("machine")
    host = zone.create_host("job", f"{SPEED:.0f}f")
    zone.seal()
    job = Job(policy, rings, int(groups), int(r), int(steps), int(every), offsets)
    Actor.create("job", host, job.__call__)
    engine.run()


main()

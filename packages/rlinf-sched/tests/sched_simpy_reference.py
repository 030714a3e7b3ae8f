"""What a plan means, written plainly on SimPy with exact fractions: slow, and independent of the native event core.

SimPy keeps the clock. At each moment, after everything that ends then has ended, `settle` looks at every stage, turn
and sync in order and begins what may begin.
"""

from collections import defaultdict
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, cast

import simpy

NEVER = 1 << 30
LAST_OF_A_MOMENT: Any = 9  # behind SimPy's own priorities 0 and 1


def exact(number):
    """The fraction that a float stands for: 1/3, not the float next to it. Irrational ones move by less than 1e-11."""
    return Fraction(number).limit_denominator(1_000_000)


def _with_mean_one(costs):
    """What rounding took is put back, so that a whole batch takes its table's time to the last digit."""
    return [*costs[:-1], Fraction(len(costs)) - sum(costs[:-1])]


class Reference:
    """`spans`: {(stage, rank, kind, step, num_items, start, end)}; `step_ends`: [steps], fractions of seconds."""

    def __init__(self, problem, plan, num_steps=1):
        self.problem, self.plan, self.flow = problem, plan, problem.flow
        self.late = self.flow.max_staleness
        self.num_steps = max(num_steps, 12 * (self.late + 1)) if self.late else num_steps
        self.env = simpy.Environment(initial_time=cast(Any, Fraction(0)))
        self.spans, self.step_ends, self.released = [], [], 0
        self.is_due, self.syncing, self.synced = False, False, set()
        self.busy_devices, self.leased = set(), {}
        self.finished, self.arrivals = defaultdict(int), defaultdict(int)
        self.stages = [self.new_stage(stage) for stage in self.flow.stages]
        by_name = {s.name: s for s in self.stages}
        self.turns = [self.new_turn([by_name[name] for name in names]) for names in self.flow.turns()]
        self.turns.sort(key=lambda turn: turn.stages[0].plan.turn)
        for turn in self.turns:
            others = {d for other in self.turns if other is not turn for s in other.stages for d in s.plan.devices}
            offloads = any(s.plan.offload and s.plan.devices for s in turn.stages)
            turn.needs_lease = offloads or bool(turn.devices & others)
        self.edges = [
            SimpleNamespace(source=a, target=b, inner=a.turn is b.turn, back=a.turn is b.turn and a.place >= b.place)
            for a in self.stages
            for b in self.stages
            if set(a.stage.writes) & set(b.stage.reads)
        ]

    def run(self):
        for _ in range(min(self.late + 1, self.num_steps)):
            self.release()
        self.wake()
        self.env.run()
        assert len(self.step_ends) == self.num_steps, "stands still"
        return self

    # -- setting up ----------------------------------------------------------------------------------------------------

    def new_stage(self, stage):
        problem, plan = self.problem, self.plan.stage(stage.name)
        profile, count, n = problem.profile(stage.name), plan.num_ranks, problem.num_items
        span = max(1, len(plan.devices) // count) if plan.devices else 0
        how = next(choice for choice in profile.instances if choice.num_devices == span)
        size = min(plan.granularity or n, -(-n // count))
        if profile.batching != "continuous" and how.max_items:
            size = min(size, how.max_items)
        moved = how.resident_bytes(len(plan.devices)) / problem.cluster.links.host_bytes_per_s
        s = SimpleNamespace(
            name=stage.name,
            stage=stage,
            plan=plan,
            profile=profile,
            how=how,
            size=size,
            room=min(how.max_items or n, -(-n // count)),
            costs=_with_mean_one([exact(c) for c in profile.costs.typical(n)]),
            onload=exact(moved if how.onload_s is None else how.onload_s),
            offload=exact(moved if how.offload_s is None else how.offload_s),
            step_s=exact(how.step_s),
            leaves=plan.offload and bool(plan.devices),
        )
        s.ranks = []
        for r in range(count):
            if len(plan.devices) >= count:
                devices = plan.devices[r * span : (r + 1) * span]
            else:
                devices = (plan.devices[r * len(plan.devices) // count],) if plan.devices else ()
            s.ranks.append(
                SimpleNamespace(
                    s=s,
                    r=r,
                    devices=set(devices),
                    busy=False,
                    step=-1,
                    owes=False,
                    inside={},
                    version=0,
                    out=defaultdict(list),
                )
            )
        return s

    def new_turn(self, stages):
        names = {s.name for s in stages}
        turn = SimpleNamespace(stages=stages, state="away", moving=0, computing=0, forced=None)
        turn.devices = {d for s in stages for d in s.plan.devices}
        turn.rounds = max(s.profile.rounds for s in stages)
        turn.onload = max((s.onload for s in stages if s.leaves), default=Fraction(0))
        turn.offload = max((s.offload for s in stages if s.leaves), default=Fraction(0))

        def enters(s):
            others = [w for c in s.stage.reads for w in self.flow.writers(c) if w not in names]
            return bool(others) or any(c in self.flow.feeds for c in s.stage.reads)

        first = next((i for i, s in enumerate(stages) if enters(s)), 0)
        for i, s in enumerate(stages):
            s.turn, s.place = turn, (i - first) % len(stages)
            s.rounds = turn.rounds
        return turn

    def release(self):
        step = self.released
        self.released += 1
        for s in self.stages:
            for queue in self.queues(s):
                queue.left[step] = s.rounds * len(queue.members)
            if not self.inputs(s, first=True):
                for item in range(self.problem.num_items):
                    self.queue_of(s, item).new[step].append((0, item, 1))

    def queues(self, s):
        if not hasattr(s, "all_queues"):
            n, count = self.problem.num_items, len(s.ranks)
            groups = [range(r, n, count) for r in range(count)] if s.stage.dispatch == "key" else [range(n)]
            s.all_queues = [
                SimpleNamespace(
                    members=members, left={}, new=defaultdict(list), there=defaultdict(list), step=0, forced=False,
                    size=min(s.size, max(1, len(members))), ranks=[r] if s.stage.dispatch == "key" else range(count),
                )
                for r, members in enumerate(groups)
            ]  # fmt: skip
        return s.all_queues

    def queue_of(self, s, item):
        return self.queues(s)[item % len(s.ranks) if s.stage.dispatch == "key" else 0]

    def inputs(self, s, first):
        return [e for e in self.edges if e.target is s and (not e.back if first else e.inner)]

    # -- the clock -----------------------------------------------------------------------------------------------------

    def after(self, seconds, then):
        def process():
            yield self.env.timeout(seconds)
            then()
            self.wake()

        self.env.process(process())

    def wake(self):
        if not self.is_due:
            self.is_due = True
            event = self.env.event()
            event._ok, event._value = True, None
            event.callbacks.append(lambda _: self.settle())
            self.env.schedule(event, priority=LAST_OF_A_MOMENT)

    def note(self, s, rank, kind, step, num_items, start, end):
        self.spans.append((s.name, rank, kind, step, num_items, start, end))

    def settle(self):
        self.is_due = False
        while True:
            before = self.fingerprint()
            for s in self.stages:
                self.start(s)
            self.change_leases()
            self.unblock_cycles()
            self.end_steps()
            if self.fingerprint() == before:
                return

    def fingerprint(self):
        queues = tuple((q.step, q.forced, len(q.there[q.step])) for s in self.stages for q in self.queues(s))
        states = tuple((t.state, t.computing, t.moving) for t in self.turns)
        ranks = tuple((i.busy, i.owes, len(i.inside)) for s in self.stages for i in s.ranks)
        return queues, states, ranks, len(self.spans), self.released, sum(map(len, self.waiting_lists()))

    def waiting_lists(self):
        return [new for s in self.stages for q in self.queues(s) for new in q.new.values()]

    # -- stages --------------------------------------------------------------------------------------------------------

    def held(self, q):
        return len(q.there[q.step]) + len(q.new[q.step])

    def ready(self, s, q):
        there, left = self.held(q), q.left.get(q.step, 0)
        if not there:
            return False
        if there == left or q.forced:
            return True
        if s.plan.granularity == 0:
            return False
        return s.profile.batching == "continuous" or there >= q.size

    def has_work(self, turn):
        steps = [q.step for s in turn.stages for q in self.queues(s) if self.ready(s, q)]
        steps += [i.step for s in turn.stages for i in s.ranks if i.owes]
        return min(steps, default=NEVER)

    def start(self, s):
        for q in self.queues(s):
            while q.left.get(q.step) == 0:
                q.step += 1
            for step, new in q.new.items():
                q.there[step] += [(item, r) for _, item, r in sorted(new)]
                new.clear()
        if s.turn.needs_lease and s.turn.state != "held":
            return
        for i in s.ranks:
            if i.owes and not i.busy and not i.devices & self.busy_devices:
                i.owes = False
                self.occupy(i)
                self.note(s, i.r, "step", i.step, 0, self.env.now, self.env.now + s.step_s)
                self.after(s.step_s, lambda i=i: self.end_step(i))
        if s.profile.batching == "continuous":
            self.run_engines(s)
            return
        for q in self.queues(s):
            for i in (s.ranks[r] for r in q.ranks):
                if not i.busy and not i.owes and self.ready(s, q) and not i.devices & self.busy_devices:
                    self.hand_over(s, q, i)

    def occupy(self, i):
        i.busy = True
        i.s.turn.computing += 1
        self.busy_devices |= i.devices

    def free(self, i):
        i.busy = False
        i.s.turn.computing -= 1
        self.busy_devices -= i.devices

    def take(self, s, q, i, count):
        items, q.there[q.step] = q.there[q.step][:count], q.there[q.step][count:]
        q.left[q.step] -= count
        q.forced = False
        i.step = q.step
        if q.left[q.step] == 0:
            if s.step_s:
                for rank in (s.ranks[r] for r in q.ranks if s.ranks[r].step == q.step):
                    rank.owes = True
                    self.finished[s.name, q.step] -= 1  # a debt of one item until it is paid
            q.step += 1
        return items

    def hand_over(self, s, q, i):
        items = self.take(s, q, i, min(q.size, len(q.there[q.step])))
        costs = [s.costs[item] for item, _ in items]
        scale = sum(costs) / len(costs) if s.profile.batching == "sum" else max(costs)
        seconds = exact(s.how.seconds(len(items))) * scale
        self.occupy(i)
        self.note(s, i.r, "compute", i.step, len(items), self.env.now, self.env.now + seconds)
        self.after(seconds, lambda: self.end_hand_over(i, items))

    def end_hand_over(self, i, items):
        self.free(i)
        self.hand_on(i, items, i.step)

    def end_step(self, i):
        self.free(i)
        self.finished[i.s.name, i.step] += 1

    def run_engines(self, s):
        touched = [i for i in s.ranks if i.busy and not i.owes and not i.inside]
        for q in self.queues(s):
            while self.ready(s, q):
                can = [
                    i
                    for i in (s.ranks[r] for r in q.ranks)
                    if not i.owes
                    and len(i.inside) < s.room
                    and (i.is_engine if i.busy else not i.devices & self.busy_devices)
                ]
                if not can:
                    break
                i = min(can, key=lambda i: len(i.inside))
                step_before = i.step
                ((item, r),) = self.take(s, q, i, 1)
                if not i.busy:
                    self.occupy(i)
                    i.is_engine, i.began, i.served, i.at = True, self.env.now, 0, self.env.now
                elif i.step != step_before:  # it goes on beside what is left of the step before
                    self.note(s, i.r, "compute", step_before, i.served, i.began, self.env.now)
                    i.began, i.served = self.env.now, 0
                self.progress(i)
                i.served += 1
                i.inside[i.step, item, r] = s.costs[item]
                touched.append(i)
        for i in s.ranks:
            if i.busy and getattr(i, "is_engine", False):
                if i.inside:
                    if i in touched or i.version < 0:
                        self.plan_leaving(i)
                else:
                    i.is_engine = False
                    self.free(i)
                    self.note(s, i.r, "compute", i.step, i.served, i.began, self.env.now)
                for step in sorted(i.out.keys() - {step for step, _, _ in i.inside}):
                    self.hand_on(i, i.out.pop(step), step)

    def progress(self, i):
        if i.inside:
            done = (self.env.now - i.at) / exact(i.s.how.seconds(len(i.inside)))
            i.inside = {entry: work - done for entry, work in i.inside.items()}
        i.at = self.env.now

    def plan_leaving(self, i):
        i.version = version = abs(i.version) + 1
        seconds = min(i.inside.values()) * exact(i.s.how.seconds(len(i.inside)))

        def leave():
            if i.version != version:
                return
            self.progress(i)
            gone = sorted(entry for entry, work in i.inside.items() if work == 0)
            i.inside = {entry: work for entry, work in i.inside.items() if work > 0}
            for step, item, r in gone:
                i.out[step].append((item, r))
            i.version = -version  # to be planned anew
            size = self.queue_of_rank(i).size
            for step, out in sorted(i.out.items()):
                while len(out) >= size:
                    part, out = out[:size], out[size:]
                    self.hand_on(i, part, step)
                i.out[step] = out

        self.after(seconds, leave)

    def queue_of_rank(self, i):
        return self.queues(i.s)[i.r if i.s.stage.dispatch == "key" else 0]

    # -- items ---------------------------------------------------------------------------------------------------------

    def hand_on(self, i, items, step):
        s = i.s
        self.finished[s.name, step] += len(items)
        for edge in (e for e in self.edges if e.source is s):
            if edge.inner:
                going = [(item, r) for item, r in items if not (edge.back and r == s.rounds)]
            else:
                going = [(item, r) for item, r in items if r == s.rounds]
            if not going:
                continue
            seconds = self.transfer_s(edge, len(going))
            if not seconds:
                self.arrive(edge, i.r, step, going)
                continue
            s.turn.moving += edge.inner
            self.note(s, i.r, "transfer", step, len(going), self.env.now, self.env.now + seconds)

            def land(edge=edge, going=going):
                edge.source.turn.moving -= edge.inner
                self.arrive(edge, i.r, step, going)

            self.after(seconds, land)

    def transfer_s(self, edge, count):
        here, there = set(edge.source.plan.devices), set(edge.target.plan.devices)
        if here & there or not here | there:
            return 0
        cluster = self.problem.cluster
        one_node = len({cluster.devices[d].node for d in here | there}) == 1
        rate = cluster.links.node_bytes_per_s if one_node else cluster.links.network_bytes_per_s
        channels = set(edge.source.stage.writes) & set(edge.target.stage.reads)
        size = sum(self.flow.item_bytes.get(channel, 0) for channel in channels)
        return exact(cluster.links.latency_s) + Fraction(count * size) / Fraction(rate)

    def arrive(self, edge, rank, step, items):
        t = edge.target
        for item, r in items:
            r = (r + edge.back) if edge.inner else 1
            self.arrivals[t.name, step, item, r] += 1
            self.arrivals[id(t.turn), step] += not edge.inner
            inputs = self.inputs(t, first=r == 1)
            if self.arrivals[t.name, step, item, r] == len(inputs):
                self.queue_of(t, item).new[step].append((rank if len(inputs) == 1 else 0, item, r))

    # -- turns, syncs, steps -------------------------------------------------------------------------------------------

    def change_leases(self):
        for turn in self.turns:
            idle = not turn.computing and not turn.moving and self.has_work(turn) == NEVER
            if turn.state == "held" and idle:
                self.move(turn, "offload", turn.offload, lambda turn=turn: self.leased.pop(id(turn), None), "away")
        waiting = [t for t in self.turns if t.needs_lease and t.state == "away" and self.has_work(t) < NEVER]
        reserved = set().union(*self.leased.values()) if self.leased else set()
        for turn in sorted(waiting, key=self.has_work):
            if not turn.devices & reserved:
                self.leased[id(turn)] = turn.devices
                self.move(turn, "onload", turn.onload, lambda: None, "held")
            reserved |= turn.devices

    def move(self, turn, kind, seconds, then, state):
        for s in turn.stages:
            for i in s.ranks if s.leaves else []:
                self.note(s, i.r, kind, None, 0, self.env.now, self.env.now + getattr(s, kind))

        def done():
            turn.state = state
            then()

        turn.state = kind
        if seconds:
            self.after(seconds, done)
        else:
            done()

    def unblock_cycles(self):
        for turn in self.turns:
            inner = any(e.inner and e.source.turn is turn for e in self.edges)
            if not inner or turn.computing or turn.moving or turn.state in ("onload", "offload"):
                continue
            expected = sum(e.target.turn is turn and not e.inner for e in self.edges) * self.problem.num_items
            if self.has_work(turn) == NEVER:
                for q in (q for s in turn.stages for q in self.queues(s)):
                    if self.held(q) and self.arrivals[id(turn), q.step] == expected:
                        q.forced = True
                        break

    def ended(self, s, step):
        return self.finished[s.name, step] == self.problem.num_items * s.rounds

    def end_steps(self):
        for step in range(len(self.step_ends), self.released):
            for edge in self.flow.weight_edges:
                sources = [s for s in self.stages if s.stage.worker == edge.source and s.stage.trains]
                away = all(not s.turn.offload or s.turn.state == "away" for s in sources)
                if self.syncing or (step, edge) in self.synced or not away:
                    continue
                if all(self.ended(s, step) for s in sources):
                    self.sync(edge, step)
        while len(self.step_ends) < self.released:
            step = len(self.step_ends)
            if not all(self.ended(s, step) for s in self.stages):
                return
            if not all((step, edge) in self.synced for edge in self.flow.weight_edges):
                return
            if not self.late and any(turn.state != "away" for turn in self.turns):
                return
            self.step_ends.append(self.env.now)
            if self.released < self.num_steps:
                self.release()

    def sync(self, edge, step):
        self.syncing = True
        cluster = self.problem.cluster
        groups = [self.flow.workers[group] for group in (edge.source, edge.target)]
        size = max(self.problem.profile(name).weights_bytes for names in groups for name in names)
        here, there = (set(self.plan.stage(names[0]).devices) for names in groups)
        one_node = len({cluster.devices[d].node for d in here | there}) <= 1 or here & there
        rate = cluster.links.node_bytes_per_s if one_node else cluster.links.network_bytes_per_s
        span = max(1, len(there) // self.plan.stage(groups[1][0]).num_ranks)
        seconds = exact(cluster.links.latency_s) + Fraction(size) / (Fraction(rate) * span)

        def done():
            self.syncing = False
            self.synced.add((step, edge))

        self.after(seconds, done)

"""Moves of workers to other devices against a restart: what passes between two training steps.

    python -m benchmarks.throughput.moves

One sorting job trains under changing plans; its processes are forked, as those of a run on CPU slots are. What is timed
is from the end of a step to the moment at which the next one can begin:

restart             all processes end, others start, the trainer loads a checkpoint
move, ended first   rollout and actor end, and start in their new places; the trainer's state passes through memory
move                they have started in their new places before the step ended
rollout moves       the same with a plan under which the actor stays where it is

The pause of a group that stays is from the end of its last computation in a step to its first one in the next, less the
median of the same between steps without a move. Where the samples of the step come from processes that compute for the
first time, it includes what these take longer.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import compare, interleave, report

from rlinf.config.load import load_config
from rlinf.config.overrides import parse_overrides
from rlinf.jobs.reasoning.job import ReasoningJob
from rlinf.loop.moving import begin_move, passed_state
from rlinf.machine import this_machine
from rlinf.planning.plans import RunPlans, moved_stages, plans_by_rule
from rlinf.planning.side_by_side import MemoryForBoth
from rlinf.processes import fork_server
from rlinf.processes.env_vars import worker_env_vars
from rlinf_sched import Mode, Plan
from rlinf_workers import COMPUTE_SPAN, Executor, FlowRun, LocalLauncher, StepContext

SETTINGS = (
    "--cluster.num_devices=2",
    "--cluster.oversubscribe=true",
    "--sft_warm_up=null",
    "--reward={kind: length, free: 0, limit: 10}",  # gives every group a gradient from the first step on
    "--rollout.num_prompts=16",
)
RESTART, ENDED_FIRST, MOVE, ROLLOUT_MOVES = "restart", "move, ended first", "move", "rollout moves"
NUM_STEPS = 3
"""Steps before each change of the plan."""


class MovingJob:
    """The sorting job, whose plan changes between steps."""

    def __init__(self, folder: Path) -> None:
        self._config: Any = load_config("sort-grpo", parse_overrides([*SETTINGS]))
        self._forks = fork_server.start(self._config)
        self._folder = folder
        self._job = ReasoningJob(self._config, this_machine())
        self._flows = self._job.build(folder)
        self._job.write_inputs(folder)
        self.together, self.apart = self._plans("collocated"), self._plans("disaggregated")
        self.two_rollouts = self._plans("disaggregated", {"rollout": 2})
        self._present = self.together
        self._num_steps = 0
        self._last_run: FlowRun | None = None
        self.usual_s: dict[str, list[float]] = defaultdict(list)
        """Worker group -> seconds from its last computation of a step to the first one of the next."""
        self.pauses_s: dict[str, list[float]] = defaultdict(list)
        """Kind of change -> the same for the groups that stay."""
        self.parts_s: dict[str, list[float]] = defaultdict(list)
        """Part of a change -> seconds."""
        self._executor = self._start()
        self._executor.sync_weights()
        self._save(self._checkpoint)

    @property
    def _checkpoint(self) -> Path:
        return self._folder / "checkpoint"

    def _plans(self, mode: Mode, num_ranks: Mapping[str, int] | None = None) -> RunPlans:
        plan = self._config.plan.model_copy(update={"num_ranks": dict(num_ranks or {})})
        job = ReasoningJob(self._config.model_copy(update={"plan": plan}), self._job.machine)
        return plans_by_rule(job, self._flows, mode)

    def _start(self) -> Executor:
        launcher = LocalLauncher(forks=self._forks)
        env_vars = worker_env_vars(self._config.cluster)
        executor = Executor(cluster=self._present.cluster, env_vars=env_vars, launcher=launcher)
        for flow in self._flows:
            executor.start(flow, self._present.plans[flow.name])
        return executor

    def _save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._executor.group("actor").call("begin_checkpoint", str(folder))
        self._executor.group("actor").call("end_checkpoint")

    def close(self) -> None:
        self._executor.shutdown()

    # -- steps -----------------------------------------------------------------------------------------------------

    def _step(self, gaps: Callable[[str, float], None]) -> None:
        """Trains a step; calls `gaps` with each group and the seconds since its last computation."""
        feeds = self._job.feeds(self._num_steps)
        num_items = max(map(len, feeds.values()))
        context = StepContext(step=self._num_steps, phase="train", seed=0, num_items=num_items)
        self._executor.begin(self._flows.train, context=context, feeds=feeds)
        before, self._last_run = self._last_run, self._executor.finish()
        self._num_steps += 1
        if before is not None:
            begins, ends = _times(self._last_run, min), _times(before, max)
            for group in begins.keys() & ends.keys():
                gaps(group, begins[group] - ends[group])

    def _steps(self) -> None:
        self._last_run = None
        for _ in range(NUM_STEPS):
            self._step(lambda group, seconds: self.usual_s[group].append(seconds))

    # -- changes ---------------------------------------------------------------------------------------------------

    @property
    def _other(self) -> RunPlans:
        return self.apart if self._present is self.together else self.together

    def restart(self, _: int) -> float:
        """Seconds of a change by new processes."""
        planned = self._other
        self._steps()
        started_s = time.perf_counter()
        self._save(self._checkpoint)
        self._executor.shutdown()
        self._present = planned
        self._executor = self._start()
        self._executor.group("actor").call("load_checkpoint", str(self._checkpoint))
        self._executor.sync_weights()
        return time.perf_counter() - started_s

    def move(self, kind: str, _: int, *, in_advance: bool) -> float:
        """Seconds of a move of rollout and actor."""
        return self._move(kind, self._other, in_advance=in_advance)

    def move_rollout(self, _: int) -> float:
        """Seconds of a move of the rollout alone."""
        if self._present is self.together:
            self._move("", self.apart, in_advance=True)
        seconds = self._move(ROLLOUT_MOVES, self.two_rollouts, in_advance=True)
        self._move("", self.apart, in_advance=True)
        return seconds

    def _move(self, kind: str, planned: RunPlans, *, in_advance: bool) -> float:
        """The move that the training loop makes."""
        memory = MemoryForBoth(is_enough=in_advance, text="")
        decided_s = time.perf_counter()
        upcoming = begin_move(self._job, self._executor, planned, memory, self._checkpoint)
        while not upcoming.is_ready(self._executor):
            time.sleep(0.01)
        ready_s = time.perf_counter() - decided_s
        self._steps()
        with ExitStack() as passing:
            times = [time.perf_counter()]
            state = None
            if "actor" in moved_stages(self._plan_of(self._present), self._plan_of(planned)):
                state = passing.enter_context(passed_state(self._executor, self._job.trainers, self._checkpoint))
                assert state is not None, "shared memory has room"
            times.append(time.perf_counter())
            moved = self._executor.move(planned.plans)
            times.append(time.perf_counter())
            if state is not None:
                self._executor.group("actor").call("load_checkpoint", str(state))
            times.append(time.perf_counter())
            self._executor.sync_weights()
            times.append(time.perf_counter())
        self._present = planned
        self._step(partial(self._stayed, kind, moved))
        if kind and state is not None:
            names = ("save the state", "replace processes and channels", "load the state", "weight syncs")
            for name, begun_s, ended_s in zip(names, times[:-1], times[1:], strict=True):
                self.parts_s[f"{kind}: {name}"].append(ended_s - begun_s)
        elif kind:
            self.parts_s[f"{kind}: replace processes and channels"].append(times[2] - times[1])
            self.parts_s[f"{kind}: weight syncs"].append(times[4] - times[3])
        if kind and in_advance:
            self.parts_s[f"{kind}: start in advance"].append(ready_s)
        return times[-1] - times[0]

    def _stayed(self, kind: str, moved: set[str], group: str, seconds: float) -> None:
        if kind and group not in moved:
            self.pauses_s[f"{kind}: {group}"].append(seconds - statistics.median(self.usual_s[group]))

    def _plan_of(self, planned: RunPlans) -> Plan:
        return planned.plans[self._flows.train.name]


def _times(run: FlowRun, which: Callable[[list[float]], float]) -> dict[str, float]:
    """Worker group -> the first begin (min) or the last end (max) of its computations, seconds."""
    times: dict[str, list[float]] = defaultdict(list)
    for span in run.spans:
        if span.category == COMPUTE_SPAN:
            group, begin_s = span.worker.partition("/")[0], span.start_ns / 1e9
            times[group].append(begin_s if which is min else begin_s + span.duration_s)
    return {group: which(seconds) for group, seconds in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=1)
    options = parser.parse_args()
    job = MovingJob(Path.cwd() / "runs" / "moves-benchmark")
    sides = {
        RESTART: job.restart,
        ENDED_FIRST: partial(job.move, ENDED_FIRST, in_advance=False),
        MOVE: partial(job.move, MOVE, in_advance=True),
        ROLLOUT_MOVES: job.move_rollout,
    }
    try:
        samples_s = interleave(sides, num_warmup=options.warmup, num_rounds=options.rounds)
    finally:
        job.close()
    report(
        "moves",
        settings={"recipe": "sort-grpo", "overrides": list(SETTINGS), "rounds": options.rounds},
        samples_s=samples_s,
        comparisons=[compare(samples_s, side, RESTART) for side in (ENDED_FIRST, MOVE, ROLLOUT_MOVES)],
        findings={
            "pause_of_groups_that_stay_s": {name: _summary(pauses) for name, pauses in sorted(job.pauses_s.items())},
            "parts_s": {name: _summary(parts) for name, parts in job.parts_s.items()},
        },
    )


def _summary(seconds: list[float]) -> dict[str, float]:
    return {"median": statistics.median(seconds), "least": min(seconds), "most": max(seconds)}


if __name__ == "__main__":
    main()

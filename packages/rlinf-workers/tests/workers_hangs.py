"""Runs of small flows that hang, and what is explained of them."""

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from rlinf_sched import Cluster, Mode, plan_for_mode
from rlinf_workers import Executor, Flow, Reader, StepContext, Worker, Writer
from rlinf_workers.explaining.explanation import RunExplanation, explain
from rlinf_workers.explaining.graph import SETTLED_S, Cause
from rlinf_workers.explaining.text import explanation_text
from rlinf_workers.testing.toy_flow import Number

CLUSTER = Cluster.cpu_slots(2)
FOUND_S = 240.0
"""For processes to start and the hang to be explained; far more than it takes on a machine that is not busy."""
NUMBERS = [Number(index=i, value=float(i)) for i in range(10)]


class Taker(Worker):
    """Takes what comes."""

    def take(self, numbers: Reader[Number]) -> None:
        for _ in numbers:
            pass

    def never_takes(self, numbers: Reader[Number]) -> None:
        time.sleep(3600)

    def answer(self, numbers: Reader[Number], out: Writer[Number]) -> None:
        for chunk in numbers:
            out.put_many([(item.index, item) for item in chunk])


@contextmanager
def running(
    tmp_path,
    flow: Flow,
    *,
    mode: Mode = "disaggregated",
    items: Sequence[Any] = NUMBERS,
    weight_sync: str = "auto",
    before: Callable[[Executor], object] = lambda executor: None,
    **choices,
) -> Iterator[Executor]:
    """The flow's run hangs inside the block.

    Args:
        items: fed to each of its feeds.
        before: called once all is there, and the weights have been synced.
    """
    graph = flow.graph()
    plan = plan_for_mode(graph, CLUSTER, mode, **choices)
    context = StepContext(step=4, phase="train", seed=0, num_items=len(items))
    feeds = dict.fromkeys(graph.feeds, items)
    with ThreadPoolExecutor(1) as thread:
        settings = {"log_folder": tmp_path, "env_vars": {"OMP_NUM_THREADS": "1"}, "weight_sync": weight_sync}
        with Executor(cluster=CLUSTER, **settings) as executor:
            executor.start(flow, plan)
            if graph.weight_edges:
                executor.sync_weights()
            before(executor)
            run = thread.submit(executor.run, flow, context=context, feeds=feeds, timeout_s=3600)
            try:
                yield executor
                assert not run.done(), run.exception()
            finally:
                for record in executor.snapshot().processes[1:]:
                    os.kill(record.pid, signal.SIGCONT)
        assert run.exception() is not None


def explained(
    executor: Executor, *root_cause: str, cause: Cause = "busy", inside: str = "", asleep: bool = False
) -> RunExplanation:
    """Waits until the first root cause is made of these nodes, is inside that function, and no wait is too young; and
    until its process sleeps, which it may not yet do on a busy machine."""
    deadline = time.monotonic() + FOUND_S
    while True:
        explanation = explain(executor.snapshot())
        first = next(iter(explanation.graph.root_causes), None)
        if first and (first.nodes, first.cause) == (root_cause, cause):
            is_settled = explanation.snapshot.taken_s - explanation.snapshot.began_s > SETTLED_S
            is_whole = first.num_waiting > 0 or cause not in ("busy", "stopped")
            if (
                is_settled
                and is_whole
                and (not inside or inside in functions(explanation, explanation.processes_of(first)[0]))
                and (not asleep or _sleeps(explanation, explanation.processes_of(first)[0]))
            ):
                return explanation
        assert time.monotonic() < deadline, f"no {root_cause}:\n{explanation_text(explanation)}"


def _sleeps(explanation: RunExplanation, process: str) -> bool:
    look = explanation.looks.get(process)
    return look is not None and look.state.condition == "sleeping" and not look.state.computes


def functions(explanation: RunExplanation, process: str) -> set[str]:
    look = explanation.looks.get(process)
    threads = look.stacks.threads if look and look.stacks else ()
    return {frame.name for thread in threads for frame in thread.frames}

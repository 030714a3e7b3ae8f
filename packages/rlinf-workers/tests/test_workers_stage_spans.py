"""The spans of a stage that takes items while it computes and hands some on before the others are done, or waits for
other ranks."""

import threading
import time
from types import SimpleNamespace
from typing import Any

from rlinf_workers.execution.stage_runner import StageRunner
from rlinf_workers.launchers.base import Identity
from rlinf_workers.spans import WaitTable


def computing_runner() -> StageRunner:
    identity = Identity(role="rollout", rank=0, num_ranks=1, devices=(), rendezvous="")
    host: Any = SimpleNamespace(
        worker=None, identity=identity, body_lock=threading.Lock(), waits=WaitTable("rollout/0")
    )
    call: Any = SimpleNamespace(stage="rollout", context=None)
    runner = StageRunner(host, call)
    runner._inside = True
    return runner


def test_items_are_counted_where_they_are_handed_on():
    runner = computing_runner()
    runner.begin_chunk(1)
    runner.add_to_chunk(2)
    runner.add_to_chunk(3)
    with runner.hands_on([11, 12]):
        runner.end_chunk()  # a put that waits for room asks for it
    runner.add_to_chunk(1)
    with runner.hands_on([13]):
        pass
    runner.end_chunk()
    assert [span.num_items for span in runner._spans] == [2, 1, 4]
    assert [span.began_ns for span in runner._spans] == [(11, 12), (13,), ()]
    ends = [span.start_ns + span.duration_ns for span in runner._spans]
    assert all(end <= span.start_ns for end, span in zip(ends, runner._spans[1:], strict=False))


def test_a_stage_that_does_not_compute_begins_with_what_it_takes():
    runner = computing_runner()
    with runner.hands_on([13]):
        pass
    assert runner._spans == []
    runner.add_to_chunk(2)
    runner.end_chunk()
    assert [span.num_items for span in runner._spans] == [2]


def test_a_span_says_how_much_of_it_were_collectives():
    runner = computing_runner()
    for kind in ("collective", "items", "collective"):
        with runner._host.waits.waiting("collective"):  # before the clock runs
            time.sleep(0.001)
        runner.begin_chunk(1)
        with runner._host.waits.waiting(kind):
            time.sleep(0.02)
        runner.end_chunk()
    first, other, last = runner._spans
    assert other.collective_ns == 0
    assert all(20_000_000 <= span.collective_ns <= span.duration_ns for span in (first, last))

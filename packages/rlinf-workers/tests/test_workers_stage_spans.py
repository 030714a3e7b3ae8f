"""The spans of a stage that takes items while it computes and hands some on before the others are done."""

import threading
from types import SimpleNamespace
from typing import Any

from rlinf_workers.execution.stage_runner import StageRunner
from rlinf_workers.launcher.base import Identity


def computing_runner() -> StageRunner:
    identity = Identity(role="rollout", rank=0, num_ranks=1, devices=(), rendezvous="")
    host: Any = SimpleNamespace(worker=None, identity=identity, body_lock=threading.Lock())
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

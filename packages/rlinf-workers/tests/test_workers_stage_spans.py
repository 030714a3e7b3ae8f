"""The spans of a stage that takes items while it computes and hands some on before the others are done, or waits for
other ranks."""

import threading
import time
from types import SimpleNamespace
from typing import Any

from rlinf_workers.execution.running_stage import RunningStage
from rlinf_workers.launchers.base import Identity
from rlinf_workers.spans import WaitTable


def computing_stage() -> RunningStage:
    identity = Identity(role="rollout", rank=0, num_ranks=1, devices=(), rendezvous="")
    host: Any = SimpleNamespace(
        worker=None, profile=None, identity=identity, body_lock=threading.Lock(), waits=WaitTable("rollout/0")
    )
    call: Any = SimpleNamespace(stage="rollout", context=None, ahead=False)
    stage = RunningStage(host, call)
    stage.is_inside = True
    return stage


def test_items_are_counted_where_they_are_handed_on():
    stage = computing_stage()
    stage.begin_chunk(1)
    stage.add_to_chunk(2)
    stage.add_to_chunk(3)
    with stage.hands_on([11, 12]):
        stage.end_chunk()  # a put that waits for room asks for it
    stage.add_to_chunk(1)
    with stage.hands_on([13]):
        pass
    stage.end_chunk()
    assert [span.num_items for span in stage.spans] == [2, 1, 4]
    assert [span.began_ns for span in stage.spans] == [(11, 12), (13,), ()]
    ends = [span.start_ns + span.duration_ns for span in stage.spans]
    assert all(end <= span.start_ns for end, span in zip(ends, stage.spans[1:], strict=False))


def test_an_interruption_is_no_computing_and_the_items_count_behind_it():
    stage = computing_stage()
    stage.begin_chunk(3)
    with stage.interrupted():
        assert stage.chunk is None
        time.sleep(0.002)
    stage.end_chunk()
    assert [span.num_items for span in stage.spans] == [0, 3]
    assert stage.spans[1].start_ns - stage.spans[0].start_ns - stage.spans[0].duration_ns >= 2_000_000


def test_a_stage_that_does_not_compute_begins_with_what_it_takes():
    stage = computing_stage()
    with stage.hands_on([13]):
        pass
    assert stage.spans == []
    stage.add_to_chunk(2)
    stage.end_chunk()
    assert [span.num_items for span in stage.spans] == [2]


def test_a_span_says_how_much_of_it_were_collectives():
    stage = computing_stage()
    for kind in ("collective", "items", "collective"):
        with stage.host.waits.waiting("collective"):  # before the clock runs
            time.sleep(0.001)
        stage.begin_chunk(1)
        with stage.host.waits.waiting(kind):
            time.sleep(0.02)
        stage.end_chunk()
    first, other, last = stage.spans
    assert other.collective_ns == 0
    assert all(20_000_000 <= span.collective_ns <= span.duration_ns for span in (first, last))

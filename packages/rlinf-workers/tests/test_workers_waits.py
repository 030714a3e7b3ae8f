"""What the threads of a worker say that they wait for."""

import os
import threading

from rlinf_workers.explaining.processes import started_ticks
from rlinf_workers.launchers.base import OwnProcess
from rlinf_workers.spans import WaitTable


def kinds(table: WaitTable) -> list[tuple[str, str]]:
    return [(wait.stage, wait.kind) for wait in table.current()]


def test_a_wait_lasts_as_long_as_its_block_and_the_inner_one_hides_the_outer():
    table = WaitTable("actor/1")
    with table.in_stage("actor"), table.waiting("items", "samples"):
        (outer,) = table.current()
        assert (outer.waiter, outer.stage, outer.target) == ("actor/1", "actor", "channel samples")
        with table.waiting("first rank"):
            assert kinds(table) == [("actor", "first rank")]
        assert table.current() == [outer]
    assert table.current() == []
    with table.waiting("service", "echo"):
        assert kinds(table) == [("", "service")], "the stage has ended"


def test_each_thread_waits_for_its_own():
    table, entered, leave = WaitTable("env/0"), threading.Event(), threading.Event()

    def wait() -> None:
        with table.in_stage("act"), table.waiting("other stage"):
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=wait)
    thread.start()
    entered.wait(60)
    with table.in_stage("step"), table.waiting("lease", number=3) as own:
        assert own.target == "lease of turn 3"
        assert sorted(kinds(table)) == [("act", "other stage"), ("step", "lease")]
    leave.set()
    thread.join()
    assert table.current() == []


def test_a_wait_for_own_processes_is_told_with_those_that_owe_an_answer_at_the_time():
    table, pids = WaitTable("env/0"), []
    with table.waiting("simulator", processes=lambda: pids):
        assert table.current() == [], "without processes the thread computes by itself"
        pids.append(os.getpid())
        (wait,) = table.current()
        own = OwnProcess(pid=os.getpid(), started_ticks=started_ticks(os.getpid()))
        assert (wait.processes, wait.target) == ((own,), "its simulators")


def test_an_engine_that_cannot_say_its_processes_ends_no_beat():
    def fails() -> list[int]:
        raise RuntimeError("the engine has ended")

    table = WaitTable("rollout/0")
    with table.waiting("engine", processes=fails):
        assert table.current() == []

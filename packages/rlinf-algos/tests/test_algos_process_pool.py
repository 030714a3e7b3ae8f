"""The pool of checking processes: order, limits, crashes, and that nothing is left behind."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from rlinf_algos import AlgosError, RewardError
from rlinf_algos.rewards.process_pool import ProcessPool

CHECKER = """
import os, signal, time

def check(what, argument=""):
    if what == "spin":
        while True:
            pass
    if what == "c loop":
        return ["right", str(len(str(7 ** 10 ** 9)))]
    if what == "too much":
        held = bytearray(1 << 40)
    if what == "memory":
        held = []
        while True:
            held.append(bytearray(16 << 20))
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "exit":
        os._exit(3)
    if what == "die once":
        if not os.path.exists(argument):
            open(argument, "w").close()
            os._exit(3)
    if what == "kill keeper":
        with open(argument, "a") as file:
            print(os.getpid(), file=file)
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
    if what == "raise":
        raise ZeroDivisionError("oh")
    if what == "pid":
        return ["right", str(os.getpid())]
    if what == "hang":
        os.mkdir(argument)
        time.sleep(1000)
    if what == "sleep":
        time.sleep(float(argument))
    return ["right", f"{what} {argument}"]
"""


@pytest.fixture
def checker(tmp_path) -> Path:
    path = tmp_path / "checker.py"
    path.write_text(CHECKER)
    return path


@pytest.fixture
def pool(checker):
    with ProcessPool(checker, num_processes=2, time_limit_s=0.5, wall_limit_s=60, memory_limit_bytes=256 << 20) as pool:
        yield pool


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def gone(pids, limit_s=20.0) -> bool:
    pids = list(pids)
    deadline = time.monotonic() + limit_s
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(is_alive, pids))


def test_results_come_in_order_whatever_happens_to_some(pool, tmp_path):
    items: list[tuple[str, ...]] = [("echo", str(i)) for i in range(40)]
    items[3], items[7], items[11], items[13] = ("spin",), ("die",), ("too much",), ("raise",)
    items[17] = ("die once", str(tmp_path / "marker"))
    results = pool.run(items)
    outcomes = dict(enumerate(outcome for outcome, _ in results))
    assert {i: outcomes.pop(i) for i in (3, 7, 11, 13)} == {3: "timeout", 7: "crashed", 11: "memory", 13: "crashed"}
    assert set(outcomes.values()) == {"right"}, "one that died once was tried again"
    assert results[7][1] == "ended by SIGKILL, twice"
    assert results[13][1] == "ZeroDivisionError: oh"
    assert [detail for _, detail in results[20:]] == [f"echo {i}" for i in range(20, 40)]


def test_memory_that_grows_is_seen(checker):
    # Much CPU time: a machine that is short of memory spends it on finding pages.
    with ProcessPool(checker, num_processes=1, time_limit_s=60, wall_limit_s=120, memory_limit_bytes=256 << 20) as pool:
        assert pool.run([("memory",), ("echo", "a")])[0][0] == "memory"


def test_a_loop_in_c_is_ended_too(pool):
    assert pool.run([("c loop",), ("echo", "a")]) == [
        ("timeout", "more than 0.5 s of CPU time"),
        ("right", "echo a"),
    ]


def test_a_check_that_sleeps_ends_by_the_wall_clock(checker):
    with ProcessPool(checker, num_processes=1, time_limit_s=0.3, wall_limit_s=1) as pool:
        assert pool.run([("sleep", "60")]) == [("timeout", "no answer in 1 s")]
    with ProcessPool(checker, num_processes=1, time_limit_s=600, wall_limit_s=1) as pool:
        assert pool.run([("c loop",)]) == [("timeout", "no answer in 1 s")]
    with ProcessPool(checker, num_processes=1, time_limit_s=0.3, wall_limit_s=60) as pool:
        assert pool.run([("sleep", "0.5")])[0][0] == "right"  # little CPU time, whatever the clock says


def test_a_keeper_that_dies_is_started_again(pool, tmp_path):
    results = pool.run([("echo", "a"), ("kill keeper", str(tmp_path / "checkers")), ("echo", "b")])
    assert [outcome for outcome, _ in results] == ["right", "crashed", "right"]
    assert pool.num_restarts == 2
    assert gone(map(int, (tmp_path / "checkers").read_text().split())), "a checking process ends with its keeper"
    before = pool.process_ids
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    assert pool.run([("echo", str(i)) for i in range(10)]) == [("right", f"echo {i}") for i in range(10)]
    assert not set(before) & set(pool.process_ids)


def test_closing_leaves_no_process_and_no_zombie(checker):
    pool = ProcessPool(checker, num_processes=2)
    children = {int(detail) for _, detail in pool.run([("pid",)] * 20) if detail}
    keepers = pool.process_ids
    assert len(keepers) == 2
    assert all(map(is_alive, [*keepers, *children]))
    pool.close()
    pool.close()
    assert gone([*keepers, *children])
    assert not any(Path(f"/proc/{pid}").exists() for pid in keepers), "they were waited for"
    assert pool.run([("echo", "again")]) == [("right", "echo again")]
    pool.close()


def test_a_pool_that_is_dropped_or_interrupted_ends(checker):
    pool = ProcessPool(checker, num_processes=1)
    pool.run([("echo", "a")])
    keepers = pool.process_ids
    del pool
    assert gone(keepers)

    pool = ProcessPool(checker, num_processes=1, wall_limit_s=90)
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        pool.run([("sleep", "60")])
    timer.join()
    assert pool.process_ids == (), "a batch that was cut off leaves no half answers"
    assert pool.run([("echo", "b")]) == [("right", "echo b")]
    pool.close()


def test_nothing_outlives_an_owner_killed_while_a_check_hangs(checker, tmp_path):
    program = f"""
        from pathlib import Path
        from rlinf_algos.rewards.process_pool import ProcessPool
        pool = ProcessPool(Path({str(checker)!r}), num_processes=2, wall_limit_s=1000)
        pids = {{detail for _, detail in pool.run([("pid",)] * 20)}}
        print(*pids, *pool.process_ids, flush=True)
        pool.run([("hang", {str(tmp_path / "first")!r}), ("hang", {str(tmp_path / "second")!r})])
    """
    owner = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pids = [int(word) for word in owner.stdout.readline().split()]
    while not all((tmp_path / name).exists() for name in ("first", "second")):
        time.sleep(0.02)
    owner.kill()
    owner.wait()
    owner.stdout.close()
    assert len(pids) >= 3
    assert gone(pids)


def test_the_number_of_processes_changes_nothing(checker):
    items = [("echo", str(i)) for i in range(33)]
    results = []
    for num_processes in (1, 3):
        with ProcessPool(checker, num_processes=num_processes) as pool:
            results.append(pool.run(items))
    assert results[0] == results[1]


def test_a_fork_of_the_owner_gets_slots_of_its_own(pool):
    pool.run([("echo", "a")])
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if pool.run([("echo", "b")]) == [("right", "echo b")] else 1)
        finally:
            os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0
    assert pool.run([("echo", "c")]) == [("right", "echo c")]


def test_texts_of_any_kind_come_through(pool):
    texts = ["", "\u222b \U0001f600", "\ud800 alone", "x" * 300_000, 'quote " and \\ and \n \0']
    assert [detail for _, detail in pool.run([("echo", text) for text in texts])] == [f"echo {text}" for text in texts]


def test_what_cannot_work_says_so(tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("import no_such_module")
    with ProcessPool(broken) as pool, pytest.raises(RewardError, match=r"broken.py cannot be loaded: ModuleNotFound"):
        pool.run([("a",)])
    with pytest.raises(AlgosError, match="num_processes=0 must be at least 1"):
        ProcessPool(broken, num_processes=0)
    with pytest.raises(AlgosError, match="memory_limit_bytes=1 must be at least"):
        ProcessPool(broken, memory_limit_bytes=1)

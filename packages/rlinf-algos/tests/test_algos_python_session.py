"""Sessions of Python: what stays between cells, and how they end. Their walls are tested in test_algos_sandbox.py."""

import contextlib
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from rlinf_algos import RewardError
from rlinf_algos.rewards import CellRun, PythonSession, python_session, sandbox_process
from rlinf_algos.rewards.confinement.processes import children_of
from rlinf_algos.rewards.sandbox import SandboxLimits

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is for Linux")

LIMITS = SandboxLimits(wall_s=3600, cpu_s=1, memory_bytes=256 << 20, num_processes=8, output_bytes=1 << 16)


@pytest.fixture(scope="module")
def session():
    with PythonSession(limits=LIMITS) as session:
        yield session


def below(process: int | None) -> list[int]:
    """All processes below one."""
    assert process is not None
    children = children_of(process)
    return children + [child for parent in children for child in below(parent)]


def eventually(condition) -> bool:
    deadline = time.monotonic() + 60
    while not (holds := condition()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return holds


# -- cells -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cells", "output"),
    [
        (["x = 3", "x += 1\nx"], "4\n"),
        (["def f():\n    return g()", "def g():\n    return 'g'", "f()"], "'g'\n"),
        (["import math", "math.floor(2.5)"], "2\n"),
        (["3; None"], ""),
        (["for i in range(2):\n    i"], ""),
        (["print('a', end=''); import sys; print('b', file=sys.stderr); 'c'"], "ab\n'c'\n"),
        (["open('file', 'w').write('text')", "open('file').read()"], "'text'\n"),
        (["open('m.py', 'w').write('y = 5')\nimport m\nm.y"], "5\n"),
        (["if __name__ == '__main__':\n    print('main')"], "main\n"),
        (["class A: pass", "import pickle\ntype(pickle.loads(pickle.dumps(A()))).__name__"], "'A'\n"),
        (["import subprocess\nsubprocess.run(['echo', 'x']).returncode"], "x\n0\n"),
        (["import os\nif os.fork() == 0:\n    print('child')\nelse:\n    os.wait()", "'parent'"], "'parent'\n"),
        (["'\u222b\U0001f600'"], "'\u222b\U0001f600'\n"),
        (["print('\\ud800')"], "\\ud800\n"),
        (["10 ** 5000 > 0 and len(str(10 ** 5000))"], "5001\n"),
        (["exit()"], ""),
        ([""], ""),
    ],
)
def test_cells_continue_each_other(session, cells, output):
    runs = [session.run(cell, time_limit_s=60) for cell in cells]
    assert [run.ending for run in runs] == ["done"] * len(cells), runs
    assert runs[-1].output == output


@pytest.mark.parametrize(
    ("cell", "error", "output"),
    [
        (
            "def f(x):\n    return 1 / x\nf(0)",
            "ZeroDivisionError",
            'Traceback (most recent call last):\n  File "<cell 1>", line 3, in <module>\n    f(0)\n'
            '  File "<cell 1>", line 2, in f\n    return 1 / x\nZeroDivisionError: division by zero\n',
        ),
        ("(", "SyntaxError", "  File \"<cell 1>\", line 1\n    (\nSyntaxError: '(' was never closed\n"),
        ("print('before')\nexit(3)", "SystemExit", "before\nSystemExit: 3\n"),
        ("def f(): f()\nf()", "RecursionError", None),
        ("x = bytearray(1 << 40)", "MemoryError", None),
        ("raise KeyboardInterrupt", "KeyboardInterrupt", None),
        ("input()", "EOFError", None),
        ("raise type('E' * 5000, (Exception,), {})", "E" * 100, None),
    ],
)
def test_a_cell_that_raises_keeps_the_state(cell, error, output):
    with PythonSession(limits=LIMITS) as session:
        run = session.run(cell, time_limit_s=60)
        assert (run.ending, run.error, run.is_alive) == ("raised", error, True)
        lines = [line for line in run.output.splitlines(keepends=True) if set(line.strip()) - set("~^")]
        assert output is None or "".join(lines) == output
        assert session.run("'alive'").output == "'alive'\n"


ENDINGS = {
    "exited": "import os; print('before', flush=True); os._exit(0)",
    "killed": "import ctypes; ctypes.string_at(0)",
    "killed by itself": "import os; os.kill(os.getpid(), 9)",
    "timeout": "import time; time.sleep(60)",
    "timeout of the processor": "import os\nos.fork()\nwhile True: pass",
    "memory": "import os, time\nfor _ in range(3):\n    if os.fork() == 0: break\n"
    "held = bytearray(100 << 20)\nfor i in range(0, len(held), 4096): held[i] = 1\ntime.sleep(60)",
    "output": "while True: print('x' * 1000)",
    "output without lines": "import os\nwhile True: os.write(1, bytes(1 << 16))",
    "garbled": "import os, time; os.write(4, b'[]\\n'); time.sleep(60)",
    "garbled by a flood": "import os, time; os.write(4, b'x' * 5000); time.sleep(60)",
    "garbled by another number": 'import os, time; os.write(4, b\'[7, "done", ""]\\n\'); time.sleep(60)',
    "exited without its pipes": "import os; os.closerange(3, 64)",
}


@pytest.mark.parametrize("way", ENDINGS)
def test_a_session_ends_at_a_limit_or_by_itself(way):
    with PythonSession(limits=LIMITS) as session:
        process = session.process_id
        run = session.run(ENDINGS[way], time_limit_s=1.0 if way == "timeout" else 60)
        assert (run.ending, run.is_alive, session.is_alive) == (way.split()[0], False, False)
        assert len(run.output) <= LIMITS.output_bytes
        assert way != "exited" or run.output == "before\n"
        assert not Path(f"/proc/{process}").exists()
        with pytest.raises(RewardError, match="the session has ended"):
            session.run("1")


def test_a_reply_in_advance_is_not_taken_for_the_next_one():
    with PythonSession(limits=LIMITS) as session:
        forged = 'import os, time; os.write(4, b\'[1, "done", ""]\\n\'); time.sleep(0.5)'
        assert session.run(forged).ending in ("done", "garbled")  # garbled: both replies were read at once
        assert not session.is_alive or session.run("1").ending == "garbled"  # the real reply of the first cell


def test_output_is_limited_for_each_cell_alone(session):
    for _ in range(3):
        assert session.run(f"print('x' * {LIMITS.output_bytes - 100})", time_limit_s=60).ending == "done"


def test_a_cell_that_is_too_long_is_not_sent(session):
    run = session.run("#" * (python_session.MAX_CODE_BYTES + 1))
    assert (run.ending, run.output) == ("raised", f"more than {python_session.MAX_CODE_BYTES} bytes of code\n")
    assert session.run(f"{'#' * (python_session.MAX_CODE_BYTES - 100)}\n5", time_limit_s=60).output == "5\n"


def test_the_seed_decides_random_numbers_and_hashes():
    def drawn(seed: int) -> str:
        with PythonSession(limits=LIMITS, seed=seed) as session:
            return session.run("import random\n(random.random(), hash('text'))").output

    first = drawn(5)
    assert first == drawn(5)
    assert all(a != b for a, b in zip(eval(first), eval(drawn(6)), strict=True))


def test_nothing_is_inherited(monkeypatch):
    monkeypatch.setenv("RLINF_SECRET", "s3cret")
    monkeypatch.setenv("PYTHONPATH", "/s3cret")
    with PythonSession(limits=LIMITS) as session:
        run = session.run("import os, sys\nprint(os.environ, sys.path, sys.argv, os.listdir('/proc/self/fd'))\ndir()")
    assert "s3cret" not in run.output and "RLINF" not in run.output
    assert "['0', '1', '2', '3', '4', '5', '6']" in run.output  # requests twice, replies, and the listing
    assert "'run_cell'" not in run.output


# -- the process -------------------------------------------------------------------------------------------------------


def states(session: PythonSession) -> list[str]:
    """The states of the program's processes. Above them are the supervisor and what asked for its namespaces."""
    texts = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2] for pid in below(session.process_id)[2:]]
    return [text.split()[0] for text in texts]


def test_nothing_runs_between_cells():
    with PythonSession(limits=LIMITS) as session:
        if len(below(session.process_id)) < 3:
            pytest.skip("needs namespaces")
        session.run("import os, time\nif os.fork() == 0:\n    os.setsid()\n    while True: time.sleep(0.001)")
        assert eventually(lambda: states(session) == ["T", "T"])
        assert session.run("6 * 7").output == "42\n"
        assert eventually(lambda: states(session) == ["T", "T"])
        assert [session.run(f"{i}").output for i in range(200)] == [f"{i}\n" for i in range(200)]


def test_a_session_beside_a_thousand_open_files():
    """Its pipes have numbers that select() does not take."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    try:
        with contextlib.ExitStack() as files:
            for _ in range(1024):
                files.callback(os.close, os.dup(0))
            with PythonSession(limits=LIMITS) as session:
                run = session.run("import time; time.sleep(0.5)\n2 + 3", time_limit_s=60)
        assert (run.ending, run.output) == ("done", "5\n")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_session_is_closed_while_a_cell_runs():
    session = PythonSession(limits=LIMITS)
    process = session.process_id
    runs: list[CellRun] = []
    thread = threading.Thread(target=lambda: runs.append(session.run("import time; time.sleep(600)", time_limit_s=600)))
    thread.start()
    assert eventually(lambda: session._number == 1)
    session.close()
    thread.join(60)
    assert [run.ending for run in runs] == ["closed"]
    assert not Path(f"/proc/{process}").exists()
    session.close()


@pytest.mark.parametrize("when", ["before", "during"])
def test_a_sandbox_that_is_killed_from_outside_is_no_ending(when):
    with PythonSession(limits=LIMITS) as session:
        entry = session.process_id
        assert entry is not None
        supervisors = [entry, *below(entry)[:-1]]

        def kill():
            for process in supervisors:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)

        if when == "before":
            kill()
        else:
            threading.Timer(0.3, kill).start()
        with pytest.raises(RewardError, match="killed from outside"):
            session.run("import time; time.sleep(60)", time_limit_s=60)
        assert not session.is_alive


def test_a_sandbox_that_cannot_start(monkeypatch):
    num_descriptors = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(python_session, "_script", lambda: "raise ImportError('broken')")
    with pytest.raises(RewardError, match=r"could not start: (.|\n)*ImportError: broken"):
        PythonSession(limits=LIMITS)
    monkeypatch.setattr(python_session, "_script", lambda: "import time; time.sleep(60)")
    monkeypatch.setattr(python_session, "START_LIMIT_S", 0.3)
    with pytest.raises(RewardError, match=r"it was not ready within 0\.3 s"):
        PythonSession(limits=LIMITS)
    monkeypatch.setattr(sandbox_process.sys, "executable", "/bin/false")
    with pytest.raises(RewardError, match="could not start"):
        PythonSession(limits=LIMITS)
    monkeypatch.setattr(sandbox_process.sys, "executable", "/absent")
    with pytest.raises(OSError):
        PythonSession(limits=LIMITS)
    assert len(os.listdir("/proc/self/fd")) == num_descriptors


def test_a_strong_session_never_becomes_weak_by_itself():
    with pytest.raises(RewardError, match="no namespaces this time"):
        PythonSession(limits=LIMITS, namespaces=False, allow_weak=False)


def test_a_session_outlasts_the_thread_that_created_it():
    sessions: list[PythonSession] = []
    thread = threading.Thread(target=lambda: sessions.append(PythonSession(limits=LIMITS)))
    thread.start()
    thread.join()
    time.sleep(0.5)  # a sandbox that the kernel ends with its thread is gone then
    with sessions[0] as session:
        assert session.run("1").output == "1\n"


def test_a_session_leaves_nothing_behind():
    before = len(os.listdir("/proc/self/fd")), set(children_of(os.getpid()))
    for _ in range(2):
        with PythonSession(limits=LIMITS) as session:
            session.run("import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(600)")
    assert (len(os.listdir("/proc/self/fd")), set(children_of(os.getpid()))) == before

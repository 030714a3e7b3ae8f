"""Programs in the sandbox: what is judged, and what hostile ones cannot do."""

import json
import os
import time
import timeit
from pathlib import Path

import pytest

from rlinf_algos import AlgosError, RewardError, get_reward
from rlinf_algos.rewards import program as module
from rlinf_algos.rewards.code_tests import is_expected
from rlinf_algos.rewards.program import CodeReward, last_program
from rlinf_algos.rewards.sandbox import SandboxLimits, run_python

pytestmark = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the sandbox is for Linux")

LIMITS = SandboxLimits(wall_s=20, cpu_s=1, memory_bytes=256 << 20, num_processes=8, output_bytes=1 << 16)
WEAKNESSES = run_python({}, ["-c", "pass"]).weaknesses if Path("/proc/self/statm").exists() else ()
needs_namespaces = pytest.mark.skipif(bool(WEAKNESSES), reason=f"the kernel gives no namespaces: {WEAKNESSES}")
SUMS = json.dumps({"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]})
ADD = "print(sum(map(int, input().split())))"


def run(program: str, *, namespaces: bool = True, limits: SandboxLimits = LIMITS, stdin: str = ""):
    return run_python({"program.py": program}, ["program.py"], stdin=stdin, limits=limits, namespaces=namespaces)


@pytest.fixture(scope="module")
def reward() -> CodeReward:
    return CodeReward(limits=LIMITS, allow_weak_isolation=True)


def fenced(program: str) -> str:
    return f"I think:\n```python\n{program}\n```\nDone."


# -- what is judged --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "reference", "outcome"),
    [
        (ADD, SUMS, "right"),
        ("print(3)", SUMS, "wrong"),
        (f"{ADD[:-1]}, end='  \\n\\n')", SUMS, "right"),
        ("1 / 0", SUMS, "wrong"),
        ("import sys; print(3); sys.exit(1)", SUMS, "wrong"),
        ("def f(x): return 2 * x", "assert f(3) == 6", "right"),
        ("def f(x): return 2 * x", "assert f(3) == 7", "wrong"),
        ("print('hello')\ndef f(x): return 2 * x", "assert f(3) == 6", "right"),
        ("import os; os._exit(0)", "assert f(3) == 6", "wrong"),
        ("raise SystemExit(0)", "assert False", "wrong"),
        ("while True: pass", "assert True", "timeout"),
        ("held = [bytearray(1 << 20) for _ in range(10**6)]", "assert True", "memory"),
        ("import ctypes; ctypes.string_at(0)", "assert True", "crashed"),
        ("while True: print('x' * 1000)", SUMS, "wrong"),
    ],
)
def test_outcomes(reward, program, reference, outcome):
    result = reward(fenced(program), reference)
    assert result.outcome == outcome
    assert result.value == float(outcome == "right")
    assert outcome == "right" or result.detail


def test_what_failed_is_told(reward):
    assert reward(fenced("print(3)"), SUMS).detail.startswith("test 2 of 2: it printed '3\\n'")
    assert "ZeroDivisionError" in reward(fenced("1 / 0"), "assert True").detail
    assert CodeReward(limits=LIMITS, partial=True, allow_weak_isolation=True)(fenced("print(3)"), SUMS).value == 0.5


def test_which_program_is_run():
    assert last_program("```python\na\n```\nthen\n```python\nb\n```") == "b\n"
    assert last_program("```\na\n```") == "a\n"
    assert last_program("```python\na\n```\n```json\n{}\n```") == "a\n"
    assert last_program("<think>\n```python\na\n```\n</think> none") is None
    assert last_program("print(1)") is None
    assert last_program("```py\r\na\r\n```\r\n") == "a\r\n"
    assert last_program("```python\na\n```python\nb\n```\n```python\nc") == "a\n```python\nb\n"


@pytest.mark.parametrize("piece", ["```\n", "```python\n", "``` \n ```", "`", " ", "\n", "</think>"])
def test_programs_are_looked_for_in_linear_time(piece):
    """Four times the text takes far less than sixteen times as long, which a quadratic search would."""
    small_s, large_s = (_cpu_s(piece * n) for n in (25_000, 100_000))
    assert large_s < 9 * small_s + 0.3


def _cpu_s(text: str) -> float:
    return min(timeit.repeat(lambda: last_program(text), timer=time.process_time, number=1, repeat=3))


@pytest.mark.parametrize(
    ("result", "expected", "is_right"),
    [
        (10**400, 1.5, False),
        (10**400, float("inf"), False),
        (float("inf"), float("inf"), True),
        ([1, -(10**400)], [1, 1e308], False),
        (float("nan"), 1.5, False),
        (10**400, 10**400, True),
        (2, 2.0, True),
        (2 + 1e-9, 2.0, True),
        (True, 1.0, False),
    ],
)
def test_results_of_calls(result, expected, is_right):
    assert is_expected(result, expected) is is_right


def test_no_program_and_no_tests(reward):
    assert reward("I do not know", SUMS).outcome == "unparseable"
    with pytest.raises(RewardError, match="the reference is empty"):
        reward(fenced("pass"), " ")
    for reference in ("[]", "{}", "[1]", '{"inputs": ["1"], "outputs": []}', '[{"input": 1, "output": "2"}]'):
        with pytest.raises(RewardError, match="is JSON, but no tests"):
            reward(fenced("pass"), reference)


def test_batches_keep_their_order(reward):
    programs = [ADD, "print(3)", ADD, "1 / 0"]
    batch = reward.score_batch([fenced(p) for p in programs], [SUMS] * 4)
    assert [result.outcome for result in batch] == ["right", "wrong", "right", "wrong"]


def test_a_weak_sandbox_needs_leave_and_is_told(monkeypatch):
    def weak(files, arguments, **options):
        return run_python(files, arguments, **{**options, "namespaces": False})

    monkeypatch.setattr(module, "run_python", weak)
    with pytest.raises(RewardError, match=r"weak on this machine: no namespaces \(switched off\); .*allow_weak_isol"):
        CodeReward(limits=LIMITS)
    reward = CodeReward(limits=LIMITS, allow_weak_isolation=True)
    assert any("can be read" in weakness for weakness in reward.weaknesses)
    result = reward(fenced(ADD), SUMS)
    assert (result.outcome, result.detail) == ("right", "run in the weak sandbox")


def test_it_is_known_by_name():
    assert get_reward("code_tests") is module.code_tests


# -- what the hostile cannot do --------------------------------------------------------------------------------------

BOTH = pytest.mark.parametrize("namespaces", [pytest.param(True, marks=needs_namespaces), False])


@BOTH
@pytest.mark.parametrize(
    ("program", "ending"),
    [
        ("while True: pass", "timeout"),
        ("held = []\nwhile True: held.append(bytearray(50 << 20))", "memory"),
        ("while True: print('x' * 1000)", "output"),
        ("import sys\nwhile True: sys.stderr.write('x' * 1000)", "output"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "killed"),
    ],
)
def test_limits(program, ending, namespaces):
    assert run(program, namespaces=namespaces).ending == ending


@BOTH
def test_sleeping_ends_by_the_wall_clock(namespaces):
    limits = SandboxLimits(wall_s=1.0)
    assert run("import time; time.sleep(600)", namespaces=namespaces, limits=limits).ending == "timeout"


@BOTH
@pytest.mark.parametrize("family", ["AF_INET", "AF_INET6", "AF_NETLINK", "AF_PACKET"])
def test_no_network(family, namespaces):
    found = run(f"import socket; socket.socket(socket.{family}, socket.SOCK_RAW)", namespaces=namespaces)
    assert found.exit_code == 1
    assert "Permission" in found.stderr or "not permitted" in found.stderr


@BOTH
def test_nothing_is_inherited(namespaces, monkeypatch):
    monkeypatch.setenv("RLINF_SECRET", "s3cret")
    secret = os.open("/proc/self/environ", os.O_RDONLY)
    os.set_inheritable(secret, True)
    try:
        program = "import os; print(sorted(os.environ), sorted(map(int, os.listdir('/proc/self/fd'))))"
        found = run(program, namespaces=namespaces)
    finally:
        os.close(secret)
    assert found.stdout == "['HOME', 'LANG', 'PATH', 'TMPDIR'] [0, 1, 2, 3]\n"  # 3 is the listing itself


@BOTH
def test_files_are_limited(namespaces):
    found = run("open('big', 'wb').write(bytes(64 << 20))", namespaces=namespaces)
    assert found.exit_code == 1
    assert "OSError" in found.stderr


@BOTH
def test_what_stays_behind_ends(namespaces, tmp_path):
    marker = f"left-{os.getpid()}-{namespaces}"
    program = f"""
import os, sys
if os.fork() == 0:
    os.setsid()
    os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)", {marker!r}])
print("ok")
"""
    assert run(program, namespaces=namespaces).stdout == "ok\n"
    deadline = time.monotonic() + 10
    while any(marker in line for line in command_lines()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(marker in line for line in command_lines())


def command_lines() -> list[str]:
    lines = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                lines.append((entry / "cmdline").read_text())
            except OSError:
                continue
    return lines


@needs_namespaces
def test_a_fork_bomb_stays_small():
    start = time.monotonic()
    found = run(
        "import os\nwhile True:\n try: os.fork()\n except OSError: pass",
        limits=SandboxLimits(wall_s=2.0, num_processes=8),
    )
    assert found.ending in ("timeout", "killed", "exited")
    assert time.monotonic() - start < 60
    assert run("print(1)").stdout == "1\n"


@needs_namespaces
def test_memory_is_counted_over_all_processes():
    program = """
import os, time
for _ in range(5):
    if os.fork() == 0:
        break
held = bytearray(120 << 20)
for i in range(0, len(held), 4096):
    held[i] = 1
time.sleep(60)
"""
    assert run(program).ending == "memory"


@needs_namespaces
def test_other_processes_cannot_be_reached(tmp_path):
    program = f"""
import os
for pid in ({os.getpid()}, 1, -1):
    try:
        os.kill(pid, 9)
    except OSError as e:
        print(type(e).__name__)
print(len([name for name in os.listdir("/proc") if name.isdigit()]))
"""
    assert run(program).stdout.splitlines() == ["ProcessLookupError", "PermissionError", "ProcessLookupError", "2"]


@needs_namespaces
def test_other_files_cannot_be_reached(tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("s3cret")
    secret.chmod(0o644)
    tmp_path.chmod(0o755)
    for path in (secret, Path(__file__), Path("/etc/hostname"), Path.home() / ".bashrc"):
        assert "FileNotFoundError" in run(f"open({str(path)!r})").stderr
    assert "Error" in run("import os, sys; open(os.path.join(sys.base_prefix, 'x'), 'w')").stderr
    assert "Error" in run("open('/usr/x', 'w')").stderr
    found = run_python({}, ["-c", f"print(open({str(secret)!r}).read())"], limits=LIMITS, readable=[str(tmp_path)])
    assert found.stdout == "s3cret\n"


def test_texts_of_any_kind_come_through():
    text = "\u222b \U0001f600 \\ \" ' \0"
    found = run("import sys; sys.stdout.buffer.write(sys.stdin.buffer.read())", stdin=text)
    assert found.stdout == text
    assert run("x = '\u222b\U0001f600'; print(len(x))").stdout == "2\n"


def test_limits_are_checked():
    with pytest.raises(AlgosError, match="cpu_s=0 must be at least 1"):
        SandboxLimits(cpu_s=0)
    with pytest.raises(AlgosError, match="memory_bytes=5 must be at least"):
        SandboxLimits(memory_bytes=5)


def test_nothing_of_the_sandbox_is_left_in_the_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run("open('x', 'w').write('1')")
    assert list(tmp_path.iterdir()) == []

"""Programs and their tests: which reward they get. What hostile ones cannot do is in test_algos_sandbox.py."""

import json
from pathlib import Path

import pytest

from rlinf_algos import RewardError, get_reward
from rlinf_algos.rewards import program as module
from rlinf_algos.rewards.code_tests import is_expected
from rlinf_algos.rewards.program import CodeReward, last_program
from rlinf_algos.rewards.sandbox import SandboxLimits, SandboxRun, run_python

pytestmark = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the sandbox is for Linux")

LIMITS = SandboxLimits(wall_s=20, cpu_s=1, memory_bytes=256 << 20, num_processes=8, output_bytes=1 << 16)
SUMS = json.dumps({"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]})
ADD = "print(sum(map(int, input().split())))"


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


def test_a_program_that_hangs_is_not_tried_on_every_test(monkeypatch):
    inputs = []

    def hangs(files, arguments, *, stdin, **options):
        inputs.append(stdin)
        ending = "timeout" if stdin != "1" else "exited"
        return SandboxRun(ending=ending, exit_code=0, stdout="1", stderr="", cpu_s=0.0, weaknesses=())

    reward = CodeReward(limits=LIMITS, partial=True, allow_weak_isolation=True)
    monkeypatch.setattr(module, "run_python", hangs)
    tests = json.dumps({"inputs": list("123456"), "outputs": ["1"] * 6})
    result = reward(fenced("pass"), tests)
    assert (inputs, result.outcome, result.value) == (list("1234"), "timeout", 1 / 6)


def test_which_program_is_run():
    assert last_program("```python\na\n```\nthen\n```python\nb\n```") == "b\n"
    assert last_program("```\na\n```") == "a\n"
    assert last_program("```python\na\n```\n```json\n{}\n```") == "a\n"
    assert last_program("<think>\n```python\na\n```\n</think> none") is None
    assert last_program("print(1)") is None
    assert last_program("```py\r\na\r\n```\r\n") == "a\r\n"
    assert last_program("```python\na\n```python\nb\n```\n```python\nc") == "a\n```python\nb\n"


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
        with pytest.raises(RewardError, match="is JSON without tests"):
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
    assert any("size of the working folder" in weakness for weakness in reward.weaknesses)
    result = reward(fenced(ADD), SUMS)
    assert (result.outcome, result.detail) == ("right", "run in the weak sandbox")


def test_it_is_known_by_name():
    assert get_reward("code_tests") is module.code_tests

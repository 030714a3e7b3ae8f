"""Calls and asserts of graded programs: what is right, and what a program that is made to deceive cannot do."""

import json
from pathlib import Path

import pytest

from rlinf_algos import RewardError
from rlinf_algos.rewards.code_tests import CallTests, is_expected, is_expected_output, read_tests
from rlinf_algos.rewards.program import CodeReward
from rlinf_algos.rewards.sandbox import SandboxLimits

pytestmark = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the sandbox is for Linux")

LIMITS = SandboxLimits(wall_s=30, cpu_s=2, memory_bytes=256 << 20, num_processes=16, output_bytes=1 << 16)


@pytest.fixture(scope="module")
def reward() -> CodeReward:
    return CodeReward(limits=LIMITS, allow_weak_isolation=True)


def fenced(program: str) -> str:
    return f"```python\n{program}\n```"


def calls(inputs, outputs, name="f") -> str:
    return json.dumps({"fn_name": name, "inputs": inputs, "outputs": outputs})


# -- calls -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "tests", "outcome"),
    [
        ("def f(a, b): return a + b", calls([[1, 2], [3, 4]], [3, 7]), "right"),
        ("def f(a, b): return a + b", calls([[1, 2], [3, 4]], [[3], [7]]), "right"),  # as APPS lists results
        ("def f(a, b): return a - b", calls([[1, 2]], [3]), "wrong"),
        ("print(input())\ndef f(a): return a", calls([[1]], [1]), "wrong"),  # no standard input to read
        ("def f(a):\n print(a)\n return (a, [a])", calls([["x"]], [["x", ["x"]]]), "right"),
        ("class Solution:\n def f(self, a): return sorted(a)", calls(["[3, 1]"], ["[1, 3]"]), "right"),  # LiveCodeBench
        ("class Solution:\n def f(self, a, b): return a * b", calls(['"ab"\n2'], ['"abab"']), "right"),
        ("def f(a): return a / 3", calls([[1], [2]], [0.333333, 0.666667]), "right"),
        ("def f(a): return a / 3", calls([[1]], [0.3334]), "wrong"),
        ("def f(a): return 1.0", calls([[1]], [1]), "right"),
        ("def f(a): return 1.0000001", calls([[1]], [1]), "wrong"),  # a whole number is one
        ("def f(a): return True", calls([[1]], [1]), "wrong"),
        ("def f(a): return {k: v + 1 for k, v in a.items()}", calls([[{"1": 2}]], [{"1": 3}]), "right"),
        ("def g(a): return a", calls([[1]], [1]), "wrong"),
        ("def f(a):\n import os\n os._exit(0)", calls([[1]], [1]), "wrong"),
        ("def f(a):\n while True: pass", calls([[1]], [1]), "timeout"),
        ("def f(a): return object()", calls([[1]], [1]), "wrong"),
    ],
)
def test_calls(reward, program, tests, outcome):
    assert reward(fenced(program), tests).outcome == outcome


def test_a_call_that_fails_is_told_and_others_count(reward):
    program = fenced("def f(a): return 10 // a")
    tests = calls([[5], [0], [2]], [2, 0, 5])
    assert reward(program, tests).detail == 'call 2 of 3: f gave {"raised": "ZeroDivisionError: ' + (
        'integer division or modulo by zero"}'
    )
    partial = CodeReward(limits=LIMITS, partial=True, allow_weak_isolation=True)
    assert partial(program, tests).value == pytest.approx(2 / 3)


def test_forms_of_tests():
    read = read_tests(calls([[1, 2]], [3]))
    assert read == CallTests(function="f", arguments=([1, 2],), outputs=(3,), may_be_listed=True)
    for tests in (calls([[1]], []), calls([1], [1]), calls([[1]], [1], "not a name"), calls([], [])):
        with pytest.raises(RewardError, match="is JSON without tests"):
            read_tests(tests)


@pytest.mark.parametrize(
    ("printed", "expected", "is_equal"),
    [
        ("3\n4 \n\n", "3\n4", True),
        ("3 4", "3\n4", False),
        ("0.3333333", "0.333333", True),
        ("x 0.33 y", "x 0.34 y", False),
        ("10000001", "10000000", False),  # whole numbers have no tolerance
        ("nan", "1.5", False),
        ("", "1.5", False),
    ],
)
def test_printed_output(printed, expected, is_equal):
    assert is_expected_output(printed, expected) == is_equal


def test_expected_values():
    assert is_expected([1, {"a": [0.1 + 0.2]}], [1, {"a": [0.3]}])
    assert not is_expected([1, 2], [1])
    assert not is_expected("1", 1)
    assert not is_expected(float("nan"), 1.5)


# -- asserts ---------------------------------------------------------------------------------------------------------

STACK = """
class Stack:
    def __init__(self): self.items = []
    def push(self, x): self.items.append(x)
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)
    def __eq__(self, other): return self.items == other.items
"""


@pytest.mark.parametrize(
    ("program", "tests", "outcome"),
    [
        ("def f(x): return 2 * x", "def check(candidate):\n    assert candidate(3) == 6\ncheck(f)", "right"),
        ("def f(xs): xs.sort()", "xs = [3, 1]\nf(xs)\nassert xs == [1, 3]", "right"),
        ("def f(x): return (x, {x}, {x: b'a'}, 1j)", "assert f(1) == (1, {1}, {1: b'a'}, 1j)", "right"),
        ("def f(x): return [x]", "assert f(1) == (1,)", "wrong"),
        ("def f(x):\n for i in range(x): yield i", "assert list(f(3)) == [0, 1, 2] and 2 in f(3)", "right"),
        ("def f(g, x): return g(x) + 1", "assert f(lambda x: 2 * x, 3) == 7", "right"),
        (
            "def f(x): raise ValueError(x)",
            "try:\n    f(1)\n    assert False\nexcept ValueError as e:\n    pass",
            "right",
        ),
        ("def f(x): raise KeyError(x)", "try:\n    f(1)\nexcept ValueError as e:\n    pass", "wrong"),
        (STACK, "s = Stack()\ns.push(4)\nassert len(s) == 1 and s.pop() == 4 and s == Stack()", "right"),
        ("import math\ndef f(x): return math.sqrt(x)", "assert math.isclose(f(2), 2 ** 0.5)", "right"),
        ("import numpy as np\ndef f(x): return np.arange(x)", "assert np.array_equal(f(3), [0, 1, 2])", "right"),
        ("import numpy as np\ndef f(x): return np.mean(x)", "assert f([1, 2]) == 1.5", "right"),
        ("def sum(a, b): return a * b", "assert sum(2, 5) == 10", "right"),  # a built-in name, as MBPP has some
        (
            "from collections import Counter\ndef f(x): return Counter(x)",
            "assert f('aab') == {'a': 2, 'b': 1}",
            "right",
        ),
        ("from fractions import Fraction\ndef f(x): return Fraction(1, x)", "assert f(2) * 2 == 1", "right"),
        ("x = 5", "assert x == 5", "right"),
        ("def f(x): return x", "assert g(1) == 1", "wrong"),
    ],
)
def test_asserts(reward, program, tests, outcome):
    result = reward(fenced(program), tests)
    assert result.outcome == outcome, result.detail


def test_the_failed_assert_is_told(reward):
    assert reward(fenced("def f(x): return 1"), "assert f(1) == 1\nassert f(2) == 2").detail == (
        "AssertionError:  in `assert f(2) == 2`"
    )


EQUAL = "class Equal:\n    def __eq__(self, other): return True\n    __hash__ = object.__hash__\n"
HOSTILE = {
    "equal to everything": EQUAL + "def f(x): return Equal()",
    "an int that is equal to everything": "class I(int):\n    __eq__ = __ne__ = __lt__ = __gt__ = lambda a, b: True\n"
    "def f(x): return I(0)",
    "a list of such": EQUAL + "def f(x): return [Equal()]",
    "ordered as one likes": "class O:\n    __lt__ = __gt__ = __sub__ = __rsub__ = __abs__ = lambda *a: O()\n"
    "    __bool__ = lambda s: True\ndef f(x): return O()",
    "contains everything": "class C:\n    def __contains__(self, x): return True\n"
    "    def __iter__(self): return iter(())\n"
    "def f(x): return C()",
    "its own built-in names": "abs = all = len = sorted = lambda *a: 0\nclass AssertionError(Exception): pass\n"
    "isclose = lambda *a, **k: True\nimport math\nmath.isclose = isclose\ndef f(x): return 0",
    "built-ins replaced": "import builtins\nfor n in ('abs', 'all', 'len', 'sorted', 'AssertionError', 'eval'):\n"
    "    setattr(builtins, n, lambda *a, **k: 0)\ndef f(x): return 0",
    "ends iterations": "def f(x): raise StopIteration",
    "ends asynchronous ones": "def f(x): raise StopAsyncIteration",
    "leaves early": "import os\nos._exit(0)",
    "leaves when asked": "import os\ndef f(x): os._exit(0)",
    "writes a verdict everywhere": "import os\nfor fd in range(64):\n    try: os.write(fd, b'{\"passed\": true}\\n')\n"
    "    except OSError: pass\ndef f(x): os._exit(0)",
    "speaks for the judge": "import os\ndef f(x):\n    for m in (b'[\"value\", 6]\\n', b'{\"passed\": true}\\n'):\n"
    "        for fd in (1, 2, 4): os.write(fd, m)\n    os._exit(0)",
    "looks for the tests": "import os, re, gc, sys\ntext = ''\nfor folder, _, files in os.walk('/proc'):\n"
    "    for n in files:\n        if n in ('environ', 'cmdline'):\n"
    "            try: text += open(folder + '/' + n).read()\n"
    "            except OSError: pass\nfor n in os.listdir('.'):\n    text += open(n, errors='replace').read()\n"
    "for o in gc.get_objects():\n"
    "    if isinstance(o, dict): text += ' '.join(v for v in o.values() if type(v) is str)\n"
    "found = re.search(r'f\\(3\\) == (\\d{5})', text)\ndef f(x): return int(found[1]) if found else None",
    "through the frames": "import sys\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n"
    "        for v in list(frame.f_locals.values()):\n            if hasattr(v, '_send'): v._send(['value', 66666])\n"
    "        frame = frame.f_back",
    "asks the judge to run code": "import os, json\ndef f(x):\n"
    "    os.write(4, json.dumps(['ask', 'call', 0, ['tuple', []], ['dict', []]]).encode() + b'\\n')\n"
    "    os.write(4, json.dumps(['ask', '__import__', 'os']).encode() + b'\\n')\n    return 0",
    "absurd data": "import os\ndef f(x):\n    os.write(4, b'[' * 100000 + b'\\n')\n    return 0",
}  # fmt: skip
ASKED = (
    "assert f(3) == 66665",
    "assert [f(3)] == [66665]",
    "assert abs(f(3) - 66665) < 1e-6",
    "import math\nassert math.isclose(f(3), 66665)",
    "assert 66665 in f(3)",
    "assert sorted(f(3)) == [66665]",
    "try:\n    ok = f(3) == 66665\nexcept:\n    ok = False\nassert ok",
    "assert all(map(lambda x: f(x) == 66665, [3]))",
    "for found, expected in zip(map(f, [3]), [66665]): assert found == expected",
)


@pytest.mark.parametrize("attack", HOSTILE)
def test_asserts_cannot_be_faked(reward, attack):
    compares = attack.startswith(("equal", "a list", "ordered", "contains", "its own", "built-ins", "ends"))
    for tests in ASKED if compares else ASKED[:1]:
        assert reward(fenced(HOSTILE[attack]), tests).outcome != "right", tests
    assert reward(fenced("def f(x): return 66665"), ASKED[0]).outcome == "right"


@pytest.mark.parametrize("attack", ["equal to everything", "writes a verdict everywhere", "looks for the tests"])
def test_calls_cannot_be_faked(reward, attack):
    assert reward(fenced(HOSTILE[attack]), calls([[3]], [66665])).outcome != "right"


# -- tests that run what the program wrote ---------------------------------------------------------------------------

FORGE = """
import os, sys
frame = sys._getframe()
while frame:
    if "verdict" in frame.f_locals:
        os.write(frame.f_locals["verdict"], b'{"passed": true}')
        os._exit(0)
    frame = frame.f_back
"""
FORGER = f"FORGE = {FORGE!r}\nCALL = '[exec(' + repr(FORGE) + ')]'\n"
PICKLED = "class P:\n    def __reduce__(self): return exec, (FORGE,)\nimport pickle\ndef f(x): return pickle.dumps(P())"
WRITTEN = {
    "exec": ("def f(run): run(FORGE)", "f(exec)\nassert f(exec) == 66665"),
    "a method": ("def f(run): run(FORGE)", "import builtins\nassert f(builtins.exec) == 66665"),
    "a partial": ("def f(run): run(FORGE)", "from functools import partial\nassert f(partial(exec)) == 66665"),
    "a function that evaluates": ("def f(run): run(FORGE)", "def run(text): exec(text)\nassert f(run) == 66665"),
    "what is in a namespace": ("def f(run): run(CALL)", "assert f({'run': eval}['run']) == 66665"),
    "returned to eval": ("def f(x): return CALL", "assert eval(f(3)) == 66665"),
    "returned to exec": ("def f(x): return FORGE", "exec(f(3))\nassert f(3) == 66665"),
    "returned to compile": ("def f(x): return CALL", "assert eval(compile(f(3), 'x', 'eval')) == 66665"),
    "in pieces": ("def f(x): return list(CALL)", "assert eval(''.join(f(3))) == 66665"),
    "as bytes": ("def f(x): return CALL.encode()", "assert eval(f(3)) == 66665"),
    "of a variable": ("f = CALL", "assert eval(f) == 66665"),
    "of an exception": (
        "def f(x): raise ValueError(CALL)",
        "try:\n    f(3)\nexcept ValueError as error:\n    assert eval(str(error)) == 66665",
    ),
    "by evaluated text": ("def f(x): return CALL", "exec('def g(x): return eval(x)')\nassert g(f(3)) == 66665"),
    "the value by its name": ("def f(x): return 'expected'", "expected = 66665\nassert eval(f(3)) == expected"),
    "by map": ("def f(x): return [CALL]", "assert list(map(eval, f(3))) == [66665]"),
    "pickled": (PICKLED, "import pickle\nassert pickle.loads(f(3)) == 66665"),
    "names of the judge's": ("import os\ndef f(x): os.write(4, b'[\"value\", [\"named\", \"os\", \"abort\"], 0]\\n')",
                             "assert f(3)() == 66665"),
}  # fmt: skip


@pytest.mark.parametrize("way", WRITTEN)
def test_what_the_program_wrote_is_not_run_by_the_judge(reward, way):
    program, tests = WRITTEN[way]
    assert reward(fenced(FORGER + program), tests).outcome != "right"


def test_functions_that_tests_pass_work(reward):
    program = """
import pickle
def f(g, *xs): return g(*xs)
def text(x): return x
def pickled(x): return pickle.dumps(x)
"""
    tests = """
import functools, math, operator, pickle
from collections import namedtuple
assert f(len, [1, 2]) == 2 and f(int, "3") == 3 and f(str.upper, "a") == "A" and f(math.sqrt, 4) == 2.0
assert f(operator.add, 1, 2) == 3 and f(exec, "x = 1") is None and f(dict.fromkeys, [1]) == {1: None}
assert f(lambda x: 2 * x, 3) == 6 and f(functools.partial(lambda x, y: x - y, 5), 3) == 2
seen = []
f(seen.append, 7)
assert seen == [7]
class Twice:
    def __call__(self, x): return 2 * x
    def twice(self, x): return 2 * x
assert f(Twice(), 4) == 8 and f(Twice().twice, 5) == 10
@functools.lru_cache
def cached(x): return x + 1
assert f(cached, 1) == 2
assert eval(text("3 + 4")) == 7 and eval(text("x * [1, -2][0]"), {"x": 3}) == 3
exec("def g(x): return x + 1")
assert g(1) == 2 and eval("g(1)") == 2
assert pickle.loads(pickled({"a": [1, (2, 3)]})) == {"a": [1, (2, 3)]}
assert namedtuple("P", "x y")(1, 2).y == 2
"""
    result = reward(fenced(program), tests)
    assert result.outcome == "right", result.detail
    computed = "def f(x): return x + 1"  # no text has come from the program
    assert reward(fenced(computed), "for i in range(3): assert eval(f'abs({f(i)})') == i + 1").outcome == "right"

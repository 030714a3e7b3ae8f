"""Programs in Python, judged by tests in a sandbox.

The program is the last fenced block of the completion (after the last `</think>`). The reference holds the tests:
- JSON with "inputs" and "outputs", two lists of texts (APPS, TACO), or a list of objects with "input" and "output": the
  program is run on each input, and what it prints must equal the output, white space at the ends of lines and of the
  text aside;
- any other text is Python that is run after the program, in its namespace, and must not raise: asserts, for example.

Asserts run in one process with the program, so a program written to deceive could declare itself right; tests of
standard input and output cannot be deceived in this way. Leaving early (`os._exit`, `sys.exit`) does not pass.
"""

import json
import re
import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

from rlinf_algos.checks import check_range
from rlinf_algos.errors import RewardError
from rlinf_algos.rewards.base import Outcome, RewardResult
from rlinf_algos.rewards.registry import register_reward
from rlinf_algos.rewards.sandbox import SandboxLimits, SandboxRun, run_python

_BLOCK = re.compile(r"^[ \t]*```[ \t]*([A-Za-z0-9+]*)[^\n]*\n(.*?)^[ \t]*```[ \t]*$", flags=re.DOTALL | re.MULTILINE)
_RUNNER = """
import os, sys
verdict = os.dup(1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
names = {"__name__": "__main__"}
for file in ("program.py", "tests.py"):
    with open(file, encoding="utf-8") as text:
        exec(compile(text.read(), file, "exec"), names)
os.write(verdict, sys.stdin.buffer.read())
"""
Pairs = tuple[tuple[str, str], ...]


class CodeReward:
    """1.0 where the program passes every test; with `partial` the share of tests of input and output that it passes.

    Outcomes: right; wrong (the detail says which test, and how); unparseable (no fenced block); timeout and memory (at
    that limit); crashed (ended by a signal).

    Args:
        limits: of each run; see `SandboxLimits`.
        num_processes: programs that run at a time.
        partial: a share of the tests gives a share of the reward.
        allow_weak_isolation: take the weaker sandbox where the kernel has no namespaces to give. Each result then says
            so in its detail, and `weaknesses` says what is not protected.

    Raises:
        RewardError: the sandbox would be the weaker one, and that was not allowed.
    """

    def __init__(
        self,
        *,
        limits: SandboxLimits | None = None,
        num_processes: int = 2,
        partial: bool = False,
        allow_weak_isolation: bool = False,
    ) -> None:
        check_range("num_processes", num_processes, low=1, why="no process runs nothing")
        self._limits = limits or SandboxLimits()
        self._num_processes, self._partial = num_processes, partial
        self.weaknesses = run_python({}, ["-c", "pass"]).weaknesses
        """What the sandbox cannot protect on this machine; empty where it can all."""
        if self.weaknesses and not allow_weak_isolation:
            raise RewardError(
                f"the sandbox for code is weak on this machine: {'; '.join(self.weaknesses)}. Allow user namespaces "
                "(sysctl user.max_user_namespaces, or the container's settings), or accept it with "
                "allow_weak_isolation"
            )

    def close(self) -> None:
        """Nothing is held between calls."""

    def __call__(self, completion: str, reference: str) -> RewardResult:
        program = last_program(completion)
        pairs = _pairs(reference)
        if program is None:
            return RewardResult(value=0.0, outcome="unparseable")
        outcome, share, detail = self._by_pairs(program, pairs) if pairs else self._by_asserts(program, reference)
        value = share if self._partial else float(outcome == "right")
        if self.weaknesses:
            detail = "; ".join(filter(None, (detail, "run in the weak sandbox")))
        return RewardResult(value=value, outcome=outcome, answer=program, detail=detail)

    def score_batch(self, completions: Sequence[str], references: Sequence[str]) -> tuple[RewardResult, ...]:
        """One result for each pair, in order."""
        with ThreadPoolExecutor(self._num_processes) as threads:
            return tuple(threads.map(self, completions, references))

    def _by_pairs(self, program: str, pairs: Pairs) -> tuple[Outcome, float, str | None]:
        """Outcome of the first test that fails, and the share of tests passed (without `partial` the rest is not
        run)."""
        first: tuple[Outcome, str] | None = None
        num_passed = 0
        for i, (given, expected) in enumerate(pairs, start=1):
            run = run_python({"program.py": program}, ["program.py"], stdin=given, limits=self._limits)
            outcome, detail = _judged(run, is_passed=_lines(run.stdout) == _lines(expected))
            num_passed += outcome == "right"
            if outcome != "right" and first is None:
                first = outcome, f"test {i} of {len(pairs)}: {detail}"
                if not self._partial:
                    break
        return (*first[:1], num_passed / len(pairs), first[1]) if first else ("right", 1.0, None)

    def _by_asserts(self, program: str, tests: str) -> tuple[Outcome, float, str | None]:
        token = secrets.token_hex(16)
        files = {"program.py": program, "tests.py": tests, "runner.py": _RUNNER}
        run = run_python(files, ["runner.py"], stdin=token, limits=self._limits)
        outcome, detail = _judged(run, is_passed=run.stdout == token)
        return outcome, float(outcome == "right"), detail


@register_reward("code_tests")
def code_tests(completion: str, reference: str) -> RewardResult:
    """`CodeReward` with its defaults."""
    return _shared()(completion, reference)


@lru_cache(maxsize=1)
def _shared() -> CodeReward:
    return CodeReward(num_processes=1)


def last_program(completion: str) -> str | None:
    """The last fenced block of Python, or of no named language; None where there is none."""
    blocks = _BLOCK.findall(completion.rpartition("</think>")[2])
    programs = [text for language, text in blocks if language.lower() in ("", "python", "python3", "py")]
    return programs[-1] if programs else None


def _pairs(reference: str) -> Pairs:
    """Pairs of input and expected output; none where the reference is Python."""
    if not reference.strip():
        raise RewardError("code_tests: the reference is empty; the dataset row has no tests")
    try:
        tests = json.loads(reference)
    except ValueError:
        return ()
    if isinstance(tests, dict):
        inputs, outputs = tests.get("inputs", []), tests.get("outputs", [])
        is_paired = len(inputs) == len(outputs)
        tests = [{"input": i, "output": o} for i, o in zip(inputs, outputs, strict=True)] if is_paired else []
    pairs = [(p.get("input"), p.get("output")) for p in tests if isinstance(p, dict)] if isinstance(tests, list) else []
    if not pairs or len(pairs) < len(tests) or not all(isinstance(text, str) for pair in pairs for text in pair):
        raise RewardError(
            f"code_tests: the reference {reference[:80]!r} is JSON, but no tests; give "
            '{"inputs": ["1 2\\n"], "outputs": ["3\\n"]} or Python with asserts'
        )
    return tuple(pairs)  # type: ignore[return-value]


def _judged(run: SandboxRun, *, is_passed: bool) -> tuple[Outcome, str | None]:
    last_line = run.stderr.strip().rpartition("\n")[2][-200:]
    match run.ending:
        case "timeout" | "memory":
            return run.ending, last_line or f"at its limit of {run.ending.replace('timeout', 'time')}"
        case "killed":
            return "crashed", last_line or "ended by a signal"
        case "output":
            return "wrong", "too much output"
    if run.exit_code != 0:
        return "wrong", last_line or f"exit code {run.exit_code}"
    return ("right", None) if is_passed else ("wrong", f"it printed {run.stdout[:100]!r}")


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().split("\n")]

"""Judges Python programs by tests in a sandbox.

The program is the last fenced block of the completion (after the last `</think>`). The reference contains the tests:
- JSON with "inputs" and "outputs", two lists of texts (APPS, TACO), or a list of objects with "input" and "output": the
  program is run on each input and must print the output; white space at the ends of lines and of the text is ignored;
- the same with "fn_name": that function, or that method of a class `Solution`, is called with each list of arguments
  (APPS, TACO) or with one argument per line (LiveCodeBench), and must return the output;
- any other text is Python code, such as asserts, that sees the program's names and must not raise.

An expected number with a fraction has a relative tolerance of 1e-5. Results are judged outside the program's sandbox:
printed text and results of calls in this process, asserts in a second sandbox (see sandboxed/judge_side.py). Only data
leaves the program's sandbox, and the tests and expected results never enter it.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

from rlinf_algos.errors import RewardError
from rlinf_algos.ranges import check_range
from rlinf_algos.rewards.base import Outcome, RewardResult
from rlinf_algos.rewards.code_tests import (
    AssertTests,
    CallTests,
    InputTests,
    is_expected,
    is_expected_output,
    read_tests,
)
from rlinf_algos.rewards.sandbox import SandboxLimits, SandboxRun, run_python
from rlinf_algos.rewards.scoring import score

_LANGUAGE = re.compile(r"```[ \t]*([A-Za-z0-9+]*)")
_PYTHON = ("", "python", "python3", "py")
_INSIDE = Path(__file__).with_name("sandboxed")
MAX_TIMEOUTS = 3
"""Number of tests of one program that may time out; with `partial`, the tests after them count as failed."""
Verdict = tuple[Outcome, float, str | None]
"""Outcome of the first test that fails, share of tests passed, and what failed."""


class CodeReward:
    """1.0 if the program passes every test; with `partial`, the share of inputs or calls that it passes.

    Outcomes: right; wrong (the detail names the test and the failure); unparseable (no fenced block); timeout and
    memory (the program reached that limit); crashed (ended by a signal).

    Args:
        limits: limits of each run; see `SandboxLimits`.
        num_processes: number of programs that run at the same time.
        partial: whether the reward is the share of passed tests.
        allow_weak_isolation: use the weak sandbox if the kernel does not allow namespaces. Each result then notes this
            in its detail, and `weaknesses` lists what is not protected.

    Raises:
        RewardError: only the weak sandbox is available, and it is not allowed.
    """

    def __init__(
        self,
        *,
        limits: SandboxLimits | None = None,
        num_processes: int = 2,
        partial: bool = False,
        allow_weak_isolation: bool = False,
    ) -> None:
        check_range("num_processes", num_processes, low=1, why="without a process nothing runs")
        self._num_processes, self._partial = num_processes, partial
        self.weaknesses = run_python({}, ["-c", "pass"]).weaknesses
        """What the sandbox cannot protect on this machine; empty if it protects everything."""
        if self.weaknesses and not allow_weak_isolation:
            raise RewardError(
                f"the sandbox for code is weak on this machine: {'; '.join(self.weaknesses)}. Allow user namespaces "
                "(sysctl user.max_user_namespaces, or the container's settings), or accept it with "
                "allow_weak_isolation"
            )

        self._limits = limits or SandboxLimits()

    def close(self) -> None:
        """Does nothing: no resources are held between calls."""

    def __call__(self, completion: str, reference: str) -> RewardResult:
        tests = read_tests(reference)
        program = last_program(completion)
        if program is None:
            return RewardResult(value=0.0, outcome="unparseable")
        outcome, share, detail = self._verdict(program, tests)
        value = share if self._partial else float(outcome == "right")
        if self.weaknesses:
            detail = "; ".join(filter(None, (detail, "run in the weak sandbox")))
        return RewardResult(value=value, outcome=outcome, answer=program, detail=detail)

    def _verdict(self, program: str, tests: InputTests | CallTests | AssertTests) -> Verdict:
        match tests:
            case InputTests():
                return self._by_inputs(program, tests)
            case CallTests():
                return self._by_calls(program, tests)
            case AssertTests():
                return self._by_asserts(program, tests)

    def score_batch(self, completions: Sequence[str], references: Sequence[str]) -> tuple[RewardResult, ...]:
        """One result for each pair, in order."""
        with ThreadPoolExecutor(self._num_processes) as threads:
            return tuple(threads.map(lambda *pair: score(self, *pair), completions, references))

    def _run(self, files: Mapping[str, str], arguments: Sequence[str], **options: Any) -> SandboxRun:
        """Runs in the accepted mode only."""
        return run_python(files, arguments, limits=self._limits, allow_weak=bool(self.weaknesses), **options)

    def _by_inputs(self, program: str, tests: InputTests) -> Verdict:
        """The verdict of tests by input and output; without `partial`, the first failure stops them."""
        first: tuple[Outcome, str] | None = None
        num_passed, num_timeouts = 0, 0
        for i, (stdin, expected) in enumerate(tests.pairs, start=1):
            run = self._run({"program.py": program}, ["program.py"], stdin=stdin)
            is_right = is_expected_output(run.stdout, expected)
            outcome, detail = _ended(run) or _judged(is_right, f"it printed {run.stdout[:100]!r}")
            num_passed += outcome == "right"
            if outcome != "right" and first is None:
                first = outcome, f"test {i} of {len(tests.pairs)}: {detail}"
            num_timeouts += outcome == "timeout"
            if first is not None and (not self._partial or num_timeouts == MAX_TIMEOUTS):
                break
        return (*first[:1], num_passed / len(tests.pairs), first[1]) if first else ("right", 1.0, None)

    def _by_calls(self, program: str, tests: CallTests) -> Verdict:
        """The verdict of tests by calls. All calls are made in one process, until it ends."""
        order = json.dumps({"function": tests.function, "arguments": tests.arguments})
        files = {"program.py": program, "program_side.py": _script("program_side")}
        run = self._run(files, ["program_side.py", "calls"], stdin=order)
        answers = run.stdout.split("\n")[:-1]
        passed = [i < len(answers) and _is_right_call(answers[i], tests, i) for i in range(len(tests.outputs))]
        if all(passed) and run.ending == "exited":
            return "right", 1.0, None
        share = sum(passed) / len(passed)
        if all(passed) or passed.index(False) >= len(answers):
            outcome, detail = _ended(run) or ("wrong", "it ended before the call did")
        else:
            outcome, detail = "wrong", f"{tests.function} gave {answers[passed.index(False)][:100]}"
        number = f"call {passed.index(False) + 1} of {len(passed)}: " if not all(passed) else ""
        return outcome, share, f"{number}{detail}"

    def _by_asserts(self, program: str, tests: AssertTests) -> Verdict:
        """The verdict of asserts. The program runs in one sandbox and its tests in another; a channel connects them."""
        asks, tells = os.pipe(), os.pipe()
        wire = _script("wire")
        program_files = {"program.py": program, "program_side.py": _script("program_side"), "wire.py": wire}
        judge_files = {"judge_side.py": _script("judge_side"), "guard.py": _script("guard"), "wire.py": wire}
        with ThreadPoolExecutor(1) as threads:
            other = threads.submit(self._run, program_files, ["program_side.py", "serve"], channel=(asks[0], tells[1]))
            judge = self._run(judge_files, ["judge_side.py"], stdin=tests.text, channel=(tells[0], asks[1]))
            run = other.result()
        try:
            verdict = json.loads(judge.stdout)
        except ValueError:  # the tests did not finish, by themselves or because the program kept them waiting
            outcome, detail = _ended(run) or _ended(judge) or ("wrong", "the tests ended without a verdict")
        else:
            if "gone" in verdict:
                outcome, detail = _ended(run) or ("wrong", "it ended before its tests did")
            else:
                outcome, detail = _judged(verdict["passed"], verdict.get("detail"))
        return outcome, float(outcome == "right"), detail


def code_tests(completion: str, reference: str) -> RewardResult:
    """`CodeReward` with its defaults."""
    return _shared()(completion, reference)


@lru_cache(maxsize=1)
def _shared() -> CodeReward:
    return CodeReward(num_processes=1)


def last_program(completion: str) -> str | None:
    """The last fenced block of Python, or of no named language; None where there is none. One pass over the lines."""
    program, block, is_python = None, None, False
    for line in completion.rpartition("</think>")[2].split("\n"):
        stripped = line.strip(" \t\r")
        if block is None:
            if opening := _LANGUAGE.match(stripped):
                block, is_python = [], opening[1].lower() in _PYTHON
        elif stripped == "```":
            program, block = ("".join(block) if is_python else program), None
        else:
            block.append(line + "\n")
    return program


@lru_cache
def _script(name: str) -> str:
    return (_INSIDE / f"{name}.py").read_text(encoding="utf-8")


def _is_right_call(answer: str, tests: CallTests, i: int) -> bool:
    try:
        reply = json.loads(answer)
    except (ValueError, RecursionError):
        return False
    if not isinstance(reply, dict) or "value" not in reply:
        return False
    result, expected = reply["value"], tests.outputs[i]
    is_listed = tests.may_be_listed and isinstance(expected, list) and len(expected) == 1
    return is_expected(result, expected) or (is_listed and is_expected(result, expected[0]))


def _judged(is_right: bool, detail: str | None) -> tuple[Outcome, str | None]:
    return ("right", None) if is_right else ("wrong", detail)


def _ended(run: SandboxRun) -> tuple[Outcome, str | None] | None:
    """Outcome and detail of a program that failed; None for one that ended normally."""
    last_line = run.stderr.strip().rpartition("\n")[2][-200:]
    match run.ending:
        case "timeout" | "memory":
            return run.ending, last_line or f"at its limit of {run.ending.replace('timeout', 'time')}"
        case "killed":
            return "crashed", last_line or "ended by a signal"
        case "output":
            return "wrong", "too much output"
        case "files":
            return "wrong", "too many or too large files"
        case "exited":
            return ("wrong", last_line or f"exit code {run.exit_code}") if run.exit_code != 0 else None

"""Reads the tests of a program from a data set's format, and compares results with expected ones."""

import ast
import json
import math
from dataclasses import dataclass
from typing import Any

from rlinf_algos.errors import RewardError

RELATIVE_TOLERANCE, ABSOLUTE_TOLERANCE = 1e-5, 1e-8
"""The tolerances of numpy's allclose, with which APPS judges numbers."""
EXAMPLE = '{"inputs": ["1 2\\n"], "outputs": ["3\\n"]}, {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}'


@dataclass(frozen=True, slots=True)
class InputTests:
    """Pairs of standard input and expected output."""

    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class CallTests:
    """Calls of one function.

    Example: CallTests("add", ([1, 2],), (3,), may_be_listed=True)
    """

    function: str
    arguments: tuple[list[Any], ...]
    outputs: tuple[Any, ...]
    may_be_listed: bool
    """An expected list of one element also stands for the element, as in APPS."""


@dataclass(frozen=True, slots=True)
class AssertTests:
    """Python that must not raise."""

    text: str


def read_tests(reference: str) -> InputTests | CallTests | AssertTests:
    """The tests in a reference.

    Raises:
        RewardError: the reference is empty, or JSON in another format.
    """
    if not reference.strip():
        raise RewardError("code_tests: the reference is empty; the dataset row has no tests")
    try:
        tests = json.loads(reference)
    except ValueError:
        return _asserts(reference)
    parsed_tests = _listed(tests) if isinstance(tests, list) else _named(tests) if isinstance(tests, dict) else None
    if parsed_tests is None:
        raise RewardError(
            f"code_tests: the reference {reference[:80]!r} is JSON without tests; give {EXAMPLE} or Python with asserts"
        )
    return parsed_tests


def _asserts(reference: str) -> AssertTests:
    """Refuses text without a statement, such as `#### 42`: every program would pass it."""
    try:
        statements = ast.parse(reference).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise RewardError(
            f"code_tests: the reference {reference[:80]!r} is neither JSON nor Python: {error}; give {EXAMPLE} or "
            "Python with asserts"
        ) from error
    if not statements:
        raise RewardError(f"code_tests: the reference {reference[:80]!r} tests nothing; give {EXAMPLE} or asserts")
    return AssertTests(reference)


def is_expected(result: Any, expected: Any) -> bool:
    """Whether JSON values are equal; numbers within the tolerance if a fraction is expected."""
    if isinstance(expected, float) and isinstance(result, int | float) and not isinstance(result, bool):
        return _is_near(result, expected)
    if isinstance(expected, list) and isinstance(result, list):
        return len(result) == len(expected) and all(map(is_expected, result, expected))
    if isinstance(expected, dict) and isinstance(result, dict):
        return result.keys() == expected.keys() and all(is_expected(result[key], expected[key]) for key in expected)
    if isinstance(expected, bool) or isinstance(result, bool):
        return result is expected
    return type(result) in (type(expected), float) and result == expected


def _is_near(result: int | float, expected: float) -> bool:
    try:
        return math.isclose(result, expected, rel_tol=RELATIVE_TOLERANCE, abs_tol=ABSOLUTE_TOLERANCE)
    except OverflowError:  # an integer too large for a float, such as 10**400
        return False


def is_expected_output(printed: str, expected: str) -> bool:
    """Whether two outputs are equal line by line, ignoring white space at the ends, with numbers that have a fraction
    compared within the tolerance."""
    ours, theirs = _lines(printed), _lines(expected)
    return len(ours) == len(theirs) and all(map(_is_equal_line, ours, theirs))


def _is_equal_line(line: str, expected: str) -> bool:
    if line == expected:
        return True
    ours, theirs = line.split(), expected.split()
    return len(ours) == len(theirs) and all(map(_is_equal_word, ours, theirs))


def _is_equal_word(word: str, expected: str) -> bool:
    if word == expected:
        return True
    try:
        return "." in expected and math.isfinite(float(expected)) and is_expected(float(word), float(expected))
    except ValueError:
        return False


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().split("\n")]


def _listed(tests: list[Any]) -> InputTests | None:
    """[{"input": ..., "output": ...}, ...]"""
    pairs = [(test.get("input"), test.get("output")) for test in tests if isinstance(test, dict)]
    return _input_tests(pairs) if len(pairs) == len(tests) else None


def _named(tests: dict[str, Any]) -> InputTests | CallTests | None:
    """{"inputs": [...], "outputs": [...]}, with "fn_name" for calls."""
    inputs, outputs, function = tests.get("inputs"), tests.get("outputs"), tests.get("fn_name")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs) or not inputs:
        return None
    if function is None:
        return _input_tests(list(zip(map(_joined, inputs), map(_joined, outputs), strict=True)))
    if not isinstance(function, str) or not function.isidentifier():
        return None
    are_texts = all(isinstance(one, str) for one in inputs)  # LiveCodeBench: one argument per line
    if not are_texts and not all(isinstance(one, list) for one in inputs):
        return None
    return CallTests(
        function=function,
        arguments=tuple([_value(line) for line in one.split("\n")] if are_texts else _keys(one) for one in inputs),
        outputs=tuple(_value(one) if are_texts and isinstance(one, str) else one for one in outputs),
        may_be_listed=not are_texts,
    )


def _joined(text: Any) -> Any:
    """Joins lines: APPS has some inputs and outputs as lists of lines."""
    return "\n".join(text) if isinstance(text, list) and all(isinstance(line, str) for line in text) else text


def _input_tests(pairs: list[tuple[Any, Any]]) -> InputTests | None:
    if not pairs or not all(isinstance(text, str) for pair in pairs for text in pair):
        return None
    return InputTests(tuple(pairs))


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _keys(arguments: list[Any]) -> list[Any]:
    """Restores integer keys: JSON turns them into text. Only if all keys of a dict are integers."""
    return [
        {int(key): value for key, value in one.items()}
        if isinstance(one, dict) and one and all(key.lstrip("-").isdigit() for key in one)
        else one
        for one in arguments
    ]

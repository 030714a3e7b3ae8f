r"""Answers of mathematics, compared by what they mean: `\boxed{\frac{3}{4}}`, 0.75 and 75\% are the same.

The answer is looked for in the completion as `final_answer` says, both sides are brought into one notation, and then
1. equal notations are right;
2. two plain numbers, and tuples, sets, intervals and lists of them, are compared exactly. A percentage may be given as
   75 or as 0.75; a decimal of six or more places may stand for a fraction (0.333333 for 1/3);
3. everything else goes to math-verify in a pool of processes, with limits of time and memory.

Two decimals that differ are different: unlike math-verify, which rounds to six places, 1.39e-10 is not 2e-10.
"""

import importlib.util
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from pathlib import Path

from rlinf_algos.errors import RewardError
from rlinf_algos.rewards.base import OUTCOMES, RewardResult
from rlinf_algos.rewards.final_answer import final_answer
from rlinf_algos.rewards.notation import Collection, Number, assigned, collection, normalized, rational
from rlinf_algos.rewards.process_pool import ProcessPool
from rlinf_algos.rewards.registry import register_reward

MAX_CHARACTERS = 1000
"""Of an answer. A longer one is "unparseable": no reference comes near."""
MIN_PLACES = 6
"""Of a decimal that may stand for a fraction, as in math-verify."""
_CHECKER = Path(__file__).with_name("math_equal.py")


class MathReward:
    """1.0 where the answer in the completion means the same as the reference.

    Outcomes besides right and wrong: "unparseable" (no answer, or none that can be read), "timeout", "memory" and
    "crashed" (see `ProcessPool`); all of these have the value 0.0 and are told apart by the outcome.

    Args:
        num_processes: checking processes.
        time_limit_s: CPU seconds for one comparison.
        memory_limit_bytes: of one checking process.

    Raises:
        RewardError: math-verify is not installed.

    Example: MathReward()(r"so it is \boxed{3/4}", r"\frac{3}{4}") is right.
    """

    def __init__(self, *, num_processes: int = 2, time_limit_s: float = 5.0, memory_limit_bytes: int = 1 << 30) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise RewardError("the math reward needs math-verify: pip install 'rlinf-algos[math]'")
        self._pool = ProcessPool(
            _CHECKER,
            num_processes=num_processes,
            time_limit_s=time_limit_s,
            memory_limit_bytes=memory_limit_bytes,
        )

    def __enter__(self) -> "MathReward":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._pool.close()

    def __call__(self, completion: str, reference: str) -> RewardResult:
        return self.score_batch([completion], [reference])[0]

    def score_batch(self, completions: Sequence[str], references: Sequence[str]) -> tuple[RewardResult, ...]:
        """One result for each pair; equal pairs of answers are compared once.

        Raises:
            RewardError: a reference without an answer.
        """
        answers = [final_answer(completion) for completion in completions]
        results: list[RewardResult | None] = []
        to_compare: dict[tuple[str, str], list[int]] = {}
        for i, (answer, reference) in enumerate(zip(answers, references, strict=True)):
            result = _without_pool(answer, _expected(reference))
            results.append(result if isinstance(result, RewardResult) else None)
            if not isinstance(result, RewardResult):
                to_compare.setdefault(result, []).append(i)
        pairs = sorted(to_compare)  # one reference goes to one process, which reads it once
        for pair, (outcome, detail) in zip(pairs, self._pool.run(pairs), strict=True):
            for i in to_compare[pair]:
                results[i] = _result(outcome, answers[i], detail)
        assert None not in results, "every pair has its result"
        return tuple(result for result in results if result is not None)


@register_reward("math_answer")
def math_answer(completion: str, reference: str) -> RewardResult:
    """`MathReward` with its defaults and one process, which starts at the first need and ends with this one."""
    return _shared()(completion, reference)


@lru_cache(maxsize=1)
def _shared() -> MathReward:
    return MathReward(num_processes=1)


@lru_cache(maxsize=4096)
def _expected(reference: str) -> str:
    answer = final_answer(reference)
    normal = normalized(answer) if answer is not None and len(answer) <= MAX_CHARACTERS else ""
    if not normal:
        raise RewardError(
            f"math_answer: the reference {reference[-80:]!r} holds no answer of at most {MAX_CHARACTERS} characters; "
            "mend the dataset row"
        )
    return normal


def _without_pool(answer: str | None, expected: str) -> RewardResult | tuple[str, str]:
    """The result where it needs no math-verify, else (reference, answer) to compare."""
    if answer is None:
        return RewardResult(value=0.0, outcome="unparseable")
    if len(answer) > MAX_CHARACTERS:
        detail = f"the answer has {len(answer)} characters; at most {MAX_CHARACTERS} are read"
        return RewardResult(value=0.0, outcome="unparseable", detail=detail)
    found = normalized(answer)
    if not found:
        return RewardResult(value=0.0, outcome="unparseable", answer=answer)
    if found == expected:
        return _result("right", answer)
    (name, expected_value), (found_name, found_value) = assigned(expected), assigned(found)
    if not (name and found_name and name != found_name):
        expected, found = expected_value, found_value
    is_equal = found == expected or _decided(expected, found)
    return (expected, found) if is_equal is None else _result("right" if is_equal else "wrong", answer)


def _decided(expected_value: str, found_value: str) -> bool | None:
    """Whether two answers are equal, where both are plain numbers or collections of them; None for all others."""
    expected_number, found_number = rational(expected_value), rational(found_value)
    if expected_number and found_number:
        return _equal(expected_number, found_number)
    expected_all, found_all = collection(expected_value), collection(found_value)
    return _same_collection(expected_all, found_all) if expected_all and found_all else None


def _same_collection(expected: Collection, found: Collection) -> bool | None:
    """A list without brackets and a set are the same; everything else needs its own brackets and its own order."""
    kinds = {expected.brackets or "{}", found.brackets or "{}"}
    if len(kinds) > 1:
        return None if "{}" in kinds else False
    if kinds == {"{}"}:
        return all(
            any(_equal(one, other) for other in others.numbers)
            for ones, others in ((expected, found), (found, expected))
            for one in ones.numbers
        )
    return len(expected.numbers) == len(found.numbers) and all(
        _equal(*pair) for pair in zip(expected.numbers, found.numbers, strict=True)
    )


def _equal(one: Number, other: Number) -> bool:
    """Equal in value; a percentage may stand for its number or for a hundredth of it. A decimal of at least six places
    may be the rounded or cut form of a fraction."""
    if one.is_percent != other.is_percent:
        percent, plain = (one, other) if one.is_percent else (other, one)
        return plain.value in (percent.value, percent.value / 100)
    if one.value == other.value or one.is_decimal == other.is_decimal:
        return one.value == other.value
    places = max(one.places, other.places)
    return places >= MIN_PLACES and abs(one.value - other.value) < Fraction(1, 10**places)


def _result(outcome: str, answer: str | None, detail: str | None = None) -> RewardResult:
    if outcome not in OUTCOMES:
        raise RewardError(f"the checker answered {outcome!r}; one of {', '.join(OUTCOMES)} was expected")
    return RewardResult(value=float(outcome == "right"), outcome=outcome, answer=answer, detail=detail)  # type: ignore[arg-type]

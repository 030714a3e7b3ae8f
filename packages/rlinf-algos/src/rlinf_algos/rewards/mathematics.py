r"""Answers of mathematics, compared by what they mean: `\boxed{\frac{3}{4}}`, 0.75 and 75\% are the same.

The answer is looked for in the completion as `final_answer` says, the reference is taken whole; both are brought into
one notation (`notation`), taken apart (`structure`) and compared part by part (`comparison`). Numbers are compared
exactly, words as words. A percentage may be given as 75 or as 0.75, but 0.75% is not 3/4; a decimal of six or more
places may stand for a fraction (0.333333 for 1/3). What is left, two formulas, goes to math-verify in a pool of
processes, with limits of time and memory.

Two decimals that differ are different: unlike math-verify, which rounds to six places, 1.39e-10 is not 2e-10.
"""

import importlib.util
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from rlinf_algos.errors import RewardError
from rlinf_algos.rewards.base import OUTCOMES, RewardResult
from rlinf_algos.rewards.chinese import is_in_chinese, says
from rlinf_algos.rewards.comparison import Comparison, Question
from rlinf_algos.rewards.final_answer import reference_answer
from rlinf_algos.rewards.forms import choice_letter, names_of
from rlinf_algos.rewards.notation import normalized
from rlinf_algos.rewards.process_pool import ProcessPool
from rlinf_algos.rewards.registry import register_reward

MAX_CHARACTERS = 1000
"""Most characters of an answer. A longer one is "unparseable": no reference is nearly as long."""
_WORDS = re.compile(r"\\text\{.*|\\emptyset ?", flags=re.DOTALL)
_SENTENCE = re.compile(r"\s*[A-Z][a-z]+ (?:[a-z]+ ){1,9}(?:is|are|has|have)\b")
_SHORT_WORD = re.compile(r"(?!abc)(?=[a-z]?[a-z]?[aeiou])[a-z]{3}|[a-z]{3,}(?: [a-z]{3,})+")
_BARE_WORDS = re.compile(r"[A-Za-z' -]+")
_DECIMAL_COMMA = re.compile(r"\A(\$?[-\u2212]?[0-9]{1,9}),([0-9]{1,2}|[0-9]{4,9}|(?<=\b0,)[0-9]{3})(?![0-9,])")
_THINGS = re.compile(r"[A-Za-z]{3,20}: ?[0-9.]{1,12}(?:, ?[A-Za-z]{3,20}: ?[0-9.]{1,12}){1,9}")
"""Several values by what they are of: "apple: 2, pear: 3"."""
_VERDICTS: dict[str, bool] = {"right": True, "wrong": False, "unparseable": False}
_CHECKER = Path(__file__).with_name("math_equal.py")
_READER = Path(__file__).with_name("answer_side.py")
_READING_S = 60.0
"""By the clock, for a machine that has no time at all for the process that reads a completion."""


class MathReward:
    """1.0 where the answer in the completion means the same as the reference.

    Outcomes besides right and wrong: "unparseable" (no answer, or none that can be read), "timeout", "memory" and
    "crashed" (see `ProcessPool`); all of these have the value 0.0 and are told apart by the outcome.

    Answers are looked for in a process of their own, so that no text holds up the caller.

    Args:
        num_processes: checking processes, beside the one that reads completions.
        time_limit_s: CPU seconds for one comparison, and for reading one completion.
        wall_limit_s: seconds by the clock for it, however busy the machine is.
        memory_limit_bytes: most memory that one checking process may take.

    Raises:
        RewardError: math-verify is not installed.

    Example: MathReward()(r"so it is \boxed{3/4}", r"\frac{3}{4}") is right.
    """

    def __init__(
        self,
        *,
        num_processes: int = 2,
        time_limit_s: float = 1.0,
        wall_limit_s: float = 2.0,
        memory_limit_bytes: int = 1 << 30,
    ) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise RewardError("the math reward needs math-verify: pip install 'rlinf-algos[math]'")
        self._pool = ProcessPool(
            _CHECKER,
            num_processes=num_processes,
            time_limit_s=time_limit_s,
            wall_limit_s=wall_limit_s,
            memory_limit_bytes=memory_limit_bytes,
        )
        self._reader = ProcessPool(
            _READER,
            num_processes=1,
            time_limit_s=time_limit_s,
            wall_limit_s=max(wall_limit_s, _READING_S),
            memory_limit_bytes=memory_limit_bytes,
        )

    def __enter__(self) -> "MathReward":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._reader.close()
        self._pool.close()

    def __call__(self, completion: str, reference: str) -> RewardResult:
        return self.score_batch([completion], [reference])[0]

    def score_batch(self, completions: Sequence[str], references: Sequence[str]) -> tuple[RewardResult, ...]:
        """One result for each pair; equal pairs of answers are compared once.

        Raises:
            RewardError: a reference without an answer.
        """
        replies = self._read(completions, references)
        answers = [text if outcome == "read" else None for outcome, text in replies]
        results: list[RewardResult | None] = [None] * len(replies)
        to_compare: dict[tuple[str, str], list[int]] = {}
        for i, (answer, reference) in enumerate(zip(answers, references, strict=True)):
            expected = _expected(reference)
            if answer is not None and _form(reference)[0] == "chinese":
                results[i] = _result("right" if says(expected, answer) else "wrong", answer)
                continue
            is_bare = answer is not None and _is_in_words(reference) and _BARE_WORDS.fullmatch(answer)
            if answer and len(answer) == 1 and expected.isupper():
                answer = answer.upper()
            if answer is not None and "," in answer:
                answer = _with_point(answer, expected)
            found = _found(rf"\text{{{answer}}}" if is_bare else answer)
            if replies[i][0] != "read":
                found = _result(replies[i][0], None, replies[i][1])
            results[i] = found if isinstance(found, RewardResult) else None
            if not isinstance(found, RewardResult):
                to_compare.setdefault((expected, found), []).append(i)
        for pair, (outcome, detail) in self._compared(list(to_compare)).items():
            for i in to_compare[pair]:
                results[i] = _result(outcome, answers[i], detail)
        assert None not in results, "every pair has its result"
        return tuple(result for result in results if result is not None)

    def _read(self, completions: Sequence[str], references: Sequence[str]) -> list[tuple[str, str | None]]:
        """("read", the answer of a completion or None) for each, or the outcome and detail of one that cannot be
        read."""
        pairs = zip(completions, references, strict=True)
        return self._reader.run([(completion, *_form(reference)) for completion, reference in pairs])

    def _compared(self, pairs: Sequence[tuple[str, str]]) -> dict[tuple[str, str], tuple[str, str | None]]:
        """(outcome, detail) of each pair (expected, found), both normalised."""
        outcomes: dict[tuple[str, str], tuple[str, str | None]] = {}
        waiting: dict[tuple[str, str], tuple[Question, ...]] = {}
        for pair in pairs:
            try:
                comparison = Comparison(*pair, known={})
                verdict = comparison.run()
            except RecursionError:
                outcomes[pair] = "memory", "nested too deeply"
                continue
            if verdict is None:
                waiting[pair] = tuple(dict.fromkeys(comparison.open))
            else:
                outcomes[pair] = "right" if verdict else "wrong", None
        ordered = sorted(waiting)  # one reference goes to one process, which reads it once
        items = [tuple(text for question in waiting[pair] for text in question) for pair in ordered]
        for pair, reply in zip(ordered, self._pool.run(items), strict=True):
            outcomes[pair] = _outcome(pair, waiting[pair], reply)
        return outcomes


def _outcome(
    pair: tuple[str, str], questions: Sequence[Question], reply: tuple[str, str | None]
) -> tuple[str, str | None]:
    """Decides right or wrong by the answers to the questions; where there are none, says why."""
    answers = reply[0].split(",")
    if any(answer not in _VERDICTS for answer in answers):
        return reply
    known = dict(zip(questions, map(_VERDICTS.__getitem__, answers), strict=True))
    verdict = Comparison(*pair, known=known).run()
    assert verdict is not None, "the first run asks all that a later one could"
    if not verdict and "unparseable" in answers:
        return "unparseable", None
    return "right" if verdict else "wrong", None


@register_reward("math_answer")
def math_answer(completion: str, reference: str) -> RewardResult:
    """`MathReward` with its defaults and one process, which starts at the first need and ends with this one."""
    return _shared()(completion, reference)


@lru_cache(maxsize=1)
def _shared() -> MathReward:
    return MathReward(num_processes=1)


@lru_cache(maxsize=4096)
def _expected(reference: str) -> str:
    if is_in_chinese(reference.strip()):
        return reference.strip()
    answer = reference_answer(reference)
    answer = rf"\text{{{answer}}}" if answer and _SHORT_WORD.fullmatch(answer) else answer
    normal = normalized(answer) if answer is not None and len(answer) <= MAX_CHARACTERS else ""
    if not normal:
        raise RewardError(
            f"math_answer: the reference {reference[-80:]!r} holds no answer of at most {MAX_CHARACTERS} characters; "
            "mend the dataset row"
        )
    return normal


@lru_cache(maxsize=4096)
def _form(reference: str) -> tuple[str, str]:
    """The form of a reference, and the names of its values, as the reading process takes them."""
    if is_in_chinese(reference.strip()):
        return "chinese", ""
    expected = _expected(reference)
    if _THINGS.fullmatch(reference.strip()):
        return "values", " ".join(re.findall(r"[A-Za-z]+(?=:)", reference))
    if _is_in_words(reference):
        return "words", ""
    if choice_letter(expected) is not None:
        return "choice", ""
    names = names_of(expected)
    return "values" if names else "", " ".join(names)


def _is_in_words(reference: str) -> bool:
    """Whether a reference begins with a word, and is no whole sentence."""
    return _WORDS.fullmatch(_expected(reference)) is not None and not _SENTENCE.match(reference)


def _with_point(answer: str, expected: str) -> str:
    """`3,5` as `3.5` where the reference is a decimal: without a space it is no list there, nor are these thousands."""
    is_decimal = re.fullmatch(r"-?[0-9]*\.[0-9]+.*", expected) is not None
    return _DECIMAL_COMMA.sub(r"\1.\2", answer) if is_decimal else answer


def _found(answer: str | None) -> RewardResult | str:
    """The normalised answer, or the result where there is none."""
    if answer is None:
        return RewardResult(value=0.0, outcome="unparseable")
    if len(answer) > MAX_CHARACTERS:
        detail = f"the answer has {len(answer)} characters; at most {MAX_CHARACTERS} are read"
        return RewardResult(value=0.0, outcome="unparseable", detail=detail)
    return normalized(answer) or RewardResult(value=0.0, outcome="unparseable", answer=answer)


def _result(outcome: str, answer: str | None, detail: str | None = None) -> RewardResult:
    if outcome not in OUTCOMES:
        raise RewardError(f"the checker answered {outcome!r}; one of {', '.join(OUTCOMES)} was expected")
    return RewardResult(
        value=float(outcome == "right"),
        outcome=outcome,  # type: ignore[arg-type]
        answer=answer,
        detail=detail,
        judge_failed=outcome == "crashed",
    )

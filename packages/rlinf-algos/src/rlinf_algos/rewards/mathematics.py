r"""Compares mathematical answers by their meaning: `\boxed{\frac{3}{4}}`, 0.75 and 75\% are the same.

`verdict` finds the answer and compares it with the reference: numbers exactly, words as words. A percentage may be
given as 75 or as 0.75, but 0.75% is not 3/4; a decimal of six or more places may stand for a fraction (0.333333 for
1/3). The remaining pairs of formulas go to math-verify in a pool of processes with time and memory limits.

Two decimals that differ are different: unlike math-verify, which rounds to six places, 1.39e-10 is not 2e-10.
"""

import importlib.util
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from rlinf_algos.errors import RewardError
from rlinf_algos.rewards.base import OUTCOMES, RewardResult
from rlinf_algos.rewards.comparison import Question
from rlinf_algos.rewards.process_pool import ProcessPool
from rlinf_algos.rewards.verdict import Verdict, decided, expected_answer

_VERDICTS: dict[str, bool] = {"right": True, "wrong": False, "unparseable": False}
_CHECKER = Path(__file__).with_name("math_equal.py")
_READER = Path(__file__).with_name("answer_side.py")
_READING_S = 60.0
"""Wall time limit for reading a completion, in case the machine is too busy to run the reading process."""


class MathReward:
    """1.0 if the answer in the completion means the same as the reference.

    Outcomes besides right and wrong: "unparseable" (no answer, or none that can be read), "timeout", "memory" and
    "crashed" (see `ProcessPool`); all of these have the value 0.0.

    Completions are read and compared in separate processes, so that no text can block the caller.

    Args:
        num_processes: checking processes, in addition to the one that reads completions.
        time_limit_s: CPU seconds for one comparison, and for reading one completion.
        wall_limit_s: wall-clock seconds for one comparison, however busy the machine is.
        memory_limit_bytes: maximum memory of one checking process.

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
        expected = [expected_answer(reference) for reference in references]
        verdicts = self._read(completions, references)
        questions = {
            (right, verdict.normalised): verdict.questions
            for right, verdict in zip(expected, verdicts, strict=True)
            if verdict.outcome == "open"
        }
        outcomes = self._compared(questions)
        results = []
        for right, verdict in zip(expected, verdicts, strict=True):
            compared = outcomes.get((right, verdict.normalised), (verdict.outcome, verdict.detail))
            results.append(_result(compared[0], verdict.answer, compared[1]))
        return tuple(results)

    def _read(self, completions: Sequence[str], references: Sequence[str]) -> list[Verdict]:
        replies = self._reader.run(list(zip(completions, references, strict=True)))
        return [
            _verdict(text or "") if outcome == "read" else Verdict(outcome, detail=text) for outcome, text in replies
        ]

    def _compared(
        self, questions: Mapping[tuple[str, str], Sequence[Question]]
    ) -> dict[tuple[str, str], tuple[str, str | None]]:
        """(outcome, detail) for each pair (expected, found) of normalised answers."""
        pairs = sorted(questions)  # sorted so that each reference goes to one process, which parses it once
        items = [tuple(text for question in questions[pair] for text in question) for pair in pairs]
        replies = zip(pairs, self._pool.run(items), strict=True)
        return {pair: _outcome(pair, questions[pair], reply) for pair, reply in replies}


def _verdict(text: str) -> Verdict:
    fields: dict[str, Any] = json.loads(text)
    fields["questions"] = tuple(map(tuple, fields["questions"]))
    return Verdict(**fields)


def _outcome(
    pair: tuple[str, str], questions: Sequence[Question], reply: tuple[str, str | None]
) -> tuple[str, str | None]:
    """(outcome, detail): right or wrong by the answers to the questions, or the reason why there are none."""
    answers = reply[0].split(",")
    if any(answer not in _VERDICTS for answer in answers):
        return reply
    is_right = decided(*pair, dict(zip(questions, map(_VERDICTS.__getitem__, answers), strict=True)))
    if not is_right and "unparseable" in answers:
        return "unparseable", None
    return "right" if is_right else "wrong", None


def math_answer(completion: str, reference: str) -> RewardResult:
    """`MathReward` with its defaults and one process, which starts at the first call and ends with this process."""
    return _shared()(completion, reference)


@lru_cache(maxsize=1)
def _shared() -> MathReward:
    return MathReward(num_processes=1)


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

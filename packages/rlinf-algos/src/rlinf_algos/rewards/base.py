"""What a reward is: a function from a completion and a reference answer to a `RewardResult`; a costly one takes a whole
batch at once."""

import math
import numbers
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, get_args, runtime_checkable

from rlinf_algos.errors import RewardError

Outcome = Literal["right", "wrong", "unparseable", "timeout", "memory", "crashed"]
"""right, wrong: the answer was found and checked. unparseable: there was no answer to check. The others say that the
check came to no end: its time was up, its memory was used up, or it crashed, be it the program that is judged or the
judge (`RewardResult.judge_failed`)."""

MAX_VALUE = 1e15
"""Of a reward, in size: sums of its square over a batch are numbers of float32."""
ALLOWED = f"a reward is a finite number between -{MAX_VALUE:g} and {MAX_VALUE:g}"
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
"""All outcomes of scoring a completion."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardPart:
    """One term of a weighted sum."""

    name: str
    weight: float
    result: "RewardResult"


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardResult:
    """A reward and how it came about. "unparseable" is not "wrong": the completion held no answer to check.

    Example: RewardResult(value=1.0, outcome="right", answer="18")
    """

    value: float
    """At most `MAX_VALUE` in size; in the rewards of this package that check an answer 1.0 for right, else 0.0."""
    outcome: Outcome
    answer: str | None = None
    """The answer as found in the completion; None where there was none."""
    detail: str | None = None
    """What a check that did not end in "right" had to say, for people."""
    judge_failed: bool = False
    """The reward itself failed on this completion, by an exception or because its process died, and the outcome is
    "crashed"; or a term of a weighted sum did. False for a program that crashed while it was judged."""
    parts: tuple[RewardPart, ...] = ()
    """The terms, where the value is a weighted sum of them."""
    has_verdict: bool = True
    """False: the value is a score, nothing judged the answer, and the outcome is a convention about the score."""

    def __post_init__(self) -> None:
        if not abs(self.value) <= MAX_VALUE:  # also where it is not a number
            raise RewardError(f"RewardResult.value={self.value} is not finite or too large; {ALLOWED}")
        if self.outcome not in OUTCOMES:
            raise RewardError(f"RewardResult.outcome={self.outcome!r}; use one of {', '.join(OUTCOMES)}")


def judge_failure(error: BaseException) -> RewardResult:
    """The result of a completion on which a reward of this package raised an exception."""
    frame = traceback.extract_tb(error.__traceback__)[-1:]
    place = f" ({Path(frame[0].filename).name}:{frame[0].lineno})" if frame else ""
    detail = f"{type(error).__name__}: {error}"[:500] + place
    return RewardResult(value=0.0, outcome="crashed", detail=detail, judge_failed=True)


def as_result(value: object, name: str) -> RewardResult:
    """A number or a truth value as a result. A truth value is a verdict; a number is a score, which counts as right
    from 1 on where an outcome is needed.

    Raises:
        RewardError: it is neither a number nor a `RewardResult`, or not finite.
    """
    if isinstance(value, RewardResult):
        return value
    if getattr(value, "ndim", None) == 0 and callable(item := getattr(value, "item", None)):
        value = item()  # of numpy or torch, np.isclose(...) for example
    has_verdict = isinstance(value, bool)
    if not isinstance(value, numbers.Real):
        raise RewardError(f"{name}: returned {type(value).__name__} {value!r:.80}; return a number or a RewardResult")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not abs(number) <= MAX_VALUE:
        raise RewardError(f"{name}: returned {number}; {ALLOWED}")
    return RewardResult(value=number, outcome="right" if number >= 1 else "wrong", has_verdict=has_verdict)


class RewardRule(Protocol):
    """What `make_reward` gives. Pure: the same arguments give the same result. Raises `RewardError` for an unusable
    reference."""

    def __call__(self, completion: str, reference: str, /) -> RewardResult: ...


class RewardFunction(Protocol):
    """A reward as its author writes it: as `RewardRule`, and it may return the number alone."""

    def __call__(self, completion: str, reference: str, /) -> RewardResult | float: ...


@runtime_checkable
class BatchReward(Protocol):
    """A reward that scores many completions faster together: in a pool of processes, or on a device.

    It holds resources; `close` gives them back and may be called twice. One that judges by what was asked, and not by
    the reference, has an attribute `reads_prompts = True`, and its `score_batch` takes the prompts as third argument.
    One with `reads_rows = True` takes the data rows, a dict of columns each, as fourth.
    One whose rounding depends on what else is in the batch has `depends_on_batch = True`.
    """

    def __call__(self, completion: str, reference: str, /) -> RewardResult: ...

    def score_batch(self, completions: Sequence[str], references: Sequence[str], /) -> tuple[RewardResult, ...]:
        """The same results as one call for each pair, in order."""
        ...

    def close(self) -> None: ...

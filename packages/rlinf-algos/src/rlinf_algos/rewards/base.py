"""The reward interface: a function from a completion and a reference answer to a `RewardResult`; a costly reward scores
a whole batch at once."""

import math
import numbers
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, get_args, runtime_checkable

from rlinf_algos.errors import RewardError

Outcome = Literal["right", "wrong", "unparseable", "timeout", "memory", "crashed"]
"""right, wrong: the answer was found and checked. unparseable: there was no answer to check. timeout, memory, crashed:
the check did not finish, because of the program under test or of the judge itself (`RewardResult.judge_failed`)."""

MAX_VALUE = 1e15
"""Largest absolute value of a reward, so that sums of its square over a batch do not overflow float32."""
ALLOWED = f"a reward is a finite number between -{MAX_VALUE:g} and {MAX_VALUE:g}"
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
"""All outcomes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardPart:
    """One term of a weighted sum."""

    name: str
    weight: float
    result: "RewardResult"


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardResult:
    """A reward with its outcome and details. "unparseable" differs from "wrong": there was no answer to check.

    Example: RewardResult(value=1.0, outcome="right", answer="18")
    """

    value: float
    """At most `MAX_VALUE` in absolute value. Rewards of this package that check an answer: 1.0 for right, else 0.0."""
    outcome: Outcome
    answer: str | None = None
    """The answer as found in the completion; None if there was none."""
    detail: str | None = None
    """Explanation for people if the outcome is not "right"."""
    judge_failed: bool = False
    """The reward itself failed on this completion (an exception, or its process died), so that the outcome is
    "crashed"; or a term of a weighted sum did. False if the program under test crashed."""
    parts: tuple[RewardPart, ...] = ()
    """The terms, if the value is a weighted sum."""
    has_verdict: bool = True
    """False: the value is a score; the answer was not judged, and the outcome is derived from the score."""

    def __post_init__(self) -> None:
        if not abs(self.value) <= MAX_VALUE:  # also true for NaN
            raise RewardError(f"RewardResult.value={self.value} is not finite or too large; {ALLOWED}")
        if self.outcome not in OUTCOMES:
            raise RewardError(f"RewardResult.outcome={self.outcome!r}; use one of {', '.join(OUTCOMES)}")


def close_reward(reward: object) -> None:
    """Gives back what a reward holds, such as processes or a model; nothing where it has no `close`."""
    close = getattr(reward, "close", None)
    if close is not None:
        close()


def judge_failure(error: BaseException) -> RewardResult:
    """The result for a completion on which a reward of this package raised an exception."""
    frame = traceback.extract_tb(error.__traceback__)[-1:]
    place = f" ({Path(frame[0].filename).name}:{frame[0].lineno})" if frame else ""
    detail = f"{type(error).__name__}: {error}"[:500] + place
    return RewardResult(value=0.0, outcome="crashed", detail=detail, judge_failed=True)


def as_result(value: object, name: str) -> RewardResult:
    """Converts a number or a bool to a `RewardResult`. A bool is a verdict; a number is a score, "right" from 1 on.

    Raises:
        RewardError: it is neither a number nor a `RewardResult`, or not finite.
    """
    if isinstance(value, RewardResult):
        return value
    if getattr(value, "ndim", None) == 0 and callable(item := getattr(value, "item", None)):
        value = item()  # a scalar of numpy or torch, for example from np.isclose(...)
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


PICTURE_FILES = "rlinf.pictures"
"""Key of a row under which a reward that reads pictures finds those of the prompt."""


class RewardRule(Protocol):
    """What `make_reward` returns. Pure: the same arguments give the same result. Raises `RewardError` for an unusable
    reference."""

    def __call__(self, completion: str, reference: str, /) -> RewardResult: ...


class RewardFunction(Protocol):
    """A reward as its author writes it: like `RewardRule`, but it may return a plain number."""

    def __call__(self, completion: str, reference: str, /) -> RewardResult | float: ...


@runtime_checkable
class BatchReward(Protocol):
    """A reward that scores many completions faster together: in a pool of processes, or on a device.

    It holds resources; `close` releases them and may be called twice. Optional attributes:
    `reads_prompts = True`: judges by the prompt; `score_batch` takes the prompts as third argument.
    `reads_rows = True`: `score_batch` takes the data rows, a dict of columns each, as fourth argument.
    `reads_pictures = True`, beside `reads_rows`: under `PICTURE_FILES` the rows have the files of the prompt's
    pictures, a tuple of bytes.
    `depends_on_batch = True`: the rounding of a score depends on the rest of the batch.
    """

    def __call__(self, completion: str, reference: str, /) -> RewardResult: ...

    def score_batch(self, completions: Sequence[str], references: Sequence[str], /) -> tuple[RewardResult, ...]:
        """The same results as one call for each pair, in order."""
        ...

    def close(self) -> None: ...

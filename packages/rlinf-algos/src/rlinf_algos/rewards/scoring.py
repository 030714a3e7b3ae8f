"""The one way to call a reward: for one completion, or for many by the batch form of the reward where it has one.

No failure becomes a 0 in silence. A reward of this package that raises on one completion gives it the outcome
"crashed" and marks the result (`RewardResult.judge_failed`), so that no text of a policy ends a run; callers count
these. A custom reward that raises ends the call with a `RewardError`: its author has to see where.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from rlinf_algos.errors import RewardError
from rlinf_algos.rewards.base import BatchReward, RewardFunction, RewardResult, as_result, judge_failure
from rlinf_algos.rewards.registry import get_reward

_LOG = logging.getLogger(__name__)
_PACKAGE = __name__.partition(".")[0] + "."


def score(reward: RewardFunction | str, completion: str, reference: str) -> RewardResult:
    """Calls the reward and makes sure of its result.

    Args:
        reward: a function or a name as for `get_reward`.
        completion: the text the policy produced, without the prompt.
        reference: the right answer, in the form the reward expects.

    Raises:
        RewardError: the reference is unusable; a custom reward raised (its exception is the cause) or returned neither
            a RewardResult nor a number.
    """
    function = get_reward(reward) if isinstance(reward, str) else reward
    name = reward if isinstance(reward, str) else getattr(reward, "__name__", repr(reward))
    where = f"reward {name!r} on completion {_short(completion)}, reference {_short(reference)}"
    try:
        result = function(completion, reference)
    except Exception as e:
        if _is_judge_failure(function, e):
            return judge_failure(e)
        raise RewardError(f"{where}: {type(e).__name__}: {e}") from e
    return as_result(result, where)


def score_all(
    reward: RewardFunction | str,
    completions: Sequence[str],
    references: Sequence[str],
    prompts: Sequence[str] | None = None,
    rows: Sequence[Mapping[str, Any]] | None = None,
) -> tuple[RewardResult, ...]:
    """A result for each completion with its own reference, in order.

    Args:
        reward: a function, a `BatchReward`, or a name as for `get_reward`.
        completions: texts the policy produced, without the prompts.
        references: the right answers, in the form the reward expects.
        prompts: what was asked, for rewards that read it (`RewardModel`, also as a term of a weighted sum); None: to
            those the references are the prompts.
        rows: the other columns of the data rows, for rewards that read them (a custom function).

    Raises:
        RewardError: as `score`; they have different lengths; or a batch form returned something else than a
            `RewardResult` for each.
    """
    for name, texts in (("references", references), ("prompts", prompts), ("rows", rows)):
        if texts is not None and len(completions) != len(texts):
            raise RewardError(f"{len(completions)} completions, {len(texts)} {name}; pass one for each")
    function = get_reward(reward) if isinstance(reward, str) else reward
    if not isinstance(function, BatchReward):
        return tuple(score(function, c, r) for c, r in zip(completions, references, strict=True))
    name = type(function).__name__
    reads_rows = getattr(function, "reads_rows", False)
    more = (prompts, rows) if reads_rows else (prompts,) if getattr(function, "reads_prompts", False) else ()
    try:
        results = tuple(function.score_batch(completions, references, *more))
    except RewardError:
        raise
    except Exception as e:
        if not _is_judge_failure(function, e):
            raise RewardError(f"reward {name} on a batch of {len(completions)}: {type(e).__name__}: {e}") from e
        columns = [completions, references, *more]
        return tuple(
            _score_alone(function, [None if column is None else column[i : i + 1] for column in columns])
            for i in range(len(completions))
        )
    are_results = all(isinstance(one, RewardResult) for one in results)  # pyright: ignore[reportUnnecessaryIsInstance]
    if len(results) != len(completions) or not are_results:
        kinds = sorted({type(result).__name__ for result in results})
        raise RewardError(
            f"reward {name}: score_batch returned {len(results)} results ({', '.join(kinds)}) for "
            f"{len(completions)} completions; return a RewardResult for each"
        )
    return results


def _score_alone(function: BatchReward, columns: Sequence[Any]) -> RewardResult:
    """One completion of a batch on which the reward raised, so that the others keep their own results."""
    try:
        (result,) = function.score_batch(*columns)
    except Exception as e:
        if _is_judge_failure(function, e):
            return judge_failure(e)
        raise
    return result


def _is_judge_failure(function: object, error: Exception) -> bool:
    """Whether a reward of this package failed on a text. A RewardError is about the reference or the settings, an
    OSError about the machine: neither is the text's fault, and neither may become a reward."""
    module = getattr(function, "__module__", None) or type(function).__module__
    if not module.startswith(_PACKAGE) or isinstance(error, RewardError | OSError):
        return False
    _LOG.warning("a reward failed on a completion, which counts as crashed", exc_info=error)
    return True


def _short(text: object) -> str:
    """The end of a text: answers are there."""
    quoted = repr(text)
    return quoted if len(quoted) <= 120 else f"...{quoted[-117:]}"

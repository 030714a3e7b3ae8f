"""Calls rewards: for one completion, or for many with the reward's batch form if it has one.

No failure silently becomes a 0. If a reward of this package raises on one completion, the result has the outcome
"crashed" and is marked (`RewardResult.judge_failed`), so that no generated text can end a run; callers count these
results. If a custom reward raises, the call raises a `RewardError` that shows its author where.
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
    """Calls the reward and checks its result.

    Args:
        reward: a function or a name as for `get_reward`.
        completion: the text that the policy generated, without the prompt.
        reference: the correct answer in the format that the reward expects.

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
    """One result for each pair of completion and reference, in order.

    Args:
        reward: a function, a `BatchReward`, or a name as for `get_reward`.
        completions: texts that the policy generated, without the prompts.
        references: the correct answers in the format that the reward expects.
        prompts: the prompts, for rewards that read them (`RewardModel`, also as a term of a weighted sum); None: these
            rewards use the references as prompts.
        rows: the other columns of the data rows, for rewards that read them (a custom function).

    Raises:
        RewardError: as `score`; the sequences have different lengths; or a batch form did not return one
            `RewardResult` for each completion.
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
    """Scores one completion of a batch on which the reward raised, so that the others keep their results."""
    try:
        (result,) = function.score_batch(*columns)
    except Exception as e:
        if _is_judge_failure(function, e):
            return judge_failure(e)
        raise
    return result


def _is_judge_failure(function: object, error: Exception) -> bool:
    """Whether a reward of this package failed on a text. A RewardError is caused by the reference or the settings, an
    OSError by the machine, so neither may become a reward."""
    module = getattr(function, "__module__", None) or type(function).__module__
    if not module.startswith(_PACKAGE) or isinstance(error, RewardError | OSError):
        return False
    _LOG.warning("a reward failed on a completion, which counts as crashed", exc_info=error)
    return True


def _short(text: object) -> str:
    """The end of a text, where the answer is."""
    quoted = repr(text)
    return quoted if len(quoted) <= 120 else f"...{quoted[-117:]}"

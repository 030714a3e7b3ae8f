"""The one way to call a reward, which never turns a crash into a 0: for one completion, or for many by the batch form
of the reward where it has one."""

from collections.abc import Mapping, Sequence
from typing import Any

from rlinf_algos.errors import RewardError
from rlinf_algos.rewards.base import BatchReward, RewardFunction, RewardResult, as_result
from rlinf_algos.rewards.registry import get_reward


def score(reward: RewardFunction | str, completion: str, reference: str) -> RewardResult:
    """Calls the reward and makes sure of its result.

    Args:
        reward: a function or a name as for `get_reward`.
        completion: the text the policy produced, without the prompt.
        reference: the right answer, in the form the reward expects.

    Raises:
        RewardError: the checker crashed (its exception is the cause) or returned neither a RewardResult nor a number.
    """
    function = get_reward(reward) if isinstance(reward, str) else reward
    name = reward if isinstance(reward, str) else getattr(reward, "__name__", repr(reward))
    where = f"reward {name!r} on completion {_short(completion)}, reference {_short(reference)}"
    try:
        result = function(completion, reference)
    except Exception as e:
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
        rows: the other columns of the data rows, for rewards that read them (a function of one's own).

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
        raise RewardError(f"reward {name} on a batch of {len(completions)}: {type(e).__name__}: {e}") from e
    if len(results) != len(completions) or not all(isinstance(result, RewardResult) for result in results):
        kinds = sorted({type(result).__name__ for result in results})
        raise RewardError(
            f"reward {name}: score_batch returned {len(results)} results ({', '.join(kinds)}) for "
            f"{len(completions)} completions; return a RewardResult for each"
        )
    return results


def _short(text: object) -> str:
    """The end of a text: answers are there."""
    shown = repr(text)
    return shown if len(shown) <= 120 else f"...{shown[-117:]}"

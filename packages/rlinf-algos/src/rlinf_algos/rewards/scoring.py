"""Many completions at once: by the batch form of a reward where it has one, else one by one."""

from collections.abc import Sequence

from rlinf_algos.errors import RewardError
from rlinf_algos.rewards.base import BatchReward, RewardFunction, RewardResult
from rlinf_algos.rewards.registry import get_reward, score


def score_all(
    reward: RewardFunction | str, completions: Sequence[str], references: Sequence[str]
) -> tuple[RewardResult, ...]:
    """A result for each completion with its own reference, in order.

    Args:
        reward: a function, a `BatchReward`, or a name as for `get_reward`.
        completions: texts the policy produced, without the prompts.
        references: the right answers, in the form the reward expects.

    Raises:
        RewardError: as `score`; the two have different lengths; or a batch form returned something else than a
            `RewardResult` for each.
    """
    if len(completions) != len(references):
        raise RewardError(f"{len(completions)} completions, {len(references)} references; pass one for each")
    function = get_reward(reward) if isinstance(reward, str) else reward
    if not isinstance(function, BatchReward):
        return tuple(score(function, c, r) for c, r in zip(completions, references, strict=True))
    name = type(function).__name__
    try:
        results = tuple(function.score_batch(completions, references))
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

"""A weighted sum of rewards, for example 0.9 for the answer and 0.1 for the format."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlinf_algos.errors import RewardError
from rlinf_algos.rewards.base import RewardFunction, RewardPart, RewardResult, close_reward
from rlinf_algos.rewards.scoring import score_all


class WeightedReward:
    """The sum of weight times value over the terms. Outcome and answer are those of the first term, which should be the
    one that checks the answer; every term's own result is in `RewardResult.parts`.

    Args:
        terms: (name, weight, reward) each; the names appear in logs.

    Raises:
        RewardError: no terms, equal names, or a weight of 0.

    Example: WeightedReward([("math", 0.9, MathReward()), ("format", 0.1, think_answer_format)])
    """

    reads_prompts = True
    """Always True, since a term may read prompts."""

    def __init__(self, terms: Sequence[tuple[str, float, RewardFunction]]) -> None:
        names = [name for name, _, _ in terms]
        if not terms or len(set(names)) < len(names) or not all(weight for _, weight, _ in terms):
            raise RewardError(
                f"weighted reward of {[(name, weight) for name, weight, _ in terms]}: it needs terms with different "
                "names and weights other than 0"
            )
        self._terms = tuple(terms)
        self.reads_rows = any(getattr(reward, "reads_rows", False) for _, _, reward in terms)
        self.reads_pictures = any(getattr(reward, "reads_pictures", False) for _, _, reward in terms)
        self.depends_on_batch = any(getattr(reward, "depends_on_batch", False) for _, _, reward in terms)

    def __call__(self, completion: str, reference: str) -> RewardResult:
        return self.score_batch([completion], [reference])[0]

    def score_batch(
        self,
        completions: Sequence[str],
        references: Sequence[str],
        prompts: Sequence[str] | None = None,
        rows: Sequence[Mapping[str, Any]] | None = None,
    ) -> tuple[RewardResult, ...]:
        """One result for each completion, in order; each term scores the whole batch at once."""
        columns = [score_all(reward, completions, references, prompts, rows) for _, _, reward in self._terms]
        return tuple(self._sum(row) for row in zip(*columns, strict=True))

    def close(self) -> None:
        for _, _, reward in self._terms:
            close_reward(reward)

    def _sum(self, results: Sequence[RewardResult]) -> RewardResult:
        parts = tuple(
            RewardPart(name=name, weight=weight, result=result)
            for (name, weight, _), result in zip(self._terms, results, strict=True)
        )
        value = sum(part.weight * part.result.value for part in parts)
        first = results[0]
        failed = next((result for result in results if result.judge_failed), None)
        detail = first.detail if failed is None else failed.detail
        return replace(first, value=value, detail=detail, judge_failed=failed is not None, parts=parts)

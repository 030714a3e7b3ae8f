"""A reward for each source of a mixture of data: mathematics by one rule, programs by another."""

from collections.abc import Mapping, Sequence
from typing import Any

from rlinf_algos.errors import RewardError
from rlinf_algos.rewards.base import RewardResult, RewardRule, close_reward
from rlinf_algos.rewards.scoring import score_all


class RewardBySource:
    """Scores each completion by the reward of the source that its data row names.

    Args:
        rewards: source -> its reward.
        column: column of the data row with the source, as in verl's data.

    Raises:
        RewardError: no rewards.

    Example: RewardBySource({"gsm8k": make_reward("numeric_match"), "math": make_reward("math_answer")})
    """

    reads_prompts = True
    """Always True, since a reward of a source may read prompts."""
    reads_rows = True

    def __init__(self, rewards: Mapping[str, RewardRule], *, column: str = "data_source") -> None:
        if not rewards:
            raise RewardError("a reward by source needs at least one source with its reward")
        self._rewards = dict(rewards)
        self._column = column
        self.reads_pictures = any(getattr(reward, "reads_pictures", False) for reward in rewards.values())
        self.depends_on_batch = any(getattr(reward, "depends_on_batch", False) for reward in rewards.values())

    def __call__(self, completion: str, reference: str) -> RewardResult:
        raise RewardError(f"a reward by source reads the column {self._column!r} of the data row; use score_all")

    def score_batch(
        self,
        completions: Sequence[str],
        references: Sequence[str],
        prompts: Sequence[str] | None = None,
        rows: Sequence[Mapping[str, Any]] | None = None,
    ) -> tuple[RewardResult, ...]:
        """One result for each completion, in order; each reward scores the completions of its source at once.

        Raises:
            RewardError: a row without the column, or with a source that has no reward.
        """
        if rows is None:
            raise RewardError(f"a reward by source reads the column {self._column!r} of the data rows; give rows")
        positions: dict[str, list[int]] = {}
        for i, row in enumerate(rows):
            positions.setdefault(self._source(row), []).append(i)
        results: dict[int, RewardResult] = {}
        for source, indices in positions.items():
            scored = score_all(
                self._rewards[source],
                [completions[i] for i in indices],
                [references[i] for i in indices],
                None if prompts is None else [prompts[i] for i in indices],
                [rows[i] for i in indices],
            )
            results |= dict(zip(indices, scored, strict=True))
        return tuple(results[i] for i in range(len(completions)))

    def close(self) -> None:
        for reward in self._rewards.values():
            close_reward(reward)

    def _source(self, row: Mapping[str, Any]) -> str:
        source = row.get(self._column)
        if source not in self._rewards:
            sources = ", ".join(map(repr, self._rewards))
            raise RewardError(f"a row has {self._column}={source!r}, which has no reward; known sources: {sources}")
        return str(source)

"""Runs rules that search a text by patterns in processes that can be killed.

The rules should take time linear in the text, and this enforces it: a completion that uses up its time is a "timeout",
one that uses up the memory a "memory", and one whose process dies is "crashed". So no text can block or crash the
caller's process.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlinf_algos.errors import RewardError
from rlinf_algos.rewards.base import RewardResult
from rlinf_algos.rewards.process_pool import ProcessPool

TIMED_RULES = ("multiple_choice", "numeric_match")
"""Rules that `make_reward` puts into a `TimedRule`. The math and code rewards have their own time limits; the others
only compare or count, which cannot hang."""
_CHECKER = Path(__file__).with_name("rule_side.py")


class TimedRule:
    """A rule of `TIMED_RULES` with a time limit.

    Args:
        rule: its name.
        options: keyword arguments of its class; none for a function.
        time_limit_s: CPU seconds for one completion.
        wall_limit_s: wall-clock seconds for one completion, in case the machine is too busy to run the process.
    """

    def __init__(
        self,
        rule: str,
        options: Mapping[str, Any] | None = None,
        *,
        time_limit_s: float = 1.0,
        wall_limit_s: float = 60.0,
    ) -> None:
        self._rule, self._options = rule, json.dumps(dict(options or {}))
        self._pool = ProcessPool(_CHECKER, num_processes=1, time_limit_s=time_limit_s, wall_limit_s=wall_limit_s)

    def close(self) -> None:
        self._pool.close()

    def __call__(self, completion: str, reference: str) -> RewardResult:
        return self.score_batch([completion], [reference])[0]

    def score_batch(self, completions: Sequence[str], references: Sequence[str]) -> tuple[RewardResult, ...]:
        """One result for each pair, in order.

        Raises:
            RewardError: a reference that the rule cannot use.
        """
        pairs = zip(completions, references, strict=True)
        replies = self._pool.run([(self._rule, self._options, *pair) for pair in pairs])
        return tuple(self._result(*reply) for reply in replies)

    def _result(self, outcome: str, text: str | None) -> RewardResult:
        if outcome == "judged":
            return RewardResult(**json.loads(text or ""))
        if outcome == "unusable":
            raise RewardError(text or "")
        return RewardResult(
            value=0.0,
            outcome=outcome,  # type: ignore[arg-type]
            detail=text,
            judge_failed=outcome == "crashed",
        )

"""Judges one completion by a rule; loaded by the processes of a `TimedRule`."""

import json
from functools import lru_cache

from rlinf_algos.errors import RewardError
from rlinf_algos.rewards import MultipleChoice, RewardFunction, get_reward


def check(rule: str, options: str, completion: str, reference: str) -> list[str]:
    """Returns: ["judged", the fields of its `RewardResult` as JSON], or ["unusable", what is wrong with the
    reference]."""
    try:
        result = _rule(rule, options)(completion, reference)
    except RewardError as error:
        return ["unusable", str(error)]
    fields = ("value", "outcome", "answer", "detail", "has_verdict")
    return ["judged", json.dumps({name: getattr(result, name) for name in fields})]


@lru_cache
def _rule(name: str, options: str) -> RewardFunction:
    return MultipleChoice(**json.loads(options)) if name == "multiple_choice" else get_reward(name)

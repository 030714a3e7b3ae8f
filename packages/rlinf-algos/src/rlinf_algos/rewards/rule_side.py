"""Judges one completion by a rule; runs in the processes of a `TimedRule`.

The rules are imported with this module, so that their import does not count towards the time of a completion.
"""

import json
from functools import lru_cache

from rlinf_algos.errors import RewardError
from rlinf_algos.rewards.base import RewardFunction
from rlinf_algos.rewards.choice import MultipleChoice
from rlinf_algos.rewards.numeric import numeric_match


def check(rule: str, options: str, completion: str, reference: str) -> list[str]:
    """Returns: ["judged", the fields of the `RewardResult` as JSON], or ["unusable", the error in the reference]."""
    try:
        result = _rule(rule, options)(completion, reference)
    except RewardError as error:
        return ["unusable", str(error)]
    fields = ("value", "outcome", "answer", "detail", "has_verdict")
    return ["judged", json.dumps({name: getattr(result, name) for name in fields})]


@lru_cache
def _rule(name: str, options: str) -> RewardFunction:
    return MultipleChoice(**json.loads(options)) if name == "multiple_choice" else numeric_match

"""Reads a completion and compares its answer; runs in the reading process of a `MathReward`."""

import json
from dataclasses import asdict

from rlinf_algos.rewards.verdict import verdict_of


def check(completion: str, reference: str) -> list[str]:
    """Returns: ["read", a `Verdict` as JSON]."""
    return ["read", json.dumps(asdict(verdict_of(completion, reference)))]

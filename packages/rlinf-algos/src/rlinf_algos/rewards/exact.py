"""The whole completion must be the answer."""

from rlinf_algos.errors import RewardError
from rlinf_algos.rewards.base import RewardResult


def exact_match(completion: str, reference: str) -> RewardResult:
    """1.0 if completion and reference are equal up to white space around them; case and inner spaces count.

    A completion of only white space is "unparseable".

    Raises:
        RewardError: an empty reference, which every empty completion would match.

    Example: exact_match(" 579\\n", "579") is right; exact_match("5 79", "579") is wrong.
    """
    answer, expected = completion.strip(), reference.strip()
    if not expected:
        raise RewardError("exact_match: the reference is empty; the dataset row has no answer")
    if not answer:
        return RewardResult(value=0.0, outcome="unparseable")
    is_right = answer == expected
    return RewardResult(value=float(is_right), outcome="right" if is_right else "wrong", answer=answer)

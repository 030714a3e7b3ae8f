"""Whether a completion has the form `<think> ... </think> <answer> ... </answer>` (DeepSeek-R1, arXiv:2501.12948)."""

from rlinf_algos.rewards.base import RewardResult

_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def think_answer_format(completion: str, reference: str) -> RewardResult:
    """1.0 if each tag occurs exactly once, in order, with only white space around the two parts, and the answer is not
    blank. The thought may be blank, since some templates omit it.

    Does not check the answer; the reference is not used. A completion in another format is "unparseable".
    """
    parts, rest = [], completion
    for tag in _TAGS:
        before, separator, rest = rest.partition(tag)
        if not separator or completion.count(tag) != 1:
            return RewardResult(value=0.0, outcome="unparseable", has_verdict=False)
        parts.append(before)
    before_thought, _, between, answer = parts
    if before_thought.strip() or between.strip() or rest.strip() or not answer.strip():
        return RewardResult(value=0.0, outcome="unparseable", has_verdict=False)
    return RewardResult(value=1.0, outcome="right", answer=answer.strip(), has_verdict=False)

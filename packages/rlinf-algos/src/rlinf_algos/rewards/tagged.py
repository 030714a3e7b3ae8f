"""Whether a completion has the form `<think> ... </think> <answer> ... </answer>` (DeepSeek-R1, arXiv:2501.12948)."""

from rlinf_algos.rewards.base import RewardResult

_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def think_answer_format(completion: str, reference: str) -> RewardResult:
    """1.0 where each tag is there once, in order, with nothing but white space around the two parts, and the answer is
    not blank; the thought may be, as where a template leaves it out.

    Says nothing about the answer being right; the reference is not used. A completion of another form is "unparseable".
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

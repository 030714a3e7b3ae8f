"""Whether a completion has the form `<think> ... </think> <answer> ... </answer>` (DeepSeek-R1, arXiv:2501.12948)."""

import re

from rlinf_algos.rewards.base import RewardResult
from rlinf_algos.rewards.registry import register_reward

_FORM = re.compile(r"\s*<think>(?P<think>.*)</think>\s*<answer>(?P<answer>.*)</answer>\s*", flags=re.DOTALL)
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


@register_reward("think_answer_format")
def think_answer_format(completion: str, reference: str) -> RewardResult:
    """1.0 where each tag is there once, in order, with nothing but white space around the two parts.

    Says nothing about the answer being right; the reference is not used. A completion of another form is "unparseable".
    """
    form = _FORM.fullmatch(completion)
    if form is None or any(completion.count(tag) != 1 for tag in _TAGS):
        return RewardResult(value=0.0, outcome="unparseable", has_verdict=False)
    return RewardResult(value=1.0, outcome="right", answer=form["answer"].strip(), has_verdict=False)

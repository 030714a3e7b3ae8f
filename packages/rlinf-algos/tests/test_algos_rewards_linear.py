"""Every rule that reads a completion takes time linear in it: four times the text, about four times the work.

A rule is a line in `RULES`, a text that may hurt is a line in `UNITS`; each rule reads each unit repeated. A quadratic
rule takes sixteen times as long at `SIZES`, where that is far above what a loaded machine adds to a few milliseconds.
"""

import time
from collections.abc import Callable

import pytest

from rlinf_algos.rewards.boxes import last_boxed
from rlinf_algos.rewards.chinese import claim
from rlinf_algos.rewards.choice import stated_letter
from rlinf_algos.rewards.exact import exact_match
from rlinf_algos.rewards.final_answer import final_answer, reference_answer
from rlinf_algos.rewards.numeric import final_number
from rlinf_algos.rewards.program import last_program
from rlinf_algos.rewards.tagged import think_answer_format

RULES: dict[str, Callable[[str], object]] = {
    "final answer": final_answer,
    "final answer in words": lambda text: final_answer(text, in_words=True),
    "final answer of several values": lambda text: final_answer(text, names=("x", "y")),
    "claim in Chinese": claim,
    "reference": reference_answer,
    "box": last_boxed,
    "numeric": final_number,
    "choice": stated_letter,
    "form": lambda text: think_answer_format(f"<think>{text}", ""),
    "program": last_program,
    "exact": lambda text: exact_match(text, "5"),
}
SHORT = ("box", "choice", "form", "program", "exact")
"""Those of every run of the tests; the others contain much of the same, and take seconds each."""

UNITS = (
    " ", "\t", "\n", " \n", "\n\n\n", "\u00a0", "\u3000", "\r\n", "\u200b", "\x00",
    "0", "1,", "1,111", "1 ", ".5", "-", "1e5", "1/2", "%", "9.",
    "a", "a ", "A)", "(A) ", "B, ", "B or ", "and ", "not ", "is ", "so ", "therefore ", "because ", ", which ",
    "{", "}", "{}", "(", ")", "()", "[", "]", "|", "<", ">", ",", ";", ":", "=", "'", '"', "_", "^", "&", "#", "*",
    "**", "`", "```", "```\n", "```py\n",
    "``` \n ```", "~", "$", "$$", "\\$5 ", "$1 ", "$a$ ", "\\(", "\\)", "\\[", "\\]", "\\\\", "\\",
    "\\frac", "\\frac{", "\\frac{1}{2}", "\\text{", "\\text{a}", "\\textbf{(A)", "\\begin{pmatrix}", "\\sqrt{",
    "\\boxed", "\\boxed ", "\\boxed{", "\\boxed{}", "\\boxed{1}", "\\boxed{1}, ", "\\boxed 2 or ", "\\boxed{{}",
    "\\fbox{ ",
    "####", "#### ", "#### 1\n", "#### a\n", "#### 1. A\n", "answer", "answer is ", "answer is A ", "answer: ",
    "answer $x$ ", "Answer\n", "the answer is 5. ", "option B is ", "choose A ", "I choose ",
    "<think>", "</think>", "<answer>", "</answer>", "<answer></answer>", "</think><answer>", "<b>", "<", "&lt;",
    "答案是", "答案是5。", "选", "。", "\uff0c", "\uff15", "个", "\u0301\u0316", "\ud800", "\ufdfa", "\U0001d401",
    "\u2212", "½", "²", "三", "三种", "三分之", "星期", "是", "<sup>", "<sup>2</sup>", "x is ", "- x = 1\n",
    "| x | 1 |\n", "all real numbers ", "between 1 and 2 ", "interval from 1 to 2 ", "half an hour ", "that ", ", as ",
    ", leaving 5", "3 buses. ", "out of the 5 ",
    "Check: ", "to verify 1. ", "下午4点", "可以买8支,还剩2元", "1 3/4 ", "5 degrees below zero ",
    "7 sacks for 2 cows ", "In 2 days, ", "has six x ", "A is 1 and a b is 2", "the 1st of May ", "π ≈ 3 ",
    "1 hen or 2 cows ",
    "1 apple ", "apples ", "It is 5. ", "Is it? ", "x = 1\n", "x=1, ", "Mr. ",
)  # fmt: skip
SIZES = (5_000, 20_000)
"""Characters of the shorter and the longer text."""
MAX_RATIO = 8.0
"""Of CPU times: linear work gives 4, quadratic work gives 16."""
NEGLIGIBLE_S = 0.02
"""What is added to the bound for the cost of a call that does not grow, and for the clock."""


def _cpu_s(rule: Callable[[str], object], text: str) -> float:
    start = time.process_time()
    rule(text)
    return time.process_time() - start


@pytest.mark.parametrize(
    "name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.slow) for name in RULES]
)
def test_work_grows_linearly(name):
    assert len(UNITS) >= 80
    slow = {}
    for unit in UNITS:
        short, long = ((f"The answer is A{unit * (size // len(unit))}") for size in SIZES)
        for _ in range(4):  # a busy machine may slow one try down, a quadratic rule is slow in all of them
            spent_s = _cpu_s(RULES[name], short), _cpu_s(RULES[name], long)
            if spent_s[1] <= MAX_RATIO * spent_s[0] + NEGLIGIBLE_S:
                break
        else:
            slow[unit] = spent_s
    assert not slow

"""What recipes of tool use need beside their tools: the reward of questions with several right answers."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from typing import Any

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)
ANSWERS = "golden_answers"
"""Column of a row that has all right answers; without it the reference answer is the only one."""


def answers_exactly(completion: str, answer: str, row: Mapping[str, Any]) -> float:
    """1.0 if the last `<answer> ... </answer>` is one of the right answers: the exact match of open-domain question
    answering (SQuAD, arXiv:1606.05250), which ignores case, punctuation, articles and white space."""
    answers = _ANSWER.findall(completion)
    right = row.get(ANSWERS) or [answer]
    right = [right] if isinstance(right, str) else right
    return float(bool(answers) and normalized(answers[-1]) in {normalized(str(one)) for one in right})


def normalized(text: str) -> str:
    """The text as exact match compares it.

    Example: " The Eiffel-Tower. " -> "eiffeltower"
    """
    bare = text.lower().translate(_WITHOUT_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())

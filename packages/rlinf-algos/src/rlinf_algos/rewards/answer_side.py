"""Finds the answer in a completion; loaded by the reading process of a `MathReward`."""

import re

from rlinf_algos.rewards.chinese import claim
from rlinf_algos.rewards.choice import stated_letter
from rlinf_algos.rewards.final_answer import final_answer
from rlinf_algos.rewards.forms import choice_letter
from rlinf_algos.rewards.mathematics import MAX_CHARACTERS
from rlinf_algos.rewards.notation import normalized


def check(completion: str, form: str, names: str) -> list[str | None]:
    """Returns: ["read", the answer; None where there is none].

    Args:
        form: of the reference: "words", "chinese" words, the letter of a "choice", several "values", or "" for others.
        names: of the values, with blanks between them; one "-" for each that has no name.
    """
    if form == "chinese":
        return ["read", claim(completion)]
    is_choice = form == "choice"
    answer = final_answer(completion, in_words=form == "words", names=tuple(names.split()))
    letter = re.fullmatch(r"(?:\\[a-z]+\{)?\(?([A-Za-z])\)?\}?", answer) if is_choice and answer else None
    if letter:
        return ["read", letter[1]]
    if is_choice and (answer is None or choice_letter(normalized(answer[:MAX_CHARACTERS])) is None):
        answer = stated_letter(completion) or answer
    return ["read", answer]

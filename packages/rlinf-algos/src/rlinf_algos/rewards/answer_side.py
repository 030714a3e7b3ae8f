"""Finds the answer in a completion; loaded by the reading process of a `MathReward`."""

from rlinf_algos.rewards.choice import stated_letter
from rlinf_algos.rewards.final_answer import final_answer
from rlinf_algos.rewards.forms import choice_letter
from rlinf_algos.rewards.mathematics import MAX_CHARACTERS
from rlinf_algos.rewards.notation import normalized


def check(completion: str, in_words: str, is_choice: str) -> list[str | None]:
    """Returns: ["read", the answer; None where there is none].

    Args:
        in_words: not empty where an answer in words is looked for.
        is_choice: not empty where the reference is the letter of a choice.
    """
    answer = final_answer(completion, in_words=bool(in_words))
    if is_choice and answer and len(answer) == 1 and answer.isalpha():
        return ["read", answer.upper()]
    if is_choice and (answer is None or choice_letter(normalized(answer[:MAX_CHARACTERS])) is None):
        answer = stated_letter(completion) or answer
    return ["read", answer]

r"""The letter of a multiple-choice question, as GPQA asks for it; the last one that is stated wins.

What counts as a statement, in the text after the last `</think>`:
- `\boxed{B}`, also `\boxed{\text{B}}`, `\boxed{(B)}` and `\boxed{B. mitochondria}`;
- "answer: B", "answer is (B)", "option B is correct", "choose B", with or without bold type, brackets and LaTeX;
- a line that is nothing but the letter: `B`, `(B)`, `**B.**`;
- the whole text, where it begins with the letter and a bracket, point or colon (`B) because ...`).

A small letter counts only in a box, in brackets, or alone: "the answer is a bit long" states nothing.
Departs from simple-evals, which takes the first "Answer: X".
"""

import re

from rlinf_algos.errors import RewardError
from rlinf_algos.rewards.base import RewardResult
from rlinf_algos.rewards.registry import register_reward

_WRAPPED = r"(?:\*\*|\\text(?:bf)?\{|\\mathrm\{|[$({\[]|[ \t])*"
_LETTER = _WRAPPED + r"(?<![A-Za-z])(?:([A-Z])|(?<=[({\[])([a-z])(?=[)}\]]))(?![A-Za-z0-9'])"
_IS = r"(?i:\s+(?:is|would be|must be|should be))?(?:\*\*)?\s?[:=]?"
_STATEMENTS = re.compile(
    "|".join(
        (
            r"\\boxed\s*\{" + _WRAPPED + r"([A-Za-z])(?![A-Za-z0-9'])",
            r"\b(?i:answer|option|choice)" + _IS + _LETTER,
            r"\b(?i:choose|pick|select)s?(?i:\s+(?:option|choice|answer))?\s?:?" + _LETTER,
            r"^[ \t]*(?:\*\*)?\(?([A-Za-z])\)?[.:]?(?:\*\*)?[ \t]*$",
            r"\A\s*(?:\*\*)?\(?([A-Z])[).:](?=\s|\*|$)",
        )
    ),
    flags=re.MULTILINE,
)


def stated_letter(text: str, num_choices: int = 26) -> str | None:
    """The last letter stated as the answer, as a capital; None where there is none among the choices.

    Example: stated_letter("First I took A. The answer is (C).") == "C".
    """
    last = None
    for statement in _STATEMENTS.finditer(text.rpartition("</think>")[2]):
        letter = next(group for group in statement.groups() if group is not None).upper()
        if ord(letter) - ord("A") < num_choices:
            last = letter
    return last


@register_reward("multiple_choice")
def multiple_choice(completion: str, reference: str) -> RewardResult:
    """1.0 where the last stated letter is that of the reference.

    Args:
        completion: any text; without a stated letter it is "unparseable".
        reference: a letter, bare or in any form that `stated_letter` reads.

    Raises:
        RewardError: the reference states no letter.
    """
    expected = stated_letter(reference.strip())
    if expected is None:
        raise RewardError(f"multiple_choice: the reference {reference[-80:]!r} is no letter; mend the dataset row")
    found = stated_letter(completion)
    if found is None:
        return RewardResult(value=0.0, outcome="unparseable")
    is_right = found == expected
    return RewardResult(value=float(is_right), outcome="right" if is_right else "wrong", answer=found)

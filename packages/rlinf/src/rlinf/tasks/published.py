r"""Published benchmark sets: their columns, rewards and prompts.

Several column names are accepted per set, because sets are published more than once (for example AIME with `problem`
and `answer`, or `Problem` and `Answer`); case is ignored. GPQA's choices are published with the right one first; here
their order depends only on the question, so that all runs and versions use the same. Prompts of several sets of
competition problems require `\boxed{}`, as in Qwen2.5-Math's evaluation.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlinf.errors import UserError
from rlinf.tasks.questions import Question, QuestionReader, check_number
from rlinf.tasks.row_values import RowError, text_of
from rlinf.tasks.rows import listed
from rlinf_algos.rewards import last_boxed

LETTERS = "ABCD"

BOXED_TEMPLATE = "{question}\n\nThink it through step by step and give the final answer in \\boxed{{}}."
NUMBER_TEMPLATE = "{question}\n\nThink it through step by step; the last line must be `#### ` and the final number."
CHOICE_TEMPLATE = (
    "{question}\n\nThink it through step by step; the last line must be `Answer: ` and the letter of one choice."
)


@dataclass(frozen=True, slots=True)
class PublishedSet:
    """One benchmark."""

    name: str
    title: str
    read: QuestionReader
    reward: str
    """A name in rlinf_algos.rewards."""
    template: str
    """Text of the prompt, with {question} for the question; other braces are doubled."""
    num_problems: int
    """Size of the published set; a file may contain fewer problems."""

    @property
    def source(self) -> str:
        """Its short name as a data set (`rlinf.hub.KNOWN_DATASETS`)."""
        return "gsm8k[test]" if self.name == "gsm8k" else self.name

    @property
    def reward_options(self) -> dict[str, int]:
        """Options of the reward."""
        return {"num_choices": len(LETTERS)} if self.reward == "multiple_choice" else {}


def published_set(name: str) -> PublishedSet | None:
    """Returns the set with this name; `AIME-24`, `aime_2024` and `aime24` are the same."""
    bare = re.sub(r"[-_ ]", "", name).casefold()
    return PUBLISHED.get(ALIASES.get(bare, bare))


def require_published(name: str, hint: str) -> PublishedSet:
    """As `published_set`.

    Raises: UserError that names a similar set.
    """
    published = published_set(name)
    if published is None:
        names = {one.name: one.name for one in PUBLISHED.values()}
        meant = names | {alias: PUBLISHED[bare].name for alias, bare in ALIASES.items()} | MISTAKEN
        close = difflib.get_close_matches(name.casefold(), meant, n=1)
        guess = f"did you mean {meant[close[0]]}?" if close else f"known: {', '.join(names)}"
        raise UserError(f"no benchmark is called {name!r}; {guess}", hint=hint)
    return published


# -- readers -------------------------------------------------------------------------------------------------------

QUESTION = ("problem", "question")


def read_gsm8k(values: Mapping[str, Any]) -> Question:
    """Reads GSM8K, whose answer is a worked solution that ends in `#### 42`."""
    answer = _text(values, ("answer",))
    check_number(answer, "answer")
    return Question(text=_text(values, QUESTION), answer=answer)


def read_integer_answer(values: Mapping[str, Any]) -> Question:
    r"""Reads AIME and AMC, whose answer is an integer, maybe written `27.0`, `033` or, in AIME 25, `336^\circ`."""
    answer = _text(values, ("answer",))
    bare = re.sub(r"\$|\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\degrees?\b|\u00b0", "", answer)
    number = re.fullmatch(r"\s*(-?)0*([0-9]+)(?:\.0*)?\s*", bare)
    if number is None:
        raise RowError(f"the answer must be a whole number, is {answer[:60]!r}")
    return Question(text=_text(values, QUESTION), answer=number[1] + number[2])


def read_math(values: Mapping[str, Any]) -> Question:
    r"""Reads MATH and Minerva: an answer, or a solution with the answer in its last `\boxed{}`."""
    if any(str(name).casefold() == "answer" for name in values):
        return Question(text=_text(values, QUESTION), answer=_text(values, ("answer",)))
    solution = _text(values, ("solution",))
    answer = last_boxed(solution)
    if not answer:
        raise RowError(f"the solution has no \\boxed{{}} with an answer: it ends {solution[-60:]!r}")
    return Question(text=_text(values, QUESTION), answer=answer)


def read_gpqa(values: Mapping[str, Any]) -> Question:
    """Reads GPQA: the right answer and three wrong ones, as A to D in an order that depends on the question."""
    right = _text(values, ("Correct Answer",)).strip()
    choices = [right, *(_text(values, (f"Incorrect Answer {i}",)).strip() for i in (1, 2, 3))]
    if len(set(choices)) < len(choices):
        raise RowError(f"two of the four choices are the same: {listed(choices)[:120]}")
    question = _text(values, ("Question",)).strip()
    ordered = sorted(choices, key=lambda choice: hashlib.sha256(f"{question}\0{choice}".encode()).digest())
    return Question(text=with_choices(question, ordered), answer=LETTERS[ordered.index(right)])


def read_mmlu(values: Mapping[str, Any]) -> Question:
    """Reads MMLU: four choices, and the right one's index, from 0, or letter."""
    choices = values.get("choices")
    if isinstance(choices, str) or not isinstance(choices, Sequence) or len(choices) != len(LETTERS):
        raise RowError(f"field 'choices' must be a list of {len(LETTERS)} texts, is {str(choices)[:60]!r}")
    answer = _text(values, ("answer",)).strip()
    letter = LETTERS[int(answer)] if answer in ("0", "1", "2", "3") else answer.upper()
    if letter not in tuple(LETTERS):
        raise RowError(f"field 'answer' must be 0 to 3 or A to D, is {answer[:60]!r}")
    return Question(text=with_choices(_text(values, QUESTION).strip(), [str(c) for c in choices]), answer=letter)


def with_choices(question: str, choices: Sequence[str]) -> str:
    """Returns the question, an empty line, and the choices after `A) ` and so on."""
    lines = [f"{letter}) {choice}" for letter, choice in zip(LETTERS, choices, strict=True)]
    return "\n".join([question, "", *lines])


def _text(values: Mapping[str, Any], names: Sequence[str]) -> str:
    """Returns the first of the columns that exists, ignoring case."""
    columns = {str(name).casefold(): name for name in reversed(list(values))}
    for name in names:
        if name.casefold() in columns:
            return text_of(values, columns[name.casefold()])
    raise RowError(f"no field {' or '.join(map(repr, names))}; the row has {listed(sorted(map(str, values)))}")


PUBLISHED: dict[str, PublishedSet] = {
    one.name.replace("_", ""): one
    for one in (
        PublishedSet("gsm8k", "GSM8K", read_gsm8k, "numeric_match", NUMBER_TEMPLATE, 1319),
        PublishedSet("aime24", "AIME 24", read_integer_answer, "math_answer", BOXED_TEMPLATE, 30),
        PublishedSet("aime25", "AIME 25", read_integer_answer, "math_answer", BOXED_TEMPLATE, 30),
        PublishedSet("math500", "MATH-500", read_math, "math_answer", BOXED_TEMPLATE, 500),
        PublishedSet("gpqa_diamond", "GPQA-diamond", read_gpqa, "multiple_choice", CHOICE_TEMPLATE, 198),
        PublishedSet("amc23", "AMC 23", read_integer_answer, "math_answer", BOXED_TEMPLATE, 40),
        PublishedSet("minerva_math", "Minerva", read_math, "math_answer", BOXED_TEMPLATE, 272),
        PublishedSet("mmlu_stem", "MMLU-STEM", read_mmlu, "multiple_choice", CHOICE_TEMPLATE, 3018),
    )
}

ALIASES = {
    "aime2024": "aime24",
    "aime2025": "aime25",
    "gpqa": "gpqadiamond",
    "gpqad": "gpqadiamond",
    "amc": "amc23",
    "amc2023": "amc23",
    "minerva": "minervamath",
    "gsm": "gsm8k",
    "gsm8ktest": "gsm8k",
    "hendrycksmath500": "math500",
    "mmlustemtest": "mmlustem",
}
"""Alternative name -> key of `PUBLISHED`, for the same problems."""
MISTAKEN = {"aime": "aime24 or aime25", "math": "math500", "mmlu": "mmlu_stem"}
"""Name of a larger set than the ones here -> suggestion for error messages."""

"""The final number of a worked solution, as GSM8K writes it: `... #### 1,234`.

The text after the last `</think>` is searched in this order:
1. the number right after the last `####` that precedes one, ignoring bold type and a currency sign; a numbered markdown
   heading such as `#### 1. Compute` does not count;
2. the last stated answer, a box or what follows "the answer is" (see `final_answer`): the number at its beginning, or
   otherwise the last number in it;
3. the last number anywhere in the text.

A number is an optional sign, digits with or without commas between groups of three, an optional fraction after a point,
an optional exponent; thousands may be separated as in LaTeX, `1{,}234` or `10\\,000`. A hyphen right after a letter,
a digit or a closing bracket is an operator or a dash, not a sign: the last number of "12-5" is 5. Numbers are compared
by value, exactly: 18, 18.0, 18.00 and 1.8e1 are equal, and so are 1234 and 1,234. A percent sign or a unit after the
number is ignored; a fraction such as 3/4 is two numbers.

Unlike verl's strict mode this does not require `####` in the completion, and takes the last one; unlike both of verl's
modes it compares values, not text.
"""

import re
from decimal import Decimal

from rlinf_algos.errors import RewardError
from rlinf_algos.rewards.base import RewardResult
from rlinf_algos.rewards.final_answer import stated_answer
from rlinf_algos.rewards.plain_text import plain_text

# An exponent has at most three digits: no answer has a longer one, and Decimal would reject it.
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w)\]}])[-+\u2212])?"
    r"(?:\\?[$\u20ac\u00a3\u00a5] ?)?"
    r"(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?P<exponent>[eE][-+]?[0-9]{1,3}(?![0-9]))?"
)
_THOUSANDS = re.compile(r"(?<=[0-9])(?:\{,\}|\\[,;:! ])(?=[0-9]{3}(?![0-9]))")
_MARKER = re.compile(r"####[ *_$:(]*(?=[-+\u2212\\$\u20ac\u00a3\u00a5.0-9])")
_HEADING = re.compile(r"[.):]\s+[A-Za-z]")


def final_number(text: str) -> Decimal | None:
    """The final number of a solution by the rule above, or None.

    Example: "6 * 3 = 18\\n#### 18" -> 18; "so $1,234.50 in all." -> 1234.50; "I do not know" -> None.
    """
    text = _THOUSANDS.sub(",", plain_text(text.rpartition("</think>")[2]))
    number = _marked(text) or _in_statement(stated_answer(text) or "") or _last(text)
    return _value(number) if number else None


def _marked(text: str) -> re.Match[str] | None:
    for marker in reversed(list(_MARKER.finditer(text))):
        number = _NUMBER.match(text, marker.end())
        if number and not _HEADING.match(text, number.end()):
            return number
    return None


def _in_statement(answer: str) -> re.Match[str] | None:
    return _NUMBER.match(answer.lstrip("$(* ")) or _last(answer)


def _last(text: str) -> re.Match[str] | None:
    last = None
    for last in _NUMBER.finditer(text):  # noqa: B007 - only the last match is needed
        pass
    return last


def numeric_match(completion: str, reference: str) -> RewardResult:
    """1.0 if the final numbers of completion and reference are equal in value.

    Args:
        completion: a solution in words; "unparseable" if it contains no number.
        reference: a number, or a whole GSM8K answer that ends in `#### number`.

    Raises:
        RewardError: the reference contains no number.
    """
    expected = final_number(reference)
    if expected is None:
        raise RewardError(f"numeric_match: the reference {reference[-80:]!r} contains no number; fix the dataset row")
    number = final_number(completion)
    if number is None:
        return RewardResult(value=0.0, outcome="unparseable")
    is_right = number == expected
    return RewardResult(value=float(is_right), outcome="right" if is_right else "wrong", answer=str(number))


def _value(match: re.Match[str]) -> Decimal:
    sign = "-" if match["sign"] in ("-", "\u2212") else ""
    return Decimal(sign + match["digits"].replace(",", "") + (match["exponent"] or ""))

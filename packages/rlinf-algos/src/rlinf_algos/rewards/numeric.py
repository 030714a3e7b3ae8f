"""The final number of a worked solution, as GSM8K writes it: `... #### 1,234`.

Where the number is looked for, in this order:
1. after the last `####` that is followed, on the same line, by a number (anything between them is skipped);
2. else the last number anywhere in the text.

A number is an optional sign, digits with or without commas between groups of three, an optional fraction after a point,
an optional exponent. A hyphen right after a letter, a digit or a closing bracket is an operator or a dash, not a sign:
the last number of "12-5" is 5. Numbers are compared by value, exactly: 18, 18.0, 18.00 and 1.8e1 are equal, and so are
1234 and 1,234. A percent sign or a unit after the number is ignored; a fraction such as 3/4 is two numbers.

Unlike verl's strict mode this needs no `####` in the completion and takes the last one; unlike both of verl's modes it
compares values, not text.
"""

import re
from decimal import Decimal

from rlinf_algos.errors import RewardError
from rlinf_algos.rewards.base import RewardResult
from rlinf_algos.rewards.registry import register_reward

# An exponent has at most three digits: what is longer is no answer, and Decimal would refuse it.
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w)\]}])[-+\u2212])?"
    r"[$\u20ac\u00a3]?"
    r"(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?P<exponent>[eE][-+]?[0-9]{1,3}(?![0-9]))?"
)
_MARKER = "####"


def final_number(text: str) -> Decimal | None:
    """The final number of a solution by the rule above, or None.

    Example: "6 * 3 = 18\\n#### 18" -> 18; "so $1,234.50 in all." -> 1234.50; "I do not know" -> None.
    """
    for part in reversed(text.split(_MARKER)[1:]):
        number = _NUMBER.search(part.split("\n", 1)[0])
        if number:
            return _value(number)
    numbers = list(_NUMBER.finditer(text))
    return _value(numbers[-1]) if numbers else None


@register_reward("numeric_match")
def numeric_match(completion: str, reference: str) -> RewardResult:
    """1.0 where the final numbers of completion and reference are equal in value.

    Args:
        completion: a solution in words; without any number it is "unparseable".
        reference: a number, or a whole GSM8K answer that ends in `#### number`.

    Raises:
        RewardError: the reference holds no number.
    """
    expected = final_number(reference)
    if expected is None:
        raise RewardError(f"numeric_match: the reference {reference[-80:]!r} holds no number; mend the dataset row")
    found = final_number(completion)
    if found is None:
        return RewardResult(value=0.0, outcome="unparseable")
    is_right = found == expected
    return RewardResult(value=float(is_right), outcome="right" if is_right else "wrong", answer=str(found))


def _value(match: re.Match[str]) -> Decimal:
    sign = "-" if match["sign"] in ("-", "\u2212") else ""
    return Decimal(sign + match["digits"].replace(",", "") + (match["exponent"] or ""))

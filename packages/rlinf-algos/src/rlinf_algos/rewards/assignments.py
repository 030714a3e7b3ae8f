r"""Reads the values of several unknowns that a solution gives one by one: "x = 6, and therefore y = 9 - x = 3".

Used only if the reference has several values; the callers pass their number and names. The last value of each name
counts; nothing is read from a text that continues with an alternative, a condition or a rejection.
"""

import re
from collections.abc import Sequence

_LETTER = r"[A-Za-z](?:_\{?[0-9a-z]\}?)?"
_IS = r"\s*(?:=|:|\bis\b|\bequals\b|\|)\s*"
_HAS = r"(?: [a-z]+)? (?:costs?|weighs?|is|has|gets?|earns?|needs?) (?:exactly )?(?=[-\u2212$\\]{0,3}[0-9])"
_END = re.compile(r"[,;|\n]|\\\\|\.(?=\s|\Z)|\\\]|\\end|\s(?:and|with|while|so|or|then|but|where)\b|\\(?:text|quad)")
_OPERATOR = re.compile(r"[-+*/^0-9}=] ?\Z")
_MARKUP = re.compile(
    r"\\?[$&*`]|\\[,;!]|\\(?:begin|end)\{[a-z*]+\}|^\s*(?:[-+\u2022]|[0-9]{1,2}[.)])\s", flags=re.MULTILINE
)
_LATER_NUMBER = re.compile(r"(?:\.\s|\n)[^=\n]{0,200}[0-9]")
"""What the text may continue with after its last assignment."""
_VALUE = re.compile(r"\s*([-\u2212]?(?:[0-9][0-9./]*|\\d?frac\{[^{}]*\}\{[^{}]*\}))(?=\s|\Z)")
_UNDECIDED = re.compile(
    r"\b(?:or|if|not|wrong|incorrect|however|but|neither|never|fails?|otherwise|unless|suppose|guess|could|might|may"
    r"|maybe|perhaps|possibly|rejected|extraneous|discarded|try)\b|n't|\?",
    flags=re.IGNORECASE,
)
_NUMBER = re.compile(r"(?<![\w.^\\])[-\u2212]?[0-9]+(?:\.[0-9]+)?(?:/[0-9]+)?(?![\w^]|\.[0-9])")
_NO_LIST = re.compile(r"\b(?:or|not|from|than|out of|between|to|by|of|if|when|plus|minus|times)\b|[=+*<>?]|n't")
_TAIL = 1500
"""Number of characters that are read at the end of a text."""


def assigned(text: str, names: Sequence[str]) -> str | None:
    """`x = 6, y = 3` for the names of the values; if the reference has no names ("-"), the tuple of the values in the
    order of their names; None if the text does not give all of them.

    Example: assigned("So x = 12 adults and y = 8 children.", ("x", "y")) == "x = 12, y = 8".
    """
    text = _MARKUP.sub("", text[-_TAIL:])
    is_named = "-" not in names
    pattern = "|".join(map(re.escape, names)) if is_named else _LETTER
    has = rf"|(?<=[A-Za-z]{{3}}){_HAS}" if is_named else ""
    values: dict[str, tuple[int, str]] = {}
    for match in re.finditer(rf"(?<![A-Za-z\\_])({pattern})(?:{_IS}{has})", text):
        value = None if _OPERATOR.search(text[: match.start()][-3:]) else _value(text[match.end() :][:200])
        if value is not None and not re.search(rf"(?<![A-Za-z\\])(?:{pattern})(?![A-Za-z(])", value):
            values[match[1]] = match.start(), value
    last = max((start for start, _ in values.values()), default=0)
    if not is_named and _LATER_NUMBER.search(text, last):
        return None
    first = min((start for start, _ in values.values()), default=0)
    first = max(text.rfind(end, 0, first) for end in (". ", "! ", "\n"))
    if len(values) != len(names) or _UNDECIDED.search(text, max(first, 0)):
        return None
    if is_named:
        sign = ":" if any(len(name) > 2 and name.isalpha() for name in names) else " ="
        return ", ".join(f"{name}{sign} {values[name][1]}" for name in names)
    return f"({', '.join(values[name][1] for name in sorted(values))})"


def listed(sentence: str, num_values: int) -> str | None:
    """The numbers of a sentence with what they count, "12 hens, 8 cows" for "There are 12 hens and 8 cows"; None unless
    the sentence has exactly this many and only lists them."""
    numbers = _NUMBER.findall(sentence.replace("$", ""))
    is_list = len(numbers) == num_values and re.search(r",|\band\b", sentence) and not _NO_LIST.search(sentence)
    if not is_list:
        return None
    things = re.findall(rf"({_NUMBER.pattern}) ([a-z]{{3,20}})\b", sentence.replace("$", ""))
    are_counts = len(things) == num_values and len({name for _, name in things}) == num_values
    return ", ".join(map(" ".join, things) if are_counts else numbers)


def _value(text: str) -> str | None:
    """The value at the beginning of a text, without what it counts; the last side of `9 - x = 3`."""
    end = _END.search(text)
    *_, side = text[: end.start() if end else len(text)].split("=")
    if re.search(r"(?<!\\)\b(?!sqrt|frac|pi|log|ln)[A-Za-z]{2,}", side):
        value = _VALUE.match(side)
        return value[1] if value else None
    return side.strip(" .()") or None

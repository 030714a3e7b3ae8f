r"""One notation for many ways to write an answer, and the exact value of those that are plain numbers.

`normalized` turns what people and models write - LaTeX, plain text, Unicode, units, currency, thousands separators -
into LaTeX that math-verify reads. It drops what says nothing about the value (spacing, sizes of brackets, units after a
number), so two answers with equal normal forms are equal. Departs from math-verify's own normalisation: numbers with an
exponent (`1.39e-10`) are read as such, plain functions and roots (`sqrt(3)/2`) become LaTeX.

`rational` reads integers, decimals, numbers with an exponent, fractions, mixed numbers and percentages exactly.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_EXPONENT = 400
"""Powers of ten beyond it are left to the checker with a limit of time."""

_UNICODE = str.maketrans(
    {
        "\u2212": "-", "\u2013": "-", "\u00d7": r" \times ", "\u00b7": r" \cdot ", "\u22c5": r" \cdot ", "\u00f7": "/",
        "\u2044": "/", "\u03c0": r"\pi ", "\u221e": r"\infty ", "\u2264": r"\le ", "\u2265": r"\ge ",
        "\u2260": r"\ne ", "\u222a": r"\cup ", "\u2229": r"\cap ", "\u2208": r"\in ", "\u00b0": "", "\u2032": "'",
        "\u00b2": "^2", "\u00b3": "^3", "\u00bd": r" \frac{1}{2}", "\u00bc": r" \frac{1}{4}",
        "\u00be": r" \frac{3}{4}", "\u00a0": " ", "\u202f": " ", "\u2009": " ", "\u20ac": "", "\u00a3": "",
        "\u221a": r"\sqrt ", "\u03b8": r"\theta ", "\u03b1": r"\alpha ", "\u03b2": r"\beta ", "\u03bb": r"\lambda ",
        "\u03c9": r"\omega ",
    }
)  # fmt: skip
_DROPPED = re.compile(
    r"(?<!\\)\\[!,;:> ]|~|\\q?quad\b|\\left(?![a-z])|\\right(?![a-z])|\\[bB]igg?[lr]?(?![a-z])|\\displaystyle\b"
    r"|\\limits\b|\\(?:\(|\)|\[|\])|\\\$|\$|\*\*(?=\s|$)|^\*\*|\^\{?\s*\\circ\s*\}?|\\degree\b|\\operatorname\b|\\AA\b"
)
_WORDS = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox|rm)\s?\{([^{}]*)\}(?:\s*\^\s*(?:\{-?[0-9]+\}|[0-9]))?")
_EXPONENT = re.compile(r"(?<![A-Za-z\\0-9.])([0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE]([-+]?[0-9]{1,4})(?![0-9A-Za-z.])")
_THOUSANDS = re.compile(r"(?<![0-9.,])([0-9]{1,3})((?:(?:,|\{,\})[0-9]{3})+)(?![0-9]|,[0-9])")
_BRACED_COMMA = re.compile(r"\{,\}")
_UNIT_WORDS = re.compile(r"(?<=[0-9})\]%])\s*([A-Za-z][A-Za-z ./]*(?:\s?\^\s?\{?-?[0-9]\}?)?)$")
_MATH_WORDS = frozenset(
    {"pi", "sin", "cos", "tan", "cot", "sec", "csc", "log", "ln", "exp", "sqrt", "arcsin", "arccos", "arctan", "sinh",
     "cosh", "tanh", "infty", "infinity", "oo", "inf", "cup", "cap", "union", "and", "or", "in", "mod", "e", "i"}
)  # fmt: skip
_SHORT_UNITS = frozenset("msghdJKNWVACLHTF")
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_FUNCTION = re.compile(
    r"(?<![\\A-Za-z])(arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|ln|log|exp)(?![A-Za-z])"
)
_CONSTANT = re.compile(r"(?<![\\A-Za-z])(pi|infinity|infty|inf|oo)(?![A-Za-z])")
_SIDES = {"infinity": r"\infty ", "inf": r"\infty ", "oo": r"\infty ", "infty": r"\infty ", "pi": r"\pi "}
_INTEGER = r"[0-9]+"
_DECIMAL = r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)"
_TEN_POWER = r"(?:(?:\\times|\\cdot|\*)10\^(?:\{(?P<braced>[-+]?[0-9]{1,4})\}|(?P<bare>[-+]?[0-9]{1,4})))"
_PLAIN = re.compile(
    rf"(?P<sign>[-+]?)(?:(?P<decimal>{_DECIMAL}){_TEN_POWER}?|10\^(?:\{{(?P<power>[-+]?[0-9]{{1,4}})\}}))"
)
_FRACTION = re.compile(
    rf"(?P<sign>[-+]?)(?P<whole>{_INTEGER})?(?:\\frac\{{(?P<top>-?{_INTEGER})\}}\{{(?P<bottom>{_INTEGER})\}})"
    rf"|(?P<sign2>[-+]?)(?P<top2>{_DECIMAL})/(?P<bottom2>{_DECIMAL})"
)
_SPACED_MIXED = re.compile(r"([-+]?)([0-9]+)\s+([0-9]+)\s*/\s*([0-9]+)")


@dataclass(frozen=True, slots=True)
class Number:
    """An exact value, and how it was written."""

    value: Fraction
    is_decimal: bool
    """Digits with or without a point; a decimal may be a rounded number, a fraction is not."""
    is_percent: bool
    places: int = 0
    """Digits after the point of a decimal, its power of ten counted in."""


def normalized(answer: str) -> str:
    r"""The answer in one LaTeX notation.

    Example: normalized(r"$\dfrac12\text{ cm}$") == r"\frac{1}{2}"; normalized("1,234 dollars") == "1234".
    """
    text = answer.strip().translate(_UNICODE)
    text = re.sub(r"(?<=[0-9])\\[,!](?=[0-9]{3}(?![0-9]))", "", text)
    text = _without_words(text.replace(r"\$", ""))
    text = _DROPPED.sub(" ", text).replace(r"\%", "%")
    text = re.sub(r"\\[dtc]frac(?![a-z])", r"\\frac", text).replace("np.", "").replace("math.", "")
    text = re.sub(r"\\frac\s?([0-9])\s?([0-9])", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac\s?([0-9])\s?\{", r"\\frac{\1}{", text)
    text = _SPACED_MIXED.sub(r"\1\2\\frac{\3}{\4}", text) if _SPACED_MIXED.fullmatch(text.strip()) else text
    text = text.strip().rstrip(".,;: ").strip()
    if not re.search(r"[(\[{]", _BRACED_COMMA.sub("", text)):
        text = _THOUSANDS.sub(
            lambda match: match[1] + match[2].replace("{", "").replace("}", "").replace(",", ""), text
        )
    text = _BRACED_COMMA.sub("", text)
    text = _without_unit(text)
    text = re.sub(r"(?<=[0-9])\.(?=\s*[-+*/)}^])", "", text)
    text = _EXPONENT.sub(r"\1 \\times 10^{\2}", text)
    text = text.replace("**", "^").replace("<=", r"\le ").replace(">=", r"\ge ").replace("!=", r"\ne ")
    text = _FUNCTION.sub(r"\\\1", _with_latex_roots(text))
    text = _CONSTANT.sub(lambda match: _SIDES[match[1]], text)
    text = text.replace("*", r" \cdot ")
    text = re.sub(r"\\(?:leq|leqslant)\b", r"\\le", re.sub(r"\\(?:geq|geqslant)\b", r"\\ge", text))
    return _without_brackets(_compact(text))


@dataclass(frozen=True, slots=True)
class Collection:
    """Plain numbers side by side: a set, a tuple, an interval (a tuple of two may be one), or a bare list."""

    brackets: str
    """As written: `{}`, `()`, `[]`, `[)`, `(]`, or nothing for a list, which is unordered like a set."""
    numbers: "tuple[Number, ...]"


def collection(normal: str) -> Collection | None:
    r"""The numbers of a normalised answer that is nothing but several plain numbers, or None.

    Example: collection(r"\{1,\frac{4}{2}\}") has the brackets "{}" and the values 1 and 2.
    """
    if len(normal) > 400:
        return None
    text = re.sub(r"^[A-Za-z]\\in(?=[\[(\\])", "", normal)
    text = text.replace("\\{", "{").replace("\\}", "}") if text.startswith("\\{") else text
    brackets = ""
    if text[:1] in ("(", "[", "{") and text[-1:] in (")", "]", "}") and len(text) > 2:
        brackets, text = text[0] + text[-1], text[1:-1]
        if brackets in ("{)", "{]", "(}", "[}"):
            return None
    parts = re.split(r",\s*|\s*(?:and|or)\s*", text)
    numbers = [rational(part) for part in parts]
    if len(parts) < 2 or any(number is None for number in numbers):
        return None
    return Collection(brackets=brackets, numbers=tuple(number for number in numbers if number is not None))


def assigned(normal: str) -> tuple[str, str]:
    """("x", "5") of `x=5`; ("", the whole) of an answer that is no single name with its value."""
    match = re.fullmatch(r"(\\?[A-Za-z]+(?:_[0-9A-Za-z]|_\{[0-9A-Za-z]+\})?(?:\([a-z]\))?)=([^=<>]+)", normal)
    return (match[1], match[2]) if match else ("", normal)


def rational(normal: str) -> Number | None:
    r"""The exact value of a normalised answer that is a plain number, or None.

    Example: rational("0.75") and rational(r"\frac{3}{4}") both have the value 3/4; rational(r"\sqrt{2}") is None.
    """
    if len(normal) > 200:
        return None
    text = normal.replace(" ", "")
    is_percent = text.endswith("%")
    text = text.removesuffix("%")
    plain = _PLAIN.fullmatch(text)
    if plain:
        return _plain(plain, is_percent)
    fraction = _FRACTION.fullmatch(text)
    if fraction is None:
        return None
    if fraction["top"] is not None:
        bottom, sign, whole = Fraction(fraction["bottom"]), fraction["sign"], Fraction(fraction["whole"] or 0)
        top = Fraction(fraction["top"])
        if fraction["whole"] and top < 0:
            return None
    else:
        top, bottom, sign, whole = _fraction(fraction["top2"]), _fraction(fraction["bottom2"]), fraction["sign2"], 0
    if bottom == 0:
        return None
    value = whole + top / bottom
    return Number(-value if sign == "-" else value, is_decimal=False, is_percent=is_percent)


def _plain(match: re.Match[str], is_percent: bool) -> Number | None:
    exponent = int(match["braced"] or match["bare"] or match["power"] or 0)
    if abs(exponent) > MAX_EXPONENT:
        return None
    value = _fraction(match["decimal"] or "1") * Fraction(10) ** exponent
    places = len((match["decimal"] or "").partition(".")[2]) - exponent
    return Number(-value if match["sign"] == "-" else value, is_decimal=True, is_percent=is_percent, places=places)


def _fraction(digits: str) -> Fraction:
    return Fraction(digits.rstrip(".") if digits != "." else "0")


def _without_words(text: str) -> str:
    """Takes `\\text{...}` out where it stands beside something; an answer in words keeps them."""
    if r"\text" not in text and r"\math" not in text and r"\mbox" not in text and r"\rm" not in text:
        return text
    rest = _WORDS.sub(lambda match: f" {match[1]} " if match[1].strip() in ("and", "or", ",") else " ", text)
    if re.search(r"[0-9A-Za-z]", rest):
        scaled = _WORDS.search(text)
        if scaled and scaled[1].strip().lower() in _SCALES:
            return _WORDS.sub(r" \1 ", text)
        return re.sub(r"(?:\s|/|\\cdot\b|[~.])+$", "", rest)
    return _WORDS.sub(r"\1", text)


def _without_unit(text: str) -> str:
    """Takes the words after a number or a closing bracket away; "5 million" becomes 5 with its power of ten."""
    unit = _UNIT_WORDS.search(text[-200:])
    if unit is None or len(text) > 200:
        return text
    words = re.findall(r"[A-Za-z]+", unit[1])
    if any(word.lower() in _MATH_WORDS for word in words):
        return text
    before = text[: unit.start(1)].strip()
    if words[0].lower() in _SCALES:
        return f"{before} \\times 10^{{{_SCALES[words[0].lower()]}}}"
    if len(words[0]) == 1 and (words[0] not in _SHORT_UNITS or not unit[0].startswith(" ")):
        return text  # 2x and 2m are products, 2 m is a length
    if re.fullmatch(r"[-+0-9.,/%\seE]+|.*\\frac\{[0-9]+\}\{[0-9]+\}", before):
        return before
    return text if len(words[0]) == 1 else before


def _with_latex_roots(text: str) -> str:
    """`sqrt(...)` becomes `\\sqrt{...}`; its bracket closes where brackets balance, else the text stays as it is."""
    for _ in range(text.count("sqrt(")):
        start = re.search(r"\\?sqrt\s?\(", text)
        if start is None:
            break
        depth = 1
        for end in range(start.end(), len(text)):
            depth += (text[end] == "(") - (text[end] == ")")
            if depth == 0:
                text = f"{text[: start.start()]}\\sqrt{{{text[start.end() : end]}}}{text[end + 1 :]}"
                break
        else:
            break
    return re.sub(r"(?<![\\A-Za-z])sqrt", r"\\sqrt", text)


def _compact(text: str) -> str:
    """Without the white space and braces that LaTeX does not need: `x_{1}, y ^ 2` is `x_1,y^2`."""
    text = re.sub(r"([_^])\s*\{\s*([0-9A-Za-z])\s*\}", r"\1\2", text)
    text = re.sub(r"(\\[A-Za-z]+)\s+(?=[A-Za-z])", "\\1\0", text)  # a command ends at the space before a letter
    text = re.sub(r",\s+", ",\1", text)  # "7, 120" is a list, "7,120" a number
    return re.sub(r"\s+", "", text).replace("{}", "").replace("\0", " ").replace("\1", " ")


def _without_brackets(text: str) -> str:
    """(a) is a, where the two belong together and hold no list."""
    while text.startswith("(") and text.endswith(")") and "," not in text:
        depth = 0
        for i, character in enumerate(text):
            depth += (character == "(") - (character == ")")
            if depth == 0 and i < len(text) - 1:
                return text
        text = text[1:-1]
    return text

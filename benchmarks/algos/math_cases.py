r"""1,000 completions with a known verdict, made from the answers of public problem sets.

Each case is a reference as its file gives it, and a completion that states either the same value in another notation
(label right) or another value in any notation (label wrong). The label follows from how the case was made and never
from a checker. Rewritings of numbers go by their exact value, those of formulas by their text (spaces, braces, brackets
of another size, `\frac` as a slash), and some terms of a sum change places. A wrong formula has one number or one sign
changed, or something added.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One completion to check."""

    source: str
    notation: str
    """How the answer was rewritten."""
    reference: str
    completion: str
    is_right: bool


def draw_cases(folder: Path, num_cases: int, seed: int) -> list[Case]:
    """Cases in equal shares: GSM8K, contests (AIME 24, AMC 23), Minerva's formulas and numbers, and sets, tuples and
    intervals put together from GSM8K's answers."""
    rows = {name: _rows(folder / f"{name}.jsonl") for name in ("gsm8k_test", "aime24", "amc23", "minerva_math")}
    generator = random.Random(seed)
    makers: list[Callable[[random.Random], Case]] = [
        lambda r: _number_case(r, "gsm8k", r.choice(rows["gsm8k_test"])["answer"]),
        lambda r: _number_case(r, "contest", str(r.choice(rows["aime24"] + rows["amc23"])["answer"])),
        lambda r: _minerva_case(r, r.choice(rows["minerva_math"])["solution"]),
        lambda r: _collection_case(r, [_gsm8k_value(r.choice(rows["gsm8k_test"])["answer"]) for _ in range(2)]),
    ]
    return [makers[i % len(makers)](generator) for i in range(num_cases)]


def _rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


# -- numbers ---------------------------------------------------------------------------------------------------------


def _number_case(r: random.Random, source: str, reference: str) -> Case:
    value = _gsm8k_value(reference)
    is_right = r.random() < 0.5
    name, text = _written(r, value if is_right else _another(r, value))
    framed = _framed(r, text)
    return Case(source=source, notation=name, reference=reference, completion=framed, is_right=is_right)


def _gsm8k_value(answer: str) -> Fraction:
    return Fraction(answer.rsplit("####", 1)[-1].strip().replace(",", ""))


def _another(r: random.Random, value: Fraction) -> Fraction:
    choices = [value + 1, value - 1, value * 10, -value, value / 2, value + Fraction(1, 10), value * 2, value + 100]
    return r.choice([choice for choice in choices if choice != value])


def _written(r: random.Random, value: Fraction) -> tuple[str, str]:
    """A notation's name and the value in it."""
    integer = value.denominator == 1
    digits = _decimal(value)
    k = r.choice((2, 3, 5, 7))
    ways: dict[str, str] = {}
    if integer:
        n = value.numerator
        ways["integer"] = str(n)
        ways["dollars"] = f"\\${n}"
        ways["units in text"] = f"{n}\\text{{ {r.choice(('cm', 'dollars', 'km per hour', 'square feet'))}}}"
        ways["units in words"] = f"{n} {r.choice(('apples', 'miles per hour', 'people', 'm', 'kg'))}"
        ways["point zero"] = f"{n}.{'0' * r.randint(1, 3)}"
        ways["sum"] = f"{n - k} + {k}"
        ways["square root"] = f"\\sqrt{{{n * n}}}" if n >= 0 else f"-\\sqrt{{{n * n}}}"
        ways["equation"] = f"x = {n}"
        ways["degrees"] = f"{n}^\\circ"
        if n and not n % k:
            ways["product"] = f"{k} \\cdot {n // k}" if n > 0 else f"-{k} \\times {-n // k}"
        if abs(n) >= 1000:
            ways["commas"] = f"{n:,}"
            ways["braced commas"] = f"{n:,}".replace(",", "{,}")
            ways["thin spaces"] = f"{n:,}".replace(",", "\\,")
        if n and not n % 1000:
            ways["powers of ten"] = f"{n // 1000} \\times 10^{{3}}"
    if digits is not None:
        ways["decimal"] = digits
        ways["percent"] = f"{_decimal(value * 100)}\\%"
        ways["exponent"] = f"{_decimal(value / 1000)}e3"
    top, bottom = value.numerator * k, value.denominator * k
    sign = "-" if top < 0 else ""
    ways["frac"] = f"{sign}\\frac{{{abs(top)}}}{{{bottom}}}"
    ways["dfrac, left right"] = f"\\left({sign}\\dfrac{{{abs(top)}}}{{{bottom}}}\\right)"
    ways["slash"] = f"{top}/{bottom}"
    if value.denominator != 1 and abs(value) > 1:
        whole = abs(value.numerator) // value.denominator
        rest = abs(value) - whole
        ways["mixed"] = f"{sign}{whole}\\frac{{{rest.numerator}}}{{{rest.denominator}}}"
    name = r.choice(sorted(ways))
    text = ways[name]
    return name, text.replace("-", "\u2212") if sign and r.random() < 0.2 and name in ("integer", "decimal") else text


def _decimal(value: Fraction) -> str | None:
    """The digits, where there are finitely many and not more than 12."""
    for places in range(13):
        scaled = abs(value) * 10**places
        if scaled.denominator == 1:
            digits = str(scaled.numerator).rjust(places + 1, "0")
            point = f"{digits[:-places]}.{digits[-places:]}" if places else digits
            return ("-" if value < 0 else "") + point
    return None


def _framed(r: random.Random, answer: str) -> str:
    """The answer in a completion, with other numbers around it."""
    frames = (
        "We have 12 + 30 = 42, so \\boxed{%s}.",
        "<think>Maybe \\boxed{-3}? No.</think>\n\nThe result is \\boxed{%s}",
        "First $a = 3$.\n\n**Answer:** $%s$",
        "Step 1: 7 of 9.\nThe answer is $%s$.",
        "Adding 3 and 4 gives 7.\nThe final answer is: \\boxed{%s}. I hope it is correct.",
        "<think>2 + 2 = 4</think><answer>%s</answer>",
        "After 3 steps:\n#### %s",
        "%s",
        "\\[ \\boxed{%s} \\]",
        "The final answer is \\( %s \\).",
    )
    return r.choice(frames) % answer


# -- formulas --------------------------------------------------------------------------------------------------------


def _minerva_case(r: random.Random, solution: str) -> Case:
    answer = _boxed(solution)
    number = re.fullmatch(r"[-+]?[0-9.]+(?:e[-+]?[0-9]+)?", answer)
    if number:
        return _number_of_a_solution(r, solution, answer)
    is_right = r.random() < 0.5
    name, text = _same_formula(r, answer) if is_right else _other_formula(r, answer)
    completion = (
        r.choice(("Thus \\boxed{%s}.", "The final answer is: \\boxed{%s}", "So $f = 2$, and \\[ \\boxed{%s} \\]"))
        % text
    )
    return Case(source="minerva", notation=name, reference=solution, completion=completion, is_right=is_right)


def _number_of_a_solution(r: random.Random, solution: str, answer: str) -> Case:
    is_right = r.random() < 0.5
    value = Fraction(answer)
    if not is_right:
        value = r.choice((value * 10, -value, value * 2, value * Fraction(101, 100)))
    mantissa, exponent = f"{float(value):e}".split("e")
    mantissa = mantissa.rstrip("0").rstrip(".")
    ways = {
        "exponent": f"{mantissa}e{int(exponent)}",
        "powers of ten": f"{mantissa} \\times 10^{{{int(exponent)}}}",
        "powers of ten, cdot": f"{mantissa} \\cdot 10^{{{int(exponent)}}} \\mathrm{{~cm}}",
    }
    plain = _decimal(value)
    if plain:
        ways |= {"decimal": plain, "decimal with units": f"{plain} \\mathrm{{~km}} / \\mathrm{{s}}"}
    name = r.choice(sorted(ways))
    completion = _framed(r, ways[name])
    return Case(source="minerva", notation=name, reference=solution, completion=completion, is_right=is_right)


def _boxed(solution: str) -> str:
    start = solution.rfind("\\boxed{") + len("\\boxed{")
    depth, end = 1, start
    while depth:
        depth += (solution[end] == "{") - (solution[end] == "}")
        end += 1
    return solution[start : end - 1]


def _same_formula(r: random.Random, formula: str) -> tuple[str, str]:
    ways = {"as it is": formula, "spaced": re.sub(r"([-+=])", r" \1 ", formula), "in text": f"${formula}$"}
    ways["dfrac"] = formula.replace("\\frac", "\\dfrac")
    ways["left right"] = re.sub(r"(?<!\\left)\(", r"\\left(", re.sub(r"(?<!\\right)\)", r"\\right)", formula))
    ways["no left right"] = formula.replace("\\left", "").replace("\\right", "")
    ways["thin spaces"] = formula.replace(" ", "\\, ")
    simple = re.sub(r"\\frac\{([^{}]*)\}\{([^{}]*)\}", r"((\1)/(\2))", formula)
    if simple != formula:
        ways["slash"] = simple
    terms = formula.split("+")
    if len(terms) == 2 and all(_balanced(term) for term in terms) and "=" not in formula and "-" not in formula:
        ways["terms swapped"] = f"{terms[1]} + {terms[0]}"
    if "=" in formula and formula.count("=") == 1:
        left, right = formula.split("=")
        ways["sides swapped"] = f"{right}={left}"
    elif re.fullmatch(r"[^=,]*", formula):
        ways["named"] = f"y = {formula}"
        ways["times one"] = f"1 \\cdot \\left({formula}\\right)"
    name = r.choice(sorted(ways))
    return name, ways[name]


def _balanced(text: str) -> bool:
    return all(text.count(a) == text.count(b) for a, b in ("()", "{}", "[]"))


def _other_formula(r: random.Random, formula: str) -> tuple[str, str]:
    ways: dict[str, str] = {}
    digit = re.search(r"(?<![_0-9.])[0-9]", formula)
    if digit:
        changed = str((int(digit[0]) + 1) % 10 or 3)
        ways["another digit"] = formula[: digit.start()] + changed + formula[digit.end() :]
    if "=" not in formula and "," not in formula:
        ways["plus one"] = f"{formula} + 1"
        ways["doubled"] = f"2 \\left({formula}\\right)"
    else:
        ways["another symbol"] = (
            formula.replace("=", "= 7 Q +", 1) if "=" in formula else formula.replace(",", "^5,", 1)
        )
    name = r.choice(sorted(ways))
    return name, ways[name]


# -- sets, tuples, intervals -----------------------------------------------------------------------------------------

_SPACES = ("", " ", "\\,", "\\; ")


def _collection_case(r: random.Random, values: list[Fraction]) -> Case:
    low, high = sorted({values[0], values[1] if values[1] != values[0] else values[1] + 1})
    kind = r.choice(("set", "tuple", "interval", "list"))
    is_right = r.random() < 0.5
    brackets = {
        "set": ("\\{", "\\}"),
        "tuple": ("(", ")"),
        "interval": r.choice((("[", ")"), ("(", "]"))),
        "list": ("", ""),
    }
    first, last = brackets[kind]
    pair = (high, low) if kind == "tuple" else (low, high)
    reference = f"{first}{_decimal(pair[0]) or pair[0]}, {_decimal(pair[1]) or pair[1]}{last}"
    if not is_right:
        wrongs = {"element": (pair[0], pair[1] + 3)}
        if kind == "tuple":
            wrongs["order"] = (pair[1], pair[0])
        if kind == "interval":
            wrongs["brackets"] = pair
        how = r.choice(sorted(wrongs))
        if how == "brackets":
            first, last = ("(", ")") if r.random() < 0.5 else ("[", "]")
        pair = wrongs[how]
    elif kind in ("set", "list") and r.random() < 0.5:
        pair = (pair[1], pair[0])
    big = r.random() < 0.4 and kind != "list"
    first, last = (f"\\left{first}", f"\\right{last}") if big else (first, last)
    a, b = (_element(r, value) for value in pair)
    text = f"{first}{a},{r.choice(_SPACES)}{b}{last}"
    if kind == "interval" and r.random() < 0.3:
        text = f"x \\in {text}"
    if kind == "list" and r.random() < 0.3:
        text = f"{a} \\text{{ and }} {b}"
    completion = (
        r.choice(("So \\boxed{%s}.", "The answer is $%s$.", "\\[\\boxed{%s}\\]", "The final answer is: \\boxed{%s}"))
        % text
    )
    return Case(source="collections", notation=kind, reference=reference, completion=completion, is_right=is_right)


def _element(r: random.Random, value: Fraction) -> str:
    k = r.choice((2, 3))
    ways = [_decimal(value) or f"\\frac{{{value.numerator}}}{{{value.denominator}}}"]
    ways.append(f"\\frac{{{value.numerator * k}}}{{{value.denominator * k}}}")
    return r.choice(ways)

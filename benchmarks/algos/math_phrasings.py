r"""Answers of public benchmarks in the phrasings that models use.

A right completion says the row's own reference. A wrong one says the reference of another row, or another choice of the
same question, in the same words. Two references count as different where an independent reading finds different values;
where it cannot tell, they make no wrong pair. Nothing is rewritten: each answer stands as its file gives it.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

PHRASINGS: dict[str, str] = {
    "Minerva": "We use the given data and simplify.\n\nFinal Answer: The final answer is ${}$. I hope it is correct.",
    "DeepSeek-R1": "<think>\nFirst I get 3, then 17.\nWait, is the answer 4? No.\n</think>\n\nPutting 3 and 17 "
    "together:\n\n\\[\n\\boxed{{{}}}\n\\]",
    "Qwen": "To solve this we proceed in 2 steps.\n\n1. Let $k = 2$.\n2. Then $k + 1 = 3$.\n\nThe final answer is: "
    "$\\boxed{{{}}}$",
    "Llama": "## Step 1: Read the question\nThere are 2 cases.\n\n## Step 2: Combine\nBoth agree.\n\nThe answer is {}.",
    "GSM8K": "First, 4 + 5 = <<4+5=9>>9.\nThen 9 - 2 = <<9-2=7>>7.\n#### {}",
    "answer tag": "<think>There are 12 of them, or 13.</think>\n<answer>{}</answer>",
    "bold answer": "We add the 2 parts.\n\n**Answer:** {}",
    "heading": "We have $a = 3$ and $b = 11$.\n\n### Final Answer\n\n${}$",
    "next line": "This leaves 5 of 9.\n\n**The final answer is:**\n\n\\[ {} \\]",
    "conclusion": "From $m = 8$ and $n = 3$ everything follows.\nTherefore, the result is ${}$.",
}
"""name -> how a completion that says the answer ends, as the named models or benchmarks have it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One completion to check."""

    source: str
    phrasing: str
    reference: str
    """The reference as its file gives it: for GSM8K and Minerva a whole solution."""
    answer: str
    """What the completion says."""
    completion: str
    is_right: bool
    is_hard: bool
    """Whether reference or answer is no plain integer."""


@dataclass(frozen=True, slots=True)
class _Row:
    source: str
    reference: str
    answer: str
    others: tuple[str, ...] = ()
    """Wrong choices of the same question."""


def draw_cases(folder: Path, *, num_gsm8k: int, seed: int, share: float = 1.0) -> list[Case]:
    """Each answer twice in every phrasing: for its own row, and for another one; or a share of these.

    All rows of AIME 24, AMC 23 and Minerva, all mathematical questions of MMLU with a numeric or symbolic answer, and
    some of GSM8K.
    """
    generator = random.Random(seed)
    rows = _rows(folder, num_gsm8k, generator)
    cases = []
    for row in rows:
        for phrasing in PHRASINGS:
            cases.append(_case(row, row.answer, phrasing, is_right=True))
            other = _other(row, rows, generator)
            cases.append(_case(row, other, phrasing, is_right=False))
    return cases if share >= 1 else generator.sample(cases, round(share * len(cases)))


def _case(row: _Row, answer: str, phrasing: str, *, is_right: bool) -> Case:
    escaped = answer
    if "$" in answer and "${}$" in PHRASINGS[phrasing]:
        escaped = re.sub(r"(?<!\\)\$", r"\\$", answer) if answer.count("$") == 1 else answer.replace("$", "")
    return Case(
        source=row.source,
        phrasing=phrasing,
        reference=row.reference,
        answer=answer,
        completion=PHRASINGS[phrasing].format(escaped.strip()),
        is_right=is_right,
        is_hard=not (re.fullmatch(r"-?[0-9]+", row.answer) and re.fullmatch(r"-?[0-9]+", answer)),
    )


def _other(row: _Row, rows: list[_Row], generator: random.Random) -> str:
    """Another choice of the question, where there are any, or the answer of another row of the same file."""
    choices = [choice for choice in row.others if are_different(choice, row.answer)]
    while not choices:
        other = generator.choice(rows)
        if other.source == row.source and are_different(other.answer, row.answer):
            choices = [other.answer]
    return generator.choice(choices)


# -- the files -------------------------------------------------------------------------------------------------------

_MMLU_TYPES = (
    "elementary_mathematics", "high_school_mathematics", "college_mathematics", "abstract_algebra",
    "high_school_statistics", "high_school_physics", "college_physics", "electrical_engineering",
)  # fmt: skip


def _rows(folder: Path, num_gsm8k: int, generator: random.Random) -> list[_Row]:
    rows: list[_Row] = []
    gsm8k = _read(folder / "gsm8k_test.jsonl") + _read(folder / "gsm8k_train.jsonl")
    for row in generator.sample(gsm8k, num_gsm8k):
        rows.append(_Row("GSM8K", row["answer"], row["answer"].rpartition("####")[2].strip()))
    for name, source in (("aime24", "AIME 24"), ("amc23", "AMC 23")):
        for row in _read(folder / f"{name}.jsonl"):
            rows.append(_Row(source, str(row["answer"]), str(row["answer"])))
    for row in _read(folder / "minerva_math.jsonl"):
        rows.append(_Row("Minerva", row["solution"], boxed(row["solution"]).strip()))
    for row in _read(folder / "mmlu_stem.jsonl"):
        choices = [choice.strip() for choice in row["choices"]]
        answer = choices[row["answer"]]
        if row["type"] in _MMLU_TYPES and is_mathematical(answer):
            others = tuple(c for i, c in enumerate(choices) if i != row["answer"] and is_mathematical(c))
            rows.append(_Row("MMLU", answer, answer, others))
    return rows


def _read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def boxed(solution: str) -> str:
    """The content of the last box."""
    start = solution.rfind("\\boxed{") + len("\\boxed{")
    depth, end = 1, start
    while depth:
        depth += (solution[end] == "{") - (solution[end] == "}")
        end += 1
    return solution[start : end - 1]


def is_mathematical(answer: str) -> bool:
    """Whether an answer is a value or a formula, with a unit or a few words at most."""
    words = re.findall(r"[A-Za-z]{4,}", re.sub(r"\\[A-Za-z]+", "", answer))
    return bool(re.search(r"[0-9=]|\\|^[A-Za-z]$", answer)) and len(words) <= 3 and "both" not in answer.lower()


# -- an independent reading ------------------------------------------------------------------------------------------


_EQUAL = (
    {"9(2-x)(2+x)", "(6-3x)(6+3x)"},
    {"9(2-x)(2+x)", "(-3x+6)(3x+6)"},
    {"\\frac{\\sqrt{3}}{12}", "\\frac{1}{4\\sqrt{3}}"},
    {"2 \u00d7 5", "5 \u00d7 2"},
    {"2^4 \u2022 3", "6 \u2022 8"},
    {"t \u2212 11 = 84; 95\u00b0F", "t \u2212 84 = 11; 95\u00b0F"},
)
"""Choices of one question that are equal in value: it asks for a form."""


def are_different(one: str, other: str) -> bool:
    """Whether two answers are known to differ: as values where both are numbers, else as texts without their spaces,
    signs of currency and units of degree; a number differs from a text with letters or another number in it."""
    if {one, other} in _EQUAL:
        return False
    values = _value(one), _value(other)
    if values[0] is not None and values[1] is not None:
        return values[0] not in (values[1], values[1] * 100, values[1] / 100)
    texts = [
        re.sub("[\\s$%\u00b0.{}()]|" r"\\(?:left|right|,|;)", "", text).lower().replace("\u2212", "-")
        for text in (one, other)
    ]
    numbers = [sorted(re.findall(r"[0-9]+", text)) for text in texts]
    letters = [sorted(re.findall(r"[a-z]", re.sub(r"frac|cdot|times|text|mathrm", "", text))) for text in texts]
    return texts[0] != texts[1] and (numbers[0] != numbers[1] or letters[0] != letters[1] or len(texts[0]) < 12)


def _value(answer: str) -> Fraction | None:
    text = re.sub(r"[\s$,%]|\\frac", "", answer).replace("\u2212", "-").replace("}{", "/").strip("{}. ")
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        pass
    top, slash, bottom = text.partition("/")
    try:
        return Fraction(top) / Fraction(bottom) if slash else None
    except (ValueError, ZeroDivisionError):
        return None


# -- answers with one thing changed, and the hard pairs ---------------------------------------------------------------


def mutated_cases(folder: Path, *, seed: int) -> list[Case]:
    """Each reference of Minerva, AIME 24, AMC 23 and MMLU with one thing changed that changes its value: a digit, a
    sign, the order of a pair, a bracket, a factor left out or added."""
    generator = random.Random(seed)
    cases = []
    for row in _rows(folder, 0, generator):
        for answer in _mutations(row.answer, generator):
            phrasing = generator.choice(list(PHRASINGS))
            cases.append(_case(row, answer, phrasing, is_right=False))
    return cases


def _mutations(answer: str, generator: random.Random) -> list[str]:
    mutations = []
    digits = [match for match in re.finditer(r"(?<![0-9_.])[1-9](?![0-9]*\})", answer) if "times" not in answer]
    if digits:
        digit = generator.choice(digits)
        changed = str((int(digit[0]) + generator.randint(1, 8) - 1) % 9 + 1)
        mutations.append(answer[: digit.start()] + changed + answer[digit.end() :])
    pair = re.fullmatch(r"([(\[])([^,()\[\]]+),([^,()\[\]]+)([)\]])", answer)
    if pair and pair[2].strip() != pair[3].strip():
        mutations.append(f"{pair[1]}{pair[3].strip()}, {pair[2].strip()}{pair[4]}")
        mutations.append(f"{'[' if pair[1] == '(' else '('}{pair[2]},{pair[3]}{pair[4]}")
    is_value = not re.search(r"[=<>,;]|\\text|[A-Za-z]{4,}|^0+\.?$", re.sub(r"\\[A-Za-z]+", "", answer))
    if is_value and re.search(r"[0-9]", answer) and not re.search(r"\$|%|0\.?$|^-?1\.?$", answer):
        mutations.append(answer[1:] if answer.startswith("-") else f"-({answer})" if "+" in answer else f"-{answer}")
        mutations.append(
            f"2({answer})" if re.search(r"[A-Za-z+-]", answer) else f"\\sqrt{{{answer}}}" if answer != "1" else "3"
        )
    return [mutation for mutation in mutations if are_different(mutation, answer)]


def hard_cases() -> list[Case]:
    """The pairs of `math_hard_pairs.tsv` of the tests."""
    path = Path(__file__).parents[2] / "packages/rlinf-algos/tests/data/math_hard_pairs.tsv"
    cases = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            verdict, reference, completion = (field.replace("\u23ce", "\n") for field in line.split("\t"))
            cases.append(
                Case(
                    source="hard",
                    phrasing="its own",
                    reference=reference,
                    answer=completion,
                    completion=completion,
                    is_right=verdict == "right",
                    is_hard=True,
                )
            )
    return cases

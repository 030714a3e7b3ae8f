r"""Finds the conclusion of a solution that states no answer: a number, a formula or a word in its last sentences.

`sentences` skips those that conclude nothing, `clauses` cuts off reasons, remarks and circumstances. In the rest, the
answer follows the last verb ("the total is 5 cm"), or is the last number or formula, with those that are joined to it
by "or", "and" or commas, and with its unit (`quantities`); `predicates` reads answers in words.

The callers cut texts to a few thousand characters.
"""

import re
from itertools import takewhile

from rlinf_algos.rewards.clauses import DEFINITE, main_clause, statement, without_adjunct
from rlinf_algos.rewards.predicates import BEST, NEGATED, predicate
from rlinf_algos.rewards.quantities import MAX_LOOKS, cleaned, holds_value, is_formal, measured, words_of
from rlinf_algos.rewards.sentences import (
    CLAUSE_END,
    SENTENCE_END,
    claim_of,
    claims_of,
    is_outside,
    leaves_open,
    split,
    without_verification,
)
from rlinf_algos.rewards.units import is_unit

_CHOSEN = re.compile(
    r"(?<!not both )(?<!neither )\b((?:[A-J]|[IV]{1,3})(?:(?:, (?:and )?| and | & )(?:[A-J]|[IV]{1,3})\b){1,5})"
    r"(?: only)? (?:are|hold|must be)(?: (?:both|all|the))?(?: (?:correct|true|right|valid|answers?))?\Z"
)
_AT_A_POINT = re.compile(r"\s(?:(?:at|when|where|for)\s\$?[a-z]\$?\s?=|when divided by)\s?[^\s=]{1,20}\Z")
_OF_VALUE = re.compile(r"\A(?:an?|the)(?: [a-z]+){1,3} of (?=[-$\\0-9])|\Aan? (?=[0-9])")
_SUM = re.compile(r"[a-z]{3}\s*=\s*(\\?[$\u20ac\u00a3]?-?[0-9][^=$]*)\Z")
_DURING = frozenset(("over", "within", "after", "for", "during"))
_RESULTS = frozenset(
    ("get", "obtain", "make", "be", "give", "have", "yield", "find", "become", "equal", "form", "total")
)
"""Verbs after "to" whose number is a result. After other verbs it belongs to a purpose: "4 hours to solve 5
problems"."""
_VERB = re.compile(
    r"\b(?:is|are|equals?|be|was|were|becomes?|remains?|gives?|get|costs?|pays?|paid"
    r"|(?:simplifies|comes|amounts|evaluates|works out|adds up|reduces) to)\b(?! not\b)[\s:]*"
)
_IS_SHARE_OF = re.compile(r"(\S+(?: [a-z]+)?) is (?:half|twice|double|a third|one third|a quarter)(?: of)? ")
_ASSIGNMENT = re.compile(r"([A-Za-z](?:_\{?\w\}?)?) ?[=:] ?([^\n=:]{1,100})")
_BULLET = re.compile(r"\A(?:[-+*\u2022]|\(?[0-9]{1,2}[.)]) ")
_ROW = re.compile(r"[\[(|]((?: ?-?[0-9.]+(?:/[0-9]+)?){1,9}) ?[\])|]")
_ROWS = re.compile(
    r"\\begin\{(align\*?|aligned|gather\*?|gathered|eqnarray\*?|split)\}(.{1,2000}?)\\end\{\1\}[.\s]{0,9}\Z", re.DOTALL
)
_ROUNDED = re.compile(r"\$[^$=]*[^$= ][^$=]+\\approx([^$=]*)\$")
"""A separate clause whose subject is rounded."""
_DERIVATION = re.compile(r"[A-Za-z0-9)}] ?(?:\^|[-+*/] ?[A-Za-z0-9])[^=<>,$]{0,40}=(?!.*(?:=|,))")
_DERIVED = re.compile(r"(?<![<>!\\:=])=(?!=)")
_NAMED_VALUE = re.compile(r"\b([b-hj-z]) (?:is|equals) (?=[-\u2212]?[0-9\\$(])")
_AMOUNT = r"\\?[$\u20ac\u00a3\u00a5]?[0-9][0-9.,]{0,12}"
_ROUNDED_UNITS = re.compile(r"\A(.{1,200}(?:\\approx|\u2248)[^a-z]{1,60}?\$?) [a-z]{1,15}(?: [a-z]{1,15})?\Z")
_TWO_EQUATIONS = re.compile(r"\A\$?([^=$,]{1,80})=[^=$,]{1,80}\$? and \$?([^=$,]{1,40})=([^=$,]{1,80})\$?\Z")
_COORDINATES = re.compile(
    r"\b([xy])\$?-coordinate (?:is |of )?\$?([-\u2212]?[0-9][0-9./]{0,12})\$? and (?:the |an? |its )?"
    r"\$?([xy])\$?-coordinate (?:is |of )?\$?([-\u2212]?[0-9][0-9./]{0,12}?)\$?\Z"
)
_MEETS = re.compile(r"\b(?:meet|intersect|cross|touch)(?:es|s)?\b")
_AT_ORIGIN = re.compile(r"\b(at |and )the origin\b")
_AND_AT = re.compile(r" and at (?:the point )?\(")
_FOR_INDICES = re.compile(
    r",? for (?:all |every |any |each )?(?:integers? )?\$?n ?(?:\\geq?|\u2265|>|\\in)\b[^=]{1,30}\Z"
)
_EACH_THEIR = re.compile(
    rf"[^,]{{1,60}}? (?:is|are|was|has|have|gets|costs|weighs|needs|earns) ({_AMOUNT})(?: [a-z]+){{0,2}}"
    r",? (?:and|while) (?:(?:his|her|their|the other|an?) [a-z]+(?: [a-z]+)?|[A-Z][a-z]+)"
    rf" (?:is|are|was|has|have|gets|costs|weighs|needs|earns) ({_AMOUNT})(?: [a-z]+){{0,2}}\Z"
)
"""Two clauses with one value each, for two people or things."""


def conclusion(text: str, *, in_words: bool = False) -> str | None:
    text = without_verification(text.strip())
    text = re.sub(r"(?:\n[^\n0-9=$\\]{1,200}){1,3}\Z", "", text) if r"\end{" in text else text
    display = re.search(r"(?:\$\$([^$]{1,2000})\$\$|\\\[((?:(?!\\\[)[\s\S]){1,2000})\\\])[.\s]{0,9}\Z", text)
    text = cleaned(display[1] or display[2]) if display else text
    rows = _ROWS.search(text)
    if rows:
        lines = [line.replace("&", "").strip(" .,;") for line in rows[2].split("\\\\") if line.strip(" &.,;\n")]
        return _system(lines[-MAX_LOOKS:]) or (lines[-1] if lines else None)
    if display:
        return text
    lines = [line for line in text.split("\n") if line.strip()][-MAX_LOOKS:]
    system = _system(lines)
    if system:
        return system
    for line in reversed(lines):
        for sentence in split(line, SENTENCE_END)[:-4:-1]:
            if leaves_open(sentence):
                return None
            if holds_value(sentence):
                break
        claims = [one for one in claims_of(line, in_words=in_words) if not one.endswith("?")]
        parts = [claim_of(one, in_words=in_words) for one in claims]
        for sentence in reversed([part for part in parts if part][-MAX_LOOKS:]):
            answer = predicate(sentence) if in_words else _alone(sentence) or _chosen(sentence) or concluded(sentence)
            if answer:
                return answer if in_words else _last_equation(answer)
        if in_words and any(parts):
            return cleaned(line)
    is_short = len(lines) == 1 and len(text.split()) <= 4 and claim_of(text, in_words=in_words) is not None
    return cleaned(lines[-1]) if is_short else None


def last_sentence(text: str) -> str:
    """The last sentence of a text that contains a digit."""
    line = next((line for line in reversed(text.split("\n")) if re.search(r"[0-9]", line)), "")
    return next((one for one in reversed(split(line, CLAUSE_END)) if re.search(r"[0-9]", one)), "")


def _chosen(sentence: str) -> str | None:
    """The letters of statements or choices that are right: "A, C" for "A and C are both correct"."""
    chosen = _CHOSEN.search(cleaned(sentence))
    best = BEST.search(main_clause(sentence))
    if best:
        return best[2]
    return re.sub(r",? and |, | & ", ", ", chosen[1]) if chosen else None


def _system(lines: list[str]) -> str | None:
    """The last lines as a system of assignments or a matrix: at least two consecutive lines that assign a value to a
    name without words, or that are rows of a matrix. Several values of one name are a list if they are listed, and
    otherwise a derivation."""
    assigned, are_listed = [], True
    for line in reversed(lines):
        assignment = _ASSIGNMENT.fullmatch(cleaned(_BULLET.sub("", line).replace("$", "")))
        if not assignment or next(words_of(assignment[0]), None):
            break
        assigned.append((assignment[1], f"{assignment[1]} = {assignment[2]}"))
        are_listed = are_listed and _BULLET.match(line) is not None
    if len(assigned) > 1 and (are_listed or len(assigned) == len(dict(assigned))):
        return ", ".join(line for _, line in reversed(assigned))
    rows = [_ROW.fullmatch(line.strip()) for line in lines]
    matrix = list(takewhile(bool, reversed(rows)))
    cells = r" \\ ".join(row[1].strip().replace(" ", " & ") for row in reversed(matrix) if row)
    return rf"\begin{{pmatrix}} {cells} \end{{pmatrix}}" if len(matrix) > 1 else None


def _alone(sentence: str) -> str | None:
    """A sentence without words, or the answer after a short label."""
    sentence = main_clause(sentence)
    label = re.match(r"(?:[A-Za-z]+ ){0,3}[A-Za-z]{2,}: ?(?=\S)", sentence)
    sentence = sentence[label.end() :] if label else sentence
    has_content = re.search(r"[0-9A-Za-z]", sentence)
    return sentence if has_content and next(words_of(sentence), None) is None else None


def concluded(sentence: str) -> str | None:
    """What follows the last verb of a sentence, if it is a number or a formula; otherwise the last one in it."""
    sentence = _NAMED_VALUE.sub(r"\1 = ", main_clause(sentence))
    point = _coordinates(sentence) if "-coordinate" in sentence else None
    if point:
        return point
    if "the origin" in sentence and _MEETS.search(sentence):
        sentence = _AND_AT.sub(" and (", _AT_ORIGIN.sub(r"\1(0, 0)", sentence))
    if "_n" in sentence:
        sentence = _FOR_INDICES.sub("", sentence)
    share = _IS_SHARE_OF.match(sentence)
    if share and holds_value(share[1]) and is_formal(share[1]):
        return measured(share[1])
    both = _EACH_THEIR.match(sentence)
    if both:
        return f"{both[1]}, {both[2]}"
    point, total = _AT_A_POINT.search(sentence), _SUM.search(sentence)
    if point and holds_value(sentence[: point.start()]) and is_outside(sentence, point.start()):
        sentence = sentence[: point.start()]
    elif total and next(words_of(sentence[: total.start() + 1]), None) and is_outside(sentence, total.start()):
        return measured(cleaned(total[1]))
    for verb in reversed(list(_VERB.finditer(sentence))[-MAX_LOOKS:]):
        if NEGATED.search(sentence, 0, verb.start()):
            return None
        rest = without_adjunct(sentence[verb.end() :], is_predicate=True)
        answer = _last_side(measured(statement(_OF_VALUE.sub("", rest))))
        is_value = holds_value(answer) or re.fullmatch(r"\(?[A-HJ-Z]\)?|[a-z]{2,3}", answer)
        if is_value and is_formal(answer):
            return answer
    return _last_of(without_adjunct(sentence))


def _coordinates(sentence: str) -> str | None:
    """`(-2, 5)` for "x-coordinate -2 and y-coordinate 5"."""
    both = _COORDINATES.search(sentence)
    if both is None or both[1] == both[3]:
        return None
    first, second = both.group(2, 4) if both[1] == "x" else both.group(4, 2)
    return f"({first}, {second})"


def _last_equation(answer: str) -> str:
    """`x = 7` for "2x = 14 and x = 7"; both equations if they assign values to two names."""
    both = _TWO_EQUATIONS.match(answer)
    is_system = both is None or all(re.fullmatch(r"\s*[A-Za-z](?:_\{?\w\}?)?\s*", side) for side in both.group(1, 2))
    is_same_function = both is not None and both[1].strip()[:2] == both[2].strip()[:2]
    return answer if both is None or is_system or is_same_function else f"{both[2].strip()} = {both[3].strip()}"


def _last_side(answer: str) -> str:
    """The result of a calculation, `30` for `2(10 + 5) = 2(15) = 30`; a rounded value loses its unit."""
    answer = _ROUNDED_UNITS.sub(r"\1", answer) if "approx" in answer or "\u2248" in answer else answer
    sides = answer.strip("$").split("=")
    if len(sides) < 2 or "," in answer or re.search(r"[<>!:]\Z|\\\Z", sides[0]) or answer.count("$") > 2:
        return answer
    if (
        next(words_of("=".join(sides[:-1])), None)
        or r"\begin" in answer
        or any(re.search(r"[^A-Za-z ]\s[A-Za-z]\s?\Z", one) for one in sides)
    ):
        return answer
    is_calculation = len(sides) > 2 or not re.search(r"[A-Za-z]", sides[0])
    return sides[-1].strip() if is_calculation and holds_value(sides[-1]) else answer


def _last_of(sentence: str) -> str | None:
    """The last number or formula between words, with its unit and the other items of its list."""
    pieces: list[tuple[str, bool]] = []
    place = 0
    for word in words_of(sentence):
        pieces += [(sentence[place : word.start()], False), (word[0], True)]
        place = word.end()
    pieces.append((sentence[place:], False))
    places = [i for i in reversed(range(0, len(pieces), 2)) if holds_value(pieces[i][0].strip(" .,;:"))]
    last = next((i for i in places if not _is_definite(pieces, i)), places[0] if places else None)
    if (
        last is None
        or (last and pieces[last - 1][0] in ("than", "not", "exceeds"))
        or pieces[max(last - 1, 0)][0] == "Not"
    ):
        return None
    first = i = last
    while i >= 2 and (pieces[i - 1][0] in ("or", "and", "except") or _is_joining_unit(pieces[i - 1][0])):
        i -= 2
        if holds_value(pieces[i][0].strip(" .,;:")):
            if _DERIVATION.search(pieces[i][0]):
                break
            if is_unit(pieces[i + 1][0]) and pieces[i + 2][0].startswith(","):
                break
            first = i
        elif pieces[i][0].strip():
            break
    tail = "".join(piece for piece, _ in pieces[first:])
    if last != places[0]:
        tail = re.split(r"\s(?:out|left|more|from|among|of|to)\b", tail)[0]
    if first == last and last > 0:
        *_, value = _DERIVED.split(tail) if "," not in tail else [tail]
        tail = value if holds_value(value.strip(" .,;:")) and "$" not in value.replace("\\$", "") else tail
    tail = re.split(r"(?<=\$): (?=\$)", tail)[-1]
    rounded = _ROUNDED.fullmatch(cleaned(tail)) if last > 0 and pieces[last][0].startswith(", ") else None
    tail = rounded[1] if rounded else tail
    return (
        measured(
            cleaned(
                re.sub(
                    r"\A(?:[a-zA-Z] (?![-=<>+*/^\u2264\u2265\u2208]|\\[gln]e\b|\\in\b)|[\s.,;:=)\u2013\u2014!?]|- )+",
                    "",
                    tail,
                )
            )
        )
        or None
    )


def _is_time(pieces: list[tuple[str, bool]]) -> bool:
    return bool(pieces) and re.fullmatch(r"(?:second|minute|hour|day|week|month|year)s?", pieces[0][0]) is not None


def _is_joining_unit(word: str) -> bool:
    return is_unit(word) and word != "in"


def _is_definite(pieces: list[tuple[str, bool]], i: int) -> bool:
    """Whether the number at the beginning of a piece was given in the question, as in "5 out of 20"."""
    before = [word.lower() for word, _ in pieces[max(0, i - 3) : i : 2][::-1]]
    is_direct = re.match(r"\s[\\$\u20ac\u00a3\u00a5]{0,2}[0-9]", pieces[i][0]) is not None
    if not is_direct or not before:
        return False
    if before[0] == "her" and before[1:2] and before[1].endswith("s"):
        return False  # "it takes her 15 minutes"
    is_duration = before[0] in _DURING and re.match(r"\s[0-9.]+\s*\Z", pieces[i][0]) and _is_time(pieces[i + 1 : i + 2])
    is_purpose = before[1:2] == ["to"] and before[0] not in _RESULTS
    return before[0] in DEFINITE or before[:2] == ["of", "out"] or is_purpose or bool(is_duration)

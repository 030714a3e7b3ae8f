r"""Detects formulas that differ because of their letters alone, without parsing them.

A letter that occurs once in one formula and not in the other changes the value of only one of them: `100\sqrt{p}` is
neither a number nor a formula of t. Formulas in which a letter may be bound or without effect are not decided here.
"""

import re
from collections import Counter
from functools import lru_cache

_TOKEN = re.compile(r"\\[A-Za-z]+|[A-Za-z]")
_GREEK = frozenset(
    rf"\{name}"
    for name in (
        "alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "kappa", "lambda", "mu", "nu", "xi",
        "rho", "sigma", "tau", "phi", "chi", "psi", "omega", "Gamma", "Delta", "Theta", "Lambda", "Sigma", "Phi",
        "Psi", "Omega",
    )
)  # fmt: skip
_PLAIN = frozenset(
    (r"\frac", r"\sqrt", r"\cdot", r"\times", r"\pi", r"\sin", r"\cos", r"\tan", r"\ln", r"\log", r"\exp")
)
_WITHOUT_EFFECT = re.compile(r"(?<![0-9.])0(?![0-9.])|(?<![0-9.])1\)?\^|'|\\frac\{d|[_<>=|!]")


def differ_in_letters(one: str, other: str) -> bool:
    """True if the formulas certainly differ; False if this is not known."""
    counts, others = _letters(one), _letters(other)
    if counts is None or others is None:
        return False
    return any(n == 1 and letter not in others for letter, n in counts.items()) or any(
        n == 1 and letter not in counts for letter, n in others.items()
    )


@lru_cache(maxsize=4096)
def _letters(formula: str) -> Counter[str] | None:
    """How often each letter occurs in a normalised formula; None if one of them may have no effect."""
    tokens = _TOKEN.findall(formula)
    letters = [token for token in tokens if token in _GREEK or (token[0] != "\\" and token not in "ei")]
    is_known = all(token in _PLAIN or token in _GREEK or token[0] != "\\" for token in tokens)
    return Counter(letters) if is_known and not _WITHOUT_EFFECT.search(formula) else None

r"""Normalises the many ways to write an answer into LaTeX without formatting.

`normalized` converts what people and models write (LaTeX, plain text, Unicode, units, currency, thousands separators)
into LaTeX that math-verify reads, with each word in its own `\text{...}`. It drops what does not affect the value:
spacing, sizes of brackets, fonts of letters and numbers. Words stay, and so does the space in `4 2`.
"""

import re
import unicodedata
from collections.abc import Callable
from functools import lru_cache

from rlinf_algos.rewards.arrays import pmatrix, without_arrays
from rlinf_algos.rewards.number_words import ONES, TENS
from rlinf_algos.rewards.units import NAMES, SCALES, is_unit

_UNICODE = str.maketrans(
    {
        "\u2212": "-", "\u2013": "-", "\u2014": "-", "\u00d7": r" \times ", "\u00b7": r" \cdot ", "\u22c5": r" \cdot ",
        "\u2022": r" \cdot ", "\u00f7": "/", "\u2044": "/", "\u03c0": r" \pi ", "\u221e": r" \infty ",
        "\u2264": r" \le ", "\u2265": r" \ge ", "\u2260": r" \ne ", "\u2248": r" \approx ", "\u00b1": r" \pm ",
        "\u222a": r" \cup ", "\u2229": r" \cap ", "\u2208": r" \in ", "\u00b0": r"^\circ ", "\u2032": "'",
        "\u2019": "'",
        "\u00a0": " ", "\u202f": r"\,", "\u2009": r"\,", "\u20ac": r"\text{euros}",
        "\u00a3": r"\text{sterling}", "\u221a": r"\sqrt ", "\u03b8": r"\theta ", "\u03b1": r"\alpha ",
        "\u03b2": r"\beta ", "\u03b3": r"\gamma ", "\u03b4": r"\delta ", "\u03bb": r"\lambda ", "\u03c9": r"\omega ",
        "\u03bc": r"\mu ", "\u00b5": r"\mu ", "\u03c3": r"\sigma ", "\u03c6": r"\phi ", "\u03c4": r"\tau ",
        "\u0398": r"\Theta ", "\u03a9": r"\text{ohm}", "\u2126": r"\text{ohm}", "\u2205": r"\emptyset ",
        "\u211d": r"\mathbb{R}", "\u2220": r"\angle ", "\u00a2": r"\text{cents}", "\u221b": r"\sqrt[3]",
        "\u2216": r"\setminus ", "\u2202": r"\partial ", "\u2a7d": r" \le ", "\u2a7e": r" \ge ", "\u2266": r" \le ",
        "\u2267": r" \ge ", "\u2227": r" \land ", "\u2228": r" \lor ", "\u2124": r"\mathbb{Z}", "\u2115": r"\mathbb{N}",
        "\u211a": r"\mathbb{Q}", "\u2103": r"^\circ C", "\u2109": r"^\circ F", "\u2033": "''",
    }
)  # fmt: skip
_SUPERSCRIPTS = re.compile("[\u00b2\u00b3\u00b9\u2070-\u207b\u207f]{1,9}")
_SMALL_FRACTION = re.compile(
    "(?:(?<![0-9A-Za-z)}\u00b2\u00b3\u00b9\u2070-\u2079])|(?=[\u00b2\u00b3\u00b9\u2070-\u2079]{1,9}(?:\u2044|/_|/[\u2080-\u2089])))"
    "([\u00b2\u00b3\u00b9\u2070-\u2079]{1,9})[\u2044/]_?\\{?([0-9\u2080-\u2089]{1,9})\\}?"
)
_ROOT_SIGN = re.compile("([\u221a-\u221c])[ \u00a0]?([0-9]{1,40}(?:\\.[0-9]{1,40})?|\\([^()]{1,80}\\))")
_ROOTS = {"\u221a": r"\sqrt", "\u221b": r"\sqrt[3]", "\u221c": r"\sqrt[4]"}
_CIRCLED = re.compile(r"(?:[\u2460-\u2473](?:\\text\{ ?and ?\}|[,\s\u3001\u548c\u4e0e]|and)*){1,20}")
"""Numbers of statements."""
_FRACTIONS = re.compile("[\u00bc-\u00be\u2150-\u215e]")
_SPACES = re.compile(
    r"(?<!\\)\\[!,;:> ]|\\middle\s*(?=[|:])|~|\\q?quad\b|\\left\s*\.|\\right\s*\.|\\left(?![a-z])|\\right(?![a-z])"
    r"|\\[bB]igg?[lrm]?(?![a-z])|\\(?:display|text)style\b|\\limits\b|(?<!\\)\\(?:\(|\)|\[|\])|\$"
    r"|\\(?:boldsymbol|bm)(?![a-z])"
)
_FONT = re.compile(
    r"\\(?:text(?:bf|rm|it|sf|tt|normal)?|math(?:rm|bf|it|sf|tt|normal)|mbox|hbox|operatorname\*?)\s*\{([^{}]*)\}"
)
_OLD_FONT = re.compile(r"\{\\(?:rm|bf|it)\s+([^{}]*)\}")
_SUBSCRIPT = re.compile(
    r"_\s*\{\s*\\(?:text|mathrm|mathbf|operatorname)\s*\{([^{}]*)\}\s*\}|_\s*\\(?:text|mathrm)\s*\{([^{}]*)\}"
)
_BASES = (2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 16)
_LETTERS = re.compile(
    r"\\text\{[^{}]*\}|\\(?:begin|end|mathbb|mathcal|mathfrak)\s*\{[A-Za-z]*\*?\}|\\[A-Za-z]+|_\{[A-Za-z]{2,}\}|[A-Za-z]+"
)
_COMMA_GROUPS = re.compile(r"(?<![0-9.,])([0-9]{1,3})((?:(?:,|\{,\})[0-9]{3})+)(?![0-9]|,[0-9])")
_EXPONENT = re.compile(r"(?<![A-Za-z\\0-9.])([0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE]([-+]?[0-9]{1,4})(?![0-9A-Za-z.])")
_FUNCTIONS = frozenset(
    {
    "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "sin", "cos", "tan", "cot", "sec", "csc", "ln", "log",
    "exp", "min", "max", "gcd", "lcm", "det", "deg",
    }
)  # fmt: skip
_CONSTANTS = {"pi": r"\pi ", "infinity": r"\infty ", "infty": r"\infty ", "inf": r"\infty ", "oo": r"\infty "}
_SHORT_WORDS = frozenset(
    {
    "and", "or", "not", "no", "yes", "if", "is", "are", "be", "to", "of", "in", "on", "at", "by", "for", "the", "an",
    "as", "it", "we", "so", "all", "any", "odd", "one", "two", "six", "ten", "men", "per", "but", "mod", "only",
    "both", "none", "day", "min", "sec", "true", "dne", "sq", "cu", "set", "nor",
    }
)  # fmt: skip
_CURRENCIES = {"\\$": "dollars", "USD": "dollars", "\u20ac": "euros", "EUR": "euros", "\u00a3": "sterling",
               "GBP": "sterling", "\\pounds": "sterling", "\u00a5": "yensign", "CNY": "yuan", "RMB": "yuan",
               "\\yen": "yensign", "JPY": "yen", "\u20b9": "rupees", "INR": "rupees", "CHF": "francs",
               "\u20a9": "won", "KRW": "won"}  # fmt: skip
_DOLLARS = re.compile(r"(?<![A-Za-z])(?:US|AU?|CA?|NZ|HK|S)\\\$(?=[0-9])")
_AMOUNT = re.compile(
    f"({'|'.join(map(re.escape, _CURRENCIES))})" + r"\s*([0-9][0-9,.]*(?:\{,\}[0-9]{3})*|\\d?frac\{[0-9]+\}\{[0-9]+\})"
    r"(\s*(?:\\text\{\s*(?:thousand|million|billion|trillion)\s*\}|(?:thousand|million|billion|trillion)\b))?"
)


def _time(time: re.Match[str]) -> str:
    return rf"{time[1]}\text{{{time[2].lower()}m}}"


_MONEY_SIGNS = re.compile(r"[$\u20ac\u00a3\u00a5\u20b9\u20a9]|[A-Z]{3}|\\pounds|\\yen")
_LETTER_UNITS = frozenset(name for name in NAMES if len(name) == 1) - {"l"}
_Spelling = tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]
_SPELLINGS: tuple[_Spelling, ...] = (
    (re.compile(r"\\[dtc]frac(?![a-z])"), r"\\frac"),
    (re.compile(r"\\(?:text)?color\s*\{[A-Za-z]+\}|\\(?:tiny|small|[lL]arge|LARGE|[hH]uge|normalsize)(?![a-z])"), ""),
    (re.compile(r"\\(?:math(?:bf|rm|it|sf)|textbf|pmb)\s*\{(?=\\(?!text|math))|\\(?:bf|rm|it)\s*\{(?=[-0-9\\])"), "{"),
    (re.compile(r"\\(?:hat|vec|bar|mathbf)\s*\{?\s*\\?([ijk])(?:math)?(?![A-Za-z])\s*\}?"), r"\1"),
    (re.compile(r"(?<=[0-9\s,~{}kM])\\Omega(?![a-z(])"), "ohm"),
    (re.compile(r"\\frac\s*([0-9A-Za-z])\s*([0-9A-Za-z])"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\frac\s*([0-9A-Za-z])\s*\{"), r"\\frac{\1}{"),
    (re.compile(r"(\\frac\s*\{[^{}]*\})\s*([0-9A-Za-z])"), r"\1{\2}"),
    (re.compile(r"\\(?:neq|not\s*=)(?![a-z])"), r"\\ne "),
    (re.compile(r"\\(?:leq|leqslant|leqq)(?![a-z])|<="), r"\\le "),
    (re.compile(r"\\(?:geq|geqslant|geqq)(?![a-z])|>="), r"\\ge "),
    (re.compile(r"\\lt(?![a-z])"), "<"),
    (re.compile(r"\\gt(?![a-z])"), ">"),
    (re.compile(r"\\(?:simeq|approxeq|doteq)(?![a-z])"), r"\\approx "),
    (re.compile(r"!="), r"\\ne "),
    (re.compile(r"(?<=\.)([0-9]*)\\dot\s*\{?([0-9])\}?(?:([0-9]*)\\dot\s*\{?([0-9])\}?)?"), r"\1\\overline{\2\3\4}"),
    (re.compile(r"(?<=[0-9]\.)\(([0-9]{1,9})\)"), r"\\overline{\1}"),
    (re.compile(r"(?<![A-Za-z\\])[ABD-MO-TV-Z]\s?(?=\(\s*[-+]?[0-9][^(),]{0,30}(?:,[^(),]{1,30}){1,2}\))"), ""),
    (re.compile(r"\\(?:varnothing)(?![a-z])"), r"\\emptyset "),
    (re.compile(r"\\lbrace(?![a-z])"), r"\\{"),
    (re.compile(r"\\rbrace(?![a-z])"), r"\\}"),
    (re.compile(r"\\[lr]?[vV]ert(?![a-z])|\\mid(?![a-z])"), "|"),
    (re.compile(r"\\(?:var)(?=phi|epsilon|theta|rho|sigma)"), r"\\"),
    (re.compile(r"\^\s*\{?\s*(?:\\prime|')\s*(?:\\prime|')\s*\}?"), "''"),
    (re.compile(r"\^\s*\{?\s*\\prime\s*\}?"), "'"),
    (re.compile(r"\\(begin|end)\{[bvVB]?(?:small)?matrix\}"), r"\\\1{pmatrix}"),
    (re.compile(r"(?<=[)\]}])\s*U\s*(?=[(\[{])"), r" \\cup "),
    (
        re.compile(
            r"(?<![A-Za-z\\])\{?(?:\\(?:mathrm|text)\s*\{\s*C\s*\}|C)\}?"
            r"_(?:\{([0-9a-z+-]{1,9})\}|([0-9a-z]))\^(?:\{([0-9a-z+-]{1,9})\}|([0-9a-z]))"
        ),
        r"\\binom{\1\2}{\3\4}",
    ),
    (re.compile(r"\\lg(?![A-Za-z])"), r"\\log_{10}"),
    (re.compile(r"\\log\s*_\s*(?:e|\{\s*e\s*\})(?![A-Za-z])"), r"\\ln "),
    (re.compile(r"\\(?:vec|overrightarrow)\s*(?:\{\s*([A-Za-z]{1,2})\s*\}|([A-Za-z])(?![A-Za-z]))"), r"\1\2"),
    (re.compile(r"\\text\{\s*([0-9]{1,2}(?::[0-9]{2})?)\s*([AaPp])\.?\s?[Mm]\.?\s*\}"), _time),
    (
        re.compile(r"\{\s*([0-9A-Za-z+-]{1,9})\s*\\choose\s*([0-9A-Za-z+-]{1,9})\s*\}"),
        r"\\binom{\1}{\2}",
    ),
    (re.compile(r"\A([0-9]{1,3}(?: [0-9]{3})+)\Z"), lambda match: match[1].replace(" ", "")),
    (re.compile(r"\\cr(?![a-z])"), r"\\\\"),
    (re.compile(r"\A\s*<([^<>=]*,[^<>=]*)>\s*\Z"), r"(\1)"),
    (re.compile(r"(?<=[)\]])\^\s*\{?\s*(?:T|\\top|\\mathsf\{T\}|\\intercal)\s*\}?\Z"), ""),
    (re.compile(r"\b(sq|cu)\."), r"\1"),
    (re.compile(r"(?<=[0-9])\s*\^\s*(?:o(?![A-Za-z])|\{\s*o\s*\})"), r"^\\circ "),
    (re.compile(r"\\AA(?![a-z])"), r"\\text{angstrom}"),
    (re.compile(r"\\%"), "%"),
    (re.compile(r"\\(?:ldots|cdots|dots)(?![a-z])"), "..."),
)  # fmt: skip
_SPELLINGS_OF_TEXT = [
    (pattern, spelling)
    for pattern, spelling in _SPELLINGS
    if not pattern.pattern.startswith(r"\\") or re.search(r"\|[<>]=", pattern.pattern)
]
"""Substitutions that only apply to text without a backslash."""
_POWER = r"(?:\^(?:\{-?[1-9]\}|-?[1-9]))"
_POWERED = rf"[A-Za-z]{{1,4}}{_POWER}?(?:(?: |/| ?\\cdot ?)[A-Za-z]{{1,4}}{_POWER}?){{0,3}}"
_UNITS_OF_POWERS = re.compile(
    rf"(?<=[0-9\s}}])\\(?:text|mathrm)\s*\{{ ?({_POWERED}) ?\}}|(?<=[0-9}}]) ({_POWERED})(?=[\s.]*\Z)"
)
"""`m\\,s^{-2}`, in a single font or without one."""
_FOR_ALL = re.compile(
    r",?\s*(?:\b(?:for|where|with)\s+)?(?:\b(?:some|any|all|every|each|an)\s+)(integer|real number)s?\s+([a-z])\b"
    r"|,?\s*(?:\b(?:for|where|with)\s+)?(?<![\\A-Za-z])([a-z])\s+(?:is|be)?\s*(?:an?|any|some)\s+(?:arbitrary\s+)?"
    r"(?:integer|real(?: number)?)\b"
)
_COORDINATE = r"\s*[-+]?(?:[0-9]|\\(?:frac|sqrt))[^()|,]{0,40}"
_GERMAN_POINT = re.compile(rf"(?:(?<![A-Za-z\\])[A-Z] ?)?\(({_COORDINATE}(?:\|{_COORDINATE}){{1,2}})\)")
_WORDINGS: tuple[_Spelling, ...] = (
    (re.compile(r"\\(?:text|textbf|mathrm|mbox)\s*\{([^{}]*\b(?:reals?|except)\b[^{}]*)\}"), r" \1 "),
    (re.compile(r"\\(?:mathbb|mathbf|Bbb)\s*\{?\s*([RZNQ])\s*\}?|\\([RZNQ])(?![A-Za-z])"), r"\\mathbb{\1\2}"),
    (re.compile(r"\\(?:text|mathrm)\s*\{([^{}]*\bintegers?\b[^{}]*)\}"), r" \1 "),
    (
        re.compile(r"(?:\\ |\s)*\(\s*([A-Za-z]\s*\\in\s*\\mathbb\{[ZNQR]\}(?:[\^_]\{?\s*(?:[*+]|\\ast)\s*\}?)?)\s*\)"),
        r", \1 ",
    ),
    (re.compile(r"(?:\\ |\s)*\(\s*([a-z]\s*\\ne\s*[^()]{1,30})\)\s*\Z"), r", \1 "),
    (re.compile(r",\s*([a-z])\s+(?:is\s+)?(?:any\s+)?real\s*\Z"), r", \1 \\in \\mathbb{R}"),
    (_GERMAN_POINT, lambda point: f"({point[1].replace('|', ',')})"),
    (_FOR_ALL, lambda words: rf", {words[2] or words[3]} \in \mathbb{{{'Z' if 'int' in words[0] else 'R'}}} "),
    (re.compile(r"\b(?:all|any|every)\s+(?:the\s+)?reals?(?:\s+(?:numbers?|values?))?(?:\s+x\b)?"), r"\\mathbb{R}"),
    (
        re.compile(
            r"(?<=\\mathbb\{R\})(\W*)(?:except(?:\s+for)?|other\s+than|but|without|not\s+equal\s+to)\b(?:\s*[a-z]\s*=)?"
        ),
        r"\1\\setminus ",
    ),
    (re.compile(r"\\(?:smallsetminus|backslash)(?![a-z])"), r"\\setminus "),
    (re.compile(r"\b(?:does|do)\s+not\s+exist\b|\bundefined\b"), "DNE"),
    (re.compile(r"\b(?:does|do)\s+not\s+converge\b|\bnot\s+convergent\b"), "diverges"),
    (re.compile(r"(?<![0-9A-Za-z)\]}])(?<![0-9A-Za-z)\]}] )\+\s*(?=\\infty|inf|oo\b)"), " "),
    (re.compile(r"(?<=[0-9])(?:st|nd|rd|th)\b"), ""),
    (re.compile(r"(?<=[a-z]) an? (?=(?:second|minute|hour|day|week|month|year|person|piece|head)\b)"), " per "),
    (re.compile(r"\A\s*([0-9]+)\s+to\s+([0-9]+)\s*\Z"), r"\1:\2"),
    (re.compile(r"\\text\{\s*([AaPp])\.\s?[Mm]\.?\s*\}"), lambda half: rf"\text{{{half[1].lower()}m}}"),
    (re.compile(r"(?<=:[0-9]{2})\s*([ap])m\b"), r"\\text{\1m}"),
    (re.compile(r"(?<=[0-9])\s*([AaPp])(?:\.\s?[Mm]\b\.?|M\b)"), lambda half: rf"\text{{{half[1].lower()}m}}"),
    (re.compile(r"\bpercentage points?\b"), "percent"),
    (re.compile(r"(?<![A-Za-z\\])log_?([0-9]{1,2})\s*(?=\()"), r"\\log_{\1}"),
    (re.compile(r"\A\s*(?:\{\})?[_^]?\{?([0-9]+)\}?\s*C\s*_?\{?([0-9]+)\}?\s*\Z"), r"\\binom{\1}{\2}"),
    (re.compile(r"\binfinite(?:\s+number\s+of)?(?=\s+solutions)"), "infinitely many"),
    (re.compile(r"\\(?:text|mathrm)\s*\{\s*([A-Za-z]{1,4})/([A-Za-z]{1,4})\s*\}"), r"\\text{\1}/\\text{\2}"),
)
"""Names of sets, words and signs with one spelling each."""
_PLAIN_NUMBER = re.compile(r"-?(?:[0-9]+\.)?[0-9]+")
_SCALED = re.compile(r"\A((?:\\?\$ ?)?[0-9]+\.[0-9]+)([MBKk])\b")
_SCALE_LETTERS = {"K": "thousand", "M": "million", "B": "billion"}
_POINTED = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:\.[0-9]{3}){2,9}(?![0-9.])")
_RUPEES = re.compile(r"(?:\\(?:text|mathrm)\{\s*Rs\.?\s*\}|\bRs\.?|\bINR\b|\u20b9)\s*([0-9][0-9,]{0,40})")
_INDIAN = re.compile(r"(?<![0-9.,])[0-9]{1,2}(?:,[0-9]{2}){1,9},0[0-9]{2}(?![0-9,])")
_MODULUS = re.compile(
    r"\\pmod ?([0-9A-Za-z])(?![0-9])|\\b?mod ?\{?([0-9]+|[a-z])\}?|\((?:\\text\{mod\}|\\b?mod ?)\{?([0-9]+|[a-z])\}?\)"
    r"|\\text\{mod(?:ulo)?\}([0-9]+|[a-z])"
)
_MONTHS = "january|february|march|april|may|june|july|august|september|october|november|december"
_DAY_FIRST = re.compile(rf"(?:\\text\{{the\}})?([0-9]{{1,2}})(?:\\text\{{of\}})?\\text\{{({_MONTHS})\}},?([0-9]{{4}})?")
_GERMAN = re.compile(r"(?<![0-9.,])([0-9]{1,3}(?:\.[0-9]{3})+),([0-9]{2})(?![0-9.,])")
_PAIRED = re.compile(r"\A([A-Za-z]), ?([A-Za-z]) ?= ?([^=,()]+),([^=,()]+)\Z")
_ELLIPSIS = re.compile(r"(?<![0-9A-Za-z,])((?:-?[0-9]{1,6},){1,9})\.\.\.,(-?[0-9]{1,6})(?![0-9,])")
_NEXT_EQUATION = re.compile(r"(?:\\q?quad|\\\\|(?<=[0-9]) (?=[abcnpqu-z]))[\s,&$]*(?=[A-Za-z](?:_\{?[0-9a-z]\}?)?\s*=)")
_NOTHING = re.compile(
    r"(?:\\text\{there\}\\text\{(?:is|are)\})?\\text\{no\}(?:\\text\{(?:real|integer|positive|such|valid)\})*"
    r"\\text\{(?:solution|root)s?\}(?:\\text\{exists?\})?|\\text\{no\}\\text\{such\}(?:\\text\{[a-z]+\})?|\\\{\\\}"
    r"|(?:\\text\{the\})?\\text\{solution\}\\text\{set\}\\text\{is\}\\text\{empty\}"
    r"|(?:\\text\{the\})?\\text\{empty\}(?:\\text\{set\})?|\\emptyset ?"
)
_NUMBER_WORDS = {word: str(value) for word, value in (ONES | TENS).items()} | {r"one} \text{half": r"\frac{1}{2}"}
_SPELLED = re.compile(
    r"\s*\\text\{(" + "|".join(sorted(map(re.escape, _NUMBER_WORDS), key=len, reverse=True)) + r")\}(?!\s*[-0-9])"
)
_TEMPERATURE = re.compile(r"\\text\{degrees?\}\\text\{(celsius|fahrenheit)\}")
_SOLUTIONS = re.compile(
    r"(?<=\\text\{many\})(?:\\text\{(?:real|integer|such|different)\})?\\text\{(?:solution|pair|triple|value)s?\}"
    r"|\A(?:\\text\{(?:the|an)\})+|(?<=.)\\text\{only\}\Z|\A\\text\{there\}\\text\{(?:is|are)\}(?=\\text\{infinitely\})"
    r"|\A(?:\\text\{(?:the|it|system|equation|s)\}){1,3}\\text\{has\}(?=\\text\{infinitely\})"
)
_BESIDE_VALUES = re.compile(
    r"\A\\mathbb\{R\}(?=[a-z](?:[<>]|\\[gl]e))|\A\\text\{(?:only|all)\}(?=[A-Za-z](?:=|[<>]|\\[gl]e))"
    r"|,?\\text\{(?:for|where)\}(?:\\text\{(?:some|any|an|arbitrary|real)\})*\\text\{constant\}[A-Za-z]\Z"
    r"|,?\\text\{where\}[A-Za-z]\\text\{is\}(?:a|\\text\{an\}|\\text\{any\})?(?:\\text\{(?:arbitrary|real)\})*"
    r"\\text\{constant\}\Z"
)
"""Words beside a value that add nothing to it."""
_MINUS = re.compile(r"\A\\text\{(?:negative|minus)\}(?=[0-9\\])")
_COMPARED = re.compile(
    r"\A(?:\\text\{all\}|\\mathbb\{R\})(?:\\text\{(?:real|numbers?|values?)\})*\\text\{(greater|less)\}\\text\{than\}"
    r"(\\text\{or\}\\text\{equal\}\\text\{to\})?(?=[-0-9\\])"
)
_DIAGONAL = re.compile(r"\\text\{diag\}\(([^()]{1,80})\)")
_CONDITION = re.compile(r",?&(?:\\text\{(?:if|for|when)\})?")
"""What introduces the condition of a case."""
_DEGREES = re.compile(
    r"\s*(?:\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-z]))|\\degree(?![a-z]))\s*(?:(?:\\text\{)?([CF])\b\}?)?"
)
_ARC_MINUTES = re.compile(r"(\\circ\s*\}?|\\degree)\s*([0-9.]+)\s*(?:\^\s*\{\s*'\s*\}|'(?!'))")
_ARC_SECONDS = re.compile(r"(\\text\{ arcmin \})\s*([0-9.]+)\s*(?:''|\")")
_ABOUT = re.compile(r"\s*\\text\{(?:about|approximately|roughly|around)\}")
_TRIGONOMETRY = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
_UNDERLINED = re.compile(r"\\underline\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
_BARE_SET = re.compile(r"\A\s*((?:[A-Za-z](?:\s*\\c[au]p\s*[A-Za-z])?\s*(?:\\in|=)\s*)?)\{([^{}]*[,|:][^{}]*)\}\s*\Z")
_OUTWARD = re.compile(r"(?<!\\)([\[\]])([^\[\]()]{1,60}[,;][^\[\]()]{1,60}?)([\[\]])")
_MIXED = re.compile(
    r"([-+]?)([0-9]+)\s+(?:\\text\{and\}\s*)?(?:([0-9]+)\s*/\s*([0-9]+)|\\frac\{([0-9]+)\}\{([0-9]+)\})"
    r"(?=\s*(?:\Z|\\text\{(?!and|or)))"
)


@lru_cache(maxsize=8192)
def normalized(answer: str) -> str:
    r"""The answer in one LaTeX notation.

    Example: normalized(r"$\dfrac12\text{ cm}$") == r"\frac{1}{2}\text{cm}"; normalized("1,234") == "1234".
    """
    if _PLAIN_NUMBER.fullmatch(answer):
        return answer
    text = answer.strip()
    text = re.sub(r"(?<=[0-9]),?\\!(?=[0-9]{3}(?![0-9]))", "", text) if r"\!" in text else text
    if "R" in text or "\u20b9" in text:
        text = _RUPEES.sub(lambda rupees: f"\u20b9{rupees[1].replace(',', '')}", text)
    text = _currency(_SCALED.sub(lambda number: f"{number[1]} {_SCALE_LETTERS[number[2].upper()]}", text))
    text = text if text.isascii() else _with_scripts(text).translate(_UNICODE)
    text = re.sub(r"(?<=[0-9])\\,(?=[0-9]{3}(?![0-9]))", "", text) if r"\," in text else text
    text = _POINTED.sub(lambda number: number[0].replace(".", ""), text) if text.count(".") > 1 else text
    text = _GERMAN.sub(lambda number: f"{number[1].replace('.', '')}.{number[2]}", text) if "," in text else text
    if "=" in text:
        text = _PAIRED.sub(r"(\1,\2)=(\3,\4)", text if "\\begin" in text else _NEXT_EQUATION.sub(", ", text))
    if "[" in text or "]" in text:
        text = _OUTWARD.sub(_inward, re.sub(r"\\(?:left|right)\s*(?=[\[\]])", "", text))
    for _ in range(min(text.count("underline"), 3)):
        text = _UNDERLINED.sub(r"\1", text)
    text = _SPACES.sub(" ", re.sub(r"\\(?:boldsymbol|bm)\s*\{", "{", text)) if re.search(r"[\\$~]", text) else text
    text = re.sub(r"\b(?:np|math|sp|sympy)\.(?=[a-z])", "", text) if "." in text else text
    for pattern, spelling in _SPELLINGS if "\\" in text else _SPELLINGS_OF_TEXT:
        text = pattern.sub(spelling, text)
    text = _BARE_SET.sub(r"\1\\{\2\\}", without_arrays(text))
    text = re.sub(r"\A(?:=+>|[=:\s\u21d2\u2192\u2234]|\\(?:Rightarrow|implies|therefore)(?![a-z]))+", "", text)
    for pattern, spelling in _WORDINGS:
        text = pattern.sub(spelling, text)
    text = _UNITS_OF_POWERS.sub(_product_of_units, text) if "^" in text else text
    text = _with_words(text)
    about = _ABOUT.match(text)
    text = text[about.end() :] if about else text
    text = _degrees(text).strip().rstrip(".,;: ").strip()
    spelled = _SPELLED.match(text)
    text = _NUMBER_WORDS[spelled[1]] + text[spelled.end() :] if spelled else text
    mixed = _MIXED.match(text)
    if mixed:
        fraction = f"\\frac{{{mixed[3] or mixed[5]}}}{{{mixed[4] or mixed[6]}}}"
        text = f"{mixed[1]}{mixed[2]}{fraction}{text[mixed.end() :]}"
    text = _without_groups(text)
    text = re.sub(r"(?<=[0-9])\.(?=\s*[-+*/)}^])", "", text) if "." in text else text
    text = _EXPONENT.sub(r"\1 \\times 10^{\2}", text)
    text = _with_latex_roots(text.replace("**", "^")).replace("*", r" \cdot ")
    text = _TEMPERATURE.sub(r"\\text{\1}", _without_brackets(_compact(text)))
    text = _ELLIPSIS.sub(_written_out, text) if ",...," in text else text
    if "mod" in text:
        text = _MODULUS.sub(lambda match: rf"\pmod{{{next(filter(None, match.groups()))}}}", text)
    if r"\text" in text or r"\mathbb{R}" in text:
        text = _BESIDE_VALUES.sub(
            "", _DAY_FIRST.sub(lambda date: rf"\text{{{date[2]}}}{date[1]}" + (f",{date[3]}" if date[3] else ""), text)
        )
        text = _COMPARED.sub(_compared, _MINUS.sub("-", text))
        text = _DIAGONAL.sub(_diagonal, text) if r"\text{diag}" in text else text
    if r"\begin{cases}" in text:
        text = _CONDITION.sub("&", text)
    return r"\emptyset" if _NOTHING.fullmatch(text) else _SOLUTIONS.sub("", text)


def _with_scripts(text: str) -> str:
    """Superscripts as powers; single-character fractions and those of small digits as fractions."""
    if _CIRCLED.fullmatch(text):
        return "".join(sorted(re.findall("[\u2460-\u2473]", text)))
    text = _ROOT_SIGN.sub(lambda root: f"{_ROOTS[root[1]]}{{{root[2].removeprefix('(').removesuffix(')')}}}", text)
    text = re.sub("(?<=[0-9])\u2218", r"^\\circ ", text)
    text = _SMALL_FRACTION.sub(lambda one: rf" \frac{{{_level(one[1])}}}{{{_level(one[2])}}}", text)
    text = _FRACTIONS.sub(
        lambda one: " \\frac{{{}}}{{{}}}".format(*unicodedata.normalize("NFKC", one[0]).split("\u2044")), text
    )
    return _SUPERSCRIPTS.sub(lambda script: f"^{{{_level(script[0])}}}", text)


def _compared(words: re.Match[str]) -> str:
    """`x>` for "all numbers greater than"."""
    sign = ">" if words[1] == "greater" else "<"
    return f"x{sign}" if not words[2] else rf"x\{'g' if sign == '>' else 'l'}e"


def _diagonal(matrix: re.Match[str]) -> str:
    cells = matrix[1].split(",")
    rows = ("&".join(cell if i == j else "0" for j in range(len(cells))) for i, cell in enumerate(cells))
    return pmatrix(rows) if len(cells) < 6 else matrix[0]


def _level(script: str) -> str:
    return unicodedata.normalize("NFKC", script).replace("\u2212", "-")


def _written_out(items: re.Match[str]) -> str:
    """`1,2,...,5` as `1,2,3,4,5`, up to 60 items."""
    first, *others = map(int, items[1].rstrip(",").split(","))
    step, last = (others[0] - first if others else 1), int(items[2])
    values = list(range(first, last + (1 if step > 0 else -1), step)) if step and (last - first) // step < 60 else []
    is_regular = values[: len(others) + 1] == [first, *others] and values[-1:] == [last]
    return ",".join(map(str, values)) if is_regular else items[0]


def _inward(interval: re.Match[str]) -> str:
    """`]0,1[` as (0,1)."""
    return f"{'[' if interval[1] == '[' else '('}{interval[2]}{']' if interval[3] == ']' else ')'}"


def _currency(text: str) -> str:
    """`\\$5` as 5 dollars; a single `$` is also a dollar sign, two delimit a formula."""
    if not _MONEY_SIGNS.search(text):
        return text
    text = re.sub(
        r"\\(?:text|mathrm)\s*\{\s*(\\?[$\u20ac\u00a3\u00a5]|[A-Z]{3})\s*\}(?=\s*[0-9$\u20ac\u00a3\u00a5])",
        r"\1",
        _DOLLARS.sub(r"\$", text),
    )
    bare = len(re.findall(r"(?<!\\)\$", text))
    if bare % 2 == 1:
        text = re.sub(r"(?<!\\)\$(?=\s?[0-9.])", r"\\$", text) if re.search(r"\$\s?[0-9.]", text) else text
    text = _AMOUNT.sub(_amount, text)
    return re.sub(r"\\\$", r"\\text{ dollars }", text)


def _amount(match: re.Match[str]) -> str:
    number = match[2].rstrip(".,")
    return rf"{number}{match[3] or ''}\text{{ {_CURRENCIES[match[1]]} }}{match[2][len(number) :]}"


# -- words -----------------------------------------------------------------------------------------------------------


def _with_words(text: str) -> str:
    """Puts every word in its own `\\text{...}`, in lower case unless it is a unit; single letters stay bare."""
    if "_" in text:
        text = _SUBSCRIPT.sub(lambda match: f"_{{{re.sub(r'[ ~]', '', match[1] or match[2] or '')}}}", text)
        text = re.sub(r"_\{?([a-z]{3,7})\}?(?![a-zA-Z])", _base, text)
    text = _OLD_FONT.sub(r"\\text{\1}", text)
    text = _FONT.sub(_in_font, text)
    pieces: list[str] = []
    place = 0
    for word in _LETTERS.finditer(text):
        before = text[place : word.start()]
        pieces += [before, _lettered(word[0], "".join(pieces[-4:]) + before, text[word.end() : word.end() + 8])]
        place = word.end()
    return "".join([*pieces, text[place:]])


def _base(subscript: re.Match[str]) -> str:
    """`_{8}` for the base "eight"."""
    value = ONES.get(subscript[1], 0)
    return f"_{{{value if value in _BASES else subscript[1]}}}"


def _product_of_units(product: re.Match[str]) -> str:
    """`m s^{-2}` as `\\text{m}\\cdot\\text{s}^{-2}`; other text unchanged."""
    pieces = re.findall(rf"( |/| ?\\cdot ?|)([A-Za-z]{{1,4}})({_POWER}?)", product[1] or product[2])
    if not all(is_unit(unit) for _, unit, _ in pieces) or not any(power for _, _, power in pieces):
        return product[0]
    return "".join(
        ("/" if joint == "/" else r"\cdot" if joint else "") + rf"\text{{{unit}}}" + power
        for joint, unit, power in pieces
    )


def _in_font(match: re.Match[str]) -> str:
    content = re.sub(r"\s*\bpercent\b", "%", match[1].replace("~", " "))
    before = match.string[: match.start()].rstrip()
    if content.strip() in _LETTER_UNITS and re.search(r"[0-9)\]}/%]$|\\cdot$", before):
        return rf"\text{{{content.strip()}}}"
    if not re.search(r"[A-Za-z]{2}", content):
        return content
    return " " + re.sub(r"(?<!\\)\b[A-Za-z]{2,}", lambda word: _as_word(word[0], is_text=True), content) + " "


def _as_word(word: str, *, is_text: bool = False) -> str:
    if re.fullmatch(r"[IVX]{2,4}", word) or (len(word) > 1 and re.fullmatch("A?B?C?D?E?", word)):
        return word
    if word in _FUNCTIONS and not (is_text and is_unit(word)):
        return rf"\{word} "
    return _CONSTANTS.get(word) or rf"\text{{{word if is_unit(word) and len(word) < 4 else word.lower()}}}"


def _lettered(letters: str, before: str, after: str) -> str:
    """A run of bare letters: a word, a function, a constant, a unit, or a product of single letters."""
    if letters[0] in "\\_":
        return letters
    if letters in _FUNCTIONS or letters in _CONSTANTS:
        is_measured = re.search(r"[0-9]\s*$", before) and re.match(r"\s*(?:$|[.,;]\s*$)", after)
        return _as_word(letters, is_text=is_measured is not None)
    if letters == "sqrt" or letters == "percent":
        return letters if letters == "sqrt" else "%"
    follows_value = re.search(r"[0-9)\]}%]\s*$|\\text\{[^{}]*\}\s*/?\s*$|[0-9]\s*/\s*$|\\pi\s*$", before)
    if len(letters) == 1:
        is_spaced = re.search(r"[0-9]\s+$|\\text\{[^{}]*\}\s*/\s*$|\\text\{(?:per|square|cubic|sq|cu)\}\s*$", before)
        if (
            letters in _LETTER_UNITS
            and is_spaced
            and re.match(r"\s*(?:$|/|\\text|\)$|(?<=\s)\([0-9.]|[.,]?\s*\Z|\^|\s[0-9.]{1,4}\s?[a-z])", after)
        ):
            return rf"\text{{{letters}}}"
        is_index = after[:1].isdigit() and letters not in "eE" and not before.endswith(("_", "^"))
        return f"{letters}_" if is_index else letters  # v0 is v_0
    if (
        len(letters) > 3
        or (len(letters) == 3 and letters.istitle() and not before)
        or letters.lower() in _SHORT_WORDS
        or letters in SCALES
        or (is_unit(letters) and (follows_value or len(letters) > 2))
    ):
        return _as_word(letters)
    return letters


def _degrees(text: str) -> str:
    """A degree sign at the end is a unit; within a formula it is a number."""

    def written(match: re.Match[str]) -> str:
        if match[1]:
            return rf"\text{{{'celsius' if match[1] == 'C' else 'fahrenheit'}}}"
        in_formula = _TRIGONOMETRY.search(match.string, 0, match.start())
        return r"\cdot\frac{\pi}{180}" if in_formula else r"\text{degrees}"

    if "'" in text:
        text = _ARC_SECONDS.sub(r"\1 \2\\text{ arcsec }", _ARC_MINUTES.sub(r"\1 \2\\text{ arcmin }", text))
    return _DEGREES.sub(written, text) if "circ" in text or "degree" in text else text


# -- numbers, roots and brackets -------------------------------------------------------------------------------------


def _without_groups(text: str) -> str:
    """1,234 without its comma unless it may be a list: in brackets, only `{,}` is certainly a thousands separator."""
    if not re.search(r"[(\[]|\\\{", text):
        text = _COMMA_GROUPS.sub(lambda match: match[1] + re.sub(r"[{},]", "", match[2]), text)
        text = _INDIAN.sub(lambda number: number[0].replace(",", ""), text) if ",0" in text else text
    return text.replace("{,}", "")


def _with_latex_roots(text: str) -> str:
    """`sqrt(...)` as `\\sqrt{...}`, up to the matching bracket; unchanged if brackets do not balance."""
    for _ in range(min(text.count("sqrt"), 50)):
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
    return re.sub(r"(?<![\\A-Za-z])sqrt", r"\\sqrt", text) if "sqrt" in text else text


_COMPACTED = (
    (re.compile(r"([_^])\s*\{\s*([0-9A-Za-z])\s*\}"), r"\1\2"),
    (re.compile(r"\\sqrt\s*(\[[^\[\]]{1,9}\])?\s*([0-9A-Za-z])"), r"\\sqrt\1{\2}"),
    (re.compile(r"(\\[A-Za-z]+)\s+(?=[A-Za-z])"), "\\1\0"),  # a command ends at the space before a letter
    (re.compile(r"([_^])([0-9])\s+(?=[0-9])"), r"\1{\2}"),
    (re.compile(r"(?<=[0-9])\s+(?=[0-9])"), "\0"),  # 4 2 is not 42
    (re.compile(r"\s+"), ""),
)
"""White space and braces that LaTeX does not need -> their replacements."""


def _compact(text: str) -> str:
    """The text without the white space and braces that LaTeX does not need: `x_{1}, y ^ 2` is `x_1,y^2`."""
    for pattern, spelling in _COMPACTED:
        text = pattern.sub(spelling, text)
    text = text.replace("{}", "").replace("\0", " ")
    for _ in range(min(text.count("{{"), 4)):
        text = re.sub(r"\{\{([^{}]*)\}\}", r"{\1}", text)
    while text.startswith("{") and text.endswith("}") and _closes_at_the_end(text):
        text = text[1:-1]
    return text


def _closes_at_the_end(text: str) -> bool:
    """Whether the bracket at the beginning is closed by the one at the end."""
    depth = 0
    for i, character in enumerate(text):
        depth += (character in "({") - (character in ")}")
        if depth == 0:
            return i == len(text) - 1
    return False


def _without_brackets(text: str) -> str:
    """`(a)` as `a`, if the two brackets match and do not enclose a list."""
    while text.startswith("(") and text.endswith(")") and "," not in text and not re.fullmatch(r"\([A-Ja-e]\)", text):
        if not _closes_at_the_end(text):
            break
        text = text[1:-1]
    return text

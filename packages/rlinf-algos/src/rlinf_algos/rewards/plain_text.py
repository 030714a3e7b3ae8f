r"""One plain notation for the text of a completion, so that one grammar finds the answer in all of them.

`plain_text` maps wide characters and Chinese punctuation to ASCII, the Chinese words with which solutions state their
answers to English ones, amounts such as `$5` to `\$5`, and drops HTML tags, code fences and bold type. Runs of blanks
become one, so that a pattern that looks past white space takes bounded time. Every step takes time linear in the text.
"""

import re

from rlinf_algos.rewards.number_words import with_numbers

_WIDE = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)} | {
    0x3000: " ", 0x3002: ". ", 0xFF0E: ".", 0x3001: ", ", 0xFF0C: ", ", 0xFF1A: ": ", 0xFF1B: "; ", 0xFF1F: "? ",
    0xFF01: "! ", 0xFFE5: "\u00a5", 0x201C: '"', 0x201D: '"', 0x2236: ":",
}  # fmt: skip
_HEADED = re.compile("\u3010([^\u3010\u3011\n]{1,12})\u3011:? ?")
_STRUCK = re.compile(
    r"~~(?=\S)[^~\n]{1,300}~~|<(s|del|strike)>[^<\n]{1,300}</\1>|\\(?:sout|st)\{[^{}\n]{1,300}\}", flags=re.IGNORECASE
)
"""What is withdrawn by being crossed out."""
_ANSWER_TAGS = re.compile(r"<(/?)(?:final[_ ]?answer|final|result)>|\[(/?)answer\]", flags=re.IGNORECASE)
_AGAIN = re.compile(r"(?<=[0-9])(\.[0-9]{0,10}?)([0-9]{1,6}?)\2{2,}(?:\.\.\.|\u2026|\\[lc]?dots(?![a-z]))")
_QUOTED = re.compile(r"^> ", flags=re.MULTILINE)
_RUPEES = re.compile(r"\bRs\.? ?(?=[0-9])")
_SUBSCRIPTS = re.compile("[\u2080-\u2089]{1,9}")
_SPACED = re.compile("(?<![0-9.,] )(?<![0-9.,])[0-9]{1,3}(?: [0-9]{3}){1,5}(?= ?[\u20ac\u00a3\u20b9])")
_TAGS = re.compile(
    r"</?(?:b|i|u|strong|em|p|br|hr|div|span|center|font|code|pre|mark|h[1-6]|ul|ol|li)(?: [^<>\n]{0,100})?/?>",
    flags=re.IGNORECASE,
)
_CHARACTERS = {"nbsp": " ", "lt": "<", "gt": ">", "amp": "&", "minus": "-", "times": "\u00d7", "pi": "\u03c0"}
_ENTITIES = re.compile(f"&({'|'.join(_CHARACTERS)});")
_FENCE = re.compile(r"^```[\w+-]{0,20}$", flags=re.MULTILINE)
_EMPHASIS = re.compile(r"(?<![0-9A-Za-z)\]}])\*\*|\*\*(?![0-9A-Za-z(\\-])|`|(?<!\w)__(?=\w)|(?<=\w)__(?!\w)")
_COMPARED = re.compile(
    r"\$\\mathbb\{R\}\$ (?:(?:that|which) are )?"
    r"(greater than or equal to|less than or equal to|at least|at most|greater than|less than) (?=[-$\\0-9])"
)
_BOUND = re.compile(
    r"\b(?:(?:all|any|every) ([a-z])|([b-hj-z]) is) "
    r"(greater than or equal to|less than or equal to|at least|at most|greater than|less than) (?=[-$\\0-9])"
)
_COMPARISONS = {"greater than or equal to": r"\ge", "at least": r"\ge", "less than or equal to": r"\le",
                "at most": r"\le", "greater than": ">", "less than": "<"}  # fmt: skip
_ROWS = re.compile(
    r"\b(?:the |a )?matrix (?:with|whose) (?:the )?(?:rows |(?:first|top) row (?:is )?)"
    r"(\([^()\n]{1,60}\)(?:,? (?:and )?(?:[a-z]{5,6} row (?:is )?)?\([^()\n]{1,60}\)){1,5})"
)
_SYMBOLS = re.compile("[\u2600-\u27bf\ufe0f\U0001f000-\U0001faff]")
_REALS = re.compile(
    r"(?<!for )\b(?:all|any|every) (?:the )?real(?: numbers?| values?|s\b)?(?: \$?x\$?)?(?![a-z])", flags=re.IGNORECASE
)
_CHINESE = re.compile("[\u4e00-\u9fff]")
_WORDS = {
    "最终": " final ", "答案": " answer ", "正确选项": " correct option ", "选项": " option ", "不正确": " wrong ",
    "正确": " correct ", "错误": " wrong ", "应选": " choose ", "选择": " choose ", "选": " choose ",
    "而不是": ", not ", "而不选": ", not ", "而非": ", not ",
    "不应选": " is not ", "不能选": " is not ", "不选": " is not ", "不是": " is not ",
    "不等于": " is not ", "等于": " equals ",
    "约为": " approximately ", "约等于": " approximately ", "约是": " approximately ", "大约": " approximately ",
    "就是": " is ", "是": " is ",
    "应为": " is ", "分别为": " are ", "分别是": " are ", "为": " is ", "或者": " or ", "或": " or ", "以及": " and ",
    "和": " and ", "与": " and ", "并且": " and ", "且": " and ", "解得": " gives ", "可得": " gives ",
    "得到": " gives ", "得": " gives ", "无实数解": " no solution ", "没有实数解": " no solution ",
    "没有解": " no solution ", "无解": " no solution ", "空集": r" \emptyset ", "不存在": " does not exist ",
    "无穷多": " infinitely many ", "无数": " infinitely many ", "全体实数": r" \mathbb{R} ",
    "所有实数": r" \mathbb{R} ", "任意实数": r" \mathbb{R} ", "因为": " because ", "由于": " because ",
    "所以": " so ", "因此": " so ", "大于等于": r" \ge ", "小于等于": r" \le ", "大于": " > ", "小于": " < ",
    "弧度": " radians ", "度": " degrees ", "美元": " dollars ", "欧元": " euros ", "英镑": " pounds sterling ",
    "人民币": " yuan ", "美分": " cents ",
    "元": " yuan ", "角": " jiao ", "平方千米": " square km ", "平方公里": " square km ",
    "平方米": " square m ", "平方厘米": " square cm ", "平方分米": " square dm ", "平方毫米": " square mm ",
    "立方米": " cubic m ", "立方厘米": " cubic cm ", "立方分米": " cubic dm ", "千米": " km ", "公里": " km ",
    "分米": " dm ", "厘米": " cm ", "毫米": " mm ", "米": " m ", "小时": " hours ", "分钟": " minutes ",
    "秒": " seconds ", "天": " days ", "星期": " weeks ", "周": " weeks ", "年": " years ", "个月": " months ",
    "千克": " kg ", "公斤": " kg ", "毫克": " mg ", "克": " g ", "吨": " tonnes ", "毫升": " ml ", "升": " liters ",
    "答:": " answer: ", "答: ": " answer: ", "千米每小时": " km/h ", "公里每小时": " km/h ", "米每秒": " m/s ",
    "万": " wan ", "亿": " yi ",
}  # fmt: skip
_AFTER_NUMBERS = frozenset("度米克天年元角万亿秒吨升周") | {"美元", "欧元", "星期"}
"""Words that are units after a number or formula, and parts of other words elsewhere."""
_WORD = re.compile("|".join(sorted(_WORDS, key=len, reverse=True)))
_COUNTED = re.compile(r"(?<=[0-9})$])\s?[\u4e00-\u9fff]{1,12}")
_PROSE = re.compile(r"(?<![\\A-Za-z{])(?!sqrt|sin|cos|tan|log|text|frac|exp)[A-Za-z]{3,}|[-+=/,(\s]\Z")


def plain_text(text: str) -> str:
    r"""The text in one notation.

    Example: plain_text("所以答案是５。") == "so answer is 5."; plain_text("it costs $5 or <b>$7</b>") has `\$5 or \$7`.
    """
    text = re.sub("(?<=[0-9])[\u2009\u202f\u00a0](?=[0-9]{3}(?![0-9]))", r"\\,", text.translate(_WIDE))
    if not text.isascii():
        text = _HEADED.sub(r"\1: ", text).replace("\u3010", "(").replace("\u3011", ")")
        text = _SUBSCRIPTS.sub(lambda digits: "_{" + "".join(chr(ord(one) - 0x2050) for one in digits[0]) + "}", text)
        text = _SPACED.sub(lambda number: number[0].replace(" ", ""), text)
    text = _RUPEES.sub("INR ", text) if "Rs" in text else text
    text = _QUOTED.sub("", text) if "\n> " in text else text
    text = (
        _ANSWER_TAGS.sub(lambda tag: f"<{tag[1] or tag[2] or ''}answer>", text)
        if "</" in text or "[/" in text
        else text
    )
    text = _AGAIN.sub(r"\1\\overline{\2}", text) if "..." in text or "\u2026" in text or "dots" in text else text
    text = _STRUCK.sub(" ", text) if "~~" in text or "</" in text or r"\s" in text else text
    text = text.replace(" as well as ", " and ")
    text = _ENTITIES.sub(lambda entity: _CHARACTERS[entity[1]], text)
    text = re.sub(r"\\(begin|end)\{(?:equation|displaymath|multline)\*?\}", _display, text)
    text = re.sub(r"\b(sq|cu)\. (?=[a-z])", r"\1 ", text)
    text = _EMPHASIS.sub("", _SYMBOLS.sub("", _FENCE.sub("", _TAGS.sub(" ", text))))
    text = _REALS.sub(r"$\\mathbb{R}$", text)
    if "at least" in text or "at most" in text or " than " in text:
        text = _BOUND.sub(_bound, _COMPARED.sub(lambda words: f"x {_COMPARISONS[words[1]]} ", text))
    text = _ROWS.sub(_matrix, text) if "matrix wi" in text or "matrix wh" in text else text
    text = with_numbers(text)
    if _CHINESE.search(text):
        text = _in_english(text)
    if "$" in text:
        text = "\n".join(map(_with_amounts, text.split("\n")))
    text = re.sub(r"[^\S\n]+", " ", text)
    return re.sub(r"\n{3,}", "\n\n", re.sub(r" ?\n ?", "\n", text)).strip()


def _bound(words: re.Match[str]) -> str:
    return f"{words[1] or words[2]} {_COMPARISONS[words[3]]} "


def _matrix(rows: re.Match[str]) -> str:
    body = r"\\".join(row.replace(",", "&") for row in re.findall(r"\(([^()]*)\)", rows[1]))
    return rf"\begin{{pmatrix}}{body}\end{{pmatrix}}"


def _display(environment: re.Match[str]) -> str:
    return r"\[" if environment[1] == "begin" else r"\]"


def _in_english(text: str) -> str:
    """The Chinese words that state answers in English; what is counted (`18 个苹果`) is left out."""
    text = _WORD.sub(_english, text)
    text = re.sub(r"[^\S\n]+", " ", _CHINESE.sub(" ", _COUNTED.sub(" ", text)))
    return re.sub(r" ([.,;:!?])", r"\1", text)


def _english(word: re.Match[str]) -> str:
    before = word.string[max(0, word.start() - 2) : word.start()].rstrip()
    is_misread = word[0] in _AFTER_NUMBERS and not re.search(r"[0-9)}$/A-Za-z\u4e07\u4ebf]\Z", before)
    return " " if is_misread else _WORDS[word[0]]


def _with_amounts(line: str) -> str:
    r"""A line with `\$` for each `$` that stands before an amount of money and borders no formula."""
    parts = re.split(r"(?<!\\)\$", line)
    pieces, i = [parts[0]], 1
    while i < len(parts):
        is_last = i == len(parts) - 1
        is_amount = re.match(r" ?[0-9.]", parts[i]) is not None
        if is_amount and (is_last or (_PROSE.search(parts[i]) and re.match(r"[0-9]|\.[0-9]", parts[i + 1]))):
            pieces.append("\\$" + parts[i])
            i += 1
        else:
            pieces.append("$" + parts[i] if is_last else f"${parts[i]}${parts[i + 1]}")
            i += 2
    return "".join(pieces)

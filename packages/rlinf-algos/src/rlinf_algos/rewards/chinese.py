"""Reads solutions in Chinese: translates the words that state an answer, units and numbers into English and digits.

`in_english` omits what it cannot translate. A reference in words that it cannot translate, such as "parallel", is
compared in Chinese: `claim` returns what the solution states at its end, and `says` whether this is the reference.
"""

import re
from itertools import pairwise

from rlinf_algos.rewards.boxes import last_boxed

_CHINESE = re.compile("[\u4e00-\u9fff]")
WIDE = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)} | {
    0x3000: " ", 0x3002: ". ", 0xFF0E: ".", 0x3001: ", ", 0xFF0C: ", ", 0xFF1A: ": ", 0xFF1B: "; ", 0xFF1F: "? ",
    0xFF01: "! ", 0xFFE5: "\u00a5", 0x201C: '"', 0x201D: '"', 0x2236: ":",
}  # fmt: skip
_WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday", "Sunday")
_DAYS = {
    f"{week}{day}": f" {name} "
    for week in ("星期", "周", "礼拜")
    for day, name in zip("一二三四五六日天", _WEEKDAYS, strict=True)
}
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
    "此时": " when ", "可知": " so ", "可见": " so ", "求得": " so ", "算得": " so ", "占": " is ",
    **dict.fromkeys(
        ("正确的是", "正确的有", "正确的结论是", "正确的结论有", "正确结论的序号是", "正确命题的序号是"),
        " answer is ",
    ),
    "等等, ": " wait, ", "更正": " correction ",
    "检验": " verification ", "验证": " verification ", "验算": " verification ", "经检验": " ",
    "所以": " so ", "一共": " so ", "总共": " so ", "共有": " so ", "因此": " so ",
    "大于等于": r" \ge ", "小于等于": r" \le ", "大于": " > ", "小于": " < ",
    "弧度": " radians ", "度": " degrees ", "美元": " dollars ", "欧元": " euros ", "英镑": " pounds sterling ",
    "人民币": " yuan ", "美分": " cents ",
    "元": " yuan ", "角": " jiao ", "平方千米": " square km ", "平方公里": " square km ",
    "平方米": " square m ", "平方厘米": " square cm ", "平方分米": " square dm ", "平方毫米": " square mm ",
    "立方米": " cubic m ", "立方厘米": " cubic cm ", "立方分米": " cubic dm ", "千米": " km ", "公里": " km ",
    "分米": " dm ", "厘米": " cm ", "毫米": " mm ", "米": " m ", "小时": " hours ", "分钟": " minutes ",
    "秒": " seconds ", "天": " days ", "星期": " weeks ", "周": " weeks ", **_DAYS, "年": " years ", "个月": " months ",
    "千克": " kg ", "公斤": " kg ", "毫克": " mg ", "克": " g ", "吨": " tonnes ", "毫升": " ml ", "升": " liters ",
    "答:": " answer: ", "答: ": " answer: ", "千米每小时": " km/h ", "公里每小时": " km/h ", "米每秒": " m/s ",
    "千米/时": " km/h ", "千米/小时": " km/h ", "公里/小时": " km/h ", "米/秒": " m/s ", "米/分": " m/min ",
    "万": " wan ", "亿": " yi ",
}  # fmt: skip
_AFTER_NUMBERS = frozenset("度米克天年元角万亿秒吨升周") | {"美元", "欧元", "星期"}
"""Words that are units after a number or formula but parts of other words elsewhere."""
_WORD = re.compile("|".join(sorted(_WORDS, key=len, reverse=True)))
_MORNING = "凌晨|清晨|早上|早晨|上午|中午"
_TIME = re.compile(
    rf"(?:(?:{_MORNING})|(下午|傍晚|晚上|夜里))([0-9]{{1,2}}|[一二三四五六七八九十]{{1,2}})[点时]"
    r"(?:整|钟|(半)|([0-9]{1,2})分?)?"
    r"|()(?<![0-9A-Z])([0-9]{1,2})点(?:整|钟|(半)|([0-9]{1,2})分)"
    r"|()(?<![0-9])([0-9]{1,2})时()([0-9]{1,2})分(?=到|出发|开始|结束|上|下|起)"
    r"|()(?<=[是为在于到])([0-9]{1,2})点()()(?![0-9])"
)
_OTHERS = "[^,\uff0c\u3002;\n]"
_ASIDE = re.compile(
    rf"((?:可以|最多|能|每[^,\uff0c\u3002;\n0-9]{{1,4}}[分得]){_OTHERS}{{1,12}})"
    rf"[,\uff0c] ?(?:还|又)?(?:剩|余|多){_OTHERS}{{1,12}}"
    rf"|[,\uff0c] ?比{_OTHERS}{{1,20}}"
)
"""A remainder or a comparison."""
_REMAINDER = re.compile("(原[来有][^.;\n]{1,60}?)还剩")
_UNIT_IN_BRACKETS = re.compile(r"(?<=[0-9])\( ([a-z/]{1,12}) \)")
_COUNTED = re.compile(r"(?<=[0-9})$])\s?[\u4e00-\u9fff]{1,12}")


_DIGITS = {digit: i for i, digit in enumerate("零一二三四五六七八九")} | {"\u3007": 0, "两": 2}
_PLACES = {"十": 10, "百": 100, "千": 1000}
_NUMERAL = f"[{''.join(_DIGITS)}{''.join(_PLACES)}万亿]{{1,12}}"
_NUMBER = re.compile(
    rf"(?<![第期周拜0-9])(?<![0-9] )(?![百千万亿])(负?)({_NUMERAL}(?=千[米克])|{_NUMERAL})(?:分之({_NUMERAL}))?"
)
_HALVES = re.compile(
    rf"(?<![0-9.])([0-9]{{1,9}}|{_NUMERAL})(?:(个)半(?=小时|月|星期|钟头)|(小时|天|年|周|斤)半(?![0-9径]))"
    "|(?<![个点时天年周多一大0-9])半(?=个?(?:小时|钟头))个?"
)
"""Halves after a number, "七个半小时"."""
_CLASSIFIER = re.compile(
    r"\s?(?:[种个只条辆本人天支棵张页岁米块双组件套名位头匹朵颗根把袋箱盒瓶杯斤吨升倍对排行列道架艘间座]"
    r"|[所家份篇句圈步枚粒场局级男女克秒]"
    r"|次(?![方函多项根曲])|角(?!形)|度|元(?![一二三])|千[米克]|厘米|毫米|公[里斤]|分[钟米]|小时|星期|周(?![一-日])|年)"
)
_COUNTS = re.compile(r"[有共剩下需要]\Z")
_SENTENCE_END = re.compile(r"[;!?\n]|\.(?![0-9])")
_STATED = re.compile(r"(?:答案|结论)(?:应该|应当|应)?(?:就?是|为|:)+|^[ *]?[ *]?答:", flags=re.MULTILINE)
_COPULA = re.compile(r"(?:(?<![可但于还总])是|(?<![因认以])为|等于|属于|叫做?|:)")
_LEADS = re.compile(r"\A(?:综上(?:所述|可知)?|所以|因此|因而|从而|于是|那么|由此可[知见]|可见|也就是|即|故|则|而|就)+")
_NEGATIONS = frozenset("不非没未无否")
_SAID_OF = frozenset("的了最先获赢得第")
"""What may follow a name in a clause. Anything else may be part of a longer word, as in "parallelogram"."""
_ALTERNATIVES = re.compile(r"[或和与且及、,]|还是|可能(?!性)|也许|不一定")
_UNDECIDED = re.compile(r"或|还是|可能(?!性)|也许|不一定")
_MAX_CLAIM = 200
"""Maximum number of characters of a sentence that states an answer in words."""


def is_chinese(text: str) -> bool:
    return _CHINESE.search(text) is not None


def is_in_chinese(reference: str) -> bool:
    """Whether a reference consists of Chinese words only, some of which cannot be translated here."""
    return re.fullmatch("[\u4e00-\u9fff\u3001,\uff0c\u3002]{1,40}", reference) is not None and is_chinese(
        _WORD.sub("", with_digits(reference))
    )


def claim(text: str) -> str | None:
    """The clause in which a solution states its answer in words: its last box, what follows "the answer is", or the
    end of its last sentence that is not a question."""
    text = text.rpartition("</think>")[2].translate(WIDE)
    boxed = last_boxed(text)
    if boxed and is_chinese(boxed):
        return re.sub(r"\\(?:text|mathrm|textbf)\{([^{}]*)\}", r"\1", boxed)[:_MAX_CLAIM]
    stated = list(_STATED.finditer(text))
    sentence = _SENTENCE_END.split(text[stated[-1].end() :][:_MAX_CLAIM].lstrip("*: \n"))[0] if stated else ""
    if not sentence:
        ends = [0, *(end.end() for end in _SENTENCE_END.finditer(text)), len(text)]
        sentences = (text[start:end] for start, end in pairwise(ends))
        sentence = next((one for one in list(sentences)[::-1] if is_chinese(one) and not one.endswith("?")), "")
    clauses = [clause for clause in sentence[-_MAX_CLAIM:].split(",") if is_chinese(clause)]
    return re.sub(r"[\s.!;*\"]", "", clauses[-1]) if clauses else None


def says(reference: str, clause: str) -> bool:
    """Whether a clause states the reference: as its predicate, or as its first or last words."""
    reference, clause = re.sub(r"[\s.,]", "", reference.translate(WIDE)), _LEADS.sub("", clause)
    copulas = list(_COPULA.finditer(clause))
    subject, tail = (clause[: copulas[-1].start()], clause[copulas[-1].end() :]) if copulas else ("", clause)
    if subject[-1:] in _NEGATIONS:
        return False
    tail = re.sub(r"\A[A-Za-z0-9]{1,4}的|\A一?[个条种名位]|[的了]\Z", "", tail)
    if not copulas and tail.endswith(reference) and tail != reference:
        before = tail.removesuffix(reference)
        return not any(word in _NEGATIONS for word in before) and not _UNDECIDED.search(before)
    if _ALTERNATIVES.search(tail.replace(reference, "")):
        return False
    if copulas and subject == reference:
        return True
    rest = tail.removeprefix(reference) if tail.startswith(reference) else None
    if rest is not None and (not rest or len(reference) == 1 or rest[0] in _SAID_OF):
        return not any(word in _NEGATIONS for word in rest)
    return False


def with_digits(text: str) -> str:
    """The text with digits instead of numbers in words that count something: "三种" becomes "3种"."""
    return _NUMBER.sub(_digits, text)


def _digits(number: re.Match[str]) -> str:
    sign, numeral, over = "-" if number[1] else "", number[2], number[3]
    value, part = _value(numeral), _value(over) if over else None
    if over:
        return number[0] if None in (value, part) or not value else f"{sign}{part}/{value}"
    is_counted = _CLASSIFIER.match(number.string, number.end()) is not None
    if numeral == "一":
        before = max(0, number.start() - 1)
        is_counted = is_counted and _COUNTS.search(number.string, before, number.start()) is not None
    is_number = value is not None and (len(numeral) > 1 or is_counted or sign)
    return f"{sign}{value}" if is_number else number[0]


def _value(numeral: str) -> int | None:
    """The value of a numeral; None for others, such as "三四"."""
    total, section, digit, last = 0, 0, None, 10**12
    for letter in numeral:
        if letter in _DIGITS:
            if digit:
                return None
            digit = _DIGITS[letter]
        elif letter in _PLACES:
            if (digit is None and section) or _PLACES[letter] >= last:
                return None
            section, digit, last = section + (1 if digit is None else digit) * _PLACES[letter], None, _PLACES[letter]
        else:
            section += digit or 0
            if not section:
                return None
            total, section, digit, last = (total + section) * (10**4 if letter == "万" else 10**8), 0, None, 10**12
    return total + section + (digit or 0)


def in_english(text: str) -> str:
    """The text with the Chinese words that state answers in English; counted things (`18 个苹果`) are omitted."""
    text = re.sub(f"零下({_NUMERAL})", lambda words: f"-{_value(words[1])}", _TIME.sub(_time, text))
    text = _REMAINDER.sub(r"\1所以剩", text) if "还剩" in text else text
    text = _HALVES.sub(_halves, text) if "半" in text else text
    text = re.sub("零下(?=[0-9])", "-", with_digits(text))
    text = re.sub(r"(?<=[0-9])小?时([0-9]{1,2})分(?!钟)", r"小时\1分钟", text)
    text = _WORD.sub(_english, re.sub(r"(?<=角)([0-9])分(?!钟)", r"\1 fen", text))
    text = _UNIT_IN_BRACKETS.sub(r" \1", text)
    text = re.sub(r"[^\S\n]+", " ", _CHINESE.sub(" ", _COUNTED.sub(" ", text)))
    return re.sub(r" ([.,;:!?])", r"\1", text)


def without_asides(text: str) -> str:
    """The text without clauses that compare or name a remainder: "可以买8支" for "可以买8支,还剩2元"."""
    return _ASIDE.sub(lambda aside: aside[1] or "", text) if is_chinese(text) else text


def _halves(words: re.Match[str]) -> str:
    """`7.5小时` for "七个半小时", `0.5小时` for "半小时"."""
    if not words[1]:
        return "0.5"
    number = int(words[1]) if words[1].isdecimal() else _value(words[1])
    return words[0] if number is None else f"{number}.5{words[2] or words[3]}".replace("个", "")


def _time(words: re.Match[str]) -> str:
    """`16:20` for "下午4点20分"."""
    evening, hour, half, minute = next(words.groups()[i : i + 4] for i in (0, 4, 8, 12) if words[i + 2] is not None)
    hours = int(hour) if hour.isdecimal() else _value(hour)
    if hours is None:
        return words[0]
    hours += 12 if evening and hours < 12 else 0
    return f" {hours}:{int(minute or 0) if not half else 30:02d} "


def _english(word: re.Match[str]) -> str:
    before = word.string[max(0, word.start() - 2) : word.start()].rstrip()
    is_misread = word[0] in _AFTER_NUMBERS and not re.search(r"[0-9)}$/A-Za-z\u4e07\u4ebf]\Z", before)
    return " " if is_misread else _WORDS[word[0]]

r"""Reads an answer in words from a sentence: yes or no, who or what, or what somebody or something is."""

import re

from rlinf_algos.rewards.clauses import main_clause
from rlinf_algos.rewards.quantities import cleaned, without_filler

BEST = re.compile(
    r"(?:\A|\s)((?:plan |option |store |company )?)([A-J])(?: is|'s) (?:the )?"
    r"(?:better|best|cheaper|cheapest|correct|right)(?: [a-z]+)?(?: (?:by|for|for the|in) .{1,30})?\Z",
    flags=re.IGNORECASE,
)
NEGATED = re.compile(r"(?:\b(?:not|never|cannot|can't|neither|nor)|n't)\s+(?:be\s+)?\Z", flags=re.IGNORECASE)
_THAT = re.compile(
    r"\b(?:is|be|concludes?|conclusion|means?|implies|shows?|see|know|find|follows|deduce) that (?=\S)"
    r"|\b(?:[Tt]his|which|[Tt]hat) (?:means|implies|shows) (?=[A-Z])"
)
_PREDICATE = re.compile(
    r"\b(?:is|are|be|was|were|equals?|becomes?|has|have|falls? on|called|named|chooses?|wins?|get|must|takes place on"
    r"|(?:belongs?|goes|go) to|represents?|describes?|(?:lies?|lands?) (?:in|on)|opens?|costs?)\b\s*"
)
_COMPARATIVE = re.compile(
    r"(?:the )?((?:more|less|fewer|most|least|better|worse|best)(?: [a-z]+)?|[a-z]{2,}(?:er|est))"
    r"(?= (?:than|deal|value|choice|option|one|buy|in|of)\b|[,.]|\Z)"
)
_WHOLE = re.compile(
    r"\b(?:does|do) not exist\b|\bcannot be determined\b|\bno (?:[a-z]+ )?solutions?\b|\binfinitely many\b(?: [a-z]+)?"
    r"|\binfinite(?: number of)? solutions\b"
    r"|\bempty set\b|\bsolution set is empty\b",
    flags=re.IGNORECASE,
)
_ENDS_WITH_FORMULA = re.compile(r"\b(?:is|are|be):? (\$[^$]{1,2000}\$)[.!]?\Z")
_NAMED = r"(?!(?:The|It|This|That|These|Those|He|She|We|They|There|Its|Our|Both|All|No|An?)\b)[A-Z][a-z]+"
_ASIDE = re.compile(r";\s(?!it\b|so\b|thus\b|hence\b|therefore\b).*", flags=re.DOTALL)
_FEW_WORDS = 7


def predicate(sentence: str) -> str | None:
    """The answer in words that a sentence states: yes or no, or what follows its verb."""
    sentence = main_clause(_ASIDE.sub("", sentence), in_words=True)
    clauses = [that.end() for that in _THAT.finditer(sentence) if not NEGATED.search(sentence, 0, that.start())]
    sentence = sentence[clauses[-1] :] if clauses else sentence
    formula = _ENDS_WITH_FORMULA.search(sentence)
    if formula:
        return formula[1]
    whole = _WHOLE.search(sentence)
    if whole:
        return whole[0]
    reply = re.match(r"(?:yes|no|true|false)(?=,|\Z)", sentence, flags=re.IGNORECASE)
    if reply:
        return reply[0]
    verbs = [verb for verb in _PREDICATE.finditer(sentence) if verb.end() < len(sentence)]
    if not verbs:
        ending = re.search(r"\bthe [a-z]+ ([a-z]{4,}s)\Z", sentence)
        if ending and len(sentence.split()) > len(ending[0].split()):
            return ending[1]
        name = re.match(
            _NAMED
            + r"(?= (?!or\b|and\b|nor\b|(?:did|does|is|was) not|[a-z]+n't|cannot\b|could|lo[sz]t|loses|lie[sd])[a-z]+)",
            sentence,
        )
        return (
            name[0]
            if name and (len(sentence.split()) < _FEW_WORDS or clauses)
            else re.sub(r"\A(?:the|this|our|its) [a-z]+ (?!of\b)(?=[a-z])", "", sentence, flags=re.IGNORECASE) or None
        )
    subject = sentence[: verbs[0].start()].strip()
    if subject.lower() in ("both", "neither", "none"):
        return subject
    best = BEST.search(sentence)
    noun = (
        re.search(r"(?:plan|option|store|company|offer|deal)\b", sentence[best.end(2) :])
        if best and not best[1]
        else None
    )
    if best:
        return f"{noun[0] + ' ' if noun else best[1]}{best[2]}"
    comparative = _COMPARATIVE.match(sentence, verbs[-1].end())
    if comparative and len(verbs) == 1:
        return f"{subject} is {comparative[1]}"  # the answer is who, or what they are
    clause = re.split(r", (?:and|but|while)\b", sentence[verbs[-1].end() :])[0]
    if re.fullmatch(_NAMED, subject) and clause.startswith("the "):
        return subject
    clause = re.split(r" (?:who|that|which) ", clause)[0]
    clause = re.sub(
        r"\A(?:(?!not\b|never\b)[a-z]+ )?(?:on|in|at|to) (?:an? |the )?(?=[A-Z])", "", without_filler(cleaned(clause))
    )
    return re.sub(r"\A(?:an?|the) (?=\w)|(?<=\w) (?:function|number|integer)\Z", "", clause) or None

r"""Units of measurement, from a list, with what one is in terms of another: 2 hours 30 minutes are 150 minutes.

A unit is a product of powers of bases: `km/h` is 1000/3600 of m s^-1. Things that are counted ("12 apples") are a unit
of their own, as far as the words name a thing: "5 or more" and "5 dozen" do not.
"""

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

_TABLE = {
    "m": "m 1 m meter metre",
    "km": "m 1000 km kilometer kilometre kms",
    "cm": "m 1/100 cm centimeter centimetre cms",
    "mm": "m 1/1000 mm millimeter millimetre",
    "um": "m 1/1000000 um micrometer micron",
    "nm": "m 1/1000000000 nm nanometer nanometre",
    "pm": "m 1/1000000000000 pm picometer",
    "angstrom": "m 1/10000000000 angstrom AA",
    "inch": "inch 1 inch inches in",
    "foot": "inch 12 foot feet ft",
    "yard": "inch 36 yard yd yds",
    "mile": "inch 63360 mile mi",
    "parsec": "parsec 1 parsec pc",
    "lightyear": "lightyear 1 lightyear ly",
    "s": "s 1 s sec secs second",
    "ms": "s 1/1000 ms millisecond",
    "us": "s 1/1000000 us microsecond",
    "ns": "s 1/1000000000 ns nanosecond",
    "minute": "s 60 minute min mins",
    "hour": "s 3600 hour h hr hrs",
    "day": "s 86400 day",
    "week": "s 604800 week wk",
    "month": "month 1 month",
    "year": "month 12 year yr yrs",
    "g": "g 1 g gram",
    "kg": "g 1000 kg kilogram kilo kgs",
    "mg": "g 1/1000 mg milligram",
    "tonne": "g 1000000 tonne",
    "ounce": "ounce 1 ounce oz",
    "pound": "ounce 16 pound lb lbs",
    "ton": "ton 1 ton",
    "dollar": "dollar 1 dollar usd USD buck",
    "cent": "dollar 1/100 cent penny pennies",
    "euro": "euro 1 euro eur EUR",
    "sterling": "sterling 1 sterling gbp GBP",
    "pence": "sterling 1/100 pence",
    "yuan": "yuan 1 yuan CNY RMB rmb",
    "jiao": "yuan 1/10 jiao",
    "fen": "yuan 1/100 fen",
    "yen": "yen 1 yen JPY",
    "yensign": "yensign 1 yensign",
    "rupee": "rupee 1 rupee INR",
    "franc": "franc 1 franc CHF",
    "won": "won 1 won KRW",
    "dm": "m 1/10 dm decimeter decimetre",
    "hectare": "hectare 1 hectare",
    "acre": "acre 1 acre",
    "liter": "liter 1 L l liter litre",
    "ml": "liter 1/1000 ml mL milliliter millilitre",
    "gallon": "cup 16 gallon gal",
    "quart": "cup 4 quart qt",
    "pint": "cup 2 pint pt",
    "cup": "cup 1 cup",
    "degree": "degree 1 degree deg",
    "radian": "radian 1 radian rad rads",
    "arcmin": "degree 1/60 arcmin arcminute",
    "arcsec": "degree 1/3600 arcsec arcsecond",
    "celsius": "celsius 1 celsius",
    "fahrenheit": "fahrenheit 1 fahrenheit",
    "K": "K 1 K kelvin Kelvin",
    "J": "J 1 J joule Joule",
    "kJ": "J 1000 kJ kilojoule",
    "eV": "eV 1 eV electronvolt",
    "keV": "eV 1000 keV",
    "MeV": "eV 1000000 MeV",
    "erg": "erg 1 erg",
    "cal": "cal 1 cal calorie",
    "kcal": "cal 1000 kcal kilocalorie",
    "W": "W 1 W watt Watt",
    "kW": "W 1000 kW kilowatt",
    "V": "V 1 V volt Volt",
    "mV": "V 1/1000 mV",
    "kV": "V 1000 kV KV",
    "A": "A 1 A amp ampere Ampere",
    "mA": "A 1/1000 mA",
    "ohm": "ohm 1 ohm Ohm",
    "kohm": "ohm 1000 kohm",
    "Mohm": "ohm 1000000 Mohm",
    "F": "F 1 F farad",
    "uF": "F 1/1000000 uF",
    "Hz": "Hz 1 Hz hertz Hertz",
    "kHz": "Hz 1000 kHz KHz",
    "MHz": "Hz 1000000 MHz",
    "GHz": "Hz 1000000000 GHz",
    "N": "N 1 N newton Newton",
    "Pa": "Pa 1 Pa pascal",
    "kPa": "Pa 1000 kPa",
    "atm": "atm 1 atm",
    "C": "C 1 C coulomb Coulomb",
    "T": "T 1 T tesla Tesla",
    "mol": "mol 1 mol mole",
    "bit": "bit 1 bit",
    "kB": "bit 8000 kB KB kilobyte",
    "MB": "bit 8000000 MB megabyte",
    "GB": "bit 8000000000 GB gigabyte",
    "TB": "bit 8000000000000 TB terabyte",
    "kWh": "kWh 1 kWh",
    "byte": "bit 8 byte",
    "unit": "unit 1 unit",
    "point": "point 1 point",
    "revolution": "revolution 1 revolution rev",
    "person": "person 1 person people",
    "child": "child 1 child children kid",
}
"""name -> base, how many of the base it is, and how it is written; a plural `s` is understood."""
_DERIVED = {
    "liter": ({"m": 3}, Fraction(1, 1000)),
    "N": ({"g": 1, "m": 1, "s": -2}, Fraction(1000)),
    "J": ({"g": 1, "m": 2, "s": -2}, Fraction(1000)),
    "W": ({"g": 1, "m": 2, "s": -3}, Fraction(1000)),
    "Pa": ({"g": 1, "m": -1, "s": -2}, Fraction(1000)),
    "Hz": ({"s": -1}, Fraction(1)),
    "inch": ({"m": 1}, Fraction(254, 10000)),
}
"""Bases that are products of others, and how many of the product one of it is."""
_SPEEDS = {"mph": "mile/hour", "kmh": "km/hour", "kph": "km/hour", "rpm": "revolution/minute", "fps": "foot/s"}
SCALES = {
    "wan": 10**4,
    "yi": 10**8,
    "dozen": 12,
    "hundred": 100,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}
"""Words that multiply the number before them."""
NO_THINGS = frozenset(
    {
    "or", "and", "more", "less", "fewer", "than", "least", "most", "over", "under", "about", "not", "never", "no",
    "times", "plus", "minus", "squared", "cubed", "mod", "modulo", "base", "remainder", "half", "halves", "quarter",
    "quarters", "third", "thirds", "fourth", "fourths", "fifth", "fifths", "if", "when", "unless", "either", "maybe",
    "perhaps", "even", "odd", "prime", "negative", "positive", "infinity", "to", "between", "from", "through",
    "approximately", "exactly", "factorial", "percent", "is", "are", "was", "wrong", "right", "correct", "but",
    "except", "without", "nor", "neither", "versus", "divided", "by", "multiplied", "hundreds", "thousands",
    "millions", "dozens", "tens", "greater", "smaller", "larger", "at", "up", "down", "in", "for", "with", "of",
    "off", "out",
    }
)  # fmt: skip
_IRREGULAR = frozenset(
    {
    "people", "children", "men", "women", "feet", "fish", "sheep", "deer", "mice", "geese", "teeth", "total",
    "years", "dice",
    }
)  # fmt: skip
_WORD = r"\\text\{([^{}]*)\}"
_PART = re.compile(
    rf"(?P<joint>/|\\cdot|\\times)?(?:{_WORD}|(?P<mu>\\mu)|(?P<one>1(?=/)))(?:\^(?:\{{(-?[0-9])\}}|([0-9])))?"
)


@dataclass(frozen=True, slots=True)
class Unit:
    """Example: km/h is Unit(bases=(("m", 1), ("s", -1)), factor=Fraction(5, 18))."""

    bases: tuple[tuple[str, int], ...]
    """Sorted by name, without powers of 0."""
    factor: Fraction
    """How many of the product of the bases one of it is."""


def _listed() -> dict[str, tuple[str, Fraction]]:
    names: dict[str, tuple[str, Fraction]] = {}
    for row in _TABLE.values():
        base, factor, *written = row.split()
        for name in written:
            names[name] = names[name if len(name) < 3 else name + "s"] = (base, Fraction(factor))
    return names


NAMES = _listed()


def is_unit(word: str) -> bool:
    """Whether the word is a unit of the list."""
    return word in NAMES or (word.lower() in NAMES and len(word) > 2) or word.lower() in _SPEEDS


@lru_cache(maxsize=4096)
def read_unit(text: str) -> Unit | None:
    r"""The unit of `\text{km}/\text{h}`, `\text{square}\text{feet}`, `\text{apples}`; None where it is none.

    Args:
        text: what stands after a number, normalised.
    """
    if not text or (text[0] == "/" and r"\text" not in text):
        return None
    bases: dict[str, int] = {}
    factor, place, sign, power = Fraction(1), 0, 1, 1
    words, last = re.findall(_WORD, text), None
    if is_thing(words) and re.fullmatch(rf"(?:{_WORD})+", text) and not is_unit(words[-1]):
        return Unit(bases=((" ".join(word.rstrip("s") for word in words), 1),), factor=Fraction(1))
    while place < len(text):
        part = _PART.match(text, place)
        if part is None:
            return None
        place = part.end()
        sign = -1 if part["joint"] == "/" else sign
        word = part[2]
        if word is None:
            if part["mu"]:
                factor /= 1_000_000
            continue
        if word in ("per", "a", "an", "each", "every"):
            sign = -1
            continue
        if word in ("squared", "cubed") and last:
            base, exponent = last[0], last[1] * (1 if word == "squared" else 2)
            parts, of_base = _DERIVED.get(base, ({base: 1}, Fraction(1)))
            factor *= (last[2] * of_base) ** exponent
            for name, times in parts.items():
                bases[name] = bases.get(name, 0) + times * exponent
            continue
        if word in ("square", "sq", "cubic", "cu"):
            power = 2 if word[0] == "s" else 3
            continue
        if word.lower() in _SPEEDS:
            word, under = _SPEEDS[word.lower()].split("/")
            base, size = NAMES[under]
            bases[base], factor = bases.get(base, 0) - 1, factor / size
        entry = NAMES.get(word) or (NAMES.get(word.lower()) if len(word) > 2 else None)
        if entry is None and ((sign == 1 and not bases) or not is_thing([word], is_plural=False)):
            return None
        base, size = entry or (word.rstrip("s"), Fraction(1))
        exponent = sign * power * int(part[5] or part[6] or 1)
        parts, of_base = _DERIVED.get(base, ({base: 1}, Fraction(1)))
        factor *= (size * of_base) ** exponent
        for name, times in parts.items():
            bases[name] = bases.get(name, 0) + times * exponent
        last, power = (base, exponent, size), 1
    if not words or power != 1:
        return None
    return Unit(bases=tuple(sorted((base, n) for base, n in bases.items() if n)), factor=factor)


def is_thing(words: list[str], *, is_plural: bool = True) -> bool:
    """Whether the words can name what is counted."""
    return (
        0 < len(words) <= 3
        and all(word.isalpha() and word.islower() and len(word) > 2 and word not in NO_THINGS for word in words)
        and not any(word in SCALES for word in words)
        and (not is_plural or words[-1].endswith("s") or words[-1] in _IRREGULAR)
    )

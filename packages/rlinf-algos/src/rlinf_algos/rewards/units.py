r"""A table of units of measurement with their conversion factors: 2 hours 30 minutes are 150 minutes.

A unit is a product of powers of bases: `km/h` is 1000/3600 of m s^-1. Counted things ("12 apples") are a separate unit
if the words name a thing; those of "5 or more" and "5 dozen" do not.
"""

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

_TABLE = """
m: 1 m meter metre, 1000 km kilometer kilometre kms, 1/100 cm centimeter centimetre cms,
    1/1000 mm millimeter millimetre, 1/1000000 um micrometer micron, 1/1000000000 nm nanometer nanometre,
    1/1000000000000 pm picometer, 1/10000000000 angstrom AA, 1/10 dm decimeter decimetre;
inch: 1 inch inches in, 12 foot feet ft, 36 yard yd yds, 63360 mile mi;
parsec: 1 parsec pc; lightyear: 1 lightyear ly;
s: 1 s sec secs second, 1/1000 ms millisecond, 1/1000000 us microsecond, 1/1000000000 ns nanosecond,
    60 minute min mins, 3600 hour h hr hrs, 86400 day, 604800 week wk;
month: 1 month, 12 year yr yrs;
g: 1 g gram, 1000 kg kilogram kilo kgs, 1/1000 mg milligram, 1000000 tonne;
ounce: 1 ounce oz, 16 pound lb lbs; ton: 1 ton; dollar: 1 dollar usd USD buck, 1/100 cent penny pennies;
euro: 1 euro eur EUR; sterling: 1 sterling gbp GBP, 1/100 pence; yuan: 1 yuan CNY RMB rmb, 1/10 jiao, 1/100 fen;
yen: 1 yen JPY; yensign: 1 yensign; rupee: 1 rupee INR; franc: 1 franc CHF; won: 1 won KRW; hectare: 1 hectare;
acre: 1 acre;
liter: 1 L l liter litre, 1/1000 ml mL milliliter millilitre;
cup: 16 gallon gal, 4 quart qt, 2 pint pt, 1 cup;
degree: 1 degree deg, 1/60 arcmin arcminute, 1/3600 arcsec arcsecond;
radian: 1 radian rad rads; celsius: 1 celsius; fahrenheit: 1 fahrenheit; K: 1 K kelvin Kelvin;
J: 1 J joule Joule, 1000 kJ kilojoule; eV: 1 eV electronvolt, 1000 keV, 1000000 MeV; erg: 1 erg;
cal: 1 cal calorie, 1000 kcal kilocalorie; W: 1 W watt Watt, 1000 kW kilowatt;
V: 1 V volt Volt, 1/1000 mV, 1000 kV KV; A: 1 A amp ampere Ampere, 1/1000 mA;
ohm: 1 ohm Ohm, 1000 kohm, 1000000 Mohm; F: 1 F farad, 1/1000000 uF;
Hz: 1 Hz hertz Hertz, 1000 kHz KHz, 1000000 MHz, 1000000000 GHz;
N: 1 N newton Newton; Pa: 1 Pa pascal, 1000 kPa; atm: 1 atm; C: 1 C coulomb Coulomb; T: 1 T tesla Tesla;
mol: 1 mol mole;
bit: 1 bit, 8000 kB KB kilobyte, 8000000 MB megabyte, 8000000000 GB gigabyte, 8000000000000 TB terabyte, 8 byte;
kWh: 1 kWh; unit: 1 unit; point: 1 point; revolution: 1 revolution rev; person: 1 person people;
child: 1 child children kid;
"""
"""Each base with its units: the size of one unit in the base, and its spellings; a plural `s` is implied."""
_DERIVED = {
    "liter": ({"m": 3}, Fraction(1, 1000)),
    "N": ({"g": 1, "m": 1, "s": -2}, Fraction(1000)),
    "J": ({"g": 1, "m": 2, "s": -2}, Fraction(1000)),
    "W": ({"g": 1, "m": 2, "s": -3}, Fraction(1000)),
    "Pa": ({"g": 1, "m": -1, "s": -2}, Fraction(1000)),
    "Hz": ({"s": -1}, Fraction(1)),
    "inch": ({"m": 1}, Fraction(254, 10000)),
}
"""Bases that are products of others, and the size of one in that product."""
_SPEEDS = {"mph": "mile/hour", "kmh": "km/hour", "kph": "km/hour", "rpm": "revolution/minute", "fps": "foot/s"}
SCALES = {"wan": 10**4, "yi": 10**8, "dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6,
          "billion": 10**9, "trillion": 10**12}  # fmt: skip
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
    """The size of one unit in the product of the bases."""


def _listed() -> dict[str, tuple[str, Fraction]]:
    names: dict[str, tuple[str, Fraction]] = {}
    for group in " ".join(_TABLE.split()).removesuffix(";").split("; "):
        base, entries = group.split(": ")
        for entry in entries.split(","):
            factor, *spellings = entry.split()
            for name in spellings:
                names[name] = names[name if len(name) < 3 else name + "s"] = (base, Fraction(factor))
    return names


NAMES = _listed()


def is_unit(word: str) -> bool:
    """Whether the word is a unit of the list."""
    return word in NAMES or (word.lower() in NAMES and len(word) > 2) or word.lower() in _SPEEDS


@lru_cache(maxsize=4096)
def read_unit(text: str) -> Unit | None:
    r"""The unit of `\text{km}/\text{h}`, `\text{square}\text{feet}`, `\text{apples}`; None if the text is not a unit.

    Args:
        text: the normalised text after a number.
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
            factor *= _raise(bases, base, last[2], exponent)
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
        factor *= _raise(bases, base, size, exponent)
        last, power = (base, exponent, size), 1
    if not words or power != 1:
        return None
    return Unit(bases=tuple(sorted((base, n) for base, n in bases.items() if n)), factor=factor)


def _raise(bases: dict[str, int], base: str, size: Fraction, exponent: int) -> Fraction:
    """Multiplies the bases by the base with this exponent; returns the same power of the unit's size."""
    parts, of_base = _DERIVED.get(base, ({base: 1}, Fraction(1)))
    for name, times in parts.items():
        bases[name] = bases.get(name, 0) + times * exponent
    return (size * of_base) ** exponent


def is_thing(words: list[str], *, is_plural: bool = True) -> bool:
    """Whether the words can name a counted thing."""
    return (
        0 < len(words) <= 3
        and all(word.isalpha() and word.islower() and len(word) > 2 and word not in NO_THINGS for word in words)
        and not any(word in SCALES for word in words)
        and (not is_plural or words[-1].endswith("s") or words[-1] in _IRREGULAR)
    )

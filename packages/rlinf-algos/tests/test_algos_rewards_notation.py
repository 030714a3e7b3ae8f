"""One notation for answers, their exact numbers, units and structure."""

from fractions import Fraction

import pytest
from hypothesis import given, strategies as st

from rlinf_algos.rewards.notation import normalized
from rlinf_algos.rewards.plain_number import rational
from rlinf_algos.rewards.structure import read
from rlinf_algos.rewards.units import Unit, read_unit


@pytest.mark.parametrize(
    ("written", "normal"),
    [
        (r"$\dfrac12\text{ cm}$", r"\frac{1}{2}\text{cm}"),
        ("1,234 dollars", r"1234\text{dollars}"),
        ("1{,}234", "1234"),
        (r"\$1,234.50", r"1234.50\text{dollars}"),
        ("$12.25", r"12.25\text{dollars}"),
        ("7, 120", "7,120"),
        ("(1,234)", "(1,234)"),
        (r"5.47e5 \mathrm{~m} / \mathrm{s}", r"5.47\times10^5\text{m}/\text{s}"),
        ("1 1/2", r"1\frac{1}{2}"),
        ("2*sqrt(x+(1))/3", r"2\cdot\sqrt{x+(1)}/3"),
        ("\u221a2", r"\sqrt{2}"),
        ("x_{1}, y ^ 2", "x_1,y^2"),
        (r"\left( \frac{a}{b} \right)", r"\frac{a}{b}"),
        ("(a)(b)", "(a)(b)"),
        (r"90^\circ", r"90\text{degrees}"),
        (r"\sin 30^\circ", r"\sin30\cdot\frac{\pi}{180}"),
        (r"\alpha x", r"\alpha x"),
        ("2x", "2x"),
        ("12 m", r"12\text{m}"),
        ("12m", "12m"),
        ("v0^2", "v_0^2"),
        (r"\text{Even}", r"\text{even}"),
        (r"2+3\mathrm{i}", "2+3i"),
        (r"\mathbf{v}", "v"),
        (r"\text{increasing on }(0,1)", r"\text{increasing}\text{on}(0,1)"),
        ("increasing on (0,1)", r"\text{increasing}\text{on}(0,1)"),
        (r"\lambda_{\text {red }}", r"\lambda_{red}"),
        (r"1010_{\text{two}}", "1010_2"),
        ("4 2", "4 2"),
        (r"x \neq 3", r"x\ne3"),
        ("about 20", "20"),
        ("50 percent", "50%"),
        ("5.", "5"),
        ("-1./3", "-1/3"),
    ],
)
def test_one_notation(written, normal):
    assert normalized(written) == normal


@given(st.integers(-(10**9), 10**9), st.integers(1, 10**4), st.integers(1, 9))
def test_fractions_are_read_exactly(top, bottom, factor):
    value = Fraction(top, bottom)
    sign, size = ("-", -top) if top < 0 else ("", top)
    for written in (
        f"{top}/{bottom}",
        f"{sign}\\frac{{{size * factor}}}{{{bottom * factor}}}",
        f"\\dfrac{{{top}}}{{{bottom}}}",
        f"{sign}{size // bottom}\\frac{{{size % bottom}}}{{{bottom}}}",
    ):
        number = rational(normalized(written))
        assert number is not None
        assert number.value == value


@given(st.integers(-(10**12), 10**12), st.integers(0, 6), st.integers(-30, 30))
def test_decimals_are_read_exactly(digits, places, exponent):
    value = Fraction(digits, 10**places) * Fraction(10) ** exponent
    sign, size = ("-", -digits) if digits < 0 else ("", digits)
    text = str(size).rjust(places + 1, "0")
    plain = f"{sign}{text[:-places]}.{text[-places:]}" if places else f"{sign}{text}"
    for written in (f"{plain}e{exponent}", f"{plain} \\times 10^{{{exponent}}}", f"{plain}*10^{exponent}"):
        if exponent < 0 and written.endswith(f"^{exponent}"):
            continue  # 10^-3 without braces is 10 to the minus, times three
        number = rational(normalized(written))
        assert number is not None
        assert number.value == value


@given(st.integers(0, 10**6), st.sampled_from([2, 3, 8, 16]))
def test_numbers_in_other_bases_have_their_value(value, base):
    digits, rest = "", value
    while rest or not digits:
        digits, rest = "0123456789ABCDEF"[rest % base] + digits, rest // base
    number = rational(f"{digits}_{base}" if base < 10 else f"{digits}_{{{base}}}")
    assert (number.value if number else None) == (value if digits[0].isdigit() else None)


def test_digits_beyond_a_base_are_no_number():
    assert rational("1012_2") is None


def test_repeating_decimals_are_fractions():
    number = rational(r"0.1\overline{6}")
    assert number is not None
    assert number.value == Fraction(1, 6)


@given(st.text(alphabet="0123456789.,/-+eE%$\\{}()[] fracsqrttextm^*_=<&'\u2212\u221a\u00b0", max_size=60))
def test_any_text_can_be_read(text):
    normal = normalized(text)
    read(normal)
    rational(normal)
    assert "\0" not in normal


@pytest.mark.parametrize(
    ("text", "bases", "factor"),
    [
        (r"\text{cm}", (("m", 1),), Fraction(1, 100)),
        (r"\text{cm}^2", (("m", 2),), Fraction(1, 10000)),
        (r"\text{square}\text{feet}", (("m", 2),), Fraction(3048, 10000) ** 2),
        (r"\text{km}/\text{h}", (("m", 1), ("s", -1)), Fraction(5, 18)),
        (r"\text{miles}\text{per}\text{hour}", (("m", 1), ("s", -1)), Fraction(1609344, 1000 * 3600)),
        (r"\text{liters}", (("m", 3),), Fraction(1, 1000)),
        (r"\text{kg}\text{m}/\text{s}", (("g", 1), ("m", 1), ("s", -1)), Fraction(1000)),
        (r"\mu\text{m}", (("m", 1),), Fraction(1, 1_000_000)),
        (r"\text{red}\text{apples}", (("red apple", 1),), Fraction(1)),
    ],
)
def test_units_come_from_a_list(text, bases, factor):
    assert read_unit(text) == Unit(bases=bases, factor=factor)


@pytest.mark.parametrize(
    "text", [r"\text{or}\text{more}", r"\text{times}", r"\text{halves}", r"\text{red}", r"\text{squared}", "x", ""]
)
def test_what_is_no_unit(text):
    assert read_unit(text) is None


@pytest.mark.parametrize(
    ("written", "kind", "parts"),
    [
        ("5 or 9", "list", ("5", "9")),
        ("x=1,2", "list", ("x=1", "x=2")),
        ("(1,2]", "tuple", ("1", "2")),
        (r"\{1,(2,3)\}", "set", ("1", "(2,3)")),
        (r"(0,1)\cup[2,3]", "union", ("(0,1)", "[2,3]")),
        (r"2\pm\sqrt{3}", "list", (r"2+\sqrt{3}", r"2-\sqrt{3}")),
        ("-1 < x <= 4", "relation", ("-1", "x", "4")),
        (r"\begin{bmatrix}1&2\\3&4\end{bmatrix}", "matrix", ("1", "2", "3", "4")),
        ("5 cm", "quantity", ("5",)),
        ("2 hours 30 minutes", "quantity", ("150",)),
        ("3 million", "formula", ()),
        ("5 or more", "list", ("5", r"\text{more}")),
        ("increasing on (0,1)", "phrase", ("(0,1)",)),
        ("x+1", "formula", ()),
    ],
)
def test_the_structure_of_an_answer(written, kind, parts):
    answer = read(normalized(written))
    assert (answer.kind, tuple(part.text for part in answer.parts)) == (kind, parts)

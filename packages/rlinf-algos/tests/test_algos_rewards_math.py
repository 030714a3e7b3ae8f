"""The math reward: where the answer stands, what is equal, and that no text can hang it."""

import os
import sys
import time
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_algos import RewardError, get_reward, score
from rlinf_algos.rewards import mathematics as module
from rlinf_algos.rewards.final_answer import final_answer
from rlinf_algos.rewards.mathematics import MathReward
from rlinf_algos.rewards.notation import assigned, collection, normalized, rational

needs_math_verify = pytest.mark.skipif(
    not module.importlib.util.find_spec("math_verify"), reason="needs rlinf-algos[math]"
)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{1} and then \boxed{2}", "2"),
        (r"\boxed{a \boxed{b} c}", r"a \boxed{b} c"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\fbox{7}", "7"),
        (r"\boxed{1} but \boxed{2", "1"),
        (r"<think>\boxed{1}</think> it is \boxed{2}", "2"),
        (r"<think>no</think><answer> 5 </answer>", "5"),
        (r"<answer>so \boxed{6}</answer> and 9", "6"),
        ("6 * 3 = 18\n#### 18", "18"),
        ("#### 18\n####", "18"),
        ("The answer is 5. I hope it is 6.", "5"),
        ("**Answer:** $x^2$ of 7", "x^2"),
        ("The final answer is: $\\frac{1}{2}$", "\\frac{1}{2}"),
        ("Answer: \\$50", "\\$50"),
        ("The answer to the whole question is 12 apples", "12 apples"),
        (" 42 ", "42"),
        ("First 12.\nThen we get $a+b$ in the end.", "a+b"),
        ("First $a+b$.\nThen we get 12 in the end.", "12"),
        ("First 3.\nThen -7.5 of it", "-7.5"),
        ("nothing\nhere", None),
        ("", None),
        ("<think>5</think>", None),
    ],
)
def test_where_the_answer_stands(text, answer):
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    ("written", "normal"),
    [
        (r"$\dfrac12\text{ cm}$", r"\frac{1}{2}"),
        ("1,234 dollars", "1234"),
        ("1{,}234", "1234"),
        (r"\$1,234.50", "1234.50"),
        ("7, 120", "7, 120"),
        ("(1,234)", "(1,234)"),
        (r"5.47e5 \mathrm{~m} / \mathrm{s}", r"5.47\times10^5"),
        ("3 million", r"3\times10^6"),
        ("1 1/2", r"1\frac{1}{2}"),
        ("2*sqrt(x+(1))/3", r"2\cdot\sqrt{x+(1)}/3"),
        ("\u221a2", r"\sqrt2"),
        ("x_{1}, y ^ 2", "x_1, y^2"),
        (r"\left( \frac{a}{b} \right)", r"\frac{a}{b}"),
        ("(a)(b)", "(a)(b)"),
        (r"90^\circ", "90"),
        (r"\alpha x", r"\alpha x"),
        ("2x", "2x"),
        ("12 m", "12"),
        (r"\text{even}", "even"),
        ("5.", "5"),
        ("-1./3", "-1/3"),
    ],
)
def test_one_notation(written, normal):
    assert normalized(written) == normal
    assert normalized(normal) == normal


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


@given(st.text(alphabet="0123456789.,/-+eE%$\\{}()[] fracsqrttextm^*\u2212\u221a", max_size=60))
def test_any_text_can_be_normalised(text):
    normal = normalized(text)
    for reader in (rational, collection, assigned):
        reader(normal)
    assert "\0" not in normal and "\1" not in normal


@pytest.mark.parametrize(
    ("reference", "answer", "outcome"),
    [
        ("18", "18.0", "right"),
        ("18", "19", "wrong"),
        ("1.39e-10", r"2 \times 10^{-10}", "wrong"),
        ("50", r"50\%", "right"),
        ("0.5", r"50\%", "right"),
        (r"50\%", "0.5", "right"),
        (r"50\%", "5", "wrong"),
        (r"5000\%", "0.5", "wrong"),
        ("1/3", "0.333333", "right"),
        ("1/3", "0.3333", "wrong"),
        ("1/3", "0.343333", "wrong"),
        ("2/3", "0.666667", "right"),
        ("2/3", "0.666666", "right"),
        ("(1,2)", r"\left(1, \frac{4}{2}\right)", "right"),
        ("(1,2)", "(2,1)", "wrong"),
        ("(1,2)", "[1,2)", "wrong"),
        ("[1,2)", r"x \in [1,2)", "right"),
        (r"\{1,2\}", r"\{2,1\}", "right"),
        (r"\{1,2\}", r"\{2,3\}", "wrong"),
        ("1, 2", r"2 \text{ and } 1", "right"),
        ("x=5", "5", "right"),
        ("5", "x = 5", "right"),
        ("5", "", "unparseable"),
        ("5", "9" * 2000, "unparseable"),
    ],
)
def test_plain_numbers_need_no_process(reference, answer, outcome):
    found = module._without_pool(answer or None, module._expected(reference))
    assert not isinstance(found, tuple)
    assert found.outcome == outcome
    assert found.value == float(outcome == "right")


def test_an_unusable_reference_raises():
    for reference in ("", "<think>5</think>", "9" * 2000):
        with pytest.raises(RewardError, match="holds no answer of at most 1000 characters; mend the dataset row"):
            module._expected(reference)


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RewardError, match=r"pip install 'rlinf-algos\[math\]'"):
        MathReward()


@pytest.fixture(scope="module")
def reward():
    with MathReward(num_processes=1, time_limit_s=1.0) as reward:
        yield reward


@needs_math_verify
@pytest.mark.parametrize(
    ("reference", "answer", "outcome"),
    [
        (r"\sqrt{8}", "2*sqrt(2)", "right"),
        ("x/2-1/4+c e^{-2x}", r"\frac{x}{2}-\frac14+ce^{-2x}", "right"),
        ("x/2-1/4+c e^{-2x}", r"\frac{x}{2}-\frac14+ce^{-3x}", "wrong"),
        (r"\frac{1}{m} t", r"1 \cdot \left(\frac{1}{m} t\right)", "right"),
        (r"\frac{\pi}{2}", "pi/2", "right"),
        (r"\frac{\pi}{2}", "1.570796", "right"),
        (r"[0,\infty)", r"[0, \infty)", "right"),
        (r"[0,\infty)", r"(0, \infty)", "wrong"),
        (r"(x-1)(x+1)", "x^2 - 1", "right"),
        (r"\sin^2 t", r"1 - \cos^2 t", "right"),
        (r"x^2+y^2=4", r"2x^2+2y^2=8", "right"),
        (r"a x + b = c", r"a x + b = c + 1", "wrong"),
        (r"X_{d}=125-1.25 P", r"X_d = 125 - \frac{5}{4} P", "right"),
        (r"2^{10}", "1024", "right"),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 1 \\ \frac{4}{2} \end{pmatrix}", "right"),
    ],
)
def test_what_means_the_same_is_right(reward, reference, answer, outcome):
    assert reward(rf"Thus \boxed{{{answer}}}.", reference).outcome == outcome


HOSTILE = {
    "tower of powers": "9^{9^{9^9}}",
    "factorial": "10000000!",
    "deep brackets": "(" * 900,
    "deep fractions": r"\frac{1}{" * 100 + "1" + "}" * 100,
    "endless sum": r"\sum_{i=1}^{10^{12}} i^{i}",
    "commands": r"\frac" * 190,
    "surrogate": "\ud800 \u222b\u2230",
    "carets": "^" * 900,
    "long number": "9" * 999,
    "decimals": "1" * 400 + "." + "1" * 400,
    "exponent": "1e999999999",
    "zero": r"\frac{1}{0}",
    "commas": ",".join(["1"] * 450),
}


@needs_math_verify
@pytest.mark.parametrize("answer", HOSTILE.values(), ids=HOSTILE)
def test_hostile_answers_end(reward, answer):
    start = time.monotonic()
    result = reward(rf"\boxed{{{answer}}}", r"\sqrt{2}")
    assert result.value == 0.0
    assert result.outcome in ("wrong", "unparseable", "timeout", "memory", "crashed")
    assert time.monotonic() - start < 60
    assert reward(r"\boxed{\frac{2}{\sqrt{2}}}", r"\sqrt{2}").outcome == "right", "the next check works"


@needs_math_verify
def test_a_timeout_is_told_from_wrong(reward):
    result = reward(r"\boxed{9^{9^{9^9}}}", r"\sqrt{2}")
    assert (result.outcome, result.value, result.detail) == ("timeout", 0.0, "more than 1 s of CPU time")


@pytest.mark.parametrize(
    "piece", [r"\boxed{", "$", "answer is ", "<answer>", "####", r"\(", "a" * 50 + " ", "{}", "1,", r"\text{"]
)
def test_long_texts_take_linear_time(piece):
    """A hundred thousand characters in CPU time that a quadratic search could not keep."""
    text = piece * (100_000 // len(piece))
    start = time.process_time()
    answer = final_answer(text)
    if answer is not None and len(answer) <= module.MAX_CHARACTERS:
        normalized(answer)
    assert time.process_time() - start < 2.0


@needs_math_verify
def test_batches_equal_single_calls_and_keep_their_order(reward):
    references = ["18", r"\sqrt{2}", "1/2", r"\pi", "18"]
    completions = ["#### 18", r"\boxed{\frac{2}{\sqrt{2}}}", "no idea\nat all", r"\boxed{3}", "17"]
    batch = reward.score_batch(completions, references)
    assert [r.outcome for r in batch] == ["right", "right", "unparseable", "wrong", "wrong"]
    assert batch == tuple(map(reward, completions, references))
    assert batch == tuple(reversed(reward.score_batch(completions[::-1], references[::-1])))
    assert reward.score_batch([], []) == ()


@needs_math_verify
def test_it_is_known_by_name():
    assert get_reward("math_answer") is module.math_answer
    assert score("math_answer", "it is \\boxed{0.5}", "\\frac{1}{2}").outcome == "right"


@pytest.mark.slow
@needs_math_verify
def test_agreement_on_real_answers(monkeypatch):
    root = Path(__file__).parents[3]
    folder = Path(os.environ.get("RLINF_TEST_DATA", root.parent / "shared" / "data"))
    if not (folder / "gsm8k_test.jsonl").exists():
        pytest.skip(f"no data in {folder}; set RLINF_TEST_DATA")
    monkeypatch.syspath_prepend(root)
    draw_cases = sys.modules.get("benchmarks.algos.math_cases") or __import__(
        "benchmarks.algos.math_cases", fromlist=["draw_cases"]
    )
    cases = draw_cases.draw_cases(folder, 1000, 1)
    with MathReward() as reward:
        results = reward.score_batch([case.completion for case in cases], [case.reference for case in cases])
    agreed = sum((result.outcome == "right") == case.is_right for result, case in zip(results, cases, strict=True))
    assert agreed >= 990

"""Rewards: what counts as the answer, the registry, and that nothing fails in silence."""

from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from rlinf_algos import RewardError, RewardResult, get_reward, register_reward, reward_names, score, score_all
from rlinf_algos.rewards import (
    exact_match,
    final_number,
    numeric_match,
    registry as registry_module,
    think_answer_format,
)


@pytest.fixture
def registry(monkeypatch):
    """A copy of the registry that the test may write to."""
    monkeypatch.setattr(registry_module.REWARDS, "_added", dict(registry_module.REWARDS._added))


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("She makes 9 * 2 = $<<9*2=18>>18 every day.\n#### 18", "18"),
        ("#### 1,234", "1234"),
        ("#### $1,234,567.50 in all", "1234567.50"),
        ("####18", "18"),
        ("#### -5", "-5"),
        ("#### \u22125", "-5"),
        ("#### -$5", "-5"),
        ("#### $-5", "-5"),
        ("#### +5", "5"),
        ("#### .5", "0.5"),
        ("#### **42**", "42"),
        ("#### 1 of 3", "1"),
        ("#### 3\nNext question: 7 + 8 = 15", "3"),
        ("#### 3\n#### 4", "4"),
        ("#### 3 #### none", "3"),
        ("#### Step 1: Add\n2 + 40 = 42\n\nThe answer is 42.", "42"),
        ("#### 1. Compute\n2 + 40 = 42\n#### 2. Conclude\nThe answer is \\boxed{42}, for 3 people", "42"),
        ("#### Final answer\n42", "42"),
        ("it is $1{,}234$", "1234"),
        ("it is $10\\,000$ or 10\u2009000", "10000"),
        ("so 12 is it. ####\n99", "99"),
        ("the answer is 7.", "7"),
        ("1, 2, 3", "3"),
        ("12-5", "5"),
        ("(x)-5", "5"),
        ("x = -5", "-5"),
        ("$3.25!", "3.25"),
        ("50%", "50"),
        ("1,2345", "2345"),
        ("1.8e1", "18"),
        ("2E-3", "0.002"),
        ("in 2024, 3 cats", "3"),
        ("no digits, only ####", None),
        ("", None),
        ("-", None),
        ("\u0663", None),
    ],
)
def test_final_number(text, number):
    assert final_number(text) == (None if number is None else Decimal(number))


def test_a_monstrous_exponent_is_no_crash():
    assert final_number("1e99999999999999999999") == Decimal("99999999999999999999")
    assert score("numeric_match", "1e999", "1").outcome == "wrong"


@given(st.integers(-(10**15), 10**15), st.integers(0, 4))
def test_numbers_come_back_however_they_are_written(value, num_decimals):
    exact = Fraction(value, 10**num_decimals)
    plain = f"{Decimal(value).scaleb(-num_decimals):f}"
    for written in (plain, f"{Decimal(plain):,f}", f"{plain}0" if "." in plain else f"{plain}.0"):
        for text in (f"thus\n#### {written}", f"it is {written} .", f"#### ${written}" if value >= 0 else written):
            number = final_number(text)
            assert number is not None
            assert Fraction(number) == exact


@given(st.text(alphabet="0123456789-+.,eE#$ \n()x", max_size=40))
def test_any_text_gives_a_finite_number_or_none(text):
    number = final_number(text)
    assert number is None or number.is_finite()


def test_numeric_match():
    reference = "He needs 5 + 13 = 18.\n#### 18"
    assert numeric_match("I think 18.00", reference) == RewardResult(value=1.0, outcome="right", answer="18.00")
    assert numeric_match("#### 18", "18") == RewardResult(value=1.0, outcome="right", answer="18")
    assert numeric_match("18 or 19", reference) == RewardResult(value=0.0, outcome="wrong", answer="19")
    assert numeric_match("no idea", reference) == RewardResult(value=0.0, outcome="unparseable")
    with pytest.raises(RewardError, match="the reference 'none' contains no number"):
        numeric_match("18", "none")


def test_exact_match():
    assert exact_match(" 579\n", "579 ") == RewardResult(value=1.0, outcome="right", answer="579")
    assert exact_match("5 79", "579") == RewardResult(value=0.0, outcome="wrong", answer="5 79")
    assert exact_match("A", "a").outcome == "wrong"
    assert exact_match(" \n", "579") == RewardResult(value=0.0, outcome="unparseable")
    with pytest.raises(RewardError, match="the reference is empty"):
        exact_match("", " ")


@pytest.mark.parametrize(
    ("completion", "outcome", "answer"),
    [
        ("<think>a\nb</think> <answer> 5 </answer>\n", "right", "5"),
        ("<think></think><answer>5</answer>", "right", "5"),
        ("<think>a</think><answer> \n</answer>", "unparseable", None),
        ("<answer>5</answer>", "unparseable", None),
        ("<think>a</think><answer>5</answer> and more", "unparseable", None),
        ("<think>a</think> so <answer>5</answer>", "unparseable", None),
        ("<think>a</think><answer>5</answer><answer>6</answer>", "unparseable", None),
        ("<think><think>a</think></think><answer>5</answer>", "unparseable", None),
        ("<answer>5</answer><think>a</think>", "unparseable", None),
    ],
)
def test_think_answer_format(completion, outcome, answer):
    result = think_answer_format(completion, "")
    assert (result.outcome, result.answer) == (outcome, answer)
    assert result.value == float(outcome == "right")


def test_reward_result_refuses_what_is_no_reward():
    for value in (float("nan"), float("-inf"), 1e16):
        with pytest.raises(
            RewardError, match=r"is not finite or too large; a reward is a finite number between -1e\+15"
        ):
            RewardResult(value=value, outcome="right")
    for value in (1e300, -(10**400), np.float32("inf")):
        with pytest.raises(RewardError, match=r"returned -?(1e\+300|inf); a reward is a finite number between -1e\+15"):
            score(lambda completion, reference: value, "c", "r")  # noqa: B023 # pyright: ignore[reportArgumentType]
    with pytest.raises(
        RewardError, match="outcome='correct'; use one of right, wrong, unparseable, timeout, memory, crashed"
    ):
        RewardResult(value=1.0, outcome="correct")  # type: ignore[arg-type]


def test_registry_knows_its_own():
    assert reward_names() == (
        "code_tests",
        "exact_match",
        "math_answer",
        "multiple_choice",
        "numeric_match",
        "think_answer_format",
    )
    assert get_reward("exact_match") is exact_match


@pytest.mark.usefixtures("registry")
def test_registering():
    @register_reward("length")
    def length(completion: str, reference: str) -> RewardResult:
        return RewardResult(value=float(len(completion)), outcome="right")

    assert get_reward("length") is length
    assert "length" in reward_names()
    assert score("length", "abc", "").value == 3.0
    register_reward("length")(length)  # a module that is imported twice
    with pytest.raises(RewardError, match="the reward name 'length' is taken by"):
        register_reward("length")(exact_match)


def test_unknown_names():
    with pytest.raises(RewardError, match="no reward is called 'numeric_mach'; did you mean 'numeric_match'"):
        get_reward("numeric_mach")
    with pytest.raises(
        RewardError, match="known: code_tests, exact_match, math_answer, multiple_choice, numeric_match, think"
    ):
        get_reward("zzz")


def test_import_paths():
    assert get_reward("rlinf_algos.rewards.exact:exact_match") is exact_match
    with pytest.raises(RewardError, match=r"'no_such_module:f' cannot be imported: No module named"):
        get_reward("no_such_module:f")
    with pytest.raises(RewardError, match="cannot be imported: module 'math' has no attribute 'g'"):
        get_reward("math:g")
    with pytest.raises(RewardError, match="'math:pi' is a float, not a function"):
        get_reward("math:pi")
    with pytest.raises(RewardError, match="':f' cannot be imported"):
        get_reward(":f")


def built_in(rule):
    """The rule as if it were one of the package's."""
    rule.__module__ = "rlinf_algos.rewards.some"
    return rule


def test_a_rule_of_the_package_that_raises_on_one_text_marks_it_and_goes_on(caplog):
    def inverse(completion, reference):
        return RewardResult(value=float(reference) / float(completion), outcome="right")

    results = score_all(built_in(inverse), ["1", "0", "2"], ["1", "1", "1"])
    assert [(one.outcome, one.value, one.judge_failed) for one in results] == [
        ("right", 1.0, False),
        ("crashed", 0.0, True),
        ("right", 0.5, False),
    ]
    assert (results[1].detail or "").startswith("ZeroDivisionError: float division by zero (test_algos_rewards.py:")
    assert "ZeroDivisionError" in caplog.text, "the log has the traceback"


def test_what_is_no_fault_of_the_text_ends_the_call():
    """A machine without descriptors may not become a reward of 0."""

    def fails(completion, reference):
        raise OSError("too many open files")

    with pytest.raises(RewardError, match="OSError: too many open files"):
        score_all(built_in(fails), ["5"], ["5"])


def test_a_failing_batch_is_scored_one_by_one():
    class Picky:
        __module__ = "rlinf_algos.rewards.picky"

        def __call__(self, completion, reference):
            raise AssertionError("the batch form is there")

        def score_batch(self, completions, references):
            return tuple(RewardResult(value=1 / len(text), outcome="right") for text in completions)

        def close(self):
            pass

    results = score_all(Picky(), ["a", "", "bb"], ["1"] * 3)
    assert [(one.outcome, one.value) for one in results] == [("right", 1.0), ("crashed", 0.0), ("right", 0.5)]


def test_a_custom_reward_that_raises_ends_the_call():
    def crashes(completion: str, reference: str) -> RewardResult:
        raise ZeroDivisionError("oh")

    with pytest.raises(RewardError, match=r"reward 'crashes' on completion 'c', reference 'r': ZeroDivisionError: oh"):
        score(crashes, "c", "r")
    with pytest.raises(RewardError, match="reward 'numeric_match' on completion"):
        score_all("numeric_match", ["1", "1"], ["1", "none"])
    with pytest.raises(RewardError, match=r"completion \.\.\.y{6}x{110}', reference"):
        score(crashes, "y" * 200 + "x" * 110, "r")


def test_a_checker_that_returns_something_else_raises():
    with pytest.raises(RewardError, match=r"returned str '1.0'; return a number or a RewardResult"):
        score(lambda completion, reference: "1.0", "c", "r")  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize(
    ("value", "expected", "has_verdict"),
    [(np.isclose(1.0, 1.0), 1.0, True), (np.float32(0.5), 0.5, False), (torch.tensor(0.5), 0.5, False)],
)
def test_numbers_and_truth_values_may_be_those_of_numpy_and_torch(value, expected, has_verdict):
    result = score(lambda completion, reference: value, "c", "r")
    assert (result.value, result.has_verdict) == (expected, has_verdict)


def test_score_all_pairs_in_order():
    results = score_all("exact_match", ["1", "2", ""], ["1", "1", "1"])
    assert [r.outcome for r in results] == ["right", "wrong", "unparseable"]
    with pytest.raises(RewardError, match="2 completions, 1 references"):
        score_all("exact_match", ["1", "2"], ["1"])

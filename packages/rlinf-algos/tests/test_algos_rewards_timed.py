"""Rules of texts in processes that can be ended: the same results as the rule itself, and a clock."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

from rlinf_algos import RewardError
from rlinf_algos.rewards import (
    MathReward,
    RewardSpec,
    TimedRule,
    make_reward,
    multiple_choice,
    numeric_match,
    score_all,
)
from rlinf_algos.rewards.choice import MultipleChoice
from rlinf_algos.rewards.timed import TIMED_RULES

needs_math_verify = pytest.mark.skipif(find_spec("math_verify") is None, reason="math-verify is an extra")
TEXTS = ["The answer is (B). #### 4", "", "4", "\x00 \ud800", "B", "4e2 or E", "\n" * 1000]


@pytest.mark.parametrize(
    ("spec", "rule", "reference"),
    [
        (RewardSpec(rule="numeric_match"), numeric_match, "4"),
        (RewardSpec(rule="multiple_choice"), multiple_choice, "B"),
        (RewardSpec(rule="multiple_choice", options={"num_choices": 4}), MultipleChoice(num_choices=4), "B"),
    ],
)
def test_results_are_those_of_the_rule(spec, rule, reference):
    reward = make_reward(spec)
    assert isinstance(reward, TimedRule) and spec.rule in TIMED_RULES
    assert list(score_all(reward, TEXTS, [reference] * len(TEXTS))) == [rule(text, reference) for text in TEXTS]
    with pytest.raises(RewardError, match="fix the"):
        reward("4", "none")
    reward.close()


@pytest.mark.parametrize(
    "make",
    [
        lambda: TimedRule("numeric_match", time_limit_s=0.05),
        pytest.param(lambda: MathReward(time_limit_s=0.05), marks=needs_math_verify),
    ],
    ids=["numeric", "math"],
)
def test_a_text_that_takes_too_long_is_a_timeout_of_its_own(make):
    reward = make()
    results = score_all(reward, ["4", "x1 " * 5_000_000, "5"], ["4"] * 3)
    assert [result.outcome for result in results] == ["right", "timeout", "wrong"]
    assert not any(result.judge_failed for result in results), "what a text can cause is its own"
    reward.close()


def test_a_process_that_dies_is_a_failure_of_the_judge(monkeypatch):
    reward = TimedRule("numeric_match")
    monkeypatch.setattr(reward._pool, "run", lambda items: [("crashed", "ended by SIGSEGV, twice")])
    result = reward("4", "4")
    assert (result.value, result.outcome, result.judge_failed) == (0.0, "crashed", True)


def test_rules_of_texts_need_no_torch():
    """So that a process that judges starts in a moment, and is small."""
    code = "import sys, rlinf_algos.rewards.rule_side; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

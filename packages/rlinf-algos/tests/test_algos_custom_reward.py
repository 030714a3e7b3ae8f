"""Functions of one's own: what they are given, what they may return, and what is said of their mistakes."""

import sys
import time
import types

import pytest

from rlinf_algos import RewardError, RewardResult, RewardSpec, make_reward, score_all
from rlinf_algos.rewards import PICTURE_FILES, CustomReward, RewardTerm


@pytest.fixture
def own(monkeypatch):
    """Puts functions into a module that can be imported as `mine`."""
    module = types.ModuleType("mine")
    monkeypatch.setitem(sys.modules, "mine", module)
    return lambda name, function: setattr(module, name, function)


def test_numbers_are_results(own):
    own("f", lambda completion, answer: len(completion) / 4)
    results = score_all(make_reward("mine:f"), ["x", "xxxx"], ["", ""])
    assert [(result.value, result.outcome) for result in results] == [(0.25, "wrong"), (1.0, "right")]
    assert not any(result.has_verdict for result in results)
    own("g", lambda completion, answer: completion == answer)
    assert make_reward("mine:g")("a", "a") == RewardResult(value=1.0, outcome="right")
    numpy = pytest.importorskip("numpy")
    own("h", lambda completion, answer: numpy.float32(0.5))
    assert make_reward("mine:h")("a", "a").value == 0.5


def test_prompt_and_row_come_by_name(own):
    seen = []

    def both(completion, answer, *, prompt=None, row=None):
        seen.append((completion, answer, prompt, row))
        return 0.0

    def positional(text, answer, row):
        seen.append(row)
        return 0.0

    own("both", both)
    own("positional", positional)
    weighted = RewardSpec(
        rule="weighted",
        terms=tuple(
            RewardTerm(name=n, weight=1.0, reward=RewardSpec(rule=f"mine:{n}")) for n in ("both", "positional")
        ),
    )
    reward = make_reward(weighted)
    assert reward.reads_rows  # type: ignore[attr-defined]
    score_all(reward, ["c"], ["a"], ["p"], [{"level": 5}])
    assert seen == [("c", "a", "p", {"level": 5}), {"level": 5}]
    seen.clear()
    score_all(make_reward("mine:both"), ["c"], ["a"])
    assert seen == [("c", "a", "", {})]


def test_a_judge_that_sees_gets_the_files_of_pictures(own):
    seen = []

    def sees(completion, answer, *, pictures):
        seen.append(pictures)
        return 0.0

    def reads(completion, answer, *, row):
        seen.append(row)
        return 0.0

    own("sees", sees)
    own("reads", reads)
    terms = [RewardTerm(name=n, weight=1.0, reward=RewardSpec(rule=f"mine:{n}")) for n in ("sees", "reads")]
    reward = make_reward(RewardSpec(rule="weighted", terms=tuple(terms)))
    assert reward.reads_rows and reward.reads_pictures  # type: ignore[attr-defined]
    score_all(reward, ["c", "d"], ["a", "a"], ["p", "p"], [{"level": 5, PICTURE_FILES: (b"png",)}, {}])
    assert seen == [(b"png",), (), {"level": 5}, {}]


def test_a_class_is_made_once_with_its_options(own):
    class Counts:
        def __init__(self, *, start=0):
            self.count = start

        def __call__(self, completion, answer):
            self.count += 1
            return self.count

    own("Counts", Counts)
    reward = make_reward(RewardSpec(rule="mine:Counts", options={"start": 5}))
    assert [result.value for result in score_all(reward, ["", ""], ["", ""])] == [6.0, 7.0]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda completion, answer: None, "reward 'mine:f': returned NoneType None; return a number or a RewardResult"),
        (lambda completion, answer: "1", "returned str '1'; return a number or a RewardResult"),
        (lambda completion, answer: float("nan"), "returned nan; a reward is a finite number"),
        (lambda completion, answer: 1 / 0, "on completion 'c', answer 'a': ZeroDivisionError: division by zero"),
        (lambda completion, answer: sys.exit(3), "SystemExit: 3"),
    ],
)
def test_mistakes_are_errors(own, function, message):
    own("f", function)
    with pytest.raises(RewardError) as caught:
        score_all(make_reward("mine:f"), ["c"], ["a"])
    assert message in str(caught.value)


@pytest.mark.parametrize("function", [lambda completion: 0.0, lambda prompt, answer: 0.0, lambda a, b, c: 0.0])
def test_other_parameters_are_refused_before_a_call(own, function):
    own("f", function)
    with pytest.raises(RewardError, match=r"'mine:f' has the parameters .*called as f\(completion, answer\)"):
        make_reward("mine:f")


def test_a_call_that_hangs_is_named_with_its_place():
    def hangs(completion, answer):
        time.sleep(5)

    with pytest.raises(RewardError, match=r"'mine:hangs' did not return within 0.2 s; it is at") as caught:
        CustomReward(hangs, name="mine:hangs", time_limit_s=0.2)("", "")
    assert "in hangs\n    time.sleep(5)" in str(caught.value)

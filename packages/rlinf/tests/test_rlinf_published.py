"""The published sets: their columns as published, what is right, and rows that are not of that form."""

import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rlinf.errors import UserError
from rlinf.tasks.prompts import template_of
from rlinf.tasks.published import PUBLISHED, last_boxed, published_set, require_published
from rlinf.tasks.questions import RowError, load_problems
from rlinf_algos.rewards import make_reward

DATA = Path(os.environ.get("RLINF_TEST_DATA", Path(__file__).parents[4] / "shared" / "data"))
"""A folder with the public benchmark files; tests on real rows are skipped where it is absent."""

GPQA = {
    "Question": "Which particle?\n",
    "Correct Answer": "The muon ",
    "Incorrect Answer 1": "The tau",
    "Incorrect Answer 2": "The electron",
    "Incorrect Answer 3": "No particle",
    "Subdomain": "Physics",
}


def read(name: str, row: dict[str, Any]) -> tuple[str, str]:
    question = PUBLISHED[name].read(row)
    return question.text, question.answer


@pytest.mark.parametrize(
    ("name", "row", "text", "answer"),
    [
        ("gsm8k", {"question": "q", "answer": "3 + 4 = 7\n#### 7"}, "q", "3 + 4 = 7\n#### 7"),
        ("aime24", {"id": 60, "problem": "p", "solution": "s", "answer": "204", "url": "u"}, "p", "204"),
        ("aime24", {"ID": "2024-I-1", "Problem": "p", "Solution": "s", "Answer": 33}, "p", "33"),
        ("aime25", {"problem": "p", "answer": "070", "id": "0"}, "p", "70"),
        ("aime25", {"question": "p", "answer": "0"}, "p", "0"),
        ("aime25", {"problem": "p", "answer": "336^\\circ"}, "p", "336"),
        ("aime25", {"problem": "p", "answer": "$336^{\\circ}$"}, "p", "336"),
        ("amc23", {"id": 0, "problem": "p", "answer": 27.0, "url": "u", "question": "p"}, "p", "27"),
        ("amc23", {"question": "p", "answer": "-1.0"}, "p", "-1"),
        (
            "math500",
            {"problem": "p", "solution": "so \\boxed{1}", "answer": "\\frac{3}{56}", "level": 5, "unique_id": "a.json"},
            "p",
            "\\frac{3}{56}",
        ),
        ("minervamath", {"problem": "p", "solution": "\\boxed{a} then \\boxed{4.5e33} erg", "idx": 0}, "p", "4.5e33"),
        ("minervamath", {"question": "p", "answer": "1.6"}, "p", "1.6"),
        (
            "mmlustem",
            {"question": "q", "choices": ["w", "x", "y", "z"], "answer": 2},
            "q\n\nA) w\nB) x\nC) y\nD) z",
            "C",
        ),
        (
            "mmlustem",
            {"question": "q", "choices": ["w", "x", "y", "z"], "answer": "a"},
            "q\n\nA) w\nB) x\nC) y\nD) z",
            "A",
        ),
    ],
)
def test_a_row_as_it_is_published(name: str, row: dict[str, Any], text: str, answer: str):
    assert read(name, row) == (text, answer)


def test_gpqa_choices_are_put_in_an_order_that_the_question_decides():
    text, letter = read("gpqadiamond", GPQA)
    lines = text.splitlines()
    assert lines[:2] == ["Which particle?", ""]
    assert sorted(line[3:] for line in lines[2:]) == ["No particle", "The electron", "The muon", "The tau"]
    assert [line[:3] for line in lines[2:]] == ["A) ", "B) ", "C) ", "D) "]
    assert f"{letter}) The muon" in lines
    shuffled = list(GPQA.items())
    random.Random(0).shuffle(shuffled)
    assert read("gpqadiamond", dict(shuffled)) == (text, letter)
    swapped = GPQA | {"Incorrect Answer 1": "The electron", "Incorrect Answer 2": "The tau"}
    assert read("gpqadiamond", swapped) == (text, letter), "the order of the wrong ones in the file does not matter"


def test_the_right_choice_of_gpqa_is_at_every_letter_about_as_often():
    letters = Counter(read("gpqadiamond", GPQA | {"Question": f"Which of {i}?"})[1] for i in range(2000))
    assert set(letters) == set("ABCD")
    assert all(abs(count - 500) < 100 for count in letters.values())


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("gsm8k", {"question": "q", "answer": "seven"}, "the answer holds no number: 'seven'"),
        ("gsm8k", {"question": "q"}, "no field 'answer'; the row has 'question'"),
        ("gsm8k", {"question": " ", "answer": "#### 1"}, "field 'question' is empty"),
        ("aime24", {"answer": "1"}, "no field 'problem' or 'question'; the row has 'answer'"),
        ("aime24", {"problem": "p", "answer": "7.5"}, "the answer must be a whole number, is '7.5'"),
        ("aime24", {"problem": "p", "answer": None}, "field 'answer' must be text or a number, is null"),
        ("amc23", {"problem": "p", "answer": float("nan")}, "field 'answer' is nan, no finite number"),
        ("math500", {"problem": "p", "answer": ""}, "field 'answer' is empty"),
        ("minervamath", {"problem": "p", "solution": "it is 5"}, "the solution has no \\boxed{} with an answer"),
        ("gpqadiamond", GPQA | {"Incorrect Answer 2": "The tau"}, "two of the four choices are the same"),
        ("gpqadiamond", {"Question": "q"}, "no field 'Correct Answer'; the row has 'Question'"),
        ("mmlustem", {"question": "q", "choices": ["a"], "answer": 0}, "must be a list of 4 texts"),
        ("mmlustem", {"question": "q", "choices": "abcd", "answer": 0}, "must be a list of 4 texts"),
        ("mmlustem", {"question": "q", "choices": list("wxyz"), "answer": 4}, "must be 0 to 3 or A to D, is '4'"),
        ("mmlustem", {"question": "q", "choices": list("wxyz"), "answer": True}, "must be text or a number, is true"),
    ],
)
def test_a_row_of_another_form_says_what_is_wrong(name: str, row: dict[str, Any], message: str):
    with pytest.raises(RowError) as caught:
        read(name, row)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("\\boxed{1} \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        ("\\boxed {x}", "x"),
        ("\\boxed{3} then \\boxed{4", "3"),
        ("\\boxed{\\boxed{5}}", "5"),
        ("$x = 1/2$ or $x = 2$, our answer is $\\boxed 2$.", "2"),
        ("so $\\boxed\\frac{1}{2}$", "\\frac{1}{2}"),
        ("boxed{5}", None),
        ("", None),
    ],
)
def test_last_boxed(text: str, content: str | None):
    assert last_boxed(text) == content


@pytest.mark.parametrize(
    ("names", "meant"),
    [
        (("aime24", "AIME24", "AIME-24", "aime_24", "AIME 24", "aime2024", "AIME_2024"), "aime24"),
        (("aime2025", "AIME-2025"), "aime25"),
        (("gpqa", "GPQA-Diamond"), "gpqa_diamond"),
        (("MATH-500", "math_500"), "math500"),
        (("minerva", "Minerva-Math"), "minerva_math"),
        (("amc", "AMC-2023"), "amc23"),
    ],
)
def test_names_in_many_spellings(names: tuple[str, ...], meant: str):
    for name in names:
        published = published_set(name)
        assert published is not None and published.name == meant


def test_an_unknown_name_says_what_is_near():
    assert published_set("amie24") is None
    with pytest.raises(UserError, match="no benchmark is called 'amie24'; did you mean aime24\\?\nhint: h"):
        require_published("amie24", "h")
    for name, meant in (
        ("aime", "aime24 or aime25"),
        ("aime2026", "aime25"),
        ("mmlu", "mmlu_stem"),
        ("math", "math500"),
    ):
        with pytest.raises(UserError, match=f"did you mean {meant}\\?"):
            require_published(name, "h")
    with pytest.raises(UserError, match="known: gsm8k, aime24, aime25, math500, gpqa_diamond"):
        require_published("chess", "h")


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_templates_hold_the_question_once(name: str):
    prompt = template_of(PUBLISHED[name].template, "question")("WHAT {x}?")
    assert prompt.count("WHAT {x}?") == 1
    assert "{question}" not in prompt


@pytest.mark.parametrize(
    ("name", "file", "count", "first_answer"),
    [
        ("gsm8k", "gsm8k_test.jsonl", 1319, "#### 18"),
        ("aime24", "aime24.jsonl", 30, "204"),
        ("amc23", "amc23.jsonl", 40, "27"),
        ("minervamath", "minerva_math.jsonl", 272, "1.6"),
        ("mmlustem", "mmlu_stem.jsonl", 3018, "C"),
    ],
)
def test_the_real_files(name: str, file: str, count: int, first_answer: str):
    if not (DATA / file).exists():
        pytest.skip(f"no {file} in {DATA}; set RLINF_TEST_DATA")
    published = PUBLISHED[name]
    loaded = load_problems(DATA / file, published.read, template_of(published.template, "question"), on_bad_row="stop")
    assert len(loaded.problems) == count == published.num_problems
    assert loaded.problems[0].answer.endswith(first_answer)
    assert loaded.problems[-1].place == f"{DATA / file}:{count}"


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_the_reward_of_a_set_knows_a_right_completion_in_the_form_that_is_asked_for(name: str):
    published = PUBLISHED[name]
    if published.reward == "math_answer":
        pytest.importorskip("math_verify")
    number = {"question": "q", "problem": "q", "answer": "#### 42" if name == "gsm8k" else "42"}
    rows = {"gpqadiamond": GPQA, "mmlustem": number | {"choices": list("wxyz"), "answer": 2}}
    answer = published.read(rows.get(name, number)).answer
    form = {"numeric_match": "so\n#### {}", "math_answer": "so \\boxed{{{}}}", "multiple_choice": "so\nAnswer: {}"}
    plain = answer.removeprefix("#### ")
    other = "ABCD"[("ABCD".index(plain) + 1) % 4] if plain in tuple("ABCD") else "41"
    reward = make_reward(published.reward)
    outcomes = [reward(form[published.reward].format(text), answer).outcome for text in (plain, other)]
    assert outcomes == ["right", "wrong"]
    assert reward("", answer).outcome == "unparseable"

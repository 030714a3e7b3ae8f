"""Rows become pairs of answers to one prompt, as text and as tokens."""

from pathlib import Path

import pytest

from rlinf.config.supervised import PreferenceColumnsConfig
from rlinf.errors import UserError
from rlinf.tasks.example_tokens import ExampleEncoder
from rlinf.tasks.examples import ExampleRow
from rlinf.tasks.language import character_tokenizer
from rlinf.tasks.preferences import PreferenceColumns, fit_preferences, tokenized_preference
from rlinf.tasks.prompts import PromptEncoder
from rlinf.tasks.rows import Row

USER = {"role": "user", "content": "hi"}
YES, NO = {"role": "assistant", "content": "yes"}, {"role": "assistant", "content": "no"}
CHAT = (("user", "hi"),)
TEMPLATE = (
    "{% for m in messages %}[{{ m.role[0] }}]{{ m.content }};{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
)


def read(values, **columns):
    return PreferenceColumns(columns=PreferenceColumnsConfig(**columns))(Row(number=1, place="x:1", values=values))


def chat(answer, prompt=CHAT):
    return ExampleRow(turns=(*prompt, ("assistant", answer)), num_given=len(prompt), place="x:1")


@pytest.mark.parametrize(
    ("values", "columns"),
    [
        ({"prompt": [USER], "chosen": [YES], "rejected": [NO]}, {}),
        ({"prompt": "hi", "chosen": [YES], "rejected": [NO]}, {}),
        ({"prompt": [USER], "chosen": "yes", "rejected": "no"}, {}),
        ({"chosen": [USER, YES], "rejected": [USER, NO]}, {}),
        ({"q": [USER], "good": "yes", "bad": "no"}, {"prompt": "q", "chosen": "good", "rejected": "bad"}),
    ],
)
def test_pairs_of_chats(values, columns):
    pair = read(values, **columns)
    assert (pair.chosen, pair.rejected) == (chat("yes"), chat("no"))


def test_a_common_beginning_of_several_turns_is_the_prompt():
    pair = read({"chosen": [USER, NO, USER, YES], "rejected": [USER, NO, USER, NO]})
    prompt = (("user", "hi"), ("assistant", "no"), ("user", "hi"))
    assert (pair.chosen, pair.rejected) == (chat("yes", prompt), chat("no", prompt))


def test_pairs_of_texts():
    pair = read({"question": "2+2", "chosen": "4", "rejected": "5"})
    assert pair.chosen == ExampleRow(prompt="2+2", completion="4", place="x:1")
    assert pair.rejected == ExampleRow(prompt="2+2", completion="5", place="x:1")


def encoded(row, template: str | None = TEMPLATE):
    tokenizer = character_tokenizer("abcdefghijklmnopqrstuvwxyz0123456789+=[];")
    tokenizer.chat_template = template
    prompts = PromptEncoder(tokenizer, chat=template is not None)
    encoder = ExampleEncoder(prompts, tokenizer, "{}".format, on_all=False, folder=Path("model"))
    return tokenized_preference(encoder, row), tokenizer


def parts(row, template: str | None = TEMPLATE):
    pair, tokenizer = encoded(row, template)
    return tuple(tokenizer.decode(ids) for ids in (pair.prompt_ids, pair.chosen_ids, pair.rejected_ids))


def test_the_tokens_of_a_pair():
    assert parts(read({"prompt": [USER], "chosen": "yes", "rejected": "no"})) == ("[u]hi;[a]", "yes;", "no;")
    assert parts(read({"prompt": "2+2", "chosen": "4", "rejected": "5"})) == ("[u]2+2;[a]", "4;", "5;")
    plain = parts(read({"prompt": "2+2=", "chosen": "4", "rejected": "5"}), None)
    assert plain == ("2+2=", "4<end>", "5<end>")


def test_long_pairs():
    answers = (("a", "b"), ("abcdef", "abcxyz"), ("abcdef", "x"))
    pairs = [encoded(read({"prompt": "2=", "chosen": one, "rejected": two}), None)[0] for one, two in answers]
    with pytest.raises(UserError, match=r"2 of 3 examples are longer than 5 tokens \(up to 9\)"):
        fit_preferences(pairs, 5, "stop", "rows")
    dropped, _ = fit_preferences(pairs, 5, "drop", "rows")
    assert list(dropped) == pairs[:1]
    cut, notes = fit_preferences(pairs, 5, "cut", "rows")
    assert [len(pair.chosen_ids) for pair in cut] == [2, 3], "the second is abc twice, cut"
    assert notes[1] == "rows: 1 pairs have equal answers in tokens and were left out"

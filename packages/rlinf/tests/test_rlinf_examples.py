"""Rows become demonstrations, and demonstrations tokens with a mask of those that are learned."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, strategies as st

from rlinf.config.supervised import ExampleColumnsConfig
from rlinf.errors import UserError
from rlinf.jobs.supervised.source import dealt
from rlinf.tasks.example_tokens import ExampleEncoder, fit_examples
from rlinf.tasks.examples import ExampleColumns, ExampleRow
from rlinf.tasks.language import character_tokenizer
from rlinf.tasks.prompts import PromptEncoder
from rlinf.tasks.rows import Row

USER, ASSISTANT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}
PLAIN_TEMPLATE = (
    "{% for m in messages %}[{{ m.role[0] }}]{{ m.content }};{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
)
MARKED_TEMPLATE = (
    "{% for m in messages %}[{{ m.role[0] }}]{% if m.role == 'assistant' %}{% generation %}{{ m.content }};"
    "{% endgeneration %}{% else %}{{ m.content }};{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[a]{% endif %}"
)
FORGETFUL_TEMPLATE = (  # drops the thoughts of earlier turns, as several published ones do
    "{% for m in messages %}[{{ m.role[0] }}]{% if m.role == 'assistant' and loop.last %}(hm){% endif %}"
    "{{ m.content }};{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
)


def read(values, **columns):
    row = Row(number=1, place="file.jsonl:1", values=values)
    return ExampleColumns(columns=ExampleColumnsConfig(**columns))(row)


@pytest.mark.parametrize(
    ("values", "columns", "expected"),
    [
        ({"messages": [USER, ASSISTANT]}, {}, {"turns": (("user", "hi"), ("assistant", "yo"))}),
        (
            {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]},
            {},
            {"turns": (("user", "hi"), ("assistant", "yo"))},
        ),
        ({"prompt": "2+2=", "completion": "4"}, {}, {"prompt": "2+2=", "completion": "4"}),
        ({"question": "2+2", "answer": "4"}, {}, {"prompt": "2+2", "completion": "4"}),
        ({"instruction": "Add", "input": "2 2", "output": "4"}, {}, {"prompt": "Add\n\n2 2", "completion": "4"}),
        ({"instruction": "Say", "input": "", "output": "4"}, {}, {"prompt": "Say", "completion": "4"}),
        (
            {"prompt": [USER], "completion": [ASSISTANT]},
            {},
            {"turns": (("user", "hi"), ("assistant", "yo")), "num_given": 1},
        ),
        (
            {"prompt": [USER, ASSISTANT, USER], "completion": "no"},
            {},
            {"turns": (("user", "hi"), ("assistant", "yo"), ("user", "hi"), ("assistant", "no")), "num_given": 3},
        ),
        ({"text": "once", "id": 3}, {}, {"completion": "once"}),
        ({"text": "once", "prompt": "a", "completion": "b"}, {"text": "text"}, {"completion": "once"}),
        ({"q": "1", "a": "2"}, {"prompt": "q", "completion": "a"}, {"prompt": "1", "completion": "2"}),
    ],
)
def test_rows_of_all_shapes(values, columns, expected):
    assert read(values, **columns) == ExampleRow(place="file.jsonl:1", **expected)


def encoder(template=None, *, on_all=False, to_prompt="{}".format, **options):
    tokenizer = character_tokenizer("abcdefghijklmnopqrstuvwxyz0123456789+=[];() ")
    tokenizer.chat_template = template
    prompts = PromptEncoder(tokenizer, chat=template is not None, **options)
    return ExampleEncoder(prompts, tokenizer, to_prompt, on_all=on_all, folder=Path("model")), tokenizer


def text_and_learned(pair, row):
    """The text, and that of the tokens with a loss; others are dots."""
    example, tokenizer = pair[0].encode(row), pair[1]
    letters = [tokenizer.decode([token]) for token in example.token_ids.tolist()]
    learned = "".join(
        letter if has else "." * len(letter) for letter, has in zip(letters, example.has_loss, strict=True)
    )
    return "".join(letters), learned


CHAT = (("user", "hi"), ("assistant", "yo"), ("user", "sure"), ("assistant", "yes"))


@pytest.mark.parametrize("template", [PLAIN_TEMPLATE, MARKED_TEMPLATE])
def test_every_turn_of_the_assistant_is_learned(template):
    text, learned = text_and_learned(encoder(template), ExampleRow(turns=CHAT))
    assert text == "[u]hi;[a]yo;[u]sure;[a]yes;"
    assert learned == "." * 9 + "yo;" + "." * 11 + "yes;"


@pytest.mark.parametrize("template", [PLAIN_TEMPLATE, MARKED_TEMPLATE])
def test_turns_of_the_prompt_are_not_learned(template):
    _, learned = text_and_learned(encoder(template), ExampleRow(turns=CHAT, num_given=3))
    assert learned == "." * 23 + "yes;"


def test_a_prompt_that_is_text_becomes_a_turn():
    pair = encoder(PLAIN_TEMPLATE, to_prompt="add {}".format, system_prompt="be brief")
    text, learned = text_and_learned(pair, ExampleRow(prompt="2+2", completion="4"))
    assert text == "[s]be brief;[u]add 2+2;[a]4;"
    assert learned == "." * 26 + "4;"


def test_without_a_template_the_completion_and_the_end_are_learned():
    assert text_and_learned(encoder(), ExampleRow(prompt="2+2=", completion="4")) == ("2+2=4<end>", "....4<end>")


def test_all_of_a_text_is_learned_but_its_first_token():
    assert text_and_learned(encoder(), ExampleRow(completion="once")) == ("once<end>", ".nce<end>")


def test_everything_is_learned_on_request():
    _, learned = text_and_learned(encoder(PLAIN_TEMPLATE, on_all=True), ExampleRow(turns=CHAT[:2]))
    assert learned == ".u]hi;[a]yo;"


def test_a_template_that_forgets_is_refused_by_name():
    pair, tokenizer = encoder(FORGETFUL_TEMPLATE)
    with pytest.raises(UserError, match=r"model\.path=model: its chat template does not keep .*turn 2 of 4") as caught:
        pair.encode(ExampleRow(turns=CHAT))
    assert "{% generation %}" in str(caught.value.hint)
    one_answer = text_and_learned((pair, tokenizer), ExampleRow(turns=CHAT[:2]))
    assert one_answer == ("[u]hi;[a](hm)yo;", ".........(hm)yo;"), "a chat with one answer is kept"


def test_a_token_across_the_beginning_of_an_answer_is_split():
    """As in sampling, where the prompt is tokenized before there is an answer."""
    pair, tokenizer = encoder(PLAIN_TEMPLATE)
    plain = tokenizer.__call__
    joined = tokenizer.convert_tokens_to_ids("0")  # stands for `]y`

    class Joining(SimpleNamespace):
        def __call__(self, text, **options):
            ids = plain(text, **options)["input_ids"]
            at = text.find("]y")
            return {"input_ids": ids if at < 0 else [*ids[:at], joined, *ids[at + 2 :]]}

    pair._tokenizer = Joining(eos_token_id=1)
    example = pair.encode(ExampleRow(turns=CHAT[:2]))
    assert joined not in example.token_ids.tolist()
    assert example.has_loss.tolist() == [False] * 9 + [True] * 3
    assert pair.num_apart == 1


def test_long_examples():
    pair, _ = encoder()
    texts = ("ab", "abcdefgh", "abcdef")
    examples = [pair.encode(ExampleRow(prompt=text, completion="x", place=text)) for text in texts]
    with pytest.raises(
        UserError, match=r"rows: 2 of 3 examples are longer than 7 tokens \(up to 10\), the first at abc"
    ):
        fit_examples(examples, 7, "stop", "rows")
    dropped, notes = fit_examples(examples, 7, "drop", "rows")
    assert [one.place for one in dropped] == ["ab"] and "dropped" in notes[0]
    cut, notes = fit_examples(examples, 7, "cut", "rows")
    assert [(one.place, len(one.token_ids)) for one in cut] == [("ab", 4), ("abcdef", 7)]
    assert "cut off" in notes[0] and notes[1] == "rows: 1 examples have no token with a loss and were left out"
    with pytest.raises(UserError, match="no example is left"):
        fit_examples(examples[1:2], 7, "drop", "rows")


@given(st.lists(st.integers(1, 999), min_size=1, max_size=40), st.integers(1, 5))
def test_shards_get_about_equally_many_tokens(lengths, num_shards):
    order = dealt(lengths, num_shards)
    assert sorted(order) == list(range(len(lengths)))
    counts = [order[shard::num_shards] for shard in range(num_shards)]
    sums = [sum(lengths[place] for place in places) for places in counts]
    assert max(map(len, counts)) - min(map(len, counts)) <= 1
    assert max(sums) - min(sums) <= 2 * max(lengths)

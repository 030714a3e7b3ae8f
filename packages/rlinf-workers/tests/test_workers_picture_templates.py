"""Chat templates of vision-language models: histories with pictures have the tokens of a rendering of the whole."""

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlinf_workers.agents.dialects import ChatDialect, MessagesDialect, ResponsesDialect
from rlinf_workers.agents.messages import RequestRefused, read_messages
from rlinf_workers.agents.pictures import PictureText, part_of
from rlinf_workers.agents.templates.base import AuthoredTokens
from rlinf_workers.agents.templates.jinja import JinjaTemplate
from rlinf_workers.agents.templates.tokens import PICTURE, TokenText

QWEN = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}<|im_start|>system\nHelp.<|im_end|>\n"
    "{% endif %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}<|im_end|>\n"
    "{% else %}{% for c in m['content'] %}{% if c['type'] == 'image' or 'image' in c or 'image_url' in c %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in c %}{{ c['text'] }}{% endif %}{% endfor %}"
    "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LISTS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% for c in m['content'] %}{% if c['type'] == 'text' %}"
    "{{ c['text'] }}{% elif c['type'] == 'image' %}<image>{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template that drops contents that are no lists."""
FAMILIES = {
    "qwen": (QWEN, "<|image_pad|>", "<|vision_start|>{}<|vision_end|>"),
    "lists": (LISTS, "<image>", "{}"),
}
RED, BLUE = part_of(b"red"), part_of(b"blue")


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


@pytest.fixture(params=sorted(FAMILIES))
def loaded(request) -> tuple[JinjaTemplate, Any]:
    """The template, and a transformers tokenizer with the same."""
    source, placeholder, around = FAMILIES[request.param]
    special = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<image>"]
    vocabulary = {token: index for index, token in enumerate([*special, *pre_tokenizers.ByteLevel.alphabet()])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    whole: Any = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", additional_special_tokens=special
    )
    whole.chat_template = source
    picture = PictureText(placeholder, vocabulary[placeholder], around)
    return JinjaTemplate(TokenText(whole), source, picture=picture), whole


def flat(pieces: list[AuthoredTokens]) -> list[int]:
    return [token for piece in pieces for token in piece.token_ids]


def rendered(template: JinjaTemplate, tokenizer: Any, messages: list[dict[str, Any]], places: list[int]) -> list[int]:
    """The tokens of transformers.

    Args:
        places: which of the placeholders stand for pictures.
    """
    as_lists = [one.for_template(as_lists=True) for one in read_messages(messages)]
    encoded = tokenizer.apply_chat_template(as_lists, tokenize=True, return_dict=True, add_generation_prompt=True)
    ids, picture = list(encoded["input_ids"]), template._picture
    assert picture is not None
    placeholders = [place for place, token in enumerate(ids) if token == picture.placeholder_id]
    for place in places:
        ids[placeholders[place]] = PICTURE
    return ids


def test_histories_with_pictures_are_those_of_the_template(loaded):
    """Text that holds a placeholder, such as one that the policy wrote, stands for no picture."""
    template, tokenizer = loaded
    question = {"role": "user", "content": [RED, text("What <image><|image_pad|> is it?")]}
    assert flat(template.prompt(read_messages([question]), ())) == rendered(template, tokenizer, [question], [0])
    turn = {"role": "assistant", "content": "A fox."}
    messages = [question, turn, {"role": "user", "content": [text("And "), BLUE, text("or"), RED]}]
    suffix = template.suffix(read_messages(messages), (), 2, None)
    whole = rendered(template, tokenizer, messages, [0, 2, 3])
    assert flat(suffix) == whole[-len(flat(suffix)) :] and flat(suffix).count(PICTURE) == 2
    assert {piece.author for piece in suffix if PICTURE in piece.token_ids} == {"user"}


@pytest.mark.parametrize(
    ("dialect", "body"),
    [
        (ChatDialect(), {"messages": [{"role": "user", "content": [text("a"), RED]}]}),
        (
            ResponsesDialect(),
            {
                "input": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "input_text", "text": "a"},
                            {"type": "input_image", "image_url": RED["image_url"]["url"]},
                        ],
                    }
                ]
            },
        ),
        (
            MessagesDialect(),
            {
                "max_tokens": 4,
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            text("a"),
                            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "cmVk"}},
                        ],
                    }
                ],
            },
        ),
        (
            MessagesDialect(),
            {
                "max_tokens": 4,
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "tool_result",
                                "tool_use_id": "1",
                                "content": [
                                    text("a"),
                                    {"type": "image", "source": {"type": "base64", "data": "cmVk"}},
                                ],
                            }
                        ],
                    }
                ],
            },
        ),
    ],
    ids=["chat", "responses", "anthropic", "anthropic tool"],
)
def test_every_dialect_brings_the_same_picture(dialect, body):
    (message,) = read_messages(dialect.read(body, {}).messages)
    assert [one.content for one in message.pictures] == [b"red"]
    assert message.for_template()["content"] == [text("a"), {"type": "image"}]


@pytest.mark.parametrize(
    ("part", "problem"),
    [
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,???"}}, "the picture is not base64"),
        ({"type": "image_url", "image_url": {"url": "/home/me/cat.png"}}, "pictures come as data URLs"),
        ({"type": "image_url"}, "has no URL of a picture"),
    ],
)
def test_pictures_of_a_request_that_cannot_be_read_are_named(part, problem):
    with pytest.raises(RequestRefused, match=rf"messages\[0\].content\[1\]: .*{problem}"):
        read_messages([{"role": "user", "content": [text("a"), part]}])
    with pytest.raises(RequestRefused, match="turns of the assistant are text"):
        read_messages([{"role": "assistant", "content": [RED]}])

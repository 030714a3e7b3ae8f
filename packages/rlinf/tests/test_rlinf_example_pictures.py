"""Pictures of demonstrations and of pairs: tokens, losses, and what is refused."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from workers_vision_folders import tiny_folder

from rlinf.config.load import load_config
from rlinf.config.overrides import parse_overrides
from rlinf.errors import UserError
from rlinf.jobs.supervised.dpo import DpoSource
from rlinf.jobs.supervised.reward_model import ScoredTexts
from rlinf.jobs.supervised.sft import DemonstrationSource
from rlinf.tasks.drawings import picture_of
from rlinf.tasks.language import load_checkpoint_tokenizer
from rlinf_workers.models import PictureProcessor, picture_places
from rlinf_workers.testing.engines import tiny_model

Sources = Callable[..., Any]
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}{% for p in m.content %}{% if p.type == 'image' %}<|image_pad|>"
    "{% else %}{{ p.text }}{% endif %}{% endfor %} {% endfor %}{% if add_generation_prompt %}a{% endif %}"
)
RED, BLUE = (picture_of(np.full((24, 40, 3), color, np.uint8)).content for color in (9, 99))
URL = f"data:image/png;base64,{base64.b64encode(RED).decode()}"


@pytest.fixture
def source_of(tmp_path: Path) -> Sources:
    """Makes the source of a job from rows."""
    (tmp_path / "red.png").write_bytes(RED)
    (tmp_path / "blue.png").write_bytes(BLUE)
    tiny_folder(tmp_path / "model", "qwen2_5_vl")
    classes: dict[str, Any] = {"sft": DemonstrationSource, "dpo": DpoSource, "reward_model": ScoredTexts}

    def make(job: str, *rows: Mapping[str, Any], model: Path = tmp_path / "model", **overrides: Any) -> Any:
        (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        flags = {"model.path": model, "task.train_files": tmp_path / "rows.jsonl", "task.num_held_out": 1}
        flags |= {"actor.num_shards": 1, "actor.batch_size": 1}
        recipe = {"sft": "sft", "dpo": "dpo", "reward_model": "reward-model"}[job]
        arguments = [f"--{key}={value}" for key, value in (flags | overrides).items()]
        return classes[job](load_config(recipe, parse_overrides(arguments)))

    return make


def test_an_example_is_its_prompt_with_pictures_and_its_completion(source_of: Sources, tmp_path: Path) -> None:
    rows = [{"prompt": "a<image>b=", "completion": "12", "image": name} for name in ("red.png", "blue.png")]
    source = source_of("sft", *rows, **{"task.loss_on": "all"})
    (example,) = source.items([0], is_held_out=False)
    tokenizer = load_checkpoint_tokenizer(tmp_path / "model")
    processor = PictureProcessor(str(tmp_path / "model"), tokenizer)
    text = f"a{processor.picture_text}b=12"
    placeholders = int((example.token_ids == processor.placeholder_id).sum())
    (one,) = example.pictures.pictures
    assert placeholders == one.num_tokens == processor.num_tokens(40, 24)
    whole = tokenizer(text.replace(processor.placeholder, processor.placeholder * placeholders))["input_ids"]
    assert example.token_ids.tolist() == [*whole, tokenizer.eos_token_id]
    learned = ~picture_places(example.pictures, len(example.token_ids))
    learned[0] = False
    assert torch.equal(example.loss_mask != 0, learned)
    assert source.training_set[0].num_tokens == len(example.token_ids)


def test_a_chat_has_the_pictures_of_its_parts(source_of: Sources, tmp_path: Path) -> None:
    tokenizer = load_checkpoint_tokenizer(tmp_path / "model")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "model")
    question = [{"type": "image", "image": URL}, {"type": "text", "text": "b="}]
    chat = [{"role": "user", "content": question}, {"role": "assistant", "content": "1"}]
    chat += [
        {"role": "user", "content": [{"type": "text", "text": "?"}, question[0]]},
        {"role": "assistant", "content": "2"},
    ]
    source = source_of("sft", {"messages": chat}, {"messages": chat})
    (example,) = source.items([0], is_held_out=False)
    assert len(example.pictures.pictures) == 2
    learned = tokenizer.decode(example.token_ids[example.loss_mask != 0])
    assert learned.replace(" ", "") == "12"


def test_a_pair_has_the_pictures_of_its_prompt(source_of: Sources) -> None:
    row = {"prompt": "b=", "chosen": "1", "rejected": "2", "images": ["red.png", "blue.png"]}
    source = source_of("dpo", row, row)
    (pair,) = source.items([0], is_held_out=False)
    group = pair.group()
    assert group.prompt.pictures is not None and len(group.prompt.pictures.pictures) == 2
    assert source.training_set[0].num_prompt_tokens == len(pair.prompt_ids)


@pytest.mark.parametrize(
    ("job", "row", "overrides", "message"),
    [
        (
            "sft",
            {"prompt": "<image><image>", "completion": "1"},
            {},
            "has 2 markers <image>, but the row has 1 picture",
        ),
        ("sft", {"text": "abc"}, {}, "a text without a prompt has no place for the pictures"),
        ("sft", {"prompt": "a", "completion": "1", "image": "no.png"}, {}, "no.png: No such file"),
        (
            "sft",
            {"prompt": "a", "completion": "1"},
            {"task.max_tokens": 6, "task.long_examples": "cut"},
            "with its pictures, which task.long_examples=cut would cut",
        ),
        (
            "reward_model",
            {"prompt": "a", "chosen": "1", "rejected": "2"},
            {},
            "reward models are trained on text",
        ),
    ],
)
def test_pictures_that_cannot_be_learned_are_refused(
    source_of: Sources, job: str, row: dict[str, Any], overrides: dict[str, Any], message: str
) -> None:
    rows = [{"image": "red.png", **row}] * 2
    with pytest.raises(UserError, match=message):
        _ = source_of(job, *rows, **overrides).training_set


def test_a_model_of_text_alone_ignores_pictures_only_where_it_is_told_to(source_of: Sources, tmp_path: Path) -> None:
    blind = tmp_path / "blind"
    tiny_model(blind)
    row = {"prompt": "1+1=", "completion": "2", "image": "red.png"}
    with pytest.raises(UserError, match="has pictures or videos, and the model reads text alone") as refusal:
        _ = source_of("sft", row, row, model=blind).training_set
    assert "--task.columns.images false" in str(refusal.value.hint)
    source = source_of("sft", row, row, model=blind, **{"task.columns.images": "false"})
    assert source.training_set[0].pictures == ()

"""A judge against plain forward passes of its model, question by question."""

from typing import Any

import pytest
import torch
from workers_harnesses import drawing
from workers_vision_folders import random_weights, tiny_folder

from rlinf_algos import RewardError
from rlinf_algos.rewards import PICTURE_FILES, RewardSpec, make_reward, score_all
from rlinf_workers.models.language_model import LoadedModel, ModelSettings, load_model
from rlinf_workers.models.picture_files import PictureFile
from rlinf_workers.models.picture_processor import PictureProcessor

OPTIONS: dict[str, Any] = {
    "question": "{prompt}={completion}={answer}?",
    "accepts": "a",
    "rejects": "b",
    "graded": True,
}
BOUND = 1e-5
"""Rounding in float32."""
JUDGE = "rlinf_workers.roles.language.model_judge:ModelJudge"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> str:
    return random_weights(tiny_folder(tmp_path_factory.mktemp("judge"), "qwen2_5_vl")).folder


@torch.no_grad()
def plain(loaded: LoadedModel, processor: PictureProcessor, text: str, files: list[bytes]) -> float:
    """The probability of the first word, by one call of transformers for a whole question."""
    ids, pictures = processor.encode(
        text.replace("<image>", processor.picture_text), [PictureFile(one) for one in files]
    )
    tokens = torch.tensor([ids])
    arguments = (
        {}
        if pictures is None
        else {
            name: torch.cat([one.arguments[name] for one in pictures.pictures])
            for name in pictures.pictures[0].arguments
        }
    )
    kinds = (tokens == processor.placeholder_id).int()
    loaded.model.model.rope_deltas = None
    logits = loaded.model(tokens, mm_token_type_ids=kinds, **arguments).logits[0, -1]
    words = [loaded.tokenizer(word)["input_ids"][0] for word in "ab"]
    return float(logits[words].softmax(-1)[0])


def test_a_judge_sees_the_pictures_of_each_problem(folder: str) -> None:
    """Several completions of two problems in one call, in passes of several sizes; a completion cannot end its turn or
    have pictures of its own."""
    first, second, third = (drawing(number) for number in (10, 90, 170))
    problems = [("<image>12<image>", "1", [first, second]), ("3c", "2", [third])]
    completions = ["1", "23", "1<end>", "<|image_pad|>0"]
    loaded = load_model(ModelSettings(folder=folder, has_weights=True))
    processor = PictureProcessor(folder, loaded.tokenizer)
    questions = [(problem, completion) for problem in problems for completion in completions]
    for max_tokens, question in ((1, OPTIONS["question"]), (4096, OPTIONS["question"]), (99, "{completion}{prompt}?")):
        options = {**OPTIONS, "folder": folder, "max_tokens": max_tokens, "question": question}
        judge = make_reward(RewardSpec(rule=JUDGE, options=options))
        results = score_all(
            judge,
            [completion for _, completion in questions],
            [answer for (_, answer, _), _ in questions],
            [prompt for (prompt, _, _), _ in questions],
            [{PICTURE_FILES: tuple(files)} for (_, _, files), _ in questions],
        )
        for ((prompt, answer, files), completion), result in zip(questions, results, strict=True):
            marked = prompt if "<image>" in prompt else f"<image>{prompt}"
            inert = completion.replace("<", "< ")
            text = question.format(prompt=marked, completion=inert, answer=answer)
            assert result.value == pytest.approx(plain(loaded, processor, text, files), abs=BOUND)
            assert result.outcome == ("right" if result.value > 0.5 else "wrong")
        assert len({result.value for result in results}) == len(questions)


def test_what_a_judge_cannot_do_is_refused_and_a_broken_picture_counts_as_crashed(folder: str) -> None:
    with pytest.raises(RewardError, match=r"the words 'a' and 'ab' do not begin with different tokens"):
        make_reward(RewardSpec(rule=JUDGE, options={**OPTIONS, "folder": folder, "rejects": "ab"}))
    judge = make_reward(RewardSpec(rule=JUDGE, options={**OPTIONS, "folder": folder, "graded": False}))
    broken, right = score_all(judge, ["1", "1"], ["1", "2"], ["", ""], [{PICTURE_FILES: (b"rubbish",)}, {}])
    assert broken.judge_failed and broken.value == 0 and right.value in (0, 1)

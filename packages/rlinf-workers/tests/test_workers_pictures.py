"""Models that see: engine and trainer against one plain forward pass of transformers, for each architecture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlinf_comm import Channel
from rlinf_sched.derive import ModelShape
from rlinf_workers.engines.huggingface.engine import HuggingFaceEngine
from rlinf_workers.engines.sampling import SamplingSettings
from rlinf_workers.models.language_model import LoadedModel, ModelSettings, build_model
from rlinf_workers.models.packed import pack_without_padding, packed_logits
from rlinf_workers.models.pictures import VISION_LANGUAGE, joined_arguments
from rlinf_workers.models.sequences import completion_logits, pack_groups
from rlinf_workers.models.trainable import TokenModel
from rlinf_workers.roles.language.objectives import Imitation
from rlinf_workers.roles.picture_pool import PicturePool
from rlinf_workers.roles.records.language import Example, Prompt, SampleGroup
from rlinf_workers.roles.records.pictures import ProcessedPicture, pictures_of
from rlinf_workers.testing.backends import check_ranks
from rlinf_workers.testing.pictures import (
    IMAGE,
    VIDEO,
    SeeingSubject,
    own_positions,
    prompt_with_pictures,
    tiny_vision_language,
)
from rlinf_workers.trainers.fsdp2.backend import fsdp2

CPU = torch.device("cpu")
BOUND = 1e-5
"""Nats; rounding in float32."""
SIZES = [[(1, 1)], [(2, 3), (1, 2)], [], [(3, 1)], [(2, 2, 1)], [(1, 4), (3, 2), (1, 1)]]
SIZES += [[(3, 1, 2), (2, 1), (2, 1, 1), (1, 2)]]
"""Rows and columns of the pictures of each prompt, behind the groups of frames of a video; the third prompt is text
alone."""


@pytest.fixture(params=sorted(VISION_LANGUAGE), scope="module")
def model(request: Any, tmp_path_factory: Any) -> Any:
    return build_model(tiny_vision_language(request.param, tmp_path_factory.mktemp("model")), CPU)


def plain_logits(model: Any, prompt: Prompt, completion: Tensor) -> Tensor:
    """[T, V] before each token of the completion, in two calls, so that only the prompt has pictures. Positions and
    features are the model's own doing."""
    from transformers import DynamicCache

    arguments: dict[str, Any] = {}
    if prompt.pictures is not None:
        tiled = model.config.model_type == "smolvlm"
        joined = joined_arguments(prompt.pictures.pictures)
        arguments = {name: one[None] if tiled else one for name, one in joined.items()}
    whole, begin = torch.cat([prompt.token_ids, completion]), len(prompt.token_ids)
    positions = own_positions(model, whole, arguments, torch.arange(len(whole)) < begin)
    first_positions, rest_positions = {}, {}
    if positions is not None:
        first_positions, rest_positions = (
            {"position_ids": own[:, None]} for own in (positions[:, :begin], positions[:, begin:-1])
        )
    cache = DynamicCache(config=model.config)
    first = model(input_ids=whole[None, :begin], cache=cache, use_cache=True, **arguments, **first_positions)
    first = first.logits[0, -1:]
    if len(completion) == 1:
        return first
    rest = model(input_ids=completion[None, :-1], cache=cache, use_cache=True, **rest_positions).logits[0]
    return torch.cat([first, rest])


def logprobs_of(logits: Tensor, completion: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, completion[:, None])[:, 0]


def prompts_of(model: Any) -> list[Prompt]:
    return [prompt_with_pictures(model, index, sizes) for index, sizes in enumerate(SIZES)]


def sampled(
    model: Any, prompts: Sequence[Prompt], *, at_once: int = 2, decodes_fixed: bool = False, **options: Any
) -> dict[tuple[int, int], Any]:
    """(Prompt, member) -> tokens and log-probabilities.

    Args:
        decodes_fixed: with the steps that a GPU captures as graphs.
    """
    loaded = LoadedModel(model=model, tokenizer=None, stop_ids=(1,), pad_id=0)
    engine = HuggingFaceEngine(loaded, CPU, max_prompt_tokens=48, **options)
    if decodes_fixed:
        engine._decoder = engine._make_decoder(captures=False)
    sampling = SamplingSettings(group_size=3, max_new_tokens=6)
    waiting, answers = list(prompts), {}
    while len(answers) < 3 * len(prompts):
        while waiting and (count := min(at_once, engine.free_capacity(3), len(waiting))):
            engine.submit([waiting.pop(0) for _ in range(count)], sampling, seed=0, step=0)
        for one in engine.finished():
            for i, member in enumerate(one.members):
                length = int(one.loss_mask[i].sum())
                answers[one.index, member] = one.token_ids[i, :length], one.logprobs[i, :length]
    return answers


@pytest.mark.parametrize(
    "options",
    [{}, {"refill": True, "max_batch_sequences": 8}, {"decodes_fixed": True}],
    ids=["batch", "refill", "graphs"],
)
@torch.no_grad()
def test_the_engine_samples_from_what_the_model_sees(model: Any, options: dict[str, Any]):
    prompts = prompts_of(model)
    for (index, _), (tokens, logprobs) in sampled(model, prompts, **options).items():
        plain = logprobs_of(plain_logits(model, prompts[index], tokens), tokens)
        assert (plain - logprobs).abs().max() < BOUND, f"prompt {index}"


@pytest.mark.parametrize("options", [{}, {"refill": True, "max_batch_sequences": 8}], ids=["batch", "refill"])
def test_equal_tokens_with_other_pictures_are_other_prompts(model: Any, options: dict[str, Any]):
    prompts = [prompt_with_pictures(model, index, [(2, 2)]) for index in range(2)]
    assert torch.equal(prompts[0].token_ids, prompts[1].token_ids)
    answers = sampled(model, prompts, **options)
    alone = sampled(model, prompts[1:], **options)
    for key, (tokens, logprobs) in alone.items():
        assert torch.equal(tokens, answers[key][0])
        if "moe" not in model.config.model_type:
            assert torch.equal(logprobs, answers[key][1]), "the same bits beside another prompt"


def groups_of(model: Any) -> list[SampleGroup]:
    """Completions with tokens that stand for pictures: the policy may sample them."""
    generator = torch.Generator().manual_seed(9)
    mask = (torch.arange(5) < torch.tensor([5, 2, 0, 4])[:, None]).float()
    groups = []
    for prompt in prompts_of(model):
        ids = torch.randint(2, 13, mask.shape, generator=generator)
        ids[0, 1], ids[3, 0] = IMAGE, VIDEO
        zeros = torch.zeros_like(mask)
        groups.append(
            SampleGroup(prompt=prompt, completion_ids=ids, loss_mask=mask, rollout_logprobs=zeros, policy_version=0)
        )
    return groups


def _padded(model: Any, groups: Sequence[SampleGroup]) -> Tensor:
    batch = pack_groups(groups)
    logits = completion_logits(model, batch)
    return torch.cat(
        [
            logprobs_of(row, ids)[mask != 0]
            for row, ids, mask in zip(logits, batch.completion_ids, batch.loss_mask, strict=True)
        ]
    )


def _packed(model: Any, groups: Sequence[SampleGroup]) -> Tensor:
    batch = pack_without_padding(groups)
    return logprobs_of(packed_logits(model, batch), batch.ids)


@pytest.mark.parametrize("answers", [_padded, _packed], ids=["padded", "packed"])
def test_the_trainer_sees_what_the_engine_saw(model: Any, answers: Any):
    """Log-probabilities and the gradients of all parameters, those of the vision tower included."""
    groups = groups_of(model)
    plain = torch.cat(
        [
            logprobs_of(plain_logits(model, group.prompt, ids[:length]), ids[:length])
            for group in groups
            for ids, length in zip(group.completion_ids, group.row_lengths.tolist(), strict=True)
            if length
        ]
    )
    names, parameters = zip(*model.named_parameters(), strict=True)
    weights = torch.linspace(-1, 1, len(plain))
    expected = torch.autograd.grad(plain @ weights, parameters, allow_unused=True)
    own = answers(model, groups)
    assert (own - plain).abs().max() < BOUND
    for name, one, other in zip(
        names, torch.autograd.grad(own @ weights, parameters, allow_unused=True), expected, strict=True
    ):
        if other is None:
            assert one is None or not one.any(), name
            continue
        assert (one - other).norm() <= 1e-4 * other.norm() + 1e-6, name


@pytest.mark.parametrize("packs", [False, True], ids=["padded", "packed"])
@torch.no_grad()
def test_examples_are_learned_with_their_pictures(model: Any, packs: bool):
    prompts, generator = prompts_of(model), torch.Generator().manual_seed(3)
    answers = [torch.randint(2, 13, (4,), generator=generator) for _ in prompts]
    rows = [torch.cat([prompt.token_ids, answer]) for prompt, answer in zip(prompts, answers, strict=True)]
    is_answer = [torch.arange(len(row)) >= len(row) - 4 for row in rows]
    examples = [
        Example(index=prompt.index, token_ids=row, loss_mask=mask.float(), pictures=prompt.pictures)
        for prompt, row, mask in zip(prompts, rows, is_answer, strict=True)
    ]
    objective = Imitation(packs=packs, tells_likeliest=False)
    batch = objective.batch(examples, 0)
    adapter = TokenModel(ModelSettings(folder="", has_weights=False), 1.0)
    logprobs = adapter.answers(model, batch, entropies=False).logprobs
    own = logprobs[(batch.loss_mask if packs else batch.loss_mask[:, 1:]) != 0].view(-1, 4)
    for row, prompt, answer in zip(own, prompts, answers, strict=True):
        assert (row - logprobs_of(plain_logits(model, prompt, answer), answer)).abs().max() < BOUND


def test_plans_count_the_parameters_of_the_vision_tower(model: Any):
    shape = ModelShape.from_config(model.config.to_dict())
    assert shape.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    tower = [
        one
        for name, one in model.named_parameters()
        if not name.startswith(("lm_head", "model.language_model", "model.text_model"))
    ]
    assert shape.vision_parameters == sum(parameter.numel() for parameter in tower)
    linear = [
        one
        for name, one in model.named_modules()
        if isinstance(one, torch.nn.Linear) and not name.startswith(("lm_head", "model.language_model", "model.text"))
    ]
    assert shape.vision_widths == sum(one.in_features + one.out_features for one in linear)


def test_pictures_are_copied_once_on_their_way_to_the_trainer():
    """From the driver's pool by reference; counted are the bytes that channels copy."""
    pixels = torch.randn(4096, 512)
    token_ids, positions = torch.arange(8), torch.zeros(3, 8, dtype=torch.int64)
    plain = ProcessedPicture(token_ids=token_ids, arguments={"pixel_values": pixels}, position_ids=positions, digest="")
    pool = PicturePool(pytest.fail, capacity_bytes=2 * pixels.nbytes)
    item: Any = Prompt(
        index=0, token_ids=token_ids, reference_answer="", pictures=pictures_of([(0, pool.place(plain))])
    )
    copied = 0
    for name in ("prompts", "samples", "referenced", "scored"):
        channel = Channel.create(name, capacity_items=2, capacity_bytes=2 * pixels.nbytes)
        channel.put(item)
        copied += channel.stats().num_bytes
        item = channel.take()[0].value
        if isinstance(item, Prompt):
            zeros = torch.zeros(4, 6)
            item = SampleGroup(
                prompt=item, completion_ids=zeros.long(), loss_mask=zeros, rollout_logprobs=zeros, policy_version=0
            )
    assert torch.equal(item.prompt.pictures.pictures[0].arguments["pixel_values"], pixels)
    assert pixels.nbytes + copied <= 1.05 * pixels.nbytes


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_ranks_that_share_weights_may_see_different_pictures(tmp_path: Path):
    check_ranks(fsdp2, str(tmp_path), num_ranks=2, num_ranks_per_replica=1, subject=SeeingSubject)

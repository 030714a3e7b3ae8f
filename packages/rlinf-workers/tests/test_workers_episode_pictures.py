"""Episodes that see: rows with pictures in the middle, against one plain forward pass of transformers over the row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rlinf_comm import pack, unpack
from rlinf_workers.agents.pictures import HistoryPicture
from rlinf_workers.agents.records import AgentTrajectory, Sampled, TokenNode
from rlinf_workers.agents.turn_log import LoggedTurn
from rlinf_workers.engines.huggingface.engine import HuggingFaceEngine
from rlinf_workers.engines.sampling import SamplingSettings
from rlinf_workers.models.language_model import LoadedModel, build_model
from rlinf_workers.models.packed import pack_without_padding, packed_logits
from rlinf_workers.models.pictures import VISION_LANGUAGE, joined_arguments, rope_positions
from rlinf_workers.models.sequences import completion_logits, pack_groups
from rlinf_workers.roles.language.episodes import group_of
from rlinf_workers.roles.language.history_pictures import by_reference, read_history
from rlinf_workers.roles.language.late_groups import LateGroup
from rlinf_workers.roles.language.open_episodes import OpenEpisodes, PendingTurn
from rlinf_workers.roles.language.turn_queue import TurnQueue
from rlinf_workers.roles.records.language import Prompt, SampleGroup
from rlinf_workers.roles.records.pictures import ProcessedPicture, pictures_of
from rlinf_workers.testing.pictures import END, IMAGE, START, own_positions, random_picture, tiny_vision_language

CPU = torch.device("cpu")
BOUND = 1e-5
"""Nats; rounding in float32."""


FAST = ("qwen2_5_vl", "smolvlm")
"""Architectures with M-RoPE, and with positions as for text."""


@pytest.fixture(
    params=[pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in sorted(VISION_LANGUAGE)],
    scope="module",
)
def model(request: Any, tmp_path_factory: Any) -> Any:
    return build_model(tiny_vision_language(request.param, tmp_path_factory.mktemp("model")), CPU)


def pictures_for(model: Any) -> list[ProcessedPicture]:
    generator = torch.Generator().manual_seed(4)
    return [random_picture(model, size, generator) for size in ((2, 3), (1, 4), (3, 1))]


def run_of(picture: ProcessedPicture) -> list[int]:
    """The tokens of a picture in a history."""
    run = HistoryPicture(digest=picture.digest, token_ids=picture.token_ids.tolist())
    return [START, *run.tokens, END]


def turn(parent: int, token_ids: list[int]) -> TokenNode:
    zeros = [0.0] * len(token_ids)
    sampled = Sampled(token_ids=token_ids, logprobs=zeros, versions=[(len(token_ids), 0)])
    return TokenNode(parent=parent, author="policy", token_ids=token_ids, sampled=sampled)


def episodes_of(pictures: list[ProcessedPicture]) -> list[AgentTrajectory]:
    """One that branches after its first turn, to two tools with a picture each, and one of two turns without any."""
    first, second, third = pictures
    begin = TokenNode(parent=-1, author="user", token_ids=[3, *run_of(first), 4])
    branched = [
        begin,
        turn(0, [5, 6, 1]),
        TokenNode(parent=1, author="tool", token_ids=[7, *run_of(second), *run_of(first)]),
        turn(2, [8, 9, 10]),
        TokenNode(parent=1, author="tool", token_ids=[7, *run_of(third), 11]),
        turn(4, [2, 12]),
        TokenNode(parent=5, author="tool", token_ids=[*run_of(second)]),
    ]
    text = [begin, turn(0, [7, 1]), TokenNode(parent=1, author="tool", token_ids=[9]), turn(2, [4, 5, 6, 7])]
    return [AgentTrajectory(nodes=branched, reward=1.0), AgentTrajectory(nodes=text, reward=0.0)]


def group(model: Any) -> SampleGroup:
    pictures = pictures_for(model)
    prompt = Prompt(index=0, token_ids=torch.tensor([3, 4]), reference_answer="")
    return group_of(prompt, episodes_of(pictures), policy_version=0, pictures=by_reference(pictures))


def plain_logprobs(model: Any, samples: SampleGroup) -> Tensor:
    """Of the tokens with a loss, row by row: the model computes each whole row, its positions and its features."""
    values = []
    own = samples.prompt.pictures
    assert own is not None
    for row, length in enumerate(samples.row_lengths.tolist()):
        ids = torch.cat([samples.prompt.token_ids, samples.completion_ids[row, :length]])
        later = samples.pictures_of_row(row)
        arguments: dict[str, Any] = joined_arguments([*own.pictures, *(later.pictures if later else ())])
        if model.config.model_type == "smolvlm":
            arguments = {name: one[None] for name, one in arguments.items()}
        else:
            arguments["mm_token_type_ids"] = (ids == IMAGE).int()[None]
        logprobs = model(input_ids=ids[None], use_cache=False, **arguments).logits[0].log_softmax(-1)
        if hasattr(model.model, "rope_deltas"):
            model.model.rope_deltas = None
        begin = len(samples.prompt.token_ids)
        chosen = logprobs[begin - 1 : -1].gather(-1, ids[begin:, None])[:, 0]
        values.append(chosen[samples.loss_mask[row, :length] != 0])
    return torch.cat(values)


def padded(model: Any, samples: SampleGroup) -> Tensor:
    batch = pack_groups([samples])
    logprobs = completion_logits(model, batch).log_softmax(-1).gather(-1, batch.completion_ids[..., None])[..., 0]
    return logprobs[batch.loss_mask != 0]


def packed(model: Any, samples: SampleGroup) -> Tensor:
    batch = pack_without_padding([samples])
    return packed_logits(model, batch).log_softmax(-1).gather(-1, batch.ids[:, None])[:, 0]


@pytest.mark.parametrize("answers", [padded, packed])
def test_the_trainer_sees_the_pictures_of_every_row(model: Any, answers: Any):
    """Log-probabilities and the gradients of all parameters, those of the vision tower included."""
    samples = group(model)
    assert len(samples.pictures) == 3 and samples.shared is not None and samples.shared.any()
    plain, own = plain_logprobs(model, samples), answers(model, samples)
    assert (own - plain).abs().max() < BOUND
    parameters = list(model.parameters())
    weights = torch.linspace(-1, 1, len(plain))
    expected = torch.autograd.grad(plain @ weights, parameters, allow_unused=True)
    for one, other in zip(torch.autograd.grad(own @ weights, parameters, allow_unused=True), expected, strict=True):
        if other is not None:
            assert (one - other).norm() <= 1e-4 * other.norm() + 1e-6


def test_positions_of_a_row_are_those_of_transformers(model: Any):
    pictures = pictures_for(model)
    history = [
        3,
        *run_of(pictures[0]),
        4,
        5,
        6,
        *run_of(pictures[1]),
        *run_of(pictures[2]),
        8,
        9,
    ]
    token_ids, seen = read_history(history, by_reference(pictures))
    expected = own_positions(model, token_ids, joined_arguments(pictures))
    if expected is not None:
        assert torch.equal(rope_positions(seen, len(token_ids)), expected)


@torch.no_grad()
def test_the_engine_goes_on_with_a_history_that_has_pictures(model: Any):
    """A placeholder that the policy sampled in an earlier turn stays a token like others."""
    pictures = pictures_for(model)
    loaded = LoadedModel(model=model, tokenizer=None, stop_ids=(1,), pad_id=0)
    engine = HuggingFaceEngine(loaded, CPU, max_prompt_tokens=48, refill=True, max_batch_sequences=4)
    queue = TurnQueue(engine, "huggingface")
    histories = [
        [3, *run_of(pictures[0]), 4, IMAGE, 5, *run_of(pictures[1]), 6],
        [3, *run_of(pictures[0]), 4, 5, *run_of(pictures[2]), 6],
        [3, 4],
    ]
    for noise, history in enumerate(histories, 1):
        turn, there = LoggedTurn(noise=noise), by_reference(pictures)
        queue.add(PendingTurn(episode=None, turn=turn, token_ids=history, pictures=there, request=None))
    queue.submit(SamplingSettings(group_size=1, max_new_tokens=5))
    turns = []
    while queue.is_running:
        turns += queue.finished()
    assert len(turns) == 3
    for pending, sampled in turns:
        node = TokenNode(parent=-1, author="user", token_ids=list(pending.token_ids))
        nodes = [node, TokenNode(parent=0, author="policy", token_ids=sampled.token_ids, sampled=sampled)]
        prompt = Prompt(index=0, token_ids=torch.tensor([0]), reference_answer="")
        samples = group_of(prompt, [AgentTrajectory(nodes=nodes)], policy_version=0, pictures=by_reference(pictures))
        plain = packed(model, samples)
        assert (plain - torch.tensor(sampled.logprobs)).abs().max() < BOUND


def test_equal_tokens_with_other_pictures_are_no_common_prompt(model: Any):
    generator = torch.Generator().manual_seed(5)
    pictures = [random_picture(model, (2, 2), generator) for _ in range(2)]
    episodes = [
        AgentTrajectory(nodes=[TokenNode(parent=-1, author="user", token_ids=[3, *run_of(one), 4]), turn(0, [5, 1])])
        for one in pictures
    ]
    prompt = Prompt(index=0, token_ids=torch.tensor([3]), reference_answer="")
    samples = group_of(prompt, episodes, policy_version=0, pictures=by_reference(pictures))
    assert samples.prompt.token_ids.tolist() == [3, START] and samples.prompt.pictures is None
    assert [row[0].digest for row in samples.placed_pictures] == [one.digest for one in pictures]


def test_a_late_group_keeps_the_pictures_of_its_episodes(model: Any):
    """Also through a checkpoint: what its turns follow can be computed when it goes on."""
    of_task, of_tool, _ = pictures_for(model)
    prompt = Prompt(
        index=0,
        token_ids=torch.tensor([3, *of_task.token_ids.tolist()]),
        reference_answer="",
        pictures=pictures_of([(1, of_task)]),
    )
    groups = OpenEpisodes(1, keeps_histories=True)
    groups.open(LateGroup(prompt=prompt, step=0, submitted_index=0, finished=(), unfinished=()))
    ((_, episode),) = list(groups.begin(4))
    episode.pictures |= by_reference([of_tool])
    history = [3, *run_of(of_task), 4, *run_of(of_tool)]
    episode.log.add(7, history)
    (late,) = unpack(pack(groups.left_over({0: (0, 0)})))
    assert [one.digest for one in late.pictures] == [of_tool.digest], "the prompt has its own"
    again = OpenEpisodes(1, keeps_histories=True)
    again.open(late)
    ((_, episode),) = list(again.begin(4))
    assert episode.log.history(7) == history
    token_ids, seen = read_history(history, episode.pictures)
    assert seen is not None and seen.begins == (2, 5 + of_task.num_tokens)
    assert token_ids.max() < 64 and torch.equal(
        joined_arguments(seen.pictures)["pixel_values"], joined_arguments([of_task, of_tool])["pixel_values"]
    )

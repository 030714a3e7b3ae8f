"""Sessions that see: a real engine, a real agent process and the model's own image processor."""

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from workers_harnesses import drawing
from workers_rollouts import rollout_of_agents
from workers_vision_folders import random_weights, seeing_prompts, tiny_folder

from rlinf_comm import Channel, pack, unpack
from rlinf_workers.agents.link import NewPicture
from rlinf_workers.agents.picture_reader import EpisodePictures, PictureReader
from rlinf_workers.agents.pictures import (
    PICTURE_URL,
    HistoryPicture,
    MessagePicture,
    part_of,
    part_of_url,
    read_part,
)
from rlinf_workers.agents.settings import PictureSettings
from rlinf_workers.engines.sampling import SamplingSettings
from rlinf_workers.models.language_model import ModelSettings, load_model
from rlinf_workers.models.picture_files import PictureError
from rlinf_workers.models.pictures import joined_arguments
from rlinf_workers.roles.language.agent_rollout import AgentRollout
from rlinf_workers.roles.language.late_groups import late_from_start
from rlinf_workers.roles.picture_pool import PicturePool
from rlinf_workers.roles.records.language import SampleGroup
from rlinf_workers.worker import StepContext

SAMPLING = SamplingSettings(group_size=2, max_new_tokens=3)
BOUND = 1e-5
"""Nats; rounding in float32."""


@pytest.fixture(scope="module")
def seeing_model(tmp_path_factory) -> ModelSettings:
    return random_weights(tiny_folder(tmp_path_factory.mktemp("seeing"), "qwen2_5_vl"))


@pytest.fixture
def settings(seeing_model, monkeypatch):
    here = str(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", here)
    monkeypatch.setattr(sys, "path", [here, *sys.path])
    return rollout_of_agents(
        seeing_model,
        SAMPLING,
        run="workers_harnesses:look_twice",
        max_context_tokens=80,
        pictures=PictureSettings(folder=seeing_model.folder),
    )


def plain_logprobs(model: Any, group: SampleGroup, row: int) -> torch.Tensor | None:
    """Of the tokens of a row with a loss, by one call of transformers; None: the policy has sampled a placeholder,
    which transformers would take for a picture."""
    length, prompt = int(group.row_lengths[row]), group.prompt
    ids = torch.cat([prompt.token_ids, group.completion_ids[row, :length]])
    later = group.pictures_of_row(row)
    assert prompt.pictures is not None and later is not None
    pictures = [*prompt.pictures.pictures, *later.pictures]
    kinds = (ids == model.config.image_token_id).int()
    if int(kinds.sum()) != sum(one.num_tokens for one in pictures):
        return None
    with torch.no_grad():
        logits = model(ids[None], mm_token_type_ids=kinds[None], **joined_arguments(pictures)).logits[0]
    begin = len(prompt.token_ids)
    logprobs = logits.log_softmax(-1)[begin - 1 : -1].gather(-1, ids[begin:, None])[:, 0]
    return logprobs[group.loss_mask[row, :length] != 0]


def test_turns_follow_the_pictures_of_the_task_and_of_messages(make_worker, settings, seeing_model):
    """What was sampled against one forward pass of transformers over each whole row, and the bytes of pictures that
    move: into the pool, from the agent process, and through the channels of prompts and of samples."""
    pool = PicturePool(pytest.fail, capacity_bytes=1 << 24)
    prompts = seeing_prompts(seeing_model.folder, pool, ["1="] * 2)
    of_task = [one for prompt in prompts if prompt.pictures for one in prompt.pictures.pictures]
    worker = make_worker(AgentRollout, settings)
    worker._host.step = StepContext(step=3, phase="train", seed=11, num_items=2)
    worker.weights_received(7)
    sent: list[NewPicture] = []
    take = worker._agents.take

    def counted(*, waits: bool) -> Any:
        messages = take(waits=waits)
        sent.extend(one for one in messages if isinstance(one, NewPicture))
        return messages

    worker._agents.take = counted
    groups = [group for whole in worker.sample(prompts) for group in whole]
    worker.close()
    moved = sum(one.num_bytes for one in of_task)
    moved += sum(len(tensor.content) for one in sent for tensor in one.arguments.values())
    model, num_compared = load_model(seeing_model).model, 0
    pictures = {one.digest: one.num_bytes for one in of_task}
    channel = Channel.create("samples", capacity_items=2, capacity_bytes=1 << 24)
    for group in groups:
        assert set(group.causes) == {""} and len(group.loss_mask) == SAMPLING.group_size
        assert len(group.pictures) == 2
        pictures |= {digest: one.num_bytes for digest, one in group.pictures.items()}
        channel.put(group)
        received = channel.take()[0].value
        for row in range(SAMPLING.group_size):
            authors = [one.author for one in received.segments[row] if one.author != "template"]
            assert authors == ["policy", "user", "policy", "user", "policy"]
            plain = plain_logprobs(model, received, row)
            if plain is not None:
                num_compared += 1
                assert (plain - received.rollout_logprobs[row][received.loss_mask[row] != 0]).abs().max() < BOUND
    assert num_compared and len(pictures) == 6
    moved += channel.stats().num_bytes
    assert moved <= 1.05 * sum(pictures.values())


def test_a_picture_is_sent_once_and_what_cannot_be_read_is_named(tmp_path):
    settings = PictureSettings(folder=tiny_folder(tmp_path, "qwen2_5_vl"))
    sent: list[Any] = []
    pictures = PictureReader(settings, sent.append)
    of_task = HistoryPicture(digest="ab" * 8, token_ids=[4, 4])

    async def read_all() -> None:
        first, second = (EpisodePictures(number, [of_task], pictures) for number in (1, 2))
        one, again = await first.read(message_picture(drawing(1))), await second.read(message_picture(drawing(1)))
        assert one == again and [bool(message.arguments) for message in sent] == [True, False]
        assert await first.read(read_part(part_of_url(PICTURE_URL + of_task.digest))) is of_task
        pictures.abandon()
        await first.read(message_picture(drawing(1)))
        assert sent[-1].arguments, "the rank has forgotten it"
        for picture, problem in (
            (read_part(part_of_url("https://example.org/cat.png")), "is on the network; send a data URL, or allow it"),
            (message_picture(b"rubbish"), "is no picture that Pillow reads"),
            (read_part(part_of_url(PICTURE_URL + "cd" * 8)), "is none of the task's"),
        ):
            with pytest.raises(PictureError, match=problem):
                await first.read(picture)

    asyncio.run(read_all())


def message_picture(content: bytes) -> MessagePicture:
    return read_part(part_of(content))


class RecordedAgentRollout(AgentRollout):
    """Keeps its decisions, and follows those of an earlier run."""

    earlier: Any = None

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self.decisions: list[Any] = []

    @property
    def records(self) -> bool:
        return True

    @property
    def recorded(self) -> Any:
        return self.earlier

    def decide(self, decision: Any) -> None:
        self.decisions.append(decision)


@pytest.mark.slow
def test_a_replay_processes_the_pictures_of_the_record(make_worker, settings, seeing_model):
    pool = PicturePool(pytest.fail, capacity_bytes=1 << 24)
    pictures = replace(settings.agent.pictures, sends_files=True)
    broken = replace(settings.agent, pictures=pictures, run="workers_harnesses:play_and_fail", num_retries=0)
    outcomes, decisions = [], None
    for agent in (replace(settings.agent, pictures=pictures), broken):
        worker = make_worker(RecordedAgentRollout, replace(settings, agent=agent))
        worker._host.step = StepContext(step=3, phase="train", seed=11, num_items=2)
        worker.weights_received(7)
        worker.earlier = None if decisions is None else [(0, json.loads(json.dumps(one))) for one in decisions]
        groups = [
            one for whole in worker.sample(seeing_prompts(seeing_model.folder, pool, ["1="] * 2)) for one in whole
        ]
        worker.close()
        decisions = worker.decisions
        outcomes.append(({one.index: one.digest() for one in groups}, sum("picture" in one for one in decisions)))
    assert outcomes[0] == outcomes[1] and outcomes[0][1] >= 8


def begin_again(worker: AgentRollout) -> None:
    """Goes on from a checkpoint, without the agents."""
    worker.go_on_with([unpack(pack(worker.late_groups()))])


@pytest.mark.slow
@pytest.mark.parametrize("between", [lambda worker: None, begin_again], ids=["going on", "begun again"])
def test_episodes_that_outlive_a_step_keep_their_pictures(make_worker, reader, settings, seeing_model, between):
    """A group is late in each step; its rows are what transformers computes with their pictures."""
    sampling = replace(SAMPLING, max_new_tokens=8)
    agent = replace(settings.agent, max_new_tokens=8, max_context_tokens=96)
    late = replace(settings, train=sampling, max_lateness=1, agent=agent, max_prompt_tokens=agent.max_prompt_tokens)
    pool = PicturePool(pytest.fail, capacity_bytes=1 << 24)
    prompts = seeing_prompts(seeing_model.folder, pool, ["1="] * 2)
    worker = make_worker(AgentRollout, late)
    steps = [StepContext(step=step, phase="train", seed=11, num_items=2) for step in range(5)]
    worker.go_on_with([[late_from_start(replace(prompts[0], index=2), steps[0], 2)]])
    model, num_compared, num_mixed = load_model(seeing_model).model, 0, 0
    for step in steps:
        worker._host.step = step
        worker.weights_received(step.step)
        groups: list[tuple[int, SampleGroup]] = []
        writer = SimpleNamespace(put_many=groups.extend)
        worker.generate(reader([prompts]), writer)
        assert len(groups) == 2 and len(worker.late_groups()) == 1
        for _, group in groups:
            num_mixed += len(group.tokens_by_version()) > 1
            for row in range(SAMPLING.group_size):
                plain = plain_logprobs(model, group, row)
                if plain is not None:
                    num_compared += 1
                    assert (plain - group.rollout_logprobs[row][group.loss_mask[row] != 0]).abs().max() < BOUND
        between(worker)
    worker.close()
    assert num_compared and num_mixed

"""Which version of the weights sampled which token, from the engine through the rollout to the actor's batch."""

from dataclasses import replace

import pytest
import torch

from rlinf_comm import pack, unpack
from rlinf_workers.engines.base import Completions
from rlinf_workers.engines.huggingface.slots import Slots
from rlinf_workers.engines.sampling import SamplingSettings
from rlinf_workers.errors import WorkersError
from rlinf_workers.models.packed import pack_without_padding
from rlinf_workers.roles.language.advantages import LearningGroup
from rlinf_workers.roles.language.micro_batches import tokens_of
from rlinf_workers.roles.language.rollout import OpenGroups, Rollout, RolloutSettings
from rlinf_workers.roles.records.language import Prompt, SampleGroup, Segment
from rlinf_workers.testing.engines import prompts_of

SAMPLING = SamplingSettings(group_size=2, max_new_tokens=16)
MASK = torch.tensor([[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]])
GROUP = SampleGroup(
    prompt=Prompt(index=3, token_ids=torch.tensor([2, 4]), reference_answer=""),
    completion_ids=torch.ones(3, 4, dtype=torch.int64),
    loss_mask=MASK,
    rollout_logprobs=torch.zeros(3, 4),
    policy_version=4,
    segments=(
        (Segment(num_tokens=1, policy_version=4), Segment(num_tokens=3, policy_version=6)),
        (Segment(num_tokens=2, policy_version=5),),
        (Segment(num_tokens=2, policy_version=4), Segment(num_tokens=1, policy_version=5)),
    ),
)
VERSIONS = [[4, 6, 6, 6], [5, 5], [4, 4, 5]]


def versions_of(tensor, mask) -> list[list[int]]:
    return [row[own.bool()].tolist() for row, own in zip(tensor, mask, strict=True)]


def test_segments_cross_a_channel_and_give_each_token_its_version():
    group = unpack(pack(GROUP))
    assert group.segments == GROUP.segments
    assert versions_of(group.token_versions(), MASK) == VERSIONS
    assert versions_of(group.subset(slice(1, 3)).token_versions(), MASK[1:]) == VERSIONS[1:]
    assert versions_of(replace(group, segments=()).token_versions(), MASK) == [[4] * 4, [4] * 2, [4] * 3]


@pytest.mark.parametrize("packs", [False, True])
def test_the_actors_batch_has_the_version_of_each_token(packs):
    other = replace(
        GROUP,
        completion_ids=torch.ones(3, 2, dtype=torch.int64),
        loss_mask=torch.ones(3, 2),
        rollout_logprobs=torch.zeros(3, 2),
        segments=(),
        policy_version=9,
    )
    groups = [
        LearningGroup(samples=samples, rewards=torch.zeros(3), advantages=torch.ones(3)) for samples in (other, GROUP)
    ]
    packing = {"pack": pack_without_padding} if packs else {}
    batch = tokens_of(groups, torch.device("cpu"), **packing)
    assert batch is not None and batch.token_versions.shape == batch.sequences.loss_mask.shape
    assert versions_of(batch.token_versions, batch.sequences.loss_mask) == [[9, 9]] * 3 + VERSIONS


def part(member, version, segments=()):
    return Completions(
        index=3,
        members=(member,),
        token_ids=torch.ones(1, 3, dtype=torch.int64),
        loss_mask=torch.ones(1, 3),
        logprobs=torch.zeros(1, 3),
        truncated=torch.tensor([True]),
        policy_version=version,
        segments=segments,
    )


def test_a_group_lists_segments_only_if_versions_differ():
    segments = (Segment(num_tokens=2, policy_version=4), Segment(num_tokens=1, policy_version=5))
    for parts, expected in (
        ([part(1, 4), part(0, 4)], [[4] * 3, [4] * 3]),
        ([part(1, 4), part(0, 5)], [[5] * 3, [4] * 3]),
        ([part(1, 4, (segments,)), part(0, 5)], [[5] * 3, [4, 4, 5]]),
    ):
        groups = OpenGroups(2)
        groups.open([GROUP.prompt])
        (group,) = groups.add(parts)
        assert versions_of(group.token_versions(), group.loss_mask) == expected and group.policy_version == 4
        assert bool(group.segments) == (expected[0] != expected[1])


def rollout(make_worker, model, how, **changes):
    settings = RolloutSettings(
        model=model,
        train=SAMPLING,
        evaluate=SAMPLING,
        max_prompt_tokens=8,
        max_batch_sequences=8,
        engine_options={"refill": True},
        on_new_weights=how,
    )
    worker = make_worker(Rollout, replace(settings, **changes))
    worker.weights_received(3)
    return worker


@pytest.mark.parametrize("how", ["finish", "keep", "recompute"])
def test_the_rollout_takes_weights_that_are_offered_while_it_generates(make_worker, model, how, monkeypatch):
    worker, steps, step = rollout(make_worker, model, how), [], Slots._step

    def offer_in_the_fourth(slots):
        steps.append(slots.num_running)
        if len(steps) == 4:
            worker.offer_weights(lambda: 5)
        return step(slots)

    monkeypatch.setattr(Slots, "_step", offer_in_the_fourth)
    groups = [group for groups in worker.sample(prompts_of([4, 5, 6])) for group in groups]
    assert sorted(group.index for group in groups) == [0, 1, 2] and worker.policy_version == 5
    versions = [row for group in groups for row in versions_of(group.token_versions(), group.loss_mask)]
    assert max(map(len, versions)) > 5, "none was running when the weights came"
    assert all(
        row == ([3] * len(row) if how == "finish" else [3] * min(5, len(row)) + [5] * (len(row) - 5))
        for row in versions
    )


def test_an_engine_that_cannot_pause_is_named(make_worker, model):
    worker = rollout(make_worker, model, "keep", engine_options={})
    worker._engine = object.__new__(type("Plain", (), {"finished": lambda self: []}))
    with pytest.raises(WorkersError, match="huggingface cannot pause, so on_new_weights=keep is not possible"):
        worker._take_weights(lambda: 5)

"""Which version of the weights sampled which token, from the engine through the rollout to the actor's batch."""

from dataclasses import replace

import pytest
import torch

from rlinf_comm import pack, unpack
from rlinf_workers.engines.base import Completions
from rlinf_workers.engines.huggingface.engine import HuggingFaceEngine
from rlinf_workers.engines.huggingface.slots import Slots
from rlinf_workers.engines.sampling import SamplingSettings
from rlinf_workers.errors import SettingsRefused
from rlinf_workers.execution.running_stage import RunningStage
from rlinf_workers.execution.stage_calls import StageCall
from rlinf_workers.models.packed import pack_without_padding
from rlinf_workers.roles.language.advantages import LearningGroup
from rlinf_workers.roles.language.micro_batches import tokens_of
from rlinf_workers.roles.language.rollout import OpenGroups, Rollout, RolloutSettings
from rlinf_workers.roles.records.language import Prompt, SampleGroup, Segment
from rlinf_workers.testing.engines import prompts_of

SAMPLING = SamplingSettings(group_size=2, max_new_tokens=16)
EDGE = "actor -> rollout"
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


class Published:
    """A receiver that finds every version."""

    def __init__(self):
        self.received = []

    def receive(self, tensors, policy_version, timeout_s=60.0):
        self.received.append(policy_version)


def rollout(make_worker, model, how, *, recorded=None, **changes):
    """A rollout that serves version 3, and runs a stage."""
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
    host = worker._host
    call = StageCall(
        stage="rollout",
        method="generate",
        context=host.step,
        reads=(),
        writes=(),
        lease_turn=None,
        offloads=False,
        discards=False,
        receives={EDGE: 3},
        publishes=(),
        replica_channel=None,
        trains=False,
        offered=EDGE,
        records=True,
        recorded=recorded,
    )
    host._receivers[EDGE] = Published()
    host._of_thread.running = RunningStage(host, call)
    host._of_thread.running.begin_chunk(0)
    return worker


def generated(worker, reader, writer) -> list[list[int]]:
    """The versions that sampled the tokens of each completion."""
    worker.generate(reader([prompts_of([4, 5, 6])]), writer)
    assert sorted(group.index for group in writer.items) == [0, 1, 2]
    return [row for group in writer.items for row in versions_of(group.token_versions(), group.loss_mask)]


def takes_of(worker) -> list[tuple[int, int]]:
    decisions = worker._host._of_thread.running.decisions
    return [(one["took"], one["after"]) for one in decisions if "took" in one]


@pytest.fixture
def offers(monkeypatch):
    """offers[n] = version: offered to the worker during decode step n, counted from 1."""
    offered, steps, step = {}, [], Slots._step

    def offering(slots):
        steps.append(slots.num_running)
        if len(steps) in offered:
            worker, version = offered[len(steps)]
            worker._host.offer_weights(EDGE, version)
        return step(slots)

    monkeypatch.setattr(Slots, "_step", offering)
    return offered


@pytest.mark.parametrize("how", ["keep", "recompute"])
def test_the_rollout_takes_weights_that_are_offered_while_it_generates(make_worker, model, reader, writer, how, offers):
    worker = rollout(make_worker, model, how)
    offers[4] = worker, 5
    versions = generated(worker, reader, writer)
    assert max(map(len, versions)) > 5, "none was running when the weights came"
    assert all(row == [3] * min(5, len(row)) + [5] * (len(row) - 5) for row in versions)
    assert (worker.policy_version, takes_of(worker)) == (5, [(5, 4)])


def test_a_rollout_that_finishes_first_takes_no_weights(make_worker, model, reader, writer, offers):
    worker = rollout(make_worker, model, "finish")
    offers[4] = worker, 5
    assert all(set(row) == {3} for row in generated(worker, reader, writer))
    assert (worker._host._receivers[EDGE].received, takes_of(worker)) == ([3], [])


def test_a_recorded_rollout_takes_weights_at_the_recorded_step_whenever_they_come(
    make_worker, model, reader, writer, offers
):
    recorded = [(0, {"took": 4, "after": 2}), (1, {"took": 6, "after": 3}), (0, {"took": 6, "after": 7})]
    worker = rollout(make_worker, model, "keep", recorded=recorded)
    offers[1], offers[2], offers[3] = (worker, 4), (worker, 5), (worker, 6)
    versions = generated(worker, reader, writer)
    assert all(row == ([3] * 3 + [4] * 5 + [6] * 8)[: len(row)] for row in versions)
    assert takes_of(worker) == [(4, 2), (6, 7)] and max(map(len, versions)) > 8


def test_an_engine_that_cannot_pause_is_named(make_worker, model, monkeypatch):
    monkeypatch.delattr(HuggingFaceEngine, "suspend")
    with pytest.raises(SettingsRefused, match="huggingface cannot pause, so on_new_weights=keep is not possible"):
        rollout(make_worker, model, "keep")

"""Ranks that share a router, in processes: on several nodes they sample what ranks without a router do."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from workers_agents import ProcessAgents
from workers_harnesses import drawing
from workers_rollouts import rollout_of_agents
from workers_vision_folders import random_weights, seeing_prompts, tiny_folder

from rlinf_sched import Cluster, plan_for_mode
from rlinf_workers import Executor, Flow, LocalLauncher, StepContext
from rlinf_workers.agents.pictures import part_of
from rlinf_workers.agents.settings import PictureSettings
from rlinf_workers.engines.sampling import SamplingSettings
from rlinf_workers.execution import executor as executor_module
from rlinf_workers.execution.ports import Reader, Writer
from rlinf_workers.roles import AgentRollout, Prompt, SessionRouter
from rlinf_workers.roles.picture_pool import PicturePool
from rlinf_workers.roles.records.language import SampleGroup
from rlinf_workers.worker import Worker

CONTEXT = StepContext(step=3, phase="train", seed=11, num_items=6)


async def turns(session, task):
    """An agent: as many turns as its prompt says; if the task has a picture, each turn but the first follows another
    one."""
    messages = list(task.messages)
    for number in range(int(task.text)):
        (turn,) = await session.chat(messages)
        added = [part_of(drawing(7 * number))] if task.pictures else []
        messages += [turn.message(), {"role": "user", "content": [*added, {"type": "text", "text": "1"}]}]
    return 0.0


class Reading(Worker):
    """Takes its turn on the devices after the rollout, and hands groups on."""

    def read(self, samples: Reader[SampleGroup], read: Writer[SampleGroup]) -> None:
        for chunk in samples:
            read.put_many([(group.index, group) for group in chunk])


def sampled(settings, launcher, cluster, folder, prompts: Sequence[Prompt]):
    """The digest of each group, and the metrics."""
    flow = Flow("routed").worker("rollout", AgentRollout, settings)
    if settings.agent.routed:
        flow.worker("router", SessionRouter, settings, shared_by="rollout")
    flow.stage("rollout", AgentRollout.generate, reads="prompts", writes="samples")
    flow.worker("reading", Reading).stage("reading", Reading.read, reads="samples", writes="read")
    with Executor(cluster=cluster, launcher=launcher, log_folder=folder) as executor:
        granularity = {"rollout": 1, "reading": 1}
        executor.start(flow, plan_for_mode(flow.graph(), cluster, "collocated", granularity=granularity))
        run = executor.run(flow, context=CONTEXT, feeds={"prompts": prompts}, timeout_s=120)
    return {group.index: group.digest() for group in run.collected["read"]}, run.metrics


@pytest.mark.slow
@pytest.mark.parametrize("sees", [False, True])
def test_ranks_of_two_nodes_share_a_router_and_sample_the_same_tokens(sees, model, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", __file__.rpartition("/")[0])
    run, of_model = "test_workers_routed_ranks:turns", {"max_context_tokens": 40}
    prompts = [
        Prompt(index=index, token_ids=torch.zeros(1, dtype=torch.int64), reference_answer="", text=text)
        for index, text in enumerate("313131")
    ]
    if sees:
        (tmp_path / "model").mkdir()
        model = random_weights(tiny_folder(tmp_path / "model", "qwen2_5_vl"))
        pool = PicturePool(pytest.fail, capacity_bytes=1 << 24)
        prompts = seeing_prompts(model.folder, pool, "313131")
        of_model = {"max_context_tokens": 160, "pictures": PictureSettings(folder=model.folder)}
    alone = rollout_of_agents(model, SamplingSettings(group_size=8, max_new_tokens=5), run=run, **of_model)
    alone = replace(alone, agent=replace(alone.agent, max_episodes=32))
    routed = replace(alone, agent=replace(alone.agent, routed=True))
    slots = Cluster.cpu_slots(2).devices
    nodes = Cluster(devices=tuple(replace(slot, node=node) for node, slot in enumerate(slots)))
    monkeypatch.setattr(executor_module, "CHANNEL_ITEMS", 2)  # the next turn empties a full channel
    expected, _ = sampled(alone, LocalLauncher(), Cluster.cpu_slots(1), tmp_path / "alone", prompts)
    groups, metrics = sampled(routed, ProcessAgents(), nodes, tmp_path / "routed", prompts)
    assert groups == expected and len(groups) == CONTEXT.num_items
    assert metrics["router/engine_turns"] == 8 * (3 + 1 + 3 + 1 + 3 + 1) / 2, "each turn once, in one of both engines"
    assert metrics["router/moved_turns"] > 0

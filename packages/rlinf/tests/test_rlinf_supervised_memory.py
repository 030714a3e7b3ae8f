"""The memory of supervised jobs: counted before a start, and refused with settings that fit."""

import re
from typing import Any

import pytest

from rlinf.config.load import load_config
from rlinf.config.overrides import parse_overrides
from rlinf.config.supervised import SupervisedConfig
from rlinf.errors import UserError
from rlinf.jobs.supervised.flow import training_flow
from rlinf.jobs.supervised.memory import SupervisedMemory
from rlinf_sched import Plan, plan_for_mode
from rlinf_sched.derive import find_model, gpu_cluster

PADDED = ("--actor.max_tokens_per_micro_batch=null", "--actor.micro_batch_examples=1")


def memory_of(*flags: str, recipe: str = "sft", num_devices: int = 1) -> tuple[SupervisedMemory, Plan]:
    """For Qwen2.5-7B on GPUs of 80 GB, with rows of 2,048 tokens."""
    config: Any = load_config(
        recipe,
        parse_overrides(["--model.path=m", "--task.train_files=[d.jsonl]", "--actor.num_shards=1", *PADDED, *flags]),
    )
    assert isinstance(config, SupervisedConfig)
    num_rows = 2 if recipe == "dpo" else 1
    cluster = gpu_cluster("H100", num_devices)
    memory = SupervisedMemory(config, find_model("Qwen2.5-7B"), cluster, 0, num_tokens=2048, num_rows=num_rows)
    flow = training_flow(config, trainer="rlinf_workers.roles:SupervisedActor").graph()
    return memory, plan_for_mode(flow, cluster, "collocated", num_ranks={"actor": config.actor.resolved_shards})


def needed(*flags: str, **sizes: Any) -> int:
    memory, plan = memory_of(*flags, **sizes)
    return memory.fullest_place(plan).needed_bytes


def test_weights_gradients_and_moments_are_counted():
    """Four numbers of four bytes for each of 7.6 billion parameters."""
    assert 16 * 7.6e9 < needed() < 16 * 7.6e9 + 40e9


def test_passes_grow_with_rows_and_pairs_have_two():
    one, two = (needed(f"--actor.micro_batch_examples={count}") for count in (1, 2))
    assert needed(recipe="dpo") == two > one


def test_an_adapter_needs_no_moments_of_the_model():
    assert needed("--actor.lora={rank: 8}") < needed() - 11.5 * 7.6e9


def test_what_does_not_fit_is_refused_with_settings_that_do():
    memory, plan = memory_of("--actor.micro_batch_examples=8", num_devices=8)
    with pytest.raises(UserError, match=r"Qwen2\.5-7B, 7\.62 billion parameters, does not fit") as raised:
        memory.check(plan)
    assert raised.value.hint is not None
    fits = re.findall(r"^  (--.*): [\d.]+ GiB$", raised.value.hint, flags=re.MULTILINE)
    assert fits
    for line in fits:
        flags = [f"{key}={value}" for key, value in re.findall(r"(--\S+) (\S+)", line)]
        changed, placed = memory_of("--actor.micro_batch_examples=8", *flags, num_devices=8)
        changed.check(placed)

"""What ranks hold: against a real model's parameters and autograd's own records, and refusals with numbers."""

from typing import Any

import pytest
import torch

from rlinf import jobs
from rlinf.config.load import load_config
from rlinf.config.overrides import parse_overrides
from rlinf.config.reasoning import ReasoningConfig
from rlinf.errors import UserError
from rlinf.machine import Machine
from rlinf.planning.memory import check_memory, rank_memory, replicated_job, shape_of
from rlinf_sched.cluster import Cluster
from rlinf_sched.derive import Lengths
from rlinf_sched.derive.replicated import ReplicatedJob, trainer_memory
from rlinf_sched.derive.shapes import ModelShape
from rlinf_sched.plan import Plan, StagePlan
from rlinf_workers.models.sequences import SequenceBatch, completion_logprobs

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_heads": 4,
    "num_kv_heads": 2,
    "vocab_size": 300,
}

WIDE: dict[str, Any] = {**SMALL, "hidden_size": 4096}


def config_of(*overrides: str) -> ReasoningConfig:
    config = load_config("sort-grpo", parse_overrides(overrides))
    assert isinstance(config, ReasoningConfig)
    return config


def test_what_a_backward_pass_keeps_is_what_autograd_records() -> None:
    """Every tensor that autograd saves, by storage, once; parameters aside."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    names = {"num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads"}
    config = Qwen2Config(num_hidden_layers=6, **{names.get(key, key): value for key, value in SMALL.items()})
    config._attn_implementation = "sdpa"
    model = Qwen2ForCausalLM(config)
    group_size, prompt, limit = 8, 16, 48
    batch = SequenceBatch(
        prompt_ids=torch.zeros(1, prompt, dtype=torch.int64),
        prompt_mask=torch.ones(1, prompt, dtype=torch.int64),
        completion_ids=torch.zeros(group_size, limit, dtype=torch.int64),
        loss_mask=torch.ones(group_size, limit),
    )
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = completion_logprobs(model, batch, 1.0).sum()
    shape = ModelShape(name="small", num_layers=6, head_dim=16, qkv_bias=True, **SMALL)
    assert shape.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    lengths = Lengths(mean_tokens=limit, limit_tokens=limit, prompt_tokens=prompt, group_size=group_size)
    counted = trainer_memory(shape, ReplicatedJob(lengths=lengths, num_groups=1), 1).work
    assert loss.requires_grad
    assert counted / sum(saved.values()) == pytest.approx(1.1, abs=0.2)  # the gradients of the logits come on top


def test_a_rank_has_weights_its_shards_gradients_and_two_moments() -> None:
    config = config_of("--actor.num_shards=8", "--warm_start=null", "--rollout.num_prompts=64")
    shape = shape_of(config, 13)
    assert shape is not None
    copy = 4 * shape.num_parameters
    for num_ranks, num_buffers in ((1, 8), (4, 2), (8, 1)):
        memory = rank_memory(shape, replicated_job(config), {"actor": num_ranks}, has_reference=False)
        assert memory["actor"].state == (1 + num_buffers + 2) * copy
        assert memory["rollout"].state == copy
    warm = config_of("--actor.num_shards=8")
    assert trainer_memory(shape, replicated_job(warm), 8).state == (1 + 1 + 4) * copy  # two optimizers


def test_a_model_that_cannot_fit_is_refused_before_anything_starts() -> None:
    config = config_of("--cluster.num_devices=2")
    jobs.prepare(config, Machine(num_cpus=2, memory_bytes=16 << 30))
    with pytest.raises(UserError) as caught:
        jobs.prepare(config, Machine(num_cpus=2, memory_bytes=1 << 30))
    message = str(caught.value)
    assert "does not fit: the 4 processes need about" in message
    assert "and this machine has 1.0" in message
    assert "- actor " in message
    assert "optimizer" in message


def test_on_gpus_the_largest_turn_counts_and_what_stays_beside_it() -> None:
    config = config_of("--warm_start=null")
    shape = ModelShape(name="wide", num_layers=2, head_dim=64, **WIDE)
    job = replicated_job(config)
    memory = rank_memory(shape, job, {"actor": 1}, has_reference=False)
    rollout, actor = memory["rollout"].peak(64), memory["actor"].peak(64)

    def check(memory_bytes: int, *, offload: bool) -> None:
        stages = tuple(
            StagePlan(stage=name, devices=(0,), num_ranks=1, granularity=0, offload=offload, turn=turn)
            for turn, name in enumerate(("rollout", "actor"))
        )
        cluster = Cluster.cuda_nodes(1, 1, name="fake", memory_bytes=memory_bytes)
        check_memory(config, shape, Plan(flow="grpo", mode="collocated", stages=stages, reason=""), cluster, 1 << 40)

    check(max(rollout, actor), offload=True)
    with pytest.raises(UserError, match=r"a device needs about .* and fake \(device 0\) has"):
        check(max(rollout, actor) - 1, offload=True)
    together = actor + memory["rollout"].state
    check(together, offload=False)
    with pytest.raises(UserError):
        check(together - 1, offload=False)

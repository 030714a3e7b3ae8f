"""What ranks hold: against a real model's parameters and autograd's own records, and refusals with numbers."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlinf import jobs
from rlinf.config.load import load_config
from rlinf.config.overrides import parse_overrides
from rlinf.config.reasoning import ReasoningConfig
from rlinf.errors import UserError
from rlinf.jobs.reasoning.flow import job_shape
from rlinf.jobs.reasoning.memory import (
    ReasoningMemory,
    kept_weights,
    loads_of,
    partner_shapes,
    rank_memory,
    reference_shape,
    shape_of,
    stored_bytes,
)
from rlinf.jobs.reasoning.planning import reasoning_loads, reasoning_problem
from rlinf.machine import Machine
from rlinf.planning import memory as memory_of_plans
from rlinf.planning.memory import Load, at_once_place, device_place
from rlinf_algos import token_logprobs
from rlinf_sched import Cluster, Plan, StagePlan, plan_for_mode
from rlinf_sched.derive import Adapter, JobShape, Lengths, ModelShape, RankMemory, find_model, forward_memory
from rlinf_sched.derive.memory.activations import layers_bytes, packed_pass, passes_of_micro_batch
from rlinf_workers.models.packed import pack_without_padding, packed_logits
from rlinf_workers.models.sequences import SequenceBatch, completion_logits
from rlinf_workers.plugins import TRAINERS
from rlinf_workers.roles import Prompt
from rlinf_workers.roles.records.language import SampleGroup
from rlinf_workers.trainers.megatron.memory import micro_batch_pass
from rlinf_workers.trainers.megatron.options import MegatronOptions

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_heads": 4,
    "num_kv_heads": 2,
    "vocab_size": 300,
}

WIDE: dict[str, Any] = {**SMALL, "hidden_size": 4096}

REPLICATED = TRAINERS.spec("replicated")


@pytest.fixture
def without_cuda(monkeypatch) -> None:
    """GPUs with less memory than CUDA itself takes."""
    monkeypatch.setattr(memory_of_plans, "CONTEXT_BYTES", 0)
    monkeypatch.setattr(memory_of_plans, "DEVICE_BYTES", 0)
    monkeypatch.setattr(memory_of_plans, "COMMUNICATOR_BYTES", 0)


def config_of(*overrides: str) -> ReasoningConfig:
    config = load_config("sort-grpo", parse_overrides(overrides))
    assert isinstance(config, ReasoningConfig)
    return config


def test_a_micro_batch_has_at_most_the_groups_of_a_shard():
    lengths = Lengths(mean_tokens=10, limit_tokens=20, group_size=4)
    job = JobShape(lengths=lengths, num_groups=8, num_shards=2, micro_batch_groups=16)
    assert passes_of_micro_batch(job) == passes_of_micro_batch(replace(job, micro_batch_groups=4))


LATENT = {
    **{"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "n_shared_experts": 1},
    **{"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "intermediate_size": 288, "num_kv_heads": 4},
    **{"q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "head_dim": 16}


@pytest.mark.parametrize(
    ("kind", "dtype", "more"),
    [
        ("qwen2", "float32", {}),
        ("qwen2", "bfloat16", {}),
        ("llama", "float32", {}),
        ("qwen3", "bfloat16", {"head_dim": 16}),
        ("qwen3_moe", "float32", EXPERTS),
        ("qwen3_moe", "bfloat16", EXPERTS),
        ("deepseek_v3", "float32", LATENT),
    ],
)
@pytest.mark.parametrize("is_packed", [False, True], ids=["padded", "packed"])
def test_what_a_backward_pass_keeps_is_what_autograd_records(
    kind: str, dtype: str, more: dict[str, Any], is_packed: bool
) -> None:
    """Every tensor that autograd saves, by storage, once; parameters aside."""
    from transformers import AutoConfig, AutoModelForCausalLM

    names = {"num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads"}
    values = {names.get(key, key): value for key, value in {**SMALL, "num_hidden_layers": 6, **more}.items()}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **values), dtype=getattr(torch, dtype))
    group_size, prompt, limit = 8, 16, 48
    batch = SequenceBatch(
        prompt_ids=torch.zeros(2, prompt, dtype=torch.int64),
        prompt_mask=torch.tensor([[0, 0] + [1] * (prompt - 2), [1] * prompt]),
        completion_ids=torch.zeros(2 * group_size, limit, dtype=torch.int64),
        loss_mask=torch.ones(2 * group_size, limit),
    )

    def run() -> torch.Tensor:
        return (
            packed_logits(model, pack_without_padding(groups_of(batch)))
            if is_packed
            else completion_logits(model, batch)
        )

    recorded = recorded_bytes(model, run)
    shape = ModelShape.from_config({"model_type": kind, **values})
    assert shape.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    lengths = Lengths(mean_tokens=limit, limit_tokens=limit, prompt_tokens=prompt, group_size=group_size)
    job = JobShape(lengths=lengths, num_groups=2, micro_batch_groups=2, dtype_bytes={"float32": 4}.get(dtype, 2))
    row = packed_pass(replace(job, max_tokens_per_micro_batch=10_000))
    assert row is not None
    counted = sum(layers_bytes(shape, job, call) for call in ((row,) if is_packed else passes_of_micro_batch(job)))
    assert counted / recorded == pytest.approx(1.0, abs=0.05)  # the last completion token is not computed


def groups_of(batch: SequenceBatch) -> list[SampleGroup]:
    """The groups of a micro-batch whose completions are equally long."""
    num_completions = len(batch.completion_ids) // len(batch.prompt_ids)
    return [
        SampleGroup(
            prompt=Prompt(index=index, token_ids=batch.prompt_ids[index], reference_answer=""),
            completion_ids=ids,
            loss_mask=torch.ones(ids.shape),
            rollout_logprobs=torch.zeros(ids.shape),
            policy_version=0,
        )
        for index, ids in enumerate(batch.completion_ids.split(num_completions))
    ]


def recorded_bytes(model: torch.nn.Module, run: Callable[[], object]) -> int:
    """What autograd saves while it runs, by storage, once; parameters aside."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def write_config(folder: Path, kind: str, **more: Any) -> ModelShape:
    from transformers import AutoConfig

    names = {"num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads"}
    values = {names.get(key, key): value for key, value in {**SMALL, "num_hidden_layers": 6, **more}.items()}
    AutoConfig.for_model(kind, **values).save_pretrained(folder)
    return ModelShape.from_folder(folder)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("targets", [None, ("q_proj", "v_proj"), ("o_proj", "gate_proj")])
def test_a_backward_pass_through_an_adapter_keeps_less(tmp_path, dtype: str, targets: tuple[str, ...] | None) -> None:
    from rlinf_workers.models import LoraSettings, ModelSettings, find_targets
    from rlinf_workers.models.lora import LoraModel
    from rlinf_workers.models.trainable import TokenModel

    shape = write_config(tmp_path, "qwen2", num_hidden_layers=16)  # no gradient goes into the first one's attention
    settings = ModelSettings(folder=str(tmp_path), has_weights=False, dtype=dtype)
    ends, _ = find_targets(str(tmp_path), targets or ["all-linear"])
    lora = LoraSettings(rank=4, alpha=8.0, targets=ends, base_digest="")
    model = LoraModel(TokenModel(settings, 1.0), settings, lora).build(torch.device("cpu"))
    batch = SequenceBatch(
        prompt_ids=torch.zeros(2, 16, dtype=torch.int64),
        prompt_mask=torch.tensor([[0, 0] + [1] * 14, [1] * 16]),
        completion_ids=torch.zeros(16, 48, dtype=torch.int64),
        loss_mask=torch.ones(16, 48),
    )
    lengths = Lengths(mean_tokens=48, limit_tokens=48, prompt_tokens=16, group_size=8)
    adapter = Adapter(rank=4, targets=targets)
    dtype_bytes = {"float32": 4}.get(dtype, 2)
    job = JobShape(lengths=lengths, num_groups=2, micro_batch_groups=2, dtype_bytes=dtype_bytes, adapter=adapter)
    counted = sum(layers_bytes(shape, job, call) for call in passes_of_micro_batch(job))
    whole = sum(layers_bytes(shape, replace(job, adapter=None), call) for call in passes_of_micro_batch(job))
    recorded = recorded_bytes(model, lambda: completion_logits(model, batch))
    assert counted / recorded == pytest.approx(1.0, abs=0.05)
    assert dtype == "bfloat16" or counted < 0.95 * whole


@pytest.mark.parametrize(
    ("kind", "more", "dtype"),
    [
        ("qwen2", {}, "float32"),
        ("qwen2", {}, "bfloat16"),
        ("qwen3", {"head_dim": 16}, "bfloat16"),
        ("qwen3_moe", EXPERTS, "float32"),
        ("deepseek_v3", LATENT, "float32"),
    ],
)
@pytest.mark.parametrize("is_packed", [False, True], ids=["padded", "packed"])
def test_what_megatrons_layers_keep_is_what_autograd_records(
    tmp_path, kind: str, more: dict[str, Any], dtype: str, is_packed: bool
) -> None:
    pytest.importorskip("megatron.core")  # tools/environment.sh installs it
    from rlinf_workers.models import ModelSettings
    from rlinf_workers.models.trainable import TokenModel
    from rlinf_workers.testing.backends import trial_worker
    from rlinf_workers.trainers import BackendSettings, OptimizerSettings
    from rlinf_workers.trainers.megatron.parallel import disconnect

    shape = write_config(tmp_path, kind, **{"max_position_embeddings": 64, **more})
    group_size, prompt, limit = 8, 16, 48
    options: dict[str, Any] = {"compute_dtype": dtype}
    settings = BackendSettings(name="megatron", options=options)
    model = TokenModel(ModelSettings(folder=str(tmp_path), has_weights=False), 1.0)
    backend: Any = settings.make(model, trial_worker(), OptimizerSettings(learning_rate=0.1))
    batch = SequenceBatch(
        prompt_ids=torch.randint(1, 300, (2, prompt)),
        prompt_mask=torch.ones(2, prompt, dtype=torch.int64),
        completion_ids=torch.randint(1, 300, (2 * group_size, limit)),
        loss_mask=torch.ones(2 * group_size, limit),
    )
    if is_packed:
        batch = pack_without_padding(groups_of(batch))
    try:
        backend.begin(1)
        loss = lambda answers: (answers.logprobs.sum(), [1.0])  # noqa: E731
        recorded = recorded_bytes(backend._model, lambda: backend.backward(0, batch, loss))
    finally:
        disconnect()
    lengths = Lengths(mean_tokens=limit, limit_tokens=limit, prompt_tokens=prompt, group_size=group_size)
    budget = 2 * (prompt + group_size * limit) if is_packed else None
    job = JobShape(
        lengths=lengths,
        num_groups=2,
        trainer_options=options,
        micro_batch_groups=2,
        max_tokens_per_micro_batch=budget,
        on_gpu=False,
    )
    counted = micro_batch_pass(shape, job, MegatronOptions(**options))
    dtype_bytes = 2 if dtype == "bfloat16" else 4
    tokens, h = budget or 2 * group_size * (prompt + limit), shape.hidden_size
    head = 2 * group_size * limit * (shape.vocab_size + h) * dtype_bytes + tokens * h * (8 + dtype_bytes)
    assert (counted.kept_bytes + head) / recorded == pytest.approx(1.0, abs=0.05)


def test_a_packed_micro_batch_is_counted_by_its_budget() -> None:
    shape = ModelShape(name="small", num_layers=6, head_dim=16, qkv_bias=True, **SMALL)
    lengths = Lengths(mean_tokens=40, limit_tokens=48, prompt_tokens=16, group_size=8)
    job = JobShape(lengths=lengths, num_groups=8, micro_batch_groups=8)
    budgets = [replace(job, max_tokens_per_micro_batch=n) for n in (800, 1600)]
    work = [REPLICATED.rank_memory(shape, budget, 1).activations for budget in budgets]
    assert 1.7 < work[1] / work[0] < 2.1
    sizes = {
        (on_gpu, n): forward_memory(shape, replace(job, max_tokens_per_micro_batch=n, on_gpu=on_gpu)).activations
        for on_gpu in (False, True)
        for n in (200, 400, 800)
    }
    assert sizes[False, 200] < sizes[False, 400] == sizes[False, 800]  # no pass has tokens of two groups
    assert sizes[True, 200] < sizes[True, 400] < sizes[True, 800]


def test_a_backward_pass_holds_back_a_gradient_of_every_layer() -> None:
    """No weight gets its gradient before the completions' pass is through all layers, so a copy of them waits."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    names = {"num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads"}
    config = Qwen2Config(num_hidden_layers=3, **{names.get(key, key): value for key, value in SMALL.items()})
    model = Qwen2ForCausalLM(config)
    events: list[str] = []
    first, *_ = layers = list(model.model.layers)
    first.register_full_backward_hook(lambda *_: events.append("through"))
    for parameter in (parameter for layer in layers for parameter in layer.parameters()):
        parameter.register_post_accumulate_grad_hook(lambda _: events.append("gradient"))
    batch = SequenceBatch(
        prompt_ids=torch.zeros(1, 2, dtype=torch.int64),
        prompt_mask=torch.ones(1, 2, dtype=torch.int64),
        completion_ids=torch.zeros(2, 2, dtype=torch.int64),
        loss_mask=torch.ones(2, 2),
    )
    token_logprobs(completion_logits(model, batch), batch.completion_ids).sum().backward()
    assert events[0] == "through"
    shape = ModelShape(name="small", num_layers=3, head_dim=16, qkv_bias=True, **SMALL)
    lengths = Lengths(mean_tokens=2, limit_tokens=2, prompt_tokens=2, group_size=2)
    work = REPLICATED.rank_memory(shape, JobShape(lengths=lengths, num_groups=1), 1).work()
    heads = 2 * 4 * shape.vocab_size * shape.hidden_size
    assert 4 * shape.num_parameters + heads < work < 4.3 * shape.num_parameters + heads


def test_a_sft_warm_up_keeps_more_than_a_small_micro_batch() -> None:
    shape = shape_of(config_of(), 13)
    assert shape is not None
    flags = ("--actor.micro_batch_groups=1", "--algorithm.group_size=2")
    job, without = job_shape(config_of(*flags)), job_shape(config_of(*flags, "--sft_warm_up=null"))
    assert job.sft_warm_up_sequences == 128
    sizes = [REPLICATED.rank_memory(shape, one, 1).work() for one in (job, without)]
    assert sizes[0] > 10 * sizes[1]


def test_a_made_model_has_the_parameters_that_are_counted(tmp_path) -> None:
    from rlinf.tasks.language import write_model_folder
    from rlinf_workers.models import ModelSettings
    from rlinf_workers.models.language_model import build_model

    config = config_of()
    assert config.model.architecture is not None
    write_model_folder(tmp_path, config.model.architecture, "0123456789", "float32")
    model = build_model(ModelSettings(folder=str(tmp_path), has_weights=False), torch.device("cpu"))
    shape = shape_of(config, 13)
    assert shape is not None
    assert shape.num_parameters == sum(parameter.numel() for parameter in model.parameters())


def test_a_teacher_is_counted_with_its_own_shape(tmp_path) -> None:
    names = {"num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads"}
    large = {names.get(key, key): value for key, value in WIDE.items()} | {"num_hidden_layers": 9}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", **large}))
    config = config_of("--algorithm.name=distillation", f"--reference.path={tmp_path}")
    small = shape_of(config, 13)
    assert small is not None
    teacher = reference_shape(config, small)
    assert teacher is not None
    assert (teacher.num_layers, teacher.hidden_size) == (9, 4096)
    memory = rank_memory(config, small, job_shape(config), {})
    assert memory["reference"].weights == 4 * teacher.num_parameters > 100 * memory["actor"].weights
    assert reference_shape(config_of("--algorithm.kl_coef=0.1"), small) is small
    assert reference_shape(config_of(), small) is None


def test_an_evaluation_may_have_more_sequences_at_once_than_a_step() -> None:
    stages = (StagePlan(stage="rollout", devices=(0,), num_ranks=1, granularity=0, offload=False, turn=0),)
    plan = Plan(flow="grpo", mode="collocated", stages=stages, reason="")
    flags = ("--rollout.num_prompts=16", "--algorithm.group_size=4")
    for num_held_out, expected in ((8, 16), (500, 125), (4000, 128)):
        config = config_of(*flags, f"--task.num_held_out={num_held_out}")
        shape = shape_of(config, 13)
        assert shape is not None
        (load,) = loads_of(config, shape, plan)
        assert load.num_items == expected


REFILL = ("--rollout.engine_options={refill: true}", "--rollout.num_prompts=16", "--algorithm.group_size=4")


def test_rows_that_are_refilled_hold_all_sequences_of_a_replica() -> None:
    """Neither the plan's granularity nor the batches' 512 sequences bound them."""
    rollout = StagePlan(stage="rollout", devices=(0, 1), num_ranks=2, granularity=1, offload=False, turn=0)
    plan = Plan(flow="grpo", mode="collocated", stages=(rollout,), reason="")
    for num_held_out, num_rows in ((8, 32), (100, 64), (4000, 2048)):
        config = config_of(*REFILL, f"--task.num_held_out={num_held_out}")
        shape = shape_of(config, 13)
        assert shape is not None
        for load in loads_of(config, shape, plan, on_gpu=False):
            tokens = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
            of_token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * 4
            assert load.memory.kv_pool == num_rows * -(-tokens // 16) * 16 * of_token
            assert load.memory.state == load.memory.weights + load.memory.kv_pool, "it stays between turns"


def test_a_cache_of_free_memory_takes_no_more_than_its_share() -> None:
    stages = tuple(
        StagePlan(stage=name, devices=(0,), num_ranks=1, granularity=0, offload=False, turn=0)
        for name in ("rollout", "actor")
    )
    plan = Plan(flow="grpo", mode="collocated", stages=stages, reason="")
    lengths = ("--rollout.max_new_tokens=496", "--model.architecture.max_positions=512")
    flags = (*REFILL, "--task.num_held_out=20000", "--sft_warm_up=null", *lengths)
    config = config_of(*flags)
    shape = shape_of(config, 13)
    assert shape is not None
    for has, on_gpu, share in ((4 << 30, True, 0.8), (1 << 30, False, 0.25)):
        load = loads_of(config, shape, plan, on_gpu=on_gpu, device_bytes=4 << 30, host_bytes=1 << 30)[0]
        most = share * (has - load.memory.weights)
        row = 512 * 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * 4
        assert most - row < load.memory.kv_pool <= most
    cluster = Cluster.cpu_slots(1, memory_bytes=1 << 30)
    greedy = config_of(*flags, "--rollout.engine_options={refill: true, cache_share: 0.9}")
    with pytest.raises(UserError) as error:
        ReasoningMemory(greedy, shape, cluster, 4 << 30).check(plan)
    assert "KV cache 3.6" in str(error.value)
    (share,) = re.findall(r"--rollout.engine_options.cache_share ([\d.]+)", error.value.hint or "")
    modest = config_of(*flags, f"--rollout.engine_options={{refill: true, cache_share: {share}}}")
    ReasoningMemory(modest, shape, cluster, 4 << 30).check(plan)


@pytest.mark.parametrize(
    ("share", "reason"),
    [
        ("0", "is not a fraction; use one above 0"),
        ("1.5", "is not a fraction"),
        ("true", "expected `float"),
        ("half", "got `str"),
    ],
)
def test_a_share_of_free_memory_is_a_share(share: str, reason: str) -> None:
    with pytest.raises(UserError, match=rf"rollout.engine_options.cache_share=.*{reason}"):
        config_of(f"--rollout.engine_options={{refill: true, cache_share: {share}}}")


def test_no_worker_took_more_than_was_counted() -> None:
    results = Path(__file__).parents[3] / "benchmarks" / "results" / "memory.json"
    for name, case in json.loads(results.read_text())["cases"].items():
        for worker, row in case["workers"].items():
            assert row["measured_bytes"] <= row["counted_bytes"] < 1.4 * row["measured_bytes"], (name, worker)


def test_a_rank_has_weights_its_shards_gradients_and_two_moments() -> None:
    config = config_of("--actor.num_shards=8", "--sft_warm_up=null", "--rollout.num_prompts=64")
    shape = shape_of(config, 13)
    assert shape is not None
    copy = 4 * shape.num_parameters
    for num_ranks, num_buffers in ((1, 8), (4, 2), (8, 1)):
        memory = rank_memory(config, shape, job_shape(config), {"actor": num_ranks})
        assert memory["actor"].state == (1 + num_buffers + 2) * copy
        assert memory["rollout"].state == copy
    warm = config_of("--actor.num_shards=8")
    memory_of_rank = REPLICATED.rank_memory(shape, job_shape(warm), 8)
    assert memory_of_rank.state == (1 + 1 + 2) * copy  # one optimizer after the other


def test_weights_that_generate_in_half_the_bytes_take_half_of_them() -> None:
    shape = ModelShape(name="small", num_layers=2, head_dim=16, **SMALL)
    plain, half = (
        rank_memory(one, shape, job_shape(one), {}) for one in (config_of(), config_of("--rollout.dtype=bfloat16"))
    )
    assert half["actor"] == plain["actor"]
    assert 2 * half["rollout"].weights == plain["rollout"].weights
    assert 2 * half["rollout"].kv_cache_of_item == plain["rollout"].kv_cache_of_item


def test_weights_in_fp8_take_a_byte_and_so_do_their_syncs() -> None:
    """The embeddings and norms of this shape stay in float32."""
    shape = ModelShape(name="small", num_layers=2, head_dim=16, **SMALL)
    plain, quantized = config_of(), config_of("--rollout.quantization=fp8")
    linear = shape.num_linear_parameters
    scales = 4 * -(-linear // 128**2)
    expected = 4 * (shape.num_parameters - linear) + linear + scales
    before, after = (rank_memory(one, shape, job_shape(one), {}) for one in (plain, quantized))
    assert after["rollout"].weights == expected < before["rollout"].weights / 2
    assert after["rollout"].kv_cache_of_item == before["rollout"].kv_cache_of_item
    assert after["rollout"].activations > 0, "a layer that computes"
    assert after["actor"] == before["actor"]
    versions = kept_weights(quantized, shape, 1, on_gpu=False).host_bytes
    assert versions == 2 * expected, "a version, and the copy that is quantized"


def test_planned_syncs_move_the_quantized_bytes_or_the_adapter() -> None:
    def synced_bytes(*overrides: str) -> int:
        lines = ["--model.path=Qwen/Qwen2.5-1.5B", "--model.architecture=null", "--sft_warm_up=null"]
        lines += ["--cluster.num_devices=2", "--model.dtype=bfloat16", *overrides]
        config = load_config("sort-grpo", parse_overrides(lines))
        assert isinstance(config, ReasoningConfig)
        problem = reasoning_problem(config, 2, gpu="H100", env_step_s=None)
        return problem.synced_bytes(problem.flow.weight_edges[0])

    shape = find_model("Qwen2.5-1.5B")
    linear = shape.num_linear_parameters
    expected = 2 * (shape.num_parameters - linear) + linear + 4 * -(-linear // 128**2)
    assert synced_bytes("--rollout.quantization=fp8") == expected
    merged = synced_bytes()
    assert merged == 2 * shape.num_parameters
    adapter, lora = 2 * Adapter(rank=16).num_parameters(shape), "--actor.lora.rank=16"
    for engine in ("huggingface", "sglang", "vllm"):
        assert synced_bytes(lora, f"--rollout.engine={engine}") == adapter < merged / 20
    assert synced_bytes(lora, "--rollout.quantization=fp8") == expected, "it is merged, then quantized"


def test_a_checkpoints_copy_is_shared_out_and_counted_with_the_process() -> None:
    config = config_of("--actor.num_shards=4", "--sft_warm_up=null")
    shape = shape_of(config, 13)
    assert shape is not None
    copy = 4 * shape.num_parameters
    for backend in ("replicated", "megatron", "fsdp2"):
        job, spec = job_shape(config, on_gpu=False), TRAINERS.spec(backend)
        one, four = (spec.rank_memory(shape, job, num_ranks) for num_ranks in (1, 4))
        assert one.host_copy == 3 * copy, "weights and two moments"
        assert 3 * copy / 4 <= four.host_copy < 1.2 * copy
        without = Load(group="actor", memory=replace(one, host_copy=0), num_items=1, offload=False)
        assert replace(without, memory=one).process - without.process == 3 * copy


def test_ranks_that_share_a_model_out_have_parts_of_all_but_the_work() -> None:
    flags = ["--actor.num_shards=8", "--actor.backend=fsdp2", "--sft_warm_up=null", "--algorithm.kl_coef=0.1"]
    config = config_of(*flags)
    shape = shape_of(config, 13)
    assert shape is not None
    copy = 4 * shape.num_parameters
    for num_ranks in (1, 2, 8):
        memory = rank_memory(config, shape, job_shape(config), {"actor": num_ranks})
        part = -(-copy // num_ranks)
        assert (memory["actor"].weights, memory["actor"].gradients, memory["actor"].optimizer) == (part, part, 2 * part)
        assert memory["rollout"].state == memory["reference"].state == copy
    with pytest.raises(
        UserError, match=r"backend_options.dtype: fsdp2 has no option of that name; known: compile, compute_dtype"
    ):
        jobs.prepare(
            config_of(*flags, "--actor.backend_options={dtype: float32}"), Machine(num_cpus=2, memory_bytes=16 << 30)
        )
    for options in ("{compute_dtype: bfloat16}", "{recompute: true}"):
        changed = config_of(*flags, f"--actor.backend_options={options}")
        cheaper = rank_memory(changed, shape, job_shape(changed), {})
        dearer = rank_memory(config, shape, job_shape(config), {})
        assert cheaper["actor"].work() < dearer["actor"].work()


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


@pytest.mark.usefixtures("without_cuda")
def test_settings_that_a_refusal_names_fit() -> None:
    """Each of them, given as it stands there; and no key of it is there for nothing."""
    flags = ["--sft_warm_up=null", "--actor.num_shards=2", "--actor.micro_batch_groups=8"]
    shape = ModelShape(name="wide", num_layers=4, head_dim=64, **WIDE)
    stages = tuple(
        StagePlan(stage=name, devices=(0, 1), num_ranks=2, granularity=0, offload=True, turn=turn)
        for turn, name in enumerate(("rollout", "actor"))
    )
    plan = Plan(flow="grpo", mode="collocated", stages=stages, reason="")

    def refusal(memory_bytes: int, *overrides: str) -> str:
        cluster = Cluster.cuda_nodes(1, 2, name="fake", memory_bytes=memory_bytes)
        try:
            ReasoningMemory(config_of(*flags, *overrides), shape, cluster, 1 << 40).check(plan)
        except UserError as error:
            return str(error)
        return ""

    lines: list[str] = []
    needed = max(load.peak for load in loads_of(config_of(*flags), shape, plan))
    for share in (0.99, 0.8, 0.6, 0.4):
        memory_bytes = round(share * needed)
        _, _, listing = refusal(memory_bytes).partition("any of these fits:\n")
        for line in listing.splitlines():
            overrides = line.partition(":")[0].split("--")[1:]
            settings = [f"--{override.strip().replace(' ', '=')}" for override in overrides]
            assert not refusal(memory_bytes, *settings), line
            assert all(refusal(memory_bytes, *(one for one in settings if one != left)) for left in settings), line
            lines.append(line)
    assert any("--actor.backend fsdp2" in line for line in lines), lines
    assert any("--model.dtype bfloat16" in line for line in lines), lines
    assert "no other number of groups, precision or backend fits" in refusal(1 << 20)


@pytest.mark.usefixtures("without_cuda")
def test_a_refusal_names_larger_cuts_of_megatron_that_the_model_allows() -> None:
    flags = ["--sft_warm_up=null", "--actor.backend=megatron", "--actor.micro_batch_groups=1", "--model.dtype=float32"]
    flags += ["--actor.backend_options={recompute: true}", "--mode=collocated"]
    shape = ModelShape(name="wide", num_layers=8, head_dim=64, **WIDE)  # two KV groups
    stages = tuple(
        StagePlan(stage=name, devices=(0, 1, 2, 3), num_ranks=2, granularity=0, offload=True, turn=turn)
        for turn, name in enumerate(("rollout", "actor"))
    )
    plan = Plan(flow="grpo", mode="collocated", stages=stages, reason="")
    needed = {load.group: load.peak for load in loads_of(config_of(*flags), shape, plan)}
    cluster = Cluster.cuda_nodes(1, 4, name="fake", memory_bytes=round(0.6 * needed["actor"]))
    with pytest.raises(UserError) as caught:
        ReasoningMemory(config_of(*flags), shape, cluster, 1 << 40).check(plan)
    lines = [line.strip() for line in str(caught.value).splitlines() if "tensor_parallel" in line]
    assert lines and lines[0].startswith("--actor.backend_options.tensor_parallel 2:")
    assert needed["rollout"] < 0.6 * needed["actor"], "the actor is what does not fit"


@pytest.mark.usefixtures("without_cuda")
def test_on_gpus_the_largest_turn_counts_and_what_stays_beside_it() -> None:
    config = config_of("--sft_warm_up=null")
    shape = ModelShape(name="wide", num_layers=2, head_dim=64, **WIDE)
    job = job_shape(config)
    memory = rank_memory(config, shape, job, {"actor": 1})
    mailbox = memory["rollout"].weights  # a version that is published and not yet taken
    rollout, actor = memory["rollout"].peak(64) + mailbox, memory["actor"].peak(64) + mailbox

    def check(memory_bytes: int, *, offload: bool, config: ReasoningConfig = config) -> None:
        stages = tuple(
            StagePlan(stage=name, devices=(0,), num_ranks=1, granularity=0, offload=offload, turn=turn)
            for turn, name in enumerate(("rollout", "actor"))
        )
        cluster = Cluster.cuda_nodes(1, 1, name="fake", memory_bytes=memory_bytes)
        plan = Plan(flow="grpo", mode="collocated", stages=stages, reason="")
        ReasoningMemory(config, shape, cluster, 1 << 40).check(plan)

    check(max(rollout, actor), offload=True)
    with pytest.raises(UserError, match=r"a device needs about .* and fake \(device 0\) has"):
        check(max(rollout, actor) - 1, offload=True)
    through_host = config_of("--sft_warm_up=null", "--cluster.weight_sync=shared")
    check(max(rollout, actor) - mailbox, offload=True, config=through_host)
    by_streams = config_of("--sft_warm_up=null", "--cluster.weight_sync=streams")
    copied = max(rollout, actor) - mailbox + 4 * shape.num_parameters  # as the actor has it, in float32
    check(copied, offload=True, config=by_streams)
    with pytest.raises(UserError):
        check(copied - 1, offload=True, config=by_streams)
    option = "--cluster.weight_sync_options.device_memory=false"
    over_host = config_of("--sft_warm_up=null", "--cluster.weight_sync=streams", option)
    check(max(rollout, actor) - mailbox, offload=True, config=over_host)
    together = actor + memory["rollout"].state
    check(together, offload=False)
    with pytest.raises(UserError):
        check(together - 1, offload=False)


APART = tuple(
    StagePlan(stage=name, devices=(device,), num_ranks=1, granularity=0, offload=False, turn=device)
    for device, name in enumerate(("rollout", "actor"))
)


def overlapping(max_staleness: int, *more: str) -> tuple[ReasoningConfig, ModelShape]:
    flags = ("--sft_warm_up=null", "--mode=disaggregated", f"--algorithm.max_staleness={max_staleness}")
    return config_of(*flags, *more), ModelShape(name="wide", num_layers=2, head_dim=64, **WIDE)


@pytest.mark.usefixtures("without_cuda")
@pytest.mark.parametrize("max_staleness", [0, 1, 4])
def test_a_gpu_that_trains_holds_a_version_for_each_step_under_way(max_staleness: int) -> None:
    config, shape = overlapping(max_staleness)
    actor = rank_memory(config, shape, job_shape(config), {"actor": 1})["actor"].peak(64)
    needed = actor + (max_staleness + 1) * 4 * shape.num_parameters

    def check(memory_bytes: int) -> None:
        cluster = Cluster.cuda_nodes(1, 2, name="fake", memory_bytes=memory_bytes)
        plan = Plan(flow="grpo", mode="disaggregated", stages=APART, reason="")
        ReasoningMemory(config, shape, cluster, 1 << 40).check(plan)

    check(needed)
    with pytest.raises(UserError, match=r"a device needs about .* and fake \(device 1\) has"):
        check(needed - 1)


@pytest.mark.usefixtures("without_cuda")
def test_versions_that_do_not_fit_are_named_with_settings_that_do() -> None:
    config, shape = overlapping(4)
    actor = rank_memory(config, shape, job_shape(config), {"actor": 1})["actor"].peak(64)
    cluster = Cluster.cuda_nodes(1, 2, name="fake", memory_bytes=actor + 2 * 4 * shape.num_parameters)
    plan = Plan(flow="grpo", mode="disaggregated", stages=APART, reason="")
    with pytest.raises(UserError) as error:
        ReasoningMemory(config, shape, cluster, 1 << 40).check(plan)
    size = 5 * 4 * shape.num_parameters / 2**30
    assert f"actor: 5 versions of the weights, kept until the engines have received them: {size:.2f} GiB" in str(
        error.value
    )
    hint = error.value.hint or ""
    assert "--cluster.weight_sync shared" in hint and "--algorithm.max_staleness 1" in hint
    for changed in (overlapping(1)[0], overlapping(4, "--cluster.weight_sync=shared")[0]):
        ReasoningMemory(changed, shape, cluster, 1 << 40).check(plan)


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_versions_in_host_memory_are_counted_there(kind: str) -> None:
    config, shape = overlapping(3, "--cluster.weight_sync=shared")
    plan = Plan(flow="grpo", mode="disaggregated", stages=APART, reason="")
    gpus, slots = Cluster.cuda_nodes(1, 2, name="fake", memory_bytes=1 << 40), Cluster.cpu_slots(2, memory_bytes=1)
    memory = ReasoningMemory(config, shape, gpus if kind == "cuda" else slots, 0)
    place = memory.fullest_place(plan)
    versions = 4 * 4 * shape.num_parameters
    processes = 0 if kind == "cuda" else sum(load.process for load in place.loads)
    assert place.needed_bytes == versions + processes
    with pytest.raises(UserError, match=r"4 versions of the weights, .* of host memory"):
        replace(memory, host_bytes=place.needed_bytes - 1).check(plan)
    replace(memory, host_bytes=place.needed_bytes).check(plan)


def test_ranks_share_the_versions_between_machines() -> None:
    """Streams keep what the ranks train, in float32."""
    config, shape = overlapping(1)
    actor = replace(APART[1], devices=(1, 2), num_ranks=2)
    plan = Plan(flow="grpo", mode="disaggregated", stages=(APART[0], actor), reason="")
    loads = loads_of(config, shape, plan, nodes=(0, 1))
    assert [load.versions.gpu_bytes for load in loads] == [0, *[2 * 4 * shape.num_parameters // 2] * 2]


@pytest.mark.parametrize(("counted", "measured"), [(16.7, 23.5), (40.8, 51.7)])
def test_what_the_driver_counts_is_predicted_within_a_tenth_and_never_under(counted: float, measured: float) -> None:
    """Two jobs on one H100, GRPO of 0.5B and 1.5B shapes on 2026-11-26: what was counted, and what NVML counted of the
    whole GPU. Both roles were resident."""
    rollout, actor = (RankMemory(weights=round(share * counted * 2**30)) for share in (0.2, 0.8))
    loads = [Load(group=name, memory=one, num_items=1, offload=False) for name, one in (("a", rollout), ("b", actor))]
    held = device_place("H100", 80 << 30, loads).held_bytes
    assert held is not None and 1.0 <= held / 2**30 / measured < 1.1
    assert at_once_place("H100", 80 << 30, loads).needed_bytes == pytest.approx(held)
    assert device_place("H100", 20 << 30, loads[:1]).held_bytes <= 20 << 30, "torch frees its cache before it fails"


def test_a_pool_is_allocated_in_one_piece() -> None:
    pool = Load(group="rollout", memory=RankMemory(weights=0, kv_pool=10 << 30), num_items=1, offload=False)
    assert pool.gpu_bytes == (10 << 30) + memory_of_plans.CONTEXT_BYTES
    engine = replace(pool, num_contexts=2)
    assert engine.gpu_bytes - pool.gpu_bytes == memory_of_plans.CONTEXT_BYTES


@pytest.mark.parametrize(
    ("overrides", "num_ranks", "communicators"),
    [
        ([], 1, 0),
        ([], 4, 1),
        (["--actor.backend=fsdp2", "--actor.backend_options={sequence_parallel: 2}"], 4, 2),
        (["--actor.backend=megatron", "--actor.backend_options={tensor_parallel: 2, pipeline_parallel: 2}"], 8, 4),
    ],
    ids=["alone", "all ranks", "and those that share rows", "matrices, stages and replicas"],
)
def test_nccls_buffers_count_for_each_group_of_ranks(overrides: list[str], num_ranks: int, communicators: int) -> None:
    config = config_of("--sft_warm_up=null", "--mode=collocated", "--actor.max_tokens_per_micro_batch=4096", *overrides)
    shape = ModelShape(name="wide", num_layers=8, head_dim=64, **WIDE)
    span = config.actor.trainer_spec.ranks_per_replica(config.actor.backend_options) or 1
    devices = tuple(range(num_ranks))
    stages = (
        StagePlan(stage="rollout", devices=devices[:1], num_ranks=1, granularity=0, offload=True, turn=0),
        StagePlan(stage="actor", devices=devices, num_ranks=num_ranks // span, granularity=0, offload=True, turn=1),
    )
    plan = Plan(flow="grpo", mode="collocated", stages=stages, reason="")
    loads = {load.group: load for load in loads_of(config, shape, plan)}
    needed = memory_of_plans.CONTEXT_BYTES + communicators * memory_of_plans.COMMUNICATOR_BYTES
    assert loads["actor"].context_bytes == needed and loads["rollout"].num_communicators == 0


def test_state_stays_on_a_gpu_that_has_room_for_all() -> None:
    """However much each rank takes in its turn, the allocators of the others keep what they took in theirs."""
    config = config_of("--sft_warm_up=null")
    shape = ModelShape(name="wide", num_layers=2, head_dim=64, **WIDE)
    stages = tuple(
        StagePlan(stage=name, devices=(0,), num_ranks=1, granularity=0, offload=True, turn=turn)
        for turn, name in enumerate(("rollout", "actor"))
    )
    plan = Plan(flow="grpo", mode="collocated", stages=stages, reason="")
    peaks = sum(load.peak for load in loads_of(config, shape, plan))

    def fits(memory_bytes: int, plan: Plan = plan) -> bool:
        cluster = Cluster.cuda_nodes(1, 1, name="fake", memory_bytes=memory_bytes)
        return ReasoningMemory(config, shape, cluster, 0).all_fit_at_once(plan)

    mailbox = 4 * shape.num_parameters
    assert not fits(peaks + mailbox)
    needed = round(1.25 * peaks) + 2 * memory_of_plans.CONTEXT_BYTES + memory_of_plans.DEVICE_BYTES + mailbox + 2
    assert fits(needed) and not fits(needed - (1 << 20))
    cluster = Cluster.cuda_nodes(1, 1, name="fake", memory_bytes=needed - (1 << 20))
    memory = ReasoningMemory(config, shape, cluster, 0).with_measured({"actor": 1 << 20, "rollout": 1 << 20})
    assert memory.all_fit_at_once(plan), "what the driver counted in an earlier run replaces what is predicted"
    other = StagePlan(stage="judge", devices=(0,), num_ranks=1, granularity=0, offload=True, turn=2)
    assert not fits(1 << 50, replace(plan, stages=(*plan.stages, other))), "nobody knows what it needs"


def test_beyond_a_size_more_tokens_need_no_more_logits() -> None:
    shape = ModelShape(name="wide", num_layers=1, head_dim=16, qkv_bias=True, **{**SMALL, "vocab_size": 1 << 17})

    def work(group_size: int) -> tuple[int, int]:
        lengths = Lengths(mean_tokens=256, limit_tokens=256, prompt_tokens=16, group_size=group_size)
        job = JobShape(lengths=lengths, num_groups=1)
        return REPLICATED.rank_memory(shape, job, 1).work(), forward_memory(shape, job).work()

    logits = 4 * 256 << 17  # of a sequence, in float32
    small, most, above, far = (work(group_size) for group_size in (4, 8, 16, 32))
    assert most[0] - small[0] > 4 * 2 * logits and most[1] - small[1] > 4 * 1.9 * logits
    assert above[0] < most[0] and above[1] < most[1]
    assert far[0] - above[0] < logits and far[1] - above[1] < logits


def test_a_partner_has_an_engine_of_its_own_beside_that_of_the_policy() -> None:
    """Its weights and cache come on top; the caches share what one would take."""
    team = ["--rollout.agent.agents.guesser.trains=false", "--rollout.agent.agents.guesser.path=Qwen/Qwen2.5-0.5B"]
    alone, both = (load_config("guess-team", parse_overrides(lines)) for lines in ([], team))
    assert isinstance(alone, ReasoningConfig) and isinstance(both, ReasoningConfig)
    policy = shape_of(alone, 30)
    (partner,) = partner_shapes(both).values()
    assert policy is not None and partner is not None
    has = 20 * 2**30
    jobs_of = [job_shape(config, device_bytes=has) for config in (alone, both)]
    assert jobs_of[0].engine_options.get("cache_share") is None
    assert jobs_of[1].engine_options == {"refill": True, "cache_share": 0.4}
    one, two = (rank_memory(c, policy, job, {})["rollout"] for c, job in zip((alone, both), jobs_of, strict=True))
    assert two.weights == 4 * (policy.num_parameters + partner.num_parameters)
    engine = alone.rollout.engine_spec
    apart = [engine.memory(shape, jobs_of[1]) for shape in (policy, partner)]
    assert two.kv_pool == sum(memory.kv_pool for memory in apart)
    assert two.activations == max(memory.activations for memory in apart) > one.activations


def test_a_plan_counts_the_memory_of_a_partner() -> None:
    base = ["--model.path=Qwen/Qwen2.5-1.5B", "--model.architecture=null", "--sft_warm_up=null"]
    team = ["--rollout.agent.agents.guesser.trains=false", "--rollout.agent.agents.guesser.path=Qwen/Qwen2.5-0.5B"]
    alone, both = (load_config("guess-team", parse_overrides(lines)) for lines in (base, [*base, *team]))
    assert isinstance(alone, ReasoningConfig) and isinstance(both, ReasoningConfig)
    profiles = [
        reasoning_problem(config, 1, gpu="H100", env_step_s=None).profiles.stages["rollout"].instances[0]
        for config in (alone, both)
    ]
    (partner,) = partner_shapes(both).values()
    assert partner is not None
    more = profiles[1].state_bytes - profiles[0].state_bytes
    assert more > 4 * partner.num_parameters  # and its cache


def test_a_further_policy_has_an_actor_and_an_engine_of_its_own() -> None:
    base = ["--model.path=Qwen/Qwen2.5-1.5B", "--model.architecture=null", "--sft_warm_up=null"]
    base += ["--cluster.num_devices=4", "--actor.num_shards=2"]
    begins_alike = "--rollout.agent.agents.guesser.policy=second"
    begins_otherwise = "--rollout.agent.agents.guesser.path=Qwen/Qwen2.5-0.5B"
    alone, alike, smaller = (
        load_config("guess-team", parse_overrides([*base, *lines]))
        for lines in ([], [begins_alike], [begins_otherwise])
    )
    assert isinstance(alone, ReasoningConfig) and isinstance(alike, ReasoningConfig)
    assert isinstance(smaller, ReasoningConfig)
    shape = shape_of(alone, 30)
    assert shape is not None
    job = job_shape(alike)
    one, two, other = (rank_memory(config, shape, job, {}) for config in (alone, alike, smaller))
    assert two["actor"] == two["actor-second"] == one["actor"]
    assert two["rollout"].weights == 2 * one["rollout"].weights
    assert one["rollout"].weights < other["rollout"].weights < two["rollout"].weights
    assert other["actor-guesser"].optimizer < other["actor"].optimizer == one["actor"].optimizer
    assert stored_bytes(shape, alike) == 2 * stored_bytes(shape, alone)
    for config, trainer in ((alike, "actor-second"), (smaller, "actor-guesser")):
        problem = reasoning_problem(config, 4, gpu="H100", env_step_s=None)
        assert problem.flow.training_groups == ("actor", trainer)
        plan = plan_for_mode(problem.flow, problem.cluster, "collocated")
        loads = reasoning_loads(config, plan, problem.cluster)
        assert {load.group: load.memory for load in loads}.keys() == {"rollout", "actor", trainer}

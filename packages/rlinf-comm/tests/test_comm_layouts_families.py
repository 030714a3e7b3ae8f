"""Layouts of Qwen2-MoE, DeepSeek and GLM: against transformers' models, through whole round trips, and in FP8."""

import dataclasses
from typing import Any

import pytest
import torch
from comm_references import huggingface_rank, megatron_rank, merged_rank

from rlinf_comm import LayoutError
from rlinf_comm.testing import LAYOUT_CHECKS, assert_bitwise_equal
from rlinf_comm.weights import execute, manifest_of, merge_manifests, reshard_plan, verify
from rlinf_comm.weights.layouts import (
    LatentAttention,
    TransformerShape,
    huggingface_layout,
    megatron_layout,
    merged_layout,
)

COMMON = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "vocab_size": 30}
DEEPSEEK = {
    **COMMON, "num_hidden_layers": 4, "num_key_value_heads": 4, "n_routed_experts": 4, "moe_intermediate_size": 8,
    "n_shared_experts": 2, "first_k_dense_replace": 1, "q_lora_rank": 6, "kv_lora_rank": 5, "qk_rope_head_dim": 3,
    "qk_nope_head_dim": 4, "v_head_dim": 3, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
}  # fmt: skip
GLM = {
    **COMMON, "num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 6, "attention_bias": True,
    "n_routed_experts": 4, "moe_intermediate_size": 8, "n_shared_experts": 2, "first_k_dense_replace": 1,
    "use_qk_norm": True, "num_experts_per_tok": 2,
}  # fmt: skip
CONFIGS = {
    "qwen2_moe": ("Qwen2MoeConfig", {
        **COMMON, "num_hidden_layers": 4, "num_key_value_heads": 2, "num_experts": 4, "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 12, "mlp_only_layers": [1],
    }),
    "deepseek_v2": ("DeepseekV2Config", {**DEEPSEEK, "q_lora_rank": None}),
    "deepseek_v3": ("DeepseekV3Config", DEEPSEEK),
    "glm4_moe": ("Glm4MoeConfig", GLM),
    "glm4_moe, without norms and biases": ("Glm4MoeConfig", {**GLM, "use_qk_norm": False, "attention_bias": False}),
}  # fmt: skip


def real_model(family):
    """(shape, tensors) of a model that transformers made, parameters and buffers, each element another number."""
    transformers = pytest.importorskip("transformers")
    name, settings = CONFIGS[family]
    config = getattr(transformers, name)(**settings)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values = torch.randperm(sum(t.numel() for t in tensors.values()), generator=torch.Generator().manual_seed(0))
    parts = values.float().split([t.numel() for t in tensors.values()])
    tensors = {name: part.view(t.shape) for (name, t), part in zip(tensors.items(), parts, strict=True)}
    return TransformerShape.from_config(config.to_dict(), dtype="float32"), tensors


def empty(layout):
    return [
        {name: torch.full(spec.shape, -1.0).to(getattr(torch, spec.dtype)) for name, spec in rank.buffers.items()}
        for rank in layout.ranks
    ]


def same(got, expected):
    """Bit for bit, in whichever order the names come."""
    for rank, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        assert_bitwise_equal(
            {name: ours[name].contiguous() for name in sorted(ours)},
            {name: theirs[name].contiguous() for name in sorted(theirs)},
            f"rank {rank}",
        )


def attested(layout, ranks, leave_out=()):
    parts = [manifest_of(layout, r, each, policy_version=0, leave_out=leave_out) for r, each in enumerate(ranks)]
    return merge_manifests(parts)


@pytest.mark.parametrize("te", [False, True])
@pytest.mark.parametrize("family", CONFIGS)
def test_a_real_model_goes_round_bit_for_bit(family, te):
    """transformers -> Megatron TP 2 PP 2 EP 2 -> SGLang TP 2 EP 2 -> transformers, attested at every stop."""
    shape, model = real_model(family)
    rotary = ["model.rotary_emb.*"]
    whole = huggingface_layout(shape, fused_experts=True)
    trainer = megatron_layout(shape, tp=2, pp=2, ep=2, transformer_engine=te, experts="sequential", vocab_multiple=8)
    engine = merged_layout(shape, tp=2, ep=2)
    expected = attested(whole, [model], rotary)
    trained, served = empty(trainer), empty(engine)

    execute(reshard_plan(whole, trainer), [model], trained, leave_out=rotary)
    verify(expected, attested(trainer, trained))
    execute(reshard_plan(trainer, engine), trained, served)
    verify(expected, attested(engine, served))
    back = {name: tensor if "rotary" in name else torch.zeros_like(tensor) for name, tensor in model.items()}
    execute(reshard_plan(engine, whole), served, [back], leave_out=rotary)
    same([back], [model])


DEEP = TransformerShape(
    num_layers=2, hidden=8, num_heads=4, num_kv_heads=4, head_dim=4, vocab=11, intermediate=8, num_experts=4,
    expert_intermediate=4, dense_layers=(0,), shared_intermediate=8, router_bias=True, mtp_layers=1, dtype="float32",
    latent=LatentAttention(q_rank=6, kv_rank=5, nope_dim=2, rope_dim=3, value_dim=2),
)  # fmt: skip

GLM_FILE = {
    **GLM,
    "model_type": "glm4_moe",
    "dtype": "float32",
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
}
"""With the keys that the config.json of GLM-4.5 has, and transformers writes."""


@pytest.mark.parametrize("te", [False, True])
@pytest.mark.parametrize("shape", [DEEP, TransformerShape.from_config(GLM_FILE, mtp=True)], ids=["deepseek", "glm"])
def test_multi_token_prediction_goes_from_megatron_to_the_draft_model_and_back(shape, te):
    generator = torch.Generator().manual_seed(0)
    full = {name: torch.randn(spec.shape, generator=generator) for name, spec in shape.specs().items()}
    sizes: dict[str, Any] = {"tp": 2, "pp": 2, "dp": 2, "ep": 2}
    trainer = megatron_layout(shape, **sizes, transformer_engine=te, vocab_multiple=1)
    engine, disk = merged_layout(shape, tp=2, ep=2, vocab_multiple=2), huggingface_layout(shape)
    cut = dict(sizes, etp=1, te=te, experts="te_grouped", pad=-1.0, vocab_multiple=1)
    trained = [megatron_rank(full, shape, rank=rank, **cut) for rank in range(8)]
    parts: dict[str, Any] = {"tp": 2, "ep": 2, "etp": 1, "vocab_tp": 2, "pad": -1.0, "vocab_multiple": 2}
    expected = [merged_rank(full, shape, rank=rank, **parts) for rank in range(2)]
    served, saved, again = empty(engine), empty(disk), empty(trainer)
    execute(reshard_plan(trainer, disk), trained, saved)
    same(saved, [full])
    execute(reshard_plan(disk, engine), saved, served)
    same(served, expected)
    execute(reshard_plan(engine, trainer), served, again)
    same(again, trained)


@pytest.mark.parametrize(
    ("without", "extra"),
    [
        ({"mtp_layers": 0}, r"source rank 4 has 22 tensors .*mtp\.layers\.0\.enorm"),
        ({"shared_intermediate": 0}, r"source rank 0 has 2 tensors .*mlp\.shared_experts\.linear_fc1\.weight"),
        ({"router_bias": False}, r"source rank 0 has 1 tensor .*router\.expert_bias"),
    ],
)
def test_a_megatron_model_with_more_than_its_layout_is_refused(without, extra):
    """What ReshardExecutor, manifests and verify would otherwise pass over in silence."""
    less = dataclasses.replace(DEEP, **{"mtp_layers": 0, "dense_layers": (), **without})
    sizes: dict[str, Any] = {"tp": 2, "pp": 2, "dp": 2, "ep": 2}
    options = dict(sizes, etp=1, te=True, experts="te_grouped", pad=0.0, vocab_multiple=1)
    generous = dataclasses.replace(less, **{name: getattr(DEEP, name) for name in without})
    full = {name: torch.zeros(spec.shape) for name, spec in generous.specs().items()}
    cut = [megatron_rank(full, generous, rank=rank, **options) for rank in range(8)]
    trained = [{name: tensor.contiguous() for name, tensor in rank.items()} for rank in cut]
    trainer, engine = megatron_layout(less, **sizes, vocab_multiple=1), merged_layout(less, tp=2, ep=2)
    with pytest.raises(LayoutError, match=extra):
        execute(reshard_plan(trainer, engine), trained, empty(engine))
    with pytest.raises(LayoutError, match=extra.removeprefix("source ")):
        attested(trainer, trained)


# --- FP8 --------------------------------------------------------------------------------------------------------------

BLOCK = (4, 2)
FP8 = dataclasses.replace(DEEP, fp8_scales=BLOCK, expert_intermediate=8, latent=LatentAttention(
    q_rank=8, kv_rank=7, nope_dim=4, rope_dim=2, value_dim=4))  # fmt: skip


def dequantized(tensors):
    """Every weight times its scales, each spread over its block; kv_a ends in half a block, as in DeepSeek-V3."""
    out = {}
    for name, tensor in tensors.items():
        scale = tensors.get(f"{name}_scale_inv")
        if scale is None:
            out[name] = tensor
            continue
        spread = scale.repeat_interleave(BLOCK[0], -2).repeat_interleave(BLOCK[1], -1)
        out[name] = tensor.float() * spread[..., : tensor.shape[-2], : tensor.shape[-1]]
    return {name: tensor for name, tensor in out.items() if not name.endswith("_scale_inv")}


def fp8_checkpoint():
    generator = torch.Generator().manual_seed(0)
    full = {}
    for name, spec in FP8.specs().items():
        numbers = torch.randn(spec.shape, generator=generator)
        full[name] = numbers.to(getattr(torch, spec.dtype))
    return full


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 2), (2, 1)])
def test_fp8_weights_and_their_scales_are_cut_alike(tp, ep):
    """What the engine multiplies is what cutting the multiplied checkpoint gives."""
    full = fp8_checkpoint()
    assert full["model.layers.1.self_attn.kv_a_proj_with_mqa.weight_scale_inv"].shape == (3, 4)  # of [9, 8]
    etp = tp // ep
    disk, engine = huggingface_layout(FP8), merged_layout(FP8, tp=tp, ep=ep, vocab_multiple=2)
    served, saved = empty(engine), empty(disk)
    execute(reshard_plan(disk, engine), [full], served)
    parts: dict[str, Any] = {"tp": tp, "ep": ep, "etp": etp, "vocab_tp": tp, "pad": -1.0, "vocab_multiple": 2}
    for rank, tensors in enumerate(served):
        same([dequantized(tensors)], [merged_rank(dequantized(full), FP8, rank=rank, **parts)])
    execute(reshard_plan(engine, disk), served, saved)
    same(saved, [full])
    verify(attested(disk, [full]), attested(engine, served))


def test_fp8_names_and_shapes_are_those_of_transformers():
    transformers = pytest.importorskip("transformers")
    quantization = transformers.FineGrainedFP8Config(weight_block_size=(4, 4))
    config = transformers.DeepseekV3Config(**{**DEEPSEEK, "num_hidden_layers": 2, "kv_lora_rank": 8})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        replace = transformers.integrations.finegrained_fp8.replace_with_fp8_linear
        model = replace(model, modules_to_not_convert=["lm_head"], quantization_config=quantization)
    config.quantization_config = quantization.to_dict()
    shape = TransformerShape.from_config(config.to_dict())
    assert shape.fp8_scales == (4, 4)
    stored = huggingface_layout(shape, fused_experts=True).ranks[0].buffers
    expected = {name: (tuple(tensor.shape), str(tensor.dtype)[6:]) for name, tensor in model.named_parameters()}
    expected |= {name: ((4,), "float32") for name, _ in model.named_buffers() if "correction" in name}
    # From 5.24 on, transformers holds routers in float32, whatever type a checkpoint has for them.
    router = "model.layers.1.mlp.gate.weight"
    expected[router] = (expected[router][0], "bfloat16")
    assert {name: (spec.shape, spec.dtype) for name, spec in stored.items()} == dict(sorted(expected.items()))


def test_scales_for_whole_tensors_stay_with_them():
    shape = dataclasses.replace(DEEP, fp8_scales="tensor")
    specs = huggingface_layout(shape).specs
    assert specs["model.layers.0.self_attn.o_proj.weight"].dtype == "float8_e4m3fn"
    assert specs["model.layers.0.self_attn.o_proj.weight_scale"].shape == ()
    with pytest.raises(
        LayoutError, match=r"has one FP8 scale for the whole tensor\. Engines that merge tensors compute"
    ):
        merged_layout(shape)


@pytest.mark.parametrize("layout", [merged_layout(FP8, tp=2, ep=2), huggingface_layout(FP8, fused_experts=True),
                                    megatron_layout(DEEP, tp=2, pp=2, ep=2)])  # fmt: skip
@pytest.mark.parametrize("check", LAYOUT_CHECKS, ids=lambda check: check.__name__)
def test_they_conform(layout, check):
    check(layout)


CRITIC = TransformerShape(
    num_layers=4, hidden=16, num_heads=4, num_kv_heads=2, head_dim=4, vocab=30, intermediate=24, value_head=True
)


def test_a_critics_head_is_whole_on_the_ranks_of_the_last_stage():
    assert CRITIC.specs()["lm_head.weight"].shape == (1, 16)
    layout = megatron_layout(CRITIC, tp=2, pp=2, transformer_engine=False, dtype="float32")
    for number, rank in enumerate(layout.ranks):
        heads = {name: buffer.shape for name, buffer in rank.buffers.items() if name.startswith("output_layer")}
        assert heads == ({"output_layer.weight": (1, 16), "output_layer.bias": (1,)} if number >= 2 else {})
    full = {name: torch.randn(spec.shape) for name, spec in CRITIC.specs().items()}
    parts, back = empty(layout), empty(huggingface_layout(CRITIC, dtype="float32"))
    execute(reshard_plan(huggingface_layout(CRITIC, dtype="float32"), layout), [full], parts)
    execute(reshard_plan(layout, huggingface_layout(CRITIC, dtype="float32")), parts, back)
    same(back, [full])


def test_fused_experts_are_stacked_as_in_transformers():
    full = {name: torch.randn(spec.shape) for name, spec in DEEP.specs().items()}
    memory, disk = huggingface_layout(DEEP, fused_experts=True), huggingface_layout(DEEP)
    fused = empty(memory)
    execute(reshard_plan(disk, memory), [full], fused)
    same(fused, [huggingface_rank(full, DEEP, fused_experts=True)])


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: merged_layout(FP8, tp=4, ep=4),
            r"cuts through the FP8 blocks of \d along dimension \d; use so few ranks",
        ),
        (lambda: megatron_layout(FP8), "Megatron holds FP8 weights as Transformer Engine's own tensors"),
        (lambda: merged_layout(dataclasses.replace(DEEP, mtp_layers=2)), "mtp_layers=2: SGLang's draft model has one"),
        (
            lambda: megatron_layout(dataclasses.replace(DEEP, tied_embeddings=True), pp=2),
            "would store the embedding twice",
        ),
        (lambda: megatron_layout(DEEP, tp=4, transformer_engine=False), "q_rank=6 is not a multiple of tp=4"),
        (
            lambda: merged_layout(dataclasses.replace(DEEP, shared_intermediate=9), tp=2),
            "shared_intermediate=9 is not a mul",
        ),
        (lambda: merged_layout(CRITIC), "an engine generates tokens, but a critic's head has no row for each token"),
        (lambda: dataclasses.replace(CRITIC, tied_embeddings=True), "value_head with tied_embeddings"),
        (lambda: dataclasses.replace(DEEP, qk_norm=True), "latent attention with qkv_bias or qk_norm"),
        (lambda: TransformerShape.from_config({**GLM_FILE, "mlp_bias": True}), "glm4_moe with attention_bias or mlp_b"),
        (
            lambda: TransformerShape.from_config({**GLM_FILE, "moe_layer_freq": 2}),
            "moe_layer_freq=2; the ready layouts",
        ),
        (
            lambda: TransformerShape.from_config(
                {
                    "model_type": "llama",
                    **COMMON,
                    "num_hidden_layers": 1,
                    "quantization_config": {"quant_method": "awq"},
                }
            ),
            "quantization_config.quant_method='awq'; ready layouts know 'fp8'",
        ),
    ],
)
def test_what_no_layout_describes_is_refused(build, message):
    with pytest.raises(LayoutError, match=message):
        build()

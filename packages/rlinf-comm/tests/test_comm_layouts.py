"""The ready layouts against plain torch code that cuts as the engines do: names, shapes and every bit."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from comm_properties import holds_for
from comm_references import huggingface_rank, megatron_rank, merged_rank
from hypothesis import strategies as st

from rlinf_comm import LayoutError
from rlinf_comm.testing import LAYOUT_CHECKS, assert_bitwise_equal, execute_copies
from rlinf_comm.weights import reshard_plan
from rlinf_comm.weights.layouts import (
    LatentAttention,
    TransformerShape,
    huggingface_layout,
    megatron_layout,
    merged_layout,
)

PAD = -3.0
"""In the padding of the vocabulary; no canonical element has this value."""
KEPT = ("e_score_correction_bias", "expert_bias")
"""Float32 in every engine."""


LATENT = [None, LatentAttention(q_rank=8, kv_rank=5, nope_dim=4, rope_dim=3, value_dim=2)]
LATENT += [LatentAttention(kv_rank=6, nope_dim=2, rope_dim=2, value_dim=4)]


@st.composite
def shapes(draw):
    experts = draw(st.sampled_from([0, 0, 4, 8]))
    latent = draw(st.sampled_from(LATENT))
    mtp_layers = draw(st.sampled_from([0, 0, 1]))
    shared = draw(st.sampled_from([0, 8])) if experts else 0
    return TransformerShape(
        num_layers=2,
        hidden=8,
        num_heads=8,
        num_kv_heads=draw(st.sampled_from([1, 2, 4, 8])),
        head_dim=draw(st.sampled_from([2, 4])),
        vocab=draw(st.integers(9, 24)),
        intermediate=8,
        num_experts=experts,
        expert_intermediate=4,
        dense_layers=draw(st.sampled_from([(), (0,)])) if experts else (),
        shared_intermediate=shared,
        shared_gate=bool(shared) and draw(st.booleans()),
        router_bias=experts > 0 and draw(st.booleans()),
        latent=latent,
        mtp_layers=mtp_layers,
        qkv_bias=latent is None and draw(st.booleans()),
        qk_norm=latent is None and draw(st.booleans()),
        tied_embeddings=not mtp_layers and draw(st.booleans()),
        dtype="float32",
    )


def numbers(shape: TransformerShape, seed: int = 0) -> dict[str, torch.Tensor]:
    """Canonical tensors in which every element is another number."""
    specs = shape.specs()
    values = torch.randperm(sum(math.prod(spec.shape) for spec in specs.values()),
                            generator=torch.Generator().manual_seed(seed)).float()  # fmt: skip
    parts = values.split([math.prod(spec.shape) for spec in specs.values()])
    return {name: part.reshape(spec.shape) for (name, spec), part in zip(specs.items(), parts, strict=True)}


@st.composite
def megatron_cases(draw, shape):
    tp = draw(st.sampled_from([1, 2, 4, 8] if shape.head_dim == 4 or shape.num_kv_heads > 1 else [1, 2, 4]))
    tp = tp if (shape.q_rows + 2 * shape.kv_rows) % tp == 0 else 1
    pp, etp = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2]))
    ep = draw(st.sampled_from([1, 2, 4]))
    dp = max(1, ep * etp // tp) if shape.num_experts else draw(st.sampled_from([1, 2]))
    if not shape.num_experts or tp * dp % (ep * etp):
        ep = etp = 1
    te = draw(st.booleans()) or (shape.latent is not None and (shape.latent.kv_rank + shape.latent.rope_dim) % tp > 0)
    return {
        "tp": tp, "pp": pp, "dp": dp, "ep": ep, "etp": etp, "te": te,
        "experts": draw(st.sampled_from(["te_grouped", "grouped", "sequential"])),
        "vocab_multiple": draw(st.sampled_from([1, 5, 128])),
    }  # fmt: skip


def make_megatron(shape, case, dtype=None):
    names = {"etp": "expert_tp", "te": "transformer_engine"}
    arguments: dict[str, Any] = {str(names.get(key, key)): value for key, value in case.items()}
    return megatron_layout(shape, **arguments, dtype=dtype)


@st.composite
def merged_cases(draw, shape):
    tp = draw(st.sampled_from([1, 2, 4, 8]))
    ep, etp = (draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2]))) if shape.num_experts else (1, 1)
    return {"tp": tp, "ep": ep, "etp": etp, "vocab_tp": draw(st.sampled_from([1, tp])), "vocab_multiple": 8}


def make_merged(shape, case, dtype=None):
    arguments: dict[str, Any] = {"expert_tp" if key == "etp" else key: value for key, value in case.items()}
    return merged_layout(shape, **arguments, dtype=dtype)


def all_ranks(reference, full, shape, layout, case, pad=PAD, dtype=torch.float32):
    """The reference's parameters of all ranks, checked to have the layout's names, shapes and dtypes."""
    ranks = []
    for rank, stored in enumerate(layout.ranks):
        tensors = reference(full, shape, rank=rank, pad=pad, **case)
        tensors = {
            name: tensors[name].to(torch.float32 if name.endswith(KEPT) else dtype).contiguous()
            for name in sorted(tensors)
        }
        assert {name: (tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()} == {
            name: (buffer.shape, f"torch.{buffer.dtype}") for name, buffer in stored.buffers.items()
        }
        ranks.append(tensors)
    return ranks


def check_reshard(src, dst, sources, expected):
    """Runs the copy tables, for all sources at once and pair by pair, into buffers full of PAD."""
    reshard = reshard_plan(src, dst)
    assert reshard.num_bytes == reshard.min_num_bytes
    flat = [tensor for tensors in sources for tensor in tensors.values()]
    for dst_rank, want in enumerate(expected):
        got = {name: torch.full_like(tensor, PAD) for name, tensor in want.items()}
        execute_copies(reshard.copies(dst_rank=dst_rank), flat, list(got.values()))
        assert_bitwise_equal(got, want, f"rank {dst_rank}")
        got = {name: torch.full_like(tensor, PAD) for name, tensor in want.items()}
        for src_rank, tensors in enumerate(sources):
            table = reshard.copies(dst_rank=dst_rank, src_rank=src_rank)
            execute_copies(table, list(tensors.values()), list(got.values()))
        assert_bitwise_equal(got, want, f"rank {dst_rank}")


@holds_for(st.data(), num=15, num_slow=60)
def test_megatron_to_merged(data):
    shape = data.draw(shapes())
    src_case, dst_case = data.draw(megatron_cases(shape)), data.draw(merged_cases(shape))
    full = numbers(shape)
    dtype = data.draw(st.sampled_from([None, "bfloat16"]))
    src, dst = make_megatron(shape, src_case), make_merged(shape, dst_case, dtype)
    sources = all_ranks(megatron_rank, full, shape, src, src_case, pad=float("nan"))
    served = torch.bfloat16 if dtype else torch.float32
    check_reshard(src, dst, sources, all_ranks(merged_rank, full, shape, dst, dst_case, dtype=served))


@holds_for(st.data(), num=15, num_slow=60)
def test_merged_to_megatron(data):
    shape = data.draw(shapes())
    src_case, dst_case = data.draw(merged_cases(shape)), data.draw(megatron_cases(shape))
    full = numbers(shape)
    src, dst = make_merged(shape, src_case), make_megatron(shape, dst_case)
    sources = all_ranks(merged_rank, full, shape, src, src_case, pad=float("nan"))
    check_reshard(src, dst, sources, all_ranks(megatron_rank, full, shape, dst, dst_case))


@holds_for(st.data(), num=12, num_slow=40)
def test_megatron_to_megatron_through_any_sizes(data):
    shape = data.draw(shapes())
    src_case, dst_case = data.draw(megatron_cases(shape)), data.draw(megatron_cases(shape))
    full = numbers(shape)
    src, dst = make_megatron(shape, src_case), make_megatron(shape, dst_case)
    sources = all_ranks(megatron_rank, full, shape, src, src_case, pad=float("nan"))
    check_reshard(src, dst, sources, all_ranks(megatron_rank, full, shape, dst, dst_case))


@holds_for(st.data(), st.booleans(), st.booleans(), num=12, num_slow=40)
def test_huggingface_to_merged_and_back(data, fused_experts, back):
    shape = data.draw(shapes())
    case = data.draw(merged_cases(shape))
    full = numbers(shape)
    whole, parts = huggingface_layout(shape, 2, fused_experts=fused_experts), make_merged(shape, case)
    rank = huggingface_rank(full, shape, fused_experts=fused_experts)
    rank = {name: rank[name].contiguous() for name in sorted(rank)}
    assert {name: tuple(tensor.shape) for name, tensor in rank.items()} == {
        name: buffer.shape for name, buffer in whole.ranks[1].buffers.items()
    }
    merged_ranks = all_ranks(merged_rank, full, shape, parts, case)
    if back:
        check_reshard(parts, whole, merged_ranks, [rank, rank])
    else:
        check_reshard(whole, parts, [rank, rank], merged_ranks)


SMALL = TransformerShape(
    num_layers=2, hidden=6, num_heads=4, num_kv_heads=2, head_dim=2, vocab=11, intermediate=8, num_experts=4,
    expert_intermediate=4, dense_layers=(1,), qk_norm=True, qkv_bias=True,
)  # fmt: skip
LAYOUTS = {
    "huggingface": huggingface_layout(SMALL, 2, fused_experts=True, dtype="float32"),
    "merged": merged_layout(SMALL, tp=4, ep=2),
    "megatron": megatron_layout(SMALL, tp=2, pp=2, ep=2, expert_tp=2, vocab_multiple=4),
    "megatron virtual": megatron_layout(dataclasses.replace(SMALL, num_layers=4), tp=2, pp=2, virtual_stages=2),
    "megatron grouped": megatron_layout(SMALL, tp=4, ep=4, experts="grouped", dtype="float16"),
}


@pytest.mark.parametrize("check", LAYOUT_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", LAYOUTS)
def test_ready_layouts_conform(name, check):
    check(LAYOUTS[name])


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: merged_layout(SMALL, tp=3), "num_heads=4 is not a multiple of tp=3; use a divisor of 4"),
        (lambda: merged_layout(SMALL, tp=4, ep=3), "num_experts=4 is not a multiple of ep=3"),
        (lambda: merged_layout(SMALL, tp=2, num_ranks=3), "num_ranks=3 is not a multiple of tp=2"),
        (
            lambda: merged_layout(SMALL, tp=2, vocab_multiple=1, expert_tp=1),
            "the padded vocabulary=11 is not a multiple",
        ),
        (lambda: megatron_layout(SMALL, pp=3), "num_layers=2 is not a multiple of pp=3"),
        (lambda: megatron_layout(SMALL, virtual_stages=2), "virtual_stages=2 with pp=1; it needs pp > 1"),
        (
            lambda: megatron_layout(SMALL, pp=2, virtual_stages=2),
            r"num_layers=2 is not a multiple of pp \* virtual_stages=4",
        ),
        (
            lambda: megatron_layout(SMALL, pp=2, layers_by_stage=[1, 2]),
            r"layers_by_stage=\[1, 2\] for pp=2, virtual_stages=1 and num_layers=2",
        ),
        (lambda: megatron_layout(SMALL, tp=2, dp=1, ep=4), r"tp \* dp=2 is not a multiple of ep \* expert_tp=4"),
        (lambda: TransformerShape.from_config({"model_type": "bert"}), "model_type='bert' has no ready layouts"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(build, message):
    with pytest.raises(LayoutError, match=message):
        build()


def test_stages_may_be_uneven():
    layout = megatron_layout(SMALL, pp=2, layers_by_stage=[2, 0])
    assert not any(name.startswith("decoder.layers.") for name in layout.ranks[1].buffers)
    assert "decoder.layers.1.mlp.linear_fc1.weight" in layout.ranks[0].buffers


@pytest.mark.parametrize("tied", [False, True])
def test_virtual_stages_are_dealt_out_in_turn(tied):
    """Chunk c of stage s is what stage c * pp + s of a longer pipeline would be, also where these are uneven."""
    shape = dataclasses.replace(SMALL, num_layers=8, dense_layers=(1,), tied_embeddings=tied)
    dealt = megatron_layout(shape, tp=2, pp=2, ep=2, virtual_stages=2, layers_by_stage=[1, 3, 2, 2])
    long = megatron_layout(shape, tp=2, pp=4, ep=2, layers_by_stage=[1, 3, 2, 2])
    assert dealt.num_ranks == 4
    for rank, stored in enumerate(dealt.ranks):
        chunks = [long.ranks[(2 * chunk + rank // 2) * 2 + rank % 2] for chunk in range(2)]
        assert stored.buffers == {
            f"model{chunk}.{name}": spec for chunk, part in enumerate(chunks) for name, spec in part.buffers.items()
        }
        blocks = [
            dataclasses.replace(block, buffer=f"model{chunk}.{block.buffer}")
            for chunk, part in enumerate(chunks)
            for block in part.blocks
        ]
        assert sorted(stored.blocks, key=str) == sorted(blocks, key=str)
    assert {"model0.decoder.layers.1.self_attention.linear_proj.weight", "model1.output_layer.weight"} <= {
        *dealt.ranks[3].buffers
    }


CONFIGS = {
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 6, "tie_word_embeddings": False}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"head_dim": 6, "num_experts": 4, "moe_intermediate_size": 8, "mlp_only_layers": [1]},
    ),
    "llama": ("LlamaConfig", {}),
}  # fmt: skip


@pytest.mark.parametrize("model_type", CONFIGS)
def test_shapes_are_those_of_the_real_models(model_type):
    transformers = pytest.importorskip("transformers")
    name, settings_ = CONFIGS[model_type]
    config = getattr(transformers, name)(
        hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=30, **settings_,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    shape = TransformerShape.from_config(config.to_dict(), dtype="float32")
    parameters = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    fused = any(name.endswith("experts.gate_up_proj") for name in parameters)
    buffers = huggingface_layout(shape, fused_experts=fused).ranks[0].buffers
    assert {name: buffer.shape for name, buffer in buffers.items()} == dict(sorted(parameters.items()))

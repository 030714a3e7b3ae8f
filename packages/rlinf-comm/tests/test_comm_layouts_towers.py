"""Layouts of models that see: transformers' Qwen2.5-VL, Qwen3-VL and SmolVLM, cut for an engine as plain torch code
cuts them."""

import dataclasses
from collections import Counter

import pytest
import torch
from comm_references import merged_rank

from rlinf_comm import LayoutError
from rlinf_comm.testing import assert_bitwise_equal
from rlinf_comm.weights import execute, reshard_plan
from rlinf_comm.weights.layouts import (
    SiglipTower,
    TransformerShape,
    huggingface_layout,
    megatron_layout,
    merged_layout,
)

TEXT = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT |= {"num_key_value_heads": 2, "head_dim": 4, "vocab_size": 30}
TOWER = {"depth": 2, "hidden_size": 8, "intermediate_size": 12, "num_heads": 4, "patch_size": 2, "out_hidden_size": 16}
QWEN3 = {"num_position_embeddings": 9, "deepstack_visual_indexes": [0, 1]}
SIGLIP = {"num_hidden_layers": 2, "hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 4}
SIGLIP |= {"image_size": 8, "patch_size": 2}
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 1}
CONFIGS = {
    "qwen2_5_vl": {"text_config": TEXT, "vision_config": TOWER},
    "qwen3_vl": {"text_config": TEXT, "vision_config": TOWER | QWEN3},
    "qwen3_vl_moe": {"text_config": TEXT | EXPERTS, "vision_config": TOWER | QWEN3},
    "smolvlm": {"text_config": TEXT | {"model_type": "llama"}, "vision_config": SIGLIP, "scale_factor": 2},
}


@pytest.fixture(params=CONFIGS)
def real(request):
    """(shape, tensors) of a model of transformers, each element another number."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(request.param, tie_word_embeddings=False, **CONFIGS[request.param])
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(config)
    sizes = {name: parameter.shape for name, parameter in model.named_parameters()}
    numbers = torch.randperm(sum(size.numel() for size in sizes.values())).float()
    parts = numbers.split([size.numel() for size in sizes.values()])
    tensors = {name: part.view(size) for (name, size), part in zip(sizes.items(), parts, strict=True)}
    return TransformerShape.from_config(config.to_dict(), dtype="float32"), tensors


OF_TOWERS = ("model.visual.", "model.vision_model.", "model.connector.")
BY_COLUMNS = (".attn.proj.", ".down_", ".linear_fc2.", ".mlp.2.", ".out_proj.", ".mlp.fc2.")


def tower_rank(full, num_layers, rank, tp):
    """The parameters of the tower of one rank by vLLM's names, from transformers' tensors."""
    out, tower = {}, {name: one for name, one in full.items() if name.startswith(OF_TOWERS)}
    for name, whole in tower.items():
        here, kind = name.replace("model.visual.", "visual."), name.rpartition(".")[2]
        if ".q_proj." in name:
            heads = [tower[name.replace(".q_", f".{part}_")].chunk(tp)[rank] for part in "qkv"]
            out[here.replace(".q_", ".qkv_")] = torch.cat(heads)
        elif ".k_proj." in name or ".v_proj." in name:
            continue
        elif ".attn.qkv." in name:
            out[here] = torch.cat([part.chunk(tp)[rank] for part in whole.chunk(3)])
        elif ".gate_proj." in name:
            halves = [whole, tower[name.replace("gate_", "up_")]]
            out[here.replace("gate_proj", "gate_up_proj")] = torch.cat([half.chunk(tp)[rank] for half in halves])
        elif ".up_proj." in name:
            continue
        elif any(part in name for part in (".linear_fc1.", ".merger.mlp.0.", ".mlp.fc1.")):
            out[here] = whole.chunk(tp)[rank]
        elif kind == "weight" and any(part in name for part in BY_COLUMNS):
            out[here] = whole.chunk(tp, 1)[rank]
        else:
            out[here] = whole
    return out


def decoder_of(full):
    """Its tensors as in a model without a tower, each expert by itself."""
    behind = {name: one for name, one in full.items() if not name.startswith(OF_TOWERS)}
    decoder = {name.replace(".language_model.", ".").replace(".text_model.", "."): behind[name] for name in behind}
    for name in [name for name in decoder if name.endswith(".experts.gate_up_proj")]:
        prefix = name.removesuffix("gate_up_proj")
        for expert, (both, down) in enumerate(zip(decoder.pop(name), decoder.pop(f"{prefix}down_proj"), strict=True)):
            decoder[f"{prefix}{expert}.gate_proj.weight"], decoder[f"{prefix}{expert}.up_proj.weight"] = both.chunk(2)
            decoder[f"{prefix}{expert}.down_proj.weight"] = down
    return decoder


@pytest.mark.parametrize(("tp", "tower_tp"), [(1, 1), (2, 2), (2, 1)])
def test_a_tower_and_its_decoder_are_cut_as_engines_cut_them(real, tp, tower_tp):
    shape, full = real
    whole = huggingface_layout(shape, fused_experts=True)
    served = merged_layout(shape, tp=tp, expert_tp=tp, tower_tp=tower_tp, vocab_multiple=1)
    assert {name: spec.shape for name, spec in whole.ranks[0].buffers.items()} == {
        name: tuple(tensor.shape) for name, tensor in sorted(full.items())
    }
    held = [{name: torch.zeros(spec.shape) for name, spec in rank.buffers.items()} for rank in served.ranks]
    execute(reshard_plan(whole, served), [full], held)
    for rank, own in enumerate(held):
        sizes = {"tp": tp, "ep": 1, "etp": tp, "vocab_tp": tp, "rank": rank, "vocab_multiple": 1, "pad": 0.0}
        expected = merged_rank(decoder_of(full), shape, **sizes)
        expected |= tower_rank(full, 2, rank % tower_tp, tower_tp)
        assert_bitwise_equal(
            {name: own[name] for name in sorted(own)},
            {name: expected[name].contiguous() for name in sorted(expected)},
            f"rank {rank}",
        )


@pytest.mark.parametrize("tp", [1, 2])
def test_sglang_cuts_positions_by_rows_and_pads_what_belongs_to_no_tensor(real, tp):
    shape, full = real
    if isinstance(shape.tower, SiglipTower):
        with pytest.raises(LayoutError, match="no engine pads this tower"):
            merged_layout(shape, tp=tp, tower_width=16, positions_tp=tp)
        return
    served = merged_layout(shape, tp=tp, expert_tp=tp, tower_width=16, positions_tp=tp)
    reshard = reshard_plan(huggingface_layout(shape, fused_experts=True), served)
    held = [{name: torch.zeros(spec.shape) for name, spec in rank.buffers.items()} for rank in served.ranks]
    execute(reshard, [full], held)
    padded = {name: extended(tensor) for name, tensor in full.items()}
    for rank, own in enumerate(held):
        expected = tower_rank(padded, 2, rank, tp)
        if not shape.tower.gated:
            positions = torch.zeros(64, 8)
            positions[:9] = full["model.visual.pos_embed.weight"]
            expected["visual.pos_embed.weight"] = positions.chunk(tp)[rank]
        assert_bitwise_equal(
            {name: own[name] for name in sorted(expected)},
            {name: expected[name].contiguous() for name in sorted(expected)},
            f"rank {rank}",
        )
        written = Counter[str]()
        for block in served.ranks[rank].blocks:
            written[block.buffer] += block.box.num_elements
        padded_buffers = {name for name, tensor in own.items() if written[name] < tensor.numel()}
        assert set(reshard.padded_buffers(rank)) == padded_buffers


def extended(tensor):
    """With zeros up to 16 where the MLP of a tower's block has 12."""
    missing = [4 * (size == 12) for size in reversed(tensor.shape)]
    return torch.nn.functional.pad(tensor, [part for size in missing for part in (0, size)])


def test_what_a_tower_cannot_do_is_refused(real):
    shape, _ = real
    with pytest.raises(LayoutError, match="no place for a vision tower"):
        megatron_layout(shape)
    one_head = dataclasses.replace(shape, tower=dataclasses.replace(shape.tower, num_heads=1))
    with pytest.raises(LayoutError, match=r"vision_config.num_(attention_)?heads=1 is not a multiple of tp=2"):
        merged_layout(one_head, tp=2)

"""Adapters in the merged and sharded layers of SGLang and vLLM, against plain products of the whole layers."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from rlinf_comm import LayoutError, WeightMismatchError
from rlinf_comm.testing import execute_copies
from rlinf_comm.weights import Layout, reshard_plan, specs_of
from rlinf_comm.weights.layouts import (
    LORA_A,
    LORA_B,
    TransformerShape,
    adapted_layout,
    is_adapter_tensor,
    merged_layout,
)
from rlinf_comm.weights.layouts.tower import QwenTower
from rlinf_workers.engines.adapted_layers import adapt_layers
from rlinf_workers.engines.inside import Inside
from rlinf_workers.models.lora_settings import LoraSettings
from rlinf_workers.weight_sync.base import SyncedTensors, WeightPort
from rlinf_workers.weight_sync.shared.sync import SharedWeightSync

SHAPE = TransformerShape(
    num_layers=1, hidden=16, num_heads=4, num_kv_heads=2, head_dim=4, vocab=64, intermediate=24, dtype="float64"
)
TOWER = QwenTower(
    gated=True,
    num_layers=1,
    hidden=8,
    num_heads=4,
    intermediate=20,
    out_hidden=16,
    patch=(3, 2, 2, 2),
    patches_per_token=4,
)
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PREFIX = "model.layers.0."


class Plain:
    """As an engine computes a linear layer without an adapter."""

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return linear(x, layer.weight, bias)


def lora_of(targets: tuple[str, ...], rank: int = 3) -> LoraSettings:
    return LoraSettings(rank=rank, alpha=6.0, targets=targets, base_digest="")


def merged_model(layout: Layout, rank: int) -> nn.Module:
    """A process's layers of one decoder layer, and of its tower."""
    model: Any = nn.Module()
    for name, spec in layout.ranks[rank].buffers.items():
        if name.startswith((PREFIX, "visual.")) and name.endswith("weight") and len(spec.shape) == 2:
            one: Any = nn.Module()
            one.weight = nn.Parameter(torch.zeros(spec.shape, dtype=torch.float64), requires_grad=False)
            one.quant_method, owner = Plain(), model
            *path, own = name.removesuffix(".weight").split(".")
            for part in path:
                if not hasattr(owner, part):
                    owner.add_module(part, nn.Module())
                owner = getattr(owner, part)
            owner.add_module(own, one)
    return model


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(
    ("tower", "targets"),
    [
        (None, ALL),
        (None, ("q_proj", "v_proj", "up_proj")),
        (None, ("k_proj", "o_proj", "gate_proj")),
        (TOWER, (*ALL, "attn.qkv", "attn.proj", "mlp.0", "mlp.2")),
    ],
)
def test_merged_and_sharded_layers_add_the_update_of_each_adapted_part(tp, tower, targets):
    """With four processes two of them hold the same key and value head, and MLPs of the tower are padded."""
    lora, shape = lora_of(targets), replace(SHAPE, tower=tower)
    base = merged_layout(shape, tp=tp, tower_width=tower and 24)
    layout = adapted_layout(base, lora.rank, lora.changes)
    random = torch.Generator().manual_seed(tp)
    tensors = {
        name: torch.randn(spec.shape, generator=random, dtype=torch.float64) for name, spec in layout.specs.items()
    }
    plan = reshard_plan(Layout.replicated(specs_of(tensors), 1), layout)
    canonical = [tensors[name] for name in sorted(tensors)]
    models = [merged_model(base, rank) for rank in range(tp)]
    for rank, (model, held) in enumerate(zip(models, layout.ranks, strict=True)):
        adapt_layers(model, held, lora.scale)
        buffers = {name: torch.zeros(spec.shape, dtype=torch.float64) for name, spec in held.buffers.items()}
        execute_copies(plan.copies(dst_rank=rank), canonical, list(buffers.values()))
        parameters = dict(model.named_parameters())
        assert {name for name in buffers if "lora" in name} == {name for name in parameters if "lora" in name}
        for name, parameter in parameters.items():
            parameter.copy_(buffers[name])
    served = {block.name for block in base.ranks[0].blocks if block.buffer in parameters}
    for name in sorted(name.removesuffix(".weight") for name in served):
        x = torch.randn(5, tensors[f"{name}.weight"].shape[1], generator=random, dtype=torch.float64)
        expected = linear(x, tensors[f"{name}.weight"])
        if lora.changes(name):
            expected += lora.scale * linear(linear(x, tensors[name + LORA_A]), tensors[name + LORA_B])
        results = {}
        for model, held in zip(models, base.ranks, strict=True):
            for block in (block for block in held.blocks if block.name == f"{name}.weight"):
                module: Any = model.get_submodule(block.buffer.removesuffix(".weight"))
                own_x = torch.ones(5, held.buffers[block.buffer].shape[1], dtype=torch.float64)
                first, count = block.box.start[1], block.box.shape[1]
                own_x[:, :count] = x[:, first : first + count]
                row = block.offset // own_x.shape[1]
                result = module.quant_method.apply(module, own_x)[:, row : row + block.box.shape[0]]
                results[block.box] = result  # replicas have the same
        total = torch.zeros_like(expected)
        for box, result in results.items():
            total[:, box.start[0] : box.start[0] + box.shape[0]] += result
        torch.testing.assert_close(total, expected, rtol=0, atol=1e-12)
    if tower is not None:
        assert models[0].get_parameter("visual.blocks.0.attn.qkv.lora_A").shape == (lora.rank, tower.hidden)


def test_an_adapter_of_layers_that_a_process_does_not_have_is_refused_by_name():
    lora, base = lora_of(("query", "wo")), merged_layout(SHAPE)
    with pytest.raises(LayoutError, match="changes none of the model's linear layers"):
        adapted_layout(base, lora.rank, lora.changes)
    model: Any = merged_model(base, 0)
    held = adapted_layout(base, 3, lora_of(("up_proj",)).changes).ranks[0]
    model.model.layers.get_submodule("0.mlp.gate_up_proj").weight = nn.Parameter(torch.zeros(64, 16))
    with pytest.raises(ValueError, match=r"mlp\.gate_up_proj\.weight is to be \[48, 16\], and Module has \[64, 16\]"):
        adapt_layers(model, held, 2.0)
    del model.model.layers.get_submodule("0.mlp.gate_up_proj").quant_method
    with pytest.raises(ValueError, match=r"mlp\.gate_up_proj\.weight .* has no such linear layer"):
        adapt_layers(model, held, 2.0)


def test_a_process_has_one_end_for_the_base_and_one_for_the_adapter_and_names_what_is_wrong_with_either():
    """A flipped bit of A, another scale, and frozen weights that are served from elsewhere since they were checked."""
    lora, model = lora_of(ALL), merged_model(merged_layout(SHAPE), 0)
    layout = adapted_layout(merged_layout(SHAPE), lora.rank, lora.changes)
    adapt_layers(model, layout.ranks[0], lora.scale)
    own = dict(model.named_parameters())
    layout = layout.only({block.name for block in layout.ranks[0].blocks if block.buffer in own})
    inside, senders = Inside(connection=None, model=model, sizes={}), {}  # type: ignore[arg-type] - nothing is sent
    tensors = {name: torch.randn(spec.shape, dtype=torch.float64) for name, spec in layout.specs.items()}
    kinds: dict[SyncedTensors, bool] = {"frozen": False, "trained": True}
    for kind, is_adapter in kinds.items():
        served = layout.only({name for name in layout.specs if is_adapter_tensor(name) == is_adapter})
        plan = reshard_plan(Layout.replicated(served.specs, 1), served)
        sync = SharedWeightSync("actor -> rollout", plan)
        about: Any = {"edge": "actor -> rollout", "rank": 0, "reshard": plan, "weight_sync": "shared", "tensors": kind}
        inside.open(WeightPort(side="receive", address=sync.address, **about))
        sender = SharedWeightSync.open_sender(WeightPort(side="send", address=sync.address, **about))
        senders[kind] = (sync, sender, {name: tensors[name] for name in served.specs})

    def publish_and_fill(kind: SyncedTensors, version: int) -> tuple[str, int, float]:
        _, sender, published = senders[kind]
        finish_reads = sender.publish(published, version)
        end = "actor -> rollout (frozen)" if kind == "frozen" else "actor -> rollout"
        inside.fill(end, version, 10.0)
        finish_reads()
        return end, version, lora.scale

    assert inside.check(*publish_and_fill("frozen", 0)).num_tensors == 4
    assert inside.check(*publish_and_fill("trained", 1)).num_tensors == 8
    filled = publish_and_fill("trained", 2)
    own[f"{PREFIX}self_attn.qkv_proj.lora_A"].view(-1).view(torch.uint8)[8 * 16 * 4] ^= 1  # of k
    with pytest.raises(WeightMismatchError, match="version 2") as raised:
        inside.check(*filled)
    assert raised.value.tensors == (f"{PREFIX}self_attn.k_proj.lora_A.weight",)
    inside.check(*publish_and_fill("trained", 3))
    module: Any = model.get_submodule(f"{PREFIX}mlp.down_proj")
    module.quant_method.scale = 6.0
    with pytest.raises(WeightMismatchError, match=r"updates by 2\.0, and the engine those of .*mlp\.down_proj by"):
        inside.check(*publish_and_fill("trained", 4))
    module.quant_method.scale = lora.scale
    gate_up: Any = model.get_submodule(f"{PREFIX}mlp.gate_up_proj")
    gate_up.quant_method, adapted = Plain(), gate_up.quant_method
    with pytest.raises(WeightMismatchError, match=r"those of .*mlp\.gate_up_proj by another number, or adds none"):
        inside.check(*publish_and_fill("trained", 5))
    gate_up.quant_method = adapted
    module.weight.data = module.weight.data.clone()
    with pytest.raises(WeightMismatchError, match=r"mlp\.down_proj\.weight have other addresses"):
        inside.check(*publish_and_fill("trained", 6))

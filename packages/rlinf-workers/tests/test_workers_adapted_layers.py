"""Adapters in the merged and sharded layers of SGLang and vLLM, against plain products of the whole layers."""

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
from rlinf_workers.engines.adapted_layers import adapt_layers
from rlinf_workers.engines.inside import Inside
from rlinf_workers.models.lora_settings import LoraSettings
from rlinf_workers.weight_sync.base import SyncedTensors, WeightPort
from rlinf_workers.weight_sync.shared.sync import SharedWeightSync

SHAPE = TransformerShape(
    num_layers=1, hidden=16, num_heads=4, num_kv_heads=2, head_dim=4, vocab=64, intermediate=24, dtype="float64"
)
LAYERS = {
    "self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "self_attn.o_proj": ("o_proj",),
    "mlp.gate_up_proj": ("gate_proj", "up_proj"),
    "mlp.down_proj": ("down_proj",),
}
SUMMED = ("self_attn.o_proj", "mlp.down_proj")
"""Layers whose input is sharded."""
ALL = tuple(part for parts in LAYERS.values() for part in parts)
PREFIX = "model.layers.0."


class Plain:
    """As an engine computes a linear layer without an adapter."""

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return linear(x, layer.weight, bias)


def lora_of(targets: tuple[str, ...], rank: int = 3) -> LoraSettings:
    return LoraSettings(rank=rank, alpha=6.0, targets=targets, base_digest="")


def merged_model(layout: Layout, rank: int) -> nn.Module:
    """A process's layers of one decoder layer, and its embedding."""
    model: Any = nn.Module()
    sizes = {block.name: block.box.shape[0] for block in layout.ranks[rank].blocks}
    for layer, parts in LAYERS.items():
        one: Any = nn.Module()
        shape = layout.ranks[rank].buffers[f"{PREFIX}{layer}.weight"].shape
        one.weight = nn.Parameter(torch.zeros(shape, dtype=torch.float64), requires_grad=False)
        above = f"{PREFIX}{layer.rpartition('.')[0]}"
        one.output_partition_sizes, one.quant_method = [sizes[f"{above}.{part}.weight"] for part in parts], Plain()
        owner = model
        *path, own = f"{PREFIX}{layer}".split(".")
        for name in path:
            if not hasattr(owner, name):
                owner.add_module(name, nn.Module())
            owner = getattr(owner, name)
        owner.add_module(own, one)
    return model


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("targets", [ALL, ("q_proj", "v_proj", "up_proj"), ("k_proj", "o_proj", "gate_proj")])
def test_merged_and_sharded_layers_add_the_update_of_each_adapted_part(tp, targets):
    """With four processes two of them hold the same key and value head."""
    lora, base = lora_of(targets), merged_layout(SHAPE, tp=tp)
    layout = adapted_layout(base, lora.rank, lora.changes)
    random = torch.Generator().manual_seed(tp)
    tensors = {
        name: torch.randn(spec.shape, generator=random, dtype=torch.float64) for name, spec in layout.specs.items()
    }
    models = [merged_model(base, rank) for rank in range(tp)]
    for model, held in zip(models, layout.ranks, strict=True):
        adapt_layers(model, lora)
        buffers = {name: spec.shape for name, spec in held.buffers.items() if name.startswith(PREFIX)}
        own = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        assert own == {name: shape for name, shape in buffers.items() if "norm" not in name}
    canonical = [tensors[name] for name in sorted(tensors)]
    served = [
        {name: torch.empty(spec.shape, dtype=torch.float64) for name, spec in held.buffers.items()}
        for held in layout.ranks
    ]
    plan = reshard_plan(Layout.replicated(specs_of(tensors), 1), layout)
    for rank, buffers in enumerate(served):
        execute_copies(plan.copies(dst_rank=rank), canonical, list(buffers.values()))
    for model, buffers in zip(models, served, strict=True):
        for name, parameter in model.named_parameters():
            parameter.copy_(buffers[name])
    for layer, parts in LAYERS.items():
        names = [f"{PREFIX}{layer.rpartition('.')[0]}.{part}" for part in parts]
        x = torch.randn(5, tensors[f"{names[0]}.weight"].shape[1], generator=random, dtype=torch.float64)
        expected = []
        for name in names:
            expected.append(linear(x, tensors[f"{name}.weight"]))
            if lora.changes(name):
                expected[-1] += lora.scale * linear(linear(x, tensors[name + LORA_A]), tensors[name + LORA_B])
        total = [torch.zeros_like(one) for one in expected]
        for rank, model in enumerate(models):
            module: Any = model.get_submodule(f"{PREFIX}{layer}")
            blocks = {b.name: b.box for b in layout.ranks[rank].blocks if b.buffer == f"{PREFIX}{layer}.weight"}
            columns = next(iter(blocks.values()))
            own_x = x[:, columns.start[1] : columns.start[1] + columns.shape[1]]
            results = module.quant_method.apply(module, own_x).split(module.output_partition_sizes, dim=-1)
            for sums, name, result in zip(total, names, results, strict=True):
                box = blocks[f"{name}.weight"]
                if layer in SUMMED:
                    sums += result
                else:
                    sums[:, box.start[0] : box.start[0] + box.shape[0]] = result
        for sums, one in zip(total, expected, strict=True):
            torch.testing.assert_close(sums, one, rtol=0, atol=1e-12)


def test_an_adapter_that_changes_no_layer_is_refused_by_its_targets():
    lora = lora_of(("query", "wo"))
    with pytest.raises(ValueError, match="has no linear layer query or wo"):
        adapt_layers(merged_model(merged_layout(SHAPE), 0), lora)
    with pytest.raises(LayoutError, match="changes none of the model's linear layers"):
        adapted_layout(merged_layout(SHAPE), lora.rank, lora.changes)


def test_a_process_has_one_end_for_the_base_and_one_for_the_adapter_and_names_what_is_wrong_with_either():
    """A flipped bit of A, another scale, and frozen weights that are served from elsewhere since they were checked."""
    lora, model = lora_of(ALL), merged_model(merged_layout(SHAPE), 0)
    adapt_layers(model, lora)
    own = dict(model.named_parameters())
    layout = adapted_layout(merged_layout(SHAPE), lora.rank, lora.changes)
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

    assert inside.check(*publish_and_fill("frozen", 0)).num_tensors == len(LAYERS)
    assert inside.check(*publish_and_fill("trained", 1)).num_tensors == 2 * len(LAYERS)
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
    module.weight.data = module.weight.data.clone()
    with pytest.raises(WeightMismatchError, match=r"mlp\.down_proj\.weight have other addresses"):
        inside.check(*publish_and_fill("trained", 5))

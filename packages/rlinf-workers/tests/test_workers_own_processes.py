"""Weights go straight into the processes of an engine, and whatever these serve that was not published is named."""

import ctypes
import json
import random
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from workers_own_processes import TP, TwoProcesses

from rlinf_comm import LayoutError, WeightMismatchError
from rlinf_comm.weights import Layout, execute, reshard_plan, specs_of
from rlinf_comm.weights.fp8 import BlockQuantizer, quantize
from rlinf_comm.weights.layouts import TransformerShape, merged_layout, quantized_layout, quantized_names
from rlinf_workers.engines import inside as engine_inside
from rlinf_workers.engines.inside import HeldWeights
from rlinf_workers.engines.serving_layout import serving_layout
from rlinf_workers.errors import WorkersError
from rlinf_workers.models.language_model import ModelSettings, build_model
from rlinf_workers.testing.architectures import tiny_architecture
from rlinf_workers.testing.engines import check_offload, check_weights
from rlinf_workers.testing.weight_sync import parts_of
from rlinf_workers.weight_sync.base import WeightPort
from rlinf_workers.weight_sync.shared.sync import SharedWeightSync

NUM_FLIPS = 1000
EDGE = "actor -> rollout"


class Sync:
    """A trainer in this process, and an engine with two of its own."""

    def __init__(self, settings, *, attests=True, **options):
        self.attests = attests
        model = build_model(settings, torch.device("cpu"))
        self.weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
        self.engine = TwoProcesses(settings, torch.device("cpu"), max_prompt_tokens=8, **options)
        specs = specs_of(self.weights)
        self.reshard = reshard_plan(Layout.replicated(specs, 1), self.engine.layout().with_dtypes_of(specs))
        self.sync = SharedWeightSync(EDGE, self.reshard)
        self.sender = SharedWeightSync.open_sender(self.port("send", 0))
        self.receiver = self.engine.open_receiver([self.port("receive", rank) for rank in range(TP)])

    def port(self, side, rank):
        return WeightPort(
            edge=EDGE,
            side=side,
            rank=rank,
            reshard=self.reshard,
            weight_sync="shared",
            address=self.sync.address,
            attests=self.attests,
        )

    def change(self, version):
        generator = torch.Generator().manual_seed(version)
        for tensor in self.weights.values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator))

    def publish(self, version):
        self.change(version)
        return self.sender.publish(self.weights, version)

    def expected(self):
        """What each process should hold; where nothing lies, it holds 0."""
        layout = self.engine.layout().with_dtypes_of(specs_of(self.weights))
        return parts_of(self.weights, layout)


@pytest.fixture
def started():
    """Makes a Sync, and ends its engine."""
    syncs = []

    def start(settings, **options):
        syncs.append(Sync(settings, **options))
        return syncs[-1]

    yield start
    for sync in syncs:
        sync.engine.close()


@pytest.mark.parametrize("check", [check_weights, check_offload], ids=lambda check: check.__name__)
def test_an_engine_with_processes_of_its_own_conforms(check, model):
    check(partial(TwoProcesses, model, torch.device("cpu")), model)


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "qwen3_moe", "llama"])
def test_parameters_are_filled_where_the_engine_has_them(name, tmp_path, started):
    """Llama has tied embeddings; the engine rounds to bfloat16. Rows that pad an embedding are zero."""
    sync = started(tiny_architecture(name, tmp_path), dtype="bfloat16")
    for version in (1, 2):
        finish_reads = sync.publish(version)
        if version == 2:
            finish_reads()
        sync.receiver.receive({}, version)()
        for parameters, expected in zip(sync.engine.parameters, sync.expected(), strict=True):
            assert parameters.keys() == expected.keys()
            assert all(torch.equal(parameters[key], expected[key]) for key in expected)


@pytest.mark.parametrize(
    ("liar", "text"),
    [
        ("SkipsATensor", r"model\.layers\.1\.self_attn\.[qkv]_proj\.weight"),
        ("StaysOld", r"embed_tokens.*differ"),
        ("SwapsExperts", r"model\.layers\.1\.mlp\.experts\.gate_up_proj"),
        ("FillsOthers", r"have other addresses"),
        ("DoesNothing", r"was not filled"),
        ("AnswersForAnotherVersion", r"serve versions \[6, 6\], not 7"),
    ],
)
def test_a_process_that_says_success_and_did_something_else_is_found(liar, text, tmp_path, started):
    sync = started(tiny_architecture("qwen3_moe", tmp_path), liar=liar)
    sync.publish(7)
    check = sync.receiver.receive({}, 7)
    with pytest.raises(WeightMismatchError, match=text) as raised:
        check()
    message = str(raised.value)
    assert "version 7" in message or liar == "AnswersForAnotherVersion"
    assert all(f"engine process {rank} (pid " in message for rank in range(TP)) or liar == "AnswersForAnotherVersion"
    if liar in ("SkipsATensor", "SwapsExperts"):
        assert raised.value.tensors and all(name.startswith("model.layers.1.") for name in raised.value.tensors)


def test_every_flipped_bit_is_found_and_named(model, started):
    """In what is served, and on the way to it."""
    sync, choose = started(model), random.Random(5)
    blocks = [[block for block in rank.blocks if block.box.num_elements] for rank in sync.engine.layout().ranks]
    for version in range(1, NUM_FLIPS + 1):
        finish_reads = sync.publish(version)
        if version % 2:
            check = sync.receiver.receive({}, version)
            rank = choose.randrange(TP)
            block = choose.choice(blocks[rank])
            names = {block.name}
            flip(sync.engine.parameters[rank][block.buffer], block, choose)
        else:
            finish_reads()
            store = sync.sender._sender
            slot = [store._words.load(store._control.slot_version(0, slot)) for slot in range(2)].index(version)
            placed = choose.choice(store._own)
            names = {placed.piece.name}
            address = store._slot_address(slot) + placed.offset + choose.randrange(placed.num_bytes)
            ctypes.c_uint8.from_address(address).value ^= 1 << choose.randrange(8)
            check = sync.receiver.receive({}, version)
        with pytest.raises(WeightMismatchError, match=f"version {version}") as raised:
            check()
        assert set(raised.value.tensors) == names


def test_an_edge_that_is_not_attested_serves_what_it_has(model, started):
    sync = started(model, attests=False)
    for version in range(1, 5):
        sync.publish(version)()
        check = sync.receiver.receive({}, version)
        sync.engine.parameters[0]["model.norm.weight"][0] += 1
        check()


def flip(tensor, block, choose):
    """A bit of an element of a block."""
    index = [choose.randrange(length) for length in block.box.shape]
    place = block.offset + sum(i * stride for i, stride in zip(index, block.strides, strict=True))
    flat = tensor.view(-1).view(torch.uint8)
    flat[place * tensor.element_size() + choose.randrange(tensor.element_size())] ^= 1 << choose.randrange(8)


def test_a_model_that_does_not_fit_is_refused_by_name(model):
    engine = TwoProcesses(model, torch.device("cpu"), max_prompt_tokens=8, missing="model.norm.weight")
    with pytest.raises(LayoutError, match=r"qwen2, engine process 0: .*model\.norm\.weight \[32\] is missing"):
        engine.layout()
    engine.close()


def test_a_padded_or_unknown_parameter_is_refused_by_name(model):
    engine = TwoProcesses(model, torch.device("cpu"), max_prompt_tokens=8)
    held = [HeldWeights(buffers=dict(rank.buffers), sizes={"tp": TP}) for rank in engine.stored.ranks]
    name, other = "model.layers.0.mlp.down_proj.weight", "model.layers.0.mlp.scale"
    spec = held[1].buffers[name]
    held[1].buffers.update({name: type(spec)((spec.shape[0], 64), spec.dtype), other: spec})
    with pytest.raises(LayoutError, match=re.escape(f"{name} is float32 [32, 64] and not float32 [32, 32]")) as raised:
        serving_layout(model, held)
    assert "engine process 1" in str(raised.value) and f"{other} [32, 32] is unexpected" in str(raised.value)


@pytest.mark.parametrize(("kind", "weight"), [("deepseek_v3", "kv_b_proj"), ("glm4_moe", "mlp.gate")])
def test_a_model_that_engines_compute_from_copies_is_refused(kind, weight, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(LayoutError, match=rf"'{kind}': .* copies that they made of {weight} .*engine=huggingface"):
        serving_layout(
            ModelSettings(folder=str(tmp_path), has_weights=False), [HeldWeights(buffers={}, sizes={"tp": 1})]
        )


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_merged_fp8_parameters_are_filled_with_quantized_weights(family, tmp_path):
    """As SGLang has them on two devices, from a trainer that stacks experts as transformers does."""
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128}
    sizes |= {"intermediate_size": 512, "moe_intermediate_size": 256}
    settings = tiny_architecture(family, tmp_path, **sizes)
    config = json.loads((tmp_path / "config.json").read_text())
    shape = replace(TransformerShape.from_config(config, "float32"), fp8_scales=(128, 128))
    parallelism = {"tp": TP, "expert_tp": TP}
    held = [HeldWeights(buffers=dict(rank.buffers), sizes=parallelism) for rank in merged_layout(shape, tp=TP).ranks]
    with pytest.raises(LayoutError, match=r"float8_e4m3fn .* and not float32|unexpected"):
        serving_layout(settings, held)
    served = serving_layout(replace(settings, quantization="fp8"), held)

    weights = {name: one.detach() for name, one in build_model(settings, torch.device("cpu")).named_parameters()}
    trained = Layout.replicated(specs_of(weights), 1)
    names = quantized_names(trained.specs, served.specs)
    assert ("model.layers.1.mlp.experts.gate_up_proj" in names) == (family == "qwen3_moe")
    filled = [
        {name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)) for name, spec in rank.buffers.items()}
        for rank in served.ranks
    ]
    published = BlockQuantizer(trained, 0, names).quantized(weights)
    execute(reshard_plan(quantized_layout(trained, names), served), [published], filled)

    at = "model.layers.1.self_attn."
    parts = [(weights[f"{at}{part}_proj.weight"], rows) for part, rows in (("q", 256), ("k", 128), ("v", 128))]
    for rank in range(TP):
        own = [quantize(weight[rank * rows : (rank + 1) * rows]) for weight, rows in parts]
        for number, suffix in enumerate(("", "_scale_inv")):
            expected = torch.cat([one[number].to(torch.float32) for one in own])
            assert torch.equal(filled[rank][f"{at}qkv_proj.weight{suffix}"].to(torch.float32), expected)
    if family == "qwen3_moe":
        stack = weights["model.layers.1.mlp.experts.gate_up_proj"]  # [experts, gate and up, hidden]
        for rank in range(TP):
            gate_up = torch.cat([stack[:, first : first + 128] for first in (128 * rank, 256 + 128 * rank)], 1)
            for number, name in enumerate(("w13_weight", "w13_weight_scale_inv")):
                tensor = filled[rank][f"model.layers.1.mlp.experts.{name}"]
                assert torch.equal(tensor.to(torch.float32), quantize(gate_up)[number].to(torch.float32))


def test_a_process_that_died_is_named(model, started):
    sync = started(model)
    sync.publish(1)
    check = sync.receiver.receive({}, 1)
    sync.engine.children[1].kill()
    sync.engine.children[1].join()
    with pytest.raises(WorkersError, match=r"engine process 1 \(pid \d+\) has died"):
        check()
    sync.engine.tickets.pop()


def test_a_larger_model_has_longer_to_answer(model, started, monkeypatch):
    """A check reads all of its weights."""
    monkeypatch.setattr(engine_inside, "READ_BYTES_PER_S", 1e3)
    engine = started(model).engine
    largest = max(sum(tensor.nbytes for tensor in parameters.values()) for parameters in engine.parameters)
    assert engine.own_processes._answer_s == 60.0 + largest / 1e3


def test_an_answer_that_came_too_late_is_nobodys(model, started):
    """A call that was given up leaves its answers behind; the next call gets its own."""
    sync = started(model)
    processes = sync.engine.own_processes
    enter, processes._enter = processes._enter, lambda ticket: 1 / 0
    with pytest.raises(ZeroDivisionError):
        processes.call("fill", EDGE, 1, 60.0, waits=True)
    processes._enter = enter
    sync.publish(2)
    sync.receiver.receive({}, 2)()
    number = processes.call("describe")
    assert number == processes.call("describe")

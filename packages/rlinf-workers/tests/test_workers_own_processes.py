"""Weights go straight into the processes of an engine, and whatever these serve that was not published is named."""

import ctypes
import random
import re
from functools import partial

import pytest
import torch
from workers_own_processes import TP, TwoProcesses

from rlinf_comm import LayoutError, WeightMismatchError
from rlinf_comm.weights import Layout, reshard_plan, specs_of
from rlinf_workers.engines import processes as engine_processes
from rlinf_workers.engines.inside import HeldWeights
from rlinf_workers.engines.serving_layout import serving_layout
from rlinf_workers.errors import WorkersError
from rlinf_workers.models.language_model import build_model
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
    """Llama has tied embeddings; the engine rounds to bfloat16."""
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
    monkeypatch.setattr(engine_processes, "CHECK_BYTES_PER_S", 1e3)
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

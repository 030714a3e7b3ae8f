"""Weights that are served in FP8: what an engine computes with them, and that a flow quantizes them on their way."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rlinf_comm.weights import Layout, TensorSpec
from rlinf_comm.weights.fp8 import dequantize, quantize
from rlinf_sched import Cluster, plan_for_mode
from rlinf_sched.derive import JobShape, Lengths, ModelShape
from rlinf_workers import Executor, Flow, Reader, StepContext, Worker, Writer
from rlinf_workers.engines import HuggingFaceEngine, SamplingSettings
from rlinf_workers.execution.worker_host import are_stored
from rlinf_workers.models.fp8_modules import quantize_modules
from rlinf_workers.models.language_model import build_model
from rlinf_workers.models.placement import tensors_of
from rlinf_workers.testing.architectures import tiny_architecture
from rlinf_workers.testing.engines import prompts_of, sample
from rlinf_workers.testing.toy_flow import Number
from rlinf_workers.trainers.served import LowRank, Served

CPU = torch.device("cpu")
LENGTHS = Lengths(mean_tokens=8, limit_tokens=16, prompt_tokens=8, group_size=2)
WIDE = {"hidden_size": 160, "intermediate_size": 144}
"""Sizes that blocks of 128 do not divide."""


def rounded_model(settings):
    """The plain model with weights that went through FP8."""
    model = build_model(settings, CPU)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "_proj" in name and name.endswith(("proj.weight", "gate_up_proj", "down_proj")):
                parameter.copy_(dequantize(*quantize(parameter), parameter.dtype))
    return model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe", "llama"])
def test_it_computes_what_a_plain_model_with_the_rounded_weights_computes(family, dtype, tmp_path):
    settings = replace(tiny_architecture(family, tmp_path, **WIDE), dtype=dtype)
    model = build_model(settings, CPU)
    quantize_modules(model)
    tokens = torch.randint(2, 12, (3, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, rounded_model(settings)(tokens).logits)
    assert not torch.equal(model(tokens).logits, build_model(settings, CPU)(tokens).logits)


def test_embeddings_norms_biases_head_and_routers_stay(tmp_path):
    model = build_model(tiny_architecture("qwen3_moe", tmp_path), CPU)
    before = {name: tensor.dtype for name, tensor in tensors_of(model).items()}
    quantize_modules(model)
    after = {name: tensor.dtype for name, tensor in tensors_of(model).items()}
    changed = {name.rpartition("layers.")[2] for name in before if before[name] != after[name]}
    assert changed == {
        f"{layer}.{part}"
        for layer in (0, 1)
        for part in (
            *(f"self_attn.{one}_proj.weight" for one in "qkvo"),
            "mlp.experts.gate_up_proj",
            "mlp.experts.down_proj",
        )
    }
    scales = after.keys() - before.keys()
    assert {name.removesuffix("_scale_inv").rpartition("layers.")[2] for name in scales} == changed


def test_a_model_without_such_layers_is_refused():
    from transformers import GPT2Config, GPT2LMHeadModel

    with pytest.raises(
        ValueError, match=r"quantization=fp8: GPT2LMHeadModel has no linear layer whose name ends in _proj"
    ):
        quantize_modules(GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=9, n_positions=8)))


@pytest.mark.parametrize("options", [{}, {"refill": True}], ids=["batches", "refill"])
def test_the_engine_samples_with_the_rounded_weights(options, tmp_path):
    """Also after it was offloaded and its weights were dropped."""
    settings = tiny_architecture("qwen2", tmp_path, **WIDE)
    engine = HuggingFaceEngine(replace(settings, quantization="fp8"), CPU, max_prompt_tokens=8, **options)
    engine.offload()
    engine.onload()
    engine.weights_received(0)
    prompts, model = prompts_of([4, 7, 8]), rounded_model(settings)
    for one in sample(engine, prompts, SamplingSettings(group_size=2, max_new_tokens=6)):
        prompt = next(prompt for prompt in prompts if prompt.index == one.index)
        for row in range(len(one.members)):
            num_tokens = int(one.loss_mask[row].sum())
            answer = one.token_ids[row, :num_tokens]
            with torch.no_grad():
                logits = model(torch.cat([prompt.token_ids, answer])[None]).logits[0]
            logprobs = logits.log_softmax(-1)[len(prompt.token_ids) - 1 : -1].gather(1, answer[:, None])[:, 0]
            torch.testing.assert_close(one.logprobs[row, :num_tokens], logprobs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_plans_count_the_bytes_that_the_engine_holds(family, tmp_path):
    sizes = {"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128}
    sizes |= {"intermediate_size": 384, "moe_intermediate_size": 128}
    settings = replace(tiny_architecture(family, tmp_path, **sizes), dtype="bfloat16")
    model = build_model(settings, CPU)
    quantize_modules(model)
    shape = ModelShape.from_folder(tmp_path)
    job = JobShape(lengths=LENGTHS, num_groups=1, dtype_bytes=4, served_bytes=2, serves_fp8=True)
    num_bytes = sum(tensor.nbytes for tensor in tensors_of(model).values())
    assert job.served_weights_bytes(shape) == pytest.approx(num_bytes, rel=1e-3)
    of_layers = max(
        sum(one.numel() for name, one in layer.named_parameters() if name.endswith(ends))
        for layer in model.model.layers
        for ends in ("down_proj.weight", "o_proj.weight", "gate_up_proj")
    )
    assert shape.largest_linear_parameters == of_layers


def test_weights_that_are_merged_when_they_are_read_are_not_changed_in_place():
    """The first copy may not lend its address to the second."""
    weights = {"a": torch.ones(4, 6), "b": torch.ones(2, 3)}
    change = LowRank(a=torch.ones(1, 6), b=torch.ones(4, 1), scale=1.0)
    merged = Served(weights=weights, changes={"a": change}).merged()
    assert are_stored(weights, weights) and are_stored(merged, ["b"])
    assert not are_stored(merged, ["b", "a"])
    assert not are_stored({"a": torch.ones(4, 6).T}, ["a"])


# -- a flow ------------------------------------------------------------------------------------------------------------

ROWS, COLUMNS = 200, 150
NUM_STEPS = 20


def weight_of(version: int) -> Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(version))


class Half(Worker):
    """Trains half of the rows of a matrix, which ends within a block."""

    def __init__(self) -> None:
        self._version = 0
        self._weight = self._own()

    def learn(self, served: Reader[Number]) -> None:
        for _ in served:
            pass
        self._version += 1
        self._weight.copy_(self._own())

    def _own(self) -> Tensor:
        half = ROWS // 2
        return weight_of(self._version)[self.rank * half : (self.rank + 1) * half].clone()

    def weights(self) -> Mapping[str, Tensor]:
        return {"a_proj.weight": self._weight}

    def layout(self) -> Layout:
        return Layout.sharded({"a_proj.weight": TensorSpec((ROWS, COLUMNS), "float32")}, 2)

    @property
    def policy_version(self) -> int:
        return self._version


class Serving(Worker):
    """Compares what it serves with the whole matrix."""

    def __init__(self) -> None:
        values, scales = quantize(torch.zeros(ROWS, COLUMNS))
        self._tensors = {"a_proj.weight": values, "a_proj.weight_scale_inv": scales}
        self._version = -1

    def show(self, numbers: Reader[Number], served: Writer[Number]) -> None:
        for chunk in numbers:
            values, scales = quantize(weight_of(self._version))
            is_exact = torch.equal(self._tensors["a_proj.weight"].view(torch.uint8), values.view(torch.uint8))
            is_exact = is_exact and torch.equal(self._tensors["a_proj.weight_scale_inv"], scales)
            self.record("show/exact", float(is_exact))
            self.record("show/version", float(self._version))
            served.put_many([(item.index, item) for item in chunk])

    def weights(self) -> Mapping[str, Tensor]:
        return self._tensors

    def weights_received(self, policy_version: int) -> None:
        self._version = policy_version


@pytest.mark.parametrize("weight_sync", [pytest.param("shared", marks=pytest.mark.slow), "streams"])
def test_ranks_with_parts_of_a_block_publish_what_the_whole_matrix_gives(tmp_path, weight_sync):
    """Twenty syncs, each checked by the digests of what is served."""
    flow = Flow("toy").worker("serving", Serving).worker("half", Half)
    flow.stage("serving", Serving.show, reads="numbers", writes="served")
    flow.stage("half", Half.learn, reads="served", dispatch="key", trains=True)
    flow.weights("half", to="serving")
    cluster = Cluster.cpu_slots(2)
    with Executor(
        cluster=cluster,
        log_folder=tmp_path / "logs",
        env_vars={"OMP_NUM_THREADS": "1"},
        weight_sync=weight_sync,
    ) as executor:
        executor.start(flow, plan_for_mode(flow.graph(), cluster, "collocated"))
        executor.sync_weights()
        for step in range(NUM_STEPS):
            context = StepContext(step=step, phase="train", seed=0, num_items=2)
            numbers = [Number(index=index, value=0.0) for index in range(2)]
            metrics = executor.run(flow, context=context, feeds={"numbers": numbers}, timeout_s=600).metrics
            assert (metrics["show/exact"], metrics["show/version"]) == (1.0, step)
        edge = flow.graph().weight_edges[0]
        assert executor.weights_bytes(edge) == ROWS * COLUMNS + 4 * 4, "a byte a weight, and a scale for each block"

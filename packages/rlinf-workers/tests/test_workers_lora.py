"""LoRA: what serves equals peft's own merge, only the adapter costs and is saved, and the base says what it was."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rlinf_comm.testing import assert_bitwise_equal
from rlinf_comm.weights import execute, reshard_plan
from rlinf_comm.weights.layouts import is_adapter_tensor
from rlinf_workers.engines.huggingface.engine import MIN_ROWS, HuggingFaceEngine
from rlinf_workers.errors import WeightFilesError
from rlinf_workers.launchers.local.launcher import LocalLauncher
from rlinf_workers.models.adapted_modules import adapt_modules
from rlinf_workers.models.language_model import ModelSettings, build_model, load_model
from rlinf_workers.models.lora import LoraModel, LoraSettings, find_targets, first_adapter
from rlinf_workers.models.sequences import SequenceBatch
from rlinf_workers.models.trainable import TokenModel, ValueModel
from rlinf_workers.testing.architectures import tiny_architecture
from rlinf_workers.testing.backends import MakeBackend, trial_worker
from rlinf_workers.testing.engines import tiny_model
from rlinf_workers.testing.launchers import launched, start
from rlinf_workers.testing.weight_sync import parts_of
from rlinf_workers.trainers.base import OptimizerSettings
from rlinf_workers.trainers.checkpoint import CheckpointFiles
from rlinf_workers.trainers.fsdp2.backend import fsdp2
from rlinf_workers.trainers.replicated.backend import ReplicatedBackend
from rlinf_workers.worker import Worker

pytestmark = pytest.mark.usefixtures("forked_workers")

TARGETS = ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
SETTINGS = OptimizerSettings(learning_rate=1e-2, epsilon=1e-3, max_grad_norm=1e9)
LORA = LoraSettings(rank=3, alpha=12.0, targets=TARGETS, base_digest="0123456789abcdef")
BATCH = SequenceBatch(
    prompt_ids=torch.tensor([[0, 2, 1, 4]]),
    prompt_mask=torch.tensor([[0, 1, 1, 1]]),
    completion_ids=torch.tensor([[5, 3, 1], [4, 4, 6]]),
    loss_mask=torch.ones(2, 3),
)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("base"))


def adapted(model, lora=LORA) -> LoraModel:
    return LoraModel(TokenModel(model, 1.0), model, lora)


def make(model, lora=LORA, worker=None, backend: MakeBackend = ReplicatedBackend, **options) -> Any:
    return backend(adapted(model, lora), worker or trial_worker(), optimizer=SETTINGS, num_shards=2, **options)


def train(backend, num_updates=2) -> list[float]:
    """Returns the norms; every shard of every rank has the batch, weighted by its number."""
    norms = []
    for _ in range(num_updates):
        backend.begin(1)
        for shard in backend.shards:
            backend.backward(shard, BATCH, lambda answers, scale=shard + 1: (-scale * answers.logprobs.sum(), [1.0]))
        backend.finish_backward()
        norms.append(backend.step(6.0))
    return norms


def save(backend, folder, worker=None):
    """As a checkpoint has it."""
    files = CheckpointFiles(worker or trial_worker(), str(folder))
    files.add_model(backend, "model")
    files.add_optimizer(backend)
    files.start().wait()
    return f"{folder}/model"


def pick(tensors, names):
    return {name: tensors[name] for name in names}


def plain(model):
    return AutoModelForCausalLM.from_pretrained(model.folder, dtype=getattr(torch, model.dtype)).eval()


def merged_by_peft(model, folder) -> dict[str, torch.Tensor]:
    return PeftModel.from_pretrained(plain(model), str(folder)).merge_and_unload().state_dict()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_serves_is_what_peft_merges(tmp_path, base, dtype):
    model = dataclasses.replace(base, dtype=dtype)
    backend = make(model)
    train(backend)
    expected, weights = merged_by_peft(model, save(backend, tmp_path)), backend.weights()
    assert weights.keys() == expected.keys()
    changed = 0
    for name, tensor in plain(model).state_dict().items():
        assert weights[name].dtype == expected[name].dtype == tensor.dtype
        torch.testing.assert_close(weights[name], expected[name], rtol=1e-6, atol=1e-7)
        changed += not torch.equal(weights[name], tensor)
    assert changed == 14
    assert {p.dtype for p in backend.on_model(lambda m: list(m.parameters())) if p.requires_grad} == {torch.float32}


def test_an_engine_serves_what_the_adapter_says(base):
    backend = make(base)
    train(backend)
    engine = HuggingFaceEngine(base, torch.device("cpu"), max_prompt_tokens=8)
    before = TokenModel(base, 1.0).answers(engine._model, BATCH, entropies=False).logprobs
    execute(reshard_plan(backend.layout(), engine.layout()), [dict(backend.weights())], [dict(engine.weights())])
    after = TokenModel(base, 1.0).answers(engine._model, BATCH, entropies=False).logprobs
    trained = backend.forward(BATCH).logprobs
    assert (before - trained).abs().max() > 1e-2
    torch.testing.assert_close(after, trained, rtol=1e-5, atol=1e-5)
    assert_bitwise_equal(backend.forward(BATCH, adapter=False).logprobs, before.detach())


def test_only_the_adapter_costs_gradients_and_moments(base):
    backend = make(base)
    train(backend)
    linear = sum(sum(shape) for shape in find_targets(base.folder, ["all-linear"])[1].values())
    count = LORA.rank * linear
    assert {at: buffer.numel() * buffer.element_size() for at, buffer in backend._buffers.items()} == {
        (0, torch.float32): 4 * count,
        (1, torch.float32): 4 * count,
    }
    moments = [t for state in backend._optimizer.state.values() for key, t in state.items() if key != "step"]
    assert sum(t.numel() * t.element_size() for t in moments) == 2 * 4 * count
    assert all(p.grad is None for p in backend.on_model(lambda m: list(m.parameters())) if not p.requires_grad)


def test_merged_weights_are_made_one_at_a_time(base):
    backend = make(base)
    weights = backend.weights()
    name = "model.layers.0.mlp.up_proj.weight"
    assert weights[name].data_ptr() != weights[name].data_ptr() or weights[name] is not weights[name]
    assert weights["model.norm.weight"] is weights["model.norm.weight"]


@pytest.mark.parametrize("backend", [ReplicatedBackend, fsdp2])
def test_an_adapter_goes_on_from_its_files_to_the_bit(tmp_path, base, backend):
    one, other = make(base, backend=backend), make(dataclasses.replace(base, seed=9), backend=backend)
    train(one)
    save(one, tmp_path)
    size = sum(file.stat().st_size for file in (tmp_path / "model").glob("*.safetensors"))
    assert size < Path(base.folder, "model.safetensors").stat().st_size
    other.load_model(f"{tmp_path}/model")
    other.load_optimizer(str(tmp_path))
    assert train(one) == train(other)
    for name, weight in one.weights().items():
        assert_bitwise_equal(weight.detach(), other.weights()[name].detach())


def test_a_critic_may_stand_beside_and_takes_what_serves(base):
    policy = make(base)
    train(policy)
    critic = ReplicatedBackend(ValueModel(base), trial_worker(), optimizer=SETTINGS, num_shards=2)
    critic.start_from(policy)
    for name, weight in policy.weights().items():
        if name != "lm_head.weight":
            assert_bitwise_equal(critic.weights()[name].detach(), weight.detach())


@pytest.mark.parametrize(
    ("lora", "says"),
    [
        (dataclasses.replace(LORA, base_digest="f" * 16), "another base"),
        (dataclasses.replace(LORA, rank=2), "the rank and the targets"),
        (dataclasses.replace(LORA, targets=("q_proj",)), "the rank and the targets"),
    ],
)
def test_an_adapter_that_is_another_is_refused(tmp_path, base, lora, says):
    with pytest.raises(ValueError, match=says):
        make(base, lora).load_model(save(make(base), tmp_path))


def test_an_adapter_that_binds_to_no_layer_is_not_served(tmp_path, base):
    """As after an export under other names: peft warns, and serves the base."""
    folder = Path(save(make(base), tmp_path))
    build_model(dataclasses.replace(base, folder=str(folder)), torch.device("cpu"))
    tensors = load_file(folder / "adapter_model.safetensors")
    moved = {name.replace(".layers.", ".decoder.layers."): tensor for name, tensor in tensors.items()}
    save_file(moved, folder / "adapter_model.safetensors", {"format": "pt"})
    with pytest.raises(WeightFilesError, match=r"does not fit its base .*decoder\.layers\.0\..*lora_A\.weight"):
        build_model(dataclasses.replace(base, folder=str(folder)), torch.device("cpu"))


def test_a_whole_model_is_no_adapter_and_an_adapter_no_model(tmp_path, base):
    with pytest.raises(ValueError, match="holds a whole model"):
        make(base).load_model(base.folder)
    folder = save(make(base), tmp_path)
    whole = ReplicatedBackend(TokenModel(base, 1.0), trial_worker(), optimizer=SETTINGS, num_shards=2)
    with pytest.raises(ValueError, match="holds an adapter"):
        whole.load_model(folder)


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (["all-linear"], TARGETS),
        (["q_proj", "mlp.up_proj"], ("q_proj", "up_proj")),
        (["layers.1.self_attn.v_proj"], ("model.layers.1.self_attn.v_proj",)),
    ],
)
def test_targets_are_found_in_the_config_alone(base, targets, expected):
    assert find_targets(base.folder, targets)[0] == expected


@pytest.mark.parametrize(
    ("targets", "says"),
    [
        (["q_proj", "query"], "'query' is no layer of qwen2; use all-linear, or of down_proj, gate_proj"),
        (["lm_head"], "lm_head, the head"),
        (["embed_tokens"], "a Embedding"),
    ],
)
def test_targets_that_mean_nothing_are_named(base, targets, says):
    with pytest.raises(ValueError, match=says):
        find_targets(base.folder, targets)


class Rank(Worker):
    """One of two that hold a model together."""

    def learn(self, model, folder: str, options: dict) -> dict[str, list[float]]:
        backend = make(model, worker=self, backend=fsdp2, **options)
        reference = backend.forward(BATCH, adapter=False).logprobs
        norms = train(backend)
        if self.rank == 0:  # the other one idles
            assert_bitwise_equal(backend.forward(BATCH, adapter=False).logprobs, reference)
            assert not torch.equal(backend.forward(BATCH).logprobs, reference)
        saved = save(backend, folder, self)
        self.ranks.barrier()
        expected = parts_of(merged_by_peft(model, saved), backend.layout())[self.rank]
        assert backend.weights().keys() == expected.keys()
        for name, part in backend.weights().items():
            torch.testing.assert_close(part, expected[name], rtol=1e-6, atol=1e-7)
        moments = [t.to_local() for state in backend._optimizer.state.values() for k, t in state.items() if k != "step"]
        return {
            "norms": norms,
            "moments": [float(t.numel()) for t in moments],
            "reference": reference.flatten().tolist(),
        }


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_two_ranks_that_share_a_model_train_what_one_does(tmp_path, base, dtype):
    """And their files are those of one, which goes on from them."""
    model = dataclasses.replace(base, dtype=dtype)
    one = make(model)
    reference, norms = one.forward(BATCH).logprobs.flatten().tolist(), train(one)
    with launched(LocalLauncher) as launcher:
        ranks = start(launcher, tmp_path / "ranks", Rank, num_ranks=2).call("learn", model, str(tmp_path), {})
    save(one, tmp_path / "one")
    for rank in ranks:
        assert rank["norms"] == pytest.approx(norms, rel=1e-6 if dtype == "float32" else 0.05)
        assert rank["reference"] == pytest.approx(reference, rel=1e-6)
    moments = [t for state in one._optimizer.state.values() for key, t in state.items() if key != "step"]
    assert sum(sum(rank["moments"]) for rank in ranks) == sum(t.numel() for t in moments)
    for name in ("model/adapter_model.safetensors", "optimizer.safetensors") if dtype == "float32" else ():
        tensors, expected = load_file(tmp_path / name), load_file(tmp_path / "one" / name)
        assert tensors.keys() == expected.keys()
        for key, tensor in tensors.items():
            torch.testing.assert_close(tensor, expected[key], rtol=1e-5, atol=1e-6, msg=f"{name}: {key}")
    one.load_model(f"{tmp_path}/model")
    one.load_optimizer(str(tmp_path))
    assert one.num_steps == 2


def test_an_engine_serves_an_adapter_beside_its_base(base):
    """In whole batches and with continuous batching; the sync moves the adapter alone."""
    backend = make(base)
    engine = HuggingFaceEngine(dataclasses.replace(base, adapter=LORA), torch.device("cpu"), max_prompt_tokens=8)
    own, merged = dict(engine.weights()), TokenModel(base, 1.0).build(torch.device("cpu"))
    before = TokenModel(base, 1.0).answers(engine._model, BATCH, entropies=False).logprobs
    for _ in range(2):
        train(backend)
        names = {name for name in own if is_adapter_tensor(name)}
        reshard = reshard_plan(backend.layout(merged=False).only(names), engine.layout().only(names))
        execute(reshard, [pick(backend.weights(merged=False), names)], [pick(own, names)])
        served = TokenModel(base, 1.0).answers(engine._model, BATCH, entropies=False).logprobs
        torch.testing.assert_close(served, backend.forward(BATCH).logprobs, rtol=1e-5, atol=1e-5)
        for name, tensor in backend.weights().items():
            merged.get_parameter(name).data.copy_(tensor)
        with_merged = TokenModel(base, 1.0).answers(merged, BATCH, entropies=False).logprobs
        torch.testing.assert_close(served, with_merged, rtol=1e-5, atol=1e-5)
    assert (served - before).abs().max() > 1e-2
    linear = sum(sum(shape) for shape in find_targets(base.folder, ["all-linear"])[1].values())
    assert reshard.num_bytes == 4 * LORA.rank * linear


@pytest.mark.parametrize("rank", [1, 3, 16])
def test_an_adapted_row_has_the_same_bits_in_any_batch(rank):
    """From the smallest batch of the engine on, as the layer's own product."""
    generator = torch.Generator().manual_seed(rank)
    model = torch.nn.ModuleDict({"q_proj": torch.nn.Linear(64, 96, bias=False)})
    adapt_modules(model, dataclasses.replace(LORA, rank=rank, targets=("q_proj",)))
    for parameter in model.parameters():
        parameter.data.normal_(generator=generator)
    rows = torch.randn(300, 64, generator=generator)
    whole = model["q_proj"](rows)
    for num_rows in (MIN_ROWS, 9, 31, 100):
        assert_bitwise_equal(model["q_proj"](rows[:num_rows]), whole[:num_rows])


def test_an_adapter_that_changes_no_layer_is_refused(base):
    with pytest.raises(ValueError, match="Qwen2ForCausalLM has no linear layer query"):
        load_model(dataclasses.replace(base, adapter=dataclasses.replace(LORA, targets=("query",))))


def test_experts_that_peft_would_adapt_are_refused(tmp_path):
    """glm4_moe has dense layers and shared experts, whose names end like those of experts in its checkpoints."""
    tiny_architecture("glm4_moe", tmp_path)
    model = ModelSettings(folder=str(tmp_path), has_weights=False)
    for build in (adapted(model).build, lambda _: first_adapter(model, LORA)):
        with pytest.raises(ValueError, match=r"peft adapts .*\.mlp\.experts.* name only layers of attention"):
            build(torch.device("cpu"))
    attention = dataclasses.replace(LORA, targets=("q_proj", "o_proj"))
    assert adapted(model, attention).build(torch.device("cpu"))

"""Every policy trains whole and through an adapter, held by every rank or cut over them, with the same numbers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from workers_rounding import additions_of_transformer, rounding_bound

from rlinf_algos import DaggerAlgorithm, preset
from rlinf_comm.testing import assert_bitwise_equal
from rlinf_envs import ActionSpec, FieldSpec
from rlinf_workers.errors import WeightFilesError
from rlinf_workers.launchers.local.launcher import LocalLauncher
from rlinf_workers.models.lora import LoraSettings, add_adapter, policy_targets
from rlinf_workers.plugins import POLICIES
from rlinf_workers.policies.base import PolicySettings, make_policy, outline_policy
from rlinf_workers.roles.embodied.actor import EmbodiedActorSettings
from rlinf_workers.roles.embodied.dagger_actor import DaggerActor, DaggerActorSettings
from rlinf_workers.roles.embodied.imitating import ImitatedRows
from rlinf_workers.roles.records.embodied import LabelledSegment
from rlinf_workers.testing.backends import trial_worker
from rlinf_workers.testing.launchers import launched, start
from rlinf_workers.testing.policies import random_fields
from rlinf_workers.testing.weight_sync import parts_of
from rlinf_workers.trainers.base import BackendSettings, OptimizerSettings
from rlinf_workers.trainers.checkpoint import CheckpointFiles
from rlinf_workers.worker import Worker

pytestmark = pytest.mark.usefixtures("forked_workers")

pytest.importorskip("transformers", minversion="5.17")
pytest.importorskip("peft")

FIELDS = {
    "state": FieldSpec(shape=(4,), dtype="float32"),
    "image.front": FieldSpec(shape=(40, 40, 3), dtype="uint8"),
    "instruction": FieldSpec(shape=(), dtype="text"),
}
BOUNDS = torch.ones(3)
ACTIONS = ActionSpec(kind="continuous", shape=(3,), low=-BOUNDS, high=BOUNDS)
FLOW = {"chunk_size": 2, "width": 32, "num_layers": 2, "image_size": 28, "value_width": 8}
POLICY_OPTIONS: dict[str, dict[str, Any]] = {
    "actor_critic": {"hidden_sizes": (16,), "chunk_size": 2},
    "cnn": {"hidden_size": 16, "chunk_size": 2},
    "openvla": {"image_size": 28, "vision_width": 16, "width": 32, "value_hidden_size": 16},
    "openvla_oft": {"image_size": 28, "vision_width": 16, "width": 32, "head": "l1", "chunk_size": 2, "proprio": True},
    "pi0": FLOW,
    "pi05": FLOW | {"noise": "flow-noise"},
    "smolvla": FLOW | {"num_denoising_steps": 2},
}
ADAPTED = ("openvla", "openvla_oft", "pi0", "pi05", "smolvla")
OPTIMIZER = OptimizerSettings(learning_rate=1e-2, epsilon=1e-3, max_grad_norm=1.0)
CASES = [(name, False) for name in POLICY_OPTIONS] + [(name, True) for name in ADAPTED]
QUICK = [pytest.param(*case, marks=[] if case in {("cnn", False), ("pi0", False), ("pi0", True)} else pytest.mark.slow)
         for case in CASES]  # fmt: skip
slow = pytest.mark.slow
ROUNDED: dict[str, dict[str, Any]] = {"openvla_oft": {"head": "tokens"}}
"""In bfloat16: the L1 head's log-probabilities are distances in tenths, which magnifies rounding tenfold."""
SHARED_BOUND = {"float32": 1e-6, "bfloat16": 0.05}
"""As language models have it."""


def settings_of(name: str, *, lora: bool, backend: str = "replicated", **options) -> EmbodiedActorSettings:
    backend_options = {k: options.pop(k) for k in ("compute_dtype", "recompute") if k in options}
    policy = PolicySettings(
        name=name,
        fields=FIELDS,
        actions=ACTIONS,
        options=POLICY_OPTIONS[name] | options,
        seed=1,
        wide_heads=lora,
    )
    adapter = None
    if lora:
        backbone = POLICIES.get(name).backbone
        targets, _ = policy_targets(outline_policy(policy), backbone, ["all-linear"])
        adapter = LoraSettings(rank=4, alpha=8.0, targets=targets, base_digest="0123456789ab", backbone=backbone)
    return EmbodiedActorSettings(
        policy=policy,
        algorithm=preset("ppo", samples="episodes"),
        backend=BackendSettings(name=backend, options=backend_options, num_shards=2),
        optimizer=OPTIMIZER,
        lora=adapter,
    )


class Batch:
    """What a policy is asked about; four rows."""

    def __init__(self, settings: PolicySettings) -> None:
        policy, self.fields = make_policy(settings, torch.device("cpu")), random_fields(FIELDS, 4)
        noise = torch.randn(4, policy.noise_size, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            answer = policy.act(self.fields, noise)
        self.actions, self.extras = answer.actions, answer.extras


@pytest.mark.parametrize("name", POLICY_OPTIONS)
def test_every_policy_imitates_an_expert(make_worker, name):
    policy = settings_of(name, lora=False).policy
    num_actions = make_policy(policy, torch.device("cpu")).act(random_fields(FIELDS, 1), None).actions.shape[1]
    actor = make_worker(
        DaggerActor,
        DaggerActorSettings(
            policy=policy,
            algorithm=DaggerAlgorithm(batch_size=4, num_updates=1),
            backend=BackendSettings(num_shards=1),
            optimizer=OPTIMIZER,
            chunk_size=num_actions,
        ),
    )
    before = {key: tensor.clone() for key, tensor in actor._backend.model_tensors().items()}
    answers = torch.rand(6, num_actions, 3)
    actor.begin_step([LabelledSegment(group=0, fields=random_fields(FIELDS, 6), actions=answers, policy_version=0)])
    actor.update(0)
    after = actor._backend.model_tensors()
    assert all(tensor.isfinite().all() for tensor in after.values())
    assert any(not torch.equal(tensor, before[key]) for key, tensor in after.items() if "observation" not in key)


def held(settings: EmbodiedActorSettings, worker: Worker | None = None) -> Any:
    return settings.backend.make(settings.model, worker or trial_worker(), settings.optimizer)


def train(backend, batch: Batch, num_updates=2) -> list[float]:
    """Sums of log-probabilities and norms of the gradient."""
    sums_and_norms = []

    def loss(answers, scale):
        total = (answers.values - 1).square().sum() - 0.01 * (answers.logprobs.sum() + answers.entropies.sum())
        return scale * total, [float(answers.logprobs.detach().sum())]

    for _ in range(num_updates):
        backend.begin(1)
        for shard in backend.shards:
            backend.backward(shard, batch, lambda answers, scale=shard + 1: loss(answers, scale), entropies=True)
        sums_and_norms += [*backend.finish_backward(), backend.step(12.0)]
    return sums_and_norms


def save(backend, folder: Path, worker: Worker | None = None) -> str:
    files = CheckpointFiles(worker or trial_worker(), str(folder))
    files.add_model(backend, "model")
    files.add_optimizer(backend)
    files.start().wait()
    return f"{folder}/model"


@pytest.mark.parametrize(("name", "lora"), QUICK)
def test_fsdp2_has_the_numbers_of_replicated(name, lora):
    """pi0's values come from its expert, so that nothing reads what the last layer of its language model says."""
    settings = settings_of(name, lora=lora)
    batch, one = Batch(settings.policy), held(settings)
    expected = train(one, batch)
    other = held(settings_of(name, lora=lora, backend="fsdp2"))
    assert train(other, batch) == pytest.approx(expected, rel=1e-6)
    assert (
        other.weights().keys()
        == one.weights().keys()
        == make_policy(settings.policy, one._worker.device).state_dict().keys()
    )
    for key, tensor in one.weights().items():
        torch.testing.assert_close(other.weights()[key], tensor, rtol=1e-5, atol=1e-6, msg=key)


@pytest.mark.parametrize("name", ["pi05", *(pytest.param(name, marks=slow) for name in ("pi0", "smolvla", "openvla"))])
@pytest.mark.parametrize("lora", [False, pytest.param(True, marks=slow)])
def test_fsdp2_imitates_as_replicated_does(name, lora):
    """The loss of pi0 and pi0.5 reads keys and values of their language model alone, whatever their values read."""
    options = {} if name == "openvla" else {"value": "vision-language"}
    settings = settings_of(name, lora=lora, **options)
    policy, fields = make_policy(settings.policy, torch.device("cpu")), random_fields(FIELDS, 4)
    generator = torch.Generator().manual_seed(2)
    noise = torch.randn(4, policy.noise_size, generator=generator)
    actions = torch.rand(4, POLICY_OPTIONS[name].get("chunk_size", 1), 3, generator=generator)
    norms_of_kinds = []
    for kind in ("replicated", "fsdp2"):
        backend = held(settings_of(name, lora=lora, backend=kind, **options))
        demonstrations, norms = ImitatedRows(fields=fields, actions=actions, noise=noise), []
        for _ in range(2):
            backend.begin(1)
            backend.backward(0, demonstrations, lambda answers: (-answers.logprobs.sum(), [1.0]))
            backend.finish_backward()
            norms.append(backend.step(4.0))
        norms_of_kinds.append(norms)
    assert norms_of_kinds[1] == pytest.approx(norms_of_kinds[0], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "lora"), CASES)
def test_bfloat16(name, lora):
    """Weights in it, and float32 weights that are computed in it with parts computed again."""
    others = ROUNDED.get(name, {})
    batch = Batch(settings_of(name, lora=lora, **others).policy)
    exact = train(held(settings_of(name, lora=lora, **others)), batch)
    if name in ADAPTED:
        expected = train(held(settings_of(name, lora=lora, dtype="bfloat16", **others)), batch)
        actual = train(held(settings_of(name, lora=lora, dtype="bfloat16", backend="fsdp2", **others)), batch)
        assert actual == pytest.approx(expected, rel=SHARED_BOUND["bfloat16"])
        assert expected == pytest.approx(exact, rel=0.1)
    options = {"compute_dtype": "bfloat16"} | ({"recompute": True} if name in ADAPTED else {})
    actual = train(held(settings_of(name, lora=lora, backend="fsdp2", **options, **others)), batch)
    assert actual == pytest.approx(exact, rel=0.1)


# -- adapters ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=slow)])
@pytest.mark.parametrize("name", ADAPTED)
def test_a_plain_policy_that_is_given_what_serves_says_what_the_adapter_says(name, dtype):
    settings = settings_of(name, lora=True, dtype=dtype, **(ROUNDED.get(name, {}) if dtype == "bfloat16" else {}))
    batch, backend = Batch(settings.policy), held(settings)
    before = backend.forward(batch).logprobs
    train(backend, batch)
    plain = make_policy(settings.policy, torch.device("cpu"))
    with torch.no_grad():
        for key, tensor in plain.state_dict().items():
            assert backend.weights()[key].dtype == tensor.dtype, key
            tensor.copy_(backend.weights()[key])
        outputs = plain.evaluate(batch.fields, batch.actions, batch.extras)
    additions = additions_of_transformer(num_layers=4, width=32, inner_width=96, num_tokens=40)  # and towers
    rounding = rounding_bound(additions, size=10)  # of the L1 head, whose log-probabilities are distances in tenths
    trained, bound = backend.forward(batch), rounding if dtype == "float32" else 0.02
    assert (trained.logprobs - before).abs().max() > 1e-3
    torch.testing.assert_close(outputs.logprobs, trained.logprobs, rtol=bound, atol=bound)
    torch.testing.assert_close(outputs.values, trained.values, rtol=bound, atol=bound)


@pytest.mark.parametrize("name", ["pi0", *(pytest.param(name, marks=slow) for name in ADAPTED if name != "pi0")])
@pytest.mark.parametrize("kind", ["replicated", pytest.param("fsdp2", marks=slow)])
def test_adapter_and_heads_alone_are_trained_and_saved_and_go_on_to_the_bit(tmp_path, name, kind):
    settings = settings_of(name, lora=True, backend=kind)
    batch, one = Batch(settings.policy), held(settings)
    train(one, batch)
    folder = save(one, tmp_path)
    trained = {key for key, p in one.on_model(lambda m: list(m.named_parameters())) if p.requires_grad}
    inside = [key for key in trained if settings.lora.is_inside(key)]  # type: ignore[reportOptionalMemberAccess]
    assert inside and all(".lora_" in key for key in inside)
    assert {"value_head.0.weight", "value_head.0.bias"} <= trained
    saved = load_file(f"{folder}/adapter_model.safetensors")
    named = {key.removeprefix("base_model.model.") for key in saved}
    assert {key.replace(".default.", ".") for key in trained} <= named
    assert not any(key.startswith(settings.lora.backbone) and ".lora_" not in key for key in named)  # type: ignore
    assert json.loads(Path(folder, "base.json").read_text())["digest"] == "0123456789ab"
    other = held(settings)
    other.load_model(folder)
    other.load_optimizer(str(tmp_path))
    assert train(one, batch) == train(other, batch)
    for key, tensor in one.weights().items():
        assert_bitwise_equal(tensor.detach(), other.weights()[key].detach())


def test_a_plain_policy_takes_a_saved_adapter_and_its_heads(tmp_path):
    settings = settings_of("pi0", lora=True)
    batch, backend = Batch(settings.policy), held(settings)
    train(backend, batch)
    folder = save(backend, tmp_path)
    plain = make_policy(settings.policy, torch.device("cpu"))
    add_adapter(plain, folder)
    for key, tensor in plain.state_dict().items():
        torch.testing.assert_close(tensor, backend.weights()[key].detach(), rtol=1e-6, atol=1e-7, msg=key)
    other = make_policy(settings_of("pi0", lora=True, width=48).policy, torch.device("cpu"))
    with pytest.raises(WeightFilesError, match=r"the policy has no .* of the shape"):
        add_adapter(other, folder)


def test_targets_are_trained_layers_of_the_backbone():
    def targets(name, *target_names, **options):
        policy = outline_policy(settings_of(name, lora=False, **options).policy)
        return policy_targets(policy, POLICIES.get(name).backbone, target_names)

    _, all_of_pi0 = targets("pi0", "all-linear")
    assert "model.model.vlm.language_model.layers.0.self_attn.q_proj" in all_of_pi0
    assert "model.model.vlm.language_model.layers.1.self_attn.q_proj" not in all_of_pi0  # nobody reads its output
    assert not any("action_out_proj" in name or "value_head" in name for name in all_of_pi0)
    _, of_expert = targets("pi0", "all-linear", trains="expert")
    assert {name.rpartition(".layers")[0] for name in of_expert} == {"model.model.dit"}
    assert targets("pi0", "q_proj", trains="expert")[0] == tuple(
        f"model.model.dit.layers.{i}.self_attn.q_proj" for i in range(2)
    )
    assert not any("lm_head" in name for name in targets("openvla", "all-linear")[1])
    with pytest.raises(ValueError, match=r"'query' is no layer of Pi05; use all-linear, or of dense, down_proj"):
        targets("pi05", "query")
    with pytest.raises(ValueError, match=r"'value_head.0' means value_head.0, no layer of the backbone"):
        targets("pi05", "value_head.0")


# -- ranks ---------------------------------------------------------------------------------------------------------


class Rank(Worker):
    """One of two that hold a policy together."""

    def learn(self, settings: EmbodiedActorSettings, folder: str) -> list[float]:
        backend, batch = held(settings, self), Batch(settings.policy)
        sums_and_norms = train(backend, batch)
        save(backend, Path(folder), self)
        self.ranks.barrier()
        one = held(settings_of(settings.policy.name, lora=settings.lora is not None))
        one.load_model(f"{folder}/model")
        expected = parts_of(dict(one.weights()), backend.layout())[self.rank]
        for key, part in backend.weights().items():
            torch.testing.assert_close(part, expected[key], rtol=1e-6, atol=1e-7, msg=key)
        return sums_and_norms


@pytest.mark.slow
@pytest.mark.parametrize(("name", "lora"), CASES)
def test_two_ranks_that_share_a_policy_train_what_one_does(tmp_path, name, lora):
    """And write the files that one reads."""
    settings = settings_of(name, lora=lora)
    expected = train(held(settings), Batch(settings.policy))
    with launched(LocalLauncher) as launcher:
        group = start(launcher, tmp_path / "ranks", Rank, num_ranks=2)
        actual = group.call("learn", settings_of(name, lora=lora, backend="fsdp2"), str(tmp_path / "saved"))
    assert actual[0] == actual[1] == pytest.approx(expected, rel=1e-5)

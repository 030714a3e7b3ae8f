"""Adapters and backends of robot policies before any process starts."""

from dataclasses import replace

import pytest
import torch

from rlinf.config.common import TrainerConfig
from rlinf.config.lora import LoraConfig
from rlinf.errors import UserError
from rlinf.jobs.training import check_policy_module, policy_digest, policy_lora
from rlinf_envs import ActionSpec, FieldSpec
from rlinf_workers.policies import PolicySettings

pytest.importorskip("transformers", minversion="5.17")
pytest.importorskip("peft")

FIELDS = {
    "state": FieldSpec(shape=(4,), dtype="float32"),
    "image.front": FieldSpec(shape=(28, 28, 3), dtype="uint8"),
}
BOUNDS = torch.ones(2)
PI05 = PolicySettings(
    name="pi05",
    fields=FIELDS,
    actions=ActionSpec(kind="continuous", shape=(2,), low=-BOUNDS, high=BOUNDS),
    options={"chunk_size": 2, "width": 32, "num_layers": 1, "image_size": 28, "trains": "expert"},
)
LORA = LoraConfig(rank=4)


def test_an_adapter_is_of_what_the_policy_would_train():
    lora = policy_lora(LORA, "fsdp2", PI05)
    assert lora is not None and lora.backbone == ("model.model",)
    assert all(target.startswith("model.model.dit.") for target in lora.targets)
    assert policy_lora(None, "megatron", PI05) is None


@pytest.mark.parametrize(
    ("policy", "backend", "lora", "says"),
    [
        (replace(PI05, name="cnn", options={}), "fsdp2", LORA, "policy.name=cnn has no backbone"),
        (PI05, "replicated", LORA.model_copy(update={"targets": ("query",)}), "'query' is no layer of Pi05"),
        (PI05, "replicated", LORA.model_copy(update={"targets": ("value_head.0",)}), "no layer of the backbone"),
    ],
)
def test_what_cannot_be_is_refused(policy, backend, lora, says):
    with pytest.raises(UserError, match=says):
        policy_lora(lora, backend, policy)


def test_layers_are_computed_again_where_there_are_some():
    again = TrainerConfig(backend="fsdp2", backend_options={"recompute": True})
    check_policy_module(again, PI05)
    small = replace(PI05, name="actor_critic", options={"hidden_sizes": (4,)})
    check_policy_module(TrainerConfig(backend="fsdp2"), small)
    with pytest.raises(UserError, match="recompute=true, but ActorCritic has no decoder layers"):
        check_policy_module(again, small)


def test_a_base_is_its_options_seed_and_files(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with_files = replace(PI05, options=PI05.options | {"folder": str(tmp_path)})
    digests = [
        policy_digest(each) for each in (PI05, replace(PI05, seed=1), with_files, replace(PI05, wide_heads=True))
    ]
    (tmp_path / "config.json").write_text("[]")
    digests.append(policy_digest(with_files))
    assert len(set(digests)) == 4 and digests[0] == digests[3]


def test_a_base_has_the_adapter_that_is_added_to_its_files(tmp_path):
    folders = {"folder": str(tmp_path), "lora_folder": str(tmp_path / "lora")}
    (tmp_path / "lora").mkdir()
    digests = []
    for content in ("one", "another"):
        (tmp_path / "lora" / "adapter_model.safetensors").write_text(content)
        digests.append(policy_digest(replace(PI05, options=PI05.options | folders)))
    assert digests[0] != digests[1]

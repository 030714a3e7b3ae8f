"""Adapters before any process starts: what they count in memory, and which can be used."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch

from rlinf.config.inputs import check_model_folder
from rlinf.errors import UserError
from rlinf.evaluation.model import load_model
from rlinf.jobs.trainer_memory import named_shape
from rlinf.jobs.training import with_base
from rlinf.run_folder.adapters import base_digest
from rlinf.run_folder.checksums import write_checksums
from rlinf.run_folder.export import export
from rlinf_sched.derive import Adapter, JobShape, Lengths
from rlinf_workers.models import LoraSettings, ModelSettings, find_targets
from rlinf_workers.models.language_model import build_model
from rlinf_workers.models.lora import LoraModel
from rlinf_workers.models.trainable import TokenModel
from rlinf_workers.plugins import TRAINERS
from rlinf_workers.testing.architectures import ARCHITECTURES, tiny_architecture
from rlinf_workers.testing.backends import trial_worker
from rlinf_workers.testing.engines import tiny_model
from rlinf_workers.trainers import OptimizerSettings, ReplicatedBackend
from rlinf_workers.trainers.checkpoint import CheckpointFiles

LENGTHS = Lengths(mean_tokens=2, limit_tokens=2, prompt_tokens=2, group_size=2)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("base"))


@pytest.fixture
def run(tmp_path, base):
    """A run's folder with one checkpoint, whose adapter is not as it began."""
    lora = LoraSettings(rank=2, alpha=4.0, targets=("q_proj", "up_proj"), base_digest=base_digest(Path(base.folder)))
    kind = LoraModel(TokenModel(base, 1.0), base, lora)
    backend = ReplicatedBackend(kind, trial_worker(), optimizer=OptimizerSettings(learning_rate=1.0), num_shards=1)
    for parameter in backend.on_model(lambda model: list(model.parameters())):
        if parameter.requires_grad:
            parameter.data.normal_(generator=torch.Generator().manual_seed(0))
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000001"
    files = CheckpointFiles(trial_worker(), str(checkpoint))
    files.add_model(backend, "model")
    digests = files.start().wait()
    (checkpoint / "state.json").write_text("{}")
    write_checksums(checkpoint, digests)
    return tmp_path / "run", lora, {name: tensor.clone() for name, tensor in backend.weights().items()}


@pytest.mark.parametrize("name", sorted({*ARCHITECTURES} - {"gemma"}))
@pytest.mark.parametrize("targets", [None, ("q_proj", "v_proj"), ("o_proj",)])
def test_an_adapter_has_the_weights_that_are_counted(tmp_path, name, targets):
    tiny_architecture(name, tmp_path)
    layers = find_targets(str(tmp_path), targets or ["all-linear"])[1].values()
    adapter = Adapter(rank=3, targets=targets)
    assert adapter.num_parameters(named_shape(tmp_path)) == 3 * sum(map(sum, layers))


@pytest.mark.parametrize(("backend", "num_buffers"), [("replicated", 4), ("fsdp2", 1)])
@pytest.mark.parametrize("has_critic", [False, True])
def test_gradients_and_moments_are_counted_for_what_is_trained(tmp_path, backend, num_buffers, has_critic):
    """In bfloat16, where the adapter is float32 all the same; a critic is trained whole."""
    tiny_architecture("qwen2", tmp_path)
    shape, adapter = named_shape(tmp_path), Adapter(rank=3)
    job = JobShape(
        lengths=LENGTHS,
        num_groups=4,
        num_shards=4,
        dtype_bytes=2,
        adapter=adapter,
        has_critic=has_critic,
    )
    memory = TRAINERS.spec(backend).rank_memory(shape, job, 1)
    own, copy = 4 * adapter.num_parameters(shape), 2 * shape.num_parameters
    critic = copy if has_critic else 0
    assert memory.weights == copy + critic + own
    assert memory.gradients == num_buffers * (own + critic)
    assert memory.optimizer == 2 * (own + critic)


def test_an_adapter_stands_for_the_model_that_it_makes(run, tmp_path):
    """In `rlinf eval`, and exported merged; every number of what was served is there."""
    folder, _, served = run
    model = load_model(folder)
    export(model.folder.parent, tmp_path / "merged", merged=True)
    check_model_folder(tmp_path / "merged")
    for place in (model.folder, tmp_path / "merged"):
        settings = ModelSettings(folder=str(place), has_weights=True)
        state = build_model(settings, torch.device("cpu")).state_dict()
        assert state.keys() == served.keys()
        for name, tensor in served.items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-6, atol=1e-7)


def test_an_export_leaves_the_adapter_as_it_is_and_merges_nothing_else(run, tmp_path, base):
    checkpoint = run[0] / "checkpoints" / "step-000001"
    export(checkpoint, tmp_path / "adapter")
    files = {path.name: path.read_bytes() for path in (checkpoint / "model").iterdir()}
    exported = {path.name: path.read_bytes() for path in (tmp_path / "adapter").iterdir()}
    assert exported.pop("README.md").startswith(b"---\nlibrary_name: peft\n")
    assert exported == files
    shutil.rmtree(checkpoint / "model")
    shutil.copytree(base.folder, checkpoint / "model")
    write_checksums(checkpoint, {})
    with pytest.raises(UserError, match=r"--merged: .* holds a whole model, no adapter"):
        export(checkpoint, tmp_path / "merged", merged=True)


def test_an_adapter_is_no_model_to_train(run):
    with pytest.raises(UserError, match="holds an adapter, not a model") as caught:
        check_model_folder(run[0] / "checkpoints" / "step-000001" / "model")
    assert "rlinf export RUN --merged" in str(caught.value)


def test_another_base_is_refused_before_a_run_goes_on_and_by_eval(run, base, tmp_path):
    folder, lora, _ = run
    adapter = folder / "checkpoints" / "step-000001" / "model"
    assert with_base(lora, Path(base.folder), folder) == lora
    assert with_base(lora, Path(base.folder), tmp_path / "new") == lora
    other = tmp_path / "other"
    shutil.copytree(base.folder, other)
    weights = bytearray((other / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (other / "model.safetensors").write_bytes(weights)
    with pytest.raises(UserError, match=r"was trained on another base than .*other"):
        with_base(lora, other, folder)
    adapter = shutil.copytree(adapter, tmp_path / "adapter")
    config = json.loads((adapter / "adapter_config.json").read_text())
    for path, says in ((other, "another base"), (tmp_path / "gone", "does not exist")):
        (adapter / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": str(path)}))
        with pytest.raises(UserError, match=says):
            load_model(adapter)


def test_an_adapter_needs_peft(run, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "peft" else real(name, *more))
    with pytest.raises(UserError, match="needs the package peft, which is not installed") as caught:
        load_model(run[0])
    assert "pip install 'rlinf[lora]'" in str(caught.value)

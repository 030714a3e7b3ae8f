"""`rlinf export`: a Hugging Face folder out of a checkpoint."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from rlinf.cli.main import main
from rlinf.config.embodied import EmbodiedConfig
from rlinf.config.load import load_config, to_yaml
from rlinf.config.overrides import Override
from rlinf.errors import UserError
from rlinf.jobs.acting import env_spec, policy_settings
from rlinf.jobs.env_interface import probe
from rlinf.run_folder import RunFolder
from rlinf.run_folder.checkpoints import further_policies, refuse_damaged_model
from rlinf_workers.models import ModelSettings, index_name, index_of, write_tensors
from rlinf_workers.models.trainable import TokenModel
from rlinf_workers.models.weight_files import WeightFiles, file_names
from rlinf_workers.policies import Policy, make_policy
from rlinf_workers.roles.embodied.actor import PolicyModel
from rlinf_workers.testing.architectures import tiny_architecture
from rlinf_workers.testing.backends import Chooser, trial_worker
from rlinf_workers.testing.engines import tiny_model
from rlinf_workers.trainers import ModelAdapter, ReplicatedBackend
from rlinf_workers.trainers.checkpoint import CheckpointFiles


def save(run: Path, step: int, kind: ModelAdapter, score: float | None = None, config_yaml: str = "name: a\n") -> Path:
    """A checkpoint as a run writes it."""
    new = not (run / "manifest.json").exists()
    with RunFolder(run, config_yaml=config_yaml, command=["rlinf"], keep_checkpoints=9, resume=not new) as folder:
        digests: dict[str, str] = {}
        with folder.new_checkpoint(step, {"own_score": score}, digests) as path:
            worker = trial_worker()
            files = CheckpointFiles(worker, str(path))
            files.add_model(ReplicatedBackend(kind, worker, optimizer=None, num_shards=1), "model")
            digests.update(files.start().wait())
    return run / "checkpoints" / f"step-{step:06d}"


def test_a_damaged_model_of_a_further_policy_is_refused_and_no_other(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", config_yaml="name: a\n", command=["rlinf"], keep_checkpoints=1)
    with folder, folder.new_checkpoint(1, {"own_score": None}) as path:
        for model in (path / "model", path / "policies" / "second" / "model"):
            model.mkdir(parents=True)
            (model / "model.safetensors").write_bytes(b"weights")
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000001"
    assert further_policies(checkpoint) == ("second",)
    second = checkpoint / "policies" / "second" / "model"
    refuse_damaged_model(second, key="model.path")
    (second / "model.safetensors").write_bytes(b"others")
    refuse_damaged_model(checkpoint / "model", key="model.path")
    with pytest.raises(UserError, match=r"model\.path=.*second/model: checkpoint step-000001 is damaged"):
        refuse_damaged_model(second, key="model.path")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with three checkpoints of models that differ; the second was the best."""
    base = tmp_path_factory.mktemp("base")
    settings = tiny_architecture("qwen3_moe", base / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(tiny_model(base / "tokenizer").folder, name), base / "model")
    GenerationConfig(eos_token_id=1, do_sample=True, temperature=0.5).save_pretrained(settings.folder)
    run = base / "run"
    for step, score in ((0, 0.25), (10, 0.75), (20, 0.5)):
        kind = TokenModel(ModelSettings(folder=settings.folder, has_weights=False, seed=step), 1.0)
        save(run, step, kind, score)
    shutil.copytree(settings.folder, base / "saved")
    return run


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path / "run", symlinks=True)
    return tmp_path / "run"


PARKED = """\
from pathlib import Path

from rlinf_workers.policies.actor_critic.policy import ActorCritic


class Parked(ActorCritic):
    def write_published(self, output, dtype=None):
        (Path(output) / "parked.txt").write_text(str(float(next(self.parameters()).flatten()[0])))
        return ["value_head.bias", "value_head.weight"]
"""
"""A policy with a format of its own."""


def save_policy(run: Path, name: str) -> Policy:
    """A run of a robot policy in CartPole, with one checkpoint; returns the policy."""
    config = load_config("env-ppo", [Override(key=("policy", "name"), text=name)])
    assert isinstance(config, EmbodiedConfig)
    settings = policy_settings(config.policy, probe(env_spec(config.env), None), seed=5)
    save(run, 5, PolicyModel(settings), 0.5, config_yaml=to_yaml(config))
    return make_policy(settings, torch.device("cpu"))


def test_a_policy_is_written_in_its_own_format(tmp_path: Path, monkeypatch, capsys):
    (tmp_path / "parked_policy.py").write_text(PARKED)
    monkeypatch.syspath_prepend(tmp_path)
    policy = save_policy(tmp_path / "run", "parked_policy:Parked")
    assert main(["export", str(tmp_path / "run"), "--output", str(tmp_path / "out")]) == 0
    assert "left out, because the format has no place for it: value_head\n" in capsys.readouterr().out
    first = float(next(policy.parameters()).flatten()[0])
    assert (tmp_path / "out" / "parked.txt").read_text() == str(first), "the checkpoint's weights, not the seed's"


def weights(folder: Path, **how: object) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder, **how).state_dict()


def check_equal(folder: Path, checkpoint: Path) -> None:
    actual, expected = weights(folder), weights(checkpoint / "model")
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


@pytest.mark.parametrize(
    ("which", "step"), [([], 20), (["--checkpoint", "best"], 10), (["--checkpoint", "step-000000"], 0)]
)
def test_the_checkpoint_that_is_meant_loads_bit_equal(run: Path, capsys: pytest.CaptureFixture[str], which, step):
    output = run.parent / "model"
    assert main(["export", str(run), *which, "--output", str(output)]) == 0
    checkpoint = run / "checkpoints" / f"step-{step:06d}"
    check_equal(output, checkpoint)
    copied = {file.name for file in (checkpoint / "model").iterdir()}
    assert {file.name for file in output.iterdir()} == {*copied, "README.md"}
    assert not list(run.parent.glob(".model*"))
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith(f"{checkpoint}, score 0.")
    assert out[1].startswith(f"{output}: ")


def test_a_checkpoint_by_its_path_and_in_another_dtype(run: Path):
    """A model of several files, as more ranks write them; the index and the config go with the dtype."""
    checkpoint = run / "checkpoints" / "step-000010"
    files = WeightFiles(checkpoint / "model")
    tensors = {name: files.read(name).clone() for name in files.specs}
    shutil.copytree(checkpoint / "model", run.parent / "shared")
    (run.parent / "shared" / "model.safetensors").unlink()
    shared = run.parent / "shared"
    parts = {}
    for rank, name in enumerate(file_names("model", 2)):
        part = dict(list(tensors.items())[rank::2])
        write_tensors(shared / name, part)
        parts[name] = {key: tensor.nbytes for key, tensor in part.items()}
    (shared / index_name("model")).write_text(index_of(parts))
    folder = RunFolder(run, config_yaml="", command=[], keep_checkpoints=9, resume=True)
    with folder, folder.new_checkpoint(30, {"own_score": None}) as path:
        shutil.copytree(shared, path / "model")

    output = run.parent / "bf16"
    one = str(run / "checkpoints" / "step-000030")
    assert main(["export", one, "--dtype", "bfloat16", "--output", str(output)]) == 0
    exported = WeightFiles(output)
    assert set(exported.specs) == set(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(exported.read(name), tensor.bfloat16()), name
    config = json.loads((output / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and config["model_type"] == "qwen3_moe"
    total = json.loads((output / index_name("model")).read_text())["metadata"]["total_size"]
    assert total == sum(tensor.nbytes for tensor in tensors.values()) // 2
    assert {tensor.dtype for tensor in weights(output, dtype="auto").values()} == {torch.bfloat16}
    assert main(["export", one, "--output", str(run.parent / "same")]) == 0
    check_equal(run.parent / "same", run / "checkpoints" / "step-000010")


def damaged(run: Path, name: str) -> None:
    file = run / "checkpoints" / name / "model" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-7] ^= 4
    file.write_bytes(content)


BEFORE = r"\nhint: the newest whole one before it is .*step-000000$"
MISTAKES = {
    "nowhere --output out": r"nowhere does not exist\nhint: give the --output of rlinf train",
    "folder --output out": r"folder is no folder of a run and no checkpoint\nhint: ",
    "new --output out": r"new: the run has no checkpoint yet\nhint: let it run on",
    "run --output full": r"--output=full is there already\nhint: an export overwrites nothing",
    "run --output folder/file": r"--output=folder/file is there already",
    "run --checkpoint step-7 --output out": r"run has no such checkpoint\nhint: there are newest, best, step-000000, ",
    "run/checkpoints/step-000000 --checkpoint best --output out": r"is a checkpoint already\nhint: leave",
    "unscored --checkpoint best --output out": r"none of its checkpoints was evaluated.*\nhint: use --checkpoint new",
    "flipped --output out": r"step-000020 is damaged: model/model\.safetensors: is not what was written" + BEFORE,
    "lost --output out": r"step-000010 is damaged: model/model\.safetensors: No such file.*" + BEFORE,
    "robot --output out": r"robot/checkpoints/step-000005: ActorCritic has no published format\nhint: its weights, ",
    "run --dtype int8 --output out": r"argument --dtype: invalid choice: 'int8'",
    "run": r"no place to write to\nhint: give --output FOLDER, --push USER/NAME, or both",
    "run --output out --private": r"--private applies to an upload\nhint: add --push",
    "run --push name": r"--push name: not a name on the Hub: it has no owner before the name\nhint: write USER/NAME",
    "run --push a/b--c": r"--push a/b--c: not a name on the Hub: .*\nhint: write USER/NAME",
    "run --push a/b": r"--push a/b: HF_HUB_OFFLINE is set\nhint: unset it to upload, or leave --push out",
}


def test_only_what_the_sums_name_is_exported_and_no_link_is_followed(run: Path, tmp_path: Path, capsys):
    (tmp_path / "private").write_text("secret")
    model = max((run / "checkpoints").glob("step-*")) / "model"
    (model / "key").symlink_to(tmp_path / "private")
    (model / "more.txt").write_text("not of the checkpoint")
    assert main(["export", str(run), "--output", str(tmp_path / "out")]) == 0
    assert not {"key", "more.txt"} & {file.name for file in (tmp_path / "out").iterdir()}
    config = model / "config.json"
    config.rename(tmp_path / "config.json")
    config.symlink_to(tmp_path / "config.json")
    assert main(["export", str(run), "--output", str(tmp_path / "other")]) == 2
    assert "model/config.json: is a link, or outside the folder" in capsys.readouterr().err


@pytest.fixture(scope="module")
def mistaken(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("mistakes")
    for name in ("run", "flipped", "lost"):
        shutil.copytree(trained, root / name, symlinks=True)
    for name in ("step-000010", "step-000020"):
        damaged(root / "flipped", name)
    shutil.rmtree(root / "lost" / "checkpoints" / "step-000020")
    (root / "lost" / "checkpoints" / "step-000010" / "model" / "model.safetensors").unlink()
    (root / "folder").mkdir()
    (root / "folder" / "file").touch()
    (root / "full").mkdir()
    (root / "full" / "file").touch()
    RunFolder(root / "new", config_yaml="", command=[], keep_checkpoints=1).close()
    save(root / "unscored", 5, Chooser())
    save_policy(root / "robot", "actor_critic")
    return root


@pytest.mark.parametrize(("line", "says"), MISTAKES.items())
def test_mistakes_are_answered_on_one_screen(line: str, says: str, mistaken: Path, monkeypatch, capsys):
    monkeypatch.chdir(mistaken)
    before = sorted(mistaken.rglob("*"))
    assert main(["export", *line.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) <= 4
    assert re.search(says, err.strip()), err
    assert sorted(mistaken.rglob("*")) == before

"""The model card of an export, and its upload to a Hub on loopback with the real client."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from hub_server import HubServer, hub_server
from rlinf.cli.main import main
from rlinf.run_folder import RunFolder
from rlinf.run_folder.model_card import TrainedBy

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONFIG = {
    "name": "gsm8k-grpo",
    "job": "reasoning",
    "seed": 3,
    "model": {"path": f"org/base@{COMMIT}"},
    "task": {"train_files": ["openai/gsm8k:main[train]", "/home/me/more.jsonl"], "mixture": {}},
    "algorithm": {"name": "grpo"},
    "reward": {"kind": "numeric"},
    "actor": {"learning_rate": 1e-6, "lora": None},
}
METRICS = {
    "reward": 0.5,
    "accuracy": 0.882,
    "accuracy_error": 0.0144,
    "accuracy/aime24": 0.1,
    "accuracy_error/aime24": 0.0548,
    "num_problems": 500.0,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with one evaluated checkpoint."""
    folder = tmp_path_factory.mktemp("runs") / "mine"
    with RunFolder(folder, config_yaml=yaml.safe_dump(CONFIG), command=["rlinf"], keep_checkpoints=1) as writer:
        writer.evaluation(20, METRICS, time_s=1.0)
        with writer.new_checkpoint(20, {"own_score": 0.882}) as path:
            (path / "model").mkdir()
            (path / "model" / "config.json").write_text('{"model_type": "qwen2"}')
            (path / "model" / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return folder


def test_a_further_policy_has_the_base_that_its_agent_names_or_that_of_the_first(run: Path):
    checkpoint = run / "checkpoints" / "step-000020"
    agents = {"solver": {}, "critic": {"path": "org/critic"}, "editor": {"policy": "second"}}
    for policy, base in (("critic", "org/critic"), ("second", f"org/base@{COMMIT}"), (None, f"org/base@{COMMIT}")):
        card = TrainedBy.read(checkpoint, policy)
        assert replace(card, config=CONFIG | {"rollout": {"agent": {"agents": agents}}}).base == base


def head_of(card: str) -> dict:
    return yaml.safe_load(card.split("---\n")[1])


def test_the_card_states_recipe_base_data_versions_and_scores(run: Path, tmp_path: Path):
    assert main(["export", str(run), "--output", str(tmp_path / "out")]) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert head_of(card) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "base_model": "org/base",
        "datasets": ["openai/gsm8k"],
        "tags": ["rlinf", "reasoning", "grpo"],
    }
    assert "recipe `gsm8k-grpo`: reinforcement learning on text, starting from [org/base](" in card
    assert "after 20 training steps" in card and f"at revision `{COMMIT}`" in card
    assert "| `accuracy` | 88.2 % | 85.4 % to 91.0 % |" in card and "500 held-out" in card
    assert "| `accuracy/aime24` | 10.0 % | 0.0 % to 20.7 % |" in card
    assert "| `reward` |" not in card, "it has no error"
    assert "`openai/gsm8k:main[train]`" in card and "`more.jsonl`" in card and "/home/me" not in card
    assert "| torch | " in card and "| seed | 3 |" in card
    assert 'AutoModelForCausalLM.from_pretrained("out")' in card


# -- uploads -------------------------------------------------------------------------------------------------------

CALLS = """
import contextlib, io, json, os, sys
from rlinf.cli.main import main

outcomes = []
for token, arguments in json.load(sys.stdin):
    os.environ.pop("HF_TOKEN", None)
    if token:
        os.environ["HF_TOKEN"] = token
    with contextlib.redirect_stdout(io.StringIO()) as screen, contextlib.redirect_stderr(screen):
        code = main(arguments)
    outcomes.append([screen.getvalue(), code])
print(json.dumps(outcomes))
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory):
    """A Hub on which `alice` may write, and where a model of hers exists."""
    top = tmp_path_factory.mktemp("hub")
    (top / "public").mkdir()
    with hub_server() as served:
        served.uploads = top
        served.writers["hf_alice"] = "alice"
        served.add("alice/public", top / "public")
        served.add("alice/full", top / "public")
        served.statuses["alice/full"] = 507
        yield served


def pushed(hub: HubServer, *calls: tuple[str, list[str]], home: Path) -> list[tuple[str, int]]:
    """What each command prints, and its exit code; in one process with the Hub's address."""
    done = subprocess.run(
        [sys.executable, "-c", CALLS],
        input=json.dumps(calls),
        env=os.environ
        | {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
        | {"HF_HUB_DISABLE_PROGRESS_BARS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return [(text, code) for text, code in json.loads(done.stdout)]


def test_a_model_is_uploaded_with_its_card_or_refused_on_one_screen(run: Path, hub: HubServer, tmp_path: Path):
    source, output = str(run), str(tmp_path / "output")
    calls = (
        ("hf_alice", ["export", source, "--push", "alice/mine", "--private"]),
        ("hf_alice", ["export", source, "--push", "alice/mine"]),
        ("", ["export", source, "--push", "alice/other"]),
        ("hf_wrong", ["export", source, "--push", "alice/other"]),
        ("hf_alice", ["export", source, "--push", "bob/mine", "--output", output]),
        ("hf_alice", ["export", source, "--push", "alice/public", "--private"]),
        ("hf_alice", ["export", source, "--push", "alice/full"]),
    )
    first, again, anonymous, wrong, other, public, full = pushed(hub, *calls, home=tmp_path / "home")
    folder = hub.repos["models", "alice/mine"]
    assert (first[1], again[1]) == (0, 0), first
    assert f"{hub.url}/alice/mine/commit/" in first[0]
    assert {file.name for file in folder.iterdir()} == {"README.md", "config.json", "model.safetensors"}
    assert (folder / "model.safetensors").read_bytes() == (2).to_bytes(8, "little") + b"{}"
    card = (folder / "README.md").read_text()
    assert "# mine\n" in card and 'AutoModelForCausalLM.from_pretrained("alice/mine")' in card
    assert hub.private == {"alice/mine"}
    refusals = (anonymous, wrong, other, public, full)
    assert [code for _, code in refusals] == [2] * 5 and all("Traceback" not in text for text, _ in refusals)
    assert "error: --push alice/other: you are not logged in to http" in anonymous[0]
    assert "alice/other: " in wrong[0] and "does not accept your token\nhint: log in with `hf auth login`" in wrong[0]
    assert "your token may not write models of bob\nhint: check the name of the owner; log in" in other[0]
    assert f"{output} is complete: later, hf upload bob/mine {output} uploads it" in other[0]
    assert "--private: this model exists and is public\nhint: choose another name" in public[0]
    assert "answers 507" in full[0]
    assert not list((tmp_path / "home").rglob("rlinf-export-*"))


def test_a_hub_that_cannot_be_reached_ends_a_push_before_the_export(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_TOKEN", "hf_alice")
    output = tmp_path / "out"
    assert main(["export", str(run), "--push", "alice/mine", "--output", str(output)]) == 2
    message = capsys.readouterr().err
    assert "http://127.0.0.1:9 cannot be reached" in message and "hint: check the network, and HF_ENDPOINT" in message
    assert not output.exists()

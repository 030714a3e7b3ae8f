"""Runs of robot policies as they lie on the disk, made without training."""

from pathlib import Path

import torch

from rlinf.config.embodied import EmbodiedConfig
from rlinf.config.load import load_config, to_yaml
from rlinf.config.overrides import parse_overrides
from rlinf.jobs.acting import env_spec, policy_settings
from rlinf.jobs.env_interface import probe
from rlinf.run_folder.checkpoints import writing_with_checksums
from rlinf_workers.models import write_tensors
from rlinf_workers.policies import make_policy

SPOTS = """
extends: pushcube-ppo
name: spots
policy: {name: cnn, options: {hidden_size: 16}}
algorithm: {num_minibatches: 1, num_epochs: 1}
env:
  kind: import
  id: integration_tests.extensions.spots:Spots
  options: {size: 40}
  num_envs: 4
  num_groups: 2
  num_steps: 6
  max_episode_steps: 6
  num_eval_episodes: 4
run: {num_steps: 2, evaluate_every: 1, stop_at_score: null}
"""
"""A policy that looks at pictures of 40 x 40 pixels, for runs of seconds."""


def make_run(folder: Path, recipe: str = SPOTS, *overrides: str) -> Path:
    """A run with one checkpoint, of its policy's first weights."""
    folder.mkdir()
    (folder / "recipe.yaml").write_text(recipe)
    config = load_config(str(folder / "recipe.yaml"), parse_overrides(overrides))
    assert isinstance(config, EmbodiedConfig)
    (folder / "config.yaml").write_text(to_yaml(config))
    (folder / "manifest.json").write_text("{}")
    settings = policy_settings(config.policy, probe(env_spec(config.env)), config.seed)
    policy = make_policy(settings, torch.device("cpu"))
    with writing_with_checksums(folder / "checkpoints" / "step-000003", {"step": 3, "own_score": None}) as checkpoint:
        (checkpoint / "model").mkdir()
        write_tensors(checkpoint / "model" / "model.safetensors", dict(policy.state_dict()))
    return folder

"""LIBERO in whole runs: a small OpenVLA-OFT imitates a file in LIBERO's layout, learns, is filmed and is asked out of
distribution. Needs hf-libero, its scenes (RLINF_LIBERO_ASSETS, or a folder `shared/libero_assets` beside the checkout)
and h5py."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from command_line import END_TIMEOUT_S, RLINF, environment, rows, train
from rlinf_envs import EnvError, EnvSpec, make_env, tensor_field
from rlinf_envs.adapters.libero.assets import VARIABLE, assets_folder
from rlinf_envs.adapters.libero.demonstrations import read_libero
from rlinf_envs.adapters.libero.env import LiberoEnv
from rlinf_envs.adapters.libero.tasks import package
from rlinf_envs.core.vector import InProcessVector

BESIDE = Path(__file__).parents[2] / "shared" / "libero_assets"
if BESIDE.is_dir():
    os.environ.setdefault(VARIABLE, str(BESIDE))
try:
    package()
    assets_folder()
except EnvError as missing:
    pytest.skip(str(missing), allow_module_level=True)
h5py = pytest.importorskip("h5py")

pytestmark = pytest.mark.slow
SIZE = 32
TASK = "pick_up_the_butter_and_place_it_in_the_basket"
NUM_ACTIONS = 12
SHORT = {
    "env.id": "libero_object",
    "env.num_envs": 4,
    "env.num_groups": 2,
    "env.episodes_per_step": "null",
    "env.num_steps": 8,
    "env.max_episode_steps": 8,
    "env.options": f"{{tasks: [{TASK}], cameras: [agentview], image_size: {SIZE}}}",
    "env.num_eval_episodes": 2,
    "policy.options": "{chunk_size: 4, width: 32, vision_width: 16}",
    "actor.backend": "replicated",
    "actor.num_shards": 2,
    "actor.micro_batch_size": "null",
    "run.num_steps": 1,
    "run.evaluate_every": 1,
    "run.checkpoint_every": 1,
    "cluster.num_devices": 1,
}
"""libero-oft-grpo in a minute."""


def libero(**options) -> InProcessVector:
    options |= {"tasks": TASK, "cameras": ("agentview", "wrist"), "image_size": SIZE}
    env = make_env(EnvSpec(kind="libero", id="libero_object", num_envs=1, max_episode_steps=99, options=options))
    assert isinstance(env, InProcessVector)
    return env


def actions_of(demo: int) -> torch.Tensor:
    return torch.rand(NUM_ACTIONS, 1, 7, generator=torch.Generator().manual_seed(demo)) * 2 - 1


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    """A folder with one file in LIBERO's layout: two episodes of random actions, beside each what was seen after it.
    That they reached the goal is only said."""
    folder = tmp_path_factory.mktemp("recorded")
    env = libero(rotate=False)
    row = env._envs[0]
    assert isinstance(row, LiberoEnv)
    with h5py.File(folder / f"{TASK}_demo.hdf5", "w") as file:
        for demo in range(2):
            env.reset([demo])
            group = file.create_group(f"data/demo_{demo}")
            states, seen = [], []
            for action in actions_of(demo):
                states.append(row.scene._env.sim.get_state().flatten())
                observation = env.step(action).observation
                position, turn, fingers = np.split(tensor_field(observation, "state")[0].numpy(), (3, 6))
                seen.append(
                    {
                        "ee_pos": position,
                        "ee_ori": turn,
                        "gripper_states": fingers,
                        "joint_states": row.scene._drawn.qpos[:7].copy(),
                        "agentview_rgb": tensor_field(observation, "image.agentview")[0].numpy(),
                        "eye_in_hand_rgb": tensor_field(observation, "image.wrist")[0].numpy(),
                    }
                )
            for key in seen[0]:
                group[f"obs/{key}"] = np.stack([one[key] for one in seen])
            group["actions"] = actions_of(demo)[:, 0].double().numpy()
            group["states"] = np.stack(states)
            group["rewards"] = group["dones"] = np.arange(NUM_ACTIONS) == NUM_ACTIONS - 1
    env.close()
    return folder


def test_demonstrations_are_what_the_environment_shows(recorded: Path) -> None:
    env = libero()
    for demo, read in enumerate(read_libero(recorded)):
        env.reset([demo])
        before = env.step(actions_of(demo)[0]).observation  # what was seen before the first action is in no file
        for time, action in enumerate(actions_of(demo)[1:]):
            assert torch.equal(read.actions[time], action[0])
            for name in ("state", "image.agentview", "image.wrist"):
                assert torch.equal(tensor_field(read.observations, name)[time], tensor_field(before, name)[0])
            assert read.observations["instruction"][time] == before["instruction"][0]
            before = env.step(action).observation
    env.close()


@pytest.fixture(scope="module")
def run(recorded: Path, tmp_path_factory) -> Path:
    begin = {"source": "libero", "path": recorded, "num_episodes": 2, "num_steps": 3, "batch_size": 8}
    keys = SHORT | {f"sft_warm_up.{name}": value for name, value in begin.items()}
    return train("libero-oft-grpo", tmp_path_factory.mktemp("runs") / "run", keys)


def test_a_policy_imitates_and_learns(run: Path) -> None:
    notes = json.loads((run / "manifest.json").read_text())["notes"]
    assert f"SFT warm-up: 2 demonstrations of {TASK}, {2 * (NUM_ACTIONS - 1)} chunks" in notes
    (step,) = rows(run)
    assert step["env/episode_length"] == 8 and step["env/truncated_fraction"] == 1 and abs(step["actor/kl"]) < 1e-6


def rlinf(*arguments: object, code: int = 0) -> str:
    """What it printed."""
    line = [*RLINF, *map(str, arguments), "--cluster.num_devices", "1"]
    done = subprocess.run(line, capture_output=True, text=True, env=environment(), timeout=END_TIMEOUT_S)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_out_of_distribution_has_the_numbers_of_the_run_as_seen(run: Path, tmp_path: Path) -> None:
    only = ["--only", "vision,other words,execution"]  # unseen tasks have scenes of libero_90
    rlinf("eval", "--suite", "libero-ood", run, "--output", tmp_path / "out", "--suite.num_episodes", 2, *only)
    variants = json.loads((tmp_path / "out" / "result.json").read_text())["variants"]
    evaluated = rows(run, "evaluations.jsonl")[-1]
    assert variants["seen"]["return"] == evaluated["return"]
    assert variants["seen"]["success_at_end"] == evaluated["success_at_end"]
    assert len(variants) == 8 and all(variant["num_episodes"] == 2 for variant in variants.values())


def test_unseen_tasks_without_their_scenes_are_refused_before_anything_is_written(run: Path, tmp_path: Path) -> None:
    task = "KITCHEN_SCENE5_put_the_black_bowl_on_the_plate"  # the first that is asked
    with contextlib.suppress(EnvError):
        make_env(EnvSpec(kind="libero", id="libero_90", num_envs=1, options={"tasks": task})).close()
        pytest.skip("the scenes of libero_90 are on this machine")
    arguments = ["--suite", "libero-ood", run, "--output", tmp_path / "out", "--only", "unseen tasks"]
    printed = rlinf("eval", *arguments, code=2)
    assert f"variant 'unseen tasks': env.id='libero_90': libero_90: {task} cannot be built from the scenes" in printed
    assert not (tmp_path / "out").exists()


def test_it_is_filmed(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("imageio_ffmpeg")
    rlinf("play", run, "--output", tmp_path / "out", "--episodes", 2)
    lines = (tmp_path / "out" / "episodes.jsonl").read_text().splitlines()
    assert [len(json.loads(line)["actions"]) for line in lines] == [8, 8]
    assert (tmp_path / "out" / "episodes.mp4").stat().st_size > 1000

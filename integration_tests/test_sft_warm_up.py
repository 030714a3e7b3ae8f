"""An SFT warm-up from a dataset through the command line: the policy imitates, one and two ranks have the same numbers,
and a resumed run does not begin with one again."""

import json
import subprocess

import numpy as np
import pytest

from command_line import RLINF, environment, rows, train, weights

SWING = {
    "env.kind": "gymnasium",
    "env.id": "Pendulum-v1",
    "env.options": "{}",
    "env.num_envs": 4,
    "env.num_groups": 2,
    "env.num_steps": 10,
    "env.max_episode_steps": 10,
    "env.num_eval_episodes": 4,
    "policy.chunk_size": 2,
    "policy.hidden_sizes": "[16]",
    "algorithm.num_minibatches": 1,
    "algorithm.num_epochs": 1,
    "run.evaluate_every": 1,
    "run.stop_at_score": "null",
}


def record(folder):
    """A LeRobot dataset, version 2.1: torques against the speed."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    (folder / "meta").mkdir(parents=True)
    features = {"observation.state": {"dtype": "float32", "shape": [3]}, "action": {"dtype": "float32", "shape": [1]}}
    pattern = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
    info = {"codebase_version": "v2.1", "fps": 20, "chunks_size": 1000, "features": features, "data_path": pattern}
    (folder / "meta/info.json").write_text(json.dumps(info))
    (folder / "meta/tasks.jsonl").write_text(json.dumps({"task_index": 0, "task": "stand up"}) + "\n")
    lines = [json.dumps({"episode_index": i, "tasks": ["stand up"], "length": 10}) for i in range(4)]
    (folder / "meta/episodes.jsonl").write_text("\n".join(lines))
    (folder / "data/chunk-000").mkdir(parents=True)
    chance = np.random.default_rng(0)
    for episode in range(4):
        states = chance.uniform(-1, 1, (10, 3))
        columns = {
            "observation.state": states.tolist(),
            "action": (-states[:, 2:]).tolist(),
            "episode_index": [episode] * 10,
            "task_index": [0] * 10,
        }
        parquet.write_table(pa.table(columns), folder / f"data/chunk-000/episode_{episode:06d}.parquet")
    return folder


@pytest.mark.slow
def test_one_and_two_ranks_warm_up_alike_and_a_resumed_run_does_not(tmp_path):
    begin = {"source": "lerobot", "path": str(record(tmp_path / "set")), "num_episodes": 4, "num_steps": 60}
    keys = SWING | {f"sft_warm_up.{name}": value for name, value in begin.items()}
    runs = []
    for devices in (1, 2):
        run = train(
            "pushcube-ppo", tmp_path / str(devices), keys | {"cluster.num_devices": devices, "run.num_steps": 1}
        )
        notes = json.loads((run / "manifest.json").read_text())["notes"]
        assert "SFT warm-up: 4 demonstrations of stand up, 40 chunks" in notes
        runs.append((rows(run), rows(run, "evaluations.jsonl"), weights(run)))
    assert runs[0] == runs[1]
    again = [*RLINF, "train", "--resume", "--output", str(tmp_path / "2"), "--run.num_steps", "2"]
    done = subprocess.run(again, capture_output=True, text=True, env=environment(), timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SFT warm-up" not in done.stdout + done.stderr

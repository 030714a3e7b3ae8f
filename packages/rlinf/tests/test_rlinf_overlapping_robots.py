"""Steps of a robot's job that overlap give what the definition of staleness says, computed in one process."""

import json

import pytest
import torch
from safetensors.torch import load_file

from rlinf.cli.main import main
from rlinf.config.load import load_config
from rlinf.config.overrides import parse_overrides
from rlinf.program.recipe import make_workers
from rlinf_workers import StepContext
from rlinf_workers.execution.executor import CHANNEL_BYTES

NUM_STEPS = 5
POLE = f"""
job: embodied
name: tiny-pole
mode: disaggregated
cluster: {{num_devices: 2, oversubscribe: true}}
run: {{num_steps: {NUM_STEPS}, evaluate_every: {NUM_STEPS}, checkpoint_every: {NUM_STEPS}, trace: false}}
env: {{kind: gymnasium, id: CartPole-v1, num_envs: 8, num_groups: 4, num_steps: 16, max_episode_steps: 40,
  num_eval_episodes: 4, eval_seed: 50000}}
policy: {{name: actor_critic, hidden_sizes: [16], normalize_observations: true}}
actor: {{learning_rate: 1.0e-3, num_shards: 2}}
"""
ALGORITHMS = {
    "ppo": "{name: ppo, num_minibatches: 2, num_epochs: 2}",
    "corrected": "{name: ppo, num_minibatches: 2, num_epochs: 2, correction: truncated}",
    "close": "{name: ppo, num_minibatches: 2, num_epochs: 2, target_kl: 1.0e-5}",
}
"""`close`: steps that begin farther from the policy that acted than their target."""


def act(workers, step):
    """The trajectories of a training step, in the order of their groups."""
    workers.begin(StepContext(step=step, phase="train", seed=0, num_items=0))
    env, policy, trajectories = workers["env"], workers["policy"], []
    observations = env.begin_segments()
    while observations:
        action, complete = policy.act_on(observations.pop(0))
        observations += [] if action is None else env.advance(action)
        trajectories += complete
    return sorted(trajectories, key=lambda one: one.group)


def trained(config, folder, max_staleness):
    """The weights after all steps, each acted in when all but the last `max_staleness` of the steps before it have been
    trained."""
    _, workers = make_workers(config, folder)
    acted = []
    for step in range(NUM_STEPS + max_staleness):
        workers.sync("actor", "policy")
        if step < NUM_STEPS:
            acted.append(act(workers, step))
        if step >= max_staleness:
            workers.begin(StepContext(step=step - max_staleness, phase="train", seed=0, num_items=0))
            workers["actor"].train([acted.pop(0)])
    weights = {name: tensor.detach().clone() for name, tensor in workers["actor"].weights().items()}
    workers.close()
    return weights


WHOLE = ("--env.episodes_per_step=24", "--env.num_steps=40", "--env.num_processes=1")
"""Steps of whole episodes, of which the next one begins while the longest of one go on."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("max_staleness", "algorithm", "channel_bytes", "env"),
    [
        (1, "ppo", CHANNEL_BYTES, ()),
        (2, "corrected", CHANNEL_BYTES, ()),
        (2, "close", CHANNEL_BYTES, ()),
        pytest.param(2, "ppo", 4096, (), marks=pytest.mark.slow),
        pytest.param(1, "ppo", CHANNEL_BYTES, WHOLE, marks=pytest.mark.slow),
        pytest.param(2, "ppo", 4096, WHOLE, marks=pytest.mark.slow),
    ],
)
def test_the_policy_that_acts_is_that_of_so_many_steps_before(
    max_staleness, algorithm, channel_bytes, env, tmp_path, monkeypatch
):
    """Also where trajectories fill the channel to the actor, so that acting has to wait for it."""
    monkeypatch.setattr("rlinf_workers.execution.executor.CHANNEL_BYTES", channel_bytes)
    path, run = tmp_path / "tiny.yaml", tmp_path / "run"
    path.write_text(f"{POLE}algorithm: {ALGORITHMS[algorithm]}\n")
    settings = [f"--algorithm.max_staleness={max_staleness}", "--env.episodes_megabytes=0", *env]
    assert main(["train", str(path), "--output", str(run), *settings]) == 0
    rows = [json.loads(line)["metrics"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["rollout/staleness_max"] for row in rows] == [min(step, max_staleness) for step in range(NUM_STEPS)]

    threads = torch.get_num_threads()
    expected = trained(
        load_config(str(path), parse_overrides([*env, "--env.num_processes=0"])), tmp_path / "program", max_staleness
    )
    torch.set_num_threads(threads)
    written = load_file(run / "checkpoints" / f"step-{NUM_STEPS:06d}" / "model" / "model.safetensors")
    assert written.keys() == expected.keys()
    for name, tensor in written.items():
        assert torch.equal(tensor, expected[name]), name

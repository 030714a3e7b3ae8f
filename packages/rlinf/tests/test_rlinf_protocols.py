"""Published protocols as settings, against the numbers in their sources."""

import pytest

from rlinf import UserError
from rlinf.config.load import load_comparison, load_trained
from rlinf.config.overrides import Override, parse_overrides
from rlinf.config.protocols import PROTOCOLS, chosen_protocol

RUN = """
job: embodied
name: reader
seed: 0
env: {{kind: libero, id: {suite}, max_episode_steps: 100, num_steps: 100, eval_ignore_terminations: true,
      options: {{cameras: [agentview], image_size: 224, tasks: [0], quality: fast}}}}
policy: {{name: {policy}, options: {{chunk_size: {chunk}, cameras: [agentview]}}}}
"""


@pytest.fixture
def run(tmp_path):
    def make(suite: str = "libero_spatial", policy: str = "pi0", chunk: int = 3):
        (tmp_path / "config.yaml").write_text(RUN.format(suite=suite, policy=policy, chunk=chunk))
        return tmp_path

    return make


@pytest.mark.parametrize(
    ("protocol", "suite", "limit", "num_episodes"),
    [
        ("openvla", "libero_spatial", 220, 500),
        ("openvla", "libero_object", 280, 500),
        ("openpi", "libero_goal", 300, 500),
        ("openpi", "libero_90", 400, 4500),
        ("lerobot", "libero_spatial", 280, 100),
        ("lerobot", "libero_10", 520, 100),
        ("simplevla", "libero_10", 512, 500),
        ("simplevla", "libero_goal", 512, 500),
    ],
)
def test_limits_and_numbers_of_episodes_are_the_published_ones(run, protocol, suite, limit, num_episodes):
    chosen = chosen_protocol(protocol, load_trained(run(suite)))
    config = load_trained(run(suite), chosen.overrides)
    assert (config.env.max_episode_steps, chosen.num_episodes, chosen.first_seed) == (limit, num_episodes, 0)
    assert config.env.eval_ignore_terminations is False
    options = dict(config.env.options)
    assert options.pop("init_states") == ("0-9" if protocol == "lerobot" else "0-49")
    assert options == {
        "cameras": ("agentview",),
        "image_size": 256,
        "tasks": None,
        "quality": "full",
        "num_wait_steps": 10,
        "rotate": True,
    }


@pytest.mark.parametrize(
    ("protocol", "policy", "published"),
    [
        ("openpi", "pi0", {"chunk_size": 5, "num_denoising_steps": 10}),
        ("openpi", "pi05", {"chunk_size": 5, "num_denoising_steps": 10}),
        ("lerobot", "pi05", {"chunk_size": 10, "num_denoising_steps": 10}),
        ("lerobot", "smolvla", {"chunk_size": 1, "num_denoising_steps": 10}),
        ("lerobot", "pi0", {}),
        ("openpi", "openvla_oft", {}),
    ],
)
def test_options_are_those_of_the_policies_that_the_source_evaluates(run, protocol, policy, published):
    own = load_trained(run(policy=policy))
    chosen = chosen_protocol(protocol, own)
    assert load_trained(run(policy=policy), chosen.overrides).policy.options == {**own.policy.options, **published}


def test_the_command_line_wins_over_the_protocol(run):
    folder = run()
    checkpoint = folder / "checkpoints" / "step-000001"

    def preset(config):
        chosen = chosen_protocol("openvla", config)
        return [*chosen.overrides, Override(key=("compare", "num_episodes"), text=str(chosen.num_episodes))]

    own = parse_overrides(["--env.max_episode_steps", "250", "--env.id", "libero_goal"])
    config = load_comparison([("", checkpoint)] * 2, own, preset)
    assert config.compare.num_episodes == 500 and config.a == config.b
    assert config.a.env.max_episode_steps == 250 and config.a.env.options["quality"] == "full"
    of_b = ["--b.env.max_episode_steps", "90", "--b.env.id", "libero_10"]
    own = parse_overrides(["--compare.num_episodes", "20", *of_b])
    config = load_comparison([("", checkpoint)] * 2, own, preset)
    assert config.compare.num_episodes == 20 and config.a.env.max_episode_steps == 220
    assert (config.b.env.max_episode_steps, config.b.env.id) == (90, "libero_10")


def test_mistakes_are_named(run):
    with pytest.raises(UserError, match=r"--protocol openpl is none of openvla, openpi, .*; did you mean openpi\?"):
        chosen_protocol("openpl", load_trained(run()))
    with pytest.raises(UserError, match=r"the policy acts in env\.kind=libero, env\.id=libero_100"):
        chosen_protocol("openvla", load_trained(run("libero_100")))


def test_every_protocol_names_its_source():
    assert all("/" in protocol.source and protocol.source.count(",") for protocol in PROTOCOLS.values())

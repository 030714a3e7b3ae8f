"""Environments whose packages are only where their role runs."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlinf.config.embodied import EmbodiedConfig, EnvConfig, PolicyActorConfig, PolicyConfig
from rlinf.config.load import load_config, to_yaml
from rlinf.config.overrides import parse_overrides
from rlinf.errors import UserError
from rlinf.jobs import prepare
from rlinf.jobs.acting import chosen_policy, limit_notes, picture_notes, termination_notes
from rlinf.jobs.embodied.job import EmbodiedJob
from rlinf.jobs.embodied.running_episodes import RunningEpisodes
from rlinf.jobs.env_interface import probe
from rlinf.jobs.training import epsilon_notes
from rlinf.machine import InstalledGpu, Machine
from rlinf_envs import EnvSpec, FieldSpec, RowSnapshot
from rlinf_workers import FlowRun
from rlinf_workers.roles import EnvInterface, GroupEpisodes
from rlinf_workers.testing.venvs import second_venv

GPUS = (InstalledGpu(name="fake", memory_bytes=80 << 30),) * 2
ROBOTS = """
import gymnasium as gym
import numpy as np

class Arm(gym.Env):
    action_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
    observation_space = gym.spaces.Box(-9.0, 9.0, (3,), np.float32)
    def reset(self, *, seed=None, options=None): return np.zeros(3, np.float32), {}
    def step(self, action): return np.zeros(3, np.float32), 0.0, False, False, {"success": True}

class NoLicence(Arm):
    def __init__(self): raise RuntimeError("no licence for the simulator")
"""


@pytest.mark.maniskill
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_gpu_simulation_without_a_gpu_is_refused_before_anything_starts():
    overrides = parse_overrides(["--env.options.sim_backend", "gpu"])
    with pytest.raises(UserError, match=r"^env.id='PushCube-v1': options.sim_backend=gpu: no CUDA device was found"):
        prepare(load_config("pushcube-ppo", overrides))


@pytest.mark.maniskill
@pytest.mark.parametrize(("backend", "takes_gpus"), [("cpu", False), ("gpu", True), ("auto", True)])
def test_simulators_take_gpus_where_they_simulate_on_them(
    backend: str, takes_gpus: bool, monkeypatch: pytest.MonkeyPatch
):
    def probe_on_cpu(spec: EnvSpec, python: str | None) -> EnvInterface:
        return probe(replace(spec, options={**spec.options, "sim_backend": "cpu"}), python)

    monkeypatch.setattr("rlinf.jobs.embodied.job.probe", probe_on_cpu)
    config = load_config("pushcube-ppo", parse_overrides(["--env.options.sim_backend", backend]))
    assert isinstance(config, EmbodiedConfig)
    job = EmbodiedJob(config, Machine(num_cpus=8, memory_bytes=64 << 30, gpus=GPUS))
    flows = job.build(Path("unused"))
    assert [flow.graph().stage("env").needs_device for flow in (flows.train, flows.evaluate)] == [takes_gpus] * 2


@pytest.mark.parametrize(
    ("env_id", "tasks", "backend", "expected"),
    [
        ("PushCube-v1", None, "auto", True),
        ("tabletop", None, "auto", False),
        ("tabletop", ["PushCube-v1"], "auto", True),
        ("tabletop", "PushCube-v1", "auto", True),
        ("tabletop", ["PushCube-v1", "PullCube-v1"], "auto", False),
        ("tabletop", None, "gpu", True),
        ("PushCube-v1", None, "cpu", False),
    ],
)
def test_a_suite_of_several_tasks_simulates_on_the_cpu_by_itself(env_id, tasks, backend: str, expected: bool):
    """As `_choose_backend` of the simulator does, which refuses `gpu` with several tasks."""
    options = {"sim_backend": backend, "tasks": tasks}
    assert EnvConfig(kind="maniskill", id=env_id, options=options).simulates_on_gpu is expected


def test_an_environment_is_looked_at_where_its_role_runs(tmp_path: Path):
    python = second_venv(tmp_path / "environment")
    (packages,) = (tmp_path / "environment" / "lib").glob("python*/site-packages")
    (packages / "robots.py").write_text(ROBOTS)

    def spec(name: str) -> EnvSpec:
        return EnvSpec(kind="import", id=f"robots:{name}", num_envs=2, max_episode_steps=5)

    with pytest.raises(UserError, match="No module named 'robots'"):
        probe(spec("Arm"))
    keys = {"kind": "import", "id": "robots:Arm", "options": "{}"}
    overrides = [f"--venvs.env={python}", *(f"--env.{key}={value}" for key, value in keys.items())]
    job = prepare(load_config("pushcube-ppo", parse_overrides(overrides)))
    assert isinstance(job, EmbodiedJob) and job.score.name == "success_at_end"
    assert [interpreter.path for interpreter in job.venvs.values()] == [python]
    with pytest.raises(UserError, match="no licence for the simulator") as caught:
        probe(spec("NoLicence"), python)
    assert str(caught.value).startswith(f"env.id='robots:NoLicence' in {python}: RuntimeError: ")
    assert "raised in " in str(caught.value) and "robots.py:12" in str(caught.value)


BATCHES = """
import gymnasium as gym
import numpy as np
import torch
from rlinf_envs import vector_of_callable

class Camera(gym.Env):
    action_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
    observation_space = gym.spaces.Box(0, 255, (64, 64, 3), np.uint8)
    def reset(self, *, seed=None, options=None): return np.zeros((64, 64, 3), np.uint8), {}
    def step(self, action): return np.zeros((64, 64, 3), np.uint8), 0.0, False, False, {}

class Batch:
    def __init__(self, num_envs, max_episode_steps=None):
        self.rows = vector_of_callable(Camera, num_envs, max_episode_steps=max_episode_steps)
    def __getattr__(self, name): return getattr(self.rows, name)

class FloatPictures(Batch):
    def reset(self, seeds): return {name: value.float() for name, value in self.rows.reset(seeds).items()}

class Raises(Batch):
    def reset(self, seeds): return seeds["none"]

class Exits(Batch):
    def __init__(self, num_envs, max_episode_steps=None): raise SystemExit(3)

class NoReplay(Batch):
    def __getattr__(self, name):
        if name in ("snapshot", "restore"): raise AttributeError(name)
        return super().__getattr__(name)

class Endless(Batch):
    def __init__(self, num_envs, max_episode_steps=None): super().__init__(num_envs)
"""


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("Exits", "could not be made: SystemExit: 3\nhint: raised in "),
        ("FloatPictures", "the observation of reset()['image.main'] is [1, 64, 64, 3] torch.float32; the spec says "),
        ("Raises", "TypeError: list indices must be integers or slices, not str\nhint: raised in "),
        ("Endless", "an episode does not end after max_episode_steps=1"),
    ],
)
def test_a_batch_that_breaks_its_promises_is_named_before_the_start(name, text, tmp_path, monkeypatch):
    (tmp_path / "batches.py").write_text(BATCHES)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError) as caught:
        probe(EnvSpec(kind="import", id=f"batches:{name}", num_envs=2, max_episode_steps=5))
    assert f"env.id='batches:{name}'{' ' if name == 'Exits' else ': '}{text}" in str(caught.value)


def test_episodes_go_on_where_a_step_is_shorter_and_they_can_be_replayed(tmp_path, monkeypatch):
    (tmp_path / "longer.py").write_text(BATCHES)
    monkeypatch.syspath_prepend(tmp_path)
    keys = ["--env.kind=import", "--env.id=longer:Camera", "--run.stop_at_score=null", "--policy.name=cnn"]

    def job(*more: str) -> EmbodiedJob:
        prepared = prepare(load_config("pushcube-ppo", parse_overrides([*keys, "--env.episodes_megabytes=0", *more])))
        assert isinstance(prepared, EmbodiedJob)
        return prepared

    assert job("--env.episodes_megabytes=1").build(tmp_path).train.graph().collects == ("episodes",)
    collects = [job(f"--env.max_episode_steps={n}").build(tmp_path).train.graph().collects for n in (50, 51)]
    assert collects == [(), ("episodes",)]
    assert job("--env.id=longer:NoReplay")
    with pytest.raises(
        UserError, match=r"^env.num_steps=50 is below env.max_episode_steps=51, and .*cannot return"
    ) as e:
        job("--env.max_episode_steps=51", "--env.id=longer:NoReplay")
    assert "use --env.num_steps 51" in str(e.value)


def test_running_episodes_are_those_that_were_saved(tmp_path):
    rows = tuple(
        RowSnapshot(seed=2**31 + i, episode_index=i, actions=torch.arange(6.0).reshape(3, 2)[:i]) for i in (2, 0, 3)
    )
    rewarded = tuple(replace(row, rewards=row.actions.sum(1) / 3) for row in rows)
    groups = [GroupEpisodes(group=10, rows=rows[:2]), GroupEpisodes(group=11, rows=rewarded)]
    episodes = RunningEpisodes()
    episodes.take(FlowRun(metrics={}, collected={"episodes": groups}, shown_rows=[], spans=[], start_s=0, duration_s=0))
    episodes.save(tmp_path)
    other = RunningEpisodes()
    other.load(tmp_path)
    for one, saved in zip(other._groups, groups, strict=True):
        assert one.group == saved.group
        for row, expected in zip(one.rows, saved.rows, strict=True):
            assert (row.seed, row.episode_index) == (expected.seed, expected.episode_index)
            assert torch.equal(row.actions, expected.actions)
            of_both = [None if of.rewards is None else of.rewards.tolist() for of in (row, expected)]
            assert of_both[0] == of_both[1]
    other.load(tmp_path / "of another run")
    other.save(tmp_path / "never made")
    assert not (tmp_path / "never made").exists()


def test_who_sees_pictures_alone_is_pointed_to_the_policy_for_them(tmp_path, monkeypatch):
    (tmp_path / "cameras.py").write_text(BATCHES)
    monkeypatch.syspath_prepend(tmp_path)
    keys = ["--env.kind=import", "--env.id=cameras:Camera", "--run.stop_at_score=null"]
    with pytest.raises(
        UserError, match=r"reads state, and .* shows image.main\n.*or --policy.name cnn, which looks at"
    ):
        prepare(load_config("pushcube-ppo", parse_overrides(keys)))
    assert isinstance(prepare(load_config("pushcube-ppo", parse_overrides([*keys, "--policy.name=cnn"]))), EmbodiedJob)


def test_policy_auto_is_the_one_that_reads_what_the_environment_shows(tmp_path, monkeypatch):
    (tmp_path / "cameras.py").write_text(BATCHES)
    monkeypatch.syspath_prepend(tmp_path)
    camera = ["--env.kind=import", "--env.id=cameras:Camera"]
    job = prepare(load_config("env-ppo", parse_overrides(camera)))
    assert (job.config.policy.name, dict(job.config.policy.options)) == ("cnn", {})
    assert "policy.name=auto: cnn, because env.id='cameras:Camera' shows image.main" in job.notes
    assert "name: cnn" in to_yaml(job.config)  # what a resumed run and `rlinf play` read
    job = prepare(load_config("env-ppo", parse_overrides(["--policy.hidden_sizes=[8]"])))
    assert (job.config.policy.name, job.config.policy.hidden_sizes) == ("actor_critic", (8,))
    for wrong, text in (
        (
            [*camera, "--policy.hidden_sizes=[8]"],
            "policy.hidden_sizes is for policy.name=actor_critic; .* cnn, because",
        ),
        (["--policy.options.reads_state=true"], "policy.options is for policy.name=cnn; .* actor_critic, because"),
    ):
        with pytest.raises(UserError, match=text):
            prepare(load_config("env-ppo", parse_overrides(wrong)))


def test_policy_auto_reads_pictures_and_state():
    fields = {
        "image.main": FieldSpec(shape=(64, 64, 3), dtype="uint8"),
        "state": FieldSpec(shape=(4,), dtype="float32"),
    }
    interface = replace(probe(EnvSpec(kind="gymnasium", id="CartPole-v1", num_envs=1)), fields=fields)
    policy, _ = chosen_policy(PolicyConfig(name="auto"), interface, "both")
    assert (policy.name, policy.options) == ("cnn", {"reads_state": True})
    own_options = PolicyConfig(name="auto", options={"reads_state": False, "hidden_size": 8})
    assert chosen_policy(own_options, interface, "both")[0].options == {"reads_state": False, "hidden_size": 8}


def test_the_manifest_says_where_episodes_are_cut_before_their_own_limit():
    interface = probe(EnvSpec(kind="gymnasium", id="CartPole-v1", num_envs=1))
    (note,) = limit_notes(EnvConfig(kind="gymnasium", id="CartPole-v1", max_episode_steps=499), interface)
    assert note.startswith("env.max_episode_steps=499 cuts episodes of CartPole-v1, whose own limit is 500 actions")
    assert limit_notes(EnvConfig(kind="gymnasium", id="CartPole-v1", max_episode_steps=500), interface) == ()
    other = replace(interface, registered_limit=None)
    assert limit_notes(EnvConfig(kind="import", id="a:B", max_episode_steps=5), other) == ()


def test_the_limit_of_a_custom_environment_is_that_of_its_spec(tmp_path, monkeypatch):
    (tmp_path / "limited.py").write_text(
        "import gymnasium as gym\n"
        "def registered(): return gym.make('CartPole-v1')\n"
        "def wrapped(): return gym.wrappers.TimeLimit(gym.make('CartPole-v1').unwrapped, 300)\n"
        "def bare(): return gym.make('CartPole-v1').unwrapped.__class__()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name, limit in (("registered", 500), ("wrapped", 300), ("bare", None)):
        assert probe(EnvSpec(kind="import", id=f"limited:{name}", num_envs=1)).registered_limit == limit


def test_the_manifest_says_where_episodes_go_on_after_their_end():
    env = EnvConfig(kind="gymnasium", id="Hopper-v5", ignore_terminations=True, eval_ignore_terminations=True)
    (note,) = termination_notes(env)
    assert note.startswith(
        "env.ignore_terminations and env.eval_ignore_terminations: episodes of Hopper-v5 go on after"
    )
    assert termination_notes(env.model_copy(update={"kind": "maniskill"})) == ()
    assert termination_notes(EnvConfig(kind="gymnasium", id="Hopper-v5")) == ()


def test_an_epsilon_for_small_networks_is_noted_with_a_published_checkpoint():
    published = PolicyConfig(name="openvla", options={"folder": "model"})
    (note,) = epsilon_notes(PolicyActorConfig(), published)
    assert note.startswith("actor.adam_epsilon=1e-05: ") and note.endswith("--actor.adam_epsilon 1e-08")
    assert epsilon_notes(PolicyActorConfig(adam_epsilon=1e-8), published) == ()
    assert epsilon_notes(PolicyActorConfig(), PolicyConfig(name="openvla")) == ()


def test_pictures_that_published_checkpoints_have_not_seen_are_noted():
    policy = PolicyConfig(name="openvla", options={"folder": "model"})

    def notes(policy=policy, kind="libero", **options) -> tuple[str, ...]:
        return picture_notes(
            EnvConfig(kind=kind, id="libero_10", options={"cameras": ("agentview",)} | options), policy
        )

    (note,) = notes(image_size=224)
    assert "with --env.options.quality full --env.options.image_size 256, and this run draws others" in note
    assert notes(image_size=256, quality="full") == ()
    assert notes(cameras=()) == notes(kind="metaworld") == notes(PolicyConfig(name="openvla")) == ()

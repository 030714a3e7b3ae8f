"""The SFT warm-up of an embodied run: what is refused before anything starts, and the batches that are fed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlinf.config.load import load_config
from rlinf.config.overrides import parse_overrides
from rlinf.errors import UserError
from rlinf.jobs.acting import policy_settings
from rlinf.jobs.demonstrations import MAX_FAILURES, Chunks, SftWarmUp, counted
from rlinf.jobs.embodied.success_classifier import RewardFromPictures
from rlinf.jobs.env_interface import needs_of
from rlinf_envs import ActionSpec, Demonstration, FieldSpec, tensor_field
from rlinf_workers.policies import Needs
from rlinf_workers.roles import EnvInterface
from rlinf_workers.roles.records.embodied import texts_of

NEEDS = Needs(reads=("state", "instruction"), chunk_size=3)
STATE = {"state": FieldSpec(shape=(2,), dtype="float32")}
ACTIONS = ActionSpec(kind="continuous", shape=(3,), low=-torch.ones(3), high=torch.ones(3))


def demonstration(length: int, first: float) -> Demonstration:
    return Demonstration(
        task="push",
        seed=None,
        observations={"state": torch.full((length, 2), first), "instruction": [f"push {first:g}"] * length},
        actions=first + torch.arange(length * 3, dtype=torch.float32).view(length, 3),
        rewards=torch.zeros(length),
        success=True,
    )


def test_chunks_repeat_the_last_action_of_an_episode():
    chunks = Chunks.of([demonstration(2, 0.0), demonstration(1, 100.0)], NEEDS, ACTIONS)
    assert chunks.fields["state"][:, 0].tolist() == [0.0, 0.0, 100.0]
    assert texts_of(chunks.fields["instruction"]) == ["push 0", "push 0", "push 100"]
    assert chunks.actions[:, :, 0].tolist() == [[0.0, 3.0, 3.0], [3.0, 3.0, 3.0], [100.0, 100.0, 100.0]]


def test_discrete_actions_count_from_0():
    spec = ActionSpec(kind="discrete", shape=(), low=torch.tensor(2), high=torch.tensor(5))
    demo = Demonstration(
        task="push",
        seed=None,
        observations={"state": torch.zeros(2, 2)},
        actions=torch.tensor([2, 5]),
        rewards=torch.zeros(2),
        success=True,
    )
    assert Chunks.of([demo], Needs(reads=("state",)), spec).actions.tolist() == [[[0]], [[3]]]


def config_of(*overrides: str) -> Any:
    return load_config("pushcube-ppo", parse_overrides(list(overrides)))


def sft_warm_up(path: Path, *, interface: EnvInterface | None = None, needs: Needs | None = None, **keys: Any):
    names = {"source": "maniskill", "path": path, "num_episodes": 2} | keys
    config = config_of(*(f"--sft_warm_up.{name}={value}" for name, value in names.items()))
    env_interface = interface or EnvInterface(fields=STATE, actions=ACTIONS, notes=(), knows_success=True)
    return SftWarmUp(config.sft_warm_up, config, env_interface, needs or Needs(reads=("state",)))


@pytest.fixture
def trajectories(tmp_path: Path) -> Path:
    h5py = pytest.importorskip("h5py")
    env = {"env_id": "PushCube-v1", "env_kwargs": {"control_mode": "pd_joint_delta_pos"}}
    episodes = [{"episode_id": i, "episode_seed": i, "success": True} for i in range(2)]
    (tmp_path / "traj.json").write_text(json.dumps({"env_info": env, "episodes": episodes}))
    with h5py.File(tmp_path / "traj.h5", "w") as file:
        for i in range(2):
            file[f"traj_{i}/actions"] = np.zeros((4, 3), np.float32)
            file[f"traj_{i}/obs"] = np.full((5, 2), i, np.float32)
    return tmp_path / "traj.h5"


def test_batches_do_not_depend_on_the_shards(trajectories):
    actions = []
    for shards in (1, 2, 4):
        groups = ["--env.num_groups=4", f"--actor.num_shards={shards}"]
        config = config_of(*groups, "--sft_warm_up={source: experts}", "--env.kind=metaworld")
        start = sft_warm_up(trajectories)
        start._num_shards = shards
        assert config.sft_warm_up is not None
        chunks = Chunks.of([demonstration(30, 0.0)], NEEDS, ACTIONS)
        batches = start._batches(chunks, 3)
        assert [batch.shard for batch in batches] == list(range(shards))
        whole = torch.zeros(64, 3, 3)
        for batch in batches:
            whole[batch.shard :: shards] = batch.actions
        actions.append(whole)
    assert torch.equal(actions[0], actions[1]) and torch.equal(actions[0], actions[2])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_episodes": 3}, "it has 2 successful episodes, and sft_warm_up.num_episodes=3"),
        ({"path": "nowhere.h5"}, r"nowhere\.h5: .*nowhere\.h5 does not exist"),
        (
            {"needs": Needs(reads=("image.front",))},
            "it has no 'image.front', which the policy reads; it has instruction, state",
        ),
        (
            {"interface": EnvInterface(
                fields={"state": FieldSpec(shape=(5,), dtype="float32")}, actions=ACTIONS, notes=(), knows_success=True
            )},
            r"'state' is float32 of shape \[2\], and the environment shows float32 of shape \[5\]",
        ),
        (
            {"interface": EnvInterface(
                fields=STATE,
                actions=ActionSpec(kind="continuous", shape=(7,), low=-torch.ones(7), high=torch.ones(7)),
                notes=(),
                knows_success=True,
            )},
            r"its actions are continuous of shape \[3\], and the environment takes continuous ones of shape \[7\]",
        ),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(trajectories, changes, says):
    with pytest.raises(UserError, match=says):
        sft_warm_up(changes.pop("path", trajectories), **changes)


@pytest.mark.parametrize(("name", "says"), [("actions", "row 1 of 'actions'"), ("obs", "row 1 of 'state'")])
def test_numbers_that_are_not_finite_are_named_with_their_row(trajectories, name, says):
    import h5py

    with h5py.File(trajectories, "a") as file:
        dataset: Any = file[f"traj_0/{name}"]
        dataset[1, 1] = np.nan
    with pytest.raises(UserError, match=rf"successful episode 0: {says} has a number that is not finite: \[0\.0, nan"):
        sft_warm_up(trajectories)


@pytest.mark.parametrize("policy", ["openvla", "openvla_oft"])
def test_a_gripper_that_counts_from_0_is_refused_where_its_sign_is_read(trajectories, policy):
    """Read by their signs, 0 and 1 would both be closed."""
    import h5py

    def record(*gripper: float) -> None:
        with h5py.File(trajectories, "a") as file:
            actions: Any = file["traj_0/actions"]
            actions[:, -1] = gripper

    texts = FieldSpec(shape=(), dtype="text", texts=("push",))
    picture = FieldSpec(shape=(32, 32, 3), dtype="uint8")
    fields = {"state": STATE["state"], "image.front": picture, "instruction": texts}
    interface = EnvInterface(fields=fields, actions=ACTIONS, notes=(), knows_success=True)

    def begin(**options: str) -> SftWarmUp:
        chosen = config_of(f"--policy={{name: {policy}, options: {json.dumps({'width': 64} | options)}}}").policy
        needs = needs_of(policy_settings(chosen, interface, 0), "PushCube-v1")
        return sft_warm_up(trajectories, needs=replace(needs, reads=("state",)))

    record(1, 1, 0, 0)
    with pytest.raises(UserError, match=r"episode 0: the last number of its actions, .* is from 0 to 1, .* -1 to 1"):
        begin(gripper="open_is_minus_one")
    begin(gripper="as_is")
    begin()
    for one in ([1, 1, -1, -1], [1, 1, 1, 1], [-1, 0, 0, 1]):
        record(*one)
        begin(gripper="open_is_minus_one")


def test_every_episode_that_is_taken_is_looked_at(trajectories):
    import h5py

    with h5py.File(trajectories, "a") as file:
        del file["traj_1/obs"]
        file["traj_1/obs"] = np.zeros((5, 7), np.float32)
    start = sft_warm_up(trajectories)
    with pytest.raises(
        UserError, match=r"traj\.h5, successful episode 1: 'state' is float32 of shape \[7\], and the environment"
    ):
        start._reader._episode(1)


def test_maniskills_trajectories_say_what_the_environment_says(trajectories):
    """Its words come from the options of the environment, and so does what a state is."""
    fields = {"state": FieldSpec(shape=(1,), dtype="float32"), "instruction": FieldSpec(shape=(), dtype="text")}
    interface = EnvInterface(fields=fields, actions=ACTIONS, notes=(), knows_success=True)
    config = config_of(
        "--env.options={state: robot, instruction: shove it}",
        f"--sft_warm_up={{source: maniskill, path: {trajectories}, num_episodes: 2}}",
    )
    start = SftWarmUp(config.sft_warm_up, config, interface, NEEDS)
    assert start._reader._files is not None
    for one in start._reader._files:
        assert one.observations["instruction"] == ["shove it"] * 4
        assert tensor_field(one.observations, "state").shape == (4, 1)


@pytest.mark.parametrize(
    ("env_id", "tasks", "says"),
    [
        ("tabletop", None, None),
        ("tabletop", "[PickCube-v1, PushCube-v1]", None),
        ("tabletop", "PushCube-v1", None),
        (
            "tabletop",
            "[PickCube-v1, PullCube-v1]",
            r"tabletop with env\.options\.tasks=\('PickCube-v1', 'PullCube-v1'\)",
        ),
        ("pick_and_place", None, r"pick_and_place\n"),
        ("PullCube-v1", None, r"PullCube-v1\n"),
    ],
)
def test_trajectories_of_one_of_the_tasks_are_taken(trajectories, env_id, tasks, says):
    """They were recorded in PushCube-v1, which is one of tabletop's."""
    options = "{state: robot}" if tasks is None else f"{{state: robot, tasks: {tasks}}}"
    config = config_of(
        f"--env.id={env_id}",
        f"--env.options={options}",
        f"--sft_warm_up={{source: maniskill, path: {trajectories}, num_episodes: 2}}",
    )
    interface = EnvInterface(fields=STATE, actions=ACTIONS, notes=(), knows_success=True)
    if says is None:
        SftWarmUp(config.sft_warm_up, config, interface, Needs(reads=("state",)))
    else:
        with pytest.raises(UserError, match=rf"recorded with env\.id=PushCube-v1, and the config has {says}"):
            SftWarmUp(config.sft_warm_up, config, interface, Needs(reads=("state",)))


class Experts:
    """Stands in for a session whose experts take turns at two tasks; that of `spin` is no good."""

    def __init__(self) -> None:
        self.asked, self.notes = 0, []

    def group(self, role: str):
        return self

    def call(self, method: str, seed: int) -> list[list[Demonstration]]:
        self.asked += 1
        demo = demonstration(2, 0.0)
        return [[demo if self.asked % 2 else replace(demo, task="spin", success=False)]]

    def note(self, text: str) -> None:
        self.notes.append(text)


def experts_of(num_episodes: int) -> SftWarmUp:
    section = f"--sft_warm_up={{source: experts, num_episodes: {num_episodes}}}"
    config = config_of(section, "--env.kind=metaworld", "--env.id=MT10")
    interface = EnvInterface(fields=STATE, actions=ACTIONS, notes=(), knows_success=True)
    return SftWarmUp(config.sft_warm_up, config, interface, Needs(reads=("state",)))


def test_a_task_without_demonstrations_is_told():
    session: Any = Experts()
    demos = experts_of(3)._reader.read(session)
    assert [one.task for one in demos] == ["push"] * 3
    (note,) = session.notes
    assert note.startswith("sft_warm_up: no demonstration of spin: its expert failed 2 times; more time (env.max_ep")
    assert counted(demos) == "3 demonstrations of push"
    assert counted([*demos, replace(demos[0], task="lift")]) == "4 demonstrations (1 of lift, 3 of push)"


def test_an_expert_that_never_succeeds_is_refused_whatever_others_do():
    session: Any = Experts()
    with pytest.raises(UserError, match=f"the expert of spin failed {MAX_FAILURES} times in a row"):
        experts_of(100)._reader.read(session)
    assert session.asked == 2 * MAX_FAILURES


@pytest.mark.parametrize(
    ("recorded", "options", "says"),
    [
        (
            "pd_joint_delta_pos",
            "{control_mode: pd_ee_delta_pos}",
            "=pd_joint_delta_pos, and the config has pd_ee_delta",
        ),
        ("pd_joint_pos", "{}", "=pd_joint_pos, and the config has pd_joint_delta_pos"),
    ],
)
def test_another_control_mode_is_refused(trajectories, recorded, options, says):
    """Also that of an environment whose options leave it out: both take eight numbers."""
    described = trajectories.with_suffix(".json")
    described.write_text(described.read_text().replace("pd_joint_delta_pos", recorded))
    config = config_of(
        f"--env.options={options}", f"--sft_warm_up={{source: maniskill, path: {trajectories}, num_episodes: 2}}"
    )
    interface = EnvInterface(fields=STATE, actions=ACTIONS, notes=(), knows_success=True)
    with pytest.raises(UserError, match=rf"recorded with env\.options\.control_mode{says}"):
        SftWarmUp(config.sft_warm_up, config, interface, Needs(reads=("state",)))


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("--sft_warm_up={source: experts}", "goes with env.kind=metaworld, and this one is maniskill; use lerobot or"),
        (
            "--sft_warm_up={source: lerobot}",
            "sft_warm_up.path is not given, and sft_warm_up.source=lerobot reads files",
        ),
        (
            "--sft_warm_up={source: maniskill, path: a.h5, batch_size: 63}",
            "=63 is not a multiple of actor.num_shards=2",
        ),
        ("--success_classifier={source: experts}", "success_classifier.source=experts goes with env.kind=metaworld"),
    ],
)
def test_sections_that_do_not_go_together_are_refused(override, says):
    with pytest.raises(UserError, match=says):
        config_of(override, "--actor.num_shards=2")


@pytest.mark.parametrize(
    ("observes_rows", "says"),
    [
        (False, "success_classifier looks at each row after every action"),
        (True, "success_classifier: it reads pictures"),
    ],
)
def test_a_success_classifier_needs_rows_that_are_observed_and_pictures(observes_rows, says):
    config = config_of("--success_classifier={source: experts}", "--env.kind=metaworld", "--env.id=MT10")
    interface = EnvInterface(fields=STATE, actions=ACTIONS, notes=(), knows_success=True, observes_rows=observes_rows)
    with pytest.raises(UserError, match=says):
        RewardFromPictures(config.success_classifier, config, interface)

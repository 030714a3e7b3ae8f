"""Disturbed environments keep the protocol, change what they say and nothing else, and are replayable."""

from __future__ import annotations

from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlinf_envs import Disturbance, EnvError, EnvSpec, FieldSpec, episode_seed, make_env, tensor_field
from rlinf_envs.testing import check_env


class Dial(gymnasium.Env):
    """A number that is turned, two pictures of it, and what to do."""

    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
    observation_space = spaces.Dict(
        {
            "place": spaces.Box(-9.0, 9.0, (1,), np.float32),
            "left": spaces.Box(0, 255, (16, 24, 3), np.uint8),
            "right": spaces.Box(0, 255, (8, 8, 1), np.uint8),
            "instruction": spaces.Text(64),
        }
    )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._place = self.np_random.uniform(-1.0, 1.0, 1).astype(np.float32)
        return self._seen(), {}

    def step(self, action):
        self._place = np.clip(self._place + action, -9.0, 9.0).astype(np.float32)
        return self._seen(), float(self._place[0]), bool(self._place[0] > 3), False, {"success": bool(self._place > 3)}

    def _seen(self):
        shade = np.uint8(100 + 10 * float(self._place[0]))
        left = np.full((16, 24, 3), shade)
        left[0] = 0
        return {"place": self._place, "left": left, "right": np.full((8, 8, 1), shade), "instruction": "turn it"}


SPEC = EnvSpec(kind="import", id=f"{__name__}:Dial", num_envs=3, max_episode_steps=6)
ALL = Disturbance(
    brightness=-0.2,
    texture=0.3,
    noise=0.3,
    shift=2,
    wordings=("please {instruction}", "{instruction} now"),
)


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment's module, which pytest imports under a name of its own."""
    import sys

    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or __import__("types").ModuleType(__name__))
    monkeypatch.setattr(sys.modules[__name__], "Dial", Dial, raising=False)


def disturbed(disturbance: Disturbance, num_envs: int = 3):
    return make_env(replace(SPEC, num_envs=num_envs, disturbance=disturbance))


def test_it_keeps_every_rule_snapshots_included() -> None:
    check_env(lambda: disturbed(ALL), num_steps=14)


def test_nothing_but_what_is_seen_is_changed() -> None:
    plain, changed = make_env(SPEC), disturbed(ALL)
    one, other = plain.reset([1, 2, 3]), changed.reset([1, 2, 3])
    push = torch.linspace(-1, 1, 3 * 4).reshape(3, 4, 1)
    for _ in range(4):
        a, b = plain.step_chunk(push), changed.step_chunk(push)
        assert torch.equal(a.rewards, b.rewards) and a.episodes == b.episodes
        one, other = a.observation, b.observation
        assert torch.equal(tensor_field(one, "state"), tensor_field(other, "state"))
        assert not torch.equal(tensor_field(one, "image.left"), tensor_field(other, "image.left"))
        assert tensor_field(other, "image.right").shape == (3, 8, 8, 1)
        assert set(other["instruction"]) <= {"please turn it", "turn it now"}


def test_a_draw_belongs_to_the_episode_and_its_time_alone() -> None:
    """The second episode of a row is that of a row that begins with its seed, in a batch of another size."""
    noisy = Disturbance(noise=0.5, texture=0.2, shift=1)
    first = disturbed(noisy)
    first.reset([5, 6, 7])
    for _ in range(6):
        result = first.step(torch.zeros(3, 1))
    assert len(result.episodes) == 3
    alone = disturbed(noisy, num_envs=1)
    begun = alone.reset([episode_seed(6, 1)])
    assert torch.equal(tensor_field(begun, "image.left")[0], tensor_field(result.observation, "image.left")[1])
    one, other = alone.step(torch.zeros(1, 1)), first.step(torch.zeros(3, 1))
    assert torch.equal(tensor_field(one.observation, "image.left")[0], tensor_field(other.observation, "image.left")[1])
    assert not torch.equal(tensor_field(one.observation, "image.left"), tensor_field(begun, "image.left")), "it is new"


def test_each_kind_does_what_it_says() -> None:
    picture = np.full((16, 16, 3), 100, np.uint8)
    picture[:, 0] = 200
    assert (Disturbance(brightness=-0.4).picture(picture, 1, 0, 0)[:, 1:] == 60).all()
    assert (Disturbance(brightness=1.0).picture(picture, 1, 0, 0)[:, 0] == 255).all()
    mixed = Disturbance(texture=0.5).picture(picture, 1, 0, 0).astype(int)
    assert (mixed[0:2, 2:4] == mixed[0, 2]).all() and mixed[:, 1:].min() >= 50 and mixed[:, 1:].max() <= 178
    grains = Disturbance(noise=0.25).picture(picture, 1, 0, 0).astype(int)
    assert len(np.unique(grains)) > 30 and grains[:, 1:].min() >= 75 and grains[:, 1:].max() <= 139
    moved = [Disturbance(shift=3).picture(picture, seed, 9, 0) for seed in range(30)]
    assert len({int((one[:, :, 0] == 200).sum()) // 16 for one in moved}) > 2, "the edge fills what is left over"
    assert (Disturbance(shift=3).picture(picture, 4, 0, 0) == moved[4]).all(), "a shift stays for an episode"
    assert Disturbance().picture(picture, 1, 0, 0).tolist() == picture.tolist()


def test_sentences_come_before_wordings() -> None:
    disturbance = Disturbance(wordings=("do: {instruction}",), paraphrases=(("turn it", ("rotate it", "spin it")),))
    assert {disturbance.words("turn it", seed) for seed in range(20)} == {"rotate it", "spin it"}
    assert disturbance.words("open {it}", 3) == "do: open {it}"


def test_all_that_an_instruction_may_say_is_known() -> None:
    """Of what is drawn nothing lacks, and the longest comes first."""
    disturbance = Disturbance(wordings=("do: {instruction}", "{instruction}"), paraphrases=(("turn it", ("spin it",)),))
    instructions = ("turn it", "open it", "shut it")
    (spec,) = disturbance.fields({"instruction": FieldSpec(shape=(), dtype="text", texts=instructions)}).values()
    assert spec.texts == ("do: open it", "do: shut it", "open it", "shut it", "spin it")
    assert {disturbance.words(text, seed) for text in instructions for seed in range(20)} == set(spec.texts)
    changed = disturbed(ALL, num_envs=1)
    assert changed.observation_spec["instruction"].texts == (), "the environment does not know what it says"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"noise": 1.5}, r"disturb.noise=1.5; it must be in 0..1"),
        ({"brightness": -2.0}, r"disturb.brightness=-2.0; it must be in -1..1"),
        ({"shift": -1}, r"disturb.shift=-1"),
        ({"wordings": ("please",)}, r"'please' lacks \{instruction\}"),
        ({"paraphrases": (("a", ()),)}, r"'a' has no other words"),
    ],
)
def test_a_disturbance_that_is_none_is_refused(values: dict, expected: str) -> None:
    with pytest.raises(EnvError, match=expected):
        Disturbance(**values)


def test_what_is_not_there_cannot_be_disturbed() -> None:
    spec = EnvSpec(kind="gymnasium", id="CartPole-v1", num_envs=1, disturbance=Disturbance(noise=0.1))
    with pytest.raises(EnvError, match="the disturbance changes pictures, and the environment shows none"):
        make_env(spec)
    with pytest.raises(EnvError, match="changes an instruction"):
        make_env(replace(spec, disturbance=Disturbance(wordings=("{instruction}",))))

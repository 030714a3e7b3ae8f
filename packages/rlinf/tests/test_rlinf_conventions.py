"""Conventions of robot policies: errors, the rule, the search, on policies whose right answers are known exactly."""

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from rlinf.conventions.actions import alternatives_of_actions
from rlinf.conventions.alternative import Alternative
from rlinf.conventions.answers import Answers
from rlinf.conventions.checked import ConventionVerdict, check_conventions
from rlinf.conventions.frames import ComparedFrames, frames_of
from rlinf.conventions.numbers import dead_inputs, differences_or_targets, range_lines
from rlinf.conventions.observations import PROMPTS, alternatives_of_observations, zoomed
from rlinf.conventions.scoring import OpenLoopError, baselines, is_better, open_loop_error, rank_tail, t_tail
from rlinf.conventions.screen import verdict_text
from rlinf.errors import UserError
from rlinf_envs import ActionSpec, Demonstration, FieldSpec
from rlinf_workers.policies import PolicyError, PolicyStep
from rlinf_workers.roles import text_tensor

SIDE, NUM_DEMONSTRATIONS, LENGTH = 20, 12, 9
PICTURE = FieldSpec(shape=(SIDE, SIDE, 3), dtype="uint8")
FIELDS = {
    "state": FieldSpec(shape=(4,), dtype="float32"),
    "image.front": PICTURE,
    "image.wrist": PICTURE,
    "instruction": FieldSpec(shape=(), dtype="text"),
}
READS = tuple(FIELDS)
TEXTS = ("lift the red block", "lift the blue block")


def _spec(low: float = -1.0, size: int = 4) -> ActionSpec:
    bounds = torch.ones(size)
    lows = -bounds
    lows[-1] = low
    return ActionSpec(kind="continuous", shape=(size,), low=lows, high=bounds)


class Exact(nn.Module):
    """Reads every convention: a patch to the top left of each camera, its colours, the state, the words."""

    def __init__(self, noise: float = 0.0) -> None:
        super().__init__()
        self.weight, self._noise = nn.Parameter(torch.zeros(1)), noise

    def act(self, fields: Mapping[str, Tensor], noise: None) -> PolicyStep:
        actions = _right(fields)
        if self._noise:
            key = int(fields["state"].double().abs().sum() * 1e6)
            actions = actions + self._noise * torch.randn(actions.shape, generator=torch.Generator().manual_seed(key))
        return PolicyStep(actions=actions[:, None], logprobs=torch.zeros(1), values=torch.zeros(1))


def _right(fields: Mapping[str, Tensor]) -> Tensor:
    front, wrist = (fields[f"image.{name}"][:, :6, :6].float().mean((1, 2)) / 127.5 - 1 for name in ("front", "wrist"))
    capital = fields["instruction"][:, :1].float() == ord("l")
    first = front[:, :1] * torch.where(capital, 1.0, -1.0)
    return torch.cat(
        [first, 0.5 * wrist[:, 1:2] + 0.3, fields["state"][:, :1] * 0.6, fields["state"][:, 3:].sign()], dim=1
    )


def _demonstrations(seed: int = 0, count: int = NUM_DEMONSTRATIONS) -> list[Demonstration]:
    generator = torch.Generator().manual_seed(seed)
    demonstrations = []
    for number in range(count):
        blocks = torch.randint(0, 256, (LENGTH, 2, 3, 3, 3), generator=generator, dtype=torch.uint8)
        pictures = blocks.repeat_interleave(7, 2).repeat_interleave(7, 3)[:, :, :SIDE, :SIDE]
        text = TEXTS[number % 2]
        state = torch.rand(LENGTH, 4, generator=generator) * 2 - 1
        fields = {
            "state": state,
            "image.front": pictures[:, 0].contiguous(),
            "image.wrist": pictures[:, 1].contiguous(),
        }
        actions = _right({**fields, "instruction": text_tensor([text] * LENGTH)})
        demonstrations.append(
            Demonstration(
                task="lift",
                seed=None,
                observations={**fields, "instruction": [text] * LENGTH},
                actions=actions,
                rewards=torch.zeros(LENGTH),
                success=True,
            )
        )
    return demonstrations


def _frames(seed: int = 0, spec: ActionSpec | None = None) -> ComparedFrames:
    return frames_of(_demonstrations(seed), READS, spec or _spec())


def _checked(frames: ComparedFrames, policy: Any = None, *, closer: ComparedFrames | None = None) -> ConventionVerdict:
    answers = Answers(lambda options: cast(Any, policy or Exact()), frames)
    alternatives = [*alternatives_of_observations(FIELDS, READS), *alternatives_of_actions(frames.spec, state_size=4)]
    return check_conventions(answers, READS, alternatives, closer=closer)


# -- errors and the rule -----------------------------------------------------------------------------------------------


def test_an_error_is_the_share_of_variance_that_is_not_explained():
    frames = _frames()
    assert open_loop_error(frames.actions, frames).mean == 0
    everything = torch.cat([one.actions for one in _demonstrations()])
    half = everything.mean(0) + 0.5 * (frames.actions - everything.mean(0))
    by_hand = ((half - frames.actions) / everything.std(0, correction=0)).square()
    error = open_loop_error(half, frames)
    torch.testing.assert_close(error.by_number, by_hand.mean(0))
    assert error.mean == pytest.approx(by_hand.mean().item(), rel=1e-5)
    assert baselines(frames)["mean action"].mean == pytest.approx(1.0, abs=0.15)


def test_the_tail_of_students_distribution_is_that_of_an_integral():
    for freedom in (4, 5, 11, 19):
        scale = math.gamma((freedom + 1) / 2) / math.gamma(freedom / 2) / math.sqrt(freedom * math.pi)
        for t in (0.3, 2.0, 6.0):
            x = torch.linspace(0, t, 200_001, dtype=torch.float64)
            inside = torch.trapezoid(scale * (1 + x**2 / freedom) ** (-(freedom + 1) / 2), x).item()
            assert t_tail(t, freedom) == pytest.approx(0.5 - inside, abs=1e-9)


@pytest.mark.parametrize("gains", [[0.3, -0.1, 0.7, 0.2], [0.5, 0.5, -0.5, 0.2, 0.0], [-1.0, -2.0], [3.0, 1.0, 2.0]])
def test_the_tail_of_signed_ranks_is_that_of_all_signs(gains):
    sizes = torch.tensor([abs(gain) for gain in gains if gain])
    ranks = ((sizes < sizes[:, None]).sum(1) + (sizes <= sizes[:, None]).sum(1) + 1) / 2
    sums = [
        sum(r for r, sign in zip(ranks, signs, strict=True) if sign) for signs in product((0, 1), repeat=len(ranks))
    ]
    seen = sum(r for r, gain in zip(ranks, [gain for gain in gains if gain], strict=True) if gain > 0)
    assert rank_tail(gains) == pytest.approx(sum(one >= seen for one in sums) / len(sums))


def test_hard_demonstrations_do_not_hide_what_all_others_gain():
    high = [0.2 + 0.01 * n for n in range(24)] + [4.0, 6.0]
    low = [0.5 * error for error in high[:24]] + [4.4, 4.6]
    assert is_better(_error(low), _error(high), num_comparisons=50)


def _error(numbers: list[float]) -> OpenLoopError:
    return OpenLoopError(by_number=torch.zeros(0), by_demonstration=torch.tensor(numbers))


def test_a_difference_counts_if_it_repeats_and_is_not_small():
    high = _error([1.0, 1.1, 0.9, 1.0, 1.0, 1.1])
    assert is_better(_error([0.5, 0.6, 0.4, 0.5, 0.55, 0.6]), high, num_comparisons=50)
    assert not is_better(_error([0.95, 1.05, 0.85, 0.95, 0.95, 1.05]), high, num_comparisons=1)  # 5 %
    assert not is_better(_error([0.1, 1.2, 0.9, 0.1, 1.2, 1.0]), high, num_comparisons=50)  # not in each


# -- the search --------------------------------------------------------------------------------------------------------

TURNED = ("image.front", "image.wrist")
TURNS = {
    "picture rotation": lambda x: x.flip(1, 2),
    "picture left-right": lambda x: x.flip(2),
    "picture top-bottom": lambda x: x.flip(1),
    "colour order": lambda x: x.flip(-1),
}


def _observing(frames: ComparedFrames, convention: str) -> ComparedFrames:
    """The frames as an environment with another convention shows them."""
    fields = dict(frames.fields)
    if convention in TURNS:
        fields |= {name: TURNS[convention](fields[name]) for name in TURNED}
    elif convention == "camera order":
        fields |= {"image.front": fields["image.wrist"], "image.wrist": fields["image.front"]}
    elif convention == "state order":
        fields["state"] = fields["state"][:, [3, 0, 1, 2]]
    elif convention == "prompt form":
        fields["instruction"] = text_tensor([TEXTS[n % 2].upper() for n in frames.demonstration.tolist()])
    return replace(frames, fields=fields)


OBSERVED = (*TURNS, "camera order", "state order", "prompt form")


@pytest.mark.parametrize("convention", OBSERVED)
def test_a_convention_of_observations_is_named(convention):
    verdict = _checked(_observing(_frames(), convention))
    assert [cause.convention for cause in verdict.causes] == [convention]
    assert verdict.search.explained.error.mean < 1e-6
    assert not verdict.passes


def _taking(convention: str) -> ComparedFrames:
    """The frames with the actions that an environment with another convention takes."""
    demonstrations = _demonstrations()
    for one in demonstrations:
        done = one.actions
        if convention == "gripper sign":
            done[:, 3] *= -1
        elif convention == "delta or absolute actions":
            states = one.observations["state"]
            assert isinstance(states, Tensor)
            done[:, :3] = (states[:, :3] + 0.1 * done[:, :3]).clamp(-1, 1)
        elif convention == "actions not un-normalised":
            done[:, :3] *= 0.05
        else:
            done[:, :3] = done[:, [1, 0, 2]]
    return frames_of(demonstrations, READS, _spec())


@pytest.mark.parametrize(
    "convention",
    ["gripper sign", "delta or absolute actions", "actions not un-normalised", "action axes"],
)
def test_a_convention_of_actions_is_named(convention):
    verdict = _checked(_taking(convention))
    assert verdict.causes[0].convention == convention


def test_a_gripper_from_0_is_named():
    class FromZero(Exact):
        def act(self, fields: Mapping[str, Tensor], noise: None) -> PolicyStep:
            step = super().act(fields, noise)
            step.actions[..., 3] = (step.actions[..., 3] + 1) / 2
            return step

    (cause,) = _checked(_frames(), FromZero()).causes
    assert (cause.convention, cause.change) == ("gripper range", "the last number from 0..1 to -1..1")


def test_two_conventions_at_once_are_both_named():
    both = _observing(_taking("gripper sign"), "picture rotation")
    assert {cause.convention for cause in _checked(both).causes} == {"gripper sign", "picture rotation"}
    hidden = _observing(_observing(_frames(), "colour order"), "camera order")
    assert {cause.convention for cause in _checked(hidden).causes} == {"colour order", "camera order"}


def test_nothing_is_looked_for_beside_a_change_that_explains_all():
    one = _checked(_observing(_frames(), "colour order"))
    nothing = _checked(_frames())
    assert one.search.num_trials == nothing.search.num_trials


def test_targets_and_their_order_are_both_named():
    """The state is added before the axes are swapped; the reverse adds the wrong numbers."""
    demonstrations = _demonstrations()
    for one in demonstrations:
        states = one.observations["state"]
        assert isinstance(states, Tensor)
        one.actions[:, :3] = (states[:, :3] + 0.1 * one.actions[:, :3])[:, [1, 0, 2]]
    verdict = _checked(frames_of(demonstrations, READS, _spec()))
    assert {cause.convention for cause in verdict.causes} == {"delta or absolute actions", "action axes"}
    assert verdict.search.explained.error.mean < 0.1


def _steep(actions: Tensor) -> Tensor:
    return torch.cat([(4 * actions[..., :3]).clamp(-1, 1), actions[..., 3:]], dim=-1)


class Weak(Exact):
    """Moves by three quarters of what is right, and with noise, as a policy after little training."""

    def act(self, fields: Mapping[str, Tensor], noise: None) -> PolicyStep:
        step = Exact(0.1).act(fields, noise)
        actions = _steep(step.actions)
        actions[..., :3] *= 0.75
        return replace(step, actions=actions)


def test_metres_are_named_for_a_weak_policy():
    """Cut to the environment's bounds, its numbers have nearly the right scale."""
    spec = _spec()
    spec.low[:3], spec.high[:3] = -0.05, 0.05
    demonstrations = _demonstrations()
    for one in demonstrations:
        one.actions.copy_(_steep(one.actions))
        one.actions[:, :3] *= 0.05
    assert _checked(frames_of(demonstrations, READS, spec), Weak()).causes[0].convention == "actions not un-normalised"


def test_a_shrinkage_is_no_cause():
    noisy = Exact(0.6)
    shrinking = Alternative(
        convention="temperature", change="half", setting="", convert=lambda actions, _: 0.5 * actions
    )
    answers = Answers(lambda options: cast(Any, noisy), _frames())
    verdict = check_conventions(answers, READS, [shrinking])
    assert verdict.search.singles[0].error.mean < 0.8 * verdict.search.as_configured.error.mean
    assert not verdict.causes


class Rare(Exact):
    """Closes the gripper wrongly in a tenth of all moments."""

    @staticmethod
    def mended(actions: Tensor, states: Tensor) -> Tensor:
        is_wrong = states[:, :1] > 0.8
        return torch.cat([actions[:, :-1], torch.where(is_wrong, -actions[:, -1:], actions[:, -1:])], dim=1)

    def act(self, fields: Mapping[str, Tensor], noise: None) -> PolicyStep:
        step = super().act(fields, noise)
        return replace(step, actions=self.mended(step.actions[:, 0], fields["state"])[:, None])


def test_a_gain_in_few_moments_is_proved_by_more_frames():
    few, many = (frames_of(_demonstrations(), READS, _spec(), num_each=number) for number in (2, LENGTH))
    mending = Alternative(
        convention="gripper sign",
        change="right",
        setting="",
        convert=lambda actions, frames: Rare.mended(actions, frames.fields["state"]),
    )
    answers = Answers(lambda options: cast(Any, Rare()), few)
    assert not check_conventions(answers, READS, [mending]).causes
    (cause,) = check_conventions(answers, READS, [mending], closer=many).causes
    assert cause.evidence.endswith(f"to 0.00 (judged by {NUM_DEMONSTRATIONS * LENGTH} frames)")


def test_conventions_that_explain_as_much_are_printed_together():
    frames = _taking("gripper sign")
    converting = alternatives_of_actions(frames.spec, state_size=4)
    (sign,) = [one for one in converting if one.convention == "gripper sign"]
    same = replace(sign, convention="mirror", change="all as in a mirror", setting="turn the mirror")
    verdict = check_conventions(Answers(lambda options: cast(Any, Exact()), frames), READS, [sign, same])
    (cause,) = verdict.causes
    (other,) = cause.equivalents
    assert {cause.convention, other.convention} == {"gripper sign", "mirror"}
    assert f"or, as good: {other.convention}: {other.change} -> {other.setting[:20]}" in verdict_text("it", verdict)
    (alone,) = _checked(frames).causes
    assert not alone.equivalents


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_a_right_set_up_accuses_nobody(noise):
    """With noise, too, where anything that shrinks the predictions lowers the error."""
    for seed in range(3):
        closer = frames_of(_demonstrations(seed), READS, _spec(), num_each=LENGTH)
        verdict = _checked(_frames(seed), Exact(noise), closer=closer)
        assert not verdict.causes, verdict.causes
        assert verdict.passes
        assert "nothing is wrong" in verdict_text("it", verdict)


def test_a_policy_of_something_else_is_unexplained():
    class Other(Exact):
        def act(self, fields: Mapping[str, Tensor], noise: None) -> PolicyStep:
            drawn = torch.rand(len(fields["state"]), 1, 4, generator=torch.Generator().manual_seed(1)) * 2 - 1
            return PolicyStep(actions=drawn, logprobs=torch.zeros(1), values=torch.zeros(1))

    verdict = _checked(_frames(), Other())
    assert not verdict.causes
    assert not verdict.passes
    assert "UNEXPLAINED" in verdict_text("it", verdict)


def test_a_variant_that_the_policy_does_not_have_is_left_out():
    def make(options: Mapping[str, Any]) -> Any:
        if options:
            raise PolicyError("no such option")
        return Exact()

    answers = Answers(cast(Any, make), _frames())
    other = Alternative(convention="chunk length", change="chunk_size: 4", setting="", options={"chunk_size": 4})
    verdict = check_conventions(answers, READS, [other])
    assert verdict.refused == {"chunk_size: 4": "no such option"}
    assert verdict.passes


def test_a_pair_with_a_variant_that_the_policy_does_not_have_is_not_listed():
    def make(options: Mapping[str, Any]) -> Any:
        if options:
            raise PolicyError("no such option")
        return Exact(0.3)

    frames = _observing(_frames(), "colour order")
    (order,) = [one for one in alternatives_of_observations(FIELDS, READS) if one.convention == "colour order"]
    other = Alternative(convention="chunk length", change="chunk_size: 4", setting="", options={"chunk_size": 4})
    verdict = check_conventions(Answers(cast(Any, make), frames), READS, [order, other])
    assert [cause.convention for cause in verdict.causes] == ["colour order"]
    assert list(verdict.refused) == ["chunk_size: 4"]


def test_a_variant_that_does_not_fit_into_memory_is_left_out():
    def make(options: Mapping[str, Any]) -> Any:
        if options:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return Exact()

    answers = Answers(cast(Any, make), _frames())
    wide = Alternative(convention="data type", change="dtype: float32", setting="", options={"dtype": "float32"})
    verdict = check_conventions(answers, READS, [wide])
    assert verdict.refused == {"dtype: float32": "the device has not enough memory for it"}
    assert verdict.passes


def test_a_form_that_the_instructions_have_needs_no_other_answers():
    class Counting(Exact):
        num_calls = 0

        def act(self, fields: Mapping[str, Tensor], noise: None) -> PolicyStep:
            self.num_calls += 1
            return super().act(fields, noise)

    policy = Counting()
    answers = Answers(cast(Any, lambda options: policy), _frames())
    prompts = [one for one in alternatives_of_observations(FIELDS, READS) if one.convention == "prompt form"]
    answered = {one.change: answers.of([one]) for one in prompts}
    as_they_are = answers.of([])
    assert as_they_are is not None
    same = [name for name, answer in answered.items() if answer is as_they_are]
    assert same == [
        "instructions in lower case, without a full stop",
        "instructions without a scene's name or a question around it",
    ]
    assert policy.num_calls == 1 + len(prompts) - len(same)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("KITCHEN_SCENE3 turn on the stove", "turn on the stove"),
        ("LIVING_ROOM_SCENE1_put_it_away", "put_it_away"),
        ("In: What action should the robot take to lift it?\nOut:", "lift it"),
        ("lift it", "lift it"),
    ],
)
def test_what_surrounds_an_instruction_is_removed(text, says):
    assert PROMPTS["without a scene's name or a question around it"](text) == says
    assert PROMPTS["as the question of OpenVLA's prompt"](text) == f"What action should the robot take to {says}?"


# -- frames and numbers ------------------------------------------------------------------------------------------------


def test_too_few_demonstrations_prove_nothing():
    with pytest.raises(UserError, match="there are 4 demonstrations; at least 5"):
        frames_of(_demonstrations(count=4), READS, _spec())


def test_frames_are_spread_over_each_demonstration():
    demonstrations = _demonstrations()
    frames = frames_of(demonstrations, READS, _spec())
    assert frames.num_demonstrations == NUM_DEMONSTRATIONS
    first = [row for row in range(len(frames.actions)) if frames.demonstration[row] == 0]
    assert len(first) == 8
    assert torch.equal(frames.actions[first[0]], demonstrations[0].actions[0])
    assert torch.equal(frames.actions[first[-1]], demonstrations[0].actions[-1])
    assert torch.equal(frames.before[first[-1]], demonstrations[0].actions[-2])
    assert torch.equal(frames.elsewhere[first[-1]], demonstrations[1].actions[-1])


def test_inputs_that_carry_nothing_are_causes():
    frames = _frames()
    dark = {name: values // 255 if name == "image.wrist" else values for name, values in frames.fields.items()}
    (one,) = dead_inputs(replace(frames, fields=dark), READS)
    assert one.convention == "picture range"
    assert "the brightest value of image.wrist" in one.evidence
    both = {name: values // 255 if name in TURNED else values for name, values in frames.fields.items()}
    (one,) = dead_inputs(replace(frames, fields=both), READS)
    assert "image.front" in one.evidence and "image.wrist" in one.evidence
    still = {**frames.fields, "state": torch.zeros_like(frames.fields["state"])}
    assert _checked(replace(frames, fields=still)).causes[0].convention == "constant state"
    assert not dead_inputs(frames, READS)


def test_the_screen_says_what_black_pictures_hide():
    frames = _observing(_frames(), "picture rotation")
    black = {name: values // 255 if name in TURNED else values for name, values in frames.fields.items()}
    verdict = _checked(replace(frames, fields=black))
    assert verdict.causes[0].convention == "picture range"
    assert "picture rotation" not in {cause.convention for cause in verdict.causes}
    screen = " ".join(verdict_text("it", verdict).split())
    assert "NOTE: pictures are black: what else is wrong with them cannot be seen" in screen
    assert "Mend this first and run again." in screen
    assert "NOTE" not in verdict_text("it", _checked(frames))


def test_numbers_tell_differences_from_targets():
    generator = torch.Generator().manual_seed(0)

    def demonstrations(targets: bool) -> list[Demonstration]:
        episodes = []
        for _ in range(5):
            moves = torch.randn(30, 3, generator=generator)
            states = torch.cat([torch.zeros(1, 3), (0.1 * moves).cumsum(0)])
            done = states[1:] if targets else moves
            actions = torch.cat([done, torch.ones(30, 1)], dim=1)
            episodes.append(
                Demonstration(
                    task="", seed=None, observations={"state": states[:-1]}, actions=actions, rewards=torch.zeros(30),
                    success=True,
                )
            )  # fmt: skip
        return episodes

    assert "differences of the state" in str(differences_or_targets(demonstrations(False)))
    assert "targets for the state" in str(differences_or_targets(demonstrations(True)))


def test_values_outside_the_statistics_are_counted():
    demonstrations = _demonstrations()
    everything = torch.cat([one.actions for one in demonstrations])
    low, high = torch.full((4,), -torch.inf), torch.full((4,), torch.inf)
    low[1], high[1] = everything[:, 1].quantile(0.25), 9.0
    lines = range_lines(demonstrations, _frames(), (low, high))
    assert "25.0% of number 1" in lines[0]


def test_a_zoom_keeps_the_middle():
    picture = torch.zeros(1, 21, 21, 3, dtype=torch.uint8)
    picture[:, 10, 10] = 255
    picture[:, 0] = 90
    assert zoomed(picture, 0.5)[0, 10, 10].tolist() == [255] * 3
    assert not zoomed(picture, 0.5)[0, 0].any()
    torch.testing.assert_close(zoomed(picture, 1.0), picture)

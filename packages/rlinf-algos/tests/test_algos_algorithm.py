"""Algorithms as plain data: presets, what is filled in, what is refused, and that the tables say what the functions
take."""

import subprocess
import sys

import pytest

from rlinf_algos import Algorithm, AlgosError, preset, register_advantage, register_policy_loss
from rlinf_algos.algorithm import DEFAULTS, EPISODE_PRESETS, KL_ESTIMATES, PRESETS, problems
from rlinf_algos.parts import (
    ADVANTAGES,
    BUILTIN_ADVANTAGES,
    BUILTIN_POLICY_LOSSES,
    INPUTS,
    POLICY_LOSSES,
    advantage_takes,
    policy_loss_takes,
    takes_of_advantage,
    takes_of_policy_loss,
)

MINE = Algorithm(name="mine", normalize_std=False, clip_low=0.1, clip_high=0.3)
MINE_UNBOUNDED = preset("ppo", policy_loss="decoupled", value_clip=None, weight_cap=None)
MINE_OF_EPISODES = preset("ppo", samples="episodes", target_kl=None)
NOT_MINE = 3


def halved(rewards, *, share=0.5, power):
    """An advantage function with options of its own."""
    return share * rewards**power


def of_tokens(rewards, values, loss_mask, gamma):
    return rewards


def of_steps(rewards, terminated, values):
    return rewards


def wrong_inputs(scores):
    return scores


def mixed_inputs(rewards, values):
    return rewards


def my_loss(policy_logprobs, proximal_logprobs, advantages, loss_mask, *, clip_low, rollout_logprobs, beta=1.0):
    raise NotImplementedError


@pytest.mark.parametrize(
    ("name", "samples"), [*((n, "completions") for n in PRESETS), *((n, "episodes") for n in EPISODE_PRESETS)]
)
def test_a_preset_is_whole(name, samples):
    algorithm = preset(name, samples=samples)
    assert (algorithm.name, algorithm.samples) == (name, samples)
    for part, table, takes in (
        (algorithm.advantage, BUILTIN_ADVANTAGES, advantage_takes),
        (algorithm.policy_loss, BUILTIN_POLICY_LOSSES, policy_loss_takes),
    ):
        expected = {name for name, field in table[part].options.items() if field in Algorithm.__slots__}
        assert set(algorithm.options_of(takes(part))) == expected, "every field that its parts take has a value"
    assert algorithm.correction is None
    assert ADVANTAGES.get(algorithm.advantage)
    assert POLICY_LOSSES.get(algorithm.policy_loss)
    assert KL_ESTIMATES.get(algorithm.kl)


def test_the_presets_differ_as_their_sources_do():
    assert preset("grpo") == Algorithm(name="grpo", normalize_std=True, clip_low=0.2, clip_high=0.2)
    assert preset("dr_grpo").aggregation == "constant_length_mean"
    assert preset("dr_grpo").normalize_std is False
    assert preset("dapo").clip_high == 0.28
    assert preset("dapo").dynamic_sampling
    assert preset("ppo").has_critic
    assert preset("ppo").value_loss == "clipped"
    assert not preset("reinforce_plus_plus").has_critic
    assert preset("reinforce_plus_plus").whiten_advantages
    assert preset("gspo").clip_high == 4e-4
    assert preset("gmpo").clip_high == 0.4
    assert preset("gdpo").whiten_advantages
    assert (preset("distillation").reward_coef, preset("distillation").gamma, preset("distillation").kl_coef) == (
        0,
        0,
        1,
    )
    dppo = preset("dppo_tv")
    assert (dppo.proximal_policy, dppo.clip_high, preset("dppo_kl").clip_high) == ("rollout", 0.15, 0.05)
    assert (preset("rloo_clip").policy_loss, preset("rloo_clip").advantage) == ("sequence_clip", "rloo")
    assert preset("gigpo", samples="episodes").gamma == 0.95
    assert preset("cispo", num_epochs=3, num_minibatches=2).num_updates == 6


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("grop", {}, "no algorithm is called 'grop'; did you mean 'grpo'"),
        ("grpo", {"clip_lo": 0.1}, "'clip_lo' is no field of an algorithm; did you mean 'clip_low'"),
        ("grpo", {"advantage": "rlo"}, "no advantage is called 'rlo'; did you mean 'rloo'"),
        ("grpo", {"policy_loss": "gpso"}, "no policy loss is called 'gpso'; did you mean 'gspo'"),
        ("grpo", {"kl": "k4"}, "no KL estimate is called 'k4'"),
        ("grpo", {"aggregation": "token-mean"}, "aggregation=token-mean is not known; did you mean 'token_mean'"),
        ("grpo", {"kl_in": "los"}, "kl_in=los is not known; did you mean 'loss'"),
        ("ppo", {"value_loss": "hubert"}, "value_loss=hubert is not known; did you mean 'huber'"),
        ("grpo", {"gae_lambda": 0.9}, "gae_lambda=0.9 is not used: it belongs to advantage=gae, and this is"),
        ("grpo", {"value_loss": "huber"}, "value_loss=huber is not used: it belongs to the critic, and advantage=grpo"),
        (
            "ppo",
            {"value_loss": "clipped", "huber_delta": 1.0},
            "huber_delta=1.0 is not used: it belongs to another val",
        ),
        (
            "grpo",
            {"episode_aggregation": "episode_mean"},
            "episode_aggregation=episode_mean is not used: it is about ep",
        ),
        ("rloo", {"clip_low": 0.2}, "clip_low=0.2 is not used: it belongs to policy_loss=ppo_clip or gspo or"),
        ("grpo", {"correction": "ice"}, "correction=ice is not known; did you mean 'icepop'"),
        (
            "grpo",
            {"correction_low": 0.5},
            "correction_low=0.5 is not used: it belongs to correction=masked or rejected",
        ),
        ("grpo", {"correction": "truncated", "correction_low": 0.5}, "and this is truncated; leave it out"),
        ("grpo", {"overlong_penalty": 1.0}, "it belongs to overlong_buffer_tokens, which is 0"),
        ("grpo", {"oversampling": 2.0}, "oversampling=2.0 is not used: it belongs to dynamic_sampling=true"),
        ("grpo", {"clip_low": None}, "clip_low is null; it belongs to policy_loss=ppo_clip"),
        ("grpo", {"clip_low": 1.5}, "clip_low=1.5 must be between 0 and 1"),
        ("grpo", {"num_epochs": 0}, "num_epochs=0 must be at least 1"),
        ("grpo", {"dual_clip": 1.0}, "dual_clip=1.0 must be above 1"),
        ("grpo", {"group_size": 1}, "group_size=1: advantage=grpo compares the completions of a prompt"),
        ("dapo", {"group_size": 1}, "group_size=1: dynamic_sampling leaves out groups whose rewards are all equal"),
        ("ppo", {"group_size": 1, "dynamic_sampling": True}, "which a single completion's are; use at least 2"),
        ("grpo", {"policy_loss": "decoupled", "correction": "truncated"}, "correction=truncated would weigh a second"),
        ("ppo", {"value_loss": "huber", "huber_delta": 0.0}, "huber_delta=0.0 must be above 0 and finite"),
        ("grpo", {"correction_level": "sequence"}, "correction_level=sequence is not used: it belongs to correction="),
        ("grpo", {"correction": "icepop", "correction_level": "token"}, "and this is icepop; leave it out"),
        ("grpo", {"correction": "masked", "correction_level": "row"}, "correction_level=row is not known"),
        ("grpo", {"kl": "k2", "kl_clamp": 10.0}, "kl_clamp=10.0 is not used: it belongs to kl=k3 or k3+, and this is"),
        ("grpo", {"kl_clamp": 0.0}, "kl_clamp=0.0 must be above 0 and finite, or null"),
        ("ppo", {"kl_horizon": 100}, "kl_horizon=100 is not used: it belongs to kl_target, which is null"),
        ("ppo", {"kl_target": 6.0}, "kl_target=6.0 is not used: it belongs to kl_in=reward with a kl_coef above 0"),
        ("grpo", {"kl_target": 6.0, "kl_coef": 0.1}, "kl_target=6.0 is not used: it belongs to kl_in=reward"),
        ("grpo", {"reward_coef": 0.0}, "reward_coef=0 leaves nothing to learn from"),
        (
            "gdpo",
            {"overlong_buffer_tokens": 4},
            "overlong_buffer_tokens=4 is not used: advantage=gdpo reads the components",
        ),
        ("gdpo", {"kl_in": "reward", "kl_coef": 0.1}, "kl_in=reward is not used: advantage=gdpo reads the components"),
        ("gdpo", {"group_size": 1}, "group_size=1: advantage=gdpo compares the completions of a prompt"),
        ("grpo", {"top_entropy_fraction": 0.0}, "top_entropy_fraction=0.0 must be above 0 and at most 1"),
        ("grpo", {"off_policy_threshold": -0.1}, "off_policy_threshold=-0.1 must be at least 0"),
        ("grpo", {"rejection": "token_k4"}, "rejection=token_k4 is not known; did you mean 'token_k"),
        ("grpo", {"rejection": "token_k3"}, "rejection_limit is null; it belongs to rejection, and this is token_k3"),
        (
            "grpo",
            {"rejection_limit": 0.1},
            "rejection_limit=0.1 is not used: it belongs to rejection, and this is null",
        ),
        ("grpo", {"rejection": "token_k3", "rejection_limit": 0.0}, "rejection_limit=0.0 must be above 0 and finite"),
        ("grpo", {"kl_bias_correction": True}, "kl_bias_correction=true is not used: it belongs to kl_in=loss with"),
        ("grpo", {"entropy_target": 0.0}, "entropy_target=0.0 must be above 0 and finite, or null"),
        ("grpo", {"entropy_coef_step": 0.1}, "entropy_coef_step=0.1 is not used: it belongs to entropy_target, which"),
        ("grpo", {"router_aux_coef": -1.0}, "router_aux_coef=-1.0 must be at least 0"),
        (
            "grpo",
            {"router_aux_coef": 0.1, "aggregation": "token_sum"},
            "router_aux_coef=0.1 is a mean, and",
        ),
        ("grpo", {"proximal_policy": "engine"}, "proximal_policy=engine is not known"),
        (
            "rloo",
            {"proximal_policy": "rollout"},
            "proximal_policy=rollout is not used: policy_loss=policy_gradient has",
        ),
        ("grpo", {"proximal_policy": "rollout", "policy_loss": "decoupled"}, "weight of policy_loss=decoupled 1"),
        (
            "dppo_tv",
            {"correction": "truncated"},
            "correction=truncated would weigh a second time: with proximal_policy",
        ),
        ("otb", {"group_size": 1}, "group_size=1: advantage=otb compares the completions of a prompt"),
        ("grpo", {"options": {"beta": 1}}, "options.beta=1 is not used: no part takes it"),
        ("grpo", {"options": {"clip_low": 1}}, "options.clip_low=1 is not used: it is the field algorithm.clip_low"),
    ],
)
def test_mistakes_name_the_field_and_the_way_out(name, changes, message):
    with pytest.raises(AlgosError) as caught:
        preset(name, **changes)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("dapo", {}, "its samples are completions of a language model; of episodes: ppo, grpo, gigpo"),
        ("ppp", {}, "no algorithm is called 'ppp'; did you mean 'ppo'"),
        ("ppo", {"kl_coef": 0.1}, "kl_coef=0.1 is not used: it is about completions, and samples are episodes"),
        (
            "ppo",
            {"advantage": "returns"},
            "advantage=returns cannot be computed for episodes; use grpo, rloo, opo, pass_at_k, gae_steps",
        ),
        ("grpo", {"advantage": "gdpo"}, "advantage=gdpo cannot be computed for episodes"),
        ("grpo", {"value_coef": 1.0}, "value_coef=1.0 is not used: it belongs to the critic, and advantage=grpo has"),
        ("ppo", {"value_coef": None}, "value_coef is null; it weighs the values that advantage=gae_steps reads"),
        ("gigpo", {"reward_level": "action", "ratio_level": "action"}, "=action: advantage=gigpo compares states"),
        ("grpo", {"proximal_policy": "rollout"}, "proximal_policy=rollout is not used: it is about completions"),
        ("ppo", {"target_kl": 0.0}, "target_kl=0.0 must be above 0 and finite, or null"),
        (f"{__name__}:MINE", {}, "MINE' has samples=completions; here they are episodes"),
    ],
)
def test_mistakes_with_episodes(name, changes, message):
    with pytest.raises(AlgosError) as caught:
        preset(name, samples="episodes", **changes)
    assert message in str(caught.value)


def test_what_goes_with_an_anchor_at_the_rollout():
    """The weight of the policy in training over the engine is right where the loss has no ratio, and a rejection has
    no weight."""
    assert preset("rloo", proximal_policy="rollout", correction="truncated").correction_high == 2.0
    assert preset("dppo_tv", correction="rejected", rejection="sequence_max_k3", rejection_limit=0.5).num_updates == 4
    assert (
        preset("grpo", correction="truncated", rejection="sequence_sum_k1", rejection_limit=0.7).rejection_limit == 0.7
    )


def test_an_advantage_on_steps():
    assert preset("ppo", samples="episodes", advantage=f"{__name__}:of_steps").has_critic
    assert takes_of_advantage(of_steps).works_on == "steps"
    with pytest.raises(
        AlgosError, match="of_steps cannot be computed for completions; use grpo, rloo, opo, gdpo, pass_at_k, otb,"
    ):
        preset("grpo", advantage=f"{__name__}:of_steps")


def test_advantages_of_turns_are_for_completions_too():
    assert preset("gigpo", options={"step_weight": 0.5}).gamma == 0.95
    assert preset("grpo", advantage="turn_returns").gamma == 1.0
    with pytest.raises(AlgosError, match="group_size=1: advantage=gigpo compares the completions of a prompt"):
        preset("gigpo", group_size=1)
    with pytest.raises(AlgosError, match="gae_steps cannot be computed for completions"):
        preset("grpo", advantage="gae_steps")


def test_a_correction_brings_its_range():
    assert preset("grpo", correction="icepop").correction_high == 5.0
    assert (preset("grpo", correction="truncated").correction_low, preset("grpo").correction_high) == (None, None)
    assert preset("grpo", correction="masked", correction_high=3.0).correction_low == 0.0
    assert preset("grpo", correction="masked").correction_level == "token"
    assert preset("grpo", correction="icepop").correction_level is None
    assert preset("ppo", kl_coef=0.1, kl_target=6.0).kl_horizon == DEFAULTS["kl_horizon"]


def test_another_part_brings_the_defaults_of_its_fields():
    grpo = preset("grpo", policy_loss="policy_gradient", advantage="gae")
    assert (grpo.clip_low, grpo.clip_high, grpo.normalize_std) == (None, None, None)
    assert (grpo.gamma, grpo.gae_lambda, grpo.value_loss) == (DEFAULTS["gamma"], DEFAULTS["gae_lambda"], "clipped")
    assert preset("ppo", group_size=1).group_size == 1


@pytest.mark.parametrize("name", BUILTIN_ADVANTAGES)
def test_the_table_of_advantages_says_what_the_functions_take(name):
    from inspect import signature

    function, takes = ADVANTAGES.get(name), BUILTIN_ADVANTAGES[name]
    arguments = signature(function).parameters
    # an input goes in by its place, so a mask may be called otherwise
    assert len(takes.inputs) <= len(arguments)
    assert set(takes.options) <= set(arguments)
    needed = {key for key, a in list(arguments.items())[len(takes.inputs) :] if a.default is a.empty}
    assert set(takes.required) == needed


@pytest.mark.parametrize("name", BUILTIN_POLICY_LOSSES)
def test_the_table_of_policy_losses_says_what_the_functions_take(name):
    actual, takes = takes_of_policy_loss(POLICY_LOSSES.get(name)), BUILTIN_POLICY_LOSSES[name]
    assert actual.inputs == takes.inputs
    assert set(takes.options) <= set(actual.options)
    assert actual.required == takes.required


def test_parts_of_ones_own():
    here = __name__
    sys.modules.setdefault(here, sys.modules[__name__])
    algorithm = preset("grpo", advantage=f"{here}:halved", options={"power": 2})
    takes = takes_of_advantage(ADVANTAGES.get(algorithm.advantage))
    assert algorithm.options_of(takes) == {"power": 2}, "what has a default and is not given is left to it"
    assert takes.works_on == "groups"
    with pytest.raises(AlgosError, match=r"options.power is not set; advantage=.*:halved needs it"):
        preset("grpo", advantage=f"{here}:halved")
    assert preset("grpo", advantage=f"{here}:of_tokens", group_size=1).has_critic
    loss = preset("grpo", policy_loss=f"{here}:my_loss", options={"beta": 2.0})
    takes = takes_of_policy_loss(POLICY_LOSSES.get(loss.policy_loss))
    assert "rollout_logprobs" in takes.inputs
    assert loss.options_of(takes) == {"clip_low": 0.2, "beta": 2.0}
    assert loss.clip_high is None, "mine does not take it"


def test_functions_that_are_no_parts():
    with pytest.raises(AlgosError, match="takes no argument `rewards`"):
        takes_of_advantage(wrong_inputs)
    with pytest.raises(AlgosError, match="takes rewards, values: on groups"):
        takes_of_advantage(mixed_inputs)
    with pytest.raises(AlgosError, match=r"a policy loss begins with \(policy_logprobs, proximal"):
        takes_of_policy_loss(halved)
    fields = {name: getattr(preset("grpo"), name) for name in Algorithm.__slots__}
    errors = list(problems(fields | {"advantage": f"{__name__}:wrong_inputs"}))
    assert [name for name, _ in errors] == ["advantage"]


def test_an_algorithm_of_ones_own():
    algorithm = preset(f"{__name__}:MINE", clip_high=0.4)
    assert (algorithm.normalize_std, algorithm.clip_low, algorithm.clip_high) == (False, 0.1, 0.4)
    unbounded = preset(f"{__name__}:MINE_UNBOUNDED")
    assert (unbounded.value_clip, unbounded.weight_cap) == (None, None), "null is what it says, not the default"
    assert preset(f"{__name__}:MINE", advantage="gae").value_clip == DEFAULTS["value_clip"], "MINE has no critic"
    of_episodes = preset(f"{__name__}:MINE_OF_EPISODES", samples="episodes", num_epochs=2)
    assert (of_episodes.advantage, of_episodes.value_clip, of_episodes.target_kl) == ("gae_steps", None, None)
    with pytest.raises(AlgosError, match="is a int; make it an"):
        preset(f"{__name__}:NOT_MINE")


def test_registering():
    register_advantage("test_algos_halved")(halved)
    register_advantage("test_algos_halved")(halved)  # a module that is imported twice
    assert ADVANTAGES.get("test_algos_halved") is halved
    assert "test_algos_halved" in ADVANTAGES.names()
    with pytest.raises(AlgosError, match="the advantage name 'grpo' is taken by"):
        register_advantage("grpo")(halved)
    with pytest.raises(AlgosError, match="a colon marks an import path"):
        register_policy_loss("a:b")(my_loss)
    ADVANTAGES._added.pop("test_algos_halved")


def test_needs_no_torch():
    code = (
        "import sys; from rlinf_algos.algorithm import preset, PRESETS; [preset(name) for name in PRESETS]; "
        "assert 'torch' not in sys.modules; import rlinf_algos; rlinf_algos.gae; assert 'torch' in sys.modules; "
        "from rlinf_algos import *; ppo_clip_loss"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


def test_inputs_are_documented():
    assert {name for takes in BUILTIN_ADVANTAGES.values() for name in takes.inputs} <= set(INPUTS)


@pytest.mark.parametrize(
    ("name", "changes", "correction"),
    [
        ("grpo", {}, "truncated"),
        ("rloo", {}, "truncated"),
        ("gspo", {}, "truncated"),
        ("grpo", {"correction": None}, None),
        ("grpo", {"correction": "icepop"}, "icepop"),
        ("grpo", {"policy_loss": "decoupled", "num_minibatches": 2}, None),
        ("dppo_tv", {}, None),
    ],
)
def test_older_weights_are_corrected_for_unless_the_loss_does_it(name, changes, correction):
    assert preset(name, max_staleness=1, **changes).correction == correction
    assert preset(name).correction is None


@pytest.mark.parametrize(
    ("name", "changes", "correction"),
    [
        ("ppo", {}, None),
        ("grpo", {}, None),
        ("ppo", {"correction": "truncated"}, "truncated"),
        ("ppo", {"policy_loss": "policy_gradient"}, "truncated"),
    ],
)
def test_the_ratio_of_episodes_corrects_for_older_weights_if_the_loss_has_one(name, changes, correction):
    assert preset(name, samples="episodes", max_staleness=1, **changes).correction == correction


def test_a_loss_without_a_ratio_cannot_learn_from_older_weights():
    with pytest.raises(AlgosError, match=r"max_staleness=2: policy_loss=policy_gradient has no ratio"):
        preset("rloo", max_staleness=2, correction=None)

"""An algorithm as plain data: its advantage, its policy loss, and their numbers.

    Algorithm(advantage="grpo", policy_loss="ppo_clip", clip_low=0.2, clip_high=0.28, aggregation="token_mean", ...)

`preset("dapo")` returns a named one, `preset("dapo", clip_high=0.3)` one with a change. A field that the chosen
components do not use is None; setting it is an error, so that no number in a recipe is without effect. Needs no torch,
so that configs can be checked on any machine; `Parts` has the functions.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, Literal

from rlinf_algos.errors import AlgosError
from rlinf_algos.parts import (
    ADVANTAGES,
    BUILTIN_ADVANTAGES,
    BUILTIN_POLICY_LOSSES,
    POLICY_LOSSES,
    TOKEN_CHOICES,
    Takes,
    advantage_takes,
    policy_loss_takes,
)
from rlinf_algos.presets import (
    AGGREGATIONS,
    CORRECTION_LEVELS,
    CORRECTION_OPTIONS,
    CORRECTIONS,
    DAGGER,
    DEFAULTS,
    EPISODE_AGGREGATIONS,
    EPISODE_PRESETS,
    FIELDS_OF_SAMPLES,
    KL_ESTIMATES,
    NULLABLE,
    OFF_POLICY_PRESETS,
    OPTIONS_OF_RATIO,
    PRESETS,
    PROXIMAL_POLICIES,
    RANGES,
    RATIO_LEVELS,
    REJECTIONS,
    REWARD_LEVELS,
    VALUE_LOSSES,
)
from rlinf_algos.registry import Registry, did_you_mean

Option = bool | int | float | str | None


class AlgorithmError(AlgosError):
    """Fields of an algorithm that are invalid or incompatible."""

    def __init__(self, problems: Sequence[tuple[str, str]]) -> None:
        self.problems = problems
        """As `problems` has them."""
        super().__init__("; ".join(f"{name}{text}" for name, text in problems))


@dataclass(frozen=True, kw_only=True, slots=True)
class Algorithm:
    """How rewards become an update. `preset` creates one and fills in omitted fields. null: the algorithm does not use
    the field.

    Example: preset("grpo") == Algorithm(name="grpo", normalize_std=True, clip_low=0.2, clip_high=0.2)
    """

    __pydantic_config__: ClassVar = {
        "extra": "forbid",
        "strict": True,
        "allow_inf_nan": False,
        "use_attribute_docstrings": True,
    }
    """For configs that have an algorithm as a section: pydantic reads the docstrings of the fields as descriptions."""

    name: str = "own"
    """Name of a preset (ppo, grpo, ... for completions; ppo or grpo for episodes), or package.module:NAME of a custom
    algorithm."""
    samples: Literal["completions", "episodes"] = "completions"
    """What the algorithm learns from: completions of a language model or episodes of environments. The job determines
    it."""
    group_size: int = 8
    """Completions sampled for each prompt; most algorithms compare them with each other. With env.episodes_per_step:
    episodes from each start."""
    advantage: str = "grpo"
    """How advantages are computed. Completions: grpo, rloo, opo, pass_at_k, otb, gdpo (with a weighted reward), gae
    (with a critic), returns; of turns: gigpo, turn_returns, grpo_steps. Episodes: grpo, rloo, opo, pass_at_k,
    grpo_steps, gigpo, turn_returns, gae_steps (with values). Or package.module:function."""
    normalize_std: bool | None = None
    """Divide advantages by the standard deviation of the rewards in the group."""
    gamma: float | None = None
    """Discount factor per token, per turn if advantages are of turns, or per answer of a policy; in [0, 1]."""
    gae_lambda: float | None = None
    """Lambda of generalized advantage estimation, the decay of later temporal-difference errors; in [0, 1]."""
    bootstrap_at_termination: bool | None = None
    """gae_steps: add the value of the last state also if the task ended the episode, as if the episode continued.
    false: only if a time limit ended it."""
    bootstrap_at_truncation: bool | None = None
    """gae_steps: add the value of the last state if a time limit ended the episode. false: the limit is part of the
    task, and an episode that reaches it has failed."""
    episode_aggregation: Literal["chunk_mean", "episode_mean"] = "chunk_mean"
    """What the loss is a mean over. chunk_mean: all answers of a step, so that long episodes count more. episode_mean:
    episodes, each the mean over its answers, so that an early success counts as much as a long failure."""
    reward_level: Literal["chunk", "action"] = "chunk"
    """What rewards, values and advantages belong to if a policy answers with several actions at once. chunk: all of
    these actions together; their rewards are added up. action: each action; needs ratio_level action or token."""
    ratio_level: Literal["chunk", "action", "token"] = "chunk"
    """What has its own clipped probability ratio: a chunk of actions, each action, or each token or dimension of an
    action."""
    whiten_advantages: bool = False
    """Normalize the advantages of a step to mean 0 and standard deviation 1, over all its tokens or environment
    steps."""
    policy_loss: str = "ppo_clip"
    """The policy loss: ppo_clip, gspo, gmpo, cispo, sapo, sequence_clip, dppo_tv, dppo_kl, clip_cov, kl_cov, decoupled,
    policy_gradient, or package.module:function."""
    proximal_policy: Literal["actor", "rollout"] = "actor"
    """The log-probabilities in the denominator of the ratio. actor: the actor's, computed before the first of several
    optimizer steps. rollout: those of the engine that sampled, which saves a forward pass (verl: bypass_mode)."""
    max_staleness: int = 0
    """Training steps by which the weights that sampled may be older than those that train, so that generation runs
    ahead of training (docs/staleness.md). Above 0, correction is truncated by default, unless the ratio of the policy
    loss is to the policy that sampled. 0: the steps do not overlap."""
    clip_low: float | None = None
    """The probability ratio is clipped below at 1 - clip_low. gmpo: the logarithm of the ratio is clipped at -clip_low.
    dppo: maximum divergence of a token that became less likely."""
    clip_high: float | None = None
    """The probability ratio is clipped above at 1 + clip_high; widen it if the entropy falls towards 0. If omitted, the
    preset decides: 0.2 for most, 0.28 for dapo. Policy loss gmpo: the logarithm of the ratio is clipped at clip_high.
    Policy loss dppo: tokens whose probability has grown are left out if the two policies' distributions differ by more
    than this. null: the policy loss does not clip."""
    dual_clip: float | None = None
    """Ratio, above 1, beyond which the loss of a negative advantage no longer grows; null: no such bound."""
    weight_cap: float | None = None
    """decoupled: maximum importance weight between actor and engine; tokens, or actions, with a larger weight are left
    out. null: none is left out."""
    correction: Literal["truncated", "masked", "rejected", "icepop"] | None = None
    """Correction of the mismatch between engine and actor by importance weights. truncated: weights are cut at
    correction_high. masked: tokens outside correction_low and correction_high are left out. rejected: the same, without
    weights for the others. icepop: masked, token by token (arXiv:2510.18855). null: no correction. If omitted:
    truncated if max_staleness is above 0 or the engine's weights are quantized (rollout.quantization), and nothing else
    corrects for that; else null."""
    correction_level: Literal["token", "sequence", "geometric"] | None = None
    """What has its own importance weight: a token, a whole completion (sequence), or the geometric mean over a
    completion. icepop always uses tokens."""
    correction_low: float | None = None
    """Tokens with a smaller ratio of actor to engine are left out; not used by truncated."""
    correction_high: float | None = None
    """Tokens with a larger ratio of actor to engine are left out; truncated: maximum weight."""
    rejection: str | None = None
    """Leaves out tokens, or completions, whose divergence between engine and actor exceeds rejection_limit, in addition
    to any correction. token_k1, token_k2, token_k3: of a token. sequence_sum_k1, sequence_mean_k3, ...: sum or mean
    over a completion. sequence_max_k2, sequence_max_k3: the largest of a completion's tokens. null: nothing is
    rejected."""
    rejection_limit: float | None = None
    """Limit of rejection in nats; for k1 it bounds the absolute value of the log-ratio."""
    off_policy_threshold: float | None = None
    """Completions with a negative advantage are left out if their mean log-ratio to the policy that sampled them
    exceeds this many nats per token (DeepSeek-V3.2); null: none is."""
    top_entropy_fraction: float = 1.0
    """Share of the tokens of an optimizer step that the policy loss uses: those with the highest entropy
    (arXiv:2506.01939). Below 1 the actor computes entropies in an additional forward pass."""
    aggregation: Literal[
        "token_mean", "token_sum", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant_length_mean"
    ] = "token_mean"
    """How the losses of tokens are combined into one number."""
    kl: str = "k3"
    """Estimator of the KL divergence from the reference: k1, k2, k3, abs, k1+, k3+."""
    kl_coef: float = 0.0
    """Weight of the KL divergence from the reference model; 0 leaves the reference worker out."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL divergence goes: a term of the loss, or a penalty on the rewards."""
    kl_bias_correction: bool = False
    """Multiply the KL of each token in the loss by the probability ratio, with its gradient (DeepSeek-V3.2)."""
    kl_clamp: float | None = None
    """Maximum KL of a token in nats, for k3 and k3+; null: no limit. verl uses 10."""
    kl_target: float | None = None
    """Adapt kl_coef after each step so that the KL of a completion approaches this value in nats; needs kl_in reward.
    null: kl_coef stays constant."""
    kl_horizon: int | None = None
    """Number of completions over which an adapted kl_coef may change by a fifth."""
    reward_coef: float = 1.0
    """Weight of the reward if the KL is in the reward; 0: only the KL teaches, as in distillation."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    entropy_target: float | None = None
    """Adapt entropy_coef after each optimizer step so that the entropy of a token does not fall below this value in
    nats (Skywork-OR1); the bonus applies only while the entropy is not above it. null: entropy_coef stays constant."""
    entropy_coef_step: float | None = None
    """Change of an adapted entropy_coef per optimizer step; the coefficient stays between 0 and 1."""
    router_aux_coef: float = 0.0
    """Weight of the load-balancing loss of a mixture of experts, over the tokens of a micro-batch
    (arXiv:2101.03961)."""
    value_loss: Literal["clipped", "huber"] | None = None
    """Loss of the critic, if the advantage uses values."""
    value_clip: float | None = None
    """Maximum change of a value in an update; the larger of the losses with and without it counts. null: no limit, the
    default with value_loss huber."""
    huber_delta: float | None = None
    """huber: error beyond which the loss of the critic is linear."""
    value_coef: float | None = None
    """Weight of the value loss, if the policy itself predicts values."""
    dynamic_sampling: bool = False
    """Leave groups whose rewards are all equal out of the update and of its totals (DAPO). Episodes: those from one
    start, with env.episodes_per_step."""
    oversampling: float = 1.0
    """With dynamic_sampling: sample this many times as many prompts and train on the first groups that have a learning
    signal. Episodes: begin at most this many times as many starts, until there are as many groups with a signal."""
    overlong_buffer_tokens: int = 0
    """Length of the interval below rollout.max_new_tokens in which the reward falls linearly (DAPO), in tokens; 0: no
    penalty."""
    overlong_penalty: float | None = None
    """Amount by which the reward of a completion at the length limit falls."""
    overlong_filter: bool = False
    """Leave completions that were cut at the length limit out of the update and of its totals (DAPO)."""
    num_minibatches: int = 1
    """Optimizer steps in one pass over the samples of a step."""
    num_epochs: int = 1
    """Passes over the samples of a step."""
    target_kl: float | None = None
    """End the epochs once the KL divergence from the policy that sampled exceeds this value in nats; null: never."""
    options: Mapping[str, Option] = field(default_factory=dict)
    """Further arguments of a custom advantage or policy loss."""

    def __post_init__(self) -> None:
        errors = list(problems(asdict(self)))
        if errors:
            raise AlgorithmError(errors)

    @property
    def has_critic(self) -> bool:
        """Whether the advantage reads values."""
        return "values" in advantage_takes(self.advantage).inputs

    @property
    def reads_parts(self) -> bool:
        """Whether the advantage reads the parts of a weighted reward."""
        return "parts" in advantage_takes(self.advantage).inputs

    @property
    def reads_logit_norms(self) -> bool:
        """Whether the advantage reads a pass of the actor over the completions before the update."""
        return "logit_norms" in advantage_takes(self.advantage).inputs

    @property
    def num_updates(self) -> int:
        """Optimizer steps on the samples of one step."""
        return self.num_minibatches * self.num_epochs

    @property
    def chooses_tokens(self) -> bool:
        """Whether tokens are chosen over the whole batch of an optimizer step before its first gradient."""
        return self.top_entropy_fraction < 1 or self.policy_loss in TOKEN_CHOICES.names()

    @property
    def idle_fields(self) -> tuple[str, ...]:
        """The numbers, options among them, that cannot act as the algorithm stands: those of a ratio that is always 1,
        since the policy in training is the one before the update."""
        if self.num_updates > 1 or self.proximal_policy == "rollout" or self.policy_loss not in BUILTIN_POLICY_LOSSES:
            return ()
        options = self.options_of(policy_loss_takes(self.policy_loss))
        return tuple(name for name in OPTIONS_OF_RATIO if options.get(name) is not None)

    @property
    def gathers_whole_step(self) -> bool:
        """Whether no gradient can be computed before the last group of a step is there."""
        asks_first = self.has_critic or self.reads_logit_norms or self.chooses_tokens
        decides_together = asks_first or self.whiten_advantages or self.oversampling > 1
        return decides_together or self.num_updates > 1

    def options_of(self, takes: Takes) -> dict[str, Option]:
        """Argument -> value, for a part that takes these."""
        return {
            argument: getattr(self, name) if name in _FIELDS else self.options[name]
            for argument, name in takes.options.items()
            if name in _FIELDS or name in self.options
        }


_FIELDS = {item.name: item for item in fields(Algorithm)}


def preset(name: str, **changes: Any) -> Algorithm:
    """The algorithm of that name, with changes.

    Args:
        name: a key of `PRESETS`, or the import path "package.module:NAME" of a custom `Algorithm`.
        changes: fields to change.

    Raises: AlgosError that lists what is wrong: the name, a field that is unknown, unused or out of range.
    """
    unknown = [change for change in changes if change not in _FIELDS]
    if unknown:
        raise AlgosError(f"{unknown[0]!r} is no field of an algorithm; {did_you_mean(unknown[0], _FIELDS)}")
    return Algorithm(**filled(name, changes))


def filled(name: str, changes: Mapping[str, Any], *, engine_differs: bool = False) -> dict[str, Any]:
    """All fields of an algorithm: the changes, else the preset's, else the defaults of the fields that are used.

    Args:
        engine_differs: the engine samples from another distribution than the actor computes, as with quantized weights;
            `correction` is then truncated by default, as with `max_staleness` above 0.

    Raises: AlgosError for a name that is not known. Nothing else is checked; see `problems`.
    """
    base = _preset_fields(name, changes.get("samples"))
    values = {item.name: item.default for item in fields(Algorithm)} | {"options": {}} | base | dict(changes)
    values["name"] = name
    differs = engine_differs or values["max_staleness"] not in (0, None)
    if "correction" not in changes and differs and _needs_correction(values):
        values["correction"] = "truncated"
    try:
        used = set(used_options(values))
    except (AlgosError, TypeError):
        return values  # a part that is not known; `problems` says so
    for option, default in DEFAULTS.items():
        if option not in used:
            values[option] = changes.get(option)
        elif option not in changes:
            own = CORRECTION_OPTIONS.get(str(values["correction"]), {})
            if option == "value_clip" and values["value_loss"] == "huber":
                own = {"value_clip": None}
            values[option] = base.get(option, own.get(option, default))
    return values


def problems(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What is wrong with the fields of an algorithm, as (field, what follows its name in a message).

    Example: ("gae_lambda", "=0.9 is not used: it belongs to advantage=gae, and this is advantage=grpo; leave it out")
    """
    unknown = list(_unknown_parts(values))
    yield from unknown
    for name, (low, high, why) in RANGES.items():
        value = values[name]
        if value is not None and not low <= value <= high:
            allowed = f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
            yield name, f"={value} must be {allowed}: {why}"
    for name, why in (
        ("kl_clamp", "it bounds a KL"),
        ("kl_target", "it is a KL to come to"),
        ("target_kl", "it bounds a KL"),
        ("entropy_target", "it is an entropy to keep"),
        ("rejection_limit", "it bounds a divergence"),
    ):
        if values[name] is not None and not 0 < values[name] < math.inf:
            yield name, f"={values[name]} must be above 0 and finite, or null to disable it: {why}"
    if not 0 < values["top_entropy_fraction"] <= 1:
        yield "top_entropy_fraction", f"={values['top_entropy_fraction']} must be above 0 and at most 1: it is a share"
    if values["dual_clip"] is not None and not values["dual_clip"] > 1:
        yield "dual_clip", f"={values['dual_clip']} must be above 1, or null to disable it: it bounds the ratio"
    if values["huber_delta"] is not None and not 0 < values["huber_delta"] < math.inf:
        yield "huber_delta", f"={values['huber_delta']} must be above 0 and finite: it is where the square ends"
    if not unknown:
        try:
            yield from _misfits(values)
        except AlgosError as error:
            yield "policy_loss" if "policy loss" in str(error) else "advantage", f": {error}"


def used_options(values: Mapping[str, Any]) -> Iterator[str]:
    """The fields among `DEFAULTS`, and the keys of `options`, that the chosen parts use."""
    advantage = advantage_takes(values["advantage"])
    yield from advantage.options.values()
    yield from policy_loss_takes(values["policy_loss"]).options.values()
    if "values" in advantage.inputs:
        yield "value_loss"
        yield "value_clip"
        if values["value_loss"] == "huber":
            yield "huber_delta"
        if values["samples"] == "episodes":
            yield "value_coef"
    yield from CORRECTION_OPTIONS.get(str(values["correction"]), {})
    if values["kl"] in ("k3", "k3+"):
        yield "kl_clamp"
    if values["kl_target"] is not None:
        yield "kl_horizon"
    if values["entropy_target"] is not None:
        yield "entropy_coef_step"
    if values["rejection"] is not None:
        yield "rejection_limit"
    if values["overlong_buffer_tokens"]:
        yield "overlong_penalty"


def _needs_correction(values: Mapping[str, Any]) -> bool:
    """Whether nothing weighs the samples by actor over engine yet. The ratio of episodes is to the policy that
    sampled."""
    if values["correction"] is not None or values["policy_loss"] == "decoupled":
        return False
    is_anchored = values["samples"] == "episodes" or values["proximal_policy"] == "rollout"
    return not is_anchored or values["policy_loss"] == "policy_gradient"


def _preset_fields(name: str, samples: str | None) -> dict[str, Any]:
    presets = EPISODE_PRESETS if samples == "episodes" else PRESETS
    if name in presets:
        return presets[name]
    if name in PRESETS:
        raise AlgosError(f"its samples are completions of a language model; of episodes: {', '.join(presets)}")
    if ":" not in name:
        names = [*presets, *((*OFF_POLICY_PRESETS, DAGGER) if samples == "episodes" else ())]
        raise AlgosError(
            f"no algorithm is called {name!r}; {did_you_mean(name, names)} A custom algorithm is 'package.module:NAME'"
        )
    registry: Registry[Any] = Registry("algorithm")
    own = registry.get(name, callable_only=False)
    if not isinstance(own, Algorithm):
        raise AlgosError(f"{name!r} is a {type(own).__name__}; make it an rlinf_algos.Algorithm")
    if samples not in (None, own.samples):
        raise AlgosError(f"{name!r} has samples={own.samples}; here they are {samples}")
    fields_of_own = asdict(own)
    means_none = NULLABLE & set(used_options(fields_of_own))
    return {key: value for key, value in fields_of_own.items() if value is not None or key in means_none}


def _unknown_parts(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, registry in (("advantage", ADVANTAGES), ("policy_loss", POLICY_LOSSES), ("kl", KL_ESTIMATES)):
        name = values[key]
        if ":" not in name and name not in registry.names():
            yield key, f"={name}: {registry.unknown(name)}"
    known_words = {
        "aggregation": AGGREGATIONS,
        "kl_in": ("loss", "reward"),
        "samples": tuple(FIELDS_OF_SAMPLES),
        "correction": (None, *CORRECTIONS),
        "correction_level": (None, *CORRECTION_LEVELS),
        "rejection": (None, *REJECTIONS),
        "proximal_policy": PROXIMAL_POLICIES,
        "value_loss": (None, *VALUE_LOSSES),
        "ratio_level": RATIO_LEVELS,
        "reward_level": REWARD_LEVELS,
        "episode_aggregation": EPISODE_AGGREGATIONS,
    }
    for key, choices in known_words.items():
        if values[key] not in choices:
            words = [word for word in choices if word is not None]
            yield key, f"={values[key]} is not known; {did_you_mean(str(values[key]), words)}"


def _misfits(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Values that the chosen parts do not use, and values that they need."""
    used, samples = set(used_options(values)), values["samples"]
    (other,) = set(FIELDS_OF_SAMPLES) - {samples}
    for option in FIELDS_OF_SAMPLES[other]:
        if values[option] != _FIELDS[option].default:
            yield option, f"={values[option]} is not used: it is about {other}, and samples are {samples}; leave it out"
    for option in (option for option in DEFAULTS if option not in FIELDS_OF_SAMPLES[other]):
        value = values[option]
        if option not in used and value is not None:
            yield option, f"={value} is not used: {_home_of(option, values)}; leave it out"
        elif option in used and value is None and option not in NULLABLE:
            yield option, f" is null; {_home_of(option, values)}"
    for option in values["options"]:
        if option not in used or option in _FIELDS:
            where = f"it is the field algorithm.{option}" if option in _FIELDS else "no part takes it"
            yield f"options.{option}", f"={values['options'][option]} is not used: {where}"
    for key, takes in (("advantage", advantage_takes), ("policy_loss", policy_loss_takes)):
        part = takes(values[key])
        for option in part.required:
            if part.options[option] not in _FIELDS and part.options[option] not in values["options"]:
                yield f"options.{option}", f" is not set; {key}={values[key]} needs it"
    if values["correction"] is not None and values["policy_loss"] == "decoupled":
        yield (
            "correction",
            f"={values['correction']} would weigh a second time: policy_loss=decoupled holds the weight of actor over "
            "engine already; leave one of them out",
        )
    if values["proximal_policy"] == "rollout":
        yield from _anchor_misfits(values)
    if values["reward_level"] == "action":
        yield from _level_misfits(values)
    if values["max_staleness"]:
        yield from _staleness_misfits(values)
    if not _fits(advantage_takes(values["advantage"]), values):
        names = [name for name, takes in BUILTIN_ADVANTAGES.items() if _fits(takes, values)]
        yield (
            "advantage",
            f"={values['advantage']} cannot be computed for {samples}; use {', '.join(names)} or your own",
        )
    elif samples == "completions":
        yield from _reward_misfits(values)
        yield from _group_misfits(values)
    else:
        yield from _group_misfits(values, "start")


def _anchor_misfits(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What does not go with a ratio that is actor over engine already."""
    loss, correction, rejects = values["policy_loss"], values["correction"], values["rejection"] is not None
    if loss == "decoupled":
        yield (
            "proximal_policy",
            "=rollout makes every weight of policy_loss=decoupled 1: it is of proximal policy over engine; use "
            "ppo_clip, or proximal_policy=actor",
        )
    elif loss == "policy_gradient":
        if correction is None and not rejects:
            yield (
                "proximal_policy",
                "=rollout is not used: policy_loss=policy_gradient has no ratio; add a correction, which then weighs "
                "by the policy in training over the engine, or leave it out",
            )
    elif correction in ("truncated", "masked", "icepop") and loss in BUILTIN_POLICY_LOSSES:
        yield (
            "correction",
            f"={correction} would weigh a second time: with proximal_policy=rollout the ratio of policy_loss={loss} is "
            "actor over engine already; use rejection or correction=rejected, or policy_loss=policy_gradient",
        )


def _staleness_misfits(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What cannot learn from samples of older weights."""
    staleness, advantage = values["max_staleness"], values["advantage"]
    corrects = values["correction"] is not None or values["rejection"] is not None
    if values["policy_loss"] == "policy_gradient" and not corrects:
        yield (
            "max_staleness",
            f"={staleness}: policy_loss=policy_gradient has no ratio to the weights that sampled, so older ones would "
            "bias it; leave correction out, which is then truncated, or use max_staleness=0",
        )
    if "logit_norms" in advantage_takes(advantage).inputs:
        yield (
            "max_staleness",
            f"={staleness}: advantage={advantage} reads the probabilities of the policy that sampled, and the actor "
            "only has those of the newest weights; use another advantage, or max_staleness=0",
        )


def _level_misfits(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What does not go with rewards of single actions."""
    if values["ratio_level"] == "chunk":
        yield (
            "reward_level",
            "=action is finer than ratio_level=chunk: one ratio takes one advantage; set ratio_level action or token",
        )
    if advantage_takes(values["advantage"]).works_on == "groups":
        yield (
            "reward_level",
            f"=action is not used: advantage={values['advantage']} gives all of an episode one advantage; leave it out",
        )
    if "state_ids" in advantage_takes(values["advantage"]).inputs:
        yield (
            "reward_level",
            f"=action: advantage={values['advantage']} compares states, and a chunk of actions has one; leave it out",
        )


def _fits(takes: Takes, values: Mapping[str, Any]) -> bool:
    """Whether the samples have what a part takes."""
    if values["samples"] == "episodes":
        return takes.works_on != "tokens" and "parts" not in takes.inputs
    return takes.works_on != "steps" or takes.works_on_turns


def _group_misfits(values: Mapping[str, Any], source: str = "prompt") -> Iterator[tuple[str, str]]:
    """What is made of the completions of a prompt, or of the episodes from a start."""
    kind = "completion" if source == "prompt" else "episode"
    if values["dynamic_sampling"] and values["group_size"] < 2:
        yield (
            "group_size",
            f"={values['group_size']}: dynamic_sampling leaves out groups whose rewards are all equal, which a single "
            f"{kind}'s are; use at least 2",
        )
    elif values["group_size"] < 2 and advantage_takes(values["advantage"]).compares:
        yield (
            "group_size",
            f"={values['group_size']}: advantage={values['advantage']} compares the {kind}s of a {source}; use at "
            "least 2",
        )
    if values["oversampling"] > 1 and not values["dynamic_sampling"]:
        yield "oversampling", f"={values['oversampling']} is not used: it belongs to dynamic_sampling=true"


def _reward_misfits(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What is made of the reward and of a KL in it."""
    kl_in_reward = values["kl_in"] == "reward" and values["kl_coef"] > 0
    if values["kl_target"] is not None and not kl_in_reward:
        yield "kl_target", f"={values['kl_target']} is not used: it belongs to kl_in=reward with a kl_coef above 0"
    if values["kl_bias_correction"] and (values["kl_in"] != "loss" or not values["kl_coef"]):
        yield "kl_bias_correction", "=true is not used: it belongs to kl_in=loss with a kl_coef above 0"
    if values["router_aux_coef"] and values["aggregation"] == "token_sum":
        yield "router_aux_coef", f"={values['router_aux_coef']} is a mean, and aggregation=token_sum a sum; use another"
    if values["reward_coef"] == 0 and not kl_in_reward:
        yield "reward_coef", "=0 leaves nothing to learn from; it belongs to kl_in=reward with a kl_coef above 0"
    if "rewards" in advantage_takes(values["advantage"]).inputs:
        return
    why = f"is not used: advantage={values['advantage']} reads the components of the reward, not their sum"
    for option, is_changed in (
        ("kl_in", kl_in_reward),
        ("overlong_buffer_tokens", values["overlong_buffer_tokens"] > 0),
        ("reward_coef", values["reward_coef"] != 1.0),
    ):
        if is_changed:
            yield option, f"={values[option]} {why}"


def _home_of(option: str, values: Mapping[str, Any]) -> str:
    """Which parts use an option, and which ones are chosen."""
    for key, table in (("advantage", BUILTIN_ADVANTAGES), ("policy_loss", BUILTIN_POLICY_LOSSES)):
        homes = [name for name, takes in table.items() if option in takes.options.values() and _fits(takes, values)]
        if homes:
            return f"it belongs to {key}={' or '.join(homes)}, and this is {key}={values[key]}"
    homes = [name for name, options in CORRECTION_OPTIONS.items() if option in options]
    if homes:
        return f"it belongs to correction={' or '.join(homes)}, and this is {values['correction'] or 'null'}"
    if option == "kl_clamp":
        return f"it belongs to kl=k3 or k3+, and this is kl={values['kl']}"
    if option == "kl_horizon":
        return "it belongs to kl_target, which is null"
    if option == "entropy_coef_step":
        return "it belongs to entropy_target, which is null"
    if option == "rejection_limit":
        return f"it belongs to rejection, and this is {values['rejection'] or 'null'}"
    if option == "overlong_penalty":
        return "it belongs to overlong_buffer_tokens, which is 0"
    if "values" not in advantage_takes(values["advantage"]).inputs:
        return f"it belongs to the critic, and advantage={values['advantage']} has none"
    if option == "value_coef":
        return f"it weighs the values that advantage={values['advantage']} reads"
    return f"it belongs to another value_loss than {values['value_loss']}"

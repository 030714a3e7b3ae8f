"""Config of the embodied job: a robot learns a task in simulation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from rlinf.config.algorithm import RobotAlgorithm
from rlinf.config.base import Conflict, DataPath, Options, Section, either, not_multiple
from rlinf.config.common import JobConfig, TrainerConfig
from rlinf.config.lora import LoraConfig
from rlinf_algos import EPISODE_PRESETS, Algorithm, DaggerAlgorithm, OffPolicyAlgorithm, preset
from rlinf_envs import EXPERTS, KINDS, KindSpec, kind_spec, kinds_with, sources
from rlinf_workers.plugins import POLICIES, TRAINERS
from rlinf_workers.policies import PolicySpec

EVAL_SEED_LIMIT = 2**31
"""Training resets use seeds from here on, evaluations use seeds below it, so the two never overlap."""


def _check_kind(kind: str) -> str:
    """Imports the spec of a custom kind, which needs no torch."""
    try:
        kind_spec(kind)
    except Exception as error:  # a custom module may raise any exception
        allowed = f"{', '.join(KINDS)}, or package.module:NAME of a custom kind"
        text = f"a kind that can be imported ({error})" if ":" in kind else allowed
        raise PydanticCustomError("env_kind", "{text}", {"text": text}) from error
    return kind


AUTO = "auto"
"""The `policy.name` that stands for cnn or actor_critic, whichever reads what the environment shows."""


class EnvConfig(Section):
    """The environments in training and evaluation."""

    kind: Annotated[str, AfterValidator(_check_kind)] = Field(
        description=f"Where id is looked up: {', '.join(KINDS)}, or package.module:NAME of a custom kind. import: id "
        "is `package.module:callable` of a custom environment."
    )
    id: str = Field(min_length=1, description="The environment, for example PushCube-v1.")
    num_envs: int = Field(default=8, ge=1, description="Environments simulated in parallel; a multiple of num_groups.")
    num_groups: int = Field(
        default=4,
        ge=1,
        description="Number of environment groups: while one group waits for actions, another is simulated.",
    )
    num_processes: int = Field(
        default=0,
        ge=0,
        description="Separate processes for each group's environments: groups simulate concurrently, and a simulator "
        "that crashes or hangs is replaced. 0: all groups run in the env worker.",
    )
    hang_limit_s: float | None = Field(
        default=None,
        gt=0,
        description="Seconds after which a process that has not answered counts as hung; null: 20 times its longest "
        "answer so far, at least 20.",
    )
    num_steps: int = Field(
        default=50,
        ge=1,
        description="Actions of each environment in one training step. Episodes that may be longer continue in the "
        "next step; otherwise each step begins with a reset.",
    )
    episodes_per_step: int | None = Field(
        default=None,
        ge=1,
        description="Whole episodes of a training step, algorithm.group_size from each start: simulators take the next "
        "one as soon as theirs has ended, so there may be more episodes than environments, and the numbers do not "
        "depend on num_envs and num_groups. null: a step is num_steps actions in each environment.",
    )
    max_episode_steps: int = Field(default=50, ge=1, description="Actions after which an episode is cut off.")
    ignore_terminations: bool = Field(
        default=False,
        description="Training episodes continue after success or failure until the time limit, so that the policy "
        "learns to stay successful. For maniskill, metaworld and libero; Gymnasium does not define steps after the "
        "end.",
    )
    eval_ignore_terminations: bool = Field(
        default=False,
        description="The same for evaluations, which then score success after the last step. false: an episode ends "
        "where the environment ends it, as Gymnasium, Meta-World and LIBERO count.",
    )
    options: Options = Field(
        default={}, description="Arguments of the environment's constructor, for example ManiSkill's control_mode."
    )
    num_eval_episodes: int = Field(default=100, ge=1, description="Episodes of an evaluation.")
    eval_seed: int = Field(
        default=50_000, ge=0, description="Reset seed of the first evaluation episode; each further episode adds 1."
    )
    num_eval_videos: int = Field(
        default=0,
        ge=0,
        description="Episodes of each evaluation, from the first on, that are recorded to videos/step-*.mp4 in the "
        "run's folder (needs rlinf[video]). Recording changes no number; it costs rendering time and 10 MB per "
        "episode.",
    )
    episodes_megabytes: int = Field(
        default=256,
        ge=0,
        description="Size limit of episodes/ in the run's folder: seed, actions and rewards of every training episode, "
        "from which rlinf replay RUN --step S --env E replays it. Beyond it, the oldest steps are deleted. 0: none are "
        "kept.",
    )

    @property
    def spec(self) -> KindSpec:
        """The spec of this kind of environments."""
        return kind_spec(self.kind, self.id)

    @property
    def simulates_on_gpu(self) -> bool:
        """Whether the simulator uses a GPU if there is one; other simulators run on CPU cores."""
        return self.spec.simulates_on_gpu(self.id, self.options)


class PolicyConfig(Section):
    """The policy: actor_critic (separate policy and value networks over the state), or another one. null: the policy
    has no such option."""

    name: str = Field(
        default=POLICIES.default,
        min_length=1,
        description=f"{', '.join(POLICIES.names())}, or package.module:Class of a custom one. auto: cnn if the "
        "environment shows pictures, else actor_critic.",
    )
    options: Options = Field(
        default={}, description="Arguments of the policy's constructor, for every policy but actor_critic."
    )
    hidden_sizes: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(strict=False, min_length=1)] | None = Field(
        default=None, description="actor_critic: widths of the hidden layers."
    )
    initial_log_std: float | None = Field(
        default=None,
        ge=-10,
        le=3,
        description="actor_critic with continuous actions: logarithm of the initial standard deviation of the actions.",
    )
    normalize_observations: bool | None = Field(
        default=None, description="actor_critic: normalize observations by their running mean and standard deviation."
    )
    chunk_size: int | None = Field(
        default=None, ge=1, description="actor_critic: actions per forward pass, executed one after the other."
    )

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, values: Any) -> Any:
        """Fills in the default policy's keys that a recipe omits."""
        if isinstance(values, dict) and values.get("name", POLICIES.default) == POLICIES.default:
            return {**POLICIES.spec(POLICIES.default).recipe_keys, **values}
        return values

    def conflicts(self) -> Iterator[Conflict]:
        if self.name == AUTO:  # `rlinf.jobs.acting.chosen_policy` checks the keys against the policy that it chooses
            return
        default = POLICIES.default
        keys, has_keys = POLICIES.spec(default).recipe_keys, self.name == default
        if has_keys and self.options:
            yield Conflict(
                keys=("policy.options", "policy.name"),
                text=f"={self.options} is not used: policy.name={default} has {', '.join(keys)} as keys of "
                "policy; leave it out",
            )
        for key in keys:
            value = getattr(self, key)
            if has_keys and value is None:
                yield Conflict(keys=(f"policy.{key}",), text=f" is null; policy.name={default} needs it")
            elif not has_keys and value is not None:
                yield Conflict(
                    keys=(f"policy.{key}", "policy.name"),
                    text=f"={value} is not used: it belongs to policy.name={default}; leave it out, or give it as "
                    f"policy.options.{key}",
                )

    @property
    def spec(self) -> PolicySpec:
        """The spec of the policy; for auto, that of the policy without pictures."""
        return POLICIES.spec(POLICIES.default if self.name == AUTO else self.name)

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of the policy's constructor."""
        if self.name != POLICIES.default:
            return dict(self.options)
        return {key: getattr(self, key) for key in self.spec.recipe_keys}


class DemonstrationsConfig(Section):
    """Demonstrations that each batch of an off-policy algorithm has a share of, with their rewards."""

    HUB_USE = "folder"
    AT: ClassVar[str] = "demonstrations"
    """The key of the section, for messages."""

    source: str = Field(
        description="Source of the demonstrations: the environment's scripted experts, the folder of a LeRobot "
        "dataset, LIBERO's HDF5 files (one or a folder of them), or a ManiSkill trajectory (the .h5 file, with its "
        ".json beside it)."
    )
    path: DataPath | None = Field(
        default=None, description="The folder or file, or the name of a data set on the Hub; not used with experts."
    )
    rename: dict[str, str] = Field(
        default={}, description="Name in the files -> field of the environment, for names that differ."
    )
    num_episodes: int = Field(default=20, ge=1, description="Demonstrations to use, all of them successful episodes.")

    def conflicts(self) -> Iterator[Conflict]:
        at = self.AT
        if self.source == EXPERTS and self.path is not None:
            yield Conflict(
                keys=(f"{at}.path", f"{at}.source"),
                text=f"={self.path} is not used: {at}.source=experts records its demonstrations; leave it out",
            )
        if self.source != EXPERTS and self.path is None:
            yield Conflict(
                keys=(f"{at}.path", f"{at}.source"),
                text=f" is not given, and {at}.source={self.source} reads files; say where they are",
            )
        if self.source == EXPERTS and self.rename:
            yield Conflict(
                keys=(f"{at}.rename", f"{at}.source"),
                text=f"is not used: {at}.source=experts has the environment's own fields; leave it out",
            )

    def source_conflicts(self, env: EnvConfig) -> Iterator[Conflict]:
        """A source that this kind of environment does not have."""
        fitting = sources(env.spec)
        if self.source in fitting:
            return
        kinds = " or ".join(kinds_with(self.source))
        goes = f"goes with env.kind={kinds}, and this one is" if kinds else "is no source of demonstrations of env.kind"
        yield Conflict(
            keys=(f"{self.AT}.source", "env.kind"),
            text=f"={self.source} {goes} {env.kind}; use {' or '.join(fitting)}",
        )


class ImitationConfig(DemonstrationsConfig):
    """Supervised training on demonstrations before the first step, so that a new policy succeeds often enough to learn
    from rewards."""

    AT = "sft_warm_up"

    num_steps: int = Field(default=300, ge=1, description="Optimizer steps.")
    batch_size: int = Field(
        default=64, ge=1, description="Demonstrated action chunks per optimizer step; a multiple of actor.num_shards."
    )
    learning_rate: float = Field(
        default=1e-3, gt=0, description="Peak learning rate after a short warm-up; it decays to a tenth."
    )


class SuccessClassifierConfig(DemonstrationsConfig):
    """A classifier of pictures, trained before the first step, that gives the reward of training episodes in place of
    the environment: 1 after an action if it sees success, which ends the episode (unless env.ignore_terminations)."""

    AT = "success_classifier"

    num_episodes: int = Field(
        default=100,
        ge=4,
        description="Demonstrations to use, all of them successful episodes. Their last pictures show success, the "
        "others do not.",
    )
    num_failures: int = Field(
        default=100,
        ge=4,
        description="Episodes of random actions, half of which begin as a demonstration whose seed is known.",
    )
    cameras: str | None = Field(
        default=None, description="Names of the cameras that it sees, separated by commas; null: all."
    )
    threshold: float = Field(
        default=0.9,
        gt=0,
        lt=1,
        description="Probability above which a picture shows success; higher: fewer failures are taken for successes.",
    )
    num_steps: int = Field(default=300, ge=1, description="Optimizer steps.")
    batch_size: int = Field(
        default=64, ge=2, multiple_of=2, description="Pictures per optimizer step, half of which show success."
    )
    learning_rate: float = Field(default=1e-3, gt=0, description="Learning rate of AdamW.")


class PolicyActorConfig(TrainerConfig):
    """The optimizer (AdamW, which is Adam without weight decay) and how a batch is split."""

    lora: LoraConfig | None = Field(
        default=None,
        description="VLA policies (openvla, openvla_oft, pi0, pi05, smolvla): train low-rank updates of the backbone's "
        "linear layers, and all weights of the heads (docs/backends.md); null: the policy's options decide what is "
        "trained.",
    )
    value_learning_rate: float | None = Field(
        default=None,
        gt=0,
        description="Initial learning rate of the policy's value function, or of off-policy critics; null: "
        "learning_rate.",
    )
    max_grad_norm: float = Field(default=0.5, gt=0, description="Gradients with a larger norm are scaled down to it.")
    adam_epsilon: float = Field(
        default=1e-5,
        gt=0,
        description="Added to the denominator of AdamW's step, the root of the mean squared gradient. The default "
        "follows PPO for small networks; billions of weights need 1e-8, since a gradient of norm 1 over them has a "
        "root mean square near 1e-5.",
    )
    num_shards: int = Field(
        default=2,
        ge=1,
        description="Number of shards into which a batch is divided. Each has its own sum of gradients, so the numbers "
        "do not depend on how many ranks compute the shards. The number of ranks must divide it: 4 shards run on 1, 2 "
        "or 4 ranks. A resumed run keeps it (docs/checkpoints.md).",
    )
    micro_batch_size: int | None = Field(
        default=None,
        ge=1,
        description="Samples of a shard per forward and backward pass, to limit memory; null: the shard's share of a "
        "minibatch.",
    )


class EmbodiedConfig(JobConfig):
    """A robot learns a task in simulation."""

    job: Literal["embodied"] = Field(description="Name of the job.")
    env: EnvConfig = Field(description="The environments.")
    policy: PolicyConfig = Field(default=PolicyConfig(), description="The policy.")
    sft_warm_up: ImitationConfig | None = Field(
        default=None, description="Supervised training on demonstrations before the first step; null for none."
    )
    demonstrations: DemonstrationsConfig | None = Field(
        default=None,
        description="Demonstrations for algorithm.demonstration_fraction of each batch; null for none.",
    )
    success_classifier: SuccessClassifierConfig | None = Field(
        default=None,
        description="A classifier of pictures that gives the reward of training; null: the environment gives it.",
    )
    algorithm: RobotAlgorithm = Field(
        default=preset("ppo", samples="episodes"),
        description="The learning algorithm: ppo, grpo, ...; off-policy, from a replay buffer: sac, rlpd; from an "
        "expert who names its actions while the policy acts: dagger.",
    )
    actor: PolicyActorConfig = Field(default=PolicyActorConfig(), description="The optimizer and how a batch is split.")

    @property
    def roles(self) -> tuple[str, ...]:
        return ("env", "policy", "actor")

    @property
    def compares_episodes(self) -> bool:
        """Whether advantages compare whole episodes from one start, for want of a critic."""
        return isinstance(self.algorithm, Algorithm) and not self.algorithm.has_critic

    @property
    def segments_continue(self) -> bool:
        """Whether a training step continues the previous step's episodes: if steps are shorter than episodes may be,
        resets would only show their beginnings."""
        is_shorter = self.env.num_steps < self.env.max_episode_steps
        return not self.compares_episodes and self.env.episodes_per_step is None and is_shorter

    @property
    def begins_ahead(self) -> bool:
        """Whether environments without an episode of a step begin those of the next one. Simulators in the env worker's
        own process are used by one thread alone."""
        has_processes = self.env.num_processes > 0
        return self.algorithm.max_staleness > 0 and self.env.episodes_per_step is not None and has_processes

    def _film_conflicts(self) -> Iterator[Conflict]:
        videos, episodes = self.env.num_eval_videos, self.env.num_eval_episodes
        if videos > episodes:
            yield Conflict(
                keys=("env.num_eval_videos", "env.num_eval_episodes"),
                text=f"={videos} is more than env.num_eval_episodes={episodes}; film at most {episodes}",
            )

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        yield from self._film_conflicts()
        if not self.actor.trainer_spec.trains_policies:
            others = either(TRAINERS, lambda spec: spec.trains_policies)
            yield Conflict(
                keys=("actor.backend",), text=f"={self.actor.backend} holds language models alone; use {others}"
            )
        yield from not_multiple("env.num_envs", self.env.num_envs, "env.num_groups", self.env.num_groups)
        width = self.env.num_envs // self.env.num_groups
        if self.env.num_processes > width:
            yield Conflict(
                keys=("env.num_processes", "env.num_envs", "env.num_groups"),
                text=f"={self.env.num_processes} exceeds the {width} environments of a group; use 0 to {width}",
            )
        if self.env.hang_limit_s is not None and not self.env.num_processes:
            yield Conflict(
                keys=("env.hang_limit_s", "env.num_processes"),
                text=f"={self.env.hang_limit_s} is not used: only a process of its own can be replaced; use "
                "env.num_processes=1, or leave it out",
            )
        shards = ("actor.num_shards", self.actor.num_shards)
        if self.env.episodes_per_step is None:
            yield from not_multiple("env.num_groups", self.env.num_groups, *shards)
            if conflict := self.sample_conflict():
                yield conflict
        if isinstance(self.algorithm, OffPolicyAlgorithm):
            yield from self._off_policy_conflicts(self.algorithm)
        elif isinstance(self.algorithm, DaggerAlgorithm):
            yield from self._dagger_conflicts(self.algorithm)
        else:
            yield from self._on_policy_conflicts(self.algorithm)
        if self.sft_warm_up is not None:
            yield from not_multiple("sft_warm_up.batch_size", self.sft_warm_up.batch_size, *shards)
            yield from self.sft_warm_up.source_conflicts(self.env)
        if self.demonstrations is not None:
            yield from self.demonstrations.source_conflicts(self.env)
        if self.success_classifier is not None:
            yield from self.success_classifier.source_conflicts(self.env)
        last = self.env.eval_seed + self.env.num_eval_episodes
        if last > EVAL_SEED_LIMIT:
            yield Conflict(
                keys=("env.eval_seed", "env.num_eval_episodes"),
                text=f"={self.env.eval_seed} + env.num_eval_episodes={self.env.num_eval_episodes} exceeds 2**31, where "
                "the seeds of training begin; use a smaller seed",
            )
        yield from self._cut_conflicts(self.actor)
        yield from self._shard_conflicts(self.actor.num_shards)
        if self.actor.sequence_ranks > 1:
            yield Conflict(
                keys=("actor.backend_options.sequence_parallel", "policy.name"),
                text=f"={self.actor.sequence_ranks}: ranks share the rows of tokens of a language model, and a "
                "robot's policy has none; leave it out",
            )

    def num_samples(self, chunk_size: int = 1) -> int:
        """Samples of a training step: answers of the policy, each of `chunk_size` actions, in all environments."""
        return self.env.num_envs * self.env.num_steps // chunk_size

    def sample_conflict(self, chunk_size: int = 1) -> Conflict | None:
        """What is wrong with the numbers of samples of a step, for a policy with this chunk size."""
        if isinstance(self.algorithm, OffPolicyAlgorithm):
            return self._update_conflict(self.algorithm, chunk_size)
        if isinstance(self.algorithm, DaggerAlgorithm):
            return None
        return self._minibatch_conflict(self.algorithm.num_minibatches, chunk_size)

    def _minibatch_conflict(self, count: int, chunk_size: int) -> Conflict | None:
        """Each shard's samples are split into minibatches."""
        num_samples, shards = self.num_samples(chunk_size), self.actor.num_shards
        size = max(1, num_samples // shards)
        if num_samples % (count * shards) == 0:
            return None
        nearest = sorted((n for n in range(1, size + 1) if size % n == 0), key=lambda n: (abs(n - count), n))[:2]
        return Conflict(
            keys=("algorithm.num_minibatches", "env.num_steps", "env.num_envs", "actor.num_shards"),
            text=f"={count} does not cut the {self._made_of(chunk_size)} of a step, in actor.num_shards={shards} "
            f"shards, into equal minibatches; use {' or '.join(map(str, sorted(nearest)))}",
        )

    def _update_conflict(self, algorithm: OffPolicyAlgorithm, chunk_size: int) -> Conflict | None:
        """A step has whole updates, and at least one of the policy, whose version counts them."""
        updates = algorithm.update_ratio * self.num_samples(chunk_size)
        if updates == round(updates) and updates % algorithm.policy_delay == 0 and updates > 0:
            return None
        return Conflict(
            keys=("algorithm.update_ratio", "algorithm.policy_delay", "env.num_steps", "env.num_envs"),
            text=f"={algorithm.update_ratio:g} makes {updates:g} updates of the critics out of the "
            f"{self._made_of(chunk_size)} of a step; it must be a multiple of algorithm.policy_delay="
            f"{algorithm.policy_delay}, and at least that",
        )

    def _made_of(self, chunk_size: int) -> str:
        divided = f" / {chunk_size}" if chunk_size > 1 else ""
        return f"env.num_envs * env.num_steps{divided} = {self.num_samples(chunk_size)} samples"

    def _on_policy_conflicts(self, algorithm: Algorithm) -> Iterator[Conflict]:
        if self.demonstrations is not None:
            yield Conflict(
                keys=("demonstrations", "algorithm.name"),
                text=f" is not used: algorithm.name={algorithm.name} learns on-policy; sft_warm_up imitates "
                "demonstrations before the first step",
            )
        if self.env.episodes_per_step is not None:
            yield from self._episode_conflicts(algorithm, self.env.episodes_per_step)
        else:
            yield from self._unused_conflicts(algorithm)
            if self.compares_episodes:
                yield from self._group_conflicts(algorithm.advantage)

    def _unused_conflicts(self, algorithm: Algorithm) -> Iterator[Conflict]:
        """Settings that belong to whole episodes."""
        if algorithm.name in EPISODE_PRESETS:
            usual = preset(algorithm.name, samples="episodes").group_size
            if algorithm.group_size != usual:
                yield Conflict(
                    keys=("algorithm.group_size", "env.episodes_per_step", "env.num_envs", "env.num_groups"),
                    text=f"={algorithm.group_size} is not used: it belongs to env.episodes_per_step, and without it a "
                    "group has env.num_envs / env.num_groups episodes; leave it out",
                )
        if algorithm.dynamic_sampling:
            yield Conflict(
                keys=("algorithm.dynamic_sampling", "env.episodes_per_step"),
                text="=true is not used: it belongs to env.episodes_per_step, which lets further starts take the "
                "places of groups without a signal; set it, or leave this out",
            )

    def _episode_conflicts(self, algorithm: Algorithm, num_episodes: int) -> Iterator[Conflict]:
        """A step is whole episodes: groups from one start, equally many in each shard."""
        env, group_size, num_shards = self.env, algorithm.group_size, self.actor.num_shards
        keys, unit = ("env.episodes_per_step", "algorithm.group_size", "actor.num_shards"), group_size * num_shards
        if num_episodes % unit:
            nearest = sorted({max(1, num_episodes // unit) * unit, (num_episodes // unit + 1) * unit})
            yield Conflict(
                keys=keys,
                text=f"={num_episodes} is not a multiple of algorithm.group_size={group_size} times actor.num_shards="
                f"{num_shards}; use {' or '.join(map(str, nearest))}",
            )
        if env.num_steps != env.max_episode_steps:
            yield Conflict(
                keys=("env.num_steps", "env.episodes_per_step", "env.max_episode_steps"),
                text=f"={env.num_steps} would cut or continue episodes, and env.episodes_per_step={num_episodes} "
                f"trains on whole ones; use {env.max_episode_steps}, as env.max_episode_steps",
            )
        least, where = max(1, num_episodes // num_shards), "a shard"
        if algorithm.dynamic_sampling:
            least, where = group_size, "a group, all that dynamic_sampling may leave of a shard"
        if algorithm.num_minibatches > least:
            yield Conflict(
                keys=("algorithm.num_minibatches", *keys),
                text=f"={algorithm.num_minibatches} is more than the {least} episodes of {where}, which are one sample "
                f"each at least; use at most {least}",
            )

    def _off_policy_conflicts(self, algorithm: OffPolicyAlgorithm) -> Iterator[Conflict]:
        if self.env.episodes_per_step is not None:
            yield Conflict(
                keys=("env.episodes_per_step", "algorithm.name"),
                text=f"={self.env.episodes_per_step} is not used: algorithm.name={algorithm.name} learns from single "
                "transitions of env.num_steps actions; leave it out",
            )
        shards = ("actor.num_shards", self.actor.num_shards)
        yield from not_multiple("algorithm.batch_size", algorithm.batch_size, *shards)
        yield from not_multiple("algorithm.buffer_size", algorithm.buffer_size, *shards)
        if self.actor.trainer_spec.shards_state:
            yield Conflict(
                keys=("actor.backend", "algorithm.name"),
                text=f"={self.actor.backend} shards models over ranks, and algorithm.name={algorithm.name} trains "
                "small ones that each rank holds; use replicated",
            )
        if self.sft_warm_up is not None:
            yield Conflict(
                keys=("sft_warm_up", "algorithm.name"),
                text=f" is not used: algorithm.name={algorithm.name} does not imitate; give it as demonstrations, "
                "which a share of each batch is drawn from (algorithm.name=rlpd)",
            )
        yield from not_multiple("algorithm.demonstration_fraction", algorithm.num_demonstrated, *shards)
        if algorithm.num_demonstrated and self.demonstrations is None:
            yield Conflict(
                keys=("algorithm.demonstration_fraction", "demonstrations", "algorithm.name"),
                text=f"={algorithm.demonstration_fraction:g} needs demonstrations; give --demonstrations.source, or "
                "use algorithm.name=sac",
            )
        if self.demonstrations is not None and not algorithm.num_demonstrated:
            yield Conflict(
                keys=("demonstrations", "algorithm.demonstration_fraction"),
                text=f" is not used: algorithm.demonstration_fraction={algorithm.demonstration_fraction:g}; use "
                "algorithm.name=rlpd, or set it",
            )

    def _dagger_conflicts(self, algorithm: DaggerAlgorithm) -> Iterator[Conflict]:
        if self.env.episodes_per_step is not None:
            yield Conflict(
                keys=("env.episodes_per_step", "algorithm.name"),
                text=f"={self.env.episodes_per_step} is not used: algorithm.name=dagger asks the expert in segments of "
                "env.num_steps actions; leave it out",
            )
        for name in ("batch_size", "buffer_size"):
            size = getattr(algorithm, name)
            yield from not_multiple(f"algorithm.{name}", size, "actor.num_shards", self.actor.num_shards)
        if self.demonstrations is not None:
            yield Conflict(
                keys=("demonstrations", "algorithm.name"),
                text=" is not used: algorithm.name=dagger imitates, and needs no rewards; give it as sft_warm_up, "
                "whose demonstrations stay among what is imitated",
            )
        if self.sft_warm_up is None and not algorithm.expert_share and not self.policy.options.get("folder"):
            yield Conflict(
                keys=("sft_warm_up", "algorithm.expert_share", "policy.options", "algorithm.name"),
                text=" is not given, so that an untrained policy would choose the first states that the expert is "
                "asked about; give demonstrations (--sft_warm_up.source), let the expert act first "
                "(--algorithm.expert_share 1), or begin from a checkpoint (policy.options.folder)",
            )

    def _group_conflicts(self, advantage: str) -> Iterator[Conflict]:
        """Without a critic, whole episodes from one start are compared within a group."""
        num_envs, num_groups = self.env.num_envs, self.env.num_groups
        if num_envs < 2 * num_groups:
            yield Conflict(
                keys=("env.num_envs", "env.num_groups", "algorithm.advantage", "algorithm.name"),
                text=f"={num_envs} leaves {num_envs // num_groups} environment in each of env.num_groups={num_groups}, "
                f"and algorithm.advantage={advantage} compares those of a group; use at least "
                f"{2 * num_groups}, better {8 * num_groups}",
            )
        num_steps, limit = self.env.num_steps, self.env.max_episode_steps
        if num_steps != limit:
            yield Conflict(
                keys=("env.num_steps", "env.max_episode_steps", "algorithm.advantage", "algorithm.name"),
                text=f"={num_steps} differs from env.max_episode_steps={limit}, and algorithm.advantage="
                f"{advantage} compares whole episodes; use {limit}",
            )

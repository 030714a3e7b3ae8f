"""Config of the reasoning job: a language model is trained from rewards alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from rlinf.config.agents import AgentConfig, agent_by_name, trainer_of
from rlinf.config.algorithm import CompletionsAlgorithm
from rlinf.config.base import Conflict, ModelPath, Section, either, neighbours, not_multiple
from rlinf.config.common import (
    ENGINE,
    KEPT_IN_TRAINING,
    MIN_P,
    NUM_SHARDS,
    STOP,
    TOP_K,
    TOP_P,
    EngineConfig,
    JobConfig,
    NumShards,
    OptimizerConfig,
    RunConfig,
    ShardedTrainerConfig,
    Strings,
)
from rlinf.config.lora import LoraConfig
from rlinf.config.rewards import MAX_JUDGE_FAILURES, RewardConfig
from rlinf.config.tasks import DrawnTaskConfig, FilesTask, TaskConfig
from rlinf_algos import preset
from rlinf_workers.engines import EngineSpec
from rlinf_workers.plugins import ENGINES, TRAINERS

AUTO_ENGINE = "auto"
ENGINE_CHOICE = f"rollout.engine={AUTO_ENGINE} is "
"""How the note about the chosen engine begins."""


@dataclass(frozen=True, kw_only=True)
class AnyEngineSpec(EngineSpec):
    """The spec of `rollout.engine: auto`: it refuses nothing, because each candidate is validated with the config
    before one is chosen (jobs/reasoning/engine_choice.py)."""

    def devices_per_rank(self, tensor_parallel_size: int) -> int:
        return tensor_parallel_size

    def new_weights_problem(self, options: Mapping[str, Any], on_new_weights: str, *, has_stop: bool) -> str | None:
        return None

    def late_groups_problem(self, options: Mapping[str, Any]) -> str | None:
        return None

    def episodes_problem(self, options: Mapping[str, Any]) -> str | None:
        return None

    def experts_problem(self, options: Mapping[str, Any], *, has_stop: bool) -> str | None:
        return None

    def kept_problem(self, options: Mapping[str, Any]) -> str | None:
        return None

    def options_beside(self, options: Mapping[str, Any], num_engines: int, *, on_gpu: bool) -> Mapping[str, Any] | None:
        return options


ANY_ENGINE = AnyEngineSpec(
    name=AUTO_ENGINE, implementation=ENGINES.spec(ENGINES.default).implementation, quantizations=("fp8",)
)


class VisionTowerConfig(Section):
    """The vision tower of a small new vision-language model."""

    patch_size: int = Field(
        default=8, ge=1, description="Pixels of the side of a patch; 2 x 2 patches are one token of the language model."
    )
    hidden_size: int = Field(default=64, ge=4, description="Width of the tower; a multiple of 4 num_heads.")
    intermediate_size: int = Field(default=128, ge=1, description="Width of its MLP.")
    num_layers: int = Field(default=2, ge=1, description="Its layers.")
    num_heads: int = Field(default=4, ge=1, description="Its attention heads.")

    @property
    def token_pixels(self) -> int:
        """Pixels of the side of what becomes a token."""
        return 2 * self.patch_size

    def num_tokens(self, width: int, height: int) -> int:
        """Tokens of a picture, with those that begin and end it."""
        side = self.token_pixels
        return max(1, round(width / side)) * max(1, round(height / side)) + 2


class ArchitectureConfig(Section):
    """A small new model, with a tokenizer of single characters."""

    family: Literal["qwen2", "qwen2_5_vl"] = Field(
        default="qwen2", description="Architecture, by its Hugging Face name; qwen2_5_vl reads pictures."
    )
    hidden_size: int = Field(default=96, ge=1, description="Width of the residual stream; a multiple of num_heads.")
    intermediate_size: int = Field(default=256, ge=1, description="Width of the MLP.")
    num_layers: int = Field(default=3, ge=1, description="Transformer layers.")
    num_heads: int = Field(default=4, ge=1, description="Attention heads; a multiple of num_kv_heads.")
    num_kv_heads: int = Field(default=2, ge=1, description="Key-value heads.")
    max_positions: int = Field(
        default=64, ge=2, description="Longest sequence in tokens, prompt and completion together."
    )
    initializer_range: float = Field(
        default=0.02,
        gt=0,
        le=1,
        description="Standard deviation of the initial weights. The default is for widths of thousands; near a width "
        "of 100 attention then begins almost uniform, and 0.1, or 1 / sqrt(width), learns from pictures much sooner.",
    )
    vision: VisionTowerConfig | None = Field(
        default=None, description="The vision tower of family qwen2_5_vl; null: one of the default sizes."
    )

    @property
    def vision_tower(self) -> VisionTowerConfig | None:
        """None for a model of text alone."""
        return (self.vision or VisionTowerConfig()) if self.family == "qwen2_5_vl" else None


class ModelConfig(Section):
    """The model to train: either a folder, or the architecture of a new model."""

    path: ModelPath | None = Field(
        default=None,
        description="Model folder (config.json, weights, tokenizer), or the name of a model on the Hugging Face Hub, "
        "ORG/NAME[@REVISION].",
    )
    architecture: ArchitectureConfig | None = Field(
        default=None, description="Shape of a new model with random weights."
    )
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="Type of weights and computation.")

    def conflicts(self) -> Iterator[Conflict]:
        if self.path is None and self.architecture is None:
            yield Conflict(
                keys=("model.path", "model.architecture"),
                text=" is not set; give --model.path FOLDER with a Hugging Face model, or the shape of a new one "
                "under model.architecture",
            )
        if self.path is not None and self.architecture is not None:
            yield Conflict(
                keys=("model.path", "model.architecture"),
                text=f"={self.path} and model.architecture are both set; set one of them to null "
                "(--model.architecture null)",
            )


class SftWarmUpConfig(Section):
    """Supervised training before the first step, so that a new model is right often enough to learn from rewards."""

    target_accuracy: float = Field(
        default=0.4,
        gt=0,
        le=1,
        description="Stop once the accuracy on held-out problems reaches this value; the mean reward, if the reward "
        "does not check answers.",
    )
    max_steps: int = Field(default=400, ge=1, description="Maximum number of optimizer steps.")
    batch_size: int = Field(
        default=256, ge=1, description="Problems per optimizer step; a multiple of actor.num_shards."
    )
    learning_rate: float = Field(default=3e-3, gt=0, description="Peak learning rate of AdamW, after a short warm-up.")
    check_every: int = Field(default=20, ge=1, description="Optimizer steps between two checks of the accuracy.")
    reuse: bool = Field(
        default=True,
        description="Reuse the SFT warm-up of an earlier run if everything that determines it is identical; false: "
        "repeat it.",
    )


class RolloutConfig(EngineConfig):
    """The completions of each step and the engine that generates them."""

    AT = "rollout."

    engine: str = Field(
        default=EngineConfig.model_fields["engine"].default,
        description=f"{ENGINE} auto: the fastest of those that are installed and accept this recipe's settings, by "
        "derived times or a short probe (docs/how-do-i.md).",
    )
    num_prompts: int = Field(
        default=64, ge=1, description="Prompts per step; each gets algorithm.group_size completions."
    )
    max_new_tokens: int = Field(ge=1, description="Maximum completion length in tokens.")
    temperature: float = Field(default=1.0, gt=0, description="Sampling temperature in training.")
    top_p: float = Field(default=1.0, gt=0, le=1, description=TOP_P + KEPT_IN_TRAINING)
    top_k: int = Field(default=0, ge=0, description=TOP_K + KEPT_IN_TRAINING)
    min_p: float = Field(default=0.0, ge=0, le=1, description=MIN_P + KEPT_IN_TRAINING)
    stop: Strings = Field(default=(), description=STOP)
    max_prompt_tokens: int = Field(
        ge=1, description="Maximum prompt length in tokens; task.long_prompts decides how longer ones are treated."
    )
    dtype: Literal["float32", "bfloat16"] | None = Field(
        default=None, description="Type of the weights that generate; the weight sync casts them. null: model.dtype."
    )
    quantization: Literal["fp8"] | None = Field(
        default=None,
        description="fp8: the linear layers that generate have their weights in FP8 (e4m3) with a scale for each block "
        "of 128 x 128; the weight sync quantizes them, and rollout.dtype is the type of everything else "
        "(docs/quantization.md). algorithm.correction is then truncated by default. null: not quantized.",
    )
    sampler: Literal["in_order", "as_finished"] = Field(
        default="in_order",
        description="Which groups a step trains on. in_order: those of its own prompts. as_finished: those that are "
        "whole first; the others go on in the next step with its weights, at most algorithm.max_staleness - 1 steps, "
        "so that no step waits for its longest completions. Needs max_staleness 2 or more (docs/staleness.md).",
    )
    on_new_weights: Literal["finish", "keep", "recompute"] = Field(
        default="finish",
        description="How running completions go on when new weights arrive. finish: they end with the earlier weights "
        "first, and weights arrive between two steps; keep: their KV cache stays as the earlier weights computed it, "
        "further tokens are sampled with the new ones; recompute: the new weights compute their KV cache again. keep "
        "and recompute need algorithm.max_staleness 1 or more, and are repeatable with run.record alone "
        "(docs/staleness.md).",
    )
    agent: Annotated[AgentConfig | None, BeforeValidator(agent_by_name)] = Field(
        default=None,
        description="Episodes of many turns, with tools or a custom harness; null: one completion answers a prompt.",
    )
    stop_on_mismatch: bool = Field(
        default=False,
        description="Stop the run if the first step's log-prob mismatch between trainer and engine is larger than "
        "rounding explains (docs/trust.md); false: print a note and go on.",
    )

    @property
    def engine_spec(self) -> EngineSpec:
        return ANY_ENGINE if self.engine == AUTO_ENGINE else super().engine_spec

    @property
    def truncated_by(self) -> str | None:
        """The first of top_p, top_k and min_p that excludes tokens from training samples; None: all can be drawn."""
        limits = {"top_p": self.top_p < 1, "top_k": self.top_k > 0, "min_p": self.min_p > 0}
        return next((name for name, excludes in limits.items() if excludes), None)

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        if self.quantization is not None and self.quantization not in self.engine_spec.quantizations:
            yield Conflict(
                keys=("rollout.quantization", "rollout.engine"),
                text=f"={self.quantization}: rollout.engine={self.engine} does not serve quantized weights; leave it "
                f"out, or use {either(ENGINES, lambda spec: bool(spec.quantizations))}",
            )
        how = self.on_new_weights
        problem = self.engine_spec.new_weights_problem(self.engine_options, how, has_stop=bool(self.stop))
        if problem is not None:
            yield Conflict(
                keys=("rollout.on_new_weights", "rollout.engine"),
                text=f"={how} is not possible with rollout.engine={self.engine}: {problem}",
            )
        yield from self.length_conflicts(self.max_sequence_tokens, self.max_sequence_key)
        if self.agent is not None:
            yield from self._agent_conflicts(self.agent)

    @property
    def max_sequence_tokens(self) -> int:
        """Tokens of the longest sequence: a prompt with its completion, or a conversation."""
        return self.max_prompt_tokens + self.max_new_tokens if self.agent is None else self.agent.max_context_tokens

    @property
    def max_sequence_key(self) -> str:
        """The keys that set it, for messages."""
        single = "rollout.max_prompt_tokens + rollout.max_new_tokens"
        return single if self.agent is None else "rollout.agent.max_context_tokens"

    @property
    def max_completion_tokens(self) -> int:
        """Tokens after the prompt: of a completion, or of the rest of a conversation."""
        return self.max_sequence_tokens - self.max_prompt_tokens

    def num_trained_agents(self, policy: str | None) -> int:
        """Agents by name that a policy learns from, None for that of model.path; 0: there is one, without a name."""
        return 0 if self.agent is None else len(self.agent.trained_agents(policy))

    @property
    def partner_paths(self) -> dict[str, Path]:
        """Agent -> the model of a partner."""
        return {} if self.agent is None else self.agent.partner_paths

    @property
    def further_policies(self) -> dict[str, Path | None]:
        """As `AgentConfig.further_policies`."""
        return {} if self.agent is None else self.agent.further_policies

    @property
    def agent_models(self) -> dict[str, Path]:
        """As `AgentConfig.models`."""
        return {} if self.agent is None else self.agent.models

    def options_beside_others(self, *, on_gpu: bool) -> Mapping[str, Any] | None:
        """`engine_options` of each engine of a rank; None: it cannot have several."""
        return self.engine_options if self.agent is None else self.agent.options_of_engines(self, on_gpu=on_gpu)

    def _agent_conflicts(self, agent: AgentConfig) -> Iterator[Conflict]:
        """Episodes need room for a prompt and a turn, and an engine that fits."""
        needed = self.max_prompt_tokens + self.max_new_tokens
        if agent.max_context_tokens < needed:
            yield Conflict(
                keys=("rollout.agent.max_context_tokens", "rollout.max_prompt_tokens", "rollout.max_new_tokens"),
                text=f"={agent.max_context_tokens} is less than rollout.max_prompt_tokens + rollout.max_new_tokens = "
                f"{needed}, so that not even a first turn fits; use more",
            )
        yield from agent.engine_conflicts(self)
        for key, chosen in agent.keys_of_engines("rollout."):
            yield from self._conflicts_of_steps(key, chosen)

    def _conflicts_of_steps(self, key: str, chosen: str) -> Iterator[Conflict]:
        """Turns of a further engine end with their step."""
        for other, value in (("sampler", "in_order"), ("on_new_weights", "finish")):
            if getattr(self, other) != value:
                yield Conflict(
                    keys=(f"rollout.{other}", key),
                    text=f"={getattr(self, other)}: turns of a partner or a further policy ({key}={chosen}) end with "
                    f"their step; use {value}",
                )


class EvaluationConfig(Section):
    """Sampling settings for held-out problems, every run.evaluate_every steps."""

    num_samples: int = Field(default=1, ge=1, description="Completions of each problem (k of avg@k).")
    temperature: float = Field(default=0.0, ge=0, description="Sampling temperature; 0: greedy decoding.")
    top_p: float = Field(default=1.0, gt=0, le=1, description=TOP_P)
    top_k: int = Field(default=0, ge=0, description=TOP_K)
    min_p: float = Field(default=0.0, ge=0, le=1, description=MIN_P)
    stop: Strings | None = Field(default=None, description=STOP + " null: rollout.stop.")

    def conflicts(self) -> Iterator[Conflict]:
        if self.num_samples > 1 and self.temperature == 0:
            yield Conflict(
                keys=("evaluation.num_samples", "evaluation.temperature"),
                text=f"={self.num_samples} completions of evaluation.temperature=0 are all the same; "
                "use a temperature above 0, for example 0.6, or 1 completion",
            )
        for name, value, all_tokens in (("top_p", self.top_p, 1), ("top_k", self.top_k, 0), ("min_p", self.min_p, 0)):
            if value != all_tokens and self.temperature == 0:
                yield Conflict(
                    keys=(f"evaluation.{name}", "evaluation.temperature"),
                    text=f"={value:g} is not used: evaluation.temperature=0 takes the likeliest token; use a "
                    "temperature above 0, or leave it out",
                )


class ReferenceConfig(Section):
    """The reference model of algorithm.kl."""

    path: ModelPath | None = Field(
        default=None,
        description="Folder, or name on the Hub, of a model with the actor's tokenizer: a teacher. null: the actor's "
        "model before the first step.",
    )
    sync_every: int | None = Field(
        default=None,
        ge=1,
        description="Update the reference with a share of the policy every this many training steps (TR-DPO, "
        "arXiv:2404.09656); null: never.",
    )
    sync_weight: float = Field(
        default=0.6,
        gt=0,
        le=1,
        description="The policy's share in such an update; 1: replace the reference by the policy.",
    )


class ActorConfig(ShardedTrainerConfig):
    """The optimizer (AdamW) and how a batch is split."""

    lora: LoraConfig | None = Field(
        default=None,
        description="Train only low-rank updates of model.path (docs/backends.md); null: the whole model.",
    )

    micro_batch_groups: int = Field(
        default=8,
        ge=1,
        description="Groups per forward and backward pass, padded to one length; decides the peak memory. Ignored if "
        "actor.max_tokens_per_micro_batch is set.",
    )
    max_tokens_per_micro_batch: Annotated[int, Field(ge=1)] | Literal["auto"] | None = Field(
        default="auto",
        description="Tokens per forward and backward pass, packed without padding, with each prompt once for all its "
        "completions (docs/batches.md). At least rollout.max_prompt_tokens + rollout.max_new_tokens. null: padded "
        "passes of actor.micro_batch_groups. auto: on GPUs as many tokens as their memory allows, at most 32,768; "
        "null on CPU slots. A run's config.yaml has the number.",
    )
    router_replay: bool = Field(
        default=False,
        description="Train a mixture of experts with the experts that the engine chose for each token, so that both "
        "sides compute the same model even where a router is near a tie (arXiv:2510.11370, docs/trust.md). Needs "
        "actor.max_tokens_per_micro_batch and an engine that records them.",
    )
    freeze_vision_tower: bool = Field(
        default=False,
        description="Of a vision-language model, train the decoder alone, not the vision tower and what projects its "
        "features (docs/vision-language.md).",
    )
    balance_shards: bool = Field(
        default=False,
        description="Read all groups of a step before the first pass and give every shard about the same number of "
        "tokens; needs actor.max_tokens_per_micro_batch. Always on for algorithms that read all groups first anyway.",
    )
    group_order: Literal["index", "arrival"] = Field(
        default="index",
        description="index: train on groups in the order of their prompts, so that sums are bitwise identical under "
        "every plan. arrival: in order of completion, so that training starts earlier. Without effect if all groups "
        "are read first anyway.",
    )
    num_shards: NumShards = Field(default=2, description=NUM_SHARDS)

    @property
    def token_budget(self) -> int | None:
        """Tokens of a packed micro-batch; None: micro-batches are padded, as with `auto` until the devices are known
        (jobs.reasoning.checks)."""
        return None if self.max_tokens_per_micro_batch == "auto" else self.max_tokens_per_micro_batch


class CriticConfig(OptimizerConfig):
    """The critic of algorithms that have one: a copy of the actor's architecture with one value per token."""

    learning_rate: float = Field(default=1e-3, gt=0, description="Learning rate at the first step.")


class ReasoningRunConfig(RunConfig):
    """Length of the run, evaluations, checkpoints, logs and failures, with the judge failures that a run tolerates."""

    max_judge_failures: float = Field(default=0.5, ge=0, le=1, description=MAX_JUDGE_FAILURES)


class ReasoningConfig(JobConfig):
    """A language model is trained from rewards alone."""

    job: Literal["reasoning"] = Field(description="Name of the job.")
    task: TaskConfig = Field(description="Source of problems and answers.")
    model: ModelConfig = Field(description="The model to train.")
    sft_warm_up: SftWarmUpConfig | None = Field(
        default=None, description="Supervised training before the first step; null for none."
    )
    rollout: RolloutConfig = Field(description="The completions of each step and the engine that generates them.")
    algorithm: CompletionsAlgorithm = Field(default=preset("grpo"), description="The learning algorithm.")
    reward: RewardConfig = Field(description="How a completion is scored.")
    evaluation: EvaluationConfig = Field(
        default=EvaluationConfig(), description="Sampling settings for held-out problems during training."
    )
    actor: ActorConfig = Field(default=ActorConfig(), description="The optimizer and how a batch is split.")
    reference: ReferenceConfig = Field(
        default=ReferenceConfig(), description="The reference model of algorithm.kl, if the algorithm has a KL term."
    )
    critic: CriticConfig = Field(
        default=CriticConfig(), description="The optimizer of the critic, if the algorithm has one."
    )
    run: ReasoningRunConfig = Field(description="Length of the run, evaluations, checkpoints, logs and failures.")

    @property
    def roles(self) -> tuple[str, ...]:
        return ("rollout", "reward", "actor", *(("reference",) if self.has_reference_worker else ()))

    @property
    def policies(self) -> dict[str | None, Path | None]:
        """Policy that is trained, None for that of model.path -> the model that it begins with, where it is another
        than that of model.path or model.architecture."""
        return {None: None, **self.rollout.further_policies}

    @property
    def trainers(self) -> dict[str, str | None]:
        """Worker group that trains -> its policy, as in `policies`."""
        return {"actor" if policy is None else trainer_of(policy): policy for policy in self.policies}

    @property
    def training_groups(self) -> tuple[str, ...]:
        return tuple(self.trainers)

    @property
    def group_venvs(self) -> dict[str, str]:
        """The actor's is that of all trainers."""
        actor = self.venvs.get("actor")
        return self.venvs if actor is None else {**self.venvs, **dict.fromkeys(self.trainers, actor)}

    @property
    def replica_sizes(self) -> dict[str, int]:
        """Includes the actors' replica size that the backend's options determine."""
        size = self.actor.ranks_per_replica
        return super().replica_sizes | (dict.fromkeys(self.trainers, size) if size is not None and size > 1 else {})

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        yield from self.backend_conflicts(self.actor, self.model.dtype)
        yield from self._model_conflicts()
        yield from self._task_conflicts()
        yield from self._batch_conflicts()
        yield from self._critic_conflicts()
        yield from self._lora_conflicts()
        yield from self._algorithm_conflicts()
        yield from self._further_policy_conflicts()
        yield from self._cut_conflicts(self.actor)
        if self.actor.num_shards != "auto":
            yield from self._shard_conflicts(self.actor.num_shards)

    def placement_conflicts(self, num_devices: int) -> Iterator[Conflict]:
        yield from super().placement_conflicts(num_devices)
        span, chosen = self.rollout.tensor_parallel_size, self.plan.devices.get("rollout")
        available = num_devices if chosen is None else len(chosen)
        if available < span or ((chosen or self.mode == "collocated") and available % span):
            key = "cluster.num_devices" if chosen is None else "plan.devices.rollout"
            yield Conflict(
                keys=("rollout.tensor_parallel_size", key),
                text=f"={span}: {key} gives the rollout {available} device{'s' if available > 1 else ''}, and an "
                f"engine has {span}; use {neighbours(available, span)} devices, or another size",
            )

    @property
    def served_dtype(self) -> str:
        """Dtype of the weights that generate."""
        return self.rollout.dtype or self.model.dtype

    @property
    def syncs_adapters(self) -> bool:
        """Whether weight syncs move only adapters, which the engine serves beside its base. The base is not
        quantized then: it would be frozen in FP8."""
        return (
            self.actor.lora is not None
            and self.rollout.engine_spec.syncs_adapters
            and self.rollout.quantization is None
        )

    @property
    def knows_reference(self) -> bool:
        """Whether the actor computes the reference's log-probabilities: with LoRA, the reference is the actor's model
        without its adapter."""
        return bool(self.algorithm.kl_coef) and self.actor.lora is not None and self.reference.path is None

    @property
    def has_reference_worker(self) -> bool:
        """Whether a separate worker group computes the reference's log-probabilities."""
        return bool(self.algorithm.kl_coef) and not self.knows_reference

    @property
    def gathers_whole_step(self) -> bool:
        """Whether the actor reads all groups of a step before it computes."""
        return self.algorithm.gathers_whole_step or self.knows_reference

    def _lora_conflicts(self) -> Iterator[Conflict]:
        """An adapter needs a base model that has a folder and does not change."""
        if self.actor.lora is None:
            return
        if self.sft_warm_up is not None:
            yield Conflict(
                keys=("sft_warm_up", "actor.lora"),
                text=" cannot go before actor.lora: it would train the adapter, and the reference is the model without "
                "it; train without actor.lora first and give the model of its checkpoint with --model.path, "
                "--sft_warm_up null",
            )
        if self.model.path is None:
            yield Conflict(
                keys=("model.path", "actor.lora"),
                text=" is not set; actor.lora changes a model that has been trained, so give its folder with "
                "--model.path FOLDER --model.architecture null",
            )

    def _algorithm_conflicts(self) -> Iterator[Conflict]:
        """Settings of other sections that contradict the algorithm."""
        algorithm, teacher = self.algorithm, self.reference.path
        if teacher is not None and not algorithm.kl_coef:
            yield Conflict(
                keys=("reference.path", "algorithm.kl_coef"),
                text=f"={teacher} is not used: algorithm.kl_coef is 0, so there is no reference model",
            )
        yield from self._reference_conflicts()
        if teacher is None and algorithm.reward_coef == 0:
            yield Conflict(
                keys=("reference.path", "algorithm.reward_coef"),
                text=" is not set, and algorithm.reward_coef=0 learns from the KL to the reference alone; give a "
                "teacher with --reference.path FOLDER",
            )
        agent = self.rollout.agent
        if agent is not None and agent.environment is not None and self.reward.kind != "episode":
            yield Conflict(
                keys=("rollout.agent.environment", "reward.kind"),
                text=f" gives the rewards, and reward.kind={self.reward.kind} has nothing to score; use "
                "reward.kind=episode",
            )
        if algorithm.reads_parts and self.reward.kind != "weighted":
            yield Conflict(
                keys=("algorithm.advantage", "reward.kind"),
                text=f"={algorithm.advantage} needs the components of a reward, but reward.kind={self.reward.kind} has "
                "none; use reward.kind=weighted with its terms",
            )
        spec, backend = self.actor.trainer_spec, f"actor.backend={self.actor.backend}"
        if algorithm.reads_logit_norms and not spec.exposes_logits:
            yield Conflict(
                keys=("algorithm.advantage", "actor.backend"),
                text=f"={algorithm.advantage} reads every probability of a token's distribution, which {backend} does "
                f"not give; use {either(TRAINERS, lambda spec: spec.exposes_logits)}",
            )
        if algorithm.router_aux_coef and not spec.exposes_routers:
            yield Conflict(
                keys=("algorithm.router_aux_coef", "actor.backend"),
                text=f"={algorithm.router_aux_coef:g}: {backend} does not give the actor its routers' logits; use "
                f"{either(TRAINERS, lambda spec: spec.exposes_routers)}",
            )
        yield from self._router_replay_conflicts()
        yield from self._truncated_sampling_conflicts()
        yield from self._sampler_conflicts()
        yield from self._new_weights_conflicts()
        num_samples = self.rollout.num_prompts * algorithm.group_size
        if algorithm.kl_horizon is not None and algorithm.kl_horizon < num_samples:
            yield Conflict(
                keys=("algorithm.kl_horizon", "rollout.num_prompts", "algorithm.group_size"),
                text=f"={algorithm.kl_horizon} is less than the {num_samples} completions of a step; use at least "
                f"{num_samples}",
            )

    def _router_replay_conflicts(self) -> Iterator[Conflict]:
        """The engine records the experts of whole completions, and the actor's packed passes use them."""
        if not self.actor.router_replay:
            return
        rollout, spec = self.rollout, self.actor.trainer_spec
        if not spec.replays_routers:
            yield Conflict(
                keys=("actor.router_replay", "actor.backend"),
                text=f"=true: actor.backend={self.actor.backend} does not let the actor choose experts; use "
                f"{either(TRAINERS, lambda spec: spec.replays_routers)}",
            )
        elif self.actor.token_budget is None:
            yield Conflict(
                keys=("actor.router_replay", "actor.max_tokens_per_micro_batch"),
                text="=true needs packed micro-batches; set actor.max_tokens_per_micro_batch, for example to "
                f"{4 * rollout.max_sequence_tokens}",
            )
        if rollout.agent is not None:
            yield Conflict(
                keys=("actor.router_replay", "rollout.agent"),
                text="=true: the experts of episodes with several turns are not recorded; leave one of them out",
            )
        elif (
            problem := rollout.engine_spec.experts_problem(rollout.engine_options, has_stop=bool(rollout.stop))
        ) is not None:
            yield Conflict(
                keys=("actor.router_replay", "rollout.engine"),
                text=f"=true is not possible with rollout.engine={rollout.engine}: {problem}",
            )
        for key, required in (("sampler", "in_order"), ("on_new_weights", "finish")):
            if (value := getattr(rollout, key)) != required:
                yield Conflict(
                    keys=("actor.router_replay", f"rollout.{key}"),
                    text=f"=true: with rollout.{key}={value} the completions of a group may have several caches of its "
                    f"prompt, and the experts of one are recorded; use {required}",
                )

    def _truncated_sampling_conflicts(self) -> Iterator[Conflict]:
        """With top_p, top_k or min_p the engine says which tokens it drew from, and the actor's packed passes compute
        log-probabilities among these; over all tokens, gradients of a small policy were off by 4 % with top_p 0.95 and
        by 22 % with 0.7."""
        rollout, actor = self.rollout, self.actor
        if (name := rollout.truncated_by) is None:
            return
        at = f"rollout.{name}"
        text = f"={getattr(rollout, name):g}: training needs the tokens that each was drawn from"
        instead = f"leave {at} out, and use rollout.temperature for less noise (evaluation.{name} may be set)"
        if not actor.trainer_spec.exposes_logits:
            yield Conflict(
                keys=(at, "actor.backend"),
                text=f"{text}, and actor.backend={actor.backend} computes log-probabilities over all tokens; use "
                f"{either(TRAINERS, lambda spec: spec.exposes_logits)}, or {instead}",
            )
        elif actor.token_budget is None:
            yield Conflict(
                keys=(at, "actor.max_tokens_per_micro_batch"),
                text=f"{text}, which packed micro-batches carry; set actor.max_tokens_per_micro_batch, for example to "
                f"{4 * rollout.max_sequence_tokens}, or {instead}",
            )
        if rollout.agent is not None:
            yield Conflict(
                keys=(at, "rollout.agent"),
                text=f"{text}, which episodes with several turns do not record; {instead}",
            )
        elif (problem := rollout.engine_spec.kept_problem(rollout.engine_options)) is not None:
            yield Conflict(
                keys=(at, "rollout.engine"),
                text=f"{text}, and with rollout.engine={rollout.engine} {problem}; {instead}",
            )
        if self.algorithm.reads_logit_norms:
            yield Conflict(
                keys=(at, "algorithm.advantage"),
                text=f"{text}, and algorithm.advantage={self.algorithm.advantage} weighs all tokens; {instead}",
            )

    def _sampler_conflicts(self) -> Iterator[Conflict]:
        """Groups that outlive a step need steps of staleness and an engine that suspends completions."""
        rollout = self.rollout
        if rollout.sampler == "in_order":
            return
        if self.algorithm.max_staleness < 2:
            yield Conflict(
                keys=("rollout.sampler", "algorithm.max_staleness"),
                text=f"=as_finished: with algorithm.max_staleness={self.algorithm.max_staleness} no group may be late, "
                "as one step of it is generation ahead of training; use 2 or more",
            )
        if (problem := rollout.engine_spec.late_groups_problem(rollout.engine_options)) is not None:
            yield Conflict(
                keys=("rollout.sampler", "rollout.engine"),
                text=f"=as_finished is not possible with rollout.engine={rollout.engine}: {problem}",
            )
        if self.plan.num_ranks_per_replica.get("rollout", 1) > 1:
            yield Conflict(
                keys=("rollout.sampler", "plan.num_ranks_per_replica.rollout"),
                text="=as_finished is for replicas of one rank",
            )
        if self.num_late_groups == 0:
            yield Conflict(
                keys=("rollout.sampler", "rollout.num_prompts"),
                text=f"=as_finished: with rollout.num_prompts={rollout.num_prompts} no group would be late; use more",
            )

    def _new_weights_conflicts(self) -> Iterator[Conflict]:
        """Weights arrive while completions run where steps overlap; each rank takes them when it likes."""
        how = self.rollout.on_new_weights
        if how == "finish":
            return
        if not self.algorithm.max_staleness:
            yield Conflict(
                keys=("rollout.on_new_weights", "algorithm.max_staleness"),
                text=f"={how}: with algorithm.max_staleness=0 no weights arrive while completions run; use finish, or "
                "max_staleness 1 or more",
            )
        if self.plan.num_ranks_per_replica.get("rollout", 1) > 1:
            yield Conflict(
                keys=("rollout.on_new_weights", "plan.num_ranks_per_replica.rollout"),
                text=f"={how} is for replicas of one rank",
            )

    @property
    def model_paths(self) -> dict[str, Path | None]:
        """Key -> the model that it names: the policy's, the reference's, and those of agents."""
        agents = {} if self.rollout.agent is None else self.rollout.agent.agents
        of_agents = {f"rollout.agent.agents.{name}.path": one.path for name, one in agents.items() if one.path}
        return {"model.path": self.model.path, "reference.path": self.reference.path, **of_agents}

    @property
    def chat_options(self) -> dict[str, bool | int | float | str]:
        """Arguments of the chat template; empty for generated tasks."""
        return self.task.chat_options if isinstance(self.task, FilesTask) else {}

    @property
    def takes_weights(self) -> bool:
        """Whether running completions go on with new weights."""
        return self.rollout.on_new_weights != "finish"

    @property
    def has_prompts_by_rank(self) -> bool:
        """Whether each rank of the rollout has its own prompts, all at once, so that a replay can repeat what it does
        with them."""
        return self.max_lateness > 0 or self.takes_weights

    @property
    def routes_turns(self) -> bool:
        """Whether a router gives turns of episodes to the engines; else each rank runs its own episodes, whose order a
        record and late groups follow."""
        agent = self.rollout.agent
        return agent is not None and agent.router and not (self.has_prompts_by_rank or self.run.record)

    @property
    def steps_ahead(self) -> int:
        """Steps by which generation runs ahead of training. The rest of max_staleness is for late groups."""
        return 1 if self.max_lateness else self.algorithm.max_staleness

    @property
    def max_lateness(self) -> int:
        """Steps by which a group may leave later than its prompt came in."""
        return max(0, self.algorithm.max_staleness - 1) if self.rollout.sampler == "as_finished" else 0

    @property
    def num_late_groups(self) -> int:
        """Groups that are under way beside those of a step: half of what could still leave in time, so that each step
        can choose."""
        return self.rollout.num_prompts * self.max_lateness // 2

    def _reference_conflicts(self) -> Iterator[Conflict]:
        """Checks `reference.sync_every`, which needs a reference that can follow the policy."""
        reference, every = self.reference, self.reference.sync_every
        if every is None:
            if reference.sync_weight != ReferenceConfig().sync_weight:
                yield Conflict(
                    keys=("reference.sync_weight", "reference.sync_every"),
                    text=f"={reference.sync_weight:g} is not used: it belongs to reference.sync_every, which is null",
                )
            return
        what = None
        if not self.algorithm.kl_coef:
            what = ("algorithm.kl_coef", "algorithm.kl_coef is 0, so there is no reference; leave it out")
        elif reference.path is not None:
            what = ("reference.path", "reference.path is a teacher, which does not follow its student; leave one out")
        elif self.knows_reference:
            what = ("actor.lora", "with actor.lora the reference is the model without its adapter; leave it out")
        if what is not None:
            yield Conflict(keys=("reference.sync_every", what[0]), text=f"={every} is not used: {what[1]}")
        elif self.algorithm.max_staleness:
            yield Conflict(
                keys=("algorithm.max_staleness", "reference.sync_every"),
                text=f"={self.algorithm.max_staleness}: reference.sync_every={every} changes the reference between "
                "steps, which overlap; leave one of them out",
            )

    def _further_policy_conflicts(self) -> Iterator[Conflict]:
        """The reference's log-probabilities are those of one model."""
        if not self.has_reference_worker:
            return
        for policy, path in self.rollout.further_policies.items():
            if path is not None:
                yield Conflict(
                    keys=("algorithm.kl_coef", "rollout.agent.agents"),
                    text=f"={self.algorithm.kl_coef:g}: the reference is one model, and the policy {policy} begins "
                    f"with {path}; use algorithm.kl_coef 0, actor.lora, or a policy that begins with model.path",
                )
            elif self.reference.sync_every is not None:
                yield Conflict(
                    keys=("reference.sync_every", "rollout.agent.agents"),
                    text=f"={self.reference.sync_every}: the reference would follow the policy of model.path alone, "
                    f"and the policy {policy} is compared with it too; leave it out",
                )

    def _model_conflicts(self) -> Iterator[Conflict]:
        architecture = self.model.architecture
        if architecture is None:
            return
        at, heads = "model.architecture.", architecture.num_heads
        yield from not_multiple(f"{at}hidden_size", architecture.hidden_size, f"{at}num_heads", heads)
        yield from not_multiple(f"{at}num_heads", heads, f"{at}num_kv_heads", architecture.num_kv_heads)
        tower = architecture.vision_tower
        if tower is not None:
            width, heads = tower.hidden_size, f"{at}vision.num_heads"
            yield from not_multiple(f"{at}vision.hidden_size", width, f"4 {heads}", 4 * tower.num_heads)
        elif architecture.vision is not None:
            yield Conflict(
                keys=(f"{at}vision", f"{at}family"),
                text=f" is not used: {at}family={architecture.family} reads text alone; use qwen2_5_vl",
            )
        num_tokens = self.rollout.max_sequence_tokens
        if architecture.max_positions < num_tokens:
            yield Conflict(
                keys=("model.architecture.max_positions", "rollout.max_new_tokens", "rollout.max_prompt_tokens"),
                text=f"={architecture.max_positions} is less than {self.rollout.max_sequence_key} = {num_tokens}; use "
                f"at least {num_tokens}",
            )

    def _task_conflicts(self) -> Iterator[Conflict]:
        task = self.task
        if isinstance(task, FilesTask):
            if task.answer_format == "gsm8k" and self.reward.kind == "exact":
                yield Conflict(
                    keys=("reward.kind", "task.answer_format"),
                    text="=exact can never match answers of task.answer_format=gsm8k, which hold the solution too; "
                    "use numeric",
                )
            return
        prompt, answer = task.num_tokens
        if isinstance(task, DrawnTaskConfig) and self.model.architecture is not None:
            tower = self.model.architecture.vision_tower
            if tower is None:
                yield Conflict(
                    keys=("task.kind", "model.architecture.family"),
                    text=f"={task.kind} has pictures, and model.architecture.family={self.model.architecture.family} "
                    "reads text alone; use qwen2_5_vl",
                )
                return
            prompt += tower.num_tokens(*task.picture_size)
        for key, needed, what in (("max_prompt_tokens", prompt, "a prompt"), ("max_new_tokens", answer, "an answer")):
            value = getattr(self.rollout, key)
            if value < needed:
                size = f"task.{task.SIZE or 'kind'}"
                yield Conflict(
                    keys=(f"rollout.{key}", size),
                    text=f"={value} is too short: {what} of {size}={getattr(task, task.SIZE or 'kind')} has {needed} "
                    f"tokens; use at least {needed}",
                )
        if task.NEEDS_AGENT and self.rollout.agent is None:
            yield Conflict(
                keys=("task.kind", "rollout.agent"),
                text=f"={task.kind} is played in several turns; set rollout.agent",
            )

    def _critic_conflicts(self) -> Iterator[Conflict]:
        """Settings of the critic if the algorithm has none. Default values are allowed, because resolved configs
        contain them."""
        if self.algorithm.has_critic:
            return
        unused = CriticConfig()
        for key in CriticConfig.model_fields:
            value = getattr(self.critic, key)
            if value != getattr(unused, key):
                yield Conflict(
                    keys=(f"critic.{key}", "algorithm.advantage"),
                    text=f"={value} is not used: algorithm.advantage={self.algorithm.advantage} has no critic; "
                    "leave it out",
                )

    def _budget_conflicts(self) -> Iterator[Conflict]:
        """Conflicts of `actor.max_tokens_per_micro_batch` with other settings."""
        budget = self.actor.token_budget
        if budget is None:
            if self.actor.balance_shards:
                yield Conflict(
                    keys=("actor.balance_shards", "actor.max_tokens_per_micro_batch"),
                    text="=true needs actor.max_tokens_per_micro_batch, which is not set; set it, or leave this out",
                )
            return
        if not self.actor.trainer_spec.packs_sequences:
            yield Conflict(
                keys=("actor.max_tokens_per_micro_batch", "actor.backend"),
                text=f"={budget} packs sequences, and actor.backend={self.actor.backend} computes padded ones alone; "
                f"leave it out, or use {either(TRAINERS, lambda spec: spec.packs_sequences)}",
            )
        longest = self.rollout.max_sequence_tokens
        if budget < longest:
            yield Conflict(
                keys=("actor.max_tokens_per_micro_batch", "rollout.max_prompt_tokens", "rollout.max_new_tokens"),
                text=f"={budget} is less than {self.rollout.max_sequence_key} = {longest}, and a sequence is not cut; "
                f"use at least {longest}",
            )

    def _batch_conflicts(self) -> Iterator[Conflict]:
        num_prompts, num_minibatches = self.rollout.num_prompts, self.algorithm.num_minibatches
        num_prompts_per_update = num_prompts // num_minibatches
        yield from not_multiple("rollout.num_prompts", num_prompts, "algorithm.num_minibatches", num_minibatches)
        if self.actor.num_shards != "auto" and num_prompts_per_update < self.actor.num_shards:
            yield Conflict(
                keys=("actor.num_shards", "rollout.num_prompts"),
                text=f"={self.actor.num_shards} is more than the {num_prompts_per_update} prompts of an optimizer "
                f"step; use at most {num_prompts_per_update}",
            )
        yield from self._budget_conflicts()
        buffer, limit = self.algorithm.overlong_buffer_tokens, self.rollout.max_new_tokens
        if buffer > limit:
            yield Conflict(
                keys=("algorithm.overlong_buffer_tokens", "rollout.max_new_tokens"),
                text=f"={buffer} is more than rollout.max_new_tokens={limit}; use at most {limit}",
            )
        if self.sft_warm_up and self.actor.num_shards != "auto":
            size = self.sft_warm_up.batch_size
            yield from not_multiple("sft_warm_up.batch_size", size, "actor.num_shards", self.actor.num_shards)

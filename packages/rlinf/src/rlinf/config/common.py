"""Config sections that jobs share: devices, plan, optimizer, engine, and length of the run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from rlinf.config.base import Conflict, InputPath, Section, Seed, Strings
from rlinf.config.loggers import Loggers
from rlinf.plugin_checks import spec_of
from rlinf_algos import did_you_mean
from rlinf_workers.engines import EngineSpec
from rlinf_workers.plugins import ENGINES, LAUNCHERS, TRAINERS
from rlinf_workers.trainers import TrainerSpec

if TYPE_CHECKING:
    from rlinf_workers.launchers import LauncherSpec

TOP_K = "Sample from the k most likely tokens; 0 disables it. With top_p, from the tokens that pass both."
TOP_P = "Sample from the most likely tokens whose probabilities add up to this much; 1: from all."
MIN_P = "Sample from tokens at least this fraction as likely as the most likely one; 0: from all."
KEPT_IN_TRAINING = " The loss is over the same tokens (docs/trust.md#truncated-sampling)."
STOP = (
    "A completion ends, as with an end token, with the token that completes one of these strings. The string stays in "
    "the text."
)

VENVS = (
    "Role -> venv of its workers: a name created by rlinf venv create, or the path of an interpreter, with a slash in "
    "it (docs/venvs.md). Other roles run in the driver's venv."
)


def _absolute_path(python: str) -> str:
    """Makes a path absolute, so that a run can be resumed from another folder. Keeps symlinks, because a venv's
    `python` is one."""
    return os.path.abspath(os.path.expanduser(python)) if "/" in python else python


Python = Annotated[str, Field(min_length=1), AfterValidator(_absolute_path)]


def venv_conflicts(venvs: Mapping[str, str], roles: Sequence[str]) -> Iterator[Conflict]:
    """Yields the names in `venvs` that are not roles of the job."""
    for role, python in venvs.items():
        if role not in roles:
            text = f"={python}: no worker of this job has the role {role!r}; {did_you_mean(role, roles)}"
            yield Conflict(keys=(f"venvs.{role}",), text=text)


Mode = Literal["auto", "collocated", "disaggregated", "hybrid"]


class OptimizerConfig(Section):
    """AdamW and its schedule."""

    learning_rate: float = Field(default=3e-4, gt=0, description="Learning rate at the first step.")
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        default=(0.9, 0.999), description="Decay of AdamW's two running averages."
    )
    weight_decay: float = Field(default=0.0, ge=0, description="Decoupled weight decay.")
    max_grad_norm: float = Field(default=1.0, gt=0, description="Gradients with a larger norm are scaled down to it.")
    lr_warmup_steps: int = Field(
        default=0, ge=0, description="Optimizer steps over which the learning rate rises linearly to its full value."
    )
    lr_decay_steps: int | None = Field(
        default=None,
        ge=1,
        description="Optimizer steps over which the learning rate falls linearly to min_lr_ratio of it; null: it "
        "stays constant.",
    )
    min_lr_ratio: float = Field(
        default=0.0, ge=0, le=1, description="Final learning rate after lr_decay_steps, as a fraction of learning_rate."
    )
    adam_epsilon: float = Field(
        default=1e-8,
        gt=0,
        description="Added to the denominator of AdamW's step, the root of the mean squared gradient.",
    )


class TrainerConfig(OptimizerConfig):
    """The optimizer and the training backend."""

    backend: str = Field(
        default="replicated",
        min_length=1,
        description="Training backend: replicated, fsdp2, megatron (docs/backends.md), or package.module:Class of a "
        "custom one (docs/plugins/backend.md).",
    )
    backend_options: dict[str, bool | int | float | str] = Field(
        default={},
        description="Options of the backend: compute_dtype, recompute, compile and sequence_parallel of fsdp2, "
        "tensor_parallel and more of megatron (docs/backends.md), or those of a custom backend.",
    )

    @property
    def trainer_spec(self) -> TrainerSpec:
        """The spec of the backend; the defaults if the backend does not exist, which `check_names` reports."""
        return TRAINERS.spec_if_there(self.backend)

    @property
    def ranks_per_replica(self) -> int | None:
        """`plan.num_ranks_per_replica.actor` as the backend's options determine it; None: they do not."""
        return self.trainer_spec.ranks_per_replica(self.backend_options)

    @property
    def sequence_ranks(self) -> int:
        """Ranks that compute each packed micro-batch together."""
        return self.trainer_spec.sequence_ranks(self.backend_options)

    def conflicts(self) -> Iterator[Conflict]:
        for option, text in self.trainer_spec.problems(self.backend_options):
            yield Conflict(keys=(f"actor.backend_options.{option}", "actor.backend"), text=text)


NumShards = Annotated[int, Field(ge=1)] | Literal["auto"]
NUM_SHARDS = (
    "Number of shards into which a batch is divided. Each has its own sum of gradients, so the numbers do not depend "
    "on how many ranks compute the shards; each costs one gradient's memory. The number of ranks must divide the "
    "number of shards: 4 shards run on 1, 2 or 4 ranks. auto: one per device of the machine where the run starts, or "
    "one per replica that fits on them. A resumed run keeps the number (docs/checkpoints.md)."
)


class ShardedTrainerConfig(TrainerConfig):
    """`TrainerConfig` of a language model, whose number of shards may follow from the devices."""

    num_shards: NumShards = Field(default="auto", description=NUM_SHARDS)

    @property
    def resolved_shards(self) -> int:
        """`num_shards` after `auto` was resolved."""
        assert self.num_shards != "auto", "jobs.prepare resolves it (rlinf.config.devices.resolve_for_devices)"
        return self.num_shards


ENGINE = (
    "What generates completions: huggingface, sglang (docs/sglang.md), vllm (docs/vllm.md), or package.module:Class of "
    "a custom engine (docs/plugins/engine.md)."
)


class EngineConfig(Section):
    """The engine of a rollout."""

    AT: ClassVar[str]
    """Prefix of the keys in messages: "rollout." or nothing."""

    engine: str = Field(default="huggingface", description=ENGINE)
    engine_options: dict[str, bool | int | float | str | list[int | float | str]] = Field(
        default={},
        description="Options of the engine: cuda_graphs, refill, cache_share and keep_turns of huggingface; the "
        "arguments of SGLang or vLLM by their own names, such as mem_fraction_static (docs/sglang.md) or "
        "gpu_memory_utilization (docs/vllm.md); or those of a custom engine.",
    )
    tensor_parallel_size: int = Field(
        default=1, ge=1, description="Devices over which an engine shards the model; each rollout rank has this many."
    )

    @property
    def engine_spec(self) -> EngineSpec:
        """The spec of the engine; the defaults if the engine does not exist, which `check_names` reports."""
        return ENGINES.spec_if_there(self.engine)

    @property
    def devices_per_rank(self) -> int:
        """Devices of a rank, as in rlinf_sched.flow_graph.Stage."""
        return self.engine_spec.devices_per_rank(self.tensor_parallel_size)

    def conflicts(self) -> Iterator[Conflict]:
        at, spec = self.AT, self.engine_spec
        if self.tensor_parallel_size > 1 and not spec.cuts_models:
            yield Conflict(
                keys=(f"{at}tensor_parallel_size", f"{at}engine"),
                text=f"={self.tensor_parallel_size}: {at}engine={self.engine} computes on one device; use 1, or "
                "another engine",
            )
        for option, text in spec.problems(self.engine_options):
            yield Conflict(keys=(f"{at}engine_options.{option}", f"{at}engine"), text=text)

    def length_conflicts(self, num_tokens: int, what: str) -> Iterator[Conflict]:
        """Yields the engine options that are too small for sequences of `num_tokens` tokens; `what` names the
        sequence."""
        for option, text in self.engine_spec.length_problems(self.engine_options, num_tokens):
            yield Conflict(
                keys=(f"{self.AT}engine_options.{option}",),
                text=f"{text} is less than {what} = {num_tokens}; use at least {num_tokens}",
            )


class ClusterConfig(Section):
    """The devices of the run: GPUs, or slots of the CPU on a machine without one."""

    device: Literal["auto", "gpu", "cpu"] = Field(
        default="auto",
        description="auto: GPUs, or CPU slots on a machine without GPUs; an error if there are GPUs that cannot be "
        "used. gpu: GPUs only. cpu: CPU slots only.",
    )
    num_devices: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        default="auto",
        description="GPUs to use, or CPU slots on a machine without GPUs; auto takes all GPUs, or at most 8 CPU slots.",
    )
    oversubscribe: bool = Field(
        default=False, description="Allow more CPU slots than this machine has cores; they share the cores."
    )
    pin_slots: bool = Field(
        default=True,
        description="Pin workers on CPU slots to the cores of their slots, slot i to core i; false: any core.",
    )
    threads_per_device: int = Field(default=1, ge=1, description="CPU threads of each worker process.")
    launcher: str = Field(
        default="local",
        min_length=1,
        description="What starts the processes: local, on this machine; ray, on the nodes of a Ray cluster "
        "(docs/clusters.md); or package.module:Class of a custom launcher.",
    )
    pass_env_vars: Strings = Field(
        default=(),
        description="Env vars with credentials that are passed to workers and their child processes, such as "
        "OPENAI_API_KEY for a custom reward. All other env vars that look like credentials (API keys, tokens, "
        "secrets, passwords) stay with the driver.",
    )
    launcher_options: dict[str, bool | int | float | str] = Field(
        default={}, description="Keyword arguments of the launcher's constructor."
    )
    weight_sync: str = Field(
        default="auto",
        min_length=1,
        description="Transport of weights from trainers to engines: auto, chosen by their placement; device, through "
        "GPU memory of one machine; shared, through host memory of one machine; streams, between processes of any "
        "machines; per_node, to each machine once; or package.module:Class.",
    )
    weight_sync_options: dict[str, bool | int | float | str] = Field(
        default={}, description="Keyword arguments of the weight sync's constructor."
    )
    attest_weights: bool = Field(
        default=True,
        description="Check after each sync, before any output leaves, that the digests of the served weights equal "
        "those of the published ones; false: device and shared skip this, and the run's manifest records it.",
    )

    @property
    def launcher_spec(self) -> LauncherSpec:
        """The spec of the launcher. Raises: UserError."""
        return spec_of(LAUNCHERS, self.launcher, at="cluster.launcher")


class PlanConfig(Section):
    """Placement by hand in place of the mode's rule, and the profile that mode auto plans from."""

    granularity: dict[str, Annotated[int, Field(ge=0)]] = Field(
        default={}, description="Stage -> items handed over at a time; 0 is the whole batch."
    )
    devices: dict[str, tuple[Annotated[int, Field(ge=0)], ...]] = Field(
        default={}, description="Worker group -> indices of its devices."
    )
    num_ranks: dict[str, Annotated[int, Field(ge=1)]] = Field(
        default={}, description="Worker group -> processes; a multiple or a divisor of its number of devices."
    )
    num_ranks_per_replica: dict[str, Annotated[int, Field(ge=1)]] = Field(
        default={}, description="Worker group -> processes that together hold one copy of its model; 1 by default."
    )
    profile: InputPath | None = Field(
        default=None,
        description="Problem file with measured profiles, as rlinf profile writes it; mode auto plans from it at "
        "once. null: mode auto measures the run's first steps.",
    )


class RunConfig(Section):
    """Length of the run, evaluations, checkpoints, logs and failures."""

    @property
    def profiled_steps(self) -> tuple[int, int] | None:
        """First and last step of `profile_steps`."""
        if self.profile_steps is None:
            return None
        first, _, last = self.profile_steps.partition("-")
        return int(first), int(last or first)

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        first, last = self.profiled_steps or (1, 1)
        if not first <= last <= self.num_steps and self.profile_steps is not None:
            yield Conflict(
                keys=("run.profile_steps", "run.num_steps"),
                text=f"={self.profile_steps}: the steps of this run are 1 to {self.num_steps}; give the first and the "
                "last one, such as 5-7",
            )

    num_steps: int = Field(ge=1, description="Training steps of the whole run, those before a `--resume` included.")
    max_minutes: float | None = Field(
        default=None, gt=0, description="Stop after this much training time, checked after each step."
    )
    evaluate_every: int = Field(
        default=10,
        ge=1,
        description="Steps between evaluations on held-out problems; the last step is always evaluated.",
    )
    checkpoint_every: int = Field(
        default=50, ge=1, description="Steps between checkpoints; the last step always writes one."
    )
    keep_checkpoints: int = Field(
        default=2, ge=1, description="Number of newest checkpoints to keep; the one with the best score is kept too."
    )
    trace: bool = Field(default=True, description="Write trace.json, a timeline of all workers.")
    trace_megabytes: int = Field(
        default=16, ge=1, description="Size limit of trace.json; beyond it, only the first and the last steps are kept."
    )
    profile_steps: str | None = Field(
        default=None,
        pattern=r"^[1-9][0-9]*(-[1-9][0-9]*)?$",
        description="Training steps to profile, such as 5-7 or 5, counted from 1 as on the terminal (step 5 is the "
        "row `step: 4` of metrics.jsonl): torch's profiler writes a trace of each worker to profiles/ in the run's "
        "folder (docs/profiles.md). null: none.",
    )
    record: bool = Field(
        default=False,
        description="Write what decided the numbers of each step (versions of the weights, samples as digests, reward "
        "outcomes) to record.jsonl, so that rlinf replay can do the run again and compare (docs/replay.md).",
    )
    num_samples_logged: int = Field(
        default=4,
        ge=0,
        description="Prompts of each step whose completions, with rewards, are written to samples.jsonl.",
    )
    worker_timeout_s: float = Field(
        default=60.0,
        gt=0,
        description="Heartbeat timeout in seconds: a worker that is stopped or unreachable for this long is lost. A "
        "worker whose process still runs is subject to step_timeout_s only.",
    )
    step_timeout_s: float | None = Field(
        default=None,
        gt=0,
        description="Stop a step or an evaluation that takes longer, and report which process waited for which; null: "
        "10 times the expected duration, at least 600 s, and 3600 s while no duration can be predicted.",
    )
    on_failure: Literal["restart", "stop"] = Field(
        default="restart",
        description="What to do when a worker dies or a step times out. restart: continue from the newest checkpoint "
        "with new processes, with identical numbers. stop: end the run.",
    )
    max_restarts: int = Field(
        default=3,
        ge=1,
        description="Give up after this many restarts without progress; used with on_failure: restart.",
    )
    loggers: Loggers = Field(
        default=Loggers(),
        description="What gets the metrics beside the run's folder: tensorboard, wandb, mlflow, swanlab, trackio, or "
        "package.module:Class of a custom log writer. A list names all of them; a section adds to TensorBoard "
        "(docs/loggers.md).",
    )
    stop_at_score: float | None = Field(
        default=None,
        description="Stop once an evaluation reaches this score: the accuracy or success rate, or the mean reward if "
        "the reward does not judge answers. Refused for environments that never report success. null: no such limit.",
    )


class JobConfig(Section):
    """Base config of all jobs. A custom job's subclass also has the field `job: str`."""

    if TYPE_CHECKING:
        job: Any

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="Name of the run; part of its default output folder."
    )
    seed: Seed = Field(
        default=0,
        description="Seed of all random numbers of the run. On CPU slots the same seed gives the same numbers in every "
        "mode; docs/start.md, Reproducible numbers, has the conditions.",
    )
    mode: Mode = Field(
        default="auto",
        description="auto: the fastest plan, judged by the first steps. collocated: all workers take turns on all "
        "devices. disaggregated: generation and training have separate devices. hybrid: generation is spread over the "
        "devices, then training uses all of them.",
    )
    cluster: ClusterConfig = Field(default=ClusterConfig(), description="The devices of the run.")
    plan: PlanConfig = Field(default=PlanConfig(), description="Placement choices by hand.")
    venvs: dict[str, Python] = Field(default={}, description=VENVS)
    run: RunConfig = Field(description="Length of the run, evaluations, checkpoints, logs and failures.")

    @property
    def roles(self) -> tuple[str, ...]:
        """The worker groups of the job."""
        raise NotImplementedError

    @property
    def training_groups(self) -> tuple[str, ...]:
        """The worker groups that the section `actor` is about."""
        return ("actor",)

    @property
    def group_venvs(self) -> dict[str, str]:
        """Worker group -> its Python, as `venvs`."""
        return self.venvs

    @property
    def replica_sizes(self) -> dict[str, int]:
        """Worker group -> ranks that hold one copy of its model together, where they are more than one."""
        return dict(self.plan.num_ranks_per_replica)

    def _schedule_conflicts(self) -> Iterator[Conflict]:
        for name in ("actor", "critic"):
            section = getattr(self, name, None)
            if isinstance(section, OptimizerConfig) and section.min_lr_ratio and section.lr_decay_steps is None:
                yield Conflict(
                    keys=(f"{name}.min_lr_ratio", f"{name}.lr_decay_steps"),
                    text=f"={section.min_lr_ratio:g} is not used: {name}.lr_decay_steps is null, so the learning rate "
                    "stays; set it, or leave this out",
                )

    def conflicts(self) -> Iterator[Conflict]:
        yield from self._schedule_conflicts()
        if self.mode == "auto":
            for choice in ("granularity", "devices", "num_ranks", "num_ranks_per_replica"):
                if chosen := getattr(self.plan, choice):
                    yield Conflict(
                        keys=(f"plan.{choice}", "mode"),
                        text=f"={ {name: list(v) if isinstance(v, tuple) else v for name, v in chosen.items()} }: "
                        "mode=auto chooses it; choose by hand under another mode, for example mode=hybrid",
                    )
        yield from self._replica_conflicts()
        yield from venv_conflicts(self.venvs, self.roles)
        if self.cluster.num_devices != "auto":
            yield from self.placement_conflicts(self.cluster.num_devices)

    def placement_conflicts(self, num_devices: int) -> Iterator[Conflict]:
        """Yields the choices that do not fit on this number of devices."""
        for group, devices in self.plan.devices.items():
            if wrong := [device for device in devices if device >= num_devices]:
                yield Conflict(
                    keys=(f"plan.devices.{group}", "cluster.num_devices"),
                    text=f"={list(devices)}: device {wrong[0]} does not exist; the run has devices 0 to "
                    f"{num_devices - 1}",
                )
        if self.mode in ("disaggregated", "hybrid") and num_devices < 2:
            yield Conflict(
                keys=("mode", "cluster.num_devices"), text=f"={self.mode} needs at least 2 devices, and the run has 1"
            )

    def _replica_conflicts(self) -> Iterator[Conflict]:
        for group, size in self.replica_sizes.items():
            num_ranks = self.plan.num_ranks.get(group, size)
            if num_ranks % size:
                yield Conflict(
                    keys=(f"plan.num_ranks_per_replica.{group}", f"plan.num_ranks.{group}"),
                    text=f"={size} does not divide plan.num_ranks.{group}={num_ranks}; every replica has as many ranks",
                )
            if size > 1 and self.plan.profile:
                yield Conflict(
                    keys=(f"plan.num_ranks_per_replica.{group}", "plan.profile"),
                    text=f"={size}: nothing is predicted for replicas of several ranks; leave plan.profile out",
                )

    def backend_conflicts(self, actor: TrainerConfig, model_dtype: str) -> Iterator[Conflict]:
        """Settings that the actor's backend does not support or already determines."""
        size = actor.ranks_per_replica
        if text := actor.trainer_spec.dtype_problem(actor.backend_options, model_dtype):
            keys = ("actor.backend_options", "model.dtype", "actor.backend")
            yield Conflict(keys=keys, text=f": actor.backend={actor.backend} {text}")
        if size is None:
            return
        option = actor.trainer_spec.sequence_option
        sharing = actor.backend_options.get(option, 1)
        is_padded = getattr(actor, "token_budget", None) is None
        if isinstance(sharing, int) and sharing > 1 and is_padded:
            yield Conflict(
                keys=(f"actor.backend_options.{option}", "actor.max_tokens_per_micro_batch"),
                text=f"={sharing} ranks share packed micro-batches, and these are padded; set "
                "actor.max_tokens_per_micro_batch",
            )
        for group in self.training_groups:
            chosen = self.plan.num_ranks_per_replica.get(group)
            if chosen is not None and chosen != size:
                yield Conflict(
                    keys=(f"plan.num_ranks_per_replica.{group}", "actor.backend_options"),
                    text=f"={chosen}, but actor.backend_options make replicas of {size}; leave it out",
                )
        if size > 1 and self.mode == "auto":
            yield Conflict(
                keys=("mode", "actor.backend_options"),
                text=f"=auto plans ranks that each compute their own micro-batches, and actor.backend={actor.backend} "
                f"has {size} ranks a replica; use another mode, for example mode=collocated",
            )

    def _cut_conflicts(self, actor: TrainerConfig) -> Iterator[Conflict]:
        for group in self.training_groups if actor.trainer_spec.shards_state and actor.sequence_ranks == 1 else ():
            if (size := self.plan.num_ranks_per_replica.get(group, 1)) > 1:
                yield Conflict(
                    keys=(f"plan.num_ranks_per_replica.{group}", "actor.backend"),
                    text=f"={size}: {actor.backend} cuts the model over all ranks of the actor and gives each its own "
                    f"micro-batches; leave it out and set plan.num_ranks.{group}",
                )

    def _shard_conflicts(self, num_shards: int) -> Iterator[Conflict]:
        for group in self.training_groups:
            num_ranks = self.plan.num_ranks.get(group, 0) // self.replica_sizes.get(group, 1)
            if num_ranks and num_shards % num_ranks:
                yield Conflict(
                    keys=(f"plan.num_ranks.{group}", "actor.num_shards"),
                    text=f"={num_ranks} does not divide actor.num_shards={num_shards}; use a divisor of {num_shards}, "
                    f"or {num_ranks} or a multiple of it as actor.num_shards, which a resumed run keeps",
                )

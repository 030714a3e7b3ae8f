"""Sections that every job has: where it runs, how it is cut into steps, how long it lasts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from rlinf.config.base import Conflict, InputPath, Section, Seed
from rlinf.config.venvs import VENVS, Python, venv_conflicts
from rlinf_workers.plugins import TRAINERS
from rlinf_workers.trainers import TrainerSpec

TOP_K = "Sample from so many of the likeliest tokens only; 0: from all. With top_p, from those that both leave."
TOP_P = "Sample from the likeliest tokens that hold this much probability; 1: from all."
MIN_P = "Sample from tokens with at least this share of the likeliest one's probability; 0: from all."
FULL_DISTRIBUTION = " Training samples from all tokens and refuses any other value."
STOP = (
    "A completion ends with the token that completes one of these strings in its text, as with an end token. It "
    "keeps the string."
)


def _strings(value: Any) -> Any:
    """`</answer>` for `[</answer>]`."""
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


Strings = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_strings)]

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
        description="Optimizer steps over which the learning rate falls linearly to min_lr_ratio of it; null keeps it.",
    )
    min_lr_ratio: float = Field(
        default=0.0, ge=0, le=1, description="Share of the learning rate that is left after lr_decay_steps."
    )


class TrainerConfig(OptimizerConfig):
    """The optimizer, and what holds the model."""

    backend: str = Field(
        default="replicated",
        min_length=1,
        description="What holds and trains the model: replicated, fsdp2, megatron (docs/backends.md), or "
        "package.module:Class of one's own (docs/plugins/backend.md).",
    )
    backend_options: dict[str, bool | int | float | str] = Field(
        default={},
        description="Further arguments of the backend: compute_dtype and recompute of fsdp2, tensor_parallel and "
        "more of megatron (docs/backends.md), or one's own.",
    )

    @property
    def trainer_spec(self) -> TrainerSpec:
        """What is known of the backend; of one that is not there the defaults, which `check_names` reports."""
        return TRAINERS.spec_if_there(self.backend)

    @property
    def ranks_per_replica(self) -> int | None:
        """What the options of the backend say of `plan.num_ranks_per_replica.actor`; None: nothing."""
        return self.trainer_spec.ranks_per_replica(self.backend_options)

    def conflicts(self) -> Iterator[Conflict]:
        for option, text in self.trainer_spec.problems(self.backend_options):
            yield Conflict(keys=(f"actor.backend_options.{option}", "actor.backend"), text=text)


class ClusterConfig(Section):
    """The devices of the run: GPUs, or slots of the CPU on a machine without one."""

    device: Literal["auto", "gpu", "cpu"] = Field(
        default="auto",
        description="auto: the GPUs, or CPU slots where there is none; GPUs that are there and cannot be used are an "
        "error. gpu: GPUs or nothing. cpu: CPU slots, whatever is there.",
    )
    num_devices: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        default="auto",
        description="GPUs to use, or CPU slots where there is no GPU; auto takes all GPUs, or up to 8 CPU slots.",
    )
    oversubscribe: bool = Field(
        default=False, description="Allow more CPU slots than this machine has cores; they share the cores."
    )
    pin_slots: bool = Field(
        default=True,
        description="Workers on CPU slots keep to the cores of their slots, slot i to core i; false: any core.",
    )
    threads_per_device: int = Field(
        default=1, ge=1, description="Threads that each worker process computes with on the CPU."
    )
    launcher: str = Field(
        default="local",
        min_length=1,
        description="What starts the processes: local, on this machine; ray, on the nodes of a Ray cluster "
        "(docs/clusters.md); or package.module:Class.",
    )
    pass_env_vars: Strings = Field(
        default=(),
        description="Env vars with credentials that workers and the processes that they start get, such as "
        "OPENAI_API_KEY for a custom reward. All others whose names or values look like credentials (API keys, tokens, "
        "secrets, passwords) stay with the driver.",
    )
    launcher_options: dict[str, bool | int | float | str] = Field(
        default={}, description="Keyword arguments of the launcher's constructor."
    )
    weight_sync: str = Field(
        default="auto",
        min_length=1,
        description="What carries weights from those who train to those who serve them: auto, by where both are; "
        "device, through GPU memory of one machine; shared, through host memory of one machine; streams, between "
        "processes of any machines; per_node, to each machine once; or package.module:Class.",
    )
    weight_sync_options: dict[str, bool | int | float | str] = Field(
        default={}, description="Keyword arguments of the weight sync's constructor."
    )
    attest_weights: bool = Field(
        default=True,
        description="Whoever serves weights proves after each sync that they are what was published, before anything "
        "that was made with them leaves; false: device and shared leave this out, and the run's manifest says so.",
    )


class PlanConfig(Section):
    """Choices by hand, in place of what the mode's rule gives; and what mode auto plans from."""

    granularity: dict[str, Annotated[int, Field(ge=0)]] = Field(
        default={}, description="Stage -> items per hand-over; 0 is the whole batch."
    )
    devices: dict[str, tuple[Annotated[int, Field(ge=0)], ...]] = Field(
        default={}, description="Worker group -> indices of its devices."
    )
    num_ranks: dict[str, Annotated[int, Field(ge=1)]] = Field(
        default={}, description="Worker group -> processes; a multiple or a divisor of the number of its devices."
    )
    num_ranks_per_replica: dict[str, Annotated[int, Field(ge=1)]] = Field(
        default={}, description="Worker group -> processes that hold one copy of its model together; 1 by default."
    )
    profile: InputPath | None = Field(
        default=None,
        description="Problem file with measured profiles, as rlinf profile writes it. Mode auto plans from it at once; "
        "null: from what the run's first steps take.",
    )


class WandbConfig(Section):
    """Where on W&B the run's metrics go."""

    project: str = Field(min_length=1, description="Name of the project.")
    entity: str | None = Field(default=None, min_length=1, description="User or team; null: the one who is logged in.")
    name: str | None = Field(default=None, min_length=1, description="Name of the run; null: its folder's.")
    mode: Literal["online", "offline"] | None = Field(
        default=None, description="offline writes to the run folder, for `wandb sync`; null: what WANDB_MODE says."
    )


class RunConfig(Section):
    """How long the run lasts, and what it writes down when."""

    num_steps: int = Field(ge=1, description="Training steps.")
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
        default=2, ge=1, description="Newest checkpoints that are kept; the one with the best score is kept too."
    )
    trace: bool = Field(default=True, description="Write trace.json, which says what every worker did when.")
    trace_megabytes: int = Field(
        default=16, ge=1, description="Size past which trace.json keeps the first and the last steps alone."
    )
    num_samples_logged: int = Field(
        default=4, ge=0, description="Prompts of a step whose first completion goes to samples.jsonl."
    )
    worker_timeout_s: float = Field(
        default=60.0,
        gt=0,
        description="Heartbeat timeout in seconds: a worker that is stopped or out of reach for so long is lost. "
        "One whose process runs is left to step_timeout_s.",
    )
    step_timeout_s: float | None = Field(
        default=None,
        gt=0,
        description="A step or an evaluation that takes longer is given up, and the run says who waited for whom; "
        "null: 10 times what it should take by its plan and by those before it, at least 600 s, and 3600 s where "
        "nothing is known yet.",
    )
    on_failure: Literal["restart", "stop"] = Field(
        default="restart",
        description="What a run does that loses a worker, or whose step passes its deadline. restart: it goes on from "
        "its newest checkpoint with new processes, to the same numbers. stop: it ends.",
    )
    max_restarts: int = Field(
        default=3,
        ge=1,
        description="Restarts after which a run ends that comes no further than before; on_failure: restart.",
    )
    wandb: WandbConfig | None = Field(
        default=None, description="Send metrics to W&B too (needs rlinf[wandb]); null: TensorBoard alone."
    )
    stop_at_score: float | None = Field(
        default=None,
        description="Stop once an evaluation reaches it: accuracy, or share of episodes with success; the mean reward "
        "or return where there is neither.",
    )


class JobConfig(Section):
    """What every job has. A custom job's subclass has the field `job: str`, too."""

    if TYPE_CHECKING:
        job: Any

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="Name of the run; part of its default output folder."
    )
    seed: Seed = Field(
        default=0,
        description="Decides every random number of the run; the same seed gives the same numbers under every plan.",
    )
    mode: Mode = Field(
        default="auto",
        description="auto: whichever is fastest, by what the first steps take. collocated: all workers take turns on "
        "all devices. disaggregated: generation and training have devices of their own. hybrid: generation "
        "is spread out, then training uses all devices.",
    )
    cluster: ClusterConfig = Field(default=ClusterConfig(), description="The devices of the run.")
    plan: PlanConfig = Field(default=PlanConfig(), description="Placement choices by hand.")
    venvs: dict[str, Python] = Field(default={}, description=VENVS)
    run: RunConfig = Field(description="Length of the run, and what it writes down when.")

    @property
    def roles(self) -> tuple[str, ...]:
        """The worker groups of the job."""
        raise NotImplementedError

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
        """What does not fit on so many devices."""
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

    def _cut_conflicts(self, actor: TrainerConfig) -> Iterator[Conflict]:
        size = self.plan.num_ranks_per_replica.get("actor", 1)
        if actor.trainer_spec.shards_state and size > 1:
            yield Conflict(
                keys=("plan.num_ranks_per_replica.actor", "actor.backend"),
                text=f"={size}: {actor.backend} cuts the model over all ranks of the actor and gives each its own "
                "micro-batches; leave it out and set plan.num_ranks.actor",
            )

    def _shard_conflicts(self, num_shards: int) -> Iterator[Conflict]:
        num_ranks = self.plan.num_ranks.get("actor", 0) // self.replica_sizes.get("actor", 1)
        if num_ranks and num_shards % num_ranks:
            yield Conflict(
                keys=("plan.num_ranks.actor", "actor.num_shards"),
                text=f"={num_ranks} does not divide actor.num_shards={num_shards}; use a divisor of {num_shards}, "
                f"or {num_ranks} or a multiple of it as actor.num_shards",
            )

"""Whether a reasoning recipe's model fits: its shapes, what each rank of its workers will hold, and which smaller
settings would fit, before any process starts.

`rlinf_sched.derive.memory` has the formulas, and the spec of each training backend and engine says how it is counted.
`rlinf plan` plans with these numbers and `rlinf train` refuses by them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial, reduce
from pathlib import Path
from typing import Any

from rlinf.config.reasoning import ReasoningConfig
from rlinf.errors import UserError
from rlinf.jobs.reasoning.flow import job_shape
from rlinf.jobs.trainer_memory import (
    does_not_fit,
    hint_of,
    most_ranks,
    named_shape,
    option_axes,
    precision_axes,
    ranks_in_replicas,
    trainer_axes,
    trainer_stage,
)
from rlinf.planning.fitting import KeyChange, fitting_changes
from rlinf.planning.memory import (
    ALLOCATED_SHARE,
    KeptWeights,
    Load,
    MemoryPool,
    PlanMemory,
    at_once_place,
    device_place,
    host_place,
    versions_place,
    weight_sync_of,
)
from rlinf_sched import Cluster, Plan, ProfileError, StagePlan
from rlinf_sched.derive import (
    JobShape,
    ModelShape,
    RankMemory,
    forward_memory,
)
from rlinf_workers.trainers import DTYPE_BYTES
from rlinf_workers.weight_sync import EdgeEnds, suitable_weight_syncs

NUM_STORED = 2
"""Copies of the weights that the host's store between trainer and engines takes at most: the version that is served,
and the next."""
MOST_TOKENS, BUSY_TOKENS = 32768, 8192
"""Tokens of a packed micro-batch that the recipe leaves open. With the most, launches are a small part of the time of a
pass; with fewer than the other, they take longer than the arithmetic of a small model."""
NOTHING_FITS = (
    "no other number of groups, precision or backend fits: use a smaller model, shorter sequences "
    "(rollout.max_new_tokens, rollout.max_prompt_tokens), stages for more ranks "
    "(actor.backend_options.pipeline_parallel of megatron), more devices (cluster.num_devices), or devices with more "
    "memory"
)


# -- shapes ------------------------------------------------------------------------------------------------------------


def shape_of(config: ReasoningConfig, num_words: int) -> ModelShape | None:
    """The shape of the recipe's model; None for an architecture whose parts we cannot count.

    Args:
        num_words: size of the tokenizer's vocabulary, for a model that is made from scratch.
    """
    architecture = config.model.architecture
    if architecture is not None:
        sizes = architecture.model_dump(exclude={"family", "max_positions", "initializer_range", "vision"})
        width = architecture.hidden_size // architecture.num_heads
        return ModelShape(name=architecture.family, head_dim=width, vocab_size=num_words, qkv_bias=True, **sizes)
    assert config.model.path is not None, "a config has a path or an architecture"
    try:
        return named_shape(config.model.path)
    except ProfileError:
        return None


def reference_shape(config: ReasoningConfig, shape: ModelShape) -> ModelShape | None:
    """The shape of the reference's model: the teacher's, or the actor's own. None where the recipe has no reference, or
    where we cannot count the teacher's parts.

    Args:
        shape: the shape of the actor's model.

    Raises: UserError for a teacher that is neither a folder nor a public model.
    """
    if not config.has_reference_worker or config.reference.path is None:
        return shape if config.has_reference_worker else None
    return _shape_at(config.reference.path, "reference.path")


def policy_shapes(config: ReasoningConfig, shape: ModelShape) -> dict[str, ModelShape | None]:
    """Worker group that trains -> the shape of its model; None where we cannot count the parts.

    Args:
        shape: of the model of model.path or of model.architecture.

    Raises: UserError for a path that is neither a folder nor a public model.
    """
    paths = {trainer: config.policies[policy] for trainer, policy in config.trainers.items()}
    return {
        trainer: shape if path is None else _shape_at(path, _key_of(config, path)) for trainer, path in paths.items()
    }


def partner_shapes(config: ReasoningConfig) -> dict[Path, ModelShape | None]:
    """The shapes of the models of partners; None where we cannot count the parts.

    Raises: UserError for a path that is neither a folder nor a public model.
    """
    return {path: _shape_at(path, _key_of(config, path)) for path in config.rollout.partner_paths.values()}


def _key_of(config: ReasoningConfig, path: Path) -> str:
    """The key that gives an agent this model."""
    return next(key for key, one in config.model_paths.items() if one == path and key.startswith("rollout."))


def _shape_at(path: Path, key: str) -> ModelShape | None:
    """The shape of a model; None where we cannot count its parts. Raises: UserError if it is neither a folder nor a
    public model."""
    try:
        return named_shape(path, key)
    except ProfileError as error:
        if not path.exists():
            raise UserError(f"{key}: {error}") from error
        return None


# -- what the ranks hold -----------------------------------------------------------------------------------------------


def rank_memory(
    config: ReasoningConfig, shape: ModelShape, job: JobShape, num_ranks: Mapping[str, int]
) -> dict[str, RankMemory]:
    """Worker group -> what one of its ranks holds. Raises: as `reference_shape`."""
    trainer, reference = config.actor.trainer_spec, reference_shape(config, shape)
    engine, trained = config.rollout.engine_spec, policy_shapes(config, shape)
    served = [*trained.values(), *partner_shapes(config).values()]
    engines = [engine.memory(one, job) for one in served if one is not None]
    memory = {"rollout": reduce(_engines_together, engines)} | {
        group: trainer.rank_memory(own, job, num_ranks.get(group, 1))
        for group, own in trained.items()
        if own is not None
    }
    return memory if reference is None else {**memory, "reference": forward_memory(reference, trainer.computed(job))}


def _engines_together(one: RankMemory, other: RankMemory) -> RankMemory:
    """The memory of two engines of a rank: both hold weights and caches, and one computes at a time."""
    alternating = ("activations", "activations_of_item", "step", "sync")
    both = {field.name: (getattr(one, field.name), getattr(other, field.name)) for field in fields(RankMemory)}
    return RankMemory(**{name: max(pair) if name in alternating else sum(pair) for name, pair in both.items()})


def loads_of(
    config: ReasoningConfig,
    shape: ModelShape,
    plan: Plan,
    *,
    on_gpu: bool = True,
    device_bytes: int = 0,
    host_bytes: int = 0,
    nodes: Sequence[int] = (0,),
) -> list[Load]:
    """The load of every rank of the plan that has a model; `device_bytes` as in `job_shape`.

    Args:
        host_bytes: memory of the machine, for an engine on CPU slots that takes a share of it.
        nodes: nodes of the plan's devices.
    """
    job = job_shape(config, on_gpu=on_gpu, device_bytes=device_bytes)
    under_way = _most_at_once(config, job, plan.stage("rollout")) * job.lengths.group_size
    job = replace(job, host_bytes=host_bytes, under_way=under_way)
    engine, trainer = config.rollout.engine_spec, config.actor.trainer_spec
    span = trainer.num_ranks_of_replica(job)  # the planner's plans have a rank for each replica
    ranks = {stage.stage: stage.num_replicas * span if span > 1 else stage.num_ranks for stage in plan.stages}
    of_group = rank_memory(config, shape, job, ranks)
    versions = {
        group: kept_weights(config, own, ranks.get(group, 1), nodes=nodes, on_gpu=on_gpu)
        for group, own in policy_shapes(config, shape).items()
        if own is not None
    }
    loads = []
    for stage in plan.stages:
        if (memory := of_group.get(stage.stage)) is None:
            continue
        num_items = _most_at_once(config, job, stage)
        num_devices = job.tensor_parallel if stage.stage == "rollout" else 1
        for rank in range(stage.num_ranks):
            load = Load(
                group=stage.stage,
                memory=memory,
                num_items=num_items,
                offload=stage.offload,
                devices=stage.devices_of(rank)[:num_devices],  # where a rank has more, it computes on the first
                engine_process_bytes=num_devices * engine.process_bytes if stage.stage == "rollout" else 0,
                num_contexts=2 if stage.stage == "rollout" and engine.process_bytes else 1,
                num_communicators=_num_communicators(config, stage.stage, job, ranks.get(stage.stage, 1)),
                versions=versions.get(stage.stage, KeptWeights()),
            )
            loads.append(load)
    return loads


def _num_communicators(config: ReasoningConfig, group: str, job: JobShape, num_ranks: int) -> int:
    """Groups of ranks in which a process of the worker group communicates, or of an engine over several GPUs."""
    if group in config.trainers:
        return config.actor.trainer_spec.num_communicators(job.trainer_options, num_ranks)
    return int(group == "rollout" and job.tensor_parallel > 1)


def _most_at_once(config: ReasoningConfig, job: JobShape, stage: StagePlan) -> int:
    """Prompts with `group_size` completions each, in training or, in other words, evaluation."""
    size, num_samples = job.lengths.group_size, config.evaluation.num_samples
    is_bounded = not config.rollout.engine_spec.fills_its_memory(config.rollout.engine_options)
    most = 0
    for num_prompts, num_rows in ((job.num_groups, size), (config.task.num_held_out, num_samples)):
        share = -(-num_prompts // stage.num_replicas)
        bounded = min(stage.granularity or share, share, max(1, job.max_sequences // num_rows))
        at_once = bounded if stage.stage != "rollout" or is_bounded else share
        most = max(most, -(-at_once * num_rows // size))
    return most


@dataclass(frozen=True)
class ReasoningMemory(PlanMemory):
    """Memory use of a reasoning run on its devices."""

    config: ReasoningConfig
    shape: ModelShape
    cluster: Cluster
    host_bytes: int
    held_bytes: Mapping[str, int] = field(default_factory=dict)
    """Role -> what a rank's processes held of a GPU in an earlier run, as far as it was measured."""

    def with_measured(self, held_bytes: Mapping[str, int]) -> ReasoningMemory:
        return replace(self, held_bytes=held_bytes)

    @property
    def is_on_gpu(self) -> bool:
        return self.cluster.devices[0].kind == "cuda"

    def check(self, plan: Plan) -> None:
        """Whether the plan's ranks fit their devices, or all of them the host where the devices are CPU slots.

        Raises: UserError with what each needs, what there is, and which settings would fit.
        """
        config, actor, rollout = self.config, plan.stage("actor"), plan.stage("rollout")

        def place_of(changed: ReasoningConfig) -> MemoryPool:
            span, before = changed.rollout.tensor_parallel_size, config.rollout.tensor_parallel_size
            generates = rollout if span == before else replace(rollout, num_ranks=len(rollout.devices) // span)
            stages = (
                trainer_stage(config, changed, stage)
                if stage.stage in config.trainers
                else generates
                if stage is rollout
                else stage
                for stage in plan.stages
            )
            return replace(self, config=changed).fullest_place(replace(plan, stages=tuple(stages)))

        check_fits(
            config,
            self.shape,
            place_of,
            partial(job_shape, on_gpu=self.is_on_gpu, device_bytes=self.cluster.devices[0].memory_bytes),
            num_ranks=actor.num_ranks,
            most_ranks=most_ranks(actor, config.rollout.num_prompts // config.algorithm.num_minibatches),
            num_devices=len(actor.devices),
            num_engine_devices=len(rollout.devices),
            nodes=nodes_of(plan, self.cluster),
        )

    def all_fit_at_once(self, plan: Plan) -> bool:
        """Whether every device is a GPU with room for the peaks of all its ranks together, so that no state has to
        leave it. False where a role is not counted: a teacher of a kind that we do not know."""
        if not self.is_on_gpu:
            return False
        loads = self._loads(plan)
        is_counted = {load.group for load in loads} >= {stage.stage for stage in plan.stages if stage.devices}
        is_counted &= None not in partner_shapes(self.config).values()
        return is_counted and all(place.missing_bytes <= 0 for place in self._places_at_once(loads))

    def place_beside(self, plan: Plan, other: Plan, groups: Collection[str]) -> MemoryPool | None:
        new = [load for load in self._loads(other) if load.group in groups]
        if {load.group for load in new} < {stage.stage for stage in other.stages if stage.devices} & set(groups):
            return None
        loads = [*self._loads(plan), *new]
        if not self.is_on_gpu:  # the weights of both are published
            return host_place(self.host_bytes, loads, shared=2 * stored_bytes(self.shape, self.config))
        return max(self._places_at_once(loads), key=lambda place: place.missing_bytes)

    def _places_at_once(self, loads: Sequence[Load]) -> list[MemoryPool]:
        """Every GPU with the ranks that are on it."""
        return [
            at_once_place(
                f"{device.name} (device {index})",
                device.memory_bytes,
                [load for load in loads if index in load.devices],
            )
            for index, device in enumerate(self.cluster.devices)
        ]

    def fullest_place(self, plan: Plan) -> MemoryPool:
        """The device that has least to spare; the host where the devices are CPU slots, on which offloading leaves
        everything where it is, or where it lacks memory for published weights."""
        loads, devices = self._loads(plan), self.cluster.devices
        if not self.is_on_gpu:
            return host_place(self.host_bytes, loads, shared=stored_bytes(self.shape, self.config))
        versions = versions_place(self.host_bytes, loads, lambda index: devices[index].node)
        if versions.missing_bytes > 0:
            return versions
        places = [
            device_place(
                f"{device.name} (device {index})", device.memory_bytes, [x for x in loads if index in x.devices]
            )
            for index, device in enumerate(devices)
        ]
        return max(places, key=lambda place: place.missing_bytes)

    def _loads(self, plan: Plan) -> list[Load]:
        device_bytes = self.cluster.devices[0].memory_bytes
        loads = loads_of(
            self.config,
            self.shape,
            plan,
            on_gpu=self.is_on_gpu,
            device_bytes=device_bytes,
            host_bytes=self.host_bytes,
            nodes=nodes_of(plan, self.cluster),
        )
        return [replace(load, held_bytes=self.held_bytes.get(load.group)) for load in loads]


def nodes_of(plan: Plan, cluster: Cluster) -> list[int]:
    """The nodes of the devices that the plan uses."""
    return sorted({cluster.devices[index].node for stage in plan.stages for index in stage.devices})


# -- published weights -------------------------------------------------------------------------------------------------


def kept_weights(
    config: ReasoningConfig, shape: ModelShape, num_ranks: int, *, nodes: Sequence[int] = (0,), on_gpu: bool = True
) -> KeptWeights:
    """What one of `num_ranks` ranks of the actor keeps of published versions until the engines have received them: a
    version for each step that is under way. Of an adapter that is synced alone, these are versions of the adapter, and
    one of its base.

    Args:
        nodes: nodes of trainer and engines.
    """
    spec, num_versions = weight_sync_of(config.cluster, nodes, on_gpu=on_gpu), config.steps_ahead + 1
    job = job_shape(config, on_gpu=on_gpu)
    synced_bytes = job.synced_weights_bytes(shape) // num_ranks
    synced, frozen = shape.num_parameters, 0
    if job.syncs_adapter and job.adapter is not None:
        synced, frozen = job.adapter.num_parameters(shape), shape.num_parameters

    def sizes(num_parameters: int, served_bytes: int) -> dict[str, Any]:
        trained_bytes = DTYPE_BYTES["float32"] * num_parameters // num_ranks
        options = config.cluster.weight_sync_options
        return {"trained_bytes": trained_bytes, "served_bytes": served_bytes, "options": options}

    version, base = sizes(synced, synced_bytes), sizes(frozen, job.served.dtype_bytes * frozen // num_ranks)
    quantized = 0 if config.rollout.quantization is None else synced_bytes  # a copy, while a version is published
    of_gpu, of_host = spec.gpu_bytes, partial(spec.host_bytes, on_gpus=on_gpu)
    return KeptWeights(
        num_versions=num_versions,
        gpu_bytes=num_versions * of_gpu(**version) + of_gpu(**base) + quantized if on_gpu else 0,
        host_bytes=num_versions * of_host(**version) + of_host(**base) + (0 if on_gpu else quantized),
    )


def stored_bytes(shape: ModelShape, config: ReasoningConfig) -> int:
    """Bytes of published weights of all policies in the memory of a machine without GPUs, which its processes share."""
    trained = [own for own in policy_shapes(config, shape).values() if own is not None]
    job = job_shape(config, on_gpu=False)
    synced = [job.synced_weights_bytes(own) for own in trained]
    once = [
        job.served_weights_bytes(own) - size if job.syncs_adapter else 0
        for own, size in zip(trained, synced, strict=True)
    ]
    versions = [kept_weights(config, own, 1, on_gpu=False).host_bytes for own in trained]
    sizes = zip(synced, once, versions, strict=True)
    return sum(max(NUM_STORED * size + frozen, num_bytes) for size, frozen, num_bytes in sizes)


# -- how many tokens a pass takes --------------------------------------------------------------------------------------


def with_token_budget(
    config: ReasoningConfig, shape: ModelShape, *, device_bytes: int, num_devices: int, nodes: Sequence[int] = (0,)
) -> ReasoningConfig:
    """The config with what memory decides, for GPUs: a number in place of `actor.max_tokens_per_micro_batch: auto`, and
    whether activations are recomputed, where the recipe leaves that open.

    The number is the most tokens with which the ranks of all roles fit on one device at once, unless these are too few
    to keep it busy; or else the most with which trainer and reference fit alone. Activations are recomputed where fewer
    tokens than keep it busy fit without, or not the micro-batch that the recipe names, and recomputing makes it fit.

    Args:
        config: resolved, see `rlinf.config.devices.resolve_for_devices`.
        device_bytes: memory of a device.
        num_devices: of the run, on `nodes`.
    """
    options, spec = config.actor.backend_options, config.actor.trainer_spec
    is_open = config.actor.max_tokens_per_micro_batch == "auto"
    if is_open and not spec.packs_sequences:
        return config
    place = (device_bytes, num_devices, nodes)
    ways = [config]
    smaller = spec.smaller(options, config.model.dtype, num_devices)
    if "recompute" not in options and any(option == "recompute" for option, _ in smaller):
        ways.append(with_actor(config, backend_options={**options, "recompute": True}))
    if not is_open:
        if len(ways) == 1:
            return config
        return next((way for way in ways if _trainer_fits(way, shape, *place)), config)
    busy = [(way, BUSY_TOKENS, at_once) for way in ways for at_once in (True, False)]
    for way, least, at_once in [*busy, *((way, 1, False) for way in ways)]:
        if (size := _token_budget(way, shape, *place, least=least, at_once=at_once)) is not None:
            return with_actor(way, max_tokens_per_micro_batch=size)
    return with_actor(config, max_tokens_per_micro_batch=config.rollout.max_sequence_tokens)


def with_budget_on(config: ReasoningConfig, shape: ModelShape, cluster: Cluster) -> ReasoningConfig:
    """`with_token_budget` for the GPUs of a cluster, all of its nodes, whichever a plan uses."""
    return with_token_budget(
        config,
        shape,
        device_bytes=min(device.memory_bytes for device in cluster.devices),
        num_devices=len(cluster.devices),
        nodes=range(cluster.num_nodes),
    )


def recompute_notes(config: ReasoningConfig, settled: ReasoningConfig) -> list[str]:
    """Says that `with_token_budget` has made activations be recomputed, if it has.

    Args:
        settled: what it made of the config.
    """
    if settled.actor.backend_options == config.actor.backend_options:
        return []
    return ["actor.backend_options.recompute=true: activations do not fit the GPU's memory without"]


def _token_budget(
    config: ReasoningConfig,
    shape: ModelShape,
    device_bytes: int,
    num_devices: int,
    nodes: Sequence[int],
    *,
    least: int,
    at_once: bool,
) -> int | None:
    """The largest number of tokens for `with_token_budget` that fits; None if that is less than `least`.

    Args:
        at_once: all roles on one device, rather than trainer and reference alone.
    """
    longest, place = config.rollout.max_sequence_tokens, (device_bytes, num_devices, nodes)
    halved = (MOST_TOKENS >> halvings for halvings in range(MOST_TOKENS.bit_length()))
    sizes = [*(size for size in halved if size > longest), longest]
    job = job_shape(with_actor(config, max_tokens_per_micro_batch=longest), device_bytes=device_bytes)
    num_items = max(1, min(-(-job.num_groups // num_devices), job.max_sequences // job.lengths.group_size))

    def fits(size: int) -> bool:
        changed = with_actor(config, max_tokens_per_micro_batch=size)
        if not at_once:
            return _trainer_fits(changed, shape, *place, num_items=num_items)
        loads = loads_alone(changed, shape, *place, num_items=num_items)
        return at_once_place("", device_bytes, loads).missing_bytes <= 0

    return next((size for size in sizes if size >= least and fits(size)), None)


def _trainer_fits(
    config: ReasoningConfig,
    shape: ModelShape,
    device_bytes: int,
    num_devices: int,
    nodes: Sequence[int],
    *,
    num_items: int = 1,
) -> bool:
    """Whether a rank of each role that trains or scores fits on a GPU that it has for itself; arguments as
    `loads_alone`."""
    loads = loads_alone(config, shape, device_bytes, num_devices, nodes, num_items=num_items)
    return all(_fits_alone(load, device_bytes) for load in loads if load.group != "rollout")


def _fits_alone(load: Load, device_bytes: int) -> bool:
    """Whether a rank fits on a GPU with what the allocator reserves for passes, and CUDA's own memory."""
    passes = ALLOCATED_SHARE * load.memory.work(load.num_items)
    return load.memory.state + passes + load.context_bytes + load.versions.gpu_bytes <= device_bytes


def with_actor(config: ReasoningConfig, **values: Any) -> ReasoningConfig:
    """The config with other values of its section `actor`."""
    return config.model_copy(update={"actor": config.actor.model_copy(update=values)})


def loads_alone(
    config: ReasoningConfig,
    shape: ModelShape,
    device_bytes: int,
    num_devices: int,
    nodes: Sequence[int],
    *,
    num_items: int = 1,
) -> list[Load]:
    """A rank of each worker group on GPUs, all of which it has for itself; arguments as `with_token_budget`.

    Args:
        num_items: prompts that a rank works on at once.
    """
    job = job_shape(config, device_bytes=device_bytes)
    size = config.actor.trainer_spec.num_ranks_of_replica(job)
    ranks = dict.fromkeys(config.trainers, ranks_in_replicas(config, size, num_devices))
    versions = {
        group: kept_weights(config, own, ranks[group], nodes=nodes)
        for group, own in policy_shapes(config, shape).items()
        if own is not None
    }
    return [
        Load(
            group=group,
            memory=memory,
            num_items=num_items,
            offload=True,
            num_communicators=_num_communicators(config, group, job, ranks.get(group, 1)),
            versions=versions.get(group, KeptWeights()),
        )
        for group, memory in rank_memory(config, shape, job, ranks).items()
    ]


# -- settings that fit -------------------------------------------------------------------------------------------------


def check_fits(
    config: ReasoningConfig,
    shape: ModelShape,
    place_of: Callable[[ReasoningConfig], MemoryPool],
    job_of: Callable[[ReasoningConfig], JobShape],
    *,
    num_ranks: int,
    most_ranks: int,
    num_devices: int,
    num_engine_devices: int,
    nodes: Sequence[int],
) -> None:
    """Checks that a config has enough memory.

    Args:
        place_of: returns the fullest device, or the host, for a config.
        job_of: returns the planner's job shape for a config on these devices.
        num_ranks: ranks of the actor; `most_ranks` could be, on `num_devices`.
        num_engine_devices: devices of the rollout.
        nodes: nodes of all these devices.

    Raises: UserError with the nearest settings that fit.
    """

    def shortage_of(changed: ReasoningConfig) -> str | None:
        """Why an engine's KV pool is too small for the longest sequence."""
        text = changed.rollout.engine_spec.shortage(shape, job_of(changed))
        return text and f"rollout.engine={changed.rollout.engine}: {text}"

    def fitting(changed: ReasoningConfig) -> int | None:
        cut = cut_refusal(changed, shape, num_devices)
        if cut or num_engine_devices % changed.rollout.tensor_parallel_size or shortage_of(changed):
            return None
        place = place_of(changed)
        return None if place.missing_bytes > 0 else place.needed_bytes

    shortage = shortage_of(config)
    place = None if shortage else place_of(config)
    if place is not None and place.missing_bytes <= 0:
        return
    fits = fitting_changes(config, list(_axes(config, num_ranks, most_ranks, num_devices, nodes)), fitting)
    hint = hint_of(fits, NOTHING_FITS)
    raise UserError(shortage or "", hint=hint) if place is None else does_not_fit(shape, place, hint)


def cut_refusal(config: ReasoningConfig, shape: ModelShape, num_devices: int | None = None) -> UserError | None:
    """Returns why engines cannot split the model across their devices, or the actor's backend across `num_devices`.

    Args:
        num_devices: of the actor; None: only engines are checked.
    """
    if text := config.rollout.engine_spec.cut_problem(shape, config.rollout.tensor_parallel_size):
        return UserError(f"rollout.tensor_parallel_size{text}")
    if refusal := quantization_refusal(config, shape, on_gpu=True):
        return refusal
    if num_devices is None:
        return None
    options, size = config.actor.backend_options, config.actor.ranks_per_replica or 1
    if problem := config.actor.trainer_spec.model_problem(options, shape):
        return UserError("actor.backend_options." + "".join(problem))
    if num_devices % size:
        return UserError(
            f"cluster.num_devices={num_devices} is not a multiple of the {size} ranks that hold one copy of the model "
            f"(actor.backend_options: {', '.join(f'{key}={value}' for key, value in options.items())})",
            hint="change one of them",
        )
    return None


def quantization_refusal(config: ReasoningConfig, shape: ModelShape | None, *, on_gpu: bool) -> UserError | None:
    """Returns why engines cannot serve the model with quantized weights."""
    rollout = config.rollout
    if rollout.quantization is None:
        return None
    text = rollout.engine_spec.quantization_problem(shape, rollout.tensor_parallel_size, on_gpu=on_gpu)
    return UserError(f"rollout.quantization={rollout.quantization}: {text}") if text else None


def _axes(
    config: ReasoningConfig, num_ranks: int, most_ranks: int, num_devices: int, nodes: Sequence[int]
) -> Iterator[list[KeyChange]]:
    """Values of a key to try, mild ones first; the keys in the order of what they cost."""
    yield from trainer_axes(config, "micro_batch_groups", num_ranks, most_ranks, num_devices)
    yield from _version_axes(config, nodes)
    yield from _engine_axes(config, job_shape(config))
    yield from precision_axes(config)


def _version_axes(config: ReasoningConfig, nodes: Sequence[int]) -> Iterator[list[KeyChange]]:
    """Where steps overlap: a weight sync that keeps no versions on GPUs, or fewer versions."""
    if not (staleness := config.algorithm.max_staleness):
        return
    sizes: dict[str, Any] = {"trained_bytes": 1, "served_bytes": 1, "options": config.cluster.weight_sync_options}
    syncs = suitable_weight_syncs(EdgeEnds(sources=nodes, targets=nodes, on_gpus=True))
    if names := [spec.name for spec in syncs if not spec.gpu_bytes(**sizes)]:
        yield [KeyChange(key=("cluster", "weight_sync"), value=name) for name in names]
    yield [KeyChange(key=("algorithm", "max_staleness"), value=smaller) for smaller in reversed(range(staleness))]


def _engine_axes(config: ReasoningConfig, job: JobShape) -> Iterator[list[KeyChange]]:
    """What an engine may have otherwise."""
    rollout, spec = config.rollout, config.rollout.engine_spec
    yield from option_axes(("rollout", "engine_options"), spec.smaller(rollout.engine_options, job))
    if not spec.cuts_models:
        return
    size = rollout.tensor_parallel_size  # what its devices send each other
    yield [KeyChange(key=("rollout", "tensor_parallel_size"), value=size << doublings) for doublings in (1, 2, 3)]
    if config.served_dtype == "float32":  # precision
        yield [KeyChange(key=("rollout", "dtype"), value="bfloat16")]

"""Whether the model of a supervised run fits: what each rank of the trainer will hold, by the longest example of the
data, and which smaller settings would fit, before any process starts."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from rlinf.config.supervised import SupervisedConfig
from rlinf.jobs.trainer_memory import (
    adapter_of,
    does_not_fit,
    hint_of,
    most_ranks,
    precision_axes,
    trainer_axes,
    trainer_stage,
)
from rlinf.planning.fitting import KeyChange, fitting_changes
from rlinf.planning.memory import Load, MemoryPool, PlanMemory, device_place, host_place
from rlinf_sched import Cluster, Plan
from rlinf_sched.derive import JobShape, Lengths, ModelShape
from rlinf_workers.trainers import DTYPE_BYTES

NOTHING_FITS = (
    "no other number of examples, precision or backend fits: use a smaller model, shorter examples (task.max_tokens "
    "with task.long_examples), actor.lora, more devices (cluster.num_devices), or devices with more memory"
)


@dataclass(frozen=True)
class SupervisedMemory(PlanMemory):
    """Memory use of the trainer, the only worker."""

    config: SupervisedConfig
    shape: ModelShape
    cluster: Cluster
    host_bytes: int
    num_tokens: int
    """Tokens of the longest row of an example."""
    num_rows: int
    """Rows of an example: 2 for a pair of answers."""

    @property
    def is_on_gpu(self) -> bool:
        return self.cluster.devices[0].kind == "cuda"

    def check(self, plan: Plan) -> None:
        config, stage = self.config, plan.stages[0]

        def place_of(changed: SupervisedConfig) -> MemoryPool:
            moved = replace(plan, stages=(trainer_stage(config, changed, stage),))
            return replace(self, config=changed).fullest_place(moved)

        def fitting(changed: SupervisedConfig) -> int | None:
            if len(stage.devices) % (changed.actor.ranks_per_replica or 1):
                return None
            place = place_of(changed)
            return None if place.missing_bytes > 0 else place.needed_bytes

        place = place_of(config)
        if place.missing_bytes <= 0:
            return

        def axes() -> Iterator[list[KeyChange]]:
            most = most_ranks(stage, config.actor.batch_size)
            yield from trainer_axes(config, "micro_batch_examples", stage.num_ranks, most, len(stage.devices))
            yield from precision_axes(config)

        raise does_not_fit(self.shape, place, hint_of(fitting_changes(config, list(axes()), fitting), NOTHING_FITS))

    def all_fit_at_once(self, plan: Plan) -> bool:
        """Always: one worker group has the devices for itself."""
        return self.is_on_gpu

    def fullest_place(self, plan: Plan) -> MemoryPool:
        loads = self._loads(plan)
        if not self.is_on_gpu:
            return host_place(self.host_bytes, loads)
        device = self.cluster.devices[plan.stages[0].devices[0]]
        return device_place(device.name, device.memory_bytes, loads[:1])

    def place_beside(self, plan: Plan, other: Plan, groups: Collection[str]) -> MemoryPool | None:
        if self.is_on_gpu:
            return None  # the trainer has its GPUs for itself
        return host_place(self.host_bytes, [*self._loads(plan), *self._loads(other)])

    def _loads(self, plan: Plan) -> list[Load]:
        stage = plan.stages[0]
        memory = self.config.actor.trainer_spec.rank_memory(self.shape, self._job(), stage.num_ranks)
        memory = replace(memory, sync=0)  # no engine is served
        return [
            Load(group=stage.stage, memory=memory, num_items=1, offload=False, devices=stage.devices_of(rank))
            for rank in range(stage.num_ranks)
        ]

    def _job(self) -> JobShape:
        actor = self.config.actor
        return JobShape(
            lengths=Lengths(
                mean_tokens=self.num_tokens,
                limit_tokens=self.num_tokens,
                prompt_tokens=0,
                group_size=self.num_rows,
            ),
            num_groups=actor.batch_size,
            dtype_bytes=DTYPE_BYTES[self.config.model.dtype],
            num_shards=actor.resolved_shards,
            trainer_options=actor.backend_options,
            micro_batch_groups=min(actor.micro_batch_examples, -(-actor.batch_size // actor.resolved_shards)),
            max_tokens_per_micro_batch=actor.max_tokens_per_micro_batch,
            adapter=adapter_of(actor.lora),
            on_gpu=self.is_on_gpu,
        )

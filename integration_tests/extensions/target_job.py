"""A custom job: it learns where a target lies. Nothing here imports torch, so that it is validated and planned at once;
its workers, in target_workers.py, are named by their import paths."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import Field

from rlinf.config.base import Conflict, Section
from rlinf.config.common import JobConfig
from rlinf.jobs.spec import JobSpec
from rlinf_sched import Cluster, InstanceProfile, Problem, Profiles, StageProfile, TimePoint
from rlinf_sched.derive import gpu_cluster
from rlinf_workers import Flow

WORKERS = "integration_tests.extensions.target_workers"
MODEL_BYTES = 1 << 20


class TargetConfig(Section):
    """Where it lies."""

    position: float = Field(default=3.0, description="The hidden position.")
    num_guesses: int = Field(default=32, ge=2, description="Guesses a step.")


class TargetJobConfig(JobConfig):
    """The recipe's keys."""

    job: str = Field(description="The import path of this job.")
    target: TargetConfig = Field(default=TargetConfig(), description="What is to be found.")

    @property
    def roles(self) -> tuple[str, ...]:
        return ("sampler", "judge", "actor")

    def conflicts(self) -> Iterable[Conflict]:
        yield from super().conflicts()
        if self.target.num_guesses % 2:
            yield Conflict(keys=("target.num_guesses",), text=f"={self.target.num_guesses} is odd; use an even number")


def training_flow(config: TargetJobConfig) -> Flow:
    """The one declaration: for the run, and for the planner."""
    flow = (
        Flow("target")
        .worker("sampler", f"{WORKERS}:Sampler")
        .worker("judge", f"{WORKERS}:Judge", config.target.position)
    )
    flow.worker("actor", f"{WORKERS}:Learner")
    flow.stage("sampler", "draw", reads="seeds", writes="guesses")
    flow.stage("judge", "score", reads="guesses", writes="scored", needs_device=False)
    flow.stage("actor", "learn", reads="scored", ordered=True, trains=True, num_parts=1)
    return flow.weights("actor", to="sampler")


def _stage(seconds: float, **memory: Any) -> StageProfile:
    return StageProfile(
        instances=(InstanceProfile(points=(TimePoint(num_items=1, seconds=seconds),), **memory),),
        weights_bytes=memory.get("state_bytes", 0),
        source="made up",
    )


@dataclass(frozen=True, kw_only=True)
class TargetSpec(JobSpec):
    def preload(self, config: TargetJobConfig) -> Sequence[str]:
        return [WORKERS]

    def problem(self, config: TargetJobConfig, num_devices: int, *, gpu: str, env_step_s: float | None) -> Problem:
        graph = training_flow(config).graph()
        return Problem(
            flow=replace(graph, item_bytes={"guesses": 16, "scored": 16}),
            profiles=Profiles(
                stages={
                    "sampler": _stage(0.02, state_bytes=MODEL_BYTES),
                    "judge": _stage(0.001, num_devices=0),
                    "actor": _stage(0.01, state_bytes=MODEL_BYTES),
                }
            ),
            cluster=gpu_cluster(gpu, num_devices),
            num_items=config.target.num_guesses,
        )

    def plan_notes(self, config: TargetJobConfig, cluster: Cluster, *, env_step_s: float | None) -> Sequence[str]:
        return ("the times of this job are made up",)


SPEC = TargetSpec(
    name="target", implementation="integration_tests.extensions.target_run:TargetJob", config=TargetJobConfig
)

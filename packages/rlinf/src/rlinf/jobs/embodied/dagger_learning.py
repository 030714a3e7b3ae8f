"""How the embodied job learns from an expert that it asks while the policy acts: DAgger."""

from __future__ import annotations

from typing import Any

from rlinf.config.embodied import EmbodiedConfig
from rlinf.errors import UserError
from rlinf.jobs.embodied.buffer_memory import demonstrated_in, size_of
from rlinf.jobs.embodied.learning import Learning, is_soft
from rlinf.jobs.training import optimizer_settings
from rlinf_algos import DaggerAlgorithm
from rlinf_workers.models import LoraSettings
from rlinf_workers.policies import Needs, PolicySettings
from rlinf_workers.roles import DaggerActorSettings, ExpertQueries, label_bytes
from rlinf_workers.trainers import BackendSettings, OptimizerSettings


class DaggerLearning(Learning):
    """The supervised loss of the policy, in states that it visits and an expert labels."""

    keeps_demonstrations = True

    def __init__(self, config: EmbodiedConfig, algorithm: DaggerAlgorithm) -> None:
        self._config, self._algorithm = config, algorithm

    def check(self, policy: PolicySettings, needs: Needs, host_bytes: int) -> None:
        if is_soft(policy):
            raise UserError(
                f"policy.name={policy.name} has no supervised loss: it is trained by off-policy algorithms",
                hint="use --policy.name auto, or --algorithm.name sac",
            )
        self._check_budget(needs.chunk_size)
        self._check_buffers(policy, needs, host_bytes)

    def _check_budget(self, chunk_size: int) -> None:
        """Each shard needs something to imitate, if there are no demonstrations."""
        budget, num_groups = self._algorithm.max_expert_actions, self._config.env.num_groups
        if budget is not None and budget < num_groups * chunk_size and self._config.sft_warm_up is None:
            raise UserError(
                f"algorithm.max_expert_actions={budget} is less than one answer of {chunk_size} actions in each of "
                f"env.num_groups={num_groups} groups",
                hint=f"use {num_groups * chunk_size} at least, or give demonstrations (--sft_warm_up.source)",
            )

    def _check_buffers(self, policy: PolicySettings, needs: Needs, host_bytes: int) -> None:
        """Counts what the expert may be asked, and the memory of its answers, and notes both."""
        queries, algorithm = self.queries(needs), self._algorithm
        num_asked = sum(
            queries.num_groups * algorithm.num_asked(step, queries.num_envs, queries.num_answers)
            for step in range(self._config.run.num_steps)
        )
        if algorithm.max_expert_actions is not None:
            num_asked = min(num_asked, algorithm.max_expert_actions // needs.chunk_size)
        row_bytes = label_bytes(
            {name: policy.fields[name] for name in needs.reads}, needs.chunk_size * policy.actions.low.numel()
        )
        num_bytes = min(num_asked, algorithm.buffer_size) * row_bytes
        demonstrated = demonstrated_in(self._config, row_bytes)
        size = f"{size_of(num_bytes)}{demonstrated.text}"
        if num_bytes + demonstrated.num_bytes > host_bytes:
            raise UserError(
                f"algorithm.buffer_size={algorithm.buffer_size}: the expert's answers take {size}, and this machine "
                f"has {size_of(host_bytes)}",
                hint="use a smaller one, or a smaller algorithm.query_rate",
            )
        self.notes = (
            f"dagger: the expert names up to {num_asked * needs.chunk_size:,} actions beside those of demonstrations "
            f"({num_asked:,} answers, {size} of the actor's host memory)",
            *self._optimizer_notes(),
        )

    def _optimizer_notes(self) -> tuple[str, ...]:
        if self._config.sft_warm_up is None or self._config.actor.lr_warmup_steps:
            return ()
        return (
            "actor.lr_warmup_steps=0: the optimizer begins anew after the SFT warm-up, and its first steps, which move "
            "every weight by the learning rate, may undo what was learned; --actor.lr_warmup_steps 50 lets it rise",
        )

    def queries(self, needs: Needs) -> ExpertQueries:
        env = self._config.env
        return ExpertQueries(
            algorithm=self._algorithm,
            num_groups=env.num_groups,
            num_envs=env.num_envs // env.num_groups,
            num_answers=env.num_steps // needs.chunk_size,
            chunk_size=needs.chunk_size,
        )

    def rollout(self, policy: PolicySettings, needs: Needs) -> tuple[Any, ...]:
        return (policy,)

    def actor(
        self,
        policy: PolicySettings,
        needs: Needs,
        backend: BackendSettings,
        *,
        sft_warm_up: OptimizerSettings | None,
        lora: LoraSettings | None,
    ) -> DaggerActorSettings:
        return DaggerActorSettings(
            policy=policy,
            algorithm=self._algorithm,
            backend=backend,
            optimizer=optimizer_settings(self._config.actor),
            sft_warm_up=sft_warm_up,
            chunk_size=needs.chunk_size,
            micro_batch_size=self._config.actor.micro_batch_size,
            lora=lora,
        )

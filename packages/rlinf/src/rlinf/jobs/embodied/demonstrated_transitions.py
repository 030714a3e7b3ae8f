"""Demonstrations as transitions, for algorithms that draw a share of each batch from them (RLPD, arXiv:2302.02948).

They are read or recorded once, before the first step, and sent to the actor, which keeps them beside its replay buffers
and in its checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlinf.config.embodied import DemonstrationsConfig, EmbodiedConfig
from rlinf.errors import UserError
from rlinf.jobs.demonstrations import DemonstrationReader, counted
from rlinf_envs import Demonstration
from rlinf_workers import Flow
from rlinf_workers.policies import Needs
from rlinf_workers.roles import EnvInterface, OffPolicyActor, Transitions, text_tensor

if TYPE_CHECKING:
    from rlinf.loop.session import Session


class DemonstratedTransitions:
    """The demonstrations of an off-policy run. Raises: as `DemonstrationReader`."""

    def __init__(
        self, settings: DemonstrationsConfig, config: EmbodiedConfig, interface: EnvInterface, needs: Needs
    ) -> None:
        self._settings, self._needs = settings, needs
        self._num_shards = config.actor.num_shards
        self._terminates = not config.env.ignore_terminations
        self._labels_success = config.success_classifier is not None
        self._reader = DemonstrationReader(settings, config, interface, needs)
        self._flow: Flow | None = None

    def flows_of(self, train: Flow) -> list[Flow]:
        self._flow = Flow("demonstrations").workers_of(train, "actor")
        return [self._flow.stage("actor", OffPolicyActor.remember, reads="demonstrated", dispatch="key", ordered=True)]

    def run(self, session: Session) -> None:
        """Raises: UserError where the experts fail all the time, or demonstrations have no rewards."""
        assert self._flow is not None, "flows_of comes first"
        demos = self._reader.read(session)
        if self._labels_success:
            demos = [replace(demo, rewards=_only_last(demo.rewards)) for demo in demos]
        if not any(bool(demo.rewards.any()) for demo in demos):
            raise UserError(
                f"demonstrations.source={self._settings.source}: all rewards are 0, and off-policy algorithms learn "
                "from rewards",
                hint="use a source with rewards, such as experts",
            )
        transitions = transitions_of(demos, self._needs, terminates=self._terminates)
        count = len(transitions.rewards)
        if count < self._num_shards:
            raise UserError(
                f"demonstrations: they have {count} transitions, fewer than actor.num_shards={self._num_shards}",
                hint="use more demonstrations",
            )
        session.note(f"demonstrations: {counted(demos)}, {count} transitions")
        shards = [_rows(transitions, shard, self._num_shards) for shard in range(self._num_shards)]
        session.run_flow(self._flow, step=0, feeds={"demonstrated": shards})


def _only_last(rewards: Tensor) -> Tensor:
    """The rewards of a demonstration where success alone is rewarded, which is what its last action reached."""
    rewards = torch.zeros_like(rewards)
    rewards[-1] = 1
    return rewards


def transitions_of(demonstrations: Sequence[Demonstration], needs: Needs, *, terminates: bool) -> Transitions:
    """All transitions of successful episodes, [N, 1, ...]; group 0.

    Of T actions, a chunk of K begins at each. If success ends an episode (`terminates`), so does the last transition,
    whose next observation does not count; the chunk of a transition that reaches the end repeats the last action, as
    the environment ignores the actions after it. Otherwise only chunks whose next observation was recorded are used.
    """
    columns: dict[str, list[Tensor]] = {}
    for demo in demonstrations:
        for name, values in _columns(demo, needs, terminates=terminates).items():
            columns.setdefault(name, []).append(values)
    whole = {name: torch.cat(parts)[:, None] for name, parts in columns.items()}
    return Transitions(
        group=0,
        fields={name: whole[f"here {name}"] for name in needs.reads},
        next_fields={name: whole[f"next {name}"] for name in needs.reads},
        actions=whole["actions"],
        rewards=whole["rewards"],
        terminated=whole["terminated"],
        policy_version=0,
    )


def _columns(demo: Demonstration, needs: Needs, *, terminates: bool) -> dict[str, Tensor]:
    num_actions, size = len(demo.actions), needs.chunk_size
    starts = torch.arange(num_actions if terminates else max(0, num_actions - size))
    after = starts[:, None] + torch.arange(size)
    is_executed = after < num_actions
    after = after.clamp(max=num_actions - 1)
    ends = (starts + size).clamp(max=num_actions - 1)
    columns = {
        "actions": demo.actions.reshape(num_actions, -1)[after],
        "rewards": (demo.rewards[after] * is_executed).sum(1),
        "terminated": torch.full(starts.shape, terminates) & (starts + size >= num_actions),
    }
    for name in needs.reads:
        values = demo.observations[name]
        values = values if isinstance(values, Tensor) else text_tensor(values)
        columns |= {f"here {name}": values[starts], f"next {name}": values[ends]}
    return columns


def _rows(transitions: Transitions, shard: int, num_shards: int) -> Transitions:
    """Every `num_shards`-th transition."""

    def chosen(values: Tensor) -> Tensor:
        return values[shard::num_shards].contiguous()

    return Transitions(
        group=shard,
        fields={name: chosen(values) for name, values in transitions.fields.items()},
        next_fields={name: chosen(values) for name, values in transitions.next_fields.items()},
        actions=chosen(transitions.actions),
        rewards=chosen(transitions.rewards),
        terminated=chosen(transitions.terminated),
        policy_version=0,
    )

"""A ManiSkill batch as the rows of a vector: GPU physics steps all rows at once, in one process.

On the GPU, the start of an episode depends only on its seed, because each row has its own generators
(`maniskill_resets`). But the same actions then lead to nearly the same states, not to bitwise equal ones: PhysX keeps
contact data over a reset, and its parallel sums have no fixed order.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rlinf_envs.adapters.maniskill.resets import ExactReset, KeptTargets, begin_each_row_by_its_seed
from rlinf_envs.adapters.maniskill.simulation import ManiSkillSimulation
from rlinf_envs.adapters.maniskill.tasks import registered_tasks
from rlinf_envs.core.episodes import require_envs
from rlinf_envs.core.lockstep import RowsStep
from rlinf_envs.core.protocol import Observation
from rlinf_envs.errors import EnvError

NOT_TO_THE_BIT = (
    "ManiSkill simulates on the GPU: an episode begins where its seed says, but the same actions do not lead to the "
    "same numbers to the bit (rlinf_envs.adapters.maniskill.rows)"
)
OWN_OBJECTS = (
    "ManiSkill builds this task's objects by seed, and on the GPU once for each row: an episode has the objects of its "
    "row, whatever its seed"
)


class ManiSkillRows:
    """`rlinf_envs.core.lockstep.RowsSimulator` of one ManiSkill environment with `num_envs` rows; options as for
    `make_maniskill`.

    Args:
        rows_end_together: all episodes have the same length, so no row is reset while others continue.
        on_gpu: False: physics on the CPU, which ManiSkill supports for one row only; its resets are exact.
    """

    def __init__(
        self, task: str, num_envs: int, *, rows_end_together: bool = False, on_gpu: bool = True, **options: Any
    ) -> None:
        require_envs(num_envs)
        builds_by_seed = on_gpu and _builds_by_seed(registered_tasks()[task].cls)
        if builds_by_seed:
            options = {"reconfiguration_freq": 0} | options  # one row behaves like many
        self._simulation = ManiSkillSimulation(task, num_envs=num_envs, on_gpu=on_gpu, **options)
        self._env = self._simulation.env
        self.num_envs = num_envs
        self._settles = hasattr(self._env, "_settle")  # ManiSkill's name for it
        if on_gpu:
            self._require_rows_apart(task, rows_end_together)
        if not self._settles:
            begin_each_row_by_its_seed(self._env)
        with torch.inference_mode():
            self._exact = None if on_gpu else ExactReset(self._env)
        self.notes = self._simulation.notes + ((NOT_TO_THE_BIT,) if on_gpu else ())
        if builds_by_seed:
            self.notes += (OWN_OBJECTS,)
        self.action_spec = self._simulation.action_spec
        self.reset(range(num_envs), [0] * num_envs)
        self.observation_spec = self._simulation.spec_of(self._simulation.observe())

    @torch.inference_mode()
    def reset(self, rows: Sequence[int], seeds: Sequence[int]) -> None:
        options: dict[str, Any] = {} if self._exact is None else dict(self._exact.prepare())
        options["env_idx"] = torch.tensor(list(rows), device=self._env.device)
        if self._settles:
            options["episode_id"] = torch.tensor([seeds[row] for row in rows], device=self._env.device)
        targets = KeptTargets(self._env) if len(rows) < self.num_envs else None
        # ManiSkill needs the seeds of all rows, even if it resets only some.
        self._simulation.reset(list(seeds), options)
        if targets is not None and targets.restore(rows):
            self._simulation.look_again()  # some robots observe their controllers' targets

    @torch.inference_mode()
    def step(self, actions: np.ndarray) -> RowsStep:
        rewards, terminated, success = self._simulation.step(actions)
        return RowsStep(
            rewards=_on_host(rewards, np.float32),
            terminated=_on_host(terminated, np.bool_),
            success=None if success is None else _on_host(success, np.bool_),
        )

    def observe(self, rows: Sequence[int]) -> Observation:
        chosen = slice(None) if len(rows) == self.num_envs else list(rows)
        # Through numpy, because inference-mode tensors are of little use outside of it.
        observation: Observation = {
            name: torch.from_numpy(value[chosen].to("cpu", copy=True).numpy())
            for name, value in self._simulation.observe().items()
        }
        if self._simulation.instruction is not None:
            observation["instruction"] = [self._simulation.instruction] * len(rows)
        return observation

    def render(self) -> np.ndarray:
        return self._simulation.render()

    def close(self) -> None:
        self._simulation.close()

    def _require_rows_apart(self, task: str, rows_end_together: bool) -> None:
        """Raises: EnvError if a row cannot be reset while others continue."""
        if self._settles and not rows_end_together:
            raise EnvError(
                f"{task}: ManiSkill lets its objects settle in a reset, which moves every row of a GPU simulation; set "
                "ignore_terminations=True, so that all rows end together, or options.sim_backend=cpu"
            )
        if self._env.reconfiguration_freq:
            raise EnvError(
                f"options.reconfiguration_freq={self._env.reconfiguration_freq}: the rows of a GPU simulation are "
                "built once, together; leave it out, or use options.sim_backend=cpu"
            )


def _builds_by_seed(task_class: Any) -> bool:
    """Returns whether ManiSkill rebuilds the task's objects per seed if there is only one row; such tasks define how
    often."""
    from mani_skill.envs.sapien_env import BaseEnv

    make = task_class.__init__
    return make is not BaseEnv.__init__ and "reconfiguration_freq" in inspect.signature(make).parameters


def _on_host(values: Any, dtype: type[np.generic]) -> np.ndarray:
    return torch.as_tensor(values).cpu().numpy().astype(dtype)

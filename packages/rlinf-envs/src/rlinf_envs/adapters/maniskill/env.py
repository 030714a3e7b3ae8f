"""ManiSkill3 tasks: on the CPU one PhysX scene per environment, N of them in a process; on a GPU one batch.

ManiSkill's own batching (`num_envs > 1`) exists on CUDA only (`maniskill_rows`); on the CPU it advises one process per
environment. Here, several environments share a process, which is as fast per core and starts in a fraction of the time.

Departs from ManiSkill as described in `maniskill_simulation`, and on the CPU by exact resets: the same seed and actions
give the same numbers in a used environment as in a new one (`maniskill_resets.ExactReset`; `exact_reset=False` disables
it). Trajectories are a function of seed and actions on one machine and build; other processors may round differently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from rlinf_envs.adapters.maniskill.resets import ExactReset
from rlinf_envs.adapters.maniskill.simulation import ManiSkillSimulation
from rlinf_envs.adapters.maniskill.tasks import registered_tasks, tasks_of
from rlinf_envs.core.lockstep import LockstepVector
from rlinf_envs.core.names import names_of
from rlinf_envs.core.protocol import FieldSpec
from rlinf_envs.core.vector import InProcessVector, SingleEnv, SingleObservation, SingleStep
from rlinf_envs.errors import EnvError

SIM_BACKENDS = ("auto", "cpu", "gpu")
NO_GPU_FOUND = "options.sim_backend=auto: no CUDA device was found, so ManiSkill simulates on the CPU"


def make_maniskill(
    task: str,
    num_envs: int,
    *,
    max_episode_steps: int | None = None,
    ignore_terminations: bool = False,
    **options: Any,
) -> InProcessVector | LockstepVector:
    """Creates `num_envs` environments of a ManiSkill task (for example "PushCube-v1") or suite
    (`maniskill_tasks.SUITES`).

    `max_episode_steps=None` takes the task's limit, for a suite the longest. Options:
        tasks=None               some of the suite's tasks; None: all. An episode with seed s has task number
                                 s modulo their number: seeds that count up sweep them, drawn seeds sample them
        cameras=None             pictures "image.<camera>" of these of the task's cameras, beside the state
        state="full"             "robot": the positions and velocities of the joints alone, for policies that have to
                                 see the rest; the only one that the tasks of a suite have in common
        obs_mode="state"         the full state as one vector; "rgb": the pictures of all cameras, the robot's own state
                                 and what the task adds; "rgb+state": the same pictures and the full state
        reward_mode="normalized_dense"   or "dense", "none", where the task has them, or "sparse": 1 where it is solved;
                                 "stages", for tasks of the suite bridge: see `StageReward`
        control_mode="pd_joint_delta_pos"
        image_size=None          side of the observation images in pixels; None: the task's own
        quality="fast"           "full": ManiSkill's default shader instead of its minimal one
        lite_robot=False         robots are drawn by their collision shapes, grey, at a fraction of the time
        render=False             whether `render()` works (it needs a Vulkan device, as images do)
        sim_backend="cpu"        "gpu": one batched simulation on the CUDA device, of one task; "auto": that where there
                                 is such a device and one task, else "cpu"
        render_backend="auto"    where to draw: "gpu", "cpu", "auto" (CUDA if torch has it, else the CPU)
        sim_freq, control_freq   Hz; None: the task's own
        instruction=None         a text handed out as observation "instruction"; None: ours (`maniskill_tasks`)
        exact_reset=True         see the module's text; on the CPU alone
    Every other option goes to the task's constructor (for example robot_uids="fetch").
    Raises EnvError for an unknown task (with close matches), missing assets and options that the task does not accept;
    RenderingUnavailableError if images are requested and rendering is not possible.
    """
    tasks = tasks_of(task, names_of(options.pop("tasks", None), "tasks"))
    first = tasks[0]
    limits = [registered_tasks()[name].max_episode_steps for name in tasks]
    limit = max_episode_steps if max_episode_steps is not None or None in limits else max(limits)
    on_gpu, notes = _choose_backend(tasks, options.pop("sim_backend", "cpu"))
    if on_gpu:
        return _on_gpu(first, num_envs, limit, ignore_terminations, options)
    if len(tasks) > 1:
        from rlinf_envs.adapters.maniskill.suite import ManiSkillSuite

        make: Callable[[], SingleEnv] = lambda: ManiSkillSuite(tasks, notes=notes, **options)  # noqa: E731
    else:
        make = lambda: ManiSkillEnv(first, notes=notes, **options)  # noqa: E731
    return InProcessVector(
        make,
        num_envs,
        max_episode_steps=limit,
        ignore_terminations=ignore_terminations,
    )


def _choose_backend(tasks: tuple[str, ...], backend: object) -> tuple[bool, tuple[str, ...]]:
    """Returns whether to simulate on the GPU, and notes about it.

    Raises: EnvError if the chosen backend is not available.
    """
    if backend not in SIM_BACKENDS:
        raise EnvError(f"options.sim_backend={backend!r}; allowed: {', '.join(SIM_BACKENDS)}")
    has_gpu = torch.cuda.is_available()
    if backend == "gpu" and len(tasks) > 1:
        raise EnvError(
            f"options.sim_backend=gpu: one GPU simulation has one task, and these are {len(tasks)} "
            f"({', '.join(tasks[:3])}{', ...' if len(tasks) > 3 else ''}); choose one as the id, or sim_backend=cpu"
        )
    if backend == "gpu" and not has_gpu:
        raise EnvError(
            "options.sim_backend=gpu: no CUDA device was found (torch.cuda.is_available() is False), and ManiSkill "
            "simulates batches on CUDA alone; use sim_backend=cpu, or a machine with an NVIDIA GPU and a CUDA build of "
            "torch"
        )
    if backend == "auto" and not has_gpu:
        return False, (NO_GPU_FOUND,)
    return backend != "cpu" and len(tasks) == 1, ()


def _on_gpu(
    task: str, num_envs: int, limit: int | None, ignore_terminations: bool, options: dict[str, Any]
) -> LockstepVector:
    from rlinf_envs.adapters.maniskill.rows import ManiSkillRows

    if "exact_reset" in options:
        raise EnvError("options.exact_reset: resets on the GPU are not exact; leave it out, or use sim_backend=cpu")
    rows = ManiSkillRows(task, num_envs, rows_end_together=ignore_terminations, **options)
    return LockstepVector(rows, max_episode_steps=limit, ignore_terminations=ignore_terminations)


class ManiSkillEnv:
    """One ManiSkill environment on the CPU (`rlinf_envs.core.vector.SingleEnv`); options as for `make_maniskill`."""

    def __init__(self, task: str, *, exact_reset: bool = True, notes: tuple[str, ...] = (), **options: Any) -> None:
        self._simulation = ManiSkillSimulation(task, **options)
        with torch.inference_mode():
            self._exact = ExactReset(self._simulation.env) if exact_reset else None
        self.notes = notes + self._simulation.notes
        if not exact_reset:
            self.notes += ("exact_reset=False: an episode also depends on what its environment ran before",)
        self.action_spec = self._simulation.action_spec
        self.reset(0)
        self.observation_spec: Mapping[str, FieldSpec] = self._simulation.spec_of(self._simulation.observe())

    @torch.inference_mode()
    def reset(self, seed: int) -> None:
        self._simulation.reset(seed, {} if self._exact is None else self._exact.prepare())

    def step(self, action: np.ndarray) -> SingleStep:
        reward, terminated, success = self._simulation.step(action)
        return SingleStep(
            reward=float(reward),
            terminated=bool(terminated),
            truncated=False,  # the vector applies the time limit
            success=None if success is None else bool(success),
        )

    @torch.inference_mode()
    def observe(self) -> SingleObservation:
        """Returns ManiSkill's batch of one as a row."""
        row: dict[str, np.ndarray | str] = {
            name: value[0].cpu().numpy() for name, value in self._simulation.observe().items()
        }
        if self._simulation.instruction is not None:
            row["instruction"] = self._simulation.instruction
        return row

    def render(self) -> np.ndarray:
        return self._simulation.render()[0]

    def close(self) -> None:
        self._simulation.close()

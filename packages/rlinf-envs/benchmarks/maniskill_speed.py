"""Steps per second of a ManiSkill task: in one process, in several, and through Gymnasium's vector environments.

    python packages/rlinf-envs/benchmarks/maniskill_speed.py [--num-envs 4] [--num-processes 2] [--rounds 7]

All contenders run in the same process, a slice each in turn, so that a busy machine disturbs them alike. Prints the
median and the best slice of each, and the ratio of medians to the first. The peer is what ManiSkill's documentation
advises on a CPU: its CPUGymWrapper in Gymnasium's AsyncVectorEnv, one process per environment; and the same in
SyncVectorEnv. Without a Vulkan driver the peer runs with our stand-ins for visuals, which it would not start without.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import gymnasium
import torch

from rlinf_envs import BatchedEnv, EnvSpec, make_env
from rlinf_envs.testing import sample_actions

SLICE_STEPS = 50


def peer_env(task: str) -> Any:
    """One environment as ManiSkill's documentation builds it."""
    from rlinf_envs.adapters.maniskill.tasks import tasks_of
    from rlinf_envs.adapters.maniskill.without_vulkan import disable_visuals, has_vulkan_device

    tasks_of(task)
    if not has_vulkan_device():
        disable_visuals()
    from mani_skill.utils.wrappers.gymnasium import CPUGymWrapper

    env = gymnasium.make(
        task,
        obs_mode="state",
        reward_mode="normalized_dense",
        control_mode="pd_joint_delta_pos",
        sim_backend="physx_cpu",
        render_backend="none",
    )
    return CPUGymWrapper(env, record_metrics=True)


def peer(task: str, num_envs: int, kind: str) -> Callable[[torch.Tensor], object]:
    makers = [lambda: peer_env(task)] * num_envs
    vector = (
        gymnasium.vector.AsyncVectorEnv(makers, context="spawn")
        if kind == "async"
        else gymnasium.vector.SyncVectorEnv(makers)
    )
    vector.reset(seed=0)
    return lambda actions: vector.step(actions.numpy())


def ours(task: str, num_envs: int, num_processes: int) -> tuple[BatchedEnv, float, float]:
    began = time.perf_counter()
    env = make_env(EnvSpec(kind="maniskill", id=task, num_envs=num_envs, num_processes=num_processes))
    made_s = time.perf_counter() - began
    env.reset(range(num_envs))
    began = time.perf_counter()
    for seed in range(20):
        env.reset(range(seed, seed + num_envs))
    return env, made_s, (time.perf_counter() - began) / 20 / num_envs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="PushCube-v1")
    parser.add_argument("--num-envs", type=int, default=4)
    parser.add_argument("--num-processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)

    contenders: dict[str, Callable[[torch.Tensor], object]] = {}
    spec = None
    for num_processes in (0, args.num_processes):
        env, made_s, reset_s = ours(args.task, args.num_envs, num_processes)
        print(f"{num_processes} process(es): make {made_s:.2f} s, reset {1e3 * reset_s:.2f} ms an environment")
        contenders[f"rlinf-envs, {num_processes} process(es)"] = env.step
        spec = env.action_spec
    contenders["Gymnasium SyncVectorEnv"] = peer(args.task, args.num_envs, "sync")
    contenders[f"Gymnasium AsyncVectorEnv, {args.num_envs} processes"] = peer(args.task, args.num_envs, "async")

    assert spec is not None, "at least one contender is ours"
    generator = torch.Generator().manual_seed(0)
    actions = sample_actions(spec, (SLICE_STEPS, args.num_envs), generator)
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(args.rounds):
        for name, step in contenders.items():
            began = time.perf_counter()
            for step_actions in actions:
                step(step_actions)
            rates[name].append(SLICE_STEPS * args.num_envs / (time.perf_counter() - began))
    base = statistics.median(next(iter(rates.values())))
    for name, values in rates.items():
        median = statistics.median(values)
        print(f"{name:45s} median {median:6.0f} best {max(values):6.0f} env-steps/s   x{median / base:.2f}")


if __name__ == "__main__":
    main()

"""Simulators with pictures through the flow, against as many processes of Gymnasium's AsyncVectorEnv: what the
benchmarks of single simulators share.

The flow is that of training without its trainer: two env processes with two groups each, and a policy that answers
every step. It reads every byte of the pictures and computes next to nothing (`glance`), as the peers compute nothing: a
network on the simulators' two cores would be measured in place of the way there and back.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from benchmarks.harness import Step, compare, interleave, report
from benchmarks.throughput.pipelining import PIPELINED, Placement, Side, env_and_policy, make_plan

from rlinf.config.embodied import EmbodiedConfig
from rlinf.config.load import load_config
from rlinf.config.overrides import parse_overrides
from rlinf.jobs.embodied.job import EmbodiedJob
from rlinf.machine import this_machine
from rlinf.processes.env_vars import worker_env_vars
from rlinf_sched import Cluster
from rlinf_workers import Executor

NUM_PROCESSES = 2
NUM_GROUPS = 2 * NUM_PROCESSES
FLOW = "through the flow"
PLACEMENT = Placement(
    name="hybrid", devices={"env": (0,), "policy": (1,)}, num_ranks={"env": NUM_PROCESSES, "policy": 1}
)


def simulator_arguments(description: str | None) -> argparse.ArgumentParser:
    """The options that all of them have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--steps", type=int, default=24, help="actions of a segment")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    return parser


def compare_with_flow(
    name: str,
    args: argparse.Namespace,
    env: Mapping[str, Any],
    peers: Mapping[str, Callable[[], Step]],
    findings: Mapping[str, Any],
) -> None:
    """Runs the flow and its peers in turn and writes the report.

    Args:
        args: of `simulator_arguments`, with what the caller added.
        env: overrides of the environment; the number of its groups and steps is known.
        peers: name -> makes what times as many segments as the flow has groups.
        findings: beside the steps a second.
    """
    job = _job(args, env)
    train, cluster = job.build(Path()).train, Cluster.cpu_slots(2)
    with Executor(cluster=cluster, env_vars=worker_env_vars(job.config.cluster)) as executor:
        flow = env_and_policy(train, PIPELINED)
        executor.start(flow, make_plan(flow, cluster, PLACEMENT, NUM_GROUPS))
        sides: dict[str, Step] = {FLOW: Side(executor, flow, job.config.seed, num_warmup=1).step}
        for peer, make in peers.items():
            sides[peer] = make()
        samples_s = interleave(sides, num_warmup=1, num_rounds=args.rounds)
    num_steps = args.steps * NUM_GROUPS
    rates = {side: num_steps / float(np.median(seconds)) for side, seconds in samples_s.items()}
    report(
        name,
        settings={key: value for key, value in vars(args).items() if key != "output"},
        samples_s=samples_s,
        comparisons=[compare(samples_s, peer, FLOW) for peer in peers],
        findings={"env_steps_per_s": rates, **findings},
        output=args.output,
    )


def _job(args: argparse.Namespace, env: Mapping[str, Any]) -> EmbodiedJob:
    chosen = {
        **env,
        "env.num_envs": NUM_GROUPS,
        "env.num_groups": NUM_GROUPS,
        "env.num_steps": args.steps,
        "env.max_episode_steps": 1000,
        "policy": "{name: 'benchmarks.throughput.glance:Glance', options: {}}",
        "algorithm.num_minibatches": 1,
        "cluster.num_devices": 2,
    }
    config = load_config("pushcube-ppo", parse_overrides([f"--{key}={value}" for key, value in chosen.items()]))
    assert isinstance(config, EmbodiedConfig), "the recipe is an embodied one"
    return EmbodiedJob(config, this_machine())


def bare_segments(make: Callable[[], gymnasium.Env[Any, Any]], *, num_steps: int, action_size: int) -> Step:
    """Seconds of as many segments as the flow has groups, in Gymnasium's own processes, with random actions that are
    there already; each begins with a reset."""
    vector = gymnasium.vector.AsyncVectorEnv([make] * NUM_PROCESSES, context="spawn")
    generator = torch.Generator().manual_seed(0)
    actions = (torch.rand(num_steps, NUM_PROCESSES, action_size, generator=generator) * 2 - 1).numpy()

    def run(round_index: int) -> float:
        began_s = time.perf_counter()
        for segment in range(NUM_GROUPS // NUM_PROCESSES):
            vector.reset(seed=NUM_GROUPS * round_index + NUM_PROCESSES * segment)
            for step_actions in actions:
                vector.step(step_actions)
        return time.perf_counter() - began_s

    return run

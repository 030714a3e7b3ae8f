"""PPO on ManiSkill's states, environment steps a second: the recipe pushcube-ppo as a flow against a single script with
the same settings, in the same run.

    python -m benchmarks.throughput.ppo_states

The flow is collocated on two CPU slots, which is what the recipe gets on two cores. The script (`plain_ppo`) runs
twice:
with an environment in each of eight processes, and with all of them in its own. Every side has one torch thread in each
process. The flow's resets are exact, the peers' are not. Target: 1.3 times the faster peer.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from pathlib import Path

import gymnasium
import numpy as np
import torch
from benchmarks.harness import compare, interleave, report
from benchmarks.throughput.overhead import FlowSide
from benchmarks.throughput.plain_ppo import NUM_ENVS, NUM_STEPS, PlainPpo

from rlinf import jobs
from rlinf.config.load import load_config
from rlinf.config.overrides import parse_overrides
from rlinf.planning.plans import make_plans
from rlinf.processes.env_vars import worker_env_vars
from rlinf_workers import Executor, StepContext

FLOW, ASYNC, SYNC = "flow", "script, a process an environment", "script, one process"
TARGET = 1.3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--mode", default="collocated")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # Gymnasium's and SAPIEN's
    torch.set_num_threads(1)
    flags = ["--cluster.num_devices=2", f"--mode={args.mode}"]
    job = jobs.prepare(load_config("pushcube-ppo", parse_overrides(flags)))
    with tempfile.TemporaryDirectory() as folder:
        flows = job.build(Path(folder))
        planned = make_plans(job, flows, Path())
        environment = worker_env_vars(job.config.cluster)
        with Executor(cluster=planned.cluster, log_folder=Path(folder) / "logs", env_vars=environment) as executor:
            executor.start(flows.train, planned.plans[flows.train.name])
            executor.sync_weights()
            flow = FlowSide(executor, flows.train)

            def step(index: int) -> float:
                context = StepContext(step=index, phase="train", seed=job.config.seed, num_items=0)
                return flow.step(context, {})[0]

            scripts = {
                ASYNC: PlainPpo(lambda makers: gymnasium.vector.AsyncVectorEnv(makers, context="spawn")),
                SYNC: PlainPpo(gymnasium.vector.SyncVectorEnv),
            }
            sides = {FLOW: step} | {name: script.step for name, script in scripts.items()}
            samples_s = interleave(sides, num_warmup=2, num_rounds=args.rounds)
    rates = {name: NUM_ENVS * NUM_STEPS / float(np.median(seconds)) for name, seconds in samples_s.items()}
    report(
        "ppo-states",
        settings={"recipe": "pushcube-ppo", "mode": args.mode, "num_devices": 2, "target": TARGET},
        samples_s=samples_s,
        comparisons=[compare(samples_s, peer, FLOW) for peer in (ASYNC, SYNC)],
        findings={
            "env_steps_per_s": rates,
            "flow_over_faster_script": rates[FLOW] / max(rates[ASYNC], rates[SYNC]),
        },
        output=args.output,
    )


if __name__ == "__main__":
    main()

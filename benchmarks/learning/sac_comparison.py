"""SAC and RLPD against stable-baselines3's SAC: success and speed of the same budget, in the same run.

    python -m benchmarks.learning.sac_comparison --peer-python FOLDER/bin/python [--tasks pendulum ...] [--seeds 0 1 2]

The peer needs an interpreter with stable-baselines3 beside what this repository needs; it is no requirement of the
project. From the project's environment, without another torch:

    python -m venv FOLDER && FOLDER/bin/pip install --no-deps stable-baselines3==2.9.2
    # and a .pth file in FOLDER's site-packages with the path of the project's site-packages

Both sides have the same environments, number of environment steps and of updates, network sizes, batches, learning
rates and first random actions (sac_tasks.py), one thread each, and take turns round by round; with `--core` all
processes of both are bound to one core. With `--ahead` ours collects a round on a second core while the actor
updates, with weights of one round before (`algorithm.max_staleness: 1`); a turn is then several rounds, which begin
and end within it. `--peer-threads` is for the peer alone, whose updates are no faster with more than one. The peer's
process has no env vars but the number of threads, and ours those that `rlinf train` gives its workers (malloc keeps
freed memory). Ours is what `rlinf train` runs, processes of env, policy and actor that take turns on one CPU slot;
the peer is one process. Adam is that of each side's defaults but for the learning rate. Both are scored by the same
function, on the same seeds. RLPD has layer norm, targets from two of its critics, half of each batch from
demonstrations, and a policy update for two of the critics'; the peer's SAC has as many critics, and the same
demonstrations in its buffer.

Target: at least the peer's success at 1.3 times its speed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from itertools import combinations, product
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from benchmarks.harness import compare, cpu_seconds, interleave, report
from benchmarks.learning.sac_tasks import HIDDEN_SIZE, NUM_EVAL_EPISODES, NUM_LAYERS, TASKS, Task, evaluate

from rlinf import jobs
from rlinf.config.load import load_config
from rlinf.config.overrides import parse_overrides
from rlinf.jobs.acting import env_spec, policy_settings
from rlinf.jobs.env_interface import probe
from rlinf.loop.session import Session
from rlinf.planning.plans import make_plans
from rlinf.processes.env_vars import worker_env_vars
from rlinf_workers import Executor, Flow, FlowRun, StepContext
from rlinf_workers.roles import load_policy

REPOSITORY = Path(__file__).parents[2]
ENVS = REPOSITORY / "packages" / "rlinf-envs" / "src"
OURS, PEER = "rlinf", "stable-baselines3"
TARGET = 1.3


def overrides_of(task: Task, seed: int, *, ahead: bool) -> list[str]:
    """The recipe pendulum-sac with the task's settings."""
    values: dict[str, Any] = {
        "seed": seed,
        "mode": "disaggregated" if ahead else "collocated",
        "cluster.num_devices": 2 if ahead else 1,
        "algorithm.max_staleness": int(ahead),
        "env.kind": task.kind,
        "env.id": task.id,
        "env.options": json.dumps(dict(task.options)),
        "env.max_episode_steps": task.max_episode_steps,
        "env.num_envs": task.num_envs,
        "env.num_groups": 1,
        "env.num_steps": task.num_steps,
        "policy.options": json.dumps({"hidden_size": HIDDEN_SIZE, "num_layers": NUM_LAYERS}),
        "actor.learning_rate": task.learning_rate,
        "algorithm.gamma": task.gamma,
        "algorithm.batch_size": task.batch_size,
        "algorithm.buffer_size": task.buffer_size,
        "algorithm.num_random": task.num_random,
        "algorithm.update_ratio": task.update_ratio,
    }
    if task.num_demonstrations:
        values |= {
            "algorithm.name": "rlpd",
            "algorithm.num_critics": task.num_critics,
            "algorithm.policy_delay": 2,
            "algorithm.initial_temperature": 0.02,
            "algorithm.backup_entropy": "false",
            "demonstrations.source": "experts",
            "demonstrations.num_episodes": task.num_demonstrations,
        }
    return [f"--{key}={value}" for key, value in values.items()]


class Ours:
    """The job's flow, driven round by round. It stands in for the session while the job prepares itself."""

    def __init__(self, stack: ExitStack, task: Task, seed: int, folder: Path, *, ahead: bool) -> None:
        self.folder, self._task, self._seed = folder, task, seed
        overrides = parse_overrides(overrides_of(task, seed, ahead=ahead))
        self._job = job = jobs.prepare(load_config("pendulum-sac", overrides))
        flows = job.build(folder)
        planned = make_plans(job, flows, Path())
        job.write_inputs(folder)
        self._executor = stack.enter_context(
            Executor(cluster=planned.cluster, log_folder=folder / "logs", env_vars=worker_env_vars(job.config.cluster))
        )
        for flow in (flows.train, *flows.others):
            self._executor.start(flow, planned.plans[flow.name])
        self.demonstrated: Path | None = None
        job.prepare(cast(Session, self))
        self._executor.sync_weights()
        self._flow = flows.train
        interface = probe(env_spec(job.config.env), None)
        self._settings = policy_settings(job.config.policy, interface, seed)
        self.cpu_s: list[float] = []

    def turn(self, rounds: range) -> float:
        before_s, start_s = cpu_seconds(_process_ids()), time.perf_counter()
        begun = iter(rounds)
        for _ in rounds:
            while self._executor.num_under_way <= self._executor.steps_ahead(self._flow):
                if (index := next(begun, None)) is None:
                    break
                context = StepContext(step=index, phase="train", seed=self._seed, num_items=0)
                self._executor.begin(self._flow, context=context)
            self._executor.finish()
        spent_s = time.perf_counter() - start_s
        self.cpu_s.append(cpu_seconds(_process_ids()) - before_s)
        return spent_s

    def evaluate(self) -> dict[str, float]:
        folder = str(self.folder / "policy")
        self._executor.group("actor").call("save_model", folder)
        policy = load_policy(self._settings, folder, torch.device("cpu"))
        return evaluate(self._task, lambda states: policy.act({"state": states}, None).actions[:, 0])

    # -- what Job.prepare uses of a session ------------------------------------------------------------------------

    def run_flow(self, flow: Flow, *, step: int, feeds: dict[str, list[Any]]) -> FlowRun:
        (item,) = feeds["demonstrated"]
        columns = {"actions": item.actions[:, 0, 0], "rewards": item.rewards[:, 0], "terminated": item.terminated[:, 0]}
        columns |= {"state": item.fields["state"][:, 0], "next_state": item.next_fields["state"][:, 0]}
        self.demonstrated = self.folder / "demonstrated.pt"
        torch.save(columns, self.demonstrated)
        context = StepContext(step=step, phase="train", seed=self._seed, num_items=1)
        return self._executor.run(flow, context=context, feeds=feeds)

    def group(self, name: str) -> Any:
        return self._executor.group(name)

    def note(self, text: str) -> None:
        print(text, flush=True)


class Peer:
    """The peer in its process. Use as a context manager."""

    def __init__(
        self, python: str, name: str, seed: int, demonstrated: Path | None, log: Path, num_threads: int
    ) -> None:
        self._log_path, threads = log, str(num_threads)
        self.cpu_s: list[float] = []
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [python, "-m", "benchmarks.learning.sac_peer", name, str(seed), str(demonstrated or "-")],
                cwd=REPOSITORY,
                start_new_session=True,  # as our workers: schedulers share a machine between sessions
                env=os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "PYTHONPATH": str(ENVS)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
            )
        self.versions = self._read()["ready"]

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def turn(self, rounds: range) -> float:
        spent = [self._ask("round") for _ in rounds]
        self.cpu_s.append(sum(one["cpu_s"] for one in spent))
        return sum(one["seconds"] for one in spent)

    def evaluate(self) -> dict[str, float]:
        return self._ask("evaluate")

    def _ask(self, what: str) -> dict[str, Any]:
        assert self._process.stdin is not None, "it was opened with a pipe"
        self._process.stdin.write(what + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None, "it was opened with a pipe"
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the peer ended; its last words:\n{self._log_path.read_text()[-3000:]}")
        return json.loads(line)


def _process_ids() -> list[int]:
    """Process ids of this process and of our workers."""
    return [os.getpid(), *(child.pid for child in multiprocessing.active_children() if child.pid)]


def measure(name: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """One task with one seed."""
    task = TASKS[name]
    num_rounds, of_turn = options.rounds or task.num_rounds, options.rounds_in_turn
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ours = Ours(stack, task, seed, folder, ahead=options.ahead)
        peer = Peer(options.peer_python, name, seed, ours.demonstrated, folder / "peer.log", options.peer_threads)
        stack.enter_context(peer)
        sides = {OURS: ours, PEER: peer}
        curves: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
        samples_s: dict[str, list[float]] = {side: [] for side in sides}
        for first in range(0, num_rounds, options.evaluate_every):
            count = min(options.evaluate_every, num_rounds - first)
            turns = [range(i, min(i + of_turn, first + count)) for i in range(first, first + count, of_turn)]
            steps = {side: (lambda i, one=one, turns=turns: one.turn(turns[i])) for side, one in sides.items()}
            for side, seconds in interleave(steps, num_warmup=0, num_rounds=len(turns)).items():
                samples_s[side] += seconds
            for side, one in sides.items():
                curves[side].append({"env_steps": (first + count) * task.env_steps, **one.evaluate()})
                print(f"{name}, seed {seed}, {side}: {curves[side][-1]}", flush=True)
            run = {
                "task": name,
                "seed": seed,
                "curves": curves,
                "samples_s": samples_s,
                "cpu_s": {side: one.cpu_s for side, one in sides.items()},
                "peer": peer.versions,
            }
            if options.keep:
                with options.keep.open("a") as file:
                    file.write(json.dumps(run) + "\n")
    return run


def between(ours: Sequence[float], peers: Sequence[float]) -> dict[str, Any]:
    """The difference of the means of two sides over seeds: a 95 % interval by bootstrap over seeds, and the share of
    divisions of all values among the sides that differ at least as much (the exact permutation test)."""
    one, other, both = np.array(ours), np.array(peers), np.array([*ours, *peers])
    drawn = np.random.default_rng(0).integers(len(one), size=(2, 100_000, len(one)))
    low, high = np.quantile(one[drawn[0]].mean(1) - other[drawn[1]].mean(1), [0.025, 0.975])
    difference = one.mean() - other.mean()
    sums = np.array([both[list(rows)].sum() for rows in combinations(range(len(both)), len(one))])
    differences = sums / len(one) - (both.sum() - sums) / len(other)
    return {
        OURS: list(ours),
        PEER: list(peers),
        "difference": difference,
        "difference_95": [low, high],
        "permutation_p": float((np.abs(differences) >= abs(difference) - 1e-12).mean()),
    }


def summary(name: str, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the runs of a task with several seeds say."""
    task = TASKS[name]
    last = {side: [run["curves"][side][-1] for run in runs] for side in (OURS, PEER)}
    spent = {side: [s for run in runs for s in run["samples_s"][side]] for side in (OURS, PEER)}
    cpu = {side: [s for run in runs for s in run["cpu_s"][side]] for side in (OURS, PEER)}
    num_env_steps = sum(one["env_steps"] for one in last[OURS])
    by_round = statistics.median(p / o for o, p in zip(spent[OURS], spent[PEER], strict=True))
    return {
        **{key: between(*([one[key] for one in last[side]] for side in (OURS, PEER))) for key in ("success", "return")},
        "env_steps_per_s": {side: num_env_steps / sum(s) for side, s in spent.items()},
        "updates_per_s": {side: num_env_steps * task.update_ratio / sum(s) for side, s in spent.items()},
        "speed": sum(spent[PEER]) / sum(spent[OURS]),
        "speed_median_over_rounds": by_round,
        "speed_of_cpu_time": sum(cpu[PEER]) / sum(cpu[OURS]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", required=True, help="interpreter that can import stable_baselines3")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=None, help="in place of each task's number")
    parser.add_argument("--evaluate-every", type=int, default=20, help="rounds")
    parser.add_argument("--ahead", action="store_true", help="ours collects the next round while the actor updates")
    parser.add_argument("--rounds-in-turn", type=int, default=1, help="of one side, before it is the other's turn")
    parser.add_argument("--peer-threads", type=int, default=1)
    parser.add_argument("--core", type=int, default=None, help="bind every process of both sides to this core")
    parser.add_argument("--keep", type=Path, help="file with all runs, which are not repeated")
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    if options.core is not None:
        os.sched_setaffinity(0, {options.core})  # inherited by every process that is started
    torch.set_num_threads(1)
    earlier = [json.loads(line) for line in options.keep.open()] if options.keep and options.keep.exists() else []
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in options.tasks}
    for seed, name in product(options.seeds, options.tasks):
        of_this = [one for one in earlier if (one["task"], one["seed"]) == (name, seed)]
        num_env_steps = (options.rounds or TASKS[name].num_rounds) * TASKS[name].env_steps
        is_whole = of_this and of_this[-1]["curves"][OURS][-1]["env_steps"] >= num_env_steps
        runs[name].append(of_this[-1] if is_whole else measure(name, seed, options))
    summaries = {name: summary(name, ones) for name, ones in runs.items()}
    for name, one in summaries.items():
        print(name, json.dumps(one, indent=1))
    samples_s = {
        f"{side}, {name}": [s for run in ones for s in run["samples_s"][side]]
        for name, ones in runs.items()
        for side in (OURS, PEER)
    }
    report(
        "sac-comparison",
        settings={
            "tasks": {name: asdict(TASKS[name]) for name in options.tasks},
            "seeds": options.seeds,
            "hidden_layers": [HIDDEN_SIZE] * NUM_LAYERS,
            "num_eval_episodes": NUM_EVAL_EPISODES,
            "core": options.core,
            "ahead": options.ahead,
            "rounds_in_turn": options.rounds_in_turn,
            "peer_threads": options.peer_threads,
            "target_speed": TARGET,
            "peer": next(iter(runs.values()))[0]["peer"],
        },
        samples_s=samples_s,
        comparisons=[compare(samples_s, f"{PEER}, {name}", f"{OURS}, {name}") for name in runs],
        findings={
            "summaries": summaries,
            "curves": {name: [run["curves"] for run in ones] for name, ones in runs.items()},
        },
        output=options.output,
    )


if __name__ == "__main__":
    main()

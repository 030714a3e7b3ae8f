"""Runs the flow prompts -> rollout -> reward of each benchmark on all devices.

The rollout workers are shared by all benchmarks, the reward workers by those with the same reward. Samples come back
as soon as a device has finished a few problems. Noise belongs to (seed, benchmark, row, sample), so a sample does not
depend on what else is asked, on the order or on the number of devices.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from rlinf.config.evaluation import EvalConfig
from rlinf.evaluation.benchmarks import Benchmark, Benchmarks
from rlinf.evaluation.model import EvaluatedModel
from rlinf.jobs.generation import PromptMaker, sampling_settings
from rlinf.machine import this_machine
from rlinf.planning.cluster import make_cluster
from rlinf.processes.executor import make_executor
from rlinf.processes.failures import run_failed
from rlinf.tasks import Problem
from rlinf_algos.rewards import RewardSpec
from rlinf_sched.modes import plan_for_mode
from rlinf_workers import Executor, Flow, StepContext, WorkersError
from rlinf_workers.language.reward import Reward, RewardSettings
from rlinf_workers.language.rollout import Rollout, RolloutSettings
from rlinf_workers.models.language_model import ModelSettings
from rlinf_workers.records.language import ScoredGroup

HANDOVERS = 4
"""Pieces that a device's share of a benchmark comes in at least: progress shows, and a slow device holds up little."""
SEED_BITS = 23


class SampleSink(Protocol):
    """Where samples go."""

    def begin(self, benchmark: Benchmark) -> None:
        """Its samples come from now on."""
        ...

    def group(self, benchmark: Benchmark, group: ScoredGroup) -> None:
        """The scored samples of one problem; called from a thread of this process."""
        ...


class Runner:
    """The processes of an evaluation."""

    def __init__(
        self, config: EvalConfig, model: EvaluatedModel, benchmarks: Benchmarks, log_folder: Path, sink: SampleSink
    ) -> None:
        self._config = config
        self._model = model
        self._benchmarks = benchmarks
        self._log_folder = log_folder
        self._sink = sink
        self._cluster = make_cluster(config.cluster, this_machine())

    def run(self, todo: Sequence[tuple[Benchmark, Sequence[Problem]]]) -> None:
        """Asks the problems of each benchmark.

        Raises: RunFailed where a worker dies or raises.
        """
        executor = make_executor(
            self._config.cluster,
            self._cluster,
            log_folder=self._log_folder,
            worker_timeout_s=self._config.worker_timeout_s,
        )
        with executor:
            try:
                for benchmark, problems in todo:
                    self._run(executor, benchmark, problems)
            except WorkersError as error:
                raise run_failed(error, self._log_folder) from error

    def describe_devices(self) -> str:
        """For people: what the samples are drawn on."""
        return self._cluster.describe()

    def _run(self, executor: Executor, benchmark: Benchmark, problems: Sequence[Problem]) -> None:
        flow = self._flow(benchmark)
        devices = self._cluster.compute_devices
        share = -(-len(problems) // (HANDOVERS * len(devices)))
        fits = max(1, self._config.max_batch_sequences // self._config.samples_per_problem)
        plan = plan_for_mode(
            flow.graph(), self._cluster, "collocated", granularity={"rollout": min(share, fits), "reward": 1}
        )
        make_prompt = PromptMaker(
            encoder=self._benchmarks.encoder,
            max_tokens=self._benchmarks.max_prompt_tokens,
            sends_rows=":" in benchmark.reward.rule,
        )
        self._sink.begin(benchmark)
        executor.start(flow, plan)

        def on_items(_: str, groups: Sequence[Any]) -> None:
            for group in groups:
                self._sink.group(benchmark, group)

        executor.run(
            flow,
            context=StepContext(
                step=0,
                phase="evaluate",
                seed=benchmark_seed(self._config.seed, benchmark.name),
                num_items=len(problems),
            ),
            feeds={"prompts": [make_prompt(problem.number, problem) for problem in problems]},
            timeout_s=self._config.timeout_s,
            on_items=on_items,
        )

    def _flow(self, benchmark: Benchmark) -> Flow:
        config, folder = self._config, str(self._model.folder)
        model = ModelSettings(folder=folder, has_weights=True, dtype=config.dtype, seed=config.seed)
        sampling = sampling_settings(
            config, group_size=config.samples_per_problem, max_new_tokens=config.max_new_tokens
        )
        rollout = RolloutSettings(
            model=model,
            train=sampling,
            evaluate=sampling,
            max_prompt_tokens=self._benchmarks.max_prompt_tokens,
            max_batch_sequences=config.max_batch_sequences,
            engine=config.engine,
            engine_options=config.engine_options,
        )
        reward = f"reward-{re.sub(r'[^A-Za-z0-9_]+', '-', _tag(benchmark.reward))}"
        flow = Flow(f"evaluate-{benchmark.name}")
        flow.worker("rollout", Rollout, rollout)
        flow.worker(reward, Reward, RewardSettings(rule=benchmark.reward, tokenizer_folder=folder))
        flow.stage("rollout", Rollout.generate, reads="prompts", writes="samples")
        flow.stage("reward", Reward.score, reads="samples", writes="scored", worker=reward, needs_device=False)
        return flow


def _tag(reward: RewardSpec) -> str:
    """A name for each reward with its options."""
    return "-".join([reward.rule, *(f"{key}-{value}" for key, value in (reward.options or {}).items())])


def benchmark_seed(seed: int, name: str) -> int:
    """A seed for each benchmark, so that the tenth problems of two do not share their noise."""
    return seed | (zlib.crc32(name.encode()) << SEED_BITS)

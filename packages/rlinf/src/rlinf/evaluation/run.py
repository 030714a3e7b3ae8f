"""Runs an evaluation from its settings to its result, for `rlinf eval`.

The flow prompts -> rollout -> reward of each benchmark runs on all devices. The rollout workers are shared by all
benchmarks, the reward workers by those with the same reward. Samples are returned whenever a device has finished a few
problems. Sampling noise depends only on (seed, benchmark, row, sample), so a sample does not depend on other problems,
their order or the number of devices.
"""

from __future__ import annotations

import re
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rlinf.config.agents import AgentConfig
from rlinf.config.devices import make_cluster
from rlinf.config.downloads import snapshot_folders
from rlinf.config.evaluation import EvalConfig
from rlinf.config.inputs import is_adapter
from rlinf.config.load import to_yaml
from rlinf.console.activities import running, starting
from rlinf.console.eval_progress import EvalProgress
from rlinf.errors import UserError
from rlinf.evaluation.benchmarks import Benchmark, Benchmarks, prepare_benchmarks
from rlinf.evaluation.folder import EvalFolder
from rlinf.evaluation.model import EvaluatedModel, load_model
from rlinf.evaluation.policies import check_policies
from rlinf.evaluation.run_prompt import prompted_as_in_run
from rlinf.evaluation.scores import DISCARDED, RIGHT, WRONG, BenchmarkScores, score_benchmark
from rlinf.jobs.agents import check_agent, refuse_other_models
from rlinf.jobs.generation import check_engine, check_installed, engine_options, sampling_settings
from rlinf.jobs.models import check_architecture, engine_ways, refuse_videos_of_agents
from rlinf.jobs.named_agents import check_partners, named_agents
from rlinf.machine import machine_of
from rlinf.processes.env_vars import as_in_workers
from rlinf.processes.executor import check_plugins, make_executor, run_failed
from rlinf.processes.venvs import describe_venvs, examine_venvs
from rlinf.tasks import TaskProblem
from rlinf.tasks.language import load_checkpoint_tokenizer
from rlinf.tasks.prompts import PromptEncoder
from rlinf_sched import Cluster, ProfileError, plan_for_mode
from rlinf_sched.derive import JobShape, Lengths, ModelShape
from rlinf_workers import Executor, Flow, StepContext, WorkersError
from rlinf_workers.agents import EpisodeSettings, NamedAgent, PictureSettings
from rlinf_workers.launchers import Interpreter
from rlinf_workers.models import ModelSettings, reads_pictures
from rlinf_workers.roles import (
    AgentRollout,
    Reward,
    RewardSettings,
    Rollout,
    RolloutSettings,
    ScoredGroup,
    SessionRouter,
    conversation,
)

HANDOVERS = 4
"""Minimum number of batches per device and benchmark, for visible progress and load balancing."""
SEED_BITS = 23


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalRun:
    """A prepared evaluation: all inputs were read and checked, nothing is written or started."""

    config: EvalConfig
    model: EvaluatedModel
    benchmarks: Benchmarks
    cluster: Cluster
    notes: list[str]
    """Notes for the user about the scores."""
    venvs: dict[str, Interpreter]
    """Role -> the interpreter of its venv."""

    def run(self, path: Path, *, resume: bool, command: Sequence[str], progress: EvalProgress) -> list[BenchmarkScores]:
        """Samples the remaining problems and scores all samples.

        Raises: UserError if the folder does not fit, RunFailed if a worker dies or raises.
        """
        inputs = {
            "the model": self.model.fingerprint,
            **{f"benchmarks.{one.name}": one.fingerprint for one in self.benchmarks.sets},
        }
        folder = EvalFolder(
            path, resume=resume, config_yaml=to_yaml(self.config), command=command, inputs=inputs, notes=self.notes
        )
        with folder:
            for note in self.notes:
                progress.message(f"note: {note}")
            started_s = time.monotonic()
            self._ask(folder, progress)
            scores = self._score(folder)
            folder.write_result(
                {
                    "model": str(self.model.folder),
                    "settings": self.config.model_dump(mode="json"),
                    "chat": self.benchmarks.encoder.is_chat,
                    "notes": self.notes,
                    "session_s": time.monotonic() - started_s,
                    "benchmarks": {one.benchmark.name: one.to_json() for one in scores},
                }
            )
        return scores

    def _ask(self, folder: EvalFolder, progress: EvalProgress) -> None:
        config = self.config
        done = folder.keep_whole_problems(config.samples_per_problem)
        todo = [
            (one, problems)
            for one in self.benchmarks.sets
            if (problems := [problem for problem in one.problems if (one.name, problem.number) not in done])
        ]
        if done:
            num_left = sum(len(problems) for _, problems in todo)
            progress.message(f"{len(done)} problems were answered before; {num_left} are left")
        if not todo:
            return
        logs, timeout_s = folder.path / "logs", config.worker_timeout_s
        if self.venvs:
            folder.venvs(describe_venvs(self.venvs))
        progress.message(f"model {self.model.folder} on {self.cluster.describe()}")
        groups = {"rollout": "rollout"} | {_reward_group(one): "reward" for one, _ in todo}
        venvs = {group: self.venvs[role] for group, role in groups.items() if role in self.venvs}
        with (
            make_executor(
                config.cluster,
                self.cluster,
                models=snapshot_folders(config),
                log_folder=logs,
                worker_timeout_s=timeout_s,
                venvs=venvs,
            ) as executor,
            progress.doing(partial(starting, executor)),
        ):
            try:
                tokenizers = self._tokenizers()
                for one, problems in todo:
                    self._ask_benchmark(one, problems, executor, folder, progress, tokenizers)
            except WorkersError as error:
                raise run_failed(error, logs) from error

    def _ask_benchmark(
        self,
        benchmark: Benchmark,
        problems: Sequence[TaskProblem],
        executor: Executor,
        folder: EvalFolder,
        progress: EvalProgress,
        tokenizers: Mapping[str, Any],
    ) -> None:
        config, encoder = self.config, self.benchmarks.encoder
        flow = self._flow(benchmark)
        share = -(-len(problems) // (HANDOVERS * len(self.cluster.compute_devices)))
        fits = max(1, config.max_batch_sequences // config.samples_per_problem)
        chunks = {"rollout": min(share, fits), "reward": 1}
        executor.start(flow, plan_for_mode(flow.graph(), self.cluster, "collocated", granularity=chunks))
        rows = [row for row in folder.read_samples() if row["benchmark"] == benchmark.name]
        progress.begin(
            benchmark.title,
            num_problems=len(benchmark.problems),
            num_done=len(benchmark.problems) - len(problems),
            num_samples=config.samples_per_problem,
            num_right=sum(row["outcome"] == RIGHT for row in rows),
        )
        by_number = {problem.number: problem for problem in problems}

        def on_items(_: str, groups: Sequence[ScoredGroup]) -> None:
            for group in groups:
                folder.write_samples(_rows(benchmark.name, by_number[group.samples.index], group, encoder, tokenizers))
                progress.problem(sum(_outcome(group, sample) == RIGHT for sample in range(len(group.completions))))

        is_agent = config.agent is not None
        max_tokens, is_custom = self.benchmarks.max_prompt_tokens, ":" in benchmark.reward.rule
        prompts = [
            encoder.prompt(
                problem.number,
                problem,
                max_tokens=max_tokens,
                sends_row=is_agent or is_custom,
                sends_messages=is_agent,
                sends_pictures=is_custom,
            )
            for problem in problems
        ]
        seed = benchmark_seed(config.seed, benchmark.name)
        with progress.doing(running(f"evaluating on {benchmark.title}", executor)):
            executor.run(
                flow,
                context=StepContext(step=0, phase="evaluate", seed=seed, num_items=len(problems)),
                feeds={"prompts": prompts},
                timeout_s=config.timeout_s,
                on_items=on_items,
            )

    def _flow(self, benchmark: Benchmark) -> Flow:
        config, folder = self.config, str(self.model.folder)
        sampling = sampling_settings(
            config,
            group_size=config.samples_per_problem,
            max_new_tokens=config.max_new_tokens,
            stop=config.stop or (),
        )
        agent = None if config.agent is None else self._episodes(config.agent)
        rollout = RolloutSettings(
            model=ModelSettings(folder=folder, has_weights=True, dtype=config.dtype, seed=config.seed),
            train=sampling,
            evaluate=sampling,
            max_prompt_tokens=self.benchmarks.max_prompt_tokens if agent is None else agent.max_prompt_tokens,
            max_batch_sequences=config.max_batch_sequences,
            engine=config.engine,
            engine_options=self._engine_options(),
            agent=agent,
        )
        reward = _reward_group(benchmark)
        flow = Flow(f"evaluate-{benchmark.name}")
        flow.worker("rollout", Rollout if agent is None else AgentRollout, rollout)
        if agent is not None and agent.routed:
            flow.worker("router", SessionRouter, rollout, shared_by="rollout")
        settings = RewardSettings(
            rule=benchmark.reward,
            tokenizer_folder=folder,
            tokenizers_of_agents={} if agent is None else agent.partner_folders,
            max_judge_failures=config.max_judge_failures,
        )
        flow.worker(reward, Reward, settings)
        span = config.devices_per_rank
        flow.stage("rollout", "generate", reads="prompts", writes="samples", devices_per_rank=span)
        flow.stage("reward", Reward.score, reads="samples", writes="scored", worker=reward, needs_device=False)
        return flow

    def _tokenizers(self) -> dict[str, Any]:
        """Agent with a model of its own -> the model's tokenizer; "": the evaluated model's."""
        paths = {} if self.config.agent is None else self.config.agent.models
        own = {name: load_checkpoint_tokenizer(path, f"agent.agents.{name}.path") for name, path in paths.items()}
        return {"": self.model.tokenizer, **own}

    def _episodes(self, agent: AgentConfig) -> EpisodeSettings:
        return EpisodeSettings(
            **agent.episode_options,
            routed=agent.router,
            agents={name: _untrained(one) for name, one in named_agents(agent).items()},
            max_new_tokens=self.config.max_new_tokens,
            tokenizer_folder=str(self.model.folder),
            chat_options=self.config.chat_options if self.benchmarks.encoder.is_chat else {},
            pictures=self._pictures_of_agents,
        )

    @property
    def _pictures_of_agents(self) -> PictureSettings | None:
        """None for a model that reads text alone."""
        folder, config = str(self.model.folder), self.config
        if not reads_pictures(folder):
            return None
        return PictureSettings(
            folder=folder,
            min_pixels=config.min_pixels,
            max_pixels=config.max_pixels,
            fetches=config.fetch_pictures,
        )

    def _engine_options(self) -> dict[str, Any]:
        """Returns the engine options of all benchmarks, which share the rollout's processes."""
        config, device = self.config, self.cluster.devices[0]
        on_gpu, options = device.kind == "cuda", config.engine_options
        if config.agent is not None:
            options = config.agent.options_of_engines(config, on_gpu=on_gpu) or options
        num_tokens = num_sequence_tokens(config, self.benchmarks) - self.benchmarks.max_prompt_tokens
        lengths = Lengths(
            mean_tokens=num_tokens,
            limit_tokens=num_tokens,
            prompt_tokens=self.benchmarks.max_prompt_tokens,
            group_size=config.samples_per_problem,
        )
        job = JobShape(
            lengths=lengths,
            num_groups=max(len(one.problems) for one in self.benchmarks.sets),
            dtype_bytes=4 if config.dtype == "float32" else 2,
            max_sequences=config.max_batch_sequences,
            on_gpu=on_gpu,
            engine_options=options,
            tensor_parallel=config.tensor_parallel_size,
            device_bytes=device.memory_bytes,
        )
        try:
            shape = ModelShape.from_folder(self.model.folder)
        except ProfileError:
            shape = None
        return engine_options(config, shape, job)

    def _score(self, folder: EvalFolder) -> list[BenchmarkScores]:
        rows = folder.read_samples()
        config = self.config
        return [
            score_benchmark(
                one,
                [row for row in rows if row["benchmark"] == one.name],
                k=sorted(set(config.k)),
                num_samples=config.samples_per_problem,
            )
            for one in self.benchmarks.sets
        ]


def prepare(config: EvalConfig) -> EvalRun:
    """Checks the devices, and reads and checks the model folder and all data files. For a run's model, prompt settings
    that are not set are taken from the run.

    Raises: UserError.
    """
    check_plugins(config.cluster)
    cluster = make_cluster(config.cluster, machine_of(config.cluster))
    venvs = examine_venvs(config.venvs)
    check_installed(config, venvs.get("rollout"))
    check_engine(config)
    model = load_model(config.model)
    if is_adapter(model.folder) and not config.engine_spec.serves_adapters:
        raise UserError(
            f"model={config.model} holds an adapter, and engine={config.engine} may take whole models alone",
            hint="rlinf export RUN --merged --output FOLDER, then --model FOLDER",
        )
    written = config.notes
    config, notes = prompted_as_in_run(config, model)
    notes = [*written, *notes]
    with as_in_workers(config.cluster):
        benchmarks = prepare_benchmarks(config, model)
    if config.agent is not None:
        refuse_videos_of_agents(problem for benchmark in benchmarks.sets for problem in benchmark.problems)
    num_tokens = num_sequence_tokens(config, benchmarks)
    ways = engine_ways(config, on_gpu=cluster.devices[0].kind == "cuda")
    check_architecture(model.folder, ways, num_tokens=num_tokens, key="model")
    if config.agent is not None:
        check_agent(config.agent, config.chat_options, model.folder, at="", model_key="model")
        check_policies(config.agent)
        if reads_pictures(model.folder):
            refuse_other_models(config.agent, str(model.folder), "")
        notes += check_partners(config.agent, config.chat_options, ways, "")
    if config.prompt_format == "auto":
        notes.append(f"prompt_format=auto: {benchmarks.encoder.describe()}")
    notes += model.notes
    notes += [note for benchmark in benchmarks.sets for note in benchmark.notes]
    return EvalRun(config=config, model=model, benchmarks=benchmarks, cluster=cluster, notes=notes, venvs=venvs)


def _untrained(agent: NamedAgent) -> NamedAgent:
    """The agent in an evaluation: one with a model of its own is a partner."""
    return agent if agent.folder is None else replace(agent, trains=False, trainer="")


def num_sequence_tokens(config: EvalConfig, benchmarks: Benchmarks) -> int:
    """Tokens of the longest sequence: a prompt with its completion, or a conversation."""
    single = benchmarks.max_prompt_tokens + config.max_new_tokens
    return single if config.agent is None else config.agent.max_context_tokens


def _reward_group(benchmark: Benchmark) -> str:
    """Returns the worker group that scores a benchmark, shared by benchmarks with the same reward."""
    options = benchmark.reward.options or {}
    tag = "-".join([benchmark.reward.rule, *(f"{key}-{value}" for key, value in options.items())])
    return f"reward-{re.sub(r'[^A-Za-z0-9_]+', '-', tag)}"


def benchmark_seed(seed: int, name: str) -> int:
    """Returns a seed for each benchmark, so that equal rows of two benchmarks do not share their noise."""
    return seed | (zlib.crc32(name.encode()) << SEED_BITS)


def _rows(
    benchmark: str, problem: TaskProblem, group: ScoredGroup, encoder: PromptEncoder, tokenizers: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Returns the samples of one problem as rows of samples.jsonl."""
    samples = group.samples
    assert samples.truncated is not None, "the engine says which completions did not end"
    lengths = samples.by_episode(samples.loss_mask.sum(-1)).int().tolist()
    truncated = (samples.by_episode(samples.truncated.int()) > 0).tolist()
    prompt = encoder.text(problem)
    is_whole = samples.trajectories is not None or problem.pictures
    was_cut = not is_whole and len(encoder.encode(problem.content)) > len(samples.prompt.token_ids)
    rows = []
    for i, completion in enumerate(group.completions):
        row = {
            "benchmark": benchmark,
            "problem": problem.number,
            "sample": i,
            "place": problem.place,
            "prompt": prompt,
            "completion": completion,
            "reference_answer": problem.answer,
            "answer": group.answers[i] if group.answers else None,
            "outcome": _outcome(group, i),
            "reward": float(group.rewards[i]),
            "num_prompt_tokens": len(samples.prompt.token_ids),
            "prompt_was_cut": was_cut,
            "num_completion_tokens": lengths[i],
            "truncated": truncated[i],
        }
        if samples.trajectories is not None:
            row |= _episode(group, i, tokenizers)
        rows.append(row)
    return rows


def _outcome(group: ScoredGroup, sample: int) -> str:
    """The outcome of the check; of an episode whose agent has given the reward, right from 1 on."""
    if group.samples.causes and group.samples.is_discarded[sample]:
        return DISCARDED
    if group.outcomes and group.outcomes[sample]:
        return group.outcomes[sample]
    return RIGHT if float(group.rewards[sample]) >= 1 else WRONG


def _episode(group: ScoredGroup, episode: int, tokenizers: Mapping[str, Any]) -> dict[str, Any]:
    """What a row has of an episode: turns, cause, and who wrote what in its last branch."""
    samples = group.samples
    assert samples.trajectories is not None, "rows of episodes"
    of_episode = samples.trajectories == episode
    last = int(of_episode.nonzero()[-1])
    turns = None if samples.turns is None else samples.turns[of_episode]
    return {
        "num_turns": 0 if turns is None else int(turns.max()) + 1,
        "cause": samples.causes[episode],
        "detail": samples.details[episode],
        "segments": conversation(samples, last, tokenizers),
        **({"reward": None} if bool(group.rewards[episode].isnan()) else {}),
    }

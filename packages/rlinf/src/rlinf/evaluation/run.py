"""One evaluation from its settings to its result; what `rlinf eval` calls."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from rlinf.config.evaluation import EvalConfig
from rlinf.config.load import to_yaml
from rlinf.evaluation.benchmarks import Benchmark, Benchmarks, prepare_benchmarks
from rlinf.evaluation.folder import EvalFolder
from rlinf.evaluation.model import EvaluatedModel, load_model
from rlinf.evaluation.run_prompt import ask_as_in_run, run_prompt
from rlinf.evaluation.runner import Runner
from rlinf.evaluation.scores import RIGHT, BenchmarkScores, score_benchmark
from rlinf.jobs.generation import check_engine
from rlinf_workers.records.language import ScoredGroup


class EvalReport(Protocol):
    """Who is told how far the evaluation is."""

    def message(self, text: str) -> None: ...

    def begin(self, title: str, *, num_problems: int, num_done: int, num_samples: int, num_right: int) -> None:
        """A benchmark, of which `num_done` problems were answered in an earlier session."""
        ...

    def problem(self, num_right: int) -> None:
        """One more problem, with so many right samples."""
        ...


class Evaluation:
    """Prepared: all inputs were read and checked, nothing is written or started."""

    def __init__(
        self, config: EvalConfig, model: EvaluatedModel, benchmarks: Benchmarks, notes: Sequence[str] = ()
    ) -> None:
        self._config = config
        self._prompt_notes = list(notes)
        self._model = model
        self._benchmarks = benchmarks

    def run(self, path: Path, *, resume: bool, command: Sequence[str], report: EvalReport) -> list[BenchmarkScores]:
        """Asks what has not been asked, and scores all samples.

        Raises: UserError where the folder does not fit, RunFailed where a worker dies or raises.
        """
        config = self._config
        inputs = {
            "the model": self._model.fingerprint,
            **{f"benchmarks.{one.name}": one.fingerprint for one in self._benchmarks.sets},
        }
        notes = self._notes()
        settings = {"config_yaml": to_yaml(config), "command": command, "inputs": inputs}
        folder = EvalFolder.resume(path, **settings) if resume else EvalFolder.create(path, notes=notes, **settings)
        with folder:
            for note in notes:
                report.message(f"note: {note}")
            started_s = time.monotonic()
            self._ask(folder, report)
            scores = self._score(folder)
            folder.write_result(
                {
                    "model": str(self._model.folder),
                    "settings": config.model_dump(mode="json"),
                    "chat": self._benchmarks.encoder.is_chat,
                    "notes": notes,
                    "session_s": time.monotonic() - started_s,
                    "benchmarks": {one.benchmark.name: one.to_json() for one in scores},
                }
            )
        return scores

    def _notes(self) -> list[str]:
        how = self._benchmarks.encoder.describe()
        chosen = [f"prompt_format=auto: {how}"] if self._config.prompt_format == "auto" else []
        return [*self._prompt_notes, *chosen, *self._benchmarks.notes]

    def _ask(self, folder: EvalFolder, report: EvalReport) -> None:
        done = folder.keep_whole_problems(self._config.samples_per_problem)
        todo = [
            (one, [problem for problem in one.problems if (one.name, problem.number) not in done])
            for one in self._benchmarks.sets
        ]
        num_left = sum(len(problems) for _, problems in todo)
        if done:
            report.message(f"{len(done)} problems were answered before; {num_left} are left")
        if not num_left:
            return
        writer = _Writer(folder, self._benchmarks, report, self._config.samples_per_problem)
        runner = Runner(self._config, self._model, self._benchmarks, folder.path / "logs", writer)
        report.message(f"model {self._model.folder} on {runner.describe_devices()}")
        runner.run([(one, problems) for one, problems in todo if problems])

    def _score(self, folder: EvalFolder) -> list[BenchmarkScores]:
        rows = folder.read_samples()
        config = self._config
        return [
            score_benchmark(
                one,
                [row for row in rows if row["benchmark"] == one.name],
                k=sorted(set(config.k)),
                num_samples=config.samples_per_problem,
            )
            for one in self._benchmarks.sets
        ]


class _Writer:
    """Takes scored groups as they come, writes their samples and tells the report."""

    def __init__(self, folder: EvalFolder, benchmarks: Benchmarks, report: EvalReport, num_samples: int) -> None:
        self._folder = folder
        self._report = report
        self._num_samples = num_samples
        self._benchmarks = benchmarks
        self._problems = {one.name: {problem.number: problem for problem in one.problems} for one in benchmarks.sets}

    def group(self, benchmark: Benchmark, group: ScoredGroup) -> None:
        self._folder.write_samples(self._rows(benchmark, group))
        self._report.problem(sum(outcome == RIGHT for outcome in group.outcomes))

    def begin(self, benchmark: Benchmark) -> None:
        rows = [row for row in self._folder.read_samples() if row["benchmark"] == benchmark.name]
        self._report.begin(
            benchmark.title,
            num_problems=len(benchmark.problems),
            num_done=len(rows) // self._num_samples,
            num_samples=self._num_samples,
            num_right=sum(row["outcome"] == RIGHT for row in rows),
        )

    def _rows(self, benchmark: Benchmark, group: ScoredGroup) -> list[dict[str, Any]]:
        samples = group.samples
        problem = self._problems[benchmark.name][samples.index]
        assert samples.truncated is not None, "the engine says which completions did not end"
        lengths, truncated = samples.loss_mask.sum(-1).int().tolist(), samples.truncated.tolist()
        encoder = self._benchmarks.encoder
        prompt, num_tokens = encoder.text(problem.prompt), len(samples.prompt.token_ids)
        was_cut = len(encoder.encode(problem.prompt)) > num_tokens
        return [
            {
                "benchmark": benchmark.name,
                "problem": problem.number,
                "sample": i,
                "place": problem.place,
                "prompt": prompt,
                "completion": completion,
                "reference_answer": problem.answer,
                "answer": group.answers[i],
                "outcome": group.outcomes[i],
                "reward": float(group.rewards[i]),
                "num_prompt_tokens": num_tokens,
                "prompt_was_cut": was_cut,
                "num_completion_tokens": lengths[i],
                "truncated": truncated[i],
            }
            for i, completion in enumerate(group.completions)
        ]


def prepare(config: EvalConfig) -> Evaluation:
    """Reads and checks the model folder and all data files. A run's model is asked as in the run, where the settings
    leave it open.

    Raises: UserError.
    """
    check_engine(config.engine, config.engine_options)
    model = load_model(config.model)
    prompt, notes = run_prompt(config.model, model.tokenizer)
    if prompt is not None:
        config, notes = ask_as_in_run(config, prompt, model.tokenizer)
    return Evaluation(config, model, prepare_benchmarks(config, model), notes)

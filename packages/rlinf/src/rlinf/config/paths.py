"""Files and folders that a config names, looked for before anything heavy is imported: a mistyped path is answered at
once. What is in them is checked later."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rlinf.config.evaluation import EvalConfig
from rlinf.config.inputs import check_model_folder
from rlinf.config.reasoning import ReasoningConfig
from rlinf.config.rewards import ModelReward
from rlinf.config.schema import Config
from rlinf.config.tasks import FilesTask
from rlinf.errors import UserError


def check_paths(config: Config) -> None:
    """Raises: UserError for a model's folder or a data file that is not there."""
    if not isinstance(config, ReasoningConfig):
        return
    for key, path in (("model.path", config.model.path), ("reference.path", config.reference.path)):
        if path is not None:
            check_model_folder(path, key=key)
    if isinstance(config.reward, ModelReward):
        check_model_folder(config.reward.path, key="reward.path")
    if isinstance(task := config.task, FilesTask):
        _check_files([*task.train_files, *task.eval_files, *task.eval_sets.values()])


def check_eval_paths(config: EvalConfig) -> None:
    """As `check_paths`, of an evaluation."""
    if not config.model.exists():
        check_model_folder(config.model, key="model")
    _check_files(benchmark.file for benchmark in config.benchmarks.values())


def _check_files(paths: Iterable[Path]) -> None:
    for path in paths:
        if not path.exists():
            raise UserError(f"{path}: No such file or directory", hint="check the path of the data file")

"""Names, files and folders that a config refers to, looked up before anything heavy is imported: a mistyped one is
answered at once. What is behind them is checked later."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlinf.config.common import ClusterConfig
from rlinf.config.embodied import EmbodiedConfig
from rlinf.config.evaluation import EvalConfig
from rlinf.config.inputs import check_model_folder, download_hint
from rlinf.config.playing import TrainedConfig
from rlinf.config.reasoning import ReasoningConfig
from rlinf.config.rewards import FunctionReward, ModelReward, RewardConfig, WeightedReward
from rlinf.config.schema import Config
from rlinf.config.tasks import FilesTask
from rlinf.environments import python_of
from rlinf.errors import UserError
from rlinf_algos.errors import AlgosError
from rlinf_algos.registry import Registry
from rlinf_workers.plugins import ENGINES, LAUNCHERS, POLICIES, TRAINERS, WEIGHT_SYNCS


def check_names(config: Config) -> None:
    """Raises: UserError for a name that nothing is known by; import paths are not followed, which a plan needs not."""
    for registry, name, at in _names(config):
        _refused(registry.check, name, at)


def check_references(config: Config) -> None:
    """Raises: UserError for a name that nothing is known by, and for a file or folder that is not there."""
    for registry, name, at in _names(config):
        _refused(registry.locate, name, at)
    _check_environments(config.environments)
    if config.plan.profile is not None:
        _check_file(config.plan.profile, "plan.profile", "rlinf profile RECIPE writes such a file")
    if isinstance(config, EmbodiedConfig):
        _check_embodied(config)
    else:
        _check_reasoning(config)


def check_eval_references(config: EvalConfig) -> None:
    """As `check_references`, of an evaluation."""
    _check_processes(config.cluster, config.environments)
    _refused(ENGINES.locate, config.engine, f"engine={config.engine}")
    for name, benchmark in config.benchmarks.items():
        if benchmark.reward is not None and ":" in benchmark.reward:
            at = f"benchmarks.{name}.reward={benchmark.reward}"
            _refused(Registry("reward").locate, benchmark.reward, at)
    if not config.model.exists():
        check_model_folder(config.model, key="model")
    _check_data(benchmark.file for benchmark in config.benchmarks.values())


def check_trained_references(config: TrainedConfig) -> None:
    """As `check_references`, of what a trained policy acts with."""
    _check_processes(config.cluster, config.environments)
    _refused(POLICIES.locate, config.policy.name, "policy.name")


def _names(config: Config) -> Iterator[tuple[Registry[Any], str, str]]:
    """What a run names, with the key as a message begins with it."""
    yield from _cluster_names(config.cluster)
    yield TRAINERS, config.actor.backend, f"actor.backend={config.actor.backend}"
    if isinstance(config, EmbodiedConfig):
        yield POLICIES, config.policy.name, "policy.name"
    else:
        yield ENGINES, config.rollout.engine, f"rollout.engine={config.rollout.engine}"


def _cluster_names(cluster: ClusterConfig) -> Iterator[tuple[Registry[Any], str, str]]:
    yield LAUNCHERS, cluster.launcher, "cluster.launcher"
    if cluster.weight_sync != "auto":
        yield WEIGHT_SYNCS, cluster.weight_sync, "cluster.weight_sync"


def _check_embodied(config: EmbodiedConfig) -> None:
    if config.env.kind == "import" and ":" in config.env.id and "env" not in config.environments:
        _refused(Registry("environment").locate, config.env.id, f"env.id={config.env.id!r}")
    if config.warm_start is not None and config.warm_start.path is not None:
        _check_file(config.warm_start.path, "warm_start.path", "check the path of the demonstrations")


def _check_reasoning(config: ReasoningConfig) -> None:
    for key, path in (("model.path", config.model.path), ("reference.path", config.reference.path)):
        if path is not None:
            check_model_folder(path, key=key)
    _check_reward(config.reward, "reward")
    if isinstance(task := config.task, FilesTask):
        _check_data([*task.train_files, *task.eval_files, *task.eval_sets.values()])


def _check_reward(reward: RewardConfig, key: str) -> None:
    match reward:
        case WeightedReward():
            for name, term in reward.terms.items():
                _check_reward(term.reward, f"{key}.terms.{name}.reward")
        case ModelReward():
            check_model_folder(reward.path, key=f"{key}.path")
        case FunctionReward():
            _refused(Registry("reward").locate, reward.path, f"{key}.path={reward.path}")


def _check_processes(cluster: ClusterConfig, environments: Mapping[str, str]) -> None:
    for registry, name, at in _cluster_names(cluster):
        _refused(registry.locate, name, at)
    _check_environments(environments)


def _check_environments(environments: Mapping[str, str]) -> None:
    for role, python in environments.items():
        try:
            python_of(python)
        except UserError as error:
            raise UserError(f"environments.{role}: {error.message}", hint=error.hint) from error


def _refused(check: Callable[[str], None], name: str, at: str) -> None:
    """What a registry says of a name, as an error that begins with the key."""
    try:
        check(name)
    except AlgosError as error:
        raise UserError(f"{at}: {error}") from error


def _check_file(path: Path, key: str, hint: str) -> None:
    if not path.exists():
        raise UserError(f"{key}={path}: No such file or directory", hint=hint)


def _check_data(paths: Iterable[Path]) -> None:
    for path in paths:
        if not path.exists():
            hint = download_hint(path, "--repo-type dataset ") or "check the path of the data file"
            raise UserError(f"{path}: No such file or directory", hint=hint)

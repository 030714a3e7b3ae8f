"""Checks that the names, files and folders in a config exist, before anything heavy is imported, so that typos fail at
once. Their contents are checked later."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlinf.config.common import ClusterConfig, JobConfig
from rlinf.config.evaluation import EvalConfig
from rlinf.config.inputs import check_model_folder, download_hint
from rlinf.config.playing import TrainedConfig
from rlinf.errors import UserError
from rlinf.jobs.plugins import job_spec
from rlinf.venvs import python_of
from rlinf_algos import AlgosError, Registry
from rlinf_workers.plugins import ENGINES, LAUNCHERS, POLICIES, WEIGHT_SYNCS


def check_names(config: JobConfig) -> None:
    """Raises: UserError for an unknown name. Import paths are not followed, because a plan does not need them."""
    for registry, name, at in _names(config):
        refused(registry.check, name, at)


def check_references(config: JobConfig) -> None:
    """Raises: UserError for an unknown name, and for a missing file or folder."""
    for registry, name, at in _names(config):
        refused(registry.locate, name, at)
    _check_venvs(config.venvs)
    if config.plan.profile is not None:
        check_file(config.plan.profile, "plan.profile", "rlinf profile RECIPE writes such a file")
    job_spec(config).check_references(config)


def check_eval_references(config: EvalConfig) -> None:
    """`check_references` for an evaluation."""
    _check_processes(config.cluster, config.venvs)
    refused(ENGINES.locate, config.engine, f"engine={config.engine}")
    for name, benchmark in config.benchmarks.items():
        if benchmark.reward is not None and ":" in benchmark.reward:
            at = f"benchmarks.{name}.reward={benchmark.reward}"
            refused(Registry("reward").locate, benchmark.reward, at)
    if not config.model.exists():
        check_model_folder(config.model, key="model")
    check_data(benchmark.file for benchmark in config.benchmarks.values())


def check_trained_references(config: TrainedConfig) -> None:
    """`check_references` for the config of a trained policy."""
    _check_processes(config.cluster, config.venvs)
    refused(POLICIES.locate, config.policy.name, "policy.name")


def _names(config: JobConfig) -> Iterator[tuple[Registry[Any], str, str]]:
    """Yields (registry, name, key) for each name in a run's config."""
    yield from _cluster_names(config.cluster)
    yield from job_spec(config).names(config)


def _cluster_names(cluster: ClusterConfig) -> Iterator[tuple[Registry[Any], str, str]]:
    yield LAUNCHERS, cluster.launcher, "cluster.launcher"
    if cluster.weight_sync != "auto":
        yield WEIGHT_SYNCS, cluster.weight_sync, "cluster.weight_sync"


def _check_processes(cluster: ClusterConfig, venvs: Mapping[str, str]) -> None:
    for registry, name, at in _cluster_names(cluster):
        refused(registry.locate, name, at)
    _check_venvs(venvs)


def _check_venvs(venvs: Mapping[str, str]) -> None:
    for role, python in venvs.items():
        try:
            python_of(python)
        except UserError as error:
            raise UserError(f"venvs.{role}: {error.message}", hint=error.hint) from error


def refused(check: Callable[[str], None], name: str, at: str) -> None:
    """Converts a registry's error about a name into a UserError that begins with the key."""
    try:
        check(name)
    except AlgosError as error:
        raise UserError(f"{at}: {error}") from error


def check_file(path: Path, key: str, hint: str) -> None:
    if not path.exists():
        raise UserError(f"{key}={path}: No such file or directory", hint=hint)


def check_data(paths: Iterable[Path]) -> None:
    for path in paths:
        if not path.exists():
            hint = download_hint(path, "--repo-type dataset ") or "check the path of the data file"
            raise UserError(f"{path}: No such file or directory", hint=hint)

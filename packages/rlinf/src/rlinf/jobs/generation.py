"""What training and evaluation set on the rollout alike: how completions are sampled, and the engine."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rlinf.config.common import EngineConfig
from rlinf.config.evaluation import EvalConfig
from rlinf.config.reasoning import EvaluationConfig, RolloutConfig
from rlinf.errors import UserError
from rlinf.plugin_checks import named_class
from rlinf_sched.derive import JobShape, ModelShape
from rlinf_workers.engines import SamplingSettings
from rlinf_workers.launchers import Interpreter
from rlinf_workers.plugins import ENGINES


def sampling_settings(
    settings: RolloutConfig | EvaluationConfig | EvalConfig,
    *,
    group_size: int,
    max_new_tokens: int,
    stop: tuple[str, ...],
) -> SamplingSettings:
    """How the engine samples."""
    return SamplingSettings(
        group_size=group_size,
        max_new_tokens=max_new_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        min_p=settings.min_p,
        stop=stop,
    )


def check_engine(settings: EngineConfig, key: str = "engine") -> None:
    """Whether there is such an engine, and its constructor takes the options.

    Args:
        key: the engine's, for messages.
    Raises: UserError.
    """
    name, arguments = settings.engine, {"max_prompt_tokens": None, "max_batch_sequences": 1}
    named_class(ENGINES, name, settings.engine_options, None, None, at=f"{key}={name}", **arguments)


def check_installed(settings: EngineConfig, where: Interpreter | None) -> None:
    """Whether what the engine needs is installed where the rollout runs, in a version that is known.

    Args:
        where: the rollout's environment; None: this process's own.
    Raises: UserError.
    """
    spec = settings.engine_spec
    if not spec.packages:
        return
    find = _version_here if where is None else where.packages.get
    package, installed = next(((name, find(name)) for name in spec.packages if find(name)), (spec.packages[0], None))
    place = sys.executable if where is None else where.path
    key, name = f"{settings.AT}engine={settings.engine}", spec.name
    if installed is None:
        if where is None:
            hint = f"rlinf venv create {name} (--cpu on CPU slots), then --venvs.rollout {name}"
        else:
            hint = f"rlinf venv create {name} (--cpu on CPU slots) makes one; rlinf venv list shows what there is"
        raise UserError(f"{key}: {package} is not installed in the environment of {place}", hint=hint)
    if installed not in spec.known_versions and not settings.engine_options.get("any_version"):
        raise UserError(
            f"{key}: the environment of {place} has {package} {installed}; known to work: "
            f"{', '.join(spec.known_versions)}",
            hint=f"rlinf venv create {name}, or --{settings.AT}engine_options.any_version true to take it as it is",
        )


def _version_here(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def engine_options(settings: EngineConfig, shape: ModelShape | None, job: JobShape) -> dict[str, Any]:
    """Arguments of the engine's constructor, with those that follow from the model where the settings leave them open.

    Args:
        shape: the model's; None where we cannot count its parts, and the engine decides by itself.
        job: what is asked of a rank, with the options of an engine.
    """
    return dict(job.engine_options) if shape is None else settings.engine_spec.filled_options(shape, job)

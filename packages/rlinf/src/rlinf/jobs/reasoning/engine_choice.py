"""`rollout.engine: auto`: chooses the engine by what the candidates take.

Candidates are the engines that are installed and accept the recipe's settings. A single candidate is taken at no cost.
Otherwise the planner's derived steps decide if every candidate has one and the best is clearly shorter; else a probe
with the real workers. The choice replaces `auto` in the config, so a resumed run keeps it.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlinf.config.load import to_yaml, validated
from rlinf.config.reasoning import AUTO_ENGINE, ENGINE_CHOICE, ReasoningConfig
from rlinf.config.yaml_source import Tree
from rlinf.console.live_line import LiveLine
from rlinf.errors import RunFailed, UserError
from rlinf.jobs.generation import check_installed
from rlinf.jobs.reasoning.planning import reasoning_problem
from rlinf.machine import Machine
from rlinf.processes.venvs import examine_venvs
from rlinf.venvs.folder import venvs
from rlinf_sched import SchedError, best_plan
from rlinf_sched.derive import sheet_of
from rlinf_workers.plugins import ENGINES

CLOSE = 0.1
"""Relative distance to the best derived step below which derived steps do not decide: SGLang's and vLLM's are derived
alike, and predictions are less exact than this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Seconds of a step for each candidate."""

    what: str
    """What they are seconds of, and from where, for people."""
    values: Mapping[str, float]
    """Engine -> seconds."""
    failures: Mapping[str, str]
    """Candidate without a number -> why."""

    @property
    def best(self) -> str:
        return min(self.values, key=self.values.__getitem__)

    @property
    def close(self) -> list[str]:
        """The engines whose seconds are within `CLOSE` of the best."""
        limit = (1 + CLOSE) * self.values[self.best]
        return [name for name, value in self.values.items() if value <= limit]

    def __str__(self) -> str:
        ordered = sorted(self.values, key=self.values.__getitem__)
        return ", ".join(f"{name} {self.values[name]:,.4g} s" for name in ordered) + f" ({self.what})"


def choose_engine(config: ReasoningConfig, machine: Machine) -> ReasoningConfig:
    """The config with an engine in place of `auto`, and a note about the choice.

    Raises: UserError if no engine is possible; RunFailed if all fail in the probe.
    """
    candidates, refused = installed_engines(config, machine)
    if len(candidates) > 1:
        candidates, refused = _prepared(candidates, refused, machine)
    if not candidates:
        raise _nothing_left(refused)
    if len(candidates) == 1:
        return _chosen(candidates, next(iter(candidates)), [], refused)
    derived = _derived_here(candidates, machine)
    if derived is not None:
        if len(close := derived.close) == 1:
            return _chosen(candidates, derived.best, [derived], refused)
        candidates = {name: candidates[name] for name in close}
    measured = _measured(candidates, machine)
    if not measured.values:
        failures = _reasons(measured.failures)
        raise RunFailed(f"rollout.engine={AUTO_ENGINE}: every engine failed in the probe\n{failures}")
    return _chosen(candidates, measured.best, [measured, *([derived] if derived else [])], refused)


def choose_planned_engine(config: ReasoningConfig, num_devices: int, gpu: str) -> ReasoningConfig:
    """`choose_engine` for GPUs that need not be there: by derived steps alone, whatever is installed here.

    Raises: UserError if nothing fits.
    """
    candidates: dict[str, ReasoningConfig] = {}
    refused: dict[str, str] = {}
    for name in ENGINES.names():
        try:
            candidates[name] = _with_engine(config, name)
        except UserError as error:
            refused[name] = error.message
    figures = _derived(candidates, num_devices, gpu)
    if not figures.values:
        raise _nothing_left({**refused, **figures.failures})
    config = _chosen(candidates, figures.best, [figures], refused)
    if len(close := figures.close) == 1:
        return config
    undecided = f"{' and '.join(close)} are too close to decide; rlinf train measures them"
    return config.with_notes((*config.notes, undecided))


# -- candidates --------------------------------------------------------------------------------------------------------


def installed_engines(config: ReasoningConfig, machine: Machine) -> tuple[dict[str, ReasoningConfig], dict[str, str]]:
    """The engines that are installed and accept the recipe's settings, each with its config; and for every other one
    the reason. An engine that needs a venv of its own gets the one that `rlinf venv create` made for these devices,
    unless the recipe names another."""
    candidates: dict[str, ReasoningConfig] = {}
    refused: dict[str, str] = {}
    for name in ENGINES.names():
        try:
            candidates[name] = _where_installed(_with_engine(config, name), machine)
        except UserError as error:
            refused[name] = error.message
    return candidates, refused


def _with_engine(config: ReasoningConfig, name: str, venv: str | None = None) -> ReasoningConfig:
    """Raises: UserError for a setting that the engine does not accept."""
    values = config.model_dump(mode="json")
    values["rollout"]["engine"] = name
    if venv is not None:
        values["venvs"]["rollout"] = venv
    chosen = validated(Tree(values=values)).with_notes(config.notes)
    assert isinstance(chosen, ReasoningConfig), "the job is the same"
    return chosen


def _where_installed(config: ReasoningConfig, machine: Machine) -> ReasoningConfig:
    """Raises: UserError if no venv has the engine."""
    problem: UserError | None = None
    for venv in _possible_venvs(config, machine):
        try:
            chosen = config if venv is None else _with_engine(config, config.rollout.engine, venv)
            check_installed(chosen.rollout, examine_venvs(chosen.group_venvs).get("rollout"))
            return chosen
        except UserError as error:
            problem = problem or error
    assert problem is not None, "there is always a place to look"
    raise problem


def _possible_venvs(config: ReasoningConfig, machine: Machine) -> Iterator[str | None]:
    """Venvs of the rollout to look in; None: as the config says."""
    yield None
    needed = config.rollout.engine_spec.venv
    if needed is None or "rollout" in config.venvs:
        return
    on_cpu = config.cluster.device == "cpu" or not machine.gpus
    for one in venvs():
        if one.stamp.is_complete and one.stamp.name == needed.name and one.stamp.cpu == on_cpu:
            yield one.path.name


def _prepared(
    candidates: Mapping[str, ReasoningConfig], refused: Mapping[str, str], machine: Machine
) -> tuple[dict[str, ReasoningConfig], dict[str, str]]:
    """Candidates whose model, memory and placement pass every check of a run, and the reasons of the others."""
    from rlinf.jobs import prepare

    passed: dict[str, ReasoningConfig] = {}
    failed = dict(refused)
    for name, config in candidates.items():
        try:
            prepare(config, machine)
            passed[name] = config
        except UserError as error:
            failed[name] = error.message
    return passed, failed


# -- figures -----------------------------------------------------------------------------------------------------------


def _derived_here(candidates: Mapping[str, ReasoningConfig], machine: Machine) -> Figures | None:
    """Derived steps on this machine's GPUs; None if a candidate has none."""
    from rlinf.config.devices import check_cluster, device_kind

    cluster = next(iter(candidates.values())).cluster
    if device_kind(cluster, machine) != "cuda":
        return None
    sheet = sheet_of(gpu.name for gpu in machine.gpus)
    if sheet is None:
        return None
    figures = _derived(candidates, check_cluster(cluster, machine), sheet)
    return None if figures.failures else figures


def _derived(candidates: Mapping[str, ReasoningConfig], num_devices: int, gpu: str) -> Figures:
    values: dict[str, float] = {}
    failures: dict[str, str] = {}
    for name, config in candidates.items():
        try:
            problem = reasoning_problem(config, num_devices, gpu=gpu, env_step_s=None)
            plan = best_plan(problem, None if config.mode == "auto" else [config.mode])
            assert plan.prediction is not None, "the planner predicts"
            values[name] = plan.prediction.step_s
        except UserError as error:
            failures[name] = error.message
        except SchedError as error:
            failures[name] = str(error)
    return Figures(what=f"a step, derived for {num_devices} x {gpu}", values=values, failures=failures)


def _measured(candidates: Mapping[str, ReasoningConfig], machine: Machine) -> Figures:
    """Samples a step's prompts, or as many as time allows, with each candidate, in processes that then end. Engines
    draw completions of other lengths, so their seconds are those of as many tokens: the mean over all."""
    from rlinf.jobs import prepare
    from rlinf.jobs.reasoning.job import ReasoningJob
    from rlinf.loop.engine_probe import EngineProbe, probe_engine
    from rlinf.run_folder import RunFolder

    probes: dict[str, EngineProbe] = {}
    failures: dict[str, str] = {}
    for name, config in candidates.items():
        job = prepare(config, machine)
        assert isinstance(job, ReasoningJob), "the config is of this job"
        with tempfile.TemporaryDirectory(prefix="rlinf-engine-") as scratch:
            path, command = Path(scratch) / "run", ["rlinf", "probe", name]
            with (
                RunFolder(
                    path, config_yaml=to_yaml(config), command=command, keep_checkpoints=1, trace_bytes=0
                ) as folder,
                LiveLine().doing(f"measuring the engine {name}"),
            ):
                try:
                    probes[name] = probe_engine(job, folder)
                except RunFailed as error:
                    failures[name] = str(error).partition("\n")[0]
    if not probes:
        return Figures(what="", values={}, failures=failures)
    every = probes.values()
    tokens_of_prompt = statistics.mean(one.num_tokens / one.num_prompts for one in every)
    fewest, step_prompts = min(one.num_prompts for one in every), max(one.step_prompts for one in every)
    return Figures(
        what=f"a step's sampling, weight sync and offload, measured over {fewest} of {step_prompts} prompts",
        values={name: one.step_s(tokens_of_prompt) for name, one in probes.items()},
        failures=failures,
    )


# -- the choice --------------------------------------------------------------------------------------------------------


def _chosen(
    candidates: Mapping[str, ReasoningConfig], name: str, figures: Sequence[Figures], refused: Mapping[str, str]
) -> ReasoningConfig:
    """The chosen engine's config with the note."""
    config, others = candidates[name], dict(refused)
    for one in figures:
        others |= one.failures
    why = "; ".join(map(str, figures)) or "the only one that is possible here"
    not_possible = f"; not possible: {_reasons(others)}" if others else ""
    return config.with_notes((*config.notes, f"{ENGINE_CHOICE}{name}: {why}{not_possible}"))


def _nothing_left(refused: Mapping[str, str]) -> UserError:
    return UserError(
        f"rollout.engine={AUTO_ENGINE}: no engine is possible: {_reasons(refused)}",
        hint="change the setting that is named, or choose an engine: --rollout.engine NAME",
    )


def _reasons(refused: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {_reason(name, reason)}" for name, reason in refused.items())


def _reason(name: str, text: str) -> str:
    """The text in one line, without the key that names the engine again."""
    return " ".join(text.removeprefix(f"rollout.engine={name}: ").split())

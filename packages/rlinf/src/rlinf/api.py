"""RLinf from Python: what the commands do, for scripts and notebooks.

run = rlinf.train("sort-grpo", run={"num_steps": 50}, seed=1)
pandas.DataFrame(run.metrics).plot(x="step", y="reward/mean")
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from rlinf.cli.output_folder import new_folder
from rlinf.config import load
from rlinf.config.common import JobConfig
from rlinf.config.overrides import Override
from rlinf.errors import UserError
from rlinf.loop.ending import how_to_go_on
from rlinf.run_folder.fingerprints import code_fingerprints
from rlinf.run_folder.lock import check_empty, check_free
from rlinf.run_folder.plain_files import read_plain_json
from rlinf.run_folder.rows import read_rows
from rlinf.torch_import import import_torch
from rlinf.training import OnStep, run_training

if TYPE_CHECKING:
    from rlinf.playing.loaded import LoadedPolicy
    from rlinf_sched.explain import PlanExplanation

MAIN_HINT = """\
workers are processes of their own and cannot see it: write it to a file, and name it "my_module:{name}".
In a notebook, put this line on top of its cell: %%writefile my_module.py"""


@dataclass(frozen=True, slots=True)
class Run:
    """A run in its folder, finished or under way; every attribute reads the folder anew.

    Example: `Run("runs/sort-grpo-...").metrics[-1]["reward/mean"]`
    """

    folder: Path
    """The run's folder; text becomes a path."""

    def __init__(self, folder: str | Path) -> None:
        object.__setattr__(self, "folder", Path(folder))

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The metrics of each training step, a row a step; `pandas.DataFrame(run.metrics)` is a table."""
        return _table(self.folder / "metrics.jsonl")

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """The metrics of each evaluation; `step` counts the training steps before it."""
        return _table(self.folder / "evaluations.jsonl")

    @property
    def samples(self) -> list[dict[str, Any]]:
        """Completions that were kept for inspection; empty for robots."""
        from rlinf.report.records import WORST

        return [row for row in read_rows(self.folder / "samples.jsonl") if WORST not in row]

    @property
    def config(self) -> JobConfig:
        """The config with all its keys. Raises: UserError for a folder that holds none."""
        return load.load_for_resume(self.folder)

    @property
    def result(self) -> dict[str, Any] | None:
        """The score before and after, and times; None while it is not finished."""
        file = self.folder / "result.json"
        return dict(read_plain_json(file)) if file.exists() else None

    @property
    def report(self) -> Path:
        """The page with curves, samples and plans, written at the end of a run; `rlinf report` writes it anew."""
        return self.folder / "report.html"

    def resume(
        self, overrides: Mapping[str, Any] | None = None, /, *, on_step: OnStep | None = None, **keys: Any
    ) -> Run:
        """Continues the run from its newest checkpoint, for example with `run={"num_steps": 200}`.

        Raises: UserError for a key that would change what the run has computed so far.
        """
        config = load.load_for_resume(self.folder, _overrides(overrides, keys))
        check_free(self.folder)
        if ended := how_to_go_on(config.run, self.folder):
            print(ended)
        else:
            _train(config, self.folder, "rlinf.Run.resume", resume=True, on_step=on_step)
        return self

    def evaluate(
        self, benchmarks: Mapping[str, Any], /, *, output: str | Path | None = None, **keys: Any
    ) -> dict[str, Any]:
        """Evaluates the language model of the newest checkpoint as `rlinf eval` does.

        Args:
            benchmarks: name -> data file or name on the Hub, or a section with `file`, `reward` and more.
            output: the evaluation's folder; None: a new one below runs/.
            keys: settings of the evaluation, for example `k=8` or `temperature=1.0`.

        Returns: what `result.json` of the evaluation holds.
        Raises: UserError.
        """
        import_torch()
        from rlinf import evaluation
        from rlinf.config.downloads import with_downloads
        from rlinf.console.eval_progress import EvalProgress
        from rlinf.jobs.checks import check_eval_references

        named = {
            name: {"file": value} if isinstance(value, str | Path) else value for name, value in benchmarks.items()
        }
        overrides = _overrides({"benchmarks": named, "model": self.folder}, keys)
        config = with_downloads(load.load_eval(None, overrides))
        check_eval_references(config)
        path = new_folder(f"eval-{self.folder.name}") if output is None else Path(output)
        with _current_modules(config), _main_hidden():
            prepared = evaluation.prepare(config)
            prepared.run(path, resume=False, command=["rlinf.Run.evaluate"], progress=EvalProgress())
        return dict(read_plain_json(path / "result.json"))

    def export(
        self, output: str | Path, *, checkpoint: str | None = None, dtype: str | None = None, merged: bool = False
    ) -> Path:
        """Writes the model of a checkpoint as a Hugging Face folder; arguments as of `rlinf export`.

        Raises: UserError.
        """
        from rlinf.run_folder.export import export, find_checkpoint

        return export(find_checkpoint(self.folder, checkpoint), Path(output), dtype, merged=merged).folder

    def _repr_html_(self) -> str:
        """A line for notebooks."""
        rows = self.metrics
        steps = f"{len(rows)} steps" if rows else "no step yet"
        return f"run <code>{self.folder}</code>: {steps}, <a href='{self.report}'>report</a>"


def load_config(recipe: str | Path, overrides: Mapping[str, Any] | None = None, /, **keys: Any) -> JobConfig:
    """Returns the config of a recipe, checked.

    Args:
        recipe: name of a shipped recipe, or path of a YAML file.
        overrides: values by dotted key, `{"run.num_steps": 50}`.
        keys: values by key, `seed=1`; those of a section as a dict, `run={"num_steps": 50}`.

    Raises: UserError that lists all mistakes.
    """
    return load.load_config(str(recipe), _overrides(overrides, keys))


def train(
    recipe: str | Path,
    overrides: Mapping[str, Any] | None = None,
    /,
    *,
    output: str | Path | None = None,
    on_step: OnStep | None = None,
    **keys: Any,
) -> Run:
    """Trains a recipe to its end and returns the run; progress is printed as by `rlinf train`.

    A reward, a loss or another custom part is given as its import path or as the function itself, which has to be in a
    module that workers can import.

    Args:
        recipe, overrides, keys: as of `load_config`.
        output: the run's folder, which must be new or empty; None: a new one below runs/.
        on_step: called after each training step with the step's number, from 0, and its metrics.

    Raises: UserError for wrong inputs, before anything was written; RunFailed.
    """
    config = load_config(recipe, overrides, **keys)
    run = Run(output if output is not None else new_folder(config.name))
    check_free(run.folder)
    check_empty(run.folder)
    _train(config, run.folder, "rlinf.train", str(recipe), on_step=on_step)
    return run


def plan(
    problem: str | Path,
    overrides: Mapping[str, Any] | None = None,
    /,
    *,
    num_devices: int | None = None,
    gpu: str | None = None,
    what_if: bool = False,
    **keys: Any,
) -> PlanExplanation:
    """Plans a job for GPUs that need not be there, and returns the plan with its reasons; `print` shows it.

    Args:
        problem: a recipe, or a workload or problem file of `rlinf plan`, which says itself what GPUs it has.
        overrides, keys: of a recipe, as of `load_config`.
        num_devices: of a recipe: number of GPUs.
        gpu: of a recipe: a product that `rlinf plan --gpu` knows; None: H100.
        what_if: also plan changed problems, such as twice the GPUs; takes several times as long.

    Raises: UserError.
    """
    from rlinf.planning.named import explain_named

    devices = {} if num_devices is None else {"cluster.num_devices": num_devices}
    values = _overrides({**(overrides or {}), **devices}, keys)
    return explain_named(str(problem), values, gpu=gpu, what_if=what_if)[0]


def load_policy(path: str | Path, checkpoint: str | None = None) -> LoadedPolicy:
    """Loads a trained robot policy into this process; `policy.act(observations)` returns actions.

    Args:
        path: a run's folder, one of its checkpoints, or a recipe with a published checkpoint in
            `policy.options.folder`.
        checkpoint: of a run: newest (default), best, or a name such as step-000100.

    Raises: UserError.
    """
    import_torch()
    from rlinf.playing.loaded import load_policy

    return load_policy(path, checkpoint)


# -- training --------------------------------------------------------------------------------------------------------


def _train(config: JobConfig, folder: Path, *command: str, resume: bool = False, on_step: OnStep | None = None) -> None:
    """Trains, and prints the scores. Raises: as `train`."""
    resume_with = f"rlinf.Run({str(folder)!r}).resume()"
    with _current_modules(config), _main_hidden():
        result = run_training(config, folder, command=command, resume=resume, on_step=on_step, resume_with=resume_with)
    print(f"\n{result}")


@contextmanager
def _main_hidden() -> Iterator[None]:
    """Processes that are started meanwhile do not run the caller's program a second time, so that it needs no
    `if __name__ == "__main__"`."""
    main = sys.modules["__main__"]
    before = {name: vars(main)[name] for name in ("__file__", "__spec__") if name in vars(main)}
    vars(main).pop("__file__", None)  # with None, `inspect` fails, which torch needs while it is imported
    main.__spec__ = None
    try:
        yield
    finally:
        vars(main).update(before)


_DIGESTS: dict[str, str] = {}
"""Custom module -> digest of its file when a call first used it."""


@contextmanager
def _current_modules(config: BaseModel) -> Iterator[None]:
    """Imports custom modules anew whose file has changed since an earlier call, as when a notebook's cell writes it
    again: workers read the new file, and so must the checks in this process."""
    _forget_changed_modules(config)
    try:
        yield
    finally:
        _forget_changed_modules(config)  # knows the modules that the checks have imported


def _forget_changed_modules(config: BaseModel) -> None:
    for name, digest in code_fingerprints(config.model_dump(mode="json")).items():
        module = name.rpartition("=")[2].partition(":")[0]
        if _DIGESTS.setdefault(module, digest) != digest:
            _DIGESTS[module] = digest
            sys.modules.pop(module, None)


# -- values --------------------------------------------------------------------------------------------------------


def _overrides(overrides: Mapping[str, Any] | None, keys: Mapping[str, Any]) -> Sequence[Override]:
    """The values as on a command line."""
    return [
        Override(key=key, text=_text(value, ".".join(key))) for key, value in _leaves({**(overrides or {}), **keys})
    ]


def _leaves(values: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in values.items():
        key = (*above, *str(name).split("."))
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, key)
        else:
            yield key, value


def _text(value: Any, key: str) -> str:
    """A value as it is written on a command line."""
    if callable(value):
        value = _import_path(value, key)
    try:
        return json.dumps(value, default=_plain)
    except TypeError as error:
        raise UserError(f"{key}={value!r}: {error}", hint="give text, a number, a bool, a list or a dict") from error


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"a {type(value).__name__} is no value of a recipe")


def _import_path(value: Any, key: str) -> str:
    """The import path of a function or class. Raises: UserError for one that no other process can import."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", repr(value))
    if module == "__main__":
        raise UserError(f"{key}={name} is defined in the program or notebook itself", hint=MAIN_HINT.format(name=name))
    member = None if module is None else getattr(importlib.import_module(module), name, None)
    if "<" in name or getattr(member, "__qualname__", None) != name:  # the same one, or that of an edited module
        raise UserError(
            f"{key}={name}: it has no name in a module", hint="give a function or class at the top level of a module"
        )
    return f"{module}:{name}"


def _table(file: Path) -> list[dict[str, Any]]:
    """The rows of a file with the metrics beside step and time."""
    return [{key: value for key, value in row.items() if key != "metrics"} | row["metrics"] for row in read_rows(file)]

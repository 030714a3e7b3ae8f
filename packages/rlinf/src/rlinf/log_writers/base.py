"""Log writers: what sends a run's metrics, samples and files somewhere, such as TensorBoard, W&B or MLflow.

The run's folder has all of it in any case (`metrics.jsonl`, `evaluations.jsonl`, `samples.jsonl`); a log writer gets
copies. `rlinf.log_writers.delivery` calls each writer in a thread of its own, so that a slow one does not hold up
training and an error in one does not end it. The loggers of Lightning and TRL are called in the training loop instead.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EVALUATION = "evaluation/"
"""Begins the names of evaluation metrics, in every log writer."""
SampleRows = Sequence[Mapping[str, Any]]
"""Rows of samples.jsonl: one completion each, the completions of a prompt together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedRun:
    """The run that a log writer writes about."""

    id: str
    """8 hexadecimal digits; the same when the run is resumed."""
    name: str
    """Name of the run's folder."""
    folder: Path
    """The run's folder. It exists, and a writer may put files of its own there."""
    config: Mapping[str, Any]
    """The resolved config; JSON values, nested by section."""
    resumed_from_step: int | None = None
    """Training steps that were done when the run was resumed; None for a new run."""

    def recall(self, writer: str) -> Mapping[str, Any]:
        """Returns what the writer of that name remembered in an earlier session; empty in the first."""
        from rlinf.run_folder.plain_files import read_plain_json  # the config imports this module

        try:
            values = read_plain_json(self.folder / f"{writer}.json")
        except FileNotFoundError:
            return {}
        return values if isinstance(values, Mapping) else {}

    def remember(self, writer: str, values: Mapping[str, Any]) -> None:
        """Writes values that a resumed run needs, such as an id that a server chose, to `<writer>.json`."""
        from rlinf.run_folder.rows import to_json, write_file

        write_file(self.folder / f"{writer}.json", to_json(values) + "\n")


class LogWriter(ABC):
    """Base class of log writers. A writer overrides the methods that it has a use for; only `write` is required.

    All methods are called in one thread, which is not the main one, in the order of the run. An exception of `begin`
    ends the command before training starts. An exception of another method becomes one warning to the user; the call is
    tried again later, and training goes on.
    """

    def begin(self, run: LoggedRun) -> None:  # noqa: B027 - optional
        """Opens the log; continues it if `run.resumed_from_step` is not None."""

    @abstractmethod
    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Writes the metrics of a training step.

        Args:
            step: the step's number, from 0.
            values: by name (docs/metrics.md); NaN and infinities are possible.
        """

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Writes an evaluation; `write` by default.

        Args:
            step: number of training steps done.
            values: as in `write`; their names begin with `evaluation/`.
        """
        self.write(step, values)

    def samples(self, step: int, rows: SampleRows) -> None:  # noqa: B027 - optional
        """Writes sampled completions of a training step; `side_by_side` makes a table of them."""

    def video(self, step: int, path: Path) -> None:  # noqa: B027 - optional
        """Writes the film (MP4) of the evaluation after `step` training steps."""

    def artifact(self, name: str, path: Path) -> None:  # noqa: B027 - optional
        """Writes a file at the end of the run: config, plan, result, report."""

    def rewind(self, step: int) -> None:  # noqa: B027 - optional
        """The run continues from its checkpoint of this step, in the same process: metrics of the steps from there on
        come again. Nothing to do for logs in which a later value of a step replaces an earlier one."""

    def close(self, failure: str | None) -> None:  # noqa: B027 - optional
        """Finishes the log; called once, at the end of every session.

        Args:
            failure: why the run stopped, "interrupted" if the user did it; None if it finished.
        """


def side_by_side(rows: SampleRows) -> tuple[list[str], list[list[Any]]]:
    """Returns columns and rows of a table with a row for each prompt and all its completions beside each other.

    Example: two completions of one prompt give the columns prompt, reference_answer, mean_reward, completion_1,
        reward_1, answer_1, completion_2, reward_2, answer_2.
    """
    groups = list(sample_groups(rows))
    each = [name for name in ("completion", "reward", "answer", "outcome") if any(name in row for row in rows)]
    most = max(map(len, groups), default=0)
    columns = ["prompt", "reference_answer", "mean_reward"]
    columns += [f"{name}_{i + 1}" for i in range(most) for name in each]
    return columns, [_group_row(group, each, most) for group in groups]


def sample_groups(rows: SampleRows) -> list[list[Mapping[str, Any]]]:
    """Returns the rows of completions by prompt, in order; rows about something else, such as the worst token, are left
    out."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if "completion" in row:
            groups.setdefault(f"{row.get('step')}/{row.get('prompt_index')}/{row.get('prompt')}", []).append(row)
    return list(groups.values())


def _group_row(group: Sequence[Mapping[str, Any]], each: Sequence[str], most: int) -> list[Any]:
    rewards = [row["reward"] for row in group if isinstance(row.get("reward"), int | float)]
    mean = sum(rewards) / len(rewards) if rewards else None
    cells = [row.get(name) for row in group for name in each]
    padding = [None] * (most * len(each) - len(cells))
    return [group[0].get("prompt"), group[0].get("reference_answer"), mean, *cells, *padding]

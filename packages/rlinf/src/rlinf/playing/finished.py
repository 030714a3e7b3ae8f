"""Compares two evaluations that `rlinf play` has finished, from their files alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlinf.config.yaml_source import dump
from rlinf.errors import UserError
from rlinf.evaluation.folder import EvalFolder
from rlinf.playing import comparison_page
from rlinf.playing.comparison_scores import ComparisonScore, paired, to_json
from rlinf.playing.protocol import check_same, joint
from rlinf.run_folder.folder import RESULT
from rlinf.run_folder.plain_files import read_plain_json
from rlinf.run_folder.rows import read_rows, write_file

EPISODES = "episodes.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedEvaluation:
    """The folder of an evaluation with its results."""

    path: Path
    checkpoint: str
    protocol: Mapping[str, Any]
    """As in result.json."""
    batch_size: int | None
    """Environments that the policy answered together; None: unknown."""
    rows: Sequence[Mapping[str, Any]]
    """Of the episodes; each has task, seed and success_at_end."""


def is_finished(path: Path) -> bool:
    """Returns whether a folder has the results of an evaluation."""
    return (path / RESULT).is_file() and (path / EPISODES).is_file()


def read_finished(path: Path) -> FinishedEvaluation:
    """Raises: UserError for a folder that `rlinf play` did not write, or wrote before it recorded protocols."""
    try:
        result = read_plain_json(path / RESULT)
    except ValueError as error:
        raise UserError(f"{path / RESULT} is not JSON: {error}") from error
    if not isinstance(result, dict) or not isinstance(result.get("protocol"), dict):
        raise UserError(
            f"{path / RESULT} has no protocol, so what was evaluated is unknown",
            hint="play the policy again with this version of rlinf play",
        )
    rows = read_rows(path / EPISODES)
    if not rows or not all({"task", "seed", "success_at_end"} <= row.keys() for row in rows):
        raise UserError(f"{path / EPISODES} does not hold the episodes of one policy, as rlinf play writes them")
    if any(row["success_at_end"] is None for row in rows):
        raise UserError(f"{path}: the environment never says that an episode succeeded, and success is compared")
    return FinishedEvaluation(
        path=path,
        checkpoint=str(result.get("checkpoint")),
        protocol=result["protocol"],
        batch_size=result.get("batch_size"),
        rows=rows,
    )


def compare(
    evaluations: Sequence[FinishedEvaluation], path: Path, *, force: bool, command: Sequence[str]
) -> ComparisonScore:
    """Compares two evaluations and writes result.json and a page.

    Args:
        path: the output folder.
        force: compare although the protocols differ, on the starts that both have.

    Raises: UserError if the protocols differ, or no start is in both.
    """
    a, b = evaluations
    if not force:
        check_same(a.protocol, b.protocol, ("A", "B"))
    score = paired(a.rows, b.rows)
    if not score.starts:
        raise UserError(f"{a.path} and {b.path} have no start in common: their seeds and tasks differ")
    notes = []
    if (left := max(len(a.rows), len(b.rows)) - len(score.starts)) > 0:
        notes.append(f"{left} starts are not in both evaluations and were left out")
    if a.batch_size != b.batch_size:
        notes.append(
            f"A answered {a.batch_size or 'an unknown number of'} environments together and B "
            f"{b.batch_size or 'an unknown number'}: other batches round differently, and a last bit may decide an "
            "episode; rlinf play --one-by-one prevents this"
        )
    record = joint(a.protocol, b.protocol)
    yaml = dump({"finished": {"a": str(a.path), "b": str(b.path), "force": force}})
    with EvalFolder(
        path, resume=False, config_yaml=yaml, command=command, inputs={}, notes=notes, job="comparison"
    ) as folder:
        about = {
            side: {"folder": str(one.path), "checkpoint": one.checkpoint}
            for side, one in zip("ab", evaluations, strict=True)
        }
        folder.write_result({**about, "protocol": record, "notes": notes, **to_json(score)})
        line = f"A is {a.checkpoint}, B is {b.checkpoint}"
        write_file(path / comparison_page.PAGE, comparison_page.render(line, score, record, None, notes))
    return score

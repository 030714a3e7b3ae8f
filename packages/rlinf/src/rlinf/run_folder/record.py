"""The record of a run: what decided the numbers of its steps, so that a replay ends with the same weights.

    record.jsonl   {"step", "begun_after", "decisions": {stage: [[rank, decision], ...]}} a training step

Steps that are in the record already, of this run before it was interrupted or of the run that is replayed, are followed
and compared; further ones are added.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlinf.errors import UserError
from rlinf.run_folder.checkpoints import CHECKPOINTS, checkpoint_steps
from rlinf.run_folder.rows import append_rows, iter_rows, keep_rows, to_json

if TYPE_CHECKING:
    from rlinf_workers import Decisions  # imports torch

RECORD = "record.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedStep:
    """A training step."""

    begun_after: int
    """Steps that had ended when this one began: the weights after so many steps sampled it."""
    decisions: Mapping[str, Decisions]
    """Stage -> the decisions of its ranks."""


class RunRecord:
    """The record in a run's folder, which need not exist yet.

    Args:
        must_match: the run is a replay: it ends with the record, or with the first step that differs.
    """

    def __init__(self, folder: Path, *, must_match: bool = False) -> None:
        self._path = folder / RECORD
        self.must_match = must_match
        self.num_equal = 0
        """Steps that were compared with the record, and were equal."""
        self._steps = {row["step"]: _step(row) for row in iter_rows(self._path)}

    @property
    def num_steps(self) -> int:
        """Steps up to the last one that is recorded."""
        return max(self._steps, default=-1) + 1

    def decisions(self, step: int) -> Mapping[str, Decisions] | None:
        """What a step is to follow; None: it is not in the record."""
        recorded = self._steps.get(step)
        return None if recorded is None else recorded.decisions

    def begun_after(self, step: int) -> int | None:
        """How many steps had ended when a step began; None: it is not in the record."""
        recorded = self._steps.get(step)
        return None if recorded is None else recorded.begun_after

    def next_pause(self, step: int) -> int | None:
        """The first later step that began when all before it had ended; None: the record does not say."""
        pauses = (later for later, one in self._steps.items() if later > step and one.begun_after == later)
        first = min(pauses, default=self.num_steps)
        return first if first > step else None

    def add(self, step: int, new: RecordedStep) -> str:
        """Records a step that has ended, or compares it with its record.

        Returns: what differs first; empty if nothing does. The record then has the new step and none after it, unless
            it must match.
        """
        row = {"step": step, "begun_after": new.begun_after, "decisions": new.decisions}
        new = _step(json.loads(to_json(row)))  # as it is read back
        if (recorded := self._steps.get(step)) is not None:
            difference = _difference(recorded, new)
            if not difference:
                self.num_equal += 1
            if self.must_match or not difference:
                return difference
            keep_rows(self._path, lambda row: row["step"] < step)
            self._steps = {number: one for number, one in self._steps.items() if number < step}
        else:
            difference = ""
        self._steps[step] = new
        append_rows(self._path, [row])
        return difference


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """A run that is done again from its record."""

    run: Path
    """Its folder."""
    checkpoint: Path | None
    """Where the replay begins; None: where the run did."""

    @property
    def overlaps(self) -> bool:
        """Whether steps of the record overlapped."""
        return any(row["begun_after"] < row["step"] for row in iter_rows(self.run / RECORD))

    def copy_to(self, folder: Path, row_files: Collection[str]) -> None:
        """Copies the record and the checkpoint into the folder of the replay, with all rows of these files."""
        shutil.copyfile(self.run / RECORD, folder / RECORD)
        if self.checkpoint is None:
            return
        shutil.copytree(self.checkpoint, folder / CHECKPOINTS / self.checkpoint.name)
        for name in row_files:
            if (self.run / name).exists():
                shutil.copyfile(self.run / name, folder / name)


def replay_of(run: Path, from_step: int) -> Replay:
    """A replay that begins with the newest checkpoint after at most `from_step` steps; where the run did if that is 0.

    Raises: UserError if the run has no record, or no such checkpoint.
    """
    if not (run / RECORD).is_file():
        raise UserError(
            f"{run}: has no {RECORD}, so there is nothing to replay", hint="a run with --run.record true writes one"
        )
    if not from_step:
        return Replay(run=run, checkpoint=None)
    steps = dict(checkpoint_steps(run / CHECKPOINTS))
    usable = [step for step in steps if step <= from_step]
    if not usable:
        names = ", ".join(map(str, steps)) or "none"
        raise UserError(
            f"--from {from_step}: {run} has no checkpoint after so few steps",
            hint=f"its checkpoints: {names}; without --from the replay begins where the run did",
        )
    return Replay(run=run, checkpoint=steps[max(usable)])


def _step(row: Mapping[str, Any]) -> RecordedStep:
    decisions = {stage: [(rank, one) for rank, one in pairs] for stage, pairs in row["decisions"].items()}
    return RecordedStep(begun_after=row["begun_after"], decisions=decisions)


def _difference(recorded: RecordedStep, new: RecordedStep) -> str:
    """What differs first in a step, in words; empty if it is the same."""
    if recorded.begun_after != new.begun_after:
        return f"it began after {new.begun_after} steps had ended, and in the record after {recorded.begun_after}"
    for stage in {**recorded.decisions, **new.decisions}:  # in the order of the flow
        before, now = (_by_subject(one.decisions.get(stage, [])) for one in (recorded, new))
        for subject in sorted(before.keys() | now.keys()):
            if before.get(subject) != now.get(subject):
                was, has = before.get(subject, "nothing"), now.get(subject, "nothing")
                return f"{stage}, {subject}: {_shortened(has)}, and in the record {_shortened(was)}"
    return ""


def _by_subject(decisions: Decisions) -> dict[str, Any]:
    """The decisions by what they are about. Groups are the same whichever rank has had them, and so are weights of
    which every rank has a copy. What agents say is left out, since a replay reads it from the record."""
    by_subject: dict[str, Any] = {}
    for rank, one in decisions:
        if "said" in one:
            continue
        for what, value in one.items():
            if what == "weights":
                digests = by_subject.setdefault("weights", [])
                digests += [value] * (value not in digests)
                continue
            about = f"group {one['group']:06}" if "group" in one else f"rank {rank}"
            by_subject.setdefault(f"{what} of {about}", []).append(value)
    return by_subject


def _shortened(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 100 else f"{text[:100]}..."

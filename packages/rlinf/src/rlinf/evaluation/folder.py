"""The folder of an evaluation.

    config.yaml    the settings; --resume starts from it
    manifest.json  versions, machine, commands, notes, and fingerprints of the model and the problems
    samples.jsonl  a row for each completion, written as they come
    logs/          what each worker printed
    result.json    the scores, once all samples are there

A problem's samples are written in one piece; an incomplete piece is dropped when the evaluation is resumed, and its
problem is sampled again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlinf.errors import UserError
from rlinf.run_folder.fingerprints import changed_inputs, refuse_changed
from rlinf.run_folder.lock import FolderLock
from rlinf.run_folder.manifest import Manifest, failure_of, new_manifest
from rlinf.run_folder.rows import append_rows, keep_rows, read_rows, sync, to_json, write_file

SAMPLES = "samples.jsonl"
Done = set[tuple[str, int]]
"""(benchmark, row number) of problems with all their samples."""


class EvalFolder:
    """Open for writing; use it as a context manager.

    Args:
        path: for a new evaluation, must not exist or be empty.
        resume: continue the evaluation in the folder.
        inputs: name -> fingerprint of the inputs besides the settings; compared when the evaluation is resumed.
        notes: notes for the user; a resumed evaluation has new ones.
        job: kind of evaluation, for the manifest.

    Raises: UserError if there is nothing to resume, another process writes the folder, or an input has changed.
    """

    def __init__(
        self,
        path: Path,
        *,
        resume: bool,
        config_yaml: str,
        command: Sequence[str],
        inputs: Mapping[str, Any],
        notes: Sequence[str] = (),
        job: str = "evaluation",
    ) -> None:
        self.path = path
        if resume:
            self._manifest = Manifest.read(path, what="evaluation")
            _check_inputs(path, self._manifest, inputs)
        else:
            path.mkdir(parents=True, exist_ok=True)
            about = {"job": job, "inputs": inputs, "notes": list(notes)}
            self._manifest = Manifest(path, new_manifest(config_yaml, command) | about)
        self._lock = FolderLock(path, command)
        write_file(path / "config.yaml", config_yaml)
        self._manifest.begin_session(command)
        self._manifest.note(*self._lock.notes)

    def venvs(self, values: Mapping[str, Any]) -> None:
        """Records the venvs of roles in this session."""
        self._manifest.session("venvs", values)

    def note(self, *texts: str) -> None:
        """Records notes for the user."""
        self._manifest.note(*texts)

    def keep_whole_problems(self, samples_per_problem: int) -> Done:
        """Drops the samples of incomplete problems; returns the complete ones."""
        counts = Counter((row["benchmark"], row["problem"]) for row in read_rows(self.path / SAMPLES))
        done = {problem for problem, count in counts.items() if count == samples_per_problem}
        keep_rows(self.path / SAMPLES, lambda row: (row["benchmark"], row["problem"]) in done)
        return done

    def write_samples(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Writes all samples of one problem and syncs them to disk."""
        append_rows(self.path / SAMPLES, rows)
        sync(self.path / SAMPLES)

    def read_samples(self) -> list[dict[str, Any]]:
        return read_rows(self.path / SAMPLES)

    def write_result(self, values: Mapping[str, Any]) -> None:
        write_file(self.path / "result.json", to_json(values, indent=1) + "\n")

    def __enter__(self) -> EvalFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self._manifest.end_session(failure_of(kind, error))
        self._lock.release()


def _check_inputs(path: Path, manifest: Manifest, inputs: Mapping[str, Any]) -> None:
    if "inputs" not in manifest.values or manifest.values.get("job") in ("reasoning", "embodied"):
        raise UserError(
            f"{path} is the folder of a training run, not of an evaluation", hint="rlinf train --resume goes on with it"
        )
    changed = changed_inputs(manifest.values["inputs"], inputs)
    refuse_changed(changed, "evaluation", path, "put back what it was, or start anew with another --output folder")

"""Datasets in LeRobot's layout, versions 2.0, 2.1 and 3.0: parquet files of numbers, perhaps videos beside them.

Both have `meta/info.json` with `codebase_version`, `fps`, the `features` (dtype and shape of each column), and patterns
of the files. (Layouts: lerobot's `datasets/utils.py` at v2.1 and v3.0.)

* 2.x: a parquet file for each episode, `meta/episodes.jsonl` (`episode_index`, `tasks`, `length`), `meta/tasks.jsonl`.
* 3.0: files of many episodes; `meta/episodes/chunk-*/file-*.parquet` says which rows (`dataset_from_index`) of which
  file, and which seconds of which video; `meta/tasks.parquet` has the sentences.

Names become fields so: `observation.state` is "state", `observation.images.<camera>` is "image.<camera>", the episode's
task is "instruction"; `rename` says it of other names, that of the actions too. An episode counts as successful unless
a column `next.success` ends with false: most datasets hold successes alone, and have no such column.
"""

from __future__ import annotations

import importlib
import io
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf_envs.demonstrations.base import Demonstration, DemonstrationFiles
from rlinf_envs.errors import EnvError
from rlinf_envs.protocol import Observation

VERSIONS = ("v2.0", "v2.1", "v3.0")
_STATE, _PICTURES, _ACTION = "observation.state", "observation.images.", "action"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Episode:
    """Where one episode lies."""

    index: int
    length: int
    task: str | None
    """None: the rows say it."""
    table: Path
    videos: dict[str, tuple[Path, int]] = field(default_factory=dict)
    """Feature -> its file, and the first frame in it."""


class LeRobotDemonstrations(DemonstrationFiles):
    """The successful episodes of a dataset's folder. Raises: EnvError where it is not what it should be."""

    def __init__(self, path: Path, rename: Mapping[str, str]) -> None:
        self._path = path
        described = path / "meta" / "info.json"
        if not described.is_file():
            raise EnvError(f"{described} is missing; give the folder of a LeRobot dataset")
        self._info: dict[str, Any] = json.loads(described.read_text(encoding="utf-8"))
        version = self._info.get("codebase_version")
        if version not in VERSIONS:
            raise EnvError(f"{described} has codebase_version={version!r}; {', '.join(VERSIONS)} are read")
        self._features: dict[str, Any] = self._info["features"]
        features = _by_field(described, self._features, rename)
        if _ACTION not in features:
            raise EnvError(
                f"{described} has no feature '{_ACTION}'; it has {', '.join(sorted(self._features))}. Where it has "
                f"another name: rename: {{NAME: {_ACTION}}}"
            )
        self._action = features.pop(_ACTION)
        self._fields = {name: field for field, name in features.items()}
        self._numbered = [line for line in self._listed() if line.length > 0]

    def __len__(self) -> int:
        return len(self._successful)

    def read(self, number: int) -> Demonstration:
        episode = self._successful[number]
        rows, task = self._rows(episode), episode.task
        if task is None:
            task = self._tasks[int(rows["task_index"][0])]
        shown: Observation = {field: self._values(episode, rows, name) for name, field in self._fields.items()}
        shown["instruction"] = [task] * episode.length
        rewards = _numbers(rows["next.reward"]) if "next.reward" in rows else torch.zeros(episode.length)
        actions = _numbers(rows[self._action])
        return Demonstration(
            task=task,
            seed=None,
            observations=shown,
            actions=actions if actions.dtype == torch.int64 else actions.float(),
            rewards=rewards.float().reshape(-1),
            success=True,
        )

    # -- what there is -----------------------------------------------------------------------------------------------

    @cached_property
    def _successful(self) -> list[_Episode]:
        if "next.success" not in self._features:
            return self._numbered
        return [each for each in self._numbered if bool(_numbers(self._rows(each)["next.success"])[-1])]

    @cached_property
    def _tasks(self) -> dict[int, str]:
        """By their number."""
        if self._is_split:
            lines = _lines(self._path / "meta" / "tasks.jsonl")
            return {line["task_index"]: line["task"] for line in lines}
        columns = _table(self._path / "meta" / "tasks.parquet")
        (sentences,) = (name for name in columns if name != "task_index")
        return {int(i): str(text) for i, text in zip(columns["task_index"], columns[sentences], strict=True)}

    @property
    def _is_split(self) -> bool:
        """Whether each episode has files of its own."""
        return self._info["codebase_version"].startswith("v2.")

    def _listed(self) -> list[_Episode]:
        return self._listed_split() if self._is_split else self._listed_together()

    def _listed_split(self) -> list[_Episode]:
        found = []
        for line in _lines(self._path / "meta" / "episodes.jsonl"):
            index = line["episode_index"]
            where = {"episode_index": index, "episode_chunk": index // self._info["chunks_size"]}
            video = self._info.get("video_path") or ""
            found.append(
                _Episode(
                    index=index,
                    length=line["length"],
                    task=line["tasks"][0] if len(line.get("tasks", ())) == 1 else None,
                    table=self._path / self._info["data_path"].format(**where),
                    videos={key: (self._path / video.format(video_key=key, **where), 0) for key in self._videos},
                )
            )
        return found

    def _listed_together(self) -> list[_Episode]:
        found = []
        for file in sorted((self._path / "meta" / "episodes").glob("chunk-*/file-*.parquet")):
            columns = _table(file)
            for row in range(len(columns["episode_index"])):
                one = {name: values[row] for name, values in columns.items()}
                tasks = one.get("tasks")
                found.append(
                    _Episode(
                        index=int(one["episode_index"]),
                        length=int(one["length"]),
                        task=str(tasks[0]) if tasks is not None and len(tasks) == 1 else None,
                        table=self._file("data_path", one, "data"),
                        videos={
                            key: (
                                self._file("video_path", one, f"videos/{key}", video_key=key),
                                round(one[f"videos/{key}/from_timestamp"] * self._info["fps"]),
                            )
                            for key in self._videos
                        },
                    )
                )
        return found

    def _file(self, pattern: str, one: Mapping[str, Any], columns: str, **others: str) -> Path:
        numbers = {name: int(one[f"{columns}/{name}"]) for name in ("chunk_index", "file_index")}
        return self._path / self._info[pattern].format(**numbers, **others)

    @property
    def _videos(self) -> list[str]:
        return [name for name in self._fields if self._features[name]["dtype"] == "video"]

    # -- one episode -------------------------------------------------------------------------------------------------

    def _rows(self, episode: _Episode) -> dict[str, Any]:
        """Column -> the values of the episode's rows."""
        if not episode.table.is_file():
            raise EnvError(f"{episode.table} is missing, which {self._path / 'meta'} names")
        columns = _table(episode.table)
        chosen = np.flatnonzero(np.asarray(columns["episode_index"]) == episode.index)
        if len(chosen) != episode.length:
            raise EnvError(f"{episode.table} has {len(chosen)} rows of episode {episode.index}, not {episode.length}")
        return {name: [values[i] for i in chosen] for name, values in columns.items()}

    def _values(self, episode: _Episode, rows: Mapping[str, Any], name: str) -> Tensor:
        """[T, ...] of one feature."""
        if self._features[name]["dtype"] == "video":
            return torch.from_numpy(_frames(*episode.videos[name], episode.length))
        if self._features[name]["dtype"] == "image":
            pictures = [_imageio().imread(io.BytesIO(cell["bytes"])) for cell in rows[name]]
            return torch.from_numpy(np.stack(pictures))
        return _numbers(rows[name]).float()


def _by_field(described: Path, features: Iterable[str], rename: Mapping[str, str]) -> dict[str, str]:
    """Field, or `action` -> the feature that it is read from. Raises: EnvError where there are several."""
    found: dict[str, list[str]] = defaultdict(list)
    for name in features:
        if (field := rename.get(name, _field(name))) is not None:
            found[field].append(name)
    for field, names in found.items():
        if len(names) > 1:
            others = ", or ".join(f"rename: {{{name}: ANOTHER}}" for name in names)
            raise EnvError(
                f"{described}: the features {', '.join(names)} are all '{field}', and one can be; give the others "
                f"another name: {others}"
            )
    return {field: names[0] for field, names in found.items()}


def _field(name: str) -> str | None:
    """What a feature is called where `rename` does not say; None: it is not read."""
    if name.startswith(_PICTURES):
        return "image." + name.removeprefix(_PICTURES)
    return {_STATE: "state", _ACTION: _ACTION}.get(name)


def _numbers(cells: Sequence[Any]) -> Tensor:
    return torch.from_numpy(np.stack([np.asarray(cell) for cell in cells]))


def _lines(file: Path) -> list[dict[str, Any]]:
    if not file.is_file():
        raise EnvError(f"{file} is missing; the dataset is not whole")
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line]


def _table(file: Path) -> dict[str, list[Any]]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise EnvError(
            f"parquet files are read by pyarrow, which is missing ({error}); pip install 'rlinf-envs[lerobot]'"
        ) from error
    if not file.is_file():
        raise EnvError(f"{file} is missing; the dataset is not whole")
    return parquet.read_table(file).to_pydict()


def _frames(file: Path, first: int, number: int) -> np.ndarray:
    """[number, H, W, 3] uint8 of a video, from frame `first` on."""
    if not file.is_file():
        raise EnvError(f"{file} is missing; the dataset's videos have to be there too")
    with _imageio().get_reader(file, format="FFMPEG") as reader:
        frames = [np.asarray(frame) for frame in islice(reader, first, first + number)]
    if len(frames) < number:
        raise EnvError(f"{file} ends after {first + len(frames)} frames; {first + number} are needed")
    return np.stack(frames)


def _imageio() -> Any:
    try:
        return importlib.import_module("imageio.v2")
    except ImportError as error:
        raise EnvError(
            f"pictures and videos are read by imageio, which is missing ({error}); pip install 'rlinf-envs[lerobot]'"
        ) from error

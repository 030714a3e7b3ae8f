"""Reads datasets in LeRobot's layout, versions 2.0, 2.1 and 3.0: parquet files of numbers, optionally videos.

Both have `meta/info.json` with `codebase_version`, `fps`, the `features` (dtype and shape of each column), and patterns
of the files. (Layouts: lerobot's `datasets/utils.py` at v2.1 and v3.0.)

* 2.x: a parquet file for each episode, `meta/episodes.jsonl` (`episode_index`, `tasks`, `length`), `meta/tasks.jsonl`.
* 3.0: files of many episodes; `meta/episodes/chunk-*/file-*.parquet` maps an episode to rows (`dataset_from_index`) of
  a file and seconds of a video; `meta/tasks.parquet` has the sentences.

`observation.state` becomes the field "state", `observation.images.<camera>` "image.<camera>", and the task of a row
(`task_index`) its "instruction"; `rename` maps other names, including that of the actions. An episode counts as
successful unless a column `next.success` ends with false: most datasets hold only successes and have no such column.
"""

from __future__ import annotations

import importlib
import io
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf_envs.core.protocol import Observation
from rlinf_envs.demonstrations.base import Demonstration, DemonstrationFiles, RunEnvironment
from rlinf_envs.demonstrations.lerobot_folder import INFO, DatasetFolder
from rlinf_envs.errors import EnvError

VERSIONS = ("v2.0", "v2.1", "v3.0")
_STATE, _PICTURES, _ACTION = "observation.state", "observation.images.", "action"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Episode:
    """Location of one episode."""

    index: int
    length: int
    task: str | None
    """The task of all its rows by the metadata; None: several tasks, or none."""
    table: Path
    videos: dict[str, tuple[Path, int]] = field(default_factory=dict)
    """Feature -> its file, and the first frame in it."""


class LeRobotDemonstrations(DemonstrationFiles):
    """The successful episodes of a dataset's folder. Raises: EnvError if its content is not as expected."""

    def __init__(self, path: Path, rename: Mapping[str, str], _: RunEnvironment | None = None) -> None:
        self._folder = DatasetFolder(path)
        described = path / INFO
        if not described.is_file():
            raise EnvError(f"{described} is missing; give the folder of a LeRobot dataset")
        self._info = self._folder.json(INFO)
        version = self._info.get("codebase_version")
        if version not in VERSIONS:
            raise EnvError(f"{described} has codebase_version={version!r}; {', '.join(VERSIONS)} are read")
        self._features: dict[str, Any] = self._folder.entry(self._info, "features", INFO)
        features = _by_field(described, self._features, rename)
        if _ACTION not in features:
            raise EnvError(
                f"{described} has no feature '{_ACTION}'; it has {', '.join(sorted(self._features))}. Where it has "
                f"another name: rename: {{NAME: {_ACTION}}}"
            )
        self._action = features.pop(_ACTION)
        self._fields = {name: field for field, name in features.items()}
        self._numbered = self._listed_split() if self._is_split else self._listed_together()
        self._check_numbers(described)

    def __len__(self) -> int:
        return len(self._successful)

    def read(self, number: int) -> Demonstration:
        episode = self._successful[number]
        rows = self._rows(episode)
        instructions = self._instructions(episode, rows)
        observations: Observation = {field: self._values(episode, rows, name) for name, field in self._fields.items()}
        observations["instruction"] = instructions
        has_rewards = "next.reward" in rows
        rewards = self._numbers(episode, rows, "next.reward") if has_rewards else torch.zeros(episode.length)
        actions = self._numbers(episode, rows, self._action)
        return Demonstration(
            task="; ".join(dict.fromkeys(instructions)),
            seed=None,
            observations=observations,
            actions=actions if actions.dtype == torch.int64 else actions.float(),
            rewards=rewards.float().reshape(-1),
            success=True,
        )

    # -- what there is -----------------------------------------------------------------------------------------------

    @cached_property
    def _successful(self) -> list[_Episode]:
        if "next.success" not in self._features:
            return self._numbered
        ends = [self._numbers(each, self._rows(each), "next.success")[-1] for each in self._numbered]
        return [each for each, end in zip(self._numbered, ends, strict=True) if bool(end)]

    @cached_property
    def _tasks(self) -> dict[int, str]:
        """Returns task number -> sentence."""
        tasks: dict[int, str] = {}
        for index, sentence in self._listed_tasks():
            if not isinstance(sentence, str) or not sentence.strip() or tasks.get(index, sentence) != sentence:
                what = f"is also {tasks[index]!r}" if index in tasks else "is no sentence"
                raise EnvError(f"{self._folder.path / self._tasks_file}: task {index} is {sentence!r}, which {what}")
            tasks[index] = sentence
        return tasks

    def _listed_tasks(self) -> Iterable[tuple[int, Any]]:
        folder, name = self._folder, self._tasks_file
        if self._is_split:
            lines = folder.lines(name)
            return [(folder.entry(line, "task_index", name), folder.entry(line, "task", name)) for line in lines]
        columns = folder.table(folder.file(name, "the layout of LeRobot"))
        sentences = [column for column in columns if column != "task_index"]
        if len(sentences) != 1 or "task_index" not in columns:
            raise EnvError(f"{folder.path / name} has the columns {', '.join(columns)}; allowed: task_index and a text")
        return zip(map(int, columns["task_index"]), columns[sentences[0]], strict=True)

    @property
    def _tasks_file(self) -> str:
        return "meta/tasks.jsonl" if self._is_split else "meta/tasks.parquet"

    @property
    def _is_split(self) -> bool:
        """Whether each episode has separate files."""
        return self._info["codebase_version"].startswith("v2.")

    def _listed_split(self) -> list[_Episode]:
        file = "meta/episodes.jsonl"
        chunks_size = self._folder.entry(self._info, "chunks_size", INFO)
        if not isinstance(chunks_size, int) or chunks_size < 1:
            raise EnvError(
                f"{self._folder.path / INFO} has chunks_size={chunks_size!r}; it must be an integer from 1 on"
            )
        listed = []
        for line in self._folder.lines(file):
            index, length = self._index_and_length(line, file)
            where = {"episode_index": index, "episode_chunk": index // chunks_size}
            listed.append(
                _Episode(
                    index=index,
                    length=length,
                    task=_only_task(line),
                    table=self._folder.named(self._info, "data_path", **where),
                    videos={
                        key: (self._folder.named(self._info, "video_path", video_key=key, **where), 0)
                        for key in self._videos
                    },
                )
            )
        return listed

    def _listed_together(self) -> list[_Episode]:
        listed, root = [], self._folder.path
        for path in sorted((root / "meta" / "episodes").glob("chunk-*/file-*.parquet")):
            file = str(path.relative_to(root))
            columns = self._folder.table(self._folder.file(file, "the folder meta/episodes"))
            for row in range(len(self._folder.entry(columns, "episode_index", file))):
                one = {name: values[row] for name, values in columns.items()}
                index, length = self._index_and_length(one, file)
                listed.append(
                    _Episode(
                        index=index,
                        length=length,
                        task=_only_task(one),
                        table=self._file("data_path", one, "data", file),
                        videos={
                            key: (
                                self._file("video_path", one, f"videos/{key}", file, video_key=key),
                                round(
                                    self._folder.entry(one, f"videos/{key}/from_timestamp", file)
                                    * self._folder.entry(self._info, "fps", INFO)
                                ),
                            )
                            for key in self._videos
                        },
                    )
                )
        return listed

    def _index_and_length(self, line: Mapping[str, Any], file: str) -> tuple[int, int]:
        """Returns index and length of an episode from the metadata in `file`. Raises: EnvError for invalid numbers."""
        index, length = (self._folder.entry(line, key, file) for key in ("episode_index", "length"))
        for key, number, least in (("episode_index", index, 0), ("length", length, 1)):
            if not isinstance(number, int) or number < least:
                raise EnvError(
                    f"{self._folder.path / file}: episode {index} has {key}={number!r}; it must be an integer from "
                    f"{least} on. Mend the metadata, or leave the episode out of it"
                )
        return index, length

    def _check_numbers(self, described: Path) -> None:
        """Raises: EnvError if an episode is listed twice or missing."""
        indices = [each.index for each in self._numbered]
        if twice := [index for index in set(indices) if indices.count(index) > 1]:
            raise EnvError(f"{described.parent}: episode {min(twice)} is listed {indices.count(min(twice))} times")
        total = self._info.get("total_episodes", len(indices))
        if total != len(indices):
            raise EnvError(
                f"{described} has total_episodes={total}, and {len(indices)} episodes are listed in "
                f"{described.parent}; the dataset is not whole"
            )

    def _file(self, pattern: str, one: Mapping[str, Any], columns: str, file: str, **others: str) -> Path:
        names = ("chunk_index", "file_index")
        numbers = {name: int(self._folder.entry(one, f"{columns}/{name}", file)) for name in names}
        return self._folder.named(self._info, pattern, **numbers, **others)

    @property
    def _videos(self) -> list[str]:
        return [name for name in self._fields if self._features[name]["dtype"] == "video"]

    # -- one episode -------------------------------------------------------------------------------------------------

    def _rows(self, episode: _Episode) -> dict[str, Any]:
        """Returns column -> values of the episode's rows."""
        columns = self._folder.table(episode.table)
        chosen = np.flatnonzero(np.asarray(self._column(episode, columns, "episode_index")) == episode.index)
        if len(chosen) != episode.length:
            raise EnvError(f"{episode.table} has {len(chosen)} rows of episode {episode.index}, not {episode.length}")
        times = [columns["frame_index"][i] for i in chosen] if "frame_index" in columns else []
        if any(later <= earlier for earlier, later in pairwise(times)):
            raise EnvError(f"{episode.table}: the rows of episode {episode.index} are not in the order of frame_index")
        return {name: [values[i] for i in chosen] for name, values in columns.items()}

    def _instructions(self, episode: _Episode, rows: Mapping[str, Any]) -> list[str]:
        """Returns the sentence of each row; the metadata's if rows have none."""
        indices = [int(index) for index in rows.get("task_index", ())]
        if not indices or (episode.task is not None and not self._folder.has(self._tasks_file)):
            if episode.task is None or len(set(indices)) > 1:
                raise EnvError(
                    f"{episode.table}: nothing says the task of each row of episode {episode.index}; that is a column "
                    f"'task_index' and {self._folder.path / self._tasks_file}"
                )
            return [episode.task] * episode.length
        for row, index in enumerate(indices):
            if index not in self._tasks:
                raise EnvError(
                    f"{episode.table}: row {row} of episode {episode.index} has task_index={index}, which "
                    f"{self._folder.path / self._tasks_file} does not name"
                )
        return [self._tasks[index] for index in indices]

    def _values(self, episode: _Episode, rows: Mapping[str, Any], name: str) -> Tensor:
        """Reads one feature, [T, ...]."""
        if self._features[name]["dtype"] == "video":
            return torch.from_numpy(_frames(*episode.videos[name], episode.length))
        if self._features[name]["dtype"] == "image":
            cells = self._column(episode, rows, name)
            return torch.from_numpy(np.stack([_imageio().imread(io.BytesIO(cell["bytes"])) for cell in cells]))
        return self._numbers(episode, rows, name).float()

    def _numbers(self, episode: _Episode, rows: Mapping[str, Any], name: str) -> Tensor:
        """Reads a column of numbers, [T, ...]. Raises: EnvError if it is not numeric or its rows differ in shape."""
        cells = [np.asarray(cell) for cell in self._column(episode, rows, name)]
        at = f"{episode.table}: {name!r} of episode {episode.index}"
        if odd := [cell.tolist() for cell in cells if cell.dtype.kind not in "biuf"]:
            raise EnvError(f"{at} has {odd[0]!r}; numbers are needed")
        if len(shapes := sorted({cell.shape for cell in cells})) > 1:
            raise EnvError(f"{at} has rows of the shapes {', '.join(map(str, map(list, shapes)))}; one is needed")
        return torch.from_numpy(np.stack(cells))

    def _column(self, episode: _Episode, columns: Mapping[str, Any], name: str) -> Any:
        return self._folder.entry(columns, name, episode.table.relative_to(self._folder.path))


def _only_task(line: Mapping[str, Any]) -> str | None:
    """Returns the sentence of an episode's metadata if it is the only one, else None."""
    tasks = line.get("tasks")
    return str(tasks[0]) if isinstance(tasks, list) and len(tasks) == 1 else None


def _by_field(described: Path, features: Iterable[str], rename: Mapping[str, str]) -> dict[str, str]:
    """Returns field, or `action`, -> the feature it is read from. Raises: EnvError if there are several."""
    by_field: dict[str, list[str]] = defaultdict(list)
    for name in features:
        if (field := rename.get(name, _field(name))) is not None:
            by_field[field].append(name)
    for field, names in by_field.items():
        if len(names) > 1:
            others = ", or ".join(f"rename: {{{name}: ANOTHER}}" for name in names)
            raise EnvError(
                f"{described}: the features {', '.join(names)} are all '{field}', and one can be; give the others "
                f"another name: {others}"
            )
    return {field: names[0] for field, names in by_field.items()}


def _field(name: str) -> str | None:
    """Returns the default field of a feature; None: it is not read."""
    if name.startswith(_PICTURES):
        return "image." + name.removeprefix(_PICTURES)
    return {_STATE: "state", _ACTION: _ACTION}.get(name)


def _frames(file: Path, first: int, number: int) -> np.ndarray:
    """Reads frames of a video from `first` on, [number, H, W, 3] uint8."""
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

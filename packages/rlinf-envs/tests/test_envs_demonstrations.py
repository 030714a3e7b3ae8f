"""Readers of demonstrations, against files that are written here in the published layouts."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlinf_envs import EnvError, FieldSpec, RunEnvironment, open_demonstrations, tensor_field

LENGTHS = (4, 3, 5)
TASKS = ("open the drawer", "close the drawer")


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(EnvError, match="no demonstrations of source 'rlds'; there are lerobot, maniskill, libero"):
        open_demonstrations("rlds", tmp_path)
    with pytest.raises(EnvError, match="nowhere does not exist"):
        open_demonstrations("lerobot", tmp_path / "nowhere")
    with pytest.raises(EnvError, match=r"meta/info\.json is missing; give the folder of a LeRobot dataset"):
        open_demonstrations("lerobot", tmp_path)
    (tmp_path / "traj.h5").write_bytes(b"")
    with pytest.raises(EnvError, match=r"traj\.json is missing: it says which episodes of traj\.h5 succeeded"):
        open_demonstrations("maniskill", tmp_path / "traj.h5")


# -- LeRobot -----------------------------------------------------------------------------------------------------------


def picture(episode: int, row: int) -> np.ndarray:
    """[16, 16, 3]: flat colours, which video keeps."""
    return np.full((16, 16, 3), 40 * episode + 20 * row, np.uint8)


def rows_of(episode: int, *, images: bool) -> list[dict[str, Any]]:
    import imageio.v2 as imageio

    rows = []
    for row in range(LENGTHS[episode]):
        one = {
            "observation.state": [float(episode), float(row)],
            "action": [0.1 * row, -0.1 * episode, 1.0],
            "timestamp": row / 10,
            "frame_index": row,
            "episode_index": episode,
            "index": sum(LENGTHS[:episode]) + row,
            "task_index": episode % 2,
            "next.reward": float(row),
            "next.success": row == LENGTHS[episode] - 1 and episode != 1,
        }
        if images:
            coded = io.BytesIO()
            imageio.imwrite(coded, picture(episode, row), format="png")  # type: ignore[reportCallIssue]
            one["observation.images.front"] = {"bytes": coded.getvalue(), "path": None}
        rows.append(one)
    return rows


def write_table(path: Path, rows: list[dict[str, Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.Table.from_pylist(rows), path)


def write_video(path: Path, frames: list[np.ndarray]) -> None:
    imageio: Any = pytest.importorskip("imageio.v2")
    path.parent.mkdir(parents=True, exist_ok=True)
    with imageio.get_writer(path, format="FFMPEG", fps=10, macro_block_size=16, quality=10) as writer:
        for frame in frames:
            writer.append_data(frame)


def write_info(folder: Path, version: str, *, images: bool, **paths: str) -> None:
    features: dict[str, Any] = {
        "observation.state": {"dtype": "float32", "shape": [2]},
        "action": {"dtype": "float32", "shape": [3]},
        "next.success": {"dtype": "bool", "shape": [1]},
    }
    features["observation.images.front"] = {"dtype": "image" if images else "video", "shape": [16, 16, 3]}
    (folder / "meta").mkdir(parents=True)
    info = {"codebase_version": version, "fps": 10, "chunks_size": 2, "features": features, **paths}
    (folder / "meta" / "info.json").write_text(json.dumps(info))


def write_split(folder: Path, *, images: bool) -> Path:
    """Version 2.1: files of one episode."""
    write_info(
        folder,
        "v2.1",
        images=images,
        data_path="data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        video_path="videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
    )
    for name, lines in (
        ("tasks", [{"task_index": i, "task": task} for i, task in enumerate(TASKS)]),
        ("episodes", [{"episode_index": i, "tasks": [TASKS[i % 2]], "length": n} for i, n in enumerate(LENGTHS)]),
    ):
        (folder / "meta" / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for i, length in enumerate(LENGTHS):
        write_table(folder / f"data/chunk-{i // 2:03d}/episode_{i:06d}.parquet", rows_of(i, images=images))
        if not images:
            video = folder / f"videos/chunk-{i // 2:03d}/observation.images.front/episode_{i:06d}.mp4"
            write_video(video, [picture(i, row) for row in range(length)])
    return folder


def write_together(folder: Path, *, images: bool) -> Path:
    """Version 3.0: the first two episodes in one file, the third in another; one video of all."""
    write_info(
        folder,
        "v3.0",
        images=images,
        data_path="data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        video_path="videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
    )
    write_table(
        folder / "meta/tasks.parquet",
        [{"task_index": i, "__index_level_0__": task} for i, task in enumerate(TASKS)],
    )
    camera = "videos/observation.images.front"
    lines = [
        {
            "episode_index": i,
            "tasks": list(TASKS) if i == 0 else [TASKS[i % 2]],
            "length": length,
            "data/chunk_index": 0,
            "data/file_index": i // 2,
            "dataset_from_index": sum(LENGTHS[:i]),
            "dataset_to_index": sum(LENGTHS[: i + 1]),
            f"{camera}/chunk_index": 0,
            f"{camera}/file_index": 0,
            f"{camera}/from_timestamp": sum(LENGTHS[:i]) / 10,
            f"{camera}/to_timestamp": sum(LENGTHS[: i + 1]) / 10,
        }
        for i, length in enumerate(LENGTHS)
    ]
    write_table(folder / "meta/episodes/chunk-000/file-000.parquet", lines)
    write_table(folder / "data/chunk-000/file-000.parquet", rows_of(0, images=images) + rows_of(1, images=images))
    write_table(folder / "data/chunk-000/file-001.parquet", rows_of(2, images=images))
    if not images:
        frames = [picture(i, row) for i, length in enumerate(LENGTHS) for row in range(length)]
        write_video(folder / f"{camera}/chunk-000/file-000.mp4", frames)
    return folder


@pytest.mark.parametrize("images", [True, False], ids=["images", "videos"])
@pytest.mark.parametrize("write", [write_split, write_together])
def test_lerobot_datasets_are_what_was_written(tmp_path: Path, write: Any, images: bool) -> None:
    pytest.importorskip("pyarrow")
    pytest.importorskip("imageio")
    if not images:
        pytest.importorskip("imageio_ffmpeg")
    read = open_demonstrations("lerobot", write(tmp_path / "set", images=images))
    assert len(read) == 2, "the second episode did not succeed"
    for demonstration, episode in zip(read, (0, 2), strict=True):
        length = LENGTHS[episode]
        assert (demonstration.task, demonstration.seed, demonstration.success) == (TASKS[0], None, True)
        assert demonstration.observations["instruction"] == [TASKS[0]] * length
        states = [[float(episode), float(row)] for row in range(length)]
        assert tensor_field(demonstration.observations, "state").tolist() == states
        expected = torch.tensor([[0.1 * row, -0.1 * episode, 1.0] for row in range(length)])
        torch.testing.assert_close(demonstration.actions, expected)
        assert demonstration.rewards.tolist() == [float(row) for row in range(length)]
        seen = tensor_field(demonstration.observations, "image.front")
        assert seen.dtype == torch.uint8
        drawn = torch.from_numpy(np.stack([picture(episode, row) for row in range(length)]))
        assert (seen.int() - drawn.int()).abs().max() <= (0 if images else 8)


def test_a_name_may_be_another_fields(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    pytest.importorskip("imageio")
    folder = write_split(tmp_path / "set", images=True)
    (demonstration, _) = open_demonstrations("lerobot", folder, rename={"observation.images.front": "image.corner"})
    assert set(demonstration.observations) == {"state", "image.corner", "instruction"}


def test_actions_may_have_another_name(tmp_path: Path) -> None:
    """As openpi's LIBERO set has them."""
    pytest.importorskip("pyarrow")
    pytest.importorskip("imageio")
    folder = write_split(tmp_path / "set", images=True)
    (expected, _) = open_demonstrations("lerobot", folder)
    info = json.loads((folder / "meta/info.json").read_text())
    info["features"]["actions"] = info["features"].pop("action")
    (folder / "meta/info.json").write_text(json.dumps(info))
    for i in range(len(LENGTHS)):
        rows = [{"actions" if k == "action" else k: v for k, v in row.items()} for row in rows_of(i, images=True)]
        write_table(folder / f"data/chunk-{i // 2:03d}/episode_{i:06d}.parquet", rows)
    with pytest.raises(EnvError, match=r"has no feature 'action'; it has actions, .*rename: \{NAME: action\}"):
        open_demonstrations("lerobot", folder)
    (demonstration, _) = open_demonstrations("lerobot", folder, rename={"actions": "action"})
    assert torch.equal(demonstration.actions, expected.actions)
    assert set(demonstration.observations) == {"state", "image.front", "instruction"}, "actions are not shown"


def test_several_features_of_one_field_are_named_with_what_to_set(tmp_path: Path) -> None:
    """Without a word the last of them would be read."""
    pytest.importorskip("pyarrow")
    folder = write_split(tmp_path / "set", images=True)
    described = folder / "meta/info.json"
    info = json.loads(described.read_text())
    info["features"]["actions"] = info["features"]["action"]
    info["features"]["observation.images.side"] = info["features"]["observation.images.front"]
    described.write_text(json.dumps(info))
    for rename, names, field in (
        ({"actions": "action"}, ("action", "actions"), "action"),
        (
            {"observation.images.side": "image.front"},
            ("observation.images.front", "observation.images.side"),
            "image.front",
        ),
    ):
        with pytest.raises(EnvError) as refused:
            open_demonstrations("lerobot", folder, rename=rename)
        first, second = names
        assert str(refused.value) == (
            f"{described}: the features {first}, {second} are all '{field}', and one can be; give the others another "
            f"name: rename: {{{first}: ANOTHER}}, or rename: {{{second}: ANOTHER}}"
        )
    assert len(open_demonstrations("lerobot", folder, rename={"actions": "action", "action": "joints"}))


def metadata_of(folder: Path, **changes: Any) -> Path:
    """The dataset with other entries in meta/info.json."""
    described = folder / "meta/info.json"
    described.write_text(json.dumps(json.loads(described.read_text()) | changes))
    return folder


def listed(folder: Path, *changes: dict[str, Any]) -> None:
    """Other entries in the lines of meta/episodes.jsonl."""
    file = folder / "meta/episodes.jsonl"
    lines = [json.loads(line) | change for line, change in zip(file.read_text().splitlines(), changes, strict=True)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("write", [write_split, write_together])
def test_each_row_has_the_sentence_of_its_own_task(write: Any, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    folder = write(tmp_path / "set", images=True)
    rows = [row for i in ((0,) if write is write_split else (0, 1)) for row in rows_of(i, images=True)]
    for row, index in zip(rows, (0, 0, 1, 1), strict=False):
        row["task_index"] = index
    name = "episode_000000" if write is write_split else "file-000"
    write_table(folder / f"data/chunk-000/{name}.parquet", rows)
    demonstration = open_demonstrations("lerobot", folder)[0]
    assert demonstration.observations["instruction"] == [TASKS[0]] * 2 + [TASKS[1]] * 2
    assert demonstration.task == f"{TASKS[0]}; {TASKS[1]}"
    rows[2]["task_index"] = 7
    write_table(folder / f"data/chunk-000/{name}.parquet", rows)
    with pytest.raises(EnvError, match=r"row 2 of episode 0 has task_index=7, which .*meta/tasks\.\w+ does not name"):
        open_demonstrations("lerobot", folder)[0]


@pytest.mark.parametrize(
    ("changes", "total", "text"),
    [
        (({}, {"length": 0}, {}), 3, r"episodes\.jsonl: episode 1 has length=0; it must be an integer from 1 on"),
        (({}, {"length": -3}, {}), 3, "episode 1 has length=-3"),
        (({}, {"length": None}, {}), 3, "episode 1 has length=None"),
        (({}, {"episode_index": 0}, {}), 3, "episode 0 is listed 2 times"),
        (({}, {}, {}), 4, r"info\.json has total_episodes=4, and 3 episodes are listed"),
    ],
)
def test_no_episode_of_the_metadata_vanishes(changes: Any, total: int, text: str, tmp_path: Path) -> None:
    folder = metadata_of(write_split(tmp_path / "set", images=True), total_episodes=total)
    listed(folder, *changes)
    with pytest.raises(EnvError, match=text):
        open_demonstrations("lerobot", folder)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (
            "../other/episode_{episode_index:06d}.parquet",
            r"data_path, names '\.\./other/episode_000000\.parquet', which is",
        ),
        ("/etc/passwd", "names '/etc/passwd', which is /etc/passwd, outside of the dataset's folder"),
        ("link/episode_{episode_index:06d}.parquet", "names 'link/episode_000000.parquet', which is .*outside"),
        ("data/{episode_index.__class__}", "with the field {episode_index.__class__}; allowed: episode_index, ep"),
        ("data/{episode_index:099999999d}", "with the field {episode_index:099999999d}; allowed: .* nine digits"),
        ("data/{frame}", "with the field {frame}; allowed"),
        ("data/{", "is no pattern of a file"),
        (7, "is no pattern of a file"),
    ],
)
def test_a_dataset_reads_its_own_files_alone(pattern: Any, text: str, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    write_split(tmp_path / "other", images=True)
    folder = metadata_of(write_split(tmp_path / "set", images=True), data_path=pattern)
    (folder / "link").symlink_to(tmp_path / "other" / "data" / "chunk-000")
    with pytest.raises(EnvError, match=text):
        open_demonstrations("lerobot", folder)


@pytest.mark.parametrize("name", ["meta/info.json", "meta/tasks.jsonl", "meta/episodes.jsonl"])
def test_links_of_metadata_lead_nowhere_else_but_in_the_hubs_cache(name: str, tmp_path: Path) -> None:
    """There every file of a snapshot is a link to a blob."""
    pytest.importorskip("pyarrow")
    folder = write_split(tmp_path / "cache/snapshots/main", images=True)
    (tmp_path / "cache/blobs").mkdir()
    (folder / name).rename(tmp_path / "cache/blobs/1")
    (folder / name).symlink_to(tmp_path / "cache/blobs/1")
    assert open_demonstrations("lerobot", folder)[0].task == TASKS[0]
    (tmp_path / "cache/snapshots").rename(tmp_path / "cache/sets")
    with pytest.raises(EnvError, match=rf"names '{name}', which is .*cache/blobs/1, outside of the dataset's folder"):
        open_demonstrations("lerobot", tmp_path / "cache/sets/main")[0]


def test_damaged_files_of_a_dataset_are_named(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    folder = write_split(tmp_path / "set", images=True)
    (folder / "data/chunk-000/episode_000000.parquet").write_bytes(b"PAR1")
    with pytest.raises(EnvError, match=r"episode_000000\.parquet cannot be read as parquet"):
        open_demonstrations("lerobot", folder)
    rows = rows_of(0, images=True)
    write_table(folder / "data/chunk-000/episode_000000.parquet", rows[::-1])
    with pytest.raises(EnvError, match="the rows of episode 0 are not in the order of frame_index"):
        open_demonstrations("lerobot", folder)
    write_table(folder / "data/chunk-000/episode_000000.parquet", [{k: r[k] for k in r if k != "action"} for r in rows])
    with pytest.raises(EnvError, match=r"episode_000000\.parquet has no 'action'; it has observation.state, "):
        open_demonstrations("lerobot", folder)[0]
    (folder / "meta/tasks.jsonl").write_text('{"task_index": 0}\n')
    with pytest.raises(EnvError, match=r"meta/tasks\.jsonl has no 'task'; it has task_index"):
        open_demonstrations("lerobot", folder)[1]
    (folder / "meta/info.json").write_text("{")
    with pytest.raises(EnvError, match=r"meta/info\.json is not JSON"):
        open_demonstrations("lerobot", folder)


@pytest.mark.parametrize(
    ("cells", "text"),
    [
        ([[0.0], [None]], r"'action' of episode 0 has \[None\]; numbers are needed"),
        ([[0.0], None], r"'action' of episode 0 has None; numbers are needed"),
        (["a", "b"], "'action' of episode 0 has 'a'; numbers are needed"),
        ([[0.0], [0.0, 1.0]], r"'action' of episode 0 has rows of the shapes \[1\], \[2\]; one is needed"),
    ],
)
def test_cells_that_are_no_numbers_are_named(cells: list[Any], text: str, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    folder = write_split(tmp_path / "set", images=True)
    rows = [row | {"action": cells[i > 0]} for i, row in enumerate(rows_of(0, images=True))]
    write_table(folder / "data/chunk-000/episode_000000.parquet", rows)
    with pytest.raises(EnvError, match=text):
        open_demonstrations("lerobot", folder)[0]


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        ([{"task_index": 0, "task": None}], "task 0 is None, which is no sentence"),
        ([{"task_index": 0, "task": " "}], "task 0 is ' ', which is no sentence"),
        ([{"task_index": 0, "task": "a"}, {"task_index": 0, "task": "b"}], "task 0 is 'b', which is also 'a'"),
    ],
)
def test_tasks_without_one_sentence_are_refused(lines: list[dict[str, Any]], text: str, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    folder = write_split(tmp_path / "set", images=True)
    (folder / "meta/tasks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(EnvError, match=text):
        open_demonstrations("lerobot", folder)[0]


def test_a_sentence_may_hold_line_breaks_of_unicode(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    folder = write_split(tmp_path / "set", images=True)
    lines = [{"task_index": i, "task": f"go\u2028on {i}"} for i in range(2)]
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    (folder / "meta/tasks.jsonl").write_text(text, encoding="utf-8")
    assert open_demonstrations("lerobot", folder)[0].task == "go\u2028on 0"


def test_a_dataset_of_failures_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    pytest.importorskip("imageio")
    folder = write_split(tmp_path / "set", images=True)
    lines = (folder / "meta/episodes.jsonl").read_text().splitlines()
    (folder / "meta/episodes.jsonl").write_text(lines[1] + "\n")
    with pytest.raises(EnvError, match="set has no successful episode"):
        open_demonstrations("lerobot", folder)
    (folder / "data/chunk-000/episode_000001.parquet").unlink()
    with pytest.raises(EnvError, match=r"episode_000001\.parquet is missing, which .*meta names"):
        open_demonstrations("lerobot", folder)


# -- ManiSkill ---------------------------------------------------------------------------------------------------------


def write_trajectories(folder: Path, *, obs: str) -> Path:
    import h5py

    folder.mkdir()
    metadata = {
        "env_info": {"env_id": "PushCube-v1", "env_kwargs": {"control_mode": "pd_joint_delta_pos", "obs_mode": obs}},
        "episodes": [
            {"episode_id": i, "episode_seed": 10 + i, "success": i != 1, "elapsed_steps": LENGTHS[i]} for i in range(3)
        ],
    }
    (folder / "traj.json").write_text(json.dumps(metadata))
    with h5py.File(folder / "traj.h5", "w") as file:
        for i, length in enumerate(LENGTHS):
            group = file.create_group(f"traj_{i}")
            group["actions"] = np.full((length, 3), 0.5 * i, np.float32)
            group["success"] = np.arange(length) == length - 1
            group["rewards"] = np.arange(length, dtype=np.float32)
            states = np.arange(2 * (length + 1), dtype=np.float32).reshape(-1, 2) + i
            if obs == "state":
                group["obs"] = states
            elif obs != "none":
                if obs == "rgb+state":
                    group["obs/state"] = states
                else:
                    group["obs/agent/qpos"], group["obs/agent/qvel"] = states[:, 1:], states[:, :1]
                group["obs/sensor_data/base_camera/rgb"] = np.stack([picture(i, row) for row in range(length + 1)])
    return folder / "traj.h5"


@pytest.mark.parametrize("obs", ["state", "rgb+state"])
def test_maniskill_trajectories_are_what_was_written(tmp_path: Path, obs: str) -> None:
    pytest.importorskip("h5py")
    read = open_demonstrations("maniskill", write_trajectories(tmp_path / "set", obs=obs))
    assert (read.env_id, dict(read.options)) == ("PushCube-v1", {"control_mode": "pd_joint_delta_pos"})
    assert [(episode.task, episode.seed) for episode in read] == [("PushCube-v1", 10), ("PushCube-v1", 12)]
    episode = read[-1]
    assert episode.actions.tolist() == [[1.0] * 3] * 5
    assert episode.rewards.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert tensor_field(episode.observations, "state").tolist() == [[2.0 * t + 2, 2.0 * t + 3] for t in range(5)]
    if obs != "state":
        expected = torch.from_numpy(np.stack([picture(2, row) for row in range(5)]))
        assert torch.equal(tensor_field(episode.observations, "image.base_camera"), expected)


@pytest.mark.parametrize(
    ("env_id", "options", "expected"),
    [
        ("PushCube-v1", {}, "push the cube to the target"),
        ("PushCube-v1", {"instruction": "shove it"}, "shove it"),
        ("Unnamed-v1", {}, None),
    ],
)
def test_trajectories_say_what_their_environment_says(
    tmp_path: Path, env_id: str, options: dict[str, str], expected: str | None
) -> None:
    pytest.importorskip("h5py")
    file = write_trajectories(tmp_path / "set", obs="state")
    file.with_suffix(".json").write_text(file.with_suffix(".json").read_text().replace("PushCube-v1", env_id))
    demonstration = open_demonstrations("maniskill", file, environment=RunEnvironment(options=options))[0]
    assert demonstration.observations.get("instruction") == (None if expected is None else [expected] * LENGTHS[0])


@pytest.mark.parametrize(
    ("obs", "size", "expected"), [("state", 1, [0, 2, 4, 6]), ("rgb+state", 1, [0, 2, 4, 6]), ("rgb", 2, [1, 3, 5, 7])]
)
def test_a_robots_own_state_is_the_first_part(tmp_path: Path, obs: str, size: int, expected: list[float]) -> None:
    """Of `agent` the positions come first, then the velocities; here 1, 3, ... and 0, 2, ..."""
    pytest.importorskip("h5py")
    robot = RunEnvironment(
        fields={"state": FieldSpec(shape=(size,), dtype="float32")},
        options={"state": "robot", "cameras": "base_camera"},
    )
    file = write_trajectories(tmp_path / "set", obs=obs)
    state = tensor_field(open_demonstrations("maniskill", file, environment=robot)[0].observations, "state")
    assert state.shape == (4, size) and state[:, 0].tolist() == expected
    for fields, there in (({}, "none"), ({"image.front": FieldSpec(shape=(8, 8, 3), dtype="uint8")}, "image.front")):
        with pytest.raises(EnvError, match=rf"the field 'state' of the environment .*; its fields are {there}\. Give"):
            open_demonstrations("maniskill", file, environment=RunEnvironment(fields=fields, options=robot.options))
    described = file.with_suffix(".json")
    described.write_text(described.read_text().replace("PushCube-v1", "SO100GraspCube-v1"))
    with pytest.raises(EnvError, match=r"states of SO100GraspCube-v1 do not hold what options\.state=robot shows"):
        open_demonstrations("maniskill", file, environment=robot)


def test_trajectories_without_observations_have_to_be_replayed(tmp_path: Path) -> None:
    pytest.importorskip("h5py")
    read = open_demonstrations("maniskill", write_trajectories(tmp_path / "set", obs="none"))
    with pytest.raises(EnvError, match=r"recorded without observations; replay them with python -m mani_skill"):
        _ = read[0]

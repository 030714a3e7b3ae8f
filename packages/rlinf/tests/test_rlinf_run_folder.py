"""The run folder's writer: rows, checkpoints, trace, resuming."""

import itertools
import json
import math
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from rlinf.config.common import RunConfig
from rlinf.errors import UserError
from rlinf.log_writers.delivery import LogWriters
from rlinf.run_folder import RunFolder, TraceEvent, read_events, read_rows
from rlinf.run_folder.checksums import damage
from rlinf.run_folder.lock import FolderLock, check_empty, check_free
from rlinf.run_folder.manifest import git_state
from rlinf.run_folder.rows import append_rows, write_file
from rlinf.run_folder.trace import TraceWriter

CONFIG = "job: reasoning\nname: sort-grpo\nmode: hybrid\nseed: 7\n"


def create(path: Path, keep_checkpoints: int = 2) -> RunFolder:
    return RunFolder(
        path, config_yaml=CONFIG, command=["rlinf", "train", "sort-grpo"], keep_checkpoints=keep_checkpoints
    )


def resume(path: Path, config_yaml: str = CONFIG) -> RunFolder:
    return RunFolder(path, resume=True, config_yaml=config_yaml, command=["again"], keep_checkpoints=2)


def train(folder: RunFolder, first: int, last: int, *, checkpoint_every: int = 3) -> None:
    """Steps `first` to `last - 1` as the training loop records them; numbers depend on the step alone."""
    for step in range(first, last):
        folder.metrics(step, {"reward/mean": step / 7, "actor/loss": math.nan}, time_s=1.0 + step)
        folder.samples(step, [{"prompt": f"p{step}", "reward": 1.0}])
        done = step + 1
        if done % checkpoint_every == 0:
            folder.evaluation(done, {"accuracy": done / 10}, time_s=1.0 + step)
            save(folder, done)


def save(folder: RunFolder, step: int, **state: object) -> None:
    with folder.new_checkpoint(step, state) as checkpoint:
        (checkpoint / "model").mkdir()
        (checkpoint / "model" / "weights").write_bytes(bytes(step))


def names(folder: RunFolder) -> list[str]:
    return sorted(path.name for path in (folder.path / "checkpoints").iterdir())


def test_create_takes_a_missing_or_an_empty_folder_and_no_other(tmp_path: Path) -> None:
    create(tmp_path / "a" / "b").close()
    (tmp_path / "empty").mkdir()
    create(tmp_path / "empty").close()
    with pytest.raises(UserError, match=r"(?s)empty exists and is not empty.*--resume.*--output"):
        create(tmp_path / "empty")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"(?s)file is a file; a folder is written.*--output"):
        create(tmp_path / "file")


def test_a_resumed_run_refuses_inputs_that_have_changed_unless_they_are_accepted(tmp_path: Path, capsys) -> None:
    path = tmp_path / "run"
    arguments: dict[str, Any] = {"config_yaml": CONFIG, "command": ["x"], "keep_checkpoints": 2}
    RunFolder(path, inputs={"model.path=m": "1", "task.train_files=a": "2"}, **arguments).close()
    changed = {"model.path=m": "1", "task.train_files=a": "3"}
    before = {file: file.read_bytes() for file in path.iterdir()}
    with pytest.raises(UserError, match=r"^task\.train_files=a has changed since the run in .*run began") as caught:
        RunFolder(path, resume=True, inputs=changed, **arguments)
    assert str(caught.value.hint).endswith(f"rlinf train --resume --output {path} --accept-changed-inputs")
    assert {file: file.read_bytes() for file in path.iterdir()} == before
    RunFolder(path, resume=True, inputs=changed, accept_changed_inputs=True, **arguments).close()
    assert "note: task.train_files=a has changed since the run began; accepted at 20" in capsys.readouterr().out
    RunFolder(path, resume=True, inputs=changed, **arguments).close()  # what was accepted is what counts from then on
    manifest = json.loads((path / "manifest.json").read_text())
    assert [note.split(";")[0] for note in manifest["notes"]] == ["task.train_files=a has changed since the run began"]


def test_rows_are_strict_json_with_null_for_what_is_not_finite(tmp_path: Path) -> None:
    folder = create(tmp_path / "run")
    folder.metrics(0, {"a": 0.1, "b": math.nan, "c": math.inf}, time_s=2.5)
    text = (folder.path / "metrics.jsonl").read_text()
    row = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert row == {"step": 0, "time_s": 2.5, "metrics": {"a": 0.1, "b": None, "c": None}}


def test_a_row_is_in_the_file_as_soon_as_it_is_written(tmp_path: Path) -> None:
    folder = create(tmp_path / "run")
    folder.samples(3, [{"prompt": "a\nb", "reward": 1.0}, {"prompt": "é", "reward": 0.0}])
    assert read_rows(folder.path / "samples.jsonl") == [
        {"step": 3, "prompt": "a\nb", "reward": 1.0},
        {"step": 3, "prompt": "é", "reward": 0.0},
    ]


def test_a_full_disk_is_told_with_the_file(tmp_path: Path) -> None:
    append_rows(tmp_path / "metrics.jsonl", [{"a": 0.1}])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, limits[1]))  # no file may grow: stands for a disk without room
    try:
        with pytest.raises(OSError, match=r"File too large: '.*/metrics\.jsonl'"):
            append_rows(tmp_path / "metrics.jsonl", [{"a": 0.1}])
        with pytest.raises(OSError, match=r"File too large: '.*/problem\.json'"):
            write_file(tmp_path / "problem.json", "{ }")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.glob(".*.partial")), "what could not be written is gone"


def test_last_evaluation(tmp_path: Path) -> None:
    folder = create(tmp_path / "run")
    assert folder.last_evaluation() == {}
    folder.evaluation(0, {"accuracy": 0.25}, time_s=0.0)
    folder.evaluation(5, {"accuracy": math.nan, "num_problems": 4.0}, time_s=1.0)
    last = folder.last_evaluation()
    assert math.isnan(last["accuracy"])
    assert last["num_problems"] == 4.0


def test_result_and_manifest(tmp_path: Path) -> None:
    folder = create(tmp_path / "run")
    folder.note("no GPU: CPU slots")
    folder.note("no GPU: CPU slots")
    manifest = json.loads((folder.path / "manifest.json").read_text())
    assert (manifest["seed"], manifest["name"], manifest["mode"]) == (7, "sort-grpo", "hybrid")
    assert manifest["command"] == ["rlinf", "train", "sort-grpo"]
    assert manifest["notes"] == ["no GPU: CPU slots"]
    assert manifest["ended"] is None
    assert manifest["packages"]["pydantic"]
    assert manifest["machine"]["num_cores"] >= 1
    folder.result({"before": math.nan, "after": 0.5})
    assert json.loads((folder.path / "result.json").read_text()) == {"before": None, "after": 0.5}
    assert json.loads((folder.path / "manifest.json").read_text())["ended"] is not None


def test_leaving_the_folder_by_an_error_records_it(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), create(tmp_path / "run") as folder:
        raise RuntimeError("worker lost")
    manifest = json.loads((folder.path / "manifest.json").read_text())
    assert manifest["sessions"][0]["failure"] == "RuntimeError: worker lost"
    assert manifest["ended"] is not None


def test_git_state_is_that_of_the_file_and_not_of_a_repository_around_it(tmp_path: Path) -> None:
    state = git_state(Path(__file__))
    untracked = tmp_path / "module.py"
    untracked.write_text("")
    assert git_state(untracked) is None
    assert state is None or len(state["commit"]) == 40


# -- checkpoints -------------------------------------------------------------------------------------------------------


def test_checkpoint_state_comes_back_exactly(tmp_path: Path) -> None:
    folder = create(tmp_path / "run")
    assert folder.latest_checkpoint() is None
    save(folder, 12, before=math.nan, score=0.1 + 0.2, stage_s={"actor": 1e-9})
    checkpoint = folder.latest_checkpoint()
    assert checkpoint is not None
    assert checkpoint.name == "step-000012"
    state = folder.read_state(checkpoint)
    assert math.isnan(state.pop("before"))
    assert state == {"step": 12, "score": 0.1 + 0.2, "stage_s": {"actor": 1e-9}}
    assert (checkpoint / "model" / "weights").stat().st_size == 12


def test_old_checkpoints_go(tmp_path: Path) -> None:
    folder = create(tmp_path / "run", keep_checkpoints=2)
    for step in (0, 5, 10, 1_000_000):
        save(folder, step)
    assert names(folder) == ["step-000010", "step-1000000"]
    latest = folder.latest_checkpoint()
    assert latest is not None and latest.name == "step-1000000"


def test_a_checkpoint_that_fails_leaves_nothing(tmp_path: Path) -> None:
    folder = create(tmp_path / "run")
    with pytest.raises(ZeroDivisionError), folder.new_checkpoint(3, {}) as checkpoint:
        (checkpoint / "half").write_text(str(1 / 0))
    assert names(folder) == []


def damaged(path: Path, draw: random.Random) -> str:
    """One file of a checkpoint with a flipped bit, a part cut off, or gone. Returns what was done."""
    victim = draw.choice(sorted(file for file in path.rglob("*") if file.is_file()))
    content = bytearray(victim.read_bytes())
    kind = draw.choice(["flip", "flip", "cut", "remove"])
    if kind == "remove":
        victim.unlink()
    elif kind == "cut":
        victim.write_bytes(content[: draw.randrange(len(content))])
    else:
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        victim.write_bytes(content)
    return f"{kind} {victim.name}"


def test_300_random_damages_are_all_found(tmp_path: Path) -> None:
    folder = create(tmp_path / "run")
    save(folder, 6, elapsed_s=2.5, own_score=0.75)
    checkpoint = folder.path / "checkpoints" / "step-000006"
    content = {path: path.read_bytes() for path in checkpoint.rglob("*") if path.is_file()}
    assert damage(checkpoint) is None
    draw = random.Random(12)
    for _ in range(300):
        harm = damaged(checkpoint, draw)
        assert damage(checkpoint), harm
        for path, whole in content.items():
            path.write_bytes(whole)


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = create(tmp_path / "run")
    save(folder, 3, elapsed_s=1.25, own_score=0.5)
    save(folder, 6, elapsed_s=2.5, own_score=0.75)
    (folder.path / "checkpoints" / ".step-000009.partial").mkdir()
    folder.close()
    draw = random.Random(12)
    for number in range(3):
        path = tmp_path / f"copy-{number}"
        shutil.copytree(folder.path, path, symlinks=True)
        harm = damaged(path / "checkpoints" / "step-000006", draw)
        resumed = resume(path)
        lines = capsys.readouterr().out.splitlines()
        assert names(resumed) == ["best", "step-000003", "step-000006.bad"], harm
        assert len(lines) == 1 and "step-000006 is damaged" in lines[0] and "step-000006.bad" in lines[0], harm
        assert resumed.latest_checkpoint() == path / "checkpoints" / "step-000003"
        assert (path / "checkpoints" / "best").resolve().name == "step-000003"
        assert lines[0].removeprefix("warning: ") in json.loads((path / "manifest.json").read_text())["notes"]
        resumed.close()


def test_a_run_is_not_started_over_when_no_checkpoint_is_whole(tmp_path: Path) -> None:
    folder = create(tmp_path / "run")
    train(folder, 0, 3)
    folder.close()
    (folder.path / "checkpoints" / "step-000003" / "model" / "weights").write_bytes(b"???")
    for _ in range(2):  # also when it was set aside before
        with pytest.raises(UserError, match=r"(?s)no checkpoint to go on from.*step-000003\.bad.*3 steps.*hint"):
            resume(folder.path)
    assert len(read_rows(folder.path / "metrics.jsonl")) == 3
    shutil.rmtree(folder.path / "checkpoints")
    with pytest.raises(UserError, match=r"holds none, and 3 steps"):
        resume(folder.path)


def test_the_seal_is_what_sha256sum_reads(tmp_path: Path) -> None:
    folder = create(tmp_path / "run")
    save(folder, 3)
    checked = subprocess.run(
        ["sha256sum", "--check", "--strict", "SHA256SUMS"],
        cwd=folder.path / "checkpoints" / "step-000003",
        capture_output=True,
        text=True,
    )
    assert (checked.returncode, checked.stdout) == (0, "model/weights: OK\nstate.json: OK\n")


def test_the_best_checkpoint_survives_and_is_pointed_to(tmp_path: Path) -> None:
    folder = create(tmp_path / "run", keep_checkpoints=1)
    for step, score in [(0, 0.1), (1, 0.9), (2, 0.9), (3, math.nan), (4, None), (5, 0.2)]:
        save(folder, step, own_score=score)
    assert names(folder) == ["best", "step-000002", "step-000005"]
    best = folder.best_checkpoint()
    assert best is not None and (folder.path / "checkpoints" / "best").resolve() == best.resolve()


def test_the_best_loss_is_the_lowest(tmp_path: Path) -> None:
    folder = create(tmp_path / "run", keep_checkpoints=1)
    for step, score in [(0, 0.9), (1, 0.1), (2, 0.1), (3, math.nan), (4, 0.2)]:
        save(folder, step, own_score=score, lower_is_better=True)
    assert names(folder) == ["best", "step-000002", "step-000004"]


# -- the lock ----------------------------------------------------------------------------------------------------------

HOLD = """
import subprocess, sys
from rlinf.run_folder.lock import FolderLock
from pathlib import Path
from typing import Any
lock = FolderLock(Path(sys.argv[1]), ["rlinf", "train"])
child = subprocess.Popen(["sleep", "600"], close_fds=False)
print(child.pid, flush=True)
sys.stdin.read()
"""


def test_a_second_process_is_refused_and_a_killed_one_leaves_no_lock(tmp_path: Path) -> None:
    folder = create(tmp_path / "run")
    save(folder, 3)
    folder.close()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    child = int(holder.stdout.readline())
    try:
        before = {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()}
        with pytest.raises(UserError, match=rf"(?s)in use: process {holder.pid} on .* since 20.*rlinf train.*hint"):
            resume(folder.path)
        assert before == {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()}
        holder.kill()
        holder.wait()
        os.kill(child, 0)  # lives on, without the lock
        resume(folder.path).close()
    finally:
        os.kill(child, signal.SIGKILL)


def test_two_new_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    lock = FolderLock(tmp_path / "run", ["rlinf", "train", "sort-grpo"])
    with pytest.raises(UserError, match=r"in use: process .*sort-grpo"):
        create(tmp_path / "run")
    lock.release()
    create(tmp_path / "run").close()  # a lock that somebody left is no content


def test_another_users_link_is_not_followed_and_nobody_else_can_hold_the_lock(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("keep me")
    for make in (Path.symlink_to, Path.hardlink_to):
        folder = tmp_path / make.__name__
        folder.mkdir()
        make(folder / ".lock", precious)
        with pytest.raises(UserError, match=r"\.lock is .*, and rlinf did not write it"):
            FolderLock(folder, ["rlinf"])
        with pytest.raises(UserError, match=r"\.lock is "):
            check_free(folder)
    assert precious.read_text() == "keep me"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").touch(0o644)  # as an earlier version made it
    FolderLock(tmp_path / "run", ["rlinf"]).release()
    assert (tmp_path / "run" / ".lock").stat().st_mode & 0o777 == 0o600


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    for use in (check_free, check_empty, lambda folder: FolderLock(folder, ["rlinf"])):
        with pytest.raises(UserError, match=rf"(?s){tmp_path} belongs to the user with id .*hint"):
            use(tmp_path)
    assert not list(tmp_path.iterdir())


# -- resuming ----------------------------------------------------------------------------------------------------------


@settings(max_examples=15)
@given(stopped=st.integers(0, 10), torn=st.sampled_from(["", '{"step": 4, "met', "\x00\x00"]))
def test_a_resumed_run_leaves_the_rows_of_one_that_never_stopped(
    tmp_path_factory: pytest.TempPathFactory, stopped: int, torn: str
) -> None:
    path = tmp_path_factory.mktemp("runs")
    whole = create(path / "whole")
    train(whole, 0, 11)
    first = create(path / "resumed")
    save(first, 0)
    train(first, 0, stopped)
    first.close()
    for name in ("metrics.jsonl", "evaluations.jsonl", "samples.jsonl"):
        if (first.path / name).exists():
            with (first.path / name).open("a") as file:
                file.write(torn)
    second = resume(first.path)
    checkpoint = second.latest_checkpoint()
    step = second.read_state(checkpoint)["step"] if checkpoint else 0
    assert step == stopped // 3 * 3
    train(second, step, 11)
    for name in ("metrics.jsonl", "evaluations.jsonl", "samples.jsonl"):
        assert (second.path / name).read_bytes() == (whole.path / name).read_bytes()


def test_an_evaluation_after_the_checkpoint_is_dropped_and_the_one_at_it_kept(tmp_path: Path) -> None:
    folder = create(tmp_path / "run")
    train(folder, 0, 4)
    folder.evaluation(4, {"accuracy": 0.9}, time_s=9.0)  # stopped before the checkpoint that belongs to it
    folder.close()
    resumed = resume(folder.path)
    assert resumed.last_evaluation() == {"accuracy": 0.3}


def test_resume_needs_a_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"(?s)no run to resume in .*--output"):
        resume(tmp_path / "none")


def test_resume_records_the_session_and_may_replace_the_config(tmp_path: Path) -> None:
    folder = create(tmp_path / "run")
    save(folder, 3)
    folder.result({"after": 0.5})
    times = [(0, 2), (2, 9), (3, 1)]  # the second plan had steps that are made again
    folder.write_plan_times([{"first_step": first, "num_steps": count} for first, count in times])
    folder.close()
    started = json.loads((folder.path / "manifest.json").read_text())["started"]
    resumed = resume(folder.path, config_yaml="name: longer\n")
    resumed.write_plan_times([{"first_step": 3, "num_steps": 9}])
    plans = json.loads((folder.path / "plan_times.json").read_text())["plans"]
    assert [(plan["first_step"], plan["num_steps"]) for plan in plans] == [(0, 2), (2, 1), (3, 9)]
    assert not (folder.path / "result.json").exists()  # that of a run which has ended
    manifest = json.loads((folder.path / "manifest.json").read_text())
    assert manifest["started"] == started
    assert manifest["ended"] is None
    assert [session["command"] for session in manifest["sessions"]] == [["rlinf", "train", "sort-grpo"], ["again"]]
    assert manifest["sessions"][1]["resumed_from_step"] == 3
    assert (folder.path / "config.yaml").read_text() == "name: longer\n"


def test_tensorboard_shows_each_step_once_and_the_checkpoint_s_evaluation(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    loggers = RunConfig(num_steps=7).loggers
    folder = create(tmp_path / "run")
    folder.log_to(LogWriters.begin(loggers, folder.logged_run({})))
    train(folder, 0, 5)
    folder.close()
    resumed = resume(folder.path)
    resumed.log_to(LogWriters.begin(loggers, resumed.logged_run({})))
    train(resumed, 3, 5)
    resumed.begin_again("a worker died")
    train(resumed, 3, 7)
    resumed.close()
    events = EventAccumulator(str(folder.path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("reward/mean")] == list(range(7))
    assert [event.step for event in events.Scalars("evaluation/accuracy")] == [3, 6]


# -- trace -------------------------------------------------------------------------------------------------------------


def event(
    name: str, lane: str, worker: str, start_ns: int, step: int = 0, duration_ns: int = 500_000_000
) -> TraceEvent:
    return TraceEvent(
        name=name,
        category="stage",
        lane=lane,
        start_ns=start_ns,
        duration_ns=duration_ns,
        args={"worker": worker, "step": step, "loss": math.nan},
    )


def test_the_trace_names_lanes_and_workers_and_goes_on_after_a_kill(tmp_path: Path) -> None:
    folder = create(tmp_path / "run")
    origin_ns = round(json.loads((folder.path / "manifest.json").read_text())["started_s"] * 1e9)
    path = folder.path / "trace.json"
    for second, name in ((1, "rollout"), (2, "actor")):
        folder.trace([event(name, "device cpu:0", f"{name}/0", origin_ns + second * 10**9)])
        assert json.loads(path.read_text())[-1]["name"] == name, "whole JSON after every write"
    folder.close()
    path.write_bytes(path.read_bytes()[:-3] + b',\n{"name": "torn')
    resumed = resume(folder.path)
    resumed.trace([event("actor", "device cpu:0", "actor/0", origin_ns + 3 * 10**9)])
    resumed.trace([event("reward", "reward/0", "reward/0", origin_ns + 4 * 10**9)])
    resumed.close()
    events = json.loads(path.read_text())
    assert events == list(read_events(path))
    lanes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    workers = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans = [e for e in events if e["ph"] == "X"]
    assert [lanes[e["pid"]] for e in spans] == ["device cpu:0"] * 3 + ["reward/0"]
    assert [workers[e["pid"], e["tid"]] for e in spans] == ["rollout/0", "actor/0", "actor/0", "reward/0"]
    assert [e["ts"] for e in spans] == [1_000_000, 2_000_000, 3_000_000, 4_000_000]
    assert {e["dur"] for e in spans} == {500_000}
    assert len([e for e in events if e["name"] == "session"]) == 2


@given(st.lists(st.integers(0, 5_000), min_size=2, max_size=40), st.integers(0, 10**6))
def test_spans_that_follow_one_another_do_not_overlap_in_the_trace(lengths_ns: list[int], origin_ns: int) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        writer = TraceWriter(Path(scratch) / "trace.json", origin_ns=origin_ns)
        starts_ns = itertools.accumulate(lengths_ns, initial=origin_ns)
        writer.write([event("a", "l", "l", t, duration_ns=d) for t, d in zip(starts_ns, lengths_ns, strict=False)])
        writer.close()
        spans = [e for e in json.loads((Path(scratch) / "trace.json").read_text()) if e["ph"] == "X"]
    assert all(type(e["ts"]) is int and type(e["dur"]) is int and e["dur"] >= 0 for e in spans)
    assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in itertools.pairwise(spans))


def test_a_long_trace_keeps_the_first_and_the_last_steps_whole(tmp_path: Path) -> None:
    path, limit = tmp_path / "trace.json", 40_000
    writer = TraceWriter(path, origin_ns=0, limit_bytes=limit)
    writer.session(0)
    for step in range(300):
        writer.write([event(f"part {i}", "cpu:0", f"w/{step // 200}", step * 10**9, step) for i in range(5)])
        assert path.stat().st_size < limit
    writer.close()
    events = json.loads(path.read_text())
    by_step = Counter(e["args"]["step"] for e in events if e["ph"] == "X")
    assert set(by_step.values()) == {5}, "no step is there in part"
    (gap,) = [e["args"] for e in events if e["name"] == "left out"]
    assert sorted(by_step) == [*range(gap["first_step"]), *range(gap["last_step"] + 1, 300)]
    assert len(by_step) > 30 and gap["first_step"] > 5
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} == {"w/0", "w/1"}, "both are named still"
    assert len([e for e in events if e["name"] == "session"]) == 1


def test_a_run_may_go_without_a_trace(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", config_yaml=CONFIG, command=[], keep_checkpoints=1, trace_bytes=0)
    folder.trace([event("rollout", "device cpu:0", "rollout/0", 0)])
    folder.close()
    assert not (folder.path / "trace.json").exists()

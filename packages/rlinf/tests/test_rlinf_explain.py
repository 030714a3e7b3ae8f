"""`rlinf explain`, and the watch that writes what it reads."""

import io
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlinf.cli.main import main
from rlinf.console.progress import Progress
from rlinf.loop.watch import RunWatch
from rlinf.run_folder import RunFolder
from rlinf_workers.explaining import (
    DRIVER,
    ProcessRecord,
    ProcessSight,
    RunExplanation,
    Snapshot,
    explain,
    read_snapshot,
    snapshot_json,
)
from rlinf_workers.explaining.explanation import look_here
from rlinf_workers.explaining.processes import started_ticks
from rlinf_workers.explaining.snapshot import StageState
from rlinf_workers.explaining.text import graph_lines
from rlinf_workers.launchers import Wait

pytestmark = pytest.mark.usefixtures("brief_search")

LIMIT_S = 120.0


def record(name: str, pid: int) -> ProcessRecord:
    return ProcessRecord(name=name, host=platform.node(), pid=pid, started_ticks=started_ticks(pid), log_path="")


@pytest.fixture
def stopped() -> Iterator[int]:
    """A process that was stopped."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    process.send_signal(signal.SIGSTOP)
    while "State:\tT" not in Path(f"/proc/{process.pid}/status").read_text():
        time.sleep(0.01)
    yield process.pid
    process.kill()
    process.wait()


def hanging(reward_pid: int, driver_pid: int | None = None) -> Snapshot:
    """The actor waits for the reward's items for 100 s."""
    now_s = time.time()
    return Snapshot(
        taken_s=now_s,
        flow="grpo",
        step=7,
        phase="train",
        began_s=now_s - 100,
        stages=(
            StageState(name="reward", worker="reward", writes=("scored",), unfinished=(0,)),
            StageState(name="actor", worker="actor", reads=("scored",), unfinished=(0,)),
        ),
        waits=(Wait(waiter="actor/0", stage="actor", kind="items", of="scored", since_s=now_s - 90),),
        processes=(record(DRIVER, driver_pid or os.getpid()), record("reward/0", reward_pid)),
    )


def run_folder(path: Path) -> RunFolder:
    return RunFolder(path, config_yaml="name: x\n", command=["rlinf"], keep_checkpoints=1)


def test_a_live_run_is_explained_on_one_screen(tmp_path: Path, stopped: int, capsys: pytest.CaptureFixture[str]):
    with run_folder(tmp_path / "run") as folder:
        (folder.path / "waits.json").write_bytes(snapshot_json(hanging(stopped)))
        assert main(["explain", str(folder.path)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert main(["explain", str(folder.path), "--json"]) == 0
        explanation = json.loads(capsys.readouterr().out)
    assert lines[0].startswith("flow 'grpo', step 7 (train), under way for 100.")
    assert lines[1] == f"root cause: reward/0 reward (process {stopped}) is stopped; 1 other waits for it"
    assert f"kill -CONT {stopped}" in lines[2]
    assert lines[4].startswith("  actor/0 actor waits for channel scored since 90.")
    assert lines[4].endswith("-> reward/0 reward")
    assert len(lines) < 40
    assert explanation["graph"]["root_causes"] == [{"cause": "stopped", "nodes": ["reward/0 reward"], "num_waiting": 1}]


@pytest.mark.parametrize(
    ("took_s", "expected_s", "is_fine"), [(0.4, None, True), (7.0, None, False), (7.0, 5.0, True), (16.0, 5.0, False)]
)
def test_nothing_is_wrong_with_a_step_that_may_be_in_time(took_s: float, expected_s: float | None, is_fine: bool):
    now_s = time.time()
    snapshot = replace(hanging(1), taken_s=now_s, began_s=now_s - took_s, expected_s=expected_s)
    busy = SimpleNamespace(cause="busy", nodes=("reward/0 reward",), num_waiting=0)
    node = SimpleNamespace(name="reward/0 reward", process="reward/0", wait=None, remark="", holds=())
    graph = SimpleNamespace(root_causes=(busy,), nodes=(node,))
    seen: Any = SimpleNamespace(
        snapshot=snapshot, graph=graph, nodes={node.name: node}, looks={}, processes_of=lambda root_cause: ["reward/0"]
    )
    lines = list(graph_lines(seen))
    assert (f"root cause: nobody: nothing is wrong after {took_s:.1f} s; reward/0 reward works" in lines) == is_fine
    assert any(line.startswith("what to do") for line in lines) != is_fine


def test_a_driver_that_writes_no_more_is_the_root_cause(
    tmp_path: Path, stopped: int, capsys: pytest.CaptureFixture[str]
):
    snapshot = hanging(stopped, driver_pid=stopped)
    with run_folder(tmp_path / "run") as folder:
        old: Any = {**json.loads(snapshot_json(snapshot)), "taken_s": time.time() - 60}
        (folder.path / "waits.json").write_text(json.dumps(old))
        assert main(["explain", str(folder.path)]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith(f"root cause: driver (process {stopped}) has written nothing for 6")


def test_a_run_without_processes_says_how_it_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def output(path: Path) -> str:
        assert main(["explain", str(path)]) == 0
        return capsys.readouterr().out

    with run_folder(tmp_path / "done") as folder:
        assert "has no processes yet, or ends" in output(folder.path)
        folder.result({"num_steps": 12})
    assert "is finished after 12 steps" in output(folder.path)
    failed = run_folder(tmp_path / "failed")
    failed.close("RunFailed: worker reward/0 on x was lost")
    (failed.path / "explain-step-3.txt").write_text("root cause: reward/0\n")
    go_on = f"go on with: rlinf train --resume --output {failed.path}"
    assert f"RunFailed: worker reward/0 on x was lost\n{go_on}\nexplained then: " in output(failed.path)
    dead = run_folder(tmp_path / "dead")
    gone = subprocess.Popen([sys.executable, "-c", ""])
    (dead.path / "waits.json").write_bytes(snapshot_json(hanging(gone.pid, driver_pid=gone.pid)))
    gone.wait()
    dead._lock.release()
    assert "was killed: nobody works on it" in output(dead.path)
    assert "go on with: rlinf train --resume --output" in output(dead.path)


def test_between_runs_of_a_flow_the_move_is_the_drivers(
    tmp_path: Path, stopped: int, capsys: pytest.CaptureFixture[str]
):
    with run_folder(tmp_path / "run") as folder:
        snapshot = Snapshot(taken_s=time.time(), processes=hanging(stopped).processes[:1])
        (folder.path / "waits.json").write_bytes(snapshot_json(snapshot))
        assert main(["explain", str(folder.path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("root cause: no flow is running: the move is the driver's")
    assert any(line.startswith(f"driver (process {os.getpid()}): ") for line in lines)


def test_the_end_of_a_run_is_explained_behind_what_was_explained_before(tmp_path: Path, stopped: int):
    stream, unchecked = io.StringIO(), FakeExecutor(hanging(stopped))
    executor: Any = unchecked
    watch = RunWatch(executor, tmp_path, expected_s=lambda: None, message=Progress(total=1, stream=stream).message)
    for _ in range(2):
        watch.explain_end(explain(hanging(stopped)))
    assert (tmp_path / "explain-step-7.txt").read_text().count("root cause: reward/0 reward") == 2
    gone = RunWatch(executor, tmp_path / "gone", expected_s=lambda: None, message=watch._message)
    gone.explain_end(explain(hanging(stopped)))
    lines = stream.getvalue().splitlines()
    assert lines[:2] == [f"explained in {tmp_path / 'explain-step-7.txt'}"] * 2
    assert lines[2].startswith("note: the explanation could not be written: ")


def test_what_stands_in_a_run_folder_decides_no_signal_and_no_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """A folder may have been copied from anywhere: process ids and logs in it are not believed."""
    ends = (
        "import signal, sys; signal.signal(signal.SIGUSR1, lambda *_: sys.exit(9)); print(flush=True); sys.stdin.read()"
    )
    stranger = subprocess.Popen([sys.executable, "-c", ends], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert stranger.stdout is not None and stranger.stdin is not None and stranger.stdout.readline()
    outside = tmp_path / "secret.log"
    outside.write_text("secret line\n")
    with run_folder(tmp_path / "run") as folder:
        inside = folder.path / "logs" / "0.log"
        inside.parent.mkdir()
        inside.write_text("\x1b[2Jcleared \x9b31m\n")
        for log in (outside, inside):
            snapshot = hanging(stranger.pid, driver_pid=os.getpid())
            records = (replace(one, log_path=str(log)) for one in snapshot.processes)
            (folder.path / "waits.json").write_bytes(snapshot_json(replace(snapshot, processes=tuple(records))))
            assert main(["explain", "--all", str(folder.path)]) == 0
            text = capsys.readouterr().out
            assert "secret line" not in text and "\x1b" not in text and "\x9b" not in text
        assert r"\x1b[2Jcleared \x9b31m" in text
    assert stranger.poll() is None, "it got a signal"
    stranger.stdin.close()
    assert stranger.wait() == 0


def test_a_folder_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["explain", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path} is not the folder of a run: it has no manifest.json\n"


class FakeExecutor:
    """Hangs in step 7."""

    explanation = None
    driver_log = ""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def snapshot(self) -> Snapshot:
        return self._snapshot

    def explain(self, snapshot: Snapshot) -> RunExplanation:
        return explain(snapshot, elsewhere=self.look_elsewhere(snapshot))

    def look_elsewhere(self, snapshot: Snapshot) -> list[ProcessSight]:
        """As a worker there would."""
        far = [one for one in snapshot.processes if one.host != platform.node()]
        seen = look_here([replace(one, host=platform.node()) for one in far])
        return [replace(one, name=record.name) for one, record in zip(seen, far, strict=True)]


def watched(tmp_path: Path, snapshot: Snapshot, expected_s: float | None, until: str) -> tuple[str, list[str]]:
    """What the watch told until a file was there and written once more, and the files that it left."""
    stream, executor = io.StringIO(), FakeExecutor(snapshot)
    unchecked: Any = executor
    message = Progress(total=10, stream=stream).message
    with RunWatch(unchecked, tmp_path, expected_s=lambda: expected_s, message=message):
        deadline = time.monotonic() + LIMIT_S
        while not (tmp_path / until).exists():
            assert time.monotonic() < deadline, until
            time.sleep(0.05)
        stored = read_snapshot((tmp_path / "waits.json").read_bytes())
        assert stored.processes == snapshot.processes
        (tmp_path / "waits.json").unlink()
        while not (tmp_path / "waits.json").exists():
            time.sleep(0.05)
    assert executor.driver_log == str(tmp_path / "logs" / "driver.log")
    assert list((tmp_path / "logs").iterdir()) == [], "nobody asked for the driver's stacks"
    return stream.getvalue(), sorted(path.name for path in tmp_path.iterdir())


def test_a_step_beyond_three_times_what_was_expected_is_explained_once(tmp_path: Path, stopped: int):
    output, files = watched(tmp_path, hanging(stopped), 30.0, "explain-step-7.txt")
    assert files == ["explain-step-7.txt", "logs"], "waits.json goes with the processes"
    assert output.count("\n") == 1
    assert output.startswith("step 7 has taken 100 s, 30.0 s were expected; root cause: reward/0 reward (process ")
    assert output.endswith("(explain-step-7.txt)\n")
    text = (tmp_path / "explain-step-7.txt").read_text()
    assert "; 30.0 s were expected\nroot cause: reward/0 reward" in text


@pytest.mark.parametrize("expected_s", [None, 40.0])
def test_a_step_that_may_still_be_in_time_is_not(tmp_path: Path, stopped: int, expected_s: float | None):
    assert watched(tmp_path, hanging(stopped), expected_s, "waits.json") == ("", ["logs"])


def test_the_watch_takes_signals_to_its_log_while_it_lives(tmp_path: Path, stopped: int):
    unchecked: Any = FakeExecutor(hanging(stopped))
    with RunWatch(unchecked, tmp_path, expected_s=lambda: None, message=print):
        os.kill(os.getpid(), signal.SIGUSR1)
        deadline = time.monotonic() + LIMIT_S
        while "test_the_watch_takes_signals" not in (tmp_path / "logs" / "driver.log").read_text():
            assert time.monotonic() < deadline


def test_a_process_of_another_host_is_seen_from_there(tmp_path: Path, stopped: int, capsys: pytest.CaptureFixture[str]):
    """The command asks the run's driver, which asks a worker of that host."""
    here = hanging(stopped)
    far = replace(here, processes=(here.processes[0], replace(here.processes[1], host="elsewhere")))
    with run_folder(tmp_path / "run") as folder:
        unchecked: Any = FakeExecutor(far)
        with RunWatch(unchecked, folder.path, expected_s=lambda: None, message=print):
            while not (folder.path / "waits.json").exists():
                time.sleep(0.05)
            assert main(["explain", str(folder.path)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert not (folder.path / "seen-elsewhere.json").exists()
    assert lines[1] == f"root cause: reward/0 reward (process {stopped}) is stopped; 1 other waits for it"
    assert any(line.startswith("  stack, by py-spy") for line in lines) or "no stack" in "".join(lines)

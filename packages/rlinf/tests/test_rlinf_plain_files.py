"""A folder may have come from anybody: what is read or written in it is what has that name, and nothing else."""

import base64
import json
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rlinf.cli.main import main
from rlinf.errors import UserError
from rlinf.report import write_report
from rlinf.run_folder import RunFolder, TraceEvent
from rlinf.run_folder.folder import film_path
from rlinf.run_folder.lock import check_owner
from rlinf.run_folder.plain_files import copy_plain, open_plain, read_plain
from rlinf.run_folder.rows import append_rows, write_file
from rlinf.run_folder.trace import TraceWriter

SECRET = "a secret of whoever reads the folder"
ODD_RESULT = {
    **{"score": 5, "before": 0.5, "after": 1.0, "score_is_share": True, "num_steps": "x", "training_s": 1.0},
    "stage_seconds": {},
}
EVENT = TraceEvent(name="train", category="stage", lane="device cpu:0", start_ns=0, duration_ns=9)


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    file = tmp_path / "secret"
    file.write_text(SECRET)
    return file


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run that was filmed."""
    path = tmp_path_factory.mktemp("finished") / "run"
    with RunFolder(path, config_yaml="name: x\n", command=[], keep_checkpoints=1) as folder:
        append_rows(path / "metrics.jsonl", [{"step": 0, "time_s": 1.0, "metrics": {"a": 1.0}}])
        append_rows(path / "evaluations.jsonl", [{"step": 2, "time_s": 1.0, "metrics": {"success_at_end": 0.5}}])
        film_path(path, 2).parent.mkdir()
        film_path(path, 2).write_bytes(b"film")
        folder.samples(0, [{"completion": "1"}])
        folder.trace([EVENT])
        folder.result({"num_steps": 1})
    return path


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.mark.parametrize(
    "name", ["manifest.json", "config.yaml", "metrics.jsonl", "samples.jsonl", "result.json", "plan.json"]
)
@pytest.mark.parametrize("plant", ["link", "pipe"])
def test_no_command_reads_through_a_link_or_waits_at_a_pipe(
    run: Path, secret: Path, name: str, plant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name) if plant == "pipe" else (run / name).symlink_to(secret)
    also = {"result.json": ["summary"], "manifest.json": ["explain"]}
    commands = ["report", *also.get(name, [])]
    for command in commands:
        assert main([command, str(run)]) == 2
        error = capsys.readouterr().err
        assert name in error and SECRET not in error
    assert not (run / "report.html").exists()


@pytest.mark.parametrize("linked", ["file", "folder"])
def test_no_film_comes_from_elsewhere(run: Path, tmp_path: Path, linked: str) -> None:
    film = film_path(run, 2)
    film.rename(tmp_path / film.name)
    if linked == "folder":
        film.parent.rmdir()
        film.parent.symlink_to(tmp_path)
    else:
        film.symlink_to(tmp_path / film.name)
    page = write_report(run).read_text()
    assert base64.b64encode(b"film").decode() not in page
    assert "This part cannot be drawn" in page and ("leads out of" if linked == "folder" else "a symbolic link") in page


def test_a_second_name_of_another_users_file_is_not_read(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system lets anybody give a file that he cannot read a second name in his own folder."""
    read_plain(run / "result.json")
    stat, owner = os.stat, run.stat().st_uid + 1
    foreign = os.stat_result((*stat(run)[:4], owner, *stat(run)[5:]))
    monkeypatch.setattr(os, "stat", lambda path, **options: foreign if path == run else stat(path, **options))
    with pytest.raises(UserError, match=r"result\.json is no plain file of the folder's owner"):
        read_plain(run / "result.json")


def test_what_is_written_replaces_a_link_and_never_follows_it(run: Path, secret: Path) -> None:
    for name in ("report.html", ".report.html.partial", ".manifest.json.partial", ".trace.json.partial"):
        (run / name).symlink_to(secret)
    page = write_report(run)
    trace = TraceWriter(run / "trace.json", origin_ns=0)
    trace.write([EVENT])
    trace.close()
    write_file(run / "manifest.json", (run / "manifest.json").read_bytes())
    copy_plain(run / "config.yaml", page)
    assert secret.read_text() == SECRET
    assert page.read_text() == "name: x\n" and not page.is_symlink()
    assert Counter(event["name"] for event in json.loads((run / "trace.json").read_text()))["train"] == 2


def test_rows_are_not_added_to_another_file(run: Path, secret: Path) -> None:
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").symlink_to(secret)
    with pytest.raises(UserError, match=r"metrics\.jsonl is a symbolic link"):
        append_rows(run / "metrics.jsonl", [{"step": 1}])
    assert secret.read_text() == SECRET
    (run / "metrics.jsonl").unlink()
    with pytest.raises(FileNotFoundError):
        open_plain(run / "metrics.jsonl")


def test_a_folder_that_everybody_may_write_into_is_noted(tmp_path: Path) -> None:
    for name, mode, count in (("mine", 0o755, 0), ("everybody's", 0o777, 1)):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(mode)
        RunFolder(tmp_path / name, config_yaml="name: x\n", command=[], keep_checkpoints=1).close()
        notes = json.loads((tmp_path / name / "manifest.json").read_text())["notes"]
        assert len([note for note in notes if note.startswith("every user of this machine may write")]) == count


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a link of another user")
def test_another_users_link_to_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    check_owner(tmp_path / "link")
    os.chown(tmp_path / "link", 65534, 65534, follow_symlinks=False)
    with pytest.raises(UserError, match="is a link of the user with id 65534"):
        check_owner(tmp_path / "link")


def test_what_files_hold_does_not_steer_the_terminal(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clear = "\x1b[2J\x9b31m"
    result = {"score": clear, "before": 0.5, "after": 1.0, "score_is_share": True, "num_steps": 1, "training_s": 1.0}
    (run / "result.json").write_text(json.dumps(result | {"stage_seconds": {clear: 1.0}}))
    assert main(["compare", str(run)]) == 0
    (run / "result.json").write_text(json.dumps({clear: 1}))
    assert main(["compare", str(run)]) == 0
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["sessions"][-1] |= {"ended": clear, "failure": clear}
    (run / "manifest.json").write_text(json.dumps(manifest))
    assert main(["explain", str(run)]) == 0
    output = "".join(capsys.readouterr())
    assert r"\x1b[2J\x9b31m" in output and "\x1b" not in output and "\x9b" not in output


@pytest.mark.parametrize(
    ("command", "name", "value", "code"),
    [
        ("explain", "manifest.json", {"sessions": ["odd"]}, 2),
        ("explain", "manifest.json", {"sessions": [{"started": 1}]}, 2),
        ("explain", "result.json", 7, 0),
        ("explain", "result.json", {}, 0),
        ("compare", "result.json", ODD_RESULT, 0),
    ],
)
def test_values_of_other_kinds_are_no_traceback(run: Path, command: str, name: str, value: Any, code: int) -> None:
    (run / name).write_text(json.dumps(value))
    assert main([command, str(run)]) == code

"""Checkpoints that are written while training goes on."""

import errno
import hashlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from rlinf.errors import RunFailed
from rlinf.loop import checkpoint_writer
from rlinf.loop.checkpoint_writer import CheckpointWriter
from rlinf.run_folder import RunFolder
from rlinf.run_folder.checksums import damage
from rlinf_workers import RemoteError

END_S = 60.0


class Ranks:
    """A trainer of two ranks that write when they are let."""

    def __init__(self) -> None:
        self.calls: list[Future[dict[str, str]]] = []
        self.content = b"weights"

    def call(self, method: str, folder: str) -> None:
        assert method == "begin_checkpoint"
        self.folder = Path(folder)

    def start_call(self, method: str, lane: int) -> list[Future[dict[str, str]]]:
        assert (method, lane) == ("end_checkpoint", checkpoint_writer.LANE)
        self.calls = [Future(), Future()]
        return self.calls

    def write(self, digest: str | None = None) -> None:
        for rank, call in enumerate(self.calls):
            (self.folder / f"{rank}").write_bytes(self.content)
            call.set_result({f"{rank}": digest or hashlib.sha256(self.content).hexdigest()})


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    with RunFolder(tmp_path / "run", config_yaml="name: a\n", command=["rlinf"], keep_checkpoints=2) as folder:
        yield folder


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def writer(folder: RunFolder, notes: list[str]) -> Iterator[CheckpointWriter]:
    with CheckpointWriter(folder, notes.append) as writer:
        yield writer


def names(folder: RunFolder) -> list[str]:
    return sorted(path.name for path in (folder.path / "checkpoints").iterdir())


def save(writer: CheckpointWriter, ranks: Any, step: int) -> None:
    writer.save({"": ranks}, step, {"own_score": None})


def test_training_goes_on_until_the_checkpoint_is_whole(folder: RunFolder, writer: CheckpointWriter) -> None:
    ranks = Ranks()
    save(writer, ranks, 3)
    writer.check()
    assert writer.take_times() == {}
    assert names(folder) == [".step-000003.partial"] and writer.is_writing
    ranks.write()
    writer.wait()
    assert not writer.is_writing
    checkpoint = folder.latest_checkpoint()
    assert checkpoint is not None and names(folder) == ["step-000003"]
    assert damage(checkpoint) is None
    times = writer.take_times()
    assert 0 < times["time/checkpoint_wait_s"] <= times["time/checkpoint_s"]
    assert writer.take_times() == {}


def test_one_at_most_is_under_way(
    folder: RunFolder, writer: CheckpointWriter, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_writer, "LONG_WAIT_S", 0.05)
    first, second = Ranks(), Ranks()
    save(writer, first, 1)
    threading.Timer(0.2, first.write).start()
    save(writer, second, 2)
    assert names(folder) == [".step-000002.partial", "step-000001"]
    assert notes == ["training waits for checkpoints: when one is due, the one before is still being written"]
    second.write()
    writer.wait()
    assert names(folder) == ["step-000001", "step-000002"]


def test_what_a_rank_cannot_write_ends_the_run_by_name(folder: RunFolder, writer: CheckpointWriter) -> None:
    """When all ranks have ended, so that none writes into a folder that is being deleted."""
    ranks = Ranks()
    save(writer, ranks, 4)
    first, second = ranks.calls
    first.set_exception(RemoteError("actor/0", "OSError", "[Errno 28] No space left on device: 'model'", ""))
    writer.check()
    assert names(folder) == [".step-000004.partial"]
    second.set_result({})
    writer_ended = threading.Event()
    threading.Thread(target=lambda: (writer._thread and writer._thread.join(), writer_ended.set())).start()
    assert writer_ended.wait(END_S)
    with pytest.raises(RunFailed, match=r"checkpoint step-000004 could not be written: .*actor/0.*No space left"):
        writer.check()
    assert names(folder) == []
    writer.wait()


def test_what_the_driver_cannot_write_is_raised_with_the_checkpoint(
    folder: RunFolder, writer: CheckpointWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("rlinf.run_folder.checkpoints.write_checksums", full)
    ranks = Ranks()
    save(writer, ranks, 4)
    ranks.write()
    with pytest.raises(OSError, match=r"No space left on device: '.*/checkpoints/step-000004'"):
        writer.wait()
    assert names(folder) == []


def test_each_trainer_writes_into_its_own_folder(folder: RunFolder, writer: CheckpointWriter) -> None:
    first, second = Ranks(), Ranks()
    writer.save({"": first, "policies/second": second}, 3, {"own_score": None})
    second.folder.mkdir(parents=True)
    second.content = b"other weights"
    second.write()
    first.write()
    writer.wait()
    checkpoint = folder.latest_checkpoint()
    assert checkpoint is not None and damage(checkpoint) is None
    assert (checkpoint / "0").read_bytes() == b"weights"
    assert (checkpoint / "policies" / "second" / "0").read_bytes() == b"other weights"


def test_ranks_that_cannot_begin_leave_nothing(folder: RunFolder, writer: CheckpointWriter) -> None:
    class Full(Ranks):
        def call(self, method: str, folder: str) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        save(writer, Full(), 4)
    assert names(folder) == []
    writer.wait()


def test_what_is_not_whole_when_the_processes_end_is_gone(folder: RunFolder) -> None:
    ranks = Ranks()
    with CheckpointWriter(folder, print) as writer:
        save(writer, ranks, 4)
        for call in ranks.calls:
            call.set_exception(RemoteError("actor/0", "WorkersError", "was shut down", ""))
    assert names(folder) == []


def test_files_are_not_read_again_where_their_writers_digested_them(
    folder: RunFolder, writer: CheckpointWriter
) -> None:
    ranks = Ranks()
    save(writer, ranks, 3)
    ranks.write(digest="0" * 64)
    writer.wait()
    checkpoint = folder.latest_checkpoint()
    assert checkpoint is not None
    assert damage(checkpoint) == "0: is not what was written; 1: is not what was written"

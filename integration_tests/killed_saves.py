"""Saves that are killed at each of their steps: `python killed_saves.py FOLDER`, run by test_checkpoints.py.

A fork of this process saves a checkpoint, and kills itself (SIGKILL) right before its Nth change of the disk; then the
folder is opened as the next start opens it. N counts up until a save comes to its end. Prints a line of JSON for each.
"""

import json
import os
import shutil
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

from rlinf.loop.checkpoint_writer import CheckpointWriter
from rlinf.run_folder import RunFolder
from rlinf.run_folder.seal import damage
from rlinf_workers.testing.backends import Chooser, trial_worker
from rlinf_workers.training.checkpoint import CheckpointFiles
from rlinf_workers.training.replicated.backend import ReplicatedBackend

CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class OneRank:
    """A worker group of this process, as `CheckpointWriter` calls it, that trains the model of a seed."""

    def __init__(self, seed: int) -> None:
        self._worker = trial_worker()
        self.backend = ReplicatedBackend(Chooser(seed), self._worker, optimizer=None, num_shards=1)

    def call(self, method: str, folder: str) -> None:
        self._files = CheckpointFiles(self._worker, folder)
        self._files.add_model(self.backend, "model")
        self._files.start()

    def start_call(self, method: str, lane: int) -> list[Any]:
        return [ThreadPoolExecutor(1).submit(self._files.wait)]

    def bits(self) -> dict[str, bytes]:
        return {name: tensor.detach().numpy().tobytes() for name, tensor in self.backend.weights().items()}


def opened(path: Path, *, resume: bool) -> RunFolder:
    return RunFolder(path, config_yaml="", command=[], keep_checkpoints=1, trace_bytes=0, resume=resume)


def save(path: Path, step: int, *, resume: bool) -> None:
    with opened(path, resume=resume) as folder, CheckpointWriter(folder, print) as writer:
        writer.save(cast(Any, OneRank(step)), step, {"own_score": step / 10})
        writer.wait()


def killed_at(point: int) -> None:
    """From here on this process dies before its `point`th change."""
    left = point

    def count() -> None:
        nonlocal left
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in CHANGES or (event == "open" and args[2] & WRITES):
            count()

    def counted_fsync(descriptor: int, fsync=os.fsync) -> None:
        count()
        fsync(descriptor)

    sys.addaudithook(hook)
    os.fsync = counted_fsync


def try_point(base: Path, path: Path, point: int) -> bool:
    """Whether the save came to its end."""
    shutil.copytree(base, path, symlinks=True)
    child = os.fork()
    if not child:
        killed_at(point)
        save(path, 2, resume=True)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or not status, status
    with opened(path, resume=True) as folder:
        newest = folder.latest_checkpoint()
        assert newest is not None
        loaded, step = OneRank(9), int(newest.name[-1])
        loaded.backend.load_model(str(newest / "model"))
        names = sorted(entry.name for entry in (path / "checkpoints").iterdir())
        found = {
            "killed": os.WIFSIGNALED(status),
            "names": names,
            "temporary": [str(entry) for entry in path.rglob("*.partial")],
            "damage": damage(newest),
            "is_bit_equal": loaded.bits() == OneRank(step).bits(),
        }
    print(json.dumps(found), flush=True)
    shutil.rmtree(path)
    return not status


def main() -> None:
    folder = Path(sys.argv[1])
    save(folder / "base", 1, resume=False)
    point = 1
    while not try_point(folder / "base", folder / f"at-{point}", point):
        point += 1


if __name__ == "__main__":
    main()

"""Saves that are killed (SIGKILL): `python killed_saves.py FOLDER [NUMBER]`, run by test_checkpoints.py.

Without a number, a fork of this process saves a checkpoint and kills itself right before its Nth change of the disk; N
counts up until a save comes to its end. With one, a fork saves one checkpoint after the other, of 17 MB each, and is
killed at a random moment, so often. After each kill the folder is opened as the next start opens it, and a line of JSON
says what was found.
"""

import itertools
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from rlinf.loop.checkpoint_writer import CheckpointWriter
from rlinf.run_folder import RunFolder
from rlinf.run_folder.checksums import damage
from rlinf_workers.testing.backends import Chooser, trial_worker
from rlinf_workers.trainers import ReplicatedBackend
from rlinf_workers.trainers.checkpoint import CheckpointFiles

CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Wide(Chooser):
    """Takes a while to write."""

    def build(self, device: torch.device) -> nn.Module:
        model = super().build(device)
        model.register_buffer("much", torch.full((1 << 21,), float(self._seed), dtype=torch.float64))
        return model


class OneRank:
    """A worker group of this process, as `CheckpointWriter` calls it, that has the model of a step."""

    def __init__(self, step: int, kind: type[Chooser]) -> None:
        self._worker = trial_worker()
        self.backend = ReplicatedBackend(kind(step), self._worker, optimizer=None, num_shards=1)

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


def save(path: Path, steps: Iterable[int], kind: type[Chooser], *, resume: bool) -> None:
    with opened(path, resume=resume) as folder, CheckpointWriter(folder, print) as writer:
        for step in steps:
            writer.save({"": cast(Any, OneRank(step, kind))}, step, {"own_score": step / 10})
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


def found_after(path: Path, kind: type[Chooser]) -> dict[str, Any]:
    """What the next start finds."""
    with opened(path, resume=True) as folder:
        newest = folder.latest_checkpoint()
        assert newest is not None
        loaded = OneRank(-1, kind)
        loaded.backend.load_model(str(newest / "model"))
        return {
            "names": sorted(entry.name for entry in (path / "checkpoints").iterdir()),
            "temporary": [str(entry) for entry in path.rglob("*.partial")],
            "damage": damage(newest),
            "is_bit_equal": loaded.bits() == OneRank(int(newest.name[-6:]), kind).bits(),
        }


def at_each_point(folder: Path) -> None:
    save(folder / "base", [1], Chooser, resume=False)
    status = point = 1
    while status:
        path = shutil.copytree(folder / "base", folder / "at", symlinks=True)
        child = os.fork()
        if not child:
            killed_at(point)
            save(path, [2], Chooser, resume=True)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        assert not status or os.WIFSIGNALED(status), status
        print(json.dumps({"killed": bool(status), **found_after(path, Chooser)}), flush=True)
        shutil.rmtree(path)
        point += 1


def at_random_moments(path: Path, number: int) -> None:
    draw = random.Random(14)
    save(path, [1], Wide, resume=False)
    for _ in range(number):
        newest = max(int(entry.name[-6:]) for entry in (path / "checkpoints").glob("step-*"))
        child = os.fork()
        if not child:
            save(path, itertools.count(newest + 1), Wide, resume=True)
        while not any((path / "checkpoints").glob(".step-*")):
            time.sleep(0.001)
        time.sleep(draw.uniform(0.0, 1.0))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        inside = [entry.name for entry in (path / "checkpoints").glob(".*")]
        print(json.dumps({"inside": inside, **found_after(path, Wide)}), flush=True)


def main() -> None:
    folder, *number = sys.argv[1:]
    if number:
        at_random_moments(Path(folder, "run"), int(number[0]))
    else:
        at_each_point(Path(folder))


if __name__ == "__main__":
    main()

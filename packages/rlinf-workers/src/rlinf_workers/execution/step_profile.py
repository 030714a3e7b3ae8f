"""The profile of a worker process over some steps: torch's profiler, with a range for each stage and span.

The trace is a Chrome trace (JSON, compressed), which ui.perfetto.dev and chrome://tracing open. Where the worker is on
a GPU, the same ranges are NVTX ranges, for Nsight Systems. Processes that a worker has started, such as those of an
engine or a simulator, are not in it.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch._C._profiler import _ExperimentalConfig  # torch documents it as an argument of torch.profiler.profile
from torch.profiler import ProfilerActivity, profile, record_function


class StepProfile:
    """Profiles all threads of this process from its creation until `write`, which the same thread has to call."""

    def __init__(self, *, on_gpu: bool) -> None:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        self._on_gpu = on_gpu
        self._profile = profile(activities=activities, experimental_config=_all_threads())
        self._profile.start()

    def range(self, name: str) -> ProfileRange:
        """A range to enter and leave in one thread."""
        return ProfileRange(name, nvtx=self._on_gpu)

    def write(self, path: Path, *, worker: str) -> None:
        """Ends the profile and writes its trace; the name ends in .json or .json.gz."""
        self._profile.stop()
        self._profile.add_metadata("worker", worker)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(path))


class ProfileRange:
    """A named range of the calling thread: in the profile, and in NVTX."""

    def __init__(self, name: str, *, nvtx: bool) -> None:
        self._name, self._nvtx = name, nvtx
        self._recorded: AbstractContextManager[object] = record_function(name)
        self._thread = 0

    def enter(self) -> None:
        self._thread = threading.get_ident()
        self._recorded.__enter__()
        if self._nvtx:
            torch.cuda.nvtx.range_push(self._name)

    def leave(self) -> None:
        """Ends the range; does nothing in another thread, where it cannot be ended."""
        if threading.get_ident() != self._thread:
            return
        if self._nvtx:
            torch.cuda.nvtx.range_pop()
        self._recorded.__exit__(None, None, None)


def _all_threads() -> _ExperimentalConfig | None:
    """The setting by which the profiler records the threads of all stages, not only the one that started it; None
    where this torch has none."""
    try:
        return _ExperimentalConfig(profile_all_threads=True)
    except TypeError:
        return None

"""Checks this machine: devices, memory, channels between processes, extras.

Nothing is guessed: channels are tested with a second process, and a GPU counts only if torch can use it.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from rlinf.config.common import JobConfig
from rlinf.finding import Finding
from rlinf.jobs.spec import job_spec
from rlinf.machine import this_machine
from rlinf.run_folder.manifest import installed_packages, processor_name
from rlinf_envs import KINDS, KindSpec, kind_spec

OWN_PACKAGES = ("rlinf", "rlinf-workers", "rlinf-comm", "rlinf-sched", "rlinf-algos", "rlinf-envs")
FROM_WHEELS = "with the folder that tools/build-wheels.sh writes: pip install --find-links wheels"
"""How to install one of them; none is on a public index."""
MIN_OPEN_FILES = 1024
"""Minimum limit of open files: each channel, connection and log of a worker is an open file of the driver."""
MIN_FREE_DISK_BYTES = 5 << 30
"""Minimum free disk space: two checkpoints of a model of half a billion parameters with optimizer state."""
HAND_OVER_TIMEOUT_S = 60

_READER = """
import sys
from rlinf_comm import Channel, unpack
channel = Channel.open(unpack(sys.stdin.buffer.read()))
print(channel.take(timeout_s=20)[0].value)
"""


def examine(folder: Path, config: JobConfig | None = None) -> Iterator[Finding]:
    """Checks this machine and yields findings; takes some seconds.

    Args:
        folder: where runs would be written.
        config: a run whose custom plug-ins are checked, too.
    """
    yield Finding("python", "ok", f"{platform.python_version()} ({sys.executable})")
    yield Finding("system", "ok", platform.platform())
    yield from _packages()
    yield _cores()
    yield from _attempt("memory", _memory)
    yield _open_files()
    yield _disk(folder)
    yield from _attempt("torch", _torch)
    yield from _attempt("hand-over between processes", _hand_over)
    yield from _attempt("sandbox", _sandbox)
    kinds = [kind_spec(kind) for kind in KINDS]
    used = [] if config is None else job_spec(config).env_kinds(config)
    for kind in [*kinds, *(kind for kind in used if kind not in kinds)]:
        yield from _attempt(kind.name, partial(_simulator, kind))
    yield _video()
    yield from _attempt("venvs", _venvs)


# -- machine -----------------------------------------------------------------------------------------------------------


def _cores() -> Finding:
    usable, present = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    limited = f"; {present} in the machine, this process may use {usable}" if usable < present else ""
    text = f"{usable} x {processor_name()}{limited}"
    if usable < 2:
        hint = "without a GPU only mode collocated fits; others share the core with --cluster.oversubscribe true"
        return Finding("cores", "note", text, hint)
    return Finding("cores", "ok", text)


def _memory() -> Iterator[Finding]:
    from rlinf_sched import host_memory

    present_bytes, usable_bytes = host_memory.machine_bytes(), host_memory.usable_bytes()
    text = f"{present_bytes / 2**30:.1f} GiB"
    if usable_bytes < present_bytes:
        text = f"{text} in the machine; this container may use {usable_bytes / 2**30:.1f} GiB"
        yield Finding("memory", "note", text, "what lies in channels counts as well")
    else:
        yield Finding("memory", "ok", text)


def _open_files() -> Finding:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < MIN_OPEN_FILES:
        hint = f"ulimit -n {MIN_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, 65536)}"
        return Finding("open files", "problem", f"at most {soft} in a process; large runs need {MIN_OPEN_FILES}", hint)
    return Finding("open files", "ok", f"at most {soft:,} in a process")


def _disk(folder: Path) -> Finding:
    place = folder.resolve()
    while not place.exists():
        place = place.parent
    free_bytes = shutil.disk_usage(place).free
    text = f"{free_bytes / 2**30:.1f} GiB free in {place}"
    if not os.access(place, os.W_OK):
        return Finding("disk", "problem", f"{place} cannot be written to", "choose another folder with --output")
    if free_bytes < MIN_FREE_DISK_BYTES:
        return Finding("disk", "note", text, "checkpoints of large models need more")
    return Finding("disk", "ok", text)


# -- packages ----------------------------------------------------------------------------------------------------------


def _installed() -> dict[str, str]:
    """Returns normalised name -> version: imageio is installed as ImageIO, and mani-skill as mani_skill."""
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in installed_packages().items()}


def _packages() -> Iterator[Finding]:
    installed = _installed()
    missing = [name for name in OWN_PACKAGES if name not in installed]
    present = ", ".join(f"{name} {installed[name]}" for name in OWN_PACKAGES if name in installed)
    yield Finding("packages", "ok", present or "none")
    if missing:
        hint = f"{FROM_WHEELS} {' '.join(missing)}"
        yield Finding("packages", "problem", f"not installed: {', '.join(missing)}", hint)


def _video() -> Finding:
    installed, needed = _installed(), ("imageio", "imageio-ffmpeg")
    if not installed.keys() >= set(needed):
        return Finding("videos", "note", "episodes cannot be recorded as mp4", "pip install 'rlinf-envs[video]'")
    return Finding("videos", "ok", ", ".join(f"{name} {installed[name]}" for name in needed))


# -- tests -------------------------------------------------------------------------------------------------------------


def _attempt(subject: str, look: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """Turns any exception of a check into a finding."""
    try:
        yield from look()
    except Exception as error:  # noqa: BLE001 - a broken installation may raise anything; it is shown, not swallowed
        yield Finding(subject, "problem", f"{type(error).__name__}: {error}")


def _torch() -> Iterator[Finding]:
    import torch

    cuda = torch.version.cuda
    yield Finding("torch", "ok", f"{torch.__version__}, {f'CUDA {cuda}' if cuda else 'CPU only'}")
    machine = this_machine()
    if machine.gpus:
        yield from map(_gpu, range(len(machine.gpus)))
        yield _cuda_kernels()
    elif machine.unusable_gpus:
        hint = f"check the driver: nvidia-smi, CUDA {cuda}" if cuda else "install a torch built for CUDA"
        yield Finding("GPU", "problem", f"torch cannot use it: {machine.unusable_gpus}", hint)
    else:
        yield Finding("GPU", "note", f"none; devices are CPU slots, up to {machine.num_cpus} of them")


def _gpu(index: int) -> Finding:
    import torch

    properties = torch.cuda.get_device_properties(index)
    free_bytes, total_bytes = torch.cuda.mem_get_info(index)
    text = f"{properties.name}, {total_bytes / 2**30:.1f} GiB, {free_bytes / 2**30:.1f} GiB free"
    if free_bytes < total_bytes // 2:
        return Finding(f"GPU {index}", "note", text, "another process uses it: nvidia-smi")
    return Finding(f"GPU {index}", "ok", text)


def _cuda_kernels() -> Finding:
    import rlinf_comm

    if rlinf_comm.has_cuda_kernels():
        return Finding("CUDA kernels", "ok", "rlinf-comm was built with them")
    hint = "rebuild it where nvcc is, from a clone: RLINF_CUDA=ON pip install ./packages/rlinf-comm"
    return Finding("CUDA kernels", "note", "rlinf-comm was built without them", hint)


def _hand_over() -> Iterator[Finding]:
    """Sends one item through a channel to another process, as workers do."""
    from rlinf_comm import Channel, pack

    subject = "hand-over between processes"
    channel = Channel.create("doctor", capacity_items=1, capacity_bytes=1 << 16)
    channel.put("received")
    done = subprocess.run(
        [sys.executable, "-c", _READER],
        input=pack(channel.address),
        capture_output=True,
        timeout=HAND_OVER_TIMEOUT_S,
        check=False,
    )
    if done.returncode == 0 and done.stdout.strip() == b"received":
        yield Finding(subject, "ok", "shared memory works")
        return
    last_line = (done.stderr.decode(errors="replace").strip().splitlines() or ["no message"])[-1]
    hint = "processes of one user must be able to open each other's /proc/<pid>/fd; containers can forbid it"
    yield Finding(subject, "problem", f"another process could not take an item: {last_line}", hint)


def _sandbox() -> Iterator[Finding]:
    """Runs a program in the sandbox of `reward.kind=code`."""
    from rlinf_algos.rewards import run_python

    weaknesses = run_python({}, ["-c", "pass"]).weaknesses
    if not weaknesses:
        yield Finding("sandbox", "ok", "strong: programs of reward.kind=code run in namespaces of their own")
        return
    hint = "allow user namespaces (sysctl user.max_user_namespaces, the container's settings); docs/rewards.md"
    yield Finding("sandbox", "note", f"weak, for reward.kind=code: {'; '.join(weaknesses)}", hint)


def _simulator(kind: KindSpec) -> Iterator[Finding]:
    """Checks a kind of environments on this machine."""
    if (check := kind.machine_check(_installed())) is not None:
        yield Finding(*check)


# -- venvs of roles ----------------------------------------------------------------------------------------------------


def _venvs() -> Iterator[Finding]:
    """Yields one finding per venv created by `rlinf venv create`; `rlinf venv check` has details."""
    from rlinf.venvs import examine as venvs_examined
    from rlinf.venvs.folder import venvs

    for venv in venvs():
        findings = list(venvs_examined.examine(venv))
        problems = [finding for finding in findings if finding.verdict == "problem"]
        subject = f"venv {venv.path.name}"
        if problems:
            first, *others = problems
            more = f" (and {len(others)} more: rlinf venv check {venv.path.name})" if others else ""
            yield Finding(subject, "problem", f"{first.subject}: {first.text}{more}", first.hint)
        else:
            yield Finding(subject, "ok", f"{venv.title}, Python {venv.stamp.python}, {venv.path}")

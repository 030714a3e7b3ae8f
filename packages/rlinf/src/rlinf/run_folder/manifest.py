"""manifest.json: with what, from what and on what a run ran, and every fall-back it took."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def new_manifest(config_yaml: str, command: Sequence[str]) -> dict[str, Any]:
    """What is known of a run before it starts."""
    import yaml

    config = yaml.safe_load(config_yaml)
    config = config if isinstance(config, dict) else {}
    packages = installed_packages()
    return {
        "format": 1,
        **{key: config.get(key) for key in ("name", "job", "mode", "seed")},
        "command": list(command),
        "started": timestamp(),
        "started_s": time.time(),
        "ended": None,
        "notes": [],
        "sessions": [],
        "machine": describe_machine(),
        "git": git_state(Path(__file__).resolve()),
        "python": platform.python_version(),
        "torch": packages.get("torch"),
        "packages": packages,
    }


def timestamp() -> str:
    """The local time with its offset, to the second."""
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")


def installed_packages() -> dict[str, str]:
    """Every installed distribution and its version, by name."""
    found = {dist.metadata["Name"]: dist.version for dist in importlib.metadata.distributions() if dist.metadata}
    return dict(sorted(((name, version) for name, version in found.items() if name), key=lambda kv: kv[0].lower()))


def describe_machine() -> dict[str, Any]:
    """Host, system, processor, cores, memory."""
    return {
        "host": platform.node(),
        "system": platform.platform(),
        "processor": processor_name(),
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def processor_name() -> str:
    """The processor's name where the system tells it, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def git_state(source: Path) -> dict[str, Any] | None:
    """Commit of the checkout that a source file belongs to, and whether files differ from it; None for an installed
    package or without git."""
    # ls-files: a virtual environment inside somebody's repository must not pass for that repository's code.
    if _git(source, "ls-files", "--error-unmatch", source.name) is None:
        return None
    commit = _git(source, "rev-parse", "HEAD")
    changes = _git(source, "status", "--porcelain", "--untracked-files=no")
    return None if commit is None else {"commit": commit, "has_changes": bool(changes)}


def _git(source: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=source.parent, capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()

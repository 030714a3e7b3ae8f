"""manifest.json: versions, inputs and machine of a run, and all fall-backs."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import secrets
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rlinf.errors import INTERRUPTED, UserError
from rlinf.run_folder.plain_files import read_plain_json
from rlinf.run_folder.rows import to_json, write_file


class Manifest:
    """A folder's manifest.json; changes are written immediately. Notes may be added from any thread."""

    def __init__(self, folder: Path, values: dict[str, Any]) -> None:
        self._file = folder / "manifest.json"
        self.values = values
        """The content of the manifest."""
        self._lock = threading.Lock()

    @classmethod
    def read(cls, folder: Path, *, what: str) -> Manifest:
        """Reads the manifest of an earlier `what`, a run or an evaluation. Raises: UserError if there is none."""
        try:
            return cls(folder, read_plain_json(folder / "manifest.json"))
        except FileNotFoundError as error:
            raise UserError(
                f"there is no {what} to resume in {folder}: it has no manifest.json",
                hint=f"--output must name the folder of an earlier {what}; leave --resume out to start a new one",
            ) from error
        except UserError:
            raise  # a ValueError, too
        except ValueError as error:
            raise UserError(f"{folder / 'manifest.json'} is not JSON: {error}") from error

    @property
    def run_id(self) -> str:
        """8 hexadecimal digits; the same in all sessions of a run."""
        if "id" not in self.values:  # a run of an earlier version
            self.values["id"] = secrets.token_hex(4)
        return str(self.values["id"])

    def note(self, *texts: str) -> None:
        """Adds notes for the user; the same text only once."""
        with self._lock:
            new = [text for text in dict.fromkeys(texts) if text not in self.values["notes"]]
            if new:
                self.values["notes"] += new
                self._write()

    def begin_session(self, command: Sequence[str], **more: Any) -> None:
        session = {"started": timestamp(), "ended": None, "command": list(command), **more}
        self.values["sessions"].append(session)
        self.values["ended"] = None
        self._write()

    def session(self, key: str, value: Any) -> None:
        """Sets a value of the current session."""
        with self._lock:
            self.values["sessions"][-1][key] = value
            self._write()

    def end_session(self, failure: str | None = None) -> None:
        """Ends the session; `failure` is the reason if it failed."""
        self.values["ended"] = self.values["sessions"][-1]["ended"] = timestamp()
        if failure is not None:
            self.values["sessions"][-1]["failure"] = failure
        self._write()

    def _write(self) -> None:
        write_file(self._file, to_json(self.values, indent=1) + "\n")


def failure_of(kind: type[BaseException] | None, error: BaseException | None) -> str | None:
    """Returns the text for `Manifest.end_session` if a block ends with an error."""
    if kind is None or issubclass(kind, KeyboardInterrupt):
        return None if kind is None else INTERRUPTED
    return f"{kind.__name__}: {error}".rstrip(": ")


def new_manifest(config_yaml: str, command: Sequence[str]) -> dict[str, Any]:
    """Returns the content of a manifest before a run starts."""
    config = yaml.safe_load(config_yaml)
    config = config if isinstance(config, dict) else {}
    packages = installed_packages()
    return {
        "format": 1,
        "id": secrets.token_hex(4),
        **{key: config.get(key) for key in ("name", "job", "mode", "seed")},
        "command": list(command),
        "started": timestamp(),
        "started_s": time.time(),
        "ended": None,
        "notes": [],
        "env_vars_kept_from_workers": _driver_only_variables(config),
        "sessions": [],
        "machine": describe_machine(),
        "git": git_state(Path(__file__).resolve()),
        "python": platform.python_version(),
        "torch": packages.get("torch"),
        "packages": packages,
    }


def _driver_only_variables(config: Mapping[str, Any]) -> list[str]:
    """Returns the names of env vars with credentials that stay with the driver."""
    from rlinf_workers.launchers import credential_names  # imports numpy

    passed = (config.get("cluster") or {}).get("pass_env_vars") or ()
    return [name for name in credential_names(os.environ) if name not in passed]


def timestamp() -> str:
    """Returns the local time with its offset, to the second."""
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")


def installed_packages() -> dict[str, str]:
    """Returns name -> version of all installed distributions."""
    versions = {dist.metadata["Name"]: dist.version for dist in importlib.metadata.distributions() if dist.metadata}
    return dict(sorted(((name, version) for name, version in versions.items() if name), key=lambda kv: kv[0].lower()))


def describe_machine() -> dict[str, Any]:
    """Returns host, system, processor, cores and memory."""
    return {
        "host": platform.node(),
        "system": platform.platform(),
        "processor": processor_name(),
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def processor_name() -> str:
    """Returns the processor's name if the system provides it, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def git_state(source: Path) -> dict[str, Any] | None:
    """Returns the commit of the checkout that contains a source file, and whether files differ from it; None for an
    installed package or without git."""
    # ls-files: a venv inside an unrelated repository must not count as that repository's code.
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

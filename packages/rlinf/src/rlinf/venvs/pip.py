"""Installs packages into a venv with pip, or locked lists with uv if it is on the path; shows progress, and the end of
the output on failure."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from rlinf.errors import RunFailed
from rlinf_workers.launchers import clean_env_vars

TAIL_LINES = 15
_COLLECTING = re.compile(r"Collecting (\S+)|Processing \S*?([^/\s]+)(?=\s|$)")
"""The second form appears if the index is a folder of files."""


def install(python: Path, arguments: Sequence[str], *, collecting: Callable[[str], None], hint: str = "") -> None:
    """Runs `pip install` with the user's pip configuration.

    Args:
        collecting: called with each distribution that pip collects, and with "" when unpacking starts.
        hint: added to the message if pip fails.

    Raises: RunFailed with the end of pip's output.
    """
    # Files are compiled on first import, because most files of a large package are never imported.
    options = ["--disable-pip-version-check", "--no-input", "--progress-bar", "off", "--no-compile"]
    command = [str(python), "-m", "pip", "install", *options, *arguments]
    tail: deque[str] = deque(maxlen=TAIL_LINES)
    with subprocess.Popen(
        command, env=clean_env_vars(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        try:
            assert process.stdout is not None, "it was asked for"
            for line in process.stdout:
                tail.append(line.rstrip())
                if match := _COLLECTING.match(line):
                    collecting(match[1] or match[2])
                elif line.startswith("Installing collected packages"):
                    collecting("")
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        ending = "\n  ".join(line for line in tail if line)
        raise RunFailed(
            f"pip install failed in {python.parent.parent}; it ended with\n  {ending}" + (hint and f"\nhint: {hint}")
        )


def install_locked(
    python: Path, locked: Path, *, collecting: Callable[[str], None], note: Callable[[str], None]
) -> None:
    """Installs a requirements file with digests: with uv if it is on the path, else, or if uv fails, with pip.

    uv does not read pip's configuration, so it fails if only that names the index; `note` gets the reason.

    Raises: as `install`.
    """
    arguments = ["--no-deps", "--require-hashes", "-r", str(locked)]
    if uv := shutil.which("uv"):
        command = [uv, "pip", "install", "--quiet", "--python", str(python), *arguments]
        done = subprocess.run(command, env=clean_env_vars(), capture_output=True, text=True, check=False)
        if done.returncode == 0:
            collecting("")
            return
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        note(f"uv could not install the list ({reason.strip()}); pip does")
    install(python, arguments, collecting=collecting)

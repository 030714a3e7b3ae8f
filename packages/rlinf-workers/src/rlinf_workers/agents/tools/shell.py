"""The tool `shell`: each episode has a sandboxed folder, in which a call is a command of bash.

The walls and limits are those of the tool `python` (python.py), whose process runs the commands. As in mini-swe-agent,
every command has a new shell: files stay, variables and the current folder do not. Whatever a command has started ends
with it. A command that takes too long is ended, and the files stay; one that reaches another limit loses them.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

from rlinf_workers.agents.tools.base import ToolResult, ToolSpec, ToolUnavailable
from rlinf_workers.agents.tools.python import PythonOptions, PythonTool, PythonToolSession
from rlinf_workers.plugins import Spec

SPEC = Spec(name="shell", implementation="rlinf_workers.agents.tools.shell:ShellTool", options=PythonOptions)
FUNCTION_SPEC = ToolSpec(
    name="shell",
    description=(
        "Runs a command with bash in the working folder, and returns what it prints and its exit code. Files stay for "
        "later calls; variables and the current folder do not. There is no network."
    ),
    parameters={
        "type": "object",
        "properties": {"command": {"type": "string", "description": "the command to run"}},
        "required": ["command"],
        "additionalProperties": False,
    },
)
FOLDER = "work"
"""Of the commands, below that of the process that runs them."""
GRACE_S = 5.0
"""Time to end a command that takes too long, before its process is ended with the files."""
NO_BASH = "bash is not installed in this sandbox"
MAX_FILE_BYTES = 512 << 10
"""Of all files that `read_files` returns; the output of a cell has a limit."""
_RUN = """\
import os, signal, subprocess
os.makedirs({folder!r}, exist_ok=True)
try:
    shell = subprocess.Popen(
        ["bash", "-c", {command!r}], cwd={folder!r}, stdin=subprocess.DEVNULL, start_new_session=True
    )
except FileNotFoundError:
    raise SystemExit({no_bash!r})
try:
    code = shell.wait({limit_s!r})
    note = f"[exit code {{code}}]" if code else ""
except subprocess.TimeoutExpired:
    note = "[The command took longer than {limit_s:g} s and was ended.]"
finally:
    try:
        os.killpg(shell.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    shell.wait()
if note:
    print(note)
"""
_WRITE = """\
import os
path = os.path.join({folder!r}, {name!r})
os.makedirs(os.path.dirname(path), exist_ok=True)
with open(path, "w", encoding="utf-8", newline="") as file:
    size = file.write({text!r})
"""
_READ = """\
import json, os
texts, left = {{}}, {max_bytes!r}
for place, folders, names in os.walk({folder!r}):
    folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "__pycache__")
    for name in sorted(names):
        path = os.path.join(place, name)
        if os.path.islink(path) or not os.path.isfile(path) or os.path.getsize(path) > left:
            continue
        with open(path, "rb") as file:
            content = file.read(left)
        try:
            texts[os.path.relpath(path, {folder!r})] = content.decode()
        except UnicodeDecodeError:
            continue
        left -= len(content)
print(json.dumps(texts))
"""


class ShellTool(PythonTool):
    """A sandboxed folder for each episode; see the module's docstring."""

    specs = (FUNCTION_SPEC,)

    def open(self, episode: str) -> ShellToolSession:
        return ShellToolSession(self, seed=zlib.crc32(episode.encode("utf-8", "surrogatepass")))


class ShellToolSession(PythonToolSession):
    """The folder of one episode."""

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Raises: ToolUnavailable."""
        limit_s = self._tool.options.time_limit_s
        cell = _RUN.format(folder=FOLDER, command=arguments["command"], limit_s=limit_s, no_bash=NO_BASH)
        result = await self.call_cell(cell, limit_s + GRACE_S)
        if result.detail == "SystemExit" and NO_BASH in result.text:
            raise ToolUnavailable(NO_BASH)
        return result

    async def write_files(self, files: Mapping[str, str]) -> None:
        """Puts texts into the folder; names are relative to it.

        Raises: ToolUnavailable if they do not fit, or the sandbox fails.
        """
        for name, text in files.items():
            result = await self.call_cell(_WRITE.format(folder=FOLDER, name=name, text=text))
            if result.failure:
                raise ToolUnavailable(f"the file {name} cannot be put into the sandbox: {result.text[-500:]}")

    async def read_files(self) -> dict[str, str]:
        """The texts in the folder by name, without hidden folders, links, and what exceeds MAX_FILE_BYTES together.
        They are the policy's. Empty if it has left nothing that can be read.

        Raises: ToolUnavailable.
        """
        result = await self.call_cell(_READ.format(folder=FOLDER, max_bytes=MAX_FILE_BYTES))
        try:
            texts = json.loads(result.text)
        except (ValueError, RecursionError):
            return {}
        is_mapping = isinstance(texts, dict) and all(isinstance(text, str) for text in texts.values())
        return texts if is_mapping else {}

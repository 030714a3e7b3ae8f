"""An agent that repairs programs with a shell, one command a turn: the idea of mini-swe-agent, in a sandbox.

A row has the column `files`, name -> text of the folder to begin with, `tests` in a format of the reward `code`, and
may have `program`, the file that they test (solution.py). The policy's turn has one fenced block of bash; it reads what
the command printed, and submits with the command SUBMIT. Then the tests judge the folder as it is, in a sandbox to
which the policy has had no access. The episode's reward is 1 if they pass. An episode that has used its turns or its
context is judged, too.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from rlinf_algos.rewards import CodeReward
from rlinf_workers.agents import NOT_OF_POLICY, EpisodeEnded
from rlinf_workers.agents.tools import PythonOptions, ShellTool, ToolUnavailable

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
PROGRAM = "solution.py"
COMMAND = re.compile(r"^```(?:bash|sh)?[ \t]*\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)
FORMAT = "Write exactly one command, in a block that begins with ```bash; your turn has {number}."
OPTIONS = PythonOptions(time_limit_s=60.0, cpu_s=600, max_characters=10_000)
"""Of the shell: the time limit and the length of an output are those of mini-swe-agent."""


async def repair(session: Any, task: Any) -> float:
    """The agent. Raises: EpisodeEnded if the sandbox or the judge fails by itself."""
    shell = await _shell(asyncio.get_running_loop())
    folder = shell.open(session.id)
    try:
        await folder.write_files(texts_of(task.row.get("files", {})))
        await _converse(session, task, folder)
        files = await folder.read_files()
    except ToolUnavailable as error:
        raise EpisodeEnded("tool_service", str(error)) from error
    finally:
        await folder.close()
    program = str(task.row.get("program") or PROGRAM)
    return await judged(files, program, str(task.row["tests"])) if program in files else 0.0


async def _converse(session: Any, task: Any, folder: Any) -> None:
    """Commands and their outputs, until the policy submits or may not go on."""
    messages = list(task.messages)
    while True:
        try:
            (turn,) = await session.chat(messages)
        except EpisodeEnded as end:
            if end.cause in NOT_OF_POLICY:
                raise
            return
        commands = COMMAND.findall(turn.content)
        if len(commands) != 1:
            output = FORMAT.format(number=len(commands))
        elif commands[0].strip().startswith(SUBMIT):
            return
        else:
            output = (await folder.call("shell", {"command": commands[0]})).text
        messages += [turn.message(), {"role": "user", "content": output}]


async def judged(files: Mapping[str, str], program: str, tests: str) -> float:
    """1.0 if the program of these files passes the tests, else 0.0. Raises: EpisodeEnded if the judge fails by itself;
    RewardError for tests that cannot be read."""
    result = await asyncio.to_thread(_judge(), f"```python\n{_one_program(files, program)}\n```", tests)
    if result.judge_failed:
        raise EpisodeEnded("service", f"the tests failed by themselves: {result.detail}")
    return result.value


def texts_of(files: Any) -> dict[str, str]:
    """Name -> text of a column, which may be JSON; of columns that share a struct, other rows' names are None."""
    names = json.loads(files) if isinstance(files, str) else files
    return {str(name): str(text) for name, text in names.items() if text is not None}


def _one_program(files: Mapping[str, str], program: str) -> str:
    """A program that writes the files into its working folder and does what `program` does. The judge runs it in the
    policy's sandbox, not beside the tests."""
    return "\n".join(
        [
            "import json, os, sys",
            f"for name, text in json.loads({json.dumps(json.dumps(dict(files)))}).items():",
            "    os.makedirs(os.path.dirname(name) or '.', exist_ok=True)",
            "    with open(name, 'w', encoding='utf-8') as file:",
            "        file.write(text)",
            "sys.path.insert(0, os.getcwd())",
            f"exec(compile(open({program!r}, encoding='utf-8').read(), {program!r}, 'exec'), globals())",
        ]
    )


@cache
def _judge() -> CodeReward:
    return CodeReward(num_processes=1)


_SHELLS: dict[Any, asyncio.Task[ShellTool]] = {}


async def _shell(loop: asyncio.AbstractEventLoop) -> ShellTool:
    """The tool of this process, which starts with the first episode."""

    async def start() -> ShellTool:
        tool = ShellTool(OPTIONS)
        await tool.start()
        return tool

    if loop not in _SHELLS:
        _SHELLS[loop] = asyncio.ensure_future(start())
    try:
        return await asyncio.shield(_SHELLS[loop])
    except ToolUnavailable as error:
        raise EpisodeEnded("tool_service", str(error)) from error

"""The process that runs a harness: `python harness_process.py DESCRIPTOR package.module:function`. With `check` in
place of a descriptor it imports the function, and exits with PROBLEM and why it cannot be.

It imports nothing but the standard library and the harness, so that it runs under any interpreter. Messages are lines
of JSON on the socket DESCRIPTOR; see harness.py for the other end. Hundreds of episodes share its event loop, and what
each prints is kept apart.
"""

from __future__ import annotations

import asyncio
import contextvars
import difflib
import importlib
import inspect
import io
import json
import math
import os
import socket
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor

MAX_PRINTED = 20_000
"""Characters of an episode's output that are kept, its end."""
MAX_PIECES = 64
"""Pieces of output that are put together when there are more."""
PROBLEM = 3
"""Exit status. The reason is on standard output after a zero character, since modules may print, too."""
MAX_THREADS = 1024
"""Episodes at once of a harness that is not async."""
_printed: contextvars.ContextVar = contextvars.ContextVar("printed", default=None)


class HarnessSession:
    """What a harness gets of its session.

    Attributes:
        id: name of the session.
        base_url: address for OpenAI's SDK.
        api_key: the session's token.
    """

    def __init__(self, number, base_url, api_key, name, send):
        self.id, self.base_url, self.api_key = name, base_url, api_key
        self._number, self._send = number, send

    def env(self):
        """Env vars for an agent that runs as a subprocess."""
        root = self.base_url[: -len("/v1")] if self.base_url.endswith("/v1") else self.base_url
        openai = {"OPENAI_BASE_URL": self.base_url, "OPENAI_API_KEY": self.api_key}
        return {**os.environ, **openai, "ANTHROPIC_BASE_URL": root, "ANTHROPIC_API_KEY": self.api_key}

    def reward(self, value, turn=-1, agent=None):
        """Gives an agent a reward of its own in this episode; without an agent, a turn of the policy, by default the
        latest."""
        if agent is None:
            self._send({"id": self._number, "turn": int(turn), "turn_reward": finite(value)})
        else:
            self._send({"id": self._number, "agent": str(agent), "agent_reward": finite(value)})


class _Printed(io.TextIOBase):
    """Standard output: what an episode prints goes to its own text and to the log."""

    def __init__(self, log):
        self._log = log

    def write(self, text):
        own = _printed.get()
        if own is not None:
            own.append(text[-MAX_PRINTED:])
            if len(own) > MAX_PIECES:
                own[:] = ["".join(own)[-MAX_PRINTED:]]
        return self._log.write(text)

    def flush(self):
        self._log.flush()

    def fileno(self):
        return self._log.fileno()


def finite(reward):
    """Raises: ValueError for a reward that is not a finite number."""
    value = float(reward)
    if not math.isfinite(value):
        raise ValueError(f"the reward {value} is not a finite number")
    return value


class NotThere(Exception):
    """There is no such function; the message says what is there."""


def _located(path):
    """The function of an import path. Raises: NotThere, and whatever its module raises."""
    module, _, name = path.partition(":")
    folder, script_folder = os.getcwd(), os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [place for place in sys.path if place != script_folder]  # users' modules may have the same names
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # a module that it imports
        names = [file[:-3] for file in os.listdir(folder) if file.endswith(".py")]
        raise NotThere(
            f"there is no module {error.name!r} in the present folder ({folder}) or in PYTHONPATH"
            + _similar(error.name, names)
        ) from None
    function = getattr(loaded, name, None)
    if function is None:
        raise NotThere(f"{loaded.__file__} has no {name!r}" + _similar(name, vars(loaded)))
    if not callable(function):
        raise NotThere(f"{name!r} of {loaded.__file__} is a {type(function).__name__} and no function")
    return function


def _similar(name, names):
    matches = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def _reason(error):
    return str(error) if isinstance(error, NotThere) else "its module raises an exception:\n" + traceback.format_exc()


def _check(path, first):
    try:
        function = _located(path)
        if first and next(iter(inspect.signature(function).parameters), "base_url") != first:
            raise NotThere(f"{path} talks to the policy over HTTP, since its first parameter is not {first!r}")
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a module may raise anything
        print("\0" + _reason(error), end="")
        sys.exit(PROBLEM)


async def _episode(run, message, send):
    own: list = []
    _printed.set(own)
    session = HarnessSession(message["id"], message["base_url"], message["api_key"], message["session"], send)
    answer = {"id": message["id"]}
    try:
        if inspect.iscoroutinefunction(run):
            reward = await run(message["base_url"], message["task"], session=session)
        else:
            reward = await asyncio.to_thread(run, message["base_url"], message["task"], session=session)
        answer["reward"] = None if reward is None else finite(reward)
    except asyncio.CancelledError:
        raise
    except (Exception, SystemExit):  # noqa: BLE001 - a harness may raise anything
        answer["error"] = traceback.format_exc()[-MAX_PRINTED:]
    answer["printed"] = "".join(own)[-MAX_PRINTED:]
    send(answer)


async def _serve(descriptor, path):
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=descriptor), limit=1 << 28)

    def send(answer):
        writer.write(json.dumps(answer).encode() + b"\n")

    try:
        run = _located(path)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a harness may raise anything
        send({"id": -1, "error": _reason(error)})
        await writer.drain()
        return
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(MAX_THREADS))
    send({"id": -1})
    episodes: dict = {}
    while line := await reader.readline():
        message = json.loads(line)
        if "cancel" in message:
            if (task := episodes.pop(message["cancel"], None)) is not None:
                task.cancel()
            continue
        task = asyncio.ensure_future(_episode(run, message, send))
        episodes[message["id"]] = task
        task.add_done_callback(lambda _, number=message["id"]: episodes.pop(number, None))
    sys.stdout.flush()
    os._exit(0)  # threads that hang hold up nothing


if __name__ == "__main__":
    if sys.argv[1] == "check":
        _check(*sys.argv[2:4])
        sys.exit()
    sys.stdout, sys.stderr = _Printed(sys.stdout), _Printed(sys.stderr)  # type: ignore[assignment]
    asyncio.run(_serve(int(sys.argv[1]), sys.argv[2]))

"""Failures that tests inject into episodes: tools, harnesses and agents that fail in a way that the task or the policy
names. The agent process and the harness process import this file."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import threading
import time
import urllib.error
import urllib.request

from workers_harnesses import chat

from rlinf_algos.rewards.confinement.processes import children_of
from rlinf_workers.agents.tools import ToolFailed, ToolUnavailable

FAILING_MEMBER = 1
"""The episode of a group in which the failure is injected."""
URL = "FAILURES_URL"
"""Env var: address of a service that fails as its path says."""


# -- tools -------------------------------------------------------------------------------------------------------------


async def fail(how: str) -> str:
    """Fails.

    Args:
        how: in which way.
    """
    match how:
        case "raise":
            raise KeyError("a mistake of the tool")
        case "hang":
            await asyncio.sleep(600)
        case "exit":
            sys.exit(3)
        case "cancel":
            raise asyncio.CancelledError
        case "garbage":
            return object()  # type: ignore[return-value]
        case "lost":
            raise ToolUnavailable("the database is gone")
        case "refuse":
            raise ToolFailed("There is no such row.")
    return how


def block(how: str) -> str:
    """Blocks its thread.

    Args:
        how: anything.
    """
    time.sleep(2.0)
    return how


def ask(path: str) -> str:
    """Asks a service.

    Args:
        path: what the service does.
    """
    address = os.environ[URL] if path != "down" else "http://127.0.0.1:9/"
    with urllib.request.urlopen(address + path, timeout=30) as answer:
        return json.loads(answer.read())["value"]


def strike(number: str) -> str:
    """Kills the sandboxes of this process.

    Args:
        number: of those that are killed as they come; 0: those that there are.
    """
    if int(number):
        threading.Thread(target=_kill_next, args=(int(number),), daemon=True).start()
    else:
        _kill_sandboxes()
    return number


def starve(number: str) -> str:
    """Lets the next sandboxes of this process not start.

    Args:
        number: how many.
    """
    from rlinf_workers.agents.tools import python

    left, create = int(number), python.PythonSession

    def fails(**options):
        nonlocal left
        left -= 1
        if not left:
            python.PythonSession = create
        raise OSError("no more processes")

    python.PythonSession = fails  # type: ignore[assignment]
    return number


def _kill_sandboxes() -> set[int]:
    """Returns those that it has killed."""
    sandboxes = {process for process in children_of(os.getpid()) if b"sandbox_entry" in _command(process)}
    for process in sandboxes:
        for one in (process, *children_of(process)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
    return sandboxes


def _kill_next(number: int) -> None:
    killed: set[int] = set()  # a busy machine takes a while to end one that is killed
    while len(killed) < number:
        killed |= _kill_sandboxes()
        time.sleep(0.05)


def _command(process: int) -> bytes:
    try:
        with open(f"/proc/{process}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""


# -- harnesses: the task's text says how one fails ---------------------------------------------------------------------


async def harness(base_url, task, *, session):
    """One turn; in one episode of a group the failure that the task names."""
    if task["member"] == FAILING_MEMBER:
        return await HARNESSES[task["text"]](base_url, task, session)
    await chat(base_url, session, task["messages"])
    return None


async def _raises(base_url, task, session):
    await chat(base_url, session, task["messages"])
    print("before the mistake")
    raise KeyError("a mistake of the harness")


async def _raises_once(base_url, task, session):
    await chat(base_url, session, task["messages"])
    if session.id.endswith("-0"):
        raise KeyError("a mistake of the harness")


async def _dies(base_url, task, session):
    await chat(base_url, session, task["messages"])
    os.kill(os.getpid(), signal.SIGKILL)


async def _dies_once(base_url, task, session):
    await chat(base_url, session, task["messages"])
    if session.id.endswith("-0"):
        os.kill(os.getpid(), signal.SIGKILL)


async def _exits(base_url, task, session):
    await chat(base_url, session, task["messages"])
    sys.exit(3)


async def _exits_in_thread(base_url, task, session):
    await chat(base_url, session, task["messages"])
    await asyncio.to_thread(sys.exit, 3)


async def _hangs(base_url, task, session):
    await chat(base_url, session, task["messages"])
    await asyncio.sleep(600)


async def _hangs_in_thread(base_url, task, session):
    await chat(base_url, session, task["messages"])
    await asyncio.to_thread(time.sleep, 4.0)


async def _returns(value, base_url, task, session):
    await chat(base_url, session, task["messages"])
    return value


async def _rewards(value, turn, base_url, task, session):
    await chat(base_url, session, task["messages"])
    session.reward(value, turn=turn)
    await asyncio.sleep(600)


async def _wrong_key(base_url, task, session):
    session.api_key = "another"
    await chat(base_url, session, task["messages"])


async def _wrong_request(base_url, task, session):
    await chat(base_url, session, [{"role": "nobody"}])


async def _server_fault(base_url, task, session):
    """The server's part is below."""
    try:
        await chat(base_url, session, task["messages"], seed=13)
    except urllib.error.HTTPError as error:
        return float(error.code)
    return 1.0


async def _asks_without_end(base_url, task, session):
    messages = list(task["messages"])
    while True:
        answer = await chat(base_url, session, messages)
        messages += [answer["choices"][0]["message"], {"role": "user", "content": "3"}]


async def _ignores_the_end(base_url, task, session):
    try:
        await _asks_without_end(base_url, task, session)
    except urllib.error.HTTPError:
        return 0.5


async def _asks_for_nothing(base_url, task, session):
    return 1.0


async def _floods(base_url, task, session):
    await chat(base_url, session, task["messages"])
    print("x" * 3_000_000)


HARNESSES = {
    "harness raises": _raises,
    "harness raises once": _raises_once,
    "harness is killed": _dies,
    "harness is killed among others": _dies_once,
    "harness exits": _exits,
    "harness exits in a thread": _exits_in_thread,
    "harness hangs": _hangs,
    "harness hangs in a thread": _hangs_in_thread,
    "harness returns a text": lambda *arguments: _returns("good", *arguments),
    "harness returns nan": lambda *arguments: _returns(float("nan"), *arguments),
    "harness rewards with nan": lambda *arguments: _rewards(float("nan"), -1, *arguments),
    "harness rewards another turn": lambda *arguments: _rewards(1.0, 5, *arguments),
    "harness has another key": _wrong_key,
    "harness asks nonsense": _wrong_request,
    "harness meets a fault": _server_fault,
    "harness asks without end": _asks_without_end,
    "harness ignores the end": _ignores_the_end,
    "harness asks for nothing": _asks_for_nothing,
    "harness prints a lot": _floods,
}


def _break_server() -> None:
    """The session server of this process has a fault that requests with the seed 13 meet."""
    from rlinf_workers.agents.sessions import AgentSession

    chat_of_session = AgentSession.chat

    async def chat_or_fault(self, messages, *, seed=None, **options):
        if seed == 13:
            raise RuntimeError("a fault of the server")
        return await chat_of_session(self, messages, seed=seed, **options)

    AgentSession.chat = chat_or_fault  # type: ignore[method-assign]


if getattr(sys.modules["__main__"], "__spec__", None) is not None and "rlinf_workers.agents.host" in sys.argv[
    0
].replace(os.sep, "."):
    _break_server()


# -- agents in the agent process ---------------------------------------------------------------------------------------


async def agent(session, task):
    """One turn; in one episode of a group the failure that the task names."""
    (turn,) = await session.chat(task.messages)
    if task.member != FAILING_MEMBER:
        return None
    match task.text:
        case "agent raises":
            raise RuntimeError("a mistake of the agent")
        case "agent exits":
            sys.exit(3)
        case "agent hangs":
            await asyncio.sleep(600)
        case "agent returns nan":
            return float("nan")
        case "agent rewards with nan":
            session.reward_turn(turn, float("nan"))
        case "agent asks nonsense":
            await session.chat([])
        case "agent asks without end":
            messages = list(task.messages)
            while True:
                messages += [turn.message(), {"role": "user", "content": "3"}]
                (turn,) = await session.chat(messages)
    return None

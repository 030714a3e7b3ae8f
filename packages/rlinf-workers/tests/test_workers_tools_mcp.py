"""The tool `mcp` with small servers of the official package: over stdio and HTTP, and what they do when they fail."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from workers_tools import Test, run_in_episode, started_tool

from rlinf_workers.agents.tools import EpisodeTools, ToolResult, ToolUnavailable, make_tools
from rlinf_workers.plugins import OptionError

pytest.importorskip("mcp")

SCRIPT = str(Path(__file__).with_name("workers_mcp_server.py"))


def started(**options: Any):
    return started_tool(**{"tool": "mcp", **options})


def run(test: Test, *, num_attempts: int = 1, **options: Any) -> None:
    run_in_episode(test, num_attempts=num_attempts, **{"tool": "mcp", **options})


async def count(episode: EpisodeTools, name: str = "count") -> list[str]:
    """Process, number of its calls, and what it sees of its surroundings."""
    result = await episode.call(name, {})
    assert result.failure == "", result
    return result.text.split(" ")


async def misbehave(episode: EpisodeTools, how: str) -> ToolResult:
    return await episode.call("misbehave", {"how": how})


def is_alive(process: str) -> bool:
    return Path(f"/proc/{process}").exists()


def test_a_server_over_stdio_and_who_causes_its_failures(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", "s3cret")

    async def test(episode: EpisodeTools) -> None:
        specs = {spec.name: spec for spec in episode._places[0].tool.specs}
        assert list(specs) == ["add", "count", "draw", "misbehave"]
        drawn = await episode.call("draw", {})
        assert (drawn.text, drawn.pictures) == ("", (b"png",))
        assert specs["add"].description == "Adds two numbers."
        assert specs["add"].parameters["required"] == ["a", "b"]
        assert (await episode.call("add", {"a": 2, "b": 3})).text == "5"
        assert (await episode.call("add", {"a": "x", "b": 3})).failure == "policy"
        process, number, own, secret, folder = await count(episode)
        assert (number, own, secret, folder) == ("1", "mine", "None", str(tmp_path))
        assert 7900 < len((await misbehave(episode, "flood")).text) <= 8000
        for how, failure, detail in [
            ("anticipated", "policy", "no such row"),
            ("parameters", "policy", "there is no such row"),
            ("crash", "service", "Error executing tool misbehave"),
            ("protocol", "service", "MCPError: broken"),
            ("hang", "service", "misbehave of the MCP server"),
        ]:
            result = await misbehave(episode, how)
            assert (result.failure, detail in result.detail) == (failure, True), result
        assert (await count(episode))[:2] == [process, "2"]  # none of them cost the connection
        died = await misbehave(episode, "exit")
        assert (died.failure, "Connection closed" in died.detail) == ("service", True)
        assert (await count(episode))[1] == "1"  # a new server

    options = {"env_vars": {"OWN": "mine"}, "folder": str(tmp_path), "time_limit_s": 2}
    run(test, command=[sys.executable, SCRIPT], **options)


@pytest.mark.slow
def test_a_server_for_each_episode_keeps_its_state():
    async def main() -> None:
        options = {"command": [sys.executable, SCRIPT], "connection": "episode", "prefix": "my_"}
        async with started(**options, functions=["count", "misbehave"]) as tools:
            assert [spec.name for spec in tools[0].specs] == ["my_count", "my_misbehave"]
            episodes = [EpisodeTools(tools, name) for name in "ab"]
            first = await asyncio.gather(*(count(episode, "my_count") for episode in episodes))
            assert first[0][0] != first[1][0]
            assert [numbers[1] for numbers in first] == ["1", "1"]
            assert (await count(episodes[0], "my_count"))[:2] == [first[0][0], "2"]
            os.kill(int(first[0][0]), signal.SIGKILL)
            lost = await episodes[0].call("my_count", {})
            assert (lost.failure, "cannot be recreated" in lost.detail) == ("service", True)
            with pytest.raises(ToolUnavailable, match="cannot be recreated"):
                episodes[1].branch("c")
            assert (await count(episodes[1], "my_count"))[1] == "2"
            for episode in episodes:
                await episode.close()
            assert not any(is_alive(numbers[0]) for numbers in first)

    asyncio.run(asyncio.wait_for(main(), 120))


def test_a_shared_server_serves_many_and_is_replaced_when_it_dies():
    async def main() -> None:
        async with started(command=[sys.executable, SCRIPT]) as tools:
            episodes = [EpisodeTools(tools, str(i), num_attempts=2) for i in range(64)]
            results = await asyncio.gather(*(one.call("add", {"a": i, "b": 1}) for i, one in enumerate(episodes)))
            assert [result.text for result in results] == [str(i + 1) for i in range(64)]
            process = (await count(episodes[0]))[0]
            waiting = asyncio.ensure_future(misbehave(episodes[0], "hang"))
            await asyncio.sleep(0.3)
            os.kill(int(process), signal.SIGKILL)  # during a call and between those of the others
            assert (await count(episodes[1]))[0] != process
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            last = (await count(episodes[2]))[0]
        assert not is_alive(last)

    asyncio.run(asyncio.wait_for(main(), 120))


@pytest.mark.slow
def test_a_server_over_http():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([sys.executable, SCRIPT, str(port)], stderr=subprocess.DEVNULL)

    async def test(episode: EpisodeTools) -> None:
        assert (await episode.call("add", {"a": 2, "b": 3})).text == "5"
        assert (await misbehave(episode, "anticipated")).failure == "policy"
        assert (await misbehave(episode, "hang")).failure == "service"
        assert (await episode.call("add", {"a": 2, "b": 3})).text == "5"
        assert (await misbehave(episode, "exit")).failure == "service"
        assert (await episode.call("add", {"a": 2, "b": 3})).failure == "service"  # it does not run any more

    try:
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            assert server.poll() is None
        run(test, url=f"http://127.0.0.1:{port}/mcp", time_limit_s=2, start_limit_s=10)
    finally:
        server.kill()
        server.wait()


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        ("print('hello')", "cannot be reached: "),
        ("import time\nwhile True: print('garbage ' * 100, flush=True); time.sleep(0.01)", "did not start within 1 s"),
        ("import time; time.sleep(600)", "did not start within 1 s"),
        (None, "cannot be reached: FileNotFoundError"),
    ],
)
def test_a_server_that_does_not_start_is_refused(program, problem):
    async def test(episode: EpisodeTools) -> None:
        raise AssertionError("it has not started")

    command = ["/absent/server"] if program is None else [sys.executable, "-c", program]
    with pytest.raises(ToolUnavailable) as error:
        run(test, command=command, start_limit_s=1 if "sleep" in (program or "") else 60)
    assert problem in str(error.value)


def test_functions_that_a_server_lacks_are_refused():
    async def test(episode: EpisodeTools) -> None:
        raise AssertionError("it has not started")

    with pytest.raises(ToolUnavailable, match=r"has no function 'ad'; did you mean 'add'\?"):
        run(test, command=[sys.executable, SCRIPT], functions=["ad"])


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, "command or url: one of them is required, not both"),
        ({"command": ["x"], "url": "http://x"}, "one of them is required, not both"),
        ({"command": ["x"], "connection": "own"}, "connection='own': allowed: 'shared', 'episode'"),
        ({"command": ["x"], "start_limit_s": 0}, "start_limit_s=0.0 must be above 0"),
    ],
)
def test_options_are_checked(options, problem):
    with pytest.raises(OptionError) as error:
        make_tools([{"tool": "mcp", **options}])
    assert problem in str(error.value)

"""The tool `python`: state and its loss, who caused it, branches, and many episodes at once."""

import asyncio
import contextlib
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from workers_tools import Test, run_in_episode, started_tool

from rlinf_algos.rewards import PythonSession
from rlinf_algos.rewards.confinement.processes import children_of
from rlinf_workers.agents.tools import EpisodeTools, ToolResult, ToolUnavailable, make_tools, python
from rlinf_workers.agents.tools.python import PythonOptions, PythonTool, PythonToolSession
from rlinf_workers.plugins import OptionError

DEFAULTS = {"tool": "python", "allow_weak_isolation": True, "time_limit_s": 30}
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is for Linux")


def run(test: Test, *, num_attempts: int = 2, **options: Any) -> None:
    run_in_episode(
        test,
        num_attempts=num_attempts,
        **DEFAULTS | options,
    )


def started(**options: Any):
    return started_tool(**DEFAULTS | options)


async def call(episode: EpisodeTools, code: str) -> ToolResult:
    return await episode.call("python", {"code": code})


async def output(episode: EpisodeTools, code: str) -> str:
    result = await call(episode, code)
    assert result.failure == "", result
    return result.text


def session_of(episode: EpisodeTools) -> PythonToolSession:
    session = episode._places[0].session
    assert session is not None and isinstance(session._session, PythonToolSession)
    return session._session


def sandbox_process(episode: EpisodeTools) -> int:
    process = session_of(episode)._process
    assert process is not None and process.process_id is not None
    return process.process_id


def kill_sandbox(entry: int) -> None:
    """Kills the sandbox without letting it report."""
    supervisors = [entry, *children_of(entry)]
    for process in supervisors:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def test_the_state_stays_for_an_episode():
    async def test(episode: EpisodeTools) -> None:
        assert await output(episode, "x = 20") == "(no output)"
        assert await output(episode, "print('x is'); x + 1") == "x is\n21\n"
        failed = await call(episode, "1 / 0")
        assert (failed.failure, failed.detail) == ("policy", "ZeroDivisionError")
        assert failed.text.endswith("ZeroDivisionError: division by zero\n")
        assert await output(episode, "x") == "20\n"

    run(test)


HOSTILE = {
    "exited": "import os; os._exit(0)",
    "killed": "import ctypes; ctypes.string_at(0)",
    "killed by itself": "import os; os.kill(os.getpid(), 9)",
    "timeout": "while True: pass",
    "timeout asleep": "import time; time.sleep(600)",
    "memory": "import os, time\nfor _ in range(3):\n    if os.fork() == 0: break\n"
    "held = bytearray(60 << 20)\nfor i in range(0, len(held), 4096): held[i] = 1\ntime.sleep(60)",
    "output": "while True: print('x' * 1000)",
    "garbled": "import os, time; os.write(4, b'{\\n'); time.sleep(60)",
}


@pytest.mark.parametrize("way", HOSTILE)
def test_a_program_that_loses_its_process_is_the_policys(way):
    async def test(episode: EpisodeTools) -> None:
        await output(episode, "x = 5")
        result = await call(episode, HOSTILE[way])
        assert (result.failure, result.detail) == ("policy", way.split()[0])
        assert python.ENDINGS[result.detail].split("{")[0] in result.text
        assert result.text.endswith(f"{python.STATE_LOST}]")
        assert len(result.text) <= 8000
        assert (await call(episode, "x")).detail == "NameError"  # a new process

    limits = {"memory_bytes": 128 << 20} if way == "memory" else {"time_limit_s": 1} if "timeout" in way else {}
    run(test, num_attempts=1, **limits)


def test_memory_that_a_program_asks_for_in_vain_keeps_the_state():
    async def test(episode: EpisodeTools) -> None:
        await output(episode, "x = 5")
        assert (await call(episode, "y = bytearray(1 << 40)")).detail == "MemoryError"
        assert await output(episode, "x") == "5\n"

    run(test)


def test_a_sandbox_that_is_killed_from_outside_is_the_services():
    async def test(episode: EpisodeTools) -> None:
        await output(episode, "x = 5")
        task = asyncio.ensure_future(call(episode, "import time; time.sleep(600)"))
        await asyncio.sleep(0.3)
        kill_sandbox(sandbox_process(episode))
        result = await task
        assert (result.failure, "killed from outside" in result.detail) == ("service", True)
        assert await output(episode, "x") == "5\n"  # the next attempt has the state after the last good call

    run(test, num_attempts=1)


def test_a_sandbox_that_was_lost_between_calls_is_recreated():
    async def test(episode: EpisodeTools) -> None:
        await output(episode, "x = 5")
        kill_sandbox(sandbox_process(episode))
        assert await output(episode, "x + 1") == "6\n"

    run(test)


@pytest.mark.parametrize("error", [OSError("no more processes"), MemoryError()])
def test_a_sandbox_that_cannot_start_is_the_services(monkeypatch, error):
    def fails(**options: Any) -> PythonSession:
        raise error

    async def test(episode: EpisodeTools) -> None:
        monkeypatch.setattr(python, "PythonSession", fails)
        result = await call(episode, "1")
        assert result.failure == "service"
        assert str(error) in result.detail
        monkeypatch.undo()
        assert await output(episode, "1") == "1\n"  # no place was lost

    run(test, max_sandboxes=1)


def test_a_machine_without_a_sandbox_is_refused(monkeypatch):
    monkeypatch.setattr(
        python, "run_python", lambda *arguments, **options: type("Run", (), {"weaknesses": ("no walls",)})
    )
    with pytest.raises(ToolUnavailable, match=r"weak on this machine: no walls.*allow_weak_isolation"):
        asyncio.run(PythonTool(PythonOptions()).start())
    asyncio.run(PythonTool(PythonOptions(allow_weak_isolation=True)).start())


def test_many_sandboxes_get_enough_descriptors(monkeypatch):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, limits[1]))
        asyncio.run(PythonTool(PythonOptions(max_sandboxes=256, allow_weak_isolation=True)).start())
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (256 * 8 + 512, limits[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    monkeypatch.setattr(python.resource, "getrlimit", lambda which: (1024, 1024))
    with pytest.raises(ToolUnavailable, match=r"needs 2560 file descriptors, .* 1024 .*; use at most 64"):
        asyncio.run(PythonTool(PythonOptions(max_sandboxes=256)).start())


# -- branches ----------------------------------------------------------------------------------------------------------


def test_a_branch_has_the_same_state_and_its_own_future():
    async def test(episode: EpisodeTools) -> None:
        await output(episode, "import random\nvalues = [random.random()]")
        await call(episode, "values.append(hash('text'))\nopen('f', 'w').write('1')\nraise ValueError")
        branch = episode.branch("branch")
        try:
            await output(episode, "values.append('of the first')")
            of_branch = await output(branch, "values, open('f').read()")
            assert of_branch == (await output(episode, "values[:2], open('f').read()"))
            assert await output(branch, "random.random()") == await output(episode, "random.random()")
            other = EpisodeTools([branch._places[0].tool], "other")
            assert await output(other, "import random; [random.random(), hash('text')]") not in of_branch
            await other.close()
        finally:
            await branch.close()

    run(test)


def test_a_branch_says_what_differs():
    async def test(episode: EpisodeTools) -> None:
        session = session_of_new(episode)
        for code in ("import os; os.urandom(8)", "5"):
            await session.call("python", {"code": code})
        other = session_of_new(episode)
        result = await other.restore(session.snapshot())
        assert (result.failure, result.detail) == ("", "1 of 2 calls printed something else when run again")
        assert (await other.call("python", {"code": "7"})).text == "7\n"
        await session.close()
        await other.close()

    run(test)


def session_of_new(episode: EpisodeTools) -> PythonToolSession:
    return episode._places[0].tool.tool.open("other")  # type: ignore[return-value]


def test_a_branch_that_ends_otherwise_is_the_services(monkeypatch):
    async def test(episode: EpisodeTools) -> None:
        await output(episode, "import time; time.sleep(0.5)")
        branch = episode.branch("branch")
        monkeypatch.setattr(python, "REPLAY_FACTOR", 0.001)
        result = await call(branch, "1")
        assert (result.failure, "call 1 ended: The program took" in result.detail) == ("service", True)
        await branch.close()

    run(test)


def test_a_lost_state_is_not_branched():
    async def test(episode: EpisodeTools) -> None:
        await output(episode, "x = 5")
        await call(episode, "import os; os._exit(0)")
        await output(episode, "y = 6")
        branch = episode.branch("branch")
        assert (await call(branch, "x")).detail == "NameError"
        assert await output(branch, "y") == "6\n"
        await branch.close()

    run(test)


# -- many at once ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_64_episodes_keep_their_states_apart():
    async def main() -> None:
        async with started() as tools:
            episodes = [EpisodeTools(tools, f"e{i}") for i in range(64)]

            async def play(i: int) -> list[str]:
                await output(episodes[i], f"x = {i}; open('file', 'w').write('{i}')")
                await call(episodes[i], "import os; os._exit(0)" if i % 7 == 0 else "1 / 0")
                if i % 7 == 0:
                    await output(episodes[i], f"x = {i}; open('file', 'w').write('{i}')")
                return [await output(episodes[i], "x += 1000; (x, open('file').read())") for _ in range(2)]

            results = await asyncio.gather(*map(play, range(64)))
            assert results == [[f"({i + 1000}, '{i}')\n", f"({i + 2000}, '{i}')\n"] for i in range(64)]
            await asyncio.gather(*(episode.close() for episode in episodes))

    before = set(children_of(os.getpid()))
    asyncio.run(asyncio.wait_for(main(), 300))
    assert set(children_of(os.getpid())) == before


def test_processes_are_bounded_in_number():
    async def main() -> None:
        async with started(max_sandboxes=2) as tools:
            episodes = [EpisodeTools(tools, f"e{i}") for i in range(6)]
            highest = 0

            async def play(episode: EpisodeTools) -> str:
                nonlocal highest
                text = await output(episode, "2 + 3")
                highest = max(highest, len(set(children_of(os.getpid())) - before))
                await episode.close()
                return text

            assert await asyncio.gather(*map(play, episodes)) == ["5\n"] * 6
            assert highest <= 2

    before = set(children_of(os.getpid()))
    asyncio.run(asyncio.wait_for(main(), 120))


def test_waiting_for_a_place_has_an_end():
    async def test(episode: EpisodeTools) -> None:
        await output(episode, "1")
        other = EpisodeTools([episode._places[0].tool], "other", num_attempts=1)
        result = await call(other, "1")
        assert result.failure == "service"
        assert "all 1 sandboxes were in use for 0.2 s" in result.detail
        await episode.close()
        assert await output(other, "1") == "1\n"
        await other.close()

    run(test, max_sandboxes=1, wait_limit_s=0.2)


def test_calls_of_one_episode_run_one_after_the_other():
    async def test(episode: EpisodeTools) -> None:
        await output(episode, "import time; order = []")
        codes = [f"time.sleep({s}); order.append({s})" for s in (0.2, 0.1, 0.0)]
        await asyncio.gather(*(output(episode, code) for code in codes))
        assert await output(episode, "order") == "[0.2, 0.1, 0.0]\n"

    run(test)


def test_the_time_limit_does_not_count_the_wait_for_a_cpu():
    async def test(episode: EpisodeTools) -> None:
        others = [EpisodeTools([episode._places[0].tool], f"e{i}") for i in range(4)]
        results = await asyncio.gather(*(call(other, "import time; time.sleep(0.6)") for other in others))
        assert [result.failure for result in results] == [""] * 4
        assert max(result.wall_s for result in results) > 2
        await asyncio.gather(*(other.close() for other in others))

    run(test, max_running=1, time_limit_s=1.5)


# -- the end -----------------------------------------------------------------------------------------------------------


def test_a_cancelled_call_ends_its_program_and_the_state_can_be_had_again():
    async def test(episode: EpisodeTools) -> None:
        await output(episode, "x = 5")
        entry = sandbox_process(episode)
        task = asyncio.ensure_future(call(episode, "x = 6\nwhile True: pass"))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not Path(f"/proc/{entry}").exists()
        assert await output(episode, "x") == "5\n"

    run(test)


def test_an_episode_can_be_closed_during_a_call():
    async def test(episode: EpisodeTools) -> None:
        await output(episode, "1")
        entry = sandbox_process(episode)
        task = asyncio.ensure_future(call(episode, "import time; time.sleep(600)"))
        await asyncio.sleep(0.2)
        await episode.close()
        assert not Path(f"/proc/{entry}").exists()
        assert (await task).failure == "service"

    run(test)


def test_an_episode_can_be_closed_during_the_start():
    async def test(episode: EpisodeTools) -> None:
        before = set(children_of(os.getpid()))
        for delay_s in (0.0, 0.01, 0.03):
            other = EpisodeTools([episode._places[0].tool], "other", num_attempts=1)
            task = asyncio.ensure_future(call(other, "import time; time.sleep(600)"))
            await asyncio.sleep(delay_s)
            await other.close()
            assert (await task).failure == "service"
            cancelled = EpisodeTools([episode._places[0].tool], "other", num_attempts=1)
            task = asyncio.ensure_future(call(cancelled, "import time; time.sleep(600)"))
            await asyncio.sleep(delay_s)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await cancelled.close()
        while set(children_of(os.getpid())) - before:
            await asyncio.sleep(0.01)
        assert await output(episode, "1") == "1\n"

    run(test, max_sandboxes=1)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"memory_bytes": 5}, "memory_bytes=5 must be at least"),
        ({"max_running": 0}, "max_running=0 must be at least 1"),
        ({"time_limit_s": -1}, "time_limit_s=-1.0 must be above 0"),
        ({"cpu": 5}, "did you mean 'cpu_s'?"),
        ({"cpu_s": "x"}, "cpu_s='x': expected `int`"),
    ],
)
def test_options_are_checked(options, problem):
    with pytest.raises(OptionError) as error:
        make_tools([{"tool": "python", **options}])
    assert problem in str(error.value)

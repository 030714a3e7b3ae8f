"""The tool `shell`: commands in a folder of their episode, and what they cannot do to it."""

import sys

import pytest
from workers_tools import run_in_episode

from rlinf_workers.agents.tools import EpisodeTools, ToolResult, ToolUnavailable, shell
from rlinf_workers.agents.tools.shell import ShellToolSession

NUM_SLEEPING = "grep -h -A2 '^Name:.sleep' /proc/[0-9]*/status | grep -c 'State:.[RSDT]' || true"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is for Linux")


def run(test, **options):
    run_in_episode(
        test, num_attempts=1, **{"tool": "shell", "allow_weak_isolation": True, "time_limit_s": 30, **options}
    )


async def call(episode: EpisodeTools, command: str) -> ToolResult:
    return await episode.call("shell", {"command": command})


def session_of(episode: EpisodeTools) -> ShellToolSession:
    session = episode._places[0].tool.tool.open("other")
    assert isinstance(session, ShellToolSession)
    return session


def test_files_stay_and_the_shell_does_not():
    async def test(episode: EpisodeTools) -> None:
        assert (await call(episode, "ls -a | wc -l; mkdir sub; cd sub; x=5; echo one > a")).text == "2\n"
        result = await call(episode, 'echo "$x" $(cat sub/a) $(basename "$PWD"); echo loud >&2; exit 3')
        assert (result.failure, result.text) == ("", " one work\nloud\n[exit code 3]\n")

    run(test)


def test_a_command_that_takes_too_long_is_ended_and_keeps_the_files():
    async def test(episode: EpisodeTools) -> None:
        result = await call(episode, "echo one > a; sleep 600 & sleep 600")
        assert result.text == "[The command took longer than 1 s and was ended.]\n"
        assert (await call(episode, f"cat a; {NUM_SLEEPING}")).text == "one\n0\n"

    run(test, time_limit_s=1)


def test_a_command_that_reaches_another_limit_is_the_policys():
    async def test(episode: EpisodeTools) -> None:
        result = await call(episode, "echo one > a; yes")
        assert (result.failure, result.detail) == ("policy", "output")
        assert (await call(episode, "ls")).text == "(no output)"

    run(test)


def test_the_walls_are_those_of_python():
    async def test(episode: EpisodeTools) -> None:
        result = await call(episode, "cat /etc/passwd /root/.profile; echo x > /usr/x; (echo > /dev/tcp/127.0.0.1/22)")
        lines = result.text.strip().splitlines()
        assert len(lines) >= 4 and not [line for line in lines if "root:" in line], result.text
        assert "[exit code" in lines[-1]

    run(test)


def test_files_are_put_in_and_read():
    async def test(episode: EpisodeTools) -> None:
        session = session_of(episode)
        files = {"a.py": "x = 'é\\n'\r\n", "deep/er/b.txt": "", "weird ' name": "{}\n```\n"}
        await session.write_files(files)
        await session.call("shell", {"command": "mkdir .git; echo > .git/x; ln -s /etc/hosts link; true"})
        await session.call("shell", {"command": "yes | head -c 600000 > z; printf '\\xff' > r"})
        assert await session.read_files() == files
        with pytest.raises(ToolUnavailable, match="the file big cannot be put into the sandbox"):
            await session.write_files({"big": "x" * (2 << 20)})
        await session.close()

    run(test)


def test_a_sandbox_without_bash_is_the_services(monkeypatch):
    monkeypatch.setattr(shell, "_RUN", shell._RUN.replace('"bash"', '"absent-bash"'))

    async def test(episode: EpisodeTools) -> None:
        result = await call(episode, "ls")
        assert (result.failure, result.detail) == ("service", shell.NO_BASH)

    run(test)

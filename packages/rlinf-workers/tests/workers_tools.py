"""Tools that are started for a test, and an episode that uses them."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from rlinf_workers.agents.tools import EpisodeTools, make_tools, start_tools

Test = Callable[[EpisodeTools], Awaitable[None]]


@contextlib.asynccontextmanager
async def started_tool(**options: Any):
    """The tools of one entry; closed afterwards."""
    tools = make_tools([options])
    await start_tools(tools)
    try:
        yield tools
    finally:
        for tool in tools:
            await tool.close()


def run_in_episode(test: Test, *, num_attempts: int, **options: Any) -> None:
    """Runs a test with the tool in one episode."""

    async def main() -> None:
        async with started_tool(**options) as tools:
            episode = EpisodeTools(tools, "episode", num_attempts=num_attempts)
            try:
                await test(episode)
            finally:
                await episode.close()

    asyncio.run(asyncio.wait_for(main(), 120))

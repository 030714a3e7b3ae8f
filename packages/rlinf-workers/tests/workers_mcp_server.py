"""A server of the Model Context Protocol whose functions fail as they are asked to; over HTTP if it is given a port."""

import asyncio
import os
import sys

from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.shared.exceptions import MCPError

server = MCPServer("test", log_level="CRITICAL")
num_calls = 0


@server.tool()
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@server.tool()
def count() -> str:
    """The process, the number of its calls, and what it sees of its surroundings."""
    global num_calls
    num_calls += 1
    return f"{os.getpid()} {num_calls} {os.environ.get('OWN')} {os.environ.get('SECRET')} {os.getcwd()}"


@server.tool()
def draw() -> Image:
    """A picture."""
    return Image(data=b"png", format="png")


@server.tool()
async def misbehave(how: str) -> str:
    """Fails as it is asked to, or answers too much."""
    match how:
        case "anticipated":
            raise ToolError("no such row")
        case "crash":
            raise ValueError("own mistake")
        case "protocol":
            raise MCPError(-32603, "broken")
        case "parameters":
            raise MCPError(-32602, "there is no such row")
        case "exit":
            os._exit(3)
        case "hang":
            await asyncio.sleep(600)
    return "x" * 100_000


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()

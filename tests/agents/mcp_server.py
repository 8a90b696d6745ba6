"""An MCP server that speaks over its pipes."""

import asyncio
import os

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("of tests")


@server.tool()
async def add(a: int, b: int = 0, seconds: float = 0) -> int:
    """Add two numbers."""
    await asyncio.sleep(seconds)
    if a == 13:
        raise ToolError("no 13")
    if a == 99:
        os._exit(1)
    return a + b


@server.tool()
def pid() -> str:
    """Tell the process."""
    return str(os.getpid())


if __name__ == "__main__":
    server.run("stdio")

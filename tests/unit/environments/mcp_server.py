"""An MCP server whose tools have a state, for an interpreter with the package `mcp`."""

import os

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("counter")
total = 0


@server.tool()
def add(number: int, times: int = 1) -> str:
    """Add to the total and return it."""
    global total
    total += number * times
    return f"the total is {total}"


@server.tool()
def refuse(reason: str) -> str:
    """Fail."""
    raise ToolError(reason)


@server.tool()
def leave() -> str:
    """End the server."""
    os._exit(1)


if __name__ == "__main__":
    server.run("stdio")

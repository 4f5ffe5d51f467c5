"""Tools of a server that speaks the Model Context Protocol (package `mcp`, 2.0 or newer)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from megatron_dapo.environments.remote.api import EpisodeTask, Lost, Message, ToolEnvironment


def mcp_environment(
    server: str | Sequence[str], variables: Mapping[str, str] | None = None, timeout_s: float = 60.0
) -> type[ToolEnvironment]:
    """Return an environment with the tools of `server`. Derive a class from it that has `finish`.

    The server is asked for its tools once, when a worker loads the class. Each episode then has its own session, and its own
    server process if `server` is a command.

    Args:
        server: a command that is spoken to over its pipes, or a URL (streamable HTTP).
        variables: environment variables of the command.
        timeout_s: time that the server has to list its tools.

    Raises:
        ValueError: a tool has the name of one of the class's own methods.
    """

    class McpEnvironment(ToolEnvironment):
        async def reset(self, task: EpisodeTask, seed: int) -> list[Message]:
            self._stack = AsyncExitStack()
            self._client = await self._stack.enter_async_context(_client(server, variables))
            return list(task.messages)

        async def close(self) -> None:
            if hasattr(self, "_stack"):
                await self._stack.aclose()

    for tool in asyncio.run(asyncio.wait_for(_tools(server, variables), timeout_s)):
        if hasattr(McpEnvironment, tool.name):
            raise ValueError(f"the tool {tool.name!r} of {server} has the name of a method of Environment")
        setattr(McpEnvironment, tool.name, _method(tool))
    return McpEnvironment


def _client(server: str | Sequence[str], variables: Mapping[str, str] | None) -> Any:
    from mcp import Client, StdioServerParameters

    if isinstance(server, str):
        return Client(server)
    return Client(StdioServerParameters(command=server[0], args=list(server[1:]), env=dict(variables or {})))


async def _tools(server: str | Sequence[str], variables: Mapping[str, str] | None) -> list[Any]:
    tools, cursor = [], None
    async with _client(server, variables) as client:
        while True:
            page = await client.list_tools(cursor=cursor)
            tools += page.tools
            if (cursor := page.next_cursor) is None:
                return tools


def _method(tool: Any) -> Callable[..., Any]:
    async def call(self: Any, **arguments: Any) -> str:
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        try:
            result = await self._client.call_tool(tool.name, arguments)
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                raise Lost(f"the MCP server ended while it ran {tool.name}") from error
            raise
        text = "\n".join(map(_text, result.content))
        if result.is_error:
            raise RuntimeError(text)
        return text

    call.__name__ = tool.name
    call.__tool_schema__ = {  # type: ignore[attr-defined]
        "name": tool.name,
        "description": tool.description or tool.title or tool.name,
        "parameters": tool.input_schema,
    }
    return call


def _text(block: Any) -> str:
    if block.type == "text":
        return str(block.text)
    if block.type == "resource" and hasattr(block.resource, "text"):
        return str(block.resource.text)
    return json.dumps({"type": block.type, "mime_type": getattr(block, "mime_type", None)})  # no images in a text

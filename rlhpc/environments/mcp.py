"""Tools of servers that speak the Model Context Protocol, [mcp.NAME] of the run file: what they are, and calls of them.

    prompts    asked_tools ─▶ schemas, by a process of its own (`python -m rlhpc.environments.mcp`), once
    dialogue   ServedTool(…) ─▶ Sessions.call ─▶ ToolSession: opened by the first call, closed with its dialogue

A session lists its tools when it opens; if they are not those that prompts tell of, that is an error.  What the policy
may mend is a ValueError with words for it: a tool that says that it has failed, arguments that its schema refuses, a
call that takes too long while the server still answers.  Everything else is ToolServerAway, a verifier error.  A
program on standard input and output is tied to this process (base/processes.py).  Extra `mcp`, a library by the
protocol's authors; it negotiates the version, so that servers of older ones are understood.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import httpx2
import mcp_types
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp_types import CONNECTION_CLOSED, INVALID_PARAMS, REQUEST_TIMEOUT

from rlhpc.base.near_names import near_hint
from rlhpc.base.own_tools import name_of
from rlhpc.base.processes import tied_command
from rlhpc.config.tables_tools import McpConfig
from rlhpc.protocol.errors import ConfigError, RlhpcError
from rlhpc.rewards.json_schema import check_json_schema, why_invalid

# -------------------------------------------------------------------------------------------------------------- session

_INHERITED = ("LD_LIBRARY_PATH",)  # beside the library's own list: programs of environment modules start with it
_MOST_PAGES = 100  # of a list of tools
_PATIENCE = httpx2.Timeout(None, connect=5.0)  # calls have their own time
_END_S = 10.0  # for a session to end: the library gives a program four seconds, and is given some more
# What a library lets through when a server is gone, or answers what the protocol does not allow.
_AWAY = (MCPError, RuntimeError, ValueError, OSError, httpx2.HTTPError, TimeoutError, ExceptionGroup)


class ToolServerAway(RlhpcError):
    """A server of tools is gone, or does not keep to the protocol: no answer of it counts."""


class ToolSession:
    """A connection to a server.  A task of its own holds it, since the library wants one to open and close it."""

    def __init__(self, name: str, table: McpConfig) -> None:
        """Open nothing yet.  name: of [mcp.NAME]."""
        self._name, self._table = name, table
        self._client: Client | None = None
        self._holder: asyncio.Task[None] | None = None
        self._is_over = asyncio.Event()

    async def open(self) -> list[mcp_types.Tool]:
        """Connect; return the server's tools.  Raises ToolServerAway; the session is then closed."""
        opened: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._holder = asyncio.create_task(self._hold(opened))
        try:
            await asyncio.wait((opened, self._holder), return_when=asyncio.FIRST_COMPLETED)
            if not opened.done():
                await self._holder
            self._client = opened.result()
            return await self._tools()
        except _AWAY as error:
            await self.close()
            raise ToolServerAway(f"mcp.{self._name}: it cannot be asked: {_words(error)}") from error
        except BaseException:  # nothing is survived, but no session may be left open
            await self.close()
            raise

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool of an open session; return its result as text.

        Raises ValueError with words for the policy, ToolServerAway.
        """
        assert self._client is not None
        try:
            result = await self._client.call_tool(tool, dict(arguments), self._table.timeout_s)
        except MCPError as error:
            if error.code == REQUEST_TIMEOUT and await self._still_answers():
                raise ValueError(f"no answer within {self._table.timeout_s:g} s") from None
            if error.code == INVALID_PARAMS:
                raise ValueError(error.message) from None
            raise self._away(tool, error) from error
        except _AWAY as error:
            raise self._away(tool, error) from error
        text = _text(result)
        if result.is_error:
            raise ValueError(text)
        return text

    async def close(self) -> None:
        """End the session, and the program.  Idempotent."""
        self._is_over.set()
        if self._holder is not None:
            await asyncio.wait((self._holder,), timeout=_END_S)
            self._holder.cancel()
            await asyncio.gather(self._holder, return_exceptions=True)

    async def _hold(self, opened: asyncio.Future[Client]) -> None:
        async with contextlib.AsyncExitStack() as stack:
            client = await stack.enter_async_context(Client(await self._server(stack), cache=None))
            opened.set_result(client)
            await self._is_over.wait()

    async def _server(self, stack: contextlib.AsyncExitStack) -> Any:
        """Return a transport for the library to connect by.  Raises ToolServerAway."""
        table = self._table
        if table.url:
            headers = {name: _value_of(f"mcp.{self._name}", key) for name, key in table.header_variables.items()}
            http = await stack.enter_async_context(httpx2.AsyncClient(headers=headers, timeout=_PATIENCE))
            return streamable_http_client(table.url, http_client=http)
        passed = {key: _value_of(f"mcp.{self._name}", key) for key in table.pass_variables}
        inherited = {key: os.environ[key] for key in _INHERITED if key in os.environ}
        path = table.variables.get("PATH", os.environ.get("PATH"))
        if (program := shutil.which(table.command[0], path=path)) is None:
            raise ToolServerAway(f"mcp.{self._name}: there is no program {table.command[0]!r} here")
        words = tied_command([program, *table.command[1:]])
        return StdioServerParameters(command=words[0], args=words[1:], env=inherited | passed | table.variables)

    async def _tools(self) -> list[mcp_types.Tool]:
        """All tools, of all pages.  Raises what _AWAY names."""
        assert self._client is not None
        found, cursor = list[mcp_types.Tool](), None
        for _ in range(_MOST_PAGES):
            page = await self._client.list_tools(cursor=cursor)
            found += page.tools
            if (cursor := page.next_cursor) is None:
                return found
        raise ValueError(f"its list of tools has more than {_MOST_PAGES} pages")

    async def _still_answers(self) -> bool:
        """Whether the server says which tools it has, within the time of a call."""
        try:
            async with asyncio.timeout(self._table.timeout_s):
                await self._tools()
        except _AWAY:
            return False
        return True

    def _away(self, tool: str, error: BaseException) -> ToolServerAway:
        code = error.code if isinstance(error, MCPError) else 0
        if code == CONNECTION_CLOSED:
            return ToolServerAway(f"mcp.{self._name}: it has ended, or closed the connection, in a call of {tool}")
        if code == REQUEST_TIMEOUT:
            twice_s = 2 * self._table.timeout_s
            return ToolServerAway(f"mcp.{self._name}: it has answered nothing for {twice_s:g} s, in a call of {tool}")
        return ToolServerAway(f"mcp.{self._name}: a call of {tool} was answered with {_words(error)}")


def _value_of(place: str, variable: str) -> str:
    """The value of an environment variable.  Raises ToolServerAway."""
    if variable not in os.environ:
        raise ToolServerAway(f"{place}: the environment variable {variable} is not set here")
    return os.environ[variable]


def _words(error: BaseException) -> str:
    """An error in one line: of a group the first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0][:300]}" if said else type(error).__name__


def _text(result: mcp_types.CallToolResult) -> str:
    """A result as text: what is none is named; without content, the structured one as JSON."""
    if not result.content and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(map(_part, result.content))


def _part(block: Any) -> str:
    match block:
        case mcp_types.TextContent():
            return str(block.text)
        case mcp_types.ResourceLink():
            return f"({block.name}: {block.uri})"
        case mcp_types.EmbeddedResource(resource=mcp_types.TextResourceContents() as resource):
            return str(resource.text)
    kind = getattr(block, "mime_type", None) or getattr(getattr(block, "resource", None), "mime_type", None)
    return f"(here is {kind or block.type}, which cannot be shown: only text can)"


# ---------------------------------------------------------------------------------------------------------------- tools


@dataclass(frozen=True, slots=True)
class ServedTool:
    """A tool of a server, beside own_tools.OwnTool."""

    server: str
    tool: str  # by the server's name
    schema: Mapping[str, Any]  # as in TOOL_SCHEMAS, under the name that the policy calls

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call.  Raises ValueError, with a message for the policy, if its schema refuses them."""
        if why := why_invalid(dict(given), json.dumps(self.schema["function"]["parameters"])):
            raise ValueError(f"{name_of(self.schema)}: {why}")
        return dict(given)


class Sessions:
    """The sessions of a dialogue: its own, and those that its worker shares."""

    def __init__(self, tables: Mapping[str, McpConfig], told: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """told: schemas of the tools by server, as prompts tell of them."""
        self._tables, self._told = tables, told
        self._own: dict[str, ToolSession] = {}
        self.tools = {
            name_of(each.schema): each
            for name, schemas in told.items()
            for each in (_served(name, tables[name], schema) for schema in schemas)
        }

    async def call(self, tool: ServedTool, /, **arguments: Any) -> str:
        """Call a tool, in a session that is opened if there is none.  Raises ValueError, ToolServerAway."""
        name, table = tool.server, self._tables[tool.server]
        kept = self._own if table.session == "dialogue" else _shared(asyncio.get_running_loop())
        if name not in kept:
            kept[name] = await self._opened(name, table)
        try:
            return await kept[name].call(tool.tool, arguments)
        except ToolServerAway:
            await kept.pop(name).close()
            raise

    async def close(self) -> None:
        """End the dialogue's own sessions.  Idempotent."""
        while self._own:
            await self._own.popitem()[1].close()

    async def _opened(self, name: str, table: McpConfig) -> ToolSession:
        session = ToolSession(name, table)
        here = {name_of(schema): schema for schema in schemas_of(name, table, await session.open())}
        told = {name_of(schema): schema for schema in self._told[name]}
        if here != told:
            await session.close()
            raise ToolServerAway(f"mcp.{name}: its tools are not those that prompts tell of: {_difference(told, here)}")
        return session


@cache
def _shared(_loop: asyncio.AbstractEventLoop) -> dict[str, ToolSession]:
    """Sessions that all dialogues of this worker share, by server; they end with the worker."""
    return {}


def _served(name: str, table: McpConfig, schema: Mapping[str, Any]) -> ServedTool:
    return ServedTool(name, name_of(schema).removeprefix(table.prefix), schema)


def _difference(told: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    parts = (
        ("it lacks", told.keys() - here.keys()),
        ("it also has", here.keys() - told.keys()),
        ("it describes otherwise", {each for each in told.keys() & here.keys() if told[each] != here[each]}),
    )
    return "; ".join(f"{what} {', '.join(sorted(names))}" for what, names in parts if names)


# -------------------------------------------------------------------------------------------------------------- schemas


def schemas_of(name: str, table: McpConfig, tools: Sequence[mcp_types.Tool]) -> list[dict[str, Any]]:
    """JSON schemas of the tools that the policy gets, for chat templates, in the server's order.

    Raises ToolServerAway for tools that cannot be told to a model, ConfigError for one that the server does not have.
    """
    names = [tool.name for tool in tools]
    for wanted in table.tools:
        if wanted not in names:
            hint = near_hint(wanted, names)
            raise ConfigError(f"mcp.{name}.tools names {wanted!r}; legal: {', '.join(names) or 'none'}{hint}")
    if not tools:
        raise ToolServerAway(f"mcp.{name}: the server has no tools")
    if twice := next((each for each in names if names.count(each) > 1), None):
        raise ToolServerAway(f"mcp.{name}: the server lists two tools of the name {twice!r}")
    return [_schema(name, table, tool) for tool in tools if not table.tools or tool.name in table.tools]


def _schema(name: str, table: McpConfig, tool: mcp_types.Tool) -> dict[str, Any]:
    parameters = dict(tool.input_schema)
    try:
        check_json_schema(json.dumps(parameters))
    except ValueError as error:
        raise ToolServerAway(f"mcp.{name}: the arguments of its tool {tool.name!r} have {error}") from error
    told = {"name": table.prefix + tool.name, "description": tool.description or "", "parameters": parameters}
    return {"type": "function", "function": told}


async def asked_tools(tables: Mapping[str, McpConfig]) -> dict[str, list[dict[str, Any]]]:
    """JSON schemas of the tools of servers, by the servers' names, asked all at once.

    Raises ConfigError, with the key, for one that cannot be asked.
    """
    asked = await asyncio.gather(*(_asked(name, table) for name, table in tables.items()))
    return dict(zip(tables, asked, strict=True))


async def _asked(name: str, table: McpConfig) -> list[dict[str, Any]]:
    session = ToolSession(name, table)
    try:
        return schemas_of(name, table, await session.open())
    except ToolServerAway as error:
        key = f"mcp.{name}.url={table.url!r}" if table.url else f"mcp.{name}.command={list(table.command)}"
        raise ConfigError(f"{key}: {str(error).removeprefix(f'mcp.{name}: ')}") from error
    finally:
        await session.close()


def main() -> int:
    """Print {"schemas": {name: schemas}} for the tables on standard input, or {"refused": why}."""
    read = json.loads(sys.stdin.read())
    try:
        tables = {name: McpConfig.model_validate(table) for name, table in read.items()}
        said: dict[str, Any] = {"schemas": asyncio.run(asked_tools(tables))}
    except ConfigError as error:
        said = {"refused": str(error)}
    sys.stdout.write(f"\n{json.dumps(said)}\n")
    return 1 if "refused" in said else 0


if __name__ == "__main__":
    sys.exit(main())

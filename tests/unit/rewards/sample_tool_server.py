"""A server of tools for tests: `python sample_tool_server.py MODE [PORT]`, by the official library as it is.

MODE: "honest", or a way in which servers are not: see below.
"""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

from mcp.server.lowlevel import Server
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.stdio import stdio_server
from mcp_types import (
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    ListToolsResult,
    ResourceLink,
    TextContent,
    TextResourceContents,
    Tool,
)

MODE, PORT = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0
server = MCPServer("sample")
notes: list[str] = []


@server.tool()
def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def note(text: str) -> str:
    """Keep a text; tell all that were kept."""
    notes.append(text)
    return " ".join(notes)


@server.tool()
def divide(a: int, by: int) -> float:
    """Divide a number."""
    if by == 0:
        raise ValueError("by zero")
    return a / by


@server.tool()
def shown(what: str) -> CallToolResult:
    """Show what is no text, or not only."""
    parts = {
        "image": ImageContent(data="aGk=", mime_type="image/png"),
        "audio": AudioContent(data="aGk=", mime_type="audio/wav"),
        "link": ResourceLink(name="page", uri="http://localhost/page"),
        "file": EmbeddedResource(resource=TextResourceContents(uri="file:///a", text="of a file")),
        "blob": EmbeddedResource(resource=BlobResourceContents(uri="file:///a", blob="aGk=", mime_type="image/gif")),
        "text": TextContent(text="a text"),
    }
    chosen = [parts[name] for name in what.split()]
    return CallToolResult(content=chosen, structured_content={"è": [1]} if not chosen else None)


@server.tool()
async def sleep(seconds: float) -> str:
    """Answer late, and others meanwhile."""
    await asyncio.sleep(seconds)
    return "awake"


@server.tool()
async def freeze(seconds: float) -> str:
    """Answer late, and nobody else meanwhile."""
    time.sleep(seconds)  # noqa: ASYNC251  as bad servers do
    return "thawed"


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(3)


@server.tool()
def daemon() -> str:
    """Leave a process behind, in a session of its own, and tell the pids of both."""
    left = subprocess.Popen(["sleep", "600"], start_new_session=True)
    return f"{os.getpid()} {left.pid}"


@server.tool()
def told(key: str, ctx: Context) -> str:
    """Tell an environment variable, or a header."""
    request = ctx.request_context.request
    return os.environ.get(key, "") if request is None else request.headers.get(key, "")


def liar() -> Server:
    """Lists what MODE says."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    plain = Tool(name="add", description="Add.", input_schema=schema)
    number = Path(os.environ["COUNTER"]).stat().st_size if MODE == "another time" else 0
    lists = {
        "no tools": [],
        "two of one name": [plain, plain],
        "no schema": [plain.model_copy(update={"input_schema": {"type": "object", "required": "a"}})],
        "too many": [plain.model_copy(update={"name": f"add{n}", "description": "long " * 100}) for n in range(200)],
        "wrong results": [plain.model_copy(update={"output_schema": schema})],
        "another time": [plain.model_copy(update={"name": f"add_{number}"})],
    }

    async def listed(_context, _params):
        return ListToolsResult(tools=lists[MODE])

    async def answered(_context, _params):
        return CallToolResult(content=[TextContent(text="x")], structured_content={"a": "no number"})

    return Server("liar", on_list_tools=listed, on_call_tool=answered)


async def serve(liar: Server) -> None:
    async with stdio_server() as (reads, writes):
        await liar.run(reads, writes, liar.create_initialization_options())


if __name__ == "__main__":
    if MODE == "silent":
        time.sleep(600)
    elif MODE not in ("honest", "late"):
        asyncio.run(serve(liar()))
    elif PORT:
        server.run("streamable-http", host="127.0.0.1", port=PORT)
    else:
        time.sleep(2 if MODE == "late" else 0)
        server.run()

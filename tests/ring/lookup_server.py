"""A server of the demo's tool: `python lookup_server.py DOCUMENTS`, by the official library as it is."""

import json
import sys
from pathlib import Path

from mcp.server.mcpserver import MCPServer

server = MCPServer("lookup")
texts = [json.loads(line)["text"] for line in Path(sys.argv[1]).read_text().splitlines()]
known = {text.split()[0]: text for text in texts}


@server.tool()
def search(query: str) -> str:
    """Find the document about a number."""
    return known.get(query, "nothing was found")


if __name__ == "__main__":
    server.run()

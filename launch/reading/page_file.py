"""Self-contained pages for a browser: a template beside this module, filled in and written atomically."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

from rlhpc.errors import ConfigError
from rlhpc.files import write_atomically


def embedded(document: object) -> str:
    """JSON that is safe inside a script element: it cannot end the element or run code."""
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def filled_template(name: str, *, DATA: str = "", **texts: str) -> bytes:  # noqa: N803 - named as in the template
    """A template with @DATA@ put in as it is and every other @NAME@ as text.  A lone surrogate becomes its escape."""
    template = (Path(__file__).parent / name).read_text(encoding="utf-8")
    known = {key: html.escape(value) for key, value in texts.items()} | {"DATA": DATA}
    page = re.sub(r"@([A-Z]+)@", lambda match: known[match[1]], template)
    return page.encode("utf-8", "backslashreplace")


def write_whole(path: Path, page: bytes) -> None:
    """Write the page atomically.  Raises ConfigError: it cannot be written there."""
    legal = "legal: the name of a file in a directory of yours, with room for it, such as report.html"
    if path.is_dir():
        raise ConfigError(f"{path}: cannot be written: it is a directory; {legal}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, page)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}; {legal}") from error

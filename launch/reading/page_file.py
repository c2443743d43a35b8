"""Pages for a browser as files of their own: a template beside this module, filled in, and written whole."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

from rlhpc.files import write_atomically


def embedded(document: object) -> str:
    """JSON that can stand in a script element: nothing in it ends the element, and it runs nothing."""
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def filled_template(name: str, *, DATA: str = "", **texts: str) -> bytes:  # noqa: N803 - named as in the template
    """A template with @DATA@ put in as it is and every other @NAME@ as text.  A lone surrogate becomes its escape."""
    template = (Path(__file__).parent / name).read_text(encoding="utf-8")
    known = {key: html.escape(value) for key, value in texts.items()} | {"DATA": DATA}
    page = re.sub(r"@([A-Z]+)@", lambda match: known[match[1]], template)
    return page.encode("utf-8", "backslashreplace")


def write_whole(path: Path, page: bytes) -> None:
    """Whole or not at all.  Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, page)

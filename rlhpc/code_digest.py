"""Which code a process runs: processes of one run that differ in it were started from different environments.

Output: a short digest of the package's source files, the same wherever and however it is installed.
"""

from __future__ import annotations

import hashlib
from pathlib import Path


def code_digest(package: Path = Path(__file__).parent) -> str:
    """Digest of names and content of all modules.  Call it at the start: an update replaces them under a process.

    "" if they cannot be read.
    """
    whole = hashlib.sha256()
    try:
        for path in sorted(package.rglob("*.py")):
            content = path.read_bytes()
            whole.update(f"{path.relative_to(package).as_posix()} {len(content)}\n".encode() + content)
    except OSError:
        return ""
    return whole.hexdigest()[:12]

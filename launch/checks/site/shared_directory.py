"""Check the shared directory from this machine: does it exist, is it writable, which filesystem is it?

Input: a path and /proc/mounts.  Output: Findings.  Whether compute nodes see the same, `rlhpc doctor` finds out.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from launch.checks.finding import Finding

KEY = "cluster.shared_directory"
# Filesystems that several machines mount; "fuse." and a name of these counts too.
SHARED_TYPES = {
    "nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "wekafs", "panfs", "pvfs2", "orangefs", "afs",
    "cifs", "smb3", "fhgfs", "virtiofs", "9p", "ocfs2", "gfs2", "daos", "dfuse", "quobyte", "juicefs", "vast",
}  # fmt: skip


def check_directory(directory: Path) -> list[Finding]:
    """Findings about a directory, as this machine sees it."""
    value = str(directory)
    if not directory.is_dir():
        legal = "legal: a directory shared by login and compute nodes; create it, or correct the key"
        return [Finding(KEY, value, "fail", "no such directory here", legal)]
    if not os.access(directory, os.W_OK | os.X_OK):
        return [Finding(KEY, value, "fail", "not writable by you", "legal: a directory of your own or your group")]
    kind = filesystem_type(directory)
    if kind.removeprefix("fuse.") in SHARED_TYPES:
        return [Finding(KEY, value, "pass", f"on {kind}, which nodes share")]
    text = f"is on {kind}, which is usually local to one machine"
    return [Finding(KEY, value, "warn", text, "`rlhpc doctor SITE.toml` checks it on the nodes")]


def filesystem_type(path: Path, mounts: str | None = None) -> str:
    """Type of the filesystem under a path: "lustre", "nfs4", "ext4"; "?" where it is not known."""
    if mounts is None:
        table = Path("/proc/mounts")
        mounts = table.read_text(encoding="utf-8", errors="replace") if table.exists() else ""
    real, best, kind = path.resolve(), Path(), "?"
    for line in mounts.splitlines():
        words = line.split()
        if len(words) < 3:
            continue
        point = Path(re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), words[1]))
        if real.is_relative_to(point) and len(point.parts) >= len(best.parts):
            best, kind = point, words[2]
    return kind

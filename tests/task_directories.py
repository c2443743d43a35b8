"""Task directories in Harbor's form, and roots of this machine's own programs, for tests of containers."""

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rlhpc.sandbox.images import copy_programs

PROGRAMS = ("bash", "cat", "ls", "mkdir", "rm", "sleep", "setsid", "mount", "unshare", "chroot", "mknod", "ln", "yes")
REWARD_OF_ANSWER = "[[ $(cat answer 2> /dev/null) == 42 ]] && r=1 || r=0\necho $r > /logs/verifier/reward.txt\n"


@contextmanager
def reachable_directory() -> Iterator[Path]:
    """A directory that every user can reach: containers of real root are another user's."""
    base = Path(tempfile.mkdtemp(prefix="rlhpc-roots-", dir="/tmp"))
    base.chmod(0o711)
    try:
        yield base
    finally:
        shutil.rmtree(base)


def write_image(directory: Path) -> Path:
    """A root of this machine's programs."""
    copy_programs(PROGRAMS, directory)
    (directory / "etc/motd").write_text("of the image\n")
    return directory


def write_task(
    directory: Path,
    *,
    tests: str = REWARD_OF_ANSWER,
    instruction: str = "Write 42 into the file answer.\n",
    settings: str = '[environment]\ndocker_image = "programs"\nworkdir = "/app"\n',
    files: Mapping[str, str] | None = None,
) -> Path:
    """A task; files: by their paths below environment/."""
    texts = {"instruction.md": instruction, "task.toml": settings, "tests/test.sh": tests}
    texts |= {f"environment/{name}": text for name, text in (files or {}).items()}
    for name, text in texts.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    return directory

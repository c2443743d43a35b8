"""tests/slurm on one release of Slurm after the other: `python -m tests.slurm.releases [options of pytest]`.

Prints what pytest prints, and at the end a line for each release.  Ends with status 1 unless all that can be had pass.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from launch.private_slurm.packages import RELEASES, SlurmMissing, obtain

ROOT = Path(__file__).parents[2]


def run_all(words: list[str]) -> int:
    """Returns the exit status."""
    closing, has_failed = [], False
    for release in RELEASES:
        try:
            version = "{}.{:02}".format(*obtain(release=release).version)
        except SlurmMissing as error:
            closing.append(f"{release:<9} not to be had: {error}")
            continue
        status, last = run_on(release, words)
        has_failed |= status != 0
        closing.append(f"{release:<9} Slurm {version}: {last}")
    sys.stdout.write("\n".join(["", *closing, ""]))
    return int(has_failed)


def run_on(release: str, words: list[str]) -> tuple[int, str]:
    """Exit status and closing line of pytest."""
    command = [sys.executable, "-m", "pytest", "tests/slurm", "--slurm-release", release, *words]
    last = ""
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            sys.stdout.write(line)
            sys.stdout.flush()
            last = line.strip("= \n") or last
    return process.returncode, last


if __name__ == "__main__":
    sys.exit(run_all(sys.argv[1:]))

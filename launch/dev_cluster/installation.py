"""One Slurm installation on this machine: its programs, its plugins, and the environment variables that callers need.

Input: PATH or a prefix.  Writes nothing.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rlhpc.errors import RunDirectoryError

REMEDY = (
    "install Slurm's packages (Debian, Ubuntu: apt-get install --no-install-recommends slurmctld slurmd slurm-client "
    "munge), or let `rlhpc cluster up --private` unpack them in your own cache, which needs apt's lists and a network"
)
OWN_LIBRARIES = "deps"  # in a prefix that brings its C library: what its programs are linked against
DIRECTORIES = ("usr/sbin", "usr/bin", "sbin", "bin")
_PLUGINS = ("usr/lib/*/slurm-wlm", "usr/lib/*/slurm", "usr/lib64/slurm", "usr/lib/slurm", "lib/slurm", "lib64/slurm")


class SlurmMissing(RunDirectoryError):
    """Slurm is not installed, and cannot be fetched; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Installation:
    """Slurm's programs below `prefix`; None: those of the machine."""

    prefix: Path | None = None

    @property
    def directories(self) -> list[Path]:
        """Where programs are looked for."""
        if self.prefix:
            return [found for name in DIRECTORIES if (found := self.prefix / name).is_dir()]
        return [Path(entry) for entry in [*os.get_exec_path(), "/usr/sbin", "/usr/local/sbin", "/sbin"]]

    def program(self, name: str) -> str:
        """Absolute path of a program.  Raises SlurmMissing."""
        found = shutil.which(name, path=os.pathsep.join(map(str, self.directories)))
        if found is None:
            raise SlurmMissing(f"{name}: not in {self.prefix or 'PATH'}; {REMEDY}")
        return found

    @property
    def plugins(self) -> Path:
        """Directory of Slurm's plugins.  Raises SlurmMissing."""
        # Beside the programs, whose path is looked up: a site's own build lives in /opt or /usr/local.
        base = self.prefix or Path(self.program("slurmctld")).resolve().parents[1]
        for root in (base, Path("/")):
            for pattern in _PLUGINS:
                for found in sorted(root.glob(pattern)):
                    if (found / "auth_munge.so").exists():
                        return found
        raise SlurmMissing(f"no plugins of Slurm (auth_munge.so) below {base}; {REMEDY}")

    @property
    def version(self) -> tuple[int, int]:
        """(22, 5), (24, 11), …  Raises SlurmMissing: the program does not run."""
        done = subprocess.run(
            [self.program("slurmctld"), "-V"], env=self.environment({}), capture_output=True, text=True, check=False
        )
        numbers = re.search(r"(\d+)\.(\d+)", done.stdout)
        if done.returncode or not numbers:
            raise SlurmMissing(f"{self.program('slurmctld')} does not run: {(done.stderr or done.stdout).strip()}")
        return int(numbers[1]), int(numbers[2])

    @property
    def variables(self) -> dict[str, str]:
        """Entries that a prefix prepends to PATH and LD_LIBRARY_PATH."""
        if not self.prefix:
            return {}
        added = {"PATH": os.pathsep.join(map(str, self.directories))}
        # With libraries of its own its programs know where these are, and a job's programs must not find them.
        if not (self.prefix / OWN_LIBRARIES).is_dir():
            added["LD_LIBRARY_PATH"] = os.pathsep.join(map(str, [self.plugins, self.plugins.parent]))
        return added

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """`base` without variables of another Slurm, and with the programs and libraries of this one."""
        kept = {name: value for name, value in base.items() if not name.startswith(("SLURM", "SBATCH_", "SRUN_"))}
        for name, value in self.variables.items():
            kept[name] = os.pathsep.join([value, *([kept[name]] if kept.get(name) else [])])
        return kept

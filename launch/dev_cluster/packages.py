"""Where Slurm's programs come from: this machine, or Debian packages unpacked into a private prefix, without root.

Eats PATH or a prefix, makes Installation.  A prefix lies in the user's cache, one per distribution, release and
processor; it appears whole or not at all, and nothing outside it is written.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rlhpc.errors import RunDirectoryError

ROOTS = ("munge", "slurm-client", "slurmctld", "slurmd")
ACCOUNTING_ROOTS = ("mariadb-server-core", "slurm-wlm-mysql-plugin", "slurmdbd")
ACCOUNTING_PROGRAMS = ("mariadbd", "slurmdbd", "sacct", "sacctmgr")
PROGRAMS = ("munged", "slurmctld", "slurmd", "slurmstepd", "sbatch", "scancel", "scontrol", "sinfo", "squeue", "srun")
REMEDY = (
    "install Slurm's packages (Debian, Ubuntu: apt-get install --no-install-recommends slurmctld slurmd slurm-client "
    "munge), or let `rlhpc cluster up --private` unpack them in your own cache, which needs apt's lists and a network"
)
_DIRECTORIES = ("usr/sbin", "usr/bin", "sbin", "bin")
_PLUGINS = ("usr/lib/*/slurm-wlm", "usr/lib/*/slurm", "usr/lib64/slurm", "usr/lib/slurm", "lib/slurm", "lib64/slurm")
_FETCH_S = 120.0


class SlurmMissing(RunDirectoryError):
    """No Slurm here, and none to be had; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Installation:
    """Slurm's programs below `prefix`; None: those of the machine."""

    prefix: Path | None = None

    @property
    def directories(self) -> list[Path]:
        """Where programs are looked for."""
        if self.prefix:
            return [found for name in _DIRECTORIES if (found := self.prefix / name).is_dir()]
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
        """What a prefix adds to the environment: PATH and LD_LIBRARY_PATH, each to be put in front."""
        if not self.prefix:
            return {}
        libraries = [self.plugins, self.plugins.parent]
        return {
            "PATH": os.pathsep.join(map(str, self.directories)),
            "LD_LIBRARY_PATH": os.pathsep.join(map(str, libraries)),
        }

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """`base` without what another Slurm has left there, and with the programs and libraries of this one."""
        kept = {name: value for name, value in base.items() if not name.startswith(("SLURM", "SBATCH_", "SRUN_"))}
        for name, value in self.variables.items():
            kept[name] = os.pathsep.join([value, *([kept[name]] if kept.get(name) else [])])
        return kept


def installed(*, has_accounting: bool = False) -> Installation | None:
    """The machine's own Slurm, or None when a program is missing."""
    here = Installation()
    with contextlib.suppress(SlurmMissing):
        for name in (*PROGRAMS, *(ACCOUNTING_PROGRAMS if has_accounting else ())):
            here.program(name)
        _ = here.plugins
        return here
    return None


def private(cache: Path | None = None, *, has_accounting: bool = False) -> Installation:
    """The prefix in the user's cache; fetched when not there yet (4 MB, with accounting 11).  Raises SlurmMissing."""
    prefix = (cache or default_cache()) / (_release() + ("-accounting" if has_accounting else ""))
    here = Installation(prefix)
    if not (prefix / "COMPLETE").exists():
        _fetch(prefix, (*ROOTS, *(ACCOUNTING_ROOTS if has_accounting else ())))
    _ = here.version  # a system library may have gone since
    return here


def obtain(*, is_private: bool = False, has_accounting: bool = False) -> Installation:
    """The machine's Slurm, else the private one; with is_private always that.  Raises SlurmMissing."""
    here = None if is_private else installed(has_accounting=has_accounting)
    return here or private(has_accounting=has_accounting)


def default_cache() -> Path:
    """Where prefixes live: $XDG_CACHE_HOME/rlhpc/slurm."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlhpc" / "slurm"


def _release() -> str:
    facts = platform.freedesktop_os_release() if Path("/etc/os-release").exists() else {}
    return f"{facts.get('ID', 'unknown')}-{facts.get('VERSION_ID', '0')}-{platform.machine()}"


def _fetch(prefix: Path, roots: tuple[str, ...]) -> None:
    """Download and unpack beside the final place, then rename: whoever comes second uses what the first has made."""
    for tool in ("apt-get", "dpkg"):
        if shutil.which(tool) is None:
            raise SlurmMissing(f"Slurm is not installed, and {tool}, which could fetch it, is not there; {REMEDY}")
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=prefix.parent) as scratch:
        packages, tree = Path(scratch, "packages"), Path(scratch, "tree")
        packages.mkdir()
        _apt("download", *_needed(roots), directory=packages)
        for package in sorted(packages.glob("*.deb")):
            subprocess.run(["dpkg", "-x", str(package), str(tree)], check=True, capture_output=True)
        _name_programs(tree)
        (tree / "COMPLETE").touch()
        with contextlib.suppress(OSError):  # not empty: another process was quicker
            tree.rename(prefix)
    if not (prefix / "COMPLETE").exists():
        raise SlurmMissing(f"{prefix}: exists and is not complete; delete it and try again")


def _needed(roots: tuple[str, ...]) -> list[str]:
    """Slurm's own packages in any case, and those libraries that the machine lacks."""
    own = [
        line.split(":", 1)[1].strip()
        for line in _run("apt-cache", "depends", *roots).splitlines()
        if re.match(r"\s*Depends: (slurm|libslurm|libmunge)", line)
    ]
    plan = _apt("install", "--simulate", "--no-install-recommends", *roots)
    missing = re.findall(r"^Inst (\S+)", plan, re.MULTILINE)
    return sorted({*roots, *own, *(name for name in missing if name.startswith(("lib", "slurm", "munge", "mariadb")))})


def _name_programs(tree: Path) -> None:
    """Do what the packages' own scripts would: a daemon not called by its plain name leaves out GPUs, silently."""
    for directory in _DIRECTORIES:
        for found in (tree / directory).glob("*-wlm"):
            plain = found.with_name(found.name.removesuffix("-wlm"))
            if not plain.exists():
                plain.symlink_to(found.name)


def _apt(*arguments: str, directory: Path | None = None) -> str:
    settings = ("-o", "Acquire::Retries=1", "-o", "Acquire::http::Timeout=15", "-o", "Debug::NoLocking=1")
    return _run("apt-get", "-q", *settings, *arguments, directory=directory)


def _run(*command: str, directory: Path | None = None) -> str:
    environment = {**os.environ, "LC_ALL": "C"}
    try:
        done = subprocess.run(
            command, cwd=directory, env=environment, capture_output=True, text=True, check=False, timeout=_FETCH_S
        )
    except subprocess.TimeoutExpired:
        raise SlurmMissing(f"Slurm is not installed, and its packages did not come in {_FETCH_S:.0f} s") from None
    if done.returncode:
        said = [line for line in (done.stderr + done.stdout).splitlines() if line.startswith("E:")]
        raise SlurmMissing(
            f"Slurm is not installed, and apt does not deliver it ({(said or ['no reason given'])[-1]}); {REMEDY}, "
            "and where those are old or absent `apt-get update` by an administrator"
        )
    return done.stdout

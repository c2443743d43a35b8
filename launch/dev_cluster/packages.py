"""Where Slurm's programs come from: this machine, or Debian packages unpacked into a private prefix, without root.

Input: PATH, apt's lists, or the name of a Debian suite.  Output: Installation.  Prefixes are in the user's cache, one
per distribution, release and processor; each appears complete or not at all, and nothing outside it is written.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from launch.dev_cluster import releases
from launch.dev_cluster.installation import DIRECTORIES, REMEDY, Installation, SlurmMissing
from rlhpc.own_user import own_home

ROOTS = ("munge", "slurm-client", "slurmctld", "slurmd")
ACCOUNTING_ROOTS = ("mariadb-server-core", "slurm-wlm-mysql-plugin", "slurmdbd")
ACCOUNTING_PROGRAMS = ("mariadbd", "slurmdbd", "sacct", "sacctmgr")
PROGRAMS = ("munged", "slurmctld", "slurmd", "slurmstepd", "sbatch", "scancel", "scontrol", "sinfo", "squeue", "srun")
RELEASE_VARIABLE = "RLHPC_SLURM_RELEASE"  # for the tests, the demo and `cluster up` alike
_FETCH_S = 120.0


def installed(*, has_accounting: bool = False) -> Installation | None:
    """The machine's own Slurm, or None when a program is missing."""
    here = Installation()
    with contextlib.suppress(SlurmMissing):
        for name in (*PROGRAMS, *(ACCOUNTING_PROGRAMS if has_accounting else ())):
            here.program(name)
        _ = here.plugins
        return here
    return None


def private(cache: Path | None = None, *, has_accounting: bool = False, release: str | None = None) -> Installation:
    """The prefix in the user's cache; fetched if missing.  Raises SlurmMissing.

    release: another Debian suite, with its own C library (17 MB, with accounting 33); None: packages of this
    distribution (4 MB, with accounting 11).
    """
    name = f"debian-{release}-{platform.machine()}-{releases.EDITION}" if release else _own_name()
    prefix = (cache or default_cache()) / (name + ("-accounting" if has_accounting else ""))
    here = Installation(prefix)
    if not (prefix / "COMPLETE").exists():
        roots = (*ROOTS, *(ACCOUNTING_ROOTS if has_accounting else ()))
        if release:
            _make(prefix, lambda scratch, tree: releases.unpack(release, roots, scratch, tree, prefix))
        else:
            _make(prefix, lambda scratch, tree: _unpack(roots, scratch, tree))
    _ = here.version  # a system library may have gone since
    return here


def obtain(*, is_private: bool = False, has_accounting: bool = False, release: str | None = None) -> Installation:
    """The machine's Slurm, else the private one; with is_private always that.  Raises SlurmMissing.

    release: of releases.RELEASES; None: as $RLHPC_SLURM_RELEASE says.  The machine's own suite is no other one.
    """
    wanted = releases.checked(release or os.environ.get(RELEASE_VARIABLE) or None)
    if wanted and not releases.is_own(wanted):
        return private(has_accounting=has_accounting, release=wanted)
    here = None if is_private else installed(has_accounting=has_accounting)
    return here or private(has_accounting=has_accounting)


def default_cache() -> Path:
    """Directory of prefixes: $XDG_CACHE_HOME/rlhpc/slurm."""
    return Path(os.environ.get("XDG_CACHE_HOME") or own_home() / ".cache") / "rlhpc" / "slurm"


def _own_name() -> str:
    facts = platform.freedesktop_os_release() if Path("/etc/os-release").exists() else {}
    return f"{facts.get('ID', 'unknown')}-{facts.get('VERSION_ID', '0')}-{platform.machine()}"


def _make(prefix: Path, unpack: Callable[[Path, Path], None]) -> None:
    """Unpack beside the final place, then rename: the second of two processes uses the result of the first."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=prefix.parent) as scratch:
        tree = Path(scratch, "tree")
        unpack(Path(scratch), tree)
        _name_programs(tree)
        (tree / "COMPLETE").touch()
        with contextlib.suppress(OSError):  # not empty: another process was quicker
            tree.rename(prefix)
    if not (prefix / "COMPLETE").exists():
        raise SlurmMissing(f"{prefix}: exists and is not complete; delete it and try again")


def _unpack(roots: tuple[str, ...], scratch: Path, tree: Path) -> None:
    """Packages of this distribution."""
    for tool in ("apt-get", "dpkg"):
        if shutil.which(tool) is None:
            raise SlurmMissing(f"Slurm is not installed, nor is {tool}, which could fetch it; {REMEDY}")
    packages = scratch / "packages"
    packages.mkdir()
    _apt("download", *_needed(roots), directory=packages)
    for package in sorted(packages.glob("*.deb")):
        subprocess.run(["dpkg", "-x", str(package), str(tree)], check=True, capture_output=True)


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
    for directory in DIRECTORIES:
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
        raise SlurmMissing(
            f"Slurm is not installed, and its packages were not downloaded within {_FETCH_S:.0f} s"
        ) from None
    if done.returncode:
        said = [line for line in (done.stderr + done.stdout).splitlines() if line.startswith("E:")]
        raise SlurmMissing(
            f"Slurm is not installed, and apt does not deliver it ({(said or ['no reason given'])[-1]}); {REMEDY}, "
            "and where those are old or absent `apt-get update` by an administrator"
        )
    return done.stdout

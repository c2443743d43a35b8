"""Find Slurm's programs: this machine's, or Debian packages unpacked into a private prefix, without root.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhpc.base.processes import own_home
from rlhpc.protocol.errors import ConfigError, RunDirectoryError

# --------------------------------------------------------------------------------------------------------- installation
#
# One Slurm installation on this machine: its programs, its plugins, and the environment variables that callers need.
#
# Input: PATH or a prefix.  Writes nothing.

REMEDY = (
    "install Slurm's packages (Debian, Ubuntu: apt-get install --no-install-recommends slurmctld slurmd slurm-client "
    "munge), or let `rlhpc cluster up --private` unpack them in your own cache, which needs apt's lists and a network"
)
OWN_LIBRARIES = "deps"  # libraries of a prefix with its own C library
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
        """The directories in which programs are looked for."""
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
        # Beside the programs, found by PATH: a site's own build is in /opt or /usr/local.
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
        # Programs with their own libraries have the paths built in, and a job's programs must not find them.
        if not (self.prefix / OWN_LIBRARIES).is_dir():
            added["LD_LIBRARY_PATH"] = os.pathsep.join(map(str, [self.plugins, self.plugins.parent]))
        return added

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """`base` without variables of another Slurm, and with the programs and libraries of this one."""
        kept = {name: value for name, value in base.items() if not name.startswith(("SLURM", "SBATCH_", "SRUN_"))}
        for name, value in self.variables.items():
            kept[name] = os.pathsep.join([value, *([kept[name]] if kept.get(name) else [])])
        return kept


# ------------------------------------------------------------------------------------------------------------- releases
#
# Slurm of another Debian suite, in a prefix that runs on this machine, to test several Slurm releases on one machine.
#
# Input: the name of a suite.  Output: a tree of packages with their own C library and dynamic linker.  Nothing on the
# machine changes: apt works in a separate directory, as any user.  patchelf sets linker and library paths in every
# program, so that no environment variable is needed that a job's own programs would inherit.

RELEASES = {"bookworm": "22.05", "trixie": "24.11", "sid": "26.05"}  # Slurm's; that of sid moves on
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_TOOLS = {"apt-get": "apt", "dpkg": "dpkg", "patchelf": "patchelf"}  # and the packages that have them
# Of what apt would install: no interpreters, no init scripts, no documentation.
_WANTED = re.compile(r"lib|slurm|munge|mariadb|gcc-.*-base|zlib")
# Taken from another suite: the MariaDB client 3.4.10, of sid and of an update of trixie, fails on every query of
# slurmdbd, which ends at once, because slurmdbd does not announce the number of columns.
_BORROWED = dict.fromkeys(("trixie", "sid"), ("bookworm", ("libmariadb3",)))
EDITION = 2  # of the prefix's content: a cached prefix of an earlier edition is not used
_RELEASE_FETCH_S = 300.0
_ELF = b"\x7fELF"


def checked(suite: str | None) -> str | None:
    """Return the suite.  Raises ConfigError: no such suite."""
    if suite is not None and suite not in RELEASES:
        legal = ", ".join(f"{name} (Slurm {version})" for name, version in RELEASES.items())
        raise ConfigError(f"release {suite!r}: legal: {legal}")
    return suite


def is_own(suite: str) -> bool:
    """True if this machine runs that suite of Debian."""
    return _facts().get("ID") == "debian" and _facts().get("VERSION_CODENAME") == suite


def unpack(suite: str, roots: tuple[str, ...], scratch: Path, tree: Path, place: Path) -> None:
    """Fetch packages and dependencies, with the C library, into `tree`, whose programs run once it is at `place`.

    roots: names of packages.  scratch: an empty directory.  Raises SlurmMissing in one line.
    """
    _require(suite)
    lender, borrowed = _BORROWED.get(suite, ("", ()))
    apt = _Apt(suite, scratch / suite)
    plan = apt.run("install", "--simulate", "--no-install-recommends", *roots)
    names = [name for name in re.findall(r"^Inst (\S+)", plan, re.MULTILINE) if _WANTED.match(name)]
    packages = apt.download([name for name in names if name not in borrowed])
    if wanted := [name for name in names if name in borrowed]:
        packages += _Apt(lender, scratch / lender).download(wanted)
    for package in packages:
        subprocess.run(["dpkg", "-x", str(package), str(tree)], check=True, capture_output=True)
    gather_libraries(tree)
    _settle(tree, place)


def _require(suite: str) -> None:
    """Raise SlurmMissing if this machine cannot unpack another suite."""
    what = f"Slurm {RELEASES.get(suite, '')} of Debian {suite}".replace("  ", " ")
    if _facts().get("ID") != "debian":
        raise SlurmMissing(f"{what}: taken from the package sources of a Debian machine; this is {_name()}")
    lacking = sorted(package for tool, package in _TOOLS.items() if shutil.which(tool) is None)
    lacking += [] if KEYRING.exists() else ["debian-archive-keyring"]
    if lacking:
        raise SlurmMissing(f"{what}: lacks {', '.join(lacking)}; `apt-get install {' '.join(lacking)}` as root")


class _Apt:
    """apt with lists, cache and status of its own, for one suite and without installed packages."""

    def __init__(self, suite: str, scratch: Path) -> None:
        """scratch: its own directory.  Fetches the suite's lists.  Raises SlurmMissing."""
        self._suite, self._packages = suite, scratch / "packages"
        for name in ("lists/partial", "cache/archives/partial", "packages"):
            (scratch / name).mkdir(parents=True)
        (scratch / "status").touch()
        entry = f"deb [signed-by={KEYRING}] {_archive()} {suite} main\n"
        (scratch / "sources.list").write_text(entry, encoding="utf-8")
        self._config = scratch / "apt.conf"
        lines = (
            f'Dir::Etc::SourceList "{scratch}/sources.list";',
            'Dir::Etc::SourceParts "-";',
            f'Dir::State::Lists "{scratch}/lists";',
            f'Dir::State::status "{scratch}/status";',
            f'Dir::Cache "{scratch}/cache";',
            *('APT::Sandbox::User "root";', 'APT::Update::Error-Mode "any";', 'Debug::NoLocking "1";'),
            *('Acquire::Retries "1";', 'Acquire::http::Timeout "15";', 'Acquire::Languages "none";'),
        )
        self._config.write_text("\n".join(lines) + "\n", encoding="utf-8")
        self.run("update")

    def download(self, names: Sequence[str]) -> list[Path]:
        """Fetch packages; returns their files.  Raises SlurmMissing."""
        self.run("download", *names, directory=self._packages)
        return sorted(self._packages.glob("*.deb"))

    def run(self, *arguments: str, directory: Path | None = None) -> str:
        """apt-get with its settings.  Raises SlurmMissing with the last error."""
        remedy = "it takes a network and the archive that this machine's own packages come from"
        return _said(
            ("apt-get", "-q", *arguments),
            (f"Debian {self._suite}", remedy),
            directory,
            _RELEASE_FETCH_S,
            APT_CONFIG=str(self._config),
        )


def _said(
    command: Sequence[str], words: tuple[str, str], directory: Path | None, limit_s: float, **variables: str
) -> str:
    """Output of a command of apt.  words: the wanted package, and the remedy if apt does not have it.

    Raises SlurmMissing.
    """
    (wanted, remedy), environment = words, {**os.environ, "LC_ALL": "C", **variables}
    try:
        done = subprocess.run(
            command, cwd=directory, env=environment, capture_output=True, text=True, check=False, timeout=limit_s
        )
    except subprocess.TimeoutExpired:
        raise SlurmMissing(f"{wanted}: its packages were not downloaded within {limit_s:.0f} s") from None
    if done.returncode:
        said = [line for line in (done.stderr + done.stdout).splitlines() if line.startswith("E:")]
        reason = (said or ["no reason given"])[0].removeprefix("E:").strip()
        raise SlurmMissing(f"{wanted}: apt does not deliver it ({reason}); {remedy}")
    return done.stdout


def _archive() -> str:
    """The archive of this machine's own packages, which also has other suites.  Raises SlurmMissing."""
    fields = "$(RELEASE) $(COMPONENT) $(REPO_URI) $(ORIGIN)"  # the last exists once lists have been fetched
    wanted = ("apt-get", "indextargets", "--format", fields, "Created-By: Packages")
    done = subprocess.run(wanted, capture_output=True, text=True, check=False)
    own = _facts().get("VERSION_CODENAME", "")
    suites = (own, "stable", "testing", "unstable")
    found = [line.split() for line in done.stdout.splitlines()]
    named = [words for words in found if len(words) >= 3 and words[0] in suites and words[1] == "main"]
    # Others publish for a suite too; Debian's own come first.
    archives = [words[2] for words in sorted(named, key=lambda words: words[3:] != ["Debian"])]
    if not archives:
        raise SlurmMissing(f"apt's sources (/etc/apt) name no archive of Debian {own}, which would have other suites")
    return archives[0]


def gather_libraries(tree: Path) -> None:
    """Put all shared libraries into one directory, also those of suites whose /lib is not yet /usr/lib."""
    libraries = tree / OWN_LIBRARIES
    libraries.mkdir()
    for pattern in ("usr/lib/*-linux-gnu*", "lib/*-linux-gnu*", "usr/lib64", "lib64"):
        for directory in sorted(tree.glob(pattern)):
            for found in sorted(directory.glob("*.so*")):
                is_second_name = found.is_symlink() and found.readlink().parent != Path()  # it lies elsewhere
                if not is_second_name and not found.is_dir():
                    found.replace(libraries / found.name)


def _settle(tree: Path, place: Path) -> None:
    """Set the paths of linker and libraries in every program and plugin of `tree`."""
    linkers = sorted((tree / OWN_LIBRARIES).glob("ld-linux*.so.*"))
    if not linkers:
        raise SlurmMissing("the packages contain no dynamic linker (ld-linux)")
    plugins = [found for found in sorted(tree.glob("usr/lib/*/slurm*")) if found.is_dir()]
    search = os.pathsep.join(map(str, [place / OWN_LIBRARIES, *(place / each.relative_to(tree) for each in plugins)]))
    for program in _programs(tree):
        _patch(program, search, "--set-interpreter", str(place / OWN_LIBRARIES / linkers[0].name))
    for plugin in (file for directory in plugins for file in sorted(directory.glob("*.so*"))):
        if not plugin.is_symlink():
            _patch(plugin, search)


def _programs(tree: Path) -> Iterator[Path]:
    for name in ("usr/sbin", "usr/bin", "sbin", "bin"):
        for found in sorted((tree / name).glob("*")):
            if found.is_file() and not found.is_symlink() and _asks_for_a_linker(found):
                yield found


def _asks_for_a_linker(path: Path) -> bool:
    with path.open("rb") as file:
        if file.read(4) != _ELF:
            return False
    return not subprocess.run(["patchelf", "--print-interpreter", str(path)], capture_output=True).returncode


def _patch(path: Path, search: str, *more: str) -> None:
    # RPATH, not RUNPATH: it precedes LD_LIBRARY_PATH, which a user may have set.
    words = ["patchelf", *more, "--force-rpath", "--set-rpath", search, str(path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SlurmMissing(f"patchelf fails on {path.name}: {done.stderr.strip()}")


def _facts() -> dict[str, str]:
    return platform.freedesktop_os_release() if Path("/etc/os-release").exists() else {}


def _name() -> str:
    return _facts().get("PRETTY_NAME", "an unknown system")


# ------------------------------------------------------------------------------------------------------------- packages

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
    """The prefix in the user's cache ($XDG_CACHE_HOME/rlhpc/slurm); fetched if missing.  Raises SlurmMissing.

    release: another Debian suite, with its own C library (17 MB, with accounting 33); None: packages of this
    distribution (4 MB, with accounting 11).
    """
    own = f"{_facts().get('ID', 'unknown')}-{_facts().get('VERSION_ID', '0')}"
    name = f"debian-{release}-{platform.machine()}-{EDITION}" if release else f"{own}-{platform.machine()}"
    cache = cache or Path(os.environ.get("XDG_CACHE_HOME") or own_home() / ".cache") / "rlhpc" / "slurm"
    prefix = cache / (name + ("-accounting" if has_accounting else ""))
    here = Installation(prefix)
    if not (prefix / "COMPLETE").exists():
        roots = (*ROOTS, *(ACCOUNTING_ROOTS if has_accounting else ()))
        if release:
            _make(prefix, lambda scratch, tree: unpack(release, roots, scratch, tree, prefix))
        else:
            _make(prefix, lambda scratch, tree: _unpack(roots, scratch, tree))
    _ = here.version  # fails if a system library was removed since
    return here


def obtain(*, is_private: bool = False, has_accounting: bool = False, release: str | None = None) -> Installation:
    """The machine's Slurm, else the private one; with is_private always that.  Raises SlurmMissing.

    release: of RELEASES; None: $RLHPC_SLURM_RELEASE.  The machine's own suite needs no prefix of its own.
    """
    wanted = checked(release or os.environ.get(RELEASE_VARIABLE) or None)
    if wanted and not is_own(wanted):
        return private(has_accounting=has_accounting, release=wanted)
    here = None if is_private else installed(has_accounting=has_accounting)
    return here or private(has_accounting=has_accounting)


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
    """Slurm's own packages, and libraries that the machine lacks."""
    own = [
        line.split(":", 1)[1].strip()
        for line in _run("apt-cache", "depends", *roots).splitlines()
        if re.match(r"\s*Depends: (slurm|libslurm|libmunge)", line)
    ]
    plan = _apt("install", "--simulate", "--no-install-recommends", *roots)
    missing = re.findall(r"^Inst (\S+)", plan, re.MULTILINE)
    return sorted({*roots, *own, *(name for name in missing if name.startswith(("lib", "slurm", "munge", "mariadb")))})


def _name_programs(tree: Path) -> None:
    """Link programs by their plain names, as the packages' scripts would: else a daemon silently ignores GPUs."""
    for directory in DIRECTORIES:
        for found in (tree / directory).glob("*-wlm"):
            plain = found.with_name(found.name.removesuffix("-wlm"))
            if not plain.exists():
                plain.symlink_to(found.name)


def _apt(*arguments: str, directory: Path | None = None) -> str:
    settings = ("-o", "Acquire::Retries=1", "-o", "Acquire::http::Timeout=15", "-o", "Debug::NoLocking=1")
    return _run("apt-get", "-q", *settings, *arguments, directory=directory)


def _run(*command: str, directory: Path | None = None) -> str:
    remedy = f"{REMEDY}, and where those are old or absent `apt-get update` by an administrator"
    return _said(command, ("Slurm is not installed", remedy), directory, _FETCH_S)

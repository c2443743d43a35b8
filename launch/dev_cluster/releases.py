"""Slurm of another Debian suite, in a prefix that runs on this machine, to test several Slurm releases on one machine.

Input: the name of a suite.  Output: a tree of packages with their own C library and dynamic linker.  Nothing on the
machine changes: apt works in a separate directory, as any user.  patchelf sets linker and library paths in every
program, so that no environment variable is needed that a job's own programs would inherit.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from launch.dev_cluster.installation import OWN_LIBRARIES, SlurmMissing
from rlhpc.errors import ConfigError

RELEASES = {"bookworm": "22.05", "trixie": "24.11", "sid": "26.05"}  # Slurm's; that of sid moves on
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_TOOLS = {"apt-get": "apt", "dpkg": "dpkg", "patchelf": "patchelf"}  # and the packages that have them
# Of what apt would install: no interpreters, no init scripts, no documentation.
_WANTED = re.compile(r"lib|slurm|munge|mariadb|gcc-.*-base|zlib")
# Taken from another suite.  The MariaDB client 3.4.10, that of sid and by an update of trixie, allows no column in an
# answer unless told how many, which slurmdbd does not do: every query fails, and the daemon ends at once.
_BORROWED = dict.fromkeys(("trixie", "sid"), ("bookworm", ("libmariadb3",)))
EDITION = 2  # of what is unpacked: a prefix of an earlier one in a cache is not used
_FETCH_S = 300.0
_ELF = b"\x7fELF"


def checked(suite: str | None) -> str | None:
    """The same.  Raises ConfigError: no such suite."""
    if suite is not None and suite not in RELEASES:
        legal = ", ".join(f"{name} (Slurm {version})" for name, version in RELEASES.items())
        raise ConfigError(f"release {suite!r}: legal: {legal}")
    return suite


def is_own(suite: str) -> bool:
    """True if this machine runs that suite of Debian."""
    return _facts().get("ID") == "debian" and _facts().get("VERSION_CODENAME") == suite


def unpack(suite: str, roots: tuple[str, ...], scratch: Path, tree: Path, place: Path) -> None:
    """Fetch packages and what they need, C library included, into `tree`; its programs run once that is at `place`.

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
    """Raises SlurmMissing: this machine cannot unpack another suite."""
    what = f"Slurm {RELEASES.get(suite, '')} of Debian {suite}".replace("  ", " ")
    if _facts().get("ID") != "debian":
        raise SlurmMissing(f"{what}: taken from the package sources of a Debian machine; this is {_name()}")
    lacking = sorted(package for tool, package in _TOOLS.items() if shutil.which(tool) is None)
    lacking += [] if KEYRING.exists() else ["debian-archive-keyring"]
    if lacking:
        raise SlurmMissing(f"{what}: lacks {', '.join(lacking)}; `apt-get install {' '.join(lacking)}` as root")


class _Apt:
    """apt with lists, cache and status of its own, which knows one suite and no installed package."""

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
        environment = {**os.environ, "LC_ALL": "C", "APT_CONFIG": str(self._config)}
        try:
            done = subprocess.run(
                ["apt-get", "-q", *arguments], cwd=directory, env=environment, capture_output=True, text=True,
                check=False, timeout=_FETCH_S,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise SlurmMissing(
                f"Debian {self._suite}: its packages were not downloaded within {_FETCH_S:.0f} s"
            ) from None
        if done.returncode:
            said = [line for line in (done.stderr + done.stdout).splitlines() if line.startswith("E:")]
            reason = (said or ["no reason given"])[0].removeprefix("E:").strip()
            raise SlurmMissing(
                f"Debian {self._suite}: apt does not deliver it ({reason}); it takes a network and the archive that "
                "this machine's own packages come from"
            )
        return done.stdout


def _archive() -> str:
    """Where this machine's own packages come from: there other suites lie too.  Raises SlurmMissing."""
    fields = "$(RELEASE) $(COMPONENT) $(REPO_URI) $(ORIGIN)"  # the last is there once lists have been fetched
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
    """Tell every program and plugin of `tree` where its linker and its libraries will be."""
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
    # RPATH, not RUNPATH: it goes before LD_LIBRARY_PATH, which a user's environment may hold.
    words = ["patchelf", *more, "--force-rpath", "--set-rpath", search, str(path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SlurmMissing(f"patchelf fails on {path.name}: {done.stderr.strip()}")


def _facts() -> dict[str, str]:
    return platform.freedesktop_os_release() if Path("/etc/os-release").exists() else {}


def _name() -> str:
    return _facts().get("PRETTY_NAME", "an unknown system")

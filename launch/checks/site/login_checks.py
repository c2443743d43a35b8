"""Checks on the login node: Slurm's version and clock, the shared directory, free space, Python, image, modules.

Input: JobPlan, ClusterFacts and a Config.  Output: Findings.  Writes only below the given directory and removes it all.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path

from launch.checks.finding import Finding, Verdict
from launch.checks.site.shared_directory import SHARED_TYPES, filesystem_type
from launch.plan.jobs import JobPlan
from launch.plan.site_file import PrologueConfig, Site
from launch.slurm.cluster_facts import ClusterFacts
from rlhpc.errors import ConfigError

OLDEST, TRIED = (20, 11), ((22, 5), (24, 11), (26, 5))  # made for all from the first on; tests/slurm runs on the others
HET_DEFECT = (25, 11)
SKEW_WARN_S, SKEW_FAIL_S = 2.0, 60.0
_RENAMES = 200
# launch/supervisor/role_task.py sets each that nobody has set, to a directory of the job on the node.
CACHES = (
    "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT", "FLASHINFER_WORKSPACE_BASE", "CUDA_CACHE_PATH",
)  # fmt: skip


def check_version(plan: JobPlan, facts: ClusterFacts) -> Iterator[Finding]:
    """Slurm's release, and what is known to be wrong with it."""
    key, version = "slurm: version", facts.version
    if version < OLDEST:
        text = "too old: --het-group and --gpus-per-task work as needed since 20.11"
        yield Finding(key, facts.release, "fail", text, "a newer Slurm")
    elif version in TRIED:
        yield Finding(key, facts.release, "pass", "has been tried")
    elif TRIED[0] < version < TRIED[-1]:
        text = f"should work, but rlhpc is tested only on {', '.join(map(_release, TRIED))}"
        yield Finding(key, facts.release, "pass", text)
    else:
        text = f"not tested; rlhpc supports {_release(TRIED[0])} to {_release(TRIED[-1])}"
        yield Finding(key, facts.release, "warn", text, "tell us how it went")
    if version >= HET_DEFECT and plan.placement == "hetjob":
        text = "a requeue cancels a heterogeneous job whose component 0 has a step; ours has none, so it works"
        yield Finding("slurm: requeue", "", "pass", text)


def _release(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]:02}"


def check_clock(facts: ClusterFacts, asked: float) -> Finding:
    """This node against slurmctld, which tells whole seconds.  asked: time.time() when the facts were asked for."""
    key, remedy = "clock: slurmctld", "the site should run an NTP client"
    try:
        there = datetime.fromisoformat(facts.clock_text).timestamp()
    except ValueError:
        return Finding(key, "", "warn", "slurmctld does not report its time", "")
    skew = max(0.0, abs(there + 0.5 - asked) - 0.5)
    verdict = skew_verdict(skew)
    return Finding(key, "", verdict, f"differs by {skew:.0f} s, to a second", "" if verdict == "pass" else remedy)


def skew_verdict(skew_s: float) -> Verdict:
    """Of a difference between clocks: what compares times of files wants a few seconds, munge five minutes."""
    return "fail" if skew_s > SKEW_FAIL_S else "warn" if skew_s > SKEW_WARN_S else "pass"


def check_renames(directory: Path) -> Iterator[Finding]:
    """A file that is replaced again and again is seen whole by who reads it meanwhile, and is in the listing.

    directory: an empty one on the shared filesystem.
    """
    path, stop, torn = directory / "renamed", threading.Event(), [0]
    text = {side: (side * 4096).encode() for side in "ab"}
    path.write_bytes(text["a"])

    def read() -> None:
        while not stop.is_set():
            try:
                torn[0] += path.read_bytes() not in text.values()
            except FileNotFoundError:
                torn[0] += 1

    reader = threading.Thread(target=read)
    reader.start()
    try:
        each_ms = _replace_often(path, list(text.values()))
    finally:  # Ctrl-C too: the process would wait for the thread forever
        stop.set()
        reader.join()
    key, value = "shared: rename", ""
    if torn[0]:
        text_torn = f"{torn[0]} reads saw no file, or a partial one, while it was replaced"
        yield Finding(key, value, "fail", text_torn, "legal: a filesystem with atomic rename (Lustre, GPFS, NFS)")
    else:
        yield Finding(key, value, "pass", f"atomic; {each_ms:.2g} ms for a file written and renamed")
    names = os.listdir(directory)  # noqa: PTH208 - names are enough
    is_listed = "renamed" in names and "partial" not in names
    path.unlink()
    said = "as written" if is_listed else f"differs from what was written: {', '.join(names)}"
    yield Finding("shared: listing", value, "pass" if is_listed else "fail", said)


def _replace_often(path: Path, contents: list[bytes]) -> float:
    """Milliseconds of each."""
    began = time.monotonic()
    for index in range(_RENAMES):
        partial = path.with_name("partial")
        partial.write_bytes(contents[index % 2])
        partial.replace(path)
    return 1000 * (time.monotonic() - began) / _RENAMES


def check_operations(directory: Path) -> Iterator[Finding]:
    """Modes, hard links and fsync of a directory, which some filesystems lack: SMB, FUSE, NFS with its own ACLs.

    directory: an empty one on the shared filesystem.
    """
    file, key = directory / "made", "shared: modes"
    file.touch(0o600)
    try:
        file.chmod(0o700)
        refused = ""
    except OSError as error:
        refused = error.strerror or str(error)
    found = stat.S_IMODE(file.stat().st_mode)
    if found & 0o077:
        text = f"a private file has mode {found:04o}: secrets/ would be open to others"
        legal = "legal: a filesystem, or a mount, with modes (of SMB: file_mode=0600,dir_mode=0700)"
        yield Finding(key, "", "fail", text, legal)
    elif refused:
        yield Finding(key, "", "warn", f"{refused}: files keep the mode that they are made with")
    else:
        yield Finding(key, "", "pass", "as asked for")
    yield _tried("shared: hard links", lambda: (directory / "second").hardlink_to(file), "files are copied instead")
    yield _tried("shared: fsync", lambda: _fsync(directory), "a power cut may lose the newest files' names")
    for path in list(directory.iterdir()):
        path.unlink()


def _fsync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _tried(key: str, action: Callable[[], object], otherwise: str) -> Finding:
    try:
        action()
    except OSError as error:
        return Finding(key, "", "warn", f"{error.strerror}: {otherwise}", "")
    return Finding(key, "", "pass", "works")


def check_caches(plan: JobPlan, shell: Mapping[str, str] = os.environ, mounts: str | None = None) -> Iterator[Finding]:
    """Compiled kernels lie on the node in a directory of the job, unless site file or shell say something else.

    shell: the environment that a job inherits.  mounts: in the place of /proc/mounts.
    """
    findings = []
    for name in CACHES:
        is_ours = name in plan.prologue.environment
        given = plan.prologue.environment[name] if is_ours else shell.get(name)
        trouble = None if given is None else _cache_trouble(given, mounts)
        if trouble is not None:
            key, where = (f"prologue.environment.{name}", "there") if is_ours else (f"shell: {name}", "of your shell")
            remedy = f"remove it {where}: a job has its own on each node"
            findings.append(Finding(key, str(given), "warn", trouble, remedy))
    yield from findings or [Finding("caches: kernels", "", "pass", "on the nodes, in a directory of each job")]


def _cache_trouble(given: str, mounts: str | None) -> str | None:
    """What is wrong with a place for caches, as far as this node can tell."""
    if re.match(r"\$\{?TMPDIR\b(?!:?-)", given):
        return "Slurm does not set TMPDIR: without it this is a directory at the root"
    path = Path(os.path.expandvars(given))
    while path.is_absolute() and not path.exists():
        path = path.parent
    kind = filesystem_type(path, mounts) if path.is_absolute() else ""
    if kind.removeprefix("fuse.") in SHARED_TYPES:
        return f"{given} is on {kind}: compiled kernels become stale there, and fill quotas"
    return None


def check_software(prologue: PrologueConfig) -> Iterator[Finding]:
    """What the prologue names, as far as this node sees it.  It is not run here: it is made for compute nodes."""
    if prologue.modules or prologue.module_purge:
        yield _modules(prologue)
    yield from _check_paths(prologue)
    if prologue.image is not None and shutil.which("apptainer") is None:
        text = "no such command here"
        yield Finding("apptainer", "", "warn", text, "compute nodes may have it; else load it by prologue.modules")
    if not prologue.modules:
        yield _python(prologue)


def _check_paths(prologue: PrologueConfig) -> Iterator[Finding]:
    for key, path, what in _named_paths(prologue):
        if not path.exists():
            remedy = "legal: a path that nodes see too" + (
                ", as `conda info --base` prints it" if key == "conda" else ""
            )
            yield Finding(f"prologue.{key}", str(path), "fail", f"{what} is not here", remedy)
        elif not os.access(path, os.R_OK):
            yield Finding(f"prologue.{key}", str(path), "fail", f"{what} is not readable", "ask its owner")
        else:
            yield Finding(f"prologue.{key}", str(path), "pass", f"{what} is here")


def software_not_here(site: Site) -> list[str]:
    """Return lines about what the prologue names and this machine lacks, if it is one of the cluster's.

    Not refused: a node may have what the login node has not.
    """
    return [f"prologue    warning: {found.line}" for found in _missing_software(site)]


def refuse_missing_software(site: Site) -> list[str]:
    """Return such lines about what nodes may have; raises ConfigError for what lies in the directory that all share."""
    if site.cluster is not None:
        shared = site.cluster.shared_directory
        lost = [found.line for found in _missing_software(site) if Path(found.value).is_relative_to(shared)]
        if lost:
            raise ConfigError("\n".join(lost))
    return software_not_here(site)


def _missing_software(site: Site) -> list[Finding]:
    if site.cluster is None or not site.cluster.shared_directory.is_dir():
        return []
    return [found for found in _check_paths(site.prologue) if found.verdict == "fail"]


def _named_paths(prologue: PrologueConfig) -> Iterator[tuple[str, Path, str]]:
    if prologue.venv is not None:
        yield "venv", prologue.venv / "bin" / "activate", "the environment"
    if prologue.conda is not None:
        yield "conda", prologue.conda / "etc" / "profile.d" / "conda.sh", "conda"
        if "/" in (environment := prologue.conda_environment or ""):
            yield "conda_environment", Path(environment), "the environment"
    if prologue.image is not None:
        yield "image", prologue.image, "the image"
    elif Path(prologue.python).is_absolute():
        yield "python", Path(prologue.python), "the interpreter"
    if prologue.code is not None:
        yield "code", prologue.code / "launch" / "__init__.py", "the checkout"


def _python(prologue: PrologueConfig) -> Finding:
    """Version of the supervisor's interpreter: 3.9 at least."""
    prefixes = [prologue.venv / "bin"] if prologue.venv else [prologue.conda / "bin"] if prologue.conda else []
    path = os.pathsep.join([*map(str, prefixes), os.environ.get("PATH", "")])
    program = shutil.which(prologue.python, path=path)
    key = "prologue.python"
    if program is None:
        return Finding(key, prologue.python, "warn", "no such program here", "compute nodes may have it; see below")
    found = output_of(program, "-c", "import sys; print('%d.%d.%d' % sys.version_info[:3])")
    parts = tuple(int(part) for part in found.split(".")) if found.replace(".", "").isdigit() else (0,)
    if parts < (3, 9):
        text = f"is Python {found or 'of an unknown version'}; the supervisor needs 3.9"
        return Finding(key, prologue.python, "fail", text, "legal: 3.9 or newer; rlhpc itself needs 3.11")
    return Finding(key, prologue.python, "pass", f"{program} is Python {found}")


def _modules(prologue: PrologueConfig) -> Finding:
    """`module` is a function of the shell; a login shell has it where the site has modules at all."""
    names = " ".join(prologue.modules)
    asks = 'command -v module >/dev/null && module -t avail "$@" 2>&1'
    said = output_of("bash", "-lc", asks, "bash", *prologue.modules)
    missing = [name for name in prologue.modules if name.split("/")[0] not in said]
    if not said:
        return Finding("prologue.modules", names, "warn", "no module command here", "compute nodes may have it")
    if missing:
        text = f"not listed by `module avail`: {', '.join(missing)}"
        return Finding("prologue.modules", names, "warn", text, "other nodes may have others; see below")
    return Finding("prologue.modules", names, "pass", "listed by `module avail`")


def output_of(*words: str) -> str:
    """What a program prints; "" if it cannot be started or takes longer than 30 s."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    except (subprocess.TimeoutExpired, OSError):
        return ""
    return done.stdout.strip()

"""Checks on the login node: Slurm's version and clock, the shared directory, free space, Python, image, modules.

Input: JobPlan, ClusterFacts and a Config.  Output: Findings.  Writes only below the given directory and removes it all.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

from launch.checks.memory_plan import ELEMENT_BYTES, GIB
from launch.common.text import aligned, three_digits, wrapped
from launch.plan.jobs import JobPlan
from launch.plan.site_file import PrologueConfig, Site
from launch.slurm.cluster_facts import ClusterFacts
from rlhpc.config.rules import Config
from rlhpc.config.tables_services import runs_programs
from rlhpc.models.shape import ModelShape
from rlhpc.protocol.errors import ConfigError, SandboxError
from rlhpc.rewards.code_place import check_sandbox, described_languages

# -------------------------------------------------------------------------------------------------------------- finding
#
# The result of a check of a site: key and value of the site file, a verdict, what is legal or what to do.

Verdict = Literal["pass", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    key: str  # of the site file, if it has one
    value: str
    verdict: Verdict
    text: str
    remedy: str = ""  # what to do; of a failure "legal: …"

    @property
    def component(self) -> str:
        """Section of the site file that the key belongs to."""
        return self.key.rpartition(".")[0] or self.key

    @property
    def line(self) -> str:
        """The whole finding, for an error message."""
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"{self.key}={self.value!r}: {self.text}{remedy}"


def row(check: str, verdict: Verdict, text: str, remedy: str = "") -> Finding:
    """Finding without a key of the site file; a pass needs no remedy."""
    return Finding(check, "", verdict, text, remedy if verdict != "pass" else "")


# -------------------------------------------------------------------------------------------------------- sandbox check
#
# Isolation of a policy's programs on this node: its layers, and whether they are enough.
#
# Input: Config.  Output: Findings, none if no task runs programs.  Reward services run on other nodes, which are likely
# to be set up alike; each checks again when it starts.


def check_sandboxes(config: Config) -> Iterator[Finding]:
    """Start the sandbox of a code task, and end it."""
    key, required = "sandbox.require", config.sandbox.require
    try:
        layers = check_sandbox(config.sandbox, is_needed=runs_programs(config, config.judging_tasks))
    except SandboxError as error:
        remedy = "see docs/rewards.md; nodes of reward services may differ from this one"
        yield Finding(key, required, "warn", str(error), remedy)
        return
    if layers is not None:
        languages = described_languages(config.sandbox)
        yield Finding(key, required, "pass", f"here: {layers.described()}; {languages}")


# ----------------------------------------------------------------------------------------------------- shared directory
#
# Check the shared directory from this machine: does it exist, is it writable, which filesystem is it?
#
# Input: a path and /proc/mounts.  Output: Findings.  The probes check whether compute nodes see the same.

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


# ---------------------------------------------------------------------------------------------------------------- table
#
# Findings as a table for people: status, check, result, and what to do.
#
# Input: Findings.  Output: text and an exit status.

_CHECK, _LEAST = 30, 40  # columns of the check; the least for result and remedy together


def render(findings: Sequence[Finding], width: int = 120) -> str:
    """Table with a row per finding, wrapped to `width` columns."""
    check = min(_CHECK, max((len(finding.key) for finding in findings), default=5))
    room = max(_LEAST, width - len("fail  ") - check - 4)
    widths = (4, check, room - room * 2 // 5, room * 2 // 5)
    rows = wrapped(("", "check", "result", "what to do"), widths)
    for finding in findings:
        rows += wrapped((finding.verdict, finding.key, _text(finding), finding.remedy), widths)
    return "\n".join([*aligned(rows), summary(findings)])


def summary(findings: Sequence[Finding]) -> str:
    """Number of findings by verdict."""
    counts = {name: sum(finding.verdict == name for finding in findings) for name in ("pass", "warn", "fail")}
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def exit_status(findings: Sequence[Finding]) -> int:
    """1 if anything fails; a warning does not."""
    return int(any(finding.verdict == "fail" for finding in findings))


def _text(finding: Finding) -> str:
    return f"{finding.value}: {finding.text}" if finding.value else finding.text


# --------------------------------------------------------------------------------------------------------- login checks

OLDEST, TRIED = (20, 11), ((22, 5), (24, 11), (26, 5))  # made for all from the first on; tests/slurm runs on the others
HET_DEFECT = (25, 11)
SKEW_WARN_S, SKEW_FAIL_S = 2.0, 60.0
_RENAMES = 200
# launch/supervisor/role_task.py sets those that are not set, to a directory of the job on the node.
CACHES = (
    "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT", "FLASHINFER_WORKSPACE_BASE", "CUDA_CACHE_PATH",
)  # fmt: skip


def check_version(plan: JobPlan, facts: ClusterFacts) -> Iterator[Finding]:
    """Slurm's release, and its known faults."""
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
        yield row("slurm: requeue", "pass", text)


def _release(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]:02}"


def check_clock(facts: ClusterFacts, asked: float) -> Finding:
    """Compare this node's clock with slurmctld's, which has whole seconds.  asked: time.time() of the query."""
    key, remedy = "clock: slurmctld", "the site should run an NTP client"
    try:
        there = datetime.fromisoformat(facts.clock_text).timestamp()
    except ValueError:
        return row(key, "warn", "slurmctld does not report its time", "")
    skew = max(0.0, abs(there + 0.5 - asked) - 0.5)
    verdict = skew_verdict(skew)
    return row(key, verdict, f"differs by {skew:.0f} s, to a second", remedy)


def skew_verdict(skew_s: float) -> Verdict:
    """Verdict on clock skew: comparisons of file times tolerate a few seconds, munge five minutes."""
    return "fail" if skew_s > SKEW_FAIL_S else "warn" if skew_s > SKEW_WARN_S else "pass"


def check_renames(directory: Path) -> Iterator[Finding]:
    """Check that a file that is replaced repeatedly is always read whole, and listed.

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
    """Replace a file repeatedly; return the milliseconds of each time."""
    began = time.monotonic()
    for index in range(_RENAMES):
        partial = path.with_name("partial")
        partial.write_bytes(contents[index % 2])
        partial.replace(path)
    return 1000 * (time.monotonic() - began) / _RENAMES


def check_operations(directory: Path) -> Iterator[Finding]:
    """Check modes, hard links and fsync of a directory, which some filesystems lack: SMB, FUSE, NFS with its own ACLs.

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
        yield row(key, "fail", text, legal)
    elif refused:
        yield row(key, "warn", f"{refused}: files keep the mode that they are made with")
    else:
        yield row(key, "pass", "as asked for")
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
        return row(key, "warn", f"{error.strerror}: {otherwise}", "")
    return row(key, "pass", "works")


def check_caches(plan: JobPlan, shell: Mapping[str, str] = os.environ, mounts: str | None = None) -> Iterator[Finding]:
    """Check caches of compiled kernels: they are in the job's directory on the node, unless site or shell set them.

    shell: the environment that a job inherits.  mounts: instead of /proc/mounts.
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
    yield from findings or [row("caches: kernels", "pass", "on the nodes, in a directory of each job")]


def _cache_trouble(given: str, mounts: str | None) -> str | None:
    """Fault of a directory for caches, as far as this node can tell."""
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
    """Check the prologue's modules and paths on this node.  It is not run here: it is made for compute nodes."""
    if prologue.modules or prologue.module_purge:
        yield _modules(prologue)
    yield from _check_paths(prologue)
    if prologue.image is not None and shutil.which("apptainer") is None:
        text = "no such command here"
        yield row("apptainer", "warn", text, "compute nodes may have it; else load it by prologue.modules")
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
    """Return lines about software of the prologue that this machine lacks, if it belongs to the cluster.

    Not refused: compute nodes may have software that the login node lacks.
    """
    return [f"prologue    warning: {found.line}" for found in _missing_software(site)]


def refuse_missing_software(site: Site) -> list[str]:
    """Lines about software that nodes may have; raises ConfigError for missing files in the shared directory."""
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
    """Check modules in a login shell, which has the shell function `module` if the site has modules."""
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
    """Output of a program; "" if it cannot be started or takes longer than 30 s."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    except (subprocess.TimeoutExpired, OSError):
        return ""
    return done.stdout.strip()


# ---------------------------------------------------------------------------------------------------------------- space
#
# Free space on the shared filesystem, quotas, and a forecast of a run's files.
#
# Input: a directory, the output of `lfs quota` and `quota`, and a Config.  Output: Findings.  The forecast is an upper
# bound: 12 bytes per parameter plus the weights for every checkpoint kept and the one being written, plus rollouts; a
# critic, taken to be of the policy's size, doubles the 12, and an average of the weights adds 4.

STATE_BYTES = 12  # a parameter: master and two moments in float32
AVERAGE_BYTES = 4
TOKEN_BYTES = 12  # of a rollout in a segment before compression: token, log-probability, version
TEACHER_BYTES, LIKELY_BYTES = 4, 8  # its log-probability under a teacher; each of the teacher's most likely tokens
INODES = 2_000  # files of a run: checkpoints of some ranks, segments, logs, metrics; rounded up
_TIGHT = 2.0  # times the forecast


@dataclass(frozen=True, slots=True)
class Room:
    """Free space; None: no limit, or not known."""

    source: str
    free_bytes: int | None
    free_inodes: int | None


@dataclass(frozen=True, slots=True)
class Forecast:
    """Upper bound of a run's files."""

    checkpoint_bytes: int | None  # None: the model's size is not known
    rollout_bytes: int

    @property
    def total(self) -> int:
        """Bytes of both."""
        return (self.checkpoint_bytes or 0) + self.rollout_bytes


def forecast(config: Config) -> Forecast:
    """Forecast from the run file, and the model's config.json if it can be read."""
    tokens = config.generation.max_tokens
    rollouts = config.run.num_steps * config.admission.groups_per_step * config.largest_group
    parameters = _num_parameters(config.model.path / "config.json")
    states = STATE_BYTES * (2 if config.has_critic else 1) + (AVERAGE_BYTES if config.trainer.ema_decay != "off" else 0)
    each = None if parameters is None else parameters * (states + ELEMENT_BYTES[config.model.dtype])
    checkpoints = None if each is None else each * (config.checkpoint.keep + 1)
    return Forecast(checkpoints, rollouts * tokens * _token_bytes(config))


def _token_bytes(config: Config) -> int:
    algorithm = config.algorithm
    likely = algorithm.teacher_top_k if algorithm.forward_kl_coefficient > 0 else 0
    return TOKEN_BYTES + (TEACHER_BYTES + LIKELY_BYTES * likely if algorithm.asks_teachers else 0)


def _num_parameters(file: Path) -> int | None:
    try:
        shape = ModelShape.of(json.loads(file.read_bytes()))
    except (OSError, ValueError, KeyError):
        return None
    return None if shape is None else shape.num_parameters


def check_space(directory: Path, wanted: Forecast | None) -> list[Finding]:
    """Check free space and quotas against the forecast; None: without a forecast."""
    rooms = [_of_filesystem(directory), *_quotas(directory)]
    findings = [finding for room in rooms for finding in judge(room, wanted)]
    if wanted is not None and wanted.checkpoint_bytes is None:
        text = "the size of checkpoints is unknown: model.path/config.json is missing, or of another family"
        findings.append(row("room: forecast", "warn", text, "set model.path to the model's directory"))
    return findings


def judge(room: Room, wanted: Forecast | None) -> Iterator[Finding]:
    """Findings on one source of room."""
    need = wanted.total if wanted else 0
    if room.free_bytes is not None:
        text = f"{_size(room.free_bytes)} left" + (f"; the run writes up to {_size(need)}" if wanted else "")
        verdict = _verdict(room.free_bytes, need, GIB)
        yield row(f"room: {room.source}", verdict, text, "delete, or ask for more space")
    if room.free_inodes is not None:
        text = f"{room.free_inodes} files left; a run creates up to {INODES}"
        verdict = _verdict(room.free_inodes, INODES, 0)
        remedy = "put large environments (100,000 files) into an image"
        yield row(f"files: {room.source}", verdict, text, remedy)


def _verdict(left: int, need: int, least: int) -> Verdict:
    return "fail" if left < max(need, 1) else "warn" if left < max(_TIGHT * need, least) else "pass"


def _size(num_bytes: int) -> str:
    return f"{three_digits(num_bytes / GIB)} GiB"


def _of_filesystem(directory: Path) -> Room:
    status = os.statvfs(directory)
    has_inodes = status.f_files > 0  # btrfs and others count none
    return Room("filesystem", status.f_bavail * status.f_frsize, status.f_favail if has_inodes else None)


def _quotas(directory: Path) -> Iterator[Room]:
    if shutil.which("lfs") is not None and filesystem_type(directory) == "lustre":
        for option, name, owner in (("-u", "user", os.getuid()), ("-g", "group", directory.stat().st_gid)):
            yield from parse_lfs(output_of("lfs", "quota", "-q", option, str(owner), str(directory)), f"{name}'s quota")
    elif shutil.which("quota") is not None:
        yield from parse_quota(output_of("quota", "-w", "-p", "-f", str(directory)), "quota")


def parse_lfs(text: str, source: str) -> Iterator[Room]:
    """`lfs quota -q`: path kbytes quota limit grace files quota limit grace; 0 is no limit, "*" means exceeded."""
    words = text.replace("*", "").split()
    if len(words) >= 9 and all(words[index].isdigit() for index in (1, 2, 3, 5, 6, 7)):
        yield from _room(source, [int(words[index]) for index in (1, 2, 3)], [int(words[index]) for index in (5, 6, 7)])


def parse_quota(text: str, source: str) -> Iterator[Room]:
    """`quota -w -p`: filesystem blocks quota limit grace files quota limit grace, blocks of 1 KiB, after two lines."""
    for line in text.splitlines():
        words = line.replace("*", "").split()
        if len(words) == 9 and all(word.isdigit() for word in words[1:]):
            numbers = [int(word) for word in words[1:]]
            yield from _room(source, numbers[0:3], numbers[4:7])


def _room(source: str, kib: list[int], files: list[int]) -> Iterator[Room]:
    """Room by used, soft and hard limit of each; the soft one holds after its grace period."""
    free = [None if not (soft or hard) else max(0, (soft or hard) - used) for used, soft, hard in (kib, files)]
    if free != [None, None]:
        yield Room(source, None if free[0] is None else free[0] * 1024, free[1])

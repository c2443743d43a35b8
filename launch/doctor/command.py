"""The command `rlhpc doctor SITE.toml [RUN.toml] [--quick] [--report FILE]`.

Input: parsed options.  Output: the printed table and the exit status: 1 if any check fails.  Without a run file a
minimal run is assumed, as small as the site allows: one trainer rank, one generator.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.common.text import file_and_settings, say_or_lose
from launch.doctor import probe
from launch.doctor import site as login_checks
from launch.doctor.probe_jobs import Reports, probe_nodes
from launch.doctor.site import (
    KEY,
    Finding,
    check_directory,
    check_sandboxes,
    check_space,
    exit_status,
    forecast,
    render,
)
from launch.doctor.slurm_plan import find_unfit
from launch.doctor.verdicts import judge
from launch.plan.jobs import JobPlan, plan_jobs
from launch.plan.script import shared_layout
from launch.plan.site_file import Site, load_site
from launch.slurm.cluster_facts import ask_cluster, slurm_versions
from launch.slurm.commands import SlurmError
from rlhpc.base.files import write_atomically
from rlhpc.base.processes import own_home, own_name
from rlhpc.config.file import load_config
from rlhpc.config.rules import Config
from rlhpc.protocol.errors import ConfigError

# ------------------------------------------------------------------------------------------------------------ redaction
#
# Redact private data in a text: secrets, user names, home directories.  Pure except `Private.here`.
#
# Input: text and Private.  Output: text.  Guarantees: no value of a secret variable, nothing that looks like a key or a
# token, no user name and no home directory is left.  Names of nodes, partitions and accounts are not removed.

REMOVED = "(removed)"
_WORDS = (
    r"token(?!iz)|secret|passw|passphrase|credential|cookie|auth(?!ors?\b)|api[_-]?key|access[_-]?key|_key|signature"
)
_SECRET_NAME = rf"[\w.-]*(?:{_WORDS})[\w.-]*"
_SECRET = re.compile(_SECRET_NAME, re.IGNORECASE)
_VALUE = r"(?P<value>\"[^\"\n]*\"|'[^'\n]*'|\[[^\]\n]*\]|[^\s,;}\]]+)"
# name = value, name: value, "name": "value", --name value
_ASSIGNED = re.compile(
    rf"(?P<name>(?<![\w.-]){_SECRET_NAME}(?:[\"']?\s*[=:]\s*|\s+(?=[\"']))|--{_SECRET_NAME}\s+){_VALUE}", re.IGNORECASE
)
_COUNTED = re.compile(r"tokens|token_(?:budget|count|ids?)\b", re.IGNORECASE)  # tokens of text, not secrets
_NUMBER = re.compile(r"-?[\d_.]+|\[.*|null|none|true|false", re.IGNORECASE)
_BEARER = re.compile(r"\b(bearer|basic)\s+[\w.~+/=-]{8,}", re.IGNORECASE)
_SHAPES = re.compile(
    r"\b(?:hf_|sk-|gh[pousr]_|github_pat_|glpat-|xox[abpr]-|AKIA|ya29\.|pypi-)[\w-]{8,}"  # as their issuers begin them
    r"|\beyJ[\w-]{8,}\.[\w-]+\.[\w-]+"  # JSON web tokens
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
    r"|\b[0-9a-fA-F]{32,}\b|(?<![\w/+.-])(?=[\w+]*\d)(?=[\w+]*[A-Z])[A-Za-z0-9+]{32,}={0,2}",  # hexadecimal, base64
    re.DOTALL,
)
_USER_INFO = re.compile(r"(?<=//)[^\s/]+@")
_EMAIL = re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
_ANY_HOME = re.compile(r"(?<![\w.~])/(?:home|users|Users|u)/[^\s/:\"',;]+")


@dataclass(frozen=True, slots=True)
class Private:
    """Names, homes and secrets of the user who runs the command."""

    names: tuple[str, ...]
    homes: tuple[str, ...]
    values: tuple[str, ...]  # of variables with secret names

    @classmethod
    def here(cls, environment: Mapping[str, str] = os.environ) -> Private:
        """Return the names, homes and secrets of the user who runs this process."""
        names = {own_name(), *(environment.get(name, "") for name in ("USER", "LOGNAME", "SLURM_JOB_USER"))}
        homes = {str(own_home({})), str(own_home(environment))}
        homes |= {str(Path(home).resolve()) for home in homes if home}
        return cls(tuple(names), tuple(homes), tuple(v for k, v in environment.items() if is_secret_name(k)))


def is_secret_name(name: str) -> bool:
    """True if a variable of this name holds a secret."""
    return _SECRET.fullmatch(name) is not None


def redact(text: str, private: Private) -> str:
    """The text without secrets, names and homes; ~ stands for the home directory, USER for the name."""
    for value in sorted(filter(lambda value: len(value) >= 4, private.values), key=len, reverse=True):
        text = text.replace(value, REMOVED)
    text = _SHAPES.sub(REMOVED, text)
    text = _BEARER.sub(rf"\1 {REMOVED}", text)
    text = _ASSIGNED.sub(_without_value, text)
    text = _EMAIL.sub(REMOVED, _USER_INFO.sub(f"{REMOVED}@", text))
    for home in sorted(filter(lambda home: len(home) > 1, private.homes), key=len, reverse=True):
        text = re.sub(rf"{re.escape(home.rstrip('/'))}(?![\w-])", "~", text)
    text = _ANY_HOME.sub("/HOME", text)
    for name in sorted(filter(None, private.names), key=len, reverse=True):
        # In paths too (/scratch/ada/runs), but not within another word.
        text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", "USER", text)
    return text


def _without_value(found: re.Match[str]) -> str:
    is_setting = _COUNTED.search(found["name"]) is not None and _NUMBER.fullmatch(found["value"]) is not None
    return found[0] if is_setting else f"{found['name']}{REMOVED}"


# ---------------------------------------------------------------------------------------------------------- report file
#
# The file of `rlhpc doctor … --report FILE`: the information that others need to diagnose a site.
#
# Input: findings, the probes' reports, site file and run file.  Output: text without secrets, to be
# reviewed and sent.  Guarantees: only the user can read the file (mode 600); it is written completely or not at all.

WIDTH = 140
HEAD = """\
rlhpc doctor --report
Read it over before you send it: secrets, your name and home directory are taken out, names of nodes, partitions and
accounts are not.
"""
# Environment variables of Slurm, CUDA, NCCL, vLLM and Python; no others are reported.
_TOLD = (
    "SLURM", "SBATCH_", "SQUEUE_", "CUDA", "NVIDIA_", "NCCL_", "GLOO_", "UCX_", "FI_", "VLLM_", "TORCH", "PYTORCH",
    "TRITON_", "HF_", "TRANSFORMERS_", "OMP_", "MKL_", "NUMBA_", "DS_", "RLHPC_", "PYTHON", "LD_", "PATH", "TMPDIR",
    "VIRTUAL_ENV", "CONDA_PREFIX", "LOADEDMODULES", "MODULEPATH", "CC", "XDG_CACHE_HOME",
)  # fmt: skip
_ASKED = (
    ("nvidia-smi", "--query-gpu=name,memory.total,driver_version,compute_cap", "--format=csv"),
    ("nvidia-smi", "topo", "-m"),
    ("ldd", "--version"),
)


def write_report(
    path: Path,
    findings: Sequence[Finding],
    reports: Reports | None,
    files: Sequence[Path],
    error: str = "",
    environment: Mapping[str, str] = os.environ,
) -> None:
    """Write the report.  files: site file and run file.  error: why the checks ended early.

    Raises ConfigError if it cannot be written.
    """
    text = redact(report_text(findings, reports, files, error, environment), Private.here(environment))
    try:
        write_atomically(path, text.encode(), mode=0o600)
    except OSError as trouble:
        raise ConfigError(
            f"--report {path}: cannot be written ({trouble.strerror}); legal: a file in a directory of yours"
        ) from None


def report_text(
    findings: Sequence[Finding],
    reports: Reports | None,
    files: Sequence[Path],
    error: str,
    environment: Mapping[str, str],
) -> str:
    """All sections, not redacted: with secrets and names."""
    sections = [("what was found", error or render(findings, WIDTH))]
    sections.append(("this machine", _machine()))
    sections += slurm_versions()
    sections += [(" ".join(command), said) for command in _ASKED if (said := _said(*command))]
    told = sorted(name for name in environment if name.startswith(_TOLD))
    rows = [f"{name}={REMOVED if is_secret_name(name) else environment[name]}" for name in told]
    sections.append(("environment here", "\n".join(rows)))
    for path in files:
        sections.append(
            (path.name, path.read_text(encoding="utf-8", errors="replace") if path.is_file() else "not there")
        )
    if reports is not None:
        sections += [(f"node of {name}", _json(ready)) for name, ready in sorted(reports.ready.items())]
        sections += [(f"network of {name}", _json(found)) for name, found in sorted(reports.results.items())]
        sections.append(("jobs without an answer", _json({"missing": reports.missing, "failed": reports.failed})))
    return "\n".join([HEAD, *(f"==== {title}\n{text.rstrip()}\n" for title, text in sections)])


def _machine() -> str:
    versions = {name: version for name in probe.PACKAGES if (version := probe.version_of(name))}
    driver, kernel, libc = probe.driver() or "none", platform.release(), " ".join(platform.libc_ver())
    own = probe.version_of("rlhpc") or "not installed: run from a checkout"
    rows = {"rlhpc": own, "python": platform.python_version(), "kernel": kernel, "libc": libc}
    rows |= {"machine": platform.machine(), "torch is for CUDA": probe.torch_cuda() or "none", "driver": driver}
    return "\n".join(
        f"{name}: {value}" for name, value in (rows | versions | {"compiler": _json(probe.compiler())}).items()
    )


def _json(document: object) -> str:
    return json.dumps(document, indent=1, sort_keys=True)


def _said(*words: str) -> str:
    """Output of a command, with errors; "" if there is none."""
    if shutil.which(words[0]) is None:
        return ""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False, errors="replace")
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return done.stdout + done.stderr


# -------------------------------------------------------------------------------------------------------------- command


def doctor(options: argparse.Namespace) -> int:
    """Check and print; returns the exit status.

    Raises ConfigError as `rlhpc plan` does: a site without a valid plan cannot be checked; the report includes it.
    """
    run_file, overrides = file_and_settings(options.words, "run file, and overrides (key=value)")
    if overrides and run_file is None:
        raise ConfigError(f"{overrides[0]!r}: an override needs a run file, and none is given")
    report, files = options.report, [options.site_file, *([run_file] if run_file is not None else [])]
    try:
        findings, reports = _look(options, run_file, overrides)
    except ConfigError as error:
        if report is not None:
            write_report(report, (), None, files, error=str(error))
            say_or_lose(_sent(report))
        raise
    print(render(findings, shutil.get_terminal_size((140, 24)).columns))
    if report is not None:
        write_report(report, findings, reports, files)
        print(_sent(report))
    return exit_status(findings)


def _look(
    options: argparse.Namespace, run_file: Path | None, overrides: Sequence[str]
) -> tuple[list[Finding], Reports | None]:
    """All requested checks, and the reports of the nodes."""
    site = load_site(options.site_file)
    config = load_config(run_file, overrides) if run_file is not None else None
    plan = plan_of(site, config)
    findings = look_from_here(plan, config)
    is_broken = any(finding.verdict == "fail" and finding.key in (KEY, "slurm") for finding in findings)
    if options.quick or is_broken:
        return findings, None
    timeout_s = options.timeout_s
    say_or_lose(f"submitting {len(plan.components)} jobs of a few seconds; waiting at most {timeout_s:.0f} s")
    reports = probe_nodes(plan, timeout_s)
    return [*findings, *judge(reports, plan, config, timeout_s)], reports


def _sent(report: Path) -> str:
    return f"report: {report} (review it before you send it: it contains names of nodes, partitions and accounts)"


def plan_of(site: Site, config: Config | None) -> JobPlan:
    """The run's plan, or that of a minimal run.  Raises ConfigError."""
    made_up = config or _made_up(site)
    return plan_jobs(made_up, site, shared_layout(made_up, site))


def look_from_here(plan: JobPlan, config: Config | None) -> list[Finding]:
    """All checks that need no job."""
    shared = plan.cluster.shared_directory
    findings = check_directory(shared)
    if findings[0].verdict != "fail":
        with tempfile.TemporaryDirectory(prefix=".rlhpc-doctor-", dir=shared) as scratch:
            findings += login_checks.check_renames(Path(scratch))
            findings += login_checks.check_operations(Path(scratch))
        findings += check_space(shared, forecast(config) if config else None)
    findings += [*check_sandboxes(config)] if config else []
    findings += [*login_checks.check_caches(plan), *login_checks.check_software(plan.prologue)]
    return [*_ask_slurm(plan), *findings]


def _ask_slurm(plan: JobPlan) -> list[Finding]:
    asked = time.time()
    try:
        facts = ask_cluster()
        findings = [*login_checks.check_version(plan, facts), login_checks.check_clock(facts, asked)]
        return [*findings, *find_unfit(plan, facts)]
    except SlurmError as error:
        return [Finding("slurm", "", "fail", str(error), "run the command where sbatch works")]


def _made_up(site: Site) -> Config:
    """A minimal run of one rank and one replica; its model and data are never read."""
    if site.cluster is None:
        raise ConfigError("cluster: missing in the site file; jobs need at least cluster.shared_directory")
    on_gpu = site.trainer.gpus_per_node is not None
    return Config.model_validate(
        {
            "run": {"name": "doctor", "directory": str(site.cluster.shared_directory / "rlhpc-doctor"), "num_steps": 1},
            "model": {"path": "model"},
            "data": {"path": "data.jsonl", "task": "integer_arithmetic"},
            "generation": {
                "max_prompt_tokens": 8,
                "max_completion_tokens": 8,
                "num_replicas": site.generation.nodes or 1,
            },
            "admission": {"groups_per_step": 1, "group_size": 2},
            "rewards": {"num_replicas": (site.rewards.nodes or 1) if site.rewards else 1},
            "trainer": {
                "num_ranks": site.trainer.nodes or 1,
                "token_budget": 16,
                "device": "cuda" if on_gpu else "cpu",
                "backend": "reference",
            },
            "transport": {"kind": "tcp"},
        }
    )

"""The file of `rlhpc doctor … --report FILE`: the information that others need to diagnose a site.

Input: findings, the probes' reports, site file and run file.  Output: text without secrets (redaction.py), to be
reviewed and sent.  Guarantees: only the user can read the file (mode 600); it is written completely or not at all.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from launch.checks.finding import Finding
from launch.checks.nodes import probe
from launch.checks.nodes.probe_jobs import Reports
from launch.commands.doctor.redaction import REMOVED, Private, is_secret_name, redact
from launch.commands.doctor.table import render
from launch.slurm.cluster_facts import slurm_versions
from rlhpc.errors import ConfigError

WIDTH = 140
HEAD = """\
rlhpc doctor --report
Read it over before you send it: secrets, your name and home directory are taken out, names of nodes, partitions and
accounts are not.
"""
# What of the environment decides how Slurm, CUDA, NCCL, vLLM and Python behave; nothing else is told.
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
    """Write it.  files: site file and run file.  error: why the checks ended early.

    Raises ConfigError if there is no place for it.
    """
    text = redact(report_text(findings, reports, files, error, environment), Private.here(environment))
    partial = path.with_name(path.name + ".partial")
    try:
        partial.unlink(missing_ok=True)
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
        partial.replace(path)
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
    """All sections, as they are: secrets and names still in."""
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
    """Output of a command, errors too; "" where there is none."""
    if shutil.which(words[0]) is None:
        return ""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False, errors="replace")
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return done.stdout + done.stderr

"""The command `rlhpc doctor SITE.toml [RUN.toml] [--quick] [--report FILE]`.

Input: parsed options.  Output: the printed table and the exit status: 1 if any check fails.  Without a run file a
minimal run is assumed, as small as the site allows: one trainer rank, one generator.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from launch.checks.finding import Finding
from launch.checks.nodes.probe_jobs import Reports, probe_nodes
from launch.checks.nodes.verdicts import judge
from launch.checks.site import login_checks
from launch.checks.site.sandbox_check import check_sandboxes
from launch.checks.site.shared_directory import KEY, check_directory
from launch.checks.site.slurm_check import find_unfit
from launch.checks.site.space import check_space, forecast
from launch.commands.doctor.report_file import write_report
from launch.commands.doctor.table import exit_status, render
from launch.common.standard_output import say_or_lose
from launch.plan.jobs import JobPlan, plan_jobs
from launch.plan.report import shared_layout
from launch.plan.site_file import Site, load_site
from launch.slurm.cluster_facts import ask_cluster
from launch.slurm.commands import SlurmError
from rlhpc.config import Config
from rlhpc.config_file import load_config
from rlhpc.errors import ConfigError

TIMEOUT_S = 300.0


def doctor(options: Any) -> int:
    """Check and print.  options: site_file, and where given run_file, overrides, quick, timeout_s, report.

    Raises ConfigError as `rlhpc plan` does: a site that makes no plan cannot be looked at; a report tells of it too.
    """
    report, run_file = getattr(options, "report", None), getattr(options, "run_file", None)
    files = [options.site_file, *([run_file] if run_file is not None else [])]
    try:
        findings, reports = _look(options, run_file)
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


def _look(options: Any, run_file: Path | None) -> tuple[list[Finding], Reports | None]:
    """All requested checks, and the reports of the nodes."""
    site = load_site(options.site_file)
    config = load_config(run_file, getattr(options, "overrides", ())) if run_file is not None else None
    plan = plan_of(site, config)
    findings = look_from_here(plan, config)
    is_broken = any(finding.verdict == "fail" and finding.key in (KEY, "slurm") for finding in findings)
    if getattr(options, "quick", False) or is_broken:
        return findings, None
    timeout_s = float(getattr(options, "timeout_s", None) or TIMEOUT_S)
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
    """A run of one rank and one replica; its model and data are never read."""
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

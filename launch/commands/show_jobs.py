"""`rlhpc plan`, and `rlhpc submit --dry-run`: the jobs of a run, and their scripts.

Input: run file and site file.  Output: text.  Asks Slurm nothing.
"""

from __future__ import annotations

from launch.checks.site.login_checks import software_not_here
from launch.commands.evaluate.job import EvaluationJob
from launch.plan.report import plan_report
from launch.plan.site_file import Site
from rlhpc.config import Config


def jobs_in_words(config: Config, site: Site) -> str:
    """What the prologue names and is not here, the plan, and every script under its name.  Raises ConfigError."""
    lines = [*software_not_here(site), plan_report(config, site)]
    if config.evaluation:
        lines.append(f"\n----- evaluation.sbatch\n{EvaluationJob.following(config, site).script.rstrip()}")
    return "\n".join(lines)

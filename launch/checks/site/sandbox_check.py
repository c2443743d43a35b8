"""How programs of a policy would be isolated on this node: by which layers, and whether that is enough.

Input: Config.  Output: Findings, none where no task runs programs.  Reward services run on other nodes, which are
likely to be set up alike; each asks again when it starts.
"""

from __future__ import annotations

from collections.abc import Iterator

from launch.checks.finding import Finding
from rlhpc.config import Config
from rlhpc.config_sandbox import runs_programs
from rlhpc.errors import SandboxError
from rlhpc.rewards.code_place import check_sandbox, described_languages


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

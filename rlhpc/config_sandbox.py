"""[sandbox]: how programs that a policy wrote are run (docs/rewards.md).  Loads without torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from rlhpc.config_sections import Positive, PositiveFloat, Section

if TYPE_CHECKING:
    from rlhpc.config import Config

CODE_TASKS = ("code_functions", "code_stdin")
_PYTHON = "python"  # the tool


class SandboxConfig(Section):
    """[sandbox]: how tasks run the code of a completion."""

    require: Literal["strong", "basic", "none"] = "strong"
    """A node that isolates programs less than this is refused: "strong" is namespaces and seccomp, "basic" Landlock and
    seccomp, "none" limits only."""
    python: str = ""
    """Interpreter of programs, 3.9 or later; default: the run's own, with its packages."""
    cpu_s: PositiveFloat = 4.0
    """Processor time of one test; more is a wrong answer."""
    wall_s: PositiveFloat = 8.0
    """All tests of a completion together, on the clock; more is a wrong answer.  Less than rewards.timeout_s."""
    memory_bytes: Positive = 1 << 30
    """Address space of a program."""
    readable_paths: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """More directories that programs may read, beside the system's and the interpreter's."""


def runs_programs(config: Config, tasks: Sequence[str] | None = None) -> bool:
    """Whether the reward service runs what a policy wrote; tasks: that it judges, None for those of datasets."""
    judged = config.all_tasks if tasks is None else tasks
    return _PYTHON in config.environment.tools or any(is_code(config, task) for task in judged)


def is_code(config: Config, task: str) -> bool:
    """Whether a task, or a part of it, runs the code of a completion."""
    return any(part in CODE_TASKS for part in config.parts_of(task))


def sandbox_ends_before_its_verifier(config: Config) -> None:
    """Otherwise a slow program is a verifier error and not a wrong answer."""
    for task in config.all_tasks:
        has_tool = _PYTHON in config.environment.tools and any(
            dataset.environment and task in dataset.all_tasks for dataset in config.data
        )
        limit_s = config.rewards.timeout_of(task)
        if (has_tool or is_code(config, task)) and config.sandbox.wall_s >= limit_s:
            key = "task_timeout_s" if task in config.rewards.task_timeout_s else "timeout_s"
            raise ValueError(
                f"sandbox.wall_s={config.sandbox.wall_s:g} is not below rewards.{key}={limit_s:g}: a slow program "
                f"would count as a failed verifier; legal: less than rewards.{key}"
            )

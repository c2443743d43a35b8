"""[sandbox]: how programs that a policy wrote are run (docs/rewards.md).  Loads without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from rlhpc.config_sections import Positive, PositiveFloat, Section

if TYPE_CHECKING:
    from rlhpc.config import Config

CODE_TASKS = ("code_functions", "code_stdin")


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


def runs_programs(config: Config) -> bool:
    """Whether the reward service runs what a policy wrote."""
    has_tool = "python" in config.environment.tools
    return has_tool or any(dataset.task in CODE_TASKS for dataset in config.data)


def sandbox_ends_before_its_verifier(config: Config) -> None:
    """Otherwise a slow program is a verifier error and not a wrong answer."""
    is_code = runs_programs(config)
    if is_code and config.sandbox.wall_s >= config.rewards.timeout_s:
        raise ValueError(
            f"sandbox.wall_s={config.sandbox.wall_s:g} is not below rewards.timeout_s={config.rewards.timeout_s:g}: a "
            "slow program would count as a failed verifier; legal: less than rewards.timeout_s"
        )

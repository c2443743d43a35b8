"""[sandbox]: how programs that a policy wrote are run (docs/rewards.md).  Loads without torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from rlhpc.config_sections import Duration, NamedPaths, NamedProgram, Positive, Section

if TYPE_CHECKING:
    from rlhpc.config import Config

Language = Literal["python", "cpp"]
CODE_TASKS = ("code_functions", "code_stdin")
_STDIN_TASK = "code_stdin"  # which knows more languages than Python
_PYTHON = "python"  # the tool


class SandboxConfig(Section):
    """[sandbox]: how tasks run the code of a completion."""

    require: Literal["strong", "basic", "none"] = "strong"
    """Weakest isolation accepted on a node: "strong" is namespaces and seccomp, "basic" Landlock and seccomp, "none"
    limits only."""
    languages: Annotated[tuple[Language, ...], Field(strict=False, min_length=1)] = ("python",)
    """Languages that code_stdin runs; the tag of the fenced block says which, a block in any other is wrong. "cpp"
    needs a compiler on nodes of reward services, and require = "strong"."""
    python: NamedProgram = ""
    """Interpreter that runs programs, 3.9 or later; default: the run's own, with its packages."""
    cpp_compiler: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """C++ compiler and its options, ["g++-12", "-O2", "-std=c++20"]; default: g++, else clang++, with -O2
    -std=c++17."""
    compile_s: Duration = 15.0
    """CPU time of the compiler; its wall time, up to twice that, comes on top of wall_s; more is a wrong answer."""
    compile_memory_bytes: Positive = 2 << 30
    """Address space of the compiler."""
    cpu_s: Duration = 4.0
    """CPU time of one test; more is a wrong answer."""
    wall_s: Duration = 8.0
    """Wall time of all tests of a completion together; more is a wrong answer. Less than rewards.timeout_s."""
    memory_bytes: Positive = 1 << 30
    """Address space of a program."""
    readable_paths: NamedPaths = ()
    """Further directories that programs may read, besides the system's and the interpreter's."""

    @property
    def compiles(self) -> bool:
        """Whether it runs what has to be compiled first."""
        return "cpp" in self.languages

    @property
    def longest_s(self) -> float:
        """On the clock, of one completion."""
        return self.wall_s + (2 * self.compile_s if self.compiles else 0.0)


def runs_programs(config: Config, tasks: Sequence[str] | None = None) -> bool:
    """Whether the reward service runs what a policy wrote; tasks: that it judges, None for those of datasets."""
    judged = config.data_tasks if tasks is None else tasks
    return _PYTHON in config.environment.tools or any(is_code(config, task) for task in judged)


def is_code(config: Config, task: str) -> bool:
    """Whether a task, or a part of it, runs the code of a completion."""
    return any(part in CODE_TASKS for part in config.parts_of(task))


def sandbox_ends_before_its_verifier(config: Config) -> None:
    """Otherwise a slow program is a verifier error and not a wrong answer."""
    for task in config.data_tasks:
        has_tool = _PYTHON in config.environment.tools and any(
            dataset.environment and task in dataset.all_tasks for dataset in config.data
        )
        limit_s = config.rewards.timeout_of(task)
        longest_s = config.sandbox.longest_s if is_code(config, task) else config.sandbox.wall_s
        if (has_tool or is_code(config, task)) and longest_s >= limit_s:
            key = "task_timeout_s" if task in config.rewards.task_timeout_s else "timeout_s"
            compiler = " with twice sandbox.compile_s" if longest_s > config.sandbox.wall_s else ""
            raise ValueError(
                f"sandbox.wall_s={config.sandbox.wall_s:g}{compiler} is not below rewards.{key}={limit_s:g}: a slow "
                f"program would count as a failed verifier; legal: less than rewards.{key}"
            )


def languages_are_run(config: Config) -> None:
    """Python is what all tasks know; a compiler is for one of them, and needs a file system of the program's own."""
    sandbox = config.sandbox
    if sandbox.compiles and _STDIN_TASK not in config.judging_tasks:
        raise ValueError(
            f"sandbox.languages={list(sandbox.languages)}: only data.task={_STDIN_TASK!r} runs C++, and the tasks of "
            f"this run are {', '.join(config.judging_tasks)}; legal: leave 'cpp' out"
        )
    if sandbox.compiles and sandbox.require != "strong":
        raise ValueError(
            f"sandbox.languages={list(sandbox.languages)} with sandbox.require={sandbox.require!r}: a binary needs a "
            'file system of its own; legal: require = "strong"'
        )
    if not sandbox.compiles:
        for key in ("cpp_compiler", "compile_s", "compile_memory_bytes"):
            if (value := getattr(sandbox, key)) != SandboxConfig.model_fields[key].default:
                raise ValueError(
                    f"sandbox.{key}={value!r} without 'cpp' in sandbox.languages has no effect; legal: leave it out"
                )
    elif "python" not in sandbox.languages:
        others = [task for task in config.judging_tasks if task != _STDIN_TASK and task in CODE_TASKS]
        if others:
            raise ValueError(
                f"sandbox.languages={list(sandbox.languages)} with data.task={others[0]!r}, which runs Python; legal: "
                "'python' among them"
            )

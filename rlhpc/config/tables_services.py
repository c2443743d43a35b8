"""[sandbox]: how programs that a policy wrote are run (docs/rewards.md).  Loads without torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, model_validator

from rlhpc.base.user_code import is_import_path
from rlhpc.config.tables import (
    AGENT,
    COLDEST,
    OWN_REWARD,
    Arguments,
    DataConfig,
    Duration,
    LoosePath,
    NamedPath,
    NamedPaths,
    NamedProgram,
    Positive,
    PositiveFloat,
    Section,
    StopStrings,
    title_of,
)

if TYPE_CHECKING:
    from rlhpc.config.rules import Config


# --------------------------------------------------------------------------------------------------------- config agent
#
# [agent]: programs of the user's own that sample over HTTP (docs/environments.md), and their rules.  No torch.


_PROMPT_KEYS = ("prompt_template", "prompt_field", "system_prompt")


class AgentConfig(Section):
    """[agent]: who speaks to the policy in datasets with data.environment = "agent"."""

    function: str = ""
    """Your own package.module:function, def or async def, called with the record, each time in a new process; its
    return value is the reward. Or `command`."""
    command: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Instead: a program and its arguments, started for every rollout.  The record is its standard input, as JSON; the
    last line that it prints is the reward."""
    turn_timeout_s: Duration = 120.0
    """An agent without a pending request for longer is killed: while it starts, between two turns, until it reports."""
    max_sessions: Positive = 256
    """Maximum concurrent agents of each generator; further ones wait."""
    max_request_bytes: Positive = 4 << 20
    """Longer requests are refused."""


def agent_has_its_keys(config: Config) -> None:
    """An agent is a function or a command, says all that the policy reads, and answers while its lease holds."""
    agent = config.agent
    if not any(dataset.environment == AGENT for dataset in config.data):
        return
    if not agent.function and not agent.command:
        raise ValueError(f'data.environment="{AGENT}" needs agent.function (package.module:function) or agent.command')
    if agent.function and agent.command:
        raise ValueError(
            f"agent.function={agent.function!r} beside agent.command={list(agent.command)}; legal: one of them"
        )
    if agent.function and not is_import_path(agent.function):
        raise ValueError(f"agent.function={agent.function!r}; legal: package.module:function")
    if agent.turn_timeout_s >= config.admission.lease_deadline_s:
        raise ValueError(
            f"agent.turn_timeout_s={agent.turn_timeout_s:g} is not below admission.lease_deadline_s="
            f"{config.admission.lease_deadline_s:g}: a rollout whose agent is silent would be sampled a second time"
        )
    for place, dataset in enumerate(config.data):
        where = f"data.{place}" if len(config.data) > 1 else "data"
        for key in _PROMPT_KEYS if dataset.environment == AGENT else ():
            if (value := getattr(dataset, key)) != DataConfig.model_fields[key].default:
                raise ValueError(
                    f'{where}.{key}={value!r} with {where}.environment="{AGENT}": the agent gets the record, and what '
                    f"it says is all that the policy reads; legal: leave {key} out"
                )


def agents_are_not_evaluated(config: Config) -> None:
    """They live beside generators, which an evaluation has none of."""
    if config.evaluation and any(dataset.environment == AGENT for dataset in config.data):
        raise ValueError(
            f'[[evaluation]] with data.environment="{AGENT}": agents are not evaluated; legal: one of the two'
        )


# --------------------------------------------------------------------------------------------------- config environment
#
# [environment]: dialogues of several turns (docs/environments.md), and their rules.  Loads without torch.


LIBRARIES = ("gymnasium", "verifiers")  # environments of other packages, each with an extra of its name
ToolName = Literal["calculator", "python", "search"]


CALL_END = "</tool_call>"  # of environment.call_form="hermes"


class EnvironmentConfig(Section):
    """[environment]: dialogues of several turns, for datasets that have data.environment."""

    max_turns: Positive = 8
    """Maximum turns of the policy; the last one ends the dialogue."""
    max_turn_tokens: Positive | None = None
    """Maximum tokens of one turn; none: what is left of max_completion_tokens, which also counts the environment's
    tokens."""
    tools: Annotated[tuple[ToolName, ...], Field(strict=False)] = ()
    """Tools of the environment "tools", described to the model by its chat template."""
    call_form: Literal["hermes", "llama3"] = "hermes"
    """How the model writes a call: "hermes", as Qwen: <tool_call>{json}</tool_call>; "llama3": the turn is the call."""
    max_result_characters: Positive = 2000
    """Longer tool results are cut."""
    id: str = ""
    """For "gymnasium" and "verifiers": the environment's name in that library."""
    arguments: Arguments = Field(default={})
    """Keyword arguments of its constructor, or of that of your own class: {max_guesses = 8}."""
    corpus: LoosePath | None = None
    """Documents of "search": a .jsonl file of {"text": …}, or of {"title": …, "text": …}."""
    num_documents: Positive = 3
    """Documents returned by one search."""


def libraries_have_their_id(config: Config) -> None:
    """Which environment of a library; its arguments go with it."""
    table, names = config.environment, {dataset.environment for dataset in config.data}
    libraries = sorted(names & {*LIBRARIES})
    if bool(libraries) != bool(table.id):
        raise ValueError(
            f"environment.id={table.id!r} with data.environment={', '.join(map(repr, sorted(names)))}: it names one of "
            f"{' or '.join(map(repr, LIBRARIES))}, which need it"
        )
    if table.arguments and not libraries and not any(":" in name for name in names):
        raise ValueError(
            f"environment.arguments are for {', '.join(map(repr, LIBRARIES))} and package.module:Class; legal: leave "
            "them out"
        )
    if len(libraries) > 1:
        raise ValueError(
            f"data.environment={', '.join(map(repr, libraries))} in one run share environment.id; legal: one"
        )


def environment_has_its_keys(config: Config) -> None:
    """Turns are told apart by a chat template; tools, and what they need, go together."""
    table = config.environment
    names = {dataset.environment for dataset in config.data}
    for place, dataset in enumerate(config.data):
        where = f"data.{place}." if len(config.data) > 1 else "data."
        if dataset.environment and not dataset.use_chat_template:
            raise ValueError(
                f"{where}environment={dataset.environment!r} with use_chat_template=false: the model's chat "
                "template separates turns; legal: use_chat_template=true"
            )
        if OWN_REWARD in dataset.all_tasks and not dataset.environment:
            raise ValueError(f"{where}task={OWN_REWARD!r} needs {where}environment, which gives the reward")
        if dataset.environment == "tools" and OWN_REWARD in dataset.all_tasks:
            raise ValueError(
                f'{where}environment="tools" with {where}task={OWN_REWARD!r}: tools judge nothing; legal: a task that '
                "judges the last turn"
            )
    if "tools" in names and not table.tools:
        raise ValueError('data.environment="tools" needs environment.tools, such as ["calculator"]')
    if ("search" in table.tools) != (table.corpus is not None):
        raise ValueError(
            f"environment.corpus={str(table.corpus) if table.corpus else None!r} with environment.tools="
            f'{list(table.tools)}: the tool "search" and the documents that it searches go together'
        )
    cut = next((text for text in config.generation.stop if text in CALL_END), None)
    if any(names) and table.call_form == "hermes" and cut is not None:
        raise ValueError(
            f"generation.stop={cut!r} is in {CALL_END}, which ends a call of a tool, and environments are told turns "
            "without it: no call would be whole; legal: leave it out, a turn ends with the model's end token"
        )
    if table.max_turn_tokens and table.max_turn_tokens > config.generation.max_completion_tokens:
        raise ValueError(
            f"environment.max_turn_tokens={table.max_turn_tokens} is above generation.max_completion_tokens="
            f"{config.generation.max_completion_tokens}, which holds the whole dialogue"
        )


# ---------------------------------------------------------------------------------------------------- config evaluation
#
# The table [evaluation] of a run file, and its rules; see tables.py.  Loads without torch.


class EvaluationConfig(Section):
    """[evaluation]: how good the model is on held-out data while it trains; several are a table [[evaluation]] each."""

    path: LoosePath
    """A file or directory, as data.path."""
    split: str = ""
    """As data.split: "validation" or "test" of a directory."""
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]*$")] = ""
    """Name in curves and directories; default: that of its file or directory, without suffix."""
    dataset: str = ""
    """Dataset of the run whose template, reward function and limits are used; default: the only one, or the one with
    this path."""
    task: str = ""
    """Reward function, if other than that dataset's."""
    max_prompt_tokens: Positive | None = None
    """A longer prompt is refused before the run starts; none: as in training."""
    max_completion_tokens: Positive | None = None
    """Sampling stops after this many tokens; none: as in training. May be longer than in training."""
    stop: StopStrings | None = None
    """Texts that end a completion, as generation.stop; none: as in training."""
    every_steps: Positive | None = None
    """Minimum steps between two evaluations, a multiple of checkpoint.every_steps; none: every checkpoint, as far as
    time permits. The last step is always evaluated."""
    samples: Positive = 1
    """Samples per prompt."""
    prompts: Positive | None = None
    """Number of prompts, drawn at random, the same ones each time; none: all."""
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    """Sampling temperature; 0: greedy; else at least 0.01, below which vLLM does not sample."""
    ema: bool = False
    """Evaluate the moving average of the weights (trainer.ema_decay) instead of the weights."""
    num_replicas: Positive = 1
    """Engines, each with generation.tensor_parallel GPUs in addition to those of the run."""
    keep_best: str = ""
    """Metric, such as "pass@1", whose best model is kept as an HF checkpoint; default: none is."""
    stop_after: Positive | None = None
    """Stop the run after this many consecutive evaluations without improvement; needs keep_best."""

    @property
    def title(self) -> str:
        """What it is called."""
        return self.name or title_of(self.path)

    @property
    def figures(self) -> list[str]:
        """What it says of a model."""
        majority = [f"maj@{self.samples}"] if self.samples > 1 else []
        return [*(f"pass@{k}" for k in sizes_of_sets(self.samples)), *majority, "reward"]


def sizes_of_sets(samples: int) -> list[int]:
    """Every k for which pass@k is told of so many samples of a prompt: 1, 2, 4, … and all of them."""
    powers = [1 << exponent for exponent in range(samples.bit_length())]
    return sorted({*powers, samples})


def evaluations_are_told_apart(config: Config) -> None:
    """Their directories and curves have their names."""
    titles = [evaluation.title for evaluation in config.evaluation]
    for place, title in enumerate(titles):
        if title in titles[:place]:
            raise ValueError(
                f"evaluation.{titles.index(title)} and evaluation.{place} are both called {title!r}; give one of them "
                "another name"
            )


def evaluations_are_like_a_dataset(config: Config) -> None:
    """Somebody has to say how prompts are asked and completions judged."""
    titles, paths = ([getattr(dataset, key) for dataset in config.data] for key in ("title", "path"))
    for place, evaluation in enumerate(config.evaluation):
        like = evaluation.dataset
        if like not in titles if like else len(titles) > 1 and evaluation.path not in paths:
            raise ValueError(
                f"{_key(config, place, 'dataset')}={like!r}: names no dataset whose template, reward function "
                f"and limits {str(evaluation.path)!r} can use; legal: {', '.join(map(repr, titles))}"
            )


def evaluations_have_checkpoints(config: Config) -> None:
    """What is evaluated is what was saved."""
    saved = config.checkpoint.every_steps
    for place, evaluation in enumerate(config.evaluation):
        every = evaluation.every_steps
        if every is not None and every % saved:
            raise ValueError(
                f"{_key(config, place, 'every_steps')}={every}: a checkpoint comes every {saved} steps "
                "(checkpoint.every_steps); legal: a multiple of it"
            )


def best_is_a_figure(config: Config) -> None:
    """Each evaluation has figures by its number of samples."""
    for place, evaluation in enumerate(config.evaluation):
        best, figures = evaluation.keep_best, evaluation.figures
        if best and best not in figures:
            raise ValueError(
                f"{_key(config, place, 'keep_best')}={best!r} with samples={evaluation.samples}; legal: "
                f"{', '.join(map(repr, figures))}"
            )
        if evaluation.stop_after is not None and not best:
            raise ValueError(
                f"{_key(config, place, 'stop_after')}={evaluation.stop_after}: needs keep_best, the metric "
                "that has to improve"
            )
        if 0 < evaluation.temperature < COLDEST:
            raise ValueError(
                f"{_key(config, place, 'temperature')}={evaluation.temperature:g}: vLLM would sample at {COLDEST:g}; "
                f"legal: 0, for the most likely token each time, or {COLDEST:g} to 2"
            )
        if evaluation.temperature == 0 and evaluation.samples > 1:
            raise ValueError(
                f"{_key(config, place, 'temperature')}=0 with samples={evaluation.samples}: all samples of a prompt "
                "would be the same; legal: samples=1, or above 0"
            )


def _key(config: Config, place: int, key: str) -> str:
    """As a run file with one table, or several, has it."""
    return f"evaluation.{place}.{key}" if len(config.evaluation) > 1 else f"evaluation.{key}"


def averages_are_kept(config: Config) -> None:
    """Checkpoints have an average where one is asked for."""
    for place, evaluation in enumerate(config.evaluation):
        if evaluation.ema and config.trainer.ema_decay == "off":
            raise ValueError(f"{_key(config, place, 'ema')}=true needs a trainer.ema_decay such as 0.99; it is 'off'")


EVALUATION = (
    evaluations_are_told_apart,
    evaluations_are_like_a_dataset,
    evaluations_have_checkpoints,
    best_is_a_figure,
    averages_are_kept,
)


# --------------------------------------------------------------------------------------------------------- config judge
#
# [judge]: the model that the task llm_judge asks (docs/rewards.md).  Loads without torch.


TASK = "llm_judge"
TEMPLATE = (
    "Compare an answer with a reference.\n\nReference:\n{reference}\n\nAnswer:\n{completion}\n\n"
    "How well does the answer agree with the reference? Give reasons in one or two sentences. End with a line "
    '"Grade: N", where N is a whole number from 0 (wrong) to 10 (right).'
)


class JudgeConfig(Section):
    """[judge]: an OpenAI-compatible endpoint, what it is asked, and how its grade is read."""

    endpoint: str = ""
    """Base URL such as "http://node7:8000/v1"; requests go to POST endpoint/chat/completions. Required by the task
    llm_judge."""
    model: str = ""
    """Name of the model at the endpoint. Required."""
    system: str = ""
    """System message; default: none."""
    template: str = TEMPLATE
    """User message, filled with completion and reference, or with the fields of the record if data.reference_field =
    "*"; a literal brace is doubled."""
    template_file: NamedPath = ""
    """A file with the template instead."""
    grade_pattern: str = r"(?i)\bgrade:[\s*]*(-?\d+(?:\.\d+)?)"
    """Regular expression whose last match in the reply, group 1, is the grade; a match that the completion has, too,
    counts only if there is no other."""
    grade_key: str = ""
    """Instead: the reply is or has a JSON object, and this key of the outermost one is the grade."""
    worst: float = 0.0
    """Grade that gives reward 0; a grade outside worst to best is no grade."""
    best: float = 10.0
    """Grade that gives reward 1; grades in between are interpolated."""
    correct_from: float = 7.0
    """Minimum grade of a completion that counts as correct."""
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    """Sampling temperature of the judge."""
    max_tokens: Positive = 512
    """Maximum tokens of its reply."""
    timeout_s: Duration = 8.0
    """Limit for all attempts on one completion. Less than rewards.timeout_s, or task_timeout_s of the task."""
    attempts: Positive = 4
    """Requests for one completion before its verifier has failed: endpoint down, 429, 5xx, or no grade in the reply."""
    backoff_s: PositiveFloat = 0.5
    """Wait before the second attempt, doubled before each further one; Retry-After from the endpoint takes
    precedence."""
    requests_per_s: Annotated[float, Field(ge=0)] = 0.0
    """Maximum rate of all workers of all services together; 0: no limit. Each worker has two turns in timeout_s."""
    key_variable: str = ""
    """Environment variable of the reward service that holds the endpoint's API key; default: no key is sent."""
    key_file: NamedPath = ""
    """Instead: a file that holds it, readable only by its owner. Never put keys in run files."""
    cache: bool = True
    """Cache replies in the run directory, by model, messages and sampling settings, so that the same completion is
    judged once."""

    @model_validator(mode="after")
    def _grades_can_be_read(self) -> Self:
        if self.best <= self.worst:
            raise ValueError(f"judge.best={self.best:g} is not above judge.worst={self.worst:g}")
        if not self.worst <= self.correct_from <= self.best:
            raise ValueError(f"judge.correct_from={self.correct_from:g}; legal: {self.worst:g} to {self.best:g}")
        try:
            groups = re.compile(self.grade_pattern).groups
        except re.error as error:
            pattern = f"judge.grade_pattern={self.grade_pattern!r}"
            raise ValueError(f"{pattern} is not a regular expression: {error}") from error
        if groups < 1:
            raise ValueError(f"judge.grade_pattern={self.grade_pattern!r} has no group; legal: one around the grade")
        if self.key_variable and self.key_file:
            raise ValueError(f"judge.key_variable={self.key_variable!r} beside judge.key_file; legal: one of them")
        return self


def judge_can_be_asked(config: Config) -> None:
    """Who names the task needs an endpoint, and time for it."""
    if TASK not in config.judging_tasks:
        return
    judge = config.judge
    for key in ("endpoint", "model"):
        if not getattr(judge, key):
            raise ValueError(f"judge.{key} is missing, which the task {TASK!r} needs")
    if not re.fullmatch(r"https?://[^/\s@?#]+(/[^\s@?#]*)?", judge.endpoint):
        said = "…" if re.search("[@?]", judge.endpoint) else repr(judge.endpoint)  # there may be a key in it
        raise ValueError(f"judge.endpoint={said}; legal: http://HOST:PORT/v1 or https://…, without a key in it")
    for task in config.data_tasks:
        limit_s = config.rewards.timeout_of(task)
        if TASK in config.parts_of(task) and judge.timeout_s >= limit_s:
            raise ValueError(
                f"judge.timeout_s={judge.timeout_s:g} is not below the {limit_s:g} s that {task!r} has "
                "(rewards.timeout_s, rewards.task_timeout_s): its worker would be killed before the judge times out"
            )
    _turns_come_in_time(config)


def _turns_come_in_time(config: Config) -> None:
    """A worker has a turn by the rate at least twice in its time, or it would often wait for nothing."""
    judge, rewards = config.judge, config.rewards
    num_workers, longest_s = rewards.num_replicas * rewards.workers_per_replica, judge.timeout_s / 2
    if judge.requests_per_s and (turn_s := num_workers / judge.requests_per_s) > longest_s:
        raise ValueError(
            f"judge.requests_per_s={judge.requests_per_s:g} gives each of rewards.num_replicas={rewards.num_replicas} "
            f"times rewards.workers_per_replica={rewards.workers_per_replica} workers a turn every {turn_s:g} s; "
            f"legal: every {longest_s:g} s or more often, half of judge.timeout_s={judge.timeout_s:g}, "
            "or 0 for no limit"
        )


# ------------------------------------------------------------------------------------------------------- config sandbox


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

"""Tables of a run file for rewards, environments, agents and evaluations; see tables.py.  Loads without torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field

from rlhpc.base.user_code import did_you_mean, is_import_path
from rlhpc.config.setting import (
    ANY_SIZE,
    ATTEMPTS,
    BYTES,
    COLDEST,
    PROCESSES,
    SECONDS,
    STEPS,
    TOKENS,
    USUAL_TOKENS,
    Arguments,
    Duration,
    Faults,
    Keys,
    LoosePath,
    NamedPath,
    NamedPaths,
    NamedProgram,
    NonNegative,
    Positive,
    PositiveFloat,
    Section,
    Share,
    StopStrings,
    Usual,
    only_with,
    rule,
)
from rlhpc.config.tables import AGENT, AVERAGED, CONTAINER, title_of
from rlhpc.protocol.environment import TOOL_SCHEMAS, tool_name

if TYPE_CHECKING:
    from rlhpc.config.rules import Config


Name = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$")]


HANGS = f"{SECONDS}, and a verifier that hangs blocks a worker for so long"


class RewardsConfig(Section):
    """[rewards]: the reward service."""

    num_replicas: Annotated[Positive, Usual(1, 1024, PROCESSES)] = 1
    """Reward services, one process each."""
    workers_per_replica: Annotated[Positive, Usual(1, 4096, PROCESSES)] = 1
    """Worker processes of each service; one that hangs is killed."""
    batch_size: Annotated[Positive, Usual(1, 1e5, "it is in completions")] = 64
    """Maximum completions passed at once to your own batched function; timeout_s is for all of them together."""
    timeout_s: Annotated[Duration, Usual(0.1, 3600, HANGS)] = 10.0
    """A verifier that takes longer is killed and its verdict is verifier_error."""
    task_timeout_s: Annotated[dict[str, float], Usual(0.1, 3600, HANGS)] = Field(default={})
    """Other limits for single tasks, as { code_stdin = 20.0 }."""
    memory_bytes: Annotated[NonNegative, Usual(1e7, 1e13, BYTES, zero=True)] = 0
    """Address space of a worker; a verifier that needs more is a verifier_error, and its worker is replaced.
    0: no limit."""
    task_memory_bytes: Annotated[dict[str, int], Usual(1e7, 1e13, BYTES)] = Field(default={})
    """Other memory limits for single tasks."""
    task_arguments: Annotated[dict[str, Arguments], ANY_SIZE] = Field(default={})
    """Keyword arguments of reward functions of your own, as { "mine:judge" = { bonus = 0.5 } }."""
    max_attempts: Annotated[Positive, Usual(1, 100, ATTEMPTS)] = 2
    """Attempts to score one completion before its group is dropped."""
    max_error_share: Share = 0.2
    """The run stops when more than this share of the last 200 verdicts are verifier errors, for error_patience_s."""
    error_patience_s: Annotated[
        float, Field(ge=0), Usual(1, 86400, "so long a run that fails everywhere stands still", zero=True)
    ] = 120.0
    """Seconds from the first time that they are more, in which the run waits for what fails (a tool server, a judge),
    and samples only a group now and then until there is a verdict. 0: it stops at once."""

    def timeout_of(self, task: str) -> float:
        """Time limit of a task for judging a completion, in seconds."""
        return self.task_timeout_s.get(task, self.timeout_s)

    @property
    def longest_timeout_s(self) -> float:
        """Longest time limit of all tasks, in seconds."""
        return max(self.timeout_s, *self.task_timeout_s.values(), 0.0)

    @rule
    def limits_are_of_tasks(self, config: Config, key: Keys) -> Faults:
        """`task_arguments` name functions of your own that judge; `task_timeout_s`, `task_memory_bytes` name tasks of
        datasets, and are above 0.
        """
        own = [task for task in config.judging_tasks if ":" in task]
        for task in self.task_arguments:
            if task not in own:
                legal = ", ".join(own) or "leave it out, since no task is a function of your own"
                yield f"{key}.task_arguments names {task!r}; legal: {legal}"
        named = {*config.data_tasks, *(each.task for each in config.evaluation if each.task)}
        for name in ("task_timeout_s", "task_memory_bytes"):
            for task, limit in getattr(self, name).items():
                if task not in named:
                    yield f"{key}.{name} names {task!r}; legal: a task of a dataset: {', '.join(sorted(named))}"
                if limit <= 0:
                    yield f"{key}.{name}: {task}={limit:g}; legal: above 0"


class InstructionsConfig(Section):
    """[instructions]: what the task instruction_following rewards."""

    whole_table = (only_with("data.task", "instruction_following"),)

    accuracy: Literal["strict", "loose"] = "strict"
    """What counts as followed: the completion as it is ("strict"), or also without its first line, its last line or
    asterisks ("loose")."""
    reward: Literal["all", "fraction"] = "all"
    """1.0 when all instructions of a prompt are followed, or their fraction."""


class MathConfig(Section):
    """[math]: what counts as equal for the task math_answer."""

    whole_table = (only_with("data.task", "math_answer"),)

    units: Literal["optional", "required", "ignored"] = "optional"
    """Units: an answer and its reference may lack theirs, but two must agree ("optional"); an answer must have the
    reference's ("required"); none is compared ("ignored")."""
    fractions: Literal["any", "lowest"] = "any"
    """Whether 2/4 answers 1/2 ("any"), or fractions of whole numbers must be in lowest terms ("lowest")."""


class TextConfig(Section):
    """[text]: what counts as equal for the tasks exact_match and token_f1."""

    whole_table = (only_with("data.task", "exact_match", "token_f1"),)

    punctuation: Literal["words", "all"] = "words"
    """Punctuation is left out of words and kept in numbers, so that 3.5 is not 35 ("words"), or left out everywhere, as
    SQuAD's own program does ("all")."""


class CompositeConfig(Section):
    """[composite.NAME]: a task that combines others."""

    tasks: dict[str, str]
    """Its parts by name, as { answer = "math_answer", format = "regex" }; each is plotted as reward_part/NAME."""
    weights: Annotated[
        dict[str, float], Usual(-1e4, 1e4, "advantages that are not divided by a deviation grow with it")
    ] = Field(default={})
    """The reward is the sum of the parts' rewards by these weights; a part that is not named here has weight 1."""
    correct: str
    """The part that decides whether a completion is correct."""
    fields: dict[str, str] = Field(default={})
    """Fields of the record that hold a part's reference; a part that is not named gets the whole record.  Needs
    data.reference_field = "*".  Default: all parts have the record's reference."""

    def weight(self, part: str) -> float:
        """Factor on a part's reward in the weighted sum."""
        return self.weights.get(part, 1.0)

    @rule
    def parts_are_named(self, config: Config, key: Keys) -> Faults:
        """`tasks`: one or more, none of them a composite; `weights`, `fields` and `correct` name some of them."""
        if not self.tasks:
            yield f"{key.tasks} has no part; legal: one or more"
        for name, parts in (("weights", self.weights), ("fields", self.fields), ("correct", (self.correct,))):
            if strange := [part for part in parts if part not in self.tasks]:
                yield f"{key}.{name} names {strange[0]!r}, not one of its parts; legal: {', '.join(self.tasks)}"
        for part, task in self.tasks.items():
            if task in config.composite:
                yield f"{key}.tasks: {part}={task!r} is a composite; legal: a task that is none"

    @rule
    def it_judges(self, config: Config, key: Keys) -> Faults:
        """Some dataset or evaluation has the task NAME."""
        name = str(key).partition(".")[2]
        if name not in {*config.data_tasks, *(each.task for each in config.evaluation)}:
            yield f"{key} has no effect: no dataset has the task {name!r}; legal: leave it out, or data.task={name!r}"


_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")  # its name


class AgentConfig(Section):
    """[agent]: the program that converses with the policy in datasets with data.environment = "agent"."""

    whole_table = (only_with("data.environment", AGENT),)

    function: str = ""
    """Your own package.module:function, def or async def, called with the record, each time in a new process; its
    return value is the reward. Or `command`."""
    command: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Instead: a program and its arguments, started for every rollout.  The record is its standard input, as JSON; the
    last line that it prints is the reward."""
    preload: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Modules that are imported once, such as "openai", in the process whose forks the agents are. A `command` is then
    `python` with a file or with -m and a module, and costs no start of an interpreter."""
    turn_timeout_s: Annotated[Duration, Usual(1, 86400, SECONDS)] = 120.0
    """An agent without a pending request for longer is killed: while it starts, between two turns, until it reports."""
    max_sessions: Annotated[Positive, Usual(1, 1e5, PROCESSES)] = 256
    """Maximum concurrent agents of each generator; further ones wait."""
    max_rows: Annotated[Positive, Usual(1, 1e4, "it is in rows of one rollout")] = 16
    """Maximum number of rows of a rollout: lines of messages that do not continue one another, because the agent
    compacts its history, strips thoughts, or asks sub-agents.  Each has up to `generation.max_completion_tokens`."""
    max_request_bytes: Annotated[Positive, Usual(1e4, 1e9, BYTES)] = 4 << 20
    """Longer requests are refused."""

    @rule
    def an_agent_has_one_program(self, config: Config, key: Keys) -> Faults:
        """`function`, `command`: one of them with `data.environment` = `"agent"`."""
        if not any(dataset.environment == AGENT for dataset in config.data):
            return
        if not self.function and not self.command:
            yield f'data.environment="{AGENT}" needs agent.function (package.module:function) or agent.command'
        if self.function and self.command:
            yield f"{key.function} beside {key.command}; legal: one of them"
        if self.function and not is_import_path(self.function):
            yield f"{key.function}; legal: package.module:function"

    @rule
    def what_is_preloaded_is_pythons(self, config: Config, key: Keys) -> Faults:
        """`preload`: names of modules; with a `command` that is `python`, then a file, or -m and a module."""
        if wrong := [name for name in self.preload if not _MODULE.fullmatch(name)]:
            yield f"{key.preload}: {wrong[0]!r}; legal: names of modules, such as openai or package.module"
        program, *words = (*self.command, "", "", "")[:3]
        is_python = program in ("python", "python3") and (
            words[1] != "" if words[0] == "-m" else words[0][:1] not in ("", "-")
        )
        if self.preload and self.command and not is_python:
            yield f"{key.preload} beside {key.command}; legal: python, then a file, or -m and a module; or no preload"

    @rule
    def an_agent_answers_while_its_lease_holds(self, config: Config, key: Keys) -> Faults:
        """`turn_timeout_s`: below `admission.lease_deadline_s`; otherwise a rollout whose agent is silent would be
        sampled twice.
        """
        has_agents = any(dataset.environment == AGENT for dataset in config.data)
        if has_agents and self.turn_timeout_s >= config.admission.lease_deadline_s:
            yield (
                f"{key.turn_timeout_s} is not below {key.admission.lease_deadline_s}: a rollout whose agent is silent "
                "would be sampled a second time"
            )


_SHELL = "shell"  # the tool


class ContainerConfig(Section):
    """[container]: containers of the tasks of data.environment = "container"."""

    whole_table = (only_with("data.environment", CONTAINER),)

    images: NamedPath = ""
    """Directory of the images that tasks name by environment.docker_image in their task.toml."""
    root_cache: NamedPath = ""
    """Directory of unpacked images on each node's own disk; default: /tmp/rlhpc-roots-UID."""
    command_s: Annotated[Duration, Usual(0.1, 3600, SECONDS)] = 20.0
    """Time of all commands of a turn together; one that takes longer is killed, and the policy is told."""
    tests_s: Annotated[Duration, Usual(0.1, 7200, SECONDS)] = 60.0
    """Time of a task's tests, or less if its task.toml says so; tests that take longer give no reward."""
    processes: Annotated[Positive, Usual(2, 1e5, PROCESSES)] = 64
    """Maximum processes and threads of a container."""
    memory_bytes: Annotated[Positive, Usual(1e7, 1e13, BYTES)] = 1 << 30
    """Maximum memory of all processes of a container, or less if its task.toml says so."""
    disk_bytes: Annotated[Positive, Usual(1e6, 1e13, BYTES)] = 256 << 20
    """Maximum size of what a container writes, which is kept in memory, or less if its task.toml says so."""
    idle_s: Annotated[Duration, Usual(10, 86400, SECONDS)] = 900.0
    """A container without a command for so long is ended; if its dialogue goes on, its commands are run again."""
    keep_processes: bool = False
    """Keep what a command leaves running until the container ends, tests included, for tasks that start servers."""

    @rule
    def commands_end_before_their_verifier(self, config: Config, key: Keys) -> Faults:
        """`command_s` and `tests_s` together: below `rewards.timeout_s`, or `task_timeout_s` of the task; otherwise a
        slow command would count as a failed verifier.
        """
        for dataset in config.data:
            limit_s = min(map(config.rewards.timeout_of, dataset.all_tasks))
            if dataset.environment == CONTAINER and self.command_s + self.tests_s >= limit_s:
                yield (
                    f"{key.command_s} and {key.tests_s} are not below rewards.timeout_s={limit_s:g} together: a slow "
                    "command would count as a failed verifier; legal: a larger rewards.timeout_s, or "
                    "rewards.task_timeout_s"
                )


LIBRARIES = ("gymnasium", "verifiers")  # environments of other packages, each with an extra of its name


def _can_be_called(tools: tuple[str, ...]) -> tuple[str, ...]:
    for tool in tools:
        if tool not in TOOL_SCHEMAS and not is_import_path(tool):
            hint = did_you_mean(tool, TOOL_SCHEMAS)
            raise ValueError(
                f"{tool!r} is no tool; legal: {', '.join(TOOL_SCHEMAS)}, or package.module:function of your own{hint}"
            )
    return tools


CALL_ENDS = {  # of forms whose calls end with tags
    "hermes": "</tool_call>",
    "qwen3_coder": "</parameter>\n</function>\n</tool_call>",
}


class EnvironmentConfig(Section):
    """[environment]: dialogues of several turns, for datasets that have data.environment."""

    whole_table = (only_with("data.environment"),)

    max_turns: Annotated[Positive, Usual(1, 1e4, "it is in turns of the policy")] = 8
    """Maximum turns of the policy; the last one ends the dialogue."""
    max_turn_tokens: Annotated[Positive | None, USUAL_TOKENS] = None
    """Maximum tokens of one turn; none: what is left of max_completion_tokens, which also counts the environment's
    tokens."""
    tools: Annotated[tuple[str, ...], Field(strict=False), AfterValidator(_can_be_called)] = ()
    """Tools of the environment "tools", described to the model by its chat template: "calculator", "python", "search",
    or package.module:function of your own, with type hints and a docstring. "container" has "shell", and may have
    others."""
    call_form: Literal["hermes", "llama3", "qwen3_coder"] = "hermes"
    """How the model writes a call: "hermes", as Qwen3: <tool_call>{json}</tool_call>; "llama3": the turn is the call;
    "qwen3_coder", as Qwen3.5: <tool_call><function=…><parameter=…>…"""
    max_result_characters: Annotated[Positive, Usual(10, 1e7, "it is in characters")] = 2000
    """Longer tool results are cut."""
    id: str = ""
    """For "gymnasium" and "verifiers": the environment's name in that library."""
    arguments: Annotated[Arguments, ANY_SIZE] = Field(default={})
    """Keyword arguments of its constructor, or of that of your own class: {max_guesses = 8}."""
    corpus: LoosePath | None = None
    """Documents of "search": a .jsonl file of {"text": …}, or of {"title": …, "text": …}."""
    num_documents: Annotated[Positive, Usual(1, 1000, "all of them are in the prompt of the next turn")] = 3
    """Documents returned by one search."""

    @rule
    def libraries_have_their_id(self, config: Config, key: Keys) -> Faults:
        """`id`: required by `"gymnasium"` and `"verifiers"`, one of them in a run; `arguments` are for these, and for a
        class of your own.
        """
        names = {dataset.environment for dataset in config.data}
        libraries = sorted(names & {*LIBRARIES})
        if bool(libraries) != bool(self.id):
            yield (
                f"{key.id} with data.environment={', '.join(map(repr, sorted(names)))}: it names one of "
                f"{' or '.join(map(repr, LIBRARIES))}, which need it"
            )
        if self.arguments and not libraries and not any(":" in name for name in names):
            yield (
                f"{key}.arguments are for {', '.join(map(repr, LIBRARIES))} and package.module:Class; legal: leave "
                "them out"
            )
        if len(libraries) > 1:
            yield f"data.environment={', '.join(map(repr, libraries))} in one run share {key}.id; legal: one"

    @rule
    def tools_have_what_they_need(self, config: Config, key: Keys) -> Faults:
        """`tools`, `corpus`: `data.environment` = `"tools"` needs tools, `"container"` the tool `"shell"`, `"search"` a
        corpus, and vice versa; names of tools differ.
        """
        if not (self.tools or config.mcp) and any(dataset.environment == "tools" for dataset in config.data):
            yield f'data.environment="tools" needs {key}.tools, such as ["calculator"], or a server, [mcp.NAME]'
        with_calls = {dataset.environment for dataset in config.data} & {"tools", CONTAINER}
        if CONTAINER in with_calls if _SHELL not in self.tools else with_calls != {CONTAINER}:
            yield (
                f'{key.tools}: the tool "shell" and data.environment="{CONTAINER}" go together, without datasets of '
                f'data.environment="tools"; legal for it: {key}.tools = ["shell"]'
            )
        if ("search" in self.tools) != (self.corpus is not None):
            yield (f'{key.corpus} with {key.tools}: the tool "search" and the documents that it searches go together')
        for name, tools in self._tools_by_name().items():
            if len(tools) > 1:
                yield f"{key.tools}: {' and '.join(map(repr, tools))} have one name for the policy; legal: another name"
            elif name in TOOL_SCHEMAS and name not in tools:
                yield f"{key.tools}: {tools[0]!r} has the name of a tool of rlhpc; legal: another name"

    def _tools_by_name(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for tool in self.tools:
            found.setdefault(tool_name(tool), []).append(tool)
        return found

    @rule
    def calls_are_whole(self, config: Config, key: Keys) -> Faults:
        """`generation.stop`: with `call_form` other than `"llama3"` no part of `</tool_call>`, or of the tags before
        it; environments get turns without what ended them.
        """
        end = CALL_ENDS.get(self.call_form, "")
        cut = next((text for text in config.generation.stop if text in end), None)
        has_turns = any(dataset.environment for dataset in config.data)
        if has_turns and cut is not None:
            yield (
                f"generation.stop={cut!r} is in {end!r}, which ends a call of a tool, and environments are told "
                "turns without it: no call would be whole; legal: leave it out, a turn ends with the model's end token"
            )

    @rule
    def a_turn_is_within_its_dialogue(self, config: Config, key: Keys) -> Faults:
        """`max_turn_tokens`: at most `generation.max_completion_tokens`, the limit of the whole dialogue."""
        if self.max_turn_tokens and self.max_turn_tokens > config.generation.max_completion_tokens:
            yield (
                f"{key.max_turn_tokens} is above {key.generation.max_completion_tokens}, which holds the whole dialogue"
            )


class EvaluationConfig(Section):
    """[evaluation]: figures of the model on held-out data during training; several are a table [[evaluation]] each."""

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
    max_prompt_tokens: Annotated[Positive | None, USUAL_TOKENS] = None
    """A longer prompt is refused before the run starts; none: as in training."""
    max_completion_tokens: Annotated[Positive | None, USUAL_TOKENS] = None
    """Sampling stops after this many tokens; none: as in training. May be longer than in training."""
    stop: StopStrings | None = None
    """Texts that end a completion, as generation.stop; none: as in training."""
    every_steps: Annotated[Positive | None, Usual(1, 1e6, STEPS)] = None
    """Minimum steps between two evaluations, a multiple of checkpoint.every_steps; none: every checkpoint, as far as
    time permits. The last step is always evaluated."""
    samples: Annotated[Positive, Usual(1, 1e4, "it is in samples of one prompt")] = 1
    """Samples per prompt."""
    prompts: Annotated[Positive | None, Usual(1, 1e7, "it is in prompts")] = None
    """Number of prompts, drawn at random, the same ones each time; none: all."""
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    """Sampling temperature; 0: greedy; else at least 0.01, below which vLLM does not sample."""
    ema: Annotated[bool, AVERAGED] = False
    """Evaluate the moving average of the weights (trainer.ema_decay) instead of the weights."""
    num_replicas: Annotated[Positive, Usual(1, 1024, PROCESSES)] = 1
    """Engines, each with generation.tensor_parallel GPUs in addition to those of the run."""
    keep_best: str = ""
    """Metric, such as "pass@1", whose best model is kept as an HF checkpoint; default: none is."""
    stop_after: Annotated[
        Positive | None,
        Usual(1, 1000, "it is in evaluations"),
        only_with("evaluation.keep_best", why="no metric has to improve"),
    ] = None
    """Stop the run after this many consecutive evaluations without improvement; needs keep_best."""

    @property
    def title(self) -> str:
        """Name of the evaluation in files and curves."""
        return self.name or title_of(self.path)

    @property
    def figures(self) -> list[str]:
        """Names of its figures."""
        majority = [f"maj@{self.samples}"] if self.samples > 1 else []
        return [*(f"pass@{k}" for k in sizes_of_sets(self.samples)), *majority, "reward"]

    @rule
    def it_is_like_a_dataset(self, config: Config, key: Keys) -> Faults:
        """`dataset`: names one where there are several, unless `path` is that of one."""
        titles, paths = ([getattr(dataset, name) for dataset in config.data] for name in ("title", "path"))
        if self.dataset not in titles if self.dataset else len(titles) > 1 and self.path not in paths:
            yield (
                f"{key.dataset}: names no dataset whose template, reward function and limits {str(self.path)!r} can "
                f"use; legal: {', '.join(map(repr, titles))}"
            )

    @rule
    def it_has_checkpoints(self, config: Config, key: Keys) -> Faults:
        """`every_steps`: a multiple of `checkpoint.every_steps`; what is evaluated is what was saved."""
        saved = config.checkpoint.every_steps
        if self.every_steps is not None and self.every_steps % saved:
            yield (
                f"{key.every_steps}: a checkpoint comes every {saved} steps (checkpoint.every_steps); legal: a "
                "multiple of it"
            )

    @rule
    def the_best_is_a_figure(self, config: Config, key: Keys) -> Faults:
        """`keep_best`: `reward`, or a figure of so many `samples`: `pass@1`, `pass@2`, `pass@4`, …, `maj@` all."""
        if self.keep_best and self.keep_best not in self.figures:
            yield f"{key.keep_best} with samples={self.samples}; legal: {', '.join(map(repr, self.figures))}"

    @rule
    def samples_differ(self, config: Config, key: Keys) -> Faults:
        """`temperature`: 0 with `samples` = 1, since greedy samples are all the same; or 0.01 to 2, since vLLM samples
        at 0.01 where less is asked for.
        """
        if 0 < self.temperature < COLDEST:
            yield (
                f"{key.temperature}: vLLM would sample at {COLDEST:g}; legal: 0, for the most likely token each time, "
                f"or {COLDEST:g} to 2"
            )
        if self.temperature == 0 and self.samples > 1:
            yield (
                f"{key.temperature} with samples={self.samples}: all samples of a prompt would be the same; legal: "
                "samples=1, or above 0"
            )


def sizes_of_sets(samples: int) -> list[int]:
    """Every k of the pass@k figures for this number of samples of a prompt: 1, 2, 4, … and all of them."""
    powers = [1 << exponent for exponent in range(samples.bit_length())]
    return sorted({*powers, samples})


TASK = "llm_judge"
TEMPLATE = (
    "Compare an answer with a reference.\n\nReference:\n{reference}\n\nAnswer:\n{completion}\n\n"
    "How well does the answer agree with the reference? Give reasons in one or two sentences. End with a line "
    '"Grade: N", where N is a whole number from 0 (wrong) to 10 (right).'
)


OF_ENDPOINT = only_with("judge.service", "", why="the table [[service]] has it")


class JudgeConfig(Section):
    """[judge]: an OpenAI-compatible endpoint, what it is asked, and how its grade is read."""

    whole_table = (only_with("data.task", TASK),)

    service: str = ""
    """Name of a [[service]] of kind "judge", which is asked."""
    endpoint: Annotated[str, only_with("judge.service", "", why="the service has an address")] = ""
    """Instead: base URL such as "http://node7:8000/v1"; requests go to POST endpoint/chat/completions. The task
    llm_judge requires one of both."""
    model: Annotated[str, only_with("judge.service", "", why="the service has its model")] = ""
    """Name of the model at the endpoint, which requires it."""
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
    worst: Annotated[float, Usual(-1000, 1000, "it is a grade")] = 0.0
    """Grade that gives reward 0; a grade outside worst to best is no grade."""
    best: Annotated[float, Usual(-1000, 1000, "it is a grade")] = 10.0
    """Grade that gives reward 1; grades in between are interpolated."""
    correct_from: Annotated[float, ANY_SIZE] = 7.0
    """Minimum grade of a completion that counts as correct."""
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    """Sampling temperature of the judge."""
    max_tokens: Annotated[Positive, Usual(1, 1e6, TOKENS)] = 512
    """Maximum tokens of its reply."""
    timeout_s: Annotated[Duration, Usual(0.1, 3600, SECONDS), OF_ENDPOINT] = 8.0
    """Limit for all attempts on one completion. Less than rewards.timeout_s, or task_timeout_s of the task. With a
    service that one's timeout_s."""
    attempts: Annotated[Positive, Usual(1, 100, ATTEMPTS)] = 4
    """Requests for one completion before its verifier has failed: endpoint down, 429, 5xx, or no grade in the reply.
    With a service those that it answers: it may restart meanwhile."""
    backoff_s: Annotated[PositiveFloat, Usual(0.01, 60, "it is in seconds, and doubled with each attempt")] = 0.5
    """Wait before the second attempt, doubled before each further one; Retry-After from the endpoint takes
    precedence."""
    requests_per_s: Annotated[float, Field(ge=0), Usual(0.01, 1e5, "it is in requests a second", zero=True)] = 0.0
    """Maximum rate of all workers of all services together; 0: no limit. Each worker has two turns in timeout_s."""
    key_variable: Annotated[str, OF_ENDPOINT] = ""
    """Environment variable of the reward service that holds the endpoint's API key; default: no key is sent."""
    key_file: Annotated[NamedPath, OF_ENDPOINT] = ""
    """Instead: a file that holds it, readable only by its owner. Never put keys in run files."""
    cache: bool = True
    """Cache replies in the run directory, by model, messages and sampling settings, so that the same completion is
    judged once."""

    @rule
    def grades_can_be_read(self, config: Config, key: Keys) -> Faults:
        """`worst`, `correct_from`, `best` ascend; `grade_pattern` has a group, the grade."""
        if self.best <= self.worst:
            yield f"{key.best} is not above {key.worst}"
        if not self.worst <= self.correct_from <= self.best:
            yield f"{key.correct_from}; legal: {self.worst:g} to {self.best:g}"
        try:
            groups = re.compile(self.grade_pattern).groups
        except re.error as error:
            yield f"{key.grade_pattern} is not a regular expression: {error}"
        else:
            if groups < 1:
                yield f"{key.grade_pattern} has no group; legal: one around the grade"

    @rule
    def there_is_one_key(self, config: Config, key: Keys) -> Faults:
        """`key_variable`, `key_file`: one of them."""
        if self.key_variable and self.key_file:
            yield f"{key.key_variable} beside {key}.key_file; legal: one of them"

    @rule
    def the_judge_has_an_endpoint(self, config: Config, key: Keys) -> Faults:
        """`endpoint` and `model`, or `service`: required by the task `llm_judge`; no API key in the URL."""
        if TASK not in config.judging_tasks or self.service:
            return
        if not self.endpoint and (judges := [repr(each.name) for each in config.service if each.kind == "judge"]):
            yield f"{key}.service is missing, or {key}.endpoint; legal services: {', '.join(judges)}"
            return
        for name in ("endpoint", "model"):
            if not getattr(self, name):
                yield f"{key}.{name} is missing, which the task {TASK!r} needs"
        if not re.fullmatch(r"https?://[^/\s@?#]+(/[^\s@?#]*)?", self.endpoint):
            said = "…" if re.search("[@?]", self.endpoint) else repr(self.endpoint)  # there may be a key in it
            yield f"{key}.endpoint={said}; legal: http://HOST:PORT/v1 or https://…, without a key in it"

    @rule
    def the_judge_answers_in_time(self, config: Config, key: Keys) -> Faults:
        """`timeout_s`: below `rewards.timeout_s`, or `task_timeout_s` of the task; otherwise its worker is killed
        before the judge times out.
        """
        for task in config.data_tasks if not self.service else ():
            limit_s = config.rewards.timeout_of(task)
            if TASK in config.parts_of(task) and self.timeout_s >= limit_s:
                yield (
                    f"{key.timeout_s} is not below the {limit_s:g} s that {task!r} has (rewards.timeout_s, "
                    "rewards.task_timeout_s): its worker would be killed before the judge times out"
                )

    @rule
    def turns_come_in_time(self, config: Config, key: Keys) -> Faults:
        """`requests_per_s`: each worker has two turns in `timeout_s`; with fewer it would often wait for nothing."""
        service, rewards = config.service_asked_by(TASK), config.rewards
        longest_s = (service or self).timeout_s / 2
        num_workers = rewards.num_replicas * rewards.workers_per_replica
        if TASK not in config.judging_tasks or not self.requests_per_s:
            return
        if (turn_s := num_workers / self.requests_per_s) > longest_s:
            yield (
                f"{key.requests_per_s} gives each of {key.rewards.num_replicas} times "
                f"{key.rewards.workers_per_replica} workers a turn every {turn_s:g} s; legal: every {longest_s:g} s or "
                f"more often, half of {'service' if service else key}.timeout_s={2 * longest_s:g}, or 0 for no limit"
            )


Language = Literal["python", "cpp"]
CODE_TASKS = ("code_functions", "code_stdin")
_STDIN_TASK = "code_stdin"  # supports more languages than Python
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
    cpp_compiler: Annotated[
        tuple[str, ...], Field(strict=False), only_with("sandbox.languages", "cpp", other="'cpp' in sandbox.languages")
    ] = ()
    """C++ compiler and its options, ["g++-12", "-O2", "-std=c++20"]; default: g++, else clang++, with -O2
    -std=c++17."""
    compile_s: Annotated[
        Duration, Usual(0.5, 600, SECONDS), only_with("sandbox.languages", "cpp", other="'cpp' in sandbox.languages")
    ] = 15.0
    """CPU time of the compiler; its wall time, up to twice that, comes on top of wall_s; more is a wrong answer."""
    compile_memory_bytes: Annotated[
        Positive, Usual(1e7, 1e12, BYTES), only_with("sandbox.languages", "cpp", other="'cpp' in sandbox.languages")
    ] = 2 << 30
    """Address space of the compiler."""
    cpu_s: Annotated[Duration, Usual(0.05, 3600, SECONDS)] = 4.0
    """CPU time of one test; more is a wrong answer."""
    wall_s: Annotated[Duration, Usual(0.05, 3600, SECONDS)] = 8.0
    """Wall time of all tests of a completion together; more is a wrong answer. Less than rewards.timeout_s."""
    memory_bytes: Annotated[Positive, Usual(1e7, 1e12, BYTES)] = 1 << 30
    """Address space of a program."""
    readable_paths: NamedPaths = ()
    """Further directories that programs may read, besides the system's and the interpreter's."""

    @property
    def compiles(self) -> bool:
        """Whether a language must be compiled before it runs."""
        return "cpp" in self.languages

    @property
    def longest_s(self) -> float:
        """Longest wall-clock time for one completion, in seconds."""
        return self.wall_s + (2 * self.compile_s if self.compiles else 0.0)

    @rule
    def programs_end_before_their_verifier(self, config: Config, key: Keys) -> Faults:
        """`wall_s`, with C++ and twice `compile_s`: below `rewards.timeout_s`, or `task_timeout_s` of the task;
        otherwise a slow program would count as a failed verifier.
        """
        for task in config.data_tasks:
            has_tool = _PYTHON in config.environment.tools and any(
                dataset.environment and task in dataset.all_tasks for dataset in config.data
            )
            limit_s = config.rewards.timeout_of(task)
            longest_s = self.longest_s if is_code(config, task) else self.wall_s
            if (has_tool or is_code(config, task)) and longest_s >= limit_s:
                name = "task_timeout_s" if task in config.rewards.task_timeout_s else "timeout_s"
                compiler = " with twice sandbox.compile_s" if longest_s > self.wall_s else ""
                yield (
                    f"{key.wall_s}{compiler} is not below rewards.{name}={limit_s:g}: a slow program would count as a "
                    f"failed verifier; legal: less than rewards.{name}"
                )

    @rule
    def languages_are_run(self, config: Config, key: Keys) -> Faults:
        """`languages`: `"cpp"` needs the task `code_stdin` and `require` = `"strong"`; `"python"` is required by all
        other tasks that run code.
        """
        if self.compiles and _STDIN_TASK not in config.judging_tasks:
            yield (
                f"{key.languages}: only data.task={_STDIN_TASK!r} runs C++, and the tasks of this run are "
                f"{', '.join(config.judging_tasks)}; legal: leave 'cpp' out"
            )
        if self.compiles and self.require != "strong":
            yield (
                f"{key.languages} with {key.require}: a binary needs a file system of its own; legal: require = "
                '"strong"'
            )
        others = [task for task in config.judging_tasks if task != _STDIN_TASK and task in CODE_TASKS]
        if "python" not in self.languages and others:
            yield (f"{key.languages} with data.task={others[0]!r}, which runs Python; legal: 'python' among them")


def runs_programs(config: Config, tasks: Sequence[str] | None = None) -> bool:
    """Whether the reward service runs programs of the policy; tasks: the judging tasks, None for those of datasets."""
    judged = config.data_tasks if tasks is None else tasks
    return _PYTHON in config.environment.tools or any(is_code(config, task) for task in judged)


def is_code(config: Config, task: str) -> bool:
    """Whether a task, or a part of it, runs the code of a completion."""
    return any(part in CODE_TASKS for part in config.parts_of(task))

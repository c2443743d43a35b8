"""The tables [data] of a run file, and their rules; see config_sections.py.  Loads without torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, model_validator

from rlhpc.config_sections import LoosePath, Positive, PositiveFloat, Section

if TYPE_CHECKING:
    from rlhpc.config import Config

WHOLE_RECORD = "*"  # as reference_field
MADE = "reasoning_gym"  # the task of a source
OWN_REWARD = "environment"  # as task: the rewards of the environment's steps, and no other
AGENT = "agent"  # as environment: a program of the user's own that samples over HTTP
MOST_PROBLEMS = 1_000_000  # of a source
COMPRESSIONS = (".gz", ".zst")
_OF_SOURCES = ("size", "source_seed", "levels", "settings")


class DataConfig(Section):
    """[data]: prompts and their references; several datasets are a table [[data]] each."""

    path: LoosePath | None = None
    """A .jsonl, .json, .csv, .tsv, .parquet or .arrow file, plain, .gz or .zst; or a directory of them, which may be
    what `datasets` saved."""
    split: str = ""
    """"train", "validation", "test": files of a directory that are named after it; "all": all of them.  To be given
    where a directory has several splits."""
    source: str = ""
    """In place of path: problems that a library makes, "reasoning_gym:chain_sum,leg_counting" (docs/data.md)."""
    size: Annotated[int, Field(gt=0, le=MOST_PROBLEMS)] = 1000
    """Problems of source."""
    source_seed: Annotated[int, Field(ge=0, le=2000)] = 0
    """Seed of source; another one has none of the same problems, unless there are few, and is for evaluations."""
    levels: Annotated[tuple[int, ...], Field(strict=False)] = ()
    """Difficulties of source, as its curricula number them from 0, as many problems of each; default: that of
    `settings`, or of the library."""
    settings: dict[str, bool | int | float | str] = Field(default={})
    """What else the datasets of source are made with: {max_terms = 4}."""
    task: str
    """Name of the reward function (docs/rewards.md lists them); may be left out with a source, which has its own."""
    environment: str = ""
    """What the policy talks to over several turns (docs/environments.md): "tools", or package.module:Class;
    "gymnasium" or "verifiers": environment.id of these libraries; "agent": a program of yours that samples over HTTP
    (docs/agents.md); default: there is one turn."""
    task_field: str = ""
    """Field of the record whose value `tasks` turns into its reward function; a record without it has `task`."""
    tasks: dict[str, str] = Field(default={})
    """Reward functions by value of task_field: {"openai/gsm8k" = "math_answer"}."""
    prompt_template: str = "{prompt}"
    """Filled with the record's fields: "Question: {question}\\nAnswer:".  A dot leads into a field: {info.question}."""
    prompt_field: str = ""
    """In place of prompt_template: the field that is the prompt, a text or a list of chat messages, which are put into
    the chat template; what the assistant says at their end is left out."""
    system_prompt: str = ""
    """System message before the prompt, where messages of the record have none of their own; needs a chat template."""
    use_chat_template: bool = False
    """Wrap the prompt as a user message in the tokenizer's chat template; chat messages always are."""
    reference_field: str = "answer"
    """Field of the record that holds the reference, "reward_model.ground_truth" with a dot for each level; "*": the
    whole record."""
    shuffle: bool = True
    """A new seeded order in every epoch; False: file order."""
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]*$")] = ""
    """Of this dataset in messages and TensorBoard; default: that of its file or directory, without suffix."""
    weight: PositiveFloat = 1.0
    """Share of the prompts that are of this dataset, by the sum of all weights."""
    max_prompt_tokens: Positive | None = None
    """A longer prompt of this dataset is refused before the run starts; none, and at most:
    generation.max_prompt_tokens."""
    max_completion_tokens: Positive | None = None
    """Sampling of its completions stops here; none, and at most: generation.max_completion_tokens."""

    @property
    def title(self) -> str:
        """What it is called."""
        return self.name or (title_of(self.path) if self.path is not None else self.source.rpartition(":")[2])

    @property
    def place(self) -> str:
        """Where its records are from, for people."""
        return self.source or str(self.path)

    @model_validator(mode="before")
    @classmethod
    def _source_has_its_own_task(cls, table: object) -> object:
        """What is made by a library has references for its scorer, unless something else is asked for."""
        if isinstance(table, dict) and table.get("source"):
            table = {"task": MADE, **table}
            return {"reference_field": "entry", **table} if table["task"] == MADE else table
        return table

    @property
    def all_tasks(self) -> tuple[str, ...]:
        """Every reward function that judges some of it, OWN_REWARD where it is the environment itself."""
        return tuple(dict.fromkeys((self.task, *self.tasks.values())))


def title_of(path: Path) -> str:
    """Of a dataset's file or directory: its name without suffixes."""
    return path.with_suffix("").stem if path.suffix in COMPRESSIONS else path.stem


def _where(config: Config, place: int, key: str) -> str:
    return f"data.{place}.{key}" if len(config.data) > 1 else f"data.{key}"


def datasets_are_told_apart(config: Config) -> None:
    """TensorBoard and messages know them by their names."""
    titles = [dataset.title for dataset in config.data]
    for place, title in enumerate(titles):
        if title in titles[:place]:
            raise ValueError(
                f"data.{titles.index(title)} and data.{place} are both called {title!r}; give one of them another name"
            )


def limits_of_datasets_are_within_those_of_all(config: Config) -> None:
    """Budgets, caches and plans are made for the longest."""
    for place, dataset in enumerate(config.data):
        for key in ("max_prompt_tokens", "max_completion_tokens"):
            limit, most = getattr(dataset, key), getattr(config.generation, key)
            if limit is not None and limit > most:
                where = _where(config, place, key)
                raise ValueError(f"{where}={limit} is above generation.{key}={most}; legal: 1 to {most}")


def records_are_from_one_place(config: Config) -> None:
    """Files, or a library that makes them; keys of the other one would do nothing."""
    for place, dataset in enumerate(config.data):
        if bool(dataset.source) == (dataset.path is not None):
            where = _where(config, place, "path")
            said = (
                f"={str(dataset.path)!r} and source={dataset.source!r}" if dataset.source else " is not set, nor source"
            )
            raise ValueError(f"{where}{said}; legal: one of them")
        for key in _OF_SOURCES if dataset.path is not None else ("split",):
            if (value := getattr(dataset, key)) != DataConfig.model_fields[key].default:
                of = "a source" if dataset.path is not None else "a path"
                raise ValueError(f"{_where(config, place, key)}={value!r} is for {of}; legal: leave it out")
        if min(dataset.levels, default=0) < 0:
            raise ValueError(f"{_where(config, place, 'levels')}={list(dataset.levels)}; legal: from 0")


def prompts_are_made_in_one_way(config: Config) -> None:
    """A template that is not filled, a system prompt that nobody sees."""
    default = DataConfig.model_fields["prompt_template"].default
    for place, dataset in enumerate(config.data):
        where = _where(config, place, "prompt_field")
        if dataset.prompt_field and dataset.prompt_template != default:
            raise ValueError(
                f"{where}={dataset.prompt_field!r} with prompt_template={dataset.prompt_template!r}: the prompt is the "
                "field as it is; legal: one of them"
            )
        if dataset.system_prompt and not (dataset.prompt_field or dataset.use_chat_template):
            where = _where(config, place, "system_prompt")
            raise ValueError(f"{where} needs use_chat_template=true, or a prompt_field with chat messages")


def tasks_of_records_are_named(config: Config) -> None:
    """Which functions a run needs is known before it reads a record, and no dataset names code to be run."""
    for place, dataset in enumerate(config.data):
        if bool(dataset.task_field) != bool(dataset.tasks):
            given, missing = ("task_field", "tasks") if dataset.task_field else ("tasks", "task_field")
            raise ValueError(
                f"{_where(config, place, given)} needs {missing}: the field's values, and the reward function of each"
            )


DATA = (
    records_are_from_one_place,
    datasets_are_told_apart,
    limits_of_datasets_are_within_those_of_all,
    prompts_are_made_in_one_way,
    tasks_of_records_are_named,
)

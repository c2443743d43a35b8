"""Tables of the run file for reward functions (docs/rewards.md).  Loads without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from rlhpc.config_sections import Arguments, Duration, NonNegative, Positive, Section, Share

if TYPE_CHECKING:
    from rlhpc.config import Config

Name = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$")]


class RewardsConfig(Section):
    """[rewards]: the reward service."""

    num_replicas: Positive = 1
    """Reward services, one process each."""
    workers_per_replica: Positive = 1
    """Worker processes of each service; one that hangs is killed."""
    batch_size: Positive = 64
    """Maximum completions passed at once to your own batched function; timeout_s is for all of them together."""
    timeout_s: Duration = 10.0
    """A verifier that takes longer is killed and its verdict is verifier_error."""
    task_timeout_s: dict[str, float] = Field(default={})
    """Other limits for single tasks, as { code_stdin = 20.0 }."""
    memory_bytes: NonNegative = 0
    """Address space of a worker; a verifier that needs more is a verifier_error, and its worker is replaced.
    0: no limit."""
    task_memory_bytes: dict[str, int] = Field(default={})
    """Other memory limits for single tasks."""
    task_arguments: dict[str, Arguments] = Field(default={})
    """Keyword arguments of reward functions of your own, as { "mine:judge" = { bonus = 0.5 } }."""
    max_attempts: Positive = 2
    """Attempts to score one completion before its group is dropped."""
    max_error_share: Share = 0.2
    """The run stops when more than this share of the last 200 verdicts are verifier errors, for error_patience_s."""
    error_patience_s: Annotated[float, Field(ge=0)] = 120.0
    """Seconds from the first time that they are more, in which the run waits for what fails (a tool server, a judge),
    and samples only a group now and then until there is a verdict. 0: it stops at once."""

    def timeout_of(self, task: str) -> float:
        """Seconds in which a task has to judge a completion."""
        return self.task_timeout_s.get(task, self.timeout_s)

    @property
    def longest_timeout_s(self) -> float:
        """Of all tasks."""
        return max(self.timeout_s, *self.task_timeout_s.values(), 0.0)


class InstructionsConfig(Section):
    """[instructions]: what the task instruction_following rewards."""

    accuracy: Literal["strict", "loose"] = "strict"
    """What counts as followed: the completion as it is ("strict"), or also without its first line, its last line or
    asterisks ("loose")."""
    reward: Literal["all", "fraction"] = "all"
    """1.0 when all instructions of a prompt are followed, or their fraction."""


class MathConfig(Section):
    """[math]: what counts as equal for the task math_answer."""

    units: Literal["optional", "required", "ignored"] = "optional"
    """Units: an answer and its reference may lack theirs, but two must agree ("optional"); an answer must have the
    reference's ("required"); none is compared ("ignored")."""
    fractions: Literal["any", "lowest"] = "any"
    """Whether 2/4 answers 1/2 ("any"), or fractions of whole numbers must be in lowest terms ("lowest")."""


class TextConfig(Section):
    """[text]: what counts as equal for the tasks exact_match and token_f1."""

    punctuation: Literal["words", "all"] = "words"
    """Punctuation is left out of words and kept in numbers, so that 3.5 is not 35 ("words"), or left out everywhere, as
    SQuAD's own program does ("all")."""


class CompositeConfig(Section):
    """[composite.NAME]: a task that is made of others."""

    tasks: dict[str, str]
    """Its parts by name, as { answer = "math_answer", format = "regex" }; each is plotted as reward_part/NAME."""
    weights: dict[str, float] = Field(default={})
    """The reward is the sum of the parts' rewards by these weights; a part that is not named here has weight 1."""
    correct: str
    """The part that decides whether a completion is correct."""
    fields: dict[str, str] = Field(default={})
    """Fields of the record that hold a part's reference; a part that is not named gets the whole record.  Needs
    data.reference_field = "*".  Default: all parts have the record's reference."""

    def weight(self, part: str) -> float:
        """By which a part's reward counts."""
        return self.weights.get(part, 1.0)


def _parts_are_named(name: str, composite: CompositeConfig) -> None:
    if not composite.tasks:
        raise ValueError(f"composite.{name}.tasks={{}} has no part; legal: one or more")
    for key, parts in (("weights", composite.weights), ("fields", composite.fields), ("correct", [composite.correct])):
        if strange := [part for part in parts if part not in composite.tasks]:
            legal = ", ".join(composite.tasks)
            raise ValueError(f"composite.{name}.{key} names {strange[0]!r}, not one of its parts; legal: {legal}")


def composites_are_made_of_tasks(config: Config) -> None:
    """At least one part, one level, names of parts in the other tables, and records where parts take fields."""
    for name, composite in config.composite.items():
        _parts_are_named(name, composite)
        for part, task in composite.tasks.items():
            if task in config.composite:
                raise ValueError(f"composite.{name}.tasks: {part}={task!r} is a composite; legal: a task that is none")
    for place, dataset in enumerate(config.data):
        with_fields = [task for task in dataset.all_tasks if task in config.composite and config.composite[task].fields]
        if with_fields and dataset.reference_field != "*":
            where = f"data.{place}.reference_field" if len(config.data) > 1 else "data.reference_field"
            raise ValueError(
                f"{where}={dataset.reference_field!r} with composite.{with_fields[0]}.fields, which are of records; "
                'legal: "*"'
            )


def limits_are_of_tasks(config: Config) -> None:
    """A limit for a task that nobody has would be passed over, and so would arguments."""
    own = [task for task in config.judging_tasks if ":" in task]
    for task in config.rewards.task_arguments:
        if task not in own:
            legal = ", ".join(own) or "leave it out, since no task is a function of your own"
            raise ValueError(f"rewards.task_arguments names {task!r}; legal: {legal}")
    named = {*config.data_tasks, *(each.task for each in config.evaluation if each.task)}
    for key in ("task_timeout_s", "task_memory_bytes"):
        for task, limit in getattr(config.rewards, key).items():
            if task not in named:
                raise ValueError(
                    f"rewards.{key} names {task!r}; legal: a task of a dataset: {', '.join(sorted(named))}"
                )
            if limit <= 0:
                raise ValueError(f"rewards.{key}: {task}={limit:g}; legal: above 0")

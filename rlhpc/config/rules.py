"""The settings of a run: a whole run file, with values and rules that involve several tables."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from rlhpc.config.setting import Faults, Keys, Section, faults, rule
from rlhpc.config.tables import (
    AGENT,
    AdmissionConfig,
    BufferConfig,
    CheckpointConfig,
    DataConfig,
    GenerationConfig,
    ModelConfig,
    RunConfig,
    TrainerConfig,
    TransportConfig,
    WeightsConfig,
)
from rlhpc.config.tables_algorithm import (
    OVER_BATCH,
    AlgorithmConfig,
    CriticConfig,
    CurriculumConfig,
    GuardConfig,
    LoraConfig,
    ShapingConfig,
)
from rlhpc.config.tables_models import RewardModelConfig, ServiceConfig, ServiceKind
from rlhpc.config.tables_services import (
    AgentConfig,
    CompositeConfig,
    ContainerConfig,
    EnvironmentConfig,
    EvaluationConfig,
    InstructionsConfig,
    JudgeConfig,
    MathConfig,
    Name,
    RewardsConfig,
    SandboxConfig,
    TextConfig,
)
from rlhpc.config.tables_sft import DemonstrationsConfig, SftConfig
from rlhpc.config.tables_tools import McpConfig
from rlhpc.protocol.errors import ConfigError

AUTO_PARTS = 4  # more parts gain little (python -m bench.admission)


@dataclass(frozen=True, slots=True)
class SmallestPart:
    """Smallest share of an incomplete batch that the trainer may start on."""

    groups: int  # those of a whole batch: steps have no parts
    tokens: int = 0  # prompts included


MOST_DATASETS = 1000  # prompt ids of a dataset have the number of datasets as their stride


def _as_several(value: object) -> object:
    """Turn a single table [data], [evaluation], [demonstrations] or [service] into a list of one."""
    return [value] if isinstance(value, Mapping | Section) else value


# Not strict: a run file has lists, not tuples.
Datasets = Annotated[
    tuple[DataConfig, ...], BeforeValidator(_as_several), Field(strict=False, max_length=MOST_DATASETS)
]
Demonstrations = Annotated[tuple[DemonstrationsConfig, ...], BeforeValidator(_as_several), Field(strict=False)]
Evaluations = Annotated[tuple[EvaluationConfig, ...], BeforeValidator(_as_several), Field(strict=False)]
Services = Annotated[tuple[ServiceConfig, ...], BeforeValidator(_as_several), Field(strict=False)]


class Config(Section):
    """A whole run file."""

    run: RunConfig
    model: ModelConfig
    demonstrations: Demonstrations = ()
    sft: SftConfig = SftConfig()
    data: Datasets
    curriculum: CurriculumConfig = CurriculumConfig()
    generation: GenerationConfig
    admission: AdmissionConfig
    rewards: RewardsConfig = RewardsConfig()
    sandbox: SandboxConfig = SandboxConfig()
    instructions: InstructionsConfig = InstructionsConfig()
    math: MathConfig = MathConfig()
    text: TextConfig = TextConfig()
    service: Services = ()
    judge: JudgeConfig = JudgeConfig()
    reward_model: RewardModelConfig = RewardModelConfig()
    composite: dict[Name, CompositeConfig] = Field(default={})
    environment: EnvironmentConfig = EnvironmentConfig()
    mcp: dict[Name, McpConfig] = Field(default={})
    container: ContainerConfig = ContainerConfig()
    agent: AgentConfig = AgentConfig()
    shaping: ShapingConfig = ShapingConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    critic: CriticConfig = CriticConfig()
    lora: LoraConfig = LoraConfig()
    trainer: TrainerConfig
    weights: WeightsConfig = WeightsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: Evaluations = ()
    guard: GuardConfig = GuardConfig()
    buffer: BufferConfig = BufferConfig()
    transport: TransportConfig = TransportConfig()

    @property
    def run_directory(self) -> Path:
        """Absolute path of the run directory."""
        return (self.run.directory or Path("runs") / self.run.name).absolute()

    @property
    def is_supervised(self) -> bool:
        """Whether the run is supervised fine-tuning: nothing is sampled, and nothing is judged."""
        return self.run.stage == "sft"

    @property
    def longest_conversation(self) -> int:
        """Limit on the tokens of a demonstration."""
        return self.sft.max_tokens or self.trainer.token_budget // (2 if self.sft.loss == "dpo" else 1)

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares the policy with a frozen model."""
        if self.is_supervised:
            return self.sft.loss == "dpo"
        return self.algorithm.kl_coefficient > 0 and not self.algorithm.has_teacher_reference

    @property
    def has_seeded_samples(self) -> bool:
        """Whether a sample that is drawn again, anywhere and at any time, has the same tokens."""
        return self.generation.seeded_samples or self.run.deterministic

    def service_of(self, kind: ServiceKind, name: str = "") -> ServiceConfig | None:
        """Return the service of this kind and name; without a name the only one of the kind; None: there is none."""
        found = [each for each in self.service if each.kind == kind and name in ("", each.name)]
        return found[0] if len(found) == 1 else None

    @property
    def started_services(self) -> tuple[ServiceConfig, ...]:
        """Services that are started with the run; others run already."""
        return () if self.is_supervised else tuple(each for each in self.service if each.path is not None)

    def service_asked_by(self, task: str) -> ServiceConfig | None:
        """Return the service that a reward function asks; None: it asks none, or a composite."""
        if task == "llm_judge" and self.judge.service:
            return self.service_of("judge", self.judge.service)
        return self.service_of("reward", self.reward_model.service) if task == "reward_model" else None

    def services_asked_by(self, task: str) -> list[ServiceConfig]:
        """Return the services that a task and its parts ask, one after the other."""
        asked = map(self.service_asked_by, self.parts_of(task))
        return [service for service in asked if service is not None]

    def service_patience_of(self, task: str) -> float:
        """Return the seconds for which a verdict of a task may wait for services."""
        return sum(service.timeout_s for service in self.services_asked_by(task))

    def time_limit_of(self, task: str) -> float:
        """Return the seconds for judging a completion, waiting for services included."""
        return self.rewards.timeout_of(task) + self.service_patience_of(task)

    @property
    def longest_service_patience_s(self) -> float:
        """Seconds for which a verdict of any task may wait for services."""
        return max((self.service_patience_of(task) for task in self.data_tasks), default=0.0)

    @property
    def judging_tasks(self) -> tuple[str, ...]:
        """Reward functions used in this run: composites replaced by their parts, those of evaluations last."""
        named = [*self.data_tasks, *(each.task for each in self.evaluation)]
        return tuple(dict.fromkeys(part for task in named if task for part in self.parts_of(task)))

    def parts_of(self, task: str) -> tuple[str, ...]:
        """Tasks of which a composite is made; any other task alone."""
        composite = self.composite.get(task)
        return (task,) if composite is None else tuple(composite.tasks.values())

    @property
    def tool_servers(self) -> dict[str, dict[str, Any]]:
        """[mcp.NAME] by name, as values of JSON."""
        return {name: server.model_dump(mode="json") for name, server in self.mcp.items()}

    @property
    def has_critic(self) -> bool:
        """Whether the trainer computes advantages by a critic."""
        return self.algorithm.advantage == "gae"

    @property
    def stepped(self) -> TrainerConfig:
        """[trainer] with the learning rate in use: that of [lora] if adapters have their own."""
        rate = self.lora.learning_rate
        return self.trainer.model_copy(update={"learning_rate": rate}) if rate else self.trainer

    @property
    def data_tasks(self) -> tuple[str, ...]:
        """Every reward function or composite named by a dataset."""
        return tuple(dict.fromkeys(task for dataset in self.data for task in dataset.all_tasks))

    def teacher_of(self, prompt_id: int) -> ServiceConfig | None:
        """The teacher of a prompt; None: none is asked."""
        if not self.algorithm.asks_teachers:
            return None
        return self.service_of("teacher", self.dataset_of(prompt_id).teacher)

    def dataset_of(self, prompt_id: int) -> DataConfig:
        """Dataset of a prompt: with D datasets, the prompts of dataset d have the ids d, d + D, d + 2·D, …"""
        return self.data[prompt_id % len(self.data)]

    def max_completion_tokens(self, prompt_id: int) -> int:
        """Number of tokens at which sampling of a prompt's completions stops."""
        return self.dataset_of(prompt_id).max_completion_tokens or self.generation.max_completion_tokens

    @property
    def window_groups(self) -> int:
        """W: a batch takes only groups admitted fewer than W groups after the oldest waiting one."""
        return 1 if self.run.deterministic else self.admission.window

    @property
    def smallest_part(self) -> SmallestPart:
        """Smallest share of a batch that the trainer may start on before the batch is complete.

        Uses admission.step_parts with its default filled in: a part fills a row of every data-parallel rank, and steps
        have no parts with pipeline stages, since each part fills and drains the pipeline.
        """
        admission, trainer = self.admission, self.trainer
        if admission.step_parts != "auto":
            return SmallestPart(-(-admission.groups_per_step // admission.step_parts))
        if trainer.pipeline_parallel > 1 or self.needs_whole_batch:
            return SmallestPart(admission.groups_per_step)
        return SmallestPart(-(-admission.groups_per_step // AUTO_PARTS), trainer.data_parallel * trainer.token_budget)

    @property
    def needs_whole_batch(self) -> str:
        """Describe a setting with which a step needs its whole batch, why, and legal values; "" if there is none."""
        algorithm = self.algorithm
        if self.run.deterministic:
            return (
                "run.deterministic=true: who is finished first decides what is in a part; "
                "legal: step_parts=1, or run.deterministic=false"
            )
        if self.has_critic or algorithm.advantage in OVER_BATCH:
            return (
                f"algorithm.advantage={algorithm.advantage!r}, which is over the whole batch; "
                "legal: step_parts=1, or an advantage over a group"
            )
        for key, legal, why in (
            ("advantage_normalization", "off", "it is over the whole batch"),
            ("aggregation", "token", "other shares in the loss are of the whole batch"),
            ("minibatches", 1, "the whole batch is dealt out"),
            ("epochs", 1, "the whole batch is passed over again"),
        ):
            if (value := getattr(algorithm, key)) != legal:
                return f"algorithm.{key}={value!r}: {why}; legal: step_parts=1, or algorithm.{key}={legal!r}"
        return ""

    @property
    def largest_group(self) -> int:
        """Most rollouts of one prompt."""
        most = self.curriculum.max_group_size
        return self.admission.group_size if most == "off" else most

    @rule
    def there_are_prompts(self, config: Config, key: Keys) -> Faults:
        """`[[data]]`, or `[[demonstrations]]` where supervised fine-tuning is all that is done: one or more."""
        name = "demonstrations" if self.is_supervised else "data"
        if not getattr(self, name):
            yield f"{name}=[]: legal: 1 or more"

    @rule
    def a_stage_has_its_own_tables(self, config: Config, key: Keys) -> Faults:
        """`run.stage` = `"sft"`: only `[run]`, `[model]`, `[[demonstrations]]`, `[sft]`, `[lora]`, `[trainer]`,
        `[weights]`, `[checkpoint]`, `[guard]` and `[transport]` have an effect; the learning rate is that of `[sft]`.
        """
        if not self.is_supervised:
            return
        plain = _of_stage(self.sft, self.trainer)
        for name in type(self).model_fields.keys() - TABLES_OF_STAGE:
            field, given = type(self).model_fields[name], getattr(self, name)
            wanted = type(given).model_validate(plain[name]) if name in plain and given else field.get_default()
            if given and given != wanted:
                yield f"[{name}] has no effect with run.stage='sft'; legal: to leave it out"
        for name in ("learning_rate", "warmup_steps", "lr_schedule", "min_learning_rate"):
            value, default = getattr(self.trainer, name), TrainerConfig.model_fields[name].default
            if value not in (default, getattr(self.sft, name)):
                yield f"trainer.{name}={value!r} has no effect with run.stage='sft'; legal: sft.{name}"
        if self.lora.learning_rate:
            own = f"lora.learning_rate={self.lora.learning_rate:g}"
            yield f"{own} has no effect with run.stage='sft'; legal: sft.learning_rate"

    @rule
    def tables_are_told_apart(self, config: Config, key: Keys) -> Faults:
        """Datasets have different names, and so have evaluations; curves and directories have these."""
        for section, tables in (("data", self.data), ("evaluation", self.evaluation)):
            titles = [each.title for each in tables]
            for place, title in enumerate(titles):
                if title in titles[:place]:
                    yield (
                        f"{section}.{titles.index(title)} and {section}.{place} are both called {title!r}; give one of "
                        "them another name"
                    )

    @rule
    def services_are_known(self, config: Config, key: Keys) -> Faults:
        """`data.teacher`, `judge.service` and `reward_model.service` name a `[[service]]` of their kind; without a name
        there is one of that kind.
        """
        named: list[tuple[str, str, ServiceKind]] = [
            (f"data.{place}.teacher", each.teacher, "teacher") for place, each in enumerate(self.data) if each.teacher
        ]
        if self.algorithm.asks_teachers:
            named += [
                (f"data.{place}.teacher", "", "teacher") for place, each in enumerate(self.data) if not each.teacher
            ]
        if self.judge.service:
            named.append(("judge.service", self.judge.service, "judge"))
        if "reward_model" in self.judging_tasks:
            named.append(("reward_model.service", self.reward_model.service, "reward"))
        for place, name, kind in named:
            if self.service_of(kind, name) is None:
                legal = ", ".join(repr(each.name) for each in self.service if each.kind == kind)
                yield f"{place}={name!r}; legal: {legal or f'a table [[service]] with kind={kind!r}'}"

    @rule
    def agents_are_not_evaluated(self, config: Config, key: Keys) -> Faults:
        """There is no `[[evaluation]]` with `data.environment` = `"agent"`; agents live beside generators, which an
        evaluation has none of.
        """
        if self.evaluation and any(dataset.environment == AGENT for dataset in self.data):
            yield f'[[evaluation]] with data.environment="{AGENT}": agents are not evaluated; legal: one of the two'

    @model_validator(mode="before")
    @classmethod
    def _stage_alone(cls, document: object) -> object:
        """Fill in tables that only RL needs for a file of supervised fine-tuning."""
        if not isinstance(document, dict) or not isinstance(run := document.get("run"), dict):
            return document
        of_rl = [f"[{name}]" for name in _OF_RL if name in document]
        if "stage" not in run and "demonstrations" in document and len(of_rl) == 1:
            raise ValueError(
                f"{of_rl[0]} has no effect in a file of supervised fine-tuning alone; legal: to leave it out, or all "
                "of [data], [generation] and [admission], of a run that goes on with RL"
            )
        if "stage" not in run and is_of_stage_alone(document):
            if "num_steps" in run:
                raise ValueError(f"run.num_steps={run['num_steps']}: legal: sft.num_steps, or sft.epochs")
            run = {**run, "stage": "sft"}
        if run.get("stage") != "sft":
            return document
        if "demonstrations" not in document:
            raise ValueError("run.stage='sft' without a table [[demonstrations]]; legal: one, or no run.stage")
        return _of_stage(document.get("sft"), document.get("trainer")) | document | {"run": {"num_steps": 1, **run}}

    @model_validator(mode="after")
    def _keys_agree(self) -> Self:
        for fault in faults(self):
            raise ValueError(fault)
        return self


TABLES_OF_STAGE = {
    "run", "model", "demonstrations", "sft", "lora", "trainer", "weights", "checkpoint", "guard", "transport",
}  # fmt: skip


_OF_RL = ("data", "generation", "admission")  # tables that every RL run has


def is_of_stage_alone(document: Mapping[str, object]) -> bool:
    """Whether a run file is of supervised fine-tuning alone, by its tables."""
    return "demonstrations" in document and not document.keys() & {*_OF_RL}


def _of_stage(sft: object, trainer: object) -> dict[str, Any]:
    """Tables that only RL needs, for a run that samples nothing: with the sizes of its batches and conversations.

    sft, trainer: the file's values under these names, normally tables.
    """

    def number(table: object, key: str, default: int) -> int:
        value = table.get(key) if isinstance(table, Mapping) else getattr(table, key, None)
        return value if isinstance(value, int) and value > 1 else default

    longest = number(sft, "max_tokens", number(trainer, "token_budget", 2))
    size = number(sft, "batch_size", SftConfig.model_fields["batch_size"].default)
    return {
        "data": [],
        "generation": {"engine": "none", "max_prompt_tokens": 1, "max_completion_tokens": longest - 1},
        "admission": {"groups_per_step": size, "group_size": 1},
    }


def supervised(config: Config, num_conversations: int) -> Config:
    """Settings of the stage [sft] of a run; name and directory end in "-sft" unless the run has no other stage.

    num_conversations: per epoch.  Raises ConfigError: the settings of the stage contradict each other.
    """
    sft, run, directory = config.sft, config.run, config.run_directory
    steps = sft.num_steps or max(1, math.ceil(sft.epochs * num_conversations / sft.batch_size))
    if sft.warmup_steps > steps:
        raise ConfigError(f"sft.warmup_steps={sft.warmup_steps} is more than its {steps} steps; legal: 0 to {steps}")
    suffix = "" if config.is_supervised else "-sft"
    document = config.model_dump(mode="json", include=TABLES_OF_STAGE)
    document["run"] |= {
        "name": f"{run.name}{suffix}",
        "directory": str(directory.with_name(directory.name + suffix)),
        "num_steps": steps,
        "stage": "sft",
    }
    document["lora"]["learning_rate"] = 0.0
    plain = ["decay_steps", "decay_tokens", "decay_hours"]  # have no effect in the stage
    if sft.loss != "dpo":
        plain.append("reference_memory")
    document["trainer"] |= {name: TrainerConfig.model_fields[name].default for name in plain}
    for name in ("learning_rate", "warmup_steps", "lr_schedule", "min_learning_rate"):
        document["trainer"][name] = document["sft"][name]
    try:
        return Config.model_validate(document)
    except ValidationError as error:
        raise ConfigError("\n".join(str(each["ctx"]["error"]) for each in error.errors())) from error


def rates_of_run_files() -> dict[str, object]:
    """Defaults of the learning rates of [trainer], by name: a run file of supervised fine-tuning leaves them there."""
    names = ("learning_rate", "warmup_steps", "lr_schedule", "min_learning_rate")
    return {f"trainer.{name}": TrainerConfig.model_fields[name].default for name in names}


def with_values(config: Config, values: Mapping[str, object]) -> Config:
    """Return the settings with other values, by "section.key"; [data] keys of all datasets.  Checks no rule."""
    for name, value in values.items():
        section, _, key = name.partition(".")
        table = getattr(config, section)
        changed = (
            tuple(each.model_copy(update={key: value}) for each in table)
            if isinstance(table, tuple)
            else table.model_copy(update={key: value})
        )
        config = config.model_copy(update={section: changed})
    return config


def obeys_rules(config: Config) -> bool:
    """Whether keys agree with each other, after with_values()."""
    return next(faults(config), None) is None

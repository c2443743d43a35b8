"""The settings of a run: a whole run file, and the rules that tie one of its keys to another.

Input: the tables of config_sections.py.  Output: Config.  A rule is one function, which raises ValueError naming keys,
values and what is legal.  EFFECTS (config_effects.py) are the rules that each key does something beside the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Self

from pydantic import BeforeValidator, Field, model_validator

from rlhpc.config_admission import ADMISSION, SmallestPart, smallest_part
from rlhpc.config_agent import AgentConfig, agent_has_its_keys, agents_are_not_evaluated
from rlhpc.config_algorithm import AlgorithmConfig, CriticConfig, ShapingConfig
from rlhpc.config_curriculum import CurriculumConfig, no_prompt_is_solved_and_hopeless, stages_ascend
from rlhpc.config_data import DATA, DataConfig
from rlhpc.config_effects import EFFECTS
from rlhpc.config_environment import EnvironmentConfig, environment_has_its_keys, libraries_have_their_id
from rlhpc.config_evaluation import EVALUATION, EvaluationConfig
from rlhpc.config_guard import GuardConfig
from rlhpc.config_judge import JudgeConfig, judge_can_be_asked
from rlhpc.config_rates import RATES
from rlhpc.config_sandbox import SandboxConfig, languages_are_run, sandbox_ends_before_its_verifier
from rlhpc.config_sections import (
    AdmissionConfig,
    BufferConfig,
    CheckpointConfig,
    GenerationConfig,
    ModelConfig,
    RunConfig,
    Section,
    TrainerConfig,
    TransportConfig,
    WeightsConfig,
)
from rlhpc.config_statistics import STATISTICS
from rlhpc.config_tasks import (
    CompositeConfig,
    InstructionsConfig,
    MathConfig,
    Name,
    RewardsConfig,
    TextConfig,
    composites_are_made_of_tasks,
    limits_are_of_tasks,
)
from rlhpc.toml_text import shown

MOST_DATASETS = 1000  # prompts of each are numbered by the number of datasets


def _as_several(value: object) -> object:
    """A table [data] is the only dataset, [evaluation] the only evaluation."""
    return [value] if isinstance(value, Mapping | Section) else value


# A run file has lists.
Datasets = Annotated[
    tuple[DataConfig, ...], BeforeValidator(_as_several), Field(strict=False, min_length=1, max_length=MOST_DATASETS)
]
Evaluations = Annotated[tuple[EvaluationConfig, ...], BeforeValidator(_as_several), Field(strict=False)]


class Config(Section):
    """A whole run file."""

    run: RunConfig
    model: ModelConfig
    data: Datasets
    curriculum: CurriculumConfig = CurriculumConfig()
    generation: GenerationConfig
    admission: AdmissionConfig
    rewards: RewardsConfig = RewardsConfig()
    sandbox: SandboxConfig = SandboxConfig()
    instructions: InstructionsConfig = InstructionsConfig()
    math: MathConfig = MathConfig()
    text: TextConfig = TextConfig()
    judge: JudgeConfig = JudgeConfig()
    composite: dict[Name, CompositeConfig] = Field(default={})
    environment: EnvironmentConfig = EnvironmentConfig()
    agent: AgentConfig = AgentConfig()
    shaping: ShapingConfig = ShapingConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    critic: CriticConfig = CriticConfig()
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
    def has_seeded_samples(self) -> bool:
        """Whether a sample is drawn the same wherever and whenever it is drawn again."""
        return self.generation.seeded_samples or self.run.deterministic

    @property
    def judging_tasks(self) -> tuple[str, ...]:
        """Every reward function that judges in this run: those of evaluations last, of composites their parts."""
        named = [*self.data_tasks, *(each.task for each in self.evaluation)]
        return tuple(dict.fromkeys(part for task in named if task for part in self.parts_of(task)))

    def parts_of(self, task: str) -> tuple[str, ...]:
        """The tasks that a composite is made of; another task alone."""
        composite = self.composite.get(task)
        return (task,) if composite is None else tuple(composite.tasks.values())

    @property
    def has_critic(self) -> bool:
        """Whether a critic makes advantages of rewards, in the trainer."""
        return self.algorithm.advantage == "gae"

    @property
    def data_tasks(self) -> tuple[str, ...]:
        """Every reward function or composite that some dataset names."""
        return tuple(dict.fromkeys(task for dataset in self.data for task in dataset.all_tasks))

    def dataset_of(self, prompt_id: int) -> DataConfig:
        """The dataset that a prompt of this run is of: prompts of D datasets have the numbers d, d + D, d + 2·D, …"""
        return self.data[prompt_id % len(self.data)]

    def max_completion_tokens(self, prompt_id: int) -> int:
        """At which sampling of a prompt's completions stops."""
        return self.dataset_of(prompt_id).max_completion_tokens or self.generation.max_completion_tokens

    @property
    def window_groups(self) -> int:
        """A batch takes groups less than this many admissions past the oldest one waiting."""
        return 1 if self.run.deterministic else self.admission.window

    @property
    def smallest_part(self) -> SmallestPart:
        """Of a step that begins before its batch is there."""
        return smallest_part(self)

    @property
    def largest_group(self) -> int:
        """Most rollouts of one prompt."""
        most = self.curriculum.max_group_size
        return self.admission.group_size if most == "off" else most

    @model_validator(mode="after")
    def _keys_agree(self) -> Self:
        for rule in (*RULES, *EFFECTS):
            rule(self)
        return self


def budget_holds_longest_sample(config: Config) -> None:
    """A sample is never truncated, so it has to fit a micro-batch."""
    longest = config.generation.max_tokens
    if config.trainer.token_budget < longest:
        raise ValueError(
            f"trainer.token_budget={config.trainer.token_budget} is below the longest sample, "
            f"generation.max_prompt_tokens + generation.max_completion_tokens = {longest}; legal: {longest} or more"
        )


def engine_step_holds_every_sequence(config: Config) -> None:
    """When all decode, each needs one token of the step; vLLM refuses less after minutes of loading."""
    tokens, sequences = config.generation.max_num_batched_tokens, config.generation.max_num_seqs
    if tokens is not None and tokens < sequences:
        raise ValueError(
            f"generation.max_num_batched_tokens={tokens} is less than a token for each of "
            f"generation.max_num_seqs={sequences}; legal: {sequences} or more"
        )


def ranks_fill_the_layout(config: Config) -> None:
    """Every replica of the model takes the same number of ranks."""
    trainer = config.trainer
    replica = trainer.tensor_parallel * trainer.pipeline_parallel * trainer.context_parallel
    if trainer.num_ranks % replica:
        raise ValueError(
            f"trainer.num_ranks={trainer.num_ranks} is not a multiple of tensor_parallel × pipeline_parallel × "
            f"context_parallel = {replica}; legal: a multiple of {replica}"
        )
    stage = trainer.num_ranks // trainer.pipeline_parallel
    if stage % trainer.expert_parallel:
        raise ValueError(
            f"trainer.expert_parallel={trainer.expert_parallel} does not divide the {stage} ranks of a pipeline stage "
            "(trainer.num_ranks / trainer.pipeline_parallel)"
        )


def layout_keys_need_their_partner(config: Config) -> None:
    """Keys that mean nothing without another one."""
    trainer = config.trainer
    if trainer.sequence_parallel and trainer.tensor_parallel == 1:
        raise ValueError("trainer.sequence_parallel=true needs trainer.tensor_parallel of 2 or more; it is 1")
    if trainer.chunks_per_stage > 1 and trainer.pipeline_parallel == 1:
        raise ValueError(
            f"trainer.chunks_per_stage={trainer.chunks_per_stage} needs trainer.pipeline_parallel of 2 or more; it is 1"
        )
    if trainer.parameter_offload and trainer.zero_stage != 3:
        raise ValueError(f"trainer.parameter_offload=true needs trainer.zero_stage=3; it is {trainer.zero_stage}")
    if trainer.optimizer_offload and trainer.backend == "megatron" and not trainer.distributed_optimizer:
        raise ValueError(
            "trainer.optimizer_offload=true with backend='megatron' needs trainer.distributed_optimizer=true"
        )
    if trainer.optimizer_offload and trainer.backend == "megatron" and config.model.dtype == "float32":
        # Megatron 0.16.1 offloads masters only that are copies of the parameters.
        raise ValueError("trainer.optimizer_offload=true with backend='megatron' needs model.dtype='bfloat16'")


# Keys that other backends would have to ignore; what is ignored must not be set.
_ONLY_FOR = {
    "megatron": (
        "tensor_parallel",
        "sequence_parallel",
        "pipeline_parallel",
        "chunks_per_stage",
        "context_parallel",
        "expert_parallel",
        "distributed_optimizer",
        "overlap_grad_reduce",
        "transformer_engine",
    ),
    "deepspeed": ("zero_stage", "parameter_offload"),
}


def backend_knows_its_keys(config: Config) -> None:
    """A key of another backend is a misunderstanding, not a wish to be passed over."""
    trainer = config.trainer
    for backend, keys in _ONLY_FOR.items():
        for key in keys:
            value = getattr(trainer, key)
            if trainer.backend != backend and value != type(trainer).model_fields[key].default:
                raise ValueError(
                    f"trainer.{key}={shown(value)} is for backend={backend!r}; it is {trainer.backend!r}; legal: leave "
                    "it out (a resume may change backend and layout: each reads the checkpoints of all)"
                )
    if trainer.recompute_activations == "selective" and trainer.backend != "megatron":
        raise ValueError(
            f"trainer.recompute_activations='selective' is for backend='megatron'; it is {trainer.backend!r}; "
            "legal: 'none', 'full'"
        )
    if trainer.optimizer_offload and trainer.backend == "reference":
        raise ValueError("trainer.optimizer_offload=true is for backend='megatron' and 'deepspeed', not 'reference'")


def format_has_its_backend(config: Config) -> None:
    """Only Megatron writes and reads its own format."""
    if config.checkpoint.trainer_format == "megatron" and config.trainer.backend != "megatron":
        raise ValueError(
            f"checkpoint.trainer_format='megatron' needs trainer.backend='megatron'; it is {config.trainer.backend!r}; "
            "legal: 'hf'"
        )
    if config.checkpoint.trainer_format == "megatron" and config.trainer.ema_decay != "off":
        raise ValueError(
            f"checkpoint.trainer_format='megatron' with trainer.ema_decay={config.trainer.ema_decay:g}: that format "
            "has no place for an average of weights; legal: 'hf', or ema_decay='off'"
        )


def critic_knows_no_tasks(config: Config) -> None:
    """Advantages are made in the trainer, whose rows do not say of which task they are."""
    if config.has_critic and config.algorithm.advantage_normalization == "task":
        raise ValueError("algorithm.advantage_normalization='task' with advantage='gae'; legal: 'batch', 'off'")


RULES = (
    budget_holds_longest_sample,
    engine_step_holds_every_sequence,
    *STATISTICS,
    *ADMISSION,
    *RATES,
    sandbox_ends_before_its_verifier,
    languages_are_run,
    composites_are_made_of_tasks,
    limits_are_of_tasks,
    judge_can_be_asked,
    environment_has_its_keys,
    libraries_have_their_id,
    agent_has_its_keys,
    agents_are_not_evaluated,
    backend_knows_its_keys,  # before the next two: what is not for this backend is no matter of numbers
    ranks_fill_the_layout,
    layout_keys_need_their_partner,
    format_has_its_backend,
    critic_knows_no_tasks,
    *DATA,
    stages_ascend,
    no_prompt_is_solved_and_hopeless,
    *EVALUATION,
)


# ----------------------------------------------------------------------------------------- for advice of what would fit


def with_values(config: Config, values: Mapping[str, object]) -> Config:
    """The settings with other values, by "section.key", of all datasets; no rule is checked."""
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
    try:
        for rule in RULES:
            rule(config)
    except ValueError:
        return False
    return True

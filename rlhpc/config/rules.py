"""The settings of a run: a whole run file, and the rules that tie one of its keys to another.

Input: the tables of tables.py.  Output: Config.  A rule is one function, which raises ValueError naming keys,
values and what is legal.  EFFECTS (effects.py) are the rules that each key does something beside the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

from pydantic import BeforeValidator, Field, model_validator

from rlhpc.config.effects import EFFECTS
from rlhpc.config.tables import (
    DATA,
    AdmissionConfig,
    BufferConfig,
    CheckpointConfig,
    CompositeConfig,
    DataConfig,
    GenerationConfig,
    InstructionsConfig,
    MathConfig,
    ModelConfig,
    Name,
    RewardsConfig,
    RunConfig,
    Section,
    TextConfig,
    TrainerConfig,
    TransportConfig,
    WeightsConfig,
    composites_are_made_of_tasks,
    limits_are_of_tasks,
)
from rlhpc.config.tables_algorithm import (
    OF_REWARDS,
    OVER_BATCH,
    AlgorithmConfig,
    CriticConfig,
    CurriculumConfig,
    GuardConfig,
    ShapingConfig,
    no_prompt_is_solved_and_hopeless,
    stages_ascend,
)
from rlhpc.config.tables_services import (
    EVALUATION,
    AgentConfig,
    EnvironmentConfig,
    EvaluationConfig,
    JudgeConfig,
    SandboxConfig,
    agent_has_its_keys,
    agents_are_not_evaluated,
    environment_has_its_keys,
    judge_can_be_asked,
    languages_are_run,
    libraries_have_their_id,
    sandbox_ends_before_its_verifier,
)
from rlhpc.config.toml import shown

# ----------------------------------------------------------------------------------------------------- config admission
#
# How batches are put together: what a run file may not say of it, and what is chosen where it says nothing.
#
# Input: Config.  Output: SmallestPart.  Each rule raises ValueError naming keys, values and what would be legal.


AUTO_PARTS = 4  # beyond them little is gained (python -m bench.admission)


@dataclass(frozen=True, slots=True)
class SmallestPart:
    """Of a step, while its batch is not there; a part that cannot be completed to a batch is never begun."""

    groups: int  # as many as a batch: steps have no parts
    tokens: int = 0  # prompts included


def smallest_part(config: Config) -> SmallestPart:
    """With admission.step_parts filled in: by default a part fills a row of every data-parallel rank.

    With pipeline stages there are none by default: each part fills and drains the pipeline.
    """
    admission, trainer = config.admission, config.trainer
    if admission.step_parts != "auto":
        return SmallestPart(-(-admission.groups_per_step // admission.step_parts))
    if trainer.pipeline_parallel > 1 or _of_whole_batches(config):
        return SmallestPart(admission.groups_per_step)
    return SmallestPart(-(-admission.groups_per_step // AUTO_PARTS), trainer.data_parallel * trainer.token_budget)


def deterministic_order_is_strict(config: Config) -> None:
    """With a window, the batch depends on which groups are finished first."""
    if config.run.deterministic and (window := config.admission.window_groups or 1) > 1:
        raise ValueError(f"run.deterministic=true needs admission.window_groups=1, its default there; it is {window}")


def parts_are_within_a_batch(config: Config) -> None:
    """Each part has a group at least."""
    parts, groups = config.admission.step_parts, config.admission.groups_per_step
    if parts != "auto" and parts > groups:
        raise ValueError(
            f"admission.step_parts={parts} is more than admission.groups_per_step={groups}; legal: 1 to {groups}"
        )


def parts_add_up(config: Config) -> None:
    """The gradient of a part must not depend on what is in the parts that come after it."""
    if config.admission.step_parts not in ("auto", 1) and (refusal := _of_whole_batches(config)):
        raise ValueError(f"admission.step_parts={config.admission.step_parts} with {refusal}")


def _of_whole_batches(config: Config) -> str:
    """A setting with which a step needs its whole batch at once, why, and what would be legal; "": there is none."""
    algorithm = config.algorithm
    settings = {
        "algorithm.advantage_normalization": (algorithm.advantage_normalization, "off", "it is over the whole batch"),
        "algorithm.aggregation": (algorithm.aggregation, "token", "other shares in the loss are of the whole batch"),
        "algorithm.minibatches": (algorithm.minibatches, 1, "the whole batch is dealt out"),
        "algorithm.epochs": (algorithm.epochs, 1, "the whole batch is passed over again"),
    }
    if config.run.deterministic:
        return (
            "run.deterministic=true: who is finished first decides what is in a part; "
            "legal: step_parts=1, or run.deterministic=false"
        )
    if config.has_critic or algorithm.advantage in OVER_BATCH:
        return (
            f"algorithm.advantage={algorithm.advantage!r}, which is over the whole batch; "
            "legal: step_parts=1, or an advantage over a group"
        )
    for key, (value, legal, why) in settings.items():
        if value != legal:
            return f"{key}={value!r}: {why}; legal: step_parts=1, or {key}={legal!r}"
    return ""


ADMISSION = (
    deterministic_order_is_strict,
    parts_are_within_a_batch,
    parts_add_up,
)


# --------------------------------------------------------------------------------------------------------- config rates
#
# What a run file may not say of learning rates.
#
# Input: Config.  Each rule raises ValueError naming keys, values and what would be legal.


def warmup_is_shorter_than_run(config: Config) -> None:
    """Otherwise the learning rate is never reached."""
    if config.trainer.warmup_steps > config.run.num_steps:
        raise ValueError(
            f"trainer.warmup_steps={config.trainer.warmup_steps} is more than run.num_steps={config.run.num_steps}; "
            f"legal: 0 to {config.run.num_steps}"
        )


def rate_falls_over_one_thing(config: Config) -> None:
    """Which of several would end the fall?"""
    trainer = config.trainer
    over = [key for key in ("decay_steps", "decay_tokens", "decay_hours") if getattr(trainer, key) is not None]
    if len(over) > 1:
        both = " and ".join(f"trainer.{key}={getattr(trainer, key):g}" for key in over)
        raise ValueError(f"{both}: the learning rate falls over one of them; legal: one of trainer.decay_*, or none")
    if trainer.decay_steps is not None and trainer.decay_steps <= trainer.warmup_steps:
        raise ValueError(
            f"trainer.decay_steps={trainer.decay_steps} ends before warm-up, trainer.warmup_steps="
            f"{trainer.warmup_steps}; legal: {trainer.warmup_steps + 1} or more"
        )


def no_clock_in_what_is_deterministic(config: Config) -> None:
    """The same run again takes another time."""
    if config.run.deterministic and config.trainer.decay_hours is not None:
        raise ValueError(
            f"run.deterministic=true with trainer.decay_hours={config.trainer.decay_hours:g}: no two runs take the "
            "same time; legal: trainer.decay_steps, trainer.decay_tokens"
        )


def rates_do_not_cross(config: Config) -> None:
    """A schedule decreases."""
    trainer = config.trainer
    if trainer.min_learning_rate > trainer.learning_rate:
        raise ValueError(
            f"trainer.min_learning_rate={trainer.min_learning_rate:g} is above "
            f"trainer.learning_rate={trainer.learning_rate:g}; legal: 0 to {trainer.learning_rate:g}"
        )


RATES = (
    warmup_is_shorter_than_run,
    rate_falls_over_one_thing,
    no_clock_in_what_is_deterministic,
    rates_do_not_cross,
)


# ---------------------------------------------------------------------------------------------------- config statistics
#
# Settings under which the statistics of a run would be wrong: refused, with the reason.
#
# Input: Config.  Each rule raises ValueError with the keys, their values and what is legal.


def group_has_reward_variance(config: Config) -> None:
    """Group-relative advantages need a group; the reward itself does not."""
    advantage = config.algorithm.advantage
    if config.admission.group_size > 1:
        return
    if advantage not in OF_REWARDS:
        raise ValueError(
            f"admission.group_size=1 with algorithm.advantage={advantage!r}: the rewards of a group of one have zero "
            "variance, so every advantage is zero; legal: 2 or more"
        )


def every_group_is_learnt_from(config: Config) -> None:
    """A critic that sees only groups with variance learns their mean, which is nearer to a half than its prompts'."""
    advantage = config.algorithm.advantage
    if advantage in OF_REWARDS and config.admission.active_sampling:
        raise ValueError(
            f"algorithm.advantage={advantage!r} with admission.active_sampling=true, its default: the advantages are "
            "not relative to the group, so that a group whose rewards are all equal teaches something, and without it "
            "the baseline would be that of the groups that are kept; legal: admission.active_sampling=false"
        )


def sets_differ(config: Config) -> None:
    """Of a group of k members there is one set of k."""
    algorithm, size = config.algorithm, config.admission.group_size
    if algorithm.advantage == "pass_at_k" and algorithm.pass_k >= size:
        smaller = f"2 to {size - 1}, or " if size > 2 else ""
        raise ValueError(
            f"algorithm.pass_k={algorithm.pass_k} with admission.group_size={size}: there is no more than one set of "
            f"k, so every advantage is zero; legal: {smaller}admission.group_size of {algorithm.pass_k + 1} or more"
        )


def hard_prompts_get_more(config: Config) -> None:
    """The largest group is larger than others."""
    most, size = config.curriculum.max_group_size, config.admission.group_size
    if most != "off" and most <= size:
        raise ValueError(
            f"curriculum.max_group_size={most} is not above admission.group_size={size}, which every prompt gets; "
            f"legal: {size + 1} or more, or 'off'"
        )


def sequence_ratios_have_own_bounds(config: Config) -> None:
    """The mean over a sequence varies less than the ratio of a token, by the square root of its length and more."""
    algorithm = config.algorithm
    is_bounded = algorithm.proximal not in ("current", "recompute") or algorithm.num_optimiser_steps > 1
    if algorithm.loss == "gspo" and is_bounded and not {"clip_low", "clip_high"} <= algorithm.model_fields_set:
        raise ValueError(
            f"algorithm.loss='gspo' with algorithm.clip_low={algorithm.clip_low:g}, algorithm.clip_high="
            f"{algorithm.clip_high:g}, which are bounds for per-token ratios: set both; the paper uses 3e-4 and 4e-4"
        )


def cushion_leaves_room(config: Config) -> None:
    """A penalty on every completion, however short, is one on length: there is a key for that."""
    cushion, longest = config.shaping.overlong_tokens, config.generation.max_completion_tokens
    if cushion >= longest:
        raise ValueError(
            f"shaping.overlong_tokens={cushion} with generation.max_completion_tokens={longest}: every completion "
            f"would be overlong; legal: 0 to {longest - 1}"
        )


def ratio_starts_at_the_batch(config: Config) -> None:
    """With several optimiser steps the current policy is not that of the batch's start any more."""
    algorithm = config.algorithm
    if algorithm.loss == "reinforce":
        return  # no ratio: see weight_follows_the_steps
    if algorithm.num_optimiser_steps > 1 and algorithm.proximal == "current":
        raise ValueError(
            f"algorithm.proximal='current' with algorithm.minibatches={algorithm.minibatches} and algorithm.epochs="
            f"{algorithm.epochs}: the ratio would be 1 in every optimiser step, and nothing would limit how far "
            "they move the policy together; legal: 'recompute', 'loglinear' or 'behaviour'"
        )


def weight_follows_the_steps(config: Config) -> None:
    """REINFORCE has no ratio: what the steps on a batch change, only its importance weight can know."""
    algorithm = config.algorithm
    if algorithm.loss == "reinforce" and algorithm.num_optimiser_steps > 1 and algorithm.proximal != "current":
        raise ValueError(
            f"algorithm.loss='reinforce' with algorithm.proximal={algorithm.proximal!r} and algorithm.minibatches="
            f"{algorithm.minibatches}, algorithm.epochs={algorithm.epochs}: the importance weight would stay that of "
            "the batch's start, and the loss has no ratio that corrects for the steps since; legal: 'current', or "
            "another algorithm.loss"
        )


def divergence_has_a_gradient(config: Config) -> None:
    """The mean of ∇k1 = ∇log π over a policy's own samples is 0, and ∇k1 does not know the reference."""
    algorithm = config.algorithm
    if algorithm.kl_coefficient > 0 and algorithm.kl_estimator == "k1" and algorithm.kl_in == "loss":
        raise ValueError(
            f"algorithm.kl_estimator='k1' with algorithm.kl_coefficient={algorithm.kl_coefficient:g}: in a loss its "
            "gradient is that of log π, whatever the reference is, and on average zero; legal: 'k2' or 'k3', or "
            "algorithm.kl_in='reward'"
        )


def tokens_have_rewards(config: Config) -> None:
    """A group's advantages know one reward of each completion, a critic's one of each token."""
    algorithm = config.algorithm
    if algorithm.kl_in == "reward" and not config.has_critic:
        raise ValueError(
            f"algorithm.kl_in='reward' with algorithm.advantage={algorithm.advantage!r}, which knows no rewards of "
            "tokens; legal: 'loss', or algorithm.advantage='gae'"
        )
    if algorithm.kl_in == "reward" and "kl_estimator" not in algorithm.model_fields_set:
        raise ValueError(
            "algorithm.kl_in='reward' with algorithm.kl_estimator='k3', its default, which is exponential in what one "
            "token is less likely: say which; usual is 'k1', whose mean is the divergence; legal: 'k1', 'k2', 'k3'"
        )


def minibatches_have_samples(config: Config) -> None:
    """Each has one at least."""
    admission, minibatches = config.admission, config.algorithm.minibatches
    num_samples = admission.groups_per_step * admission.group_size
    if minibatches > num_samples:
        raise ValueError(
            f"algorithm.minibatches={minibatches} with admission.groups_per_step · group_size = {num_samples} samples "
            f"in a batch; legal: 1 to {num_samples}"
        )


STATISTICS = (
    group_has_reward_variance,
    every_group_is_learnt_from,
    sets_differ,
    hard_prompts_get_more,
    sequence_ratios_have_own_bounds,
    cushion_leaves_room,
    ratio_starts_at_the_batch,
    weight_follows_the_steps,
    divergence_has_a_gradient,
    tokens_have_rewards,
    minibatches_have_samples,
)


# --------------------------------------------------------------------------------------------------------------- config


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

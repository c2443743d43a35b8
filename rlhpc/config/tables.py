"""The tables of a run file, one class each: what is trained, on what, how.  Where it runs is the site file's subject.

Frozen; unknown keys are refused; defaults are the recommended values.  Loads without torch.  setting.py explains what a
key says of itself; rules.py puts the tables together; file.py reads files and overrides.  Units are
part of names: _s, _bytes, _tokens, _steps, _samples.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from rlhpc.config.setting import (
    ANY_SIZE,
    ATTEMPTS,
    BYTES,
    COLDEST,
    GPUS,
    GROUPS,
    PROCESSES,
    RATE,
    SECONDS,
    STEPS,
    TOKENS,
    USUAL_RATE,
    USUAL_TOKENS,
    Duration,
    Faults,
    Idle,
    Keys,
    LearningRate,
    LoosePath,
    NonNegative,
    Positive,
    PositiveFloat,
    Section,
    StopStrings,
    Usual,
    idle_with,
    only_with,
    only_with_any,
    rule,
)
from rlhpc.config.tables_algorithm import DISTILLATION, OF_REWARDS

if TYPE_CHECKING:
    from rlhpc.config.rules import Config

CONTAINER = "container"  # as data.environment: a shell in a container, and tests that give the reward
AGENT = "agent"  # as data.environment: a program of the user's own that samples over HTTP


class RunConfig(Section):
    """[run]: identity and length."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Name of the run, and of its directory unless `directory` is set."""
    directory: LoosePath | None = None
    """Run directory; default runs/NAME, relative to the current directory."""
    num_steps: Annotated[Positive, Usual(1, 1e6, STEPS)]
    """Total optimiser steps, including those before a resume."""
    seed: Annotated[int, Field(ge=0, lt=1 << 63), ANY_SIZE] = 0
    """Seed of prompt order, sampling and random initial weights."""
    stage: Literal["rl", "sft"] = "rl"
    """"rl", or "sft" for supervised fine-tuning on [[demonstrations]], filled in by `rlhpc sft` and for a file without
    [data], [generation] and [admission]."""
    deterministic: bool = False
    """The same run again, or interrupted and resumed, has the same batches, losses and parameters, bit for bit: weights
    change only while nothing is being sampled, samples are drawn by (seed, group, sample), kernels are deterministic
    (docs/training.md says where that holds and what it costs)."""
    log_bytes: Annotated[int, Field(ge=1 << 20), Usual(1 << 20, 1e11, BYTES)] = 1 << 27
    """Limit on one process's log in one attempt; of a longer log, as of a function of your own that prints in a loop,
    beginning and end are kept, with a line between them that says how much is left out."""


class ModelConfig(Section):
    """[model]: the checkpoint that is trained."""

    path: LoosePath
    """HF checkpoint directory: config.json, safetensors, tokenizer."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Dtype of the forward pass in trainer and engine; master weights and log-probabilities are float32."""
    chat_template_kwargs: Annotated[dict[str, bool | int | float | str], ANY_SIZE] = Field(default={})
    """Variables of the chat template, for every prompt: {enable_thinking = false}, {date_string = "26 Jul 2024"}."""


NOTHING_SAMPLED = "nothing is being sampled when weights are updated"


class GenerationConfig(Section):
    """[generation]: sampling and engines."""

    engine: Literal["vllm", "transformers", "scripted", "none"] = "vllm"
    """"transformers": continuous batching by torch and transformers alone, where there is no vLLM (docs/install.md).
    "scripted" draws tokens from a seeded table instead of a model; for tests of everything else. "none", of supervised
    fine-tuning, samples nothing."""
    num_replicas: Annotated[Positive, Usual(1, 4096, PROCESSES)] = 1
    """Generators started with the run."""
    tensor_parallel: Annotated[Positive, Usual(1, 64, GPUS)] = 1
    """GPUs of one replica."""
    max_prompt_tokens: Annotated[Positive, USUAL_TOKENS]
    """A longer prompt in the dataset is refused before the run starts."""
    max_completion_tokens: Annotated[Positive, USUAL_TOKENS]
    """Sampling stops after this many tokens."""
    temperature: Annotated[float, Field(ge=COLDEST, le=2)] = 1.0
    """Divides the logits, in the engine and in the trainer; at least 0.01, the lowest at which vLLM samples."""
    stop: StopStrings = ()
    """Texts that end a completion, or a turn of a dialogue, beside the tokenizer's end tokens: ["</answer>"]. The token
    that completes one is the last that is trained; the text before it is judged, or told to the environment."""
    endpoint: Annotated[Literal["local", "network"], only_with("data.environment", AGENT)] = "local"
    """Who can reach the generators' OpenAI-compatible endpoint for agents, with a key: programs on the same node, or on
    others too, unencrypted."""
    max_num_seqs: Annotated[Positive, Usual(1, 1e4, "it is in sequences that one engine decodes at once")] = 256
    """Upper bound of sequences decoded concurrently by one replica."""
    max_num_batched_tokens: Annotated[Positive | None, USUAL_TOKENS] = None
    """Tokens of one engine step, prompts and decoding together; None: 8192 on CUDA, vLLM's default on CPU.  With seeded
    samples on CPU, where prompts are not split, at least the longest sequence and max_num_seqs more."""
    kv_cache_bytes: Annotated[Positive | None, Usual(1e6, 1e12, BYTES)] = None
    """KV cache on each GPU of a replica; None: what gpu_memory_utilization leaves
    (on CPU: 256 MiB).  Required where trainer and engine share a GPU: neither can measure what the other will take."""
    gpu_memory_utilization: Annotated[
        float,
        Field(gt=0, le=1),
        Usual(0.05, 1, "it is a share of the GPU's memory"),
        only_with("generation.kv_cache_bytes", None, why="it sets the engine's memory"),
    ] = 0.9
    """Share of a GPU's memory for the engine."""
    enforce_eager: bool = False
    """No CUDA graphs: starts faster, decodes slower.  Always true on CPU."""
    recompute_kv: Annotated[
        bool,
        idle_with("admission.max_staleness", 0, why=NOTHING_SAMPLED),
        idle_with("run.deterministic", True, why=NOTHING_SAMPLED),
    ] = False
    """Recompute the KV cache of running requests after a weight update; False keeps it (PipelineRL)."""
    prefix_caching: bool = True
    """Share the KV cache of equal prompts; salted by policy version."""
    seeded_samples: Annotated[bool, idle_with("run.deterministic", True, why="every sample is seeded")] = False
    """Redraw a sample that was lost with its generator exactly as before, so that losses do not bias rollouts towards
    short ones (docs/staleness.md). False: rollouts continue from the prefixes that generators report, which is nearly
    as good."""

    @property
    def has_model(self) -> bool:
        """Whether the engine samples from a model."""
        return self.engine in ("vllm", "transformers")

    @property
    def max_tokens(self) -> int:
        """Limit on the tokens of a prompt with its completion."""
        return self.max_prompt_tokens + self.max_completion_tokens

    @rule
    def a_run_that_samples_has_an_engine(self, config: Config, key: Keys) -> Faults:
        """`engine` = `"none"`: where `run.stage` is `"sft"`, and there alone."""
        if (self.engine == "none") != config.is_supervised:
            legal = "'none'" if config.is_supervised else "'vllm', 'transformers', 'scripted'"
            yield f"{key.engine} with {key.run.stage}; legal: {legal}"

    @rule
    def transformers_has_one_worker(self, config: Config, key: Keys) -> Faults:
        """`engine` = `"transformers"`: one GPU a replica or service, no reward models."""
        if self.engine != "transformers":
            return
        if self.tensor_parallel > 1:
            yield f"{key.engine} with {key.tensor_parallel}; legal: tensor_parallel=1, or engine='vllm'"
        for service in config.started_services:
            if service.tensor_parallel > 1 or service.kind == "reward":
                what = f"kind={service.kind!r}" if service.kind == "reward" else "tensor_parallel > 1"
                yield f"{key.engine} with [[service]] {service.name!r}: {what}; legal: engine='vllm', or its url"

    @rule
    def an_engine_step_holds_every_sequence(self, config: Config, key: Keys) -> Faults:
        """`max_num_batched_tokens`: at least `max_num_seqs`; when all decode, each needs one token of the step."""
        tokens = self.max_num_batched_tokens
        if tokens is not None and tokens < self.max_num_seqs:  # vLLM would refuse it after minutes of loading
            yield (
                f"{key.max_num_batched_tokens} is less than a token for each of {key.max_num_seqs}; legal: "
                f"{self.max_num_seqs} or more"
            )


NO_WINDOW = 1 << 30  # groups: a batch may skip any unfinished group within the staleness bound


class AdmissionConfig(Section):
    """[admission]: how much is in flight, and how stale it may become."""

    groups_per_step: Annotated[Positive, Usual(1, 1e5, GROUPS)]
    """Groups of one batch (P)."""
    group_size: Annotated[Positive, Usual(1, 4096, "it is in rollouts of one prompt")]
    """Rollouts of one prompt (G)."""
    max_staleness: Annotated[NonNegative, Usual(0, 100, "rollouts of so old a policy teach little")] = 1
    """Hard bound on (version being trained − version at admission) of every trained rollout; 0 is synchronous."""
    window_groups: Annotated[Positive | None, Usual(1, 1e7, GROUPS)] = None
    """A batch takes only groups that were admitted fewer than this many groups after the oldest one waiting (W); 1:
    strict order; default: as many as the bound allows, but 1 with run.deterministic."""
    step_parts: Annotated[
        Positive | Literal["auto"], Usual(1, 1024, "each part is a forward and a backward pass of its own")
    ] = "auto"
    """Parts in which a step may be trained: while the trainer would wait for its batch, it computes the gradients of
    finished groups, 1/step_parts of groups_per_step or more at once. "auto": 4, each of which fills a row of every
    data-parallel rank; 1 with pipeline stages, and where the loss or the advantages are over the whole batch."""
    lease_deadline_s: Annotated[Duration, Usual(1, 86400, SECONDS)] = 600.0
    """A generator that delivers nothing and makes no progress for this long loses the lease, which is granted to
    another."""
    max_attempts: Annotated[Positive, Usual(1, 100, ATTEMPTS)] = 5
    """Leases that one member may lose before its group is dropped; also consecutive groups of a prompt whose
    completions kill reward workers before it is no longer sampled."""
    active_sampling: bool = True
    """Replace zero-variance groups at once, so that batches are full; False trains on them, as "gae", "reinforce_pp"
    and distillation need, whose advantages are not relative to the group."""
    max_zero_variance_groups: Annotated[Positive, Usual(1, 1e7, GROUPS)] = 1000
    """Stop with advice after this many consecutive zero-variance groups, or errors without a verdict between them,
    instead of wasting the allocation."""

    @property
    def longest_report_interval_s(self) -> float:
        """Longest time between two reports of a rollout being sampled: some may be lost before its lease expires."""
        return self.lease_deadline_s / 4

    @property
    def window(self) -> int:
        """W with its default filled in, for a run that is not deterministic."""
        return self.window_groups or NO_WINDOW

    @property
    def num_slots(self) -> int:
        """Limit on groups admitted and not yet released: those of S + 1 batches (docs/design.md, §4)."""
        return (self.max_staleness + 1) * self.groups_per_step

    @rule
    def a_group_has_reward_variance(self, config: Config, key: Keys) -> Faults:
        """`group_size`: 2 or more, or 1 with `algorithm.advantage` = `"reinforce_pp"`, `"gae"` or `"distillation"`; the
        rewards of one rollout have zero variance.
        """
        of_one = (*OF_REWARDS, DISTILLATION)
        if self.group_size == 1 and config.algorithm.advantage not in of_one and not config.is_supervised:
            yield (
                f"{key.group_size} with {key.algorithm.advantage}: the rewards of a group of one have zero variance, "
                "so every advantage is zero; legal: 2 or more"
            )

    @rule
    def every_group_is_learnt_from(self, config: Config, key: Keys) -> Faults:
        """`active_sampling`: `false` with `algorithm.advantage` = `"reinforce_pp"` or `"gae"`;
        [their baseline](../docs/algorithms.md#advantages) has to know the groups without variance.  Also with
        `"distillation"` or a `distillation_coefficient`; a teacher has something to say about each group.
        """
        if config.algorithm.distillation_factor and self.active_sampling:
            yield (
                f"{config.algorithm.use_of_teacher} with {key.active_sampling}, its default: a teacher teaches "
                "something about a group whose rewards are all equal, too; legal: admission.active_sampling=false"
            )
        if config.algorithm.advantage in OF_REWARDS and self.active_sampling:
            yield (
                f"{key.algorithm.advantage} with {key.active_sampling}, its default: the advantages are not relative "
                "to the group, so that a group whose rewards are all equal teaches something, and without it the "
                "baseline would be that of the groups that are kept; legal: admission.active_sampling=false"
            )

    @rule
    def a_deterministic_order_is_strict(self, config: Config, key: Keys) -> Faults:
        """`window_groups`: 1 with `run.deterministic`; with a window, the batch depends on who finishes first."""
        if config.run.deterministic and (window := self.window_groups or 1) > 1:
            yield f"{key.run.deterministic} needs admission.window_groups=1, its default there; it is {window}"

    @rule
    def parts_are_within_a_batch(self, config: Config, key: Keys) -> Faults:
        """`step_parts`: at most `groups_per_step`; each part has a group at least."""
        parts, groups = self.step_parts, self.groups_per_step
        if parts != "auto" and parts > groups:
            yield f"{key.step_parts} is more than {key.groups_per_step}; legal: 1 to {groups}"

    @rule
    def parts_add_up(self, config: Config, key: Keys) -> Faults:
        """`step_parts`: above 1 needs `algorithm.aggregation` = `"token"`, one of `minibatches` and `epochs`, an
        `advantage` over the group without `advantage_normalization`, and no `run.deterministic`; the gradient of a part
        must not depend on the parts after it ([steps in parts](../docs/staleness.md#steps-in-parts)).
        """
        if self.step_parts not in ("auto", 1) and config.needs_whole_batch:
            yield f"{key.step_parts} with {config.needs_whole_batch}"


_RESUMES = "(a resume may change backend and layout: each reads the checkpoints of all)"
MEGATRON = only_with("trainer.backend", "megatron", other=f"trainer.backend='megatron' {_RESUMES}")
DEEPSPEED = only_with("trainer.backend", "deepspeed", other=f"trainer.backend='deepspeed' {_RESUMES}")
SCHEDULED = only_with("trainer.lr_schedule", "linear", "cosine")
AVERAGED = only_with("trainer.ema_decay", other="a trainer.ema_decay such as 0.99")


class TrainerConfig(Section):
    """[trainer]: backend, layout, optimiser."""

    backend: Literal["megatron", "deepspeed", "reference"] = "megatron"
    """Implementation of the trainer."""
    num_ranks: Annotated[Positive, Usual(1, 1e5, GPUS)] = 1
    """Trainer processes; on CUDA one GPU each."""
    tensor_parallel: Annotated[Positive, Usual(1, 64, GPUS), MEGATRON] = 1
    """Ranks over which every matrix is sharded."""
    sequence_parallel: Annotated[bool, MEGATRON, idle_with("trainer.tensor_parallel", 1)] = False
    """Shard norms and residuals over tensor-parallel ranks too, each with a part of the row."""
    pipeline_parallel: Annotated[Positive, Usual(1, 128, GPUS), MEGATRON] = 1
    """Stages over which the layers are distributed."""
    chunks_per_stage: Annotated[
        Positive, Usual(1, 64, "it is in blocks of layers"), MEGATRON, idle_with("trainer.pipeline_parallel", 1)
    ] = 1
    """Blocks of layers per stage; above 1, stages interleave."""
    context_parallel: Annotated[Positive, Usual(1, 256, GPUS), MEGATRON] = 1
    """Ranks over which every packed row is split."""
    expert_parallel: Annotated[Positive, Usual(1, 1024, GPUS), MEGATRON] = 1
    """Ranks over which the experts of a mixture are distributed."""
    distributed_optimizer: Annotated[bool, MEGATRON] = True
    """Shard optimiser state over data-parallel ranks."""
    overlap_grad_reduce: Annotated[bool, MEGATRON] = False
    """Overlap gradient reduction with backward."""
    transformer_engine: Annotated[bool, MEGATRON] = False
    """Attention by TransformerEngine, which must be installed."""
    zero_stage: Annotated[Literal[1, 2, 3], DEEPSPEED] = 2
    """Shard optimiser state (1), gradients too (2), parameters too (3)."""
    optimizer_offload: Annotated[bool, only_with("trainer.backend", "megatron", "deepspeed")] = False
    """Keep the optimiser's state in host memory and step there."""
    parameter_offload: Annotated[bool, DEEPSPEED, only_with("trainer.zero_stage", 3)] = False
    """Keep parameters in host memory."""
    reference_memory: Annotated[
        Literal["host", "device"],
        Idle({"algorithm.kl_coefficient": (), "sft.loss": ("dpo",)}, True),
        idle_with("algorithm.kl_reference", "teacher", why="the teacher is not in the trainer"),
        idle_with("trainer.parameter_offload", True, why="the reference is kept with the parameters"),
    ] = "host"
    """Where the reference of algorithm.kl_coefficient or sft.loss = "dpo" is kept; from the host it crosses PCIe for
    every batch."""
    ema_decay: Annotated[
        Annotated[float, Field(gt=0, lt=1)] | Literal["off"],
        Usual(0.5, 1, "the average is over about 1 / (1 − decay) versions"),
    ] = "off"
    """Decay per version of an exponential moving average of the float32 weights, kept in checkpoints, to export and
    evaluate."""
    ema_memory: Annotated[Literal["host", "device"], AVERAGED] = "host"
    """Where the average is kept; 4 bytes for each parameter whose optimiser state a rank holds."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """"auto": cuda if there is a device."""
    token_budget: Annotated[Positive, USUAL_TOKENS]
    """Tokens of one packed micro-batch, never exceeded; at least max_prompt_tokens + max_completion_tokens."""
    recompute_activations: Annotated[
        Literal["none", "selective", "full"], only_with("trainer.backend", "megatron", accepts=("full",))
    ] = "none"
    """Trade time for memory: recompute attention only (Megatron), or whole layers."""
    learning_rate: Annotated[LearningRate, USUAL_RATE] = 1e-6
    """Peak learning rate, after warm-up."""
    warmup_steps: Annotated[NonNegative, Usual(1, 1e5, STEPS, zero=True)] = 0
    """Steps of linear warm-up from 0."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After warm-up: constant, or decay to min_learning_rate at the last step, or over the span of one of the next
    three keys."""
    decay_steps: Annotated[Positive | None, Usual(1, 1e6, STEPS), SCHEDULED] = None
    """Step at which min_learning_rate is reached; none: run.num_steps."""
    decay_tokens: Annotated[Positive | None, Usual(1000, 1e14, TOKENS), SCHEDULED] = None
    """Instead: trained tokens of the run, prompts included, as tokens/trained_total counts them."""
    decay_hours: Annotated[PositiveFloat | None, Usual(0.01, 1e4, "it is in hours"), SCHEDULED] = None
    """Instead: hours in which the run trains, over all attempts."""
    min_learning_rate: Annotated[float, Field(ge=0), Usual(1e-10, 1e-2, RATE, zero=True), SCHEDULED] = 0.0
    """Final learning rate of linear and cosine."""
    weight_decay: Annotated[
        float, Field(ge=0), Usual(1e-5, 1, "it is multiplied with the learning rate; 0.01 to 0.1 are common", zero=True)
    ] = 0.0
    """AdamW weight decay, on matrices only."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1), Usual(0.5, 1, "0.9 is common", zero=True)] = 0.9
    """Decay of the first moment."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1), Usual(0.8, 1, "0.95 to 0.999 are common")] = 0.95
    """Decay of the second moment."""
    adam_eps: Annotated[
        PositiveFloat, Usual(1e-16, 1e-3, "1e-8 is common; far above it no gradient moves a weight")
    ] = 1e-8
    """Added to the root of the second moment."""
    max_grad_norm: Annotated[PositiveFloat, Usual(1e-6, 1e6, "1 is common; a norm is clipped that is above it")] = 1.0
    """Clip the global gradient norm to this; [guard] may skip steps where it spikes."""

    @property
    def data_parallel(self) -> int:
        """Replicas of the model, each with its own rows."""
        return self.num_ranks // (self.tensor_parallel * self.pipeline_parallel * self.context_parallel)

    @rule
    def the_budget_holds_the_longest_sample(self, config: Config, key: Keys) -> Faults:
        """`token_budget`: at least `generation.max_prompt_tokens + max_completion_tokens`; a sample is never cut."""
        if self.token_budget < (longest := config.generation.max_tokens):
            yield (
                f"{key.token_budget} is below the longest sample, generation.max_prompt_tokens + "
                f"generation.max_completion_tokens = {longest}; legal: {longest} or more"
            )

    @rule
    def warmup_is_shorter_than_the_run(self, config: Config, key: Keys) -> Faults:
        """`warmup_steps`: at most `run.num_steps`."""
        if self.warmup_steps > (steps := config.run.num_steps):
            yield f"{key.warmup_steps} is more than {key.run.num_steps}; legal: 0 to {steps}"

    @rule
    def the_rate_falls_over_one_thing(self, config: Config, key: Keys) -> Faults:
        """`decay_steps`, `decay_tokens`, `decay_hours`: [one of them](../docs/algorithms.md#learning-rate);
        `decay_steps` is above `warmup_steps`.
        """
        over = [name for name in ("decay_steps", "decay_tokens", "decay_hours") if getattr(self, name) is not None]
        if len(over) > 1:
            both = " and ".join(getattr(key, name) for name in over)
            yield f"{both}: the learning rate falls over one of them; legal: one of trainer.decay_*, or none"
        if self.decay_steps is not None and self.decay_steps <= self.warmup_steps:
            yield f"{key.decay_steps} ends before warm-up, {key.warmup_steps}; legal: {self.warmup_steps + 1} or more"

    @rule
    def no_clock_in_what_is_deterministic(self, config: Config, key: Keys) -> Faults:
        """`decay_hours`: not with `run.deterministic`; two runs never take exactly the same time."""
        if config.run.deterministic and self.decay_hours is not None:
            yield (
                f"{key.run.deterministic} with {key.decay_hours}: no two runs take the same time; legal: "
                "trainer.decay_steps, trainer.decay_tokens"
            )

    @rule
    def rates_do_not_cross(self, config: Config, key: Keys) -> Faults:
        """`min_learning_rate`: at most `learning_rate`, or `lora.learning_rate` where that is the one in use."""
        peak, name = config.stepped.learning_rate, key.lora.learning_rate if config.lora.learning_rate else None
        if self.min_learning_rate > peak:
            yield f"{key.min_learning_rate} is above {name or key.learning_rate}; legal: 0 to {peak:g}"

    @rule
    def ranks_fill_the_layout(self, config: Config, key: Keys) -> Faults:
        """`num_ranks`: a multiple of `tensor_parallel · pipeline_parallel · context_parallel`; `expert_parallel`
        divides `num_ranks / pipeline_parallel`.
        """
        replica = self.tensor_parallel * self.pipeline_parallel * self.context_parallel
        if self.num_ranks % replica:
            yield (
                f"{key.num_ranks} is not a multiple of tensor_parallel × pipeline_parallel × context_parallel = "
                f"{replica}; legal: a multiple of {replica}"
            )
        stage = self.num_ranks // self.pipeline_parallel
        if stage % self.expert_parallel:
            yield (
                f"{key.expert_parallel} does not divide the {stage} ranks of a pipeline stage (trainer.num_ranks / "
                "trainer.pipeline_parallel)"
            )

    @rule
    def gradients_are_summed(self, config: Config, key: Keys) -> Faults:
        """`overlap_grad_reduce`: only with several ranks in a pipeline stage; one has nobody to sum with."""
        if self.overlap_grad_reduce and self.num_ranks == self.pipeline_parallel:
            yield (
                f"{key.overlap_grad_reduce} has no effect with one rank in a pipeline stage ({key.num_ranks}): no "
                "gradients are summed over ranks; legal: false, its default, or more trainer.num_ranks"
            )

    @rule
    def the_optimizer_can_be_offloaded(self, config: Config, key: Keys) -> Faults:
        """`optimizer_offload`: with Megatron needs `distributed_optimizer` and `model.dtype` = `"bfloat16"`."""
        if self.optimizer_offload and self.backend == "megatron":  # 0.16.1 offloads copies of the parameters only
            if not self.distributed_optimizer:
                yield f"{key.optimizer_offload} with backend='megatron' needs trainer.distributed_optimizer=true"
            if config.model.dtype == "float32":
                yield f"{key.optimizer_offload} with backend='megatron' needs model.dtype='bfloat16'"


SENT_WHOLE = "every version is sent whole"


class WeightsConfig(Section):
    """[weights]: how new weights reach the generators."""

    transport: Literal["auto", "gloo", "nccl", "ipc"] = "auto"
    """"auto": on CUDA nccl with separate GPUs, ipc if trainer and engines share one; on CPU ipc on one host, gloo
    between hosts.  Not nccl with `run.deterministic`, whose two ends set NCCL differently."""
    form: Annotated[Literal["adapter", "merged"], only_with("lora.rank")] = "adapter"
    """What is sent of adapters: A and B, which engines add to the model that they have loaded, or "merged": all weights
    with the adapters added, in model.dtype, as without adapters."""
    bucket_bytes: Annotated[int, Field(ge=1 << 16), Usual(1 << 16, 1e10, BYTES)] = 256 << 20
    """Tensors travel in buckets of about this size; extra memory on the trainer is two buckets."""
    staging: Literal["auto", "shadow", "paused"] = "auto"
    """Where a version is kept until it is complete: "shadow": in host memory, while decoding continues; "paused":
    nowhere, sampling pauses while buckets are loaded as they arrive.  "auto": shadow on CPU and if host memory has
    room, else paused."""
    delta: Literal["auto", "off"] = "auto"
    """"auto": over gloo, send only the 16-bit weights that changed (lossless), if engines keep versions in host memory;
    the trainer keeps one too. Everything else, and versions that change much, is sent in full. "off":
    always everything."""
    full_every: Annotated[
        Positive,
        Usual(1, 1e5, "it is in versions"),
        only_with("weights.delta", "auto", why=SENT_WHOLE),
        idle_with("weights.transport", "nccl", "ipc", why=SENT_WHOLE),
        only_with("model.dtype", "bfloat16", why=SENT_WHOLE),
    ] = 100
    """One version in this many is sent in full, also the first of every epoch that a generator joins."""
    timeout_s: Annotated[Duration, Usual(1, 3600, SECONDS)] = 120.0
    """A broadcast that takes longer is aborted, and its membership epoch is dissolved."""
    canary_every: Annotated[NonNegative, Usual(1, 1e5, "it is in versions", zero=True)] = 20
    """Versions between canary checks, in which every generator must reproduce the trainer's log-probabilities of a
    fixed row of tokens; always done at the start and after a generator has joined or failed. 0: only then."""
    max_canary_logratio: Annotated[PositiveFloat | Literal["off"] | None, Usual(1e-6, 10, "it is in nats a token")] = (
        None
    )
    """Mean absolute log-ratio of engine and trainer over that row, in nats, above which a generator is quarantined and
    gets the weights again. Unset: 0.01 in float32, 0.25 in bfloat16; "off": no checks."""

    @property
    def sends_changes(self) -> bool:
        """Whether versions may be sent as deltas; nccl and ipc send a whole version faster than it can be coded."""
        return self.delta == "auto" and self.transport == "gloo"


class CheckpointConfig(Section):
    """[checkpoint]: what a resume starts from."""

    every_steps: Annotated[Positive, Usual(1, 1e6, STEPS)] = 50
    """Steps between checkpoints; one is also written at the end of the run and on a graceful stop."""
    keep: Annotated[int, Field(ge=2), Usual(2, 1e4, "each checkpoint is as large as model and optimiser")] = 2
    """Complete checkpoints to keep; older ones are deleted after a newer one is complete."""
    trainer_format: Literal["hf", "megatron"] = "hf"
    """hf: HF names, streamed to one writer, read by every backend; megatron: every rank writes its own shards while
    training waits, for models whose stream to one writer takes too long; resumes only in Megatron, in any layout."""

    @rule
    def a_format_has_its_backend(self, config: Config, key: Keys) -> Faults:
        """`trainer_format`: `"megatron"` needs that `trainer.backend`, and no `trainer.ema_decay`, for which the format
        has no place.
        """
        if self.trainer_format == "megatron" and config.trainer.backend != "megatron":
            backend = config.trainer.backend
            yield f"{key.trainer_format} needs trainer.backend='megatron'; it is {backend!r}; legal: 'hf'"
        if self.trainer_format == "megatron" and config.trainer.ema_decay != "off":
            yield (
                f"{key.trainer_format} with {key.trainer.ema_decay}: that format has no place for an average of "
                "weights; legal: 'hf', or ema_decay='off'"
            )


class BufferConfig(Section):
    """[buffer]: rollouts on disk."""

    segment_groups: Annotated[Positive, Usual(1, 1e6, GROUPS)] = 256
    """A segment is sealed after this many groups, 8.4 million tokens or a minute, whichever is first."""
    partial_interval_tokens: Annotated[Positive, USUAL_TOKENS] = 256
    """Running rollouts are reported each time they grow by this many tokens: the most of each that a death loses."""
    partial_interval_s: Annotated[Duration, Usual(0.05, 3600, SECONDS)] = 10.0
    """Or when they have grown at all for this long; at most a quarter of admission.lease_deadline_s."""
    keep_routes: Annotated[bool, only_with("algorithm.routing_replay")] = False
    """Keep the experts of each token in segments and in checkpoints' rollouts: of 48 layers with 128 experts, 8 a
    token, 250 bytes a token, where all else takes about 8."""

    @rule
    def reports_renew_leases(self, config: Config, key: Keys) -> Faults:
        """`partial_interval_s`: at most a quarter of `admission.lease_deadline_s`; some reports may be lost."""
        longest, default = (
            config.admission.longest_report_interval_s,
            BufferConfig.model_fields["partial_interval_s"].default,
        )
        if self.partial_interval_s > longest and self.partial_interval_s != default:
            yield (
                f"{key.partial_interval_s} has no effect with {key.admission.lease_deadline_s}, which reports renew; "
                f"legal: {default:g}, its default, or up to {longest:g}"
            )


class TransportConfig(Section):
    """[transport]: sockets between roles."""

    kind: Literal["auto", "ipc", "tcp"] = "auto"
    """ipc within one machine; tcp between machines; "auto": ipc for `rlhpc run`, tcp for Slurm jobs."""
    curve: bool = True
    """Encrypt, and admit only this run's keys. False leaves the sockets open to every user of the node."""
    dead_after_s: Annotated[Duration, Usual(1, 3600, SECONDS)] = 15.0
    """A role without a heartbeat for this long is treated as dead; each sends one every second, or more often."""

    @property
    def heartbeat_s(self) -> float:
        """Interval of heartbeats: a few late heartbeats must not count as a death."""
        return min(1.0, self.dead_after_s / 15)


WHOLE_RECORD = "*"  # as reference_field
MADE = "reasoning_gym"  # the task of a source
OWN_REWARD = "environment"  # as task: only the rewards of the environment's steps
MOST_PROBLEMS = 1_000_000  # from one source
COMPRESSIONS = (".gz", ".zst")


FOR_AGENTS = idle_with("data.environment", AGENT, why="an agent gets the record, and what it says is all that is read")


class DataConfig(Section):
    """[data]: prompts and their references; several datasets are a table [[data]] each."""

    path: LoosePath | None = None
    """A .jsonl, .json, .csv, .tsv, .parquet or .arrow file, plain, .gz or .zst; or a directory of them, also one that
    `datasets` saved; or of task directories in Harbor's form."""
    split: Annotated[str, only_with("data.path")] = ""
    """"train", "validation", "test": the files of a directory that are named so; "all": every file. Required where a
    directory has several splits."""
    source: str = ""
    """Instead of path: problems generated by a library, "reasoning_gym:chain_sum,leg_counting" (docs/data.md)."""
    size: Annotated[int, Field(gt=0, le=MOST_PROBLEMS), only_with("data.source")] = 1000
    """Number of problems to generate from source."""
    source_seed: Annotated[int, Field(ge=0, le=2000), only_with("data.source")] = 0
    """Seed of source; another seed shares no problems with this one, unless there are few: for evaluations."""
    levels: Annotated[tuple[int, ...], Field(strict=False), ANY_SIZE, only_with("data.source")] = ()
    """Difficulties of source, as its curricula number them from 0, with equally many problems of each; default: that of
    `settings`, or of the library."""
    settings: Annotated[dict[str, bool | int | float | str], ANY_SIZE, only_with("data.source")] = Field(default={})
    """Further arguments of the datasets of source: {max_terms = 4}."""
    task: str
    """Name of the reward function (docs/rewards.md lists them); optional with a source, which has its own."""
    environment: str = ""
    """What the policy interacts with over several turns (docs/environments.md): "tools", or package.module:Class;
    "gymnasium" or "verifiers": environment.id of these libraries; "container": a shell in a task's container; "agent":
    a program of yours that samples over HTTP (docs/environments.md); default: single-turn."""
    task_field: Annotated[str, only_with("data.tasks", why="the field's values, and the reward function of each")] = ""
    """Field of the record whose value `tasks` maps to a reward function; a record without it uses `task`."""
    tasks: Annotated[dict[str, str], only_with("data.task_field")] = Field(default={})
    """Reward functions by value of task_field: {"openai/gsm8k" = "math_answer"}."""
    prompt_template: Annotated[
        str, FOR_AGENTS, only_with("data.prompt_field", "", why="the prompt is the field, unchanged")
    ] = "{prompt}"
    """Filled with the record's fields: "Question: {question}\\nAnswer:". Nested fields take a dot: {info.question}."""
    prompt_field: Annotated[str, FOR_AGENTS] = ""
    """Instead of prompt_template: the field that holds the prompt, as text or as a list of chat messages, which go
    through the chat template; assistant messages at the end are left out."""
    system_prompt: Annotated[
        str,
        FOR_AGENTS,
        only_with_any("data.use_chat_template", "data.prompt_field", why="only chat templates have a system message"),
    ] = ""
    """System message put before the prompt, unless the record's messages have their own."""
    use_chat_template: bool = False
    """Wrap the prompt as a user message in the tokenizer's chat template; chat messages always are."""
    reference_field: str = "answer"
    """Field of the record that holds the reference, "reward_model.ground_truth" with a dot for each level; "*": the
    whole record; "": none, for a task that needs no reference."""
    teacher: str = ""
    """Name of the [[service]] of kind "teacher" for its prompts; default: the only one, where algorithm asks for a
    teacher."""
    thinking_end: Annotated[str, only_with("data.environment", "", why="it is told whole turns")] = ""
    """Text with which the model ends its thinking, "</think>": only what follows it is judged, and nothing if it never
    comes; default: the whole completion is judged."""
    shuffle: bool = True
    """A new seeded order in every epoch; False: file order."""
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]*$")] = ""
    """Name of this dataset in messages and TensorBoard; default: that of its file or directory, without suffix."""
    weight: Annotated[PositiveFloat, Usual(1e-4, 1e7, "weights of datasets count relative to each other")] = 1.0
    """Share of prompts drawn from this dataset, relative to the sum of all weights."""
    max_prompt_tokens: Annotated[Positive | None, ANY_SIZE] = None
    """A longer prompt of this dataset is refused before the run starts; none, and at most:
    generation.max_prompt_tokens."""
    max_completion_tokens: Annotated[Positive | None, ANY_SIZE] = None
    """Sampling of its completions stops here; none, and at most: generation.max_completion_tokens."""

    @property
    def may_be_chat(self) -> bool:
        """Whether prompts may use the chat template, as those of prompt_field do that are chat messages."""
        return self.use_chat_template or bool(self.prompt_field)

    @property
    def title(self) -> str:
        """Name of the dataset in messages and TensorBoard."""
        return self.name or (title_of(self.path) if self.path is not None else self.source.rpartition(":")[2])

    @property
    def place(self) -> str:
        """Origin of its records, for messages: source or path."""
        return self.source or str(self.path)

    @model_validator(mode="before")
    @classmethod
    def _source_has_its_own_task(cls, table: object) -> object:
        """Fill in `task` and `reference_field` for records made by a library: its own scorer, and its entries."""
        if isinstance(table, dict) and table.get("source"):
            table = {"task": MADE, **table}
            return {"reference_field": "entry", **table} if table["task"] == MADE else table
        return table

    @property
    def all_tasks(self) -> tuple[str, ...]:
        """Reward functions of this dataset's records, OWN_REWARD for the environment itself."""
        return tuple(dict.fromkeys((self.task, *self.tasks.values())))

    @rule
    def records_are_from_one_place(self, config: Config, key: Keys) -> Faults:
        """`path`, `source`: one of them; `levels` are from 0."""
        if bool(self.source) == (self.path is not None):
            said = f"{key.path} and source={self.source!r}" if self.source else f"{key}.path is not set, nor source"
            yield f"{said}; legal: one of them"
        if min(self.levels, default=0) < 0:
            yield f"{key.levels}; legal: from 0"

    @rule
    def limits_are_within_those_of_all(self, config: Config, key: Keys) -> Faults:
        """`max_prompt_tokens`, `max_completion_tokens`: at most those of `[generation]`, by which budgets are made."""
        for name in ("max_prompt_tokens", "max_completion_tokens"):
            limit, most = getattr(self, name), getattr(config.generation, name)
            if limit is not None and limit > most:
                yield f"{getattr(key, name)} is above {getattr(key.generation, name)}; legal: 1 to {most}"

    @rule
    def fields_are_of_records(self, config: Config, key: Keys) -> Faults:
        """`reference_field`: `"*"` with `composite.NAME.fields`, which are fields of records."""
        with_fields = [task for task in self.all_tasks if task in config.composite and config.composite[task].fields]
        if with_fields and self.reference_field != WHOLE_RECORD:
            yield f'{key.reference_field} with composite.{with_fields[0]}.fields, which are of records; legal: "*"'

    @rule
    def turns_are_separated(self, config: Config, key: Keys) -> Faults:
        """`environment`: needs `use_chat_template`, which separates [turns](../docs/environments.md), and for `task` =
        `"environment"` one that gives a reward, not `"tools"`.
        """
        if self.environment and not self.use_chat_template:
            yield (
                f"{key.environment} with use_chat_template=false: the model's chat template separates turns; legal: "
                "use_chat_template=true"
            )
        if OWN_REWARD in self.all_tasks and not self.environment:
            yield f"{key}.task={OWN_REWARD!r} needs {key}.environment, which gives the reward"
        if OWN_REWARD in self.all_tasks and self.environment == "tools":
            yield (
                f"{key.environment} with {key}.task={OWN_REWARD!r}: tools judge nothing; legal: a task that judges the "
                "last turn"
            )


def title_of(path: Path) -> str:
    """The name of a dataset's file or directory without suffixes."""
    return path.with_suffix("").stem if path.suffix in COMPRESSIONS else path.stem

"""The tables of a run file, one class each: what is trained, on what, how.  Where it runs is the site file's subject.

Frozen; unknown keys are refused; defaults are the recommended values.  Loads without torch.  config.py puts the tables
together and ties their keys; config_file.py reads files and overrides.  Units are part of names: _s, _bytes, _tokens,
_steps, _samples.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Duration = Annotated[float, Field(ge=0.01)]  # seconds; in less, nothing that is waited for can happen
Arguments = dict[str, bool | int | float | str]  # keyword arguments of the user's own code
LearningRate = Annotated[float, Field(gt=0, le=1)]


def _written_out(value: object) -> object:
    """An empty text would be the current directory, ~ and $NAME a directory of that name in it."""
    if isinstance(value, str):
        if not value or "\0" in value:
            raise ValueError("legal: a path")
        if _OF_A_SHELL.search(value) and not Path(value).exists():
            raise ValueError("~ and $NAME are not expanded; legal: the path written out")
    return value


COLDEST = 0.01  # temperature at which vLLM samples where one above 0 and below this is asked for
_OF_A_SHELL = re.compile(r"^~|\$[A-Za-z_{]")
LoosePath = Annotated[Path, Field(strict=False), BeforeValidator(_written_out)]  # a run file has strings


def _absolute(value: str) -> str:
    """Roles may run in another directory than the command."""
    return str(Path(str(_written_out(value))).absolute()) if value else value


def _program(value: str) -> str:
    """A name without a directory is looked up where it runs."""
    return _absolute(value) if "/" in value else value


NamedProgram = Annotated[str, AfterValidator(_program)]
NamedPath = Annotated[str, AfterValidator(_absolute)]  # "": none
NamedPaths = Annotated[
    tuple[str, ...], Field(strict=False), AfterValidator(lambda values: tuple(map(_absolute, values)))
]
Share = Annotated[float, Field(ge=0, le=1)]
MOST_STOPS, LONGEST_STOP = 16, 256  # stop strings, characters of one


def _can_be_found(texts: tuple[str, ...]) -> tuple[str, ...]:
    """An empty text stands before the first token; U+FFFD is what a decoder shows for bytes that are no character."""
    if len(texts) > MOST_STOPS or any(not 0 < len(text) <= LONGEST_STOP or "\ufffd" in text for text in texts):
        raise ValueError(
            f"legal: {MOST_STOPS} texts or fewer, each of 1 to {LONGEST_STOP} characters, none of them U+FFFD"
        )
    return texts


StopStrings = Annotated[tuple[str, ...], Field(strict=False), AfterValidator(_can_be_found)]


class Section(BaseModel):
    """Base of every table of the run file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class RunConfig(Section):
    """[run]: identity and length."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Name of the run, and of its directory unless `directory` is set."""
    directory: LoosePath | None = None
    """Run directory; default runs/NAME, relative to the current directory."""
    num_steps: Positive
    """Total optimiser steps, including those before a resume."""
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    """Seed of prompt order, sampling and random initial weights."""
    deterministic: bool = False
    """The same run again, or interrupted and resumed, has the same batches, losses and parameters, bit for bit: weights
    change only while nothing is being sampled, samples are drawn by (seed, group, sample), kernels are deterministic
    (docs/training.md says where that holds and what it costs)."""
    log_bytes: Annotated[int, Field(ge=1 << 20)] = 1 << 27
    """Bytes of one process's log in one attempt; of a longer one, as of a function of your own that prints in a loop,
    the beginning and the end stay, and a line between them says how much is left out."""


class ModelConfig(Section):
    """[model]: the checkpoint that is trained."""

    path: LoosePath
    """HF checkpoint directory: config.json, safetensors, tokenizer."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Dtype of the forward pass in trainer and engine; master weights and log-probabilities are float32."""
    chat_template_kwargs: dict[str, bool | int | float | str] = Field(default={})
    """Variables of the chat template, for every prompt: {enable_thinking = false}, {date_string = "26 Jul 2024"}."""


class GenerationConfig(Section):
    """[generation]: sampling and engines."""

    engine: Literal["vllm", "scripted"] = "vllm"
    """"scripted" draws tokens from a seeded table instead of a model; for tests of everything else."""
    num_replicas: Positive = 1
    """Generators started with the run."""
    tensor_parallel: Positive = 1
    """GPUs of one replica."""
    max_prompt_tokens: Positive
    """A longer prompt in the dataset is refused before the run starts."""
    max_completion_tokens: Positive
    """Sampling stops after this many tokens."""
    temperature: Annotated[float, Field(ge=COLDEST, le=2)] = 1.0
    """Divides the logits, in the engine and in the trainer. vLLM samples at 0.01 where less is asked for."""
    stop: StopStrings = ()
    """Texts that end a completion, or a turn of a dialogue, beside the tokenizer's end tokens: ["</answer>"]. The token
    that completes one is the last that is trained; the text before it is judged, or told to the environment."""
    endpoint: Literal["local", "network"] = "local"
    """Who can reach the generators' OpenAI-compatible endpoint for agents, with a key: programs on the same node, or on
    others too, unencrypted. It exists only with data.environment = "agent"."""
    max_num_seqs: Positive = 256
    """Upper bound of sequences decoded concurrently by one replica."""
    max_num_batched_tokens: Positive | None = None
    """Tokens of one engine step, prompts and decoding together; None: 8192 on CUDA, vLLM's default on CPU.  With seeded
    samples on CPU, where prompts are not split, at least the longest sequence and max_num_seqs more."""
    kv_cache_bytes: Positive | None = None
    """KV cache on each GPU of a replica; None: what gpu_memory_utilization leaves
    (on CPU: 256 MiB).  Required where trainer and engine share a GPU: neither can measure what the other will take."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of a GPU's memory for the engine; ignored if kv_cache_bytes is set."""
    enforce_eager: bool = False
    """No CUDA graphs: starts faster, decodes slower.  Always true on CPU."""
    recompute_kv: bool = False
    """Recompute the KV cache of running requests after a weight update; False keeps it (PipelineRL)."""
    prefix_caching: bool = True
    """Share the KV cache of equal prompts; salted by policy version."""
    seeded_samples: bool = False
    """Redraw a sample that was lost with its generator exactly as before, so that losses do not bias rollouts towards
    short ones (docs/algorithms.md). False: rollouts continue from the prefixes that generators report, which is nearly
    as good."""

    @property
    def max_tokens(self) -> int:
        """Of a prompt with its completion."""
        return self.max_prompt_tokens + self.max_completion_tokens


NO_WINDOW = 1 << 30  # groups: a batch may pass whom it will, as far as the bound on staleness lets it


class AdmissionConfig(Section):
    """[admission]: how much is in flight, and how stale it may become."""

    groups_per_step: Positive
    """Groups of one batch (P)."""
    group_size: Positive
    """Rollouts of one prompt (G)."""
    max_staleness: NonNegative = 1
    """Hard bound on (version being trained − version at admission) of every trained rollout; 0 is synchronous."""
    window_groups: Positive | None = None
    """A batch takes only groups that were admitted fewer than this many groups after the oldest one waiting (W); 1:
    strict order; default: as many as the bound allows, but 1 with run.deterministic."""
    step_parts: Positive | Literal["auto"] = "auto"
    """Parts in which a step may be trained: while the trainer would wait for its batch, it computes the gradients of
    finished groups, 1/step_parts of groups_per_step or more at once. "auto": 4, each of which fills a row of every
    data-parallel rank; 1 with pipeline stages, and where the loss or the advantages are over the whole batch."""
    lease_deadline_s: Duration = 600.0
    """A generator that delivers nothing and makes no progress for this long loses the lease, which is granted to
    another."""
    max_attempts: Positive = 5
    """Leases that one member may lose before its group is dropped; also consecutive groups of a prompt whose
    completions kill reward workers before it is no longer sampled."""
    active_sampling: bool = True
    """Replace zero-variance groups at once, so that batches are full; False trains on them, as "gae" and "reinforce_pp"
    need, whose advantages are not relative to the group."""
    max_groups_without_spread: Positive = 1000
    """Stop with advice after this many consecutive zero-variance groups, or errors without a verdict between them,
    instead of wasting the allocation."""

    @property
    def longest_report_interval_s(self) -> float:
        """Between two reports of a rollout that is being sampled: some may be lost before its lease expires."""
        return self.lease_deadline_s / 4

    @property
    def window(self) -> int:
        """W with its default filled in, of a run that is not deterministic."""
        return self.window_groups or NO_WINDOW

    @property
    def num_slots(self) -> int:
        """Groups admitted and not yet released, at most: those of S + 1 batches (docs/design.md, §4)."""
        return (self.max_staleness + 1) * self.groups_per_step


class TrainerConfig(Section):
    """[trainer]: backend, layout, optimiser."""

    backend: Literal["megatron", "deepspeed", "reference"] = "megatron"
    """Implementation of the trainer."""
    num_ranks: Positive = 1
    """Trainer processes; on CUDA one GPU each."""
    tensor_parallel: Positive = 1
    """Megatron: ranks over which every matrix is sharded."""
    sequence_parallel: bool = False
    """Megatron: shard norms and residuals over tensor-parallel ranks too, each with a part of the row."""
    pipeline_parallel: Positive = 1
    """Megatron: stages over which the layers are distributed."""
    chunks_per_stage: Positive = 1
    """Megatron: blocks of layers per stage; above 1, stages interleave."""
    context_parallel: Positive = 1
    """Megatron: ranks over which every packed row is split."""
    expert_parallel: Positive = 1
    """Megatron: ranks over which the experts of a mixture are distributed."""
    distributed_optimizer: bool = True
    """Megatron: shard optimiser state over data-parallel ranks."""
    overlap_grad_reduce: bool = False
    """Megatron: overlap gradient reduction with backward."""
    transformer_engine: bool = False
    """Megatron: attention by TransformerEngine, which must be installed."""
    zero_stage: Literal[1, 2, 3] = 2
    """DeepSpeed: shard optimiser state (1), gradients too (2), parameters too (3)."""
    optimizer_offload: bool = False
    """Keep the optimiser's state in host memory and step there."""
    parameter_offload: bool = False
    """DeepSpeed stage 3: keep parameters in host memory."""
    reference_memory: Literal["host", "device"] = "host"
    """Where the reference of algorithm.kl_coefficient is kept; from the host it crosses PCIe for every batch."""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | Literal["off"] = "off"
    """Decay per version of an exponential moving average of the float32 weights, kept in checkpoints, to export and
    evaluate."""
    ema_memory: Literal["host", "device"] = "host"
    """Where the average is kept; 4 bytes for each parameter whose optimiser state a rank holds."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """"auto": cuda if there is a device."""
    token_budget: Positive
    """Tokens of one packed micro-batch, never exceeded; at least max_prompt_tokens + max_completion_tokens."""
    recompute_activations: Literal["none", "selective", "full"] = "none"
    """Trade time for memory: recompute attention only (Megatron), or whole layers."""
    learning_rate: LearningRate = 1e-6
    """Peak learning rate, after warm-up."""
    warmup_steps: NonNegative = 0
    """Steps of linear warm-up from 0."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After warm-up: constant, or decay to min_learning_rate at the last step, or over the span of one of the next
    three keys."""
    decay_steps: Positive | None = None
    """linear, cosine: step at which min_learning_rate is reached; none: run.num_steps."""
    decay_tokens: Positive | None = None
    """Instead: trained tokens of the run, prompts included, as tokens/trained_total counts them."""
    decay_hours: PositiveFloat | None = None
    """Instead: hours in which the run trains, over all attempts."""
    min_learning_rate: Annotated[float, Field(ge=0)] = 0.0
    """Final learning rate of linear and cosine."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW weight decay, on matrices only."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the first moment."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of the second moment."""
    adam_eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    max_grad_norm: PositiveFloat = 1.0
    """Clip the global gradient norm to this; [guard] may skip steps where it spikes."""

    @property
    def data_parallel(self) -> int:
        """Replicas of the model, each with its own rows."""
        return self.num_ranks // (self.tensor_parallel * self.pipeline_parallel * self.context_parallel)


class WeightsConfig(Section):
    """[weights]: how new weights reach the generators."""

    transport: Literal["auto", "gloo", "nccl", "ipc"] = "auto"
    """"auto": on CUDA nccl with separate GPUs, ipc if trainer and engines share one; on CPU ipc on one host, gloo
    between hosts.  Not nccl with `run.deterministic`, whose two ends set NCCL differently."""
    bucket_bytes: Annotated[int, Field(ge=1 << 16)] = 256 << 20
    """Tensors travel in buckets of about this size; extra memory on the trainer is two buckets."""
    staging: Literal["auto", "shadow", "paused"] = "auto"
    """Where a version is kept until it is complete: "shadow": in host memory, while decoding continues; "paused":
    nowhere, sampling pauses while buckets are loaded as they arrive.  "auto": shadow on CPU and if host memory has
    room, else paused."""
    delta: Literal["auto", "off"] = "auto"
    """"auto": over gloo, send only the 16-bit weights that changed (lossless), if engines keep versions in host memory;
    the trainer keeps one too. Everything else, and versions that change much, is sent in full. "off":
    always everything."""
    full_every: Positive = 100
    """With deltas: one version in this many is sent in full, also the first of every epoch that a generator joins."""
    timeout_s: Duration = 120.0
    """A broadcast that takes longer is aborted, and its membership epoch is dissolved."""
    canary_every: NonNegative = 20
    """Versions between canary checks, in which every generator must reproduce the trainer's log-probabilities of a
    fixed row of tokens; always done at the start and after a generator has joined or failed. 0: only then."""
    max_canary_logratio: PositiveFloat | Literal["off"] | None = None
    """Mean absolute log-ratio of engine and trainer over that row, in nats, above which a generator is quarantined and
    gets the weights again. Unset: 0.01 in float32, 0.25 in bfloat16; "off": no checks."""

    @property
    def sends_changes(self) -> bool:
        """Whether versions may be sent as deltas; nccl and ipc send a whole one in less time than coding it takes."""
        return self.delta == "auto" and self.transport == "gloo"


class CheckpointConfig(Section):
    """[checkpoint]: what a resume starts from."""

    every_steps: Positive = 50
    """Steps between checkpoints; one is also written at the end of the run and on a graceful stop."""
    keep: Annotated[int, Field(ge=2)] = 2
    """Complete checkpoints to keep; older ones are deleted after a newer one is complete."""
    trainer_format: Literal["hf", "megatron"] = "hf"
    """hf: HF names, streamed to one writer, read by every backend; megatron: every rank writes its own shards while
    training waits, for models whose stream to one writer takes too long; resumes only in Megatron, in any layout."""


class BufferConfig(Section):
    """[buffer]: rollouts on disk."""

    segment_groups: Positive = 256
    """A segment is sealed after this many groups, 8.4 million tokens or a minute, whichever is first."""
    partial_interval_tokens: Positive = 256
    """Running rollouts are reported each time they grow by this many tokens: the most of each that a death loses."""
    partial_interval_s: Duration = 10.0
    """Or when they have grown at all for this long; at most a quarter of admission.lease_deadline_s."""


class TransportConfig(Section):
    """[transport]: sockets between roles."""

    kind: Literal["auto", "ipc", "tcp"] = "auto"
    """ipc within one machine; tcp between machines; "auto": ipc for `rlhpc run`, tcp for Slurm jobs."""
    curve: bool = True
    """Encrypt, and admit only this run's keys. False leaves the sockets open to every user of the node."""
    dead_after_s: Duration = 15.0
    """A role without a heartbeat for this long is treated as dead; each sends one every second, or more often."""

    @property
    def heartbeat_s(self) -> float:
        """Interval of heartbeats: one late heartbeat must not count as a death, nor a few."""
        return min(1.0, self.dead_after_s / 15)

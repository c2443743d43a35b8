"""The tables of a run file, one class each: what is trained, on what, how.  Where it runs is the site file's subject.

Frozen; unknown keys are refused; defaults are the recommended values.  Loads without torch.  rules.py puts the tables
together and ties their keys; file.py reads files and overrides.  Units are part of names: _s, _bytes, _tokens,
_steps, _samples.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

if TYPE_CHECKING:
    from rlhpc.config.rules import Config


# ------------------------------------------------------------------------------------------------------ config sections


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


# ---------------------------------------------------------------------------------------------------------- config data
#
# The tables [data] of a run file, and their rules.  Loads without torch.


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
    """A .jsonl, .json, .csv, .tsv, .parquet or .arrow file, plain, .gz or .zst; or a directory of them, also one that
    `datasets` saved."""
    split: str = ""
    """"train", "validation", "test": the files of a directory that are named so; "all": every file. Required where a
    directory has several splits."""
    source: str = ""
    """Instead of path: problems generated by a library, "reasoning_gym:chain_sum,leg_counting" (docs/data.md)."""
    size: Annotated[int, Field(gt=0, le=MOST_PROBLEMS)] = 1000
    """Number of problems to generate from source."""
    source_seed: Annotated[int, Field(ge=0, le=2000)] = 0
    """Seed of source; another seed shares no problems with this one, unless there are few: for evaluations."""
    levels: Annotated[tuple[int, ...], Field(strict=False)] = ()
    """Difficulties of source, as its curricula number them from 0, with equally many problems of each; default: that of
    `settings`, or of the library."""
    settings: dict[str, bool | int | float | str] = Field(default={})
    """Further arguments of the datasets of source: {max_terms = 4}."""
    task: str
    """Name of the reward function (docs/rewards.md lists them); optional with a source, which has its own."""
    environment: str = ""
    """What the policy interacts with over several turns (docs/environments.md): "tools", or package.module:Class;
    "gymnasium" or "verifiers": environment.id of these libraries; "agent": a program of yours that samples over HTTP
    (docs/environments.md); default: single-turn."""
    task_field: str = ""
    """Field of the record whose value `tasks` maps to a reward function; a record without it uses `task`."""
    tasks: dict[str, str] = Field(default={})
    """Reward functions by value of task_field: {"openai/gsm8k" = "math_answer"}."""
    prompt_template: str = "{prompt}"
    """Filled with the record's fields: "Question: {question}\\nAnswer:". Nested fields take a dot: {info.question}."""
    prompt_field: str = ""
    """Instead of prompt_template: the field that holds the prompt, as text or as a list of chat messages, which go
    through the chat template; assistant messages at the end are left out."""
    system_prompt: str = ""
    """System message put before the prompt, unless the record's messages have their own; needs a chat template."""
    use_chat_template: bool = False
    """Wrap the prompt as a user message in the tokenizer's chat template; chat messages always are."""
    reference_field: str = "answer"
    """Field of the record that holds the reference, "reward_model.ground_truth" with a dot for each level; "*": the
    whole record."""
    thinking_end: str = ""
    """Text with which the model ends its thinking, "</think>": only what follows it is judged, and nothing if it never
    comes; default: the whole completion is judged. Single-turn."""
    shuffle: bool = True
    """A new seeded order in every epoch; False: file order."""
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]*$")] = ""
    """Name of this dataset in messages and TensorBoard; default: that of its file or directory, without suffix."""
    weight: PositiveFloat = 1.0
    """Share of prompts drawn from this dataset, relative to the sum of all weights."""
    max_prompt_tokens: Positive | None = None
    """A longer prompt of this dataset is refused before the run starts; none, and at most:
    generation.max_prompt_tokens."""
    max_completion_tokens: Positive | None = None
    """Sampling of its completions stops here; none, and at most: generation.max_completion_tokens."""

    @property
    def may_be_chat(self) -> bool:
        """Whether the chat template may make its prompts: it makes those of prompt_field that are chat messages."""
        return self.use_chat_template or bool(self.prompt_field)

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
                "field, unchanged; legal: one of them"
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


def thinking_is_of_single_turns(config: Config) -> None:
    """An environment and an agent's program are told whole turns."""
    for place, dataset in enumerate(config.data):
        if dataset.thinking_end and dataset.environment:
            raise ValueError(
                f"{_where(config, place, 'thinking_end')}={dataset.thinking_end!r} with "
                f"environment={dataset.environment!r}, which is told whole turns; legal: leave one of them out"
            )


DATA = (
    records_are_from_one_place,
    datasets_are_told_apart,
    limits_of_datasets_are_within_those_of_all,
    prompts_are_made_in_one_way,
    tasks_of_records_are_named,
    thinking_is_of_single_turns,
)


# --------------------------------------------------------------------------------------------------------- config tasks
#
# Tables of the run file for reward functions (docs/rewards.md).  Loads without torch.


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

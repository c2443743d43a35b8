"""The memory report of `rlhpc check`: a table, and whether the layout fits the GPUs of a site.

In this file: host memory; a trainer's rank; an engine; one GPU for all; advice; the report.

Input: a Config, a ModelShape and a site file.  Output: lines, or a ConfigError that names a change that would fit.
Every number is an estimate (memory_plan.py).
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any

from launch.checks.memory_plan import (
    GIB,
    EngineMemory,
    RankMemory,
    fullest,
    indivisible,
    least_cache_bytes,
    legal_ranks,
    plan_engine,
    plan_memory,
)
from launch.checks.services import service_memory_lines
from launch.plan.gpu_map import EVALUATING, GpuMap
from launch.plan.site_file import GPU_MEMORY_GIB, GpuConfig, Site, load_site
from rlhpc.config.rules import Config, obeys_rules, with_values
from rlhpc.config.toml import as_override
from rlhpc.models.shape import ModelShape, ParallelLayout
from rlhpc.protocol.errors import ConfigError

# --------------------------------------------------------------------------------------------------------- host verdict
#
# Check that the host memory requested for a trainer's task is enough for its rank, which Slurm would otherwise kill.
#
# Input: a Config, a ModelShape and a site file.  Output: lines, or a ConfigError.  An estimate (memory_plan.py).


# Guess: Python, torch and other libraries, the host's part of CUDA, buffers of NCCL and gloo, rows and weights in
# transit.  Imports alone took 0.4 GiB with torch for CPU; nothing was measured with CUDA.
PROCESS_ALLOWANCE = 8 * GIB
_FEW = 4 * GIB  # of a plan: below it the guess dominates


def judge_host(config: Config, shape: ModelShape, site: Site, source: Path) -> list[str]:
    """A line, or "" if little is needed and no limit is set.

    Raises ConfigError if trainer.memory_gib_per_gpu is too little for the fullest rank, even without the guess.
    """
    rank = max(plan_memory(config, shape), key=lambda each: each.host)
    need = (rank.host + PROCESS_ALLOWANCE) / GIB
    given, least = site.trainer.memory_gib_per_gpu, math.ceil(need)
    moment = "loads the whole model" if rank.host_loading > rank.host_training else "trains and saves"
    words = (
        f"a rank of stage {rank.stage} needs {need:.1f} GiB of host memory while it {moment} "
        f"(estimate; {PROCESS_ALLOWANCE // GIB} of them the process)"
    )
    if given is None:
        default = f"trainer.memory_gib_per_gpu is not in {source}: the partition's default must be {least} GiB a GPU"
        return [f"warning     {default}; {words}"] if rank.host > _FEW else []
    if given == 0:
        return [f"host        trainer.memory_gib_per_gpu=0, all of a node: {words}"]
    spare = given - need
    if given * GIB < rank.host:
        raise ConfigError(
            f"trainer.memory_gib_per_gpu={given} in {source}: {words}, {-spare:.1f} GiB more; "
            f"would fit: memory_gib_per_gpu={least}"
        )
    if spare >= 0:
        return [f"host        {given} GiB of trainer.memory_gib_per_gpu: {spare:.1f} GiB to spare (an estimate)"]
    if rank.host <= _FEW:
        return [f"host        {given} GiB of trainer.memory_gib_per_gpu: not judged: {words}"]
    return [f"warning     trainer.memory_gib_per_gpu={given} in {source}: {words}; would fit: {least}"]


# ------------------------------------------------------------------------------------------------------ trainer verdict
#
# Check that a trainer rank fits a GPU of its own; if not, advise a change of [trainer].
#
# Input: a Config, its model and a limit.  Output: nothing, or a ConfigError with one line of advice.  Tries the usual
# changes in the usual order, with the formulas of memory_plan.py, so that the advice is an estimate, too.

Change = dict[str, Any]  # key → value


def refuse_trainer(
    config: Config, model: Mapping[str, Any], shape: ModelShape, rank: RankMemory, memory_gib: float, gpu: str
) -> None:
    """Raises ConfigError with a change that fits.  gpu: words for which GPU that is and who says so."""
    need = rank.peak / GIB
    if need > memory_gib:
        raise ConfigError(
            f"{_layout_keys(config)}: a rank of stage {rank.stage} needs {need:.1f} GiB (estimate), "
            f"{need - memory_gib:.1f} GiB more than the {memory_gib:.4g} GiB of {gpu}; "
            f"{advise(config, model, shape, memory_gib)}"
        )


def _layout_keys(config: Config) -> str:
    trainer = config.trainer
    if trainer.backend == "deepspeed":
        keys = ["num_ranks", "zero_stage"]
    elif trainer.backend == "megatron":
        keys = ["num_ranks", "tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel"]
        keys = keys[:3] + [key for key in keys[3:] if getattr(trainer, key) > 1]
    else:
        keys = ["num_ranks"]
    words = [f"{key}={getattr(trainer, key)}" for key in (*keys, "token_budget")]
    return f"trainer.backend={trainer.backend!r} with {', '.join(words)}"


def advise(config: Config, model: Mapping[str, Any], shape: ModelShape, limit_gib: float) -> str:
    """The first change of [trainer] that fits, cheapest first, as overrides behind `rlhpc check RUN.toml`.

    limit_gib: memory of one GPU.  Keys that a change does not need are left out.
    """

    def need(change: Change) -> float:
        changed = _legal(config, change, model)
        return math.inf if changed is None else fullest(plan_memory(changed, shape)).peak / GIB

    for change in _trainer_changes(config):
        if need(change) <= limit_gib:
            change = without_needless(change, lambda fewer: need(fewer) <= limit_gib)
            return f"{_would_fit(change)} ({need(change):.1f} GiB)"
    return "no layout that was tried fits: take larger GPUs, more of them, or a smaller model"


def _would_fit(change: Change) -> str:
    return f"would fit: {' '.join(f'{key}={as_override(value)}' for key, value in change.items())}"


def without_needless(change: Change, fits: Callable[[Change], bool]) -> Change:
    """A change that fits, reduced to the keys that it needs."""
    for key in list(change):
        fewer = {name: value for name, value in change.items() if name != key}
        change = fewer if fits(fewer) else change
    return change


_HARSH = ("trainer.token_budget", "trainer.optimizer_offload")


def _trainer_changes(config: Config) -> Iterator[Change]:
    """Changes in the order of manual trials: cheap ones, alone and then together; then more GPUs."""
    cheap = list(cheap_changes(config))
    yield from cheap
    nothing, *together = itertools.accumulate(cheap, operator.or_, initial=Change())
    yield from together
    # With more GPUs, cheap changes; half the tokens and an offloaded optimiser only if nothing else helps.
    everything = together[-1] if together else nothing
    gentle = {key: value for key, value in everything.items() if key not in _HARSH}
    wider = list(_wider(config))
    for change in wider:
        yield from (change, gentle | change)
    yield from (everything | change for change in wider)


def cheap_changes(config: Config) -> Iterator[Change]:
    """Changes on the same ranks, cheapest first, without those already set or never legal here."""
    trainer = config.trainer
    longest = config.generation.max_tokens
    changes: tuple[Change, ...] = (
        {"reference_memory": "host"},
        {"ema_memory": "host"},
        {"distributed_optimizer": True},
        {"sequence_parallel": True},
        *({"zero_stage": stage} for stage in range(trainer.zero_stage + 1, 4) if trainer.backend == "deepspeed"),
        *({"recompute_activations": kind} for kind in ("selective", "full") if trainer.recompute_activations != "full"),
        {"token_budget": max(longest, trainer.token_budget // 2)},
        {"optimizer_offload": True},
    )
    for change in map(_of_trainer, changes):
        changed = with_values(config, change)
        if changed != config and obeys_rules(changed):
            yield change


def _wider(config: Config) -> Iterator[Change]:
    """Layouts with smaller parts, fewest ranks first."""
    trainer = config.trainer
    if trainer.backend in ("megatron", "reference"):  # the reference backend does not shard
        other = {} if trainer.backend == "megatron" else {"backend": "megatron"}
        for change in sorted(_wider_megatron(config), key=lambda change: change["num_ranks"]):
            yield _of_trainer(other | change)
    if trainer.backend == "deepspeed":
        yield from ({"trainer.num_ranks": factor * trainer.num_ranks} for factor in (2, 4, 8, 16, 32))


def _of_trainer(change: Change) -> Change:
    return {f"trainer.{key}": value for key, value in change.items()}


def _wider_megatron(config: Config) -> Iterator[Change]:
    """More replicas to share the optimiser, tensor ranks up to a node of eight, more stages."""
    trainer = config.trainer
    tensors = [trainer.tensor_parallel * factor for factor in (1, 2, 4, 8) if trainer.tensor_parallel * factor <= 8]
    for stages, tensor in itertools.product((1, 2, 4, 8, 16), tensors or [trainer.tensor_parallel]):
        pipeline = trainer.pipeline_parallel * stages
        replica = tensor * pipeline * trainer.context_parallel
        layout: Change = {"tensor_parallel": tensor, "pipeline_parallel": pipeline}
        layout |= {"sequence_parallel": True} if tensor > 1 else {}
        for num_ranks in sorted({trainer.num_ranks, replica, replica * trainer.data_parallel, 2 * trainer.num_ranks}):
            if num_ranks >= trainer.num_ranks:
                yield {"num_ranks": num_ranks, **layout}


def _legal(config: Config, change: Change, model: Mapping[str, Any]) -> Config | None:
    """The run file with `change`, or None if a rule or the model forbids it."""
    changed = with_values(config, change)
    if not obeys_rules(changed):
        return None
    try:
        if changed.trainer.backend == "megatron":
            ParallelLayout.of(changed.trainer).refuse_unfit(model)
    except ConfigError:
        return None
    return changed


# ------------------------------------------------------------------------------------------------------- engine verdict
#
# Check that an engine fits GPUs of its own, new weights included; if not, advise a change.
#
# Input: a Config, a ModelShape and the memory of a GPU.  Output: nothing, or a ConfigError.  An estimate.

BUCKETS = (256 << 20, 64 << 20)  # below, a broadcast is all latency
SHARES = (0.85, 0.8, 0.75, 0.7, 0.6, 0.5)


def refuse_engine(config: Config, shape: ModelShape, memory_gib: float, gpu: str) -> None:
    """Raises ConfigError with a change that fits.  gpu: words for which GPU that is and who says so."""
    refuse_small_cache(config, shape)
    complaint = _complaint(config, shape, memory_gib)
    if complaint:
        raise ConfigError(f"{complaint} of {gpu}; {_engine_advice(config, shape, memory_gib)}")


def refuse_unfit_ranks(config: Config, model: Mapping[str, Any], shape: ModelShape | None) -> None:
    """Raise ConfigError if vLLM cannot split the model over the GPUs of a replica; model: config.json."""
    ranks, heads = config.generation.tensor_parallel, int(model.get("num_attention_heads") or 0)
    if shape is not None:
        size, legal = indivisible(shape, ranks), legal_ranks(shape)
    else:  # for other families only the heads are known
        size = f"num_attention_heads={heads}" if heads % ranks else ""
        legal = tuple(number for number in range(1, heads + 1) if heads % number == 0)
    if size:
        raise ConfigError(
            f"generation.tensor_parallel={ranks} does not divide {size} of {config.model.path / 'config.json'}; "
            f"legal: {', '.join(map(str, legal))}"
        )


def refuse_small_cache(config: Config, shape: ModelShape) -> None:
    """Raise ConfigError if generation.kv_cache_bytes is too small for vLLM to start."""
    given, least = config.generation.kv_cache_bytes, least_cache_bytes(config, shape)
    if given is not None and given < least:
        raise ConfigError(
            f"generation.kv_cache_bytes={given} cannot hold one sequence of max_prompt_tokens + max_completion_tokens; "
            f"legal: {least} or more"
        )


def _complaint(config: Config, shape: ModelShape, memory_gib: float) -> str:
    """Description of what does not fit; "" if all does."""
    generation, need = config.generation, plan_engine(config, shape)
    engine, beside = need.engine / GIB, need.beside / GIB
    parts = f"weights {need.weights / GIB:.1f}, KV cache {need.kv_cache / GIB:.1f}"
    if generation.kv_cache_bytes is not None:
        words = f"engine ({parts}) and new weights while they arrive ({beside:.1f}) need {engine + beside:.1f} GiB"
        too_much, limit = engine + beside > memory_gib, memory_gib
        key = f"generation.kv_cache_bytes={generation.kv_cache_bytes}"
    elif engine > (limit := generation.gpu_memory_utilization * memory_gib):
        words, too_much = f"an engine needs at least {engine:.1f} GiB ({parts})", True
        key = f"generation.tensor_parallel={generation.tensor_parallel}"
    else:
        limit = memory_gib - limit
        words, too_much = f"new weights need {beside:.1f} GiB beside the engine while they arrive", beside > limit
        key = f"generation.gpu_memory_utilization={generation.gpu_memory_utilization:g}"
    return f"{key}: {words} (estimate), more than the {limit:.1f} GiB they may use" if too_much else ""


def _engine_advice(config: Config, shape: ModelShape, memory_gib: float) -> str:
    for change in _engine_changes(config, shape):
        if not _complaint(with_values(config, change), shape, memory_gib):
            return _would_fit(change)
    return "no setting that was tried fits: take larger GPUs or a smaller model"


def _engine_changes(config: Config, shape: ModelShape) -> Iterator[Change]:
    """Changes, cheapest first: smaller buckets, then less KV cache, then more GPUs a replica."""
    generation = config.generation
    shares: list[Change] = [{}]
    if generation.kv_cache_bytes is None:
        smaller = [share for share in SHARES if share < generation.gpu_memory_utilization]
        shares += [{"generation.gpu_memory_utilization": share} for share in smaller]
    ranks: list[Change] = [{}]
    wider = [n for n in legal_ranks(shape) if n > generation.tensor_parallel and (n <= 8 or n % 8 == 0)]
    ranks += [{"generation.tensor_parallel": n} for n in wider]
    for wide, share, bucket in itertools.product(ranks, shares, _smaller_buckets(config)):
        yield {**wide, **share, **bucket}


def _smaller_buckets(config: Config) -> list[Change]:
    """No change, then each smaller size."""
    return [{}, *({"weights.bucket_bytes": size} for size in BUCKETS if size < config.weights.bucket_bytes)]


# ------------------------------------------------------------------------------------------------------- device verdict
#
# Check that all processes of a run that share one GPU of this machine fit into its memory.
#
# Input: a Config, its model, the GPUs of each process, and their sizes.  Output: a line, or a ConfigError that names
# every share, and a change that fits.  An estimate (memory_plan.py).  Peaks are added although they rarely coincide:
# torch keeps freed memory, so that the other process cannot use it.

AN_ESTIMATE = "an estimate; nothing was measured"
_CACHE_STEP = 64 << 20  # an advised cache is a multiple of it, for readability


@dataclass(frozen=True, slots=True)
class GpuShare:
    """Share of one process of a GPU."""

    process: str  # "trainer-0"
    parts: Mapping[str, int]  # description → bytes

    @property
    def total(self) -> int:
        """Bytes."""
        return sum(self.parts.values())

    def describe(self) -> str:
        """The memory in GiB, part by part."""
        parts = ", ".join(f"{words} {value / GIB:.1f}" for words, value in self.parts.items() if value)
        return f"{self.process} {self.total / GIB:.1f} ({parts})"


def judge_devices(
    config: Config, model: Mapping[str, Any], shape: ModelShape, gpus: GpuMap, memory_gib: Mapping[str, float]
) -> str:
    """Line with the spare memory of the fullest GPU.  Raises ConfigError if one has too little.

    memory_gib: of each GPU, by its word of CUDA_VISIBLE_DEVICES; missing GPUs are not judged.
    """
    spare: dict[str, float] = {}
    holders = _holders(gpus)
    known = [word for word in holders if word in memory_gib]
    for word, processes in ((word, holders[word]) for word in known):
        _refuse(config, model, shape, processes, word, memory_gib[word])
        spare[word] = memory_gib[word] - _total(config, shape, processes) / GIB
    if len(known) < len(holders):
        unknown = next(word for word in holders if word not in known)
        return f"fits        not judged: the memory of GPU {unknown} is not known"
    word = min(spare, key=spare.__getitem__)
    shares = [_share(config, shape, process) for process in holders[word]]
    sums = " + ".join(f"{share.process} {share.total / GIB:.1f}" for share in shares)
    return f"fits        {_named(word, memory_gib[word])}: {sums} GiB, {spare[word]:.1f} GiB to spare ({AN_ESTIMATE})"


def _holders(gpus: GpuMap) -> dict[str, list[str]]:
    """GPU → processes on it; an evaluation with GPUs of its own has a generator's engine, services are judged apart."""
    holders: dict[str, list[str]] = {}
    for process, words in gpus.devices.items():
        for word in words if process != EVALUATING and not process.startswith("service-") else ():
            holders.setdefault(word, []).append(process)
    return holders


def _refuse(
    config: Config, model: Mapping[str, Any], shape: ModelShape, processes: list[str], word: str, limit: float
) -> None:
    if len(processes) > 1:
        _refuse_together(config, shape, processes, word, limit)
    elif _is_engine(processes[0]):
        refuse_engine(config, shape, limit, f"{_named(word, limit)}, {processes[0]}'s own")
    else:
        refuse_trainer(
            config, model, shape, _rank(config, shape, processes[0]), limit, f"GPU {word}, {processes[0]}'s own"
        )


def _refuse_together(config: Config, shape: ModelShape, processes: list[str], word: str, limit: float) -> None:
    if any(map(_is_engine, processes)):
        refuse_small_cache(config, shape)
    shares, total = [_share(config, shape, each) for each in processes], _total(config, shape, processes) / GIB
    if total > limit:
        keys = ["trainer.token_budget"] if not all(map(_is_engine, processes)) else []
        keys += ["generation.kv_cache_bytes"] if any(map(_is_engine, processes)) else []
        raise ConfigError(
            f"{' and '.join(f'{key}={attrgetter(key)(config)}' for key in keys)}: "
            f"{' + '.join(share.describe() for share in shares)} = {total:.1f} GiB (estimate), "
            f"{total - limit:.1f} GiB more than {_named(word, limit)} has; "
            f"{_device_advice(config, shape, processes, limit)}"
        )


def _named(word: str, limit: float) -> str:
    return f"GPU {word} ({limit:.4g} GiB)"


def _is_engine(process: str) -> bool:
    return process.startswith("generator-")


def _rank(config: Config, shape: ModelShape, process: str) -> RankMemory:
    plan = plan_memory(config, shape)
    return plan[int(process.rpartition("-")[2]) * len(plan) // config.trainer.num_ranks]


def _total(config: Config, shape: ModelShape, processes: list[str]) -> int:
    return sum(_share(config, shape, process).total for process in processes)


def _share(config: Config, shape: ModelShape, process: str) -> GpuShare:
    if _is_engine(process):
        need = plan_engine(config, shape)
        return GpuShare(
            process,
            {
                "weights": need.weights,
                "KV cache": need.kv_cache,
                "new weights while they arrive": need.beside,
                "CUDA, activations": need.allowance,
            },
        )
    rank = _rank(config, shape, process)
    return GpuShare(
        process,
        {
            "weights": rank.parameters,
            "gradients": rank.gradients,
            "optimiser": rank.optimizer,
            "ZeRO buckets": rank.buckets,
            "reference": rank.reference,
            "average of weights": rank.average,
            "a step or an export": rank.moment,
            "CUDA, NCCL, fragments": rank.allowance,
        },
    )


# -------------------------------------------------------------------------------------------------- what would fit


def _device_advice(config: Config, shape: ModelShape, processes: list[str], limit: float) -> str:
    """The first change that fits: less cache, then smaller buckets, then less memory of the trainer."""

    def fits(change: Change) -> bool:
        changed = with_values(config, change)
        return obeys_rules(changed) and _total(changed, shape, processes) <= limit * GIB

    for change in _device_changes(config, processes):
        found = _with_smaller_cache(config, change, shape, processes, limit)
        if found is None:
            continue
        found = without_needless(found, fits)
        need = _total(with_values(config, found), shape, processes) / GIB
        return f"{_would_fit(found)} ({need:.1f} GiB)"
    return "no setting that was tried fits: give trainer and engine GPUs of their own, or take a smaller model"


def _device_changes(config: Config, processes: list[str]) -> Iterator[Change]:
    trainer: list[Change] = [{}]
    if not all(map(_is_engine, processes)):
        alone = [*cheap_changes(config)]
        trainer += [*alone, *itertools.accumulate(alone, operator.or_)]
    for cheaper, smaller in itertools.product(trainer, _smaller_buckets(config)):
        yield cheaper | smaller


def _with_smaller_cache(
    config: Config, change: Change, shape: ModelShape, processes: list[str], limit: float
) -> Change | None:
    """`change`, with the KV cache reduced to what fits; None if that does not fit."""
    changed = with_values(config, change)
    if not obeys_rules(changed):
        return None
    engines = sum(map(_is_engine, processes))
    excess = _total(changed, shape, processes) - int(limit * GIB)
    if excess <= 0:
        return change or None
    if not engines:
        return None
    room = plan_engine(changed, shape).kv_cache - -(-excess // engines)
    if room < least_cache_bytes(changed, shape):
        return None
    return {**change, "generation.kv_cache_bytes": room // _CACHE_STEP * _CACHE_STEP or room}


# -------------------------------------------------------------------------------------------------------------- verdict

NOBODY = GpuMap()
NOTHING_KNOWN: Mapping[str, float] = MappingProxyType({})

_ROWS = (
    ("parameters", "parameters"),
    ("gradients", "gradients"),
    ("optimizer", "optimiser"),
    ("buckets", "ZeRO buckets"),
    ("reference", "reference"),
    ("average", "average of weights"),
    ("activations", "in a step: activations"),
    ("head", "in a step: logits, head"),
    ("optimizer_scratch", "in the update: gradients again"),
    ("export", "in an export: buckets"),
    ("allowance", "CUDA, NCCL, fragments"),
    ("peak", "fullest moment"),
    ("host_loading", "host, while loading: whole model"),
    ("host_optimizer", "host: offload"),
    ("host_snapshot", "host: checkpoint"),
    ("host_reference", "host: reference"),
    ("host_average", "host: average of weights"),
    ("host_image", "host: weights as sent"),
)


def memory_report(
    config: Config,
    model: Mapping[str, Any],
    shape: ModelShape | None,
    site_file: Path | None,
    gpus: GpuMap = NOBODY,
    memory_gib: Mapping[str, float] = NOTHING_KNOWN,
) -> str:
    """Lines of `rlhpc check` about memory.  Raises ConfigError: illegal site file, GPUs or host memory too small.

    gpus, memory_gib: the GPUs of each process on this machine, and their sizes; used without a site.
    """
    site = load_site(site_file) if site_file else None
    of_run = _memory_of_run(config, model, shape, site, site_file, gpus, memory_gib)
    return "\n".join([of_run, *service_memory_lines(config, gpus, memory_gib, site, site_file)])


def _memory_of_run(
    config: Config,
    model: Mapping[str, Any],
    shape: ModelShape | None,
    site: Site | None,
    site_file: Path | None,
    gpus: GpuMap,
    memory_gib: Mapping[str, float],
) -> str:
    """Lines about trainer and generators."""
    if shape is None:
        return f"memory      not known for model_type={model.get('model_type')!r}"
    plan = plan_memory(config, shape)
    engine = None if config.is_supervised else plan_engine(config, shape)
    if site is None and not gpus.devices:  # there is no GPU here
        also = "" if engine is None else f" and {engine.total / GIB:.1f} GiB an engine"
        return (
            f"memory      on GPUs about {fullest(plan).peak / GIB:.1f} GiB a rank{also}; --site SITE.toml shows the "
            "estimate and judges it"
        )
    table = "\n".join([describe_memory(plan), *([] if engine is None else [describe_engine(engine)])])
    if site is None or site_file is None:
        return f"{table}\n{judge_devices(config, model, shape, gpus, memory_gib)}"
    if config.trainer.device == "cpu":
        return f"{table}\nfits        not judged: trainer.device='cpu'"
    fits = judge_memory(config, model, shape, site, site_file)
    return "\n".join([table, fits, *judge_host(config, shape, site, site_file)])


def describe_memory(plan: tuple[RankMemory, ...]) -> str:
    """A table with a column for the first stage, the last, and the fullest if it is another."""
    stages = sorted({0, fullest(plan).stage, len(plan) - 1})
    lines = ["memory      estimate, GiB a rank    " + "".join(f"{f'stage {stage}':>10}" for stage in stages)]
    for name, text in _ROWS:
        values = [getattr(plan[stage], name) for stage in stages]
        if any(values):
            lines.append(f"  {text:<34}" + "".join(f"{value / GIB:>10.2f}" for value in values))
    return "\n".join(lines)


def describe_engine(need: EngineMemory) -> str:
    """A table for one GPU of a generator."""
    rows = {
        "weights": need.weights,
        "KV cache, at least": need.kv_cache,
        "new weights, arriving": need.beside,
        "CUDA, activations": need.allowance,
        "all, at least": need.total,
    }
    lines = [f"  {text:<34}{value / GIB:>10.2f}" for text, value in rows.items()]
    return "\n".join(["engine      estimate, GiB a GPU", *lines])


def judge_memory(config: Config, model: Mapping[str, Any], shape: ModelShape, site: Site, source: Path) -> str:
    """Lines with spare memory, or the GPU of unknown size.  Raises ConfigError if trainer or engine cannot fit."""
    said, has_engine = list[str](), config.generation.has_model
    limit, engine_gib = site.trainer.memory_gib, site.generation.memory_gib
    if has_engine and engine_gib is not None:
        gpu = f"{_gpu_of('generation', site.generation)} ({engine_gib:g} GiB) in {source}"
        refuse_engine(config, shape, engine_gib, gpu)
    if limit is not None:
        gpu, rank = _gpu_of("trainer", site.trainer), fullest(plan_memory(config, shape))
        refuse_trainer(config, model, shape, rank, limit, f"{gpu} in {source}")
        said = [f"fits        {limit:g} GiB of {gpu}: {limit - rank.peak / GIB:.1f} GiB to spare ({AN_ESTIMATE})"]
    unknown = ["trainer.gpu"] * (limit is None) + ["generation.gpu"] * (has_engine and engine_gib is None)
    if unknown:
        legal = f"legal: {', '.join(sorted(GPU_MEMORY_GIB))}, or gpu_memory_gib"
        lacks = f"{source} lacks {' and '.join(unknown)}, so that the GPU's memory is not known"
        said.append(f"fits        not judged: {lacks}; {legal}")
    return "\n".join(said)


def _gpu_of(name: str, section: GpuConfig) -> str:
    return f"{name}.gpu={section.gpu!r}" if section.gpu else f"{name}.gpu_memory_gib={section.gpu_memory_gib:g}"

"""Check the models of services, [[service]], before anything is started: checkpoints, addresses, memory.

Input: Config, the GPUs of this machine or a site file.  Output: lines of `rlhpc check`, or a ConfigError.  Memory is an
estimate by the formulas of memory_plan.py, without what only generators hold: new weights that arrive.
"""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.checks.memory_plan import ENGINE_ALLOWANCE, GIB, indivisible, least_cache_bytes, legal_ranks, plan_engine
from launch.checks.model_files import read_model, refuse_other_vocabulary
from launch.common.text import counted
from launch.plan.gpu_map import GpuMap
from launch.plan.processes import service_shares
from launch.plan.site_file import Site
from rlhpc.config.rules import Config
from rlhpc.config.tables_models import ServiceConfig
from rlhpc.data.tokenizer import PromptTokenizer
from rlhpc.generation.factory import service_settings
from rlhpc.models.shape import ModelShape
from rlhpc.protocol.errors import ConfigError

# --------------------------------------------------------------------------------------------------------- checkpoints

# Ends of architectures that score: classifiers, and process reward models as vLLM knows them.
SCORING = ("ForSequenceClassification", "ForTokenClassification", "RewardModel")
ANSWER_S = 3.0  # for a server at a url to answer


def refuse_unfit_services(config: Config) -> None:
    """Check the checkpoints of the services that the run starts.

    Raises ConfigError: a directory without config.json, tokenizer or weights; a reward model without a head that
    scores, or another service with one; a judge without a chat template; a tokenizer of another model; a
    tensor_parallel that does not divide the model; a KV cache too small for one sequence.
    """
    for service in config.started_services:
        _refuse_unfit(config, service, _key_of(config, service))


def _key_of(config: Config, service: ServiceConfig) -> str:
    """Key of a service's table in messages: "service", of several "service.0"."""
    return "service" if len(config.service) == 1 else f"service.{config.service.index(service)}"


def _refuse_unfit(config: Config, service: ServiceConfig, key: str) -> None:
    assert service.path is not None, "it is started by others"
    place = service.path / "config.json"
    model = read_model(service.path, f"{key}.path", has_words=service.kind != "reward")
    architectures = [str(each) for each in model.get("architectures") or ()]
    scores = any(each.endswith(SCORING) for each in architectures)
    if architectures and scores != (service.kind == "reward"):
        legal = f"legal: one that ends in {', '.join(SCORING)}" if service.kind == "reward" else "legal: one for text"
        wants = "a head that scores" if service.kind == "reward" else "a language model"
        raise ConfigError(f"{key}.kind={service.kind!r} needs {wants}, and {place} has {architectures[0]}; {legal}")
    tokenizer = PromptTokenizer(service.path)
    refuse_other_vocabulary(model, place, tokenizer.num_words, ())
    if service.kind == "judge":
        tokenizer.chat_template.render([{"role": "user", "content": "Q"}])  # raises ConfigError: there is none
    if config.generation.has_model:
        _refuse_unfit_engine(config, service, model, key)


def _refuse_unfit_engine(config: Config, service: ServiceConfig, model: Mapping[str, Any], key: str) -> None:
    shape = _shape_of(service)
    if shape is None:
        return
    if size := indivisible(shape, service.tensor_parallel):
        raise ConfigError(
            f"{key}.tensor_parallel={service.tensor_parallel} does not divide {size} of its model "
            f"({model.get('model_type')}); legal: {', '.join(map(str, legal_ranks(shape)))}"
        )
    least = least_cache_bytes(service_settings(config, service), shape)
    if service.kv_cache_bytes is not None and service.kv_cache_bytes < least:
        raise ConfigError(
            f"{key}.kv_cache_bytes={service.kv_cache_bytes} cannot hold one sequence of max_tokens; legal: {least} "
            "or more"
        )


def _shape_of(service: ServiceConfig) -> ModelShape | None:
    """Shape of a started service's model; None for an unknown family.  Raises ConfigError."""
    assert service.path is not None, "it is started by others"
    try:
        return ModelShape.of(read_model(service.path, "service.path", has_words=service.kind != "reward"))
    except KeyError as error:
        raise ConfigError(f"{service.path / 'config.json'}: no {error}") from error


# ----------------------------------------------------------------------------------------------------------- addresses


def unreachable(services: Sequence[ServiceConfig]) -> list[str]:
    """Warnings of services at a url that do not answer from here within ANSWER_S; a node may reach what we do not."""
    remote = [each for each in services if each.url]
    if not remote:
        return []
    with ThreadPoolExecutor(max_workers=min(16, len(remote))) as pool:
        found = pool.map(_why_unreachable, remote)
    return [
        f"[[service]] {service.name}: url={service.url!r} does not answer here: {why}"
        for service, why in zip(remote, found, strict=True)
        if why
    ]


def _why_unreachable(service: ServiceConfig) -> str:
    """Reason why nothing answers at a url; "" if a server does, whatever it says."""
    try:
        with urllib.request.urlopen(service.url, timeout=ANSWER_S):
            return ""
    except urllib.error.HTTPError:
        return ""  # 401 without a key, or 404 of a path that only POST has
    except (OSError, ValueError) as error:
        return str(getattr(error, "reason", error) or type(error).__name__)


# -------------------------------------------------------------------------------------------------------------- memory


@dataclass(frozen=True, slots=True)
class ServiceMemory:
    """Bytes on each GPU of one process of a service, or in host memory where it runs on a CPU."""

    service: ServiceConfig
    weights: int
    kv_cache: int  # given, or the smallest useful size
    share: float | None  # of a GPU's memory that vLLM may use; None: the cache is given, and all of it may be used

    @property
    def total(self) -> int:
        """Bytes, with what CUDA and the activations of a step take."""
        return self.weights + self.kv_cache + ENGINE_ALLOWANCE

    def describe(self) -> str:
        """The memory in GiB, part by part."""
        parts = {"weights": self.weights, "KV cache": self.kv_cache, "CUDA, activations": ENGINE_ALLOWANCE}
        words = ", ".join(f"{name} {value / GIB:.1f}" for name, value in parts.items())
        return f"{self.service.name} {self.total / GIB:.1f} ({words})"

    def refuse(self, memory_gib: float, gpu: str) -> None:
        """Raise ConfigError if a GPU of this size is too small.  gpu: words for which one that is."""
        limit = memory_gib * (1.0 if self.share is None else self.share)
        if self.total / GIB > limit:
            key = f"tensor_parallel={self.service.tensor_parallel}"
            raise ConfigError(
                f"[[service]] {self.service.name}: {key}: its engine needs at least {self.describe()} GiB (estimate), "
                f"more than the {limit:.1f} GiB that it may use of {gpu}; legal: a larger tensor_parallel or GPU, a "
                "smaller model"
            )


def plan_services(config: Config) -> list[ServiceMemory]:
    """Memory of the services that the run starts, without those of unknown families.  Raises ConfigError."""
    found = []
    for service in config.started_services:
        if (shape := _shape_of(service)) is None:
            continue
        settings = service_settings(config, service)
        need = plan_engine(settings, shape)
        share = None if service.kv_cache_bytes is not None else config.generation.gpu_memory_utilization
        found.append(ServiceMemory(service, need.weights, need.kv_cache, share))
    return found


def service_memory_lines(
    config: Config, gpus: GpuMap, memory_gib: Mapping[str, float], site: Site | None, source: Path | None
) -> Iterator[str]:
    """Yield a line about the memory of each service.  Raises ConfigError: one does not fit.

    gpus, memory_gib: the GPUs of each process on this machine, and their sizes; used without a site.
    """
    plan = plan_services(config)
    if not plan or not config.generation.has_model:
        return
    for need in plan:
        replicas = counted(need.service.replicas, "replica")
        yield f"service     estimate, GiB a GPU: {need.describe()}, {replicas} × {need.service.tensor_parallel}"
    if site is not None:
        yield from _judge_on_site(plan, site, source)
    elif gpus.devices:
        _refuse_here(config, plan, gpus, memory_gib)
    else:
        yield from _judge_host(plan)


def _judge_on_site(plan: Sequence[ServiceMemory], site: Site, source: Path | None) -> Iterator[str]:
    for need in plan:
        name, section = site.of_service(need.service.name)
        if section.gpus_per_node is None:
            continue
        if section.memory_gib is None:
            yield f"fits        not judged: {source} lacks {name}.gpu, so that the GPU's memory is not known"
            continue
        kind = section.gpu or "one"
        need.refuse(section.memory_gib, f"{name}.gpu={kind!r} ({section.memory_gib:g} GiB) in {source}")


def _refuse_here(config: Config, plan: Sequence[ServiceMemory], gpus: GpuMap, memory_gib: Mapping[str, float]) -> None:
    names = {share.service: share.names for share in service_shares(config)}
    for need in plan:
        for process in names[need.service.name]:
            for word in gpus.devices.get(process, ()):
                if word in memory_gib:
                    need.refuse(memory_gib[word], f"GPU {word}, {process}'s own")


def _judge_host(plan: Sequence[ServiceMemory]) -> Iterator[str]:
    """Yield a warning if all services together need more than the memory of this machine, where they are on its CPU."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    need = sum(each.service.replicas * (each.weights + each.kv_cache) for each in plan)
    if need > total:
        yield (
            f"warning     services need {need / GIB:.1f} GiB for weights and caches alone, of this machine's "
            f"{total / GIB:.1f} GiB of memory"
        )

"""Engines under test, each with weights to send it and the log-probabilities it should then report."""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import numpy as np
import psutil
import torch
from transformers import AutoModelForCausalLM

from rlhpc.buffer.prefixes import id_checksum
from rlhpc.config.rules import Config
from rlhpc.config.tables import WeightsConfig
from rlhpc.generation.engine import Engine
from rlhpc.generation.running_core import CoreThread
from rlhpc.generation.transformers_core import TransformersEngine
from rlhpc.generation.vllm_engine import VllmEngine
from rlhpc.models.adapter import A, B, adapter_specs, base_digest, chosen_layers, matrices_of
from rlhpc.models.shape import EMBEDDING, HEAD, INNER
from rlhpc.models.weights import read_header
from rlhpc.protocol.contracts import GenerationEngine, WeightPublisher, WeightTiming
from rlhpc.protocol.types import (
    AdapterForm,
    FinishReason,
    Float32,
    Int32,
    Prefix,
    Prompt,
    Rollout,
    RolloutRequest,
    SamplingParams,
    TensorSpec,
    WeightGroup,
    WeightManifest,
)
from rlhpc.weights.buckets import make_manifest
from rlhpc.weights.factory import make_publisher, make_receiver
from rlhpc.weights.hf_names import name_as_stored, name_of, named_on_disk
from tests.engines.scripted_engine import Script, ScriptedEngine
from tests.patience import PATIENCE_S
from tests.tiny_models import make_tiny_checkpoint

# Texts of tokens: letters, one or two of them, and two parts of a character of three bytes.
PIECES = tuple(
    (b"\xe2\x82", b"\xac", b"%c" % (97 + token % 26), b"%c." % (97 + token % 26))[token % 4] for token in range(200)
)
LONG_PROMPT = np.asarray([4 + index % 90 for index in range(150)], np.int32)  # more than a block of KV cache
MAX_TOKENS = 600
PROMPTS: dict[int, Int32] = {}  # the tokens of all requests, by the ids of their prompts


def tiny_config(
    model: Path,
    staging: str = "auto",
    dtype: str = "float32",
    lora: Mapping[str, object] = MappingProxyType({}),
    routing_replay: object = False,
    deterministic: object = False,
    **generation: object,
) -> Config:
    tables: dict[str, object] = {
        "run": {"name": "test", "num_steps": 1, "deterministic": deterministic},
        "model": {"path": model, "dtype": dtype},
        "data": {"path": model, "task": "math"},
        "algorithm": {"routing_replay": routing_replay},
        "generation": {
            "max_prompt_tokens": 192, "max_completion_tokens": MAX_TOKENS, "max_num_seqs": 16,
            "kv_cache_bytes": 64 << 20, **generation,
        },
        "admission": {"groups_per_step": 2, "group_size": 2},
        "trainer": {"token_budget": 1024} | ({"backend": "reference"} if "quantization" in lora else {}),
        "weights": {"timeout_s": PATIENCE_S, "transport": "gloo", "staging": staging},
        "lora": dict(lora),
    }  # fmt: skip
    return Config.model_validate(tables)


def decode(token_ids: Sequence[int]) -> str:
    return b"".join(PIECES[token] for token in token_ids).decode("utf-8", "replace")


def request_of(
    group_id: int,
    *,
    max_tokens: int = 16,
    temperature: float = 1.0,
    stop_token_ids: tuple[int, ...] = (),
    stop_strings: tuple[str, ...] = (),
    searched_from: int = 0,
    prompt: Int32 | None = None,
    prefix: Prefix | None = None,
) -> RolloutRequest:
    tokens = np.arange(4, 12, dtype=np.int32) + group_id % 50 if prompt is None else prompt
    prompt_id = id_checksum(tokens)
    PROMPTS[prompt_id] = tokens
    sampling = SamplingParams(max_tokens, temperature, stop_token_ids, stop_strings, searched_from)
    return RolloutRequest(group_id, 0, Prompt(prompt_id, "math", tokens, "42"), sampling, prefix)


def forget_end_of_sequence(model: Path) -> None:
    """So that a request lasts as long as a test needs it to."""
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps({**settings, "eos_token_id": None}))


class PublisherDied(Exception):
    """Its sockets close, as they do when its process is killed."""


class Subject(ABC):
    """An engine that stops only where it is told to, and the trainer's end of its weights."""

    engine: GenerationEngine
    loads_arriving = False  # new weights are loaded while they arrive, and nothing is sampled meanwhile
    num_workers = 1  # of the engine
    bucket_bytes = 1 << 20
    small_bucket_bytes = 1 << 16  # of which a version has several, and layers that straddle

    def __init__(self, publisher: WeightPublisher, transport: str = "gloo") -> None:
        self.publisher, self.transport = publisher, transport
        self.epoch = 0

    @abstractmethod
    def weights(self, version: int) -> list[tuple[str, torch.Tensor]]: ...

    @abstractmethod
    def expected_logprobs(self, version: int, rollout: Rollout) -> Float32: ...

    def expected_score(self, version: int, row: Int32) -> Float32:
        """Log-probabilities of all tokens of a row but the first."""
        ones, prompt_id = np.ones(len(row) - 1), request_of(0, prompt=row[:1]).prompt.prompt_id
        rollout = Rollout(
            0, 0, prompt_id, row[1:], ones.astype(np.float32), ones.astype(np.int32), ones.astype(np.bool_),
            FinishReason.LENGTH,
        )  # fmt: skip
        return self.expected_logprobs(version, rollout)

    @abstractmethod
    def expected_tables(self, version: int, row: Int32) -> Float32:
        """Log-probabilities of all tokens in each place of a row but the first, [T − 1, V]."""

    async def join(self) -> None:
        self.epoch += 1
        group = self.publisher.open(WeightGroup(self.epoch, self.transport, "", ("generator-0",), (self.num_workers,)))
        await asyncio.gather(self.engine.join_weights(group, "generator-0"), asyncio.to_thread(self.publisher.form))

    def manifest(self, version: int) -> WeightManifest:
        specs = [TensorSpec(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in self.weights(version)]
        return make_manifest(version, self.epoch, specs, self.bucket_bytes)

    async def update(self, version: int, cut_off_after: int | None = None) -> WeightTiming:
        """cut_off_after: the publisher dies when it has given so many tensors."""
        manifest = self.manifest(version)
        weights = self._until(version, cut_off_after)
        receiving = asyncio.create_task(self.engine.receive_weights(manifest))
        publishing = asyncio.create_task(asyncio.to_thread(self.publisher.publish, manifest, weights))
        await asyncio.wait([receiving, publishing])
        if receiving.exception() is None:
            await publishing
        publishing.exception()
        return await receiving

    def _until(self, version: int, cut_off_after: int | None) -> Iterator[tuple[str, torch.Tensor]]:
        for index, named in enumerate(self.weights(version)):
            if index == cut_off_after:
                raise PublisherDied
            yield named

    async def num_tokens(self) -> list[int]:
        """Of every request in flight."""
        raise NotImplementedError


class ScriptedSubject(Subject):
    def __init__(self, publisher: WeightPublisher) -> None:
        super().__init__(publisher)
        script = Script(seed=3, stop_probability=0, token_s=0.0005, max_num_seqs=16)
        self.engine: ScriptedEngine = ScriptedEngine(
            script, make_receiver=partial(make_receiver, device="cpu", timeout_s=PATIENCE_S), decode=decode
        )

    def weights(self, version: int) -> list[tuple[str, torch.Tensor]]:
        return [("w", torch.full((3,), float(version)))]

    def expected_logprobs(self, version: int, rollout: Rollout) -> Float32:
        return self.engine.logprob_table(version)[rollout.token_ids]

    def expected_tables(self, version: int, row: Int32) -> Float32:
        return np.tile(self.engine.logprob_table(version), (len(row) - 1, 1))


class EngineSubject(Subject):
    """A real engine and a tiny model."""

    config: Config

    def __init__(self, publisher: WeightPublisher, transport: str, model: Path, device: str) -> None:
        super().__init__(publisher, transport)
        self._device = device
        self._reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self._base = {name: tensor.detach().clone() for name, tensor in self._reference.named_parameters()}

    KIND: type[VllmEngine] | type[TransformersEngine]

    @classmethod
    async def start(
        cls,
        directory: Path,
        family: str,
        tied: bool,
        transport: str = "gloo",
        device: str = "cpu",
        staging: str = "auto",
        dtype: str = "float32",
        is_apart: bool = False,
        lora: Mapping[str, object] = MappingProxyType({}),
        num_adapters: int = 1,
        **generation: object,
    ) -> Self:
        model = make_tiny_checkpoint(directory / "model", family=family, tied=tied)
        forget_end_of_sequence(model)
        generation.setdefault("engine", "transformers" if issubclass(cls.KIND, TransformersEngine) else "vllm")
        config = tiny_config(model, staging, dtype, lora, **generation)
        weights = WeightsConfig.model_validate({"transport": transport, "timeout_s": config.weights.timeout_s})
        publisher = make_publisher(weights, directory=directory / "weights", device=device)
        subject = cls(publisher, transport, model, device)
        subject.config = config
        if issubclass(subject.KIND, TransformersEngine):
            subject.engine = await subject.KIND.start(config, seed=0, decode=decode, num_adapters=num_adapters)
        else:
            subject.engine = await subject.KIND.start(
                config, seed=0, is_apart=is_apart, decode=decode, num_adapters=num_adapters
            )
        subject.loads_arriving = staging == "paused"
        return subject

    async def num_tokens(self) -> list[int]:
        assert isinstance(self.engine, Engine)
        return sorted((await self.engine._core.counts()).values())

    def break_core(self) -> None:
        """Where it runs on a thread of this process: its next step fails."""
        if isinstance(self.engine, Engine) and isinstance(self.engine._core, CoreThread):
            self.engine._core._commands.put(_fail)

    def weights(self, version: int) -> list[tuple[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(version)
        drawn = [(n, t + 0.05 * torch.randn(t.shape, generator=generator)) for n, t in self._base.items()]
        return [(name, tensor.to(self._device)) for name, tensor in drawn]

    def expected_logprobs(self, version: int, rollout: Rollout) -> Float32:
        with torch.no_grad():
            for (_, weight), parameter in zip(self.weights(version), self._reference.parameters(), strict=True):
                parameter.copy_(weight)
        return self.reference_logprobs(rollout)

    def expected_tables(self, version: int, row: Int32) -> Float32:
        self.expected_score(version, row)
        with torch.no_grad():
            logits = self._reference(torch.from_numpy(row).long()[None]).logits[0, :-1]
        return torch.log_softmax(logits, -1).float().numpy()

    def reference_logprobs(self, rollout: Rollout) -> Float32:
        """By the weights that the reference has."""
        prompt = PROMPTS[rollout.prompt_id]
        tokens = torch.from_numpy(np.concatenate([prompt, rollout.token_ids])).long()
        with torch.no_grad():
            logits = self._reference(tokens[None]).logits[0, len(prompt) - 1 : -1]
            picked = torch.log_softmax(logits, -1).gather(1, tokens[len(prompt) :, None])
        return picked[:, 0].float().numpy()


class VllmSubject(EngineSubject):
    KIND = VllmEngine

    @property
    def worker(self) -> Any:
        """The engine's worker, if it runs on a thread of this process."""
        engine: Any = self.engine
        return engine._core._core.engine_core.model_executor.driver_worker.worker


class TransformersSubject(EngineSubject):
    """Weights by their names on disk, of any family."""

    KIND = TransformersEngine

    def __init__(self, publisher: WeightPublisher, transport: str, model: Path, device: str) -> None:
        super().__init__(publisher, transport, model, device)
        self._stored = read_header(model / "model.safetensors").keys()
        name_as_stored(self._reference, self._stored, INNER)
        self._base = {name: tensor.detach().clone() for name, tensor in self._reference.named_parameters()}

    def weights(self, version: int) -> list[tuple[str, torch.Tensor]]:
        return [
            named
            for name, tensor in super().weights(version)
            for named in named_on_disk(TensorSpec(name_of(name, self._stored), "float32", tuple(tensor.shape)), tensor)
        ]

    def expected_logprobs(self, version: int, rollout: Rollout) -> Float32:
        self._reference.set_attn_implementation("eager")
        with torch.no_grad():
            drawn = super().weights(version) if version >= 0 else list(self._base.items())
            for (_, weight), parameter in zip(drawn, self._reference.parameters(), strict=True):
                parameter.copy_(weight)
        return self.reference_logprobs(rollout)


class AdapterSubject(VllmSubject):
    """An engine that holds adapters; what its versions mean is told by their merge in float64."""

    small_bucket_bytes = 1 << 14
    _held: int | None = None  # version of the reference

    LORA = MappingProxyType({"rank": 8, "alpha": 16.0, "targets": ("attention", "mlp", "output")})

    def layers(self) -> dict[str, tuple[int, int]]:
        shapes = {name: tuple(tensor.shape) for name, tensor in self._base.items()}
        return chosen_layers(self.config.lora, matrices_of(shapes))

    def weights(self, version: int) -> list[tuple[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(version)
        specs = adapter_specs(self.layers(), self.config.lora.rank)
        return [(spec.name, 0.2 * torch.randn(spec.shape, generator=generator)) for spec in specs]

    def form(self) -> AdapterForm:
        lora = self.config.lora
        return AdapterForm(lora.rank, lora.scale, base_digest(self.config.model.path))

    def manifest(self, version: int) -> WeightManifest:
        return replace(super().manifest(version), adapter=self.form())

    def merged(self, version: int) -> dict[str, torch.Tensor]:
        """Whole weights in float64, the head's under its own name; −1: the base."""
        whole = {name: tensor.double() for name, tensor in self._base.items()}
        whole.setdefault(HEAD, whole[EMBEDDING])
        given = {name: tensor.double() for name, tensor in (self.weights(version) if version >= 0 else ())}
        for module in self.layers() if given else ():
            update = given[module + B] @ given[module + A]
            whole[f"{module}.weight"] = whole[f"{module}.weight"] + self.config.lora.scale * update
        return whole

    def expected_logprobs(self, version: int, rollout: Rollout) -> Float32:
        if (version, torch.float64) != (self._held, self._reference.dtype):
            self._reference.double()
            with torch.no_grad():
                self._reference.lm_head.weight = torch.nn.Parameter(self._reference.lm_head.weight.detach().clone())
                for name, tensor in self.merged(version).items():
                    self._reference.get_parameter(name).copy_(tensor)
            self._held = version
        return self.reference_logprobs(rollout)


class TransformersAdapterSubject(AdapterSubject):
    KIND = TransformersEngine


def _fail() -> None:
    raise RuntimeError("a kernel failed")


_strangers: frozenset[psutil.Process] = frozenset()  # below this process before an engine of these tests was started


def remember_strangers() -> None:
    """What lives below this process now is other tests': a cluster of Slurm's that other tests go on to use, say."""
    global _strangers
    _strangers = frozenset(psutil.Process().children(recursive=True))


def living_children() -> list[psutil.Process]:
    """Processes below this one that are no strangers, apart from python's resource tracker and the server of ranks.

    One that has ended is none, though whoever started it, perhaps another test, has not asked for its status yet.
    """
    found: list[psutil.Process] = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # a zombie is one, too
            words = " ".join(child.cmdline())
            if child not in _strangers and "resource_tracker" not in words and "forkserver" not in words:
                found += [child, *child.children(recursive=True)]
    return found

"""Our engine beside vLLM alone, and what new weights cost while it samples.

    python -m bench.engine MODEL [--requests 512] [--prompt 64] [--tokens 256] [--max-num-seqs 256] [--repeats 3]
                           [--dtype bfloat16] [--kv-cache-gib 8] [--eager] [--updates 5] [--rank 32]
                           [--transformers]

MODEL: an HF checkpoint directory; without one, a random model is made, of Qwen3-0.6B's sizes or of --random.  Both ways
ask the same engine for the same requests in the same process, turn about.  "direct" is AsyncLLM.generate by hand, all
requests at once; "ours" goes through VllmEngine, which keeps every token's version.  Nobody stops early.  Prints
generated tokens/s (median and range) and the ratio; then tokens/s while weights arrive one version after the other from
this process (by CUDA IPC, on CPU by gloo), and how long a version takes to arrive and stops sampling for, in seconds
and in decoding steps of as many requests.  With --rank versions are LoRA adapters of attention and MLP.  With
--transformers the engine of transformers answers the same requests, too, in its turn.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from bench.figures import tell
from bench.trainer import MODELS, make_model
from rlhpc.config.rules import Config, with_values
from rlhpc.config.tables import WeightsConfig
from rlhpc.generation.engine import Engine
from rlhpc.generation.running_core import CoreRequest
from rlhpc.generation.transformers_core import TransformersEngine
from rlhpc.generation.vllm_core import CoreProcesses, params_of
from rlhpc.generation.vllm_engine import VllmEngine
from rlhpc.models.adapter import adapter_specs, base_digest, chosen_layers, matrices_of
from rlhpc.protocol.contracts import WeightTiming
from rlhpc.protocol.types import AdapterForm, Prompt, RolloutRequest, SamplingParams, TensorSpec, WeightGroup
from rlhpc.weights.buckets import make_manifest
from rlhpc.weights.factory import make_publisher
from tests.contracts.engine_subjects import forget_end_of_sequence

BUCKET_BYTES = 256 << 20
TIMEOUT_S = 120.0


def config_of(model: Path, options: argparse.Namespace) -> Config:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tables: dict[str, object] = {
        "run": {"name": "bench", "num_steps": 1},
        "model": {"path": model, "dtype": options.dtype},
        "data": {"path": model, "task": "math"},
        "generation": {
            "max_prompt_tokens": options.prompt,
            "max_completion_tokens": options.tokens,
            "max_num_seqs": options.max_num_seqs,
            "kv_cache_bytes": int(options.kv_cache_gib * 2**30),
            "enforce_eager": options.eager,
        },
        "admission": {"groups_per_step": 2, "group_size": 2},
        "trainer": {"token_budget": max(1024, options.prompt + options.tokens)},
        "weights": {"timeout_s": TIMEOUT_S, "transport": "ipc" if device == "cuda" else "gloo"},
        "lora": {"rank": options.rank},
    }
    return Config.model_validate(tables)


def draw_requests(options: argparse.Namespace, serial: Iterator[int], vocabulary: int) -> list[RolloutRequest]:
    """Each with a prompt of its own: nothing is in a cache."""
    drawn = []
    for _ in range(options.requests):
        number = next(serial)
        tokens = np.random.default_rng(number).integers(10, vocabulary, options.prompt, dtype=np.int32)
        sampling = SamplingParams(max_tokens=options.tokens, temperature=1.0)
        drawn.append(RolloutRequest(number, 0, Prompt(number, "math", tokens, ""), sampling, None))
    return drawn


async def ours(engine: Engine, requests: list[RolloutRequest]) -> int:
    return sum(len(rollout.token_ids) for rollout in await asyncio.gather(*map(engine.generate, requests)))


async def direct(engine: Engine, requests: list[RolloutRequest]) -> int:
    async def one(request: RolloutRequest) -> int:
        tokens, name, core = request.prompt.token_ids.tolist(), f"direct-{request.group_id}", engine._core
        asked = CoreRequest(name, tokens, "direct", request.sampling.max_tokens, request.sampling.temperature)
        if not isinstance(core, CoreProcesses):
            return len((await core.sample(asked)).completion.token_ids)
        prompt = {"prompt_token_ids": tokens, "cache_salt": "direct"}
        async for output in core._llm.generate(prompt, params_of(asked), name):
            return len(output.outputs[0].token_ids)
        return 0

    return sum(await asyncio.gather(*map(one, requests)))


async def rate(sample: Awaitable[int]) -> float:
    """Tokens per second."""
    began = time.monotonic()
    count = await sample
    return count / (time.monotonic() - began)


class Trainer:
    """The other end of the weights: the checkpoint's own or random adapters, version after version."""

    def __init__(self, model: Path, config: Config, directory: Path) -> None:
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, config.model.dtype))
        weights, self._form = [(name, tensor.detach()) for name, tensor in loaded.named_parameters()], None
        if rank := config.lora.rank:
            layers = chosen_layers(config.lora, matrices_of({name: tuple(each.shape) for name, each in weights}))
            weights = [(spec.name, 0.01 * torch.randn(spec.shape)) for spec in adapter_specs(layers, rank)]
            self._form = AdapterForm(rank, config.lora.scale, base_digest(model))
        self._weights = [(name, tensor.to(self._device)) for name, tensor in weights]
        self.num_bytes = sum(tensor.nbytes for _, tensor in self._weights)
        self._transport = config.weights.transport
        settings = WeightsConfig(transport=self._transport, timeout_s=TIMEOUT_S)
        self._publisher = make_publisher(settings, directory=directory, device=self._device)

    async def join(self, engine: Engine) -> None:
        group = self._publisher.open(WeightGroup(1, self._transport, "", ("generator-0",), (1,)))
        await asyncio.gather(engine.join_weights(group, "generator-0"), asyncio.to_thread(self._publisher.form))

    async def update(self, engine: Engine, version: int) -> WeightTiming:
        specs = [TensorSpec(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in self._weights]
        manifest = make_manifest(version, 1, specs, BUCKET_BYTES, self._form)
        timing, _ = await asyncio.gather(
            engine.receive_weights(manifest),
            asyncio.to_thread(self._publisher.publish, manifest, iter(self._weights)),
        )
        return timing

    def close(self) -> None:
        self._publisher.dissolve()


async def measure(model: Path, options: argparse.Namespace, scratch: Path) -> None:
    config = config_of(model, options)
    began = time.monotonic()
    engine = await VllmEngine.start(config, seed=0)
    vocabulary = engine._core.limits.vocabulary
    print(f"engine up in {time.monotonic() - began:.0f} s, window {engine.capacity_samples} samples", flush=True)
    serial = iter(range(1 << 30))
    ways: dict[str, Callable[[Engine, list[RolloutRequest]], Any]] = {"direct": direct, "ours": ours}
    other: Engine | None = None
    if options.transformers:
        other = await TransformersEngine.start(with_values(config, {"generation.engine": "transformers"}), seed=0)
        ways["transformers"] = lambda _, requests: ours(other, requests)
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(1 + options.repeats):  # the first warms up
        for name, way in ways.items():
            rates[name].append(await rate(way(engine, draw_requests(options, serial, vocabulary))))
    medians = {name: statistics.median(found[1:]) for name, found in rates.items()}
    for name, found in rates.items():
        print(f"{name:<13} {medians[name]:10,.0f} tokens/s   {min(found[1:]):,.0f} to {max(found[1:]):,.0f}")
    print(f"ours / direct {medians['ours'] / medians['direct']:.3f}", flush=True)
    if other is not None:
        print(f"transformers / ours {medians['transformers'] / medians['ours']:.3f}", flush=True)
        await other.close()
    tell("engine tokens/s", medians["ours"])
    tell("engine over vLLM alone", medians["ours"] / medians["direct"])
    trainer = Trainer(model, config, scratch / "weights")
    try:
        if options.updates:
            await with_updates(engine, trainer, options, draw_requests(options, serial, vocabulary), medians["ours"])
    finally:
        await engine.close()
        trainer.close()


async def with_updates(
    engine: Engine, trainer: Trainer, options: argparse.Namespace, requests: list[RolloutRequest], alone: float
) -> None:
    await trainer.join(engine)
    await trainer.update(engine, 0)  # the first makes buffers
    sampling = asyncio.create_task(rate(ours(engine, requests)))
    timings, began = [], time.monotonic()
    for version in range(1, 1 + options.updates):
        await asyncio.sleep(0.2)
        timings.append(await trainer.update(engine, version))
    seconds = time.monotonic() - began
    was_sampling = not sampling.done()
    during = await sampling
    receive, pause = (statistics.median(getattr(t, name) for t in timings) for name in ("receive_s", "pause_s"))
    size, step = trainer.num_bytes / 2**30, min(options.requests, options.max_num_seqs) / alone
    beyond = "" if was_sampling else ", longer than sampling"
    print(f"{len(timings)} versions of {size:.2f} GiB in {seconds:.1f} s{beyond}")
    arrives = f"arrives in {receive:.3f} s ({size / receive:.1f} GiB/s)"
    print(f"a version     {arrives}, sampling stops for {pause:.3f} s, {pause / step:.2f} steps of {step:.3f} s")
    print(f"with updates  {during:10,.0f} tokens/s   {during / alone:.3f} of without", flush=True)
    tell("engine with updates over without", during / alone)
    tell("a version arrives in, s", receive)
    tell("sampling stops for, s", pause)
    tell("sampling stops for, steps", pause / step)
    tell("versions/s", len(timings) / sum(t.receive_s + t.pause_s for t in timings))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--random", default="qwen3-0.6b", choices=MODELS, help="sizes of the random model")
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of one prompt")
    parser.add_argument("--tokens", type=int, default=256, help="of one completion")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--transformers", action="store_true", help="also the engine of transformers")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--kv-cache-gib", type=float, default=8.0)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--rank", type=int, default=0, help="of LoRA adapters; 0: versions are all weights")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = options.model or make_model(Path(scratch) / "model", options.random, dtype=torch.bfloat16)
        copy = Path(scratch) / "copy"  # without an end-of-sequence token
        copy.mkdir()
        for path in model.iterdir():
            if path.suffix == ".json":
                (copy / path.name).write_bytes(path.read_bytes())
            else:
                (copy / path.name).symlink_to(path.absolute())
        forget_end_of_sequence(copy)
        asyncio.run(measure(copy, options, Path(scratch)))


if __name__ == "__main__":
    main()

"""What our engine asks of vLLM, and vLLM does, shown on one bfloat16 engine with a small KV cache."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file

from launch.checks.preflight import CPU_HEADS
from rlhpc.config.rules import with_values
from rlhpc.generation import engine
from rlhpc.generation.running_core import CoreThread
from rlhpc.generation.vllm_engine import VllmEngine
from rlhpc.protocol.errors import EngineError
from rlhpc.protocol.types import FinishReason, Rollout
from tests.contracts.engine_subjects import (
    PROMPTS,
    VllmSubject,
    living_children,
    remember_strangers,
    request_of,
    tiny_config,
)
from tests.patience import PATIENCE_S
from tests.tiny_models import make_tiny_checkpoint

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]
KV_CACHE_BYTES = 2 << 20  # five requests of the greatest length, or sixteen short ones
TEMPERATURE = 2.0  # so flat that many tokens are sampled; a power of two, so that dividing by it rounds nothing
STEPS_OF_BFLOAT16 = 64  # between two whole numbers from 2 to 4; above that it has fewer
KILLED_GENERATOR = """
import asyncio, os, signal, sys
from pathlib import Path
from tests.contracts.engine_subjects import VllmSubject, living_children

async def main():
    await VllmSubject.start(Path(sys.argv[1]), family="qwen2", tied=True, tensor_parallel=2)
    print("processes", *(child.pid for child in living_children()), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    asyncio.run(main())
"""
STARTS = """
import asyncio, sys
from pathlib import Path
from tests.contracts.engine_subjects import VllmSubject

async def main():
    subject = await VllmSubject.start(Path(sys.argv[1]), family="qwen2", tied=True)
    await subject.engine.close()

if __name__ == "__main__":
    asyncio.run(main())
"""


class SharpSubject(VllmSubject):
    """Logits as large as a trained model's."""

    def weights(self, version: int) -> list[tuple[str, torch.Tensor]]:
        head = "lm_head.weight" if "lm_head.weight" in self._base else "model.embed_tokens.weight"
        return [(name, 6 * tensor if name == head else tensor) for name, tensor in super().weights(version)]

    def logits(self, version: int, rollout: Rollout) -> torch.Tensor:
        """Of the first sampled token, in float32 throughout."""
        self.expected_logprobs(version, rollout)  # loads the reference
        with torch.no_grad():
            return self._reference(torch.from_numpy(PROMPTS[rollout.prompt_id]).long()[None]).logits[0, -1]


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[True, pytest.param(False, marks=pytest.mark.long)],
    ids=["tied apart", "untied"],
)
async def subject(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[SharpSubject]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
        made = await SharpSubject.start(
            tmp_path_factory.mktemp("engine"),
            family="qwen2",
            tied=request.param,
            dtype="bfloat16",
            is_apart=request.param,
            kv_cache_bytes=KV_CACHE_BYTES,
        )
        await made.join()
        await made.update(0)
        yield made
        await made.engine.close()
        made.publisher.dissolve()


async def test_weights_of_which_vllm_would_make_up_a_part_are_refused(tmp_path: Path) -> None:
    """Of q, k and v, which it puts together, it asks for one."""
    make_tiny_checkpoint(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    lost = "model.layers.1.self_attn.k_proj.weight"
    save_file({name: each for name, each in tensors.items() if name != lost}, tmp_path / "model.safetensors")
    config = tiny_config(tmp_path)
    with pytest.raises(EngineError, match=f"not started: .*no tensor {lost}"):
        await VllmEngine.start(config, seed=0)


async def test_the_engines_processes_are_spawned_whatever_the_users_environment_says(subject: SharpSubject) -> None:
    engines = [child for child in living_children() if "spawn_main" in " ".join(child.cmdline())]
    if isinstance(subject.engine._core, CoreThread):
        assert not engines
        return
    assert engines
    assert {engine.environ()["VLLM_WORKER_MULTIPROC_METHOD"] for engine in engines} == {"spawn"}


async def test_a_replica_holds_more_once_it_has_seen_how_short_answers_are(subject: SharpSubject) -> None:
    """First of those that sample: every answer is remembered."""
    before = subject.engine.capacity_samples
    for _ in range(8):
        await asyncio.gather(*(subject.engine.generate(request_of(i, max_tokens=8)) for i in range(16)))
    assert before == 5
    assert subject.engine.capacity_samples == 16


async def test_logits_have_digits_that_bfloat16_has_not(subject: SharpSubject) -> None:
    """As the trainer's have.  Log-probabilities at one place differ by what the logits there differ by."""
    in_steps: list[float] = []
    for place in range(10):
        asked = (subject.engine.generate(request_of(place, max_tokens=1, temperature=TEMPERATURE)) for _ in range(48))
        rollouts = {int(rollout.token_ids[0]): rollout for rollout in await asyncio.gather(*asked)}
        expected = subject.logits(0, next(iter(rollouts.values())))
        large = [token for token in rollouts if abs(expected[token]) >= 2]
        logits = [TEMPERATURE * float(rollouts[token].behaviour_logprobs[0]) for token in large]
        in_steps += [(logit - logits[0]) * STEPS_OF_BFLOAT16 for logit in logits[1:]]
    assert len(in_steps) >= 10
    assert np.mean(np.abs(np.asarray(in_steps) - np.round(in_steps)) > 0.02) > 0.8


async def test_sizes_of_heads_on_a_cpu_are_those_that_check_knows() -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend  # after the engine has set its environment

    assert set(CPU_HEADS) == set(CPUAttentionBackend.get_supported_head_sizes())


async def test_what_is_thrown_out_of_a_full_cache_is_counted_and_delivered_all_the_same(subject: SharpSubject) -> None:
    before = subject.engine.statistics().num_preemptions
    rollouts = await asyncio.gather(*(subject.engine.generate(request_of(i, max_tokens=400)) for i in range(16)))
    assert all(rollout.finish_reason is FinishReason.LENGTH for rollout in rollouts)
    await subject.update(1)
    assert subject.engine.statistics().num_preemptions > before


async def test_an_engine_whose_core_answers_nothing_is_given_up_and_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped by a signal it is as one whose GPU never ends its kernel: alive, and silent."""
    before = set(living_children())
    made = await SharpSubject.start(tmp_path, family="qwen2", tied=True, is_apart=True)
    own = [child for child in living_children() if child not in before]
    monkeypatch.setattr(engine, "ANSWER_S", 1.0)
    made.engine._config = with_values(made.engine._config, {"weights.timeout_s": 0.5})
    assert own
    try:
        for child in own:
            child.send_signal(signal.SIGSTOP)
        with pytest.raises(EngineError, match=r"no answer within 1 s"):
            await asyncio.wait_for(made.engine.pause(), PATIENCE_S)
        with pytest.raises(EngineError, match="the generation engine is dead"):
            await made.engine.generate(request_of(0))
    finally:
        await made.engine.close()
        made.publisher.dissolve()
    assert not [child for child in own if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.long
async def test_signals_meant_for_the_role_do_not_end_an_engine_of_two_workers(tmp_path: Path) -> None:
    """Whose core is a process of its own, beside the workers."""
    remember_strangers()
    subject = await VllmSubject.start(tmp_path, family="qwen2", tied=True, tensor_parallel=2)
    request = request_of(1, max_tokens=200)
    try:
        running = asyncio.create_task(subject.engine.generate(request))
        async with asyncio.timeout(PATIENCE_S):
            while not subject.engine.num_sampled(request.request_id):  # noqa: ASYNC110 - by polling
                await asyncio.sleep(0.001)
        processes = living_children()
        for process in processes:
            for notice in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT):
                process.send_signal(notice)
        rollout = await asyncio.wait_for(running, PATIENCE_S)
    finally:
        await subject.engine.close()
    assert len(processes) == 3
    assert rollout.finish_reason is FinishReason.LENGTH
    assert living_children() == []


@pytest.mark.long
@pytest.mark.starts
def test_an_engine_of_two_workers_ends_with_its_generator(tmp_path: Path) -> None:
    """Which had no time to end it."""
    script = tmp_path / "generator.py"  # a file: its main module is imported by processes that are spawned
    script.write_text(KILLED_GENERATOR)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr  # vLLM's workers write to stdout
    (said,) = (line for line in done.stdout.splitlines() if line.startswith("processes "))
    pids = [int(word) for word in said.split()[1:]]
    assert len(pids) == 3
    left = list[psutil.Process]()
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            left.append(psutil.Process(pid))
    _, alive = psutil.wait_procs(left, timeout=PATIENCE_S)
    for process in alive:
        process.kill()
    assert not alive


@pytest.mark.starts
def test_an_engine_starts_where_a_script_has_the_name_of_a_module_of_the_standard_library(tmp_path: Path) -> None:
    """vLLM looks at a model that it has not seen before by `python -m`."""
    (tmp_path / "random.py").write_text("raise SystemExit(9)\n")
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": root, "VLLM_CACHE_ROOT": str(tmp_path / "cache")}
    command = [sys.executable, "-P", "-c", STARTS, str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]

"""The trainer's log-probabilities are the engine's: the same tokens, the same version, packed rows of mixed lengths."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from torch import Tensor

from rlhpc.algorithms.packing import FlopCost, pack
from rlhpc.algorithms.samples import SampleMaker
from rlhpc.config.rules import Config
from rlhpc.config.tables import WeightsConfig
from rlhpc.config.tables_services import EnvironmentConfig
from rlhpc.data.prompt_form import DialogueTemplate
from rlhpc.data.tokenizer import PromptTokenizer
from rlhpc.environments.dialogue import Dialogue, TurnsTaken
from rlhpc.protocol.contracts import GenerationEngine
from rlhpc.protocol.messages import TurnReply
from rlhpc.protocol.types import (
    PackedMicrobatch,
    Prompt,
    Rollout,
    RolloutGroup,
    RolloutRequest,
    SamplingParams,
    ScoredRollout,
    TensorSpec,
    Verdict,
    WeightGroup,
)
from rlhpc.weights.buckets import make_manifest
from rlhpc.weights.factory import make_publisher
from tests.contracts.trainer_cluster import ClusterPool, Rank, TrainerCluster
from tests.contracts.trainer_layouts import LAYOUTS, packed
from tests.contracts.trainer_scenarios import look, train
from tests.tiny_models import SERVED, make_tiny_checkpoint, pack_experts
from tests.unit.training.packed_rows import draw_samples

TOLERANCE_NATS = 1e-4
TEMPERATURE = 0.8
LONG = pytest.mark.long
MXFP4 = "gpt_oss in MXFP4"
BY_TRANSFORMERS = " by transformers"  # the engine; all others are vLLM's
OF_BOTH = ("deepseek_v3", "qwen3_5_moe", "qwen3_next", MXFP4)
FAMILIES = (
    "qwen2",
    *(pytest.param(family, marks=LONG) for family in ("llama", "qwen3_moe", *SERVED, MXFP4)),
    "qwen3_5" + BY_TRANSFORMERS,
    *(pytest.param(family + BY_TRANSFORMERS, marks=LONG) for family in OF_BOTH),
)
# (family, layout): what each layout does to names and shapes is in the contract's tests; here is what an engine adds.
STREAMS = [
    ("qwen2", "megatron-tp2"),
    pytest.param("qwen2", "megatron-pp2", marks=LONG),
    pytest.param("qwen2", "deepspeed-zero3", marks=LONG),
    *(pytest.param(family, "reference-dp1", marks=LONG) for family in ("qwen3_moe", *SERVED, MXFP4)),
    pytest.param("qwen3_moe", "megatron-ep2", marks=LONG),
    *(pytest.param(family + BY_TRANSFORMERS, "reference-dp1", marks=LONG) for family in ("qwen3_5", *OF_BOTH)),
]

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]


@dataclass
class Running:
    """A real engine that began with the checkpoint of a family."""

    engine: GenerationEngine
    checkpoint: Path
    scratch: Path
    version: int = 0

    async def take(self, weights: list[tuple[str, Tensor]]) -> None:
        """Broadcast a stream to it as a new version, in a group of its own."""
        self.version += 1
        publisher = make_publisher(
            WeightsConfig(transport="gloo", timeout_s=30.0), directory=self.scratch, device="cpu"
        )
        specs = [TensorSpec(name, "float32", tuple(tensor.shape)) for name, tensor in weights]
        group = publisher.open(WeightGroup(self.version, "gloo", "", ("generator-0",), (1,)))
        await asyncio.gather(self.engine.join_weights(group, "generator-0"), asyncio.to_thread(publisher.form))
        manifest = make_manifest(self.version, self.version, specs, 1 << 20)
        sending = asyncio.to_thread(publisher.publish, manifest, iter(weights))
        await asyncio.gather(self.engine.receive_weights(manifest), sending)
        await self.engine.leave_weights()
        publisher.dissolve()

    async def sample(self) -> list[tuple[Prompt, Rollout]]:
        """Completions of many lengths."""
        requests = [
            RolloutRequest(
                group_id=index,
                sample_index=0,
                prompt=Prompt(index, "any", np.arange(5, 7 + index, dtype=np.int32), ""),
                sampling=SamplingParams(max_tokens=8 + 9 * (index % 7), temperature=TEMPERATURE),
            )
            for index in range(16)
        ]
        rollouts = list(await asyncio.gather(*(self.engine.generate(request) for request in requests)))
        assert len({len(rollout.token_ids) for rollout in rollouts}) > 5
        assert all(np.all(rollout.versions == self.engine.policy_version) for rollout in rollouts)
        return [(request.prompt, rollout) for request, rollout in zip(requests, rollouts, strict=True)]

    async def converse(self) -> list[tuple[Prompt, Rollout]]:
        """Dialogues of several turns, with what was read between them, under a chat template of characters."""
        (self.checkpoint / "chat_template.jinja").write_text(
            "{% for message in messages %}[{{ message.role }}]{{ message.content }}<eos>\n{% endfor %}"
            "{% if add_generation_prompt %}[assistant]{% endif %}"
        )
        tokenizer = PromptTokenizer(self.checkpoint)
        template = DialogueTemplate(tokenizer)

        async def environment(taken: TurnsTaken) -> TurnReply:
            said = taken.answer[::-1][: 2 + len(taken.turns)]
            is_over = taken.is_last or len(taken.turns) == 4
            reply = () if is_over or not taken.turns else ({"role": "tool", "content": said},)
            return TurnReply(0, reply, 1.0, "correct", {}, "", is_done=is_over, is_over=is_over)

        dialogues = []
        for index in range(16):
            prompt = Prompt(index, "any", template.prompt("Q" * (1 + index % 7)), "")
            request = RolloutRequest(
                index, 1, prompt, SamplingParams(max_tokens=40 + 3 * index, temperature=TEMPERATURE)
            )
            limits = EnvironmentConfig(max_turns=4, max_turn_tokens=3 + index % 5)
            speech = tokenizer, template
            dialogues.append(Dialogue(request, self.engine, environment, speech, limits, admitted_version=0))
        finished = await asyncio.gather(*(dialogue.run() for dialogue in dialogues))
        assert max(each.num_turns for each in finished) > 2
        return [(of.request.prompt, each.rollout) for of, each in zip(dialogues, finished, strict=True)]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=FAMILIES)
async def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    from rlhpc.generation.factory import start_engine

    scratch = tmp_path_factory.mktemp(request.param.replace(" ", "-"))
    family, _, engine = request.param.partition(" by ")
    if family == MXFP4:
        checkpoint = pack_experts(make_tiny_checkpoint(scratch / "model", "gpt_oss", dtype=torch.bfloat16))
    else:
        checkpoint = make_tiny_checkpoint(scratch / "model", family=family)
    started = await start_engine(_config(scratch, checkpoint, engine or "vllm"), seed=3)
    yield Running(started, checkpoint, scratch)
    await started.close()


@pytest.fixture(scope="module")
def pool() -> Iterator[ClusterPool]:
    made = ClusterPool()
    yield made
    made.close()


@pytest.mark.parametrize("running", FAMILIES, indirect=True)
async def test_fp32_logprobs_of_engine_and_trainer_differ_by_at_most_a_ten_thousandth(running, pool, tmp_path):
    rows = _packed(await running.sample())
    cluster = pool.cluster("reference-dp1", LAYOUTS["reference-dp1"])
    (answer,) = await asyncio.to_thread(
        cluster.run, look, tmp_path, model=running.checkpoint, rows=rows, temperature=TEMPERATURE
    )
    _assert_agree(rows, answer[1])


@pytest.mark.parametrize("running", FAMILIES, indirect=True)
async def test_they_agree_on_dialogues_of_several_turns_and_what_was_read_is_masked(running, pool, tmp_path):
    dialogues = await running.converse()
    rows = _packed(dialogues)
    loss_tokens = sum(int(np.count_nonzero(row.loss_mask)) for row in rows)
    assert loss_tokens == sum(int(np.count_nonzero(rollout.loss_mask)) for _, rollout in dialogues)
    assert loss_tokens < sum(len(rollout.token_ids) for _, rollout in dialogues) - 16 * len("[assistant]")
    cluster = pool.cluster("reference-dp1", LAYOUTS["reference-dp1"])
    (answer,) = await asyncio.to_thread(
        cluster.run, look, tmp_path, model=running.checkpoint, rows=rows, temperature=TEMPERATURE
    )
    _assert_agree(rows, answer[1])


@pytest.mark.parametrize(("running", "layout"), STREAMS, indirect=["running"])
async def test_an_engine_that_takes_a_layouts_stream_while_it_runs_agrees_with_it_from_then_on(
    running, layout, pool, tmp_path
):
    cluster: TrainerCluster = pool.cluster(layout, LAYOUTS[layout])
    arguments: dict[str, Any] = {"model": running.checkpoint, "directory": tmp_path / "ckpt"}
    answers = await asyncio.to_thread(cluster.run, train_and_export, tmp_path / "a", **arguments)
    await running.take(answers[0])
    rows = _packed(await running.sample())
    answers = await asyncio.to_thread(cluster.run, logprobs_of_saved, tmp_path / "b", rows=rows, **arguments)
    for logprobs in answers:
        _assert_agree(rows, logprobs)


def train_and_export(rank: Rank, *, model: Path, directory: Path) -> list[tuple[str, Tensor]]:
    """The stream after two steps that change every weight."""
    backend = rank.open(model)
    for seed in range(2):
        train(rank, backend, packed(draw_samples((40, 9, 25, 60, 13, 33), seed=seed)))
    weights = [(name, tensor.cpu().clone()) for name, tensor in backend.weights()]
    backend.save(directory).result()
    backend.close()
    return weights


def logprobs_of_saved(rank: Rank, *, model: Path, directory: Path, rows: list[PackedMicrobatch]) -> list[Tensor]:
    """Of every row on every rank, whatever its replica."""
    backend = rank.open(model, temperature=TEMPERATURE)
    backend.load(directory)
    logprobs = [tensor.cpu() for tensor in backend.logprobs(rows)]
    backend.close()
    return logprobs


def _assert_agree(rows: list[PackedMicrobatch], logprobs: list[Tensor]) -> None:
    differences = [
        np.abs(mine.numpy() - row.behaviour_logprobs)[row.loss_mask] for mine, row in zip(logprobs, rows, strict=True)
    ]
    assert sum(len(d) for d in differences) > 100  # how many are sampled is chance
    assert max(float(d.max()) for d in differences) <= TOLERANCE_NATS


def _packed(answers: list[tuple[Prompt, Rollout]]) -> list[PackedMicrobatch]:
    samples = []
    for prompt, rollout in answers:
        scored = ScoredRollout(rollout, 1.0, Verdict.CORRECT)
        group = RolloutGroup(rollout.group_id, prompt, 0, (scored,))
        samples += SampleMaker(lambda rewards, lengths: np.ones_like(rewards))([group])
    batch = pack(samples, token_budget=256, num_ranks=1, cost=FlopCost(1.0, 0.0))
    return batch.rows


def _config(directory: Path, checkpoint: Path, engine: str) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "agree", "directory": directory / "run", "num_steps": 1},
            "model": {"path": checkpoint, "dtype": "float32"},
            "data": {"path": directory / "none.jsonl", "task": "integer_arithmetic"},
            "generation": {
                "engine": engine,
                "max_prompt_tokens": 32,
                "max_completion_tokens": 96,
                "max_num_seqs": 16,
                "temperature": TEMPERATURE,
                "kv_cache_bytes": 64 << 20,
            },
            "admission": {"groups_per_step": 2, "group_size": 2},
            "trainer": {"backend": "reference", "token_budget": 256},
        }
    )

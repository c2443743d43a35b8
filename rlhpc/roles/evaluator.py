"""Samples the prompts of evaluations and has them judged: `python -m rlhpc.roles.evaluator DIRECTORY … --share I/N`.

Input: the settings in the directory, and its samples so far.  Output: the missing samples of every N-th prompt, in
samples-I.jsonl; where the dataset has an environment, each is a dialogue of several turns.  One engine with the weights
of the checkpoint, one pool of reward workers; no controller, no trainer.  A sample is drawn by (seed, prompt, number),
so that samples which a killed process had begun are drawn again alike.

Several directories evaluate LoRA adapters on one model: the engine holds the model once and up to MOST_ADAPTERS
adapters, so that the next adapter is sampled during the last long completions of the one before.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TypeVar

from rlhpc.base.files import leave_no_core_file
from rlhpc.base.host_address import refuse_foreign_network
from rlhpc.base.processes import name_nameless_user
from rlhpc.config.rules import with_values
from rlhpc.config.tables_services import runs_programs
from rlhpc.data.prompt_form import DialogueTemplate
from rlhpc.data.prompts import SeededPrompts, dialogue_template, open_prompts
from rlhpc.data.tokenizer import PromptTokenizer, answer_of
from rlhpc.environments.dialogue import Dialogue, TurnsTaken, answered, turn_request
from rlhpc.generation.factory import engine_seed, start_engine
from rlhpc.metrics.evaluations import (
    NAME,
    EvaluatedSample,
    EvaluationSettings,
    SamplesFile,
    read_samples,
    read_settings,
)
from rlhpc.protocol.contracts import GenerationEngine
from rlhpc.protocol.errors import ConfigError, GroupFailed
from rlhpc.protocol.messages import TurnReply
from rlhpc.protocol.types import FinishReason, Rollout, RolloutRequest, SamplingParams, Verdict
from rlhpc.rewards.code_place import check_sandbox
from rlhpc.rewards.environments import judged_tasks
from rlhpc.rewards.pool import Judgement, RewardPool, open_pool
from rlhpc.roles.lifecycle import exit_status_of, run_loop, stop_event

log = logging.getLogger("rlhpc.evaluator")
Answer = TypeVar("Answer", Judgement, TurnReply)
MOST_ADAPTERS = 8  # adapters that an evaluation's engine has room for


def main(arguments: list[str]) -> int:
    """Sample and judge; return the exit status, 0 also if asked to stop."""
    name_nameless_user()
    parser = argparse.ArgumentParser(prog="python -m rlhpc.roles.evaluator", description=__doc__)
    parser.add_argument("directories", type=Path, nargs="+", metavar="DIRECTORY")
    parser.add_argument("--share", default="0/1", metavar="I/N", help="the prompts p with p mod N = I")
    options = parser.parse_args(arguments)
    index, num_shares = map(int, options.share.split("/"))
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format=f"%(asctime)s evaluator-{index} %(name)s %(levelname)s %(message)s",
    )
    leave_no_core_file()
    return exit_status_of(lambda: run_loop(_evaluate(options.directories, index, num_shares)), log)


async def _evaluate(directories: Sequence[Path], index: int, num_shares: int) -> None:
    stop, missing = stop_event(), list[tuple[Path, EvaluationSettings, list[tuple[int, int]]]]()
    for directory in directories:
        settings = read_settings(directory)
        if settings is None:
            raise ConfigError(f"{directory}: no {NAME}; `rlhpc evaluate` writes it")
        there = {(each.prompt, each.sample) for each in read_samples(directory)}
        mine = [place for place in _places(settings) if place[0] % num_shares == index and place not in there]
        log.info("%s: %d samples to draw", directory, len(mine))
        if mine:
            missing.append((directory, settings, mine))
    if not missing:
        return
    # All have the same but for their adapters.  Nothing is trained on these samples.
    config = with_values(missing[0][1].config, {"algorithm.routing_replay": False})
    if config.generation.engine == "vllm":
        refuse_foreign_network(has_cuda=False, has_vllm=True)
    async with AsyncExitStack() as stack:
        seed, num_slots = engine_seed(config.run.seed, index), min(len(missing), MOST_ADAPTERS)
        engine = await start_engine(
            config, seed=seed, make_decode=lambda: PromptTokenizer.of(config.model).decode, num_adapters=num_slots
        )
        stack.push_async_callback(engine.close)
        check_sandbox(config.sandbox, is_needed=runs_programs(config))
        num_workers = _share_of_workers(config.rewards.workers_per_replica, num_shares)
        at = missing[0][1].rendezvous  # of the run to which all belong
        services = Path(at) if at else None
        pool = open_pool(config, judged_tasks(config), num_workers, rendezvous=services, with_environments=True)
        await stack.enter_async_context(pool)
        free = asyncio.Queue[int]()
        for number in range(1, 1 + num_slots):
            free.put_nowait(number)
        evaluators = [
            Evaluator(settings, mine, engine, pool, stack.enter_context(SamplesFile(directory, index)), free)
            for directory, settings, mine in missing
        ]
        await draw_all(evaluators, config.generation.max_num_seqs, stop)
    if refused := [each.refusal for each in evaluators if each.refusal]:
        raise ConfigError("\n".join(refused))


def _share_of_workers(num_workers: int, num_shares: int) -> int:
    """Number of reward workers that each evaluator process starts: all are on one node and share its workers."""
    return max(1, num_workers // num_shares)


def _places(settings: EvaluationSettings) -> Iterator[tuple[int, int]]:
    """Yield (prompt, sample) of all samples, a prompt's one after the other: they share its KV cache."""
    return ((p, s) for p in range(settings.num_prompts) for s in range(settings.samples_per_prompt))


async def draw_all(evaluators: Sequence[Evaluator], num_seqs: int, stop: asyncio.Event) -> None:
    """Keep an engine busy until all samples are on disk, one evaluation after the other; return early once stopped.

    num_seqs: sequences that the engine decodes at once.  Raises as Evaluator.draw.
    """
    waiting = ((each, *place) for each in evaluators for place in each.places)

    async def work() -> None:
        for evaluator, prompt, sample in waiting:
            await evaluator.draw(prompt, sample)

    async with asyncio.TaskGroup() as group:
        # A quarter more than the engine decodes at once: while some are judged, others take their places.
        workers = [group.create_task(work()) for _ in range(num_seqs + num_seqs // 4)]
        watch = group.create_task(_cancel_when(stop, workers))
        await asyncio.wait(workers)
        watch.cancel()


async def _cancel_when(stop: asyncio.Event, workers: Sequence[asyncio.Task[None]]) -> None:
    await stop.wait()
    log.info("asked to stop")
    for worker in workers:
        worker.cancel()


class Evaluator:
    """Draws, judges and writes the samples of one evaluation; several evaluators share engine and pool."""

    def __init__(
        self,
        settings: EvaluationSettings,
        places: list[tuple[int, int]],
        engine: GenerationEngine,
        pool: RewardPool,
        file: SamplesFile,
        free: asyncio.Queue[int],
    ) -> None:
        """places: (prompt, sample) of missing samples.  free: adapter numbers that no evaluation uses."""
        self._settings, self.places, self._engine, self._pool, self._file = settings, places, engine, pool, file
        self._free, self._num_left, self._adapter, self._beginning = free, len(places), 0, asyncio.Lock()
        self.refusal = ""  # reason why the engine refused the adapter; "": it did not
        self._prompts: SeededPrompts = open_prompts(settings.config)
        self._tokenizer = PromptTokenizer.of(settings.config.model)
        (self._dataset,) = settings.config.data
        self._template = dialogue_template(settings.config, self._tokenizer) if self._dataset.environment else None
        generation = settings.config.generation
        ends = self._tokenizer.ends(generation.stop)
        self._sampling = SamplingParams(generation.max_completion_tokens, settings.temperature, *ends)

    async def draw(self, prompt: int, sample: int) -> None:
        """Draw, judge and write a sample, once the engine has the adapter.  Raises EngineError, RoleFailed, OSError."""
        async with self._beginning:
            if not self._adapter:
                await self._load()
        if not self.refusal:
            self._file.append(await self._sample(prompt, sample))
        self._num_left -= 1
        if not self._num_left:
            self._free.put_nowait(self._adapter)

    async def _load(self) -> None:
        """Wait for a free adapter number, and load the adapter into the engine."""
        self._adapter, lora = await self._free.get(), self._settings.config.lora
        if lora.initial is not None:
            try:
                base = self._settings.inputs["base"]
                await self._engine.load_adapter(self._adapter, lora.initial, lora.scale, base)
            except GroupFailed as error:
                self.refusal = f"{self._settings.title}: {error}"
                log.warning("%s", self.refusal)

    async def _sample(self, prompt_id: int, sample: int) -> EvaluatedSample:
        prompt = self._prompts.peek(prompt_id)
        request = RolloutRequest(prompt_id, sample, prompt, self._sampling, adapter=self._adapter)
        if self._template is None:
            rollout = await self._engine.generate(request)
            has_ended = rollout.finish_reason is FinishReason.STOP
            text = self._tokenizer.decode_completion(
                rollout.token_ids, has_ended=has_ended, stop_strings=self._sampling.stop_strings
            )
            answer, _ = answer_of(text, self._dataset.thinking_end)
            judgement = await self._asked_again(partial(self._pool.judge, prompt.task, answer, prompt.reference))
        else:
            rollout, judgement = await self._converse(request, self._template)
            text = self._tokenizer.decode(rollout.token_ids, keep_special_tokens=True)
        return EvaluatedSample(
            prompt=prompt_id,
            sample=sample,
            source=self._prompts.source(prompt_id),
            completion=text,
            num_tokens=len(rollout.token_ids),
            finish_reason=rollout.finish_reason.value,
            verdict=judgement.verdict.value,
            reward=judgement.reward,
            answer=judgement.answer,
            detail=judgement.detail,
            parts=judgement.parts,
        )

    async def _asked_again(self, ask: Callable[[], Awaitable[Answer]]) -> Answer:
        """Return an answer with a verdict; ask again while the verifier fails."""
        answer = await ask()
        for _ in range(1, self._settings.config.rewards.max_attempts):
            if answer.verdict != Verdict.VERIFIER_ERROR.value:
                break
            answer = await ask()
        return answer

    async def _converse(self, request: RolloutRequest, template: DialogueTemplate) -> tuple[Rollout, Judgement]:
        """Sample a dialogue to its end; return it and the environment's judgement."""
        dialogue = Dialogue(
            request,
            self._engine,
            partial(self._environment_says, request),
            (self._tokenizer, template),
            self._settings.config.environment,
            admitted_version=self._engine.policy_version,
        )
        finished = await dialogue.run()
        reply = finished.reply
        assert reply is not None, "nobody cuts it off: a worker that is cancelled does not come here"
        judgement = Judgement(reply.reward, Verdict(reply.verdict), reply.reward_parts, reply.detail)
        return finished.rollout, judgement

    async def _environment_says(self, request: RolloutRequest, taken: TurnsTaken) -> TurnReply:
        """Return the environment's answer to the turns so far."""
        return await self._asked_again(partial(answered, self._pool, turn_request(request, self._dataset, taken)))


if __name__ == "__main__":  # engine workers are spawned: they import this module again
    sys.exit(main(sys.argv[1:]))

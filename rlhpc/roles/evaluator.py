"""Samples the prompts of an evaluation and has them judged: `python -m rlhpc.roles.evaluator DIRECTORY --share I/N`.

Input: the settings in the directory, and the samples that are there.  Output: the missing ones of every N-th prompt, in
samples-I.jsonl; where the dataset has an environment, each is a dialogue of several turns.  One engine with the weights
of the checkpoint, one pool of reward workers; no controller, no trainer.  A sample is drawn by (seed, prompt, number),
so that what a killed process had begun is drawn again alike.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TypeVar

from rlhpc.base.files import leave_no_core_file
from rlhpc.base.host_address import refuse_foreign_network
from rlhpc.base.processes import name_nameless_user
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
from rlhpc.protocol.errors import ConfigError
from rlhpc.protocol.messages import TurnReply
from rlhpc.protocol.types import FinishReason, Rollout, RolloutRequest, SamplingParams, Verdict
from rlhpc.rewards.code_place import check_sandbox
from rlhpc.rewards.environments import judged_tasks
from rlhpc.rewards.pool import Judgement, RewardPool, open_pool
from rlhpc.roles.lifecycle import exit_status_of, run_loop, stop_event

log = logging.getLogger("rlhpc.evaluator")
Answer = TypeVar("Answer", Judgement, TurnReply)


def main(arguments: list[str]) -> int:
    """Returns the exit status: 0 also where it was asked to stop."""
    name_nameless_user()
    parser = argparse.ArgumentParser(prog="python -m rlhpc.roles.evaluator", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--share", default="0/1", metavar="I/N", help="the prompts p with p mod N = I")
    options = parser.parse_args(arguments)
    index, num_shares = map(int, options.share.split("/"))
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format=f"%(asctime)s evaluator-{index} %(name)s %(levelname)s %(message)s",
    )
    leave_no_core_file()
    return exit_status_of(lambda: run_loop(_evaluate(options.directory, index, num_shares)), log)


async def _evaluate(directory: Path, index: int, num_shares: int) -> None:
    settings = read_settings(directory)
    if settings is None:
        raise ConfigError(f"{directory}: no {NAME}; `rlhpc evaluate` writes it")
    stop, config = stop_event(), settings.config
    there = {(each.prompt, each.sample) for each in read_samples(directory)}
    mine = [place for place in _places(settings) if place[0] % num_shares == index and place not in there]
    log.info("%d samples to draw", len(mine))
    if not mine:
        return
    if config.generation.engine == "vllm":
        refuse_foreign_network(has_cuda=False, has_vllm=True)
    async with AsyncExitStack() as stack:
        file = stack.enter_context(SamplesFile(directory, index))
        seed = engine_seed(config.run.seed, index)
        engine = await start_engine(config, seed=seed, make_decode=lambda: PromptTokenizer.of(config.model).decode)
        stack.push_async_callback(engine.close)
        check_sandbox(config.sandbox, is_needed=runs_programs(config))
        num_workers = _share_of_workers(config.rewards.workers_per_replica, num_shares)
        pool = open_pool(config, judged_tasks(config), num_workers, with_environments=True)
        await stack.enter_async_context(pool)
        await Evaluator(settings, engine, pool, file).sample(mine, stop)


def _share_of_workers(num_workers: int, num_shares: int) -> int:
    """How many reward workers one of the evaluator processes starts: all are on one node, where a run has a service."""
    return max(1, num_workers // num_shares)


def _places(settings: EvaluationSettings) -> Iterator[tuple[int, int]]:
    """(prompt, sample) of all, those of a prompt one after the other: they share its KV cache."""
    return ((p, s) for p in range(settings.num_prompts) for s in range(settings.samples_per_prompt))


class Evaluator:
    """Keeps an engine busy until all samples are on disk."""

    def __init__(
        self, settings: EvaluationSettings, engine: GenerationEngine, pool: RewardPool, file: SamplesFile
    ) -> None:
        self._settings, self._engine, self._pool, self._file = settings, engine, pool, file
        self._prompts: SeededPrompts = open_prompts(settings.config)
        self._tokenizer = PromptTokenizer.of(settings.config.model)
        (self._dataset,) = settings.config.data
        self._template = dialogue_template(settings.config, self._tokenizer) if self._dataset.environment else None
        generation = settings.config.generation
        ends = self._tokenizer.ends(generation.stop)
        self._sampling = SamplingParams(generation.max_completion_tokens, settings.temperature, *ends)

    async def sample(self, places: list[tuple[int, int]], stop: asyncio.Event) -> None:
        """Draw, judge and write the samples at these places, (prompt, sample); return early once `stop` is set.

        Raises EngineError, RoleFailed, OSError.
        """
        waiting = iter(places)
        num_seqs = self._settings.config.generation.max_num_seqs
        async with asyncio.TaskGroup() as group:
            # A quarter more than the engine decodes at once: while some are judged, others take their places.
            workers = [group.create_task(self._work(waiting)) for _ in range(num_seqs + num_seqs // 4)]
            watch = group.create_task(self._cancel_when(stop, workers))
            await asyncio.wait(workers)
            watch.cancel()

    async def _cancel_when(self, stop: asyncio.Event, workers: list[asyncio.Task[None]]) -> None:
        await stop.wait()
        log.info("asked to stop")
        for worker in workers:
            worker.cancel()

    async def _work(self, waiting: Iterator[tuple[int, int]]) -> None:
        for prompt, sample in waiting:
            self._file.append(await self._sample(prompt, sample))

    async def _sample(self, prompt_id: int, sample: int) -> EvaluatedSample:
        prompt = self._prompts.peek(prompt_id)
        request = RolloutRequest(prompt_id, sample, prompt, self._sampling)
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
        """An answer with a verdict, asked for again while the verifier fails."""
        answer = await ask()
        for _ in range(1, self._settings.config.rewards.max_attempts):
            if answer.verdict != Verdict.VERIFIER_ERROR.value:
                break
            answer = await ask()
        return answer

    async def _converse(self, request: RolloutRequest, template: DialogueTemplate) -> tuple[Rollout, Judgement]:
        """A dialogue to its end, and what its environment says of it."""
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
        """Its answer to the turns so far."""
        return await self._asked_again(partial(answered, self._pool, turn_request(request, self._dataset, taken)))


if __name__ == "__main__":  # engine workers are spawned: they import this module again
    sys.exit(main(sys.argv[1:]))

"""A generator samples dialogues, with a real reward service: reports, hand-back, rollouts of one turn beside them."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhpc.buffer.prefixes import PartialRollout, decode_partials, joined
from rlhpc.config.rules import Config
from rlhpc.data.tokenizer import PromptTokenizer
from rlhpc.protocol.messages import LeaseReturn
from rlhpc.protocol.types import FinishReason, Prefix, Prompt, Rollout, ScoredRollout, Verdict
from rlhpc.rewards.environments import variables_of
from rlhpc.rewards.pool import RewardPool
from tests.patience import PATIENCE_S
from tests.unit.data.checkpoints import CHATML, make_tokenizer_files
from tests.unit.roles.lone_generator import LoneGenerator
from tests.unit.roles.small_ring import small_config

pytestmark = pytest.mark.starts


def config_with(model: Path, **environment: Any) -> Config:
    settings = small_config().model_dump(mode="json")
    settings["model"]["path"] = str(model)
    plain = {"path": "none.jsonl", "task": "exact_match"}
    dialogues = {
        "environment": "tests.unit.rewards.sample_environments:Talking",
        "task": "environment",
        "use_chat_template": True,
    }
    settings["data"] = [plain | dialogues | {"name": "dialogues"}, plain | {"name": "plain"}]
    settings["environment"] = {"max_turn_tokens": 9, "max_turns": 5} | environment
    settings["generation"]["max_completion_tokens"] = 600
    settings["trainer"]["token_budget"] = 700
    settings["buffer"]["partial_interval_tokens"] = 1
    return Config.model_validate(settings)


class Talker(LoneGenerator):
    """It is given dialogues (prompt 0), and a prompt of one turn (prompt 1)."""

    def lease(self, *indices: int, prompt_id: int = 0, prefixes: tuple[Prefix | None, ...] = ()) -> None:
        task, record, max_tokens = [
            ("environment", json.dumps({"name": "you", "answer": "42"}), 600),
            ("exact_match", "42", 5),
        ][prompt_id]
        prompt = Prompt(prompt_id, task, np.array([9, 9], np.int32), record)
        self.grant(prompt_id, prompt, 2, indices, prefixes, max_tokens)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer_files(tmp_path_factory.mktemp("model"), chat_template=CHATML)


@asynccontextmanager
async def talker_with(config: Config) -> AsyncIterator[Talker]:
    async with (
        RewardPool(1, PATIENCE_S, environment=variables_of(config)) as pool,
        Talker.running(config, pool) as talker,
    ):
        yield talker


def same(mine: Rollout, other: Rollout) -> None:
    for name in ("token_ids", "behaviour_logprobs", "versions", "loss_mask"):
        np.testing.assert_array_equal(getattr(mine, name), getattr(other, name), err_msg=name)


async def test_a_dialogue_is_delivered_with_its_rewards_beside_a_rollout_of_one_turn(model: Path) -> None:
    async with talker_with(config_with(model)) as talker:
        talker.lease(0, 1)
        talker.lease(0, prompt_id=1)
        found = [await talker.delivered() for _ in range(3)]
        plain = [each for each in found if each.rollout.prompt.prompt_id == 1]
        dialogues = [each for each in found if each.rollout.prompt.prompt_id == 0]
        assert not talker.failures
    assert plain[0].rollout.loss_mask.all()
    for each in dialogues:
        assert each.verdict is Verdict.CORRECT
        assert each.reward == 2.5
        assert each.reward_parts == {"n": 5.0}
        starts = np.flatnonzero(np.diff(each.rollout.loss_mask.astype(int), prepend=0) == 1)
        assert len(starts) == 5
        assert not each.rollout.loss_mask[0]


async def test_what_is_handed_back_goes_on_elsewhere_as_if_nothing_had_happened(model: Path) -> None:
    config = config_with(model)
    async with talker_with(config) as talker:
        talker.lease(0)
        whole = await talker.delivered()
    async with talker_with(config) as talker:
        talker.lease(0)
        async with asyncio.timeout(PATIENCE_S):
            while talker.engine.statistics().tokens_generated < 20:  # noqa: ASYNC110 - a token each time
                await asyncio.sleep(0)
        await talker.sampling.hand_back()
        returned: LeaseReturn = await talker.next(LeaseReturn)
    (prefix,) = returned.prefixes
    assert prefix is not None
    assert len(prefix.token_ids) > 20
    np.testing.assert_array_equal(prefix.token_ids, whole.rollout.token_ids[: len(prefix.token_ids)])
    async with talker_with(config) as talker:
        talker.lease(0, prefixes=(prefix,))
        again = await talker.delivered()
        assert talker.engine.statistics().tokens_generated < np.count_nonzero(whole.rollout.loss_mask) - 15
    assert again.reward == whole.reward
    same(again.rollout, whole.rollout)


async def test_reports_of_a_dialogue_make_a_beginning_of_it(model: Path) -> None:
    """Put together as the controller does; whoever continues from it comes to the same end."""
    config = config_with(model)
    known: Prefix | None = None
    async with talker_with(config) as talker:
        talker.lease(0)
        while len(talker.sampling):
            report = talker.sampling.report()
            for piece in decode_partials(report.pieces.data, report.num_bytes) if report is not None else ():
                assert isinstance(piece, PartialRollout)
                assert piece.follows(known)
                known = joined(known, piece) if len(piece.tokens.token_ids) else known
            await asyncio.sleep(0)
        whole = await talker.delivered()
    assert known is not None
    assert len(known.token_ids) > 0.6 * len(whole.rollout.token_ids)
    np.testing.assert_array_equal(known.token_ids, whole.rollout.token_ids[: len(known.token_ids)])
    np.testing.assert_array_equal(known.versions, whole.rollout.versions[: len(known.token_ids)])


async def test_a_cancelled_dialogue_is_not_delivered(model: Path) -> None:
    async with talker_with(config_with(model)) as talker:
        talker.lease(0, 1)
        await asyncio.sleep(0)
        await talker.sampling.cancel(0)
        async with asyncio.timeout(PATIENCE_S):
            while len(talker.sampling):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert talker.leases.statistics.messages_received == 0


async def test_only_what_follows_the_end_of_thinking_is_judged_and_keeps_its_place(model: Path) -> None:
    async def drawn(thinking_end: str) -> ScoredRollout:
        config = config_with(model)
        data = (config.data[0], config.data[1].model_copy(update={"thinking_end": thinking_end}))
        prompt = Prompt(1, "tests.unit.rewards.sample_rewards:rewards_of_words", np.array([9, 9], np.int32), "")
        async with talker_with(config.model_copy(update={"data": data})) as talker:
            talker.grant(1, prompt, 2, (0,), (), 60)
            return await talker.delivered()

    whole, tokenizer = await drawn(""), PromptTokenizer(model)
    text = tokenizer.decode_completion(whole.rollout.token_ids, has_ended=True)
    end = re.findall(r"\w", text)[2]
    answer = text.partition(end)[2]
    places = [len(text) - len(answer) + word.end() for word in re.finditer(r"\w+", answer)]
    assert 0 < len(places) < len(re.findall(r"\w+", text))
    judged = await drawn(end)
    same(judged.rollout, whole.rollout)
    assert judged.reward == len(places)
    assert judged.token_rewards == tokenizer.on_tokens(dict.fromkeys(places, 1.0), whole.rollout.token_ids)
    assert (await drawn("no such text")).reward == 0


async def test_a_rollout_ends_with_a_stop_string_and_is_judged_without_it(model: Path) -> None:
    async def drawn(stop: tuple[str, ...]) -> ScoredRollout:
        config = config_with(model)
        generation = config.generation.model_copy(update={"stop": stop})
        prompt = Prompt(1, "tests.unit.rewards.sample_rewards:rewards_of_words", np.array([9, 9], np.int32), "")
        async with talker_with(config.model_copy(update={"generation": generation})) as talker:
            talker.grant(1, prompt, 2, (0,), (), 60)
            return await talker.delivered()

    whole, tokenizer = await drawn(()), PromptTokenizer(model)
    text = tokenizer.decode_completion(whole.rollout.token_ids, has_ended=True)
    stop = text[-4:-1]
    judged = await drawn((stop,))
    answer = text.partition(stop)[0]
    assert tokenizer.decode(judged.rollout.token_ids) == answer + stop
    np.testing.assert_array_equal(judged.rollout.token_ids, whole.rollout.token_ids[: len(judged.rollout.token_ids)])
    assert judged.rollout.loss_mask.all()
    assert judged.rollout.finish_reason is FinishReason.STOP
    assert judged.reward == len(re.findall(r"\w+", answer))

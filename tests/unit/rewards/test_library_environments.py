"""Environments of Gymnasium and of verifiers, in worker processes: their rewards, and tokens fed are tokens trained."""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass, field

import pytest

from rlhpc.config.tables_services import EnvironmentConfig
from rlhpc.environments.dialogue import TurnsTaken, answered
from rlhpc.protocol.errors import ConfigError, RoleFailed
from rlhpc.protocol.messages import TurnReply, TurnRequest
from rlhpc.rewards.environments import VARIABLE, resolve_environment
from rlhpc.rewards.pool import RewardPool
from tests.patience import PATIENCE_S
from tests.unit.roles.test_dialogue import check_tokens, dialogue_of, engine_of, speeches  # noqa: F401

IDS = {"gymnasium": "sample_games:Echo-v0", "verifiers": "sample_verifiers"}
RECORDS = {
    "gymnasium": {"prompt": "Play.", "seed": 7},
    "verifiers": {"prompt": [{"role": "user", "content": "What is 2?"}], "answer": "2", "example_id": 2},
}


def settings(library: str, **arguments: int) -> EnvironmentConfig:
    return EnvironmentConfig(id=IDS[library], arguments=arguments)


@pytest.fixture(scope="module", params=sorted(IDS))
def library(request):
    pytest.importorskip(request.param, reason=f"extra {request.param!r}")
    return request.param


@pytest.fixture
async def pool(library):
    here = {VARIABLE: json.dumps({"settings": settings(library, **most(library, 3)).model_dump(), "names": [library]})}
    async with RewardPool(1, PATIENCE_S, environment=here) as pool:
        yield pool


def most(library: str, number: int) -> dict[str, int]:
    return {"most" if library == "gymnasium" else "max_turns": number}


@dataclass
class Table:
    """Asks a pool, as a generator asks a reward service."""

    pool: RewardPool
    library: str
    key: str
    asked: list[TurnsTaken] = field(default_factory=list)

    async def __call__(self, taken: TurnsTaken) -> TurnReply:
        self.asked.append(taken)
        record = json.dumps(RECORDS[self.library])
        return await answered(
            self.pool,
            TurnRequest(0, self.key, self.library, record, taken.turns, "environment", taken.answer, "", taken.is_last),
        )


async def answer(pool, library, *turns, key="a", is_last=False):
    return await Table(pool, library, key)(TurnsTaken(turns, turns[-1] if turns else "", is_last))


@pytest.mark.starts
async def test_turns_rewards_and_the_end_are_those_of_the_library(pool, library):
    opening = await answer(pool, library)
    first = await answer(pool, library, "four")
    assert first.messages[0]["role"] == "user"
    assert first.messages[0]["content"].startswith("4 characters 🙂 <|im_end|> and ")
    last = await answer(pool, library, "four", "three", "won")
    assert last.is_done
    if library == "gymnasium":
        assert opening.messages[0]["content"].startswith("begin with ")
        assert (last.reward, last.verdict) == (0.75, "correct")  # as its info says
    else:
        assert opening.messages == ()
        assert (last.reward, last.reward_parts) == (1.5, {"half_of_turns": 1.5, "num_turns": 3.0})
        assert last.detail == "max_turns_reached"


@pytest.mark.starts
async def test_a_limit_of_the_run_ends_it_and_what_there_is_is_judged(pool, library):
    cut = await answer(pool, library, "four", "three", is_last=True)
    assert cut.is_over
    assert not cut.is_done
    assert cut.reward == (0.5 if library == "gymnasium" else 1.0)


@pytest.mark.starts
async def test_a_dialogue_is_played_again_the_same_in_another_process(pool, library):
    first = await answer(pool, library, "a", "b")
    here = {VARIABLE: json.dumps({"settings": settings(library, **most(library, 3)).model_dump(), "names": [library]})}
    async with RewardPool(1, PATIENCE_S, environment=here) as other:
        assert await answer(other, library, "a", "b") == first


@pytest.mark.starts
@pytest.mark.parametrize(("family", "seed"), [("qwen2.5", 3), ("llama3", 4)])
async def test_tokens_fed_are_tokens_trained_also_where_a_dialogue_goes_on_elsewhere(
    pool,
    library,
    speeches,  # noqa: F811
    family,
    seed,
):
    speech = speeches[family, False]
    limits, max_tokens = {"max_turns": 3, "max_turn_tokens": 30}, 2000
    engine, table = await engine_of(speech, seed, 0.1), Table(pool, library, "whole")
    whole = await dialogue_of(speech, engine, table, limits, max_tokens).run()
    check_tokens(whole, engine, table, speech, limits, max_tokens)
    assert whole.num_turns == 3
    beginning = engine.fed[1][0].prefix  # two turns are in it, with what was said between them
    again = Table(pool, library, "elsewhere")
    goes_on = await dialogue_of(speech, await engine_of(speech, seed, 0.1), again, limits, max_tokens, beginning).run()
    length = len(beginning.token_ids)
    assert goes_on.rollout.token_ids[:length].tolist() == whole.rollout.token_ids[:length].tolist()
    assert goes_on.rollout.loss_mask[:length].tolist() == whole.rollout.loss_mask[:length].tolist()
    assert goes_on.num_turns == 3


@pytest.mark.parametrize(("name", "why"), [("no_such:Game-v0", "tried on"), ("CartPole-v1", "tried on|Box")])
def test_what_is_not_there_or_no_text_is_refused_by_its_id(library, name, why):
    with pytest.raises(ConfigError, match=rf"environment\.id='{name}'.*({why})"):
        resolve_environment(library).open(EnvironmentConfig(id=name))


def test_a_game_that_is_refused_is_closed():
    pytest.importorskip("gymnasium")
    with pytest.raises(ConfigError, match="its actions are Discrete"):
        resolve_environment("gymnasium").open(EnvironmentConfig(id="sample_games:Counted-v0"))
    assert importlib.import_module("sample_games").Counted.num_closed == 1


@pytest.mark.starts
async def test_an_environment_that_fails_is_a_verifier_error(pool, library):
    if library == "verifiers":
        await answer(pool, library)
        failed = await answer(pool, library, "break")
        assert failed.verdict == "verifier_error"
        assert "the board fell off the table" in failed.detail


@pytest.mark.starts
async def test_a_pool_whose_environment_is_not_there_says_which(library):
    here = {VARIABLE: json.dumps({"settings": EnvironmentConfig(id="no-such-game").model_dump(), "names": [library]})}
    with pytest.raises(RoleFailed, match=r"environment\.id='no-such-game', tried on"):
        await RewardPool(1, PATIENCE_S, environment=here).start()

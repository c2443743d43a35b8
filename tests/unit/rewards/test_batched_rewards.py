"""Reward functions that take many completions at once."""

import asyncio
import json

import pytest

from rlhpc.protocol.errors import ConfigError, RoleFailed
from rlhpc.protocol.types import Verdict
from rlhpc.rewards.pool import RewardPool
from rlhpc.rewards.registry import asks_for_record, resolve
from tests.patience import PATIENCE_S

TASK = "sample_rewards:"
BAD = TASK + "batch_of_which_one_is"


def test_a_batched_function_is_told_by_its_parameter_and_judges_one_as_well():
    judge = resolve(TASK + "lengths")
    assert judge("abc", "") == {"reward": 3.0, "batch": 1}
    assert resolve(TASK + "lengths_later").judge_all(["ab", "abc"], ['{"per": 2}', '{"per": 3}']) == [1.0, 1.0]


def test_a_function_of_trl_gets_fields_of_records_by_name_and_the_rest_that_all_have():
    records = [
        {"prompt": "1+1=", "answer": "2", "source": "sums", "level": 1},
        {"prompt": "2+2=", "answer": "4", "source": "sums"},
    ]
    judge = resolve(TASK + "as_trl_calls_it")
    assert judge.judge_all(["1+1=2", "2+2=5"], list(map(json.dumps, records))) == [1.1, 0.1]  # "level" is of one only
    with pytest.raises(ValueError, match="parameter 'answer', and a record has no field 'answer'; it has 'prompt'"):
        judge.judge_all(["1+1=2"], ['{"prompt": "1+1="}'])
    with pytest.raises(ValueError, match=r'set data\.reference_field = "\*"'):
        judge.judge_all(["1+1=2"], ["2"])


def test_the_rest_is_nothing_where_references_are_no_records():
    judge = resolve(TASK + "batched_with_rest")
    assert judge.judge_all(["a", "b"], ["3", "4"]) == [3.0, 4.0]
    assert judge.judge_all(["a"], ['{"weight": 2}']) == [14.0]


def test_who_needs_records_is_known_without_importing_it():
    assert asks_for_record(TASK + "lengths_later")
    assert asks_for_record(TASK + "as_trl_calls_it")
    assert not asks_for_record(TASK + "lengths")


def test_parameters_without_a_name_are_refused():
    with pytest.raises(ConfigError, match="'completions' cannot be given by name"):
        resolve(TASK + "batched_by_place")


@pytest.mark.starts
async def test_who_waits_at_the_same_time_is_judged_together_up_to_the_size_of_a_batch():
    async with RewardPool(1, PATIENCE_S, preload_tasks=[TASK + "lengths"], batch_size=8) as pool:
        texts = ["x" * n for n in range(20)]
        found = await asyncio.gather(*(pool.judge(TASK + "lengths", text, "") for text in texts))
        assert [each.reward for each in found] == [float(len(text)) for text in texts]
        assert [each.parts["batch"] for each in found] == [8.0] * 16 + [4.0] * 4
        assert pool.counts.of(TASK + "lengths", "judged") == 20.0


@pytest.mark.starts
async def test_other_tasks_are_judged_between_two_batches():
    async with RewardPool(1, PATIENCE_S, preload_tasks=[TASK + "lengths", TASK + "length"], batch_size=1) as pool:
        batches = [asyncio.create_task(pool.judge(TASK + "lengths", "x", "")) for _ in range(50)]
        await asyncio.sleep(0)
        assert (await pool.judge(TASK + "length", "abc", "")).reward == 3.0
        assert sum(call.done() for call in batches) < 10
        await asyncio.gather(*batches)


@pytest.mark.starts
@pytest.mark.parametrize(
    ("bad", "said", "kind"),
    [
        ("raise", "ValueError: cannot judge this", "raised"),
        ("die", "worker died: signal SIGKILL", "died"),
        ("hang", "no answer within 4 s; killed", "timed_out"),
    ],
)
async def test_a_batch_that_fails_is_nobodys_verdict_and_the_guilty_one_is_found(bad, said, kind, caplog):
    timeout_s = 4.0 if bad == "hang" else PATIENCE_S  # those judged alone have to meet it
    async with RewardPool(2, timeout_s, preload_tasks=[BAD], batch_size=8) as pool:
        texts = [f"good {n}" for n in range(7)]
        texts.insert(3, bad)
        found = await asyncio.gather(*(pool.judge(BAD, text, "") for text in texts))
        guilty = found.pop(3)
        assert guilty.verdict is Verdict.VERIFIER_ERROR
        assert said in guilty.detail
        assert [(each.verdict, each.reward) for each in found] == [(Verdict.CORRECT, 1.0)] * 7
        counts = {name: pool.counts.of(BAD, name) for name in ("judged", "batch_failed", kind)}
        assert counts == {"judged": 8.0, "batch_failed": 1.0, kind: 1.0}
    assert f"{BAD} failed on a batch of 8 completions; judging them again one by one: {said}" in caplog.text


@pytest.mark.starts
async def test_what_is_no_reward_in_a_list_is_the_failure_of_its_completion_alone():
    async with RewardPool(1, PATIENCE_S, preload_tasks=[BAD]) as pool:
        texts = ["good", "nan", "none", "text", "fine"]
        found = await asyncio.gather(*(pool.judge(BAD, text, "") for text in texts))
        assert [each.verdict is Verdict.VERIFIER_ERROR for each in found] == [False, True, True, True, False]
        assert "reward must be a finite number, not float nan" in found[1].detail
        assert "not NoneType" in found[2].detail
        assert {name: pool.counts.of(BAD, name) for name in ("judged", "invalid", "batch_failed")} == {
            "judged": 5.0, "invalid": 3.0, "batch_failed": 0.0,
        }  # fmt: skip
        assert pool.num_restarts == 0


@pytest.mark.starts
@pytest.mark.parametrize(
    ("function", "said"),
    [("one_for_all", "returns a list with a reward for each, not float"), ("always_one", "its 2 completions, not 1")],
)
async def test_anything_but_as_many_rewards_is_a_failure_of_the_batch(function, said):
    async with RewardPool(1, PATIENCE_S, preload_tasks=[TASK + function]) as pool:
        await asyncio.gather(*(pool.judge(TASK + function, text, "") for text in "ab"))
        assert said in pool.failed_batches[TASK + function]


@pytest.mark.starts
async def test_a_call_that_is_cancelled_and_a_pool_that_is_closed_leave_nobody_waiting():
    pool = RewardPool(1, PATIENCE_S, preload_tasks=[BAD], batch_size=2)
    await pool.start()
    calls = [asyncio.create_task(pool.judge(BAD, text, "")) for text in ("gone", "hang", "hang", "good")]
    await asyncio.sleep(0)
    calls[0].cancel()
    await asyncio.sleep(0.1)
    await pool.close()
    first, *rest = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(first, asyncio.CancelledError)
    assert [type(end) for end in rest] == [RoleFailed] * 3

"""Workers that judge: one by one, in batches and turns, and what becomes of what they return."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import AsyncMock

import numpy as np
import pytest
import sample_rewards
import torch

from rlhpc.config.rules import Config
from rlhpc.metrics.evaluations import EvaluationSettings
from rlhpc.protocol.contracts import RewardOutcome
from rlhpc.protocol.errors import ConfigError, RoleFailed
from rlhpc.protocol.messages import REWARDS
from rlhpc.protocol.types import Verdict
from rlhpc.rewards import pool as place
from rlhpc.rewards.outcomes import NoReward, as_outcome, by_task, fault_of
from rlhpc.rewards.pool import RewardPool, Turns, open_pool, start_timeout_s
from rlhpc.rewards.registry import asks_for_record, resolve
from rlhpc.rewards.task_settings import ARGUMENTS
from rlhpc.roles import evaluator
from rlhpc.roles.reward_service import RewardService
from tests.engines.memory_channel import MemoryServer
from tests.patience import PATIENCE_S

TASK = "sample_rewards:"
HANG_S = {TASK + "hang": 1.0, TASK + "hang_with_child": 3.0}  # of those alone that shall not meet their limit


def is_alive(pid: int) -> bool:
    """False for a zombie too: it is gone but for its parent's notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def wait_until_gone(pid: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while is_alive(pid):  # noqa: ASYNC110  a process has no asyncio.Event
            await asyncio.sleep(0.01)


@pytest.fixture
async def pool():
    async with RewardPool(1, PATIENCE_S, preload_tasks=[TASK + "length"], task_timeout_s=HANG_S) as pool:
        yield pool


@pytest.mark.starts
async def test_a_judgement_carries_reward_verdict_parts_detail_and_where_they_were_earned(pool):
    judgement = await pool.judge(TASK + "length", "abc", "")
    assert judgement.verdict is Verdict.CORRECT
    assert (judgement.reward, judgement.parts, judgement.detail) == (3.0, {"length": 3.0}, "ok")
    judgement = await pool.judge(TASK + "rewards_of_words", "two  words", "")
    assert (judgement.reward, judgement.rewards_at) == (2.0, {3: 1.0, 10: 1.0})
    assert (await pool.judge(TASK + "rewards_of_words", "", "")).rewards_at == {}
    judgement = await pool.judge("integer_arithmetic", "1+1=3", "2")
    assert (judgement.verdict, judgement.reward) == (Verdict.WRONG, 0.0)
    judgement = await pool.judge(TASK + "fail", "x" * 2000, "")
    assert judgement.detail.endswith(f" ({line_of('cannot judge')})")
    half, one = await pool.judge(TASK + "return_number", "a", ""), await pool.judge(TASK + "return_number", "ab", "")
    assert (half.reward, half.verdict) == (0.5, Verdict.WRONG)
    assert (one.reward, one.verdict) == (1.0, Verdict.CORRECT)
    later = await pool.judge(TASK + "return_later", "abc", "")
    assert (later.reward, later.verdict, later.parts, later.answer) == (0.5, Verdict.CORRECT, {"brevity": 1.0}, "abc")
    found = await pool.judge(TASK + "answer_half_a_pair", "abc", "")
    assert (found.reward, found.verdict, found.answer) == (1.0, Verdict.CORRECT, "\\ud800")
    assert (found.parts, found.rewards_at) == ({"part\\udfff": 0.5}, {1: 0.5})
    assert pool.num_restarts == 0
    assert (await pool.judge(TASK + "read_input", "", "")).reward == 0.0


AMISS = (
    ("fail", "ValueError: cannot judge abc"),
    ("return_text", "must be a finite number, not str"),
    ("return_nan", "must be a finite number, not float nan"),
    ("return_nan_and_a_part_called_reward", "reward must be a finite number, not float nan"),
    ("return_more_than_float32_has", "reward must lie within ±1e+30, not 1e+300"),
    ("return_infinite_part", "bonus must be a finite number"),
    ("reward_before_the_first_character", "rewards_at[0]: the completion has characters 1 to 3"),
    ("reward_behind_the_last_character", "rewards_at[4]: the completion has characters 1 to 3"),
    ("reward_at_a_fraction", "rewards_at[1.5]: the completion has characters 1 to 3"),
    ("nan_at_a_character", "rewards_at[1] must be a finite number, not float nan"),
    ("rewards_in_a_list", "rewards_at must be a dict, not list"),
    ("return_nothing", "a RewardOutcome, a number, True or False, or a dict with a reward, not NoneType"),
    ("raise_half_a_pair", "ValueError: \\ud800"),
    ("return_two_rewards", "has 'reward' or 'score', not ['reward', 'score']"),
    ("nothing", "has no function"),
)


@pytest.mark.starts
async def test_whatever_a_function_raises_or_returns_amiss_is_a_verifier_error(pool):
    for function, detail in AMISS:
        judgement = await pool.judge(TASK + function, "abc", "")
        assert judgement.verdict is Verdict.VERIFIER_ERROR, function
        assert detail in judgement.detail
    assert pool.num_restarts == 0


def line_of(words: str) -> str:
    """FILE:LINE of the line of sample_rewards.py with these words."""
    file = Path(sample_rewards.__file__)
    lines = file.read_text(encoding="utf-8").splitlines()
    return f"{file}:{next(place for place, line in enumerate(lines, 1) if words in line)}"


@pytest.mark.starts
@pytest.mark.parametrize(
    ("function", "said", "words"),
    [
        ("fail_within", "KeyError: 'abc'", '{"right": 1.0}['),
        ("leave_politely", "SystemExit: 1", "raise SystemExit(1)"),
        ("batch_that_fails", "KeyError: 'abc'", '{"right": 1.0}['),
    ],
)
async def test_what_a_function_raises_has_its_line_and_once_its_traceback_in_the_log(
    pool, function, said, words, caplog
):
    for completion in ("abc", "abd", "abc"):
        judgement = await pool.judge(TASK + function, completion, "")
        assert judgement.failure == "raised"
        assert judgement.detail.endswith(f" ({line_of(words)})")
    assert said in judgement.detail
    traces = [record.getMessage() for record in caplog.records if "Traceback (most recent call last)" in record.message]
    assert len(traces) == 1
    assert "worker.py" not in traces[0]
    assert f'File "{sample_rewards.__file__}"' in traces[0]
    assert pool.num_restarts == 0


@pytest.mark.starts
async def test_a_worker_that_ends_after_its_pipe_has_its_status_said(pool):
    judgement = await pool.judge(TASK + "close_the_pipe", "", "")
    assert "worker died: exit status 5" in judgement.detail


@pytest.mark.starts
async def test_arguments_of_the_run_file_reach_a_function_and_a_batched_one():
    """A batched function's are no fields of the record, which has a scale of its own here."""
    arguments = {TASK + "scaled": {"scale": 2, "shift": 0.5}, TASK + "scaled_together": {"scale": 3}}
    async with RewardPool(1, PATIENCE_S, environment={ARGUMENTS: json.dumps(arguments)}) as pool:
        assert (await pool.judge(TASK + "scaled", "abc", "")).reward == 6.5
        record = json.dumps({"scale": 100, "answer": "7"})
        assert (await pool.judge(TASK + "scaled_together", "abc", record)).reward == 10.0


@pytest.mark.starts
@pytest.mark.parametrize(("function", "detail"), [("die", "signal SIGSEGV"), ("leave", "exit status 3")])
async def test_a_worker_that_dies_is_replaced_and_only_its_completion_is_an_error(pool, function, detail):
    before = pool.worker_pids
    lost, *others = await asyncio.gather(
        pool.judge(TASK + function, "abc", ""), *(pool.judge(TASK + "length", "a" * n, "") for n in range(20))
    )
    assert lost.verdict is Verdict.VERIFIER_ERROR
    assert detail in lost.detail
    assert [judgement.reward for judgement in others] == [float(n) for n in range(20)]
    assert pool.num_restarts == 1
    assert pool.worker_pids != before


@pytest.mark.starts
async def test_a_hung_verifier_is_killed_with_everything_it_started(pool, tmp_path):
    (worker,) = pool.worker_pids
    child_file = tmp_path / "child"
    started = time.monotonic()
    judgement = await pool.judge(TASK + "hang_with_child", "", str(child_file))  # has three seconds to start it
    assert judgement.verdict is Verdict.VERIFIER_ERROR
    assert "no answer within 3 s" in judgement.detail
    assert time.monotonic() - started < PATIENCE_S
    await wait_until_gone(worker)
    await wait_until_gone(int(child_file.read_text()))
    assert (await pool.judge(TASK + "length", "abc", "")).reward == 3.0


@pytest.mark.starts
async def test_a_hung_verifier_does_not_delay_the_others():
    async with RewardPool(2, PATIENCE_S, task_timeout_s={TASK + "hang": 10 * PATIENCE_S}) as pool:
        hung = asyncio.create_task(pool.judge(TASK + "hang", "", ""))
        others = await asyncio.gather(*(pool.judge("integer_arithmetic", str(n), str(n)) for n in range(50)))
        assert not hung.done()
        assert all(judgement.verdict is Verdict.CORRECT for judgement in others)
    with pytest.raises(RoleFailed, match="closed"):
        await hung


@pytest.mark.starts
async def test_a_memory_limit_is_an_error_of_the_completion_that_passes_it():
    async with RewardPool(1, PATIENCE_S, memory_limit_bytes=2 << 30) as pool:
        assert "MemoryError" in (await pool.judge(TASK + "allocate", "", "")).detail
        assert (await pool.judge(TASK + "length", "abc", "")).reward == 3.0


@pytest.mark.starts
async def test_a_leak_that_reaches_its_limit_costs_one_completion_and_the_worker():
    limits = {"hold_memory": 1 << 30}
    async with RewardPool(
        1, PATIENCE_S, task_memory_bytes={TASK + name: limit for name, limit in limits.items()}
    ) as pool:
        judgements = [await pool.judge(TASK + "hold_memory", "", "") for _ in range(16)]
        failed = [judgement for judgement in judgements if judgement.verdict is Verdict.VERIFIER_ERROR]
        assert failed
        assert "MemoryError" in failed[0].detail
        assert "of 1073741824 bytes" in failed[0].detail
        assert judgements[judgements.index(failed[0]) + 1].reward == 1.0  # another process, which holds nothing yet
        assert pool.counts.of(TASK + "hold_memory", "out_of_memory") == len(failed) == pool.num_restarts
        # The limit is of that task alone.
        assert (await pool.judge(TASK + "hold_memory", "", "")).verdict is Verdict.CORRECT
        assert "MemoryError" not in (await pool.judge(TASK + "length", "abc", "")).detail


@pytest.mark.starts
async def test_what_failed_is_counted_by_task_and_kind(pool):
    for function in ("fail", "return_nan", "return_text", "return_nothing", "die", "hang", "length", "length"):
        await pool.judge(TASK + function, "abc", "")
    await pool.judge(TASK + "length", "\ud800", "")
    kinds = {
        "fail": "raised", "return_nan": "invalid", "return_text": "invalid", "return_nothing": "invalid", "die": "died",
        "hang": "timed_out", "length": "unsent",
    }  # fmt: skip
    counted = by_task(RewardService(MemoryServer(REWARDS), pool).heartbeat().metrics)
    for function, kind in kinds.items():
        figures = counted[TASK + function]
        assert {name: value for name, value in figures.items() if name != "seconds"} == {
            "judged": 3.0 if function == "length" else 1.0, kind: 1.0
        }  # fmt: skip
    assert counted[TASK + "hang"]["seconds"] >= 1.0


@pytest.mark.starts
async def test_processes_that_are_forked_and_left_behind_are_killed_and_counted(pool):
    (worker,) = pool.worker_pids
    assert (await pool.judge(TASK + "fork_and_leave", "", "")).reward == 1.0
    for completion in ("", "wait"):
        # The child returns from the function, too, and would give the worker's next answer.
        assert (await pool.judge(TASK + "fork_and_come_back", completion, "")).reward == 1.0
        assert (await pool.judge(TASK + "length", "abc", "")).reward == 3.0
    assert pool.counts.of(TASK + "fork_and_leave", "forked") == 1.0
    assert pool.counts.of(TASK + "fork_and_come_back", "forked") == 2.0
    assert pool.worker_pids == (worker,)
    assert children_of(worker) == []


@pytest.mark.starts
async def test_a_program_that_a_function_keeps_is_left_alone_and_signals_to_the_job_end_no_worker(pool):
    first, second = [await pool.judge(TASK + "keep_program", "", "") for _ in range(2)]
    assert first.reward == second.reward
    assert second.verdict is Verdict.CORRECT
    assert is_alive(int(first.reward))
    (pid,) = pool.worker_pids
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(pid, number)
    assert (await pool.judge(TASK + "length", "abc", "")).reward == 3.0
    assert pool.worker_pids == (pid,)


def children_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


@pytest.mark.starts
async def test_tasks_that_hang_leave_all_workers_but_one_to_the_others():
    async with RewardPool(2, PATIENCE_S, preload_tasks=[TASK + "length"], task_timeout_s=HANG_S) as pool:
        hung = [asyncio.create_task(pool.judge(TASK + "hang", "", "")) for _ in range(6)]
        await asyncio.sleep(0)
        await hung[0]  # a first one shows what the task is like
        others = [pool.judge(TASK + "length", "abc", "") for _ in range(10)]
        assert all(judgement.reward == 3.0 for judgement in await asyncio.gather(*others))
        assert not all(call.done() for call in hung)  # judged while the others were waited for
        for call in hung:
            call.cancel()
        await asyncio.gather(*hung, return_exceptions=True)


@pytest.mark.starts
async def test_heartbeats_tell_how_many_workers_were_lost(pool):
    service = RewardService(MemoryServer(REWARDS), pool)
    assert service.heartbeat().metrics["restarts"] == 0.0
    await pool.judge(TASK + "die", "abc", "")
    await pool.judge(TASK + "length", "abc", "")  # by the new worker
    assert service.heartbeat().metrics["restarts"] == 1.0


@pytest.mark.starts
async def test_a_cancelled_call_does_not_give_its_answer_to_the_next(pool):
    call = asyncio.create_task(pool.judge(TASK + "hang", "", ""))
    await asyncio.sleep(0.05)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (await pool.judge(TASK + "length", "abcd", "")).reward == 4.0


@pytest.mark.starts
async def test_close_ends_hung_workers_at_once_and_tells_those_who_wait():
    pool = RewardPool(2, 10 * PATIENCE_S)
    await pool.start()
    calls = [asyncio.create_task(pool.judge(TASK + "hang", "", "")) for _ in range(4)]
    await asyncio.sleep(0.05)
    pids = pool.worker_pids
    started = time.monotonic()
    await pool.close()
    assert time.monotonic() - started < PATIENCE_S
    assert not any(is_alive(pid) for pid in pids)
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(outcome, RoleFailed)
    with pytest.raises(RoleFailed, match="closed"):
        await pool.judge(TASK + "length", "abc", "")
    await pool.close()


@pytest.mark.starts
async def test_a_function_that_cannot_be_imported_stops_the_start_with_the_reason():
    pool = RewardPool(2, 1.0, preload_tasks=["sample_rewards.deeper:f"])
    with pytest.raises(RoleFailed, match=r"cannot import sample_rewards\.deeper"):
        await pool.start()
    assert pool.worker_pids == ()


@pytest.mark.starts
async def test_a_pool_whose_workers_no_longer_start_says_so_instead_of_waiting_for_ever(tmp_path, monkeypatch):
    module = tmp_path / "reward_that_vanishes.py"
    module.write_text("from sample_rewards import die\n")
    monkeypatch.syspath_prepend(tmp_path)
    async with RewardPool(1, 5.0, preload_tasks=["reward_that_vanishes:die"]) as pool:
        module.unlink()
        await pool.judge("reward_that_vanishes:die", "", "")
        with pytest.raises(RoleFailed, match="cannot import reward_that_vanishes"):
            await pool.judge("reward_that_vanishes:die", "", "")


@pytest.mark.starts
def test_workers_die_with_a_service_that_is_killed(tmp_path):
    code = (
        "import asyncio, sys\n"
        "from rlhpc.rewards.pool import RewardPool\n"
        "async def main():\n"
        "    pool = RewardPool(1, 60.0)\n"
        "    await pool.start()\n"
        "    print(*pool.worker_pids, flush=True)\n"
        "    await pool.judge('sample_rewards:hang', '', '')\n"
        "asyncio.run(main())\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment) as service:
        assert service.stdout is not None
        worker = int(service.stdout.readline())
        assert is_alive(worker)
        service.kill()
    asyncio.run(wait_until_gone(worker))


# ----------------------------------------------------------------- Reward functions that take many completions at once

BAD = TASK + "batch_of_which_one_is"


def test_a_batched_function_is_told_by_its_parameters_which_have_names():
    judge = resolve(TASK + "lengths")
    assert judge("abc", "") == {"reward": 3.0, "batch": 1}
    assert resolve(TASK + "lengths_later").judge_all(["ab", "abc"], ['{"per": 2}', '{"per": 3}']) == [1.0, 1.0]
    judge = resolve(TASK + "batched_with_rest")
    assert judge.judge_all(["a", "b"], ["3", "4"]) == [3.0, 4.0]
    assert judge.judge_all(["a"], ['{"weight": 2}']) == [14.0]
    assert asks_for_record(TASK + "lengths_later")
    assert asks_for_record(TASK + "as_trl_calls_it")
    assert not asks_for_record(TASK + "lengths")
    with pytest.raises(ConfigError, match="'completions' cannot be given by name"):
        resolve(TASK + "batched_by_place")


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


# ------------------------------------- How many reward workers a process starts, and how long they may take to come up


@pytest.mark.parametrize(
    ("num_workers", "num_cores", "expected"), [(1, 1, 65.0), (1, 64, 60.078125), (64, 64, 65.0), (128, 2, 380.0)]
)
def test_workers_that_share_a_core_have_longer_to_start(num_workers: int, num_cores: int, expected: float) -> None:
    assert start_timeout_s(num_workers, num_cores) == expected


@pytest.mark.parametrize(("own", "expected"), [(0, 24), (3, 3)])
def test_a_pool_has_the_time_that_its_workers_need(monkeypatch: pytest.MonkeyPatch, own: int, expected: int) -> None:
    opened: list[tuple[int, Any]] = []

    def note(num_workers: int, _timeout_s: float, **settings: Any) -> None:
        opened.append((num_workers, settings["start_timeout_s"]))

    monkeypatch.setattr(place, "RewardPool", note)
    open_pool(make_config(), ["regex"], own)
    assert opened == [(expected, 60.0 + 5.0 * expected / len(os.sched_getaffinity(0)))]


@pytest.mark.parametrize(("num_shares", "expected"), [(1, 24), (5, 4), (24, 1), (100, 1)])
async def test_evaluators_share_the_workers_of_a_service(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, num_shares: int, expected: int
) -> None:
    opened: list[int] = []

    async def engine(*_arguments: Any, **_settings: Any) -> Any:
        return SimpleNamespace(close=AsyncMock())

    def note(_config: Config, _tasks: object, num_workers: int = 0, **_settings: Any) -> NoReturn:
        opened.append(num_workers)
        raise RoleFailed("that is all")

    monkeypatch.setattr(evaluator, "start_engine", engine)
    monkeypatch.setattr(evaluator, "open_pool", note)
    EvaluationSettings(make_config(), "a model", 1, 100, 0.0, {}).write(tmp_path)
    with pytest.raises(RoleFailed, match="that is all"):
        await evaluator._evaluate([tmp_path], num_shares - 1, num_shares)
    assert opened == [expected]


def make_config() -> Config:
    return Config.model_validate({
        "run": {"name": "a", "num_steps": 1}, "model": {"path": "m"}, "data": {"path": "d", "task": "regex"},
        "generation": {"max_prompt_tokens": 1, "max_completion_tokens": 1}, "trainer": {"token_budget": 8},
        "admission": {"groups_per_step": 1, "group_size": 2}, "rewards": {"workers_per_replica": 24},
    })  # fmt: skip


# ------------------------------------------------------------------------------------------------ what comes back


@pytest.mark.parametrize(
    ("returned", "reward", "is_correct"),
    [
        (np.array([1, 2]).sum() == 3, 1.0, True),  # numpy's own truth, which is no bool
        (np.isclose(1.0, 2.0), 0.0, False),
        (np.float32(0.5), 0.5, False),
        (np.array(1.0), 1.0, True),
        (torch.tensor(0.5), 0.5, False),
        (torch.tensor([1, 2]).sum() == 3, 1.0, True),
        ({"score": np.True_, "acc": np.False_}, 1.0, False),
        ({"score": torch.tensor(0.25), "acc": torch.tensor(True)}, 0.25, True),
    ],
    ids=str,
)
def test_numbers_and_truths_may_be_numpys_or_torchs(returned, reward, is_correct):
    outcome = as_outcome(returned)
    assert (outcome.reward, outcome.is_correct) == (reward, is_correct)
    assert type(outcome.reward) is float
    assert type(outcome.is_correct) is bool


def test_dicts_as_verl_returns_them_are_rewards_with_their_answers():
    assert as_outcome({"score": -1.0, "acc": False, "pred": "41"}) == RewardOutcome(-1.0, False, answer="41")
    assert as_outcome({"score": -1.0, "acc": False, "pred": None}) == RewardOutcome(-1.0, False)
    returned = {"reward": 1, "format": np.int64(1), "judge": "fine", "bonus": None, "detail": None, "rewards_at": None}
    assert as_outcome(returned) == RewardOutcome(1.0, True, {"format": 1.0})
    assert not as_outcome({"score": 0.3, "acc": 0.3}).is_correct
    assert not as_outcome({"score": 0.3, "acc": math.nan}).is_correct
    assert as_outcome({"score": 0.3, "acc": 1}).is_correct


@pytest.mark.parametrize(("returned", "said"), [
    (np.array([1.0, 0.0]), "not ndarray"),
    ((1.0, True), "not tuple"),
    ({"score": 1.0, "acc": "no"}, "is_correct must be True, False or a number, not str 'no'"),
])  # fmt: skip
def test_what_is_no_reward_is_named(returned, said):
    with pytest.raises(NoReward, match=said):
        as_outcome(returned)


@pytest.mark.parametrize("number", [0, 1, -3, 0.5, 1e30, -(10**30)])
def test_a_whole_number_is_as_good_as_a_float(number: float) -> None:
    assert fault_of("reward", number) == ""


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (True, "reward must be a finite number, not bool True"),
        (float("nan"), "reward must be a finite number, not float nan"),
        (float("-inf"), "reward must be a finite number, not float -inf"),
        ("1", "reward must be a finite number, not str 1"),
        (2e30, "reward must lie within ±1e+30, not 2e+30"),
        (10**40, "reward must lie within ±1e+30, not 1e+40"),
        (10**400, "reward must lie within ±1e+30, not a number beyond 1.8e308"),
    ],
)
def test_what_is_no_reward_is_told_why(value: object, why: str) -> None:
    assert fault_of("reward", value) == why


# --------------------------------------------------------------------------------------- Who gets the next idle worker


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def waits(turns: Turns[int], *tasks: str) -> list[asyncio.Task[int]]:
    return [asyncio.create_task(turns.take(task)) for task in tasks]


async def test_tasks_come_in_turn_however_many_completions_one_of_them_has():
    turns: Turns[int] = Turns()
    calls = waits(turns, *["slow"] * 5, "quick")
    await settle()
    turns.add(1)
    turns.add(2)
    await settle()
    assert [call.done() for call in calls] == [True, False, False, False, False, True]
    turns.give_back("quick", calls[-1].result())  # nobody else waits
    await settle()
    assert calls[1].done()


async def test_a_task_that_lost_a_worker_gets_one_at_a_time_until_it_gives_one_back():
    turns: Turns[int] = Turns()
    turns.add(1)
    assert await turns.take("hangs") == 1
    turns.lose("hangs")
    calls = waits(turns, "hangs", "hangs", "quick")
    for worker in (2, 3, 4):
        turns.add(worker)
    await settle()
    assert [call.done() for call in calls] == [True, False, True]
    turns.lose("hangs")  # it hung once more: the next one, alone again
    await settle()
    assert calls[1].done()
    turns.give_back("hangs", 4)  # in time: as many as there are
    more = waits(turns, "hangs", "hangs")
    turns.add(5)
    await settle()
    assert all(call.done() for call in more)


async def test_a_cancelled_wait_takes_no_worker_with_it():
    turns: Turns[int] = Turns()
    first, second = waits(turns, "a", "a")
    await settle()
    first.cancel()
    turns.add(1)  # before the cancelled one has run
    await settle()
    assert second.result() == 1
    third, fourth = waits(turns, "a", "a")
    await settle()
    turns.add(2)
    third.cancel()  # it has been served, and does not know yet
    await settle()
    assert third.cancelled()
    assert fourth.result() == 2


async def test_after_the_end_nobody_waits():
    turns: Turns[int] = Turns()
    (call,) = waits(turns, "a")
    await settle()
    turns.end("closed")
    for waiting in (call, *waits(turns, "b")):
        with pytest.raises(RoleFailed, match="closed"):
            await waiting


async def test_a_worker_is_exchanged_for_one_that_is_idle_and_for_no_other():
    turns: Turns[int] = Turns()
    turns.add(1)
    turns.add(2)
    taken = await turns.take("dialogue")
    assert (taken, turns.exchange(taken, 2)) == (1, 2)
    assert turns.exchange(2, 3) == 2
    assert await turns.take("other") == 1  # it is idle again
    assert turns.exchange(1, 2) == 1

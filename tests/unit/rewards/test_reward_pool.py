import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import sample_rewards

from rlhpc.protocol.errors import RoleFailed
from rlhpc.protocol.messages import REWARDS
from rlhpc.protocol.types import Verdict
from rlhpc.rewards.outcomes import by_task
from rlhpc.rewards.pool import RewardPool
from rlhpc.rewards.task_settings import ARGUMENTS
from rlhpc.roles.reward_service import RewardService
from tests.engines.memory_channel import MemoryServer
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.starts

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


async def test_a_judgement_carries_reward_verdict_parts_and_detail(pool):
    judgement = await pool.judge(TASK + "length", "abc", "")
    assert judgement.verdict is Verdict.CORRECT
    assert (judgement.reward, judgement.parts, judgement.detail) == (3.0, {"length": 3.0}, "ok")


async def test_a_judgement_says_where_parts_of_the_reward_are_earned(pool):
    judgement = await pool.judge(TASK + "rewards_of_words", "two  words", "")
    assert (judgement.reward, judgement.rewards_at) == (2.0, {3: 1.0, 10: 1.0})
    assert (await pool.judge(TASK + "rewards_of_words", "", "")).rewards_at == {}


async def test_wrong_is_wrong_and_not_an_error(pool):
    judgement = await pool.judge("integer_arithmetic", "1+1=3", "2")
    assert (judgement.verdict, judgement.reward) == (Verdict.WRONG, 0.0)


@pytest.mark.parametrize(
    ("function", "detail"),
    [
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
    ],
)
async def test_whatever_a_function_raises_or_returns_amiss_is_a_verifier_error(pool, function, detail):
    judgement = await pool.judge(TASK + function, "abc", "")
    assert judgement.verdict is Verdict.VERIFIER_ERROR
    assert detail in judgement.detail
    assert pool.num_restarts == 0


def line_of(words: str) -> str:
    """FILE:LINE of the line of sample_rewards.py with these words."""
    file = Path(sample_rewards.__file__)
    lines = file.read_text(encoding="utf-8").splitlines()
    return f"{file}:{next(place for place, line in enumerate(lines, 1) if words in line)}"


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


async def test_a_long_message_leaves_the_line_where_it_is(pool):
    judgement = await pool.judge(TASK + "fail", "x" * 2000, "")
    assert judgement.detail.endswith(f" ({line_of('cannot judge')})")


async def test_a_worker_that_ends_after_its_pipe_has_its_status_said(pool):
    judgement = await pool.judge(TASK + "close_the_pipe", "", "")
    assert "worker died: exit status 5" in judgement.detail


async def test_arguments_of_the_run_file_reach_a_function_and_a_batched_one():
    """A batched function's are no fields of the record, which has a scale of its own here."""
    arguments = {TASK + "scaled": {"scale": 2, "shift": 0.5}, TASK + "scaled_together": {"scale": 3}}
    async with RewardPool(1, PATIENCE_S, environment={ARGUMENTS: json.dumps(arguments)}) as pool:
        assert (await pool.judge(TASK + "scaled", "abc", "")).reward == 6.5
        record = json.dumps({"scale": 100, "answer": "7"})
        assert (await pool.judge(TASK + "scaled_together", "abc", record)).reward == 10.0


async def test_a_function_may_return_a_number_or_a_dict_and_be_a_coroutine(pool):
    half, one = await pool.judge(TASK + "return_number", "a", ""), await pool.judge(TASK + "return_number", "ab", "")
    assert (half.reward, half.verdict) == (0.5, Verdict.WRONG)
    assert (one.reward, one.verdict) == (1.0, Verdict.CORRECT)
    later = await pool.judge(TASK + "return_later", "abc", "")
    assert (later.reward, later.verdict, later.parts, later.answer) == (0.5, Verdict.CORRECT, {"brevity": 1.0}, "abc")


async def test_half_a_surrogate_pair_in_what_is_returned_is_spelt_out_and_the_worker_lives(pool):
    found = await pool.judge(TASK + "answer_half_a_pair", "abc", "")
    assert (found.reward, found.verdict, found.answer) == (1.0, Verdict.CORRECT, "\\ud800")
    assert (found.parts, found.rewards_at) == ({"part\\udfff": 0.5}, {1: 0.5})
    assert pool.num_restarts == 0


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


async def test_an_expression_that_is_never_evaluated_is_killed_too():
    limited = (
        "rlhpc.rewards.math_answer:math_answer"  # the same by its long name: another need not be judged in its time
    )
    async with RewardPool(1, PATIENCE_S, preload_tasks=["math_answer"], task_timeout_s={limited: 5.0}) as pool:
        judgement = await pool.judge(limited, r"\boxed{9^{9^{9^9}} - 9^{9^{9^9}} + 1}", "18")
        assert judgement.verdict in (Verdict.VERIFIER_ERROR, Verdict.WRONG)
        assert (await pool.judge("math_answer", r"\boxed{18}", "#### 18")).verdict is Verdict.CORRECT


async def test_a_hung_verifier_does_not_delay_the_others():
    async with RewardPool(2, PATIENCE_S, task_timeout_s={TASK + "hang": 10 * PATIENCE_S}) as pool:
        hung = asyncio.create_task(pool.judge(TASK + "hang", "", ""))
        others = await asyncio.gather(*(pool.judge("integer_arithmetic", str(n), str(n)) for n in range(50)))
        assert not hung.done()
        assert all(judgement.verdict is Verdict.CORRECT for judgement in others)
    with pytest.raises(RoleFailed, match="closed"):
        await hung


async def test_a_memory_limit_is_an_error_of_the_completion_that_passes_it():
    async with RewardPool(1, PATIENCE_S, memory_limit_bytes=2 << 30) as pool:
        assert "MemoryError" in (await pool.judge(TASK + "allocate", "", "")).detail
        assert (await pool.judge(TASK + "length", "abc", "")).reward == 3.0


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


async def test_a_task_has_a_time_limit_of_its_own():
    async with RewardPool(1, PATIENCE_S, task_timeout_s={TASK + "hang": 0.5}) as pool:
        assert "no answer within 0.5 s" in (await pool.judge(TASK + "hang", "", "")).detail


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


async def test_a_program_that_a_function_started_and_keeps_is_left_alone(pool):
    first, second = [await pool.judge(TASK + "keep_program", "", "") for _ in range(2)]
    assert first.reward == second.reward
    assert second.verdict is Verdict.CORRECT
    assert is_alive(int(first.reward))


def children_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


async def test_tasks_that_hang_leave_all_workers_but_one_to_the_others():
    async with RewardPool(2, PATIENCE_S, preload_tasks=[TASK + "length"], task_timeout_s=HANG_S) as pool:
        hung = [asyncio.create_task(pool.judge(TASK + "hang", "", "")) for _ in range(6)]
        await asyncio.sleep(0)
        await hung[0]  # a first one shows what the task is like
        others = [pool.judge(TASK + "length", "abc", "") for _ in range(50)]
        assert all(judgement.reward == 3.0 for judgement in await asyncio.gather(*others))
        assert not all(call.done() for call in hung)  # judged while the others were waited for
        for call in hung:
            call.cancel()
        await asyncio.gather(*hung, return_exceptions=True)


async def test_a_reward_function_finds_its_input_empty(pool):
    assert (await pool.judge(TASK + "read_input", "", "")).reward == 0.0


async def test_signals_to_the_whole_job_do_not_end_a_worker(pool):
    (pid,) = pool.worker_pids
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(pid, number)
    assert (await pool.judge(TASK + "length", "abc", "")).reward == 3.0
    assert pool.worker_pids == (pid,)


async def test_heartbeats_tell_how_many_workers_were_lost(pool):
    service = RewardService(MemoryServer(REWARDS), pool)
    assert service.heartbeat().metrics["restarts"] == 0.0
    await pool.judge(TASK + "die", "abc", "")
    await pool.judge(TASK + "length", "abc", "")  # by the new worker
    assert service.heartbeat().metrics["restarts"] == 1.0


async def test_a_cancelled_call_does_not_give_its_answer_to_the_next(pool):
    call = asyncio.create_task(pool.judge(TASK + "hang", "", ""))
    await asyncio.sleep(0.05)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (await pool.judge(TASK + "length", "abcd", "")).reward == 4.0


async def test_text_that_cannot_be_encoded_is_a_verifier_error(pool):
    judgement = await pool.judge(TASK + "length", "\ud800", "")
    assert judgement.verdict is Verdict.VERIFIER_ERROR
    assert pool.num_restarts == 0


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


async def test_a_function_that_cannot_be_imported_stops_the_start_with_the_reason():
    pool = RewardPool(2, 1.0, preload_tasks=["sample_rewards.deeper:f"])
    with pytest.raises(RoleFailed, match=r"cannot import sample_rewards\.deeper"):
        await pool.start()
    assert pool.worker_pids == ()


async def test_a_pool_whose_workers_no_longer_start_says_so_instead_of_waiting_for_ever(tmp_path, monkeypatch):
    module = tmp_path / "reward_that_vanishes.py"
    module.write_text("from sample_rewards import die\n")
    monkeypatch.syspath_prepend(tmp_path)
    async with RewardPool(1, 5.0, preload_tasks=["reward_that_vanishes:die"]) as pool:
        module.unlink()
        await pool.judge("reward_that_vanishes:die", "", "")
        with pytest.raises(RoleFailed, match="cannot import reward_that_vanishes"):
            await pool.judge("reward_that_vanishes:die", "", "")


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

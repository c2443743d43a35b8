"""Agents sample over HTTP: what they were given is what is trained, and nobody else is given anything."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from rlhpc.agents.host import MOST_KEPT, AgentProcesses, Ended, Host
from rlhpc.agents.session import last_line
from rlhpc.buffer.prefixes import decode_partials, joined
from rlhpc.config.rules import Config
from rlhpc.config.tables import AGENT
from rlhpc.data.prompt_form import DialogueTemplate
from rlhpc.data.tokenizer import PromptTokenizer
from rlhpc.protocol.contracts import RewardOutcome
from rlhpc.protocol.errors import RoleFailed
from rlhpc.protocol.messages import LeaseReturn
from rlhpc.protocol.types import Prefix, Prompt, Rollout, ScoredRollout, Verdict
from rlhpc.rewards.outcomes import ROWS, NoReward
from rlhpc.rewards.pool import RewardPool
from tests.patience import PATIENCE_S
from tests.unit.data.checkpoints import CHATML, SPECIAL_TOKENS, make_tokenizer_files
from tests.unit.roles.lone_generator import STOP, LoneGenerator
from tests.unit.roles.small_ring import small_config

pytestmark = pytest.mark.starts

# ------------------------------------------------------------------------------------------------ agents of a generator
#
# Agents sample over HTTP: what they were given is what is trained, and nobody else is given anything.


AGENTS = "tests.unit.roles.sample_agents"
NOTHING = Prefix(np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.int32))


def config_with(
    model: Path, agent: dict[str, Any], task: str = "environment", attempts: int = 1, **environment: Any
) -> Config:
    settings = small_config().model_dump(mode="json")
    settings["model"]["path"] = str(model)
    settings["data"] = {"path": "none.jsonl", "task": task, "environment": AGENT, "use_chat_template": True}
    settings["environment"] = {"max_turn_tokens": 9, "max_turns": 5} | environment
    settings["agent"] = {"turn_timeout_s": PATIENCE_S} | agent
    settings["rewards"]["max_attempts"] = attempts
    settings["admission"]["lease_deadline_s"] = 4 * PATIENCE_S
    settings["generation"]["max_completion_tokens"] = 600
    settings["trainer"]["token_budget"] = 700
    settings["buffer"]["partial_interval_tokens"] = 1
    return Config.model_validate(settings)


def function(name: str, **keys: Any) -> dict[str, Any]:
    return {"function": f"{AGENTS}:{name}"} | keys


class AgentsHost(LoneGenerator):
    """It has real agents."""

    def __init__(self, config: Config, tasks: asyncio.TaskGroup, pool: RewardPool | None) -> None:
        super().__init__(config, tasks, pool)
        self.tokenizer = PromptTokenizer(config.model.path)
        record = json.dumps({"question": "What is 6 times 7?", "answer": "42"})
        beginning = DialogueTemplate(self.tokenizer).tokens_of_beginning
        self.prompt = Prompt(0, config.data[0].task, beginning, record)

    def lease(self, *indices: int, prefixes: tuple[Prefix | None, ...] = (), max_tokens: int = 600) -> None:
        self.grant(0, self.prompt, 4, indices, prefixes, max_tokens)

    async def one(self) -> ScoredRollout:
        self.lease(0)
        return await self.delivered()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer_files(tmp_path_factory.mktemp("model"), chat_template=CHATML)


def turns_of(rollout: Rollout) -> list[np.ndarray]:
    """Tokens of each turn of the policy."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], rollout.loss_mask.astype(int), [0]])))
    return [rollout.token_ids[first:last] for first, last in edges.reshape(-1, 2)]


def _spoken(turn: np.ndarray) -> np.ndarray:
    """The turn without its end."""
    return turn[:-1] if turn[-1] in (STOP, SPECIAL_TOKENS.index("</turn>")) else turn


def same(mine: Rollout, other: Rollout) -> None:
    for name in ("token_ids", "behaviour_logprobs", "versions", "loss_mask"):
        np.testing.assert_array_equal(getattr(mine, name), getattr(other, name), err_msg=name)


# ------------------------------------------------------------------------------------------------------ what is trained


async def test_what_an_agent_was_given_is_what_is_trained_and_what_it_said_is_masked(model: Path) -> None:
    async with AgentsHost.running(config_with(model, function("counting"))) as host:
        host.lease(0, 1, 2)
        found = [await host.delivered() for _ in range(3)]
        table = host.engine.logprob_table(0)
        assert not host.failures
    for scored in found:
        rollout, tokenizer = scored.rollout, host.tokenizer
        assert (scored.reward, scored.verdict) == (0.5, Verdict.WRONG)
        turns = turns_of(rollout)
        assert [tokenizer.decode(_spoken(turn)) for turn in turns] == json.loads(scored.detail)
        np.testing.assert_array_equal(rollout.behaviour_logprobs[rollout.loss_mask], table[np.concatenate(turns)])
        assert (rollout.behaviour_logprobs[~rollout.loss_mask] == 0).all()
        text = tokenizer.decode(np.concatenate([host.prompt.token_ids, rollout.token_ids]), keep_special_tokens=True)
        said = "<bos><turn>system: Be brief.</turn>\n<turn>user: What is 6 times 7?</turn>\n<turn>assistant: "
        assert text.startswith(said)
        assert scored.reward_parts["length"] == len(host.prompt.token_ids) + len(rollout.token_ids)
    assert len({rollout.rollout.token_ids.tobytes() for rollout in found}) == 3


async def test_a_session_that_is_handed_back_goes_on_elsewhere_as_if_nothing_had_happened(model: Path) -> None:
    config = config_with(model, function("counting"))
    async with AgentsHost.running(config) as host:
        whole = await host.one()
    async with AgentsHost.running(config) as host:
        host.lease(0)
        async with asyncio.timeout(PATIENCE_S):
            while host.engine.statistics().tokens_generated < 14:  # noqa: ASYNC110 - a token each time
                await asyncio.sleep(0)
        await host.sampling.hand_back()
        returned: LeaseReturn = await host.next(LeaseReturn)
    (prefix,) = returned.prefixes
    assert prefix is not None
    np.testing.assert_array_equal(prefix.token_ids, whole.rollout.token_ids[: len(prefix.token_ids)])
    async with AgentsHost.running(config) as host:
        host.lease(0, prefixes=(prefix,))
        again = await host.delivered()
        drawn = host.engine.statistics().tokens_generated
    assert drawn < np.count_nonzero(whole.rollout.loss_mask) - 9
    assert (again.reward, again.detail) == (whole.reward, whole.detail)
    same(again.rollout, whole.rollout)


@pytest.mark.parametrize(
    ("known", "direct"),
    [("", "127.0.0.1"), ("*", "*"), ("localhost,.example.org", "localhost,.example.org,127.0.0.1")],
)
async def test_a_proxy_of_the_site_does_not_come_between_an_agent_and_its_endpoint(
    model: Path, monkeypatch: pytest.MonkeyPatch, known: str, direct: str
) -> None:
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # the port "discard": nobody listens
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setenv("no_proxy", known)
    async with AgentsHost.running(config_with(model, function("past_proxies"))) as host:
        scored = await host.one()
    assert (scored.reward, scored.detail) == (0.5, direct)


async def test_text_completions_are_recorded_as_they_were_sampled_and_read(model: Path) -> None:
    if importlib.util.find_spec("openai") is None:
        pytest.skip("openai is not installed (extra 'dev')")
    async with AgentsHost.running(config_with(model, function("by_text"))) as host:
        scored = await host.one()
    assert scored.verdict is not Verdict.VERIFIER_ERROR, scored.detail
    assert [list(turn) for turn in turns_of(scored.rollout)] == json.loads(scored.detail)
    whole = host.tokenizer.decode([*host.prompt.token_ids, *scored.rollout.token_ids], keep_special_tokens=True)
    beginning = DialogueTemplate(host.tokenizer).beginning
    assert whole.startswith(f"{beginning}What is 6 times 7?\nIt is")
    assert " or" in whole
    assert ". No:" in whole


async def test_token_ids_of_a_prompt_are_those_of_the_row(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("openai") is None:
        pytest.skip("openai is not installed (extra 'dev')")
    beginning = DialogueTemplate(PromptTokenizer(model)).tokens_of_beginning.tolist()
    monkeypatch.setenv("BEGINNING", " ".join(map(str, beginning)))
    async with AgentsHost.running(config_with(model, function("by_token_ids"))) as host:
        scored = await host.one()
    assert scored.verdict is not Verdict.VERIFIER_ERROR, scored.detail
    row = [*host.prompt.token_ids.tolist(), *scored.rollout.token_ids.tolist()]
    assert row == json.loads(scored.detail)
    assert len(turns_of(scored.rollout)) == 3


async def test_an_agent_that_compacts_and_asks_sub_agents_at_once_trains_a_row_for_each_line(model: Path) -> None:
    async with AgentsHost.running(config_with(model, function("changing"))) as host:
        scored = await host.one()
        opened = {name: host.sampling.agents.counts.of(AGENT, name) for name in ROWS}
        assert opened == {"rows_branch": 0, "rows_rewritten": 3, "rows_tools": 0}
    assert scored.verdict is not Verdict.VERIFIER_ERROR, scored.detail
    rollout = scored.rollout
    assert len(rollout.rows) == 4
    turns = [host.tokenizer.decode(_spoken(turn)) for turn in turns_of(rollout)]
    assert sorted(turns) == json.loads(scored.detail)
    table = host.engine.logprob_table(0)
    for row in rollout.rows:
        ids, mask = rollout.token_ids[row], rollout.loss_mask[row]
        assert len(np.flatnonzero(np.diff(mask))) == 1  # read, then said
        np.testing.assert_array_equal(rollout.behaviour_logprobs[row][mask], table[ids[mask]])


async def test_rows_that_were_reported_before_a_death_go_on_elsewhere_without_a_second_turn(model: Path) -> None:
    config = config_with(model, function("changing"))
    known: dict[int, Prefix] = {}
    async with AgentsHost.running(config) as host:
        host.lease(0)
        async with asyncio.timeout(PATIENCE_S):
            while len(known.get(0, NOTHING).rows) < 3:
                await asyncio.sleep(0)
                if (message := host.sampling.report()) is not None:
                    for piece in decode_partials(message.pieces.data, message.num_bytes):
                        assert piece.follows(known.get(piece.sample_index)), "a gap"
                        known[piece.sample_index] = joined(known.get(piece.sample_index), piece)
    prefix = known[0]
    async with AgentsHost.running(config) as host:
        host.lease(0, prefixes=(prefix,))
        scored = await host.delivered()
        drawn = host.engine.statistics().tokens_generated
    assert len(scored.rollout.rows) == 4
    assert drawn + np.count_nonzero(prefix.behaviour_logprobs) == np.count_nonzero(scored.rollout.loss_mask)


async def test_a_text_that_does_not_go_on_is_a_row_and_the_one_before_goes_on(model: Path) -> None:
    async with AgentsHost.running(config_with(model, function("other_text"))) as host:
        scored = await host.one()
    assert (scored.reward, len(scored.rollout.rows)) == (1.0, 2), scored.detail
    texts = [
        host.tokenizer.decode(scored.rollout.token_ids[row], keep_special_tokens=True) for row in scored.rollout.rows
    ]
    assert texts[0].startswith("two")
    assert texts[1].startswith("one")  # it has the last turn


@pytest.mark.parametrize(
    ("agent", "reward", "detail"),
    [
        ({"command": [sys.executable, "-m", AGENTS]}, 1.5, ""),  # it gets the record; its last line is the reward
        ({"command": ["python", "-m", AGENTS], "preload": ["openai"]}, 1.5, ""),  # likewise, in a fork
        (function("talkative"), 0.5, ("and then " * 100)[:500]),  # a long detail is cut
    ],
    ids=["program", "fork", "talkative"],
)
async def test_what_an_agent_reports_at_its_end_is_the_reward(
    model: Path, agent: dict[str, Any], reward: float, detail: str
) -> None:
    async with AgentsHost.running(config_with(model, agent)) as host:
        scored = await host.one()
    assert (scored.reward, scored.verdict, len(turns_of(scored.rollout))) == (reward, Verdict.WRONG, 1), scored.detail
    assert scored.detail == detail


async def test_the_task_of_the_dataset_judges_the_last_turn_where_it_is_not_the_agent(model: Path) -> None:
    task = "tests.ring.ring_rewards:parity"
    config = config_with(model, function("speechless"), task)
    async with RewardPool(1, PATIENCE_S) as pool, AgentsHost.running(config, pool) as host:
        scored = await host.one()
    (turn,) = turns_of(scored.rollout)
    text = host.tokenizer.decode(turn[:-1] if turn[-1] == STOP else turn)
    assert scored.reward == sum(map(ord, text)) % 2
    assert scored.detail == "against 42"


async def test_an_agent_is_told_when_there_is_no_more_room_and_its_reward_still_counts(model: Path) -> None:
    async with AgentsHost.running(config_with(model, function("endless"), max_turns=3)) as host:
        by_turns = await host.one()
        host.lease(1, max_tokens=60)
        by_tokens = await host.delivered()
    assert len(turns_of(by_turns.rollout)) == 3
    for scored in (by_turns, by_tokens):
        assert (scored.reward, scored.verdict) == (0.75, Verdict.WRONG), scored.detail
    assert len(by_tokens.rollout.token_ids) <= 60


# -------------------------------------------------------------------------------------------------- what is no reward


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("raising", "ended with exit status 1: RuntimeError: the browser is gone"),
        ("dying", "died of signal SIGKILL"),
        ("dying_oddly", "died of signal 37"),
        ("idle", "asked for no turn"),
        ("speechless", "reported no reward"),
    ],
)
async def test_a_session_that_fails_is_a_verifier_error_and_never_a_reward_of_zero(
    model: Path, name: str, why: str
) -> None:
    async with AgentsHost.running(config_with(model, function(name))) as host:
        scored = await host.one()
        counts = host.sampling.agents.counts
        assert sum(counts.of(AGENT, kind) for kind in ("raised", "died", "invalid", "timed_out")) == 1
        assert counts.of(AGENT, "judged") == 1
    assert scored.verdict is Verdict.VERIFIER_ERROR
    assert why in scored.detail


async def test_an_agent_that_dies_is_started_again_and_its_turns_are_not_sampled_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AgentsHost.running(config_with(model, function("counting"))) as host:
        whole = await host.one()
    monkeypatch.setenv("FLAKY", str(tmp_path / "has_died"))
    async with AgentsHost.running(config_with(model, function("flaky"), attempts=2)) as host:
        again = await host.one()
        counts, drawn = host.sampling.agents.counts, host.engine.statistics().tokens_generated
    assert (counts.of(AGENT, "died"), counts.of(AGENT, "judged")) == (1, 2)
    assert drawn == np.count_nonzero(again.rollout.loss_mask)
    assert again.reward == 0.5
    same(again.rollout, whole.rollout)


async def test_an_agent_that_dies_before_it_is_where_it_was_handed_back_goes_on_from_there_all_the_same(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AgentsHost.running(config_with(model, function("counting"))) as host:
        whole = await host.one()
    rollout, num_known = whole.rollout, len(whole.rollout.token_ids) - 3
    prefix = Prefix(rollout.token_ids[:num_known], rollout.behaviour_logprobs[:num_known], rollout.versions[:num_known])
    monkeypatch.setenv("FLAKY", str(tmp_path / "deaths"))
    async with AgentsHost.running(config_with(model, function("late"), attempts=3)) as host:
        host.lease(0, prefixes=(prefix,))
        again = await host.delivered()
        drawn, num_deaths = host.engine.statistics().tokens_generated, host.sampling.agents.counts.of(AGENT, "died")
    assert num_deaths == 2
    assert drawn <= 3
    same(again.rollout, whole.rollout)


async def test_an_agent_that_is_silent_for_too_long_is_killed(model: Path) -> None:
    async with AgentsHost.running(config_with(model, function("silent", turn_timeout_s=0.3))) as host:
        scored = await host.one()
        await _until(lambda: len(_descendants()) <= 1)
        assert host.sampling.agents.counts.of(AGENT, "timed_out") == 1
    assert scored.verdict is Verdict.VERIFIER_ERROR
    assert "agent.turn_timeout_s=0.3" in scored.detail


async def test_agents_are_started_again_after_the_process_that_holds_them_has_died(model: Path) -> None:
    async with AgentsHost.running(config_with(model, function("silent"))) as host:
        host.lease(0)
        await _until(lambda: len(_descendants()) == 2)
        for process in _descendants():
            with contextlib.suppress(psutil.NoSuchProcess):  # an agent dies with its host
                process.kill()
        assert "the process that starts agents ended" in (await host.delivered()).detail
        host.lease(1)
        await _until(lambda: len(_descendants()) == 2)
    assert not _descendants()


async def test_no_more_agents_live_at_once_than_may(model: Path) -> None:
    async with AgentsHost.running(config_with(model, function("by_post", max_sessions=1))) as host:
        host.lease(0, 1, 2)
        for _ in range(3):
            assert (await host.delivered()).reward == 0.25
            assert len(_descendants()) <= 3  # the host, one agent, one that is being ended
            await _until(lambda: len(_descendants()) <= 2)  # which it has been


async def test_a_rollout_that_waits_for_a_place_is_handed_back_or_cancelled_as_any_other(model: Path) -> None:
    async with AgentsHost.running(config_with(model, function("silent", max_sessions=1))) as host:
        host.lease(7)
        await host.sampling.cancel(0)  # before it has begun
        await _until(lambda: not len(host.sampling))
        host.lease(0, 1, 2)
        await _until(lambda: len(_descendants()) == 2)
        await host.sampling.recall(0)
        returned = {(await host.next(LeaseReturn)).sample_indices[0] for _ in range(3)}
        await _until(lambda: not len(host.sampling))
        host.lease(3, 4)
        await _until(lambda: len(_descendants()) == 2)
        await host.sampling.cancel(0)
        await _until(lambda: not len(host.sampling))
        assert not host.engine.statistics().tokens_generated
        host.lease(5)  # there are places again
        await _until(lambda: len(_descendants()) == 2)
    assert returned == {0, 1, 2}


async def test_an_agent_that_cannot_be_imported_ends_the_generator_with_the_reason(model: Path) -> None:
    async def sample() -> None:
        async with AgentsHost.running(config_with(model, function("missing"))) as host:
            host.lease(0)
            await host.delivered()

    with pytest.raises(BaseExceptionGroup) as raised:
        await sample()
    assert "sample_agents has no function 'missing'" in str(raised.value.exceptions)


_before: set[int] = set()  # what tests before have started, and keep


@pytest.fixture(autouse=True)
def _only_those_of_this_test() -> None:
    _before.clear()
    _before.update(each.pid for each in psutil.Process().children(recursive=True))


def _descendants() -> list[psutil.Process]:
    found = [each for each in psutil.Process().children(recursive=True) if each.pid not in _before]
    return [each for each in found if _lives(each)]


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it has ended since it was listed
        return False


async def _until(is_so: Any) -> None:
    end = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < end
        await asyncio.sleep(0.02)


# --------------------------------------------------------------------------------------- the process that starts agents
#
# The process that starts agents: what it cannot start costs it nothing, and what it has loaded its agents share.


def test_an_agent_that_cannot_be_forked_leaves_no_open_file_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_process() -> int:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    inbox, outbox = os.pipe()
    host = Host(None, ("true",), inbox, outbox)
    monkeypatch.setattr(os, "fork", no_process)
    open_before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        host._start("one", "{}", {})
    assert len(list(Path("/proc/self/fd").iterdir())) == open_before
    said = json.loads(os.read(inbox, 1 << 16).splitlines()[0])
    assert (said["ended"], said["why"]) == ("one", "no process can be started: Resource temporarily unavailable")
    for descriptor in (inbox, outbox):
        os.close(descriptor)


async def test_agents_share_what_was_loaded_and_no_random_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "import os, random, numpy.random\nLOADED_BY = os.getpid()\ndef draw(record):\n"
    module += "    return {'reward': 0, 'detail': f'{LOADED_BY} {random.random()} {numpy.random.random()}'}\n"
    (tmp_path / "agents_that_draw.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    processes, told = AgentProcesses("agents_that_draw:draw", ()), asyncio.Queue[Ended]()
    for session in range(8):
        await processes.start(str(session), "{}", {}, told.put_nowait)
    async with asyncio.timeout(PATIENCE_S):
        ended = [await told.get() for _ in range(8)]
    await processes.close()
    hosts, python, numpy = zip(*(json.loads(each.said)["detail"].split() for each in ended), strict=True)
    assert (len({*hosts}), len({*python}), len({*numpy})) == (1, 8, 8)


async def test_agents_of_a_host_that_cannot_be_listened_to_have_ended_and_the_next_one_has_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "agents_that_wait.py").write_text("import time\ndef wait(record):\n    time.sleep(record['s'])\n")
    monkeypatch.syspath_prepend(tmp_path)
    processes, told = AgentProcesses("agents_that_wait:wait", ()), asyncio.Queue[Ended]()

    def fail(_: Ended) -> None:
        raise MemoryError

    await processes.start("waits", '{"s": 3600}', {}, told.put_nowait)
    await processes.start("ends", '{"s": 0}', {}, fail)
    async with asyncio.timeout(PATIENCE_S):
        assert "the process that starts agents ended with status" in (await told.get()).fault
        await processes.start("again", '{"s": 0}', {}, told.put_nowait)
        assert (await told.get()).fault == ""
    assert processes.num_hosts == 2
    await processes.close()


async def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    processes, told = AgentProcesses("", (str(tmp_path / "solve"),)), asyncio.Queue[Ended]()
    await processes.start("one", "{}", {}, told.put_nowait)
    async with asyncio.timeout(PATIENCE_S):
        ended = await told.get()
    await processes.close()
    assert ended.fault == f"it ended with exit status 127: {tmp_path / 'solve'}: No such file or directory"


PROGRAM = """
import atexit, json, os, random, sys, threading, time

is_loaded, num_threads = "openai.types.chat.chat_completion" in sys.modules, threading.active_count()
record = json.load(sys.stdin)
atexit.register(lambda: print(json.dumps(said)))
said = {"words": sys.argv, "name": __name__, "place": sys.path[0], "loaded": is_loaded, "threads": num_threads}
said |= {"drawn": random.random(), "host": os.getppid(), "num_read": len(record["long"])}
threading.Thread(target=lambda: (time.sleep(0.2), said.update(is_waited_for=True))).start()
exec(record["then"])
"""


async def test_a_python_program_in_a_fork_runs_as_if_an_interpreter_had_started_for_it(tmp_path: Path) -> None:
    program, ended = tmp_path / "solve.py", dict[str, list[Ended]]()
    program.write_text(PROGRAM)
    records = {then: json.dumps({"then": then, "long": "x" * 200_000}) for then in ("", "sys.exit(3)", "1 / 0")}
    for words, modules in ((("python", str(program), "--fast"), ("openai",)), ((sys.executable, str(program)), ())):
        processes, told = AgentProcesses("", words, modules), asyncio.Queue[Ended]()
        for then, record in records.items():
            await processes.start(then, record, {}, told.put_nowait)
            async with asyncio.timeout(PATIENCE_S):
                ended.setdefault(then, []).append(await told.get())
        await processes.close()
    for in_fork, alone in ended.values():
        assert in_fork.status == alone.status
        here, there = (json.loads(each.said.splitlines()[-1]) for each in (in_fork, alone))
        assert here.pop("words") == [*there.pop("words"), "--fast"]
        assert (here.pop("loaded"), there.pop("loaded")) == (True, False)  # by the rehearsal: openai alone does not
        assert here.pop("drawn") != there.pop("drawn")
        assert here.pop("host") != there.pop("host")
        assert here == there
        assert (here["is_waited_for"], here["threads"]) == (True, 1)
    hosts = {json.loads(in_fork.said.splitlines()[-1])["host"] for in_fork, _ in ended.values()}
    assert len(hosts) == 1
    assert [in_fork.status for in_fork, _ in ended.values()] == [0, 3, 1]


@pytest.mark.parametrize(
    ("package", "client", "call"),
    [
        ("openai", "AsyncOpenAI", "chat.completions.create(model='p', messages=[])"),
        ("anthropic", "Anthropic", "messages.create(model='p', messages=[], max_tokens=1)"),
    ],
)
async def test_a_client_that_is_preloaded_imports_nothing_more_for_its_first_request(
    tmp_path: Path, package: str, client: str, call: str
) -> None:
    pytest.importorskip(package)
    (tmp_path / "solve.py").write_text(
        f"import asyncio, inspect, sys\nfrom {package} import {client}\nbefore = {{*sys.modules}}\nfailed = ''\n"
        f"async def ask():\n    asked = {client}(base_url='http://127.0.0.1:9', api_key='x', max_retries=0).{call}\n"
        "    await asked if inspect.isawaitable(asked) else None\n"
        "try:\n    asyncio.run(ask())\nexcept Exception as error:\n    failed = type(error).__name__\n"
        f"print(failed, len([name for name in {{*sys.modules}} - before if name.startswith('{package}')]))\n"
    )
    processes, told = AgentProcesses("", ("python", str(tmp_path / "solve.py")), (package,)), asyncio.Queue[Ended]()
    await processes.start("one", "{}", {}, told.put_nowait)
    async with asyncio.timeout(PATIENCE_S):
        ended = await told.get()
    await processes.close()
    assert ended.said.split() == ["APIConnectionError", "0"], ended


async def test_a_module_that_cannot_be_preloaded_is_named_before_an_agent_starts() -> None:
    with pytest.raises(RoleFailed, match=r"no agent can be started: agent.preload='no_such_module': .*No module named"):
        await AgentProcesses("", ("python", "solve.py"), ("json", "no_such_module")).try_start()


# -------------------------------------------------------------------------------------------------- reports of programs
#
# What a program that is an agent says of its reward: its last line, where that is JSON.


@pytest.mark.parametrize("end", ["", "\n", "\r\n", "\n\n"])
@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\x85", " "])
def test_the_last_line_may_hold_what_ends_a_line_elsewhere(mark: str, end: str) -> None:
    line = json.dumps({"reward": 0.5, "detail": f"a{mark}b"}, ensure_ascii=False)
    outcome = last_line(f"begun\n50 %\r100 %\r{line}{end}")
    assert outcome is not None
    assert (outcome.reward, outcome.detail) == (0.5, f"a{mark}b")


@pytest.mark.parametrize("output", ["", "\n", "1.0\ndone", "{"])
def test_words_for_people_are_no_reward(output: str) -> None:
    assert last_line(output) is None


HUGE = "9" * 400  # a whole number for JSON; the digits of a model, perhaps


@pytest.mark.parametrize(
    "line", ["[1]", HUGE, f"-{HUGE}", "1e39", f'{{"reward": 1, "n": {HUGE}}}', f'{{"reward": 1, "acc": {HUGE}}}']
)
def test_what_is_no_reward_is_refused(line: str) -> None:
    with pytest.raises(NoReward):
        last_line(f"begun\n{line}\n")


def test_half_a_surrogate_pair_in_a_report_is_spelt_out_since_no_message_can_have_it() -> None:
    found = last_line('{"reward": 1, "detail": "cut \\ud83d", "part\\udfff": 2}')
    assert found == RewardOutcome(1.0, True, {"part\\udfff": 2.0}, "cut \\ud83d")
    with pytest.raises(NoReward, match=r"not str \\ud83d"):
        last_line('{"reward": "\\ud83d"}')


def test_a_report_whose_beginning_was_not_kept_is_refused_and_not_overheard() -> None:
    """Where the task judges as well, the agent's own part would be missing without a word."""
    line = json.dumps({"reward": 1, "detail": "x" * MOST_KEPT})
    for kept in (line[-MOST_KEPT:], (line + "\n")[-MOST_KEPT:]):
        with pytest.raises(NoReward, match="65536 bytes or more"):
            last_line(kept)
    assert last_line("words without an end " * 10_000) is None
    assert last_line("50 % " * 20_000 + '\r{"reward": 1}') == RewardOutcome(1.0, True)

"""Services of a run as reward workers ask them: addresses that change, replicas, restarts, limits, errors."""

from __future__ import annotations

import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
from judge_server import JudgeServer, judging

from rlhpc.config.rules import Config
from rlhpc.config.tables_models import ServiceConfig
from rlhpc.config.tables_services import JudgeConfig
from rlhpc.protocol.types import Verdict
from rlhpc.rewards import pool as pools
from rlhpc.rewards.llm_judge import JudgeCache, LlmJudge, judge_client
from rlhpc.rewards.pool import RewardPool, open_pool
from rlhpc.rewards.service_client import (
    LONGEST_PAUSE_S,
    ServiceClient,
    ServiceFailed,
    patience_with,
    places_of,
)
from rlhpc.rewards.task_settings import VARIABLE, TaskSettings
from rlhpc.transport.service_address import ServiceAddress, publish_address, withdraw_address
from tests.patience import PATIENCE_S

SERVICE = ServiceConfig(name="strict", kind="judge", path=Path("/models/judge"), timeout_s=PATIENCE_S)
JUDGE = JudgeConfig(service="strict", backoff_s=0.001)


def address(server: JudgeServer, replica: int = 0, **changes: Any) -> ServiceAddress:
    known = {"service": "strict", "replica": replica, "url": server.endpoint, "key": f"key-{replica}"}
    return ServiceAddress(**known | {"model": "strict", "incarnation": "a", "pid": 1, "host": "here"} | changes)


def judge_of(
    directory: Path, service: ServiceConfig = SERVICE, cached: JudgeCache | None = None, **clock: Any
) -> LlmJudge:
    return LlmJudge(JUDGE, judge_client(JUDGE, service, str(directory), **clock), cached, service.identity)


class Clock:
    """Time passes by sleeping; what is to happen then may be planned."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.plans: list[tuple[float, Callable[[], None]]] = []

    def read(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for at, do in [plan for plan in self.plans if plan[0] <= self.now]:
            self.plans.remove((at, do))
            do()


def test_a_service_is_asked_at_its_address_with_its_key_and_by_its_name(tmp_path):
    with judging("Grade: 8") as server:
        publish_address(tmp_path, address(server))
        assert judge_of(tmp_path)("4", "4").reward == 0.8
        (request,) = server.requests
        assert (request["path"], request["model"], server.keys) == ("/v1/chat/completions", "strict", ["Bearer key-0"])


def test_no_proxy_is_between_a_run_and_its_services(tmp_path, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with judging("Grade: 8") as server:
        publish_address(tmp_path, address(server))
        assert judge_of(tmp_path)("4", "4").reward == 0.8


def test_a_service_that_has_no_address_yet_is_waited_for(tmp_path):
    clock = Clock()
    with judging("Grade: 8") as server:
        clock.plans.append((1070.0, lambda: publish_address(tmp_path, address(server))))
        service = SERVICE.model_copy(update={"timeout_s": 600.0})
        outcome = judge_of(tmp_path, service, clock=clock.read, sleep=clock.sleep)("4", "4")
        assert outcome.reward == 0.8
        assert 1070 <= clock.now <= 1070 + LONGEST_PAUSE_S
        assert outcome.costs["judge_retries"] > 10  # and still it is no failed attempt


def test_a_restarted_service_is_found_at_its_new_address(tmp_path):
    """The old address may stand there for a while: refused, or taken by another process that does not know the key."""
    clock = Clock()
    with judging("Grade: 3") as first:
        publish_address(tmp_path, address(first))
        judge = judge_of(tmp_path, clock=clock.read, sleep=clock.sleep)
        assert judge("4", "4").reward == 0.3
    with judging(401) as foreign, judging("Grade: 8") as second:
        publish_address(tmp_path, address(foreign))
        clock.plans.append((1010.0, lambda: publish_address(tmp_path, address(second, incarnation="b", key="new"))))
        assert judge("4", "4").reward == 0.8
        assert second.keys == ["Bearer new"]
        assert foreign.requests


@pytest.mark.parametrize("failure", [503, 429, "close"])
def test_a_service_that_is_away_for_longer_than_attempts_would_last_costs_no_verdict(tmp_path, failure):
    with judging(*[failure] * 12, "Grade: 8") as server:  # judge.attempts=4
        publish_address(tmp_path, address(server))
        service = SERVICE.model_copy(update={"timeout_s": PATIENCE_S})
        assert judge_of(tmp_path, service, sleep=lambda _: None)("4", "4").reward == 0.8


@pytest.mark.parametrize("failure", ["garbage", "I cannot say.", b'{"choices": [{"message": {"conte', 500])
def test_replies_without_an_answer_are_failed_attempts_of_a_service_too(tmp_path, failure):
    with judging(failure) as server:
        publish_address(tmp_path, address(server))
        with pytest.raises(ServiceFailed, match=r"^service 'strict': "):
            judge_of(tmp_path)("4", "4")
        assert len(server.requests) == 4


@pytest.mark.parametrize(("failure", "why"), [(400, "status 400"), ("redirect", "status 302"), (404, "status 404")])
def test_what_no_other_attempt_would_change_is_final(tmp_path, failure, why):
    with judging(failure) as server:
        publish_address(tmp_path, address(server))
        with pytest.raises(ServiceFailed, match=why):
            judge_of(tmp_path)("4", "4")
        assert len(server.requests) == 1


def test_another_replica_is_asked_when_one_fails_or_hangs(tmp_path):
    with judging("slow") as hung, judging("close") as broken, judging("Grade: 8") as sound:
        for replica, server in enumerate((hung, broken, sound)):
            publish_address(tmp_path, address(server, replica))
        service = SERVICE.model_copy(update={"timeout_s": 4.0})
        began = time.monotonic()
        for number in range(3):
            assert judge_of(tmp_path, service, sleep=lambda _: None)(str(number), "4").reward == 0.8
        assert time.monotonic() - began < PATIENCE_S
        assert max(len(each.requests) for each in (hung, broken)) <= 3  # not again before the others


def test_replicas_share_the_requests_of_a_batch(tmp_path):
    with judging("Grade: 8") as first, judging("Grade: 8") as second:
        publish_address(tmp_path, address(first, 0))
        publish_address(tmp_path, address(second, 1))
        judge = judge_of(tmp_path)
        for number in range(40):
            judge(str(number), "4")
        assert min(len(first.requests), len(second.requests)) >= 5


def test_what_is_away_too_long_is_an_error_that_names_the_service_and_the_cause(tmp_path):
    clock = Clock()
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound and not listening: refused
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
        with judging("Grade: 1") as server:
            publish_address(tmp_path, address(server, url=url))
        judge = judge_of(tmp_path, SERVICE.model_copy(update={"timeout_s": 600.0}), clock=clock.read, sleep=clock.sleep)
        with pytest.raises(ServiceFailed, match=r"service 'strict': .*refused.*600 s of service\.timeout_s are over"):
            judge("4", "4")
        assert 1590 < clock.now <= 1600
        # A queue behind it does not wait for so long once more each, or a dead service would stop the run for hours.
        for number in range(20):
            with pytest.raises(ServiceFailed, match="refused"):
                judge(str(number), "4")
        assert clock.now <= 1600
        withdraw_address(tmp_path, address(server, url=url))
        with judging("Grade: 8") as server:  # and it is found as soon as it is there
            publish_address(tmp_path, address(server))
            assert judge("5", "4").reward == 0.8
        # Its next absence is waited for again.
        withdraw_address(tmp_path, address(server))
        before = clock.now
        with pytest.raises(ServiceFailed, match=r"no process of it has an address|refused"):
            judge("6", "4")
        assert clock.now - before > 590


def test_an_absence_of_long_ago_says_nothing_about_the_next_one(tmp_path):
    clock = Clock()
    judge = judge_of(tmp_path, SERVICE.model_copy(update={"timeout_s": 60.0}), clock=clock.read, sleep=clock.sleep)
    for _ in range(2):
        before = clock.now
        with pytest.raises(ServiceFailed):
            judge("4", "4")
        assert clock.now - before > 50
        clock.now += 1000


def test_a_grade_is_kept_for_the_model_and_not_for_the_address(tmp_path):
    cached = JudgeCache(tmp_path / "judge")
    with judging("Grade: 5") as first:
        publish_address(tmp_path, address(first))
        assert judge_of(tmp_path, cached=cached)("4", "4").reward == 0.5
    with judging("Grade: 6") as second:
        publish_address(tmp_path, address(second, model="another-name", incarnation="b"))
        assert judge_of(tmp_path, cached=cached)("4", "4").costs == {"judge_cached": 1.0}
        other = SERVICE.model_copy(update={"path": Path("/models/another")})
        assert judge_of(tmp_path, other, cached)("4", "4").reward == 0.6


def test_a_service_with_a_url_is_asked_with_its_key_and_the_model_that_it_lists(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")
    with judging("Grade: 8") as server:
        service = ServiceConfig(name="api", kind="judge", url=server.endpoint, key_variable="MY_KEY")
        assert judge_of(tmp_path, service)("4", "4").reward == 0.8
        assert [each["path"] for each in server.requests] == ["/v1/models", "/v1/chat/completions"]
        assert server.requests[-1]["model"] == "listed"
        assert set(server.keys) == {"Bearer secret"}
    with judging(401) as server:
        service = ServiceConfig(name="api", kind="judge", url=server.endpoint, model="m", key_variable="MY_KEY")
        with pytest.raises(ServiceFailed, match="service 'api': status 401") as failed:
            judge_of(tmp_path, service)("4", "4")
        assert len(server.requests) == 1  # with a url the key does not change
        assert "secret" not in str(failed.value)


def test_a_service_of_a_run_has_no_address_without_one():
    with pytest.raises(ValueError, match=r"service 'strict' with service\.path .*legal: a service\.url"):
        places_of(SERVICE, "")


def test_damaged_addresses_are_none(tmp_path):
    (tmp_path / "service-0.json").write_text('{"service": "strict", "repl')
    (tmp_path / "service-1.json").write_text("[]")
    with judging("Grade: 1") as server:
        publish_address(tmp_path, address(server, 2, url="file:///etc/passwd"))
        client = ServiceClient(
            patience_with(SERVICE.model_copy(update={"timeout_s": 0.05})), places_of(SERVICE, str(tmp_path))
        )
        with pytest.raises(ServiceFailed, match="no process of it has an address"):
            client.ask("/classify", {}, lambda document: document, {})


# ----------------------------------------------------------------------------------------------------------- in a pool


@pytest.mark.starts
async def test_in_a_pool_a_verdict_waits_for_a_service_and_the_pool_tells_how_many_do(tmp_path, monkeypatch):
    monkeypatch.setattr(pools, "LONG_S", 0.5)
    service = SERVICE.model_copy(update={"timeout_s": 4 * PATIENCE_S})
    settings = TaskSettings(judge=JUDGE, judge_service=service, rendezvous=str(tmp_path))
    environment = {VARIABLE: settings.model_dump_json()}
    with judging("Grade: 9") as server:
        starts = Timer(6.0, publish_address, (tmp_path, address(server)))
        async with RewardPool(
            1, PATIENCE_S, environment=environment, task_timeout_s={"llm_judge": 5 * PATIENCE_S}
        ) as pool:
            starts.start()
            asked = pools.asyncio.create_task(pool.judge("llm_judge", "4", "4"))
            most = 0.0
            while not asked.done():
                await pools.asyncio.sleep(0.1)
                most = max(most, pool.metrics().get("task:waiting:llm_judge", 0.0))
            found = await asked
        assert (found.verdict, found.reward) == (Verdict.CORRECT, 0.9)
        assert most == 1.0
        assert "task:waiting:llm_judge" not in pool.metrics()
        assert pool.num_restarts == 0


def make_config(**more: Any) -> Config:
    return Config.model_validate({
        "run": {"name": "a", "num_steps": 1}, "model": {"path": "m"}, "data": {"path": "d", "task": "llm_judge"},
        "generation": {"max_prompt_tokens": 1, "max_completion_tokens": 1}, "trainer": {"token_budget": 8},
        "admission": {"groups_per_step": 1, "group_size": 2},
        "service": {"name": "strict", "kind": "judge", "path": "/models/judge", "timeout_s": 300.0},
        "judge": {"service": "strict"},
    } | more)  # fmt: skip


def test_limits_of_workers_follow_the_patience_with_the_services_that_a_task_asks():
    config = make_config()
    assert config.time_limit_of("llm_judge") == config.rewards.timeout_s + 300.0
    assert config.time_limit_of("regex") == config.rewards.timeout_s
    assert config.longest_service_patience_s == 300.0
    both = make_config(
        data={"path": "d", "task": "both"},
        service=[
            {"name": "strict", "kind": "judge", "path": "/models/judge", "timeout_s": 300.0},
            {"name": "scores", "kind": "reward", "path": "/models/scores", "timeout_s": 100.0},
        ],
        composite={"both": {"tasks": {"a": "llm_judge", "b": "reward_model", "c": "regex"}, "correct": "c"}},
        rewards={"task_timeout_s": {"both": 5.0}},
    )
    assert both.time_limit_of("both") == 405.0  # one after the other
    pool = open_pool(both, ["both"], 1)
    assert (pool._timeout_of("both"), pool._timeout_of("regex")) == (405.0, both.rewards.timeout_s)


@pytest.mark.parametrize(
    ("judge", "why"),
    [
        ({"timeout_s": 9.0}, r"judge\.timeout_s=9 has no effect"),
        ({"key_file": "/k"}, r"judge\.key_file='/k' has no effect"),
        ({"endpoint": "http://x/v1"}, r"judge\.endpoint='http://x/v1' has no effect"),
        ({"service": "other"}, r"judge\.service='other'; legal: 'strict'"),
        ({"requests_per_s": 0.005}, r"half of service\.timeout_s=300"),
    ],
)
def test_settings_of_an_endpoint_beside_a_service_are_refused(judge, why):
    with pytest.raises(ValueError, match=why):
        make_config(judge={"service": "strict"} | judge)


def test_settings_pass_through_the_environment_of_a_worker(tmp_path):
    config = make_config()
    found = TaskSettings.model_validate(json.loads(pools.worker_environment(config, None, tmp_path)[VARIABLE]))
    assert (found.judge_service, found.rendezvous) == (config.service[0], str(tmp_path))


# ----------------------------------------------------------------------------------------------------- kills and pauses

NUM_ASKED, MOST_ENDS = 30, 6  # by each worker, of all replicas

SERVER = """
import json, sys, threading, time
sys.path.insert(0, sys.argv[1])
from judge_server import JudgeServer

def answer(request):
    time.sleep(0.05)  # so that an end comes within a request
    return f"Grade: {request['messages'][0]['content'].rpartition('Answer:')[2].split()[0]}"

server = JudgeServer(answer)
print(server.endpoint, flush=True)
server.serve_forever(poll_interval=0.02)
"""


class Killable:
    """A service in processes that are killed or paused, and replaced as a supervisor does."""

    def __init__(self, directory: Path, replica: int) -> None:
        self._directory, self._replica, self._life = directory, replica, 0
        self.start()

    def start(self) -> None:
        self._life += 1
        words = [sys.executable, "-c", SERVER, str(Path(__file__).parent)]
        self._process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        url = self._process.stdout.readline().strip()
        known = {"service": "strict", "replica": self._replica, "url": url, "key": "k", "model": "strict"}
        more = {"incarnation": str(self._life), "pid": self._process.pid, "host": "here"}
        publish_address(self._directory, ServiceAddress(**known | more))

    def end(self, how: int) -> None:
        """Kill the process; or pause it, and kill it a moment later, as one that is silent for too long."""
        self._process.send_signal(how)
        if how == signal.SIGSTOP:
            time.sleep(0.3)
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


@pytest.mark.starts
@pytest.mark.waits
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_kills_and_pauses_at_any_instant_cost_no_verdict_and_change_none(tmp_path, num_replicas):
    rng, is_over = random.Random(num_replicas), threading.Event()
    replicas = [Killable(tmp_path, number) for number in range(num_replicas)]
    num_ends = 0

    def harass() -> None:
        nonlocal num_ends
        while num_ends < MOST_ENDS and not is_over.wait(rng.uniform(0.1, 0.6)):
            replica = rng.choice(replicas)
            replica.end(rng.choice((signal.SIGKILL, signal.SIGSTOP)))
            time.sleep(rng.uniform(0.0, 0.3))
            replica.start()
            num_ends += 1

    service = SERVICE.model_copy(update={"timeout_s": 2 * PATIENCE_S})
    found: dict[int, list[float]] = {}

    def ask(worker: int) -> None:
        judge = judge_of(tmp_path, service)
        found[worker] = [judge(f"{number % 11}", "4").reward for number in range(NUM_ASKED)]

    harasser = threading.Thread(target=harass)
    workers = [threading.Thread(target=ask, args=(worker,)) for worker in range(3)]
    for thread in (harasser, *workers):
        thread.start()
    for thread in workers:
        thread.join()
    is_over.set()
    harasser.join()
    for replica in replicas:
        replica.end(signal.SIGKILL)
    assert found == {worker: [number % 11 / 10 for number in range(NUM_ASKED)] for worker in range(3)}
    assert num_ends >= 2

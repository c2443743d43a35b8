"""A generator asks teachers over HTTP: nothing they do loses a rollout, scores it twice or makes a reward of it."""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from launch.view.status import teacher_lines
from rlhpc.base.run_directory import RunLayout
from rlhpc.config.file import config_hash
from rlhpc.config.rules import Config
from rlhpc.protocol.types import Rollout, TeacherScores, Verdict
from rlhpc.rewards.outcomes import TEACHER_PREFIX, by_task
from rlhpc.roles.controller.recorder import teacher_service_figures
from rlhpc.roles.generator import teachers
from rlhpc.roles.generator.generator import Generator as RoleGenerator
from rlhpc.roles.generator.sampling import Sampling
from rlhpc.roles.generator.teachers import TeacherFailed, Teachers
from rlhpc.roles.lifecycle import RoleContext
from rlhpc.weights.buckets import make_manifest
from tests import build
from tests.engines.scripted_engine import Script, ScriptedEngine
from tests.patience import PATIENCE_S
from tests.unit.data.checkpoints import make_tokenizer_files
from tests.unit.roles.small_ring import small_config
from tests.unit.roles.teacher_server import NAME, Reply, TeacherServer, logprob_of
from tests.unit.roles.test_sampling import EOS, MAX_ATTEMPTS, VOCABULARY, Session, Verifier, lease_of, until
from tests.unit.roles.test_service import client_of, context_of, engine_of, make_model

PROMPT = build.prompt(0, (9, 8, 7))
ROLLOUT = build.rollout(0, 0, length=4)
ROOT = Path(__file__).parents[3]


def taught_config(*, num_top: int = 0, timeout_s: float = PATIENCE_S, **service: Any) -> Config:
    """A run with a teacher, of its own unless `service` has a url."""
    place = {} if "url" in service else {"path": "/models/larger"}
    forward = {"forward_kl_coefficient": 0.1, "teacher_top_k": num_top} if num_top else {}
    return build.config(
        service=[{"name": NAME, "kind": "teacher", "timeout_s": timeout_s} | place | service],
        algorithm={"advantage": "distillation"} | forward,
        rewards={"max_attempts": MAX_ATTEMPTS},
        admission={"max_staleness": 2, "active_sampling": False},
        trainer={"backend": "reference"},
        transport={"kind": "tcp"},
    )


@asynccontextmanager
async def asking(config: Config, rendezvous: Path) -> AsyncIterator[Teachers]:
    asked = Teachers(config, rendezvous)
    try:
        yield asked
    finally:
        await asked.close()


def assert_is_right(scores: TeacherScores | None, rollout: Rollout = ROLLOUT, num_top: int = 0) -> None:
    assert scores is not None
    row = [*PROMPT.token_ids.tolist(), *rollout.token_ids.tolist()]
    places = range(len(PROMPT.token_ids), len(row))
    assert scores.logprobs.tolist() == [np.float32(logprob_of(row, place)) for place in places]
    ranks = range(1, num_top + 1)
    assert scores.top_ids.tolist() == [[1000 + 10 * place + rank for rank in ranks] for place in places]
    assert scores.top_logprobs.tolist() == [[-0.125 * rank for rank in ranks] for _ in places]


# ----------------------------------------------------------------------------------------------------- sound teachers


@pytest.mark.parametrize("num_top", [0, 3])
async def test_a_teacher_is_asked_for_the_tokens_of_the_completion_after_the_prompt(
    tmp_path: Path, num_top: int
) -> None:
    async with TeacherServer().running() as server, asking(taught_config(num_top=num_top), tmp_path) as asked:
        server.publish(tmp_path)
        assert_is_right(await asked.scores(PROMPT, ROLLOUT), num_top=num_top)
    row = [*PROMPT.token_ids.tolist(), *ROLLOUT.token_ids.tolist()]
    wanted = {"model": NAME, "prompt": row, "max_tokens": 1, "temperature": 0, "prompt_logprobs": num_top}
    assert server.asked == [wanted]


async def test_every_row_is_read_by_itself_and_one_that_is_refused_costs_the_answer(tmp_path: Path) -> None:
    starts = np.array([1, 4], np.int32)
    branched = build.rollout(0, 0, length=6, row_starts=starts)
    rows = [replace(branched, token_ids=branched.token_ids[row], row_starts=starts[:0]) for row in branched.rows]
    async with TeacherServer().running() as server, asking(taught_config(num_top=2), tmp_path) as asked:
        server.publish(tmp_path)
        scores = await asked.scores(PROMPT, branched)
        for each, row in zip(rows, branched.rows, strict=True):
            own = (scores.top_ids[row].reshape(-1), scores.top_logprobs[row].reshape(-1))
            assert_is_right(TeacherScores(scores.logprobs[row], *own), each, num_top=2)
        assert not scores.fault(6)
        assert sorted(len(question["prompt"]) for question in server.asked) == [3 + 1, 3 + 2, 3 + 3]

        async def refuse(request: web.Request, reply: Reply) -> web.Response:
            return web.json_response({"error": {"message": "too long"}}, status=400)

        server.faults.append(refuse)
        with pytest.raises(TeacherFailed):
            await asked.scores(PROMPT, branched)


async def test_many_rollouts_are_shared_out_over_all_replicas(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(TeacherServer().running()) for _ in range(3)]
        for replica, server in enumerate(servers):
            server.seconds = 0.05
            server.publish(tmp_path, replica)
        asked = await stack.enter_async_context(asking(taught_config(), tmp_path))
        rollouts = [replace(ROLLOUT, token_ids=ROLLOUT.token_ids + index) for index in range(30)]
        found = await asyncio.gather(*(asked.scores(PROMPT, each) for each in rollouts))
    for scores, rollout in zip(found, rollouts, strict=True):
        assert_is_right(scores, rollout)
    assert [len(server.asked) for server in servers] == [10, 10, 10]


@pytest.mark.parametrize("model", ["", NAME, "its-other-name"])
async def test_a_server_of_others_is_asked_by_its_url_and_may_have_several_names_of_one_model(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def called_otherwise(request: web.Request, reply: Reply) -> web.Response:
        return web.json_response(reply | {"model": NAME})

    monkeypatch.setenv("THE_KEY", "secret")
    async with TeacherServer(called_otherwise).running() as server:
        config = taught_config(url=server.url, key_variable="THE_KEY", **({"model": model} if model else {}))
        async with asking(config, tmp_path) as asked:
            assert_is_right(await asked.scores(PROMPT, ROLLOUT))
    assert server.asked[0]["model"] == (model or NAME)


async def test_a_service_of_the_run_is_asked_and_so_is_its_next_incarnation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that `rlhpc run` starts, with a scripted engine: another port and another key after a restart."""
    make_model(tmp_path / "model")
    config, taught = context_of(tmp_path, "teacher").config, taught_config(num_top=3).algorithm
    config = config.model_copy(update={"algorithm": taught})
    rendezvous = context_of(tmp_path, "teacher").layout.rendezvous
    async with asking(config, rendezvous) as asked:
        for start in range(2):
            waiting = asyncio.create_task(asked.scores(PROMPT, ROLLOUT))
            async with client_of(context_of(tmp_path, "teacher", start=start)) as client:
                scores, table = await waiting, engine_of(client).logprob_table(-1)
            np.testing.assert_allclose(scores.logprobs, table[ROLLOUT.token_ids], atol=1e-6)
            likely = np.argsort(-table, kind="stable")[:3]
            assert scores.top_ids.tolist() == [likely.tolist()] * len(ROLLOUT.token_ids)
            np.testing.assert_allclose(scores.top_logprobs[0], table[likely], atol=1e-6)


def test_a_prompt_of_a_run_without_teachers_is_not_asked_about() -> None:
    assert not Teachers(small_config(), Path("/nowhere")).are_asked(PROMPT)


# -------------------------------------------------------------------------------------------------- teachers in trouble


def status(code: int, **headers: str) -> Callable[[web.Request, Reply], Awaitable[web.StreamResponse]]:
    async def answer(request: web.Request, reply: Reply) -> web.StreamResponse:
        return web.json_response({"error": {"message": f"is {code}"}}, status=code, headers=headers)

    return answer


def altered(change: Callable[[Reply], None]) -> Callable[[web.Request, Reply], Awaitable[web.StreamResponse]]:
    async def answer(request: web.Request, reply: Reply) -> web.StreamResponse:
        change(reply)
        return web.Response(text=json.dumps(reply), content_type="application/json")

    return answer


def entries(reply: Reply) -> list[Any]:
    found: list[Any] = reply["choices"][0]["prompt_logprobs"]
    return found


def _of_other_tokens(reply: Reply) -> None:
    entries(reply)[-1] = {"4999": {"logprob": -1.0, "rank": 1}}


def _with_logprob(value: float) -> Callable[[Reply], None]:
    def change(reply: Reply) -> None:
        for found in entries(reply)[-1].values():
            found["logprob"] = value

    return change


async def half_a_reply(request: web.Request, reply: Reply) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Length": "5000", "Content-Type": "application/json"})
    await response.prepare(request)
    await response.write(json.dumps(reply).encode()[:200])
    assert request.transport is not None
    request.transport.abort()
    return response


async def cut_off(request: web.Request, reply: Reply) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def silence(request: web.Request, reply: Reply) -> web.StreamResponse:
    await asyncio.sleep(1e6)
    raise AssertionError


PASSING = {
    "503": status(503),
    "429": status(429, **{"Retry-After": "0.01"}),
    "429 and nonsense": status(429, **{"Retry-After": "nan"}),
    "500": status(500),
    "401, of another incarnation": status(401),
    "404, of another service": status(404),
    "half a reply": half_a_reply,
    "cut off": cut_off,
}
UNUSABLE = {
    "too few": altered(lambda reply: entries(reply).pop()),
    "too many": altered(lambda reply: entries(reply).append(None)),
    "none": altered(lambda reply: reply["choices"][0].pop("prompt_logprobs")),
    "no choice": altered(lambda reply: reply["choices"].clear()),
    "of other tokens": altered(_of_other_tokens),
    "an empty entry": altered(lambda reply: entries(reply).__setitem__(-1, None)),
    "NaN": altered(_with_logprob(math.nan)),
    "minus infinity": altered(_with_logprob(-math.inf)),
    "beyond float32": altered(_with_logprob(-1e300)),
    "above 0": altered(_with_logprob(0.5)),
    "of another model": altered(lambda reply: reply.update(model="smaller")),
}


@pytest.mark.parametrize("fault", [*PASSING, *UNUSABLE])
@pytest.mark.filterwarnings("ignore:overflow encountered")
async def test_what_passes_is_asked_again(tmp_path: Path, fault: str) -> None:
    server = TeacherServer((PASSING | UNUSABLE)[fault])
    async with server.running(), asking(taught_config(), tmp_path) as asked:
        server.publish(tmp_path)
        assert_is_right(await asked.scores(PROMPT, ROLLOUT))
        figures = asked.as_metrics()
    assert len(server.asked) == 2
    assert (figures["teacher:retries:larger"], figures["teacher:answered:larger"]) == (1.0, 1.0)


@pytest.mark.parametrize("fault", UNUSABLE)
@pytest.mark.filterwarnings("ignore:overflow encountered")
async def test_a_teacher_that_always_replies_so_fails_after_max_attempts(tmp_path: Path, fault: str) -> None:
    server = TeacherServer(*[UNUSABLE[fault]] * 10)
    async with server.running(), asking(taught_config(), tmp_path) as asked:
        server.publish(tmp_path)
        with pytest.raises(TeacherFailed, match="service 'larger': ") as failed:
            await asked.scores(PROMPT, ROLLOUT)
    assert failed.value.failure == "teacher_invalid"
    assert len(server.asked) == MAX_ATTEMPTS


@pytest.mark.parametrize("code", [400, 413, 422, 302])
async def test_a_final_refusal_is_one_at_once(tmp_path: Path, code: int) -> None:
    server = TeacherServer(*[status(code)] * 10)
    async with server.running(), asking(taught_config(), tmp_path) as asked:
        server.publish(tmp_path)
        with pytest.raises(TeacherFailed, match=rf"service 'larger': status {code}: .*is {code}") as failed:
            await asked.scores(PROMPT, ROLLOUT)
    assert failed.value.failure == "teacher_refused"
    assert len(server.asked) == 1


async def test_a_server_of_others_that_refuses_the_key_is_asked_once(tmp_path: Path) -> None:
    async with TeacherServer().running() as server, AsyncExitStack() as stack:
        asked = await stack.enter_async_context(asking(taught_config(url=server.url, model=NAME), tmp_path))
        with pytest.raises(TeacherFailed, match="status 401"):
            await asked.scores(PROMPT, ROLLOUT)
        assert asked.as_metrics()["teacher:retries:larger"] == 0


async def test_fewer_likely_tokens_than_were_asked_for_are_refused(tmp_path: Path) -> None:
    server = TeacherServer(altered(lambda reply: entries(reply)[-1].popitem()))
    server.faults.append(altered(lambda reply: [entries(reply)[-1].popitem() for _ in range(2)]))
    async with server.running(), asking(taught_config(num_top=3), tmp_path) as asked:
        server.publish(tmp_path)
        await asked.scores(PROMPT, ROLLOUT)  # three with the token itself
        with pytest.raises(TeacherFailed, match=r"2 tokens in place of algorithm\.teacher_top_k=3"):
            await asked.scores(PROMPT, ROLLOUT)


@pytest.mark.parametrize("is_there", [False, True])
async def test_a_teacher_that_answers_nothing_is_waited_for_no_longer_than_its_limit(
    tmp_path: Path, is_there: bool
) -> None:
    server = TeacherServer(silence)
    async with server.running(), asking(taught_config(timeout_s=0.6), tmp_path) as asked:
        if is_there:
            server.publish(tmp_path)
        began = time.monotonic()
        with pytest.raises(TeacherFailed, match=r"0\.6 s of service\.timeout_s are over") as failed:
            async with asyncio.timeout(PATIENCE_S):
                await asked.scores(PROMPT, ROLLOUT)
        assert time.monotonic() - began >= 0.5
        assert failed.value.failure == "teacher_unanswered"
        assert asked.as_metrics()["teacher:waiting:larger"] == 0
        await until(lambda: server.num_abandoned == is_there)


async def test_a_replica_that_is_silent_while_another_one_answers_is_given_up(tmp_path: Path) -> None:
    hung, sound = TeacherServer(*[silence] * 9), TeacherServer()
    async with hung.running(), sound.running(), asking(taught_config(timeout_s=4.0), tmp_path) as asked:
        hung.publish(tmp_path, 0)
        sound.publish(tmp_path, 1)
        many = [asyncio.create_task(asked.scores(PROMPT, ROLLOUT)) for _ in range(4)]
        await until(lambda: len(hung.asked) == 2)
        for scores in await asyncio.gather(*many, asked.scores(PROMPT, ROLLOUT)):
            assert_is_right(scores)


async def test_a_process_whose_address_was_replaced_is_waited_for_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teachers, "KNOWN_S", 0.05)
    monkeypatch.setattr(teachers, "LONGEST_LOOK_S", 0.05)
    lost, successor = TeacherServer(silence), TeacherServer()
    async with lost.running(), successor.running(), asking(taught_config(), tmp_path) as asked:
        lost.publish(tmp_path)
        task = asyncio.create_task(asked.scores(PROMPT, ROLLOUT))
        await until(lambda: lost.asked)
        successor.publish(tmp_path)
        assert_is_right(await task)


async def test_a_pause_of_this_process_is_not_the_silence_of_the_teacher(tmp_path: Path) -> None:
    async with TeacherServer().running() as server, asking(taught_config(timeout_s=2.0), tmp_path) as asked:
        server.publish(tmp_path)
        server.seconds = 0.8
        task = asyncio.create_task(asked.scores(PROMPT, ROLLOUT))
        await until(lambda: server.asked)
        time.sleep(3.0)  # noqa: ASYNC251 - a process that is stopped
        assert_is_right(await task)


def test_a_key_that_is_missing_is_an_error_that_names_it(tmp_path: Path) -> None:
    config = taught_config(url="http://127.0.0.1:9/v1", key_variable="NO_SUCH_KEY")

    async def ask() -> None:
        async with asking(config, tmp_path) as asked:
            await asked.scores(PROMPT, ROLLOUT)

    with pytest.raises(Exception, match="service 'larger': key_variable='NO_SUCH_KEY' is not set"):
        asyncio.run(ask())


# ------------------------------------------------------------------------------------------------------ whole rollouts


class Generator:
    """A generator whose rollouts have five tokens, and teachers."""

    def __init__(self, root: Path, tasks: asyncio.TaskGroup, config: Config) -> None:
        model = config.model.model_copy(update={"path": make_tokenizer_files(root / "model")})
        self.engine = ScriptedEngine(Script(vocab_size=VOCABULARY, stop_token_id=EOS, stop_probability=0.0))
        self.rendezvous = root / "rendezvous"
        self.sampling = Sampling(config.model_copy(update={"model": model}), self.engine, tasks, self.rendezvous)


@asynccontextmanager
async def generating(root: Path, **changes: Any) -> AsyncIterator[Generator]:
    async with asyncio.TaskGroup() as tasks:
        made = Generator(root, tasks, taught_config(**changes))
        await made.engine.receive_weights(make_manifest(0, 1, (), 1))
        await made.sampling.enter(0)
        yield made
        await made.sampling.give_up()
        await made.sampling.teachers.close()


async def test_a_rollout_is_delivered_with_what_the_verifier_and_the_teacher_say(tmp_path: Path) -> None:
    async with TeacherServer().running() as server, generating(tmp_path) as generator:
        server.publish(generator.rendezvous)
        session = Session()
        await session.begin(generator.sampling)
        generator.sampling.start(lease_of(0, 1))
        for _ in range(2):
            scored = (await session.delivered()).scored
            assert (scored.verdict, scored.reward) == (Verdict.CORRECT, 1.0)
            assert scored.teacher is not None
            row = [*build.prompt(0).token_ids.tolist(), *scored.rollout.token_ids.tolist()]
            wanted = [np.float32(logprob_of(row, place)) for place in range(len(row) - 5, len(row))]
            assert scored.teacher.logprobs.tolist() == wanted
        assert server.num_answered == 2
        await session.end(generator.sampling)


@pytest.mark.parametrize(("fault", "kind"), [(status(400), "refused"), (silence, "unanswered")])
async def test_a_rollout_whose_teacher_fails_is_a_verifier_error_and_no_reward(
    tmp_path: Path, fault: Any, kind: str
) -> None:
    async with TeacherServer(fault).running() as server, generating(tmp_path, timeout_s=0.5) as generator:
        server.publish(generator.rendezvous)
        session = Session()
        await session.begin(generator.sampling)
        generator.sampling.start(lease_of(0))
        scored = (await session.delivered()).scored
        assert (scored.verdict, scored.failure) == (Verdict.VERIFIER_ERROR, f"teacher_{kind}")
        assert scored.detail.startswith("service 'larger': ")
        assert scored.teacher is None
        await session.end(generator.sampling)


async def test_a_rollout_without_a_verdict_waits_for_no_teacher(tmp_path: Path) -> None:
    async with TeacherServer(silence).running() as server, generating(tmp_path) as generator:
        server.publish(generator.rendezvous)
        session = Session(Verifier(1000))
        await session.begin(generator.sampling)
        generator.sampling.start(lease_of(0))
        scored = (await session.delivered()).scored
        assert (scored.verdict, scored.failure) == (Verdict.VERIFIER_ERROR, "")
        await until(lambda: server.num_abandoned == len(server.asked))
        await session.end(generator.sampling)


async def test_a_teacher_is_waited_for_over_sessions_and_meanwhile_others_are_sampled(tmp_path: Path) -> None:
    answers = asyncio.Event()

    async def late(request: web.Request, reply: Reply) -> web.StreamResponse:
        await answers.wait()
        return web.json_response(reply)

    async with TeacherServer(late).running() as server, generating(tmp_path) as generator:
        server.publish(generator.rendezvous)
        first = Session()
        await first.begin(generator.sampling)
        generator.sampling.start(lease_of(0))
        await until(lambda: server.asked)
        generator.sampling.start(lease_of(1))
        assert (await first.delivered()).scored.rollout.sample_index == 1
        status_of = by_task(generator.sampling.teachers.as_metrics(), TEACHER_PREFIX)
        assert teacher_lines(status_of)[0].startswith("teacher  1 rollout waits for teacher larger; 0.")
        assert teacher_service_figures(status_of)["teacher/waiting"] == 1.0
        await first.end(generator.sampling)
        second = Session()
        await second.begin(generator.sampling)
        answers.set()
        scored = (await second.delivered()).scored
        assert (scored.rollout.sample_index, scored.verdict) == (0, Verdict.CORRECT)
        assert scored.teacher is not None
        assert len(server.asked) == 2
        await second.end(generator.sampling)


async def test_rollouts_that_wait_for_a_teacher_take_no_room_from_others(tmp_path: Path) -> None:
    async with TeacherServer(*[silence] * 9).running() as server, generating(tmp_path) as generator:
        server.publish(generator.rendezvous)
        session, config = Session(), taught_config()
        context = RoleContext("generator", 0, 1, 0, None, "first", RunLayout(tmp_path), config, config_hash(config))
        await session.begin(generator.sampling)
        beat = RoleGenerator(context, generator.engine, generator.sampling, session.client, session.rpc).heartbeat
        before = beat().capacity_samples
        generator.sampling.start(lease_of(0, 1))
        await until(lambda: len(server.asked) == 2)
        assert beat().capacity_samples == before + 2
        assert beat().metrics["teacher:waiting:larger"] == 2
        await session.end(generator.sampling)


@pytest.mark.parametrize("is_whole_group", [True, False])
async def test_a_rollout_that_is_given_up_takes_its_request_with_it(tmp_path: Path, is_whole_group: bool) -> None:
    async with TeacherServer(*[silence] * 9).running() as server, generating(tmp_path) as generator:
        server.publish(generator.rendezvous)
        session = Session()
        await session.begin(generator.sampling)
        generator.sampling.start(lease_of(0, 1))
        await until(lambda: len(server.asked) == 2)
        await (generator.sampling.cancel(0) if is_whole_group else generator.sampling.give_up())
        await until(lambda: server.num_abandoned == 2)
        await until(lambda: not len(generator.sampling))
        await session.end(generator.sampling)


async def test_the_lease_of_a_rollout_that_waits_for_its_teacher_is_renewed(tmp_path: Path) -> None:
    async with TeacherServer(silence).running() as server, generating(tmp_path) as generator:
        server.publish(generator.rendezvous)
        session, now = Session(), [0.0]
        generator.sampling.progress._clock = lambda: now[0]
        await session.begin(generator.sampling)
        generator.sampling.start(lease_of(0))
        await until(lambda: server.asked)
        generator.sampling.report()
        for _ in range(3):
            now[0] += 1000.0
            assert generator.sampling.report() is not None
            assert generator.sampling.report() is None
        await session.end(generator.sampling)


# ------------------------------------------------------------------------------------------------- real processes


@asynccontextmanager
async def process(rendezvous: Path, replica: int, seconds: float) -> AsyncIterator[asyncio.subprocess.Process]:
    command = [sys.executable, "-m", "tests.unit.roles.teacher_server", str(rendezvous), str(replica), str(seconds)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    child = await asyncio.create_subprocess_exec(*command, cwd=ROOT, env=environment, stdout=asyncio.subprocess.PIPE)
    try:
        assert child.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            await child.stdout.readline()
        yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


@pytest.mark.starts
@pytest.mark.parametrize("what", [signal.SIGKILL, signal.SIGSTOP])
async def test_nothing_is_lost_or_scored_twice_when_a_teacher_is_killed_or_paused(
    tmp_path: Path, what: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teachers, "KNOWN_S", 0.2)
    async with generating(tmp_path) as generator, AsyncExitStack() as stack:
        first = await stack.enter_async_context(process(generator.rendezvous, 0, 0.3))
        session = Session()
        await session.begin(generator.sampling)
        for group in range(8):
            generator.sampling.start(replace(lease_of(0, 1), group_id=group))
        await until(lambda: generator.sampling.teachers.as_metrics().get("teacher:waiting:larger") == 16)
        first.send_signal(what)
        await stack.enter_async_context(process(generator.rendezvous, 0, 0.0))  # its next incarnation
        found = [await session.delivered() for _ in range(16)]
        assert len({(each.scored.rollout.group_id, each.scored.rollout.sample_index) for each in found}) == 16
        assert {each.scored.verdict for each in found} == {Verdict.CORRECT}
        assert all(each.scored.teacher is not None for each in found)
        await session.end(generator.sampling)


@pytest.mark.starts
@pytest.mark.long
@pytest.mark.timeout(900)
async def test_fifty_kills_and_pauses_at_random_instants_lose_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teachers, "KNOWN_S", 0.2)
    chance, num_groups, found = random.Random(7), 200, []
    async with generating(tmp_path, timeout_s=800.0) as generator, AsyncExitStack() as stack:
        session = Session()
        await session.begin(generator.sampling)

        async def live_and_die(replica: int) -> None:
            for _ in range(25):
                async with process(generator.rendezvous, replica, 0.05) as child:
                    await asyncio.sleep(chance.uniform(0.0, 0.6))
                    child.send_signal(chance.choice([signal.SIGKILL, signal.SIGSTOP]))
                    await asyncio.sleep(chance.uniform(0.0, 0.3))
            await stack.enter_async_context(process(generator.rendezvous, replica, 0.0))

        async def grant() -> None:
            for group in range(num_groups):
                generator.sampling.start(replace(lease_of(0, 1), group_id=group))
                await asyncio.sleep(chance.uniform(0.0, 0.3))

        lives = [asyncio.create_task(live_and_die(replica)) for replica in range(2)]
        granting = asyncio.create_task(grant())
        while len(found) < 2 * num_groups:
            found.append((await session.delivered()).scored)
        await asyncio.gather(granting, *lives)
        assert len({(each.rollout.group_id, each.rollout.sample_index) for each in found}) == 2 * num_groups
        assert {each.verdict for each in found} == {Verdict.CORRECT}
        assert all(each.teacher is not None for each in found)
        await session.end(generator.sampling)

"""What a generator makes of its leases: rollouts that are judged, reported while they run, and outlive a controller."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhpc.buffer.prefixes import PartialRollout, decode_partials, id_checksum, joined
from rlhpc.config.rules import Config
from rlhpc.config.tables import AdmissionConfig, BufferConfig
from rlhpc.data.tokenizer import PromptTokenizer
from rlhpc.protocol.contracts import GenerationEngine
from rlhpc.protocol.messages import LEASES, REWARDS, Delivery, LeaseProgress, RewardReply, RewardRequest
from rlhpc.protocol.types import (
    FinishReason,
    Lease,
    Prefix,
    Rollout,
    RolloutRequest,
    ScoredRollout,
    Verdict,
)
from rlhpc.rewards.environments import variables_of
from rlhpc.rewards.pool import RewardPool
from rlhpc.roles.generator.sampling import Link, ProgressReporter, Sampling
from rlhpc.transport.rpc import RpcClient
from rlhpc.weights.buckets import make_manifest
from tests import build
from tests.engines.memory_channel import MemoryServer
from tests.engines.scripted_engine import Script, ScriptedEngine
from tests.patience import PATIENCE_S
from tests.unit.buffer.rollout_samples import ManualClock
from tests.unit.data.checkpoints import CHATML, SPECIAL_TOKENS, make_tokenizer_files
from tests.unit.roles.lone_generator import LoneGenerator
from tests.unit.roles.small_ring import small_config

# ------------------------------------------------------------------------------------------------------------- verdicts
#
# What a generating has judged of a completion, and what it does when the verifier fails.


EOS = SPECIAL_TOKENS.index("<eos>")
VOCABULARY = len(SPECIAL_TOKENS) + 96  # of make_tokenizer_files
MAX_ATTEMPTS = 3


def lease_of(*indices: int, prompt_id: int = 0, max_tokens: int = 5) -> Lease:
    return build.lease(0, indices, max_tokens=max_tokens, prompt=build.prompt(prompt_id))


async def until(is_so: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not is_so():  # noqa: ASYNC110 - each turn draws a token
            await asyncio.sleep(0)


class Verifier:
    """A reward service that fails so many times before it has a verdict, or never answers."""

    def __init__(
        self,
        num_failures: int = 0,
        rewards_at: dict[int, float] | None = None,
        replica: int = 0,
        *,
        answers: bool = True,
    ) -> None:
        self.server = MemoryServer(REWARDS, replica)
        self.asked: list[RewardRequest] = []
        self._num_failures, self._rewards_at, self._answers = num_failures, rewards_at or {}, answers

    async def run(self) -> None:
        while True:
            peer, request = await self.server.receive()
            self.asked.append(request)
            has_failed = len(self.asked) <= self._num_failures
            verdict, reward = ("verifier_error", 0.0) if has_failed else ("correct", 1.0)
            reply = RewardReply(request.request_id, reward, verdict, {}, f"{len(self.asked)}", self._rewards_at)
            if self._answers:
                await self.server.send(peer, reply)


class Session:
    """A controller and reward services, as long as they live."""

    def __init__(self, *verifiers: Verifier) -> None:
        self.leases, self.verifiers = MemoryServer(LEASES), verifiers or (Verifier(),)
        replicas = [verifier.server.connect("generator-0") for verifier in self.verifiers]
        self.rpc = RpcClient(replicas, max_attempts=MAX_ATTEMPTS)
        self.client = self.leases.connect("generator-0")
        self.failures: list[BaseException] = []
        self._judging = [asyncio.create_task(verifier.run()) for verifier in self.verifiers]

    @property
    def num_asked(self) -> int:
        return sum(len(verifier.asked) for verifier in self.verifiers)

    async def begin(self, sampling: Sampling) -> None:
        await self.rpc.__aenter__()
        await sampling.attach(Link(self.client, self.rpc, self.failures.append))

    async def end(self, sampling: Sampling) -> None:
        sampling.detach()
        for task in self._judging:
            task.cancel()
        await self.rpc.close()
        await self.client.close()

    async def delivered(self) -> Delivery:
        _, message = await self.leases.receive(PATIENCE_S)
        assert isinstance(message, Delivery)
        return message


class Generator:
    def __init__(self, root: Path, tasks: asyncio.TaskGroup, stop_probability: float = 0.0) -> None:
        config = small_config()
        config = config.model_copy(
            update={
                "model": config.model.model_copy(update={"path": make_tokenizer_files(root / "model")}),
                "rewards": config.rewards.model_copy(update={"max_attempts": MAX_ATTEMPTS}),
            }
        )
        script = Script(vocab_size=VOCABULARY, stop_token_id=EOS, stop_probability=stop_probability)
        self.engine = ScriptedEngine(script)
        self.sampling = Sampling(config, self.engine, tasks)

    async def until(self, num_tokens: int) -> None:
        await until(lambda: self.engine.num_sampled("0:0") >= num_tokens)


@asynccontextmanager
async def generating(root: Path, stop_probability: float = 0.0) -> AsyncIterator[Generator]:
    async with asyncio.TaskGroup() as tasks:
        made = Generator(root, tasks, stop_probability)
        await made.engine.receive_weights(make_manifest(0, 1, (), 1))
        await made.sampling.enter(0)
        yield made
        await made.sampling.give_up()


@pytest.fixture
async def generator(tmp_path: Path) -> AsyncIterator[Generator]:
    async with generating(tmp_path) as made:
        yield made


async def scored(root: Path, *verifiers: Verifier, stop_probability: float = 0.0) -> ScoredRollout:
    """What the generator delivers of one sample of five tokens at most."""
    async with generating(root, stop_probability) as generator:
        session = Session(*verifiers)
        await session.begin(generator.sampling)
        generator.sampling.start(lease_of(0))
        delivery = await session.delivered()
        await session.end(generator.sampling)
    assert not session.failures
    return delivery.scored


@pytest.mark.parametrize("num_failures", [1, MAX_ATTEMPTS - 1])
async def test_a_failed_verifier_is_asked_again_and_its_verdict_then_counts(tmp_path: Path, num_failures: int) -> None:
    verifier = Verifier(num_failures)
    delivered = await scored(tmp_path, verifier)
    assert (delivered.verdict, delivered.reward) == (Verdict.CORRECT, 1.0)
    assert len(verifier.asked) == num_failures + 1


async def test_a_verifier_that_fails_on_one_node_is_asked_on_another_one(tmp_path: Path) -> None:
    broken, sound = Verifier(1000), Verifier(0, replica=1)
    delivered = await scored(tmp_path, broken, sound)
    assert (delivered.verdict, delivered.reward) == (Verdict.CORRECT, 1.0)
    assert (len(broken.asked), len(sound.asked)) == (1, 1)


async def test_a_verifier_that_fails_max_attempts_times_is_asked_no_more_and_its_failure_is_delivered(
    tmp_path: Path,
) -> None:
    verifier = Verifier(1000)
    delivered = await scored(tmp_path, verifier)
    assert delivered.verdict is Verdict.VERIFIER_ERROR
    assert len(verifier.asked) == MAX_ATTEMPTS


@pytest.mark.parametrize(
    ("stop_probability", "reason", "num_judged"), [(1.0, FinishReason.STOP, 0), (0.0, FinishReason.LENGTH, 5)]
)
async def test_a_completion_is_judged_without_its_end_of_sequence_and_whole_if_it_was_truncated(
    tmp_path: Path, stop_probability: float, reason: FinishReason, num_judged: int
) -> None:
    verifier = Verifier(0)
    delivered: Any = await scored(tmp_path, verifier, stop_probability=stop_probability)
    assert delivered.rollout.finish_reason is reason
    assert len(delivered.rollout.token_ids) == num_judged + (reason is FinishReason.STOP)
    assert len(verifier.asked[0].completion) == num_judged  # one character a token


async def test_rewards_at_characters_are_delivered_at_the_tokens_that_complete_them(tmp_path: Path) -> None:
    verifier = Verifier(0, rewards_at={5: -1.0, 2: 0.25})
    delivered = await scored(tmp_path, verifier)
    assert list(delivered.token_rewards.items()) == [(1, 0.25), (4, -1.0)]  # one character a token


# ----------------------------------------------------------------------------------------- controllers that come and go
#
# A generator goes on sampling while no controller is there; the next one gets what comes of it.


async def test_what_is_finished_while_nobody_is_there_goes_to_the_next_controller(generator: Generator) -> None:
    first = Session()
    await first.begin(generator.sampling)
    await generator.engine.pause()
    generator.sampling.start(lease_of(0, 1))
    await asyncio.sleep(0)
    await first.end(generator.sampling)
    await generator.engine.resume()
    await until(lambda: not generator.engine.statistics().num_running)
    second = Session()
    await second.begin(generator.sampling)
    found = [await second.delivered() for _ in range(2)]
    assert sorted(each.scored.rollout.sample_index for each in found) == [0, 1]
    assert {(each.scored.reward, each.timeline) for each in found} == {(1.0, 0)}
    assert (first.num_asked, second.num_asked) == (0, 2)
    assert not first.failures
    await second.end(generator.sampling)


async def test_a_verdict_that_died_with_its_session_is_asked_for_again(generator: Generator) -> None:
    first = Session(Verifier(answers=False))
    await first.begin(generator.sampling)
    generator.sampling.start(lease_of(0))
    await until(lambda: first.num_asked)
    await first.end(generator.sampling)
    second = Session()
    await second.begin(generator.sampling)
    assert (await second.delivered()).scored.reward == 1.0
    assert not first.failures
    await second.end(generator.sampling)


async def test_a_reward_service_that_cannot_be_asked_ends_the_session_and_not_the_rollout(generator: Generator) -> None:
    first = Session()
    await first.begin(generator.sampling)
    await first.rpc.close()
    generator.sampling.start(lease_of(0))
    await until(lambda: first.failures)
    await first.end(generator.sampling)
    second = Session()
    await second.begin(generator.sampling)
    assert (await second.delivered()).scored.reward == 1.0
    await second.end(generator.sampling)


async def test_the_next_controller_hears_of_all_that_runs_though_nothing_was_drawn_since(generator: Generator) -> None:
    first, second = Session(), Session()
    await first.begin(generator.sampling)
    generator.sampling.start(lease_of(0, 1, max_tokens=10_000))
    await generator.until(50)
    await generator.engine.pause()
    while generator.sampling.report() is not None:
        pass
    await first.end(generator.sampling)
    await second.begin(generator.sampling)
    report = generator.sampling.report()
    assert report is not None
    assert report.timeline == 0
    members = [(piece.group_id, piece.sample_index) for piece in decode_partials(report.pieces.data, report.num_bytes)]
    assert sorted(members) == [(0, 0), (0, 1)]
    assert generator.sampling.report() is None
    await second.end(generator.sampling)


async def test_a_lease_that_its_predecessor_was_granted_is_not_sampled_without_weights(tmp_path: Path) -> None:
    async with asyncio.TaskGroup() as tasks:
        restarted = Generator(tmp_path, tasks)
        restarted.sampling.start(lease_of(0, 1))
        assert len(restarted.sampling) == 0
        await restarted.sampling.enter(0)
        restarted.sampling.start(lease_of(0, 1))
        assert len(restarted.sampling) == 2
        await restarted.sampling.give_up()


async def test_weights_of_another_timeline_end_what_those_before_have_begun(generator: Generator) -> None:
    first = Session(Verifier(answers=False))
    await first.begin(generator.sampling)
    generator.sampling.start(lease_of(0))  # waits for its verdict
    await until(lambda: first.num_asked)
    generator.sampling.start(lease_of(1, max_tokens=10_000))
    await first.end(generator.sampling)
    second = Session()
    await second.begin(generator.sampling)
    await generator.sampling.enter(3)
    assert len(generator.sampling) == 0
    assert generator.engine.statistics().num_running == 0
    generator.sampling.start(lease_of(0))
    delivery = await second.delivered()
    assert (delivery.timeline, delivery.scored.rollout.sample_index) == (3, 0)
    await second.end(generator.sampling)


async def test_a_lease_of_what_is_being_sampled_begins_nothing_unless_it_is_of_another_prompt(
    generator: Generator,
) -> None:
    session = Session()
    await session.begin(generator.sampling)
    generator.sampling.start(lease_of(0, max_tokens=10_000))
    await generator.until(20)
    generator.sampling.start(lease_of(0, max_tokens=10_000))
    await generator.until(30)
    assert generator.engine.statistics().num_running == 1
    generator.sampling.start(lease_of(0, prompt_id=7))
    assert (await session.delivered()).scored.rollout.prompt_id == 7
    assert generator.engine.statistics().num_running == 0
    generator.sampling.start(lease_of(0, max_tokens=10_000))
    await generator.until(20)
    of_today = build.prompt(0, (9, 8))
    generator.sampling.start(build.lease(0, (0,), max_tokens=5, prompt=of_today))
    assert (await session.delivered()).prompt_checksum == id_checksum(of_today.token_ids)
    assert generator.engine.statistics().num_running == 0
    await session.end(generator.sampling)


# ------------------------------------------------------------------------------------------------------------ dialogues
#
# A generator samples dialogues, with a real reward service: reports, hand-back, rollouts of one turn beside them.


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
        prompt = build.prompt(prompt_id, task=task, reference=record)
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


async def of_one_turn(config: Config) -> ScoredRollout:
    """A rollout of 60 tokens at most, rewarded by its words."""
    prompt = build.prompt(1, task="tests.unit.rewards.sample_rewards:rewards_of_words", reference="")
    async with talker_with(config) as talker:
        talker.grant(1, prompt, 2, (0,), (), 60)
        return await talker.delivered()


def same(mine: Rollout, other: Rollout) -> None:
    for name in ("token_ids", "behaviour_logprobs", "versions", "loss_mask"):
        np.testing.assert_array_equal(getattr(mine, name), getattr(other, name), err_msg=name)


@pytest.mark.starts
async def test_a_dialogue_is_delivered_with_its_rewards_beside_a_rollout_of_one_turn(model: Path) -> None:
    async with talker_with(config_with(model)) as talker:
        talker.lease(0, 1)
        talker.lease(0, prompt_id=1)
        found = [await talker.delivered() for _ in range(3)]
        plain = [each for each in found if each.rollout.prompt_id == 1]
        dialogues = [each for each in found if each.rollout.prompt_id == 0]
        assert not talker.failures
    assert plain[0].rollout.loss_mask.all()
    for each in dialogues:
        assert each.verdict is Verdict.CORRECT
        assert each.reward == 2.5
        assert each.reward_parts == {"n": 5.0}
        starts = np.flatnonzero(np.diff(each.rollout.loss_mask.astype(int), prepend=0) == 1)
        assert len(starts) == 5
        assert not each.rollout.loss_mask[0]


@pytest.mark.starts
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


@pytest.mark.starts
async def test_only_what_follows_the_end_of_thinking_is_judged_and_keeps_its_place(model: Path) -> None:
    async def drawn(thinking_end: str) -> ScoredRollout:
        config = config_with(model)
        data = (config.data[0], config.data[1].model_copy(update={"thinking_end": thinking_end}))
        return await of_one_turn(config.model_copy(update={"data": data}))

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


@pytest.mark.starts
async def test_a_rollout_ends_with_a_stop_string_and_is_judged_without_it(model: Path) -> None:
    async def drawn(stop: tuple[str, ...]) -> ScoredRollout:
        config = config_with(model)
        generation = config.generation.model_copy(update={"stop": stop})
        return await of_one_turn(config.model_copy(update={"generation": generation}))

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


# -------------------------------------------------------------------------------------------------------------- reports
#
# Generators say what is sampled of running rollouts: often enough that a death costs little, and each token once.


NUM_TOKENS = 600
INTERVAL_TOKENS, INTERVAL_S = 40, 10.0


def request_of(group_id: int, sample_index: int, prefix: Prefix | None = None) -> RolloutRequest:
    prompt = build.prompt(group_id + 100, [9])
    return build.request(group_id, sample_index, max_tokens=NUM_TOKENS, prompt=prompt, prefix=prefix)


def endless_engine() -> ScriptedEngine:
    return ScriptedEngine(Script(stop_probability=1e-9))


def reporter_of(it: GenerationEngine, clock: ManualClock, lease_deadline_s: float = 600.0) -> ProgressReporter:
    admission = AdmissionConfig(groups_per_step=1, group_size=2, lease_deadline_s=lease_deadline_s)
    buffer = BufferConfig(partial_interval_tokens=INTERVAL_TOKENS, partial_interval_s=INTERVAL_S)
    return ProgressReporter(it, admission, buffer, clock)


def pieces_of(report: LeaseProgress | None) -> list[PartialRollout]:
    return decode_partials(report.pieces.tobytes(), report.num_bytes) if report is not None else []


def beginning(rollout: Rollout, length: int) -> Prefix:
    return Prefix(rollout.token_ids[:length], rollout.behaviour_logprobs[:length], rollout.versions[:length])


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


async def test_every_token_is_reported_once_and_before_more_than_an_interval_has_been_sampled(
    clock: ManualClock,
) -> None:
    it, request = endless_engine(), request_of(3, 1)
    reporter, sampling = reporter_of(it, clock), asyncio.create_task(it.generate(request))
    pieces: list[PartialRollout] = []
    while not sampling.done():
        await asyncio.sleep(0)
        pieces += pieces_of(reporter.report([request], 0))
        assert reporter.num_unreported <= INTERVAL_TOKENS
    rollout = await sampling
    assert {(piece.group_id, piece.sample_index, piece.prompt_id) for piece in pieces} == {(3, 1, 103)}
    assert pieces[0].start == 0
    assert all(later.start == earlier.end for earlier, later in pairwise(pieces))
    assert all(INTERVAL_TOKENS - 4 <= len(piece.tokens.token_ids) <= INTERVAL_TOKENS for piece in pieces)
    known: Prefix | None = None
    for piece in pieces:
        assert piece.follows(known)
        known = joined(known, piece)
    assert known is not None
    assert len(known.token_ids) >= NUM_TOKENS - INTERVAL_TOKENS
    for mine, whole in zip(
        (known.token_ids, known.behaviour_logprobs, known.versions),
        (rollout.token_ids, rollout.behaviour_logprobs, rollout.versions),
        strict=True,
    ):
        np.testing.assert_array_equal(mine, whole[: len(mine)])


async def test_a_slow_rollout_is_reported_after_the_time_of_an_interval_and_one_that_stands_still_is_not(
    clock: ManualClock,
) -> None:
    it, request = endless_engine(), request_of(0, 0)
    reporter, sampling = reporter_of(it, clock), asyncio.create_task(it.generate(request))
    assert reporter.report([request], 0) is None  # it has no token yet
    while it.num_sampled(request.request_id) < 3:  # noqa: ASYNC110 - each turn of the loop draws a token
        await asyncio.sleep(0)
    await it.pause()
    assert reporter.report([request], 0) is None
    clock.advance(INTERVAL_S - reporter.look_s)
    (piece,) = pieces_of(reporter.report([request], 0))
    assert len(piece.tokens.token_ids) in (3, 4)
    clock.advance(5 * INTERVAL_S)
    assert reporter.report([request], 0) is None
    sampling.cancel()


async def test_what_came_with_the_lease_is_not_reported_again_until_somebody_asks_for_it(clock: ManualClock) -> None:
    it = endless_engine()
    whole = await it.generate(request_of(0, 0))
    request = request_of(0, 0, beginning(whole, 200))
    reporter, sampling = reporter_of(it, clock), asyncio.create_task(it.generate(request))
    while not (pieces := pieces_of(reporter.report([request], 0))):  # noqa: ASYNC110 - each turn draws a token
        await asyncio.sleep(0)
    assert (pieces[0].start, pieces[0].before) == (200, id_checksum(whole.token_ids[:200]))
    reporter.show_whole([(0, 0), (7, 7)])
    (piece,) = pieces_of(reporter.report([request], 0))
    assert (piece.start, piece.before) == (0, 0)
    assert piece.end >= pieces[0].end
    np.testing.assert_array_equal(piece.tokens.token_ids, whole.token_ids[: piece.end])
    sampling.cancel()


async def test_all_rollouts_share_a_message_and_those_that_are_almost_due_come_along(clock: ManualClock) -> None:
    it, requests = endless_engine(), [request_of(group, sample) for group in range(3) for sample in range(2)]
    reporter, sampling = reporter_of(it, clock), [asyncio.create_task(it.generate(requests[0]))]
    for _ in range(INTERVAL_TOKENS // 4):
        await asyncio.sleep(0)
    sampling += [asyncio.create_task(it.generate(request)) for request in requests[1:-1]]
    while not (pieces := pieces_of(reporter.report(requests, 0))):  # noqa: ASYNC110 - each turn draws a token
        await asyncio.sleep(0)
    assert [(piece.group_id, piece.sample_index) for piece in pieces] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]
    for task in sampling:
        task.cancel()


async def test_an_engine_that_cannot_tell_the_tokens_renews_its_leases_all_the_same(clock: ManualClock) -> None:
    class Blind(ScriptedEngine):
        is_blind = True

        def progress(self, request_id: str, start: int = 0) -> Prefix | None:
            return None if self.is_blind else super().progress(request_id, start)

    it, request = Blind(Script(stop_probability=1e-9)), request_of(0, 0)
    reporter, sampling = reporter_of(it, clock), asyncio.create_task(it.generate(request))
    found: list[PartialRollout] = []
    while it.num_sampled(request.request_id) < NUM_TOKENS // 2:
        await asyncio.sleep(0)
        clock.advance(INTERVAL_S / 20)
        found += pieces_of(reporter.report([request], 0))
    assert NUM_TOKENS // 2 // 21 <= len(found) <= NUM_TOKENS // 2 // 18
    assert {(piece.start, len(piece.tokens.token_ids)) for piece in found} == {(0, 0)}
    it.is_blind = False  # at the next look all is told, and not only what came since the last report
    while it.num_sampled(request.request_id) == reporter._reported[request.request_id].num_seen:  # noqa: ASYNC110
        await asyncio.sleep(0)
    (piece,) = pieces_of(reporter.report([request], 0))
    assert (piece.start, piece.end) == (0, it.num_sampled(request.request_id))
    assert reporter.num_unreported == 0
    sampling.cancel()


def test_leases_that_are_short_are_renewed_more_often(clock: ManualClock) -> None:
    assert reporter_of(endless_engine(), clock, lease_deadline_s=2.0).look_s == 0.5 / 8

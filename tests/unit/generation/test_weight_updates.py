"""New weights for an engine: received by a worker, loaded while sampling stands still, adopted whole or torn."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhpc.generation.weight_updates import (
    BUSY,
    DONE,
    FAILED,
    READY,
    TORN,
    PauseSwitch,
    WeightLink,
    WeightUpdates,
    WorkerNotices,
    choose_staging,
    free_host_bytes,
    write_notice,
)
from rlhpc.metrics.meters import BusyClock
from rlhpc.protocol.contracts import Allocate, WeightReceiver
from rlhpc.protocol.errors import GroupFailed, TornWeights
from rlhpc.protocol.types import TensorSpec, WeightGroup
from rlhpc.weights.buckets import make_manifest
from rlhpc.weights.memory import DeviceScope, HostShadow, NamedTensors
from tests import build
from tests.patience import PATIENCE_S

# --------------------------------------------------------------------------------------- a worker's link to the trainer


GROUP = WeightGroup(1, "gloo", "file:///x", ("g",), (1,))
MANIFEST = make_manifest(1, 1, [TensorSpec(name, "float32", (4,)) for name in "abc"], 16)  # three buckets
ON_CPU = DeviceScope(torch.device("cpu"))


class GatedReceiver(WeightReceiver):
    """Receives when it is let; what it gives is the index of the bucket."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.error: Exception | None = None
        self.error_after = 0  # buckets
        self.rank = 0
        self.has_refused = False
        self.devices: list[torch.device] = []

    def join(self, group: WeightGroup, rank: int) -> None:
        self.rank = rank

    def receive(
        self, manifest: object, allocate: Allocate, held: int | None = None
    ) -> Generator[torch.Tensor, None, None]:
        assert self.gate.wait(PATIENCE_S)
        try:
            for index in range(3):
                if self.error is not None and index == self.error_after:
                    raise self.error
                block = allocate(index, torch.device("cpu"))
                yield block.view(torch.float32).fill_(index).view(torch.uint8)
            if self.error is not None:
                raise self.error
        except GeneratorExit:
            self.has_refused = True
            raise

    def leave(self) -> None:
        self.rank = 0


@pytest.fixture
def receiver() -> GatedReceiver:
    return GatedReceiver()


@pytest.fixture
def link(receiver: GatedReceiver) -> WeightLink:
    return WeightLink(receiver, ON_CPU, HostShadow(is_pinned=False), permit_s=PATIENCE_S)


def ready(link: WeightLink, receiver: GatedReceiver, load: Callable[[NamedTensors], object]) -> None:
    """A version that is loaded while paused is here, and its first bucket waits for permission."""
    receiver.gate.set()
    link.begin_paused(MANIFEST, load)
    assert ended(link) == (READY, "")


class Model:
    """Loads what it is given."""

    def __init__(self) -> None:
        self.loaded: dict[str, float] = {}
        self.error: Exception | None = None

    def load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.loaded[name] = float(tensor[0])
            if self.error is not None:
                raise self.error


def ended(link: WeightLink) -> tuple[str, str]:
    while link.poll()[0] == BUSY:
        threading.Event().wait(0.001)
    return link.poll()


class FakeCuda:
    """CUDA's rules about threads, devices and streams, for a machine without a GPU.

    Every thread begins on device 0 and the default stream; nothing is computed.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._of_thread = threading.local()
        self._num_streams = 0
        self.synchronized: list[str] = []
        for name in ("set_device", "current_device", "stream"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "Stream", self._new_stream)

    def here(self) -> tuple[int, str]:
        """Device and stream of the calling thread."""
        return self.current_device(), getattr(self._of_thread, "stream", "default")

    def set_device(self, device: torch.device) -> None:
        assert device.index is not None
        self._of_thread.device = device.index

    def current_device(self) -> int:
        return int(getattr(self._of_thread, "device", 0))

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before = self.here()[1]
        self._of_thread.stream = stream.name
        yield
        self._of_thread.stream = before

    def _new_stream(self, device: torch.device, **kwargs: Any) -> FakeStream:
        stream = FakeStream(f"stream {self._num_streams} of {device}", self)
        self._num_streams += 1
        return stream


class FakeStream:
    def __init__(self, name: str, cuda: FakeCuda) -> None:
        self.name, self._cuda = name, cuda

    def synchronize(self) -> None:
        self._cuda.synchronized.append(self.name)


def test_a_shadow_is_handed_over_once(link: WeightLink, receiver: GatedReceiver) -> None:
    assert link.begin_shadow(MANIFEST) == (BUSY, "")
    with pytest.raises(TornWeights):
        link.take()
    receiver.gate.set()
    assert ended(link) == (DONE, "")
    assert [(name, float(tensor[0])) for name, tensor in link.take()] == [("a", 0), ("b", 1), ("c", 2)]
    with pytest.raises(TornWeights):
        link.take()


@pytest.mark.parametrize("error_after", range(4))
@pytest.mark.parametrize(
    ("error", "state"),
    [(TornWeights("bad sum"), TORN), (GroupFailed("gone"), FAILED), (MemoryError("no room"), FAILED)],
)
def test_whatever_goes_wrong_is_told_and_leaves_no_shadow(
    link: WeightLink, receiver: GatedReceiver, error: Exception, state: str, error_after: int
) -> None:
    receiver.error, receiver.error_after = error, error_after
    receiver.gate.set()
    link.begin_shadow(MANIFEST)
    found, message = ended(link)
    assert found == state
    assert str(error) in message
    with pytest.raises(TornWeights):
        link.take()


def test_a_second_task_does_not_wait_for_the_first(link: WeightLink, receiver: GatedReceiver) -> None:
    link.begin_shadow(MANIFEST)
    assert link.begin_shadow(MANIFEST)[0] == FAILED
    receiver.gate.set()
    assert ended(link) == (DONE, "")


def test_leaving_drops_the_shadow(link: WeightLink, receiver: GatedReceiver) -> None:
    receiver.gate.set()
    link.begin_shadow(MANIFEST)
    ended(link)
    link.leave()
    with pytest.raises(TornWeights):
        link.take()


def test_nothing_is_loaded_before_it_is_permitted(link: WeightLink, receiver: GatedReceiver) -> None:
    model = Model()
    link.begin_paused(MANIFEST, model.load)
    assert link.poll() == (BUSY, "")
    receiver.gate.set()
    assert ended(link) == (READY, "")
    assert model.loaded == {}
    link.permit()
    assert ended(link) == (DONE, "")
    assert model.loaded == {"a": 0, "b": 1, "c": 2}


def test_a_version_that_is_given_up_touches_nothing_and_is_refused(link: WeightLink, receiver: GatedReceiver) -> None:
    model = Model()
    ready(link, receiver, model.load)
    link.give_up()
    assert ended(link)[0] == FAILED
    assert model.loaded == {}
    assert receiver.has_refused


def test_what_was_given_up_while_its_load_waited_for_another_does_not_reach_the_model(
    link: WeightLink, receiver: GatedReceiver
) -> None:
    model, waits, other_has_loaded = Model(), threading.Event(), threading.Event()

    def load(weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        waits.set()
        assert other_has_loaded.wait(PATIENCE_S)
        model.load(weights)

    ready(link, receiver, load)
    link.permit()
    assert waits.wait(PATIENCE_S)
    link.leave()
    other_has_loaded.set()
    assert ended(link)[0] == FAILED
    assert model.loaded == {}


def test_permission_is_for_one_version(link: WeightLink, receiver: GatedReceiver) -> None:
    model = Model()
    receiver.gate.set()
    for _ in range(2):
        link.begin_paused(MANIFEST, model.load)
        assert ended(link) == (READY, "")
        link.permit()
        assert ended(link) == (DONE, "")


def test_an_engine_that_does_not_stop_sampling_is_not_waited_for_for_ever(receiver: GatedReceiver) -> None:
    link, model = WeightLink(receiver, ON_CPU, HostShadow(is_pinned=False), permit_s=0.01), Model()
    receiver.gate.set()
    link.begin_paused(MANIFEST, model.load)
    while link.poll()[0] in (BUSY, READY):
        threading.Event().wait(0.001)
    assert "did not stop sampling" in link.poll()[1]
    assert model.loaded == {}
    assert receiver.has_refused


@pytest.mark.parametrize("error_after", range(1, 4))
def test_what_is_torn_after_some_of_it_was_loaded_is_told(
    link: WeightLink, receiver: GatedReceiver, error_after: int
) -> None:
    model = Model()
    receiver.error, receiver.error_after = TornWeights("bad sum"), error_after
    ready(link, receiver, model.load)
    link.permit()
    assert ended(link) == (TORN, "bad sum")
    assert len(model.loaded) == error_after


def test_a_model_that_cannot_load_refuses_the_version(link: WeightLink, receiver: GatedReceiver) -> None:
    model = Model()
    model.error = MemoryError("no room for a layer")
    ready(link, receiver, model.load)
    link.permit()
    assert ended(link) == (FAILED, "MemoryError('no room for a layer')")
    assert receiver.has_refused


def test_a_model_that_leaves_tensors_out_has_not_loaded_the_version(link: WeightLink, receiver: GatedReceiver) -> None:
    ready(link, receiver, lambda weights: print(next(weights)))
    link.permit()
    assert ended(link)[0] == TORN


def test_a_receiver_works_on_its_workers_gpu_and_on_a_stream_of_its_own(
    receiver: GatedReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = FakeCuda(monkeypatch)
    seen: list[tuple[int, str]] = []
    monkeypatch.setattr(receiver, "join", lambda group, rank: seen.append(cuda.here()))
    scope = DeviceScope(torch.device("cuda", 3))
    shadow = HostShadow(is_pinned=False)
    for _ in range(2):  # two epochs of one worker
        link = WeightLink(receiver, scope, shadow, permit_s=PATIENCE_S)
        link.begin_join(GROUP, 1)
        assert ended(link) == (DONE, "")
    assert seen == [(3, "stream 0 of cuda:3")] * 2  # one stream for life: its freed blocks are found again
    assert cuda.here() == (0, "default")  # the engine's thread is left as it was
    assert cuda.synchronized == ["stream 0 of cuda:3"] * 2  # done is said when the copies have ended


# --------------------------------------------------------------------------------------------------- an engine's update
#
# An update that has begun to load ends whole or torn, whoever stops waiting for it.


EMPTY = make_manifest(7, 1, (), 1)


class OneWorker:
    """vLLM with one worker, whose load ends when a test says so, and how."""

    def __init__(self, outcome: str) -> None:
        self.outcome, self.is_loading, self.may_end = outcome, asyncio.Event(), asyncio.Event()

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        answers: dict[str, Any] = {"rlhpc_num_preemptions": 0, "rlhpc_held_checksum": (0, {}), "rlhpc_permit": None}
        answers["rlhpc_way_of_loading"] = "copies"
        if method == "rlhpc_begin_receive":
            return [(DONE if args[1] == "shadow" else READY, "")]
        if method == "rlhpc_load":
            self.is_loading.set()
            await self.may_end.wait()
            return [None]
        if method == "rlhpc_permit":
            self.is_loading.set()
        if method == "rlhpc_poll":
            return [(self.outcome, "the publisher is gone") if self.may_end.is_set() else (BUSY, "")]
        return [answers[method]]

    async def pause(self) -> None:
        pass

    async def resume(self) -> None:
        pass

    async def counts(self) -> dict[str, int]:
        return {}


async def call(work: Awaitable[Any]) -> Any:
    return await work


def updates_of(llm: OneWorker, staging: str, adopted: list[int]) -> WeightUpdates:
    async def adopt(version: int, _counts: dict[str, int]) -> None:
        adopted.append(version)

    config = build.config(weights={"staging": staging})
    switch = PauseSwitch(llm, call, BusyClock(time.monotonic, 1))
    return WeightUpdates(llm, call, switch, adopt, config=config, clock=time.monotonic)


@pytest.mark.parametrize(("staging", "outcome"), [("paused", TORN), ("paused", DONE), ("shadow", DONE)])
@pytest.mark.parametrize("num_cancels", [1, 2])
async def test_who_is_cancelled_while_weights_are_loaded_ends_cancelled_and_the_engine_knows_what_it_has(
    staging: str, outcome: str, num_cancels: int
) -> None:
    """A session that is over ends so: a failure in place of the cancellation would be reported, and waited on."""
    llm, adopted = OneWorker(outcome), list[int]()
    updates = updates_of(llm, staging, adopted)
    receiving = asyncio.create_task(updates.receive(EMPTY))
    await asyncio.wait_for(llm.is_loading.wait(), PATIENCE_S)
    for _ in range(num_cancels):
        receiving.cancel()
        await asyncio.sleep(0.01)
    llm.may_end.set()
    write_notice(str(updates._notices.pipe))
    await asyncio.wait({receiving}, timeout=PATIENCE_S)
    updates.close()
    assert receiving.cancelled()
    assert (adopted, updates.is_torn) == (([], True) if outcome == TORN else ([7], False))


async def test_a_worker_is_asked_when_it_gives_notice_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhpc.generation.weight_updates.NOTICE_S", PATIENCE_S)
    notices = WorkerNotices()
    pipe = str(notices.pipe)
    waiting = asyncio.create_task(notices.next())
    done, _ = await asyncio.wait({waiting}, timeout=0.05)
    assert not done
    for _ in range(3):  # before the next call: one notice is as good as three
        write_notice(pipe)
    await asyncio.wait_for(waiting, PATIENCE_S)
    write_notice(pipe)
    await asyncio.wait_for(notices.next(), PATIENCE_S)
    notices.close()
    write_notice(pipe)  # nobody reads it: no error
    assert not notices.pipe.parent.exists()


# --------------------------------------------------------------------------------------------------------- pause switch


class RecordingLlm:
    """vLLM's two calls; it refuses what would be a mistake."""

    def __init__(self) -> None:
        self.is_paused = False
        self.num_calls = 0

    async def pause(self) -> None:
        assert not self.is_paused
        self.is_paused, self.num_calls = True, self.num_calls + 1

    async def resume(self) -> None:
        assert self.is_paused
        self.is_paused, self.num_calls = False, self.num_calls + 1


@pytest.fixture
def llm() -> RecordingLlm:
    return RecordingLlm()


@pytest.fixture
def switch(llm: RecordingLlm) -> PauseSwitch:
    return PauseSwitch(llm, call, BusyClock(lambda: 0.0, 1))


async def test_an_engine_goes_on_when_the_last_one_lets_go_and_nobody_releases_for_another(
    llm: RecordingLlm, switch: PauseSwitch
) -> None:
    for holder in ("update", "caller", "update"):
        await switch.hold(holder)
    await switch.release("caller")
    await switch.release("caller")
    assert llm.is_paused
    await switch.release("update")
    assert not llm.is_paused
    assert llm.num_calls == 2


# ------------------------------------------------------------------------------------------------------- staging choice


GB = 10**9


@pytest.mark.parametrize(
    ("setting", "on_cpu", "model", "num_shadows", "free", "chosen"),
    [
        ("auto", True, 14 * GB, 1, 1 * GB, "shadow"),  # the model lives in host memory anyway
        ("auto", False, 14 * GB, 8, 400 * GB, "shadow"),
        ("auto", False, 145 * GB, 8, 1000 * GB, "paused"),  # eight workers would want 1.2 TB
        ("auto", False, 14 * GB, 8, 200 * GB, "paused"),
        ("shadow", False, 145 * GB, 8, 1 * GB, "shadow"),  # what was asked for
        ("paused", True, 1, 1, 400 * GB, "paused"),
    ],
)
def test_a_shadow_is_kept_where_every_worker_of_the_node_has_room_for_one(
    setting: str, on_cpu: bool, model: int, num_shadows: int, free: int, chosen: str
) -> None:
    got = choose_staging(setting, on_cpu=on_cpu, model_bytes=model, num_shadows=num_shadows, free_bytes=free)
    assert got == chosen


def cgroup(tmp_path: Path, line: str, **files: str) -> tuple[Path, Path]:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"1:cpu:/other\n{line}\n")
    for name, content in files.items():
        path = tmp_path / "groups" / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return tmp_path / "proc", tmp_path / "groups"


def test_the_limit_of_a_job_counts_though_it_is_set_above_the_task(tmp_path: Path) -> None:
    places = cgroup(
        tmp_path,
        "0::/job_7/step_0/task_1",
        job_7__memory_DOT_max="1000\n",
        job_7__memory_DOT_current="400\n",
        job_7__step_0__task_1__memory_DOT_max="max\n",
        job_7__step_0__task_1__memory_DOT_current="300\n",
    )
    assert free_host_bytes(*places) == 600


def test_the_older_kind_of_cgroup_is_read_too(tmp_path: Path) -> None:
    places = cgroup(
        tmp_path,
        "4:memory:/slurm/job_7",
        memory__slurm__job_7__memory_DOT_limit_in_bytes="5000",
        memory__slurm__job_7__memory_DOT_usage_in_bytes="6000",
    )
    assert free_host_bytes(*places) == 0


def test_without_a_limit_it_is_what_the_machine_has(tmp_path: Path) -> None:
    assert free_host_bytes(tmp_path / "nothing", tmp_path) > 0
    places = cgroup(
        tmp_path,
        "4:memory:/x",
        memory__x__memory_DOT_limit_in_bytes=str(2**63 - 4096),
        memory__x__memory_DOT_usage_in_bytes="6000",
    )
    assert free_host_bytes(*places) > 6000

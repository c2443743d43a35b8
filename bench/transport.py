"""How many 4,096-token rollouts a second get from one process to another: encode → TCP → verified arrays.

    python -m bench.transport [--seconds 20] [--tokens 4096]

A second process produces, this one consumes.  Contenders take turns, shuffled, several times in the same run; medians
are printed beside the fastest and slowest repeat.  "raw socket" moves the same bytes with sendall and recv_into and
does nothing else: it is the denominator.  The CPU columns hold on a busy machine too: microseconds of the producing
thread, of the consuming thread, and of all else (ZeroMQ's threads); the slowest of them bounds the rate wherever each
thread has a core.  "ZeroMQ" moves the same bytes through a bare pair of sockets: what no codec can be better than, with
and without CURVE.  Only the contenders named "channel" keep the promises of docs/design.md
(checksum over everything, sequence numbers, bounded queues, types); pickle and lists check nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import functools
import multiprocessing
import os
import pickle
import platform
import random
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq

from bench.figures import tell
from rlhpc.config.tables import TransportConfig
from rlhpc.protocol.messages import LEASES, CancelGroup
from rlhpc.protocol.types import FinishReason, Rollout, ScoredRollout, Verdict
from rlhpc.transport.channel import ZmqBlockingClient, ZmqServer
from rlhpc.transport.codec import Codec
from rlhpc.transport.security import mint_run_keys
from rlhpc.transport.sockets import contents, pull

DISTINCT = 32  # rollouts that go round
WARM = 200  # messages before the clock starts
QUEUE = 200
SPEC = dataclasses.replace(LEASES, to_server=(ScoredRollout,), capacity_messages=QUEUE)


@functools.cache
def rollouts(num_tokens: int) -> list[ScoredRollout]:
    rng = np.random.default_rng(0)
    made = []
    for index in range(DISTINCT):
        rollout = Rollout(
            group_id=index,
            sample_index=0,
            prompt_id=index,
            token_ids=rng.integers(0, 150_000, num_tokens, dtype=np.int32),
            behaviour_logprobs=-rng.random(num_tokens, dtype=np.float32),
            versions=np.full(num_tokens, index, np.int32),
            loss_mask=np.ones(num_tokens, np.bool_),
            finish_reason=FinishReason.STOP,
        )
        made.append(ScoredRollout(rollout, 1.0, Verdict.CORRECT, {"accuracy": 1.0}, "42"))
    return made


@functools.cache
def list_records(num_tokens: int) -> list[dict[str, Any]]:
    return [as_lists(scored) for scored in rollouts(num_tokens)]


def as_lists(scored: ScoredRollout) -> dict[str, Any]:
    """What a service that answers in JSON-like lists would send."""
    rollout = scored.rollout
    return {
        "group_id": rollout.group_id,
        "prompt_id": rollout.prompt_id,
        "token_ids": rollout.token_ids.tolist(),
        "logprobs": rollout.behaviour_logprobs.tolist(),
        "versions": rollout.versions.tolist(),
        "loss_mask": rollout.loss_mask.tolist(),
        "reward": scored.reward,
    }


def from_lists(wire: bytes) -> tuple[int, Any]:
    record = msgspec.msgpack.decode(wire)
    token_ids = np.array(record["token_ids"], np.int32)
    np.array(record["logprobs"], np.float32)
    np.array(record["versions"], np.int32)
    np.array(record["loss_mask"], np.bool_)
    return record["group_id"], token_ids


def from_pickle(wire: bytes) -> tuple[int, Any]:
    scored = pickle.loads(wire)
    return scored.rollout.group_id, scored.rollout.token_ids


# ---------------------------------------------------------------------------------------------- producing process


@dataclasses.dataclass(frozen=True)
class Order:
    contender: str
    address: str
    count: int
    num_tokens: int
    secrets: Path
    server_key: bytes = b""  # of a bare socket with CURVE


def produce(orders: Connection) -> None:
    """Main of the second process: carry out orders until there is none."""
    while (order := orders.recv()) is not None:
        rollouts(order.num_tokens), list_records(order.num_tokens), wire_bytes(order.num_tokens)
        began = cpu_seconds()
        PRODUCERS[order.contender](order)
        orders.send(cpu_seconds() - began)


def cpu_seconds() -> Any:
    """[this thread, the other threads of this process]"""
    return np.array([time.thread_time(), time.process_time() - time.thread_time()])


def produce_channel(order: Order) -> None:
    client = ZmqBlockingClient(
        SPEC,
        order.address,
        name="generator-0",
        incarnation="bench",
        server_name="controller-0",
        config=TransportConfig(kind="tcp", curve="CURVE" in order.contender),
        secrets=order.secrets,
    )
    for message in cycle(rollouts(order.num_tokens), order.count):
        client.send(message, timeout_s=30)
    client.receive(60)  # closing flushes for a second only; the consumer may need longer
    client.close()


def produce_frames(order: Order) -> None:
    messages = rollouts(order.num_tokens)
    codec = Codec([ScoredRollout])
    wire = wire_bytes(order.num_tokens)
    encode: dict[str, Callable[[Any], list[Any]]] = {
        "ZeroMQ": lambda _: [wire],
        "ZeroMQ, CURVE": lambda _: [wire],
        "codec, bare DEALER": lambda message: codec.encode(message, 0),
        "pickle": lambda message: [pickle.dumps(message, protocol=5)],
        "msgspec lists": lambda message: [msgspec.msgpack.encode(message)],
    }
    source: list[Any] = list_records(order.num_tokens) if order.contender == "msgspec lists" else messages
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.sndhwm = QUEUE
    if order.server_key:
        dealer.curve_serverkey = order.server_key
        dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_keypair()
    dealer.connect(order.address)
    for message in cycle(source, order.count):
        dealer.send_multipart(encode[order.contender](message), copy=order.num_tokens < 5_000)
    dealer.close(linger=-1)
    context.term()


def produce_raw(order: Order) -> None:
    host, port = order.address.split(":")
    payload = wire_bytes(order.num_tokens)
    with socket.create_connection((host, int(port))) as stream:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(order.count):
            stream.sendall(payload)


@functools.cache
def wire_bytes(num_tokens: int) -> bytes:
    return b"".join(Codec([ScoredRollout]).encode(rollouts(num_tokens)[0], 0))


def cycle(items: list[Any], count: int) -> Iterator[Any]:
    for index in range(count):
        yield items[index % DISTINCT]


PRODUCERS: dict[str, Callable[[Order], None]] = {
    "raw socket": produce_raw,
    "channel": produce_channel,
    "channel, CURVE": produce_channel,
    "ZeroMQ": produce_frames,
    "ZeroMQ, CURVE": produce_frames,
    "codec, bare DEALER": produce_frames,
    "pickle": produce_frames,
    "msgspec lists": produce_frames,
}


# ---------------------------------------------------------------------------------------------- consuming process


class Stopwatch:
    """Counts messages, looks at one in eight, and knows how long those after the warm-up took."""

    def __init__(self, expected: list[ScoredRollout], count: int) -> None:
        self.expected, self.count, self.seen = expected, count, 0
        self.began = self.ended = 0.0

    def saw(self, group_id: int, token_ids: Any) -> None:
        if group_id != self.seen % DISTINCT:
            raise SystemExit(f"message {self.seen} holds group {group_id}")
        if self.seen % 8 == 0 and not np.array_equal(token_ids, self.expected[group_id].rollout.token_ids):
            raise SystemExit(f"message {self.seen} arrived with other tokens than were sent")
        self.tick()

    def tick(self) -> None:
        self.seen += 1
        if self.seen == WARM:
            self.began = time.perf_counter()
        elif self.seen == self.count:
            self.ended = time.perf_counter()

    @property
    def per_second(self) -> float:
        return (self.count - WARM) / (self.ended - self.began)


async def consume_channel(order: Order, start: Callable[[Order], None], watch: Stopwatch) -> None:
    config = TransportConfig(kind="tcp", curve="CURVE" in order.contender)
    server = ZmqServer(
        SPEC,
        name="controller-0",
        config=config,
        secrets=order.secrets,
        clock=time.monotonic,
        interface="127.0.0.1",
    )
    start(Order(order.contender, server.address, order.count, order.num_tokens, order.secrets))
    for _ in range(order.count):
        _, scored = await server.receive(30)
        watch.saw(scored.rollout.group_id, scored.rollout.token_ids)
    await server.send("generator-0", CancelGroup(0))
    if server.statistics.messages_lost or server.statistics.messages_rejected:
        raise SystemExit("messages were lost")
    await server.close()


def consume_frames(order: Order, start: Callable[[Order], None], watch: Stopwatch) -> None:
    codec, wire, tokens = Codec([ScoredRollout]), wire_bytes(order.num_tokens), rollouts(order.num_tokens)

    def from_codec(frames: list[Any]) -> tuple[int, Any]:
        rollout = codec.decode(contents(frames), "producer")[1].rollout
        return rollout.group_id, rollout.token_ids

    def same(frames: list[Any]) -> tuple[int, Any]:
        if len(frames[0].buffer) != len(wire):
            raise SystemExit("other bytes arrived than were sent")
        index = watch.seen % DISTINCT
        return index, tokens[index].rollout.token_ids

    decode: dict[str, Callable[[list[Any]], tuple[int, Any]]] = {
        "ZeroMQ": same,
        "ZeroMQ, CURVE": same,
        "codec, bare DEALER": from_codec,
        "pickle": lambda frames: from_pickle(frames[0].buffer),
        "msgspec lists": lambda frames: from_lists(frames[0].buffer),
    }
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.rcvhwm = QUEUE
    public = b""
    if "CURVE" in order.contender:
        public, router.curve_secretkey = zmq.curve_keypair()
        router.curve_server = True
    port = router.bind_to_random_port("tcp://127.0.0.1")
    start(dataclasses.replace(order, address=f"tcp://127.0.0.1:{port}", server_key=public))
    while watch.seen < order.count:
        frames = pull(router)
        if frames is None:
            router.poll(30_000)
        else:
            watch.saw(*decode[order.contender](frames[1:]))
    router.close(linger=0)
    context.term()


def consume_raw(order: Order, start: Callable[[Order], None], watch: Stopwatch) -> None:
    buffer = memoryview(bytearray(len(wire_bytes(order.num_tokens))))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        start(Order(order.contender, f"{host}:{port}", order.count, order.num_tokens, order.secrets))
        stream, _ = listener.accept()
        with stream:
            for _ in range(order.count):
                filled = 0
                while filled < len(buffer):
                    filled += stream.recv_into(buffer[filled:])
                watch.tick()


@dataclasses.dataclass(frozen=True)
class Result:
    per_second: float
    cpu_us: Any  # per rollout: [producing thread, consuming thread, other threads]


def run_once(contender: str, count: int, num_tokens: int, secrets: Path, orders: Connection) -> Result:
    order = Order(contender, "", count, num_tokens, secrets)
    watch = Stopwatch(rollouts(num_tokens), count)
    began = cpu_seconds()
    if contender == "raw socket":
        consume_raw(order, orders.send, watch)
    elif contender.startswith("channel"):
        asyncio.run(consume_channel(order, orders.send, watch))
    else:
        consume_frames(order, orders.send, watch)
    consumer, producer = cpu_seconds() - began, orders.recv()
    cpu_us = np.array([producer[0], consumer[0], producer[1] + consumer[1]]) / count * 1e6
    return Result(watch.per_second, cpu_us)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--seconds", type=float, default=20.0, help="for the whole table, about")
    arguments.add_argument("--tokens", type=int, default=4096)
    arguments.add_argument("--repeats", type=int, default=5)
    options = arguments.parse_args()

    print(
        f"{platform.machine()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}; Python "
        f"{platform.python_version()}, libzmq {zmq.zmq_version()}, pyzmq {zmq.pyzmq_version()}, "
        f"msgspec {msgspec.__version__}, numpy {np.__version__}"
    )
    num_bytes = len(wire_bytes(options.tokens))
    print(f"{options.tokens} tokens = {num_bytes} bytes on the wire; seed 0; {options.repeats} repeats, shuffled\n")

    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    producer = multiprocessing.get_context("spawn").Process(target=produce, args=(theirs,))
    producer.start()
    with tempfile.TemporaryDirectory() as directory:
        secrets = Path(directory) / "secrets"
        mint_run_keys(secrets, ["controller-0", "generator-0"])
        rates = measure(options, secrets, ours)
    ours.send(None)
    producer.join()

    print_table(rates, options.tokens)


def print_table(results: dict[str, list[Result]], num_tokens: int) -> None:
    raw = rate_of(results["raw socket"])
    print(f"{'':20}{'rollouts/s':>11}{'(min–max)':>18}{'Mtok/s':>8}{'/ raw':>7}   CPU µs: make{'take':>7}{'rest':>7}")
    for contender, repeats in results.items():
        tell(f"{contender} over raw".replace("channel, CURVE", "CURVE channel"), rate_of(repeats) / raw)
        rates = [result.per_second for result in repeats]
        median = statistics.median(rates)
        spread = f"({min(rates):,.0f}–{max(rates):,.0f})"
        make, take, rest = np.median([result.cpu_us for result in repeats], axis=0)
        columns = f"{median:>11,.0f}{spread:>18}{median * num_tokens / 1e6:>8.1f}{median / raw:>7.2f}"
        print(f"{contender:20}{columns}{make:>15.1f}{take:>7.1f}{rest:>7.1f}")


def rate_of(repeats: list[Result]) -> float:
    """Rollouts a second, the median."""
    return statistics.median(result.per_second for result in repeats)


def measure(options: argparse.Namespace, secrets: Path, orders: Connection) -> dict[str, list[Result]]:
    share_s = options.seconds / len(PRODUCERS) / (options.repeats + 0.5)
    counts = {}
    for contender in PRODUCERS:  # a short run says how many messages fill the share
        rate = run_once(contender, WARM + 300, options.tokens, secrets, orders).per_second
        counts[contender] = WARM + max(300, int(rate * share_s))
    rates: dict[str, list[Result]] = {contender: [] for contender in PRODUCERS}
    shuffle = random.Random(0)
    for _ in range(options.repeats):
        for contender in shuffle.sample(list(PRODUCERS), len(PRODUCERS)):
            rates[contender].append(run_once(contender, counts[contender], options.tokens, secrets, orders))
    return rates


if __name__ == "__main__":
    main()

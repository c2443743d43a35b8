"""What no controller over these sockets and files can be better than, in CPU of a rollout: bench/controller.py's limit.

The same bytes take the same way and nothing is done with them: deliveries come over ZeroMQ with CURVE in TCP, one lease
goes out for each group and the ids and log-probabilities of a step to a trainer, a thread writes what came with its
checksum and fdatasync, another makes segments of groups that stand there already.  No message is decoded, there is no
asyncio, no ledger, no buffer, no advantages, no packing, no metrics.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from bench.journal import group_of, records
from rlhpc.base.native import crc32
from rlhpc.buffer.batches import ResolvedGroup
from rlhpc.buffer.journal import JournalRecord
from rlhpc.buffer.segments import to_hdf5, write_sealed
from rlhpc.protocol.messages import Delivery
from rlhpc.protocol.types import Lease, SamplingParams, ScoredRollout
from rlhpc.transport.codec import Codec
from rlhpc.transport.sockets import contents, pull

Socket = zmq.Socket[bytes]
BYTES_A_TOKEN = 8  # of a batch: id, log-probability
AHEAD = 2  # steps of leases that are out
LONG_MS = 60_000


@dataclass(frozen=True)
class Shape:
    """Of the traffic."""

    num_tokens: int
    group_size: int
    num_generators: int
    groups_per_step: int

    @property
    def rollouts_per_step(self) -> int:
        return self.group_size * self.groups_per_step


def be_others(shape: Shape, addresses: Sequence[str], server_key: bytes) -> None:
    """Main of the other process: generators that answer a lease with rollouts made before, and a trainer."""
    context: zmq.Context[Socket] = zmq.Context()
    keys, poller = zmq.curve_keypair(), zmq.Poller()

    def dealer(address: str) -> Socket:
        socket = context.socket(zmq.DEALER)
        socket.curve_serverkey, (socket.curve_publickey, socket.curve_secretkey) = server_key, keys
        socket.sndhwm = socket.rcvhwm = 0
        socket.connect(address)
        poller.register(socket, zmq.POLLIN)
        socket.send(b"here")
        return socket

    wires = [_wire(record.scored) for record in records(32, shape.num_tokens)]
    trainer = dealer(addresses[1])
    for _ in range(shape.num_generators):
        dealer(addresses[0])  # the poller holds it
    sent = 0
    while True:
        for ready, _ in poller.poll():
            pull(ready)
            if ready is trainer:
                trainer.send(b"trained")
                continue
            for _ in range(shape.group_size):
                ready.send(wires[sent % len(wires)])
                sent += 1


def _wire(scored: ScoredRollout) -> bytes:
    return b"".join(Codec([Delivery]).encode(Delivery(1, 1, "generator-0", 0, 0, scored), 0))


class Floor:
    """The controller's place in that traffic."""

    def __init__(self, shape: Shape, directory: Path) -> None:
        self._shape, self._directory, self._step = shape, directory, 0
        self._context: zmq.Context[Socket] = zmq.Context()
        self.public, self._secret = zmq.curve_keypair()
        self._intake, self._batches = self._router(), self._router()
        self.addresses = [str(socket.get_string(zmq.LAST_ENDPOINT)) for socket in (self._intake, self._batches)]
        made = records(shape.rollouts_per_step, shape.num_tokens)
        self._groups = _groups(made, shape.group_size)
        sampling = SamplingParams(max_tokens=shape.num_tokens)
        members = tuple(range(shape.group_size))
        lease = Lease(0, 0, made[0].prompt, shape.group_size, members, sampling, 0)
        self._lease = b"".join(Codec([Lease]).encode(lease, 0))
        num_tokens = len(made[0].prompt.token_ids) + len(made[0].scored.rollout.token_ids)
        self._batch = os.urandom(shape.rollouts_per_step * num_tokens * BYTES_A_TOKEN)
        self._journal = os.open(directory / "journal", os.O_WRONLY | os.O_CREAT)
        self._threads = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._work: list[Future[None]] = []

    def run(self, seconds: float, cpu: Callable[[], dict[str, float]]) -> tuple[dict[str, float], int]:
        """CPU seconds by thread of about so many seconds, and rollouts taken meanwhile."""
        generators, trainer = self._meet()
        for index in range(AHEAD * self._shape.groups_per_step):
            self._intake.send_multipart([generators[index % len(generators)], self._lease])
        for _ in range(AHEAD):
            self._take_step(generators, trainer)
        before, began, ends = cpu(), self._step, time.monotonic() + seconds
        while time.monotonic() < ends:
            self._take_step(generators, trainer)
        after = cpu()
        self._finish()
        each = {thread: after[thread] - before[thread] for thread in after}
        return each, (self._step - began) * self._shape.rollouts_per_step

    def _meet(self) -> tuple[list[bytes], bytes]:
        generators = [self._frames(self._intake)[0] for _ in range(self._shape.num_generators)]
        return [bytes(each.buffer) for each in generators], bytes(self._frames(self._batches)[0].buffer)

    def _take_step(self, generators: list[bytes], trainer: bytes) -> None:
        taken = []
        for index in range(self._shape.rollouts_per_step):
            taken.append(contents(self._frames(self._intake)[1:])[0])
            if index % self._shape.group_size == 0:
                self._intake.send_multipart(
                    [generators[index // self._shape.group_size % len(generators)], self._lease]
                )
        if self._step:
            self._frames(self._batches)  # the step before is trained
        self._batches.send_multipart([trainer, self._batch], copy=False)
        for done in self._work:
            done.result()
        write, seal = self._threads
        self._work = [write.submit(self._write, taken), seal.submit(self._seal, self._step)]
        self._step += 1

    def _write(self, taken: Sequence[Any]) -> None:
        for piece in taken:
            crc32(piece)
        os.lseek(self._journal, 0, os.SEEK_SET)  # a step's bytes again and again: this is about CPU
        for first in range(0, len(taken), 64):
            os.writev(self._journal, taken[first : first + 64])
        os.fdatasync(self._journal)

    def _seal(self, step: int) -> None:
        path = self._directory / f"segment_{step:06d}.h5"
        write_sealed(path, to_hdf5(self._groups, {}))
        path.unlink()

    def _frames(self, socket: Socket) -> list[Any]:
        while (frames := pull(socket)) is None:
            if not socket.poll(LONG_MS):
                raise SystemExit("the other process says nothing any more")
        return frames

    def _router(self) -> Socket:
        socket = self._context.socket(zmq.ROUTER)
        socket.curve_server, socket.curve_secretkey = True, self._secret
        socket.sndhwm = socket.rcvhwm = 0
        socket.bind("tcp://127.0.0.1:*")
        return socket

    def _finish(self) -> None:
        for thread in self._threads:
            thread.shutdown()
        os.close(self._journal)
        self._context.destroy(linger=0)


def _groups(made: Sequence[JournalRecord], size: int) -> list[ResolvedGroup]:
    groups = (group_of(made[at : at + size]) for at in range(0, len(made), size))
    return [ResolvedGroup(group, consumed_step=0, trained_version=0, applied=True) for group in groups]


def floor_us(shape: Shape, seconds: float, place: str, cpu: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Microseconds of CPU a rollout, by thread as `cpu` counts it."""
    with tempfile.TemporaryDirectory(dir=place) as name:
        floor = Floor(shape, Path(name))
        arguments = (shape, floor.addresses, floor.public)
        others = multiprocessing.get_context("spawn").Process(target=be_others, args=arguments)
        others.start()
        try:
            cpu_s, num_rollouts = floor.run(seconds, cpu)
        finally:
            others.kill()
            others.join()
    return {thread: spent / num_rollouts * 1e6 for thread, spent in cpu_s.items()}
